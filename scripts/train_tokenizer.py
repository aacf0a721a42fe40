"""Train the byte-level BPE in titan_lifecycle/assets/tokenizer, for torchtitan's debug models.

    python scripts/train_tokenizer.py [OUTPUT_DIRECTORY]

The text is the standard library of the Python that runs this, and the result is the same from
run to run for one Python version. The files are committed, so nobody needs to run it: every
debug model has a vocabulary of 2048, and a token outside of it would be an index error.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titan_lifecycle.data import fixed_documents, stdlib_documents

VOCAB_SIZE = 2048
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [*stdlib_documents("train"), *fixed_documents("train")]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    default = Path(__file__).parent.parent / "titan_lifecycle" / "assets" / "tokenizer"
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    directory.mkdir(parents=True, exist_ok=True)
    train().save(str(directory / "tokenizer.json"), pretty=False)
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
