"""``titan-lifecycle doctor``, on this torch and on ones that lack a name or have a fix."""

import json
import re
import subprocess
import sys

import pytest

from tests.cpu.conftest import TITAN_LIFECYCLE, environment
from titan_lifecycle import doctor
from titan_lifecycle.pipeline import _UPSTREAM_REGISTRATION

# Each change to torch in a process of its own, forked from one that has imported what takes long,
# and nothing that checks names.
SIMULATE = """
import contextlib, io, json, multiprocessing, sys, traceback
import torchtitan.trainer
from titan_lifecycle.cli import main

assert "titan_lifecycle.fsdp_lifecycle" not in sys.modules
context = multiprocessing.get_context("fork")

def simulate(change, results):
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(change, {})
            status = main(["doctor", "--quick"])
    except BaseException:
        status = traceback.format_exc()
    results.send((status, output.getvalue()))

done = {}
for name, change in json.load(sys.stdin).items():
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=simulate, args=(change, sender))
    process.start()
    done[name] = receiver.recv()
    process.join()
json.dump(done, sys.stdout)
"""

# How another torch would differ, and what of it the doctor says.
BROKEN = {
    "method": (
        """
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
del FSDPState._post_forward
""",
        ["MISSING FSDP2: ", "it lacks FSDPState._post_forward.", "not checked pipelining: "],
    ),
    "attribute": (
        # Assigned in __init__ under another name.
        """
import inspect, textwrap
from torch.distributed.fsdp._fully_shard import _fsdp_state
context = _fsdp_state.FSDPStateContext
source = textwrap.dedent(inspect.getsource(context.__init__))
exec(source.replace("post_backward_final_callback_queued", "callback_queued"), vars(_fsdp_state))
context.__init__ = _fsdp_state.__init__
""",
        ["MISSING FSDP2: ", "it lacks FSDPStateContext.post_backward_final_callback_queued."],
    ),
    "class": (
        """
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
del _fsdp_param_group.FSDPParamGroup
""",
        [
            "MISSING FSDP2: ",
            "it lacks torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
        ],
    ),
    "pipelining": (
        """
from torch.distributed.pipelining import PipelineStage
del PipelineStage._post_metadata_inference_cleanup
""",
        [
            "ok FSDP2: titan_lifecycle.fsdp_lifecycle.private loads",
            "MISSING pipelining: ",
            "it lacks PipelineStage._post_metadata_inference_cleanup",
        ],
    ),
}
UPSTREAM = f"""
from torch.distributed.pipelining import PipelineStage
PipelineStage.{_UPSTREAM_REGISTRATION} = lambda self, callback: None
"""


def run(*command, **kwargs):
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=200,
        check=False,
        **kwargs,
    )


def unwrapped(report):
    return re.sub(r"\s+", " ", report)


@pytest.fixture(scope="module")
def simulated():
    """Exit status and report of the doctor on each simulated torch."""
    changes = {name: code for name, (code, _) in BROKEN.items()} | {"upstream": UPSTREAM}
    done = run(sys.executable, "-c", SIMULATE, input=json.dumps(changes))
    assert done.returncode == 0, done.stderr
    return {name: (s, unwrapped(report)) for name, (s, report) in json.loads(done.stdout).items()}


@pytest.mark.jobs
@pytest.mark.timeout(240)
def test_here_all_is_well():
    done = run(*TITAN_LIFECYCLE, "doctor")
    assert done.returncode == 0, done.stderr
    report = unwrapped(done.stdout)
    assert "MISSING" not in report and "unknown" not in report
    assert report.endswith("titan_lifecycle fits this torch and torchtitan ")
    for name in ("FSDPState: ", "FSDPParamGroup: ", "PipelineStage: ", "_PipelineSchedule: "):
        assert f"ok {name}" in report
    assert re.search(r"torch 2\.\d+\S* torchtitan 0\.3", report)
    assert re.search(r"capability \w+ GPUs ", report)
    for issue in (203176, 203177, 203178):
        assert f"open pytorch/pytorch#{issue}: " in report
    assert "- GAP reduce-scatters of the step: 5, expected 3" in report
    assert report.count("no upstream fix in this torch") == 3


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_contract_is_reported(name, simulated):
    status, report = simulated[name]
    assert status == 1, status
    for text in BROKEN[name][1]:
        assert text in report
    assert "titan_lifecycle does not fit this torch or torchtitan: see MISSING" in report


def test_an_upstream_registration_is_reported(simulated):
    status, report = simulated["upstream"]
    assert status == 0, status
    assert f"upstream fix in this torch: PipelineStage.{_UPSTREAM_REGISTRATION}, which" in report
    assert report.count("upstream fix in this torch") == 1


def test_what_the_reproductions_say_is_reported(tmp_path, monkeypatch, capsys):
    """A closed gap, a program that fails, which also exits with status 1, and one that hangs."""
    programs = {
        203176: "print('ok  seen'); print('the gap is closed')",
        203177: "raise ValueError('boom')",
        203178: "import time; time.sleep(60)",
    }
    for issue, code in programs.items():
        (tmp_path / f"pytorch_{issue}.py").write_text(code)
    monkeypatch.setattr(doctor, "_programs", lambda: tmp_path)
    monkeypatch.setattr(doctor, "_REPRODUCTION_SECONDS", 3)
    doctor._print_gaps(True)
    report = unwrapped(capsys.readouterr().out)
    assert "closed pytorch/pytorch#203176: " in report and "- ok seen upstream fix in" in report
    assert re.search(r"unknown pytorch/pytorch#203177: .* failed: ValueError: boom", report)
    assert re.search(r"unknown pytorch/pytorch#203178: .* did not end within 3 s", report)
    assert report.count("upstream fix in this torch") == 1
