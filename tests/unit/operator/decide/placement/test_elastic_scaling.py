"""Whether a job goes on with fewer workers while others start, and when it takes those in that have started."""

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
from testing.operators.observations import NOW, build_job, build_policy, build_training, change_members, change_worker

START, RESTART = 30.0, 5.0
"""What the operator takes them for in these worlds."""


def world(
    replicas: int = 4, replica_ranks: int | None = 1, fewest: int = 2, each: int = 1, **changes: Any
) -> Observation:
    """A job that may train with `fewest` workers, and has no spares."""
    its = build_job(replicas, 0, min_replicas=fewest, nproc_per_node=each, scheduling_timeout=300.0)
    found = change_members(build_training(replicas, 0, job=its), training={"replica_ranks": replica_ranks})
    measured = found.desired.with_placement(start_seconds=START).with_budget(restart_seconds=RESTART)
    return replace(found.with_desired(measured), **changes)


def without(seen: Observation, *names: str) -> Observation:
    """The pods of these workers are gone, and they have been given up."""
    for name in names:
        record = seen.state.placement.find_worker(name)
        assert record is not None
        seen = change_worker(seen, name, gone=True)
        seen = seen.with_desired(seen.desired.with_worker(replace(record, leaving="its pod is gone", dead=True)))
    return seen


def with_successor(seen: Observation, name: str = "j-w1-1", age: float = 0.0, *, warm: bool = False) -> Observation:
    """A new worker, whose pod was made `age` seconds ago."""
    ordinal, incarnation = map(int, name.removeprefix("j-w").split("-"))
    record = WorkerRecord(name, ordinal, incarnation, uid="uid")
    pod = PodView(name, "uid", "Running", f"node-{ordinal}", f"10.1.0.{ordinal}", created_at=seen.now - age)
    beat = Heartbeat(name, LauncherState.WARM if warm else LauncherState.STARTING)
    seen = seen.with_desired(seen.desired.with_placement(workers=(*seen.state.placement.workers, record)))
    return replace(seen, workers=(*seen.workers[:-1], WorkerView(record, pod, beat, silent_seconds=0.5)))


def step(seen: Observation) -> DesiredState:
    return membership.update_membership(seen, build_policy())


def seats(draft: DesiredState) -> list[str]:
    return [member.worker for member in draft.plan.members]


def trains_on(seen: Observation, draft: DesiredState, seconds: float) -> Observation:
    """The members of `draft` have trained for so long."""
    later = replace(seen.with_desired(draft), now=seen.now + seconds)
    for member in draft.plan.members:
        beat: dict[str, Any] = {"state": LauncherState.RUNNING, "membership": draft.plan.membership}
        beat["training"] = {"replica_ranks": 1}
        beat["checkpoint"] = {"request": draft.plan.checkpoint_request}
        later = change_worker(later, member.worker, heartbeat=beat)
    return later


