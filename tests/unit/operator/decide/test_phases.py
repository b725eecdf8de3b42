"""The status of a job in each phase, and why it is degraded: the most severe reason first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Hop, Paths, PlannedPath, Stop
from pacekeeper_analysis.protocol.reports import BadLoss, PathFault, PathReport
from pacekeeper_analysis.stragglers.strategies import Bottleneck
from pacekeeper_operator.api.conditions import ConditionStatus, JobCondition, Reason
from pacekeeper_operator.api.node_quarantine import QuarantineVerdict
from pacekeeper_operator.api.training_job import CheckpointSpec, JobPhase, JobStatus
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.lifecycle.status import (
    MIN_UNIFORM_SLOWDOWN,
    build_job_status,
    build_unreadable_status,
)
from pacekeeper_operator.state.desired_state import LocalSgdChoice
from pacekeeper_operator.state.effect_results import BlockedAction
from pacekeeper_operator.state.job_metrics import PROMETHEUS_NOT_QUERIED, JobMetrics
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_fresh,
    build_job,
    build_policy,
    build_stalls,
    build_training,
    change_members,
    change_worker,
    with_pods,
)


def build_status(observation: Observation, before: JobStatus | None = None, **policy: Any) -> JobStatus:
    return build_job_status(observation, build_policy(**policy), before or JobStatus())


def find_condition(status: JobStatus, name: JobCondition) -> ConditionStatus:
    return next(condition for condition in status.conditions if condition.type == name)


def build_ended(**changes: Any) -> Observation:
    """Build a job that trained and has ended, with these changes of its lifecycle; it was stopped at NOW - 5."""
    observation = build_training()
    return observation.with_desired(
        observation.desired.with_plan(stop=Stop.FINISH).with_lifecycle(stopped_at=NOW - 5, **changes)
    )


def build_suspended(*, pods: bool) -> Observation:
    observation = build_training(job=build_job(suspend=True))
    observation = observation.with_desired(
        observation.desired.with_plan(stop=Stop.SUSPEND).with_lifecycle(stopped_at=NOW - 5)
    )
    for view in observation.workers if not pods else ():
        observation = change_worker(observation, view.name, gone=True)
    return observation


def build_recovering() -> Observation:
    observation = build_training()
    return evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()).observation


def build_starting() -> Observation:
    observation = change_members(build_training(), start={"first_step_at": None})
    return observation.with_desired(observation.desired.with_lifecycle(training_since=None))


OBSERVATIONS = {
    JobPhase.PENDING: with_pods(build_fresh()),
    JobPhase.STARTING: build_starting(),
    JobPhase.RUNNING: build_training(),
    JobPhase.RECOVERING: build_recovering(),
    JobPhase.SUSPENDED: build_suspended(pods=False),
    JobPhase.COMPLETE: build_ended(completed_at=NOW - 4),
    JobPhase.FAILED: build_ended(failed_reason="RestartBudgetSpent", failed_message="no restart is left"),
}
TRUE_CONDITIONS = {
    JobPhase.RUNNING: JobCondition.RUNNING,
    JobPhase.RECOVERING: JobCondition.RECOVERING,
    JobPhase.SUSPENDED: JobCondition.SUSPENDED,
    JobPhase.COMPLETE: JobCondition.COMPLETE,
    JobPhase.FAILED: JobCondition.FAILED,
}
"""The condition that is true in a phase, of those for the phase: one at most."""
WHY_NOT_RUNNING = {
    JobPhase.PENDING: Reason.WAITING_FOR_PODS,
    JobPhase.STARTING: Reason.WAITING_FOR_PODS,
    JobPhase.RECOVERING: Reason.INCIDENT_OPEN,
    JobPhase.SUSPENDED: Reason.SUSPENDED,
    JobPhase.COMPLETE: Reason.RANKS_FINISHED,
    JobPhase.FAILED: Reason.RESTART_BUDGET_SPENT,
}


class TestPhases:
    @pytest.mark.parametrize("phase", OBSERVATIONS)
    def test_one_condition_is_true_and_determines_the_message(self, phase: JobPhase) -> None:
        status = build_status(OBSERVATIONS[phase])
        assert status.phase is phase
        expected = TRUE_CONDITIONS.get(phase)
        assert status.message, "kubectl get -o wide shows it"
        true_conditions = [name for name in TRUE_CONDITIONS.values() if find_condition(status, name).status == "True"]
        assert true_conditions == ([] if expected is None else [expected])
        main_condition = find_condition(status, expected or JobCondition.RUNNING)
        assert (status.reason, status.message) == (main_condition.reason, main_condition.message)

    @pytest.mark.parametrize("phase", WHY_NOT_RUNNING)
    def test_the_reason_of_a_job_that_does_not_train(self, phase: JobPhase) -> None:
        assert find_condition(build_status(OBSERVATIONS[phase]), JobCondition.RUNNING).reason == WHY_NOT_RUNNING[phase]

    @pytest.mark.parametrize("phase", OBSERVATIONS)
    def test_training_metrics_are_reported_while_the_job_trains(self, phase: JobPhase) -> None:
        slow = JobMetrics(step_seconds=0.1, slowdown=1.4, relative_time=1.3, slowest_rank=2)
        status = build_status(replace(OBSERVATIONS[phase], metrics=slow))
        running = phase is JobPhase.RUNNING
        assert status.slowdown == (1.4 if running else None)
        assert status.bottleneck == ("rank 2 on j-w2-0" if running else None)

    @pytest.mark.parametrize("phase", OBSERVATIONS)
    def test_start_and_completion_time(self, phase: JobPhase) -> None:
        status = build_status(OBSERVATIONS[phase])
        assert status.start_time == (None if phase is JobPhase.PENDING else NOW - 400)
        ended = {JobPhase.COMPLETE: NOW - 4, JobPhase.FAILED: NOW - 5}
        assert status.completion_time == ended.get(phase)

    def test_failure_precedes_completion_and_both_precede_suspension(self) -> None:
        failed_and_completed = build_ended(completed_at=NOW - 4, failed_reason="ScriptFailed")
        assert build_status(failed_and_completed).phase is JobPhase.FAILED
        suspended = replace(build_ended(completed_at=NOW - 4), job=build_job(suspend=True))
        assert build_status(suspended).phase is JobPhase.COMPLETE

    def test_a_job_is_suspended_from_the_request_until_it_resumes(self) -> None:
        assert build_status(replace(build_training(), job=build_job(suspend=True))).phase is JobPhase.SUSPENDED
        assert build_status(replace(build_suspended(pods=True), job=build_job())).phase is JobPhase.SUSPENDED

    def test_the_condition_suspended_waits_for_the_last_worker(self) -> None:
        leaving = find_condition(build_status(build_suspended(pods=True)), JobCondition.SUSPENDED)
        assert (leaving.status, leaving.message) == ("False", "spec.suspend is true; 5 workers are leaving")
        assert (
            find_condition(build_status(build_suspended(pods=False)), JobCondition.SUSPENDED).message
            == "spec.suspend is true"
        )
        assert find_condition(build_status(build_training()), JobCondition.SUSPENDED).message == ""

    def test_a_failure_of_unknown_reason_is_reported(self) -> None:
        status = build_status(build_ended(failed_reason="Unknown", failed_message="of"))
        assert (status.reason, status.message) == (Reason.JOB_FAILED, "of")


class TestBefore:
    def test_values_that_are_not_reported_now_stay(self) -> None:
        before = JobStatus(step=400, last_checkpoint_step=390, round=3)
        silent = replace(
            build_training(), workers=tuple(replace(view, heartbeat=None) for view in build_training().workers)
        )
        status = build_status(silent, before)
        assert (status.step, status.last_checkpoint_step, status.round) == (400, 390, 1)
        assert build_status(build_fresh(), before).round == 3
        zero = change_members(build_training(), progress={"step": 0}, checkpoint={"step": 0})
        assert (build_status(zero, before).step, build_status(zero, before).last_checkpoint_step) == (0, 0)

    def test_the_goodput_of_a_job_that_has_ended_stays(self) -> None:
        before = JobStatus(goodput=0.7)
        assert build_status(build_ended(completed_at=NOW), before).goodput == 0.7
        assert build_status(build_ended(failed_reason="ScriptFailed"), before).goodput == 0.7
        assert build_status(build_training(), before).goodput == 1.0

    def test_before_the_first_step_there_is_no_goodput(self) -> None:
        assert build_status(build_starting()).goodput is None

    def test_the_goodput_at_the_first_step_is_one(self) -> None:
        observation = build_training()
        assert (
            build_status(observation.with_desired(observation.desired.with_lifecycle(training_since=NOW))).goodput
            == 1.0
        )

    def test_an_open_incident_reduces_goodput_while_the_job_is_stalled(self) -> None:
        observation = build_recovering()
        (incident,) = observation.state.incidents.open
        later = replace(observation, now=NOW + 30)
        assert build_status(later).goodput == pytest.approx(1 - (NOW + 30 - incident.first_sign) / 330)
        live = later.with_desired(later.desired.with_incident(replace(incident, live=True)))
        assert build_status(live).goodput == 1.0, "it trains on"

    def test_a_young_operator_reports_an_incident_or_the_end(self) -> None:
        before = build_status(build_training())
        silent = tuple(replace(view, heartbeat=None) for view in build_training().workers)
        young = replace(build_recovering(), operator_age=1.0, workers=silent)
        assert build_status(young, before).phase is JobPhase.RECOVERING
        completed = replace(build_ended(completed_at=NOW), operator_age=1.0, workers=silent)
        assert build_status(completed, before).phase is JobPhase.COMPLETE


class TestUnreadable:
    def test_the_status_stays_except_for_the_blocked_action(self) -> None:
        before = build_status(build_training())
        status = build_unreadable_status(before, 1, "delete it", NOW + 9)
        assert status.phase is JobPhase.RUNNING
        blocked = find_condition(status, JobCondition.ACTION_BLOCKED)
        assert (blocked.status, blocked.message, blocked.last_transition_time) == ("True", "delete it", NOW + 9)
        others = [condition for condition in before.conditions if condition.type != JobCondition.ACTION_BLOCKED]
        assert list(status.conditions) == [*others, blocked]

    def test_a_job_without_a_status_is_pending(self) -> None:
        assert build_unreadable_status(JobStatus(), 1, "delete it", NOW).phase is JobPhase.PENDING


class TestWaiting:
    def find_running(self, observation: Observation) -> ConditionStatus:
        return find_condition(build_status(observation), JobCondition.RUNNING)

    def test_waiting_for_an_image(self) -> None:
        observation = evaluate_job(build_fresh(), build_policy()).observation
        observation = with_pods(observation)
        observation = change_worker(
            observation, "j-w1-0", pod={"waiting_reason": "ErrImagePull", "waiting_message": "not there"}
        )
        running = self.find_running(observation)
        assert (running.status, running.reason) == ("False", Reason.IMAGE_PULL_FAILED)
        assert running.message == "worker j-w1-0: ErrImagePull: not there"

    def test_waiting_for_a_checkpoint_folder_of_another_job(self) -> None:
        checkpoint = CheckpointSpec(volume_claim_name="claim", sub_path="shared")
        observation = build_fresh(job=build_job(2, 1, checkpoint=checkpoint))
        in_use = replace(observation, cluster_view=replace(observation.cluster_view, folder_owner="first"))
        running = self.find_running(in_use)
        assert (running.status, running.reason) == ("False", Reason.FOLDER_IN_USE)
        for part in ("job first", "claim claim/shared", "spec.checkpoint.subPath", "spec.checkpoint.adopt: first"):
            assert part in running.message
        assert find_condition(build_status(in_use), JobCondition.RECONCILING).reason == Reason.FOLDER_IN_USE
        assert not evaluate_job(in_use, build_policy()).desired.state.placement.workers, (
            "no pod is created, so the folder is unchanged"
        )
        assert evaluate_job(observation, build_policy()).desired.state.placement.workers
        started = evaluate_job(observation, build_policy()).observation
        continuing = replace(started, cluster_view=in_use.cluster_view)
        assert (
            evaluate_job(continuing, build_policy()).desired.state.placement.workers == started.state.placement.workers
        )
        assert self.find_running(continuing).reason != Reason.FOLDER_IN_USE

    def test_waiting_for_the_next_placing_attempt(self) -> None:
        observation = build_fresh()
        failed = observation.with_desired(observation.desired.with_placement(attempts=2))
        running = self.find_running(failed)
        assert (running.status, running.reason) == ("False", Reason.SCHEDULING_TIMEOUT)
        assert running.message.endswith("(attempt 2); the next attempt comes shortly")
        after_older_job = replace(failed, cluster_view=replace(failed.cluster_view, older_waiting_job="elder"))
        assert self.find_running(after_older_job).message.endswith("the next attempt comes after elder, which is older")
        under_way = failed.with_desired(failed.desired.with_placement(placing_since=NOW - 1))
        assert self.find_running(under_way).reason == Reason.WAITING_FOR_PODS
        assert self.find_running(observation).reason == Reason.WAITING_FOR_PODS

    @pytest.mark.parametrize(
        ("blocked_action", "reason"),
        [
            (BlockedAction("create j-w0-0", "quota", is_pod_creation=True), Reason.POD_DENIED),
            (BlockedAction("template", "quota"), Reason.POD_DENIED),
            (BlockedAction("write incident", "quota"), Reason.WAITING_FOR_PODS),
        ],
    )
    def test_waiting_for_permission_to_create_pods(self, blocked_action: BlockedAction, reason: Reason) -> None:
        running = self.find_running(replace(build_fresh(), blocked_actions=(blocked_action,)))
        assert (running.status, running.reason) == ("False", reason)

    def test_waiting_for_pods(self) -> None:
        running = self.find_running(build_fresh())
        assert (running.status, running.message) == ("False", "0 of 2 workers are ready")


class TestActionBlocked:
    def test_three_blocked_actions_are_listed_and_more_are_counted(self) -> None:
        blocked_actions = tuple(BlockedAction(f"thing {n}", "no") for n in range(5))

        def find_message(count: int) -> str:
            return find_condition(
                build_status(replace(build_training(), blocked_actions=blocked_actions[:count])),
                JobCondition.ACTION_BLOCKED,
            ).message

        assert find_message(0) == ""
        assert find_message(3) == "thing 0: no; thing 1: no; thing 2: no"
        assert find_message(5) == "thing 0: no; thing 1: no; thing 2: no; and 2 more"


def build_shrunk() -> Observation:
    return build_training(4, 1, job=build_job(5, 1))


def build_local_sgd() -> Observation:
    observation = build_training()
    choice = LocalSgdChoice(NOW - 60, Bottleneck.COMMUNICATION, "the link is slow", "i")
    return observation.with_desired(observation.desired.with_adaptation(local_sgd=choice))


def build_measured(**metrics: Any) -> Observation:
    return replace(build_training(), metrics=JobMetrics(step_seconds=0.1, **metrics))


class TestDegraded:
    def find_degraded(self, observation: Observation, **policy: Any) -> ConditionStatus:
        return find_condition(build_status(observation, **policy), JobCondition.DEGRADED)

    def test_fewer_workers_are_explained(self) -> None:
        assert self.find_degraded(build_shrunk()).message == "4 of 5 workers train, until others have started"
        unschedulable = change_worker(build_shrunk(), "j-w4-0", pod={"unschedulable_message": "0/6 nodes"})
        assert (
            self.find_degraded(unschedulable).message
            == "4 of 5 workers train, for lack of nodes; worker j-w4-0 cannot be scheduled: 0/6 nodes"
        )

    @pytest.mark.parametrize(
        ("pod", "message"),
        [
            (
                {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "s" not found'},
                'worker j-w4-0 cannot start: CreateContainerConfigError: secret "s" not found',
            ),
            ({"unschedulable_message": "0/6 nodes"}, "worker j-w4-0 cannot be scheduled: 0/6 nodes"),
            ({}, "worker j-w4-0 is on node-4, and has not started for more than 300 s: kubectl describe pod j-w4-0"),
        ],
    )
    def test_a_spare_that_cannot_start_is_not_counted_and_is_explained(self, pod: dict[str, Any], message: str) -> None:
        unstarted = {"phase": "Pending", "created_at": NOW - 301}
        observation = change_worker(build_training(), "j-w4-0", pod=unstarted | pod)
        degraded = self.find_degraded(observation)
        assert (degraded.reason, degraded.message[: len(message)]) == (Reason.WORKER_CANNOT_START, message)
        assert build_status(observation).workers.spare == 0
        vacant = change_members(observation, start={"first_step_at": None})
        assert message in (build_status(vacant).message or ""), "the message also appears while the others wait for it"

    def test_a_claim_that_other_nodes_may_not_mount_is_named(self) -> None:
        job = build_job(checkpoint=CheckpointSpec(volume_claim_name="data"))
        waiting = change_worker(build_training(job=job), "j-w4-0", pod={"phase": "Pending", "created_at": NOW - 301})
        assert "ReadWriteOnce" not in (self.find_degraded(waiting).message or ""), "no worker has started elsewhere"
        message = self.find_degraded(change_worker(waiting, "j-w0-0", pod={"started": True})).message or ""
        assert "If claim data has access mode ReadWriteOnce" in message
        assert "set spec.checkpoint.accessMode to ReadWriteOnce, or use a claim with ReadWriteMany" in message

    def test_a_single_rank_has_no_slow_communication(self) -> None:
        single_rank = replace(build_training(1, 0), metrics=JobMetrics(uniform_slowdown=2.0, wait_share=0.6))
        assert self.find_degraded(single_rank).reason == Reason.ALL_RANKS_SLOW

    @pytest.mark.parametrize(
        ("observation", "reason"),
        [
            (build_shrunk(), Reason.FEWER_REPLICAS),
            (build_local_sgd(), Reason.LOCAL_SGD_ACTIVE),
            (build_measured(relative_time=1.1, slowest_rank=2), Reason.STRAGGLER),
            (build_measured(uniform_slowdown=MIN_UNIFORM_SLOWDOWN), Reason.ALL_RANKS_SLOW),
            (build_measured(uniform_slowdown=2.0, wait_share=0.1), Reason.ALL_RANKS_SLOW),
            (build_measured(uniform_slowdown=2.0, wait_share=0.6), Reason.SLOW_COMMUNICATION),
            (build_training(spares=0, job=build_job(4, 1)), Reason.NO_SPARE),
        ],
    )
    def test_the_reason_is_what_slows_or_endangers_the_job(self, observation: Observation, reason: Reason) -> None:
        degraded = self.find_degraded(observation)
        assert (degraded.status, degraded.reason) == ("True", reason)

    @pytest.mark.parametrize(
        "observation",
        [
            build_training(),
            build_training(spares=0, job=build_job(4, 0)),
            build_measured(relative_time=1.09, slowest_rank=2),
            build_measured(uniform_slowdown=1.19),
        ],
    )
    def test_a_healthy_job_is_not_degraded(self, observation: Observation) -> None:
        assert (self.find_degraded(observation).status, self.find_degraded(observation).reason) == (
            "False",
            Reason.HEALTHY,
        )

    def test_a_pause_and_a_breaker_are_reported_in_any_phase(self) -> None:
        observation = replace(build_recovering(), metrics=JobMetrics(relative_time=2.0, slowest_rank=2))
        assert (self.find_degraded(observation).status, self.find_degraded(observation).reason) == (
            "False",
            Reason.HEALTHY,
        )
        paused = self.find_degraded(observation, paused="maintenance")
        assert (paused.status, paused.reason) == ("True", Reason.PAUSED)
        (incident,) = observation.state.incidents.open
        tripped = observation.with_desired(
            observation.desired.with_incident(replace(incident, verdict=QuarantineVerdict.BREAKER))
        )
        degraded = self.find_degraded(tripped, paused="maintenance")
        assert (degraded.status, degraded.reason) == ("True", Reason.QUARANTINE_BREAKER)

    def test_a_bottleneck_is_reported_from_the_straggler_threshold(self) -> None:
        assert build_status(build_measured(relative_time=1.1, slowest_rank=2)).bottleneck == "rank 2 on j-w2-0"
        assert build_status(build_measured(relative_time=1.09, slowest_rank=2)).bottleneck is None
        assert build_status(build_measured(relative_time=1.1)).bottleneck is None
        assert build_status(build_measured(slowest_rank=2)).bottleneck is None

    def test_the_rank_of_a_failed_checkpoint_is_named_if_known(self) -> None:
        def find_message(**checkpoint: Any) -> str:
            heartbeat = {"checkpoint": {"error": "no space", **checkpoint}}
            return self.find_degraded(
                change_worker(change_members(build_training(), checkpoint={"step": 0}), "j-w0-0", heartbeat=heartbeat)
            ).message

        assert find_message(failed_rank=0).startswith("rank 0 could not save")
        assert find_message(failed_rank=None).startswith("a rank could not save")
        assert find_message(age_seconds=0.0).endswith("the newest good one is of step 0, less than a minute old")
        assert find_message(age_seconds=60.0).endswith("of step 0, 1 min old")
        assert find_message(age_seconds=None).endswith("the newest good one is of step 0")

    def test_a_loss_that_is_not_finite_on_the_first_rank(self) -> None:
        observation = change_worker(build_training(), "j-w0-0", heartbeat={"training": {"bad_loss": BadLoss(0, 3)}})
        assert self.find_degraded(observation).reason == Reason.NON_FINITE_LOSS


class TestMetrics:
    @pytest.mark.parametrize(
        ("unavailable", "reason"),
        [
            ("Prometheus is not configured", Reason.PROMETHEUS_NOT_CONFIGURED),
            ("Prometheus does not answer", Reason.PROMETHEUS_UNAVAILABLE),
            (PROMETHEUS_NOT_QUERIED, Reason.PROMETHEUS_UNAVAILABLE),
            ("", Reason.PROMETHEUS_AVAILABLE),
        ],
    )
    def test_missing_metrics_are_explained(self, unavailable: str, reason: Reason) -> None:
        observation = replace(build_training(), metrics=JobMetrics(prometheus_error=unavailable))
        assert find_condition(build_status(observation), JobCondition.METRICS_AVAILABLE).reason == reason

    def test_denied_access_differs_from_unavailable(self) -> None:
        message = "Prometheus at x refuses the operator (HTTP 401): check token"
        found = find_condition(
            build_status(
                replace(build_training(), metrics=JobMetrics(prometheus_error=message, prometheus_denied=True))
            ),
            JobCondition.METRICS_AVAILABLE,
        )
        assert (found.status, found.reason) == ("False", Reason.PROMETHEUS_ACCESS_DENIED)
        assert found.message.startswith(message)

    def test_missing_metrics_of_sidecars_are_explained_by_their_version(self) -> None:
        def find_metrics_condition(**changes: Any) -> ConditionStatus:
            observation = replace(build_training(), metrics=JobMetrics(unreported_members=("j-w1-0",)))
            return find_condition(
                build_status(change_worker(observation, "j-w1-0", **changes)), JobCondition.METRICS_AVAILABLE
            )

        assert (find_metrics_condition().status, find_metrics_condition().reason) == ("False", Reason.METRICS_MISSING)
        assert find_metrics_condition().message.startswith("the sidecars of j-w1-0 are older than the operator")
        assert find_metrics_condition(heartbeat={"progress": {"steps_in_round": 0}}).status == "True", (
            "there are no metrics yet"
        )
        assert find_metrics_condition(silent_seconds=60.0).status == "True", (
            "a silent worker is reported by another condition"
        )


class TestPaths:
    """Ranks 0 and 1 send to each other over planned routes."""

    def build_condition(self, *reports: PathReport, membership: int = 1) -> ConditionStatus:
        observation = build_training(2, 0)
        planned = (PlannedPath(0, 1, "s1"), PlannedPath(1, 0, "s2"))
        paths = Paths(planned, (Hop("10.0.0.1", "s1"), Hop("10.0.0.2", "s2")))
        observation = observation.with_desired(observation.desired.with_plan(paths=paths))
        for report in reports:
            heartbeat = {"paths": (report,), "membership": membership}
            observation = change_worker(observation, f"j-w{report.source}-0", heartbeat=heartbeat)
        return find_condition(build_status(observation), JobCondition.PATHS_IN_FORCE)

    def test_all_flows_follow_their_routes(self) -> None:
        found = self.build_condition(PathReport(0, 1, in_force=True), PathReport(1, 0, in_force=True))
        assert (found.status, found.reason, found.message) == ("True", Reason.ALL_FLOWS_ON_ROUTE, "2 flows")

    @pytest.mark.parametrize("fault", [fault for fault in PathFault if fault is not PathFault.NONE])
    def test_each_fault_is_explained(self, fault: PathFault) -> None:
        found = self.build_condition(PathReport(0, 1, in_force=True), PathReport(1, 0, fault=fault))
        assert (found.status, found.reason) == ("False", Reason.ROUTED_BY_NETWORK)
        assert found.message.startswith(f"1 of 2 flows do not follow their planned paths: {fault} (1): ")

    def test_missing_reports_are_unknown(self) -> None:
        for reports in ((), (PathReport(0, 1, in_force=True),), (PathReport(0, 1), PathReport(1, 0, in_force=True))):
            found = self.build_condition(*reports)
            assert (found.status, found.reason) == ("Unknown", Reason.NOT_REPORTED)

    def test_reports_of_another_membership_or_unplanned_flows_are_ignored(self) -> None:
        both = PathReport(0, 1, in_force=True), PathReport(1, 0, in_force=True)
        assert self.build_condition(*both, membership=7).status == "Unknown"
        assert self.build_condition(both[0], PathReport(1, 7, fault=PathFault.FILTERED)).status == "Unknown"

    def test_a_job_without_planned_paths_has_no_such_condition(self) -> None:
        assert JobCondition.PATHS_IN_FORCE not in {found.type for found in build_status(build_training()).conditions}
