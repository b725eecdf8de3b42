"""What the operator says of a job: phase, conditions, figures."""

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
    DEFAULT_SPARE_SECONDS,
    build_replace_lost_option,
    build_restart_option,
)
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
    list_decisions,
    with_pods,
)


def conditions(world: Observation, before: JobStatus | None = None, **of_policy: object) -> dict[str, ConditionStatus]:
    return {c.type: c for c in build_job_status(world, build_policy(**of_policy), before or JobStatus()).conditions}


def test_a_training_job() -> None:
    status = build_job_status(build_training(), build_policy(), JobStatus())
    assert (status.phase, status.round, status.step, status.last_checkpoint_step) == (JobPhase.RUNNING, 1, 500, 490)
    assert status.workers.summary == "4/4+1"
    assert status.goodput == 1.0
    assert conditions(build_training())[JobCondition.RUNNING].status == "True"
    assert conditions(build_training())[JobCondition.DEGRADED].status == "False"


def test_a_job_that_waits_says_for_what() -> None:
    start = build_fresh()
    world = with_pods(start.with_desired(evaluate_job(start, build_policy()).desired), placed=False)
    world = change_worker(world, "j-w0-0", pod={"unschedulable_message": "0/6 nodes are available: Insufficient cpu"})
    running = conditions(world)[JobCondition.RUNNING]
    assert running.reason == Reason.WAITING_FOR_PODS
    assert "Insufficient cpu" in running.message


def test_an_open_incident_is_a_recovery_until_it_is_over() -> None:
    world = build_training()
    thought = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy())
    status = build_job_status(thought.observation, build_policy(), JobStatus())
    assert status.phase is JobPhase.RECOVERING
    assert "rank 2" in (status.message or "")


def test_times_of_transition_stay_while_nothing_changes() -> None:
    before = build_job_status(build_training(), build_policy(), JobStatus())
    later = build_job_status(replace(build_training(), now=NOW + 60), build_policy(), before)
    assert [c.last_transition_time for c in later.conditions] == [NOW] * len(later.conditions)
    stopped = build_training(job=build_job(4, 1, suspend=True))
    stopped = replace(stopped.with_desired(stopped.desired.with_plan(stop=Stop.SUSPEND)), now=NOW + 60, workers=())
    changed = {c.type: c.last_transition_time for c in build_job_status(stopped, build_policy(), before).conditions}
    assert changed[JobCondition.SUSPENDED] == changed[JobCondition.RUNNING] == NOW + 60
    assert changed[JobCondition.FAILED] == NOW


def test_all_slow_alike_is_said_and_nothing_is_done_about_nodes() -> None:
    world = replace(
        build_training(), metrics=JobMetrics(step_seconds=0.2, relative_time=1.02, slowdown=1.0, uniform_slowdown=2.0)
    )
    degraded = conditions(world)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.ALL_RANKS_SLOW)
    assert "2.00 ×" in degraded.message
    assert not list_decisions(evaluate_job(world, build_policy()))


def test_a_straggler_is_not_all_slow_alike() -> None:
    world = replace(
        build_training(),
        metrics=JobMetrics(step_seconds=0.2, relative_time=2.0, slowdown=1.6, uniform_slowdown=2.0, slowest_rank=3),
    )
    assert conditions(world)[JobCondition.DEGRADED].reason == Reason.STRAGGLER


@pytest.mark.parametrize(
    ("unavailable", "status"),
    [("", "True"), ("Prometheus at x does not answer", "False"), (PROMETHEUS_NOT_QUERIED, "Unknown")],
)
def test_what_prometheus_lets_see(unavailable: str, status: str) -> None:
    world = replace(build_training(), metrics=JobMetrics(prometheus_error=unavailable))
    assert conditions(world)[JobCondition.METRICS_AVAILABLE].status == status


def test_a_pause_shows() -> None:
    degraded = conditions(build_training(), paused="remedies are paused: maintenance")[JobCondition.DEGRADED]
    assert (degraded.reason, degraded.message) == (Reason.PAUSED, "remedies are paused: maintenance")