class TestGoingOn:
    def test_the_others_go_on_at_once_and_take_the_newcomer_in_by_one_more_round(self) -> None:
        draft = step(without(world(), "j-w1-0"))
        assert seats(draft) == ["j-w0-0", "j-w2-0", "j-w3-0"]
        assert [member.ranks for member in draft.plan.members] == [(0,), (1,), (2,)]
        assert draft.plan.shares is None, "the global batch is dealt anew"

        starts = with_successor(trains_on(world(), draft, START), age=START - 1)
        assert step(starts) is starts.desired
        warm = with_successor(trains_on(world(), draft, START), age=START, warm=True)
        asked = step(warm)
        assert asked.plan.checkpoint_request == 1, "no step is lost"
        draft = step(trains_on(warm, asked, 1.0))
        assert seats(draft) == ["j-w0-0", "j-w2-0", "j-w3-0", "j-w1-1"]
        assert draft.plan.membership == 3, "one round without, one with the newcomer"

    def test_who_is_warm_by_then_takes_the_seat(self) -> None:
        draft = step(with_successor(without(world(), "j-w1-0"), warm=True))
        assert seats(draft) == ["j-w0-0", "j-w1-1", "j-w2-0", "j-w3-0"]

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"fewest": 4}, "spec.minReplicas"),
            ({"replica_ranks": None}, "the script does not say that it trains as exactly with fewer"),
            ({"replica_ranks": 4}, "no whole replica is left"),
            ({"operator_age": 9.0}, "a spare may not have been heard yet"),
        ],
    )
    def test_where_it_may_not_they_wait(self, changes: dict[str, Any], why: str) -> None:
        draft = step(without(world(**changes), "j-w1-0"))
        assert (len(draft.plan.members), draft.state.placement.vacant_since) == (4, NOW), why

    @pytest.mark.parametrize(
        ("age", "goes_on"),
        [
            (0.0, True),
            (START - RESTART - 1, True),
            (START - RESTART + 1, False),  # what is left of the wait is less than the restart
            (START, True),  # late: as long again is expected
        ],
    )
    def test_a_restart_more_is_paid_only_for_a_longer_wait(self, age: float, goes_on: bool) -> None:
        seen = with_successor(without(world(), "j-w1-0"), age=age)
        assert (len(step(seen).plan.members) == 3) is goes_on

    def test_nor_is_one_whose_pod_cannot_be_made(self) -> None:
        seen = without(world(), "j-w1-0")
        quick = seen.with_desired(seen.desired.with_placement(start_seconds=RESTART - 1))
        waits = step(quick)
        assert (len(waits.plan.members), waits.state.placement.vacant_since) == (4, NOW), "it is expected soon"
        promised = waits.with_placement(workers=(*waits.state.placement.workers, WorkerRecord("j-w1-1", 1, 1)))
        for draft in (waits, promised):
            assert len(step(replace(quick.with_desired(draft), now=NOW + RESTART - 0.5)).plan.members) == 4
            assert len(step(replace(quick.with_desired(draft), now=NOW + RESTART + 0.5)).plan.members) == 3

    def test_one_that_has_no_node_is_not_expected_soon(self) -> None:
        seen = with_successor(without(world(), "j-w1-0"), age=START - RESTART + 1)
        roomless = change_worker(seen, "j-w1-1", pod={"unschedulable_message": "0/4 nodes", "node": ""})
        assert len(step(roomless).plan.members) == 3

    def test_one_that_comes_never_leaves_them_training(self) -> None:
        seen = without(world(), "j-w1-0")
        draft = step(seen)
        for seconds in (1.0, 100.0, 10_000.0):
            later = trains_on(seen, draft, seconds)
            assert step(later) is later.desired

    def test_the_next_loss_goes_down_to_the_fewest_that_may_train_and_no_further(self) -> None:
        seen = without(world(), "j-w1-0")
        seen = without(trains_on(seen, step(seen), 5.0), "j-w2-0")
        assert seats(step(seen)) == ["j-w0-0", "j-w3-0"]
        seen = without(trains_on(seen, step(seen), 5.0), "j-w3-0")
        assert seats(step(seen)) == ["j-w0-0", "j-w3-0"]
        back = with_successor(seen, warm=True)
        assert seats(step(back)) == ["j-w0-0", "j-w1-1"]

    def test_before_anything_is_measured_a_start_is_taken_for_longer_than_a_restart(self) -> None:
        seen = without(world(), "j-w1-0")
        unknown = seen.with_desired(seen.desired.with_placement(start_seconds=None).with_budget(restart_seconds=None))
        assert len(step(unknown).plan.members) == 3


