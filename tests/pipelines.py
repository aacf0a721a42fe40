"""Tests of the lifecycle under pipeline schedules, for any backend (see tests/cpu)."""

from __future__ import annotations

import copy
import os
import tempfile
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _PipelineScheduleRuntime,
)
from torch.testing._internal.common_utils import parametrize, subtest

from tests import scenarios as s
from tests.scenarios import Case
from titan_lifecycle import register_metadata_inference_cleanup, reset_iteration
from titan_lifecycle.pipeline import lifecycle_pipelining_fn

SINGLE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
LOOPED = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
}
V_SHAPED = {"ZBVZeroBubble": ScheduleZBVZeroBubble, "DualPipeV": ScheduleDualPipeV}
ALL_SCHEDULES = [*SINGLE, *LOOPED, *V_SHAPED, "CSV"]

NUM_MICROBATCHES = 3


class Pipeline:
    """This rank's stages of a pipeline over ``pp`` ranks, its schedule and its loss."""

    def __init__(
        self,
        schedule: str,
        case: Case,
        *,
        pp: int = 1,
        device: torch.device,
        num_layers: int = 2,
        num_microbatches: int = NUM_MICROBATCHES,
        loss_fn=None,
        static: bool = False,
        register: bool = True,
    ) -> None:
        world = dist.get_world_size()
        names = ("pp", "dp_replicate", "dp_shard") if case.mesh == "hsdp" else ("pp", "dp_shard")
        dp = world // pp
        shape = (pp, 2, dp // 2) if case.mesh == "hsdp" else (pp, dp)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        pp_rank = mesh["pp"].get_local_rank()
        self.dp_rank = dist.get_rank() - pp_rank * dp
        self.num_dp_ranks = dp
        self.num_microbatches = num_microbatches

        stages_per_rank = 1 if schedule in SINGLE else 2
        num_stages = pp * stages_per_rank
        if schedule in V_SHAPED:
            indices = [pp_rank, num_stages - 1 - pp_rank]
        else:
            indices = [pp_rank + i * pp for i in range(stages_per_rank)]

        self.loss_fn = loss_fn or s.make_loss(case)
        self.stages = []
        for index in indices:
            part = stage_module(case, index, num_stages, num_layers, device)
            part = s.shard(part, mesh[names[1:]], case.grouping, reshard_after_forward=False)
            shapes = {}
            if static:
                example = torch.zeros(s.BATCH, s.LENGTH, dtype=torch.long, device=device)
                hidden = torch.zeros(
                    s.BATCH, s.LENGTH, s.DIM, device=device, requires_grad=case.freeze == "none"
                )
                shapes = {"input_args": (example,), "output_args": (hidden,)}
            self.stages.append(
                PipelineStage(part, index, num_stages, device, group=mesh.get_group("pp"), **shapes)
            )
            if index == num_stages - 1:
                self.loss_fn.set_lm_head(part.lm_head)
        self.has_first = 0 in indices
        self.has_last = num_stages - 1 in indices

        def scalar_loss(*args, **kwargs):
            return self.loss_fn(*args, **kwargs)[0]

        common = {
            "n_microbatches": num_microbatches,
            "loss_fn": scalar_loss,
            "scale_grads": False,
        }
        if schedule in SINGLE:
            self.schedule = SINGLE[schedule](self.stages[0], **common)
        elif schedule == "CSV":
            self.schedule = from_csv(self.stages, common)
        else:
            self.schedule = (LOOPED | V_SHAPED)[schedule](self.stages, **common)
        if register:
            register_metadata_inference_cleanup(self.schedule)

    @property
    def parts(self) -> list[nn.Module]:
        return [stage.submod for stage in self.stages]

    def batches(self, seed: int, num_steps: int = 1):
        return [
            s.make_batches(self.num_microbatches, self.num_dp_ranks, seed=seed + i)
            for i in range(num_steps)
        ]

    def step(self, batches, *, tokens=None, evaluate=False, **kwargs):
        """One schedule step. Returns (loss of this rank, its collectives)."""
        mine = [row[self.dp_rank] for row in batches]
        device = self.stages[0].device
        losses: list[torch.Tensor] = []
        tokens = s.num_valid(batches) if tokens is None else tokens
        run = self.schedule.eval if evaluate else self.schedule.step
        if not evaluate:
            kwargs["loss_kwargs"] = {"global_valid_tokens": tokens.to(device)}
            kwargs["return_outputs"] = False
        with s.Collectives() as collectives, torch.set_grad_enabled(not evaluate):
            run(
                arg_mbs=[(inputs.to(device),) for inputs, _ in mine] if self.has_first else None,
                kwarg_mbs=[{} for _ in mine],
                target_mbs=[labels.to(device) for _, labels in mine] if self.has_last else None,
                losses=losses if self.has_last else None,
                **kwargs,
            )
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=device)
        return loss, collectives.counts

    def gradients(self) -> dict[str, torch.Tensor]:
        return {k: v for part in self.parts for k, v in s.gradients(part).items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        return {k: v for part in self.parts for k, v in s.parameters(part).items()}

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [p for part in self.parts for p in part.parameters() if p.requires_grad], lr=0.1
        )

    @property
    def num_trainable_groups(self) -> int:
        return sum(s.num_trainable_groups(part) for part in self.parts)

    @property
    def num_groups(self) -> int:
        return sum(len(s.sharded_states(part)) for part in self.parts)


