"""Workers that are never ready: which are, and what that means for the job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.reports import Heartbeat, LauncherState
from pacekeeper_operator.api.incident import IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import JobStatus, Remedy
from pacekeeper_operator.decide.decision import Decision, FailJob, ReplaceWorker
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.failures import start_failed
from pacekeeper_operator.decide.failures.start_failed import WARM_UP_TIMEOUT_SECONDS
from pacekeeper_operator.decide.lifecycle import lifecycle, status
from pacekeeper_operator.decide.placement import workforce
from pacekeeper_operator.decide.remedies import ACTION_HANDLERS
from pacekeeper_operator.decide.stragglers import verify
from pacekeeper_operator.state.cluster_view import PodView, WorkerView
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_policy, build_training, build_untrained, change_worker

STARTING = {"state": LauncherState.STARTING}


def dead(world: Observation | None = None, name: str = "j-w4-0") -> Observation:
    """The spare's trainer has ended before it was ready."""
    return change_worker(
        world or build_training(), name, pod={"exit_code": 2, "exit_reason": "Error"}, heartbeat=STARTING
    )


def late(seconds: float = WARM_UP_TIMEOUT_SECONDS + 1) -> Observation:
    """The spare is not ready so long after its container had begun to run."""
    world = change_worker(build_training(), "j-w4-0", heartbeat=STARTING)
    record = replace(world.state.placement.workers[4], starting_since=NOW - seconds)
    return world.with_desired(world.desired.with_worker(record))


def found(world: Observation, **changes: object) -> Decision:
    decision = start_failed.check_failed_starts(world, build_policy(**changes))
    assert decision is not None
    return decision


