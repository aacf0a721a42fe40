"""torchtitan's trainer with the lifecycle's policies for gradient accumulation.

:func:`lifecycle_config` turns a ``Trainer.Config`` into a :class:`LifecycleTrainer` one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed.utils import dist_max, dist_sum
from torchtitan.models.deepseek_v3.mtp import MTPDecoder, MTPLoss
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_lifecycle.fsdp_lifecycle import (
    disable_forward_prefetch_in_backward,
    preserved_policies,
    unsharded_gradient_bytes,
)
from titan_lifecycle.fsdp_lifecycle.invocations import set_repeated_units
from titan_lifecycle.jobs.renamed_keys import HEAD_REDUCTION, with_renamed_fields
from titan_lifecycle.jobs.topology import loss_rank
from titan_lifecycle.losses.choice import (
    check_head_reduction,
    choose_loss,
    lifecycle_loss,
    takes_head_weight,
)
from titan_lifecycle.losses.chunked import LifecycleChunkedLoss
from titan_lifecycle.losses.mtp import MTPChunkedLoss, return_hidden_states
from titan_lifecycle.measure.collectives import CollectiveCounter
from titan_lifecycle.measure.step_cost import StepMeasurements, deferred_gradients
from titan_lifecycle.overrides import CHUNKED_MTP_LOSS, imported
from titan_lifecycle.pipeline import (
    observe_split_backwards,
    register_metadata_inference_cleanup,
)
from titan_lifecycle.run import stop

__all__ = ["LifecycleConfig", "LifecycleTrainer", "lifecycle_config", "stock_config"]


@with_renamed_fields(reduction=HEAD_REDUCTION)
@dataclass(kw_only=True, slots=True)
class LifecycleConfig:
    """The ``[lifecycle]`` section of a job."""

    enabled: bool = True
    """False trains with torchtitan's own ChunkedLossWrapper, or MTPLoss, and policies."""

    head_reduction: Literal["compatible", "coalesced"] = "compatible"
    """Who reduces the head's gradients where there is a choice: the chunk loop, bit for bit as
    torchtitan's wrapper, or the decoder's backward, one reduce-scatter fewer a microbatch."""

    gradient_reduction: Literal["every_microbatch", "last_microbatch", "all_reduce_last"] = (
        "every_microbatch"
    )
    """When an optimizer step of several microbatches reduces. every_microbatch: each time, as
    torchtitan. last_microbatch: once; every group's unsharded gradient stays alive meanwhile.
    all_reduce_last (HSDP): reduce-scatter each time, all-reduce over the replicas once."""

    retain_weights: bool = False
    """Keep weights gathered from the first microbatch's forward to the last one's backward: one
    all-gather a group and step, for the memory of the whole unsharded model."""

    repeated_units: Literal["release", "retain"] = "release"
    """What happens to a unit's weights between its invocations in one forward, as of an embedding
    looked up for every prediction depth. release: each invocation gathers. retain: they stay
    gathered from the first to the last, in the forward and again in the backward."""

    checkpoint_on_sigterm: bool = False
    """At SIGTERM, end after the current step and save a checkpoint of it; at a second one, end at
    once. Needs checkpoint.enable. Costs one all-reduce of a flag among the hosts a step."""

    report_file: str | None = None
    """Measure memory and time too, and write them here at the end, as JSON, from the rank that
    has the loss. Used by ``titan-lifecycle report``."""


