"""`python -m lint`: all checks over the checkout; exit status 1 where one finds something."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .layout import check_hidden_imports, check_layout
from .locked_seeds import LOCKED_FILE, check_citations, read_salts
from .names import check_names
from .prose import check_module, check_page
from .violation import Violation

ROOT = Path(__file__).parents[1]
PRODUCT = ("analysis/", "operator/", "trainer/")
"""What is installed: each name in it has one meaning."""
CHECKED = (*PRODUCT, "simulation/", "testcluster/", "testing/", "demo/", "release/")
"""Folders whose layout is checked."""
PROSE_CHECKED = (*CHECKED, "bench/", "charts/", "examples/", "lint/", "tests/")
"""Folders whose comments, docstrings, and messages are checked for banned words."""
PROSE_UNCHECKED = ("lint/prose.py",)
"""The module that defines the banned words."""
PACKAGES = frozenset(
    (
        "pacekeeper_analysis",
        "pacekeeper_operator",
        "pacekeeper",
        "pacekeeper_rank",
        "simulation",
        "testcluster",
        "testing",
        "release",
        "demo",
        "bench",
    )
)
"""All top-level packages of this repository but `tests`."""
LARGER_FOLDERS: Mapping[str, str] = {"testcluster": "one module per part of a cluster, listed in testcluster/README.md"}
"""The reason why a folder may hold more modules than `layout.MAX_FILES`, by its path."""
HIDING_MODULES: Mapping[str, str] = {
    "trainer/pacekeeper/__init__.py": "its names are imported at their first use, since most of them load torch"
}
"""The reason why a module may import others of this repository for type checkers only, by its path."""
CITING_NO_LOCKED_SEED = (*PRODUCT, "docs/decisions/", "tests/")
"""Folders that may not cite a locked scenario of the decisions bench."""
UNCHECKED_PAGES = frozenset({"docs/style.md"})
"""Its tables name the words that are not to be written."""


def main() -> int:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    violations = sorted(check_files([name for name in files if (ROOT / name).exists()]))
    print(*violations, sep="\n", file=sys.stderr)
    print(f"{len(violations)} violations of docs/style.md", file=sys.stderr)
    return 1 if violations else 0


def check_files(files: list[str]) -> Iterator[Violation]:
    """Yield what all checks find. `files`: paths below ROOT."""
    modules = [name for name in files if name.endswith(".py") and name.startswith(PROSE_CHECKED)]
    sources = {name: (ROOT / name).read_text() for name in modules if not name.startswith(PROSE_UNCHECKED)}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    yield from check_names({name: tree for name, tree in trees.items() if name.startswith(PRODUCT)})
    yield from check_layout({name: tree for name, tree in trees.items() if name.startswith(CHECKED)}, LARGER_FOLDERS)
    yield from check_hidden_imports(trees, PACKAGES, HIDING_MODULES)
    if LOCKED_FILE in files:
        citing = [name for name in files if name.startswith(CITING_NO_LOCKED_SEED)]
        texts = {name: (ROOT / name).read_text(errors="replace") for name in citing}
        yield from check_citations(texts, read_salts((ROOT / LOCKED_FILE).read_text()))
    for name, tree in trees.items():
        yield from check_module(name, sources[name], tree)
    for name in files:
        if name.endswith(".md") and name not in UNCHECKED_PAGES:
            yield from check_page(name, (ROOT / name).read_text())


if __name__ == "__main__":
    sys.exit(main())
