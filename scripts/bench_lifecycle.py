#!/usr/bin/env python
"""What the lifecycle costs and saves against torchtitan's own losses, in five parts::

    scripts/bench_lifecycle.py                 # all parts
    scripts/bench_lifecycle.py --part scope    # entering and leaving the scope, 1 process
    scripts/bench_lifecycle.py --part step     # an optimizer step of 8 microbatches, 4 ranks
    scripts/bench_lifecycle.py --part loss     # the loss alone, a process for each variant
    scripts/bench_lifecycle.py --part mtp      # as loss, multi-token prediction
    scripts/bench_lifecycle.py --part repeated # units invoked at every depth, 2 ranks

Tables go to standard output, progress to standard error, and everything to ``--json FILE``. Times
are of this machine; compare the ratios, whose two sides ran right after or in turn with each other.

scope: a root over N FSDP groups, the last of them [norm, lm_head], on a fake process group of 4.
Two measurements, each a median, with the two sides taking turns on one model:

- entry and exit, with nothing in between. Before it the head is gathered, as the decoder's forward
  leaves it in torchtitan; after it the head is sharded. "setters" are the calls around the loop of
  ``ChunkedLossWrapper.__call__``, in its order: reshard after forward off, reshard after backward
  off, gradient sync off, unshard (which finds the weights there), gradient sync on (for the last
  chunk), both reshards on, gradient sync on, reshard. "scope" is ``fsdp_partial_backwards`` entered
  and left, the two hooks every caller calls included. No forward, backward or collective is in
  either.
- the loss call of a training step, 8 chunks of one token, after the decoder's forward and before
  its backward, which are not timed: entry, exit, and what FSDP does in each chunk's backward.

step: the real trainer on ``llama3_fsdp_accumulate``, as ``titan-lifecycle report`` measures it.
Every variant runs once a round, in turn, and every other round goes in reverse. Seconds are the
median and the minimum over all rounds, ratios those of runs of the same round.

loss: from hidden states [1, L, D] and a head [V, D] in float32 to the loss and the gradients of
both, without FSDP. Memory is the peak resident set of the process above what was resident before
the first call: temporaries and the two gradients, not the weight and the hidden states. Time is
that of the fastest of `--calls` calls.

mtp: as loss, with hidden states [1, L, D] of the main prediction and of each of `--mtp-layers`. The
full logits are those of every prediction, as torchtitan's model returns them to its MTPLoss.

repeated: a decoder unit and two units of 2.1 million parameters each that every depth invokes, one
step at a time with each policy in turn, on 2 Gloo ranks. The first step is not timed.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import LinearCrossEntropyOptions
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.models.deepseek_v3.mtp import MTPLoss

from titan_lifecycle.fsdp_lifecycle import ResidencyMonitor, fsdp_partial_backwards
from titan_lifecycle.fsdp_lifecycle.invocations import RepeatedUnits, set_repeated_units
from titan_lifecycle.losses.chunked import LifecycleChunkedLoss
from titan_lifecycle.losses.from_weight import LinearCrossEntropyLoss
from titan_lifecycle.losses.mtp import MTPChunkedLoss
from titan_lifecycle.measure import report
from titan_lifecycle.measure.collectives import CollectiveCounter
from titan_lifecycle.measure.step_cost import StepCost
from titan_lifecycle.run.load import STOCK

PARTS = ("scope", "step", "loss", "mtp", "repeated")
NUM_CHUNKS = 8
_MIB = 2**20

# --- scope ---

_SCOPE_DIM = 8
_WARM_UP = 3


class _Decoder(nn.Module):
    """``num_groups`` FSDP groups of one tiny Linear each, the last of them [norm, lm_head]."""

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        dim = _SCOPE_DIM
        self.layers = nn.Sequential(*(nn.Linear(dim, dim) for _ in range(num_groups - 1)))
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.layers(x))
        return hidden


@dataclass(frozen=True, slots=True)
class ScopeCost:
    """Medians, in seconds."""

    num_groups: int
    setters: float
    scope: float
    stock_call: float
    lifecycle_call: float


def bench_scope(num_groups: Sequence[int], repeats: int) -> list[ScopeCost]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        costs = []
        for n in num_groups:
            _progress(f"scope: {n} groups")
            costs.append(_scope_cost(n, repeats))
        return costs
    finally:
        dist.destroy_process_group()


def _scope_cost(num_groups: int, repeats: int) -> ScopeCost:
    torch.manual_seed(0)
    model = _Decoder(num_groups)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard([model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    head = model.lm_head
    assert isinstance(head, FSDPModule)

    losses = [
        ChunkedLossWrapper.Config(num_chunks=NUM_CHUNKS).build(),
        LifecycleChunkedLoss.Config(num_chunks=NUM_CHUNKS).build(),
    ]
    inputs = torch.randn(1, NUM_CHUNKS, _SCOPE_DIM)
    labels = torch.randint(_SCOPE_DIM, (1, NUM_CHUNKS))
    num_tokens = torch.tensor(NUM_CHUNKS)
    edges: list[Callable[[Any], None]] = [_stock_setters, _scope]
    edge_seconds: list[list[float]] = [[], []]
    call_seconds: list[list[float]] = [[], []]
    # As timeit does; and what is collected between steps is not the model.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        # A whole step, forward and backward, takes long with 1000 groups.
        for _ in range(_WARM_UP + max(40, min(repeats, 10_000 // num_groups))):
            for loss_fn, seconds in zip(losses, call_seconds, strict=True):
                loss_fn.set_lm_head(head)
                hidden = model(inputs)
                start = time.perf_counter()
                loss, _ = loss_fn(hidden, labels, num_tokens)
                seconds.append(time.perf_counter() - start)
                loss.backward()
                model.zero_grad()
                del hidden, loss  # or the next call would pay for freeing the decoder's graph
                gc.collect()
        for _ in range(_WARM_UP + repeats):
            for edge, seconds in zip(edges, edge_seconds, strict=True):
                head.unshard()
                start = time.perf_counter()
                edge(head)
                seconds.append(time.perf_counter() - start)
    finally:
        gc.enable()
        gc.unfreeze()
    return ScopeCost(
        num_groups, *(statistics.median(s[_WARM_UP:]) for s in (*edge_seconds, *call_seconds))
    )


def _stock_setters(head: FSDPModule) -> None:
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    with spmd.no_typecheck():
        head.unshard()
    head.set_requires_gradient_sync(True, recurse=False)
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    head.reshard()


def _scope(head: nn.Module) -> None:
    with fsdp_partial_backwards(head) as hooks:
        hooks.before_last_forward()
        hooks.after_forward(())


def scope_table(costs: Sequence[ScopeCost]) -> str:
    return _table(
        [
            "FSDP groups",
            "setters, us",
            "scope, us",
            "scope / setters",
            "stock loss call, ms",
            "lifecycle loss call, ms",
            "lifecycle / stock",
        ],
        [
            [
                str(c.num_groups),
                f"{c.setters * 1e6:.1f}",
                f"{c.scope * 1e6:.1f}",
                f"{c.scope / c.setters:.2f}",
                f"{c.stock_call * 1e3:.2f}",
                f"{c.lifecycle_call * 1e3:.2f}",
                f"{c.lifecycle_call / c.stock_call:.2f}",
            ]
            for c in costs
        ],
    )


# --- step ---

_JOB = "llama3_fsdp_accumulate"


def _policy(gradient_reduction: str, *more: str) -> list[str]:
    return ["--lifecycle.gradient-reduction", gradient_reduction, *more]


_STEP_VARIANTS = {
    "stock": [STOCK],
    "every_microbatch compatible": _policy("every_microbatch"),
    "every_microbatch coalesced": _policy(
        "every_microbatch", "--lifecycle.head-reduction", "coalesced"
    ),
    "last_microbatch": _policy("last_microbatch"),
    "last_microbatch retain_weights": _policy("last_microbatch", "--lifecycle.retain-weights"),
}


def bench_step(seq_len: int, steps: int, rounds: int) -> dict[str, list[StepCost]]:
    """Every variant once a round, in turn; every other round in reverse."""
    from titan_lifecycle.jobs.shipped import resolve_job

    costs: dict[str, list[StepCost]] = {name: [] for name in _STEP_VARIANTS}
    for i in range(rounds):
        _progress(f"step: round {i + 1} of {rounds}")
        variants = list(_STEP_VARIANTS.items())[:: -1 if i % 2 else 1]
        with tempfile.TemporaryDirectory() as folder:
            overrides = {
                "--training.global-batch-size": 32,  # 4 ranks x 1 x 8 microbatches
                "--training.seq-len": seq_len,
                "--training.steps": steps,
                "--dump-folder": folder,
            }
            found = report.compare(
                str(resolve_job(_JOB)),
                [str(word) for option in overrides.items() for word in option],
                dict(variants),
            )
        for name, cost in found.items():
            costs[name].append(cost)
    return costs


def step_table(costs: dict[str, list[StepCost]]) -> str:
    """The median and the minimum over rounds; ratios are of runs of the same round."""
    merged = {
        name: replace(
            rounds[0],
            step_seconds=statistics.median(c.step_seconds for c in rounds),
            fastest_step_seconds=min(c.fastest_step_seconds for c in rounds),
            tokens_per_second_per_device=statistics.median(
                c.tokens_per_second_per_device for c in rounds
            ),
        )
        for name, rounds in costs.items()
    }
    stock, fastest = costs["stock"], merged["stock"].fastest_step_seconds
    ratios = [
        statistics.median(
            c.step_seconds / s.step_seconds for c, s in zip(rounds, stock, strict=True)
        )
        for rounds in costs.values()
    ]
    return report.table(
        merged,
        [
            ["median / stock's, median over rounds", *(f"{r:.2f}" for r in ratios)],
            [
                "fastest / stock's",
                *(f"{c.fastest_step_seconds / fastest:.2f}" for c in merged.values()),
            ],
        ],
    )


# --- loss ---

# From hidden states [1, L, D], those of each prediction on top of each other, labels [1, L] and the
# number of tokens.
_LossCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _full_logits(head: nn.Linear) -> _LossCall:
    loss_fn = CrossEntropyLoss.Config().build()

    def call(hidden: torch.Tensor, labels: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_fn(head(hidden), labels, num_tokens)[0]
        return loss

    return call


def _fused(head: nn.Linear) -> _LossCall:
    def call(hidden: torch.Tensor, labels: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        loss = F.linear_cross_entropy(
            hidden.flatten(0, 1),
            head.weight,
            labels.flatten(),
            reduction="sum",
            options=LinearCrossEntropyOptions(),
        )
        return loss / num_tokens

    return call


def _chunked(config: ChunkedLossWrapper.Config) -> Callable[[nn.Linear], _LossCall]:
    def build(head: nn.Linear) -> _LossCall:
        loss_fn = config.build()
        loss_fn.set_lm_head(head)
        return lambda *args: loss_fn(*args)[0]

    return build


_LOSS_VARIANTS: dict[str, Callable[[nn.Linear], _LossCall]] = {
    "full logits": _full_logits,
    "ChunkedLossWrapper": _chunked(ChunkedLossWrapper.Config(num_chunks=NUM_CHUNKS)),
    "LifecycleChunkedLoss": _chunked(LifecycleChunkedLoss.Config(num_chunks=NUM_CHUNKS)),
    "LifecycleChunkedLoss, LinearCrossEntropyLoss": _chunked(
        LifecycleChunkedLoss.Config(num_chunks=NUM_CHUNKS, loss_fn=LinearCrossEntropyLoss.Config())
    ),
    "linear_cross_entropy, its own chunks": _fused,
}


def _mtp_call(loss_fn: BaseLoss, predict: Callable[[torch.Tensor], torch.Tensor]) -> _LossCall:
    def call(hidden: torch.Tensor, labels: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(labels.shape[1]).expand_as(labels)
        pred = [predict(h) for h in hidden.split(1)]
        loss: torch.Tensor = loss_fn(pred, labels, num_tokens, positions=positions)[0]
        return loss

    return call


def _mtp_full_logits(head: nn.Linear) -> _LossCall:
    return _mtp_call(MTPLoss.Config().build(), head)


def _mtp_chunked(head: nn.Linear) -> _LossCall:
    loss_fn = MTPChunkedLoss.Config(num_chunks=NUM_CHUNKS).build()
    loss_fn.set_lm_head(head)
    return _mtp_call(loss_fn, lambda hidden: hidden)


_MTP_VARIANTS: dict[str, Callable[[nn.Linear], _LossCall]] = {
    "MTPLoss, full logits": _mtp_full_logits,
    "MTPChunkedLoss": _mtp_chunked,
}


@dataclass(frozen=True, slots=True)
class LossCost:
    variant: str
    vocab: int
    num_mtp_layers: int
    peak_bytes: int
    seconds: float
    loss: float
    grad_norms: list[float]
    """Of the head's weight and of the hidden states: variants must agree."""


