"""Apply nested tables (a job file) to a tree of config dataclasses (what a registry built).

Every key must be a field of the dataclass at that place, taken from the value that is there and
not from the annotation (``loss`` is annotated ``BaseLoss.Config`` and holds a subclass). Three
spellings go beyond plain keys:

- ``type`` in a section swaps the component: a subcommand name of torchtitan's command line where
  the field is a union (``[activation_checkpoint] type = "full"``), or the import path of a
  ``Configurable`` (``[loss] type = "torchtitan.components.loss.CrossEntropyLoss"``). The new
  section starts from the defaults of its class, except that fields declared by a base class which
  the old value shares keep their values. That is what torchtitan's ``derive`` does, narrowed to
  fields that mean the same in both classes.
- ``"none"`` (or ``"None"``, as on torchtitan's command line) stands for None wherever the field
  admits it, since TOML has no null. This includes ``str | None``; a file of that name is
  ``"./none"``.
- A string that begins with ``{package}/`` is a path below this installed package.

Nodes are copied, never changed in place, as a registry function may share them, and without
running ``__post_init__``: the command line may still repair the result. ``revalidate`` runs it.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import importlib.util
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from titan_lifecycle.jobs.errors import JobError, attempt, nearest
from titan_lifecycle.jobs.renamed_keys import RENAMED_CLASSES, pointer
from titan_lifecycle.jobs.shipped import PACKAGE
from titan_lifecycle.jobs.toml_file import KeyPath

_T = TypeVar("_T")
_UNSET = object()
_PACKAGE_PREFIX = "{package}/"


def apply(
    config: _T, table: Mapping[str, Any], where: Callable[[KeyPath], str]
) -> tuple[_T, dict[str, str]]:
    """Return ``config`` with ``table`` laid over it, and the place each value came from.

    Args:
        config: The root of a tree of dataclasses. Not changed.
        table: Nested tables; every key must be a field.
        where: Names the place of a key, as ``file:line``, for messages and sources.

    Raises:
        JobError: an unknown key, a value of the wrong type, a component that does not fit.
    """
    overlay = _Overlay(config, where)
    return overlay.section(config, table, ()), overlay.sources


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf below ``node``, and the class of every section.

    The class stands under the section's own path, so that swapping a component shows up when two
    trees are compared. A list of dataclasses is one leaf, for only as a whole can a job set it.
    """
    for name, value in _values(node):
        path = f"{prefix}{name}"
        if is_section(value):
            yield path, type(value)
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def is_section(value: Any) -> bool:
    """Whether ``value`` is a config that keys can be set in."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_model(value)


def revalidate(node: Any, file: Path, prefix: str = "") -> None:
    """Run ``__post_init__`` again on every config below and at ``node``, innermost first."""
    for name, value in _values(node):
        for item in value if isinstance(value, list) else [value]:
            if is_section(item):
                revalidate(item, file, f"{prefix}.{name}" if prefix else name)
    check = getattr(node, "__post_init__", None)
    if check is None:
        return
    try:
        check()
    except (ValueError, AssertionError) as error:
        raise JobError(f"{file}: {f'[{prefix}] ' if prefix else ''}{error}") from error


def subcommands(hint: Any) -> dict[str, Any]:
    """Subcommand names of a union field, with the class (or NoneType) each stands for."""
    return {
        metadata.name: member
        for member, annotations in _members(hint)
        for metadata in annotations
        if getattr(metadata, "name", None)
    }


def hints(cls: type) -> dict[str, Any]:
    """Resolved annotations of the fields of ``cls``, ``Annotated`` kept."""
    resolved = typing.get_type_hints(cls, include_extras=True)
    return {f.name: resolved[f.name] for f in dataclasses.fields(cls)}


def admits_none(hint: Any) -> bool:
    """Whether a field with this annotation may hold None."""
    return any(member is types.NoneType for member, _ in _members(hint))


def is_settable(hint: Any) -> bool:
    """Whether a TOML value can express this annotation; callables and classes it cannot."""
    hint = _strip(hint)
    origin = typing.get_origin(hint)
    if collections.abc.Callable in (hint, origin):
        return False
    if type in (hint, origin) or (isinstance(hint, type) and _is_model_type(hint)):
        return False
    if origin in (typing.Union, types.UnionType):
        return any(is_settable(a) for a in typing.get_args(hint) if a is not types.NoneType)
    return True


def module_exists(name: str) -> bool:
    """Whether ``name`` can be found, without hiding why it or a parent fails to import."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    for end in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:end]))
        if spec is None or (end < len(parts) and spec.submodule_search_locations is None):
            return False
    return True


