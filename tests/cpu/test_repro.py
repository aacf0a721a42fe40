"""The upstream reproductions: each shows its gap on this torch, and this package closes it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.conftest import environment

PROGRAMS = Path(__file__).parent.parent.parent / "scripts" / "repro"

# What each program observes: without this package, and through it.
OBSERVED = {
    "pytorch_203176": (
        [
            "GAP reduce-scatters of the inner backward: 3, expected 0 or 1",
            "GAP reduce-scatters of the step: 5, expected 3, one a group",
            "GAP frozen decoder: lm_head's gradient is 0.00 x expected",
            "GAP after evaluation: lm_head gathered True, stale marker True, expected neither",
        ],
        [
            "ok  reduce-scatters of the inner backward: 0, expected 0 or 1",
            "ok  reduce-scatters of the step: 3, expected 3, one a group",
            "ok  frozen decoder: lm_head's gradient is 1.00 x expected",
            "ok  after evaluation: lm_head gathered False, stale marker False, expected neither",
        ],
    ),
    "pytorch_203177": (
        [
            "GAP all-reduces after set_requires_all_reduce(False): 1, expected 0",
            "GAP all-gathers of a step: 2, expected 1 as before",
            "GAP reshard_after_forward=2 reshards: False, expected True; setter: "
            "reshard_after_forward should be a bool, got <class 'int'>",
        ],
        [
            "ok  all-reduces after set_requires_all_reduce(False): 0, expected 0",
            "ok  all-gathers of a step: 1, expected 1 as before",
            "ok  reshard_after_forward=2 reshards: True, expected True; setter: "
            "reshard_after_forward should be a bool, got <class 'int'>",
        ],
    ),
    "pytorch_203178": (
        [
            "GAP first step: lm_head's gradient is 1.50 x expected",
            "ok  second step: lm_head's gradient is 1.00 x expected",
            "GAP step after an evaluation: lm_head's gradient is 1.50 x expected",
        ],
        [
            "ok  first step: lm_head's gradient is 1.00 x expected",
            "ok  second step: lm_head's gradient is 1.00 x expected",
            "ok  step after an evaluation: lm_head's gradient is 1.00 x expected",
        ],
    ),
}


@pytest.mark.jobs
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", OBSERVED)
def test_reproduction(name, tmp_path):
    # Side by side: two ranks each, and most of the time is one process that imports torch.
    runs = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / f"{name}.py", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=tmp_path,
        )
        for arguments in ([], ["--fixed"])
    ]
    outputs = [run.communicate(timeout=100) for run in runs]
    (gap, gap_errors), (fixed, fixed_errors) = outputs
    expected_gap, expected_fixed = OBSERVED[name]
    assert gap.splitlines() == [*expected_gap, "the gap is open"], gap_errors
    assert fixed.splitlines() == [*expected_fixed, "the gap is closed"], fixed_errors
    assert [run.returncode for run in runs] == [1, 0]


def test_every_program_is_tested():
    assert {path.stem for path in PROGRAMS.glob("*.py")} == set(OBSERVED)


@pytest.mark.parametrize("name", OBSERVED)
def test_program_stands_alone(name):
    """Upstream reads and runs it without this package, in a minute."""
    source = (PROGRAMS / f"{name}.py").read_text()
    unconditional = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert not [line for line in unconditional if "titan" in line]
    code = source.split('"""')[2].splitlines()
    lines = [line for line in code if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 85
