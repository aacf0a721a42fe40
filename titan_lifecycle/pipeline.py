"""Pipeline stages: nothing left behind by metadata inference, and recovery after a failure.

The only module that touches private state of ``torch.distributed.pipelining``.

[Note: Metadata inference and FSDP]
A stage that was not told its shapes learns them from a probe, a real forward and backward before
the first microbatch, and again at each switch between training and evaluation. The stage then
clears ``param.grad``. FSDP's accumulated gradients are not there: they sit on the unsharded
parameters until the group is reduced, and would leak into the first step. The chunk loop, too,
would reduce the head once for a loss that nobody asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.profiler import record_function

from titan_lifecycle import private_names
from titan_lifecycle.fsdp_lifecycle import (
    ProbeGuard,
    groups_with_pending_gradients,
    reset_root,
)
from titan_lifecycle.fsdp_lifecycle.invocations import part_of_backward

__all__ = [
    "lifecycle_pipelining_fn",
    "observe_split_backwards",
    "register_metadata_inference_cleanup",
    "reset_iteration",
]

# torch's own registration, where it has one (pytorch/pytorch#203178).
_UPSTREAM_REGISTRATION = "register_metadata_inference_cleanup"

_RUNTIME_STATE = (
    "_deferred_stages",
    "_finalized_stages",
    "backward_counter",
    "bwd_recv_ops",
    "fwd_recv_ops",
    "unshard_ops",
    "unsharded_stages",
)

private_names.check("pipelining")

_registered: weakref.WeakSet[PipelineStage | _PipelineSchedule] = weakref.WeakSet()
_observed: weakref.WeakSet[_PipelineStageBase] = weakref.WeakSet()
# Schedules whose last training step was not finalized. Known to every rank of the pipeline alike,
# unlike pending gradients: a frozen stage has none.
_unfinalized: weakref.WeakSet[_PipelineSchedule] = weakref.WeakSet()


def register_metadata_inference_cleanup(target: PipelineStage | _PipelineSchedule) -> None:
    """Make dynamic metadata inference leave nothing behind in a stage's FSDP root.

    After each probe, whether it succeeded or failed, the root's iteration state is reset; its
    gradients and policies are those of before, and the probe reduces nothing. Ordinary schedule
    steps, also accumulated ones, are not touched. Registering twice does nothing, and so does a
    stage that is not FSDP or was given its shapes. See [Note: Metadata inference and FSDP].

    Args:
        target: A stage, or a schedule: all its stages on this rank.

    Raises:
        TypeError: ``target`` is neither.

    A probe raises ``RuntimeError``, before anything is changed, if gradients of an unfinalized
    step are pending: it would discard them. Register the schedule, not single stages, for every
    rank of a pipeline to raise alike, also one whose stages are frozen.
    """
    # Stages from a traced model are of another class and run no probe.
    stages = [stage for stage in _stages(target) if isinstance(stage, PipelineStage)]
    schedule = target if isinstance(target, _PipelineSchedule) else None
    for stage in stages:
        if stage in _registered:
            continue
        _registered.add(stage)
        if hasattr(stage, _UPSTREAM_REGISTRATION):
            register = getattr(stage, _UPSTREAM_REGISTRATION)
            register(lambda stage=stage: reset_root(stage.submod))
        _guard_initialization(stage, stages, schedule)
    if schedule is not None and schedule not in _registered:
        _registered.add(schedule)
        _track_finalization(schedule)


def lifecycle_pipelining_fn(pipelining_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``ModelSpec.pipelining_fn`` so that its stages are registered.

    For torchtitan's own trainer and launcher::

        spec = dataclasses.replace(spec, pipelining_fn=lifecycle_pipelining_fn(spec.pipelining_fn))
    """

    @wraps(pipelining_fn)
    def pipeline(*args: Any, **kwargs: Any) -> Any:
        result = pipelining_fn(*args, **kwargs)
        register_metadata_inference_cleanup(result[0])
        return result

    return pipeline


def observe_split_backwards(target: PipelineStage | _PipelineSchedule) -> None:
    """Let lifecycle callbacks of a stage's FSDP root follow a backward that comes in two parts.

    Zero-bubble schedules run the input gradients of a microbatch first, and its weight gradients
    some microbatches later: a delayed reader of weights and activations. With this, its
    invocations are complete, and its gradients ready, when the second part has run, once for each
    microbatch. Without it both come when the schedule finalizes the step. Whole backwards are not
    touched, and calling it twice does nothing. See ``invocations.register_lifecycle_callbacks``.

    Args:
        target: A stage, or a schedule: all its stages on this rank.

    Raises:
        TypeError: ``target`` is neither.
    """
    for stage in _stages(target):
        if isinstance(stage.submod, FSDPModule) and stage not in _observed:
            _observed.add(stage)
            _observe(stage, stage.submod)


