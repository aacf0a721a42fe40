"""How many ranks a job has, how its degrees divide them, and which rank has the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from titan_lifecycle.jobs.errors import JobError
from titan_lifecycle.jobs.render_toml import REGISTRY

if TYPE_CHECKING:
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.trainer import Trainer

__all__ = ["V_SCHEDULES", "check_degrees", "default_world_size", "loss_rank", "num_stages"]

V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""Schedules whose last stage is on pipeline rank 0, where the first is too."""

_DIVIDING = tuple(
    f"{kind}_degree"
    for kind in (
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
    )
)
_EP = "expert_parallel_degree"


def loss_rank(world_size: int, pipeline_parallel_degree: int, schedule: str) -> int:
    """The global rank that reports the loss: the first one that holds the last stage."""
    if schedule in V_SCHEDULES:
        return 0
    return world_size // pipeline_parallel_degree * (pipeline_parallel_degree - 1)


def default_world_size(parallelism: ParallelismConfig, nproc_per_node: int) -> int:
    """The ranks of a job that is not running yet.

    ``nproc_per_node`` names the processes of one node: degrees that need more ranks than that are
    those of a job for several nodes.
    """
    needed: int = math.prod(max(getattr(parallelism, name), 1) for name in _DIVIDING)
    return max(nproc_per_node, needed)


def check_degrees(
    config: Trainer.Config, world_size: int, *, path: Path, sources: Mapping[str, str]
) -> ParallelDims:
    """The dimensions of the mesh of ``world_size`` processes.

    Raises:
        JobError: The degrees do not multiply to ``world_size``, or one of them is not valid.
    """
    from torchtitan.distributed.parallel_dims import ParallelDims

    parallelism = config.parallelism

    def degree(name: str) -> str:
        source = sources[f"parallelism.{name}"]
        value = getattr(parallelism, name)
        return f"{value}" if source == REGISTRY else f"{value} ({source})"

    degrees = {name: getattr(parallelism, name) for name in _DIVIDING}
    for name, value in {**degrees, _EP: parallelism.expert_parallel_degree}.items():
        if value < 1 and not (name == "data_parallel_shard_degree" and value == -1):
            raise JobError(f"{path}: {name} {degree(name)} must be at least 1")
    try:
        dims = ParallelDims.from_config(parallelism, world_size)
    except (AssertionError, ValueError):
        product = " x ".join(f"{name} {degree(name)}" for name in degrees)
        raise JobError(
            f"{path}: the parallel degrees do not multiply to the {world_size} "
            f"processes of this job: {product}"
            + ("" if -1 in degrees.values() else f" = {math.prod(degrees.values())}")
        ) from None
    ranks = dims.dp_shard * dims.cp * dims.tp
    if ranks % dims.ep:
        raise JobError(
            f"{path}: {_EP} {degree(_EP)} "
            f"must divide data_parallel_shard_degree {dims.dp_shard} x context_parallel_degree "
            f"{dims.cp} x tensor_parallel_degree {dims.tp} = {ranks}"
        )
    return dims


def num_stages(config: Trainer.Config, dims: ParallelDims, path: Path) -> int:
    """The stages of the pipeline on all its ranks; 1 without a pipeline.

    Raises:
        JobError: torchtitan cannot split the model into stages as the job says.
    """
    if not dims.pp_enabled:
        return 1
    if parts := config.parallelism.module_fqns_per_model_part:
        return len(parts)
    from torchtitan.distributed.pipeline_parallel import _get_pipeline_metadata

    assert config.model_spec is not None
    try:
        stages: int = _get_pipeline_metadata(dims, config.parallelism, config.model_spec.model)[0]
    except ValueError as error:
        raise JobError(f"{path}: [parallelism] {error}") from error
    return stages
