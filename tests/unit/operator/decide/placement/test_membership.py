"""Which workers hold the ranks, and how long the job waits for them."""

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


def apply_step(observation: Observation) -> DesiredState:
    return membership.update_membership(observation, build_policy())


def list_members(desired: DesiredState) -> list[str]:
    return [member.worker for member in desired.plan.members]


def with_leaving(
    observation: Observation, name: str, *, dead: bool = True, waits_for_checkpoint: bool = False
) -> Observation:
    record = observation.state.placement.find_worker(name)
    assert record is not None
    leaving = replace(record, leaving="it is given up", dead=dead, waits_for_checkpoint=waits_for_checkpoint)
    return observation.with_desired(observation.desired.with_worker(leaving))


class TestEnd:
    @pytest.mark.parametrize("end", ["stop", "over"])
    def test_a_job_that_ends_keeps_its_members_and_allows_no_restarts(self, end: str) -> None:
        observation = with_leaving(build_training(), "j-w1-0")
        if end == "stop":
            observation = observation.with_desired(observation.desired.with_plan(stop=Stop.SUSPEND))
        else:
            observation = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW))
        assert apply_step(observation) is observation.desired
        limited = build_policy(max_restarts=3)
        assert membership.allow_restarts(observation, limited) is observation.desired
        assert membership.allow_restarts(build_training(), limited).plan.restarts == 3, "while the job runs"

    def test_the_policy_limits_restarts_by_launchers(self) -> None:
        for policy in (build_policy(paused="maintenance"), build_policy(allow=frozenset({Remedy.REPLACE_WORKER}))):
            assert membership.allow_restarts(build_training(), policy).plan.restarts == 0
        observation = build_training()
        with_restarts = observation.desired.with_budget(restarts=(NOW - 2, NOW - 1), membership_restarts=2)
        assert (
            membership.allow_restarts(
                observation.with_desired(with_restarts), build_policy(max_restarts=3)
            ).plan.restarts
            == 3
        )
        assert (
            membership.allow_restarts(
                observation.with_desired(with_restarts), build_policy(max_restarts=1)
            ).plan.restarts
            == 2
        )


class TestFinished:
    """Some ranks have finished; worker 0 is one of them."""

    def build_finished(self) -> Observation:
        observation = change_worker(
            build_training(), "j-w0-0", pod={"exit_code": 0, "finished": True, "phase": "Succeeded"}
        )
        return observation.with_desired(observation.desired.with_lifecycle(finished=("j-w0-0",)))

    def test_a_leaving_worker_that_still_trains_may_finish(self) -> None:
        observation = with_leaving(self.build_finished(), "j-w1-0", dead=False)
        assert apply_step(observation) is observation.desired
        recalled = apply_step(with_leaving(self.build_finished(), "j-w1-0", dead=True))
        assert recalled.state.lifecycle.finished == ()

    def test_a_worker_that_is_not_leaving_is_not_lost(self) -> None:
        observation = change_worker(self.build_finished(), "j-w1-0", gone=True)
        assert apply_step(observation) is observation.desired

    def test_a_finished_trainer_is_replaced_and_a_present_launcher_joins_again(self) -> None:
        desired = apply_step(with_leaving(self.build_finished(), "j-w1-0"))
        leaving = desired.state.placement.find_worker("j-w0-0")
        assert leaving is not None
        assert (leaving.dead, bool(leaving.leaving)) == (True, True)
        present = build_training()
        present = present.with_desired(present.desired.with_lifecycle(finished=("j-w0-0",)))
        worker = apply_step(with_leaving(present, "j-w1-0")).state.placement.find_worker("j-w0-0")
        assert worker is not None
        assert not worker.leaving

    @pytest.mark.parametrize(
        ("heartbeat", "seconds"),
        [({"state": LauncherState.RUNNING}, 9.0), ({"membership": 0}, 9.0), ({"round": 0}, 9.0), ({}, 2.9)],
        ids=["it runs", "another membership", "an earlier round", "a moment ago"],
    )
    def test_only_a_worker_that_waits_for_a_round_recalls_finished_workers(
        self, heartbeat: dict[str, object], seconds: float
    ) -> None:
        gathering: dict[str, object] = {"state": LauncherState.GATHERING}
        observation = change_worker(self.build_finished(), "j-w1-0", heartbeat=gathering, state_seconds=9.0)
        assert apply_step(observation).state.lifecycle.finished == ()
        observation = change_worker(observation, "j-w1-0", heartbeat=heartbeat, state_seconds=seconds)
        assert apply_step(observation) is observation.desired


