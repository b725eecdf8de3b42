"""Which file of the repository refers to which: by an import, or by a name in a string.

Names in strings count because tests start programs (`-m simulation`), read manifests, and build what is written in C.
An import of `a.b.c` refers only to `c`, although Python also runs the packages `a` and `a.b`: the operator's `decide`
imports every decision, so that otherwise everything would be equally near to everything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path, PurePosixPath

_SOURCE_ROOTS = ("analysis/", "operator/", "trainer/")
_WORD = re.compile(r"[\w.\-]+(?:/[\w.\-]+)*/?")
References = Mapping[str, set[str]]
"""For each Python file the files, and the folders of files that are not Python, that it refers to."""


def read_references(root: Path, paths: Iterable[str]) -> References:
    """Return what the Python files among `paths` (relative to `root`) refer to. Files may be gone."""
    index = _Index(paths)
    return {
        path: index.find_references(path, (root / path).read_text())
        for path in index.paths
        if path.endswith(".py") and (root / path).exists()
    }


def find_folders(path: str) -> Iterator[str]:
    """Yield the folders around a file, but not the repository itself."""
    return (folder.as_posix() for folder in PurePosixPath(path).parents if folder.as_posix() != ".")


class _Index:
    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = sorted(set(paths))
        self._modules: dict[str, str] = {}
        self._names: dict[str, set[str]] = {}  # of files, and of folders that hold more than Python
        for path in self.paths:
            if path.endswith((".py", ".pyi", ".c")):
                self._modules.setdefault(_name_module(path), path)
            pure = PurePosixPath(path)
            if pure.name not in ("__init__.py", "__main__.py", "conftest.py"):
                self._names.setdefault(pure.name, set()).add(path)
        self._packages = {name.split(".")[0] for name in self._modules}
        for folder in {folder for path in self.paths if not path.endswith(".py") for folder in find_folders(path)}:
            if f"{folder}/" not in _SOURCE_ROOTS:
                self._names.setdefault(PurePosixPath(folder).name, set()).add(folder)

    def find_references(self, path: str, text: str) -> set[str]:
        tree = ast.parse(text)
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update(self._find_imported(path, node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                found.update(self._find_named(node.value))
            elif isinstance(node, (ast.List, ast.Tuple)):
                found.update(self._find_started(node.elts))
        if PurePosixPath(path).name.startswith("test_"):
            conftests = (f"{folder}/conftest.py" for folder in find_folders(path))
            found.update(file for file in conftests if file in self._modules.values())
        return found - {path}

    def _find_imported(self, path: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                package = _name_module(path).split(".") + ["-"] * path.endswith("/__init__.py")
                base = ".".join([*package[: -node.level], *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            module = name if name in self._modules else name.rpartition(".")[0]
            if module in self._modules:
                yield self._modules[module]

    def _find_named(self, text: str) -> Iterator[str]:
        for found in _WORD.findall(text):
            if "." in found and found in self._modules:
                yield self._modules[found]
            if "." not in found and "/" not in found and found != text:
                continue  # a word of a sentence is no folder
            word = re.sub(r"\.so$", ".c", found.rstrip("/"))
            for path in self._names.get(word.rpartition("/")[2], ()):
                common = "/" in path and word in self._packages  # "pacekeeper" may mean anything
                if f"/{path}".endswith(f"/{word}") and not common:
                    yield path

    def _find_started(self, words: list[ast.expr]) -> Iterator[str]:
        """Find the program of `python -m package`."""
        texts = [word.value if isinstance(word, ast.Constant) else None for word in words]
        for option, name in pairwise(texts):
            if isinstance(name, str) and option == "-m" and (path := self._modules.get(f"{name}.__main__")):
                yield path


def _name_module(path: str) -> str:
    for root in _SOURCE_ROOTS:
        path = path.removeprefix(root)
    return str(PurePosixPath(path).with_suffix("")).replace("/", ".").removesuffix(".__init__")
