"""The status of a job: phase, conditions, and metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import BadLoss
from pacekeeper_operator.api.conditions import ConditionStatus, JobCondition, Reason
from pacekeeper_operator.api.node_quarantine import QuarantineVerdict
from pacekeeper_operator.api.training_job import JobPhase, JobStatus
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.decide.lifecycle.status import (
    MAX_JOB_MESSAGE_CHARACTERS,
    READY_WHILE_RECOVERING_SECONDS,
    build_job_status,
)
from pacekeeper_operator.decide.stragglers.pricing import (
    build_replace_lost_option,
    build_restart_option,
)
from pacekeeper_operator.state.effect_results import BlockedAction
from pacekeeper_operator.state.job_metrics import PROMETHEUS_NOT_QUERIED, JobMetrics
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.restart_estimates import COLD_SPARE_SECONDS
from testing.operators.observations import (
    NOW,
    build_fresh,
    build_job,
    build_policy,
    build_stalls,
    build_training,
    change_members,
    change_worker,
    list_decisions,
    with_pods,
)


def map_conditions(
    observation: Observation, before: JobStatus | None = None, **policy: object
) -> dict[str, ConditionStatus]:
    return {
        condition.type: condition
        for condition in build_job_status(observation, build_policy(**policy), before or JobStatus()).conditions
    }


def test_the_status_of_a_training_job() -> None:
    status = build_job_status(build_training(), build_policy(), JobStatus())
    assert (status.phase, status.round, status.step, status.last_checkpoint_step) == (JobPhase.RUNNING, 1, 500, 490)
    assert status.workers.summary == "4/4+1"
    assert status.goodput == 1.0
    assert map_conditions(build_training())[JobCondition.RUNNING].status == "True"
    assert map_conditions(build_training())[JobCondition.DEGRADED].status == "False"


def test_a_waiting_job_states_the_reason() -> None:
    start = build_fresh()
    observation = with_pods(start.with_desired(evaluate_job(start, build_policy()).desired), placed=False)
    observation = change_worker(
        observation, "j-w0-0", pod={"unschedulable_message": "0/6 nodes are available: Insufficient cpu"}
    )
    running = map_conditions(observation)[JobCondition.RUNNING]
    assert running.reason == Reason.WAITING_FOR_PODS
    assert "Insufficient cpu" in running.message


def test_an_open_incident_is_a_recovery() -> None:
    observation = build_training()
    result = evaluate_job(replace(observation, faults=build_stalls(observation, culprit=2)), build_policy())
    status = build_job_status(result.observation, build_policy(), JobStatus())
    assert status.phase is JobPhase.RECOVERING
    assert "rank 2" in (status.message or "")


def test_times_of_transition_stay_while_nothing_changes() -> None:
    before = build_job_status(build_training(), build_policy(), JobStatus())
    later = build_job_status(replace(build_training(), now=NOW + 60), build_policy(), before)
    assert [condition.last_transition_time for condition in later.conditions] == [NOW] * len(later.conditions)
    stopped = build_training(job=build_job(4, 1, suspend=True))
    stopped = replace(stopped.with_desired(stopped.desired.with_plan(stop=Stop.SUSPEND)), now=NOW + 60, workers=())
    changed = {
        condition.type: condition.last_transition_time
        for condition in build_job_status(stopped, build_policy(), before).conditions
    }
    assert changed[JobCondition.SUSPENDED] == changed[JobCondition.RUNNING] == NOW + 60
    assert changed[JobCondition.FAILED] == NOW


def test_a_uniform_slowdown_is_reported_without_an_action() -> None:
    observation = replace(
        build_training(), metrics=JobMetrics(step_seconds=0.2, relative_time=1.02, slowdown=1.0, uniform_slowdown=2.0)
    )
    degraded = map_conditions(observation)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.ALL_RANKS_SLOW)
    assert "2.00 ×" in degraded.message
    assert not list_decisions(evaluate_job(observation, build_policy()))


def test_a_straggler_is_not_a_uniform_slowdown() -> None:
    observation = replace(
        build_training(),
        metrics=JobMetrics(step_seconds=0.2, relative_time=2.0, slowdown=1.6, uniform_slowdown=2.0, slowest_rank=3),
    )
    assert map_conditions(observation)[JobCondition.DEGRADED].reason == Reason.STRAGGLER


@pytest.mark.parametrize(
    ("unavailable", "status"),
    [("", "True"), ("Prometheus at x does not answer", "False"), (PROMETHEUS_NOT_QUERIED, "Unknown")],
)
def test_the_condition_of_metrics_follows_prometheus(unavailable: str, status: str) -> None:
    observation = replace(build_training(), metrics=JobMetrics(prometheus_error=unavailable))
    assert map_conditions(observation)[JobCondition.METRICS_AVAILABLE].status == status


def test_a_pause_is_reported() -> None:
    degraded = map_conditions(build_training(), paused="remedies are paused: maintenance")[JobCondition.DEGRADED]
    assert (degraded.reason, degraded.message) == (Reason.PAUSED, "remedies are paused: maintenance")


def test_a_young_operator_keeps_the_phase_until_workers_report() -> None:
    before = build_job_status(build_training(), build_policy(), JobStatus())
    observation = replace(build_training(), operator_age=1.0)
    for view in observation.members:
        observation = change_worker(observation, view.name, heartbeat=None)
    unreported = replace(observation, workers=tuple(replace(view, heartbeat=None) for view in observation.workers))
    assert build_job_status(unreported, build_policy(), before).phase is JobPhase.RUNNING
    assert build_job_status(replace(unreported, operator_age=60.0), build_policy(), before).phase is JobPhase.RECOVERING


def test_the_status_stays_until_all_members_have_reported_to_a_new_operator() -> None:
    """Otherwise the status would be written four times, once for each worker that reports, without a change."""
    before = build_job_status(build_training(), build_policy(), JobStatus())
    reported = replace(build_training(), operator_age=1.0, metrics=JobMetrics(prometheus_error=PROMETHEUS_NOT_QUERIED))
    first, *others = reported.workers
    observation = replace(reported, workers=(replace(first, heartbeat=None), *others))
    assert build_job_status(observation, build_policy(paused="not known yet"), before) == before
    assert build_job_status(reported, build_policy(), before) != before
    assert build_job_status(observation, build_policy(), JobStatus()) != JobStatus(), "there is no earlier status"
    changed = replace(observation, job=replace(observation.job, generation=observation.job.generation + 1))
    assert build_job_status(changed, build_policy(), before).observed_generation == changed.job.generation
    blocked = build_job_status(
        observation.with_blocked_actions((BlockedAction("bookkeeping", "too old"),)), build_policy(), before
    )
    assert (
        "too old"
        in {condition.type: condition.message for condition in blocked.conditions}[JobCondition.ACTION_BLOCKED]
    )


def test_a_missing_spare_is_reported_as_a_risk() -> None:
    observation = change_worker(build_training(), "j-w4-0", gone=True)
    assert map_conditions(observation)[JobCondition.DEGRADED].reason == Reason.NO_SPARE


def test_goodput_decreases_by_the_lost_time_of_incidents() -> None:
    observation = build_training()
    observation = observation.with_desired(observation.desired.with_budget(lost_seconds=30.0))
    assert build_job_status(observation, build_policy(), JobStatus()).goodput == pytest.approx(0.9)


def test_before_the_first_step_the_job_is_starting() -> None:
    observation = change_members(build_training(), start={"first_step_at": None})
    observation = observation.with_desired(observation.desired.with_lifecycle(training_since=None))
    assert build_job_status(observation, build_policy(), JobStatus()).phase is JobPhase.STARTING


def test_a_non_finite_loss_is_reported_with_rank_and_step() -> None:
    observation = change_worker(build_training(), "j-w2-0", heartbeat={"training": {"bad_loss": BadLoss(2, 417)}})
    degraded = map_conditions(observation)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.NON_FINITE_LOSS)
    assert all(part in degraded.message for part in ("rank 2 on j-w2-0", "step 417", "suspend"))


def test_a_refused_plan_is_reported_with_the_message_of_the_ranks() -> None:
    observation = change_worker(
        build_training(), "j-w0-0", heartbeat={"training": {"refused": "shares sum to 33, not 32"}}
    )
    degraded = map_conditions(observation)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.PLAN_REFUSED)
    assert "shares sum to 33, not 32" in degraded.message


def test_a_failing_checkpoint_is_reported_with_rank_path_reason_and_last_age() -> None:
    error = "/checkpoints/step-500: No space left on device"
    heartbeat = {"checkpoint": {"age_seconds": 725.0, "failed_rank": 3, "error": error}}
    observation = change_worker(build_training(), "j-w0-0", heartbeat=heartbeat)
    status = build_job_status(observation, build_policy(), JobStatus())
    degraded = {condition.type: condition for condition in status.conditions}[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.CHECKPOINT_FAILING)
    for part in ("rank 3", "/checkpoints/step-500", "No space left on device", "step 490", "12 min old"):
        assert part in degraded.message
    assert status.phase is JobPhase.RUNNING, "it trains on"
    assert not list_decisions(evaluate_job(observation, build_policy()))


def test_a_failing_checkpoint_is_reported_during_the_recovery() -> None:
    observation = build_training()
    failing = change_members(observation, checkpoint={"error": "/checkpoints belongs to team/other by now"})
    result = evaluate_job(replace(failing, faults=build_stalls(failing, culprit=2)), build_policy())
    assert build_job_status(result.observation, build_policy(), JobStatus()).phase is JobPhase.RECOVERING
    degraded = map_conditions(result.observation)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.CHECKPOINT_FAILING)
    assert "team/other" in degraded.message


def test_the_status_contains_the_checkpoint_path_on_the_claim() -> None:
    assert build_job_status(build_training(), build_policy(), JobStatus()).checkpoint_sub_path == "j"


def test_a_checkpoint_that_fails_before_any_was_published() -> None:
    heartbeat = {"checkpoint": {"failed_rank": 0, "error": "/checkpoints: Read-only file system"}}
    observation = change_worker(
        change_members(build_training(), checkpoint={"step": None}), "j-w0-0", heartbeat=heartbeat
    )
    assert "there is none" in map_conditions(observation)[JobCondition.DEGRADED].message


class TestRestartCost:
    def test_the_restart_cost_grows_while_checkpoints_fail(self) -> None:
        costs = [
            change_members(build_training(), progress={"step": step}).restarts.estimate_cost()
            for step in (500, 600, 1500)
        ]
        assert costs == pytest.approx([5 + 1, 5 + 11, 5 + 101])

    def test_without_a_step_time_the_age_of_the_newest_checkpoint_counts(self) -> None:
        observation = change_worker(
            build_training(metrics=JobMetrics()), "j-w0-0", heartbeat={"checkpoint": {"age_seconds": 725.0}}
        )
        assert observation.restarts.estimate_cost() == pytest.approx(5 + 725)
        assert change_members(observation, checkpoint={"snapshot_step": 499}).restarts.estimate_cost() == pytest.approx(
            5
        ), "a snapshot is younger"

    def test_a_lost_worker_loses_its_snapshot_in_memory(self) -> None:
        observation = change_members(build_training(), progress={"step": 600}, checkpoint={"snapshot_step": 599})
        assert build_restart_option(observation, build_policy()).cost_seconds == pytest.approx(5 + 0.1)
        assert build_replace_lost_option(observation, build_policy()).cost_seconds == pytest.approx(
            5 + 11 + COLD_SPARE_SECONDS
        )


def test_a_tripped_breaker_is_reported_by_its_verdict_not_by_words_in_evidence() -> None:
    result = evaluate_job(change_worker(build_training(), "j-w1-0", gone=True), build_policy())
    (incident,) = result.desired.state.incidents.current
    misleading = replace(incident, evidence=("ValueError: the breaker has tripped",))
    observation = result.observation.with_desired(result.desired.with_incident(misleading))
    assert map_conditions(observation)[JobCondition.DEGRADED].reason != Reason.QUARANTINE_BREAKER
    tripped = replace(
        incident, verdict=QuarantineVerdict.BREAKER, quarantine_summary="node-1 is untouched: 3 nodes at once"
    )
    observation = result.observation.with_desired(result.desired.with_incident(tripped))
    degraded = map_conditions(observation)[JobCondition.DEGRADED]
    assert (degraded.reason, degraded.message) == (Reason.QUARANTINE_BREAKER, tripped.quarantine_summary)


def test_unreachable_workers_are_reported_while_they_train() -> None:
    observation = build_training()
    for view in observation.members[:3]:
        observation = change_worker(observation, view.name, reachable=False, silent_seconds=60.0)
    degraded = map_conditions(observation)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.WORKERS_UNREACHABLE)
    assert "j-w0-0, j-w1-0, j-w2-0" in degraded.message


@pytest.mark.parametrize("letters", [10, 100_000])
def test_no_message_is_longer_than_a_condition_may_be(letters: int) -> None:
    result = evaluate_job(replace(build_training(), faults=build_stalls(build_training(), culprit=2)), build_policy())
    (incident,) = result.desired.state.incidents.current
    desired = result.desired.with_incident(replace(incident, message="x" * letters))
    desired = desired.with_placement(template_rejected=1, rejection="y" * letters)
    observation = replace(
        result.observation.with_desired(desired),
        blocked_actions=tuple(BlockedAction("create a", "z" * letters) for _ in range(9)),
    )
    for condition in build_job_status(observation, build_policy(), JobStatus()).conditions:
        assert len(condition.message) <= MAX_JOB_MESSAGE_CHARACTERS


def with_desired_part(observation: Observation, part: str, **changes: object) -> Observation:
    return observation.with_desired(getattr(observation.desired, f"with_{part}")(**changes))


class TestKstatus:
    """What tools such as Helm 4 and `kubectl wait` conclude by the rules of kstatus (sigs.k8s.io/cli-utils)."""

    SUSPENDED = build_job(4, 1, suspend=True)

    @pytest.mark.parametrize(
        ("observation", "verdict", "reason"),
        [
            (build_training(), "Current", Reason.TRAINING),
            (build_training(job=build_job(6, 0)), "InProgress", Reason.REPLICAS_DIFFER),
            (build_training(job=build_job(6, 0, min_replicas=2)), "Current", Reason.TRAINING),
            (build_training(job=build_job(2, 0)), "InProgress", Reason.REPLICAS_DIFFER),
            (build_fresh(), "InProgress", Reason.WAITING_FOR_PODS),
            (
                with_desired_part(build_fresh(), "placement", template_rejected=1, rejection="no"),
                "Failed",
                Reason.POD_REFUSED,
            ),
            (with_desired_part(build_training(), "placement", template_rejected=1), "Current", Reason.TRAINING),
            (with_desired_part(build_training(), "lifecycle", completed_at=NOW), "Current", Reason.RANKS_FINISHED),
            (
                with_desired_part(build_training(), "lifecycle", failed_reason="ScriptFailed"),
                "Failed",
                Reason.SCRIPT_FAILED,
            ),
            (replace(build_training(job=SUSPENDED), workers=()), "Current", Reason.SUSPENDED),
            (build_training(job=SUSPENDED), "InProgress", Reason.SUSPENDED),
            (with_desired_part(build_training(), "plan", stop=Stop.SUSPEND), "InProgress", Reason.RESUMED),
        ],
    )
    def test_exactly_one_of_three_conditions_is_true(
        self, observation: Observation, verdict: str, reason: Reason
    ) -> None:
        status = build_job_status(observation, build_policy(), JobStatus(observed_generation=-1))
        assert compute_kstatus(status, generation=1) == (verdict, reason)
        assert compute_kstatus(status, generation=2) == ("InProgress", None), (
            "the operator has not seen the newest spec"
        )

    def test_a_job_that_the_operator_has_not_observed_is_in_progress(self) -> None:
        assert compute_kstatus(JobStatus(observed_generation=-1), generation=1) == ("InProgress", None)

    def test_a_short_recovery_stays_ready_and_a_long_one_does_not(self) -> None:
        observation = build_training()
        before = build_job_status(observation, build_policy(), JobStatus())
        hanging = evaluate_job(
            replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()
        ).observation
        short = build_job_status(hanging, build_policy(), before)
        assert (short.phase, compute_kstatus(short, 1)) == (JobPhase.RECOVERING, ("Current", Reason.TRAINING))
        nearly, long = (
            build_job_status(replace(hanging, now=NOW + seconds), build_policy(), short)
            for seconds in (READY_WHILE_RECOVERING_SECONDS - 1, READY_WHILE_RECOVERING_SECONDS)
        )
        assert compute_kstatus(nearly, 1) == ("Current", Reason.TRAINING)
        assert nearly.conditions == short.conditions, "nothing has to be written"
        assert compute_kstatus(long, 1) == ("InProgress", Reason.INCIDENT_OPEN)
        (reconciling,) = (condition for condition in long.conditions if condition.type == JobCondition.RECONCILING)
        assert "rank 2" in reconciling.message
        assert compute_kstatus(build_job_status(hanging, build_policy(), long), 1)[0] == "InProgress", (
            "until it trains again"
        )

    def test_a_job_that_was_not_ready_is_not_ready_in_a_recovery(self) -> None:
        observation = build_training()
        hanging = evaluate_job(
            replace(observation, faults=build_stalls(observation, culprit=2)), build_policy()
        ).observation
        assert compute_kstatus(build_job_status(hanging, build_policy(), JobStatus()), 1)[0] == "InProgress"


def compute_kstatus(status: JobStatus, generation: int) -> tuple[str, str | None]:
    """Return what kstatus computes, and the reason of the condition that determines it."""
    if status.observed_generation != generation:
        return "InProgress", None
    true = [condition for condition in status.conditions if condition.status == "True"]
    verdicts = {"Reconciling": "InProgress", "Stalled": "Failed", "Ready": "Current"}
    (decisive,) = (condition for condition in true if condition.type in verdicts)
    return verdicts[decisive.type], decisive.reason
