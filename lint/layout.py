"""Layout: a folder holds one subject, and so few modules; imports have no circles (docs/style.md, "Layout")."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from pathlib import PurePosixPath

from .violation import Violation

MAX_FILES = 16
"""Modules of one folder."""


def check_layout(sources: Mapping[str, ast.Module], larger: Mapping[str, str]) -> Iterator[Violation]:
    """Yield each folder with too many modules. `larger`: the reasons of folders that may hold more."""
    folders: dict[str, int] = defaultdict(int)
    for path in sources:
        folders[str(PurePosixPath(path).parent)] += not path.endswith("__init__.py")
    for folder, count in sorted(folders.items()):
        if count > MAX_FILES and folder not in larger:
            yield Violation(folder, 0, f"{count} modules, {MAX_FILES} at most: split the folder by subject")
    for folder in larger:
        if folders[folder] <= MAX_FILES:
            yield Violation(folder, 0, "needs no exception any more: remove it")


def check_hidden_imports(
    sources: Mapping[str, ast.Module], packages: Set[str], hiding: Mapping[str, str]
) -> Iterator[Violation]:
    """Yield each import for type checkers only of a module of this repository: it hides a circle.

    `packages`: the top-level packages of the repository. `hiding`: the reasons of modules that may hide imports.
    """
    for path, module in sources.items():
        lines = [
            node.lineno
            for block in ast.walk(module)
            if isinstance(block, ast.If) and _is_for_type_checkers(block.test)
            for statement in block.body
            for node in ast.walk(statement)
            if isinstance(node, ast.Import | ast.ImportFrom) and _imports_any(node, packages)
        ]
        if path in hiding and not lines:
            yield Violation(path, 0, "hides no import any more: remove its exception")
        elif path not in hiding:
            for line in lines:
                yield Violation(path, line, "an import for type checkers only hides a circle: see simulation/ports.py")


def _is_for_type_checkers(test: ast.expr) -> bool:
    """Return whether the condition is `TYPE_CHECKING`, or `typing.TYPE_CHECKING`."""
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imports_any(statement: ast.Import | ast.ImportFrom, packages: Set[str]) -> bool:
    """Return whether the statement imports one of the packages. A relative import stays in its package."""
    if isinstance(statement, ast.Import):
        return any(alias.name.partition(".")[0] in packages for alias in statement.names)
    return statement.level > 0 or (statement.module or "").partition(".")[0] in packages
