"""Goldens: the shipped jobs against theirs, and the script that makes and checks them."""

import os
import struct
from pathlib import Path

import pytest

from scripts import regenerate_goldens as goldens
from tests.cpu.conftest import COMPARED, STOCK

BACKEND = "cpu_gloo"
JOB = "llama3_fsdp"
STEPS = {
    1: {"loss": 8.208809852600098, "grad_norm": 3.1895573139190674},
    2: {"loss": 7.736435890197754, "grad_norm": 3.3278968334198},
    3: {"loss": 6.521188735961914, "grad_norm": 3.9735677242279053},
}
NO_DIFFERENCE = "largest relative difference: loss 0.0e+00, grad_norm 0.0e+00"
RENEW = f"if the change is meant, renew it with scripts/regenerate_goldens.py --job {JOB}"


def measured(job: str, run) -> goldens.Golden:
    return goldens.Golden(goldens.read_metrics(run.dump_folder), goldens.provenance(job, BACKEND))


@pytest.mark.parametrize("job", goldens.jobs_of(BACKEND))
def test_a_shipped_job_reproduces_its_golden(job, golden_run, capsys, pytestconfig):
    golden = goldens.load(job, BACKEND)
    failure = goldens.compare(job, golden, measured(job, golden_run(job)))
    assert failure is None, failure
    pytestconfig.stash.setdefault(COMPARED, []).append(capsys.readouterr().out)
    losses = [values["loss"] for values in golden.steps.values()]
    assert losses[-1] < losses[0] - 1, "it does not learn"


@pytest.mark.parametrize(
    "job, overrides",
    [
        ("llama3_fsdp_accumulate", ("--lifecycle.gradient-reduction", "every_microbatch")),
        ("llama3_hsdp_accumulate", STOCK),
    ],
)
def test_another_order_of_additions_is_caught(job, overrides, golden_run):
    golden, changed = goldens.load(job, BACKEND), measured(job, golden_run(job, *overrides))
    if goldens.other_machine(job, golden, changed):
        pytest.skip("the golden is another machine's, and no tolerance sees last bits")
    failure = goldens.compare(job, golden, changed)
    assert failure is not None
    assert failure.startswith(f"{job}: first difference at step ")
    assert "compared bit for bit" in failure
    # It was the last bits.
    assert (
        goldens.first_difference(golden.steps, changed.steps, tolerance=goldens.TOLERANCE) is None
    )


@pytest.mark.parametrize(
    "job, overrides",
    [
        # Without accumulation there is one order only, and one golden for both wrappers.
        ("llama3_fsdp", ("--lifecycle.gradient-reduction", "last_microbatch")),
        ("llama3_fsdp", STOCK),
        ("llama3_fsdp_accumulate", ("--lifecycle.retain-weights",)),
    ],
)
def test_what_leaves_the_order_alone_leaves_the_bits(job, overrides, golden_run):
    # Beside a run made here: bits are compared on any machine.
    golden, other = (measured(job, golden_run(job, *extra)) for extra in ((), overrides))
    assert goldens.compare(job, golden, other) is None


class Script:
    """The script over a folder of its own, and runs that measure what ``measures`` holds."""

    def __init__(self, folder: Path, capsys):
        self.folder = folder
        self.measures = [STEPS, STEPS]
        self.capsys = capsys

    @property
    def path(self) -> Path:
        return self.folder / BACKEND / f"{JOB}.txt"

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """The exit status, and what it printed."""
        self.runs = iter(self.measures)
        status = goldens.main([*arguments, "--plots", str(self.folder / "plots")])
        return status, "".join(self.capsys.readouterr())

    def replace(self, old: str, new: str) -> None:
        text = self.path.read_text()
        assert text.count(old) == 1
        self.path.write_text(text.replace(old, new))


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    script = Script(tmp_path, capsys)
    monkeypatch.setattr(goldens, "GOLDENS", tmp_path)
    monkeypatch.setattr(goldens, "this_backend", lambda: BACKEND)
    monkeypatch.setattr(goldens, "measure", lambda job, backend: next(script.runs))
    return script


def changed(step: int, **values: float) -> dict[int, dict[str, float]]:
    return STEPS | {step: STEPS[step] | values}