def bench_loss(
    variants: Sequence[str], num_mtp_layers: Sequence[int], args: argparse.Namespace
) -> list[LossCost]:
    costs = []
    for vocab, depth in itertools.product(args.vocabs, num_mtp_layers):
        for variant in variants:
            _progress(f"loss: vocabulary {vocab}, {variant}" + (f", {depth} deep" if depth else ""))
            command = [sys.executable, __file__, "--loss-variant", variant]
            command += ["--vocabs", str(vocab), "--mtp-layers", str(depth)]
            command += ["--length", str(args.length), "--dim", str(args.dim)]
            command += ["--calls", str(args.calls)]
            child = subprocess.run(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                check=True,
            )
            costs.append(LossCost(**json.loads(child.stdout)))
        _check_same_computation(costs[-len(variants) :])
    return costs


def _check_same_computation(costs: list[LossCost]) -> None:
    expected, *others = ([c.loss, *c.grad_norms] for c in costs)
    for cost, values in zip(costs[1:], others, strict=True):
        if any(abs(a - b) > 1e-4 * abs(b) for a, b in zip(values, expected, strict=True)):
            raise RuntimeError(
                f"{cost.variant} computes something else than {costs[0].variant}: loss and "
                f"gradient norms are {values} against {expected}"
            )