class LifecycleTrainer(Trainer):
    """torchtitan's ``Trainer``, which owns FSDP's lifecycle over an optimizer step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
        """FSDP's lifecycle around the chunked loss, accumulation and pipelines."""

        def __post_init__(self) -> None:
            # Not super(): the class that dataclass(slots=True) makes is another one than this.
            Trainer.Config.__post_init__(self)
            _validate(self)

    config: Config
    loss_fn: Any

    def __init__(self, config: Config) -> None:
        _validate(config)
        config.loss, config.override = choose_loss(config)
        super().__init__(config)
        self._loss_metrics: dict[str, torch.Tensor] = {}
        self._step_loss_metrics: dict[str, torch.Tensor] = {}
        if isinstance(self.loss_fn, LifecycleChunkedLoss):
            # Here, since an override of the user's may have put the loss there just now.
            check_head_reduction(config.loss)
            self.loss_fn.head_reduction = config.lifecycle.head_reduction
            if isinstance(self.loss_fn, MTPChunkedLoss):
                return_hidden_states(self.model_parts[0])
            self._record_loss_metrics()
        self._stop_group: Any = None
        self._stopping = False
        if config.lifecycle.checkpoint_on_sigterm:
            # Of the hosts: a flag on the device would make each step wait for the device.
            self._stop_group = dist.new_group(backend="gloo")
            stop.listen()
        self._microbatch = 0
        self._roots: list[Any] = [p for p in self.model_parts if isinstance(p, FSDPModule)]
        self._collectives = CollectiveCounter(self.model_parts)
        if config.lifecycle.enabled and self.parallel_dims.pp_enabled:
            register_metadata_inference_cleanup(self.pp_schedule)
            observe_split_backwards(self.pp_schedule)
        for root in self._roots if config.lifecycle.enabled else ():
            disable_forward_prefetch_in_backward(root)
            if config.lifecycle.repeated_units == "retain":
                set_repeated_units(root, "retain")
        if config.lifecycle.retain_weights and self.parallel_dims.fsdp_enabled:
            for root in self._roots:
                root.set_reshard_after_forward(False)
        self._measurements = (
            StepMeasurements(self.model_parts) if config.lifecycle.report_file else None
        )
        self._log_cost()

    def train_step(self, data_iterator: Any) -> None:
        self._microbatch = 0
        self._collectives.reset()
        self._step_loss_metrics = {}
        try:
            with self._measurements or nullcontext():
                super().train_step(data_iterator)
        except SystemExit as left:
            # torch's @record, around torchtitan's train(), takes a status of 0 for its end.
            raise SystemExit(left.code or 1) from left
        if self.metrics_processor.should_log(self.step):
            metrics = self._collective_metrics() | self._global_loss_metrics()
            self.metrics_processor.logger.log(metrics, self.step)
        if self._stop_group is not None:
            self._stop_where_asked()

    def should_continue_training(self) -> bool:
        return not self._stopping and bool(super().should_continue_training())

    def forward_backward_step(self, **microbatch: Any) -> torch.Tensor:
        is_last = self._microbatch == self.gradient_accumulation_steps - 1
        self._microbatch += 1
        policy = self._step_policy if self.parallel_dims.pp_enabled else self._microbatch_policy
        with self._collectives, policy(is_last):
            loss: torch.Tensor = super().forward_backward_step(**microbatch)
        # Copies: a captured CUDA graph writes each microbatch's values to the same tensors.
        values = {name: value.detach().clone() for name, value in self._loss_metrics.items()}
        self._step_loss_metrics = ChunkedLossWrapper._combine_chunk_metrics(
            self._step_loss_metrics, values
        )
        return loss

    def train(self) -> None:
        super().train()
        if self._stopping:
            self.checkpointer.maybe_wait_for_saving()
        self._add_summary_rows()
        schedule = self.config.parallelism.pipeline_parallel_schedule
        dims = self.parallel_dims
        has_loss = dist.get_rank() == loss_rank(dims.world_size, dims.pp, schedule)
        if self._measurements and has_loss:
            self._measurements.write(
                Path(self.config.lifecycle.report_file or ""),
                collectives=self._collectives.counts,
                tokens_per_step=self.ntokens_seen // max(self.step, 1),
                non_data_parallel_size=self.parallel_dims.non_data_parallel_size,
            )

    def _stop_where_asked(self) -> None:
        """Let this step be the last, with a checkpoint, once a rank is asked to stop.

        See [Note: Stopping at SIGTERM].
        """
        asked = torch.tensor(int(stop.is_requested()))
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._stop_group)
        if asked.item():
            self._stopping = True
            # The training loop saves next, and this makes it a whole checkpoint of any step. As a
            # last step's, it might hold the model alone, from which nothing resumes.
            self.checkpointer.interval = 1
            logger.warning(f"SIGTERM: saving a checkpoint of step {self.step}, then stopping")

    @contextmanager
    def _microbatch_policy(self, is_last: bool) -> Iterator[None]:
        """What FSDP does at the end of this microbatch's backward.

        ``set_is_last_backward`` is left alone: with nothing reduced there is nothing to wait for,
        and without that end the next microbatch's prefetch would follow this one's order.
        """
        lifecycle = self.config.lifecycle
        if lifecycle.gradient_reduction == "every_microbatch" and not lifecycle.retain_weights:
            yield
            return
        with preserved_policies(self._roots):
            for root in self._roots:
                if lifecycle.gradient_reduction == "last_microbatch":
                    root.set_requires_gradient_sync(is_last)
                elif lifecycle.gradient_reduction == "all_reduce_last":
                    root.set_requires_all_reduce(is_last)
                if lifecycle.retain_weights:
                    root.set_reshard_after_backward(False)
            yield
        if lifecycle.retain_weights and is_last:
            # The optimizer updates the shards: gathered weights would be stale.
            for root in self._roots:
                for module in root.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

    @contextmanager
    def _step_policy(self, is_last: bool) -> Iterator[None]:
        """What the pipeline's schedule does at the end of this step, one of an accumulation."""
        schedule = self.pp_schedule
        step = schedule.step
        if self.config.lifecycle.gradient_reduction == "last_microbatch":
            # torchtitan's trainer does not pass finalize_gradients on.
            schedule.step = partial(step, finalize_gradients=is_last)
        try:
            yield
        finally:
            schedule.step = step

    def _record_loss_metrics(self) -> None:
        """Keep what the loss reports of a microbatch: torchtitan's trainer drops it.

        Validation and pipeline schedules have the loss itself, and are not recorded.
        """
        loss_fn = self.loss_fn

        def record(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, self._loss_metrics = loss_fn(*args, **kwargs)
            return loss, self._loss_metrics

        self.loss_fn = record

    def _global_loss_metrics(self) -> dict[str, float]:
        """The loss's metrics of this step over all ranks, reduced as torchtitan's names say.

        ``/max`` and ``/min``; all others, ``_mean`` or ``/frac``, are this rank's part of a mean
        over all valid tokens, as the loss itself, and add up.
        """
        mesh = (
            self.parallel_dims.get_optional_mesh("loss")
            if self.parallel_dims.dp_cp_enabled
            else None
        )
        metrics = {}
        for name, value in self._step_loss_metrics.items():
            if name.endswith("/max"):
                metrics[name] = dist_max(value, mesh)
            elif name.endswith("/min"):
                metrics[name] = -dist_max(-value, mesh)
            else:
                metrics[name] = dist_sum(value, mesh)
        return metrics

    def _log_cost(self) -> None:
        lifecycle = self.config.lifecycle
        if lifecycle.gradient_reduction == "last_microbatch":
            logger.info(deferred_gradients(unsharded_gradient_bytes(self.model_parts)))

    def _collective_metrics(self) -> dict[str, int]:
        counts = self._collectives.counts
        return {
            f"lifecycle/{kind}_{what}": counter[kind]
            for kind in ("reduce_scatter", "all_gather", "all_reduce")
            for what, counter in (("calls", counts.calls), ("bytes", counts.num_bytes))
        }

    def _add_summary_rows(self) -> None:
        rows = getattr(self.metrics_processor, "summary_rows", None)
        if rows is None:
            return
        mine = self._collective_metrics()
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
        for kind in ("reduce_scatter", "all_gather", "all_reduce"):
            # Ranks of one pipeline stage count alike: name each figure once, with its ranks.
            ranks: dict[tuple[int, int], list[int]] = {}
            for rank, metrics in enumerate(by_rank):
                figure = (metrics[f"lifecycle/{kind}_calls"], metrics[f"lifecycle/{kind}_bytes"])
                ranks.setdefault(figure, []).append(rank)
            rows[f"{kind.replace('_', '-')}s a step"] = "; ".join(
                f"{calls} ({num_bytes / 2**20:.1f} MiB)"
                + (f" on ranks {','.join(map(str, where))}" if len(ranks) > 1 else "")
                for (calls, num_bytes), where in ranks.items()
            )


def lifecycle_config(config: Trainer.Config, **lifecycle: Any) -> LifecycleTrainer.Config:
    """The config of a :class:`LifecycleTrainer` with the settings of ``config``.

    Args:
        config: A torchtitan ``Trainer.Config``. It is not changed; nested configs are shared.
        **lifecycle: Fields of :class:`LifecycleConfig`.

    Raises:
        TypeError: ``config`` belongs to another trainer (Flux, GraphTrainer, ...), which has its
            own loop or shards by other means.
    """
    if type(config) is not Trainer.Config:
        raise TypeError(
            f"lifecycle_config takes torchtitan's Trainer.Config, got "
            f"{type(config).__qualname__}; that trainer is not supported"
        )
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.init}
    values["loss"] = lifecycle_loss(config.loss)
    return LifecycleTrainer.Config(**values, lifecycle=LifecycleConfig(**lifecycle))


