"""Workers that do not become ready: which count as failed, and what that means for the job."""

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

STARTING = {"state": LauncherState.STARTING, "commands_may_follow": False}


def build_ended(observation: Observation | None = None, name: str = "j-w4-0") -> Observation:
    """Build a job whose spare's trainer has ended before it was ready."""
    return change_worker(
        observation or build_training(), name, pod={"exit_code": 2, "exit_reason": "Error"}, heartbeat=STARTING
    )


def build_late(seconds: float = WARM_UP_TIMEOUT_SECONDS + 1) -> Observation:
    """Build a job whose spare is not ready `seconds` after its container started."""
    observation = change_worker(build_training(), "j-w4-0", heartbeat=STARTING)
    record = replace(observation.state.placement.workers[4], starting_since=NOW - seconds)
    return observation.with_desired(observation.desired.with_worker(record))


def make_decision(observation: Observation, **changes: object) -> Decision:
    decision = start_failed.check_failed_starts(observation, build_policy(**changes))
    assert decision is not None
    return decision


class TestEnded:
    def test_a_spare_that_ended_before_it_was_ready_is_replaced(self) -> None:
        decision = make_decision(build_ended())
        assert decision.message == "the trainer of j-w4-0 ended with 2 (Error) before it was ready"
        (action,) = decision.actions
        assert isinstance(action, ReplaceWorker)
        assert (action.dead, action.never_ready) == (True, True)
        assert (decision.node, decision.live) == ("node-4", True)

    @pytest.mark.parametrize("pod", [{"deleting": True}, {"disruption_reason": "Evicted"}])
    def test_a_deleted_or_evicted_pod_is_no_failed_start(self, pod: dict[str, object]) -> None:
        assert start_failed.check_failed_starts(change_worker(build_ended(), "j-w4-0", pod=pod), build_policy()) is None

    def test_the_message_names_the_launch_command_if_the_container_exits_with_zero(self) -> None:
        decision = make_decision(change_worker(build_ended(), "j-w4-0", pod={"exit_code": 0, "exit_reason": ""}))
        assert decision.message.startswith("the trainer of j-w4-0 ended with 0 before it was ready: the command of")
        assert "pacekeeper run" in decision.message

    def test_the_message_names_a_failed_init_container(self) -> None:
        pod = {"exit_code": 3, "phase": "Failed", "failed_init_container": "fetch", "exit_message": "no such bucket"}
        decision = make_decision(change_worker(build_ended(), "j-w4-0", pod=pod))
        assert decision.message == "the init container fetch of j-w4-0 ended with 3 (Error)"
        assert (decision.class_, decision.evidence) == (IncidentClass.APPLICATION, ("no such bucket",))

    def test_a_worker_that_was_ready_is_no_failed_start(self) -> None:
        assert (
            start_failed.check_failed_starts(
                change_worker(build_ended(), "j-w4-0", heartbeat={"state": "Warm"}), build_policy()
            )
            is None
        )
        silent = build_ended()
        silent = replace(silent, workers=tuple(replace(view, heartbeat=None) for view in silent.workers))
        assert make_decision(silent).worker == "j-w4-0", "it has never reported"

    def test_members_and_leaving_workers_are_ignored(self) -> None:
        assert start_failed.check_failed_starts(build_ended(name="j-w1-0"), build_policy()) is None
        observation = build_ended()
        leaving = replace(observation.state.placement.workers[4], leaving="it is given up")
        assert (
            start_failed.check_failed_starts(
                observation.with_desired(observation.desired.with_worker(leaving)), build_policy()
            )
            is None
        )
        assert make_decision(build_ended(build_ended(name="j-w1-0"))).worker == "j-w4-0", "the next one is checked"

    def test_a_failed_start_fails_only_a_job_that_has_never_trained(self) -> None:
        observation = build_ended()
        observation = observation.with_desired(observation.desired.with_placement(failed_starts=1))
        assert isinstance(make_decision(observation).actions[0], ReplaceWorker)
        untrained = build_ended(build_untrained())
        untrained = untrained.with_desired(untrained.desired.with_placement(failed_starts=1).with_plan(members=()))
        decision = make_decision(untrained)
        assert isinstance(decision.actions[0], FailJob)
        assert (decision.live, decision.round) == (False, 0)

    def test_a_job_that_has_trained_waits_longer_before_each_successor(self) -> None:
        """The successor of a lost worker ends at once, repeatedly: a registry, DNS, or a volume may be unavailable."""
        observation = change_worker(build_training(spares=0), "j-w3-0", pod={"exit_code": 137, "phase": "Failed"})
        waits, last, name = [], observation.now, "j-w3-0"
        for _ in range(9):
            for _ in range(10_000):
                desired = evaluate_job(observation, build_policy()).desired
                assert not desired.state.lifecycle.failed_reason
                observation = observation.with_desired(desired)
                current = [view for view in observation.workers if view.record.ordinal == 3 and not view.record.leaving]
                if current and current[0].name != name:
                    break
                observation = replace(observation, now=observation.now + 1)
            waits.append(observation.now - last)
            last, name = observation.now, current[0].name
            pod = PodView(name, f"uid-{name}", "Failed", "node-9", exit_code=2, exit_reason="Error")
            fresh = replace(current[0], pod=pod, heartbeat=None)
            observation = replace(
                observation, workers=tuple(fresh if view.name == name else view for view in observation.workers)
            )
        assert (waits[0], waits[1] < 8, waits[-1] > 200) == (0, True, True)
        assert all(wait <= 380 for wait in waits)
        stalled = {
            condition.type: condition
            for condition in status.build_job_status(observation, build_policy(), JobStatus()).conditions
        }["Stalled"]
        assert (stalled.status, stalled.reason) == ("True", "BackOff")
        assert "8 workers in a row ended before they were ready; the next one" in stalled.message

    def test_a_resumed_job_waits_longer_before_each_successor(self) -> None:
        observation = build_ended()
        observation = observation.with_desired(
            observation.desired.with_plan(members=()).with_placement(failed_starts=5, placing_since=NOW)
        )
        assert isinstance(make_decision(observation).actions[0], ReplaceWorker)
        after = evaluate_job(observation, build_policy()).desired.state.placement
        assert after.retry_at is not None
        assert after.retry_at - NOW > 100
        assert len(after.workers) == len(observation.state.placement.workers), "no pod is created until then"

    def test_the_first_failed_start_does_not_fail_the_job(self) -> None:
        observation = build_ended()
        decision = make_decision(observation.with_desired(observation.desired.with_placement(vacant_since=NOW - 9)))
        assert isinstance(decision.actions[0], ReplaceWorker)

    def test_a_worker_without_a_node_names_no_node(self) -> None:
        assert make_decision(change_worker(build_ended(), "j-w4-0", pod={"node": ""})).node is None