def reset_iteration(target: nn.Module | PipelineStage | _PipelineSchedule) -> None:
    """Bring ``target`` back to the start of an iteration after an exception.

    What the failed iteration left is discarded: in-flight collectives are waited for, gathered
    weights are resharded, gradients are dropped, also those of earlier microbatches of the same
    accumulation: retry the whole step. Of a stage, its chunks, manual finalization and the
    policies it sets are reset too; of a schedule, also the losses of the failed step, whose graphs
    the retry would walk otherwise. Messages between ranks that are still under way are not
    recalled: every rank of the pipeline must have left the step.

    Args:
        target: An FSDP root, a pipeline stage, or a schedule. Nothing is done for a module that is
            not FSDP.

    Raises:
        RuntimeError: ``target`` is an FSDP module but not the root.
        TypeError: ``target`` is none of these.
    """
    with record_function("lifecycle::reset_iteration"):
        if isinstance(target, nn.Module):
            reset_root(target)
            return
        for stage in _stages(target):
            _reset_stage(stage)
        if isinstance(target, _PipelineSchedule):
            target._internal_losses.clear()
            _unfinalized.discard(target)
        if isinstance(target, _PipelineScheduleRuntime):
            for name in _RUNTIME_STATE:
                getattr(target, name).clear()


def _reset_stage(stage: _PipelineStageBase) -> None:
    # The root's reset waits for a reduction under way, and invalidates the stage's handle to it.
    stage._gradient_reduction_handle = None
    reset_root(stage.submod)
    if isinstance(stage.submod, FSDPModule):
        # What the stage itself sets when it finalizes a step.
        stage.submod.set_requires_gradient_sync(True)
        stage.submod.set_reshard_after_backward(True)
    stage.clear_runtime_states()
    stage.backward_state.clear()
    stage.dw_runner.clear()
    for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
        for info in infos:
            info.buffer = None


def _stages(target: _PipelineStageBase | _PipelineSchedule) -> list[_PipelineStageBase]:
    if isinstance(target, _PipelineStageBase):
        return [target]
    if isinstance(target, PipelineScheduleSingle):
        return [target._stage]
    if isinstance(target, PipelineScheduleMulti):
        return list(target._stages)
    raise TypeError(
        f"expected a PipelineStage or a pipeline schedule, got {type(target).__qualname__}"
    )


def _guard_initialization(
    stage: PipelineStage, stages: list[PipelineStage], schedule: _PipelineSchedule | None
) -> None:
    """Run a ``ProbeGuard`` between the two methods that torch calls around the initialization."""
    backup, cleanup = stage._pre_metadata_inference_backup, stage._post_metadata_inference_cleanup
    guards: list[ProbeGuard] = []

    def guarded_backup() -> None:
        runs_probe = stage._inference_mode == InferenceMode.DYNAMIC
        if runs_probe:
            # Of all stages, before the first one is backed up: a refusal changes nothing.
            _check_nothing_pending(stages, schedule)
        if isinstance(stage.submod, FSDPModule):
            guards.append(ProbeGuard(stage.submod, runs_probe=runs_probe))
        backup()

    def guarded_cleanup() -> None:
        try:
            cleanup()
        finally:
            if guards:
                with record_function("lifecycle::metadata_inference_cleanup"):
                    guards.pop().restore()

    # On the instance: other stages keep torch's methods.
    stage._pre_metadata_inference_backup = guarded_backup  # type: ignore[method-assign]
    stage._post_metadata_inference_cleanup = guarded_cleanup  # type: ignore[method-assign]


def _observe(stage: _PipelineStageBase, root: FSDPModule) -> None:
    one_chunk, weight_one_chunk = stage.backward_one_chunk, stage.backward_weight_one_chunk

    def observed_one_chunk(
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        with part_of_backward(root, bwd_chunk_id, "whole" if full_backward else "input"):
            one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def observed_weight_one_chunk(bwd_chunk_id: int, last_backward: bool = False) -> None:
        with part_of_backward(root, bwd_chunk_id, "weight"):
            weight_one_chunk(bwd_chunk_id, last_backward)

    # On the instance: other stages keep torch's methods.
    stage.backward_one_chunk = observed_one_chunk  # type: ignore[method-assign]
    stage.backward_weight_one_chunk = observed_weight_one_chunk  # type: ignore[method-assign]


def _track_finalization(schedule: _PipelineSchedule) -> None:
    step = schedule.step

    @wraps(step)
    def tracked_step(*args: Any, finalize_gradients: bool = True, **kwargs: Any) -> Any:
        trains = schedule._has_backward
        result = step(*args, finalize_gradients=finalize_gradients, **kwargs)
        if trains:
            (_unfinalized.discard if finalize_gradients else _unfinalized.add)(schedule)
        return result

    schedule.step = tracked_step  # type: ignore[method-assign]  # on the instance


def _check_nothing_pending(stages: list[PipelineStage], schedule: _PipelineSchedule | None) -> None:
    pending = [
        f"'{fqn}' of stage {stage.stage_index}"
        for stage in stages
        for fqn in groups_with_pending_gradients(stage.submod)
    ]
    if pending or schedule in _unfinalized:
        where = ", ".join(pending) or "other stages"
        raise RuntimeError(
            "the pipeline switches between training and evaluation, which runs a "
            "metadata-inference probe, while gradients of an unfinalized step are pending in "
            f"{where}; the probe would discard them. Finalize first: run the last step of the "
            "accumulation with finalize_gradients=True"
        )
