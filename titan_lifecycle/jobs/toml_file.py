"""A parsed TOML file that knows on which line each key stands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli

from titan_lifecycle.jobs.errors import JobError

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
            if path.exists() and not path.is_file():
                raise JobError(
                    f"{path}: not a regular file; every rank reads the job file again, so that it "
                    "cannot be a folder, a pipe or a device"
                )
            # Line ends are normalized here, as a statement that ends in a lone CR is no TOML. Some
            # editors begin a file with a byte-order mark.
            text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
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
        except RecursionError:
            raise JobError(f"{path}: values are nested too deeply for a job file") from None

    def where(self, key: KeyPath) -> str:
        """``file:line`` of ``key``, or of its nearest ancestor that the file spells out."""
        lines = _key_lines(self.text)
        while key and key not in lines:
            key = key[:-1]
        return f"{self.path}:{lines[key]}" if key else str(self.path)


@lru_cache(maxsize=8)
def _key_lines(text: str) -> dict[KeyPath, int]:
    """The first line of every key.

    tomli keeps no positions, so this parses one statement at a time: a table's header, or the key
    that follows, with as many lines as make it complete.
    """
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    lengths: dict[KeyPath, int] = {}  # of arrays of tables, so far
    statement: list[str] = []
    for number, line in enumerate(text.split("\n"), start=1):
        statement.append(line)
        # Only these can end a statement of several lines: each attempt parses all of it.
        if len(statement) > 1 and not line.rstrip().endswith(("]", "}", '"', "'")):
            line_without_comment = line.split("#")[0].rstrip()
            if not line_without_comment.endswith(("]", "}", '"', "'")):
                continue
        try:
            document = tomli.loads("\n".join(statement))
        except tomli.TOMLDecodeError:
            continue
        first = number - len(statement) + 1
        if statement[0].lstrip().startswith("["):
            table = _enter_table(document, lengths)
            keys = [table[:length] for length in range(1, len(table) + 1)]
        else:
            keys = [table + key for key in _keys(document, ())]
        for key in keys:
            found.setdefault(key, first)
        statement.clear()
    return found


def _enter_table(header: dict[str, Any], lengths: dict[KeyPath, int]) -> KeyPath:
    """The path of the table that a parsed header line opens; ``lengths`` is brought up to date."""
    path: KeyPath = ()
    value: Any = header
    while value:
        ((name, value),) = value.items()
        path = (*path, name)
        if isinstance(value, list):  # [[name]]: another table in the array
            lengths[path] = lengths.get(path, 0) + 1
            value = value[0]
        if path in lengths:
            path = (*path, lengths[path] - 1)
    return path


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