class TestLate:
    def test_a_late_spare_is_replaced_and_the_job_trains_on(self) -> None:
        assert start_failed.check_failed_starts(build_late(WARM_UP_TIMEOUT_SECONDS), build_policy()) is None
        wrong_clock = replace(build_late(), clock_agrees=False)
        assert start_failed.check_failed_starts(wrong_clock, build_policy()) is None, (
            "a clock that is hours ahead is no wait of minutes"
        )
        decision = make_decision(build_late())
        (action,) = decision.actions
        assert isinstance(action, ReplaceWorker)
        assert (action.dead, action.never_ready, decision.live) == (True, True, True)
        assert (decision.node, decision.remedy) == ("node-4", Remedy.REPLACE_WORKER)

    @pytest.mark.parametrize("reported", [None, True], ids=["no launcher yet", "a launcher behind the shell"])
    def test_commands_before_the_launcher_may_take_as_long_as_the_placement(self, reported: bool | None) -> None:
        limit = build_late().job.spec.scheduling_timeout
        assert limit > WARM_UP_TIMEOUT_SECONDS
        report = {"commands_may_follow": reported}
        in_time = change_worker(build_late(limit), "j-w4-0", heartbeat=report)
        assert start_failed.check_failed_starts(in_time, build_policy()) is None
        late = make_decision(change_worker(build_late(limit + 1), "j-w4-0", heartbeat=report))
        assert f"not ready {limit:.0f} s after" in late.message
        short = change_worker(build_late(), "j-w4-0", heartbeat=report)
        short = replace(short, job=replace(short.job, spec=replace(short.job.spec, scheduling_timeout=10.0)))
        assert f"not ready {WARM_UP_TIMEOUT_SECONDS:.0f} s after" in make_decision(short).message

    def test_the_message_names_the_command_if_no_launcher_has_reported(self) -> None:
        assert "no launcher has reported" not in make_decision(change_worker(build_late(), "j-w4-0")).message
        silent = change_worker(build_late(), "j-w4-0", heartbeat={"rendezvous_port": None})
        assert (
            "no launcher has reported: the command of the container with the ranks must call torchrun"
            in make_decision(silent).message
        )

    def test_the_incident_is_not_live_if_a_rank_waits_for_the_late_worker(self) -> None:
        observation = build_late()
        assert not make_decision(
            observation.with_desired(observation.desired.with_placement(vacant_since=NOW - 9))
        ).live
        assert not make_decision(observation.with_desired(observation.desired.with_plan(members=()))).live

    def test_no_action_is_taken_if_replacing_is_not_allowed(self) -> None:
        decision = make_decision(build_late(), allow=frozenset())
        assert (decision.actions, decision.remedy) == ((), None)

    def test_a_worker_without_a_node_names_no_node(self) -> None:
        observation = build_late()
        record = replace(observation.state.placement.workers[4], node="")
        assert make_decision(observation.with_desired(observation.desired.with_worker(record))).node is None

    def test_a_pod_that_is_being_deleted_is_not_late(self) -> None:
        assert (
            start_failed.check_failed_starts(
                change_worker(build_late(), "j-w4-0", pod={"deleting": True}), build_policy()
            )
            is None
        )


