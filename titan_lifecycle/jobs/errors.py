"""Errors meant for the person who wrote the job file or the command line."""

import difflib
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


class JobError(ValueError):
    """A job that cannot run as written.

    The message is complete: where (file and line, if there is one), what was expected and found,
    and the remedy. The command line prints it alone and exits with status 2.
    """


def attempt(action: Callable[[], _T], failed: str) -> _T:
    """Call other people's code; what it raises becomes a ``JobError`` that says so and where.

    Args:
        action: Imports a module, or calls a config function.
        failed: What failed, as the start of the message.
    """
    try:
        return action()
    except JobError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise JobError(
            f"{failed}: {type(error).__name__}: {error} (at {frame.filename}:{frame.lineno})"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file that somebody asked for, and its folder.

    Raises:
        JobError: It could not be written; the message has the cause.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}") from error


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: ``; did you mean 'x'?`` or just a stop."""
    match = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean '{match[0]}'?" if match else "."
