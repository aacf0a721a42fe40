"""What a rank test leaves to the next one when it fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.conftest import environment


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_failure_skips_and_fails_no_later_test():
    """After ranks that raised, and after ranks that ended or hang."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "tests/cpu/failing_ranks.py", "-v"),
            *("-p", "no:cacheprovider", "--color=no"),
        ],
        env=environment(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    outcomes = re.findall(r"::test_(\d)\w* (PASSED|FAILED|SKIPPED)", done.stdout)
    assert dict(outcomes) == {
        "1": "PASSED",
        "2": "FAILED",
        "3": "PASSED",
        "4": "FAILED",
        "5": "PASSED",
    }, done.stdout + done.stderr
    assert "raised everywhere" in done.stdout
    assert "Timeout" in done.stdout