class _Overlay:
    def __init__(self, root: Any, where: Callable[[KeyPath], str]) -> None:
        self.root = root
        self.where = where
        self.sources: dict[str, str] = {}

    def section(self, node: Any, table: Mapping[str, Any], path: KeyPath) -> Any:
        """A copy of ``node`` with the keys of ``table`` set."""
        node = _bare(type(node), dict(_values(node)))
        fields = hints(type(node))
        for key, value in table.items():
            if key not in fields:
                raise self.unknown((*path, key), fields, value)
            current = getattr(node, key, _UNSET)
            value = self.value(fields[key], current, value, (*path, key))
            object.__setattr__(node, key, value)  # a frozen config has no other way
        for field in dataclasses.fields(node):
            if field.init and not hasattr(node, field.name):
                how = "" if is_settable(fields[field.name]) else ", which only Python code can set"
                raise JobError(
                    f"{self.where(path)}: [{_dotted(path)}] of type {type(node).__qualname__} "
                    f"needs a value for '{field.name}'{how}"
                )
        return node

    def value(self, hint: Any, current: Any, value: Any, path: KeyPath) -> Any:
        """The new value of one field, whatever kind of field it is."""
        classes = _config_classes(hint)
        if not is_settable(hint) or _is_model(current):
            raise JobError(
                f"{self.where(path)}: '{_dotted(path)}' cannot be set from a job file; "
                "it is set by the config function"
            )
        if admits_none(hint) and value in ("none", "None"):
            value = {"type": "none"} if classes else None
        if value is None:
            self.mark(path)
            return None
        if classes or is_section(current):
            if not isinstance(value, dict):
                raise self.wrong_type(path, "a table", value)
            return self.component(hint, current, value, path)
        item = _item_class(hint)
        if item is not None and isinstance(value, list):
            self.mark(path)
            return [self.value(item, _UNSET, entry, (*path, i)) for i, entry in enumerate(value)]
        self.mark(path)
        return self.leaf(hint, value, path)

    def component(self, hint: Any, current: Any, table: dict[str, Any], path: KeyPath) -> Any:
        """A nested config, of another class than before if ``table`` has a ``type``."""
        name = table.get("type", _UNSET)
        keys = {key: value for key, value in table.items() if key != "type"}
        if name is _UNSET:
            if is_section(current):
                return self.section(current, keys, path)
            classes = _config_classes(hint)
            if len(classes) > 1:
                raise JobError(
                    f"{self.where(path)}: [{_dotted(path)}] is none in this config, so it needs "
                    f"a type: {self.types(hint)}"
                )
            cls: Any = classes[0]
        else:
            cls = self.component_class(hint, name, (*path, "type"))
        if cls is types.NoneType:
            if keys:
                raise JobError(
                    f"{self.where(path)}: [{_dotted(path)}] is none and takes no other key; "
                    f"found {_quoted(keys)}"
                )
            self.mark(path)
            return None
        if type(current) is not cls:
            current = _blank(cls, current)
            self.mark(path, "type" if name is not _UNSET else None)
        return self.section(current, keys, path)

    def component_class(self, hint: Any, name: Any, path: KeyPath) -> Any:
        """The config class that a ``type`` key names, checked against the field's annotation."""
        if not isinstance(name, str):
            raise self.wrong_type(path, self.types(hint), name)
        named = subcommands(hint)
        if name == "none" and admits_none(hint):
            return types.NoneType
        if name in named:
            return named[name]
        target = self.import_path(name, hint, path)
        cls = getattr(target, "Config", target)
        bases = _config_classes(hint)
        if not (isinstance(cls, type) and issubclass(cls, tuple(bases))):
            raise JobError(
                f"{self.where(path)}: '{name}' does not fit '{_dotted(path[:-1])}', which takes a "
                f"{' or '.join(base.__qualname__ for base in bases)}"
            )
        return cls

    def import_path(self, name: str, hint: Any, path: KeyPath) -> Any:
        """The object at a dotted path; the path may go through nested classes."""
        parts = RENAMED_CLASSES.get(name, name).split(".")
        for end in range(len(parts) - 1, 0, -1):
            module_name = ".".join(parts[:end])
            failed = f"{self.where(path)}: '{module_name}' exists but failed to import"
            if not attempt(partial(module_exists, module_name), failed):
                continue
            target: Any = attempt(partial(importlib.import_module, module_name), failed)
            for part in parts[end:]:
                if not hasattr(target, part):
                    raise JobError(
                        f"{self.where(path)}: '{name}': {module_name} has no "
                        f"'{'.'.join(parts[end:])}'{nearest(part, dir(target))}"
                    )
                target = getattr(target, part)
            return target
        raise JobError(
            f"{self.where(path)}: unknown type '{name}'{nearest(name, subcommands(hint))} "
            f"Expected {self.types(hint)}"
        )

    def leaf(self, hint: Any, value: Any, path: KeyPath) -> Any:
        """``value`` as the annotated type, or an error that names both."""
        hint = _strip(hint)
        value = _expand(value)
        if path == ("override", "imports") and isinstance(value, list):
            value = [_override_import(entry) for entry in value]
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(hint)
        except PydanticUserError as error:  # a type that pydantic has no schema for
            raise JobError(
                f"{self.where(path)}: '{_dotted(path)}' cannot be set from a job file; "
                "it is set by the config function"
            ) from error
        try:
            # JSON rather than Python mode: TOML arrays become tuples where the field has one,
            # and strictly, so that true is no integer and "4" no number.
            return adapter.validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError):  # TypeError: a TOML date or time
            raise self.wrong_type(path, _expected(hint), value) from None

    def types(self, hint: Any) -> str:
        names = [f"'{name}'" for name in subcommands(hint)]
        return ", ".join([*names, "the import path of a Configurable"])

    def mark(self, path: KeyPath, key: str | None = None) -> None:
        self.sources[_dotted(path)] = self.where((*path, key) if key else path)

    def wrong_type(self, path: KeyPath, expected: str, value: Any) -> JobError:
        return JobError(
            f"{self.where(path)}: '{_dotted(path)}' must be {expected}; found {_found(value)}"
        )

    def unknown(self, path: KeyPath, fields: Mapping[str, Any], value: Any) -> JobError:
        key = path[-1]
        dotted = _dotted(path)
        inner = list(value) if isinstance(value, dict) else []
        # In a section that 0.2 had, the key says more than the section does.
        for old, place in [(f"{dotted}.{k}", (*path, k)) for k in inner] + [(dotted, path)]:
            if advice := pointer(old):
                return JobError(f"{self.where(place)}: '{old}' {advice}")
        what = f"section [{dotted}]" if isinstance(value, dict) else f"key '{dotted}'"
        hint = nearest(str(key), fields)
        homes = [found.rpartition(".")[0] for found, _ in leaves(self.root) if _last(found) == key]
        places = [f"in [{home}]" if home else "at the top of the file" for home in homes]
        if places:
            hint += f" There is a '{key}' {', '.join(places)}"
        if hint == ".":
            hint += f" Expected one of {_quoted(fields)}"
        return JobError(f"{self.where(path)}: unknown {what}{hint}")


