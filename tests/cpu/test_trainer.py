"""LifecycleTrainer on real jobs: collectives a step, and losses beside torchtitan's own."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.conftest import CONFIGS, SMALL, STOCK, environment

LOSS = "loss_metrics/global_avg_loss"


@dataclasses.dataclass
class Trained:
    losses: dict[int, float]
    reduce_scatters: int
    all_gathers: int
    all_reduces: int
    output: str


@pytest.fixture
def train(golden_run):
    def run(job: str, *overrides: str) -> Trained:
        finished = golden_run(job, *overrides)
        counts = {}
        for kind in ("reduce_scatter", "all_gather", "all_reduce"):
            calls = finished.scalars(f"lifecycle/{kind}_calls")
            last = max(calls)
            counts[f"{kind}s"] = calls.pop(last)
            # Every step after the first costs the same.
            assert {v for step, v in calls.items() if step > 1} <= {counts[f"{kind}s"]}, calls
            num_bytes = finished.scalars(f"lifecycle/{kind}_bytes")[last]
            assert (num_bytes > 0) == (counts[f"{kind}s"] > 0)
        return Trained(finished.scalars(LOSS), output=finished.output, **counts)

    return run


def assert_same_losses(actual: Trained, expected: Trained) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=1e-6)


# 8 FSDP groups, 4 accumulation steps; torchtitan's wrapper reduces and gathers the head once more
# each microbatch.
@pytest.mark.parametrize(
    "overrides, reduce_scatters, all_gathers",
    [
        (STOCK, 36, 68),
        (("--lifecycle.gradient-reduction", "every_microbatch"), 36, 64),
        (
            (
                *("--lifecycle.gradient-reduction", "every_microbatch"),
                *("--lifecycle.head-reduction", "coalesced"),
            ),
            32,
            64,
        ),
        ((), 8, 64),  # last_microbatch, as the job says
        (("--lifecycle.retain-weights",), 8, 8),
    ],
    ids=["stock", "every_microbatch", "coalesced", "last_microbatch", "retain_weights"],
)
def test_accumulation(overrides, reduce_scatters, all_gathers, train):
    trained = train("llama3_fsdp_accumulate", *overrides)
    assert (trained.reduce_scatters, trained.all_gathers) == (reduce_scatters, all_gathers)
    assert trained.all_reduces == 0
    assert_same_losses(trained, train("llama3_fsdp_accumulate", *STOCK))
    assert f"reduce-scatters a step  {reduce_scatters} (" in trained.output
    cost = re.search(r"keeps ([\d,]+) bytes of unsharded gradients in 8 FSDP", trained.output)
    assert (cost is not None) == (reduce_scatters == 8)
    if cost:  # 6,163,712 parameters, reduced in float32
        assert cost[1] == "24,654,848"


def test_hsdp_all_reduces_once(train):
    trained = train("llama3_hsdp_accumulate")  # all_reduce_last, as the job says
    assert trained.all_reduces == 8
    # The first microbatch reduces the head in the loop; the others find partial sums pending.
    assert trained.reduce_scatters == 33
    assert_same_losses(trained, train("llama3_hsdp_accumulate", *STOCK))


@pytest.mark.parametrize("job", ["llama3_pp_gpipe", "llama3_pp_1f1b", "llama3_pp_interleaved"])
def test_pipelines(job, train):
    """The last stage: 4 microbatches, 4 groups."""
    stock, ours = (train(job, *extra) for extra in (STOCK, ()))
    assert (stock.reduce_scatters, stock.all_gathers) == (8, 12)
    assert (ours.reduce_scatters, ours.all_gathers) == (4, 4)
    assert_same_losses(ours, stock)
    assert ours.losses[max(ours.losses)] < ours.losses[1] - 1
    assert "reduce-scatters a step  4 (" in ours.output


def test_a_pipeline_accumulates_over_schedule_steps(train):
    """16 instead of 8 sequences a step: two schedule steps, one reduction."""
    job = ("llama3_pp_1f1b", "--training.global_batch_size", "16")
    once = train(*job, "--lifecycle.gradient-reduction", "last_microbatch")
    assert (once.reduce_scatters, once.all_gathers) == (4, 4)
    twice = train(*job)
    assert (twice.reduce_scatters, twice.all_gathers) == (8, 8)
    assert_same_losses(once, twice)


def test_a_repeated_unit_is_retained(train):
    """The embedding, which each of two microbatches looks up for two predictions."""
    job = "deepseek_v3_mtp_chunked"
    released, retained = train(job), train(job, "--lifecycle.repeated-units", "retain")
    assert retained.all_gathers == released.all_gathers - 2
    assert retained.reduce_scatters == released.reduce_scatters
    assert retained.losses == released.losses


@pytest.mark.jobs
@pytest.mark.parametrize("job", ["llama3_fsdp", "llama3_pp_1f1b"])
def test_validation_leaves_nothing_gathered_and_no_marker(job, tmp_path):
    process = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("-m", "tests.cpu.checked_validation", str(CONFIGS / f"{job}.toml"), *SMALL),
            *("--validator.enable", "--validator.freq", "1", "--validator.steps", "2"),
            *("--validator.dataloader.dataset", "lifecycle_fixed_validation"),
            *("--training.steps", "3", "--dump_folder", str(tmp_path)),
        ],
        env=environment(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert len(re.findall(r"validate step: +\d", process.stdout + process.stderr)) == 3


@pytest.mark.jobs
def test_report_compares_both(tmp_path):
    json_file = tmp_path / "report.json"
    process = subprocess.run(
        [
            *(sys.executable, "-m", "titan_lifecycle", "report"),
            *("llama3_pp_1f1b", *SMALL, "--training.steps", "4", "--json", str(json_file)),
            # What torchtitan's own loss and policies do not know.
            *("--loss.chunk-tokens", "8", "--lifecycle.repeated-units", "retain"),
            *("--lifecycle.head-reduction", "coalesced"),
            *("--dump_folder", str(tmp_path / "out")),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    costs = json.loads(json_file.read_text())
    assert list(costs) == ["stock", "lifecycle"]
    assert costs["stock"]["calls"] == {"reduce_scatter": 8, "all_gather": 12}
    assert costs["lifecycle"]["calls"] == {"reduce_scatter": 4, "all_gather": 4}
    # The stage is the same size in both, and all of it is gathered, and has gradients, at once.
    weights = {c["peak_gathered_weight_bytes"] for c in costs.values()}
    assert weights == {costs["lifecycle"]["num_bytes"]["all_gather"]}
    assert {c["peak_unsharded_gradient_bytes"] for c in costs.values()} == weights
    for cost in costs.values():
        assert cost["num_steps"] == 4
        assert cost["peak_memory_bytes"] > 2**27
        # 4 sequences of 64 tokens a batch rank, which two pipeline ranks share.
        tps = cost["tokens_per_second_per_device"]
        assert tps == pytest.approx(4 * 64 / 2 / cost["step_seconds"])
    rows = [line.split("|")[1].strip() for line in process.stdout.splitlines() if "|" in line]
    assert "reduce-scatters a step" in rows
    assert "peak unsharded gradients MiB" in rows