def make_full_model(case: Case, num_layers: int, device) -> s.Decoder:
    torch.manual_seed(0)
    model = s.Decoder(num_layers=num_layers, tied=case.grouping == "tied").to(device)
    if case.freeze == "decoder":
        head = set(model.lm_head.parameters())
        for p in model.parameters():
            p.requires_grad_(p in head)
    return model


def stage_module(case: Case, index: int, num_stages: int, num_layers: int, device) -> s.Decoder:
    part = copy.deepcopy(make_full_model(case, num_layers, device))
    per_stage = num_layers // num_stages
    for i in range(num_layers):
        if i // per_stage != index:
            del part.layers[str(i)]
    if index > 0:
        part.tok_embeddings = None
    if index < num_stages - 1:
        part.norm = part.lm_head = None
    return part


def from_csv(stages, common) -> _PipelineScheduleRuntime:
    """A schedule read from a file: the compute actions of Interleaved1F1B."""
    order = ScheduleInterleaved1F1B(stages, **common)
    path = os.path.join(tempfile.mkdtemp(), "schedule.csv")
    order._dump_csv(path, format="compute_only")
    schedule = _PipelineScheduleRuntime(stages, **common)
    schedule._load_csv(path, format="compute_only")
    return schedule


class TestPipelines:
    """Methods of a ``RankTest``; see ``tests.ranks.on_ranks``."""

    __test__ = True

    def pipeline(self, schedule, case=Case(), **kwargs) -> Pipeline:  # noqa: B008
        return Pipeline(schedule, case, device=self.device, **kwargs)

    def assert_close(self, actual, expected, *, exact=False) -> None:
        self.assertLessEqual(set(actual), set(expected))
        for name, value in actual.items():
            torch.testing.assert_close(
                value,
                expected[name],
                **({"rtol": 0, "atol": 0} if exact else {}),
                msg=lambda m, name=name: f"{name}: {m}",
            )

    def assert_clean(self, pipeline: Pipeline) -> None:
        for part in pipeline.parts:
            self.assertEqual(s.unsharded_groups(part), [])
            self.assertEqual(s.leftovers(part), [])
            for policy in s.policies(part).values():
                if isinstance(policy, tuple):
                    self.assertEqual(policy[:3], (True, True, True))

    def train_against_reference(
        self, pipeline: Pipeline, case: Case, *, every: int, num_layers: int = 2
    ) -> list[list[Counter]]:
        """Two optimizer steps of ``every`` schedule steps; returns each step's collectives."""
        reference = make_full_model(case, num_layers, self.device)
        optimizer = pipeline.optimizer()
        reference_optimizer = torch.optim.SGD(
            [p for p in reference.parameters() if p.requires_grad], lr=0.1
        )
        counts = []
        for seed in (0, 10):
            steps = pipeline.batches(seed, every)
            tokens = s.num_valid([row for batches in steps for row in batches])
            loss = torch.zeros((), device=self.device)
            counts.append([])
            for i, batches in enumerate(steps):
                step_loss, step_counts = pipeline.step(
                    batches, tokens=tokens, finalize_gradients=i == every - 1
                )
                loss += step_loss
                counts[-1].append(step_counts)
            expected_loss, expected = s.reference_step(
                reference,
                [
                    [(a.to(self.device), b.to(self.device)) for a, b in row]
                    for batches in steps
                    for row in batches
                ],
            )
            torch.testing.assert_close(s.sum_over_ranks(loss), expected_loss)
            gradients = pipeline.gradients()
            self.assertEqual(
                set(gradients), {k for k in expected if k in dict(self.named(pipeline))}
            )
            self.assert_close(gradients, expected)
            self.assert_clean(pipeline)
            for o in (optimizer, reference_optimizer):
                o.step()
                o.zero_grad()
            self.assert_close(pipeline.parameters(), s.parameters(reference))
        return counts

    def named(self, pipeline: Pipeline):
        for part in pipeline.parts:
            yield from part.named_parameters()

    # --- one stage -----------------------------------------------------------------------------

    @parametrize("schedule", list(SINGLE))
    @parametrize("mesh", ["fsdp", "hsdp"])
    @parametrize("grouping", ["grouped", "separate", "tied"])
    @parametrize("freeze", ["none", "decoder"])
    @parametrize("every", [1, 2])
    def test_one_stage(self, schedule, mesh, grouping, freeze, every) -> None:
        case = Case(mesh, grouping, freeze)
        pipeline = self.pipeline(schedule, case)
        counts = self.train_against_reference(pipeline, case, every=every)
        groups = pipeline.num_trainable_groups
        if (grouping, freeze) == ("grouped", "decoder"):
            self.assertEqual(groups, 1)
        for steps in counts:
            for i, c in enumerate(steps):
                reductions = groups if i == every - 1 else 0
                self.assertEqual(c["reduce_scatter"], reductions)
                self.assertEqual(c["all_reduce"], reductions if mesh == "hsdp" else 0)
        # After the first step, which includes the probe: one all-gather a group and finalized
        # step. The unfinalized step gathers, the finalizing one finds the weights there.
        self.assertEqual([c["all_gather"] for c in counts[1]], [pipeline.num_groups, 0][:every])

    @parametrize("schedule", list(SINGLE))
    @parametrize("frozen, stock, ours", [(False, 5, 2), (True, 3, 1)])
    def test_reported_counts_of_a_pipeline_step(self, schedule, frozen, stock, ours) -> None:
        """Three microbatches, one decoder group and a head: the numbers reported upstream."""
        for use_stock in (True, False):
            if frozen and use_stock:
                continue  # trains nothing
            case = Case(freeze="decoder" if frozen else "none")
            pipeline = self.pipeline(
                schedule,
                case,
                num_layers=1,
                loss_fn=s.make_stock_loss() if use_stock else None,
                register=not use_stock,
            )
            # One decoder group: merge the embedding's and the block's by freezing the former.
            pipeline.parts[0].tok_embeddings.requires_grad_(False)
            pipeline.step(pipeline.batches(0)[0])
            for part in pipeline.parts:
                part.zero_grad()
            _, unfinalized = pipeline.step(pipeline.batches(1)[0], finalize_gradients=False)
            _, finalized = pipeline.step(pipeline.batches(2)[0])
            if use_stock:
                self.assertEqual(finalized["reduce_scatter"], stock)
            else:
                self.assertEqual(unfinalized["reduce_scatter"], 0)
                self.assertEqual(finalized["reduce_scatter"], ours)

    @parametrize("schedule", list(SINGLE))
    def test_several_outputs(self, schedule) -> None:
        """The stage returns two predictions, the loss sums both."""

        class TwoOutputs(s.Decoder):
            def forward(self, x):
                hidden = super().forward(x)
                return hidden, hidden * 0.5

        case = Case()
        pipeline = self.pipeline(schedule, case)
        part = pipeline.parts[0]
        part.__class__ = type("FSDPTwoOutputs", (type(part), TwoOutputs), {})
        single = pipeline.loss_fn.loss_fn

        def both(logits, labels, tokens, **_):
            return sum(single(x, y, tokens)[0] for x, y in zip(logits, labels, strict=True)), {}

        pipeline.loss_fn.loss_fn = both
        chunked = pipeline.loss_fn
        # The schedule hands one target on; the same labels serve both predictions.
        pipeline.schedule._loss_fn = lambda pred, labels, **kw: chunked(
            pred, (labels, labels), **kw
        )[0]
        counts = []
        for seed in range(2):
            batches = pipeline.batches(seed)[0]
            loss, c = pipeline.step(batches)
            counts.append(c)
            reference = make_full_model(case, 2, self.device)
            expected = torch.zeros((), device=self.device)
            for row in batches:
                for inputs, labels in row:
                    h = reference(inputs.to(self.device))
                    for x in (h, h * 0.5):
                        one = F.cross_entropy(
                            reference.lm_head(x).flatten(0, 1),
                            labels.to(self.device).flatten(),
                            reduction="sum",
                        ) / s.num_valid(batches)
                        one.backward(retain_graph=True)
                        expected += one.detach()
            torch.testing.assert_close(s.sum_over_ranks(loss), expected)
            self.assert_close(pipeline.gradients(), s.gradients(reference))
            self.assert_clean(pipeline)
            part.zero_grad()
        self.assertEqual(counts[1], Counter(all_gather=4, reduce_scatter=4))

    # --- the probe -----------------------------------------------------------------------------

    @parametrize("schedule", list(SINGLE))
    @parametrize("grouping", ["grouped", "separate", "tied"])
    @parametrize("freeze", ["none", "decoder"])
    def test_first_step_equals_one_with_static_shapes(self, schedule, grouping, freeze) -> None:
        case = Case(grouping=grouping, freeze=freeze)
        results = []
        for static in (False, True):
            pipeline = self.pipeline(schedule, case, static=static)
            part = pipeline.parts[0]
            part.register_buffer("calls", torch.zeros((), device=self.device))
            part.register_forward_pre_hook(lambda m, args: m.calls.add_(1) and None)
            kept = [p for p in part.parameters() if p.requires_grad]
            for p in kept:
                p.grad = torch.zeros_like(p)
            torch.manual_seed(5)
            loss, counts = pipeline.step(pipeline.batches(0)[0], finalize_gradients=False)
            rng = torch.get_rng_state()
            self.assertEqual(counts["reduce_scatter"], 0)
            loss2, _ = pipeline.step(pipeline.batches(1)[0])
            results.append((loss, loss2, pipeline.gradients(), rng, part.calls.clone()))
        dynamic, static = results
        for a, b in zip(dynamic, static, strict=True):
            if isinstance(a, dict):
                self.assertEqual(set(a), set(b))
                self.assert_close(a, b, exact=True)
            else:
                self.assertTrue(torch.equal(a, b), f"{a} and {b}")

    @parametrize("static", [False, True])
    def test_gradients_before_a_switch_survive_it(self, static) -> None:
        pipeline = self.pipeline("1F1B", static=static)
        pipeline.step(pipeline.batches(0)[0])
        before = pipeline.gradients()
        for evaluate in (True, False):  # a switch each, hence a probe
            batches = pipeline.batches(1)[0]
            pipeline.step(
                batches, evaluate=evaluate, **({} if evaluate else {"finalize_gradients": False})
            )
            for module in pipeline.parts[0].modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # to register the sharded parameters
            self.assert_close(pipeline.gradients(), before, exact=True)
        self.assertEqual(set(pipeline.gradients()), set(before))

    @parametrize("schedule", list(SINGLE))
    def test_a_failing_probe_leaves_a_stage_that_trains(self, schedule) -> None:
        case = Case()
        pipeline = self.pipeline(schedule, case)
        with s.failing_loss(pipeline.loss_fn, at_call=1), self.assertRaises(s.ChunkFailure):
            pipeline.step(pipeline.batches(5)[0])
        self.assert_clean(pipeline)
        self.assertEqual(pipeline.gradients(), {})
        self.train_against_reference(pipeline, case, every=1)

    @parametrize("schedule", [*SINGLE, "Interleaved1F1B"])
    def test_pending_gradients_survive_a_step_and_are_refused_at_a_switch(self, schedule) -> None:
        case = Case()
        many = schedule not in SINGLE
        results = []
        for switches in (False, True):
            pipeline = self.pipeline(
                schedule,
                case,
                pp=2 if many else 1,
                num_layers=4 if many else 2,
                num_microbatches=4,
            )
            first, second, other = pipeline.batches(0, 3)
            tokens = torch.tensor(100)
            pipeline.step(first, tokens=tokens, finalize_gradients=False)
            if switches:
                with self.assertRaisesRegex(
                    RuntimeError, r"switches between .* Finalize first: .*finalize_gradients=True"
                ):
                    pipeline.step(other, evaluate=True)
            pipeline.step(second, tokens=tokens)
            results.append(pipeline.gradients())
            # After finalizing, the switch is fine, there and back again.
            pipeline.step(other, evaluate=True)
            for part in pipeline.parts:
                self.assertEqual(s.leftovers(part), [])
            pipeline.step(first, tokens=tokens)
            self.assert_clean(pipeline)
        self.assert_close(results[1], results[0], exact=True)

    def test_a_frozen_stage_refuses_the_switch_as_the_others_do(self) -> None:
        """No rank may enter the probe alone."""
        pipeline = self.pipeline("1F1B", pp=2, num_layers=4, num_microbatches=4)
        if pipeline.has_first:
            pipeline.parts[0].requires_grad_(False)
        batches = pipeline.batches(0)[0]
        pipeline.step(batches)
        pipeline.step(batches, finalize_gradients=False)
        with self.assertRaisesRegex(RuntimeError, "switches between training and evaluation"):
            pipeline.step(batches, evaluate=True)
        pipeline.step(batches)
        pipeline.step(batches, evaluate=True)

    def test_the_probe_leaves_the_policy_of_a_root_with_parameters(self) -> None:
        """The root keeps its weights after forward, as it does without a pipeline."""
        counts = []
        for register in (False, True):
            pipeline = self.pipeline("GPipe", register=False)
            model = make_full_model(Case(), 2, self.device)
            mesh = init_device_mesh(
                self.device.type, (1, self.world_size), mesh_dim_names=("pp", "dp_shard")
            )
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["dp_shard"], reshard_after_forward=False)
            fully_shard(model, mesh=mesh["dp_shard"])  # owns embedding, norm and head
            stage = PipelineStage(model, 0, 1, self.device, group=mesh.get_group("pp"))
            pipeline.stages[0] = stage
            pipeline.loss_fn.set_lm_head(model.lm_head)
            pipeline.schedule = ScheduleGPipe(
                stage,
                n_microbatches=NUM_MICROBATCHES,
                loss_fn=lambda *a, p=pipeline, **k: p.loss_fn(*a, **k)[0],
                scale_grads=False,
            )
            if register:
                register_metadata_inference_cleanup(pipeline.schedule)
            pipeline.step(pipeline.batches(0)[0])
            _, c = pipeline.step(pipeline.batches(1)[0])
            counts.append(c["all_gather"])
        self.assertEqual(counts[0], counts[1])

    @parametrize("schedule", list(SINGLE))
    def test_an_unregistered_stage_still_trains(self, schedule) -> None:
        """As with the override alone: the probe's inner backward must not latch its mode."""
        case = Case()
        pipeline = self.pipeline(schedule, case, register=False)
        self.train_against_reference(pipeline, case, every=1)

    def test_a_reset_while_a_reduction_is_pending(self) -> None:
        pipeline = self.pipeline("1F1B")
        pipeline.step(pipeline.batches(0)[0])
        pipeline.parts[0].zero_grad()
        pipeline.step(pipeline.batches(1)[0], finalize_gradients=False)
        pipeline.stages[0].start_gradient_reduction()
        reset_iteration(pipeline.schedule)
        self.assert_clean(pipeline)
        pipeline.step(pipeline.batches(2)[0])

    def test_registration_is_idempotent_and_checks_its_target(self) -> None:
        pipeline = self.pipeline("GPipe", register=False)
        stage = pipeline.stages[0]
        original = stage._post_metadata_inference_cleanup
        register_metadata_inference_cleanup(stage)
        guarded = stage._post_metadata_inference_cleanup
        self.assertNotEqual(guarded, original)
        register_metadata_inference_cleanup(pipeline.schedule)
        self.assertIs(stage._post_metadata_inference_cleanup, guarded)
        for call in (register_metadata_inference_cleanup, reset_iteration):
            with self.assertRaisesRegex(TypeError, r"a PipelineStage or a pipeline schedule"):
                call(42)
        # Torch's own registration is used where there is one.
        other = self.pipeline("GPipe", register=False)
        calls = []
        other.stages[0].register_metadata_inference_cleanup = calls.append
        register_metadata_inference_cleanup(other.schedule)
        self.assertEqual(len(calls), 1)
        calls[0]()

    def test_pipelining_fn_is_wrapped(self) -> None:
        pipeline = self.pipeline("GPipe", register=False)
        stage = pipeline.stages[0]
        before = stage._post_metadata_inference_cleanup

        def pipelining_fn(model, *, parallel_dims):
            return pipeline.schedule, [model], True, parallel_dims

        wrapped = lifecycle_pipelining_fn(pipelining_fn)
        self.assertEqual(wrapped("model", parallel_dims=1), (pipeline.schedule, ["model"], True, 1))
        self.assertNotEqual(stage._post_metadata_inference_cleanup, before)

    # --- failure and evaluation ----------------------------------------------------------------

    @parametrize("schedule", list(SINGLE))
    @parametrize("mesh", ["fsdp", "hsdp"])
    def test_retry_after_a_failed_chunk_is_bit_identical(self, schedule, mesh) -> None:
        case = Case(mesh)
        results = []
        for fails in (False, True):
            pipeline = self.pipeline(schedule, case)
            optimizer = pipeline.optimizer()
            pipeline.step(pipeline.batches(0)[0])
            optimizer.step()
            optimizer.zero_grad()
            batches = pipeline.batches(1)[0]
            if fails:
                # The second chunk of the third microbatch.
                with (
                    s.failing_loss(pipeline.loss_fn, at_call=2 * s.NUM_CHUNKS + 1),
                    self.assertRaises(s.ChunkFailure),
                ):
                    pipeline.step(batches)
                reset_iteration(pipeline.schedule)
                self.assert_clean(pipeline)
            loss, counts = pipeline.step(batches)
            gradients = pipeline.gradients()
            optimizer.step()
            results.append((loss, counts, gradients, pipeline.parameters()))
        good, retried = results
        self.assertTrue(torch.equal(good[0], retried[0]))
        self.assertEqual(good[1], retried[1])
        self.assert_close(retried[2], good[2], exact=True)
        self.assert_close(retried[3], good[3], exact=True)

    @parametrize("schedule", list(SINGLE))
    @parametrize("grouping", ["grouped", "separate", "tied"])
    @parametrize("freeze", ["none", "decoder"])
    def test_train_evaluate_train(self, schedule, grouping, freeze) -> None:
        case = Case(grouping=grouping, freeze=freeze)
        results = []
        for evaluates in (False, True):
            pipeline = self.pipeline(schedule, case)
            optimizer = pipeline.optimizer()
            losses = []
            for seed in range(3):
                loss, _ = pipeline.step(pipeline.batches(seed)[0])
                losses.append((loss, pipeline.gradients()))
                optimizer.step()
                optimizer.zero_grad()
                self.assert_clean(pipeline)
                if evaluates:
                    batches = pipeline.batches(50)[0]
                    loss, counts = pipeline.step(batches, evaluate=True)
                    self.assertEqual(counts["reduce_scatter"], 0)
                    self.assertEqual(s.leftovers(pipeline.parts[0]), [])
                    again, _ = pipeline.step(batches, evaluate=True)
                    self.assertTrue(torch.equal(loss, again))
            results.append(losses)
        for (loss, gradients), (loss2, gradients2) in zip(*results, strict=True):
            self.assertTrue(torch.equal(loss, loss2))
            self.assert_close(gradients2, gradients, exact=True)

    def test_hsdp_with_only_the_all_reduce_deferred_is_refused(self) -> None:
        pipeline = self.pipeline("1F1B", Case("hsdp"))
        part = pipeline.parts[0]
        pipeline.step(pipeline.batches(0)[0])
        part.zero_grad()
        part.set_requires_all_reduce(False)
        with self.assertRaisesRegex(
            RuntimeError,
            r"only the all-reduce deferred, set for 'norm, lm_head'.*finalize_gradients",
        ):
            pipeline.step(pipeline.batches(1)[0])
        reset_iteration(pipeline.schedule)
        self.assert_clean(pipeline)

    # --- two stages and more -------------------------------------------------------------------

    @parametrize("schedule", [subtest(n, name=n) for n in ALL_SCHEDULES])
    @parametrize("every", [1, 2])
    def test_two_ranks_of_stages(self, schedule, every) -> None:
        case = Case()
        pipeline = self.pipeline(schedule, case, pp=2, num_layers=4, num_microbatches=4)
        counts = self.train_against_reference(pipeline, case, every=every, num_layers=4)
        for steps in counts:
            for i, c in enumerate(steps):
                expected = pipeline.num_trainable_groups if i == every - 1 else 0
                self.assertEqual(c["reduce_scatter"], expected, dict(c))
        gathers = sum(c["all_gather"] for c in counts[1])
        if not isinstance(pipeline.schedule, PipelineScheduleMulti):
            self.assertEqual(gathers, pipeline.num_groups)
        else:
            # The schedule says when a stage is gathered; nothing else gathers.
            actions = pipeline.schedule.pipeline_order_with_comms[pipeline.schedule.rank]
            unshards = Counter(
                a.stage_index for a in actions if a.computation_type.name == "UNSHARD"
            )
            expected = sum(
                unshards[stage.stage_index] * len(s.sharded_states(stage.submod))
                for stage in pipeline.stages
            )
            self.assertLessEqual(gathers, expected * every)
            self.assertGreaterEqual(gathers, pipeline.num_groups)

    @parametrize("schedule", list(SINGLE))
    def test_the_difference_to_the_stock_wrapper_is_summation_order(self, schedule) -> None:
        """Both gradients of the head, bit for bit, from the same parts summed in two orders."""
        for stock in (True, False):
            pipeline = self.pipeline(
                schedule,
                pp=2,
                num_layers=4,
                loss_fn=s.make_stock_loss() if stock else None,
            )
            pipeline.step(pipeline.batches(0)[0])  # with the probe
            for part in pipeline.parts:
                part.zero_grad()
            batches = pipeline.batches(1)[0]
            calls: list = []
            loss_fn = pipeline.loss_fn

            def recording(hidden, labels, *args, calls=calls, loss_fn=loss_fn, **kwargs):
                calls.append((hidden.detach().clone(), labels))
                return loss_fn(hidden, labels, *args, **kwargs)

            pipeline.loss_fn = recording
            if pipeline.has_last:
                head = nn.Linear(s.DIM, s.VOCAB, bias=False, device=self.device)
                with torch.no_grad():
                    head.weight.copy_(s.full(pipeline.parts[0].lm_head.weight))
            pipeline.step(batches)
            if not pipeline.has_last:
                continue
            weight = pipeline.parts[0].lm_head.weight
            shard = torch.empty_like(weight.grad.to_local())
            group = weight.device_mesh.get_group()
            reduced = torch.zeros_like(shard)
            # On the device, as the step had it: a CPU scalar divides by another kernel.
            tokens = s.num_valid(batches).to(self.device)
            for hidden, labels in calls:
                for h, y in zip(
                    hidden.chunk(s.NUM_CHUNKS, 1), labels.chunk(s.NUM_CHUNKS, 1), strict=True
                ):
                    loss, _ = loss_fn.loss_fn(head(h.contiguous()), y, tokens)
                    loss.backward()
                if stock:  # a reduction each microbatch, summed after it
                    dist.reduce_scatter_tensor(shard, head.weight.grad, group=group)
                    reduced += shard
                    head.weight.grad = None
            if not stock:  # summed before one reduction
                dist.reduce_scatter_tensor(reduced, head.weight.grad, group=group)
            self.assertTrue(torch.equal(reduced, weight.grad.to_local()), f"{stock=}")

    @parametrize("schedule", [subtest(n, name=n) for n in (*SINGLE, "Interleaved1F1B")])
    def test_two_ranks_of_stages_evaluate(self, schedule) -> None:
        case = Case()
        pipeline = self.pipeline(schedule, case, pp=2, num_layers=4, num_microbatches=4)
        batches = pipeline.batches(0)[0]
        pipeline.step(batches)
        loss, _ = pipeline.step(batches, evaluate=True)
        reference = make_full_model(case, 4, self.device)
        expected, _ = s.reference_step(
            reference, [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches]
        )
        torch.testing.assert_close(
            s.sum_over_ranks(loss), expected * s.num_valid(batches).to(self.device)
        )
        for part in pipeline.parts:
            self.assertEqual(s.leftovers(part), [])
            if isinstance(part, FSDPModule):
                part.zero_grad()
        pipeline.step(batches)
        self.assert_clean(pipeline)
