"""Multi-token prediction through the chunked loss, against torchtitan's MTPLoss on full logits.

The model is torchtitan's deepseek_v3 with MTP layers, small, sharded by torchtitan. Its layers are
dense: the experts of torchtitan's MoE compute in bfloat16, whose rounding would hide what differs
here. The shipped job, at the end, has them.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
from spmd_types.checker import typecheck
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.deepseek_v3 import make_mla_attention_config, model_registry
from torchtitan.models.deepseek_v3.config_registry import (
    deepseek_v3_debugmodel,
    deepseek_v3_debugmodel_mtp,
)
from torchtitan.models.deepseek_v3.mtp import MTPLoss, apply_fsdp_to_mtp_decoder

from tests import scenarios as s
from tests.cpu.conftest import runner
from tests.ranks import GlooTest
from titan_lifecycle.losses.choice import choose_loss
from titan_lifecycle.losses.chunked import LifecycleChunkedLoss
from titan_lifecycle.losses.mtp import MTPChunkedLoss, return_hidden_states
from titan_lifecycle.measure.collectives import CollectiveCounter
from titan_lifecycle.overrides import CHUNKED_MTP_LOSS
from titan_lifecycle.trainer import LifecycleConfig, LifecycleTrainer, lifecycle_config

VOCAB, DIM, BATCH, LENGTH = 64, 32, 2, 12
SCALE = 0.3
# Lengths of the documents packed into each sequence; the third is shorter than the greatest depth.
DOCUMENTS = ((5, 7), (3, 1, 2, 6))
EVEN, UNEVEN, TOKENS = {"num_chunks": 4}, {"num_chunks": 5}, {"chunk_tokens": 5}
# Sums in another order, in float32: of a tensor's norm, since single elements cancel.
TOLERANCE = 2e-6


def make_model(depth: int, *, seed: int = 0) -> nn.Module:
    """torchtitan's deepseek_v3 with two dense layers and ``depth`` dense MTP layers."""
    config = model_registry("debugmodel", num_mtp_layers=depth).model
    init = {"weight": nn.init.normal_, "bias": nn.init.zeros_}
    attention = make_mla_attention_config(
        layer_id=0,
        dim=DIM,
        n_heads=2,
        q_lora_rank=0,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        attn_backend="flex",
        linear_init=init,
        norm_init={"weight": nn.init.ones_},
        depth_init=lambda _: init,
        rope=ComplexRoPE.Config(dim=8, max_seq_len=LENGTH),
    )
    # FlexAttention has no backward on the CPU. Attention across documents is the same for all.
    attention.inner_attention = ScaledDotProductAttention.Config()
    ffn = make_ffn_config(dim=DIM, hidden_dim=48, w1_param_init=init, w2w3_param_init=init)
    del config.layers[2:]
    for layer in [*config.layers, *config.mtp_layers]:
        layer.attention, layer.feed_forward = copy.deepcopy(attention), copy.deepcopy(ffn)
        layer.moe = None
        for norm in ("attention_norm", "ffn_norm", "enorm", "hnorm", "mtp_norm"):
            if hasattr(layer, norm):
                getattr(layer, norm).normalized_shape = DIM
        if hasattr(layer, "eh_proj"):
            layer.eh_proj.in_features, layer.eh_proj.out_features = 2 * DIM, DIM
    config.norm.normalized_shape = DIM
    config.lm_head.in_features, config.lm_head.out_features = DIM, VOCAB
    config.tok_embeddings.num_embeddings, config.tok_embeddings.embedding_dim = VOCAB, DIM
    torch.manual_seed(seed)
    model = config.build()
    model.init_states()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1).add_(parameter.ndim == 1)
    return model


def make_batches(num_microbatches: int, num_ranks: int, *, seed: int = 1):
    """``[microbatch][rank] -> (tokens, labels, positions)``; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])

    def batch():
        tokens, labels = torch.randint(VOCAB, (2, BATCH, LENGTH), generator=generator)
        labels[0, 1] = labels[1, -1] = IGNORE_INDEX
        return tokens, labels, positions

    return [[batch() for _ in range(num_ranks)] for _ in range(num_microbatches)]


def num_valid(batches) -> torch.Tensor:
    return torch.stack([(b[1] != IGNORE_INDEX).sum() for row in batches for b in row]).sum()


def full_logits_step(model, batches) -> torch.Tensor:
    """The loss of the whole global batch by torchtitan's MTPLoss, on one process; gradients."""
    loss_fn, tokens, total = MTPLoss.Config(mtp_scale=SCALE).build(), num_valid(batches), 0
    for row in batches:
        for inputs, labels, positions in row:
            loss, _ = loss_fn(model(inputs, positions), labels, tokens, positions=positions)
            loss.backward()
            total = total + loss.detach()
    return total


