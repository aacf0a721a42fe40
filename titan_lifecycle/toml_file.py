"""A parsed TOML file that knows on which line each key stands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli

from titan_lifecycle.errors import JobError

KeyPath = tuple[str | int, ...]
"""Keys from the document's root down; an int is the position in an array of tables."""


@dataclass(frozen=True, slots=True)
class TomlFile:
    """One TOML document, read once.

    ``path`` is kept as the user spelled it, since every message repeats it.
    """

    path: Path
    text: str
    document: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> TomlFile:
        """Read and parse ``path``; a file that cannot be read or parsed is a ``JobError``."""
        try:
            # Line ends are normalized here, as a prefix that ends in a lone CR is no TOML.
            text = path.read_bytes().decode().replace("\r\n", "\n")
        except FileNotFoundError:
            raise JobError(f"{path}: no such job file") from None
        except OSError as error:
            raise JobError(f"{path}: cannot read the job file: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise JobError(f"{path}: a job file must be UTF-8: {error}") from None
        try:
            return cls(path, text, tomli.loads(text))
        except tomli.TOMLDecodeError as error:
            raise JobError(
                f"{path}:{error.lineno}:{error.colno}: TOML syntax: {error.msg}"
            ) from None

    def where(self, key: KeyPath) -> str:
        """``file:line`` of ``key``, or of its nearest ancestor that the file spells out."""
        lines = _key_lines(self.text)
        while key and key not in lines:
            key = key[:-1]
        return f"{self.path}:{lines[key]}" if key else str(self.path)


@lru_cache(maxsize=8)
def _key_lines(text: str) -> dict[KeyPath, int]:
    """The first line of every key.

    tomli keeps no positions, so this asks it which prefixes of the file are complete documents:
    a key begins right after the last complete prefix without it. (A blank or comment line before
    it is a complete prefix, too.)
    Quadratic in the length of the file, hence only run for a message or a rendering.
    """
    lines = text.split("\n")
    found: dict[KeyPath, int] = {}
    start = 0
    for end in range(1, len(lines) + 1):
        try:
            document = tomli.loads("\n".join(lines[:end]))
        except tomli.TOMLDecodeError:
            continue
        for key in _keys(document, ()):
            found.setdefault(key, start + 1)
        start = end
    return found


def _keys(value: Any, prefix: KeyPath) -> list[KeyPath]:
    items: list[tuple[str | int, Any]]
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = list(enumerate(value))
    else:
        return []
    keys: list[KeyPath] = []
    for key, child in items:
        keys += [(*prefix, key), *_keys(child, (*prefix, key))]
    return keys