def _loss_cost(
    variant: str, vocab: int, num_mtp_layers: int, length: int, dim: int, calls: int
) -> LossCost:
    """In a process of its own: a peak is of the whole process, and freed memory may stay."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Libraries set themselves up in their first call.
    predictions = 1 + num_mtp_layers
    _run_loss(variant, nn.Linear(dim, 64, bias=False), torch.randn(predictions, NUM_CHUNKS, dim))

    head = nn.Linear(dim, vocab, bias=False)
    hidden = torch.randn(predictions, length, dim)
    gc.collect()
    before = _status_bytes("VmRSS")
    # The peak so far, of imports, is forgotten: it becomes what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    seconds, loss, grad_norms = _run_loss(variant, head, hidden)
    peak = _status_bytes("VmHWM") - before
    more = [_run_loss(variant, head, hidden)[0] for _ in range(calls - 1)]
    return LossCost(variant, vocab, num_mtp_layers, peak, min([seconds, *more]), loss, grad_norms)


def _run_loss(
    variant: str, head: nn.Linear, hidden: torch.Tensor
) -> tuple[float, float, list[float]]:
    """Seconds, loss and gradient norms of one call; the gradients are gone afterwards."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(head.out_features, (1, hidden.shape[1]), generator=generator)
    num_tokens = torch.tensor(labels.numel())
    hidden = hidden.detach().requires_grad_()
    call = (_LOSS_VARIANTS | _MTP_VARIANTS)[variant](head)
    start = time.perf_counter()
    loss = call(hidden, labels, num_tokens)
    loss.backward()
    seconds = time.perf_counter() - start
    assert head.weight.grad is not None and hidden.grad is not None
    grad_norms = [head.weight.grad.norm().item(), hidden.grad.norm().item()]
    head.weight.grad = None
    return seconds, loss.item(), grad_norms