class TestRanks:
    def test_a_leaving_worker_keeps_its_ranks_while_it_trains_and_there_is_no_spare(self) -> None:
        observation = with_leaving(build_training(spares=0), "j-w1-0", dead=False)
        assert apply_step(observation) is observation.desired
        observation = with_leaving(build_training(spares=0), "j-w1-0", dead=True)
        assert apply_step(observation).state.placement.vacant_since == NOW

    @pytest.mark.parametrize("placement_values", [{"vacant_since": NOW - 5}, {"checkpoint_requested_at": NOW - 5}])
    def test_waits_are_cleared_once_all_members_are_healthy(self, placement_values: dict[str, float]) -> None:
        observation = build_training()
        observation = observation.with_desired(observation.desired.with_placement(**placement_values))
        placement = apply_step(observation).state.placement
        assert (placement.vacant_since, placement.checkpoint_requested_at) == (None, None)

    @pytest.mark.parametrize(
        ("waited_seconds", "answered", "begins"),
        [
            (MEMBERSHIP_CHECKPOINT_WAIT_SECONDS - 1, False, False),
            (MEMBERSHIP_CHECKPOINT_WAIT_SECONDS + 1, False, True),
            (1.0, True, True),
        ],
    )
    def test_a_voluntary_change_waits_for_its_checkpoint_for_a_limited_time(
        self, waited_seconds: float, answered: bool, begins: bool
    ) -> None:
        observation = build_training(2, 2, job=build_job(3, 1))
        requested = observation.with_desired(apply_step(observation))
        assert requested.plan.checkpoint_request == 1
        later = change_members(replace(requested, now=NOW + waited_seconds), checkpoint={"request": int(answered)})
        assert len(apply_step(later).plan.members) == (3 if begins else 2)

    def test_a_worker_that_moves_for_a_warning_stays_until_the_checkpoint_is_saved(self) -> None:
        observation = with_leaving(build_training(), "j-w1-0", dead=False, waits_for_checkpoint=True)
        requested = observation.with_desired(apply_step(observation))
        assert requested.plan.checkpoint_request == 1
        late = replace(requested, now=NOW + 100 * MEMBERSHIP_CHECKPOINT_WAIT_SECONDS)
        assert apply_step(late) is late.desired
        answered = change_members(late, checkpoint={"request": 1})
        assert [member.worker for member in apply_step(answered).plan.members] == [
            "j-w0-0",
            "j-w4-0",
            "j-w2-0",
            "j-w3-0",
        ]

    def test_a_worker_with_a_warning_moves_together_with_one_that_must_leave(self) -> None:
        observation = with_leaving(build_training(spares=2), "j-w1-0", dead=False, waits_for_checkpoint=True)
        requested = observation.with_desired(apply_step(with_leaving(observation, "j-w2-0", dead=False)))
        late = replace(with_leaving(requested, "j-w2-0", dead=False), now=NOW + MEMBERSHIP_CHECKPOINT_WAIT_SECONDS + 1)
        assert [member.worker for member in apply_step(late).plan.members] == ["j-w0-0", "j-w4-0", "j-w5-0", "j-w3-0"]

    def test_a_stalled_job_does_not_wait_for_a_checkpoint(self) -> None:
        observation = build_training(2, 2, job=build_job(3, 1))
        requested = observation.with_desired(apply_step(observation))
        assert len(apply_step(replace(requested, faults=build_stalls(requested, culprit=1))).plan.members) == 3


