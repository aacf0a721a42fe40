#!/usr/bin/env python
"""Make or check goldens: the loss and gradient norm of each step of a job, on one backend.

``goldens/<backend>/<job>.txt`` is in torchtitan's format, with provenance in further header lines::

    scripts/regenerate_goldens.py                      # write this machine's, all jobs
    scripts/regenerate_goldens.py --job llama3_fsdp    # one job
    scripts/regenerate_goldens.py --check              # compare, write nothing

A golden is written only when two independent runs agree bit for bit. A check compares bit for bit
where capability and versions are those of the golden, on its device, on a processor of the same
vendor, and on another vendor's where the job is known to agree (BIT_IDENTICAL). Elsewhere it
compares within TOLERANCE. It says which, and the largest relative difference of each metric.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "goldens"
CONFIGS = ROOT / "configs"
# TensorBoard stores a float32. torchtitan computes both in float32, so nothing is lost.
METRICS = {"loss": "loss_metrics/global_avg_loss", "grad_norm": "grad_norm"}

# Relative, per step: 30 times the one unit in the last place by which jobs on an Intel processor
# were measured to differ from goldens of an AMD one. Another library version may move more; then
# the goldens are to be renewed with it.
_MEASURED = 1.2e-7
TOLERANCE = {"loss": 30 * _MEASURED, "grad_norm": 30 * _MEASURED}

# Jobs measured to be bit-identical between processors of these vendors (AMD 25-17-1, Intel
# 6-207-2). Those that are not listed accumulate over microbatches or reduce over replicas, or have
# not been measured; the operation that differs is not known.
BIT_IDENTICAL = {
    frozenset({"AMD", "Intel"}): (
        "deepseek_v3_fsdp",
        "deepseek_v3_fsdp_ep",
        "deepseek_v3_mtp_chunked",
        "gpt_oss_fsdp",
        "llama3_fsdp",
        "llama3_fsdp_cp",
        "llama3_fsdp_tp",
    ),
}

# What must match for bits to be compared, the device as `same_bits` says. Not the version of this
# package: a change of ours that moves a bit is what a check is for.
FINGERPRINT = ("device", "capability", "torch", "torchtitan", "communication")

COMMON = ("--debug.deterministic", "--debug.seed", "42", "--dataloader.dataset", "lifecycle_fixed")
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
    """The header, by name, and one row a step, by metric.

    The older form of two columns, step and loss, has no header.
    """

    steps: Mapping[int, Mapping[str, float]]
    header: Mapping[str, str] = field(default_factory=dict)

    def text(self, *, two_columns: bool = False) -> str:
        columns = ["loss"] if two_columns else list(METRICS)
        lines = []
        if not two_columns:
            lines = [f"# {name}: {value}" for name, value in self.header.items()]
            lines.append(f"# step {' '.join(columns)}")
        for step, values in self.steps.items():
            lines.append(" ".join([str(step), *(repr(values[name]) for name in columns)]))
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Golden:
        header, columns, steps = {}, ["loss"], dict[int, dict[str, float]]()
        for line in text.splitlines():
            if line.startswith("# step "):
                columns = line.split()[2:]
            elif line.startswith("# "):
                name, _, value = line[2:].partition(": ")
                header[name] = value
            elif line:
                step, *values = line.split()
                steps[int(step)] = dict(zip(columns, map(float, values), strict=True))
        return cls(steps, header)


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
    failures = []
    try:
        backend = this_backend()
        if args.backend not in (None, backend):
            raise GoldenError(f"this machine's backend is {backend}; it cannot make {args.backend}")
        jobs = args.job or jobs_of(backend)
        for job in jobs:
            if not (CONFIGS / f"{job}.toml").exists():
                raise GoldenError(f"{job} is no shipped job; {backend} has {jobs_of(backend)}")
        if not args.check and find_spec("matplotlib") is None:
            raise GoldenError(
                "matplotlib, which draws old and new curves, is not installed: pip install "
                "'titan-lifecycle[plot]', or run this with the environment of make test"
            )
        if args.check and not (GOLDENS / backend).is_dir():
            raise GoldenError(
                f"there are no goldens for {backend}; make them on this machine with "
                f"{command(args.job or ())} and have them reviewed"
            )
    except GoldenError as error:
        jobs, failures = [], [str(error)]
    for job in jobs:
        try:
            failure = check(job, backend) if args.check else regenerate(job, backend, args)
        except GoldenError as error:
            failure = str(error)
        except Exception as error:  # of any kind: the other jobs take minutes each, and are good
            failure = f"{job}: {type(error).__name__}: {error}"
        if failure is not None:
            failures.append(failure)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def command(jobs: Sequence[str]) -> str:
    return " ".join(["scripts/regenerate_goldens.py", *(f"--job {job}" for job in jobs)])


def this_backend() -> str:
    """``cpu_gloo``, or ``cuda_`` or ``rocm_`` and the device's model, as in ``cuda_a10g``."""
    import torch

    if not torch.cuda.is_available():
        return "cpu_gloo"
    kind = "rocm" if torch.version.hip else "cuda"
    words = re.findall(r"\w+", torch.cuda.get_device_name().lower())
    # As in "NVIDIA A100-SXM4-80GB" or "AMD Instinct MI350X": the model is the first with a digit.
    model = next((word for word in words if re.search(r"\d", word)), "_".join(words))
    return f"{kind}_{model}"


