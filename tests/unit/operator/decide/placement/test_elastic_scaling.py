"""Whether a job continues with fewer workers while others start, and when newcomers join."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pacekeeper_analysis.protocol.reports import Heartbeat, LauncherState
from pacekeeper_operator.decide.placement import elastic_scaling, membership
from pacekeeper_operator.state.cluster_view import PodView, WorkerView
from pacekeeper_operator.state.desired_state import DesiredState, WorkerRecord
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.restart_estimates import RestartMeasurements
from testing.operators.observations import NOW, build_job, build_policy, build_training, change_members, change_worker

START, RESTART = 30.0, 5.0
"""The measured durations in these tests, in seconds."""


def build_elastic(
    replicas: int = 4, replica_ranks: int | None = 1, min_replicas: int = 2, ranks_per_worker: int = 1, **changes: Any
) -> Observation:
    """Build a job that may train with `min_replicas` workers, and has no spares."""
    job = build_job(replicas, 0, min_replicas=min_replicas, nproc_per_node=ranks_per_worker, scheduling_timeout=300.0)
    found = change_members(build_training(replicas, 0, job=job), training={"replica_ranks": replica_ranks})
    measured = found.desired.with_placement(start_seconds=START).with_budget(
        measurements=RestartMeasurements(same_workers=(RESTART,))
    )
    return replace(found.with_desired(measured), **changes)


def with_lost_workers(observation: Observation, *names: str) -> Observation:
    """Return the observation after the loss of these workers: their pods are gone, and they are leaving."""
    for name in names:
        record = observation.state.placement.find_worker(name)
        assert record is not None
        observation = change_worker(observation, name, gone=True)
        observation = observation.with_desired(
            observation.desired.with_worker(replace(record, leaving="its pod is gone", dead=True))
        )
    return observation


def with_successor(
    observation: Observation, name: str = "j-w1-1", age: float = 0.0, *, warm: bool = False
) -> Observation:
    """Add a new worker whose pod was created `age` seconds ago."""
    ordinal, incarnation = map(int, name.removeprefix("j-w").split("-"))
    record = WorkerRecord(name, ordinal, incarnation, uid="uid")
    pod = PodView(name, "uid", "Running", f"node-{ordinal}", f"10.1.0.{ordinal}", created_at=observation.now - age)
    heartbeat = Heartbeat(name, LauncherState.WARM if warm else LauncherState.STARTING)
    observation = observation.with_desired(
        observation.desired.with_placement(workers=(*observation.state.placement.workers, record))
    )
    return replace(
        observation, workers=(*observation.workers[:-1], WorkerView(record, pod, heartbeat, silent_seconds=0.5))
    )


def apply_step(observation: Observation) -> DesiredState:
    return membership.update_membership(observation, build_policy())


def list_members(desired: DesiredState) -> list[str]:
    return [member.worker for member in desired.plan.members]


def with_members_training(observation: Observation, desired: DesiredState, seconds: float) -> Observation:
    """Return the observation after the members of `desired` have trained for `seconds`."""
    later = replace(observation.with_desired(desired), now=observation.now + seconds)
    for member in desired.plan.members:
        heartbeat: dict[str, Any] = {"state": LauncherState.RUNNING, "membership": desired.plan.membership}
        heartbeat["training"] = {"replica_ranks": 1}
        heartbeat["checkpoint"] = {"request": desired.plan.checkpoint_request}
        later = change_worker(later, member.worker, heartbeat=heartbeat)
    return later


class TestContinuing:
    def test_the_others_continue_at_once_and_a_newcomer_joins_in_one_more_round(self) -> None:
        desired = apply_step(with_lost_workers(build_elastic(), "j-w1-0"))
        assert list_members(desired) == ["j-w0-0", "j-w2-0", "j-w3-0"]
        assert [member.ranks for member in desired.plan.members] == [(0,), (1,), (2,)]
        assert desired.plan.shares is None, "the global batch is divided again"

        starting = with_successor(with_members_training(build_elastic(), desired, START), age=START - 1)
        assert apply_step(starting) is starting.desired
        warm = with_successor(with_members_training(build_elastic(), desired, START), age=START, warm=True)
        requested = apply_step(warm)
        assert requested.plan.checkpoint_request == 1, "no step is lost"
        desired = apply_step(with_members_training(warm, requested, 1.0))
        assert list_members(desired) == ["j-w0-0", "j-w2-0", "j-w3-0", "j-w1-1"]
        assert desired.plan.membership == 3, "one round without, one with the newcomer"

    def test_a_warm_successor_takes_the_ranks_directly(self) -> None:
        desired = apply_step(with_successor(with_lost_workers(build_elastic(), "j-w1-0"), warm=True))
        assert list_members(desired) == ["j-w0-0", "j-w1-1", "j-w2-0", "j-w3-0"]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"min_replicas": 4}, "spec.minReplicas"),
            ({"replica_ranks": None}, "the script does not declare that it can train with fewer"),
            ({"replica_ranks": 4}, "no whole replica is left"),
            ({"operator_age": 9.0}, "a spare may not have reported yet"),
        ],
    )
    def test_the_others_wait_if_the_job_may_not_shrink(self, changes: dict[str, Any], reason: str) -> None:
        desired = apply_step(with_lost_workers(build_elastic(**changes), "j-w1-0"))
        assert (len(desired.plan.members), desired.state.placement.vacant_since) == (4, NOW), reason

    @pytest.mark.parametrize(
        ("age", "continues"),
        [
            (0.0, True),
            (START - RESTART - 1, True),
            (START - RESTART + 1, False),  # what is left of the wait is less than the restart
            (START, True),  # late: the same duration is expected again
        ],
    )
    def test_the_others_continue_only_if_the_wait_is_longer_than_a_restart(self, age: float, continues: bool) -> None:
        observation = with_successor(with_lost_workers(build_elastic(), "j-w1-0"), age=age)
        assert (len(apply_step(observation).plan.members) == 3) is continues

    def test_a_successor_whose_pod_is_not_created_is_awaited_for_one_restart(self) -> None:
        observation = with_lost_workers(build_elastic(), "j-w1-0")
        quick_start = observation.with_desired(observation.desired.with_placement(start_seconds=RESTART - 1))
        waiting = apply_step(quick_start)
        assert (len(waiting.plan.members), waiting.state.placement.vacant_since) == (4, NOW), "it is expected soon"
        not_created = waiting.with_placement(workers=(*waiting.state.placement.workers, WorkerRecord("j-w1-1", 1, 1)))
        for desired in (waiting, not_created):
            assert (
                len(apply_step(replace(quick_start.with_desired(desired), now=NOW + RESTART - 0.5)).plan.members) == 4
            )
            assert (
                len(apply_step(replace(quick_start.with_desired(desired), now=NOW + RESTART + 0.5)).plan.members) == 3
            )

    def test_a_successor_without_a_node_is_not_awaited(self) -> None:
        observation = with_successor(with_lost_workers(build_elastic(), "j-w1-0"), age=START - RESTART + 1)
        unschedulable = change_worker(observation, "j-w1-1", pod={"unschedulable_message": "0/4 nodes", "node": ""})
        assert len(apply_step(unschedulable).plan.members) == 3

    def test_the_others_continue_if_no_successor_starts(self) -> None:
        observation = with_lost_workers(build_elastic(), "j-w1-0")
        desired = apply_step(observation)
        for seconds in (1.0, 100.0, 10_000.0):
            later = with_members_training(observation, desired, seconds)
            assert apply_step(later) is later.desired

    def test_further_losses_shrink_the_job_to_the_minimum_and_no_further(self) -> None:
        observation = with_lost_workers(build_elastic(), "j-w1-0")
        observation = with_lost_workers(with_members_training(observation, apply_step(observation), 5.0), "j-w2-0")
        assert list_members(apply_step(observation)) == ["j-w0-0", "j-w3-0"]
        observation = with_lost_workers(with_members_training(observation, apply_step(observation), 5.0), "j-w3-0")
        assert list_members(apply_step(observation)) == ["j-w0-0", "j-w3-0"]
        with_newcomer = with_successor(observation, warm=True)
        assert list_members(apply_step(with_newcomer)) == ["j-w0-0", "j-w1-1"]

    def test_by_default_a_start_takes_longer_than_a_restart(self) -> None:
        observation = with_lost_workers(build_elastic(), "j-w1-0")
        unknown = observation.with_desired(
            observation.desired.with_placement(start_seconds=None).with_budget(measurements=RestartMeasurements())
        )
        assert len(apply_step(unknown).plan.members) == 3


class TestReplicas:
    """Replicas of two ranks each."""

    def test_whole_replicas_continue_and_other_workers_wait_without_ranks(self) -> None:
        desired = apply_step(with_lost_workers(build_elastic(replica_ranks=2), "j-w1-0"))
        assert list_members(desired) == ["j-w2-0", "j-w3-0"]
        with_left_over = change_worker(
            with_members_training(with_lost_workers(build_elastic(), "j-w1-0"), desired, 20.0),
            "j-w0-0",
            heartbeat={"state": LauncherState.WARM},
        )
        with_left_over = change_members(with_left_over, training={"replica_ranks": 2})
        assert apply_step(with_left_over) is with_left_over.desired
        with_both = with_successor(with_left_over, age=20.0, warm=True)
        grown = apply_step(with_members_training(with_both, apply_step(with_both), 1.0))
        assert list_members(grown) == ["j-w2-0", "j-w3-0", "j-w0-0", "j-w1-1"]

    def test_the_minimum_is_rounded_to_whole_replicas(self) -> None:
        assert (
            len(apply_step(with_lost_workers(build_elastic(replica_ranks=2, min_replicas=3), "j-w1-0")).plan.members)
            == 4
        )
        within_workers = apply_step(with_lost_workers(build_elastic(replica_ranks=2, ranks_per_worker=4), "j-w1-0"))
        assert list_members(within_workers) == ["j-w0-0", "j-w2-0", "j-w3-0"], "each worker holds two replicas"
        across = apply_step(
            with_lost_workers(build_elastic(6, replica_ranks=6, min_replicas=1, ranks_per_worker=4), "j-w1-0")
        )
        assert list_members(across) == ["j-w3-0", "j-w4-0", "j-w5-0"], "three workers hold two replicas"

    def test_snapshots_in_memory_do_not_serve_another_number_of_ranks(self) -> None:
        observation = with_lost_workers(build_elastic(replica_ranks=2), "j-w1-0")
        with_snapshot = change_members(
            observation, checkpoint={"snapshot_step": 500}
        )  # 10 steps of 0.1 s after the checkpoint
        assert len(apply_step(with_snapshot).plan.members) == 2
        slow_steps = replace(with_snapshot, metrics=replace(with_snapshot.metrics, step_seconds=2.0))
        assert len(apply_step(slow_steps).plan.members) == 4, "all train 20 s again, and half of them gain 25 s"


class TestGrowing:
    """Two of four train."""

    def build_shrunk(self, **changes: Any) -> Observation:
        observation = with_lost_workers(build_elastic(**changes), "j-w1-0", "j-w2-0")
        return with_members_training(observation, apply_step(observation), START)

    @pytest.mark.parametrize(
        ("age", "requests_checkpoint"),
        [
            (START - 3 * RESTART - 1, True),  # three workers train more after the restart than two do without it
            (START - 3 * RESTART + 1, False),
            (START - 1, False),
            (START, True),  # late: the same duration is expected again
        ],
    )
    def test_a_newcomer_waits_for_another_that_is_expected_soon(self, age: float, requests_checkpoint: bool) -> None:
        observation = with_successor(self.build_shrunk(), age=START, warm=True)
        observation = with_successor(observation, "j-w2-1", age=age)
        assert (apply_step(observation).plan.checkpoint_request == 1) is requests_checkpoint

    def test_all_missing_workers_join_at_once(self) -> None:
        observation = with_successor(with_successor(self.build_shrunk(), warm=True), "j-w2-1", warm=True)
        requested = apply_step(observation)
        assert requested.plan.checkpoint_request == 1
        assert len(apply_step(with_members_training(observation, requested, 1.0)).plan.members) == 4

    def test_newcomers_that_are_lost_repeatedly_join_after_increasing_waits(self) -> None:
        """One newcomer in each half minute, for two hours."""
        observation, name, grown = build_elastic(), "j-w1-0", list[float]()
        for incarnation in range(1, 241):
            observation = with_lost_workers(observation, name)
            observation = with_members_training(observation, apply_step(observation), START)
            name = f"j-w1-{incarnation}"
            observation = with_successor(observation, name, age=START, warm=True)
            for _ in ("requests a checkpoint", "begins the round"):
                observation = with_members_training(observation, apply_step(observation), 0.0)
            if name in observation.assigned:
                grown.append(observation.now)
        between = [later - earlier for earlier, later in pairwise(grown)]
        assert between[:3] == [30.0, 60.0, 120.0]
        assert set(between[3:]) == {120.0}, "a job does not stay smaller indefinitely"


def test_workers_are_rounded_down_to_whole_replicas() -> None:
    assert [
        elastic_scaling.round_to_whole_replicas(build_elastic(8, replica_ranks=3, min_replicas=1), n) for n in range(9)
    ] == [
        0,
        0,
        0,
        3,
        3,
        3,
        6,
        6,
        8,
    ]
    assert elastic_scaling.round_to_whole_replicas(build_elastic(8, replica_ranks=None), 5) == 5
