"""Write a config tree as a job file, with the source of each value beside it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from titan_lifecycle.jobs import overlay

REGISTRY = "registry"
"""The source of a value that nothing was laid over."""


def render_toml(config: Any, sources: Mapping[str, str], job: Mapping[str, Any]) -> str:
    """TOML text that loads to ``config`` again.

    Args:
        config: The root of the tree.
        sources: Dotted path to the place its value comes from.
        job: The ``[job]`` table.

    A None that the registry put there, and what TOML cannot express, are comment lines.
    """
    root, sections = _section(config, "", sources)
    header = ["[job]"]
    header += [_line(key, toml(value), sources[f"job.{key}"]) for key, value in job.items()]
    return "\n\n".join("\n".join(block) for block in (root, header, *sections) if block) + "\n"


def toml(value: Any) -> str | None:
    """``value`` in TOML on one line, or None if TOML has no spelling for it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        items = [toml(item) for item in value]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        value = {key: "none" if item is None else item for key, item in fields.items()}
    if isinstance(value, dict):
        pairs = [(_key(key), toml(item)) for key, item in value.items()]
        if any(item is None for _, item in pairs):
            return None
        return "{ " + ", ".join(f"{key} = {item}" for key, item in pairs) + " }" if pairs else "{}"
    return None


def _key(key: str) -> str | None:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


def _section(node: Any, path: str, sources: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """The lines of one section's own keys, and the blocks of the sections below it."""
    lines: list[str] = []
    below: list[list[str]] = []
    fields = overlay.hints(type(node))
    for name, hint in fields.items():
        value, dotted = getattr(node, name), f"{path}{name}"
        if overlay.is_section(value):
            own, nested = _section(value, f"{dotted}.", sources)
            kind = _type(hint, type(value))
            head = [f"[{dotted}]"]
            if kind is not None:
                head.append(_line("type", toml(kind), sources[dotted]))
            below += [head + own, *nested]
        elif value is None and overlay.is_settable(hint):
            line = _line(name, '"none"', sources[dotted])
            lines.append(f"# {line}" if sources[dotted] == REGISTRY else line)
        else:
            text = toml(value) if overlay.is_settable(hint) else None
            lines.append(
                f"# {name} is set by the config function"
                if text is None
                else _line(name, text, sources[dotted])
            )
    return lines, below


def _type(hint: Any, cls: type) -> str | None:
    """The ``type`` key that yields ``cls``; None where the annotation alone yields it."""
    if hint is cls:
        return None
    for name, member in overlay.subcommands(hint).items():
        if member is cls:
            return name
    owner = getattr(cls, "_owner", None) or cls
    return None if "<locals>" in owner.__qualname__ else f"{owner.__module__}.{owner.__qualname__}"


def _line(key: str, text: str | None, source: str) -> str:
    return f"{key} = {text}  # {source}"