def full_logits_terms(model, batches) -> dict[str, torch.Tensor]:
    """Each objective by itself, by a weight of 0 and by differences of MTPLoss."""
    tokens, terms = num_valid(batches), Counter()
    main_only, with_one = (MTPLoss.Config(mtp_scale=scale).build() for scale in (0.0, 1.0))
    with torch.no_grad():
        for inputs, labels, positions in (b for row in batches for b in row):
            logits = model(inputs, positions)
            main = main_only(logits, labels, tokens, positions=positions)[0]
            terms["loss/main_mean"] += main
            previous = main
            for depth in range(1, len(logits)):
                # MTPLoss of the first predictions: main + the mean over their depths.
                both = with_one(logits[: depth + 1], labels, tokens, positions=positions)[0]
                total = main + (both - main) * depth
                terms[f"loss/mtp_{depth}_mean"] += total - previous
                previous = total
    return dict(terms)


def make_loss(model, **config) -> MTPChunkedLoss:
    """The loss with its head, set up as torchtitan's trainer and ours do."""
    loss_fn = MTPChunkedLoss.Config(loss_fn=MTPLoss.Config(mtp_scale=SCALE), **config).build()
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return_hidden_states(model)
    return loss_fn


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str = "loss") -> None:
    assert actual.shape == expected.shape
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error < TOLERANCE, f"{name} differs by {error:.1e} of its norm"


def assert_same(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, name)


# --- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunks", [EVEN, UNEVEN, TOKENS], ids=str)
def test_as_full_logits(depth, chunks):
    """Loss, terms and every gradient; the head never sees more than a chunk."""
    reference, model = make_model(depth), make_model(depth)
    batches = make_batches(1, 1)
    ((inputs, labels, positions),) = batches[0]
    loss_fn = make_loss(model, **chunks)
    lengths: Counter[int] = Counter()
    model.lm_head.register_forward_pre_hook(lambda _, args: lengths.update([args[0].shape[1]]))
    largest = watch_logits(model)
    loss, metrics = loss_fn(
        model(inputs, positions), labels, num_valid(batches), positions=positions
    )
    loss.backward()
    assert_close(loss.detach(), full_logits_step(reference, batches))
    assert_same(s.gradients(model), s.gradients(reference))
    assert_same(metrics, full_logits_terms(reference, batches))
    weighted = SCALE / depth * sum(metrics[f"loss/mtp_{k}_mean"] for k in range(1, depth + 1))
    assert_close(loss.detach(), metrics["loss/main_mean"] + weighted)
    sizes = {str(EVEN): {3: 4}, str(UNEVEN): {3: 2, 2: 3}, str(TOKENS): {5: 2, 2: 1}}[str(chunks)]
    assert lengths == {length: n * (depth + 1) for length, n in sizes.items()}
    assert max(largest) == max(sizes) * BATCH * VOCAB


def watch_logits(model) -> list[int]:
    """Sizes of what the head returns."""
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda _, __, out: sizes.append(out.numel()))
    return sizes


@pytest.mark.parametrize("depth", [1, 2])
def test_labels_do_not_cross_documents(depth):
    """By hand: a token counts for depth k if its document goes on for k more tokens."""
    model = make_model(depth)
    ((_, labels, positions),) = make_batches(1, 1)[0]
    loss_fn = make_loss(model, num_chunks=4)
    seen: list[list[torch.Tensor]] = [[] for _ in range(depth + 1)]
    inner = loss_fn.loss_fn

    def spy(pred, labels, tokens, **kwargs):
        for k, chunk in enumerate(labels):
            seen[k].append(chunk)
        return inner(pred, labels, tokens, **kwargs)

    loss_fn.loss_fn = spy
    hiddens = [torch.randn(BATCH, LENGTH, DIM, requires_grad=True) for _ in range(depth + 1)]
    loss_fn(hiddens, labels, positions=positions)
    for k, chunks in enumerate(seen):
        expected = torch.full_like(labels, IGNORE_INDEX)
        for row, lengths in enumerate(DOCUMENTS):
            start = 0
            for length in lengths:
                for i in range(start, start + length - k):
                    expected[row, i] = labels[row, i + k]
                start += length
        assert torch.equal(torch.cat(chunks, dim=1), expected)


