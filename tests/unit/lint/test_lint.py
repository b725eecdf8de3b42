"""Each rule of `make lint` finds a planted violation, and accepts correct code."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lint.__main__ as lint_main
from lint.layout import MAX_FILES, check_hidden_imports, check_layout
from lint.locked_seeds import check_citations, read_salts
from lint.names import check_names
from lint.prose import BANNED, MAX_WORDS, check_module, check_page
from lint.violation import Violation

ROOT = Path(__file__).parents[3]
MAX_ARGUMENTS: int = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["pylint"]["max-args"]
BANNED_WORD, BANNED_PHRASE = "nobody", " ".join(("in", "vain"))
"""The phrase is joined here: this module is checked, too."""


def check_source_names(**sources: str) -> list[str]:
    """Return what the check of names finds in modules `a.py`, `b.py`, …"""
    return [found.message for found in check_names({f"{name}.py": ast.parse(text) for name, text in sources.items()})]


def check_text(path: str, source: str) -> list[Violation]:
    return list(check_module(path, source, ast.parse(source)))


class TestNames:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("def by_rank(): ...", "begins with a preposition"),
            ("class A:\n    def of(self): ...", "begins with a preposition"),
            ("def collect_all():\n    def without_own(): ...", "begins with a preposition"),
            ("async def _slow(): ...", "is one word"),
        ],
    )
    def test_a_function_name_without_a_verb_phrase_is_found(self, source: str, message: str) -> None:
        (found,) = check_source_names(a=source)
        assert message in found

    @pytest.mark.parametrize("source", ["class A: ...", "LOOK_SECONDS = 1", "LOOK_SECONDS: float = 1"])
    def test_a_name_with_two_meanings_is_found(self, source: str) -> None:
        (found,) = check_source_names(a=source, b=source)
        assert "is also defined at a.py:1" in found

    def test_names_that_follow_the_rules_are_accepted(self) -> None:
        source = """
            class Store:
                def read(self): ...
                def with_plan(self): ...
                def __init__(self): ...
            def main(): ...
            def to_json(): ...
            def _estimate_slowdown(): ...
            X = Y = 1
        """
        assert not check_source_names(a=_dedent(source), b="def estimate_slowdown(): ...\nX = 2")


class TestRuff:
    """Violations are planted in a file of that name: which rules hold depends on the folder."""

    def find_ruff_rules(self, path: str, source: str) -> set[str]:
        command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=json", "-"]
        found = subprocess.run(
            [*command, "--stdin-filename", path], input=source, capture_output=True, check=False, cwd=ROOT, text=True
        )
        return {violation["code"] for violation in json.loads(found.stdout)}

    @pytest.mark.parametrize("folder", ["analysis/pacekeeper_analysis", "trainer/pacekeeper", "simulation", "tests"])
    def test_a_function_of_too_many_arguments_is_found(self, folder: str) -> None:
        names = [f"a{number}" for number in range(MAX_ARGUMENTS + 1)]
        sources = [
            f"def count_all({', '.join(some)}):\n    return [{', '.join(some)}]\n" for some in (names, names[1:])
        ]
        assert [self.find_ruff_rules(f"{folder}/planted.py", source) for source in sources] == [{"PLR0913"}, set()]

    @pytest.mark.parametrize("folder", ["analysis/pacekeeper_analysis", "operator/pacekeeper_operator/decide"])
    def test_a_number_without_a_name_in_a_decision_is_found(self, folder: str) -> None:
        assert self.find_ruff_rules(f"{folder}/planted.py", "def is_slow(ratio):\n    return ratio > 1.3\n") == {
            "PLR2004"
        }
        assert not self.find_ruff_rules(
            f"{folder}/planted.py", "MAX_RATIO = 1.3\n\n\ndef is_slow(ratio):\n    return ratio > MAX_RATIO\n"
        )

    @pytest.mark.parametrize("folder", ["trainer/pacekeeper", "simulation", "tests/unit", "bench"])
    def test_numbers_elsewhere_need_no_name(self, folder: str) -> None:
        assert not self.find_ruff_rules(f"{folder}/planted.py", "def is_slow(ratio):\n    return ratio > 1.3\n")


class TestLayout:
    def test_a_folder_with_too_many_modules_is_found(self) -> None:
        sources = {f"a/m{number}.py": ast.parse("") for number in range(MAX_FILES + 1)} | {
            "a/__init__.py": ast.parse("")
        }
        (found,) = check_layout(sources, {})
        assert (found.path, found.message.split(",")[0]) == ("a", f"{MAX_FILES + 1} modules")
        assert not list(check_layout(sources, {"a": "a reason"}))

    def test_a_folder_at_the_limit_is_accepted_and_needs_no_exception(self) -> None:
        sources = {f"a/m{number}.py": ast.parse("") for number in range(MAX_FILES)} | {"a/__init__.py": ast.parse("")}
        assert not list(check_layout(sources, {}))
        (found,) = check_layout(sources, {"a": "a reason"})
        assert "remove it" in found.message


class TestHiddenImports:
    @pytest.mark.parametrize(
        "statement",
        [
            "from ..world import World",
            "from . import world",
            "from simulation.world import World",
            "import simulation.run",
        ],
    )
    @pytest.mark.parametrize("condition", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
    def test_a_hidden_import_of_this_repository_is_found(self, statement: str, condition: str) -> None:
        sources = {"a/b.py": ast.parse(f"if {condition}:\n    import numpy\n    {statement}")}
        (found,) = check_hidden_imports(sources, {"simulation"}, {})
        assert (found.path, found.line) == ("a/b.py", 3)
        assert "hides a circle" in found.message
        assert not list(check_hidden_imports(sources, {"simulation"}, {"a/b.py": "a reason"}))

    @pytest.mark.parametrize(
        "source",
        [
            "if TYPE_CHECKING:\n    from torch.distributed import TCPStore\n    import simulations",
            "from .world import World",
            "if sys.platform:\n    from .world import World",
        ],
    )
    def test_other_imports_are_accepted_and_need_no_exception(self, source: str) -> None:
        sources = {"a/b.py": ast.parse(source)}
        assert not list(check_hidden_imports(sources, {"simulation"}, {}))
        (found,) = check_hidden_imports(sources, {"simulation"}, {"a/b.py": "a reason"})
        assert "remove its exception" in found.message


class TestProse:
    def test_a_banned_word_is_found_in_its_line(self) -> None:
        (found,) = check_page("a.md", f"A line.\n\n{BANNED_WORD.capitalize()} starts the job.")
        assert (found.line, found.message) == (3, f'"{BANNED_WORD.capitalize()}": write {BANNED[BANNED_WORD]}')

    def test_a_long_sentence_is_found(self) -> None:
        (found,) = check_page("a.md", f"Short.\nIt {'very ' * MAX_WORDS}long.")
        assert found.line == 2
        assert found.message.startswith(f"{MAX_WORDS + 2} words")

    def test_names_code_and_tables_are_not_prose(self) -> None:
        page = f"`{BANNED_WORD}` is a name.\n```\n{BANNED_WORD}\n```\n| {'word ' * 2 * MAX_WORDS}|\n[text](behavior.md)"
        assert not list(check_page("a.md", page))

    @pytest.mark.parametrize(
        "source",
        [
            f'"""{BANNED_WORD.capitalize()} starts."""',
            f"x = 1  # {BANNED_WORD} starts",
            f'log.info("it tries {BANNED_PHRASE} %s", x)',
        ],
    )
    def test_a_banned_word_is_found_in_docstring_comment_and_message(self, source: str) -> None:
        assert len(check_text("a.py", source)) == 1

    @pytest.mark.parametrize(
        ("path", "count"),
        [
            *((path, 1) for path in ("bench/a.py", "examples/a.py", "lint/a.py", "testing/a.py", "tests/unit/a.py")),
            ("lint/prose.py", 0),
        ],
    )
    def test_all_folders_are_checked(
        self, path: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(f"# {BANNED_WORD}\n")
        monkeypatch.setattr(lint_main, "ROOT", tmp_path)
        assert [found.path for found in lint_main.check_files([path])].count(path) == count

    @pytest.mark.parametrize(("text", "status"), [("# a behaviour\n", 65), ("# a behavior\n", 0)])
    def test_british_spelling_is_found(self, text: str, status: int, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text(text)
        command = [
            sys.executable,
            "-m",
            "codespell_lib",
            "--toml",
            str(ROOT / "pyproject.toml"),
            str(tmp_path / "a.py"),
        ]
        assert subprocess.run(command, capture_output=True, check=False, cwd=tmp_path).returncode == status

    def test_names_in_strings_are_not_prose(self) -> None:
        assert not check_text("a.py", f'kind = "{BANNED_WORD}"\n"""Return `{BANNED_WORD}`."""')


def _dedent(text: str) -> str:
    lines = text.strip("\n").split("\n")
    width = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[width:] for line in lines)


def test_a_rule_that_cites_a_locked_salt_is_found() -> None:
    salts = read_salts('{"batches": [{"salt": "locked-1"}, {"salt": "locked-2"}]}')
    texts = {"a.py": "x = 1\n# made for 4000 of locked-2\n", "b.md": "locked-3"}
    (found,) = check_citations(texts, salts)
    assert (found.path, found.line) == ("a.py", 2)
    assert "locked-2" in found.message