class TestDeletedPods:
    """Pods in a drain: the signal does not reach a launcher behind a shell."""

    def test_the_plan_lets_ranks_of_a_deleted_leaving_pod_leave(self) -> None:
        observation = change_worker(
            with_leaving(build_training(spares=0), "j-w1-0", dead=False), "j-w1-0", pod={"deleting": True}
        )
        desired = apply_step(observation)
        assert (desired.plan.leaving, desired.plan.membership) == (("j-w1-0",), 1)
        assert desired.plan.version > observation.plan.version, "otherwise no launcher would read it"
        assert apply_step(observation.with_desired(desired)) is desired, "once"
        assert desired.plan.build_worker_plan("j-w1-0").role is WorkerRole.LEAVE

    def test_the_plan_lets_other_workers_stay(self) -> None:
        assert apply_step(with_leaving(build_training(spares=0), "j-w1-0", dead=False)).plan.leaving == ()
        deleted = change_worker(build_training(spares=0), "j-w1-0", pod={"deleting": True})
        assert apply_step(deleted).plan.leaving == (), "no check has decided on it yet"

    def test_a_new_membership_clears_the_leaving_workers(self) -> None:
        observation = change_worker(with_leaving(build_training(), "j-w1-0"), "j-w1-0", gone=True)
        desired = apply_step(observation.with_desired(observation.desired.with_plan(leaving=("j-w1-0",))))
        assert (desired.plan.membership, desired.plan.leaving) == (2, ())


class TestScaledDown:
    """The job is scaled from four workers to three, and there is no spare."""

    @pytest.mark.parametrize("lost", [0, 1, 2, 3])
    def test_the_ranks_of_a_lost_worker_are_removed_first(self, lost: int) -> None:
        """No worker replaces it, because three workers exist: otherwise the job would wait indefinitely."""
        observation = build_training(spares=0, job=build_job(3, 0))
        observation = with_leaving(change_worker(observation, f"j-w{lost}-0", pod={"exit_code": 143}), f"j-w{lost}-0")
        assert list_members(apply_step(observation)) == [f"j-w{n}-0" for n in range(4) if n != lost]

    def test_if_all_workers_are_healthy_the_last_one_leaves_after_a_checkpoint(self) -> None:
        observation = build_training(spares=0, job=build_job(3, 0))
        requested = apply_step(observation)
        assert len(requested.plan.members) == 4
        assert requested.plan.checkpoint_request == observation.plan.checkpoint_request + 1


class TestShrinking:
    """Worker 1 is gone, there is no spare, and the job may train with two of four."""

    def apply_step_with_vacancy(
        self, seconds: float, *, gone: int = 1, successor: PodView | None = None
    ) -> DesiredState:
        observation = build_training(spares=0, job=build_job(4, 0, min_replicas=2, scheduling_timeout=60.0))
        for ordinal in range(1, 1 + gone):
            observation = with_leaving(change_worker(observation, f"j-w{ordinal}-0", gone=True), f"j-w{ordinal}-0")
        observation = observation.with_desired(observation.desired.with_placement(vacant_since=NOW - seconds))
        if successor is not None:
            record = WorkerRecord("j-w1-1", 1, 1, uid="uid")
            workers = (*observation.state.placement.workers, record)
            observation = observation.with_desired(observation.desired.with_placement(workers=workers))
            views = tuple(
                WorkerView(record, successor) if view.name == record.name else view for view in observation.workers
            )
            observation = replace(observation, workers=views)
        return apply_step(observation)

    def test_the_others_continue_after_the_shrink_delay(self) -> None:
        assert len(self.apply_step_with_vacancy(SHRINK_DELAY_SECONDS - 1).plan.members) == 4
        assert list_members(self.apply_step_with_vacancy(SHRINK_DELAY_SECONDS)) == ["j-w0-0", "j-w2-0", "j-w3-0"]

    def test_a_job_does_not_shrink_below_its_minimum(self) -> None:
        assert list_members(self.apply_step_with_vacancy(10_000, gone=2)) == ["j-w0-0", "j-w3-0"]
        assert len(self.apply_step_with_vacancy(10_000, gone=3).plan.members) == 4

    def test_a_successor_that_starts_is_awaited_until_the_scheduling_timeout(self) -> None:
        starting = PodView("j-w1-1", "uid", "Pending", "node-1", created_at=NOW)
        assert len(self.apply_step_with_vacancy(59, successor=starting).plan.members) == 4
        assert len(self.apply_step_with_vacancy(60, successor=starting).plan.members) == 3

    @pytest.mark.parametrize(
        "pod_values", [{"unschedulable_message": "0/6 nodes"}, {"deleting": True}, {"exit_code": 1}]
    )
    def test_a_successor_that_cannot_start_is_not_awaited(self, pod_values: dict[str, object]) -> None:
        pod = replace(PodView("j-w1-1", "uid", "Pending", "", created_at=NOW), **pod_values)  # type: ignore[arg-type]
        assert len(self.apply_step_with_vacancy(SHRINK_DELAY_SECONDS, successor=pod).plan.members) == 3


