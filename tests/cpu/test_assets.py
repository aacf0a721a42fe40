"""Tokenizers and text: what a debug model gets, and what a job without a tokenizer is told."""

import pytest

from tests.cpu.conftest import CONFIGS
from titan_lifecycle.jobs.errors import JobError
from titan_lifecycle.jobs.job import read_header, render
from titan_lifecycle.jobs.shipped import PACKAGE
from titan_lifecycle.run.assets import check_tokenizer, missing_tokenizer
from titan_lifecycle.run.launch import train
from titan_lifecycle.run.load import load

HEADER = '[job]\nmodule = "llama3"\nconfig = "{config}"\ndevice = "cpu"\n'
TOKENIZER = str(PACKAGE / "assets/tokenizer")


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Load a job from a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def job(config, top="", text="", overrides=()):
        (tmp_path / "x.toml").write_text(top + HEADER.format(config=config) + text)
        return load(read_header("x.toml"), list(overrides))

    return job


def test_a_debug_model_gets_the_packages_tokenizer_and_text(job):
    loaded = job("llama3_debugmodel")
    lines = render(loaded).splitlines()
    assert f'hf_assets_path = "{TOKENIZER}"  # titan_lifecycle' in lines
    assert 'dataset = "python_stdlib"  # titan_lifecycle' in lines
    assert 'dataset = "python_stdlib_validation"  # titan_lifecycle' in lines
    check_tokenizer(loaded)


def test_what_the_job_names_stays(job):
    own = 'hf_assets_path = "mine"\n'
    data = '[dataloader]\ndataset = "c4"\n'
    loaded = job("llama3_debugmodel", top=own, text=data)
    assert (loaded.config.hf_assets_path, loaded.config.dataloader.dataset) == ("mine", "c4")
    assert loaded.sources["hf_assets_path"] == "x.toml:1"
    assert loaded.sources["dataloader.dataset"] == "x.toml:7"
    loaded = job("llama3_debugmodel", overrides=["--hf_assets_path", "theirs"])
    assert loaded.config.hf_assets_path == "theirs"


def test_in_torchtitans_source_tree_its_own_files_are_used(job, tmp_path):
    for folder in ("tokenizer", "c4_test"):
        (tmp_path / "tests/assets" / folder).mkdir(parents=True)
    config = job("llama3_debugmodel").config
    assert config.hf_assets_path == "./tests/assets/tokenizer"
    assert config.dataloader.dataset == "c4_test"


def test_a_real_model_keeps_its_own(job):
    config = job("llama3_8b").config
    assert config.hf_assets_path == "./assets/hf/Llama-3.1-8B"
    assert config.dataloader.dataset == "c4"


def test_a_missing_tokenizer_is_refused_with_the_way_to_fetch_it(job, tmp_path):
    loaded = job("llama3_8b")
    with pytest.raises(JobError) as caught:
        check_tokenizer(loaded)
    assert str(caught.value) == (
        "x.toml: hf_assets_path = 'assets/hf/Llama-3.1-8B' (registry): there is no such folder; "
        "fetch it with: hf download meta-llama/Llama-3.1-8B tokenizer.json tokenizer_config.json "
        "--local-dir assets/hf/Llama-3.1-8B"
    )
    folder = tmp_path / "assets/hf/Llama-3.1-8B"
    folder.mkdir(parents=True)
    assert "it has no tokenizer.json; fetch it with" in missing_tokenizer(loaded)
    (folder / "tokenizer.json").touch()
    assert missing_tokenizer(loaded) is None


def test_a_tokenizer_is_missed_before_ranks_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobError, match=r"Llama-3\.1-8B: there is no such folder|hf download"):
        train(str(CONFIGS / "llama3_8b_8gpu.toml"), [])
    assert list(tmp_path.iterdir()) == []
