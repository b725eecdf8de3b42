"""The mutation tool: which changes it makes, and which of them it reports as killed."""

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


def load_module(folder: Path, text: str) -> tuple[Path, ModuleType]:
    path = folder / "toy.py"
    path.write_text(dedent(text))
    spec = importlib.util.spec_from_file_location("toy", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return path, loaded


def list_mutations(folder: Path, text: str) -> list[tuple[str, str]]:
    path, _ = load_module(folder, text)
    return [(mutant.function, mutant.mutation) for mutant in iterate_mutants(path)]


def try_all_mutants(path: Path, checks: list[Check]) -> dict[str, TrialResult]:
    reached = trace_checks(checks, [path])
    return {mutant.mutation: result for mutant, result in try_mutants(iterate_mutants(path), checks, reached)}


class TestMutants:
    def test_comparisons_become_their_neighbors_and_negations(self, tmp_path: Path) -> None:
        assert list_mutations(tmp_path, "def f(a, b): return a < b is not None") == [
            ("f", "a < b is not None → a <= b is not None"),
            ("f", "a < b is not None → a >= b is not None"),
            ("f", "a < b is not None → a < b is None"),
        ]

    def test_booleans_are_negated(self, tmp_path: Path) -> None:
        assert list_mutations(tmp_path, "def f(a, b): return g(a and not b, strict=False, deep=True)") == [
            ("f", "a and (not b) → a or not b"),
            ("f", "not b → b"),
            ("f", "True → False"),
        ]

    def test_early_exits_are_removed_but_not_final_ones(self, tmp_path: Path) -> None:
        text = """
            def f(values):
                for value in values:
                    if value:
                        continue
                    else:
                        raise ValueError
                return 1
        """
        assert list_mutations(tmp_path, text) == [
            ("f", "if value: continue → pass"),
            ("f", "else of if value: raise ValueError → pass"),
        ]

    def test_repeated_expressions_are_numbered(self, tmp_path: Path) -> None:
        found = list_mutations(tmp_path, "def f(a): return (not a, not a)\ndef g(a): return not a")
        assert found == [("f", "not a → a"), ("f", "not a → a (2)"), ("g", "not a → a")]

    def test_code_that_runs_at_import_and_assertions_stay(self, tmp_path: Path) -> None:
        text = """
            KNOWN = 1 < 2
            class C:
                known: bool = False
                def method(self, known=True):
                    assert known is not None
                    def inner(): return not known
                    return inner
        """
        assert list_mutations(tmp_path, text) == [("C.method.inner", "not known → known")]

    def test_the_lines_of_a_compound_statement_are_its_head(self, tmp_path: Path) -> None:
        path, _ = load_module(tmp_path, "def f(a, b):\n    if (a\n        and b):\n        return 1\n    return 2\n")
        assert [mutant.lines for mutant in iterate_mutants(path)] == [range(2, 4), range(4, 5)]


class TestTrials:
    def test_a_mutant_is_killed_only_by_a_check_that_notices_it(self, tmp_path: Path) -> None:
        path, toy = load_module(tmp_path, "def f(a, b): return a < b")
        weak = [Check("weak", lambda: toy.f(1, 2))]
        assert try_all_mutants(path, weak) == {
            "a < b → a <= b": TrialResult.SURVIVED,
            "a < b → a >= b": TrialResult.KILLED,
        }
        strong = [*weak, Check("strong", lambda: not toy.f(1, 1))]
        assert set(try_all_mutants(path, strong).values()) == {TrialResult.KILLED}
        assert toy.f(1, 2), "mutants run in their own processes"

    def test_an_exception_kills_a_mutant(self, tmp_path: Path) -> None:
        path, toy = load_module(tmp_path, "def f(a):\n    if a is None:\n        return 0\n    return a + 1\n")
        assert (
            try_all_mutants(path, [Check("none", lambda: toy.f(None) == 0)])["if a is None: return 0 → pass"]
            is TrialResult.KILLED
        )

    def test_a_change_without_effect_on_the_code_is_no_mutant(self, tmp_path: Path) -> None:
        path, toy = load_module(tmp_path, "def f(a):\n    if a:\n        return\n")
        assert list(try_all_mutants(path, [Check("any", lambda: toy.f(1) is None)]).values()) == [TrialResult.SAME]

    def test_closures_decorated_functions_and_generators_are_mutated(self, tmp_path: Path) -> None:
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
        path, toy = load_module(tmp_path, text)
        checks = [
            Check("closure", lambda: toy.made()),
            Check("decorated", lambda: toy.decorated()),
            Check("generator", lambda: list(toy.generator()) == [True]),
        ]
        found = try_all_mutants(path, checks)
        assert found.pop("False → True") is TrialResult.KILLED
        assert found == dict.fromkeys(["not False → False", "not None → None", "not 0 → 0"], TrialResult.KILLED)

    def test_an_endless_mutant_is_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trial, "PATIENCE_SECONDS", 1)
        path, toy = load_module(tmp_path, "def f():\n    while False: pass\n    return 1\n")
        found = try_all_mutants(path, [Check("ends", lambda: toy.f() == 1)])
        assert found == {"False → True": TrialResult.ENDLESS}

    def test_only_checks_that_reach_the_line_run(self, tmp_path: Path) -> None:
        path, toy = load_module(tmp_path, "def f(a):\n    if a:\n        return not a\n    return 1\n")
        called = tmp_path / "asked"

        def elsewhere() -> bool:
            called.write_text("it was")
            return bool(toy.f(0))

        checks = [Check("elsewhere", elsewhere)]
        reached = trace_checks(checks, [path])
        called.unlink()
        assert [result for _, result in try_mutants(iterate_mutants(path), checks, reached)] == [
            TrialResult.SURVIVED,
            TrialResult.SURVIVED,
        ]
        assert not called.exists()

    def test_a_check_that_fails_without_a_mutant_does_not_count(self, tmp_path: Path) -> None:
        path, _ = load_module(tmp_path, "def f(): return True")
        with pytest.raises(RuntimeError, match="without a mutation"):
            trace_checks([Check("false", lambda: False)], [path])


class TestTool:
    def test_a_sample_is_reproducible_and_in_order(self) -> None:
        drawn = tool.draw_sample("decide/", 40, seed=1)
        assert drawn == tool.draw_sample("decide/", 40, seed=1) != tool.draw_sample("decide/", 40, seed=2)
        assert drawn == sorted(drawn, key=lambda mutant: (mutant.path, mutant.number))
        assert len(drawn) == 40

    def test_each_argued_entry_matches_a_mutant(self) -> None:
        """An entry whose code has changed or is gone must be removed."""
        everyone: list[Mutant] = tool.draw_sample("", 0, seed=0)
        assert len({tool.get_identity(mutant) for mutant in everyone}) == len(everyone)
        assert [entry for entry in tool.load_argued() if not any(entry.covers(mutant) for mutant in everyone)] == []