class TestRefused:
    """The kubelet has not started the pod's containers: OutOfcpu, UnexpectedAdmissionError."""

    @staticmethod
    def build_refused(observation: Observation | None = None) -> Observation:
        pod = {"phase": "Failed", "exit_code": None, "exit_reason": "OutOfcpu"}
        gone = change_worker(observation or build_training(), "j-w4-0", pod=pod)
        views = (replace(view, heartbeat=None) if view.name == "j-w4-0" else view for view in gone.workers)
        return replace(gone, workers=tuple(views))

    def test_a_refused_pod_is_replaced_and_the_script_is_not_blamed(self) -> None:
        decision = make_decision(self.build_refused())
        assert decision.message == "worker j-w4-0 is given up: its pod was refused by the kubelet of node-4 (OutOfcpu)"
        assert (decision.class_, decision.remedy) == (IncidentClass.INFRASTRUCTURE, Remedy.REPLACE_WORKER)

    def test_refused_pods_never_fail_the_job_and_each_try_waits_longer(self) -> None:
        observation = self.build_refused()
        observation = observation.with_desired(observation.desired.with_plan(members=()))
        waits = []
        for _ in range(6):
            decision = make_decision(observation)
            (action,) = decision.actions
            assert isinstance(action, ReplaceWorker)
            after = ACTION_HANDLERS[ReplaceWorker]([action], decision, observation).desired.state.placement
            assert after.refused_until is not None
            waits.append(after.refused_until - NOW)
            observation = observation.with_desired(
                observation.desired.with_placement(refused_pods=after.refused_pods, refused_until=after.refused_until)
            )
        assert waits[0] == 0
        assert waits == sorted(waits)
        assert waits[-1] > 60

    def test_no_pod_is_created_until_the_wait_ends(self) -> None:
        observation = build_training(replicas=4, spares=2)
        waiting = observation.with_desired(observation.desired.with_placement(refused_pods=2, refused_until=NOW + 5))
        count = len(observation.state.placement.workers)
        with_room = change_worker(waiting, "j-w5-0", gone=True)
        records = tuple(worker for worker in waiting.state.placement.workers if worker.name != "j-w5-0")
        with_room = with_room.with_desired(with_room.desired.with_placement(workers=records))
        assert len(workforce.update_workforce(with_room, build_policy()).state.placement.workers) == count - 1
        later = replace(with_room, now=NOW + 6)
        assert len(workforce.update_workforce(later, build_policy()).state.placement.workers) == count

    def test_refused_pods_count_until_the_awaited_worker_is_there(self) -> None:
        """The other workers train on, and the job has no spare."""

        def count_refused(observation: Observation) -> int:
            counted = observation.with_desired(
                observation.desired.with_placement(refused_pods=2, refused_until=NOW + 5)
            )
            return lifecycle.advance_lifecycle(counted, build_policy()).state.placement.refused_pods

        observation = build_training(replicas=4, spares=0)
        record = observation.state.placement.workers[3]
        leaving = observation.with_desired(
            observation.desired.with_worker(replace(record, leaving="its GPU", waits_for_checkpoint=True))
        )
        assert count_refused(observation) == 0
        assert count_refused(leaving) == 2, "no worker has replaced it"
        replacements = leaving.state.placement.workers[3], replace(record, name="j-w4-0", ordinal=4, uid="")
        with_replacement = leaving.with_desired(
            leaving.desired.with_placement(workers=(*leaving.state.placement.workers[:3], *replacements))
        )
        assert count_refused(with_replacement) == 2, "the replacement is not warm yet"


