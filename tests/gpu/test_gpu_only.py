"""What only GPUs show: streams, memory, overlap, CUDA graphs, bf16. See README.md beside it."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.common_utils import (
    get_cycles_per_ms,
    instantiate_parametrized_tests,
    parametrize,
)
from torchtitan.distributed.cudagraph import cudagraph_teardown, wrap_with_cuda_graph
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from tests import scenarios as s
from tests.pipelines import Pipeline
from tests.ranks import NcclTest
from tests.scenarios import Case
from titan_lifecycle.fsdp_lifecycle import unsharded_gradient_bytes
from titan_lifecycle.trainer import lifecycle_config

# Of the device's memory, for what the allocator rounds up and frees late.
MEMORY_SLACK = 0.05


@pytest.mark.parametrize(
    "lifecycle", [{"gradient_reduction": "last_microbatch"}, {"retain_weights": True}], ids=str
)
def test_accumulation_policies_with_cuda_graphs_are_refused(lifecycle):
    """What can be captured is below. Needs no GPU."""
    with pytest.raises(ValueError, match=r"replays the first; set training\.disable_cuda_graphs"):
        lifecycle_config(llama3_debugmodel(), **lifecycle)


class Steps:
    """Tests for any number of GPUs."""

    def build(self, case: Case, *, stock: bool = False, **kwargs: Any) -> tuple[Any, Any]:
        model = s.shard(
            s.make_model(case, device=self.device),
            s.make_mesh(case.mesh, self.device.type),
            case.grouping,
            **kwargs,
        )
        loss_fn = s.make_stock_loss() if stock else s.make_loss(case)
        loss_fn.set_lm_head(model.lm_head)
        return model, loss_fn

    def batch(self, seed: int = 1, length: int = s.LENGTH) -> list[torch.Tensor]:
        """This rank's inputs and labels, and the number of valid labels of all ranks."""
        batches = s.make_batches(1, self.world_size, seed=seed, length=length)
        return [t.to(self.device) for t in (*batches[0][self.rank], s.num_valid(batches))]

    def assert_identical(self, actual: dict[str, Any], expected: dict[str, Any]) -> None:
        self.assertEqual(set(actual), set(expected))
        for name, value in expected.items():
            self.assertTrue(torch.equal(actual[name], value), name)

    def test_bf16_compatible_is_bit_identical_to_the_stock_wrapper(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        runs = []
        with mock.patch.multiple(s, VOCAB=512, DIM=256, BATCH=4):
            for stock in (False, True):
                model, loss_fn = self.build(Case(), stock=stock, mp_policy=policy)
                optimizer = torch.optim.AdamW(model.parameters())
                history = {}
                for seed in range(3):
                    inputs, labels, tokens = self.batch(seed, length=64)
                    loss, _ = loss_fn(model(inputs), labels, tokens)
                    loss.backward()
                    history[f"loss {seed}"] = loss.detach()
                    for name, gradient in s.gradients(model).items():
                        self.assertEqual(gradient.dtype, torch.float32)
                        history[f"gradient {seed} of {name}"] = gradient
                    optimizer.step()
                    optimizer.zero_grad()
                runs.append(history | s.parameters(model))
        self.assert_identical(*runs)

    def test_cuda_graph_replay_equals_eager_compatible(self) -> None:
        self.check_cuda_graph(Case(reduction="compatible"))

    def test_cuda_graph_replay_equals_eager_coalesced(self) -> None:
        self.check_cuda_graph(Case(reduction="coalesced"))

    def check_cuda_graph(self, case: Case) -> None:
        """As torchtitan's trainer does it: warm-up, capture, replays; gradients zeroed in place."""
        if torch.version.hip:
            self.skipTest("torchtitan captures CUDA graphs on NVIDIA GPUs only")
        num_steps = 5
        runs = []
        for capture in (False, True):
            model, loss_fn = self.build(case)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            num_calls = 0

            def forward_backward(inputs, labels, tokens, extra, model=model, loss_fn=loss_fn):
                nonlocal num_calls
                num_calls += 1
                loss, _ = loss_fn(model(inputs), labels, tokens)
                loss.backward()
                return loss

            run = wrap_with_cuda_graph(forward_backward) if capture else forward_backward
            results = {}
            try:
                for seed in range(num_steps):
                    optimizer.zero_grad(set_to_none=False)
                    # Replays write the loss to one place: keep a copy.
                    results[f"loss {seed}"] = run(*self.batch(seed), {}).detach().clone()
                    optimizer.step()
                results |= s.gradients(model) | {
                    f"{name} after": value for name, value in s.parameters(model).items()
                }
                torch.cuda.synchronize()
            finally:
                cudagraph_teardown()
            self.assertEqual(num_calls, 2 if capture else num_steps)
            runs.append(results)
        self.assert_identical(runs[1], runs[0])


class OneGpuTest(NcclTest):
    world_size = 1


class TestOneGpu(Steps, OneGpuTest):
    """Sharded over one rank: no collective, all of the lifecycle."""


class TestFourGpus(Steps, NcclTest):
    # --- stream ordering -----------------------------------------------------------------------

    @parametrize("wait", ["stream", "event"])
    def test_forward_after_an_evaluation_waits_for_the_optimizer(self, wait) -> None:
        """The optimizer is still running when the next forward and backward are issued.

        ``stream``: it runs on the current stream, and the root's pre-forward makes the all-gather
        streams wait for that one. A marker left by the evaluation would skip the wait. ``event``:
        it runs on another stream, and the wait is for ``set_post_optim_event``.
        """
        # First, so that it also loads every kernel: loading one waits for the device.
        _, expected = self.update_and_step("synchronize")
        _, actual = self.update_and_step(wait)
        self.assert_identical(actual, expected)

    def test_a_forward_that_does_not_wait_sees_old_weights(self) -> None:
        """The control of the test above: it would notice weights gathered too early."""
        _, expected = self.update_and_step("synchronize")
        before, actual = self.update_and_step("too early")
        self.assertTrue(torch.equal(actual["hidden"], before))
        self.assertFalse(torch.equal(before, expected["hidden"]))

    def update_and_step(self, wait: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Train, evaluate, update, train: hidden states before, and what the last step gave."""
        # Everything is gathered anew: weights kept from the evaluation would be old ones.
        model, loss_fn = self.build(Case(), head_reshard_after_forward=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        inputs, labels, tokens = self.batch()
        loss_fn(model(inputs), labels, tokens)[0].backward()
        with torch.no_grad():
            before = model(inputs)
            loss_fn(before, labels, tokens)
        self.assertEqual(s.leftovers(model), [])
        self.assertEqual(s.unsharded_groups(model), [])
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

        current = torch.cuda.current_stream()
        stream = torch.cuda.Stream() if wait in ("event", "too early") else current
        too_early = current.record_event()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(1000 * get_cycles_per_ms()))
            optimizer.step()
            updated = stream.record_event()
        if wait == "synchronize":
            torch.cuda.synchronize()
        elif wait == "event":
            model.set_post_optim_event(updated)
        elif wait == "too early":
            model.set_post_optim_event(too_early)
        hidden = model(inputs)
        result = {"hidden": hidden.detach()}
        if wait == "too early":
            self.assertFalse(updated.query(), "the optimizer was done before the forward")
            torch.cuda.synchronize()
            return before, result
        # On top of the first step's gradients, which the optimizer may still be reading.
        loss, _ = loss_fn(hidden, labels, tokens)
        loss.backward()
        if wait != "synchronize":
            self.assertFalse(updated.query(), "the optimizer was done before the step")
        torch.cuda.synchronize()
        result["loss"] = loss.detach()
        return before, result | s.gradients(model) | {
            f"{name} after": value for name, value in s.parameters(model).items()
        }

    # --- memory --------------------------------------------------------------------------------

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """The most that ``run`` had allocated at a time, on top of what there was."""
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def test_without_deferral_the_peak_is_not_above_the_stock_wrappers(self) -> None:
        peaks = []
        with mock.patch.multiple(s, VOCAB=32768, DIM=1024, BATCH=2):
            for stock in (True, False):
                model, loss_fn = self.build(Case(), stock=stock)
                inputs, labels, tokens = self.batch(length=256)

                def step(
                    model=model, loss_fn=loss_fn, inputs=inputs, labels=labels, tokens=tokens
                ) -> None:
                    loss_fn(model(inputs), labels, tokens)[0].backward()

                step()
                model.zero_grad()
                peaks.append(self.peak_bytes(step))
                del model, loss_fn, step
        stock_peak, peak = peaks
        self.assertLessEqual(peak, stock_peak * (1 + MEMORY_SLACK))

    @parametrize("schedule", ["GPipe", "1F1B"])
    def test_the_last_stage_costs_at_most_the_heads_gradient(self, schedule) -> None:
        """The head is reduced once, by the schedule: until then its gradient stays whole."""
        peaks = []
        with mock.patch.multiple(s, VOCAB=32768, DIM=1024, BATCH=64):
            for stock in (True, False):
                pipeline = Pipeline(
                    schedule,
                    Case(),
                    pp=2,
                    device=self.device,
                    num_layers=4,
                    num_microbatches=4,
                    loss_fn=s.make_stock_loss() if stock else None,
                    register=not stock,
                )
                pipeline.step(pipeline.batches(0)[0])  # with the probe
                for part in pipeline.parts:
                    part.zero_grad()
                batches = pipeline.batches(1)[0]
                peaks.append(self.peak_bytes(lambda p=pipeline, b=batches: p.step(b)))
                has_last = pipeline.has_last
                gradients = unsharded_gradient_bytes(pipeline.parts)
                del pipeline, part
        if has_last:
            stock_peak, peak = peaks
            head = gradients["norm.weight"]  # a group's name is its first parameter's
            self.assertLessEqual(peak, stock_peak * (1 + MEMORY_SLACK) + head)

    # --- overlap -------------------------------------------------------------------------------

    @parametrize("max_input_buffers", [1, 2])
    def test_the_heads_reduction_runs_beside_decoder_backward(self, max_input_buffers) -> None:
        """In ``compatible``, where neither the norm nor a block has to be gathered for backward.

        An all-gather would queue behind the reduction, on the same communicator, and compute behind
        it: with ``[norm, lm_head]`` in one group that is so, here as with the stock wrapper. With
        one input buffer FSDP itself lets compute wait after the norm, with two after a block.
        """
        with mock.patch.multiple(s, VOCAB=65536, DIM=2048, BATCH=2):
            model, loss_fn = self.build(Case(grouping="separate"), reshard_after_forward=False)
            model.set_reduce_scatter_max_input_buffers(max_input_buffers)
            inputs, labels, tokens = self.batch(length=512)

            def step() -> None:
                loss, _ = loss_fn(model(inputs), labels, tokens)
                with record_function(OUTER_BACKWARD):
                    loss.backward()

            for _ in range(2):
                step()
                model.zero_grad()
            torch.cuda.synchronize()
            dist.barrier()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                step()
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        reductions, decoder = head_reduction_and_decoder_kernels(trace)
        self.assertTrue(reductions, "no collective kernel in the trace's lifecycle::finalize")
        self.assertTrue(decoder, "no kernel in the trace's decoder backward")
        self.assertGreater(
            overlap(reductions, decoder), 0, f"reduced at {reductions}, decoder at {decoder}"
        )


OUTER_BACKWARD = "test::outer_backward"

Interval = tuple[float, float]


def head_reduction_and_decoder_kernels(trace: Any) -> tuple[list[Interval], list[Interval]]:
    """When the collectives launched by the scope ran, and the decoder's own backward kernels.

    A kernel is told by the span in which it was launched: the spans of FSDP and of the lifecycle
    are on the host. Autograd launches from its own thread, so spans are compared by time.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]

    def kernels_launched_in(name: str, *, collective: bool) -> list[Interval]:
        spans = [
            _interval(e)
            for e in events
            if e.get("cat") == "user_annotation" and e["name"].startswith(name)
        ]
        launches = {
            e["args"]["correlation"]
            for e in events
            if e.get("cat") in ("cuda_runtime", "cuda_driver")
            and "correlation" in e.get("args", {})
            and any(start <= e["ts"] <= end for start, end in spans)
        }
        return [
            _interval(e)
            for e in events
            if e.get("cat") == "kernel"
            and e["args"].get("correlation") in launches
            and ("nccl" in e["name"].lower()) == collective
        ]

    return (
        kernels_launched_in("lifecycle::finalize", collective=True),
        kernels_launched_in(OUTER_BACKWARD, collective=False),
    )


def _interval(event: Any) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def overlap(first: list[Interval], second: list[Interval]) -> float:
    """The time, in microseconds, that kernels of both ran; twice where two of one did."""
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in first
        for other_start, other_end in second
    )


instantiate_parametrized_tests(TestFourGpus)
