"""The data sets and the tokenizer: fixed, disjoint, local."""

import hashlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from titan_lifecycle import data

PACKAGE = Path(data.__file__).parent
SCRIPTS = PACKAGE.parent / "scripts"


@pytest.fixture
def tokenizer():
    return HuggingFaceTokenizer(tokenizer_path=str(PACKAGE / "assets" / "tokenizer"))


@pytest.mark.parametrize(
    ("split", "digest"),
    [
        ("train", "a06ff20f8da7cd84512ffe41a76f0152f780aafac755919b2a5b8528e67c5cf0"),
        ("validation", "c7fdb8c1aaafa41442e8ed03576c2ea644127b7fce6d5e52b4359a9c59f15ca1"),
    ],
)
def test_the_fixed_documents_are_the_same_on_every_machine(split, digest):
    text = "\0".join(data.fixed_documents(split))
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert len(text) < 700_000


@pytest.mark.parametrize("documents", [data.fixed_documents, data.stdlib_documents])
def test_training_and_validation_share_no_document(documents):
    train, validation = list(documents("train")), list(documents("validation"))
    assert validation
    assert len(train) > 5 * len(validation)
    assert set(train).isdisjoint(validation)


def test_the_standard_library_is_read_without_its_tests():
    documents = list(data.stdlib_documents("train")) + list(data.stdlib_documents("validation"))
    root = Path(json.__file__).parent
    assert (root / "decoder.py").read_text() in documents
    assert not any("import support\n" in text and "unittest.main()" in text for text in documents)
    assert sum(map(len, documents)) > 5_000_000


@pytest.mark.parametrize("name", ["python_stdlib", "lifecycle_fixed"])
@pytest.mark.parametrize("suffix", ["", "_validation"])
def test_the_data_sets_need_no_network_and_no_cache(name, suffix, tokenizer, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("looked for a host")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    data.register()
    dataset = HuggingFaceTextDataset(name + suffix, None, tokenizer, seq_len=32)
    inputs, labels = next(iter(dataset))
    assert inputs["input"].tolist()[1:] == labels.tolist()[:-1]
    assert not list(tmp_path.iterdir())
    assert not dataset._data.cache_files


def test_a_path_for_a_generated_data_set_is_refused(tokenizer):
    data.register()
    with pytest.raises(ValueError, match="'lifecycle_fixed' is generated and reads no path"):
        HuggingFaceTextDataset("lifecycle_fixed", "/some/where", tokenizer)


def test_registering_twice_changes_nothing():
    data.register()
    names = list(DATASETS)
    data.register()
    assert list(DATASETS) == names


def test_the_tokenizer_fits_the_debug_models(tokenizer):
    from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3

    for models in (llama3, qwen3, deepseek_v3, gpt_oss):
        assert models.model_registry("debugmodel").model.vocab_size == tokenizer.vocab_size == 2048
    text = next(data.stdlib_documents("train")) + "größer €"
    tokens = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.decode(tokens[1:-1]) == text


def test_the_tokenizer_script_writes_what_torchtitan_reads(tmp_path):
    subprocess.run([sys.executable, SCRIPTS / "train_tokenizer.py", tmp_path], check=True)
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(tmp_path))
    assert tokenizer.vocab_size == 2048
    assert tokenizer.bos_id is not None and tokenizer.eos_id is not None