class TestEnded:
    def test_it_is_replaced(self) -> None:
        decision = found(dead())
        assert decision.message == "the trainer of j-w4-0 ended with 2 (Error) before it was ready"
        (action,) = decision.actions
        assert isinstance(action, ReplaceWorker)
        assert (action.dead, action.never_ready) == (True, True)
        assert (decision.node, decision.live) == ("node-4", True)

    @pytest.mark.parametrize("pod", [{"deleting": True}, {"disruption_reason": "Evicted"}])
    def test_who_was_taken_away_did_not_fail(self, pod: dict[str, object]) -> None:
        assert start_failed.check_failed_starts(change_worker(dead(), "j-w4-0", pod=pod), build_policy()) is None

    def test_a_container_that_ends_well_without_a_launcher_is_told_how_to_begin(self) -> None:
        decision = found(change_worker(dead(), "j-w4-0", pod={"exit_code": 0, "exit_reason": ""}))
        assert decision.message.startswith("the trainer of j-w4-0 ended with 0 before it was ready: the command of")
        assert "pacekeeper run" in decision.message

    def test_an_init_container_that_fails_is_named(self) -> None:
        pod = {"exit_code": 3, "phase": "Failed", "failed_init_container": "fetch", "exit_message": "no such bucket"}
        decision = found(change_worker(dead(), "j-w4-0", pod=pod))
        assert decision.message == "the init container fetch of j-w4-0 ended with 3 (Error)"
        assert (decision.class_, decision.evidence) == (IncidentClass.APPLICATION, ("no such bucket",))

    def test_nor_did_who_had_been_ready(self) -> None:
        assert (
            start_failed.check_failed_starts(
                change_worker(dead(), "j-w4-0", heartbeat={"state": "Warm"}), build_policy()
            )
            is None
        )
        silent = dead()
        silent = replace(silent, workers=tuple(replace(view, heartbeat=None) for view in silent.workers))
        assert found(silent).worker == "j-w4-0", "it was never heard"

    def test_who_holds_ranks_or_is_given_up_is_others_business(self) -> None:
        assert start_failed.check_failed_starts(dead(name="j-w1-0"), build_policy()) is None
        world = dead()
        given_up = replace(world.state.placement.workers[4], leaving="it is given up")
        assert (
            start_failed.check_failed_starts(world.with_desired(world.desired.with_worker(given_up)), build_policy())
            is None
        )
        assert found(dead(dead(name="j-w1-0"))).worker == "j-w4-0", "the next one is looked at"

    def test_a_job_that_trains_does_not_fail_of_it_and_one_that_never_has_does(self) -> None:
        world = dead()
        world = world.with_desired(world.desired.with_placement(failed_starts=1))
        assert isinstance(found(world).actions[0], ReplaceWorker)
        never = dead(build_untrained())
        never = never.with_desired(never.desired.with_placement(failed_starts=1).with_plan(members=()))
        decision = found(never)
        assert isinstance(decision.actions[0], FailJob)
        assert (decision.live, decision.round) == (False, 0)

    def test_a_job_that_has_trained_waits_longer_before_each_successor(self) -> None:
        """The successor of a lost worker ends at once, again and again: a registry, DNS or a volume may be away."""
        world = change_worker(build_training(spares=0), "j-w3-0", pod={"exit_code": 137, "phase": "Failed"})
        waits, last, name = [], world.now, "j-w3-0"
        for _ in range(9):
            for _ in range(10_000):
                draft = evaluate_job(world, build_policy()).desired
                assert not draft.state.lifecycle.failed_reason
                world = world.with_desired(draft)
                current = [view for view in world.workers if view.record.ordinal == 3 and not view.record.leaving]
                if current and current[0].name != name:
                    break
                world = replace(world, now=world.now + 1)
            waits.append(world.now - last)
            last, name = world.now, current[0].name
            pod = PodView(name, f"uid-{name}", "Failed", "node-9", exit_code=2, exit_reason="Error")
            fresh = replace(current[0], pod=pod, heartbeat=None)
            world = replace(world, workers=tuple(fresh if view.name == name else view for view in world.workers))
        assert (waits[0], waits[1] < 8, waits[-1] > 200) == (0, True, True)
        assert all(wait <= 380 for wait in waits)
        stalled = {each.type: each for each in status.build_job_status(world, build_policy(), JobStatus()).conditions}[
            "Stalled"
        ]
        assert (stalled.status, stalled.reason) == ("True", "BackOff")
        assert "8 workers in a row ended before they were ready; the next one" in stalled.message

    def test_a_job_that_resumes_does_so_too(self) -> None:
        world = dead()
        world = world.with_desired(
            world.desired.with_plan(members=()).with_placement(failed_starts=5, placing_since=NOW)
        )
        assert isinstance(found(world).actions[0], ReplaceWorker)
        after = evaluate_job(world, build_policy()).desired.state.placement
        assert after.retry_at is not None
        assert after.retry_at - NOW > 100
        assert len(after.workers) == len(world.state.placement.workers), "nobody is made until then"

    def test_the_first_one_fails_no_job(self) -> None:
        world = dead()
        waits = found(world.with_desired(world.desired.with_placement(vacant_since=NOW - 9)))
        assert isinstance(waits.actions[0], ReplaceWorker)

    def test_one_that_has_no_node_names_none(self) -> None:
        assert found(change_worker(dead(), "j-w4-0", pod={"node": ""})).node is None


class TestLate:
    def test_it_is_replaced_and_the_job_trains_on(self) -> None:
        assert start_failed.check_failed_starts(late(WARM_UP_TIMEOUT_SECONDS), build_policy()) is None
        wrong_clock = replace(late(), clock_agrees=False)
        assert start_failed.check_failed_starts(wrong_clock, build_policy()) is None, (
            "a clock that is hours ahead is no wait of minutes"
        )
        decision = found(late())
        (action,) = decision.actions
        assert isinstance(action, ReplaceWorker)
        assert (action.dead, action.never_ready, decision.live) == (True, True, True)
        assert (decision.node, decision.remedy) == ("node-4", Remedy.REPLACE_WORKER)

    def test_without_a_launcher_it_is_said_what_to_change(self) -> None:
        assert "no launcher has reported" not in found(change_worker(late(), "j-w4-0")).message
        silent = change_worker(late(), "j-w4-0", heartbeat={"rendezvous_port": None})
        assert "no launcher has reported: the command of container trainer must run" in found(silent).message

    def test_a_rank_that_waits_for_it_is_held_up(self) -> None:
        world = late()
        assert not found(world.with_desired(world.desired.with_placement(vacant_since=NOW - 9))).live
        assert not found(world.with_desired(world.desired.with_plan(members=()))).live

    def test_where_nobody_may_be_replaced_it_is_only_told(self) -> None:
        decision = found(late(), allow=frozenset())
        assert (decision.actions, decision.remedy) == ((), None)

    def test_one_that_has_no_node_names_none(self) -> None:
        world = late()
        record = replace(world.state.placement.workers[4], node="")
        assert found(world.with_desired(world.desired.with_worker(record))).node is None

    def test_one_that_is_going_is_not_late(self) -> None:
        assert (
            start_failed.check_failed_starts(change_worker(late(), "j-w4-0", pod={"deleting": True}), build_policy())
            is None
        )


