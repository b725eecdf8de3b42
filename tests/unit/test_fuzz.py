"""Mutated values at every border, always the same ones; `make fuzz` draws others, for a chosen duration."""

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
def test_mutated_values_are_accepted_or_refused_by_name(name: str) -> None:
    assert run_trials(BORDERS[name], iter(range(BORDERS[name].cases))) == BORDERS[name].cases


def test_every_decoder_is_behind_a_fuzzed_border() -> None:
    trusted = {name for names in TRUSTED.values() for name in names}
    unfuzzed = find_decoders() - trusted - trace_reached(BORDERS.values())
    assert not unfuzzed, "give each a border in tests/fuzz/borders, or argue it in tests/fuzz/decoders.py"
    assert trusted <= find_decoders(), "each argued decoder exists"


def test_all_json_is_read_in_one_place() -> None:
    """It handles depth, numbers of thousands of digits, and bytes that are no text."""
    found = [
        str(path.relative_to(ROOT))
        for source in SOURCES
        for path in (ROOT / source).rglob("*.py")
        if re.search(r"(?<!or)json\.loads?\(", path.read_text())
    ]
    # Between a launcher and its warm process.
    own = ["trainer/pacekeeper/launcher/ranks/warm_process.py", "trainer/pacekeeper_rank/forking/warm_server.py"]
    torchs = "trainer/pacekeeper_rank/collectives/flight_recorder.py"  # torch's output, in the rank itself
    container = "trainer/pacekeeper_rank/watching/process_monitor.py"  # files of the ranks of its own container
    assert sorted(found) == sorted(["analysis/pacekeeper_analysis/protocol/decoding.py", *own, torchs, container])


def build_border(enter: Enter, *, examples: Any = ({"a": [1, {"b": "c"}]},), judge: Any = None) -> Border:
    more = {} if judge is None else {"check": judge}
    return Border("broken", lambda: list(examples), mutations.mutate_document, call_directly(enter), **more)


def read_index(value: Any) -> object:
    return value["a"][1]["b"].upper()


def grow_memory(value: Any) -> object:
    return [0] * 10**9 if value != {"a": [1, {"b": "c"}]} else 0


def raise_long_message(value: Any) -> object:
    if value != {"a": [1, {"b": "c"}]}:
        raise InputError(f"{value} " * 2_000)
    return 0


def return_nan(value: Any) -> object:
    return float("nan") if value != {"a": [1, {"b": "c"}]} else 0.0


class TestFuzzer:
    @pytest.mark.parametrize(
        ("enter", "text"),
        [
            (read_index, "raises"),
            (grow_memory, "MemoryError"),
            (raise_long_message, "characters"),
            (return_nan, "is nan"),
        ],
    )
    def test_the_fuzzer_finds_each_kind_of_failure(self, enter: Enter, text: str) -> None:
        with pytest.raises(Finding, match=text) as found:
            run_trials(build_border(enter), iter(range(200)))
        assert re.search(r"--border 'broken' --seed \d+ --cases 1", str(found.value)), "how to repeat it"

    def test_the_fuzzer_ends_an_endless_decoder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(border, "MAX_SECONDS", 0.05)

        def run(value: Any) -> object:
            while value != {"a": [1, {"b": "c"}]}:
                pass
            return 0

        with pytest.raises(Finding, match="takes more than"):
            run_trials(build_border(run), iter(range(20)))

    def test_the_result_of_a_value_is_checked(self) -> None:
        other = build_border(str, judge=lambda found, valid: "" if found == valid else "another state")
        with pytest.raises(Finding, match="another state"):
            run_trials(other, iter(range(20)))

    def test_a_mutation_is_a_function_of_its_seed(self) -> None:
        kinds: Any = (
            (mutations.mutate_document, {"a": [1]}),
            (mutations.mutate_bytes, b"abcdefgh"),
            (mutations.mutate_word, "x"),
        )
        for mutate, valid in kinds:
            assert repr(mutate(Random("s"), valid)) == repr(mutate(Random("s"), valid))

    def test_a_valid_value_is_not_changed(self) -> None:
        valid = {"a": [1, {"b": "c"}]}
        for seed in range(300):
            mutations.mutate_document(Random(seed), valid)
        assert valid == {"a": [1, {"b": "c"}]}
