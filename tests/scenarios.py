"""Scenarios of the FSDP lifecycle, shared by the CPU and the GPU tests: one definition each.

A small decoder with torchtitan's shape (embedding, blocks, norm, head), sharded as torchtitan
shards it, its reference on one process with full logits, and a counter of collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.loss import ChunkedLossWrapper

from titan_lifecycle.losses.chunked import LifecycleChunkedLoss

VOCAB, DIM, BATCH, LENGTH = 32, 16, 2, 8
NUM_CHUNKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Decoder(nn.Module):
    """tok_embeddings -> layers -> norm -> lm_head; any end may be missing, as in a stage."""

    def __init__(self, *, num_layers: int = 2, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(num_layers)})
        self.norm: nn.Module | None = nn.RMSNorm(DIM)
        self.lm_head: nn.Module | None = nn.Linear(DIM, VOCAB, bias=bias)
        self._skip_lm_head = True
        self.tied = tied
        if tied:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.lm_head is not None and not self._skip_lm_head:
            x = self.lm_head(x)
        return x


@dataclass(frozen=True, slots=True)
class Case:
    mesh: str = "fsdp"  # fsdp | hsdp
    grouping: str = "grouped"  # grouped | separate | tied
    freeze: str = "none"  # none | decoder | head
    accumulation: str = "plain"  # plain | deferred | partial (HSDP: all-reduce the last only)
    reduction: str = "compatible"
    bias: bool = False

    def __str__(self) -> str:
        parts = (self.mesh, self.grouping, self.freeze, self.accumulation, self.reduction)
        return "-".join(parts) + ("-bias" if self.bias else "")


def matrix() -> list[Case]:
    return [
        Case(mesh, grouping, freeze, accumulation, reduction)
        for mesh in ("fsdp", "hsdp")
        for grouping in ("grouped", "separate", "tied")
        for freeze in ("none", "decoder", "head")
        for accumulation in ("plain", "deferred", "partial")
        for reduction in ("compatible", "coalesced")
        if accumulation != "partial" or mesh == "hsdp"
    ]


# Each mesh makes process groups, which takes longer than a small case itself.
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def make_mesh(kind: str, device_type: str) -> DeviceMesh:
    """A mesh of all ranks, the same one for every case on this rank."""
    key = (kind, device_type, dist.group.WORLD)
    if key not in _meshes:
        size = dist.get_world_size()
        if kind == "hsdp":
            shape, names = (2, size // 2), ("dp_replicate", "dp_shard")
        else:
            shape, names = (size,), ("dp_shard",)
        _meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return _meshes[key]


def forget_meshes() -> None:
    """Make new meshes from now on: the process groups of the old ones are destroyed."""
    _meshes.clear()


def make_model(case: Case, *, device: torch.device | str = "cpu", seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(tied=case.grouping == "tied", bias=case.bias).to(device)
    assert model.lm_head is not None
    if case.freeze == "decoder":
        head = set(model.lm_head.parameters())
        for p in model.parameters():
            p.requires_grad_(p in head)
    elif case.freeze == "head":
        model.lm_head.requires_grad_(False)
    return model


def shard(
    model: Decoder,
    mesh: DeviceMesh,
    grouping: str = "grouped",
    *,
    head_reshard_after_forward: bool | int = False,
    reshard_after_forward: bool = True,
    **kwargs: Any,
) -> Decoder:
    """Shard as torchtitan does: blocks and embedding alone, norm and head together."""
    kwargs["mesh"] = mesh
    ends = [m for m in (model.norm, model.lm_head) if m is not None]
    if grouping == "tied":
        fully_shard(
            [m for m in (model.tok_embeddings, *ends) if m is not None],
            reshard_after_forward=head_reshard_after_forward,
            **kwargs,
        )
    else:
        if model.tok_embeddings is not None:
            fully_shard(model.tok_embeddings, reshard_after_forward=reshard_after_forward, **kwargs)
        if grouping == "grouped" and ends:
            fully_shard(ends, reshard_after_forward=head_reshard_after_forward, **kwargs)
        else:
            for m in ends:
                fully_shard(m, reshard_after_forward=head_reshard_after_forward, **kwargs)
    for layer in model.layers.values():
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **kwargs)
    fully_shard(model, **kwargs)
    for m in model.modules():
        if isinstance(m, FSDPModule):
            # As torchtitan: gradients are sums, the loss is divided by the global token count.
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
    return model


def make_loss(case: Case = Case(), **config: Any) -> LifecycleChunkedLoss:  # noqa: B008
    config.setdefault("num_chunks", NUM_CHUNKS)
    return LifecycleChunkedLoss.Config(head_reduction=case.reduction, **config).build()


def make_stock_loss() -> ChunkedLossWrapper:
    return ChunkedLossWrapper.Config(num_chunks=NUM_CHUNKS).build()


def make_batches(
    num_microbatches: int, num_ranks: int, *, seed: int = 1, length: int = LENGTH
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """``[microbatch][rank] -> (inputs, labels)``, some labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_microbatches):
        row = []
        for _ in range(num_ranks):
            inputs = torch.randint(VOCAB, (BATCH, length), generator=generator)
            labels = torch.randint(VOCAB, (BATCH, length), generator=generator)
            labels[0, 1] = -100
            row.append((inputs, labels))
        batches.append(row)
    return batches


