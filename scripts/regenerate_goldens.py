#!/usr/bin/env python
"""Make or check goldens: the loss and gradient norm of each step of a job, on one backend.

``goldens/<backend>/<job>.txt`` is in torchtitan's format, with provenance in further header lines::

    scripts/regenerate_goldens.py                      # write this machine's, all jobs
    scripts/regenerate_goldens.py --job llama3_fsdp    # one job
    scripts/regenerate_goldens.py --check              # compare, write nothing

A golden is written when two independent runs agree bit for bit. A check compares bit for bit where
the device, its capability and the versions are those of the golden, and within TOLERANCE elsewhere;
it says which.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "goldens"
CONFIGS = ROOT / "configs"
METRICS = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm"}

# Relative, per step. Another instruction set or library version moves the last bits, and training
# spreads them: AVX2 and AVX-512 differ from the fourth step on.
TOLERANCE = {"loss": 1e-3, "grad_norm": 2e-2}

# What must match for bits to be compared. Not the version of this package: a change of ours that
# moves a bit is what a check is for.
FINGERPRINT = ("device", "capability", "torch", "torchtitan", "communication")

COMMON = ("--debug.deterministic", "--debug.seed", "42", "--dataloader.dataset", "lifecycle_fixed")
CPU = ("--training.seq_len", "64", "--training.steps", "8")
GPU = ("--training.steps", "10")

# One thread, and one instruction set that AMD and Intel processors share.
CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
}


class GoldenError(Exception):
    """A golden is missing, or does not agree with what was asked or measured."""


@dataclass(frozen=True)
class Golden:
    """The header, by name, and one row a step, by metric."""

    header: Mapping[str, str]
    steps: Mapping[int, Mapping[str, float]]

    def text(self, *, columns: Sequence[str] = tuple(METRICS)) -> str:
        lines = [f"# {name}: {value}" for name, value in self.header.items()]
        lines.append(f"# step {' '.join(columns)}")
        for step, values in self.steps.items():
            lines.append(" ".join([str(step), *(repr(values[name]) for name in columns)]))
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Golden:
        header, columns, steps = {}, list[str](), dict[int, dict[str, float]]()
        for line in text.splitlines():
            if line.startswith("# step "):
                columns = line.split()[2:]
            elif line.startswith("# "):
                name, _, value = line[2:].partition(": ")
                header[name] = value
            elif line:
                step, *values = line.split()
                steps[int(step)] = dict(zip(columns, map(float, values), strict=True))
        return cls(header, steps)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", help="must be this machine's; default: this machine's")
    parser.add_argument("--job", action="append", help="a shipped job; default: all that run here")
    parser.add_argument("--check", action="store_true", help="compare with the goldens only")
    parser.add_argument("--two-columns", action="store_true", help="write step and loss only")
    parser.add_argument(
        "--plots", type=Path, default=ROOT / "outputs/goldens", help="folder for old/new curves"
    )
    args = parser.parse_args(argv)
    try:
        backend = this_backend()
        if args.backend not in (None, backend):
            raise GoldenError(f"this machine's backend is {backend}; it cannot make {args.backend}")
        jobs = args.job or jobs_of(backend)
        if args.check and not (GOLDENS / backend).is_dir():
            raise GoldenError(
                f"there are no goldens for {backend}; make them on this machine with "
                f"{command(jobs)} and have them reviewed"
            )
        failures = [
            message
            for job in jobs
            if (message := (check if args.check else regenerate)(job, backend, args)) is not None
        ]
    except GoldenError as error:
        failures = [str(error)]
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def command(jobs: Sequence[str]) -> str:
    return "scripts/regenerate_goldens.py " + " ".join(f"--job {job}" for job in jobs)


def this_backend() -> str:
    """``cpu_gloo``, or ``cuda_`` or ``rocm_`` and the device's model, as in ``cuda_a10g``."""
    import torch

    if not torch.cuda.is_available():
        return "cpu_gloo"
    kind = "rocm" if torch.version.hip else "cuda"
    name = re.sub(r"(?i)nvidia|amd|instinct|geforce|tesla|\(.*\)", "", torch.cuda.get_device_name())
    model = re.split(r"[\s_-]+", name.strip().lower())[0]
    return f"{kind}_{model}"


def jobs_of(backend: str) -> list[str]:
    """The shipped jobs that one machine of this kind runs: debug models, on 4 ranks or on 8."""
    from titan_lifecycle.job import read_header

    sizes = (4,) if backend == "cpu_gloo" else (4, 8)
    headers = [read_header(path) for path in sorted(CONFIGS.glob("*.toml"))]
    return [h.path.stem for h in headers if "debugmodel" in h.config and h.nproc_per_node in sizes]


