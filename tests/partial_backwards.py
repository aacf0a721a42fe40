"""Tests of the partial-backward scope and the chunked loss, for any backend (see tests/cpu)."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.common_utils import (
    parametrize,
    subtest,
)
from torch.utils.checkpoint import checkpoint

from tests import scenarios as s
from tests.scenarios import Case
from titan_lifecycle import (
    complete_fsdp_grouped_forward,
    fsdp_partial_backwards,
    reset_iteration,
)
from titan_lifecycle.fsdp_lifecycle import preserved_policies
from titan_lifecycle.losses.from_weight import LinearCrossEntropyLoss

NUM_MICROBATCHES = 3


def expected_reductions(case: Case, microbatch: int) -> tuple[int, int]:
    """(reduce-scatters, all-reduces) of one microbatch: the contract's table, spelled out."""
    decoder = 0 if case.freeze == "decoder" else 3  # embedding and two blocks
    if case.grouping == "tied":
        decoder = max(decoder - 1, 0)  # the embedding is in the head's group
    # Gradients that reach the head's group from the chunk loop, and from the outer backward.
    inner = case.freeze != "head" or case.bias
    outer = case.freeze != "decoder" or case.grouping == "tied"
    if case.grouping == "separate":
        decoder += outer  # norm is a group of its own
        outer = False
    is_last = microbatch == NUM_MICROBATCHES - 1
    if case.accumulation == "deferred":
        head = int(inner or outer) if is_last else 0
        decoder = decoder if is_last else 0
    else:
        has_outer_backward = case.freeze != "decoder" or case.grouping == "tied"
        pending = case.accumulation == "partial" and microbatch > 0
        together = case.reduction == "coalesced" or pending
        head = int(inner or outer) if together else inner + outer
        if (
            case.accumulation == "partial"
            and case.grouping == "separate"
            and inner
            and has_outer_backward
            and not together
        ):
            # torch reduces zeros for a group that owns a partial sum and took no part.
            head += 1
    reductions = decoder + head
    if case.mesh != "hsdp" or (case.accumulation == "partial" and not is_last):
        return reductions, 0
    return reductions, reductions


def expected_all_gathers(case: Case, microbatch: int) -> int:
    """Forward gathers each group once. Backward gathers again what forward, or the scope, released.

    A caller that does not end the iteration (``set_is_last_backward(False)``) makes torch prefetch
    by the order of the microbatch before, one group too many, in flight for the next microbatch.
    """
    separate, tied = case.grouping == "separate", case.grouping == "tied"
    forward = 3 + separate + (not tied)  # embedding, blocks, norm, head
    if tied:
        forward = 3
    if case.freeze == "decoder" and not tied:
        return forward
    # Embedding and blocks; the head's group again for norm, or for the tied embedding.
    backward = 2 + (not separate) + (not tied)
    stale = case.accumulation != "plain" and microbatch == 1 and not tied
    return forward + backward + stale