def _status_bytes(key: str) -> int:
    """A figure of this process in /proc, which counts in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; the loss part needs Linux")


def loss_table(costs: Sequence[LossCost]) -> str:
    full = {(c.vocab, c.num_mtp_layers): c for c in costs if "full logits" in c.variant}
    of_mtp = any(c.num_mtp_layers for c in costs)
    rows = []
    for c in costs:
        reference = full[c.vocab, c.num_mtp_layers]
        rows.append(
            [
                str(c.vocab),
                *([str(c.num_mtp_layers)] if of_mtp else []),
                c.variant,
                f"{c.peak_bytes / _MIB:.0f}",
                f"{c.peak_bytes / reference.peak_bytes:.2f}",
                f"{c.seconds:.2f}",
                f"{c.seconds / reference.seconds:.2f}",
            ]
        )
    headers = ["vocabulary", *(["MTP layers"] if of_mtp else []), "loss"]
    headers += ["peak, MiB", "peak / full", "seconds", "seconds / full"]
    return _table(headers, rows, left=(headers.index("loss"),))


# --- repeated ---

_REPEATED_RANKS = 2
_REPEATED_DIM = 512


class _Depths(nn.Module):
    """A decoder unit, and two units that every prediction depth invokes."""

    def __init__(self) -> None:
        super().__init__()
        dim = _REPEATED_DIM
        self.decoder, self.merge, self.predict = (
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.Tanh(), nn.Linear(4 * dim, dim))
            for _ in range(3)
        )

    def forward(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        hidden = self.decoder(hidden)
        total = hidden.sum()
        for _ in range(depth):
            hidden = self.predict(self.merge(hidden))
            total = total + hidden.sum()
        return total


@dataclass(frozen=True, slots=True)
class RepeatedCost:
    """Of one step after the first, on rank 0; seconds are a median."""

    depth: int
    policy: str
    first_all_gathers: int
    all_gathers: int
    reduce_scatters: int
    peak_weight_bytes: int
    seconds: float


def bench_repeated(depths: Sequence[int], steps: int) -> list[RepeatedCost]:
    costs = []
    for depth in depths:
        _progress(f"repeated: depth {depth}")
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=_REPEATED_RANKS,
            run_id="repeated",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
        )
        costs += elastic_launch(config, _repeated_costs)(depth, steps)[0]
    return costs


def _repeated_costs(depth: int, steps: int) -> list[RepeatedCost]:
    """On each rank: the policies take turns, each on its own model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (_REPEATED_RANKS,), mesh_dim_names=("dp_shard",))
    hidden = torch.randn(64, _REPEATED_DIM)
    models, counts, peaks = {}, {}, {}
    seconds: dict[str, list[float]] = {"release": [], "retain": []}
    for policy in get_args(RepeatedUnits):
        model = models[policy] = _Depths()
        for unit in (model.decoder, model.merge, model.predict, model):
            fully_shard(unit, mesh=mesh)
        set_repeated_units(model, policy)
        counts[policy] = []
    for _ in range(1 + steps):
        for policy, model in models.items():
            with CollectiveCounter([model]) as counter, ResidencyMonitor([model]) as monitor:
                start = time.perf_counter()
                model(hidden, depth).backward()
                seconds[policy].append(time.perf_counter() - start)
            counts[policy].append(counter.counts.calls)
            peaks[policy] = monitor.peak_weight_bytes
    dist.destroy_process_group()
    return [
        RepeatedCost(
            depth,
            policy,
            counts[policy][0]["all_gather"],
            counts[policy][-1]["all_gather"],
            counts[policy][-1]["reduce_scatter"],
            peaks[policy],
            statistics.median(seconds[policy][1:]),
        )
        for policy in models
    ]