def test_a_young_operator_does_not_cry_wolf() -> None:
    before = build_job_status(build_training(), build_policy(), JobStatus())
    world = replace(build_training(), operator_age=1.0)
    for view in world.members:
        world = change_worker(world, view.name, heartbeat=None)
    unheard = replace(world, workers=tuple(replace(view, heartbeat=None) for view in world.workers))
    assert build_job_status(unheard, build_policy(), before).phase is JobPhase.RUNNING
    assert build_job_status(replace(unheard, operator_age=60.0), build_policy(), before).phase is JobPhase.RECOVERING


def test_what_was_said_stands_until_all_members_have_found_a_new_operator() -> None:
    """A status that changes with each worker that comes is written four times where nothing has happened."""
    before = build_job_status(build_training(), build_policy(), JobStatus())
    heard = replace(build_training(), operator_age=1.0, metrics=JobMetrics(prometheus_error=PROMETHEUS_NOT_QUERIED))
    first, *others = heard.workers
    world = replace(heard, workers=(replace(first, heartbeat=None), *others))
    assert build_job_status(world, build_policy(paused="not known yet"), before) == before
    assert build_job_status(heard, build_policy(), before) != before
    assert build_job_status(world, build_policy(), JobStatus()) != JobStatus(), "nothing was said before"
    changed = replace(world, job=replace(world.job, generation=world.job.generation + 1))
    assert build_job_status(changed, build_policy(), before).observed_generation == changed.job.generation
    blocked = build_job_status(
        world.with_blocked_actions((BlockedAction("bookkeeping", "too old"),)), build_policy(), before
    )
    assert "too old" in {c.type: c.message for c in blocked.conditions}[JobCondition.ACTION_BLOCKED]


def test_no_spare_left_is_a_risk_that_is_said() -> None:
    world = change_worker(build_training(), "j-w4-0", gone=True)
    assert conditions(world)[JobCondition.DEGRADED].reason == Reason.NO_SPARE


def test_goodput_falls_by_what_incidents_have_cost() -> None:
    world = build_training()
    world = world.with_desired(world.desired.with_budget(lost_seconds=30.0))
    assert build_job_status(world, build_policy(), JobStatus()).goodput == pytest.approx(0.9)


def test_before_the_first_step_it_is_starting() -> None:
    world = change_members(build_training(), start={"first_step_at": None})
    world = world.with_desired(world.desired.with_lifecycle(training_since=None))
    assert build_job_status(world, build_policy(), JobStatus()).phase is JobPhase.STARTING


def test_a_loss_that_is_not_finite_is_told_with_rank_and_step() -> None:
    world = change_worker(build_training(), "j-w2-0", heartbeat={"training": {"bad_loss": BadLoss(2, 417)}})
    degraded = conditions(world)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.NON_FINITE_LOSS)
    assert all(words in degraded.message for words in ("rank 2 on j-w2-0", "step 417", "suspend"))


def test_a_plan_that_the_ranks_refuse_is_told_in_their_words() -> None:
    world = change_worker(build_training(), "j-w0-0", heartbeat={"training": {"refused": "shares sum to 33, not 32"}})
    degraded = conditions(world)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.PLAN_REFUSED)
    assert "shares sum to 33, not 32" in degraded.message


def test_a_checkpoint_that_fails_is_told_with_rank_path_reason_and_the_age_of_the_last_good_one() -> None:
    error = "/checkpoints/step-500: No space left on device"
    told = {"checkpoint": {"age_seconds": 725.0, "failed_rank": 3, "error": error}}
    world = change_worker(build_training(), "j-w0-0", heartbeat=told)
    status = build_job_status(world, build_policy(), JobStatus())
    degraded = {c.type: c for c in status.conditions}[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.CHECKPOINT_FAILING)
    for words in ("rank 3", "/checkpoints/step-500", "No space left on device", "step 490", "12 min old"):
        assert words in degraded.message
    assert status.phase is JobPhase.RUNNING, "it trains on"
    assert not list_decisions(evaluate_job(world, build_policy()))


def test_a_round_that_ended_since_it_could_keep_no_checkpoint_says_so_until_another_can() -> None:
    world = build_training()
    over = change_members(world, checkpoint={"error": "/checkpoints belongs to team/other by now"})
    thought = evaluate_job(replace(over, faults=build_stalls(over, culprit=2)), build_policy())
    assert build_job_status(thought.observation, build_policy(), JobStatus()).phase is JobPhase.RECOVERING
    degraded = conditions(thought.observation)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.CHECKPOINT_FAILING)
    assert "team/other" in degraded.message