class TestRestoredBackup:
    """etcd is restored from a backup: workers are in membership 3, by version 112; the plan is version 100 of 1."""

    def build_restored(self, state: LauncherState = LauncherState.RUNNING) -> Observation:
        return change_members(build_training(2, 1), membership=3, round=5, plan_version=112, state=state)

    def test_members_of_a_later_membership_begin_one_above_it(self) -> None:
        plan = apply_step(self.build_restored()).plan
        assert (plan.membership, plan.version, plan.round) == (4, 113, 6)
        assert [member.worker for member in plan.members] == ["j-w0-0", "j-w1-0"]

    @pytest.mark.parametrize("state", [LauncherState.RUNNING, LauncherState.GATHERING, LauncherState.LOST])
    def test_a_worker_that_the_plan_does_not_know_replaces_a_lost_member(self, state: LauncherState) -> None:
        observation = change_worker(build_training(2, 1), "j-w2-0", heartbeat={"state": state, "plan_version": 112})
        observation = change_worker(with_leaving(observation, "j-w1-0"), "j-w1-0", gone=True)
        assert list_members(apply_step(observation)) == ["j-w0-0", "j-w1-0"], "a spare that is not warm yet"
        plan = apply_step(change_worker(observation, "j-w2-0", heartbeat={"membership": 3})).plan
        assert [member.worker for member in plan.members] == ["j-w0-0", "j-w2-0"]
        assert (plan.membership, plan.version) == (4, 113)

    def test_a_silent_worker_of_a_later_membership_gets_no_ranks(self) -> None:
        observation = change_worker(build_training(2, 1), "j-w2-0", heartbeat={"membership": 3}, silent_seconds=60.0)
        observation = change_worker(with_leaving(observation, "j-w1-0"), "j-w1-0", gone=True)
        assert list_members(apply_step(observation)) == ["j-w0-0", "j-w1-0"]

    def test_workers_that_trained_are_the_first_members_of_a_plan_without_any(self) -> None:
        observation = self.build_restored()
        observation = observation.with_desired(observation.desired.with_plan(version=8, membership=0, members=()))
        plan = apply_step(observation).plan
        assert [member.worker for member in plan.members] == ["j-w0-0", "j-w1-0"]
        assert (plan.membership, plan.version) == (4, 113)

    @pytest.mark.parametrize(
        ("changes", "stop", "version"),
        [
            ({"plan_version": 100}, Stop.NO, 100),
            ({"plan_version": 112}, Stop.NO, 113),
            ({"plan_version": 112, "membership": 3}, Stop.NO, 100),
            ({"plan_version": 112, "membership": 3}, Stop.SUSPEND, 113),
        ],
        ids=["they follow it", "an older plan", "an older membership", "an older membership that is to stop"],
    )
    def test_the_version_is_above_those_that_workers_follow(
        self, changes: dict[str, object], stop: Stop, version: int
    ) -> None:
        observation = change_members(build_training(2, 1), **changes)
        plan = observation.plan if stop is Stop.NO else observation.desired.with_plan(version=100, stop=stop).plan
        observation = observation.with_desired(replace(observation.desired, plan=plan))
        assert membership.raise_plan_version(observation, build_policy()).plan == replace(plan, version=version)
