"""Two text data sets that need no download.

``python_stdlib``
    The standard library's own source on this machine: real text that is there wherever this
    package runs. It differs between Python versions, so no number in a test depends on it.
``lifecycle_fixed``
    Sentences generated from a seed, identical on every machine. Tests and goldens use it.

Each has a disjoint ``..._validation`` part. `register` adds all four to torchtitan's
``DATASETS``, its extension point for data sets, and a job selects one by name::

    [dataloader]
    dataset = "python_stdlib"

They are map-style and held in memory: torchtitan resumes such a data set by skipping, and
Hugging Face's cache is never written to.
"""

import hashlib
import random
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

# Tests, vendored wheels and the code-page tables are no text to learn a language model from.
_STDLIB_SKIPPED = {
    "__pycache__",
    "_bundled",
    "dist-packages",
    "encodings",
    "idle_test",
    "idlelib",
    "site-packages",
    "test",
    "tests",
}

_FIXED_SEED = 2026
_FIXED_NUM_DOCUMENTS = {"train": 512, "validation": 64}
_FIXED_SENTENCES_PER_DOCUMENT = 24

_SUBJECTS = ("the group", "the stage", "the rank", "the shard", "the replica", "the schedule")
_VERBS = {
    "gathers": ("the weight", "the module", "the buffer"),
    "reduces": ("the gradient", "the loss", "the norm"),
    "sends": ("the output", "the microbatch", "the token"),
    "receives": ("the input", "the state", "the mask"),
}
_TIMES = ("before the forward", "after the backward", "in the first step", "in the last step")


def _stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def stdlib_documents(split: str) -> Iterator[str]:
    """The standard library's modules, one document each; every 20th is for validation.

    In the order of a digest of their names: alphabetically, whole packages would land on one
    rank, since a map-style data set is split into contiguous parts.
    """
    root = _stdlib_root()
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if _STDLIB_SKIPPED.isdisjoint(path.relative_to(root).parts)
    ]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    for index, name in enumerate(names):
        if (index % 20 == 0) == (split == "validation"):
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield text


def fixed_documents(split: str) -> Iterator[str]:
    """Sentences with structure at three ranges, so that a loss can fall for many steps.

    The verb decides among the objects, a sentence's subject follows from the last one's, and a
    document keeps to one of the times. Only ``Random.random`` is called: it is the one method
    whose sequence Python promises to keep between versions.
    """
    rng = random.Random(_FIXED_SEED)

    def pick(choices: tuple[str, ...]) -> str:
        return choices[int(rng.random() * len(choices))]

    # Both parts come from one stream, so that neither repeats the other.
    for part, num_documents in _FIXED_NUM_DOCUMENTS.items():
        for _ in range(num_documents):
            time = pick(_TIMES)
            subject = int(rng.random() * len(_SUBJECTS))
            sentences = []
            for _ in range(_FIXED_SENTENCES_PER_DOCUMENT):
                verb = pick(tuple(_VERBS))
                sentences.append(f"{_SUBJECTS[subject]} {verb} {pick(_VERBS[verb])} {time}.\n")
                step = 1 if rng.random() < 0.75 else 2
                subject = (subject + step) % len(_SUBJECTS)
            if part == split:
                yield "".join(sentences)


def register() -> None:
    """Add the data sets to torchtitan's registry; a second call changes nothing."""
    # Here, not at the top: torchtitan picks its device when it is imported.
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    def load(path: str, *, name: str, split: str) -> Dataset:
        documents = {"python_stdlib": stdlib_documents, "lifecycle_fixed": fixed_documents}[name]
        # torchtitan hands over the registered path, or the job's dataloader.dataset_path.
        if path != name:
            raise ValueError(
                f"dataloader.dataset_path = {path!r}: the data set {name!r} is generated and reads "
                "no path; leave dataset_path out, or choose another dataset"
            )
        texts = list(documents(split))
        return Dataset.from_dict({"text": texts})

    def text(sample: dict[str, str]) -> str:
        return sample["text"]

    for name in ("python_stdlib", "lifecycle_fixed"):
        for split, suffix in (("train", ""), ("validation", "_validation")):
            DATASETS[name + suffix] = DatasetConfig(
                path=name,
                loader=partial(load, name=name, split=split),
                sample_processor=text,
            )
