"""Jobs that ship, run with torchtitan's own trainer on CPU ranks.

Small shapes and few steps; configs/ says what each job shows.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.conftest import (
    CONFIGS,
    SMALL,
    TITAN_LIFECYCLE,
    Run,
    environment,
    runner,
)

LOSS, GRAD_NORM = "loss_metrics/global_avg_loss", "grad_norm"
VALIDATION = (
    "--validator.enable",
    *("--validator.freq", "2", "--validator.steps", "2"),
    *("--validator.dataloader.dataset", "lifecycle_fixed_validation"),
)


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    """llama3_fsdp for six steps, validating."""
    return runner(tmp_path_factory.mktemp("six_steps"))(
        "llama3_fsdp", *SMALL, *VALIDATION, "--training.steps", "6"
    )


def test_a_job_trains_and_sums_up(six_steps):
    assert six_steps.status == 0, six_steps.output
    losses = six_steps.scalars(LOSS)
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[6] < losses[1] - 1
    assert six_steps.scalars(GRAD_NORM).keys() == losses.keys()
    validation = six_steps.scalars("validation_metrics/loss")
    assert list(validation) == [1, 2, 4, 6]
    assert validation[6] < validation[1] - 1
    # The rank with the loss says each step once; the table closes the output.
    steps = re.findall(r"- step: +(\d+)  loss: +([\d.-]+)", six_steps.stdout)
    assert steps == [(str(step), f"{loss:.5f}") for step, loss in losses.items()]
    rows = six_steps.stdout.rpartition("\n\n")[2].splitlines()
    table = dict(row.strip().split("  ", 1) for row in rows)
    table = {name: value.strip() for name, value in table.items()}
    assert list(table)[:5] == [
        "steps",
        "first loss",
        "last loss",
        "tokens/s/device",
        "peak memory",
    ]
    assert table["steps"] == "1 to 6"
    assert table["first loss"] == f"{losses[1]:.5f}"
    assert table["last loss"] == f"{losses[6]:.5f}"
    assert re.fullmatch(r"[\d,]+ on 4 ranks", table["tokens/s/device"])
    # The same figure as torchtitan's, of the steps after the first.
    tps = six_steps.scalars("throughput(tps)")
    tokens = 5 / sum(1 / value for step, value in tps.items() if step > 1)
    shown = int(table["tokens/s/device"].split()[0].replace(",", ""))
    assert shown == pytest.approx(tokens, rel=0.5)  # the whole job's would be four times it
    memory = six_steps.scalars("memory/max_reserved(GiB)")
    assert table["peak memory"] == f"{max(memory.values()):.2f} GiB resident on rank 0"
    assert 0.2 < max(memory.values()) < 5
    assert table["TensorBoard"].startswith("out/tb/")


def test_a_resumed_run_is_bit_identical(six_steps, run_job):
    job = ("llama3_fsdp", *SMALL, *VALIDATION, "--checkpoint.enable", "--checkpoint.interval", "3")
    first = run_job(*job, "--training.steps", "3")
    assert first.status == 0, first.output
    (tensorboard,) = (first.dump_folder / "tb").iterdir()
    tensorboard.rename(first.dump_folder / "first_tb")
    resumed = run_job(*job, "--training.steps", "6")
    assert resumed.status == 0, resumed.output
    for tag in (LOSS, GRAD_NORM):
        whole = six_steps.scalars(tag)
        assert resumed.scalars(tag) == {step: whole[step] for step in (4, 5, 6)}


def test_initial_weights_do_not_depend_on_the_sharding(golden_run):
    fsdp, hsdp = (golden_run(job).scalars(LOSS) for job in ("llama3_fsdp", "llama3_hsdp"))
    assert hsdp[1] == pytest.approx(fsdp[1], rel=1e-6)
    assert hsdp[2] == pytest.approx(fsdp[2], rel=1e-5)


def test_a_pipeline_validates_and_shows_only_the_loss(run_job):
    run = run_job(
        *("llama3_pp_1f1b", *SMALL, *VALIDATION, "--training.steps", "3"),
        command=TITAN_LIFECYCLE,
        terminal=True,
    )
    assert run.status == 0, run.output
    losses, validation = run.scalars(LOSS), run.scalars("validation_metrics/loss")
    assert losses[3] < losses[1]
    assert validation[2] < validation[1]
    assert min(*losses.values(), *validation.values()) > 0
    assert not re.search(r"loss: *-", run.output)
    assert "Pipeline Parallel loss is not visible" not in run.output
    # On a terminal there is a progress bar, and step lines do not run into it.
    assert re.search(r"3/3 \[.*loss=", run.stderr)
    assert re.search(r"^\[titan\].* step:  3 ", run.stdout, re.MULTILINE)
    assert re.search(r"peak memory .* on rank 2$", run.stdout, re.MULTILINE)


def train_example(script: str, *args: str, tmp_path, **env: str) -> subprocess.Popen:
    """Start an example's script in ``tmp_path``, with its ``bin`` and this Python's commands."""
    path = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    return subprocess.Popen(
        ["bash", str(CONFIGS / "examples" / script), *args],
        env=environment(**env) | {"PATH": os.pathsep.join(path)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(*processes) -> Run:
    """The run of ``processes`` in their folder, once all have ended."""
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    folder = Path(processes[0].args[-1])
    return Run(max(abs(p.returncode) for p in processes), "".join(outputs), "", folder)


@pytest.mark.jobs
def test_two_agents_meet_as_two_nodes_would(tmp_path):
    """The example for two hosts, with both on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    args = ["127.0.0.1", "llama3_fsdp", *SMALL, "--training.steps", "2"]
    args += ["--dump_folder", str(tmp_path / "out")]
    env = {"PORT": str(port), "LOCAL_ADDR": "127.0.0.1", "NPROC_PER_NODE": "2", "JOB_ID": "test"}
    hosts = [
        train_example("torchrun_two_hosts.sh", *args, tmp_path=tmp_path, **env) for _ in range(2)
    ]
    try:
        run = finished(*hosts)
    finally:
        for host in hosts:
            host.kill()
    assert run.status == 0, run.output
    assert list(run.scalars(LOSS)) == [1, 2]
    # The ranks of an agent share its console, and one of them all says each step.
    assert len(re.findall(r"- step: ", run.stdout)) == 2