class TestReplicas:
    """Of two ranks each."""

    def test_whole_ones_go_on_and_who_is_left_over_waits_without_ranks(self) -> None:
        draft = step(without(world(replica_ranks=2), "j-w1-0"))
        assert seats(draft) == ["j-w2-0", "j-w3-0"]
        left_over = change_worker(
            trains_on(without(world(), "j-w1-0"), draft, 20.0), "j-w0-0", heartbeat={"state": LauncherState.WARM}
        )
        left_over = change_members(left_over, training={"replica_ranks": 2})
        assert step(left_over) is left_over.desired
        both = with_successor(left_over, age=20.0, warm=True)
        grown = step(trains_on(both, step(both), 1.0))
        assert seats(grown) == ["j-w2-0", "j-w3-0", "j-w0-0", "j-w1-1"]

    def test_the_least_number_of_workers_is_that_of_whole_replicas(self) -> None:
        assert len(step(without(world(replica_ranks=2, fewest=3), "j-w1-0")).plan.members) == 4
        within_workers = step(without(world(replica_ranks=2, each=4), "j-w1-0"))
        assert seats(within_workers) == ["j-w0-0", "j-w2-0", "j-w3-0"], "each holds two"
        across = step(without(world(6, replica_ranks=6, fewest=1, each=4), "j-w1-0"))
        assert seats(across) == ["j-w3-0", "j-w4-0", "j-w5-0"], "three workers hold two"

    def test_shards_in_memory_are_of_no_use_to_another_number_of_ranks(self) -> None:
        seen = without(world(replica_ranks=2), "j-w1-0")
        kept = change_members(seen, checkpoint={"snapshot_step": 500})  # 10 steps of 0.1 s after the checkpoint
        assert len(step(kept).plan.members) == 2
        dear = replace(kept, metrics=replace(kept.metrics, step_seconds=2.0))
        assert len(step(dear).plan.members) == 4, "20 s are trained again by all, and 25 s won by half of them"


class TestGrowing:
    """Two of four train."""

    def world(self, **changes: Any) -> Observation:
        seen = without(world(**changes), "j-w1-0", "j-w2-0")
        return trains_on(seen, step(seen), START)

    @pytest.mark.parametrize(
        ("age", "joins"),
        [
            (START - 3 * RESTART - 1, True),  # what three train after the restart is more than what two do without
            (START - 3 * RESTART + 1, False),
            (START - 1, False),
            (START, True),  # late: as long again is expected
        ],
    )
    def test_one_does_not_join_alone_while_the_other_is_expected_soon(self, age: float, joins: bool) -> None:
        seen = with_successor(self.world(), age=START, warm=True)
        seen = with_successor(seen, "j-w2-1", age=age)
        assert (step(seen).plan.checkpoint_request == 1) is joins

    def test_all_that_are_wanted_join_at_once(self) -> None:
        seen = with_successor(with_successor(self.world(), warm=True), "j-w2-1", warm=True)
        asked = step(seen)
        assert asked.plan.checkpoint_request == 1
        assert len(step(trains_on(seen, asked, 1.0)).plan.members) == 4

    def test_newcomers_that_are_lost_again_and_again_are_waited_with_ever_longer(self) -> None:
        """One in each half minute, for two hours."""
        seen, name, grown = world(), "j-w1-0", list[float]()
        for incarnation in range(1, 241):
            seen = without(seen, name)
            seen = trains_on(seen, step(seen), START)
            name = f"j-w1-{incarnation}"
            seen = with_successor(seen, name, age=START, warm=True)
            for _ in ("asks for a checkpoint", "takes it in"):
                seen = trains_on(seen, step(seen), 0.0)
            if name in seen.assigned:
                grown.append(seen.now)
        between = [later - earlier for earlier, later in pairwise(grown)]
        assert between[:3] == [30.0, 60.0, 120.0]
        assert set(between[3:]) == {120.0}, "a job is not left with fewer for ever"


def test_as_many_as_hold_whole_replicas() -> None:
    assert [elastic_scaling.round_to_whole_replicas(world(8, replica_ranks=3, fewest=1), n) for n in range(9)] == [
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
    assert elastic_scaling.round_to_whole_replicas(world(8, replica_ranks=None), 5) == 5