def test_where_its_checkpoints_lie_on_the_claim_is_told() -> None:
    assert build_job_status(build_training(), build_policy(), JobStatus()).checkpoint_sub_path == "j"


def test_a_checkpoint_that_fails_before_any_was_kept() -> None:
    told = {"checkpoint": {"failed_rank": 0, "error": "/checkpoints: Read-only file system"}}
    world = change_worker(change_members(build_training(), checkpoint={"step": None}), "j-w0-0", heartbeat=told)
    assert "there is none" in conditions(world)[JobCondition.DEGRADED].message


class TestWhatARestartCosts:
    def test_it_grows_while_checkpoints_fail(self) -> None:
        costs = [
            change_members(build_training(), progress={"step": step}).restarts.estimate_cost()
            for step in (500, 600, 1500)
        ]
        assert costs == pytest.approx([5 + 1, 5 + 11, 5 + 101])

    def test_by_the_age_of_the_newest_where_nobody_tells_the_time_of_a_step(self) -> None:
        world = change_worker(
            build_training(metrics=JobMetrics()), "j-w0-0", heartbeat={"checkpoint": {"age_seconds": 725.0}}
        )
        assert world.restarts.estimate_cost() == pytest.approx(5 + 725)
        assert change_members(world, checkpoint={"snapshot_step": 499}).restarts.estimate_cost() == pytest.approx(5), (
            "a snapshot is younger"
        )

    def test_what_a_lost_worker_held_in_memory_is_lost_with_it(self) -> None:
        world = change_members(build_training(), progress={"step": 600}, checkpoint={"snapshot_step": 599})
        assert build_restart_option(world, build_policy()).cost_seconds == pytest.approx(5 + 0.1)
        assert build_replace_lost_option(world, build_policy()).cost_seconds == pytest.approx(
            5 + 11 + DEFAULT_SPARE_SECONDS
        )


def test_a_breaker_that_holds_a_node_back_is_told_by_its_verdict_not_by_words() -> None:
    thought = evaluate_job(change_worker(build_training(), "j-w1-0", gone=True), build_policy())
    (incident,) = thought.desired.state.incidents.current
    prose = replace(incident, evidence=("ValueError: the breaker has tripped",))
    world = thought.observation.with_desired(thought.desired.with_incident(prose))
    assert conditions(world)[JobCondition.DEGRADED].reason != Reason.QUARANTINE_BREAKER
    held = replace(
        incident, verdict=QuarantineVerdict.BREAKER, quarantine_summary="node-1 is untouched: 3 nodes at once"
    )
    world = thought.observation.with_desired(thought.desired.with_incident(held))
    degraded = conditions(world)[JobCondition.DEGRADED]
    assert (degraded.reason, degraded.message) == (Reason.QUARANTINE_BREAKER, held.quarantine_summary)


def test_workers_that_the_operator_does_not_reach_are_told_while_they_train() -> None:
    world = build_training()
    for view in world.members[:3]:
        world = change_worker(world, view.name, reachable=False, silent_seconds=60.0)
    degraded = conditions(world)[JobCondition.DEGRADED]
    assert (degraded.status, degraded.reason) == ("True", Reason.WORKERS_UNREACHABLE)
    assert "j-w0-0, j-w1-0, j-w2-0" in degraded.message


@pytest.mark.parametrize("letters", [10, 100_000])
def test_no_message_is_longer_than_a_condition_may_be(letters: int) -> None:
    thought = evaluate_job(replace(build_training(), faults=build_stalls(build_training(), culprit=2)), build_policy())
    (incident,) = thought.desired.state.incidents.current
    draft = thought.desired.with_incident(replace(incident, message="x" * letters))
    draft = draft.with_placement(template_rejected=1, rejection="y" * letters)
    world = replace(
        thought.observation.with_desired(draft),
        blocked_actions=tuple(BlockedAction("create a", "z" * letters) for _ in range(9)),
    )
    for condition in build_job_status(world, build_policy(), JobStatus()).conditions:
        assert len(condition.message) <= MAX_JOB_MESSAGE_CHARACTERS