def repeated_table(costs: Sequence[RepeatedCost]) -> str:
    released = {c.depth: c for c in costs if c.policy == "release"}
    return _table(
        [
            "depth",
            "repeated_units",
            "all-gathers, first step",
            "all-gathers",
            "reduce-scatters",
            "peak gathered weights, MiB",
            "step, ms",
            "step / release",
        ],
        [
            [
                str(c.depth),
                c.policy,
                str(c.first_all_gathers),
                str(c.all_gathers),
                str(c.reduce_scatters),
                f"{c.peak_weight_bytes / _MIB:.1f}",
                f"{c.seconds * 1e3:.1f}",
                f"{c.seconds / released[c.depth].seconds:.2f}",
            ]
            for c in costs
        ],
        left=(1,),
    )


# --- all ---


def _table(headers: list[str], rows: list[list[str]], left: Sequence[int] = ()) -> str:
    text: str = tabulate(
        rows,
        headers=headers,
        tablefmt="github",
        colalign=["left" if i in left else "right" for i in range(len(headers))],
        disable_numparse=True,
    )
    return text


def _progress(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    scope = parser.add_argument_group("scope")
    scope.add_argument("--groups", type=int, nargs="+", default=[10, 100, 1000], metavar="N")
    scope.add_argument("--repeats", type=int, default=2000, help="default %(default)s")
    step = parser.add_argument_group("step")
    step.add_argument("--seq-len", type=int, default=64, help="default %(default)s")
    step.add_argument(
        "--steps", type=int, default=4, help="the first warms up; default %(default)s"
    )
    step.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    loss = parser.add_argument_group("loss and mtp")
    loss.add_argument("--vocabs", type=int, nargs="+", default=[32768, 131072], metavar="V")
    loss.add_argument("--length", type=int, default=2048, help="L; default %(default)s")
    loss.add_argument("--dim", type=int, default=256, help="D; default %(default)s")
    loss.add_argument("--calls", type=int, default=1, help="default %(default)s")
    loss.add_argument("--mtp-layers", type=int, nargs="+", default=[1, 2], metavar="N")
    repeated = parser.add_argument_group("repeated")
    repeated.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4], metavar="K")
    repeated.add_argument("--repeated-steps", type=int, default=10, help="default %(default)s")
    # One variant in this process, as JSON: what the loss and mtp parts start.
    variants = [*_LOSS_VARIANTS, *_MTP_VARIANTS]
    loss.add_argument("--loss-variant", choices=variants, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.loss_variant is not None:
        sizes = (args.vocabs[0], args.mtp_layers[0], args.length, args.dim)
        cost = _loss_cost(args.loss_variant, *sizes, args.calls)
        print(json.dumps(asdict(cost)))
        return 0

    parts = PARTS if args.part is None else (args.part,)
    figures: dict[str, Any] = {"torch": torch.__version__, "cpus": os.cpu_count()}
    for part in parts:
        if part == "scope":
            scope = bench_scope(args.groups, args.repeats)
            table, figures[part] = scope_table(scope), [asdict(c) for c in scope]
        elif part == "step":
            step = bench_step(args.seq_len, args.steps, args.rounds)
            table = step_table(step)
            figures[part] = {k: [asdict(c) for c in v] for k, v in step.items()}
        elif part == "repeated":
            repeated = bench_repeated(args.depths, args.repeated_steps)
            table, figures[part] = repeated_table(repeated), [asdict(c) for c in repeated]
        else:
            is_mtp = part == "mtp"
            variants = list(_MTP_VARIANTS if is_mtp else _LOSS_VARIANTS)
            loss = bench_loss(variants, args.mtp_layers if is_mtp else [0], args)
            table, figures[part] = loss_table(loss), [asdict(c) for c in loss]
        print(f"\n{table}\n", flush=True)
        if args.json is not None:
            # Now: the next part may fail, and this one took minutes.
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