def num_valid(batches: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Tensor:
    return torch.stack([(labels != -100).sum() for row in batches for _, labels in row]).sum()


def set_accumulation(model: Decoder, case: Case, *, is_last: bool) -> None:
    """What a trainer that accumulates sets before each microbatch."""
    assert isinstance(model, FSDPModule)
    if case.accumulation == "deferred":
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
    elif case.accumulation == "partial":
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)


def reference_step(
    model: Decoder, batches: list[list[tuple[torch.Tensor, torch.Tensor]]]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole global batch with full logits, on one process."""
    model.zero_grad()
    total = torch.zeros(())
    tokens = num_valid(batches)
    for row in batches:
        for inputs, labels in row:
            hidden = model(inputs)
            logits = model.lm_head(hidden)  # type: ignore[misc]
            loss = (
                F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
                / tokens
            )
            loss.backward()
            total = total + loss.detach()
    return total, gradients(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(p.detach()) for name, p in model.named_parameters()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class Collectives(TorchDispatchMode):
    """Counts collectives by operation, and records what each saw."""

    NAMES: ClassVar = {
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            self.counts[self.NAMES.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def policies(model: nn.Module) -> dict[str, Any]:
    """Every policy of every group, and of the root context, by value."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        for i, group in enumerate(state._fsdp_param_groups):
            found[f"{name}[{i}]"] = (
                group.reduce_grads,
                group.all_reduce_grads,
                group.reshard_after_backward,
                group.post_forward_mesh_info,
                state._auto_reshard_after_forward,
            )
        found["is_last_backward"] = state._state_ctx.is_last_backward
        found["all_states"] = [id(s) for s in state._state_ctx.all_states]
    return found


def sharded_states(model: nn.Module) -> dict[str, str]:
    """SHARDED, SHARDED_POST_FORWARD or UNSHARDED, by the FQN of the group."""
    return {
        f"{group._module_fqn or '<root>'}[{group._param_group_index}]": group._sharded_state.name
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    }


def unsharded_groups(model: nn.Module) -> list[str]:
    return [fqn for fqn, state in sharded_states(model).items() if state != "SHARDED"]


def leftovers(model: nn.Module) -> list[str]:
    """Markers that a finished iteration must not leave for the next one."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if state._modules_to_run_forward:
            found.append(f"{name}: modules_to_run_forward")
        if state._state_ctx.iter_forward_root is not None:
            found.append(f"{name}: iter_forward_root")
        context, comm = state._state_ctx, state._comm_ctx
        if context.post_backward_final_callback_queued:
            found.append(f"{name}: final callback queued")
        if context.manual_backward_finalization_active is not None:
            found.append(f"{name}: finalization mode latched")
        if comm._last_post_reduce_events or comm.reduce_scatter_states:
            found.append(f"{name}: reduction not waited for")
        if state._training_state.name != "IDLE":
            found.append(f"{name}: state {state._training_state.name}")
        for group in state._fsdp_param_groups:
            if group._training_state.name != "IDLE":
                found.append(f"{name}: group {group._training_state.name}")
            if group._all_gather_result is not None:
                found.append(f"{name}: all-gather in flight")
            if group._partial_reduce_output is not None:
                found.append(f"{name}: partial reduce output")
            if group._post_backward_pending:
                found.append(f"{name}: post-backward pending")
    return found


def unfinished_order(model: nn.Module) -> list[str]:
    """What the end of an iteration clears and an evaluation, having no backward, does not."""
    found = [g._module_fqn for g in model._get_fsdp_state()._comm_ctx.post_forward_order]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found += [f"{group._module_fqn}: {i}" for i in group._post_forward_indices]
    return found


def num_trainable_groups(model: nn.Module) -> int:
    seen = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if any(p.sharded_param.requires_grad for p in group.fsdp_params):
                    seen.add(id(group))
    return len(seen)


@dataclass(slots=True)
class StepResult:
    loss: torch.Tensor
    counts: list[Counter[str]] = field(default_factory=list)

    @property
    def total(self) -> Counter[str]:
        return sum(self.counts, Counter())


def run_step(
    model: Decoder,
    loss_fn: Any,
    case: Case,
    batches: list[list[tuple[torch.Tensor, torch.Tensor]]],
    *,
    rank: int,
    device: torch.device | str = "cpu",
    before_microbatch: Callable[[int], None] | None = None,
) -> StepResult:
    """One optimizer step's forwards and backwards; collectives counted per microbatch."""
    tokens = num_valid(batches).to(device)
    result = StepResult(torch.zeros((), device=device))
    for i, row in enumerate(batches):
        set_accumulation(model, case, is_last=i == len(batches) - 1)
        if before_microbatch is not None:
            before_microbatch(i)
        inputs, labels = (t.to(device) for t in row[rank])
        with Collectives() as collectives:
            loss, _ = loss_fn(model(inputs), labels, tokens)
            loss.backward()
        result.counts.append(collectives.counts)
        result.loss = result.loss + loss.detach()
    return result


def sum_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss


@contextmanager
def failing_loss(loss_fn: Any, *, at_call: int) -> Iterator[None]:
    """The inner loss raises at its ``at_call``-th call (from 0), on every rank."""
    inner, calls = loss_fn.loss_fn, 0

    class Failing(type(inner)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.__dict__.update(inner.__dict__)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls - 1 == at_call:
                raise ChunkFailure(f"inner loss call {at_call}")
            return inner(*args, **kwargs)

    loss_fn.loss_fn = Failing()
    try:
        yield
    finally:
        loss_fn.loss_fn = inner


class ChunkFailure(Exception):
    """What :func:`failing_loss` raises."""