def _values(node: Any) -> list[tuple[str, Any]]:
    fields = dataclasses.fields(node)
    return [(f.name, getattr(node, f.name)) for f in fields if hasattr(node, f.name)]


def _bare(cls: Any, values: Mapping[str, Any]) -> Any:
    """An instance with these fields set, on which neither init nor post-init has run."""
    node = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(node, name, value)
    return node


def _config_classes(hint: Any) -> list[type]:
    """The dataclasses among the members of an annotation."""
    return [m for m, _ in _members(hint) if isinstance(m, type) and dataclasses.is_dataclass(m)]


def _blank(cls: Any, old: Any = None) -> Any:
    """An instance of ``cls`` with its defaults, and the fields it inherits together with ``old``.

    Required fields stay unset; ``section`` reports them once the table has been laid over.
    """
    bases = [
        b for b in cls.__mro__ if dataclasses.is_dataclass(b) and isinstance(old, cast(type, b))
    ]
    shared = {field.name for base in bases for field in dataclasses.fields(base)}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.init and field.name in shared:
            values[field.name] = getattr(old, field.name)
        elif field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    return _bare(cls, values)


def _is_model_type(cls: type) -> bool:
    from torchtitan.protocols.model_spec import ModelSpec

    return issubclass(cls, ModelSpec)


