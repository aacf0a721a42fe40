"""torchtitan's own entry point, served by ``titan_lifecycle.config_registry``."""

import pytest

from titan_lifecycle import config_registry, cpu_backend
from titan_lifecycle.jobs.errors import JobError

JOB = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n[training]\nsteps = 3\n'


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "x.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(cpu_backend, "resolve_device", lambda device: "cuda")


def parse(*args):
    from torchtitan.config import ConfigManager

    return ConfigManager().parse_args(["--module", "titan_lifecycle", *args])


def test_path_through_torchtitan(job_file, accelerator):
    config = parse("--config", str(job_file), "--training.seq_len", "32")
    assert (config.training.steps, config.training.seq_len) == (3, 32)


def test_shipped_stem_through_torchtitan(job_file, accelerator, monkeypatch):
    monkeypatch.setattr("titan_lifecycle.jobs.shipped.shipped_jobs", lambda: {"mine": job_file})
    assert parse("--config", "mine").training.steps == 3


def test_process_count_is_checked(job_file, accelerator, monkeypatch):
    job_file.write_text(JOB + "[parallelism]\ntensor_parallel_degree = 3\n")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(JobError, match="do not multiply to the 4 processes"):
        parse("--config", str(job_file))


def test_cpu_names_the_command_to_use(job_file):
    job_file.write_text(JOB.replace("[training]", 'device = "cpu"\n[training]'))
    with pytest.raises(ValueError, match=rf"run: titan-lifecycle train {job_file}$"):
        parse("--config", str(job_file))


def test_missing_file_is_no_attribute_error(job_file):
    with pytest.raises(JobError, match=r"no/such\.toml: no such job file"):
        parse("--config", "no/such.toml")


def test_dunder_names_are_attribute_errors():
    assert not hasattr(config_registry, "__wrapped__")


def test_dir_lists_the_shipped_jobs(job_file, monkeypatch):
    monkeypatch.setattr(config_registry, "shipped_jobs", lambda: {"mine": job_file})
    monkeypatch.setattr("titan_lifecycle.jobs.shipped.shipped_jobs", lambda: {"mine": job_file})
    # The filter of torchtitan's "Available config functions".
    available = [
        name
        for name in dir(config_registry)
        if not name.startswith("_")
        and callable(getattr(config_registry, name))
        and name[0].islower()
    ]
    assert available == ["mine"]