class TestRefused:
    """The kubelet has not even begun its containers: OutOfcpu, UnexpectedAdmissionError."""

    @staticmethod
    def refused(world: Observation | None = None) -> Observation:
        pod = {"phase": "Failed", "exit_code": None, "exit_reason": "OutOfcpu"}
        gone = change_worker(world or build_training(), "j-w4-0", pod=pod)
        views = (replace(view, heartbeat=None) if view.name == "j-w4-0" else view for view in gone.workers)
        return replace(gone, workers=tuple(views))

    def test_it_is_replaced_and_the_script_is_not_blamed(self) -> None:
        decision = found(self.refused())
        assert decision.message == "worker j-w4-0 is given up: its pod was refused by the kubelet of node-4 (OutOfcpu)"
        assert (decision.class_, decision.remedy) == (IncidentClass.INFRASTRUCTURE, Remedy.REPLACE_WORKER)

    def test_however_often_the_job_does_not_fail_of_it_and_each_try_waits_longer(self) -> None:
        world = self.refused()
        world = world.with_desired(world.desired.with_plan(members=()))
        waits = []
        for _ in range(6):
            decision = found(world)
            (action,) = decision.actions
            assert isinstance(action, ReplaceWorker)
            after = ACTION_HANDLERS[ReplaceWorker]([action], decision, world).desired.state.placement
            assert after.refused_until is not None
            waits.append(after.refused_until - NOW)
            world = world.with_desired(
                world.desired.with_placement(refused_pods=after.refused_pods, refused_until=after.refused_until)
            )
        assert waits[0] == 0
        assert waits == sorted(waits)
        assert waits[-1] > 60

    def test_nobody_is_made_until_then(self) -> None:
        world = build_training(replicas=4, spares=2)
        waiting = world.with_desired(world.desired.with_placement(refused_pods=2, refused_until=NOW + 5))
        names = len(world.state.placement.workers)
        world_with_room = change_worker(waiting, "j-w5-0", gone=True)
        records = tuple(w for w in waiting.state.placement.workers if w.name != "j-w5-0")
        world_with_room = world_with_room.with_desired(world_with_room.desired.with_placement(workers=records))
        assert len(workforce.update_workforce(world_with_room, build_policy()).state.placement.workers) == names - 1
        later = replace(world_with_room, now=NOW + 6)
        assert len(workforce.update_workforce(later, build_policy()).state.placement.workers) == names

    def test_tries_count_until_whoever_was_waited_for_is_there(self) -> None:
        """Its other workers train on meanwhile, and it wants no spare."""

        def tried(world: Observation) -> int:
            counted = world.with_desired(world.desired.with_placement(refused_pods=2, refused_until=NOW + 5))
            return lifecycle.advance_lifecycle(counted, build_policy()).state.placement.refused_pods

        world = build_training(replicas=4, spares=0)
        record = world.state.placement.workers[3]
        leaves = world.with_desired(
            world.desired.with_worker(replace(record, leaving="its GPU", waits_for_checkpoint=True))
        )
        assert tried(world) == 0
        assert tried(leaves) == 2, "nobody is there in its place"
        coming = leaves.state.placement.workers[3], replace(record, name="j-w4-0", ordinal=4, uid="")
        promised = leaves.with_desired(
            leaves.desired.with_placement(workers=(*leaves.state.placement.workers[:3], *coming))
        )
        assert tried(promised) == 2, "who was made anew has not come so far"


