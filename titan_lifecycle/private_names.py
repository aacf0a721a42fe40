"""Every private name of torch and torchtitan that this package reads, in one list.

The module that reads a part calls :func:`check` with it when it is imported, and
``titan-lifecycle doctor`` shows them all. FSDP2's stand here as names only: what they name is read
in ``fsdp_lifecycle/`` alone. That package cannot be imported where one is missing, and the doctor
has to say which. Names are listed by their owner, ``module`` or ``module:Class``, which is imported
only then: torchtitan picks its device when it is imported.
"""

from __future__ import annotations

import dis
from importlib import import_module
from types import CodeType
from typing import Any

import torch

_FSDP = "torch.distributed.fsdp._fully_shard"

PRIVATE_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "FSDP2": {
        "torch.distributed": ("_spmd_no_typecheck",),
        "torch.distributed._composable_state": ("_module_state_mapping",),
        "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
        "torch.distributed.fsdp._common_utils": ("collect_grad_tensors",),
        f"{_FSDP}._fsdp_common": ("DDPMeshInfo", "FSDPMeshInfo", "TrainingState", "is_bw"),
        f"{_FSDP}._fsdp_param:FSDPParam": (
            "_orig_size",
            "_unsharded_param",
            "mp_policy",
            "sharded_param",
        ),
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup": (
            "_module_fqn",
            "_partial_reduce_output",
            "_post_backward_pending",
            "_post_forward_indices",
            "_set_unsharded_grad_dtypes",
            "_training_state",
            "all_reduce_grads",
            "comm_ctx",
            "fsdp_params",
            "is_unsharded",
            "mesh_info",
            "modules",
            "post_backward",
            "post_forward_mesh_info",
            "pre_forward",
            "reduce_grads",
            "reshard",
            "reshard_after_backward",
            "wait_for_unshard",
        ),
        f"{_FSDP}._fsdp_state:FSDPState": (
            "_auto_reshard_after_forward",
            "_cast_forward_inputs",
            "_cast_output_dtype",
            "_fsdp_param_groups",
            "_lazy_init",
            "_modules",
            "_modules_to_run_forward",
            "_post_forward",
            "_root_post_backward_final_callback",
            "_state_ctx",
            "_states_to_backward_prefetch",
            "_states_to_forward_prefetch",
            "_training_state",
        ),
        f"{_FSDP}._fsdp_state:FSDPStateContext": (
            "all_states",
            "iter_forward_root",
            "manual_backward_finalization",
            "manual_backward_finalization_active",
            "post_backward_final_callback_queued",
        ),
        "torch.nn:Module": ("_forward_hooks", "_forward_pre_hooks"),
    },
    "autograd": {
        "torch._C": (
            "_current_autograd_node",
            "_current_graph_task_id",
            "_will_engine_execute_node",
        ),
        "torch._C._autograd": ("_get_sequence_nr", "_top_saved_tensors_default_hooks"),
        "torch.autograd.graph:Node": ("_sequence_nr",),
        "torch.autograd.variable:Variable": ("_execution_engine",),
        "torch.utils.checkpoint": ("CheckpointFunction",),
    },
    "pipelining": {
        "torch.distributed.pipelining:PipelineStage": (
            "_inference_mode",
            "_post_metadata_inference_cleanup",
            "_pre_metadata_inference_backup",
        ),
        "torch.distributed.pipelining._utils": ("InferenceMode",),
        "torch.distributed.pipelining.schedules:_PipelineSchedule": (
            "_has_backward",
            "_internal_losses",
        ),
        "torch.distributed.pipelining.schedules:PipelineScheduleSingle": ("_stage",),
        "torch.distributed.pipelining.schedules:PipelineScheduleMulti": ("_stages",),
        "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime": (
            "_deferred_stages",
            "_finalized_stages",
            "backward_counter",
            "bwd_recv_ops",
            "fwd_recv_ops",
            "unshard_ops",
            "unsharded_stages",
        ),
        "torch.distributed.pipelining.stage:_PipelineStageBase": (
            "_gradient_reduction_handle",
            "backward_state",
            "dw_runner",
        ),
    },
    "losses of torchtitan": {
        "torch": ("_check",),
        "torchtitan.components.loss:BaseLoss": ("_maybe_compile",),
        "torchtitan.components.loss:ChunkedLossWrapper": ("_combine_chunk_metrics",),
        "torchtitan.models.common.decoder:Decoder": ("_skip_lm_head",),
    },
    "jobs of torchtitan": {
        "torchtitan.components.metrics:LoggerContainer": ("_loggers",),
        "torchtitan.config.configurable:Configurable.Config": ("_owner",),
        "torchtitan.distributed.pipeline_parallel": ("_get_pipeline_metadata",),
        "torchtitan.experiments": ("_supported_experiments",),
        "torchtitan.models": ("_supported_models",),
    },
    "device of torchtitan": {
        "torchtitan.tools.utils": (
            "device_module",
            "device_type",
            "get_device_info",
            "get_peak_flops",
        ),
    },
    "CPU backend": {
        "torch.distributed._functional_collectives": ("all_to_all_single_autograd",),
        "torch.distributed.tensor.experimental._context_parallel._attention": (
            "_compiled_create_block_mask",
            "create_block_mask",
        ),
        "torch.nn:Module": ("_parameters",),
        "torchtitan.models.common.attention": (
            "_compiled_create_block_mask",
            "create_block_mask",
        ),
        "torchtitan.models.common.attention:FlexAttention": ("forward",),
        "torchtitan.models.common.token_dispatcher:AllToAllTokenDispatcher": (
            "_combine_token_exchange",
            "_dispatch_token_exchange",
        ),
        "torchtitan.models.gpt_oss.moe:GptOssGroupedExperts": ("forward",),
        "torchtitan.protocols.module:Module": ("_init_param", "_param_init"),
    },
}
"""By part, then by owner. Names without an underscore are undocumented, or replaced here."""


