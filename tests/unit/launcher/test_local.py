"""What the controller of a local run decides."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper.launcher.local import ADDRESS, WORKER, judge_faults, judge_paces
from pacekeeper_analysis.plan import Member, Plan
from pacekeeper_analysis.reports import Fault, FaultKind, Heartbeat, LauncherState, RankState, RankWindow

PLAN = Plan(version=3, membership=1, members=(Member(WORKER, ADDRESS, (0, 1, 2, 3)),), restarts=5)
BEAT = Heartbeat(worker=WORKER, state=LauncherState.RUNNING, round=2, restarts=1, steered=True)


def stall(*stopped: int, round_: int = 2) -> Fault:
    """All ranks wait in a collective but those that are stopped."""
    ranks = tuple(
        RankState(rank, "TRAIN", 9.0, 7, "NONE" if rank in stopped else "ALL_REDUCE", 1, 7, 7, 3.0,
                  "T" if rank in stopped else "S", False)
        for rank in range(4)
    )  # fmt: skip
    return Fault("stall", FaultKind.STALLED, WORKER, round_, 0.0, ranks=ranks)


def test_a_hang_starts_the_next_membership_for_one_restart() -> None:
    outcome = judge_faults(PLAN, [stall(2)], [stall(2)], BEAT)
    assert outcome.plan == replace(PLAN, version=4, membership=2, round=3, restarts=3)
    assert "rank 2" in outcome.words[0]


def test_a_stall_without_a_culprit_and_one_of_an_older_round_change_nothing() -> None:
    busy = stall()
    busy = replace(busy, ranks=(replace(busy.ranks[0], phase="EVALUATE", collective="NONE"), *busy.ranks[1:]))
    assert judge_faults(PLAN, [busy], [busy], BEAT).plan is PLAN
    old = stall(2, round_=1)
    assert judge_faults(PLAN, [old], [old], BEAT).plan is PLAN


def test_a_hang_without_a_restart_left_ends_the_run() -> None:
    assert judge_faults(PLAN, [stall(2)], [stall(2)], replace(BEAT, restarts=5)).give_up


def test_a_failed_launcher_ends_the_run_with_the_scripts_words() -> None:
    fault = Fault("f", FaultKind.RANK_FAILED, WORKER, 2, 0.0, rank=1, exit_code=1, error="Traceback\nValueError: no\n")
    outcome = judge_faults(PLAN, [fault], [], replace(BEAT, state=LauncherState.FAILED))
    assert outcome.give_up == "Traceback\nValueError: no"


def windows(*seconds_per_sample: float, shares: tuple[int, ...] = (8, 8, 8, 8)) -> list[RankWindow]:
    steps = tuple(range(32))
    return [
        RankWindow(rank, steps, (1.0,) * 32, (cost * share,) * 32, (share,) * 32)
        for rank, (cost, share) in enumerate(zip(seconds_per_sample, shares, strict=True))
    ]


def test_a_slow_rank_gets_a_smaller_share() -> None:
    outcome = judge_paces(PLAN, windows(0.01, 0.01, 0.02, 0.01))
    assert outcome.plan.shares is not None
    assert sum(outcome.plan.shares) == 32
    assert outcome.plan.shares[2] == min(outcome.plan.shares)
    assert outcome.plan.version == 4
    assert outcome.plan.membership == PLAN.membership


def test_equal_ranks_and_balanced_shares_stay_as_they_are() -> None:
    assert judge_paces(PLAN, windows(0.01, 0.01, 0.01, 0.01)).plan is PLAN
    shares = judge_paces(PLAN, windows(0.01, 0.01, 0.02, 0.01)).plan.shares
    assert shares is not None
    balanced = replace(PLAN, shares=shares)
    assert judge_paces(balanced, windows(0.01, 0.01, 0.02, 0.01, shares=shares)).plan is balanced


def test_a_rank_that_has_recovered_gets_its_share_back() -> None:
    uneven = (9, 9, 5, 9)
    outcome = judge_paces(replace(PLAN, shares=uneven), windows(0.01, 0.01, 0.01, 0.01, shares=uneven))
    assert outcome.plan.shares == (8, 8, 8, 8)


def test_unwatched_shares_and_windows_over_a_change_are_left_alone() -> None:
    unknown = [replace(window, samples=(0,) * 32) for window in windows(0.01, 0.01, 0.02, 0.01)]
    assert judge_paces(PLAN, unknown).plan is PLAN
    changed = [replace(w, samples=(4,) * 16 + w.samples[16:]) for w in windows(0.01, 0.01, 0.02, 0.01)]
    assert judge_paces(PLAN, changed).plan is PLAN
