"""How runs end: failures, kills, interrupts; and finding one's rank under SLURM."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.elastic.multiprocessing import SignalException

from tests.cpu.conftest import CONFIGS, SMALL, TITAN_LIFECYCLE, environment, left_running
from titan_lifecycle import cli
from titan_lifecycle.jobs.errors import JobError, write_text
from titan_lifecycle.jobs.topology import loss_rank
from titan_lifecycle.run import launch, stop, worker
from titan_lifecycle.run.lock import LOCK_FILE, hold_dump_folder
from titan_lifecycle.run.slurm import first_host, launched_from_outside, use_slurm_environment

JOB = """
hf_assets_path = "{package}/assets/tokenizer"
[job]
module = "failing_job"
config = "failing_job"
nproc_per_node = 2
device = "cpu"
[training]
local_batch_size = 2
steps = 5
[metrics]
log_freq = 1
"""

# A config function whose data set does something to rank 1 in its second step.
MODULE = """
import os, signal, time
from datasets import Dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def process(sample):
    if os.environ.get("RANK") == "{rank}" and sample["number"] % 50 == 10:
        {action}
    return "some words to learn " * 4


def failing_job():
    numbers = Dataset.from_dict({{"number": list(range(100))}})
    DATASETS["failing"] = DatasetConfig("nowhere", lambda path: numbers, process)
    config = llama3_debugmodel()
    config.dataloader.dataset = "failing"
    return config
"""


def import_paths(folder: Path) -> str:
    """PYTHONPATH with ``folder`` first. An empty entry would name the current folder."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.fixture
def run_failing(run_job, tmp_path):
    def run(action, *overrides, rank=1, **kwargs):
        (tmp_path / "failing_job.py").write_text(MODULE.format(action=action, rank=rank))
        (tmp_path / "failing.toml").write_text(JOB)
        return run_job(
            tmp_path / "failing.toml",
            *SMALL[:2],
            *overrides,
            command=TITAN_LIFECYCLE,
            PYTHONPATH=import_paths(tmp_path),
            **kwargs,
        )

    return run


def test_the_rank_that_fails_is_named_once(run_failing, tmp_path):
    run = run_failing('raise FileNotFoundError("no such shard: part-7")')
    assert run.status == 1
    assert "step:  1" in run.stdout
    (report,) = re.findall(r"titan-lifecycle: (.*)\n", run.stderr)
    assert report == "rank 1 failed: FileNotFoundError: no such shard: part-7"
    assert run.output.count("no such shard") == 1
    # Rank 0 has lost its peer; that is nobody's business.
    assert "Traceback" not in run.output
    assert "last loss" not in run.stdout
    traceback = re.search(r"its traceback: (.*)", run.stderr)[1].strip()
    assert traceback.startswith("out/logs/")
    assert "in process\n" in (tmp_path / traceback).read_text()
    assert left_running(tmp_path) == []


def test_a_killed_rank_is_named_once(run_failing, tmp_path):
    run = run_failing("os.kill(os.getpid(), signal.SIGKILL)")
    assert run.status == 1
    assert re.findall(r"titan-lifecycle: .*", run.stderr) == [
        "titan-lifecycle: rank 1 was killed by SIGKILL"
    ]
    assert "Traceback" not in run.output
    assert left_running(tmp_path) == []


def test_an_interrupt_ends_everything(run_failing, tmp_path):
    run = run_failing("time.sleep(600)", stop_after="step:  1", timeout=120)
    assert run.status == 128 + signal.SIGINT
    assert run.stderr.splitlines()[-1] == "titan-lifecycle: stopped by SIGINT"
    assert "Traceback" not in run.output
    assert left_running(tmp_path) == []


def test_a_rank_that_leaves_is_named(run_failing, tmp_path):
    """Its status would be 0, and torch's decorator of train() would drop it."""
    run = run_failing("raise SystemExit(0)", rank=0)
    assert run.status == 1
    (report,) = re.findall(r"titan-lifecycle: (.*)\n", run.stderr)
    assert report.startswith("rank 0 failed: SystemExit")
    assert left_running(tmp_path) == []


