"""The tokenizer and the text of a job: the package's own for a debug model, a check for others.

torchtitan's debug configs name files of torchtitan's source tree, ``tests/assets/``, which an
installed torchtitan does not have. They would fail in every rank, after the ranks have started.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_lifecycle.jobs.errors import JobError
from titan_lifecycle.jobs.job import Job
from titan_lifecycle.jobs.shipped import PACKAGE

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

__all__ = ["check_tokenizer", "missing_tokenizer", "use_packaged_assets"]

_DEBUG_TOKENIZER = Path("tests/assets/tokenizer")
_DEBUG_DATASETS = {"c4_test": Path("tests/assets/c4_test")}
# torchtitan's tokenizer reads one of these.
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
# The organisation that publishes a model, by how the folder's name begins. A folder is named after
# the model alone in torchtitan's configs.
_PUBLISHERS = {
    "Llama": "meta-llama",
    "Qwen": "Qwen",
    "deepseek-": "deepseek-ai",
    "DeepSeek-": "deepseek-ai",
    "gpt-oss": "openai",
    "Kimi": "moonshotai",
    "Moonlight": "moonshotai",
}


def use_packaged_assets(config: Trainer.Config) -> Trainer.Config:
    """``config``, changed in place, with this package's tokenizer and text for torchtitan's own.

    Only where the config names torchtitan's files for tests and they are not below the current
    directory: in torchtitan's source tree a debug config keeps what it names. A config of another
    loader than the plain text one is left alone, since its data need their own tokenizer.
    """
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    loader = config.dataloader
    if type(loader) is not HuggingFaceTextDataLoader.Config:
        return config
    if Path(config.hf_assets_path) == _DEBUG_TOKENIZER and not _DEBUG_TOKENIZER.exists():
        config.hf_assets_path = str(PACKAGE / "assets/tokenizer")
        data = _DEBUG_DATASETS.get(loader.dataset)
        if data is not None and loader.dataset_path is None and not data.exists():
            config.dataloader = replace(loader, dataset="python_stdlib")
        _use_packaged_validation(config)
    return config


def _use_packaged_validation(config: Trainer.Config) -> None:
    """The validator's default is a download of hundreds of gigabytes' index."""
    from torchtitan.components.validate import Validator
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    validator = config.validator
    if type(validator) is not Validator.Config:
        return
    loader = validator.dataloader
    if type(loader) is HuggingFaceTextDataLoader.Config and loader.dataset == "c4_validation":
        loader = replace(loader, dataset="python_stdlib_validation")
        config.validator = replace(validator, dataloader=loader)


def missing_tokenizer(job: Job) -> str | None:
    """What to say of a job whose tokenizer is not there; None if it is, or if it needs none."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    config = job.config
    if not isinstance(config.tokenizer, HuggingFaceTokenizer.Config):
        return None
    folder = Path(config.hf_assets_path)
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    source = job.sources["hf_assets_path"]
    what = "there is no such folder" if not folder.is_dir() else "it has no tokenizer.json"
    if folder == _DEBUG_TOKENIZER:
        remedy = "name a folder with a tokenizer for this model's data"
    else:
        publishers = (p for start, p in _PUBLISHERS.items() if folder.name.startswith(start))
        repository = f"{next(publishers, '<publisher>')}/{folder.name}"
        remedy = (
            f"fetch it with: hf download {repository} tokenizer.json tokenizer_config.json "
            f"--local-dir {folder}"
        )
    return f"hf_assets_path = '{folder}' ({source}): {what}; {remedy}"


def check_tokenizer(job: Job) -> None:
    """Refuse a job whose tokenizer is not there, before anything is built.

    Raises:
        JobError: It names the folder, and how to fetch the tokenizer.
    """
    if missing := missing_tokenizer(job):
        raise JobError(f"{job.header.path}: {missing}")
