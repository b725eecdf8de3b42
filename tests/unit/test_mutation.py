"""The tool that looks for changes which no test notices: what it changes, and whether it notices who notices."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from tests.mutation import __main__ as tool
from tests.mutation import trial
from tests.mutation.checks import Check
from tests.mutation.mutants import Mutant, iterate_mutants
from tests.mutation.trial import TrialResult, trace_checks, try_mutants


def module(folder: Path, text: str) -> tuple[Path, ModuleType]:
    path = folder / "toy.py"
    path.write_text(dedent(text))
    spec = importlib.util.spec_from_file_location("toy", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return path, loaded


def mutations(folder: Path, text: str) -> list[tuple[str, str]]:
    path, _ = module(folder, text)
    return [(mutant.function, mutant.mutation) for mutant in iterate_mutants(path)]


def fates(path: Path, checks: list[Check]) -> dict[str, TrialResult]:
    reached = trace_checks(checks, [path])
    return {mutant.mutation: fate for mutant, fate in try_mutants(iterate_mutants(path), checks, reached)}


class TestMutants:
    def test_comparisons_become_their_neighbours_and_negations(self, tmp_path: Path) -> None:
        assert mutations(tmp_path, "def f(a, b): return a < b is not None") == [
            ("f", "a < b is not None → a <= b is not None"),
            ("f", "a < b is not None → a >= b is not None"),
            ("f", "a < b is not None → a < b is None"),
        ]

    def test_booleans(self, tmp_path: Path) -> None:
        assert mutations(tmp_path, "def f(a, b): return g(a and not b, strict=False, deep=True)") == [
            ("f", "a and (not b) → a or not b"),
            ("f", "not b → b"),
            ("f", "True → False"),
        ]

    def test_early_exits_but_no_last_ones(self, tmp_path: Path) -> None:
        text = """
            def f(values):
                for value in values:
                    if value:
                        continue
                    else:
                        raise ValueError
                return 1
        """
        assert mutations(tmp_path, text) == [
            ("f", "if value: continue → pass"),
            ("f", "else of if value: raise ValueError → pass"),
        ]

    def test_what_says_the_same_twice_is_numbered(self, tmp_path: Path) -> None:
        found = mutations(tmp_path, "def f(a): return (not a, not a)\ndef g(a): return not a")
        assert found == [("f", "not a → a"), ("f", "not a → a (2)"), ("g", "not a → a")]

    def test_what_runs_before_the_first_test_and_assertions_stay(self, tmp_path: Path) -> None:
        text = """
            KNOWN = 1 < 2
            class C:
                known: bool = False
                def method(self, known=True):
                    assert known is not None
                    def inner(): return not known
                    return inner
        """
        assert mutations(tmp_path, text) == [("C.method.inner", "not known → known")]

    def test_lines_of_a_compound_statement_are_its_heads(self, tmp_path: Path) -> None:
        path, _ = module(tmp_path, "def f(a, b):\n    if (a\n        and b):\n        return 1\n    return 2\n")
        assert [mutant.lines for mutant in iterate_mutants(path)] == [range(2, 4), range(4, 5)]


class TestTrials:
    def test_who_is_noticed_and_who_is_not(self, tmp_path: Path) -> None:
        path, toy = module(tmp_path, "def f(a, b): return a < b")
        weak = [Check("weak", lambda: toy.f(1, 2))]
        assert fates(path, weak) == {"a < b → a <= b": TrialResult.SURVIVED, "a < b → a >= b": TrialResult.KILLED}
        strong = [*weak, Check("strong", lambda: not toy.f(1, 1))]
        assert set(fates(path, strong).values()) == {TrialResult.KILLED}
        assert toy.f(1, 2), "mutants live in processes of their own"

    def test_an_exception_is_noticed(self, tmp_path: Path) -> None:
        path, toy = module(tmp_path, "def f(a):\n    if a is None:\n        return 0\n    return a + 1\n")
        assert (
            fates(path, [Check("none", lambda: toy.f(None) == 0)])["if a is None: return 0 → pass"]
            is TrialResult.KILLED
        )

    def test_a_change_that_leaves_the_code_as_it_was_is_no_mutant(self, tmp_path: Path) -> None:
        path, toy = module(tmp_path, "def f(a):\n    if a:\n        return\n")
        assert list(fates(path, [Check("any", lambda: toy.f(1) is None)]).values()) == [TrialResult.SAME]

    def test_closures_decorated_functions_and_generators_change_too(self, tmp_path: Path) -> None:
        text = """
            from functools import lru_cache, wraps
            def outer():
                def inner(): return not False
                return inner
            made = outer()
            def plain(function):
                @wraps(function)
                def call(): return function()
                return call
            @plain
            def decorated(): return not None
            def generator(): yield not 0
        """
        path, toy = module(tmp_path, text)
        checks = [
            Check("closure", lambda: toy.made()),
            Check("decorated", lambda: toy.decorated()),
            Check("generator", lambda: list(toy.generator()) == [True]),
        ]
        found = fates(path, checks)
        assert found.pop("False → True") is TrialResult.KILLED
        assert found == dict.fromkeys(["not False → False", "not None → None", "not 0 → 0"], TrialResult.KILLED)

    def test_one_that_never_ends_is_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trial, "PATIENCE_SECONDS", 1)
        path, toy = module(tmp_path, "def f():\n    while False: pass\n    return 1\n")
        found = fates(path, [Check("ends", lambda: toy.f() == 1)])
        assert found == {"False → True": TrialResult.ENDLESS}

    def test_only_checks_that_reach_the_line_are_asked(self, tmp_path: Path) -> None:
        path, toy = module(tmp_path, "def f(a):\n    if a:\n        return not a\n    return 1\n")
        asked = tmp_path / "asked"

        def elsewhere() -> bool:
            asked.write_text("it was")
            return bool(toy.f(0))

        checks = [Check("elsewhere", elsewhere)]
        reached = trace_checks(checks, [path])
        asked.unlink()
        assert [fate for _, fate in try_mutants(iterate_mutants(path), checks, reached)] == [
            TrialResult.SURVIVED,
            TrialResult.SURVIVED,
        ]
        assert not asked.exists()

    def test_a_check_that_does_not_hold_by_itself_judges_nobody(self, tmp_path: Path) -> None:
        path, _ = module(tmp_path, "def f(): return True")
        with pytest.raises(RuntimeError, match="without a mutation"):
            trace_checks([Check("false", lambda: False)], [path])


class TestTool:
    def test_a_sample_is_the_same_each_time_and_in_order(self) -> None:
        drawn = tool.draw_sample("decide/", 40, seed=1)
        assert drawn == tool.draw_sample("decide/", 40, seed=1) != tool.draw_sample("decide/", 40, seed=2)
        assert drawn == sorted(drawn, key=lambda mutant: (mutant.path, mutant.number))
        assert len(drawn) == 40

    def test_each_argument_is_about_a_mutant(self) -> None:
        """What it argued has changed, or gone: so has the argument to go."""
        everyone: list[Mutant] = tool.draw_sample("", 0, seed=0)
        assert len({tool.get_identity(mutant) for mutant in everyone}) == len(everyone)
        assert [entry for entry in tool.load_argued() if not any(entry.covers(mutant) for mutant in everyone)] == []