def with_draft(world: Observation, part: str, **changes: object) -> Observation:
    return world.with_desired(getattr(world.desired, f"with_{part}")(**changes))


class TestWhatToolsMakeOfAJob:
    """By kstatus' rules (sigs.k8s.io/cli-utils), as Helm 4, Argo CD's checks and `kubectl wait` use them."""

    SUSPENDED = build_job(4, 1, suspend=True)

    @pytest.mark.parametrize(
        ("world", "verdict", "reason"),
        [
            (build_training(), "Current", Reason.TRAINING),
            (build_training(job=build_job(6, 0)), "InProgress", Reason.REPLICAS_DIFFER),
            (build_training(job=build_job(6, 0, min_replicas=2)), "Current", Reason.TRAINING),
            (build_training(job=build_job(2, 0)), "InProgress", Reason.REPLICAS_DIFFER),
            (build_fresh(), "InProgress", Reason.WAITING_FOR_PODS),
            (with_draft(build_fresh(), "placement", template_rejected=1, rejection="no"), "Failed", Reason.POD_REFUSED),
            (with_draft(build_training(), "placement", template_rejected=1), "Current", Reason.TRAINING),
            (with_draft(build_training(), "lifecycle", completed_at=NOW), "Current", Reason.RANKS_FINISHED),
            (with_draft(build_training(), "lifecycle", failed_reason="ScriptFailed"), "Failed", Reason.SCRIPT_FAILED),
            (replace(build_training(job=SUSPENDED), workers=()), "Current", Reason.SUSPENDED),
            (build_training(job=SUSPENDED), "InProgress", Reason.SUSPENDED),
            (with_draft(build_training(), "plan", stop=Stop.SUSPEND), "InProgress", Reason.RESUMED),
        ],
    )
    def test_one_of_three_conditions_says_it(self, world: Observation, verdict: str, reason: Reason) -> None:
        status = build_job_status(world, build_policy(), JobStatus(observed_generation=-1))
        assert kstatus(status, generation=1) == (verdict, reason)
        assert kstatus(status, generation=2) == ("InProgress", None), "the operator has not seen the newest spec"

    def test_a_job_that_nobody_has_seen_is_in_progress(self) -> None:
        assert kstatus(JobStatus(observed_generation=-1), generation=1) == ("InProgress", None)

    def test_a_short_recovery_leaves_it_ready_and_a_long_one_does_not(self) -> None:
        world = build_training()
        before = build_job_status(world, build_policy(), JobStatus())
        hanging = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy()).observation
        short = build_job_status(hanging, build_policy(), before)
        assert (short.phase, kstatus(short, 1)) == (JobPhase.RECOVERING, ("Current", Reason.TRAINING))
        nearly, long = (
            build_job_status(replace(hanging, now=NOW + seconds), build_policy(), short)
            for seconds in (READY_WHILE_RECOVERING_SECONDS - 1, READY_WHILE_RECOVERING_SECONDS)
        )
        assert kstatus(nearly, 1) == ("Current", Reason.TRAINING)
        assert nearly.conditions == short.conditions, "nothing to be written"
        assert kstatus(long, 1) == ("InProgress", Reason.INCIDENT_OPEN)
        (reconciling,) = (c for c in long.conditions if c.type == JobCondition.RECONCILING)
        assert "rank 2" in reconciling.message
        assert kstatus(build_job_status(hanging, build_policy(), long), 1)[0] == "InProgress", "until it trains again"

    def test_a_job_that_was_not_ready_is_not_so_for_recovering(self) -> None:
        world = build_training()
        hanging = evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy()).observation
        assert kstatus(build_job_status(hanging, build_policy(), JobStatus()), 1)[0] == "InProgress"


def kstatus(status: JobStatus, generation: int) -> tuple[str, str | None]:
    """What kstatus computes, and the reason of the condition that says so."""
    if status.observed_generation != generation:
        return "InProgress", None
    true = [c for c in status.conditions if c.status == "True"]
    verdicts = {"Reconciling": "InProgress", "Stalled": "Failed", "Ready": "Current"}
    (said,) = (c for c in true if c.type in verdicts)
    return verdicts[said.type], said.reason