SRUN = """#!/bin/bash
# Two tasks on this host, as srun would start them.
shift
for task in 0 1; do
    SLURM_STEP_ID=0 SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
wait -n && wait -n
"""


@pytest.mark.jobs
def test_the_slurm_example_trains(tmp_path):
    """With a stand-in for srun, which is not on this machine."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    args = [str(CONFIGS / "examples/first_job.toml"), *SMALL, "--training.steps", "2"]
    args += ["--training.global_batch_size", "4", "--dump_folder", str(tmp_path / "out")]
    slurm = {"JOB_ID": str(os.getpid()), "NTASKS": "2", "JOB_NODELIST": "localhost"}
    slurm |= {"SUBMIT_DIR": str(tmp_path), "CPUS_PER_TASK": "1"}
    process = train_example(
        "slurm.sbatch",
        *args,
        tmp_path=tmp_path,
        VENV=sys.prefix,
        **{f"SLURM_{name}": value for name, value in slurm.items()},
    )
    try:
        run = finished(process)
    finally:
        process.kill()
    assert run.status == 0, run.output
    assert list(run.scalars(LOSS)) == [1, 2]
    # Two ranks, two microbatches: one reduction a group.
    assert re.search(r"reduce-scatters a step +8 ", run.stdout)


@pytest.mark.parametrize("job", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_a_shipped_job_says_what_it_shows(job):
    assert (CONFIGS / f"{job}.toml").read_text().startswith("# ")