def stock_config(config: LifecycleTrainer.Config) -> LifecycleTrainer.Config:
    """The same job with torchtitan's own loss and policies, whatever ``[lifecycle]`` asks for.

    What torchtitan does not know is reset: a length of chunks becomes the number of equal chunks
    next to it, an inner loss from the head's weight becomes cross-entropy from logits.

    Args:
        config: A valid config. It is not changed; nested configs are shared.
    """
    stock = copy.copy(config)
    given = config.lifecycle
    stock.lifecycle = LifecycleConfig(
        enabled=False,
        checkpoint_on_sigterm=given.checkpoint_on_sigterm,
        report_file=given.report_file,
    )
    stock.loss, stock.override = choose_loss(stock)
    return stock


def _validate(config: LifecycleTrainer.Config) -> None:
    lifecycle, parallelism = config.lifecycle, config.parallelism
    is_changed = (
        lifecycle.gradient_reduction != "every_microbatch"
        or lifecycle.retain_weights
        or lifecycle.repeated_units != "release"
    )
    check_head_reduction(config.loss)
    if lifecycle.checkpoint_on_sigterm and not (
        config.checkpoint.enable and not config.checkpoint.load_only
    ):
        raise ValueError(
            "lifecycle.checkpoint_on_sigterm needs checkpoint.enable = true, and "
            "checkpoint.load_only = false"
        )
    if not lifecycle.enabled:
        if is_changed or lifecycle.head_reduction != "compatible":
            raise ValueError(
                "lifecycle.head_reduction, lifecycle.gradient_reduction, lifecycle.retain_weights "
                "and lifecycle.repeated_units need lifecycle.enabled = true"
            )
        if getattr(config.loss, "chunk_tokens", None) is not None:
            raise ValueError(
                "loss.chunk_tokens needs lifecycle.enabled = true; torchtitan's own wrapper knows "
                "only loss.num_chunks"
            )
        if takes_head_weight(config.loss):
            raise ValueError(
                "[loss.loss_fn] takes the head's weight, which needs lifecycle.enabled = true; "
                "torchtitan's own wrapper gives logits"
            )
        return
    _validate_mtp(config)
    if lifecycle.retain_weights and parallelism.pipeline_parallel_degree > 1:
        raise ValueError(
            "lifecycle.retain_weights is for training without a pipeline; with one the schedule "
            "keeps or releases weights, by parallelism.fsdp_reshard_after_forward"
        )
    if lifecycle.gradient_reduction == "all_reduce_last":
        if parallelism.data_parallel_replicate_degree <= 1:
            raise ValueError(
                "lifecycle.gradient_reduction = 'all_reduce_last' needs HSDP: set "
                "parallelism.data_parallel_replicate_degree above 1, or use 'last_microbatch'"
            )
        if parallelism.pipeline_parallel_degree > 1:
            raise ValueError(
                "lifecycle.gradient_reduction = 'all_reduce_last' does not work with a pipeline: "
                "torch finalizes a stage's reduce-scatter and all-reduce together; use "
                "'last_microbatch'"
            )
    if is_changed and not config.training.disable_cuda_graphs:
        raise ValueError(
            "lifecycle.gradient_reduction, lifecycle.retain_weights and lifecycle.repeated_units "
            "change what each microbatch does, and a captured CUDA graph replays the first; set "
            "training.disable_cuda_graphs"
        )


def _validate_mtp(config: LifecycleTrainer.Config) -> None:
    overridden = CHUNKED_MTP_LOSS in imported(config.override)
    if not (overridden or isinstance(config.loss, MTPChunkedLoss.Config)):
        return
    # Exactly, as the override's target; it has replaced it where a built trainer's is checked.
    if type(config.loss) not in (MTPLoss.Config, MTPChunkedLoss.Config):
        raise ValueError(
            f"override.imports names {CHUNKED_MTP_LOSS}, which replaces torchtitan's MTPLoss, but "
            f"[loss] is a {type(config.loss).__qualname__}; start from a config with MTPLoss, as "
            "job.config = 'deepseek_v3_debugmodel_mtp', or leave the override out"
        )
    model = config.model_spec.model if config.model_spec else None
    if not isinstance(model, MTPDecoder.Config) or not model.mtp_layers:
        raise ValueError(
            "MTPChunkedLoss needs a model with MTP layers; choose a job.config that has them, as "
            "'deepseek_v3_debugmodel_mtp'"
        )
    if config.validator.enable:
        raise ValueError(
            "validator.enable = true does not work with multi-token prediction: torchtitan's "
            "validator gives the loss no positions, without which labels would cross documents; "
            "set validator.enable = false"
        )
