"""Mutated values at every border, always the same ones; `make fuzz` has others, for as long as one likes."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from tests.fuzz import border, mutations
from tests.fuzz.border import Border, Enter, Finding, call_directly, run_trials
from tests.fuzz.borders import load_borders
from tests.fuzz.decoders import ROOT, SOURCES, TRUSTED, find_decoders, trace_reached

BORDERS = load_borders()


@pytest.mark.parametrize("name", BORDERS)
def test_mutated_values_are_taken_or_refused_by_name(name: str) -> None:
    assert run_trials(BORDERS[name], iter(range(BORDERS[name].cases))) == BORDERS[name].cases


def test_every_decoder_is_behind_a_border_that_is_fuzzed() -> None:
    trusted = {name for names in TRUSTED.values() for name in names}
    unfuzzed = find_decoders() - trusted - trace_reached(BORDERS.values())
    assert not unfuzzed, "give each a border in tests/fuzz/borders, or argue it in tests/fuzz/decoders.py"
    assert trusted <= find_decoders(), "what is argued is there"


def test_all_json_is_read_in_one_place() -> None:
    """Which knows of depth, of numbers of thousands of digits, and of bytes that are no text."""
    found = [
        str(path.relative_to(ROOT))
        for source in SOURCES
        for path in (ROOT / source).rglob("*.py")
        if re.search(r"(?<!or)json\.loads?\(", path.read_text())
    ]
    own = "trainer/pacekeeper/launcher/ranks/warm_process.py"  # of a launcher and the process that it has forked
    assert sorted(found) == ["analysis/pacekeeper_analysis/protocol/decoding.py", own]


def broken(enter: Enter, *, examples: Any = ({"a": [1, {"b": "c"}]},), judge: Any = None) -> Border:
    more = {} if judge is None else {"check": judge}
    return Border("broken", lambda: list(examples), mutations.mutate_document, call_directly(enter), **more)


def index(value: Any) -> object:
    return value["a"][1]["b"].upper()


def grow(value: Any) -> object:
    return [0] * 10**9 if value != {"a": [1, {"b": "c"}]} else 0


def chatter(value: Any) -> object:
    if value != {"a": [1, {"b": "c"}]}:
        raise InputError(f"{value} " * 2_000)
    return 0


def forget(value: Any) -> object:
    return float("nan") if value != {"a": [1, {"b": "c"}]} else 0.0


class TestTheTool:
    @pytest.mark.parametrize(
        ("enter", "words"),
        [(index, "raises"), (grow, "MemoryError"), (chatter, "characters"), (forget, "is nan")],
    )
    def test_it_finds_what_must_not_be(self, enter: Enter, words: str) -> None:
        with pytest.raises(Finding, match=words) as found:
            run_trials(broken(enter), iter(range(200)))
        assert re.search(r"--border 'broken' --seed \d+ --cases 1", str(found.value)), "how to do it again"

    def test_it_ends_what_does_not_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(border, "MAX_SECONDS", 0.05)

        def run(value: Any) -> object:
            while value != {"a": [1, {"b": "c"}]}:
                pass
            return 0

        with pytest.raises(Finding, match="takes more than"):
            run_trials(broken(run), iter(range(20)))

    def test_what_comes_of_a_value_is_judged(self) -> None:
        other = broken(str, judge=lambda found, valid: "" if found == valid else "another state")
        with pytest.raises(Finding, match="another state"):
            run_trials(other, iter(range(20)))

    def test_a_seed_is_always_the_same_value(self) -> None:
        kinds: Any = (
            (mutations.mutate_document, {"a": [1]}),
            (mutations.mutate_bytes, b"abcdefgh"),
            (mutations.mutate_word, "x"),
        )
        for mutate, valid in kinds:
            assert repr(mutate(Random("s"), valid)) == repr(mutate(Random("s"), valid))

    def test_a_valid_value_is_left_as_it_is(self) -> None:
        valid = {"a": [1, {"b": "c"}]}
        for seed in range(300):
            mutations.mutate_document(Random(seed), valid)
        assert valid == {"a": [1, {"b": "c"}]}
