"""Who holds the ranks, and how long the job waits for that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.plan import Stop, WorkerRole
from pacekeeper_analysis.protocol.reports import LauncherState
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.placement import membership
from pacekeeper_operator.decide.placement.membership import MEMBERSHIP_CHECKPOINT_WAIT_SECONDS, SHRINK_DELAY_SECONDS
from pacekeeper_operator.state.cluster_view import PodView, WorkerView
from pacekeeper_operator.state.desired_state import DesiredState, WorkerRecord
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_job,
    build_policy,
    build_stalls,
    build_training,
    change_members,
    change_worker,
)


def step(world: Observation) -> DesiredState:
    return membership.update_membership(world, build_policy())


def seats(draft: DesiredState) -> list[str]:
    return [member.worker for member in draft.plan.members]


def leaving(world: Observation, name: str, *, dead: bool = True, patient: bool = False) -> Observation:
    record = world.state.placement.find_worker(name)
    assert record is not None
    given_up = replace(record, leaving="it is given up", dead=dead, waits_for_checkpoint=patient)
    return world.with_desired(world.desired.with_worker(given_up))


class TestEnd:
    @pytest.mark.parametrize("end", ["stop", "over"])
    def test_a_job_that_ends_seats_nobody_and_allows_no_restarts(self, end: str) -> None:
        world = leaving(build_training(), "j-w1-0")
        if end == "stop":
            world = world.with_desired(world.desired.with_plan(stop=Stop.SUSPEND))
        else:
            world = world.with_desired(world.desired.with_lifecycle(completed_at=NOW))
        assert step(world) is world.desired
        spent = build_policy(max_restarts=3)
        assert membership.allow_restarts(world, spent) is world.desired
        assert membership.allow_restarts(build_training(), spent).plan.restarts == 3, "while it goes on"

    def test_launchers_may_restart_what_the_policy_lets_them(self) -> None:
        for watching in (build_policy(paused="maintenance"), build_policy(allow=frozenset({Remedy.REPLACE_WORKER}))):
            assert membership.allow_restarts(build_training(), watching).plan.restarts == 0
        world = build_training()
        used = world.desired.with_budget(restarts=(NOW - 2, NOW - 1), membership_restarts=2)
        assert membership.allow_restarts(world.with_desired(used), build_policy(max_restarts=3)).plan.restarts == 3
        assert membership.allow_restarts(world.with_desired(used), build_policy(max_restarts=1)).plan.restarts == 2


class TestFinished:
    """Some ranks have come to their end; worker 0 is one of them."""

    def world(self) -> Observation:
        world = change_worker(build_training(), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"})
        return world.with_desired(world.desired.with_lifecycle(finished=("j-w0-0",)))

    def test_who_is_given_up_but_still_trains_can_come_to_its_end(self) -> None:
        world = leaving(self.world(), "j-w1-0", dead=False)
        assert step(world) is world.desired
        called_back = step(leaving(self.world(), "j-w1-0", dead=True))
        assert called_back.state.lifecycle.finished == ()

    def test_one_whose_pod_nobody_has_given_up_is_not_lost(self) -> None:
        world = change_worker(self.world(), "j-w1-0", gone=True)
        assert step(world) is world.desired

    def test_a_trainer_that_has_ended_does_not_train_any_more_and_a_launcher_that_is_there_joins_again(self) -> None:
        draft = step(leaving(self.world(), "j-w1-0"))
        given_up = draft.state.placement.find_worker("j-w0-0")
        assert given_up is not None
        assert (given_up.dead, bool(given_up.leaving)) == (True, True)
        there = build_training()
        there = there.with_desired(there.desired.with_lifecycle(finished=("j-w0-0",)))
        kept = step(leaving(there, "j-w1-0")).state.placement.find_worker("j-w0-0")
        assert kept is not None
        assert not kept.leaving

    @pytest.mark.parametrize(
        ("heartbeat", "seconds"),
        [({"state": LauncherState.RUNNING}, 9.0), ({"membership": 0}, 9.0), ({"round": 0}, 9.0), ({}, 2.9)],
        ids=["it runs", "another membership", "an earlier round", "just now"],
    )
    def test_who_does_not_wait_for_a_round_calls_nobody_back(
        self, heartbeat: dict[str, object], seconds: float
    ) -> None:
        waits: dict[str, object] = {"state": LauncherState.GATHERING}
        world = change_worker(self.world(), "j-w1-0", heartbeat=waits, state_seconds=9.0)
        assert step(world).state.lifecycle.finished == ()
        world = change_worker(world, "j-w1-0", heartbeat=heartbeat, state_seconds=seconds)
        assert step(world) is world.desired


class TestSeats:
    def test_who_is_given_up_keeps_its_ranks_while_it_trains_and_nobody_can_take_them(self) -> None:
        world = leaving(build_training(spares=0), "j-w1-0", dead=False)
        assert step(world) is world.desired
        world = leaving(build_training(spares=0), "j-w1-0", dead=True)
        assert step(world).state.placement.vacant_since == NOW

    @pytest.mark.parametrize("waited", [{"vacant_since": NOW - 5}, {"checkpoint_requested_at": NOW - 5}])
    def test_what_was_waited_for_is_forgotten_once_all_is_well(self, waited: dict[str, float]) -> None:
        world = build_training()
        world = world.with_desired(world.desired.with_placement(**waited))
        placement = step(world).state.placement
        assert (placement.vacant_since, placement.checkpoint_requested_at) == (None, None)

    @pytest.mark.parametrize(
        ("waited", "answered", "begins"),
        [
            (MEMBERSHIP_CHECKPOINT_WAIT_SECONDS - 1, False, False),
            (MEMBERSHIP_CHECKPOINT_WAIT_SECONDS + 1, False, True),
            (1.0, True, True),
        ],
    )
    def test_a_change_that_nothing_forces_waits_for_its_checkpoint_and_not_for_ever(
        self, waited: float, answered: bool, begins: bool
    ) -> None:
        world = build_training(2, 2, job=build_job(3, 1))
        asked = world.with_desired(step(world))
        assert asked.plan.checkpoint_request == 1
        later = change_members(replace(asked, now=NOW + waited), checkpoint={"request": int(answered)})
        assert len(step(later).plan.members) == (3 if begins else 2)

    def test_who_is_moved_for_a_warning_stays_until_the_checkpoint_is_there(self) -> None:
        world = leaving(build_training(), "j-w1-0", dead=False, patient=True)
        asked = world.with_desired(step(world))
        assert asked.plan.checkpoint_request == 1
        late = replace(asked, now=NOW + 100 * MEMBERSHIP_CHECKPOINT_WAIT_SECONDS)
        assert step(late) is late.desired
        answered = change_members(late, checkpoint={"request": 1})
        assert [member.worker for member in step(answered).plan.members] == ["j-w0-0", "j-w4-0", "j-w2-0", "j-w3-0"]

    def test_unless_another_one_must_go(self) -> None:
        world = leaving(build_training(spares=2), "j-w1-0", dead=False, patient=True)
        asked = world.with_desired(step(leaving(world, "j-w2-0", dead=False)))
        late = replace(leaving(asked, "j-w2-0", dead=False), now=NOW + MEMBERSHIP_CHECKPOINT_WAIT_SECONDS + 1)
        assert [member.worker for member in step(late).plan.members] == ["j-w0-0", "j-w4-0", "j-w5-0", "j-w3-0"]

    def test_nobody_waits_for_the_checkpoint_of_a_job_that_stands_still(self) -> None:
        world = build_training(2, 2, job=build_job(3, 1))
        asked = world.with_desired(step(world))
        assert len(step(replace(asked, faults=build_stalls(asked, culprit=1))).plan.members) == 3


class TestPodsThatEnd:
    """A drain: the signal does not reach a launcher behind a shell."""

    def test_their_ranks_are_told_to_save_and_leave(self) -> None:
        world = change_worker(leaving(build_training(spares=0), "j-w1-0", dead=False), "j-w1-0", pod={"deleting": True})
        draft = step(world)
        assert (draft.plan.leaving, draft.plan.membership) == (("j-w1-0",), 1)
        assert draft.plan.version > world.plan.version, "or no launcher would read it"
        assert step(world.with_desired(draft)) is draft, "once"
        assert draft.plan.build_worker_plan("j-w1-0").role is WorkerRole.LEAVE

    def test_those_that_stay_are_not(self) -> None:
        assert step(leaving(build_training(spares=0), "j-w1-0", dead=False)).plan.leaving == ()
        deleted = change_worker(build_training(spares=0), "j-w1-0", pod={"deleting": True})
        assert step(deleted).plan.leaving == (), "nobody has decided upon it yet"

    def test_a_new_membership_begins_without_them(self) -> None:
        world = change_worker(leaving(build_training(), "j-w1-0"), "j-w1-0", gone=True)
        draft = step(world.with_desired(world.desired.with_plan(leaving=("j-w1-0",))))
        assert (draft.plan.membership, draft.plan.leaving) == (2, ())


class TestScaledDown:
    """Three of four workers are wanted from now on, and there is no spare."""

    @pytest.mark.parametrize("lost", [0, 1, 2, 3])
    def test_an_empty_seat_goes_before_those_that_are_held(self, lost: int) -> None:
        """Nobody comes for it, since three workers are there: the job would wait for ever."""
        world = build_training(spares=0, job=build_job(3, 0))
        world = leaving(change_worker(world, f"j-w{lost}-0", pod={"exit_code": 143}), f"j-w{lost}-0")
        assert seats(step(world)) == [f"j-w{n}-0" for n in range(4) if n != lost]

    def test_where_all_are_well_the_last_one_goes_by_a_checkpoint(self) -> None:
        world = build_training(spares=0, job=build_job(3, 0))
        asked = step(world)
        assert len(asked.plan.members) == 4
        assert asked.plan.checkpoint_request == world.plan.checkpoint_request + 1


class TestShrinking:
    """Worker 1 is gone, there is no spare, and the job may train with two of four."""

    def vacant(self, seconds: float, *, gone: int = 1, successor: PodView | None = None) -> DesiredState:
        world = build_training(spares=0, job=build_job(4, 0, min_replicas=2, scheduling_timeout=60.0))
        for ordinal in range(1, 1 + gone):
            world = leaving(change_worker(world, f"j-w{ordinal}-0", gone=True), f"j-w{ordinal}-0")
        world = world.with_desired(world.desired.with_placement(vacant_since=NOW - seconds))
        if successor is not None:
            record = WorkerRecord("j-w1-1", 1, 1, uid="uid")
            workers = (*world.state.placement.workers, record)
            world = world.with_desired(world.desired.with_placement(workers=workers))
            views = tuple(WorkerView(record, successor) if v.name == record.name else v for v in world.workers)
            world = replace(world, workers=views)
        return step(world)

    def test_after_a_while_the_others_go_on_without(self) -> None:
        assert len(self.vacant(SHRINK_DELAY_SECONDS - 1).plan.members) == 4
        assert seats(self.vacant(SHRINK_DELAY_SECONDS)) == ["j-w0-0", "j-w2-0", "j-w3-0"]

    def test_but_not_with_fewer_than_the_job_can_do_with(self) -> None:
        assert seats(self.vacant(10_000, gone=2)) == ["j-w0-0", "j-w3-0"]
        assert len(self.vacant(10_000, gone=3).plan.members) == 4

    def test_a_successor_that_starts_is_waited_for_as_long_as_placing_may_take(self) -> None:
        starting = PodView("j-w1-1", "uid", "Pending", "node-1", created_at=NOW)
        assert len(self.vacant(59, successor=starting).plan.members) == 4
        assert len(self.vacant(60, successor=starting).plan.members) == 3

    @pytest.mark.parametrize("hopeless", [{"unschedulable_message": "0/6 nodes"}, {"deleting": True}, {"exit_code": 1}])
    def test_one_that_will_not_come_is_not(self, hopeless: dict[str, object]) -> None:
        pod = replace(PodView("j-w1-1", "uid", "Pending", "", created_at=NOW), **hopeless)  # type: ignore[arg-type]
        assert len(self.vacant(SHRINK_DELAY_SECONDS, successor=pod).plan.members) == 3