class Ends(nn.Module):
    """Norm and head in one unit whose forward is the norm's."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight
        self.lm_head = lm_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (s.DIM,), self.weight)


class TestPartialBackwards:
    """Methods of a ``RankTest``; see ``tests.ranks.on_ranks``."""

    __test__ = True

    def build(self, case: Case, **kwargs):
        model = s.shard(
            s.make_model(case, device=self.device),
            s.make_mesh(case.mesh, self.device.type),
            case.grouping,
            **kwargs,
        )
        loss_fn = s.make_loss(case)
        loss_fn.set_lm_head(model.lm_head)
        return model, loss_fn

    def step(self, model, loss_fn, case, seed, **kwargs):
        batches = s.make_batches(NUM_MICROBATCHES, self.world_size, seed=seed)
        result = s.run_step(
            model, loss_fn, case, batches, rank=self.rank, device=self.device, **kwargs
        )
        return result, batches

    def assert_clean(self, model) -> None:
        self.assertEqual(s.unsharded_groups(model), [])
        self.assertEqual(s.leftovers(model), [])
        if isinstance(model, FSDPModule):
            self.assertEqual(s.unfinished_order(model), [])

    def assert_same(self, actual: dict, expected: dict, *, exact: bool = False) -> None:
        self.assertEqual(set(actual), set(expected))
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name],
                value,
                **({"rtol": 0, "atol": 0} if exact else {}),
                msg=lambda m, name=name: f"{name}: {m}",
            )

    # --- parity and counts over the matrix -----------------------------------------------------

    @parametrize("case", [subtest(c, name=str(c).replace("-", "_")) for c in s.matrix()])
    def test_matrix(self, case: Case) -> None:
        reference = s.make_model(case, device=self.device)
        model, loss_fn = self.build(case)
        optimizers = [
            torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
            for m in (model, reference)
        ]
        for seed in range(2):
            before = []

            def check_policies(i: int, before=before) -> None:
                before.append(s.policies(model))

            result, batches = self.step(
                model, loss_fn, case, seed, before_microbatch=check_policies
            )
            if seed > 0:  # on the first step the root does not know its groups yet
                after_setting = s.policies(model)
                s.set_accumulation(model, case, is_last=True)
                self.assertEqual(after_setting, s.policies(model))
                self.assertEqual(before[-1], after_setting)
            expected_loss, expected = s.reference_step(
                reference, [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches]
            )
            torch.testing.assert_close(s.sum_over_ranks(result.loss), expected_loss)
            self.assert_same(s.gradients(model), expected)
            for i, counts in enumerate(result.counts):
                self.assertEqual(
                    (counts["reduce_scatter"], counts["all_reduce"]),
                    expected_reductions(case, i),
                    f"microbatch {i}: {dict(counts)}",
                )
                self.assertEqual(
                    counts["all_gather"],
                    expected_all_gathers(case, i),
                    f"microbatch {i}: {dict(counts)}",
                )
            self.assert_clean(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.assert_same(s.parameters(model), s.parameters(reference))

    @parametrize("mesh", ["fsdp", "hsdp"])
    @parametrize("grouping", ["grouped", "separate", "tied"])
    @parametrize("freeze", ["none", "head"])
    def test_compatible_is_bit_identical_to_the_stock_wrapper(self, mesh, grouping, freeze) -> None:
        case = Case(mesh, grouping, freeze)
        runs = []
        for stock in (False, True):
            model, loss_fn = self.build(case)
            if stock:
                loss_fn = s.make_stock_loss()
                loss_fn.set_lm_head(model.lm_head)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            history = []
            for seed in range(4):
                batches = s.make_batches(1, self.world_size, seed=seed)
                result = s.run_step(
                    model, loss_fn, case, batches, rank=self.rank, device=self.device
                )
                history.append((result.loss, s.gradients(model)))
                optimizer.step()
                optimizer.zero_grad()
            runs.append((history, s.parameters(model)))
        (ours, our_parameters), (theirs, their_parameters) = runs
        for (loss, gradients), (their_loss, their_gradients) in zip(ours, theirs, strict=True):
            self.assertTrue(torch.equal(loss, their_loss))
            self.assert_same(gradients, their_gradients, exact=True)
        self.assert_same(our_parameters, their_parameters, exact=True)

    @parametrize("grouping, stock, ours", [("separate", 7, 3), ("grouped", 7, 2)])
    def test_reported_counts_of_a_deferred_step(self, grouping, stock, ours) -> None:
        """Three microbatches, one decoder group and a head: the numbers reported upstream."""
        case = Case(grouping=grouping, accumulation="deferred")
        counts = []
        for use_stock in (True, False):
            torch.manual_seed(0)
            model = s.Decoder(num_layers=1).to(self.device)
            # One decoder group: the embedding and the block together.
            mesh = s.make_mesh("fsdp", self.device.type)
            ends = [model.norm, model.lm_head]
            for group in [ends] if grouping == "grouped" else [[m] for m in ends]:
                fully_shard(group, mesh=mesh, reshard_after_forward=False)
            fully_shard(model, mesh=mesh)
            loss_fn = s.make_stock_loss() if use_stock else s.make_loss(case)
            loss_fn.set_lm_head(model.lm_head)
            result, _ = self.step(model, loss_fn, case, 0)
            counts.append(result.total["reduce_scatter"])
        self.assertEqual(counts, [stock, ours])

    # --- isolation and policies ----------------------------------------------------------------

    @parametrize("grouping", ["grouped", "separate", "tied"])
    def test_inner_backwards_touch_no_other_group(self, grouping) -> None:
        """Between the chunks: pending gradients stay, weights stay, the prefetch order stays."""
        case = Case(grouping=grouping, accumulation="deferred")
        model, loss_fn = self.build(case)
        self.step(model, loss_fn, case, 0)
        model.zero_grad()
        head_state = model.lm_head._get_fsdp_state()
        seen: list = []

        def observe() -> tuple:
            state = model._get_fsdp_state()
            found = []
            for module in model.modules():
                if not isinstance(module, FSDPModule):
                    continue
                if module._get_fsdp_state() is head_state:
                    continue
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    found.append(
                        (
                            group._module_fqn,
                            group._sharded_state,
                            group._post_backward_pending,
                            group._training_state,
                            tuple(group._post_forward_indices),
                            [
                                None
                                if getattr(p, "_unsharded_param", None) is None
                                or p._unsharded_param.grad is None
                                else p._unsharded_param.grad.sum().item()
                                for p in group.fsdp_params
                            ],
                        )
                    )
            order = [g._module_fqn for g in state._comm_ctx.post_forward_order]
            return found, [
                fqn for fqn in order if fqn != head_state._fsdp_param_groups[0]._module_fqn
            ]

        inner = loss_fn.loss_fn

        def observing(*args, **kwargs):
            seen.append(observe())
            return inner(*args, **kwargs)

        loss_fn.loss_fn = observing
        self.step(model, loss_fn, case, 1)
        self.assertEqual(len(seen), NUM_MICROBATCHES * s.NUM_CHUNKS)
        for start in range(0, len(seen), s.NUM_CHUNKS):
            for later in seen[start + 1 : start + s.NUM_CHUNKS]:
                self.assertEqual(seen[start], later)
        # And there was something to lose: the last microbatch found gradients pending.
        self.assertTrue(all(pending for _, _, pending, *_ in seen[-1][0]))

    @parametrize("policy", [False, True, 2])
    @parametrize("fail", [False, True])
    def test_policies_are_restored_by_value(self, policy, fail) -> None:
        case = Case()
        model, loss_fn = self.build(case, head_reshard_after_forward=policy)
        self.step(model, loss_fn, case, 0)
        model.zero_grad()
        # Odd values that no constant would restore.
        model.set_requires_all_reduce(False)
        model.layers["0"].set_requires_gradient_sync(False)
        model.lm_head.set_reshard_after_backward(False)
        model.set_is_last_backward(False)
        before = s.policies(model)
        batch = s.make_batches(1, self.world_size)[0][self.rank]
        inputs, labels = (t.to(self.device) for t in batch)
        hidden = model(inputs)
        if fail:
            with s.failing_loss(loss_fn, at_call=1), self.assertRaises(s.ChunkFailure):
                loss_fn(hidden, labels)
        else:
            loss_fn(hidden, labels)[0].backward()
        self.assertEqual(s.policies(model), before)
        reset_iteration(model)

    @parametrize("grouping", ["grouped", "separate", "tied"])
    @parametrize("accumulation", ["plain", "deferred"])
    @parametrize("reduction", ["compatible", "coalesced"])
    def test_the_scope_touches_its_group_only(self, grouping, accumulation, reduction) -> None:
        """Gathered on entry, released at the exit, and the others as they were, in each case."""
        case = Case(grouping=grouping, accumulation=accumulation, reduction=reduction)
        model, loss_fn = self.build(case)
        self.step(model, loss_fn, case, 0)
        model.zero_grad()
        inputs = s.make_batches(1, self.world_size)[0][self.rank][0].to(self.device)
        hidden = model(inputs).detach().requires_grad_()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        context = model._get_fsdp_state()._state_ctx
        comm = model._get_fsdp_state()._comm_ctx
        head = model.lm_head._get_fsdp_state()._fsdp_param_groups[0]._module_fqn

        def others():
            states = {k: v for k, v in s.sharded_states(model).items() if k != f"{head}[0]"}
            return states, [g._module_fqn for g in comm.post_forward_order if g._module_fqn != head]

        before = others()
        s.set_accumulation(model, case, is_last=False)
        with fsdp_partial_backwards(model.lm_head, reduction=reduction) as hooks:
            self.assertEqual(s.sharded_states(model)[f"{head}[0]"], "UNSHARDED")
            for i in range(3):
                if i == 2:
                    hooks.before_last_forward()
                hooks.after_forward(model.lm_head(hidden)).sum().backward()
                self.assertEqual(s.sharded_states(model)[f"{head}[0]"], "UNSHARDED")
        self.assertEqual(s.sharded_states(model)[f"{head}[0]"], "SHARDED")
        self.assertEqual(others(), before)
        self.assertIsNone(context.manual_backward_finalization_active)
        reduced = bool(model.lm_head.weight.grad is not None)
        self.assertEqual(reduced, accumulation == "plain" and reduction == "compatible")
        reset_iteration(model)
        model.zero_grad()

    @parametrize("initialized", [False, True])
    def test_a_head_that_is_its_own_root(self, initialized) -> None:
        """The decoder is not FSDP: no outer backward comes through the head's root."""
        for accumulation in ("plain", "deferred"):
            for reduction in ("compatible", "coalesced"):
                case = Case(accumulation=accumulation, reduction=reduction)
                model = s.make_model(case, device=self.device)
                head = fully_shard(model.lm_head, mesh=s.make_mesh("fsdp", self.device.type))
                head.set_gradient_divide_factor(1.0)
                head.set_force_sum_reduction_for_comms(True)
                loss_fn = s.make_loss(case)
                loss_fn.set_lm_head(head)
                if initialized:
                    head(torch.zeros(1, 1, s.DIM, device=self.device)).sum().backward()
                    head.zero_grad()
                batches = s.make_batches(NUM_MICROBATCHES, self.world_size)
                tokens = s.num_valid(batches).to(self.device)
                for i, row in enumerate(batches):
                    s.set_accumulation(head, case, is_last=i == NUM_MICROBATCHES - 1)
                    inputs, labels = (t.to(self.device) for t in row[self.rank])
                    loss_fn(model(inputs), labels, tokens)[0].backward()
                reference = s.make_model(case, device=self.device)
                _, expected = s.reference_step(
                    reference,
                    [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches],
                )
                for p in (p for n, p in model.named_parameters() if n != "lm_head.weight"):
                    dist.all_reduce(p.grad)
                self.assert_same(s.gradients(model), expected)
                self.assert_clean(head)

    @parametrize("accumulation", ["plain", "deferred"])
    @parametrize("reduction", ["compatible", "coalesced"])
    def test_an_fsdp_group_inside_the_head(self, accumulation, reduction) -> None:
        class Head(nn.Sequential):
            pass

        def make():
            model = s.make_model(Case(), device=self.device)
            torch.manual_seed(1)
            model.lm_head = Head(
                nn.Linear(s.DIM, s.DIM), nn.Tanh(), nn.Linear(s.DIM, s.VOCAB, bias=False)
            ).to(self.device)
            return model

        case = Case(accumulation=accumulation, reduction=reduction)
        mesh = s.make_mesh("fsdp", self.device.type)
        model = make()
        fully_shard(model.lm_head[0], mesh=mesh)
        model = s.shard(model, mesh)
        loss_fn = s.make_loss(case)
        loss_fn.set_lm_head(model.lm_head)
        self.compare(case, model, loss_fn, make())
        model.zero_grad()
        result, _ = self.step(model, loss_fn, case, 1)
        if accumulation == "deferred":
            self.assertEqual(result.total["reduce_scatter"], 5)

    def test_policies_can_be_preserved_around_any_setter(self) -> None:
        model, loss_fn = self.build(Case("hsdp"), head_reshard_after_forward=True)
        self.step(model, loss_fn, Case("hsdp"), 0)
        model.set_requires_all_reduce(False)
        model.layers["0"].set_reshard_after_backward(False)
        before = s.policies(model)
        with preserved_policies([model]):
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_forward(False)
            model.set_reshard_after_backward(True)
            self.assertNotEqual(s.policies(model), before)
        self.assertEqual(s.policies(model), before)

    def test_preserving_policies_over_the_first_forward(self) -> None:
        """There the root decides to keep its weights after forward; that must stay."""
        model = fully_shard(nn.Linear(s.DIM, s.DIM).to(self.device))
        with preserved_policies([model]):
            model(torch.ones(1, s.DIM, device=self.device)).sum().backward()
        with s.Collectives() as collectives:
            model(torch.ones(1, s.DIM, device=self.device)).sum().backward()
        self.assertEqual(collectives.counts["all_gather"], 1)

    def test_an_unset_policy_stays_unset(self) -> None:
        """The root's automatic reshard-after-forward survives a scope on the root itself."""
        head = fully_shard(nn.Linear(s.DIM, s.VOCAB).to(self.device))
        x = torch.ones(2, s.DIM, device=self.device)
        head(x).sum().backward()
        before = s.policies(head)
        with fsdp_partial_backwards(head, outer_backward_follows=False) as hooks:
            hooks.before_last_forward()
            hooks.after_forward(head(x)).sum().backward()
        self.assertEqual(s.policies(head), before)
        self.assertTrue(head._get_fsdp_state()._auto_reshard_after_forward)
        self.assert_clean(head)

    def test_two_outputs_share_one_unshard_and_one_reduction(self) -> None:
        for grouping in ("grouped", "separate"):
            case = Case(grouping=grouping)
            model, _ = self.build(case, head_reshard_after_forward=True)
            loss_fn = s.make_loss(case, num_chunks=2)
            loss_fn.set_lm_head(model.lm_head)

            def sum_of_two(logits, labels, tokens):
                losses = [
                    F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum")
                    for x, y in zip(logits, labels, strict=True)
                ]
                return (losses[0] + 2 * losses[1]) / tokens, {}

            loss_fn.loss_fn = sum_of_two
            (inputs, labels), (_, labels2) = (
                tuple(t.to(self.device) for t in b[self.rank])
                for b in s.make_batches(2, self.world_size)
            )
            tokens = torch.tensor(10.0, device=self.device)
            model(inputs)  # the root's first forward, so that the groups know their names
            reset_iteration(model)
            hidden = model(inputs)
            head_group = model.lm_head._get_fsdp_state()._fsdp_param_groups[0]
            events: list[str] = []
            unshard, reshard = FSDPParamGroup.unshard, FSDPParamGroup.reshard

            def spy(name, original, head_group=head_group, events=events):
                def call(group, *args, **kwargs):
                    state = group._sharded_state
                    result = original(group, *args, **kwargs)
                    changed = group._all_gather_result is not None or group._sharded_state != state
                    if group is head_group and changed:
                        events.append(name)
                    return result

                return call

            with (
                mock.patch.object(FSDPParamGroup, "unshard", spy("unshard", unshard)),
                mock.patch.object(FSDPParamGroup, "reshard", spy("reshard", reshard)),
                s.Collectives() as collectives,
            ):
                loss, _ = loss_fn((hidden, hidden * 0.5), (labels, labels2), tokens)
            self.assertEqual(events, ["unshard", "reshard"])
            # The decoder's forward left norm and head sharded, by policy; a norm of its own is
            # prefetched for the outer backward.
            gathers = 2 if grouping == "separate" else 1
            self.assertEqual(dict(collectives.counts), {"all_gather": gathers, "reduce_scatter": 1})
            loss.backward()
            # Against full logits.
            reference = s.make_model(case, device=self.device)
            logits = [reference.lm_head(h) for h in (lambda h: (h, h * 0.5))(reference(inputs))]
            expected, _ = sum_of_two(logits, (labels, labels2), tokens)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            for p in reference.parameters():
                dist.all_reduce(p.grad)
            self.assert_same(s.gradients(model), s.gradients(reference))
            self.assert_clean(model)

    # --- failures and evaluation ---------------------------------------------------------------

    @parametrize("chunk", [0, 1, s.NUM_CHUNKS - 1])
    @parametrize("accumulation", ["plain", "deferred"])
    @parametrize("mesh", ["fsdp", "hsdp"])
    def test_retry_after_a_failed_chunk_is_bit_identical(self, chunk, accumulation, mesh) -> None:
        case = Case(mesh, accumulation=accumulation)
        results = []
        for fails in (False, True):
            model, loss_fn = self.build(case)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            self.step(model, loss_fn, case, 0)
            optimizer.step()
            optimizer.zero_grad()
            if fails:
                before = s.policies(model)
                with (
                    s.failing_loss(loss_fn, at_call=s.NUM_CHUNKS + chunk),
                    self.assertRaises(s.ChunkFailure),
                ):
                    self.step(model, loss_fn, case, 1)
                s.set_accumulation(model, case, is_last=True)
                self.assertEqual(s.policies(model), before)
                reset_iteration(model)
                self.assert_clean(model)
            result, _ = self.step(model, loss_fn, case, 1)
            gradients = s.gradients(model)
            optimizer.step()
            results.append((result, gradients, s.parameters(model)))
        (good, gradients, parameters), (retried, gradients2, parameters2) = results
        self.assertTrue(torch.equal(good.loss, retried.loss))
        self.assertEqual(good.counts, retried.counts)
        self.assert_same(gradients2, gradients, exact=True)
        self.assert_same(parameters2, parameters, exact=True)

    @parametrize("grouping", ["grouped", "separate", "tied"])
    @parametrize("policy", [False, True, 2])
    @parametrize("freeze", ["none", "decoder"])
    def test_evaluation_between_steps_leaves_nothing(self, grouping, policy, freeze) -> None:
        case = Case(grouping=grouping, freeze=freeze)
        results = []
        for evaluates in (False, True):
            model, loss_fn = self.build(case, head_reshard_after_forward=policy)
            self.step(model, loss_fn, case, 0)
            model.zero_grad()
            if evaluates:
                inputs, labels = (
                    t.to(self.device) for t in s.make_batches(1, self.world_size)[0][self.rank]
                )
                with torch.no_grad():
                    hidden = model(inputs)
                    states = s.sharded_states(model)
                    with s.Collectives() as collectives:
                        loss, _ = loss_fn(hidden, labels)
                self.assertFalse(loss.requires_grad)
                # One gather at the most: none where forward kept the weights.
                self.assertLessEqual(collectives.counts["all_gather"], 1)
                self.assertEqual(collectives.counts["reduce_scatter"], 0)
                # Whatever the policy: weights may change in place before the next forward.
                head = model.lm_head._get_fsdp_state()._fsdp_param_groups[0]._module_fqn
                states[f"{head}[0]"] = "SHARDED"
                self.assertEqual(s.sharded_states(model), states)
                self.assertEqual(s.leftovers(model), [])
                reference = s.make_model(case, device=self.device)
                logits = reference.lm_head(reference(inputs))
                torch.testing.assert_close(
                    loss,
                    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"),
                )
            result, _ = self.step(model, loss_fn, case, 1)
            self.assert_clean(model)
            results.append((result, s.gradients(model)))
        (plain, gradients), (evaluated, gradients2) = results
        self.assertTrue(torch.equal(plain.loss, evaluated.loss))
        self.assert_same(gradients2, gradients, exact=True)
        for kind in ("reduce_scatter", "all_reduce"):
            self.assertEqual(plain.total[kind], evaluated.total[kind])

    # --- kinds of heads and of sharding --------------------------------------------------------

    def compare(self, case, model, loss_fn, reference, *, seed=0, **kwargs) -> None:
        result, batches = self.step(model, loss_fn, case, seed)
        expected_loss, expected = s.reference_step(
            reference, [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches]
        )
        torch.testing.assert_close(s.sum_over_ranks(result.loss), expected_loss, **kwargs)
        actual = s.gradients(model)
        self.assertEqual(set(actual), set(expected))
        for name, value in expected.items():
            torch.testing.assert_close(actual[name].to(value), value, **kwargs)
        self.assert_clean(model)

    @parametrize("freeze", ["none", "decoder"])
    def test_head_with_bias(self, freeze) -> None:
        case = Case(freeze=freeze, bias=True)
        model, loss_fn = self.build(case)
        self.compare(case, model, loss_fn, s.make_model(case, device=self.device))

    @parametrize("freeze", ["decoder", "none"])
    def test_adapter_beside_a_frozen_head(self, freeze) -> None:
        class Adapted(nn.Linear):
            def __init__(self) -> None:
                super().__init__(s.DIM, s.VOCAB, bias=False)
                self.weight.requires_grad_(False)
                self.down = nn.Linear(s.DIM, 2, bias=False)
                self.up = nn.Linear(2, s.VOCAB, bias=False)

            def forward(self, x):
                return super().forward(x) + self.up(self.down(x))

        def make():
            model = s.make_model(Case(), device=self.device)
            if freeze == "decoder":
                model.requires_grad_(False)
            torch.manual_seed(1)
            model.lm_head = Adapted().to(self.device)
            return model

        case = Case()
        model = s.shard(make(), s.make_mesh("fsdp", self.device.type))
        loss_fn = s.make_loss(case)
        loss_fn.set_lm_head(model.lm_head)
        self.compare(case, model, loss_fn, make())

    @parametrize("accumulation", ["plain", "deferred"])
    def test_replicate(self, accumulation) -> None:
        case = Case(accumulation=accumulation)
        model = s.make_model(case, device=self.device)
        mesh = s.make_mesh("fsdp", self.device.type)
        for module in (model.tok_embeddings, *model.layers.values(), model.lm_head, model):
            replicate(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        loss_fn = s.make_loss(case)
        loss_fn.set_lm_head(model.lm_head)
        self.compare(case, model, loss_fn, s.make_model(case, device=self.device))
        result, _ = self.step(model, loss_fn, case, 1)
        # Embedding, two blocks, head, and norm with the root.
        steps = NUM_MICROBATCHES if accumulation == "plain" else 1
        self.assertEqual(result.total["all_reduce"], 5 * steps)

    def test_cpu_offload(self) -> None:
        case = Case(accumulation="deferred")
        model, loss_fn = self.build(case, offload_policy=CPUOffloadPolicy(pin_memory=False))
        reference = s.make_model(case, device=self.device)
        model.cpu()
        self.compare(case, model, loss_fn, reference)

    @parametrize("accumulation", ["plain", "deferred"])
    @parametrize("reduction", ["compatible", "coalesced"])
    def test_mixed_precision(self, accumulation, reduction) -> None:
        case = Case(accumulation=accumulation, reduction=reduction)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
        )
        model, loss_fn = self.build(case, mp_policy=policy)
        self.compare(
            case, model, loss_fn, s.make_model(case, device=self.device), rtol=0.05, atol=0.02
        )

    def test_bf16_accumulates_in_fp32(self) -> None:
        """256 + 1 - 256 is 1 in fp32 and 0 in bf16: one chunk each, then one microbatch each."""
        mesh = s.make_mesh("fsdp", self.device.type)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for values in ([[256.0, 1.0, -256.0]], [[256.0], [1.0], [-256.0]]):
            torch.manual_seed(0)
            norm, head = nn.RMSNorm(4), nn.Linear(4, 4, bias=False)
            model = nn.Sequential(nn.Linear(4, 4), norm, head).to(self.device)
            fully_shard([norm, head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            model.set_gradient_divide_factor(1.0)
            head.set_gradient_divide_factor(1.0)
            head.set_force_sum_reduction_for_comms(True)
            ones = torch.ones(1, 4, device=self.device, dtype=torch.bfloat16)
            model(ones)  # initializes the root
            reset_iteration(model)
            for i, chunks in enumerate(values):
                model.set_requires_gradient_sync(i == len(values) - 1)
                with fsdp_partial_backwards(head, outer_backward_follows=False) as hooks:
                    for j, value in enumerate(chunks):
                        if j == len(chunks) - 1:
                            hooks.before_last_forward()
                        (hooks.after_forward(head(ones)) * value).sum().backward()
            gradient = s.full(head.weight.grad)
            torch.testing.assert_close(
                gradient, torch.full_like(gradient, float(self.world_size)), rtol=0, atol=0
            )

    def test_data_parallel_size_of_one(self) -> None:
        case = Case(accumulation="deferred")
        mesh = dist.device_mesh.init_device_mesh(
            self.device.type, (self.world_size, 1), mesh_dim_names=("other", "dp_shard")
        )["dp_shard"]
        model = s.shard(s.make_model(case, device=self.device), mesh)
        loss_fn = s.make_loss(case)
        loss_fn.set_lm_head(model.lm_head)
        batches = s.make_batches(NUM_MICROBATCHES, 1)
        result = s.run_step(model, loss_fn, case, batches, rank=0, device=self.device)
        expected_loss, expected = s.reference_step(
            s.make_model(case, device=self.device),
            [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches],
        )
        torch.testing.assert_close(result.loss, expected_loss)
        self.assert_same(s.gradients(model), expected)
        self.assert_clean(model)

    @parametrize("accumulation", ["plain", "deferred"])
    def test_a_state_of_several_groups(self, accumulation) -> None:
        """One mesh per parameter, as expert parallelism has: a state with two groups."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
        from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
        from torch.distributed.tensor import Shard

        case = Case(accumulation=accumulation, bias=True)
        flat = s.make_mesh("fsdp", self.device.type)
        nested = s.make_mesh("hsdp", self.device.type)
        model = s.make_model(case, device=self.device)
        infos = {True: _get_mesh_info(nested, None), False: _get_mesh_info(flat, None)}
        bias = model.lm_head.bias

        fully_shard(
            [model.norm, model.lm_head],
            mesh=flat,
            reshard_after_forward=False,
            shard_placement_fn=lambda p: ShardPlacementResult(
                placement=Shard(0), mesh_info=infos[p is bias]
            ),
        )
        for layer in model.layers.values():
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.assertEqual(len(model.lm_head._get_fsdp_state()._fsdp_param_groups), 2)
        loss_fn = s.make_loss(case)
        loss_fn.set_lm_head(model.lm_head)
        self.compare(case, model, loss_fn, s.make_model(case, device=self.device))
        model.zero_grad()
        result, _ = self.step(model, loss_fn, case, 1)
        # Root (embedding), two blocks, norm + weight, bias.
        if accumulation == "deferred":
            self.assertEqual(result.total["reduce_scatter"], 5)

    # --- the loss ------------------------------------------------------------------------------

    @parametrize("grouping", ["grouped", "separate"])
    @parametrize("freeze", ["none", "decoder"])
    def test_linear_cross_entropy_as_the_inner_loss(self, grouping, freeze) -> None:
        case = Case(grouping=grouping, freeze=freeze, bias=True, accumulation="deferred")
        model, _ = self.build(case)
        loss_fn = s.make_loss(case, loss_fn=LinearCrossEntropyLoss.Config())
        loss_fn.set_lm_head(model.lm_head)
        self.compare(case, model, loss_fn, s.make_model(case, device=self.device))
        model.zero_grad()
        result, _ = self.step(model, loss_fn, case, 1)
        self.assertEqual(
            result.total["reduce_scatter"],
            sum(expected_reductions(case, i)[0] for i in range(NUM_MICROBATCHES)),
        )

    @parametrize("config", [{"num_chunks": 3}, {"num_chunks": 1}, {"chunk_tokens": 3}])
    def test_uneven_chunks(self, config) -> None:
        case = Case()
        model, _ = self.build(case)
        loss_fn = s.make_loss(case, **({"num_chunks": None} | config))
        loss_fn.set_lm_head(model.lm_head)
        self.compare(case, model, loss_fn, s.make_model(case, device=self.device))

    def test_a_rank_whose_labels_are_all_ignored(self) -> None:
        case = Case()
        model, loss_fn = self.build(case)
        batches = s.make_batches(1, self.world_size)
        batches[0][1][1].fill_(-100)
        batches[0][0][1][:, :2] = -100  # and one chunk of another rank
        result = s.run_step(model, loss_fn, case, batches, rank=self.rank, device=self.device)
        self.assertTrue(torch.isfinite(result.loss))
        if self.rank == 1:
            self.assertEqual(result.loss.item(), 0.0)
        counts: list = [None] * self.world_size
        dist.all_gather_object(counts, dict(result.total))
        self.assertEqual(counts, [counts[0]] * self.world_size)
        _, expected = s.reference_step(
            s.make_model(case, device=self.device),
            [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches],
        )
        self.assert_same(s.gradients(model), expected)

    # --- who owns the head's parameters --------------------------------------------------------

    def build_owned(self, owner: str, freeze: str, **kwargs):
        """A head that is no FSDP unit: the root owns it, with norm and embedding, or a wrapper."""
        model = s.make_model(Case(freeze=freeze), device=self.device)
        kwargs["mesh"] = s.make_mesh("fsdp", self.device.type)
        if owner == "wrapper":
            model.norm = Ends(model.norm, model.lm_head)
            model.lm_head = None
            fully_shard(model.norm, reshard_after_forward=False, **kwargs)
        if owner != "one unit":
            for layer in model.layers.values():
                fully_shard(layer, **kwargs)
        fully_shard(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    @parametrize("owner", ["root", "wrapper", "one unit"])
    @parametrize("freeze", ["none", "decoder"])
    @parametrize("accumulation", ["plain", "deferred"])
    @parametrize("reduction", ["compatible", "coalesced"])
    def test_a_head_that_another_unit_owns(self, owner, freeze, accumulation, reduction) -> None:
        case = Case(freeze=freeze, accumulation=accumulation, reduction=reduction)
        model = self.build_owned(owner, freeze)
        loss_fn = s.make_loss(case)
        head = model.norm.lm_head if owner == "wrapper" else model.lm_head
        loss_fn.set_lm_head(head)
        reference = s.make_model(case, device=self.device)
        optimizers = [torch.optim.SGD([*m.parameters()], lr=0.5) for m in (model, reference)]
        losses = []
        for seed in range(4):
            result, batches = self.step(model, loss_fn, case, seed)
            expected_loss, expected = s.reference_step(
                reference, [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches]
            )
            losses.append(s.sum_over_ranks(result.loss))
            torch.testing.assert_close(losses[-1], expected_loss)
            gradients = {n.removeprefix("norm."): g for n, g in s.gradients(model).items()}
            expected = {n.removeprefix("norm."): g for n, g in expected.items()}
            self.assert_same(gradients, expected)
            self.assert_clean(model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # Blocks, and the unit of the head; of the wrapper, the root's embedding beside it.
        decoder = 0 if freeze == "decoder" else {"root": 2, "wrapper": 3, "one unit": 0}[owner]
        twice = freeze == "none" and accumulation == "plain" and reduction == "compatible"
        steps = 1 if accumulation == "deferred" else NUM_MICROBATCHES
        self.assertEqual(result.total["reduce_scatter"], (decoder + 1 + twice) * steps)

    @parametrize("owner", ["root", "wrapper"])
    def test_mixed_precision_of_a_head_that_another_unit_owns(self, owner) -> None:
        """The unit casts what goes into the head and what comes out of it, as for its forward."""
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        model = self.build_owned(owner, "none", mp_policy=policy)
        loss_fn = s.make_loss(Case())
        head = model.norm.lm_head if owner == "wrapper" else model.lm_head
        loss_fn.set_lm_head(head)
        seen = []
        inner = loss_fn.loss_fn
        loss_fn.loss_fn = lambda logits, *rest: seen.append(logits.dtype) or inner(logits, *rest)
        result, batches = self.step(model, loss_fn, Case(), 0)
        self.assertEqual(set(seen), {torch.float32})
        expected_loss, _ = s.reference_step(s.make_model(Case()), batches)
        torch.testing.assert_close(
            s.sum_over_ranks(result.loss).cpu(), expected_loss, rtol=0.02, atol=0.02
        )
        self.assertEqual(len(head._forward_pre_hooks), 0)
        self.assertEqual(len(head._forward_hooks), 0)

    def test_a_wrapper_around_the_head(self) -> None:
        """What is not FSDP and holds a unit is scoped as the unit."""
        case = Case(accumulation="deferred")
        model, loss_fn = self.build(case)
        loss_fn.set_lm_head(nn.Sequential(model.lm_head))
        result, batches = self.step(model, loss_fn, case, 0)
        _, expected = s.reference_step(
            s.make_model(case, device=self.device),
            [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches],
        )
        self.assert_same(s.gradients(model), expected)
        self.assertEqual(result.total["reduce_scatter"], 4)
        self.assert_clean(model)

    # --- hooks at rest -------------------------------------------------------------------------

    @parametrize("mesh", ["fsdp", "hsdp"])
    @parametrize("accumulation", ["plain", "deferred"])
    @parametrize("grouping", ["grouped", "separate"])
    def test_a_product_by_hand(self, mesh, accumulation, grouping) -> None:
        """A use of the weights that is not a forward of the module."""
        case = Case(mesh, grouping, "decoder", accumulation)
        model, _ = self.build(case)
        reference = s.make_model(case, device=self.device)
        batches = s.make_batches(NUM_MICROBATCHES, self.world_size)
        weight = model.lm_head
        with s.Collectives() as collectives:
            for i, row in enumerate(batches):
                s.set_accumulation(model, case, is_last=i == NUM_MICROBATCHES - 1)
                hidden = model(row[self.rank][0].to(self.device))
                with fsdp_partial_backwards(weight, outer_backward_follows=False) as hooks:
                    for j, chunk in enumerate(hidden.split(2, dim=1)):
                        if j == 3:
                            hooks.before_last_forward()
                        logits = hooks.after_forward(chunk @ model.lm_head.weight.T)
                        logits.square().sum().backward()
        for row in batches:
            for inputs, _ in row:
                reference.lm_head(reference(inputs.to(self.device))).square().sum().backward()
        self.assert_same(s.gradients(model), s.gradients(reference))
        steps = 1 if accumulation == "deferred" else NUM_MICROBATCHES
        self.assertEqual(collectives.counts["reduce_scatter"], steps)
        self.assertEqual(collectives.counts["all_reduce"], steps if mesh == "hsdp" else 0)
        self.assert_clean(model)

    @parametrize("fail", [False, True])
    @parametrize("grouping", ["grouped", "separate"])
    def test_hooks_of_others_run_and_keep_their_place(self, fail, grouping) -> None:
        model, _ = self.build(Case(grouping=grouping))
        hidden = model(s.make_batches(1, self.world_size)[0][self.rank][0].to(self.device))
        reset_iteration(model)
        head, calls = model.lm_head, []
        before = head.register_forward_pre_hook(lambda *_: calls.append("before"))
        after = head.register_forward_hook(lambda *_: calls.append("after"))
        hooks_before = [*head._forward_pre_hooks.items()], [*head._forward_hooks.items()]
        try:
            with fsdp_partial_backwards(head) as hooks:
                head(hidden.detach())
                self.assertEqual(calls, ["before", "after"])
                before.remove()
                late = head.register_forward_pre_hook(lambda *_: calls.append("late"))
                hooks.before_last_forward()
                hooks.after_forward(head(hidden.detach())).sum().backward()
                self.assertEqual(calls[2:], ["late", "after"])
                if fail:
                    raise s.ChunkFailure
        except s.ChunkFailure:
            reset_iteration(model)
        ours = {late.id}
        kept = [(i, h) for i, h in hooks_before[0] if i != before.id]
        self.assertEqual([x for x in head._forward_pre_hooks.items() if x[0] not in ours], kept)
        self.assertIn(late.id, head._forward_pre_hooks)
        self.assertEqual([*head._forward_hooks.items()], hooks_before[1])
        after.remove()
        reset_iteration(model)

    def test_a_compiled_head(self) -> None:
        """FSDP's hooks and ours are around the compiled forward, which is compiled once."""
        case = Case(accumulation="deferred")
        model, loss_fn = self.build(case)
        num_compilations = 0

        def backend(graph, inputs):
            nonlocal num_compilations
            num_compilations += 1
            return graph.forward

        model.lm_head.compile(backend=backend, dynamic=False)
        reference = s.make_model(case, device=self.device)
        for seed in range(2):
            _, batches = self.step(model, loss_fn, case, seed)
            _, expected = s.reference_step(
                reference, [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches]
            )
            self.assert_same(s.gradients(model), expected)
            self.assert_clean(model)
            model.zero_grad()
        self.assertLessEqual(num_compilations, 1)

    @parametrize("checkpointing", ["reentrant", "non-reentrant"])
    def test_a_head_that_is_recomputed(self, checkpointing) -> None:
        case = Case(accumulation="deferred")
        model, loss_fn = self.build(case)
        forward = model.lm_head.forward
        model.lm_head.forward = lambda x: checkpoint(
            forward, x, use_reentrant=checkpointing == "reentrant"
        )
        self.compare(case, model, loss_fn, s.make_model(case, device=self.device))

    @parametrize("grouping", ["grouped", "separate"])
    @parametrize("accumulation", ["plain", "deferred"])
    def test_another_thread_runs_the_inner_backwards(self, grouping, accumulation) -> None:
        case = Case(grouping=grouping, accumulation=accumulation)
        results = []
        with ThreadPoolExecutor(1) as thread:
            for other in (False, True):
                model, loss_fn = self.build(case)
                backward = torch.Tensor.backward

                calls = itertools.cycle([*[other] * s.NUM_CHUNKS, False])  # the last is the outer

                def either(tensor, *args, backward=backward, calls=calls):
                    if next(calls):
                        return thread.submit(backward, tensor, *args).result()
                    return backward(tensor, *args)

                with mock.patch.object(torch.Tensor, "backward", either):
                    result, _ = self.step(model, loss_fn, case, 0)
                self.assert_clean(model)
                results.append((result.counts, s.gradients(model)))
        self.assertEqual(results[0][0], results[1][0])
        self.assert_same(results[1][1], results[0][1], exact=True)

    @parametrize("grouping", ["grouped", "separate"])
    @parametrize("accumulation", ["plain", "deferred"])
    @parametrize("moment", ["before", "after"])
    def test_a_scope_inside_the_outer_backward(self, grouping, accumulation, moment) -> None:
        """A loss that is computed within a backward of the same root: nothing is lost."""
        case = Case(grouping=grouping, accumulation=accumulation)
        model, _ = self.build(case)
        reference = s.make_model(case, device=self.device)
        batches = s.make_batches(NUM_MICROBATCHES, self.world_size)

        def loss_inside(net, x):
            """The head's loss of the hidden states, whose gradient runs on into the decoder."""

            class Loss(torch.autograd.Function):
                @staticmethod
                def forward(ctx, hidden):
                    ctx.hidden = hidden.detach()
                    return hidden.sum() * 1.0

                @staticmethod
                def backward(ctx, grad):
                    total = []
                    with torch.enable_grad():
                        chunks = [c.requires_grad_() for c in ctx.hidden.split(2, dim=1)]
                        with fsdp_partial_backwards(net.lm_head) as hooks:
                            for i, chunk in enumerate(chunks):
                                leaf = chunk.detach().requires_grad_()
                                if i == len(chunks) - 1:
                                    hooks.before_last_forward()
                                hooks.after_forward(net.lm_head(leaf)).square().sum().backward()
                                total.append(leaf.grad)
                    return torch.cat(total, dim=1) * grad

            hidden = net(x)
            # After: a pre-backward of the root's has run, and the end of the backward is queued.
            return Loss.apply(hidden * 1.0 if moment == "after" else hidden)

        for i, row in enumerate(batches):
            s.set_accumulation(model, case, is_last=i == NUM_MICROBATCHES - 1)
            x = row[self.rank][0].to(self.device)
            loss = loss_inside(model, x)
            if moment == "after":
                # The norm's unit has another output in this loss, whose backward comes first.
                loss = loss + 0.0 * model(x).sum()
            loss.backward()
            for inputs, _ in row:
                hidden = reference(inputs.to(self.device))
                reference.lm_head(hidden).square().sum().backward()
        self.assert_same(s.gradients(model), s.gradients(reference))
        self.assert_clean(model)

    @parametrize("grouping, prefetched", [("grouped", None), ("separate", "norm")])
    @parametrize("explicit", [False, True])
    def test_the_outer_backwards_prefetch_comes_with_the_last_chunk(
        self, grouping, prefetched, explicit
    ) -> None:
        """One gather, issued before the last chunk's forward: as late as it can be hidden."""
        case = Case(grouping=grouping)
        model, loss_fn = self.build(case, head_reshard_after_forward=True)
        if explicit:
            model.lm_head.set_modules_to_backward_prefetch([model.layers["1"]])
            prefetched = "layers.1"
        self.step(model, loss_fn, case, 0)
        model.zero_grad()
        events: list[str] = []
        unshard, inner = FSDPParamGroup.unshard, loss_fn.loss_fn

        def spy(group, *args, **kwargs):
            had = group._all_gather_result is not None
            unshard(group, *args, **kwargs)
            if group._all_gather_result is not None and not had:
                events.append(f"gather {group._module_fqn}")

        def chunk(*args):
            events.append("chunk")
            return inner(*args)

        loss_fn.loss_fn = chunk
        inputs, labels = (
            t.to(self.device) for t in s.make_batches(1, self.world_size)[0][self.rank]
        )
        hidden = model(inputs)
        with mock.patch.object(FSDPParamGroup, "unshard", spy):
            loss, _ = loss_fn(hidden, labels)
            in_scope = len(events)
            loss.backward()
        head = "norm, lm_head" if grouping == "grouped" else "lm_head"
        expected = [f"gather {head}", *["chunk"] * s.NUM_CHUNKS]
        if prefetched is not None:
            expected.insert(-1, f"gather {prefetched}")
        self.assertEqual(events[:in_scope], expected)
        if prefetched is not None:
            self.assertEqual(events.count(f"gather {prefetched}"), 1)
        self.assert_clean(model)

    def test_scopes_on_two_units(self) -> None:
        """The inner one reduces nothing while the other is open: its gradients are not whole."""
        case = Case(grouping="separate")
        model, _ = self.build(case)
        model.requires_grad_(False)
        x = s.make_batches(1, self.world_size)[0][self.rank][0].to(self.device)
        model(x)
        reset_iteration(model)
        reference = s.make_model(case, device=self.device)
        for net in (model, reference):
            net.norm.requires_grad_(True)
            net.lm_head.requires_grad_(True)
        generator = torch.Generator().manual_seed(self.rank)
        chunks = [torch.randn(1, 4, s.DIM, generator=generator) for _ in range(4)]
        chunks = [chunk.to(self.device) for chunk in chunks]
        options = {"outer_backward_follows": False}
        with (
            s.Collectives() as collectives,
            fsdp_partial_backwards(model.norm, **options) as norm_hooks,
        ):
            for pair in (chunks[:2], chunks[2:]):
                with fsdp_partial_backwards(model.lm_head, **options) as hooks:
                    for i, chunk in enumerate(pair):
                        if i == 1:
                            hooks.before_last_forward()
                            if chunk is chunks[-1]:
                                norm_hooks.before_last_forward()
                        hidden = norm_hooks.after_forward(model.norm(chunk))
                        hooks.after_forward(model.lm_head(hidden)).square().sum().backward()
                self.assertEqual(collectives.counts["reduce_scatter"], 0)
        self.assertEqual(collectives.counts["reduce_scatter"], 2)
        for chunk in chunks:
            reference.lm_head(reference.norm(chunk)).square().sum().backward()
        expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
        for gradient in expected.values():
            dist.all_reduce(gradient)
        self.assert_same(s.gradients(model), expected)
        self.assert_clean(model)

    # --- the outer backward, and what a failure leaves -----------------------------------------

    @parametrize("grouping", ["grouped", "separate", "tied", "root"])
    def test_the_outer_backward_inside_the_scope_is_refused(self, grouping) -> None:
        case = Case(grouping="grouped" if grouping == "root" else grouping)
        if grouping == "root":
            model = self.build_owned("root", "none")
            loss_fn = s.make_loss(case)
            loss_fn.set_lm_head(model.lm_head)
        else:
            model, loss_fn = self.build(case)
        self.step(model, loss_fn, case, 0)
        model.zero_grad()
        x = s.make_batches(1, self.world_size)[0][self.rank][0].to(self.device)
        hidden = model(x)
        name = model.lm_head.__class__.__name__ if grouping == "root" else "lm_head"
        with (
            self.assertRaisesRegex(
                RuntimeError,
                rf"inside the fsdp_partial_backwards .*{name}"
                if grouping != "root"
                else "inside the fsdp_partial_backwards",
            ),
            s.Collectives() as collectives,
            fsdp_partial_backwards(model.lm_head) as hooks,
        ):
            leaf = hidden.detach().requires_grad_()
            hooks.before_last_forward()
            hooks.after_forward(model.lm_head(leaf)).sum().backward()
            hidden.backward(leaf.grad)
        self.assertEqual(collectives.counts["reduce_scatter"], 0)
        reset_iteration(model)
        self.assert_clean(model)
        _, batches = self.step(model, loss_fn, case, 0)
        _, expected = s.reference_step(
            s.make_model(case, device=self.device),
            [[(a.to(self.device), b.to(self.device)) for a, b in r] for r in batches],
        )
        self.assert_same(s.gradients(model), expected)

    def test_a_failed_step_that_was_not_reset_is_named(self) -> None:
        model, loss_fn = self.build(Case())
        self.step(model, loss_fn, Case(), 0)
        model.zero_grad()
        x = s.make_batches(1, self.world_size)[0][self.rank][0].to(self.device)

        def fail(grad):
            raise s.ChunkFailure

        hidden = model(x)
        block = model.layers["1"].register_full_backward_pre_hook(lambda *_: fail(None))
        with self.assertRaises(s.ChunkFailure):
            model(x).sum().backward()
        block.remove()
        with self.assertRaisesRegex(RuntimeError, r"backward that failed .* reset_iteration"):
            fsdp_partial_backwards(model.lm_head).__enter__()
        del hidden
        reset_iteration(model)
        self.assert_clean(model)

    @parametrize("grouping", ["grouped", "separate", "tied"])
    @parametrize("policy", [False, True, 2])
    def test_weights_changed_in_place_after_an_evaluation(self, grouping, policy) -> None:
        case = Case(grouping=grouping)
        model, loss_fn = self.build(case, head_reshard_after_forward=policy)
        self.step(model, loss_fn, case, 0)
        inputs, labels = (
            t.to(self.device) for t in s.make_batches(1, self.world_size)[0][self.rank]
        )
        with torch.no_grad():
            before, _ = loss_fn(model(inputs), labels)
            if grouping == "separate":
                model.norm.reshard()  # a unit that is not the scope's stays as its policy says
            # The gradients of the step are there, as are the parameters that an optimizer knows.
            self.assertEqual(
                {n for n, p in model.named_parameters() if p.grad is not None},
                {n for n, _ in model.named_parameters()},
            )
            for parameter in model.parameters():
                parameter.mul_(0.5)
            after, _ = loss_fn(model(inputs), labels)
            reference = s.make_model(case, device=self.device)
            for parameter in reference.parameters():
                parameter.mul_(0.5)
            logits = reference.lm_head(reference(inputs))
            expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        torch.testing.assert_close(after, expected)
        self.assertNotEqual(before.item(), after.item())

    # --- errors --------------------------------------------------------------------------------

    def test_misuse_is_refused_by_name(self) -> None:
        case = Case()
        model, loss_fn = self.build(case)
        inputs = s.make_batches(1, self.world_size)[0][self.rank][0].to(self.device)
        with self.assertRaisesRegex(RuntimeError, r"'Linear' before any forward of its FSDP root"):
            fsdp_partial_backwards(model.lm_head).__enter__()
        hidden = model(inputs).detach()
        reset_iteration(model)
        before = s.policies(model)
        head, name = model.lm_head, "norm, lm_head"
        with (
            self.assertRaisesRegex(RuntimeError, rf"nested .*'{name}'"),
            fsdp_partial_backwards(head),
            fsdp_partial_backwards(model.norm),
        ):
            pass
        reset_iteration(model)
        with (
            self.assertRaisesRegex(RuntimeError, rf"never called .*'{name}'"),
            fsdp_partial_backwards(head) as hooks,
        ):
            hooks.after_forward(head(hidden)).sum().backward()
        reset_iteration(model)
        with (
            self.assertRaisesRegex(RuntimeError, rf"called twice .*'{name}'"),
            fsdp_partial_backwards(head) as hooks,
        ):
            hooks.before_last_forward()
            hooks.before_last_forward()
        reset_iteration(model)
        with (
            self.assertRaisesRegex(RuntimeError, "no forward followed"),
            fsdp_partial_backwards(head) as hooks,
        ):
            hooks.before_last_forward()
        reset_iteration(model)
        with fsdp_partial_backwards(head) as hooks:
            hooks.before_last_forward()
            late = hooks.after_forward(head(hidden)).sum()
        with self.assertRaisesRegex(RuntimeError, rf"'{name}' after its .* scope was left"):
            late.backward()
        with self.assertRaisesRegex(RuntimeError, "was left; call it inside"):
            hooks.before_last_forward()
        reset_iteration(model)
        model.norm(hidden)  # the group's forward is under way
        with self.assertRaisesRegex(
            RuntimeError, rf"'{name}' while .* is under way.* reset_iteration"
        ):
            fsdp_partial_backwards(head).__enter__()
        reset_iteration(model)
        with self.assertRaisesRegex(ValueError, "'compatible', 'coalesced', got 'both'"):
            fsdp_partial_backwards(head, reduction="both").__enter__()
        with self.assertRaisesRegex(RuntimeError, "root FSDP module"):
            reset_iteration(model.layers["0"])
        self.assertEqual(s.policies(model), before)
        self.assert_clean(model)
        # And it still trains.
        self.compare(case, model, loss_fn, s.make_model(case, device=self.device))

    def test_modules_that_are_not_fsdp_get_hooks_that_do_nothing(self) -> None:
        head = nn.Linear(s.DIM, s.VOCAB).to(self.device)
        x = torch.ones(1, s.DIM, device=self.device)
        with s.Collectives() as collectives, fsdp_partial_backwards(head) as hooks:
            y = head(x)
            self.assertIs(hooks.after_forward(y), y)
            hooks.before_last_forward()
        self.assertEqual(collectives.counts, Counter())
        self.assertIs(complete_fsdp_grouped_forward(head, y), y)
        reset_iteration(head)