def jobs_of(backend: str) -> list[str]:
    """The shipped jobs that one machine of this kind runs: debug models, on 4 ranks or on 8."""
    from titan_lifecycle.jobs.job import read_header

    sizes = (4,) if backend == "cpu_gloo" else (4, 8)
    headers = [read_header(path) for path in sorted(CONFIGS.glob("*.toml"))]
    return [h.path.stem for h in headers if "debugmodel" in h.config and h.nproc_per_node in sizes]


def settings(job: str, backend: str) -> tuple[str, ...]:
    """What a golden run changes in its job. On the CPU it is small: `make test` runs them all."""
    from titan_lifecycle.jobs.job import read_header

    if backend != "cpu_gloo":
        return (*COMMON, *GPU)
    document = read_header(CONFIGS / f"{job}.toml").file.document
    num_cp_ranks = document.get("parallelism", {}).get("context_parallel_degree", 1)
    # Context parallelism splits a sequence into whole blocks of FlexAttention's mask.
    seq_len = 64 if num_cp_ranks == 1 else 128 * num_cp_ranks
    # A loss is a mean that hides last bits at first: another order of additions in
    # llama3_fsdp_accumulate shows at step 8.
    num_steps = 8 if "global_batch_size" in document.get("training", {}) else 5
    return (*COMMON, "--training.seq_len", str(seq_len), "--training.steps", str(num_steps))


def environment(backend: str) -> dict[str, str]:
    return CPU_ENVIRONMENT if backend == "cpu_gloo" else {}


def measure(job: str, backend: str) -> dict[int, dict[str, float]]:
    """Run ``job`` through the ordinary launcher; the metrics as TensorBoard has them."""
    folder = Path(tempfile.mkdtemp(prefix=f"{job}_"))
    arguments = [
        *(sys.executable, "-m", "titan_lifecycle", "train", str(CONFIGS / f"{job}.toml")),
        *(*settings(job, backend), "--dump_folder", str(folder)),
    ]
    run = subprocess.run(
        arguments,
        env=os.environ | environment(backend),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise GoldenError(
            f"{job}: the run failed; its ranks' logs are in {folder}:\n{run.stderr[-2000:]}"
        )
    metrics = read_metrics(folder)
    shutil.rmtree(folder)
    return metrics


def read_metrics(dump_folder: Path) -> dict[int, dict[str, float]]:
    (directory,) = (dump_folder / "tb").iterdir()
    events = EventAccumulator(str(directory))
    events.Reload()
    columns = {
        name: {event.step: event.value for event in events.Scalars(tag)}
        for name, tag in METRICS.items()
    }
    return {step: {name: columns[name][step] for name in METRICS} for step in columns["loss"]}


def provenance(job: str, backend: str) -> dict[str, str]:
    import torch

    from titan_lifecycle.jobs.job import read_header
    from titan_lifecycle.run.load import load

    path = CONFIGS / f"{job}.toml"
    loaded = load(read_header(path), list(settings(job, backend)))
    degrees = loaded.config.parallelism
    named = {
        "HSDP": degrees.data_parallel_replicate_degree,
        "FSDP": degrees.data_parallel_shard_degree,
        "TP": degrees.tensor_parallel_degree,
        "CP": degrees.context_parallel_degree,
        "EP": degrees.expert_parallel_degree,
        "PP": degrees.pipeline_parallel_degree,
    }
    if backend == "cpu_gloo":
        device, capability = cpu()
        communication = "gloo, torch's own"
    else:
        device = torch.cuda.get_device_name()
        major, minor = torch.cuda.get_device_capability()
        toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        capability = f"{major}.{minor}, {toolkit}"
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        communication = f"{'RCCL' if torch.version.hip else 'NCCL'} {nccl}"
    run = ["titan-lifecycle", "train", f"configs/{job}.toml", *settings(job, backend)]
    variables = [f"{name}={value}" for name, value in environment(backend).items()]
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
        "run": shlex.join([*variables, *run]),
        "job_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "date": datetime.date.today().isoformat(),
    }