class TestIncident:
    """Incidents of a spare that does not start, in a job that trains."""

    @staticmethod
    def apply_step(observation: Observation, seconds: float = 1.0) -> Observation:
        """Run one pass `seconds` later."""
        observation = replace(observation, now=observation.now + seconds)
        return observation.with_desired(evaluate_job(observation, build_policy()).desired)

    @staticmethod
    def with_spare(observation: Observation, pod: PodView, heartbeat: Heartbeat | None = None) -> Observation:
        """Give the newest spare this pod; the spares that are leaving have none."""
        record = max(observation.state.placement.workers, key=lambda worker: worker.incarnation)
        fresh = WorkerView(
            record, replace(pod, name=record.name, uid=f"uid-{record.name}", address="10.0.0.7"), heartbeat
        )
        return replace(observation, workers=(*observation.members, fresh))

    def fail_again(self, observation: Observation, **pod: Any) -> Observation:
        """Run passes until the next spare is created, and let it end before it is ready."""
        before = len(observation.state.placement.incarnations), max(observation.state.placement.incarnations.values())
        while (
            len(observation.state.placement.incarnations),
            max(observation.state.placement.incarnations.values()),
        ) == before:
            observation = self.apply_step(observation, 10.0)
        failed = PodView("", "", "Failed", "node-7", exit_code=2, exit_reason="Error")
        return self.apply_step(self.with_spare(observation, replace(failed, **pod)))

    def test_the_incident_is_open_until_a_spare_is_warm(self) -> None:
        observation = self.apply_step(build_ended())
        (incident,) = observation.state.incidents.open
        assert (incident.live, incident.remedy) == (True, Remedy.REPLACE_WORKER)
        for _ in range(5):
            observation = self.apply_step(observation, 2.0)
            assert observation.state.incidents.open, "nothing has recovered in 0.0 s"
        running = PodView("", "", "Running", "node-7")
        observation = self.apply_step(self.with_spare(observation, running, Heartbeat(state=LauncherState.STARTING)))
        assert observation.state.incidents.open
        observation = self.apply_step(self.with_spare(observation, running, Heartbeat(state=LauncherState.WARM)))
        assert not observation.state.incidents.open
        (closed,) = observation.state.incidents.current
        assert (closed.outcome, closed.recovered) == (IncidentOutcome.RECOVERED, observation.now)

    def test_starts_that_fail_for_the_same_reason_are_one_incident(self) -> None:
        observation = self.apply_step(build_ended())
        for _ in range(8):
            observation = self.fail_again(observation)
        assert len(observation.state.incidents.current) == 1
        assert observation.state.placement.failed_starts == 9
        assert not observation.state.lifecycle.failed_reason

    def test_another_reason_opens_an_incident_that_supersedes_the_first(self) -> None:
        observation = self.fail_again(self.apply_step(build_ended()), exit_code=137, exit_reason="OOMKilled")
        first, second = sorted(observation.state.incidents.current, key=lambda incident: incident.decided)
        assert (first.outcome, second.outcome) == (IncidentOutcome.SUPERSEDED, None)
        assert "OOMKilled" in second.message

    def test_the_condition_contains_the_message_between_two_attempts(self) -> None:
        observation = self.apply_step(build_ended())
        observation = self.apply_step(replace(observation, workers=observation.members))
        found = {
            condition.type: condition
            for condition in status.build_job_status(observation, build_policy(), JobStatus()).conditions
        }["Degraded"]
        assert (found.status, found.reason) == ("True", "WorkerCannotStart")
        assert found.message == "the trainer of j-w4-0 ended with 2 (Error) before it was ready"

    def test_the_open_incident_awaits_a_worker(self) -> None:
        observation = self.apply_step(build_ended())
        assert all(map(verify.awaits_worker, observation.state.incidents.open))

    def test_a_resumed_job_has_one_incident_for_all_of_its_workers(self) -> None:
        """All workers of a job that has trained end before they are ready: its volume is unavailable."""
        observation = build_training(spares=0)
        observation = observation.with_desired(
            observation.desired.with_plan(members=()).with_placement(placing_since=NOW)
        )
        for view in observation.workers:
            observation = build_ended(observation, view.name)
        observation = self.apply_step(observation)
        (incident,) = observation.state.incidents.open
        assert not incident.live
        assert all(worker.leaving for worker in observation.state.placement.workers)
        stalled = {
            condition.type: condition
            for condition in status.build_job_status(observation, build_policy(), JobStatus()).conditions
        }["Stalled"]
        assert "ended with 2 (Error) before it was ready" in stalled.message