def test_without_gradients_nothing_is_backpropagated():
    reference, model = make_model(1), make_model(1)
    batches = make_batches(1, 1)
    ((inputs, labels, positions),) = batches[0]
    loss_fn = make_loss(model)
    with torch.no_grad():
        loss, _ = loss_fn(model(inputs, positions), labels, num_valid(batches), positions=positions)
    assert_close(loss, full_logits_step(reference, batches))
    assert s.gradients(model) == {}


def test_the_head_is_back_after_every_forward():
    model = make_model(1)
    make_loss(model)
    names, head = list(model.state_dict()), model.lm_head
    ((inputs, _, positions),) = make_batches(1, 1)[0]
    assert [h.shape for h in model(inputs, positions)] == [(BATCH, LENGTH, DIM)] * 2
    assert (list(model.state_dict()), model.lm_head) == (names, head)
    with pytest.raises(IndexError):
        model(inputs + VOCAB, positions)
    assert (list(model.state_dict()), model.lm_head, model._skip_lm_head) == (names, head, True)
    # As torchtitan's forward where the head is not skipped, as for generation.
    model._skip_lm_head = False
    assert [h.shape for h in model(inputs, positions)] == [(BATCH, LENGTH, VOCAB)] * 2


def test_without_the_override_torchtitan_refuses():
    model = make_model(1)
    model._skip_lm_head = True
    ((inputs, _, positions),) = make_batches(1, 1)[0]
    with pytest.raises(ValueError, match="skip_lm_head is not supported with MTP decoder"):
        model(inputs, positions)


def test_what_cannot_be_computed_is_refused():
    model = make_model(1)
    loss_fn = make_loss(model)
    ((inputs, labels, positions),) = make_batches(1, 1)[0]
    hiddens = model(inputs, positions)
    for pred in (hiddens[0], hiddens[:1]):
        with pytest.raises(ValueError, match="at least one MTP layer; use a model with MTP"):
            loss_fn(pred, labels, positions=positions)
    with pytest.raises(ValueError, match=r"needs positions.*pass positions="):
        loss_fn(hiddens, labels)
    with pytest.raises(ValueError, match=r"loss\.loss_fn is a .*MTPChunkedLoss takes torchtitan"):
        MTPChunkedLoss.Config(loss_fn=ChunkedLossWrapper.Config())
    with pytest.raises(TypeError, match="takes torchtitan's MTPDecoder, got a Linear"):
        return_hidden_states(nn.Linear(1, 1))


# --- configs -------------------------------------------------------------------------------------


def mtp_config(**fields):
    """A job's config with the override; ``fields`` are of the trainer's config."""
    config = deepseek_v3_debugmodel_mtp()
    config.training.disable_cuda_graphs = True
    config.override = OverrideConfig(imports=[CHUNKED_MTP_LOSS])
    for name, value in fields.items():
        setattr(config, name, value)
    return lifecycle_config(config)


def test_the_override_keeps_torchtitans_settings():
    config = mtp_config()
    config.loss.mtp_scale = 0.7
    config.override.imports[0] = (CHUNKED_MTP_LOSS, {"chunk_tokens": 16})
    apply_overrides(config.override, config)
    assert type(config.loss) is MTPChunkedLoss.Config
    assert config.loss.chunk_tokens == 16
    loss_fn = config.loss.build()
    assert isinstance(loss_fn, LifecycleChunkedLoss)  # for torchtitan's trainer, a ChunkedLoss
    assert (loss_fn.loss_fn.mtp_scale, loss_fn.loss_fn.global_vocab_size) == (0.7, 2048)
    config.__post_init__()  # is still valid
    # Torchtitan's other losses are left alone.
    config = deepseek_v3_debugmodel()
    apply_overrides(OverrideConfig(imports=[CHUNKED_MTP_LOSS]), config)
    assert type(config.loss) is ChunkedLossWrapper.Config


