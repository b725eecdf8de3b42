"""A broken or hostile rank's pattern: nothing but an InputError results from it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.profiling.localize import localize_fault, localize_in_table
from pacekeeper_analysis.profiling.page import MAX_PAGE_BYTES, ProfilePage, write_profile_page
from pacekeeper_analysis.profiling.pattern import MAX_PROFILE_ANSWER_BYTES, ProcessSetup, ProfileAnswer, RankPattern
from pacekeeper_analysis.profiling.table import MAX_TABLE_COLUMNS, read_table
from pacekeeper_analysis.protocol.requests import SourceNaming
from testing.training.patterns import HEALTHY_WORK, SLOW_FUNCTION, build_answers, build_pattern

ONE = build_pattern(
    3, {**HEALTHY_WORK, SLOW_FUNCTION: 0.05}, 0.5, setup=ProcessSetup(threads=2, variables=("OMP_NUM_THREADS=2",))
)


def test_a_pattern_is_read_as_it_was_written() -> None:
    answer = ProfileAnswer.from_bytes(ProfileAnswer(ONE, ONE).to_bytes())
    assert answer.pattern.function_patterns[0].name == ONE.function_patterns[0].name
    assert np.allclose(answer.pattern.statistics, ONE.statistics, atol=1e-4)
    assert (answer.pattern.setup, answer.pattern.step_seconds) == (ONE.setup, 0.5)
    assert answer.pattern.stacks[0].sample_count == 900
    assert answer.baseline is not None
    assert ProfileAnswer.from_bytes(ProfileAnswer(ONE).to_bytes(), stacks=False).pattern.folded == ()


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: d.update(rank="3"), "rank"),
        (lambda d: d.update(steps=0), "steps"),
        (lambda d: d.update(seconds=float("nan")), "seconds"),
        (lambda d: d.update(names=[7]), r"names\[0\]"),
        (lambda d: d.update(names=["x" * 161]), r"names\[0\]"),
        (lambda d: d.update(names=["\n"]), r"names\[0\]"),
        (lambda d: d.update(names=["x"] * 2000), "names"),
        (lambda d: d.update(owners="5" * 200), "owners"),
        (lambda d: d.update(owners="9" * len(d["owners"])), "owners"),
        (lambda d: d.update(owners="²" * len(d["owners"])), "owners"),
        (lambda d: d.update(functions=[-1] * len(d["functions"])), "functions"),
        (lambda d: d.update(functions=[10**9] * len(d["functions"])), "functions"),
        (lambda d: d.update(functions=[[1]] * len(d["functions"])), "functions"),
        (lambda d: d.update(share=d["share"][1:]), "share"),
        (lambda d: d.update(share=[1.0] * len(d["share"])), "share"),
        (lambda d: d.update(share=[float("nan")] * len(d["share"])), "share"),
        (lambda d: d.update(use=["x"] * len(d["use"])), "use"),
        (lambda d: d.update(spread=[10**400] * len(d["spread"])), "spread"),
        (lambda d: d.update(error="0.1"), "error"),
        (lambda d: d.update(stacks=[[5]]), r"stacks\[0\]"),
        (lambda d: d.update(stacks=[[5, 10**6]]), r"stacks\[0\]"),
        (lambda d: d.update(stacks=[[5, True]]), r"stacks\[0\]"),
        (lambda d: d.update(stacks=[[1, *[0] * 80]]), r"stacks\[0\]"),
        (lambda d: d.update(setup={"variables": ["SECRET=1"]}), "variables"),
        (lambda d: d.update(setup={"throttled": 2}), "throttled"),
        (lambda d: d.update(sources="Tell"), "sources"),
    ],
)
def test_an_invalid_pattern_is_named(change: Change, field: str) -> None:
    data = ONE.to_json()
    change(data)
    with pytest.raises(InputError, match=field):
        RankPattern.from_json(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"\xff", b"[" * 10_000, b"x" * (MAX_PROFILE_ANSWER_BYTES + 1), b'{"pattern":7}', b"1" * 10_000],
    ids=["empty", "list", "without", "no text", "deep", "long", "number", "long number"],
)
def test_an_invalid_answer_is_an_input_error(data: bytes) -> None:
    with pytest.raises(InputError):
        ProfileAnswer.from_bytes(data)


def test_damage_in_any_place_raises_nothing_but_input_errors() -> None:
    chance = random.Random(1)
    whole = ProfileAnswer(ONE, ONE).to_bytes()
    for _ in range(300):
        broken = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            broken[chance.randrange(len(broken))] = chance.choice(b'0123456789-.eE"[]{},:xn')
        found = localize_fault([(3, bytes(broken))], 1)
        assert found.reported in (0, 1)


def test_names_that_have_become_longer_displace_stacks() -> None:
    deep = tuple((5, *range(len(ONE.names)), 0, 1, 2) for _ in range(400))
    full = replace(ONE, folded=deep)
    answer = ProfileAnswer(full, full).rename_functions(lambda name: f"#{name}", SourceNaming.SHOW)
    data = answer.to_bytes()
    assert len(data) <= MAX_PROFILE_ANSWER_BYTES
    found = ProfileAnswer.from_bytes(data)
    assert found.pattern.names[0].startswith("#")
    assert 0 < len(found.pattern.folded) < 400


def test_a_rank_with_names_of_its_own_takes_no_other_ranks_room() -> None:
    hostile = build_pattern(0, {(f"x{i}", SLOW_FUNCTION[1]): 0.003 for i in range(120)}, 0.5)
    others = [
        build_pattern(rank, {**HEALTHY_WORK, **({SLOW_FUNCTION: 0.1} if rank == 5 else {})}, 0.5)
        for rank in range(1, 8)
    ]
    found = localize_fault(build_answers([hostile, *others]), 8)
    assert "train.py:augment" in {explanation.function for explanation in found.explanations}
    assert len(read_table(build_answers([hostile, *others])).functions) <= MAX_TABLE_COLUMNS


def test_the_page_has_suspects_next_to_usual_ranks_and_keeps_its_bounds() -> None:
    now = [
        build_pattern(rank, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2} if rank == 7 else HEALTHY_WORK, 0.6)
        for rank in range(3000)
    ]
    sent = dict(build_answers(now))
    table = read_table(sent.items())
    found = localize_in_table(table, 3000)
    data = write_profile_page(found, table, sent)
    assert len(data) <= MAX_PAGE_BYTES
    read = ProfilePage.from_json(data)
    assert read.answers[0].pattern.rank == 7
    assert len(read.answers) == 3
    assert 7 in read.plots[0].ranks
    assert len(read.plots[0].ranks) <= 2000
    assert read.localization.finding.culprit == "train.py:augment on rank 7"
    with pytest.raises(InputError):
        ProfilePage.from_json(json.dumps({"plots": 1}).encode())
