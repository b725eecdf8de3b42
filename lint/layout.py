"""Layout: a folder holds one subject, and so few modules (docs/style.md, "Layout")."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
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