def _is_model(value: Any) -> bool:
    return _is_model_type(type(value))


def _strip(hint: Any) -> Any:
    """The annotation without ``Annotated`` around it or around its union members."""
    if typing.get_origin(hint) is typing.Annotated:
        return _strip(typing.get_args(hint)[0])
    return hint


def _members(hint: Any, annotations: tuple[Any, ...] = ()) -> list[tuple[Any, tuple[Any, ...]]]:
    """The members of a union (or the one type there is), each with its annotations."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        inner, *extra = typing.get_args(hint)
        return _members(inner, (*annotations, *extra))
    if origin in (typing.Union, types.UnionType):
        return [pair for arg in typing.get_args(hint) for pair in _members(arg, annotations)]
    return [(hint, annotations)]


def _item_class(hint: Any) -> Any:
    """The dataclass of which this annotation is a list, if it is one."""
    for member, _ in _members(hint):
        if typing.get_origin(member) is list:
            (item,) = typing.get_args(member)
            if dataclasses.is_dataclass(item):
                return item
    return None


def _expand(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_PACKAGE_PREFIX):
        return str(PACKAGE / value.removeprefix(_PACKAGE_PREFIX))
    if isinstance(value, list):
        return [_expand(item) for item in value]
    if isinstance(value, dict):
        return {key: _expand(item) for key, item in value.items()}
    return value


def _override_import(entry: Any) -> Any:
    """``{ target = "a.b", kwargs = {...} }`` as the pair that torchtitan wants."""
    if isinstance(entry, dict) and set(entry) in ({"target"}, {"target", "kwargs"}):
        return [entry["target"], entry.get("kwargs", {})]
    return entry


def _expected(hint: Any) -> str:
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        types.NoneType: '"none"',
    }
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _expected(args[0])
    if hint in names:
        return names[hint]
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(repr(arg) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_expected(arg) for arg in args)
    if origin is list:
        return f"an array whose entries are each {_expected(args[0])}"
    if origin is tuple:
        return f"an array of ({', '.join('...' if a is ... else _expected(a) for a in args)})"
    if origin is dict:
        return "a table" if args[1] is Any else f"a table whose values are {_expected(args[1])}"
    return getattr(hint, "__qualname__", str(hint))


def _found(value: Any) -> str:
    kinds = {bool: "the boolean", int: "the integer", float: "the number", str: "the string"}
    kinds |= {list: "the array", dict: "the table"}
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"{kinds.get(type(value), f'the {type(value).__name__}')} {text}"


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _quoted(words: collections.abc.Iterable[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)