class TestIncident:
    """Of a spare that does not start, in a job that trains."""

    @staticmethod
    def step(world: Observation, seconds: float = 1.0) -> Observation:
        """One pass, so many seconds later."""
        world = replace(world, now=world.now + seconds)
        return world.with_desired(evaluate_job(world, build_policy()).desired)

    @staticmethod
    def with_spare(world: Observation, pod: PodView, heartbeat: Heartbeat | None = None) -> Observation:
        """Its newest spare has this pod; those that were given up have none."""
        record = max(world.state.placement.workers, key=lambda worker: worker.incarnation)
        fresh = WorkerView(
            record, replace(pod, name=record.name, uid=f"uid-{record.name}", address="10.0.0.7"), heartbeat
        )
        return replace(world, workers=(*world.members, fresh))

    def fail_again(self, world: Observation, **pod: Any) -> Observation:
        """The next spare is made, and ends before it is ready, too."""
        known = len(world.state.placement.incarnations), max(world.state.placement.incarnations.values())
        while (len(world.state.placement.incarnations), max(world.state.placement.incarnations.values())) == known:
            world = self.step(world, 10.0)
        failed = PodView("", "", "Failed", "node-7", exit_code=2, exit_reason="Error")
        return self.step(self.with_spare(world, replace(failed, **pod)))

    def test_it_is_open_until_a_spare_is_there(self) -> None:
        world = self.step(dead())
        (incident,) = world.state.incidents.open
        assert (incident.live, incident.remedy) == (True, Remedy.REPLACE_WORKER)
        for _ in range(5):
            world = self.step(world, 2.0)
            assert world.state.incidents.open, "nothing has recovered in 0.0 s"
        running = PodView("", "", "Running", "node-7")
        world = self.step(self.with_spare(world, running, Heartbeat(state=LauncherState.STARTING)))
        assert world.state.incidents.open
        world = self.step(self.with_spare(world, running, Heartbeat(state=LauncherState.WARM)))
        assert not world.state.incidents.open
        (over,) = world.state.incidents.current
        assert (over.outcome, over.recovered) == (IncidentOutcome.RECOVERED, world.now)

    def test_starts_that_fail_alike_are_one(self) -> None:
        world = self.step(dead())
        for _ in range(8):
            world = self.fail_again(world)
        assert len(world.state.incidents.current) == 1
        assert world.state.placement.failed_starts == 9
        assert not world.state.lifecycle.failed_reason

    def test_another_reason_is_another_one_and_supersedes_it(self) -> None:
        world = self.fail_again(self.step(dead()), exit_code=137, exit_reason="OOMKilled")
        first, second = sorted(world.state.incidents.current, key=lambda incident: incident.decided)
        assert (first.outcome, second.outcome) == (IncidentOutcome.SUPERSEDED, None)
        assert "OOMKilled" in second.message

    def test_the_condition_has_the_words_between_two_attempts(self) -> None:
        world = self.step(dead())
        world = self.step(replace(world, workers=world.members))
        found = {each.type: each for each in status.build_job_status(world, build_policy(), JobStatus()).conditions}[
            "Degraded"
        ]
        assert (found.status, found.reason) == ("True", "WorkerCannotStart")
        assert found.message == "the trainer of j-w4-0 ended with 2 (Error) before it was ready"

    def test_nobody_looks_more_often_for_it(self) -> None:
        world = self.step(dead())
        assert all(map(verify.awaits_worker, world.state.incidents.open))

    def test_a_resumed_job_has_one_for_all_of_its_workers(self) -> None:
        """All workers of a job that has trained end before they are ready: its volume is away."""
        world = build_training(spares=0)
        world = world.with_desired(world.desired.with_plan(members=()).with_placement(placing_since=NOW))
        for view in world.workers:
            world = dead(world, view.name)
        world = self.step(world)
        (incident,) = world.state.incidents.open
        assert not incident.live
        assert all(worker.leaving for worker in world.state.placement.workers)
        stalled = {each.type: each for each in status.build_job_status(world, build_policy(), JobStatus()).conditions}[
            "Stalled"
        ]
        assert "ended with 2 (Error) before it was ready" in stalled.message