def test_disabled_is_torchtitans_loss_on_full_logits():
    config = mtp_config()
    loss, override = choose_loss(config)
    assert (type(loss), override.imports) == (MTPChunkedLoss.Config, [])
    config.lifecycle = LifecycleConfig(enabled=False)
    config.override.imports.append(("other.override", {}))
    loss, override = choose_loss(config)
    assert override.imports == [("other.override", {})]
    assert type(loss) is MTPLoss.Config
    config.loss = MTPChunkedLoss.Config(loss_fn=config.loss)
    assert type(choose_loss(config)[0]) is MTPLoss.Config


def test_what_cannot_work_is_refused_up_front():
    assert type(mtp_config()) is LifecycleTrainer.Config
    with pytest.raises(ValueError, match=r"override\.imports names .*but \[loss\] is a Life"):
        mtp_config(loss=ChunkedLossWrapper.Config())
    with pytest.raises(ValueError, match=r"needs a model with MTP layers; choose a job\.config"):
        mtp_config(model_spec=model_registry("debugmodel"))
    config = mtp_config()
    config.validator.enable = True
    with pytest.raises(ValueError, match=r"validator\.enable = true does not work with multi-tok"):
        config.__post_init__()


@pytest.mark.parametrize("kind", ["pipeline", "context"])
def test_torchtitan_refuses_pipelines_and_context_parallelism(kind):
    config = mtp_config()
    setattr(config.parallelism, f"{kind}_parallel_degree", 2)
    # torchtitan's own error, of what it has not built; nothing of this package is missing here.
    with pytest.raises(NotImplementedError, match=f"MTP does not support {kind} parallelism"):
        config.model_spec.model.update_from_config(config=config)


# --- ranks ---------------------------------------------------------------------------------------


def shard(model: nn.Module, kind: str) -> nn.Module:
    """Sharded by torchtitan, with the plain sums that Gloo needs."""
    precision = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    apply_fsdp_to_mtp_decoder(model, s.make_mesh(kind, "cpu"), pp_enabled=False, **precision)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    return model