def cpu() -> tuple[str, str]:
    """The processor's model, and the instruction set that a run on it is pinned to."""
    cpuinfo = dict[str, str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        cpuinfo.setdefault(name.strip(), value.strip())
    machine = platform.machine()
    pinned = CPU_ENVIRONMENT["ATEN_CPU_CAPABILITY"]
    # Arm has neither line, and ignores the variable.
    has_it = pinned in cpuinfo.get("flags", "").split()
    # A name as "AMD EPYC" covers generations, whose caches differ, and with them the order of sums.
    generation = [cpuinfo[key] for key in ("cpu family", "model", "stepping") if key in cpuinfo]
    name = " ".join([cpuinfo.get("model name", machine), "-".join(generation)]).strip()
    return name, pinned if has_it else machine


def regenerate(job: str, backend: str, args: argparse.Namespace) -> str | None:
    first, second = measure(job, backend), measure(job, backend)
    if difference := first_difference(first, second):
        return f"{job}: two runs differ, nothing was written: {difference}"
    path = GOLDENS / backend / f"{job}.txt"
    old = Golden.parse(path.read_text()) if path.exists() else None
    new = Golden(first, provenance(job, backend))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(new.text(two_columns=args.two_columns))
    os.replace(temporary, path)
    if old is None:
        print(f"{job}: new golden, {len(first)} steps")
    else:
        print(f"{job}: {summary(old.steps, first)}")
        if first_difference(old.steps, first):
            print(f"{job}: old and new curves in {plot(job, old.steps, first, args.plots)}")
    return None


def check(job: str, backend: str) -> str | None:
    golden = load(job, backend)
    return compare(job, golden, Golden(measure(job, backend), provenance(job, backend)))


def load(job: str, backend: str) -> Golden:
    path = GOLDENS / backend / f"{job}.txt"
    if not path.exists():
        raise GoldenError(f"{job}: there is no golden for {backend}; make it with {command([job])}")
    return Golden.parse(path.read_text())


def compare(job: str, golden: Golden, measured: Golden) -> str | None:
    """What is wrong, or None. Says on standard output how it compared."""
    renew = f"if the change is meant, renew it with {command([job])}"
    here = measured.header
    there = golden.header or here  # the form of two columns does not say
    for name, what in (("job_sha256", "the job file has"), ("run", "the settings of a run have")):
        if there[name] != here[name]:
            return f"{job}: {what} changed since the golden was made; {renew}"
    reasons = other_machine(job, golden, measured)
    how = "bit for bit"
    if reasons:
        limits = ", ".join(f"{name} {limit:g}" for name, limit in TOLERANCE.items())
        how = f"within a relative tolerance ({limits}), because {'; '.join(reasons)}"
    if difference := first_difference(
        golden.steps, measured.steps, tolerance=TOLERANCE if reasons else None
    ):
        largest = largest_differences(golden.steps, measured.steps)
        return f"{job}: {difference}; compared {how}; {largest}; {renew}"
    print(f"{job}: agrees {how}; {largest_differences(golden.steps, measured.steps)}")
    return None


def other_machine(job: str, golden: Golden, measured: Golden) -> list[str]:
    """Why the bits of ``job`` may differ; nothing where they must not."""
    here, there = measured.header, golden.header
    if not there:
        return ["the golden does not say where it was made"]
    return [
        f"{name} {there[name]!r} became {here[name]!r}"
        for name in FINGERPRINT
        if there[name] != here[name]
        and not (name == "device" and same_bits(job, there[name], here[name]))
    ]


def same_bits(job: str, device: str, other: str) -> bool:
    """Whether ``job`` gives the same bits on these two processors, as far as is known."""
    vendors = frozenset({vendor(device), vendor(other)})
    if None in vendors:
        return False
    return len(vendors) == 1 or job in BIT_IDENTICAL.get(vendors, ())


def vendor(device: str) -> str | None:
    """Who made the processor; None where that is not known, as for a GPU."""
    return next(
        (v for v in ("AMD", "Intel") if re.match(rf"{v}(\(R\))? (EPYC|Ryz|Xeon)", device)), None
    )


def largest_differences(
    old: Mapping[int, Mapping[str, float]], new: Mapping[int, Mapping[str, float]]
) -> str:
    """The largest relative difference of each metric, over the steps that both have."""
    largest = {
        name: max(
            (
                abs(new[step][name] - values[name]) / abs(values[name])
                for step, values in old.items()
                if step in new and name in values and name in new[step]
            ),
            default=math.nan,
        )
        for name in METRICS
    }
    parts = [f"{name} {value:.1e}" for name, value in largest.items() if not math.isnan(value)]
    return f"largest relative difference: {', '.join(parts) or 'no common step'}"


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
        (
            abs(new[step][name] - value) / abs(value)
            for step, values in old.items()
            if step in new
            for name, value in values.items()
        ),
        default=math.nan,
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

    figure, axes = pyplot.subplots(
        *(2, len(METRICS)), figsize=(10, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    figure.suptitle(job)
    for (curves, differences), name in zip(axes.T, METRICS, strict=True):
        for label, steps, style in (("old", old, "o-"), ("new", new, "x--")):
            rows = {step: values[name] for step, values in steps.items() if name in values}
            curves.plot(list(rows), list(rows.values()), style, label=label)
        # The curves lie on each other where only the last bits differ.
        relative = {
            step: abs(new[step][name] - values[name]) / abs(values[name])
            for step, values in old.items()
            if name in values and step in new
        }
        differences.plot(list(relative), list(relative.values()), "o-", color="tab:red")
        differences.set_ylim(bottom=0)
        differences.ticklabel_format(axis="y", scilimits=(0, 0))
        differences.set(xlabel="step", ylabel="|new - old| / |old|")
        curves.set(ylabel=name)
        curves.legend()
        differences.xaxis.get_major_locator().set_params(integer=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job}.png"
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())
