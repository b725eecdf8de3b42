"""README and docs match the repository."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("analysis", "bench", "charts", "crds", "demo", "docs", "examples", "locks", "operator"),
    *("lint", "release", "simulation", "testcluster", "testing", "tests", "trainer"),
)
CODE_PAGES = (*sorted((ROOT / "docs/architecture").glob("*.md")), ROOT / "CONTRIBUTING.md")
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "s": 1, "min": 60, "h": 3600, "days": 1}
"""In seconds and bytes; lifetimes of certificates are constants in days."""


def test_the_shortest_script_is_the_example() -> None:
    assert (ROOT / "examples/quickstart.py").read_text() in (ROOT / "docs/running-jobs.md").read_text()


def test_the_readme_can_be_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_links_have_targets() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", CODE_PAGES, ids=[page.name for page in CODE_PAGES])
def test_paths_and_symbols_that_docs_name_exist(page: Path) -> None:
    """Docs change with a moved file or a renamed function."""
    missing = [name for name in _list_code_names(page.read_text()) if not _does_exist(name)]
    assert not missing


def test_a_path_or_symbol_that_is_gone_is_found() -> None:
    text = (
        "`decide/failures/hang.py`, `operator/none.py::check`, `tests/unit/test_readme.py::ROOT.none`, `trainer/none/`"
    )
    assert [name for name in _list_code_names(text) if not _does_exist(name)] == re.findall(r"`(\S+)`", text)


def test_tables_of_limits_hold_the_values_of_the_constants() -> None:
    rows = [line for line in (ROOT / "docs/architecture/limits.md").read_text().splitlines() if "::" in line]
    assert rows
    for row in rows:
        found = re.search(r"\| ([\d,.]+)(?: (\w+))? \| `\w+/(\S+)\.py::(\S+)` \|$", row)
        assert found, row
        number, unit, module, symbol = found.groups("")
        value: Any = import_module(module.replace("/", "."))
        for name in symbol.split("."):
            value = getattr(value, name)
        assert float(number.replace(",", "")) * UNITS[unit] == pytest.approx(value), row


def _list_code_names(text: str) -> Iterator[str]:
    """Yield the paths, and `path::symbol`, in backticks outside of fenced blocks."""
    for name in re.findall(r"`([^`\s]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path = name.partition("::")[0]
        if path.endswith(".py") or ("/" in path and path.split("/")[0] in FOLDERS):
            yield name


def _does_exist(name: str) -> bool:
    path, _, symbol = name.partition("::")
    if not (ROOT / path).exists():
        return False
    return not symbol or _defines_symbol(ast.parse((ROOT / path).read_text()).body, symbol.split("."))


def _defines_symbol(body: Sequence[ast.stmt], symbol: Sequence[str]) -> bool:
    """Return whether the first name is defined in `body`, the second one in the body of that, and so on."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name == symbol[0]:
                return len(symbol) == 1 or _defines_symbol(node.body, symbol[1:])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
            if symbol[0] in names:
                return len(symbol) == 1
    return False