def test_sigterm_saves_a_checkpoint(run_failing, tmp_path):
    """The launcher gets it in the second or third of fifty steps."""
    run = run_failing(
        "os.kill(os.getppid(), signal.SIGTERM)",
        *("--lifecycle.checkpoint-on-sigterm", "--checkpoint.enable", "--training.steps", "50"),
        timeout=120,
    )
    assert run.status == 128 + signal.SIGTERM, run.output
    assert run.stderr.splitlines()[-1] == "titan-lifecycle: stopped by SIGTERM, with a checkpoint"
    (saved,) = (run.dump_folder / "checkpoint").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert 2 <= step < 10
    # All of it, unlike the last step's: something to resume from.
    names = FileSystemReader(saved).read_metadata().state_dict_metadata
    assert any(name.startswith("optimizer") for name in names), list(names)
    assert re.findall(r"- step: +(\d+)", run.stdout)[-1] == str(step)
    assert left_running(tmp_path) == []


def test_a_second_sigterm_ends_at_once(capfd):
    with launch._StopRequest(wanted=True) as request:
        assert not stop.is_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.is_made and stop.is_requested()
        with pytest.raises(SignalException):
            os.kill(os.getpid(), signal.SIGTERM)
    assert "a second SIGTERM ends them at once" in capfd.readouterr().err
    assert not stop.is_requested()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_rank_of_torchrun_takes_the_first_sigterm_as_a_request(monkeypatch):
    monkeypatch.setattr(stop, "_signalled", False)
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_requested()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_profile_py_beside_the_job_shadows_nothing(tmp_path):
    """A rank, or a command, that looked there first would import it in the place of Python's."""
    (tmp_path / "profile.py").write_text("raise ImportError('not of Python')")
    (tmp_path / "x.toml").write_text('[job]\nmodule = "registry"\nconfig = "own"\n')
    folder = tmp_path / "own"
    folder.mkdir()
    registry = "import profile, sys\ndef own():\n    sys.exit('that is ' + profile.run.__doc__)\n"
    (folder / "registry.py").write_text(registry)
    run = subprocess.run(
        [sys.executable, "-m", "titan_lifecycle", "config", "x.toml"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(PYTHONPATH=import_paths(folder)),
        check=False,
    )
    assert "that is Run statement under profiler" in run.stderr, run.stderr


def test_ranks_are_started_without_the_current_folder(monkeypatch, tmp_path):
    commands = []

    def elastic_launch(config, entrypoint):
        return lambda *args: commands.append((entrypoint, *args))

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    monkeypatch.setenv(worker.LAUNCHED, "1")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launch.train(str(CONFIGS / "llama3_fsdp.toml"), ["--dump_folder", str(tmp_path)]) == 0
    assert [command[:2] for command in commands] == [(sys.executable, "-P")]


def test_two_jobs_do_not_share_a_folder(tmp_path):
    folder = str(tmp_path / "out")
    with (
        hold_dump_folder(folder),
        pytest.raises(JobError, match=rf"is in use by process {os.getpid()} on .*--dump_folder"),
        hold_dump_folder(folder),
    ):
        pass
    # The file of a job that has ended, however it did, is no obstacle.
    (tmp_path / "out" / LOCK_FILE).write_text("process 1 on elsewhere")
    with hold_dump_folder(folder):
        assert f"process {os.getpid()} on " in (tmp_path / "out" / LOCK_FILE).read_text()


def test_a_job_in_a_folder_that_is_in_use_or_unwritable_ends_before_any_rank_starts(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(launch, "start_ranks", lambda *args: pytest.fail("it started"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with hold_dump_folder(str(tmp_path / "out")):
        assert cli.main(["train", "llama3_fsdp", "--dump_folder", str(tmp_path / "out")]) == 2
    assert "is in use by process" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert cli.main(["train", "llama3_fsdp", "--dump_folder", str(tmp_path / "file/out")]) == 2
    error = capsys.readouterr().err
    assert f"dump_folder = '{tmp_path}/file/out' cannot be written: Not a directory" in error


def test_a_full_disk_is_named(monkeypatch):
    with pytest.raises(JobError, match=r"cannot write /dev/full: No space left on device"):
        write_text(Path("/dev/full"), "figures")
    message = {"message": "OSError: full", "extraInfo": {"py_callstack": "the stack", "time_ns": 1}}
    message["extraInfo"]["lost_peer"] = False
    failed = failure(1)
    failed.error_file_data, failed.error_file = {"message": message}, "/proc/none/error.json"
    report = launch._report(SimpleNamespace(failures={0: failed}))
    assert report == "titan-lifecycle: rank 0 failed: OSError: full\nthe stack"


def test_a_wrong_job_ends_before_any_rank_starts(run_job, tmp_path):
    run = run_job(
        "llama3_fsdp", "--parallelism.tensor_parallel_degree", "3", command=TITAN_LIFECYCLE
    )
    assert run.status == 2
    assert "do not multiply to the 4 processes" in run.stderr
    assert not run.dump_folder.exists()


def failure(exitcode, *, time_ns=None, lost_peer=False):
    """What the agent knows of a rank: its exit status, and what it has recorded if it has."""
    message = "<NONE>"
    if time_ns is not None:
        message = {"message": "", "extraInfo": {"time_ns": time_ns, "lost_peer": lost_peer}}
    return SimpleNamespace(exitcode=exitcode, error_file_data={"message": message})


TERMINATED = failure(-signal.SIGTERM)


@pytest.mark.parametrize(
    ("first", "failures"),
    [
        # Recorded in the same second, and the first one took longer to exit.
        (2, {0: failure(1, time_ns=7), 2: failure(1, time_ns=5), 1: TERMINATED}),
        (2, {0: failure(1, time_ns=4, lost_peer=True), 2: failure(1, time_ns=5)}),
        (3, {0: failure(1, time_ns=5, lost_peer=True), 3: failure(-9), 1: TERMINATED}),
        (1, {0: failure(1, time_ns=5), 2: failure(-6), 1: failure(1, time_ns=3)}),
        (1, {1: failure(1, time_ns=3, lost_peer=True)}),
        (2, {2: failure(17), 1: failure(3)}),
        # Rank 0 has left by os._exit(7), and the agent has ended the other one.
        (0, {1: TERMINATED, 0: failure(7)}),
        (0, {2: TERMINATED, 1: failure(1, time_ns=5, lost_peer=True), 0: failure(7)}),
        (0, {1: TERMINATED, 0: failure(-9)}),
        (1, {1: TERMINATED, 0: failure(1, time_ns=5, lost_peer=True)}),
    ],
)
def test_the_first_failure_is_the_one_others_follow_from(first, failures):
    assert launch._first_failure(failures)[0] == first


@pytest.mark.parametrize(
    ("world_size", "degree", "schedule", "rank"),
    [
        (4, 1, "1F1B", 0),
        (4, 2, "1F1B", 2),
        (8, 4, "Interleaved1F1B", 6),
        (4, 2, "ZBVZeroBubble", 0),
        (4, 2, "DualPipeV", 0),
    ],
)
def test_the_loss_is_on_the_first_rank_of_the_last_stage(world_size, degree, schedule, rank):
    assert loss_rank(world_size, degree, schedule) == rank


@pytest.fixture
def slurm(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        # Set first, so that what the code under test sets is removed afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "11",
        "SLURM_LOCALID": "3",
        "SLURM_NTASKS": "16",
        "SLURM_JOB_NODELIST": "gpu[07-08]",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_slurm_task_is_a_rank(slurm):
    import os

    assert launched_from_outside()
    use_slurm_environment()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["11", "16", "3", "gpu07", "23456"]


@pytest.mark.parametrize("change", [{"SLURM_STEP_ID": None}, {"SLURM_NTASKS": "1"}])
def test_a_batch_script_or_a_shell_is_none(change, slurm):
    for name, value in change.items():
        slurm.delenv(name) if value is None else slurm.setenv(name, value)
    assert not launched_from_outside()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login1", "login1"),
        ("a1,b2", "a1"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("rack2-[7]", "rack2-7"),
        ("n[1-2]-ib,m1", "n1-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_a_node_list_that_is_none():
    with pytest.raises(JobError, match="SLURM_JOB_NODELIST = ''"):
        first_host("")


def test_a_rank_leaves_without_finalizing_the_interpreter(tmp_path):
    """There, a thread of a process group that outlived it was seen to abort a finished rank."""
    program = (
        "import os, sys\n"
        "from titan_lifecycle.run import worker\n"
        "class Aborts:\n"
        "    def __del__(self, abort=os.abort): abort()\n"
        "kept = Aborts()\n"
        "print('output is kept', end='')\n"
        "sys.exit(worker.main(['missing.toml']))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "output is kept")
    assert "missing.toml" in run.stderr
