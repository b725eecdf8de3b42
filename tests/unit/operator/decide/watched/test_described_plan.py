"""The plan of a watched job: who holds which ranks, and in which round they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_operator.decide.watched.described_plan import (
    UNWATCHED_MEMBER,
    WatchedPodReport,
    build_virtual_job,
    describe_plan,
)
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.cluster_view import PodView
from pacekeeper_operator.state.desired_state import DesiredState
from testing.operators.observations import NOW, build_job
from testing.operators.watched_pods import describe_ranks

EMPTY = DesiredState(Plan(version=100))


def build_report(
    name: str, ranks: Sequence[int], world_size: int = 4, created_at: float = 0.0, **changes: Any
) -> WatchedPodReport:
    pod = PodView(name, f"uid-{name}", "Running", f"node-{name}", "10.0.0.1", created_at)
    return WatchedPodReport(pod, describe_ranks(ranks, world_size, **changes))


def end_pod(report: WatchedPodReport) -> WatchedPodReport:
    return replace(report, pod=replace(report.pod, phase="Failed"))


def list_ranks(desired: DesiredState) -> dict[str, tuple[int, ...]]:
    return {member.worker: member.ranks for member in desired.plan.members}


def train(desired: DesiredState) -> DesiredState:
    """The state once its round has completed a step."""
    rounds = desired.state.watched.rounds
    return desired.with_watched(rounds=(*rounds[:-1], replace(rounds[-1], first_step=NOW)))


def test_members_are_in_rank_order_and_missing_ranks_have_one_of_their_own() -> None:
    desired = describe_plan(EMPTY, [build_report("b", [0, 1]), build_report("a", [5], 6)], NOW)
    assert list_ranks(desired) == {"b": (0, 1), UNWATCHED_MEMBER: (2, 3)}, "the world size of most ranks"
    after = describe_plan(desired, [build_report("b", [0, 1]), build_report("a", [5, 4], 6)], NOW)
    assert list_ranks(after) == list_ranks(desired), "as many ranks do not change it"
    desired = describe_plan(EMPTY, [build_report("b", [0, 1], 6), build_report("a", [5, 4], 6)], NOW)
    assert list_ranks(desired) == {"b": (0, 1), UNWATCHED_MEMBER: (2, 3), "a": (4, 5)}
    assert [member.worker for member in desired.plan.members] == ["b", UNWATCHED_MEMBER, "a"]


def test_the_same_pods_change_nothing() -> None:
    reports = [build_report("a", [0, 1]), build_report("b", [2, 3])]
    desired = describe_plan(EMPTY, reports, NOW)
    assert describe_plan(desired, reports, NOW + 1) is desired
    assert describe_plan(desired, [replace(report, ranks=()) for report in reports], NOW + 1) == desired, (
        "a new leader has received nothing yet"
    )


def test_a_pod_cannot_take_the_ranks_of_a_running_one() -> None:
    desired = describe_plan(EMPTY, [build_report("a", [0, 1]), build_report("b", [2, 3])], NOW)
    hostile = build_report("c", [0, 1, 2, 3], created_at=-1.0)
    after = describe_plan(desired, [build_report("a", [0, 1]), build_report("b", [2, 3]), hostile], NOW)
    assert after.plan.members == desired.plan.members
    assert after.state.watched == desired.state.watched


def test_a_pod_that_is_gone_keeps_its_ranks_until_another_one_has_them() -> None:
    first, second = build_report("a", [0, 1]), build_report("b", [2, 3])
    desired = describe_plan(EMPTY, [first, second], NOW)
    gone = describe_plan(desired, [first], NOW)
    assert list_ranks(gone) == {"a": (0, 1), "b": (2, 3)}
    assert gone.plan.membership == desired.plan.membership
    replaced = describe_plan(gone, [first, build_report("c", [2, 3], started_at=NOW)], NOW)
    assert list_ranks(replaced) == {"a": (0, 1), "c": (2, 3)}
    assert replaced.plan.membership == desired.plan.membership + 1
    ended = describe_plan(desired, [first, end_pod(second), build_report("c", [2, 3], started_at=NOW)], NOW)
    assert list_ranks(ended) == {"a": (0, 1), "c": (2, 3)}
    assert [record.name for record in ended.state.placement.workers] == ["a", "b", "c"]


def test_a_round_begins_once_for_all_ranks_however_they_restart() -> None:
    """The ranks' new processes describe themselves one after the other."""
    desired = train(describe_plan(EMPTY, [build_report("a", [0, 1]), build_report("b", [2, 3])], NOW))
    new: dict[str, Any] = {"started_at": NOW + 10, "pid": 900}
    first = describe_plan(desired, [build_report("a", [0, 1], **new), build_report("b", [2, 3])], NOW + 12, 500)
    assert first.plan.round == 2
    assert [(r.round, r.last_step, r.ended) for r in first.state.watched.rounds] == [
        (1, 500, NOW + 12),
        (2, None, None),
    ]
    both = describe_plan(first, [build_report("a", [0, 1], **new), build_report("b", [2, 3], **new)], NOW + 13)
    assert both.plan.round == 2
    # A round that has completed no step, in which one rank restarts alone, as under a Job with restartPolicy OnFailure.
    again: dict[str, Any] = {"started_at": NOW + 20, "pid": 1000}
    third = describe_plan(both, [build_report("a", [0, 1], **again), build_report("b", [2, 3], **new)], NOW + 21)
    assert third.plan.round == 3
    assert all(third.state.watched.present), "the other ranks wait in their processes, and are in this round"


def test_another_world_size_begins_a_round() -> None:
    desired = train(describe_plan(EMPTY, [build_report("a", [0, 1]), build_report("b", [2, 3])], NOW))
    smaller = describe_plan(desired, [build_report("a", [0, 1], 2, started_at=NOW + 5, pid=900)], NOW + 6)
    assert list_ranks(smaller) == {"a": (0, 1)}
    assert (smaller.plan.round, smaller.plan.world_size) == (2, 2)


def test_pods_with_different_numbers_of_ranks_are_compared_rank_by_rank() -> None:
    job = build_job(1, 0)
    even = describe_plan(EMPTY, [build_report("a", [0, 1]), build_report("b", [2, 3])], NOW)
    assert build_virtual_job(job, even).spec.nproc_per_node == 2
    uneven = describe_plan(EMPTY, [build_report("a", [0, 1, 2]), build_report("b", [3])], NOW)
    assert build_virtual_job(job, uneven).spec.nproc_per_node == 1
    mixed = describe_plan(EMPTY, [build_report("a", [0, 2]), build_report("b", [1, 3])], NOW)
    assert build_virtual_job(job, mixed).spec.nproc_per_node == 1


def test_a_described_state_is_read_as_it_was_written() -> None:
    """Its pods have names that the operator has not given."""
    desired = train(describe_plan(EMPTY, [build_report("train-0-x7k2p", [0, 1]), build_report("b.c", [5], 6)], NOW))
    desired = describe_plan(desired, [build_report("train-0-x7k2p", [0, 1], 6)], NOW)
    written = state_codec.encode_state(desired, "train.0f0f0f0f")
    assert state_codec.decode_state(written, "train.0f0f0f0f").desired == desired
    plain = DesiredState(Plan(members=(Member("j-w0-0", "10.0.0.1", (0,)),)))
    assert "watched" not in state_codec.encode_state(plain, "j")["state"], "TrainingJobs are stored as before"