def measure(job: str, backend: str, overrides: Sequence[str] = ()) -> dict[int, dict[str, float]]:
    """Run ``job`` through the ordinary launcher; the metrics as TensorBoard has them."""
    on_cpu = backend == "cpu_gloo"
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *(sys.executable, "-m", "titan_lifecycle", "train", str(CONFIGS / f"{job}.toml")),
            *(*COMMON, *(CPU if on_cpu else GPU), *overrides, "--dump_folder", folder),
        ]
        environment = os.environ | (CPU_ENVIRONMENT if on_cpu else {})
        run = subprocess.run(
            arguments, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            raise GoldenError(f"{job}: the run failed:\n{run.stderr[-2000:]}")
        (directory,) = Path(folder, "tb").iterdir()
        events = EventAccumulator(str(directory))
        events.Reload()
        columns = {
            name: {event.step: event.value for event in events.Scalars(tag)}
            for name, tag in METRICS.items()
        }
    return {step: {name: columns[name][step] for name in METRICS} for step in columns["loss"]}


def provenance(job: str, backend: str) -> dict[str, str]:
    import torch

    from titan_lifecycle.job import load_job

    path = CONFIGS / f"{job}.toml"
    # Only to read the degrees: the device does not matter, but CUDA graphs would be refused.
    loaded = load_job(path, device_defaults={"training.disable_cuda_graphs": True})
    degrees = loaded.config.parallelism
    named = {
        "HSDP": degrees.data_parallel_replicate_degree,
        "FSDP": degrees.data_parallel_shard_degree,
        "TP": degrees.tensor_parallel_degree,
        "CP": degrees.context_parallel_degree,
        "EP": degrees.expert_parallel_degree,
        "PP": degrees.pipeline_parallel_degree,
    }
    on_cpu = backend == "cpu_gloo"
    if on_cpu:
        device = next(
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
        capability, communication = CPU_ENVIRONMENT["ATEN_CPU_CAPABILITY"], "gloo"
    else:
        device = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        capability = f"{major}.{minor} {torch.version.hip or torch.version.cuda}"
        communication = "nccl " + ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "config": job,
        "ngpu": str(loaded.header.nproc_per_node),
        "parallelism": ", ".join(f"{k}={v}" for k, v in named.items() if v != 1),
        "backend": backend,
        "device": device,
        "capability": capability,
        "communication": communication,
        "torch": torch.__version__,
        "torchtitan": version("torchtitan"),
        "titan_lifecycle": version("titan_lifecycle"),
        "seed": "42",
        "command": command([job]),
        "job_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "date": datetime.date.today().isoformat(),
    }


def regenerate(job: str, backend: str, args: argparse.Namespace) -> str | None:
    first, second = measure(job, backend), measure(job, backend)
    if difference := first_difference(first, second):
        return f"{job}: two runs differ, nothing was written: {difference}"
    path = GOLDENS / backend / f"{job}.txt"
    new = Golden(provenance(job, backend), first)
    if path.exists():
        old = Golden.parse(path.read_text())
        print(f"{job}: {summary(old.steps, new.steps)}")
        if old.steps != new.steps:
            print(f"{job}: old and new curves in {plot(job, old.steps, new.steps, args.plots)}")
    else:
        print(f"{job}: new golden, {len(first)} steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(new.text(columns=("loss",) if args.two_columns else tuple(METRICS)))
    os.replace(temporary, path)
    return None


def check(job: str, backend: str, args: argparse.Namespace) -> str | None:
    path = GOLDENS / backend / f"{job}.txt"
    if not path.exists():
        return f"{job}: there is no golden for {backend}; make it with {command([job])}"
    return compare(
        Golden.parse(path.read_text()), Golden(provenance(job, backend), measure(job, backend))
    )


def compare(golden: Golden, measured: Golden) -> str | None:
    """What is wrong, or None. Says on standard output how it compared."""
    job = golden.header["config"]
    renew = f"if the change is meant, renew it with {command([job])}"
    if golden.header["job_sha256"] != measured.header["job_sha256"]:
        return f"{job}: the job file has changed since the golden was made; {renew}"
    others = [k for k in FINGERPRINT if golden.header[k] != measured.header[k]]
    if difference := first_difference(
        golden.steps, measured.steps, tolerance=TOLERANCE if others else None
    ):
        return f"{job}: {difference}; {renew}"
    how = "bit for bit"
    if others:
        changed = ", ".join(f"{k} {golden.header[k]} -> {measured.header[k]}" for k in others)
        how = f"within {TOLERANCE} relative, because {changed}"
    print(f"{job}: agrees {how}")
    return None


def first_difference(
    old: Mapping[int, Mapping[str, float]],
    new: Mapping[int, Mapping[str, float]],
    *,
    tolerance: Mapping[str, float] | None = None,
) -> str | None:
    if list(old) != list(new):
        return f"steps {list(old)} became {list(new)}"
    for step, values in old.items():
        for name, value in values.items():
            other = new[step][name]
            same = (
                value == other
                if tolerance is None
                else math.isclose(value, other, rel_tol=tolerance[name])
            )
            if not same:
                return f"first difference at step {step}, {name}: {value!r} became {other!r}"
    return None


def summary(old: Mapping[int, Mapping[str, float]], new: Mapping[int, Mapping[str, float]]) -> str:
    difference = first_difference(old, new)
    if difference is None:
        return "unchanged"
    largest = max(
        abs(new[step][name] - value) / abs(value)
        for step, values in old.items()
        if step in new
        for name, value in values.items()
    )
    return f"{difference}; largest relative difference {largest:.2e}"


def plot(
    job: str,
    old: Mapping[int, Mapping[str, float]],
    new: Mapping[int, Mapping[str, float]],
    folder: Path,
) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(METRICS), figsize=(10, 4), layout="constrained")
    for axis, name in zip(axes, METRICS, strict=True):
        for label, steps, style in (("old", old, "o-"), ("new", new, "x--")):
            rows = {step: values[name] for step, values in steps.items() if name in values}
            axis.plot(list(rows), list(rows.values()), style, label=label)
        axis.set(title=f"{job}: {name}", xlabel="step")
        axis.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job}.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