def next_float32(value: float) -> float:
    """``value`` with its lowest bit flipped, as TensorBoard would store it."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return struct.unpack("<f", struct.pack("<i", bits ^ 1))[0]


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_a_flipped_bit_fails_the_check(metric, script):
    assert script("--job", JOB) == (0, f"{JOB}: new golden, 3 steps\n")
    assert script("--job", JOB, "--check") == (0, f"{JOB}: agrees bit for bit; {NO_DIFFERENCE}\n")
    value = STEPS[2][metric]
    flipped = next_float32(value)
    assert 0 < abs(flipped - value) < 1e-6
    script.replace(repr(value), repr(flipped))

    def relative(name, flipped_metric):
        return abs(value - flipped) / flipped if name == flipped_metric else 0.0

    status, output = script("--job", JOB, "--check")
    assert status == 1
    assert output == (
        f"FAILED {JOB}: first difference at step 2, {metric}: {flipped!r} became {value!r}; "
        "compared bit for bit; largest relative difference: "
        f"loss {relative('loss', metric):.1e}, grad_norm {relative('grad_norm', metric):.1e}; "
        f"{RENEW}\n"
    )


def test_a_job_that_fails_leaves_the_others_running(script, monkeypatch):
    def measure(job, backend):
        if job == JOB:
            raise OSError("disk full")
        return STEPS

    monkeypatch.setattr(goldens, "measure", measure)
    status, output = script("--job", JOB, "--job", "llama3_hsdp")
    assert status == 1
    assert "llama3_hsdp: new golden, 3 steps" in output
    assert f"FAILED {JOB}: OSError: disk full" in output
    assert not script.path.exists()


def test_what_a_regeneration_needs_is_checked_first(script, monkeypatch):
    monkeypatch.setattr(goldens, "find_spec", lambda name: None)
    monkeypatch.setattr(goldens, "measure", lambda job, backend: pytest.fail("it ran"))
    status, output = script("--job", JOB)
    assert status == 1
    assert "matplotlib" in output and "titan-lifecycle[plot]" in output


def test_elsewhere_a_check_has_a_tolerance(script):
    script("--job", JOB)
    script.replace("# torch: ", "# torch: 2.14.0 before ")
    script.measures = [changed(3, loss=STEPS[3]["loss"] * (1 + 2.5e-6))]
    status, output = script("--job", JOB, "--check")
    assert status == 0
    assert f"{JOB}: agrees within a relative tolerance (loss 3.6e-06, grad_norm 3.6e-06)" in output
    assert "because torch '2.14.0 before " in output
    assert "; largest relative difference: loss 2.5e-06, grad_norm 0.0e+00" in output
    # Once, 3e-5 passed unseen.
    script.measures = [changed(3, loss=STEPS[3]["loss"] * (1 + 5e-6))]
    status, output = script("--job", JOB, "--check")
    assert status == 1
    assert "first difference at step 3, loss: 6.521188735961914 became" in output
    assert "compared within a relative tolerance" in output


EPYC, XEON = "AMD EPYC 25-1-1", "Intel(R) Xeon(R) Platinum 8481C 6-207-2"


@pytest.mark.parametrize(
    "job, device, other, same",
    [
        ("llama3_hsdp", "AMD EPYC 25-17-1", EPYC, True),
        ("llama3_fsdp_cp", EPYC, XEON, True),
        ("llama3_fsdp_cp", XEON, EPYC, True),
        ("llama3_hsdp", EPYC, XEON, False),
        ("llama3_fsdp_cp", EPYC, "aarch64", False),
        ("llama3_fsdp_cp", "aarch64", "aarch64 2", False),
        ("llama3_fsdp", "AMD Instinct MI350X", "AMD Instinct MI300X", False),
        ("llama3_fsdp", "NVIDIA A10G", "NVIDIA A100", False),
    ],
)
def test_bits_are_compared_where_they_are_known_to_agree(job, device, other, same):
    assert goldens.same_bits(job, device, other) is same
    header = dict.fromkeys((*goldens.FINGERPRINT, "job_sha256", "run"), "same")
    golden, measured = (goldens.Golden(STEPS, header | {"device": d}) for d in (device, other))
    assert bool(goldens.other_machine(job, golden, measured)) is not same
    one_bit = goldens.Golden(changed(2, loss=next_float32(STEPS[2]["loss"])), measured.header)
    assert (goldens.compare(job, golden, one_bit) is None) is not same


def test_jobs_that_agree_between_vendors_are_shipped():
    for jobs in goldens.BIT_IDENTICAL.values():
        assert set(jobs) <= set(goldens.jobs_of(BACKEND))


@pytest.mark.parametrize(
    "line, message",
    [
        ("job_sha256", "the job file has changed since the golden was made"),
        ("run", "the settings of a run have changed since the golden was made"),
    ],
)
def test_a_golden_of_another_job_or_run_fails(line, message, script):
    script("--job", JOB)
    script.replace(f"# {line}: ", f"# {line}: 0")
    assert script("--job", JOB, "--check") == (1, f"FAILED {JOB}: {message}; {RENEW}\n")


def test_a_run_with_other_steps_fails(script):
    script("--job", JOB)
    script.measures = [{1: STEPS[1]}]
    status, output = script("--job", JOB, "--check")
    assert status == 1
    assert "steps [1, 2, 3] became [1]" in output


def test_two_columns(script):
    script("--job", JOB, "--two-columns")
    # torchtitan's older reader takes two words from each line, a header's too.
    pairs = [line.split() for line in script.path.read_text().splitlines()]
    assert {int(step): float(loss) for step, loss in pairs} == {
        step: values["loss"] for step, values in STEPS.items()
    }
    status, output = script("--job", JOB, "--check")
    assert status == 0
    assert "within a relative tolerance" in output
    assert "because the golden does not say where it was made" in output
    script.measures = [changed(2, loss=7.0)]
    assert script("--job", JOB, "--check")[0] == 1


def test_torchtitan_reads_it(script):
    """By the rules of its integration tests, which its wheel does not have.

    The columns stand in the line ``# step ...``; other lines whose first word is ``#`` are skipped.
    """
    script("--job", JOB)
    columns, rows = [], []
    for words in map(str.split, script.path.read_text().splitlines()):
        if words[:2] == ["#", "step"]:
            columns = words[1:]
        elif words[0] != "#":
            rows.append(dict(zip(columns, words, strict=True)))
    assert columns == ["step", "loss", "grad_norm"]
    assert {int(row["step"]): {k: float(row[k]) for k in columns[1:]} for row in rows} == STEPS
    header = script.path.read_text().splitlines()[:3]
    assert header == ["# config: llama3_fsdp", "# ngpu: 4", "# parallelism: FSDP=4"]


def test_provenance():
    header = goldens.provenance("llama3_pp_1f1b", BACKEND)
    assert header["parallelism"] == "FSDP=2, PP=2"
    assert header["seed"] == "42"
    assert header["command"] == "scripts/regenerate_goldens.py --job llama3_pp_1f1b"
    assert (
        "titan-lifecycle train configs/llama3_pp_1f1b.toml --debug.deterministic" in header["run"]
    )
    assert all(header[name] for name in (*goldens.FINGERPRINT, "job_sha256", "date"))


def test_two_runs_that_differ_write_nothing(script):
    script("--job", JOB)
    old = script.path.read_bytes()
    script.measures = [changed(1, loss=8.0), changed(1, loss=next_float32(8.0))]
    status, output = script("--job", JOB)
    assert status == 1
    assert "two runs differ, nothing was written: first difference at step 1, loss: 8.0" in output
    assert script.path.read_bytes() == old
    assert list(script.folder.rglob("*.*")) == [script.path]


def test_an_interrupted_write_leaves_the_old_golden(script, monkeypatch):
    script("--job", JOB)
    old = script.path.read_bytes()
    script.measures = [changed(1, loss=8.0)] * 2

    def interrupted(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script("--job", JOB)
    assert script.path.read_bytes() == old


def test_a_change_is_summed_up_and_drawn(script):
    script("--job", JOB)
    assert script("--job", JOB) == (0, f"{JOB}: unchanged\n")
    script.measures = [changed(2, loss=8.0, grad_norm=3.0)] * 2
    status, output = script("--job", JOB)
    assert status == 0
    assert "first difference at step 2, loss: 7.736435890197754 became 8.0" in output
    assert "largest relative difference 9.85e-02" in output
    picture = script.folder / "plots" / f"{JOB}.png"
    assert f"old and new curves in {picture}" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert goldens.load(JOB, BACKEND).steps == script.measures[0]


def test_another_backend_is_refused(script):
    script.measures = []
    for check in ((), ("--check",)):
        assert script("--backend", "cuda_a10g", *check) == (
            1,
            "FAILED this machine's backend is cpu_gloo; it cannot make cuda_a10g\n",
        )


def test_what_is_missing_is_said(script, monkeypatch):
    script.measures = []
    monkeypatch.setattr(goldens, "this_backend", lambda: "cuda_a10g")
    assert script("--check", "--backend", "cuda_a10g") == (
        1,
        "FAILED there are no goldens for cuda_a10g; make them on this machine with "
        "scripts/regenerate_goldens.py and have them reviewed\n",
    )
    (script.folder / "cuda_a10g").mkdir()
    assert script("--check", "--job", JOB) == (
        1,
        f"FAILED {JOB}: there is no golden for cuda_a10g; make it with "
        f"scripts/regenerate_goldens.py --job {JOB}\n",
    )
    status, output = script("--check", "--job", "llama3")
    assert status == 1
    assert "llama3 is no shipped job; cuda_a10g has ['deepseek_v3_fsdp'," in output


def test_a_failed_job_does_not_hide_the_others(script, monkeypatch):
    script("--job", JOB)

    def fail(job, backend):
        raise goldens.GoldenError(f"{job}: the run failed")

    monkeypatch.setattr(goldens, "measure", fail)
    status, output = script("--job", "llama3_hsdp", "--job", JOB)
    assert status == 1
    assert output == f"FAILED llama3_hsdp: the run failed\nFAILED {JOB}: the run failed\n"


@pytest.mark.parametrize(
    "name, hip, backend",
    [
        ("NVIDIA A10G", None, "cuda_a10g"),
        ("NVIDIA H200", None, "cuda_h200"),
        ("NVIDIA A100-SXM4-80GB", None, "cuda_a100"),
        ("NVIDIA GeForce RTX 4090", None, "cuda_4090"),
        ("AMD Instinct MI350X", "7.0", "rocm_mi350x"),
        ("AMD Radeon Graphics", "7.0", "rocm_amd_radeon_graphics"),
    ],
)
def test_backend_names(name, hip, backend, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    monkeypatch.setattr("torch.version.hip", hip)
    assert goldens.this_backend() == backend
