"""LifecycleChunkedLoss on two Gloo ranks: DTensors, SPMD types, FSDP, and torchtitan's trainer."""

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from spmd_types.checker import typecheck
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import get_spmd_backend, set_spmd_backend

from tests import scenarios as s
from tests.ranks import GlooTest
from tests.scenarios import Case
from titan_lifecycle import LifecycleChunkedLoss
from titan_lifecycle.losses.from_weight import HeadWeightLoss, LinearCrossEntropyLoss

BATCH, DIM, VOCAB = 2, 8, 32
EVEN = {"num_chunks": 4}
CONFIGS = [EVEN, {"num_chunks": 3}, {"chunk_tokens": 3}]  # of 8 tokens


def make_inputs(length=8):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, length, DIM, generator=generator)
    labels = torch.randint(VOCAB, (BATCH, length), generator=generator)
    labels[0, 0] = labels[1, length // 2] = IGNORE_INDEX
    return hidden, labels, (labels != IGNORE_INDEX).sum()


def make_head(*, bias=False):
    torch.manual_seed(0)
    return nn.Linear(DIM, VOCAB, bias=bias)


@contextmanager
def spmd_backend(name):
    previous = get_spmd_backend()
    set_spmd_backend(name)
    try:
        yield
    finally:
        set_spmd_backend(previous)


def make_losses(config, head):
    """Ours and, where lengths divide, torchtitan's."""
    inner = CrossEntropyLoss.Config(global_vocab_size=VOCAB)
    losses = [LifecycleChunkedLoss.Config(**config, loss_fn=inner).build()]
    if config is EVEN:
        losses.append(ChunkedLossWrapper.Config(**config, loss_fn=inner).build())
    for loss in losses:
        loss.set_lm_head(head)
    return losses


def reference(length=8, *, bias=False):
    """Loss, hidden gradient and head gradients with full logits, nothing parallel."""
    hidden, labels, tokens = make_inputs(length)
    head = make_head(bias=bias)
    hidden.requires_grad_()
    loss = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum") / tokens
    loss.backward()
    return loss.detach(), hidden.grad, {n: p.grad for n, p in head.named_parameters()}


def whole(tensor):
    return s.full(tensor.detach())


def constant_if_ignored(logits, labels, tokens, **loss_inputs):
    if (labels == IGNORE_INDEX).all():
        return torch.zeros(()), {}
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / tokens, {}


def requires_grad_all_the_same(logits, labels, tokens):
    loss, metrics = constant_if_ignored(logits, labels, tokens)
    return loss if loss.requires_grad else torch.zeros((), requires_grad=True), metrics


class ConstantIfIgnored(LinearCrossEntropyLoss):
    def __call__(self, pred, labels, global_valid_tokens=None, **kwargs):
        if (labels == IGNORE_INDEX).all():
            return torch.zeros(()), {}
        return super().__call__(pred, labels, global_valid_tokens, **kwargs)


@instantiate_parametrized_tests
class TestParallel(GlooTest):
    world_size = 2

    def check(self, loss_fns, hidden, gradient_of, inputs, head, expected):
        """Every loss gives the expected values, and all of them the same bits."""
        results = []
        for loss_fn in loss_fns:
            hidden.grad = None
            head.zero_grad()
            loss, metrics = loss_fn(gradient_of(hidden), *inputs)
            self.assertEqual(metrics, {})
            loss.backward()
            gradients = {n: whole(p.grad) for n, p in head.named_parameters()}
            results.append((whole(loss), whole(hidden.grad), gradients))
        torch.testing.assert_close(results[0], expected)
        torch.testing.assert_close(results[0], results[-1], rtol=0, atol=0)

    # --- DTensors ------------------------------------------------------------------------------

    @parametrize("config", CONFIGS)
    @parametrize("bias", [False, True])
    @spmd_backend("partial_dtensor")
    def test_partial_dtensor_with_a_colwise_head(self, config, bias) -> None:
        """Replicated hidden states, vocabulary-parallel logits, labels that are plain tensors."""
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        head = parallelize_module(
            make_head(bias=bias),
            mesh,
            ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        )
        hidden, labels, tokens = make_inputs()
        hidden = distribute_tensor(hidden, mesh, [Replicate()]).requires_grad_()
        losses = make_losses(config, head)
        self.check(losses, hidden, lambda h: h * 1, (labels, tokens), head, reference(bias=bias))

    @spmd_backend("partial_dtensor")
    def test_partial_dtensor_gradients_stay_partial_sums_until_the_decoder(self) -> None:
        """The buffer has the placements of the chunks' gradients, not of the hidden states."""
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        head = parallelize_module(
            make_head(), mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        )
        hidden, labels, tokens = make_inputs()
        hidden = distribute_tensor(hidden, mesh, [Replicate()]).requires_grad_()
        placements = []

        class Decoder(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, gradient):
                placements.append(gradient.placements)
                return gradient

        for loss_fn in make_losses(EVEN, head):
            loss_fn(Decoder.apply(hidden), labels, tokens)[0].backward()
        self.assertEqual(placements, [(Partial(),)] * 2)

    def test_plain_hidden_states_for_a_head_of_dtensors(self) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        head = make_head()
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
        hidden, labels, tokens = make_inputs()
        (loss_fn, _) = make_losses(EVEN, head)
        with self.assertRaisesRegex(ValueError, r"a DTensor .* prediction 0, .* is a plain tensor"):
            loss_fn(hidden, labels, tokens)

    @parametrize("config", CONFIGS)
    @parametrize("placement", [Replicate(), Shard(1), Shard(0)])
    @parametrize("head_placement", [Replicate(), Shard(0)])
    @spmd_backend("full_dtensor")
    def test_full_dtensor(self, config, placement, head_placement) -> None:
        """Each rank splits its own 8 tokens of a sequence-sharded DTensor, chunk by chunk."""
        if head_placement.is_shard() and placement.is_shard():
            # One mesh axis shards one thing: a vocabulary-parallel head has an axis of its own.
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("cp", "tp"))
            placements, head_placements = [placement, Replicate()], [Replicate(), head_placement]
        else:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            placements, head_placements = [placement], [head_placement]
        length = 16 if placement == Shard(1) and mesh.ndim == 1 else 8
        hidden, labels, tokens = make_inputs(length)
        head = make_head()
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, head_placements))
        hidden = distribute_tensor(hidden, mesh, placements).requires_grad_()
        labels = distribute_tensor(labels, mesh, placements)
        tokens = distribute_tensor(tokens, mesh, [Replicate()] * mesh.ndim)
        lengths = []
        head.register_forward_pre_hook(lambda _, args: lengths.append(args[0].to_local().shape[1]))
        losses = make_losses(config, head)
        self.check(losses, hidden, lambda h: h * 1, (labels, tokens), head, reference(length))
        self.assertEqual(lengths, [2, 2, 2, 2] * len(losses) if config is EVEN else [3, 3, 2])

    @spmd_backend("full_dtensor")
    def test_full_dtensor_with_several_predictions(self) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        hidden, labels, tokens = make_inputs(10)
        head = make_head()
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Replicate()]))
        hidden = distribute_tensor(hidden, mesh, [Shard(1)]).requires_grad_()
        labels = distribute_tensor(labels, mesh, [Shard(1)])
        (loss_fn,) = make_losses({"num_chunks": 3}, head)
        inner = loss_fn.loss_fn

        def sum_of_two(logits, labels, tokens, positions):
            self.assertEqual(positions.shape, logits[0].to_local().shape[:2])
            losses = [inner(*both, tokens)[0] for both in zip(logits, labels, strict=True)]
            return losses[0] + losses[1], {}

        loss_fn.loss_fn = sum_of_two
        tokens = distribute_tensor(tokens, mesh, [Replicate()])
        positions = torch.arange(5).expand(BATCH, 5)  # of this rank's part, a plain tensor
        pair = (hidden * 1, hidden * 1)
        loss_fn(pair, (labels, labels), tokens, positions=positions)[0].backward()
        _, gradient, weights = reference(10)
        torch.testing.assert_close(whole(hidden.grad), 2 * gradient)
        torch.testing.assert_close(whole(head.weight.grad), 2 * weights["weight"])

    def test_a_head_that_treats_chunks_differently_is_refused(self) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        hidden, labels, _ = make_inputs()
        hidden = distribute_tensor(hidden, mesh, [Replicate()]).requires_grad_()

        class Changing(nn.Module):
            calls = 0

            def forward(self, x):
                self.calls += 1
                x = x * 1  # its gradient is what the chunk gets
                if self.calls > 1:
                    return x.to_local(grad_placements=[Partial()])
                return x.to_local()

        loss_fn = LifecycleChunkedLoss.Config(num_chunks=2).build()
        loss_fn.set_lm_head(Changing())
        loss_fn.loss_fn = lambda logits, *_: (logits.sum(), {})
        with self.assertRaisesRegex(
            RuntimeError, "placements .*Partial.* after .*Replicate.*alike"
        ):
            loss_fn(hidden, labels)

    # --- SPMD types ----------------------------------------------------------------------------

    def run_with_types(self, make_losses):
        """Each loss with its head's rows split over the ranks, under strict type checking."""
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        group = mesh.get_group("tp")
        head = nn.Linear(DIM, VOCAB // 2, bias=False)
        head.weight.data.copy_(make_head().weight.data.chunk(2)[self.rank])
        results = []
        for loss_fn in make_losses(head):
            hidden, labels, tokens = make_inputs()
            hidden.requires_grad_()
            head.zero_grad()
            with set_current_spmd_mesh(mesh):
                spmd.assert_type(hidden, {group: spmd.R})
                spmd.assert_type(labels, {group: spmd.I})
                spmd.assert_type(tokens, {group: spmd.I})
                spmd.assert_type(head.weight, {group: spmd.S(0)})
                with typecheck(strict_mode="strict", local=False):
                    loss, _ = loss_fn(hidden, labels, tokens)
            loss.backward()
            gradient = hidden.grad.clone()
            dist.all_reduce(gradient, group=group)
            results.append((loss.detach(), gradient, head.weight.grad.clone()))
        return results

    @parametrize("config", CONFIGS)
    @spmd_backend("spmd_types")
    def test_spmd_types_with_a_vocabulary_parallel_head(self, config) -> None:
        """torchtitan's default backend."""
        results = self.run_with_types(lambda head: make_losses(config, head))
        loss, gradient, weights = reference()
        expected = (loss, gradient, weights["weight"].chunk(2)[self.rank])
        torch.testing.assert_close(results[0], expected)
        torch.testing.assert_close(results[0], results[-1], rtol=0, atol=0)

    @spmd_backend("spmd_types")
    def test_spmd_types_with_a_constant_chunk(self) -> None:
        def make(head):
            loss_fn, _ = make_losses(EVEN, head)
            inner = loss_fn.loss_fn
            num_calls = 0

            def first_is_constant(*args):
                nonlocal num_calls
                num_calls += 1
                loss, metrics = inner(*args)
                return (loss.detach() if num_calls == 1 else loss), metrics

            loss_fn.loss_fn = first_is_constant
            return [loss_fn]

        ((loss, gradient, _),) = self.run_with_types(make)
        expected_loss, expected, _ = reference()
        expected[:, :2] = 0  # the first of four chunks
        torch.testing.assert_close((loss, gradient), (expected_loss, expected))

    @spmd_backend("spmd_types")
    def test_a_wrong_type_is_still_found(self) -> None:
        """The type checking of the test above is on: labels of another type are refused."""
        mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
        group = mesh.get_group("tp")
        head = nn.Linear(DIM, VOCAB // 2, bias=False)
        (loss_fn, _) = make_losses(EVEN, head)
        hidden, labels, _ = make_inputs()
        with set_current_spmd_mesh(mesh):
            spmd.assert_type(hidden, {group: spmd.R})
            spmd.assert_type(labels, {group: spmd.P})
            spmd.assert_type(head.weight, {group: spmd.S(0)})
            with typecheck(strict_mode="strict", local=False):
                self.assertRaises(spmd.SpmdTypeError, loss_fn, hidden, labels)

    # --- FSDP ----------------------------------------------------------------------------------

    @parametrize("inner", ["constant", "constant_from_weight", "requires_grad_all_the_same"])
    @parametrize("freeze", ["none", "decoder"])
    @parametrize("reduction", ["compatible", "coalesced"])
    def test_constant_losses_of_ignored_labels(self, inner, freeze, reduction) -> None:
        """One rank has nothing to learn, the other an ignored chunk: collectives are the same."""
        case = Case(freeze=freeze, reduction=reduction)
        model = s.shard(s.make_model(case), s.make_mesh("fsdp", "cpu"))
        loss_fn = s.make_loss(case)
        loss_fn.loss_fn = {
            "constant": constant_if_ignored,
            "constant_from_weight": ConstantIfIgnored(LinearCrossEntropyLoss.Config()),
            "requires_grad_all_the_same": requires_grad_all_the_same,
        }[inner]
        loss_fn.set_lm_head(model.lm_head)
        batches = s.make_batches(1, 2)
        (_, ignored), (_, some_ignored) = batches[0]
        ignored.fill_(IGNORE_INDEX)
        some_ignored[:, 2:4] = IGNORE_INDEX
        result = s.run_step(model, loss_fn, case, batches, rank=self.rank)
        expected_loss, expected = s.reference_step(s.make_model(case), batches)
        if self.rank == 0:
            self.assertEqual(result.loss.item(), 0.0)
        torch.testing.assert_close(s.sum_over_ranks(result.loss), expected_loss)
        torch.testing.assert_close(s.gradients(model), expected)
        counts = [None, None]
        dist.all_gather_object(counts, dict(result.total))
        self.assertEqual(counts[0], counts[1])
        self.assertGreater(counts[0]["reduce_scatter"], 0)

    def test_inputs_of_a_loss_from_the_weight_keep_their_dtype(self) -> None:
        """FSDP casts what the head is called with: 257 tokens are 256 in bfloat16."""
        seen = []

        class FromWeight(HeadWeightLoss):
            def __init__(self):
                pass

            def __call__(self, pred, labels, global_valid_tokens=None, **inputs):
                tensors = (pred, global_valid_tokens, inputs["scale"], inputs["weight"])
                seen.append((*(t.dtype for t in tensors), global_valid_tokens.item()))
                return F.linear(pred, inputs["weight"]).float().sum() / global_valid_tokens, {}

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
        head = fully_shard(make_head(), mp_policy=policy)
        hidden, labels, _ = make_inputs()
        head(hidden)  # initializes the root
        loss_fn = LifecycleChunkedLoss.Config(num_chunks=2).build()
        loss_fn.loss_fn = FromWeight()
        loss_fn.set_lm_head(head)
        loss_fn(hidden, labels, torch.tensor(257.0), scale=torch.ones(BATCH, 8))
        bf16, fp32 = torch.bfloat16, torch.float32
        self.assertEqual(seen, [(bf16, fp32, fp32, bf16, 257.0)] * 2)


# --- torchtitan's trainer ----------------------------------------------------------------------

# Run by python -c on each rank, since torchtitan's device is settled before its first import.
TRAIN = """
import json, os, sys
from titan_lifecycle import cpu_backend
cpu_backend.activate()
import spmd_types as spmd
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.llama3.config_registry import llama3_debugmodel
import titan_lifecycle
from titan_lifecycle import LifecycleChunkedLoss, data
from titan_lifecycle.cpu_backend import overrides

data.register()
config = llama3_debugmodel()
config.hf_assets_path = titan_lifecycle.__path__[0] + "/assets/tokenizer"
config.dump_folder = sys.argv[1]
config.dataloader.dataset = "lifecycle_fixed"
config.training.local_batch_size, config.training.seq_len = 2, 64
config.training.mixed_precision_param = "float32"
config.training.disable_cuda_graphs = True
config.parallelism.tensor_parallel_degree = 2
config.parallelism.spmd_backend = "spmd_types"
config.debug.spmd_typechecking = True
config.debug.seed = 42
config.activation_checkpoint = None  # torchtitan refuses its default with type checking
config.validator.enable = False
inner = config.loss.loss_fn
config.loss = LifecycleChunkedLoss.Config(loss_fn=inner)
trainer = cpu_backend.adapt(config).build()
ours = trainer.loss_fn
batch = next(iter(trainer.dataloader))

# The CPU backend's mask is computed by operations that the type checker does not know.
dense_mask = overrides._dense_mask


@spmd.no_typecheck()
def typed_mask(block_mask):
    mask = dense_mask(block_mask)
    spmd.assert_type(mask, {"tp": spmd.R})
    return mask


overrides._dense_mask = typed_mask
parameters = dict(trainer.model_parts[0].named_parameters())


def step(loss_fn):
    loss_fn.set_lm_head(ours.lm_head)
    trainer.loss_fn = loss_fn
    inputs, labels = batch
    loss = trainer.forward_backward_step(
        input_dict=dict(inputs), labels=labels, global_valid_tokens=torch.tensor(labels.numel())
    )
    gradients = {}
    for name, p in parameters.items():
        gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        gradients[name], p.grad = gradient.clone(), None
    return loss.detach(), gradients


losses = {
    "stock": ChunkedLossWrapper.Config(loss_fn=inner).build(),
    "ours": ours,
    "uneven": LifecycleChunkedLoss.Config(chunk_tokens=24, loss_fn=inner).build(),
}
results = {name: step(loss_fn) for name, loss_fn in losses.items()}
loss, gradients = results["stock"]
report = {
    "ours": type(ours).__name__,
    "head rows": ours.lm_head.weight.to_local().shape[0],
    "losses": {name: loss.item() for name, (loss, _) in results.items()},
    "num_gradients": len(gradients),
    "other bits": [n for n, g in gradients.items() if not torch.equal(g, results["ours"][1][n])],
    "uneven": max((g - results["uneven"][1][n]).abs().max().item() for n, g in gradients.items()),
}
with open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w") as file:
    json.dump(report, file)
trainer.close()
dist.destroy_process_group()
"""


@pytest.mark.jobs
def test_torchtitans_trainer_with_a_vocabulary_parallel_head_and_type_checking(tmp_path):
    """llama3's debug model on two tensor-parallel ranks: the stock wrapper's bits."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(tmp_path)],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for report in reports:
        losses = report["losses"]
        assert report["ours"] == "LifecycleChunkedLoss"
        assert report["head rows"] == 1024  # of 2048
        assert losses["ours"] == losses["stock"] > 0
        assert report["num_gradients"] > 40
        assert report["other bits"] == []
        assert losses["uneven"] == pytest.approx(losses["stock"], rel=1e-6)
        assert report["uneven"] < 1e-5
    assert reports[0]["losses"] == reports[1]["losses"]
