"""What ``gradient_reduction = "last_microbatch"`` costs a rank, from the job's real FSDP groups.

``python -m titan_lifecycle.plan.build JOB.toml [--section.key value]`` shards the job's model as
the trainer would, on the meta device and with torchtitan's fake process group, so that it needs
neither memory nor other ranks. It is a process of its own, because both settle global state.
"""

import json
import subprocess
import sys

from titan_lifecycle import cpu_backend
from titan_lifecycle.jobs.errors import JobError
from titan_lifecycle.jobs.job import read_header
from titan_lifecycle.measure.step_cost import deferred_gradients
from titan_lifecycle.run.load import load


def describe(path: str, overrides: list[str]) -> str:
    """One sentence on the cost, for the rank that has the loss.

    Raises:
        JobError: The model could not be sharded as the job says.
    """
    run = subprocess.run(
        [sys.executable, "-P", "-m", "titan_lifecycle.plan.build", path, *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        reason = run.stderr.strip().splitlines()[-1:] or ["no output"]
        raise JobError(f"{path}: cannot shard the model as the job says: {reason[0]}")
    sizes: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return deferred_gradients(sizes)


def unsharded_gradients(path: str, overrides: list[str]) -> dict[str, int]:
    """Bytes of each group's unsharded gradients on the rank that has the loss."""
    header = read_header(path)
    on_cpu = cpu_backend.resolve_device(header.device) == "cpu"
    if on_cpu:
        cpu_backend.activate()
    # Below, after the device is settled: torchtitan picks its device when it is imported.
    import torch
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import init_fake_mode, set_spmd_backend
    from torchtitan.tools.utils import device_type

    from titan_lifecycle.fsdp_lifecycle import unsharded_gradient_bytes

    job = load(header, overrides)
    config, degrees = job.config, job.config.parallelism
    if on_cpu:
        cpu_backend.adapt(config)
    init_fake_mode(job.world_size, rank=job.loss_rank)
    set_spmd_backend(degrees.spmd_backend)
    parallel_dims = ParallelDims.from_config(degrees, job.world_size)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    if config.override.imports:
        apply_overrides(config.override, config)
    with torch.device("meta"):
        model = spec.model.build()
    common = {
        "parallel_dims": parallel_dims,
        "training": config.training,
        "parallelism": degrees,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": config.dump_folder,
    }
    if parallel_dims.pp_enabled:
        _, parts, *_ = spec.pipelining_fn(
            model,
            **common,
            device=torch.device(device_type),
            model_config=spec.model,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=lambda *args: None,
        )
    else:
        parts = [spec.parallelize_fn(model, **common)]
    return unsharded_gradient_bytes(parts)


if __name__ == "__main__":
    print(json.dumps(unsharded_gradients(sys.argv[1], sys.argv[2:])))