def unsupported(what: str, part: str = "FSDP2") -> str:
    """The message for a torch or torchtitan whose private contract is not the one relied upon."""
    return (
        f"titan_lifecycle does not know the {part} of torch {torch.__version__}: {what}. Supported "
        "are torch 2.15 and 2.16 with torchtitan 0.3; install those, or a titan_lifecycle release "
        "that supports what is installed."
    )


def missing(part: str) -> list[str]:
    """The names of ``part`` that what is installed lacks, as ``Class.name``.

    An instance attribute counts as present when its class annotates it or assigns it in
    ``__init__`` or ``init``.
    """
    found = []
    for path, names in PRIVATE_NAMES[part].items():
        owner = _owner(path)
        if owner is None:
            found.append(path.replace(":", "."))
            continue
        known = _known(owner)
        found += [f"{owner_name(path)}.{name}" for name in names if name not in known]
    return found


def check(part: str) -> None:
    """Refuse what is installed if it lacks a name of ``part``.

    Raises:
        ImportError: Names are missing; the message lists them.
    """
    if lacking := missing(part):
        raise ImportError(unsupported(f"it lacks {', '.join(lacking)}", part))


def owner_name(path: str) -> str:
    """The class in ``path``, or else the module."""
    module, _, cls = path.partition(":")
    return cls or module


def _owner(path: str) -> Any:
    module, _, names = path.partition(":")
    try:
        owner: Any = import_module(module)
        for name in names.split(".") if names else ():
            owner = getattr(owner, name)
    except (ImportError, AttributeError):
        return None
    return owner


def _known(owner: Any) -> set[str]:
    known = {*dir(owner)}
    for cls in getattr(owner, "__mro__", ()):
        known.update(cls.__dict__.get("__annotations__", ()))
        for name in ("__init__", "init"):  # what FSDPState knows of its modules is set in `init`
            code = getattr(cls.__dict__.get(name), "__code__", None)
            known.update(_assigned(code) if code else ())
    return known


def _assigned(code: CodeType) -> set[str]:
    """The attributes that ``code`` assigns; what it only reads may be missing."""
    return {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
