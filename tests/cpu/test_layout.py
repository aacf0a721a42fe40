"""The layout: which module imports which, and how long a function is."""

import ast
from graphlib import TopologicalSorter

from titan_lifecycle.jobs.shipped import PACKAGE

SOURCES = {
    ".".join(("titan_lifecycle", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): ast.parse(file.read_text())
    for file in sorted(PACKAGE.rglob("*.py"))
}


def is_type_checking(node):
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imported(tree):
    """The modules of this package that ``tree`` imports anywhere, for typing only left out."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if is_type_checking(node):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in SOURCES else node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name


def test_no_import_circle():
    """Imports inside functions count, too. A package imports its modules, never they it."""
    graph = {
        module: {m for m in imported(tree) if m in SOURCES and m != module}
        for module, tree in SOURCES.items()
    }
    assert [*TopologicalSorter(graph).static_order()]  # raises CycleError


def test_the_chunk_loop_knows_nothing_of_torchtitan():
    """Nor does what it imports."""
    seen, todo = set(), ["titan_lifecycle.losses.chunk_loop"]
    while todo:
        module = todo.pop()
        seen.add(module)
        for name in imported(SOURCES[module]):
            assert not name.startswith("torchtitan"), module
            todo += {name} & SOURCES.keys() - seen


def test_no_function_body_is_longer_than_60_lines():
    long = []
    for module, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if lines > 60:
                    long.append(f"{module}.{node.name}: {lines}")
    assert long == []
