"""Names in job files that have changed: torchtitan's keys of 0.2, this package's, its classes.

The keys are consulted only for one that the loaded config does not have: none is shadowed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T", bound=type)

MOVED: dict[str, str] = {
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "job.custom_config_module": "job.module",
    "model.name": "job.module",
    "model.flavor": "job.config",
    "model.hf_assets_path": "hf_assets_path",
    "model.tokenizer_path": "hf_assets_path",
    "profiling": "profiler",
    "validation": "validator",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.batch_size": "training.local_batch_size",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.debug_moe_force_load_balance": "debug.moe_force_load_balance",
    "training.compile": "compile.enable",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "activation_checkpoint.mode": "activation_checkpoint.type",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
    "experimental.custom_import": "override.imports",
    "experimental.custom_args_module": "job.module",
}
"""Old dotted key, or section, to the new one. A section carries the keys not listed apart."""

_PARAM_GROUPS = (
    "an optimizer is now an array of tables [[optimizer.param_groups]] with pattern, "
    "optimizer_name and optimizer_kwargs = { lr = ..., betas = [..., ...] }"
)
_CONVERTERS = (
    "model converters are part of the model: choose a config function that has them "
    "(for example llama3_debugmodel_float8) as [job] config"
)

REPLACED: dict[str, str] = {
    "job.config_file": "the job file is the argument of `titan-lifecycle train`",
    "job.description": "it has no successor; use a comment",
    "job.use_for_integration_test": "it has no successor",
    "model": "the model comes with the config function: set [job] module and config",
    "model.converters": _CONVERTERS,
    "model.print_after_conversion": _CONVERTERS,
    "quantize": _CONVERTERS,
    "optimizer.name": _PARAM_GROUPS,
    "optimizer.lr": _PARAM_GROUPS,
    "optimizer.beta1": _PARAM_GROUPS,
    "optimizer.beta2": _PARAM_GROUPS,
    "optimizer.eps": _PARAM_GROUPS,
    "optimizer.weight_decay": _PARAM_GROUPS,
    "optimizer.early_step_in_backward": "torchtitan dropped it",
    "validation.local_batch_size": "validation uses training.local_batch_size",
    "validation.seq_len": "validation uses training.seq_len",
    "parallelism.disable_loss_parallel": "the loss follows parallelism.spmd_backend",
    "parallelism.context_parallel_rotate_method": "torchtitan dropped it",
    "parallelism.expert_tensor_parallel_degree": "torchtitan dropped it; set "
    "parallelism.expert_parallel_degree alone",
    "parallelism.expert_parallel_comm_backend": "choose a config function whose model uses that "
    "token dispatcher, or swap it with override.imports",
    "activation_checkpoint.selective_ac_option": "activation_checkpoint.type = 'selective' is "
    "always per operation",
    "activation_checkpoint.early_stop": "torchtitan dropped it",
    "memory_estimation": "torchtitan dropped it",
    "fault_tolerance": "use [job] module = 'torchft.llama3', which has its own section for it",
    "experimental": "set override.imports, or [job] module for a config class of your own",
}
"""Old dotted key, or section, without a one-to-one successor: what to do instead."""

HEAD_REDUCTION = "lifecycle.head_reduction"
HEAD_REDUCTION_OF_LOSS = (
    "head_reduction; in a job, and with lifecycle_config, set lifecycle.head_reduction"
)

OWN_KEYS: dict[str, str] = {
    "lifecycle.reduction": f"is now {HEAD_REDUCTION}",
    "loss.reduction": f"is now {HEAD_REDUCTION}, the one place for this setting",
}
"""Keys that this package had, and what became of them."""

RENAMED_CLASSES: dict[str, str] = {
    f"titan_lifecycle.{old}": f"titan_lifecycle.{new}"
    for old, new in {
        "chunked_loss.LifecycleChunkedLoss": "losses.chunked.LifecycleChunkedLoss",
        "chunked_loss.LinearCrossEntropyLoss": "losses.from_weight.LinearCrossEntropyLoss",
        "metrics.SummaryMetricsProcessor": "measure.summary.SummaryMetricsProcessor",
        "mtp.AlignedMTPLoss": "losses.mtp.AlignedMTPLoss",
        "mtp.MTPChunkedLoss": "losses.mtp.MTPChunkedLoss",
    }.items()
}
"""Import paths that ``titan-lifecycle config`` once printed as ``type``, and today's."""


def pointer(dotted: str) -> str | None:
    """What an old key (or section) became, to follow its name; None for one that never was."""
    if own := OWN_KEYS.get(dotted):
        return own
    prefix, rest = dotted, ""
    while prefix:
        if new := MOVED.get(prefix):
            return f"is a 0.2 name: it is now {_spell(new + rest)}"
        if advice := REPLACED.get(prefix):
            return f"is a 0.2 name: {advice}"
        prefix, _, last = prefix.rpartition(".")
        rest = f".{last}{rest}"
    return None


def _spell(dotted: str) -> str:
    section, _, key = dotted.rpartition(".")
    if section:
        return f"{key} in [{section}]"
    # A key after the first table header would belong to that table.
    if key in MOVED.values() and key not in ("profiler", "validator"):
        return f"{key}, written at the top of the file before the first [section]"
    return f"[{key}]"


def refuse_renamed(owner: str, given: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
    """Refuse an argument under its old name.

    Raises:
        TypeError: It names the new one.
    """
    for old, new in renamed.items():
        if old in given:
            raise TypeError(f"{owner} got '{old}', which is now {new}")


def with_renamed_fields(**renamed: str) -> Any:
    """A decorator for a dataclass: old field names, each with the setting that replaced it."""

    def decorate(cls: _T) -> _T:
        init: Any = cls.__dict__["__init__"]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **fields: Any) -> None:
            refuse_renamed(cls.__qualname__, fields, renamed)
            init(self, *args, **fields)

        # Of this class alone: a dataclass that inherits from it makes an __init__ of its own.
        type.__setattr__(cls, "__init__", checked)
        return cls

    return decorate
