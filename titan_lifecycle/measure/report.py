"""``titan-lifecycle report``: a job with torchtitan's own lifecycle and with this one, compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from titan_lifecycle.jobs.errors import JobError, write_text
from titan_lifecycle.measure.step_cost import StepCost
from titan_lifecycle.run.load import STOCK

_MIB = 2**20

_ROWS: list[tuple[str, Callable[[StepCost], float], str]] = [
    ("reduce-scatters a step", lambda c: c.calls.get("reduce_scatter", 0), "{:.0f}"),
    ("all-gathers a step", lambda c: c.calls.get("all_gather", 0), "{:.0f}"),
    ("all-reduces a step", lambda c: c.calls.get("all_reduce", 0), "{:.0f}"),
    (
        "reduce-scattered MiB a step",
        lambda c: c.num_bytes.get("reduce_scatter", 0) / _MIB,
        "{:.2f}",
    ),
    ("all-gathered MiB a step", lambda c: c.num_bytes.get("all_gather", 0) / _MIB, "{:.2f}"),
    ("all-reduced MiB a step", lambda c: c.num_bytes.get("all_reduce", 0) / _MIB, "{:.2f}"),
    ("peak gathered weights MiB", lambda c: c.peak_gathered_weight_bytes / _MIB, "{:.2f}"),
    ("peak unsharded gradients MiB", lambda c: c.peak_unsharded_gradient_bytes / _MIB, "{:.2f}"),
    ("peak memory MiB", lambda c: c.peak_memory_bytes / _MIB, "{:.0f}"),
    ("step seconds (median)", lambda c: c.step_seconds, "{:.3f}"),
    ("step seconds (fastest)", lambda c: c.fastest_step_seconds, "{:.3f}"),
    ("tokens/s/device", lambda c: c.tokens_per_second_per_device, "{:.0f}"),
]


def report(job: str, overrides: list[str], json_file: Path | None = None) -> int:
    """Run ``job`` twice and print the comparison. Returns the exit status.

    The figures are of the rank that has the loss: with a pipeline, the first rank of the last
    stage. ``json_file`` gets them all.
    """
    try:
        costs = compare(job, overrides, {"stock": (STOCK,), "lifecycle": ()})
    except subprocess.CalledProcessError as failed:
        return failed.returncode
    print(table(costs))
    if json_file is not None:
        write_text(json_file, json.dumps({k: asdict(v) for k, v in costs.items()}, indent=2) + "\n")
    return 0


def compare(
    job: str, overrides: list[str], variants: Mapping[str, Sequence[str]]
) -> dict[str, StepCost]:
    """Run ``job`` once for each of ``variants``, which are further overrides by name.

    Raises:
        subprocess.CalledProcessError: A run failed; it has said why.
    """
    costs: dict[str, StepCost] = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, extra) in enumerate(variants.items()):
            file = Path(folder, f"{i}.json")
            print(f"running {job} ({name}) ...", file=sys.stderr, flush=True)
            _train([job, *overrides, *extra, "--lifecycle.report-file", str(file)])
            costs[name] = StepCost.read(file)
    return costs


def table(costs: dict[str, StepCost], more_rows: Sequence[Sequence[str]] = ()) -> str:
    """Markdown, one column a run; rows that are zero everywhere are left out."""
    rows = [
        [name, *(form.format(value(cost)) for cost in costs.values())]
        for name, value, form in _ROWS
        if any(value(cost) for cost in costs.values())
    ]
    rows += [list(row) for row in more_rows]
    text: str = tabulate(
        rows,
        headers=["", *costs],
        tablefmt="github",
        colalign=("left", *("right" for _ in costs)),
        disable_numparse=True,
    )
    return text


def _train(args: list[str]) -> None:
    if "RANK" in os.environ:
        raise JobError("titan-lifecycle report starts its own ranks; run it without torchrun")
    # Standard output is for the table.
    command = [sys.executable, "-P", "-m", "titan_lifecycle", "train", *args]
    subprocess.run(command, stdout=sys.stderr, check=True)
