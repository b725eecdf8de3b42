"""From the state of ranks to sentences for people."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.watch.container import ContainerState
from pacekeeper.watch.live import UNWATCHED_NOTICE_SECONDS, LiveAnalysis
from pacekeeper_analysis.protocol.reports import (
    FaultKind,
    FaultReport,
    Heartbeat,
    LauncherState,
    RankState,
    RankWindow,
    StepProgress,
)
from pacekeeper_analysis.protocol.watched_container import BrokenReport, RankDescription

RESET = "RuntimeError: Connection reset by peer"


def describe(rank: int, world_size: int = 4, **fields: object) -> RankDescription:
    description = RankDescription(rank, world_size, rank, 100 + rank, 0, 0.0, "Native", "3.11.7", "2.15.0", "a:1")
    return replace(description, **fields)  # type: ignore[arg-type]


def build_state(ranks: int = 4, step: int = 50, faults: tuple[FaultReport, ...] = ()) -> ContainerState:
    heartbeat = Heartbeat(worker="local", state=LauncherState.RUNNING, progress=StepProgress(step, step))
    return ContainerState(heartbeat, tuple(describe(rank, ranks) for rank in range(ranks)), faults=faults)


def build_windows(first: int, slow: dict[int, float], first_rank: int = 0) -> list[RankWindow]:
    """32 steps of four ranks, whose own work takes 10 ms, times `slow`, with noise of 2 %."""
    noise = np.random.default_rng(first).normal(1.0, 0.02, (4, 32))
    own = 0.01 * noise * np.array([[slow.get(rank, 1.0)] for rank in range(4)])
    total = tuple((own.max(axis=0) + 0.001).tolist())
    steps = tuple(range(first, first + 32))
    return [
        RankWindow(first_rank + rank, steps, total, tuple(own[rank].tolist()), (0,) * 32, sync_mode="")
        for rank in range(4)
    ]


def fail(rank: int, error: str = "", code: int = 1, at: float = 10.0, round_: int = 1) -> FaultReport:
    return FaultReport(f"f{rank}", FaultKind.RANK_FAILED, "local", round_, at, rank=rank, exit_code=code, error=error)


def stall(stack: str, state: str = "S") -> FaultReport:
    def build(rank: int, **fields: object) -> RankState:
        waiting = RankState(rank, "TRAIN", 5.0, 50, "ALL_REDUCE", 7, 9, 9, 5.0, "S", False, entered="7:9")
        return replace(waiting, **fields)  # type: ignore[arg-type]

    culprit = build(3, collective="NONE", sequence=8, stack=stack, process_state=state, entered="7:8")
    return FaultReport("s", FaultKind.STALLED, "local", 1, 20.0, ranks=(*(build(rank) for rank in range(3)), culprit))


class TestSlowRanks:
    def test_a_slow_rank_is_named_at_once_and_counted_once_it_is_certain(self) -> None:
        live = LiveAnalysis(0.0)
        assert live.observe(build_state(), build_windows(0, {}), 1.0) == [
            "watching 4 ranks: torch 2.15.0, Python 3.11.7"
        ]
        (sentence,) = live.observe(build_state(step=90), build_windows(32, {2: 2.0}), 2.0)
        assert sentence.startswith("SLOW: rank 2 takes ")
        assert "(P = 1.00); a step takes 2" in sentence
        assert live.observe(build_state(step=120), build_windows(64, {2: 2.0}), 3.0) == [], "it is named once"
        (over,) = live.observe(build_state(step=150), build_windows(96, {}), 4.0)
        assert over.startswith("no rank is slow any more")
        summary = live.summarize(5.0)
        assert summary[0] == "5 s, 4 of 4 ranks, 150 steps, the last ones of 11.2 ms each"
        assert summary[1].startswith("rank 2 was slow for ")
        assert len(summary) == 2

    def test_a_rank_that_is_slow_from_its_first_step_on_is_named_and_counted(self) -> None:
        live = LiveAnalysis(0.0)
        early = [
            replace(
                window,
                steps=window.steps[:8],
                step_seconds=window.step_seconds[:8],
                compute_seconds=window.compute_seconds[:8],
                samples=(0,) * 8,
            )
            for window in build_windows(0, {2: 2.0})
        ]
        _, sentence = live.observe(build_state(), early, 1.0)
        assert sentence.startswith("SLOW: rank 2 takes ")
        assert "(P = 1.00)" in sentence
        live.observe(build_state(step=90), build_windows(32, {2: 2.0}), 3.0)
        assert live.summarize(4.0)[1].startswith("rank 2 was slow for ")

    def test_healthy_ranks_are_not_named(self) -> None:
        live = LiveAnalysis(0.0)
        sentences = [
            sentence
            for turn in range(40)
            for sentence in live.observe(build_state(step=turn), build_windows(32 * turn, {}), float(turn))
        ]
        assert sentences == ["watching 4 ranks: torch 2.15.0, Python 3.11.7"]
        assert live.summarize(40.0)[1:] == ["no slow rank, no hang, and no failed rank"]

    def test_ranks_of_one_machine_among_several_keep_their_numbers(self) -> None:
        live = LiveAnalysis(0.0)
        state = replace(build_state(), ranks=tuple(describe(rank, 8) for rank in range(4, 8)))
        live.observe(state, build_windows(0, {}, first_rank=4), 1.0)
        (sentence,) = live.observe(state, build_windows(32, {2: 2.0}, first_rank=4), 2.0)
        assert sentence.startswith("SLOW: rank 6 takes ")

    def test_what_does_not_measure_own_work_names_no_slow_rank(self) -> None:
        live = LiveAnalysis(0.0)
        windows = [replace(window, compute_seconds=window.step_seconds) for window in build_windows(0, {2: 2.0})]
        assert not any("SLOW" in sentence for sentence in live.observe(build_state(), windows, 1.0))


class TestHangs:
    @pytest.mark.parametrize(
        ("state", "stack", "kind"),
        [
            ("S", 'File "train.py", line 9 in main\nFile "train.py", line 3 in fetch', "NeverEntered"),
            ("T", "", "Stopped"),
        ],
    )
    def test_the_rank_that_holds_the_others_up_is_named_with_its_stack(self, state: str, stack: str, kind: str) -> None:
        live = LiveAnalysis(0.0)
        live.observe(build_state(), (), 15.0)
        sentences = live.observe(build_state(faults=(stall(stack, state),)), (), 20.0)
        assert sentences[0] == f"HANG: rank 3 holds all others up ({kind})"
        assert sentences[-len(stack.splitlines()) :] == [f"rank 3: {line}" for line in stack.splitlines()] or not stack
        assert live.observe(build_state(faults=(stall(stack, state),)), (), 23.0) == [], "it is named once"
        assert live.observe(build_state(step=51), (), 25.0) == ["training goes on after 10.0 s without progress"]
        assert live.summarize(30.0)[1:] == [f"no progress for 10 s: rank 3 holds all others up ({kind})"]


class TestFailures:
    def test_a_rank_that_lost_a_peer_is_not_the_cause(self) -> None:
        live = LiveAnalysis(0.0)
        live.observe(build_state(), (), 9.0)
        assert live.observe(build_state(faults=(fail(0, RESET),)), (), 10.1) == []
        sentences = live.observe(build_state(faults=(fail(2, code=-9),)), (), 10.3)
        assert sentences == ["CRASH: rank 2 was killed by SIGKILL in round 1 before its first step"]
        assert live.observe(build_state(faults=(fail(1, RESET),)), (), 10.4) == []
        assert live.summarize(11.0)[1:] == [f"first failure of round 1: {sentences[0].removeprefix('CRASH: ')}"]

    def test_without_another_cause_the_first_lost_peer_is_reported_after_a_while(self) -> None:
        live = LiveAnalysis(0.0)
        live.observe(build_state(), (), 9.0)
        assert live.observe(build_state(faults=(fail(0, RESET),)), (), 10.1) == []
        assert live.observe(build_state(), (), 12.1)[0].startswith("CRASH: rank 0 ended with code 1")

    def test_each_round_has_its_own_cause(self) -> None:
        live = LiveAnalysis(0.0)
        live.observe(build_state(faults=(fail(1, "ValueError: a"),)), (), 10.1)
        live.observe(build_state(faults=(fail(3, "ValueError: b", round_=2),)), (), 20.1)
        assert [sentence.rpartition("ValueError: ")[2] for sentence in live.summarize(30.0)[1:]] == ["a", "b"]


def test_a_command_without_ranks_is_reported_once() -> None:
    live = LiveAnalysis(0.0)
    state = ContainerState(Heartbeat(worker="local"))
    assert live.observe(state, (), 1.0) == []
    assert "no process has become a rank so far" in live.observe(state, (), UNWATCHED_NOTICE_SECONDS)[0]
    assert live.observe(state, (), UNWATCHED_NOTICE_SECONDS + 1) == []
    assert live.summarize(100.0)[0].startswith("nothing was watched")


def test_the_step_that_a_script_continues_from_and_a_broken_library_are_reported() -> None:
    live = LiveAnalysis(0.0)
    live.observe(build_state(), (), 1.0)
    ranks = tuple(describe(rank, resumed_from=60) for rank in range(4))
    broken = (BrokenReport(101, 1.0, "end of a step", "ValueError('x')"),)
    assert live.observe(replace(build_state(), ranks=ranks, broken=broken), (), 2.0) == [
        "the script continues from step 60",
        "process 101 is not watched any more, and runs on: ValueError('x') in end of a step",
    ]