class MTPRanks:
    """Tests on the ranks of one mesh, ``mesh``; the classes below start them."""

    mesh = "fsdp"

    def microbatch(self, model, loss_fn, batch, tokens):
        inputs, labels, positions = batch
        loss, metrics = loss_fn(model(inputs, positions), labels, tokens, positions=positions)
        loss.backward()
        return loss.detach(), metrics

    def check_steps(self, depth: int, accumulation: str, reduction: str, num_microbatches: int):
        """Three optimizer steps beside one process with full logits."""
        reference, model = make_model(depth), shard(make_model(depth), self.mesh)
        names = list(model.state_dict())
        loss_fn = make_loss(model, num_chunks=4, head_reduction=reduction)
        sizes = watch_logits(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
        counter, num_groups = CollectiveCounter([model]), 5 + depth - 1
        for seed in range(3):
            batches = make_batches(num_microbatches, self.world_size, seed=seed)
            tokens, total, terms = num_valid(batches), torch.zeros(()), Counter()
            expected_terms = full_logits_terms(reference, batches)
            counter.reset()
            for i, row in enumerate(batches):
                if accumulation == "last_microbatch":
                    model.set_requires_gradient_sync(i == len(batches) - 1)
                with counter:
                    loss, metrics = self.microbatch(model, loss_fn, row[self.rank], tokens)
                total = total + loss
                terms.update(metrics)
            assert_close(s.sum_over_ranks(total), full_logits_step(reference, batches))
            assert_same({k: s.sum_over_ranks(v) for k, v in terms.items()}, expected_terms)
            # The whole gradients, hence every shard.
            assert_same(s.gradients(model), s.gradients(reference))
            self.assertEqual(s.num_trainable_groups(model), num_groups)
            # Where the head may be reduced in the loop, its norm comes later: one more.
            apart = accumulation != "last_microbatch" and reduction == "compatible"
            reductions = num_groups + apart
            if accumulation != "last_microbatch":
                reductions *= num_microbatches
            calls = counter.counts.calls
            self.assertEqual(calls["reduce_scatter"], reductions)
            self.assertEqual(calls["all_reduce"], reductions if self.mesh == "hsdp" else 0)
            self.assertEqual(s.unsharded_groups(model), [])
            self.assertEqual(s.leftovers(model), [])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same(s.parameters(model), s.parameters(reference))
        self.assertEqual(max(sizes), BATCH * VOCAB * LENGTH // 4)
        self.assertEqual(list(model.state_dict()), names)


@instantiate_parametrized_tests
class TestFSDP(MTPRanks, GlooTest):
    world_size = 2

    @parametrize("depth", [1, 2])
    @parametrize("reduction", ["compatible", "coalesced"])
    def test_one_microbatch(self, depth, reduction) -> None:
        self.check_steps(depth, "every_microbatch", reduction, 1)

    @parametrize("depth", [1, 2])
    @parametrize("accumulation", ["every_microbatch", "last_microbatch"])
    def test_accumulation(self, depth, accumulation) -> None:
        self.check_steps(depth, accumulation, "compatible", 3)


@instantiate_parametrized_tests
class TestHSDP(MTPRanks, GlooTest):
    world_size = 4
    mesh = "hsdp"

    @parametrize("accumulation", ["every_microbatch", "last_microbatch"])
    def test_accumulation(self, accumulation) -> None:
        self.check_steps(2, accumulation, "compatible", 2)


class TestTypes(GlooTest):
    """torchtitan's default SPMD backend, with strict type checking."""

    world_size = 2

    def test_a_vocabulary_parallel_head(self) -> None:
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        group, depth = mesh.get_group("tp"), 2
        generator = torch.Generator().manual_seed(1)
        values = torch.randn(depth + 1, BATCH, LENGTH, DIM, generator=generator)
        weight = torch.randn(VOCAB, DIM, generator=generator)
        batches = make_batches(1, 1)
        ((_, labels, positions),) = batches[0]
        tokens = num_valid(batches)

        hiddens = [h.clone().requires_grad_() for h in values]
        whole = weight.clone().requires_grad_()
        expected, _ = MTPLoss.Config(mtp_scale=SCALE).build()(
            [h @ whole.T for h in hiddens], labels, tokens, positions=positions
        )
        expected.backward()

        head = nn.Linear(DIM, VOCAB // 2, bias=False)
        head.weight.data.copy_(weight.chunk(2)[self.rank])
        inner = MTPLoss.Config(mtp_scale=SCALE, global_vocab_size=VOCAB)
        loss_fn = MTPChunkedLoss.Config(num_chunks=5, loss_fn=inner).build()
        loss_fn.set_lm_head(head)
        ours = [h.clone().requires_grad_() for h in values]
        previous = get_spmd_backend()
        set_spmd_backend("spmd_types")
        try:
            with set_current_spmd_mesh(mesh):
                for hidden in ours:
                    spmd.assert_type(hidden, {group: spmd.R})
                for tensor in (labels, positions, tokens):
                    spmd.assert_type(tensor, {group: spmd.I})
                spmd.assert_type(head.weight, {group: spmd.S(0)})
                with typecheck(strict_mode="strict", local=False):
                    loss, _ = loss_fn(ours, labels, tokens, positions=positions)
            loss.backward()
        finally:
            set_spmd_backend(previous)
        assert_close(loss.detach(), expected.detach())
        assert_close(head.weight.grad, whole.grad.chunk(2)[self.rank], "head")
        for hidden, reference in zip(ours, hiddens, strict=True):
            dist.all_reduce(hidden.grad, group=group)
            assert_close(hidden.grad, reference.grad, "hidden states")


# --- the shipped job -----------------------------------------------------------------------------
@pytest.mark.jobs
def test_the_shipped_job(tmp_path):
    """Chunked beside full logits, with MoE layers in bfloat16, two microbatches of four ranks."""
    job = ("deepseek_v3_mtp_chunked", "--training.seq_len", "64", "--training.steps", "2")
    stock = ("--lifecycle.no-enabled", "--lifecycle.gradient-reduction", "every_microbatch")
    runs = []
    for name, extra in (("chunked", ()), ("full", stock)):
        (tmp_path / name).mkdir()
        run = runner(tmp_path / name)(*job, *extra)
        assert run.status == 0, run.output
        runs.append(run)
    chunked, full = (partial(run.scalars) for run in runs)
    losses = chunked("loss_metrics/global_avg_loss")
    assert losses == pytest.approx(full("loss_metrics/global_avg_loss"), rel=1e-4)
    assert losses[2] < losses[1] - 1
    main, mtp = chunked("loss/main_mean"), chunked("loss/mtp_1_mean")
    for step, loss in losses.items():
        assert main[step] + 0.3 * mtp[step] == pytest.approx(loss, rel=1e-6)
    assert set(chunked("lifecycle/reduce_scatter_calls").values()) == {9}
    assert set(full("lifecycle/reduce_scatter_calls").values()) == {18}
