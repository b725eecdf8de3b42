"""What the operator says of a job in each phase of its life, and why it is degraded: the gravest reason first."""

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


def said(world: Observation, before: JobStatus | None = None, **of_policy: Any) -> JobStatus:
    return build_job_status(world, build_policy(**of_policy), before or JobStatus())


def condition(status: JobStatus, name: JobCondition) -> ConditionStatus:
    return next(condition for condition in status.conditions if condition.type == name)


def life(**changes: Any) -> Observation:
    """A job that trained, with other words about its life; it has been told to stop at NOW - 5."""
    world = build_training()
    return world.with_desired(world.desired.with_plan(stop=Stop.FINISH).with_lifecycle(stopped_at=NOW - 5, **changes))


def suspended(*, pods: bool) -> Observation:
    world = build_training(job=build_job(suspend=True))
    world = world.with_desired(world.desired.with_plan(stop=Stop.SUSPEND).with_lifecycle(stopped_at=NOW - 5))
    for view in world.workers if not pods else ():
        world = change_worker(world, view.name, gone=True)
    return world


def recovering() -> Observation:
    world = build_training()
    return evaluate_job(replace(world, faults=build_stalls(world, culprit=2)), build_policy()).observation


def starting() -> Observation:
    world = change_members(build_training(), start={"first_step_at": None})
    return world.with_desired(world.desired.with_lifecycle(training_since=None))


WORLDS = {
    JobPhase.PENDING: with_pods(build_fresh()),
    JobPhase.STARTING: starting(),
    JobPhase.RUNNING: build_training(),
    JobPhase.RECOVERING: recovering(),
    JobPhase.SUSPENDED: suspended(pods=False),
    JobPhase.COMPLETE: life(completed_at=NOW - 4),
    JobPhase.FAILED: life(failed_reason="RestartBudgetSpent", failed_message="no restart is left"),
}
HELD = {
    JobPhase.RUNNING: JobCondition.RUNNING,
    JobPhase.RECOVERING: JobCondition.RECOVERING,
    JobPhase.SUSPENDED: JobCondition.SUSPENDED,
    JobPhase.COMPLETE: JobCondition.COMPLETE,
    JobPhase.FAILED: JobCondition.FAILED,
}
"""The condition that holds in a phase, of those that say how far the job is: one at most."""
WHY_NOT_RUNNING = {
    JobPhase.PENDING: Reason.WAITING_FOR_PODS,
    JobPhase.STARTING: Reason.WAITING_FOR_PODS,
    JobPhase.RECOVERING: Reason.INCIDENT_OPEN,
    JobPhase.SUSPENDED: Reason.SUSPENDED,
    JobPhase.COMPLETE: Reason.RANKS_FINISHED,
    JobPhase.FAILED: Reason.RESTART_BUDGET_SPENT,
}


class TestPhases:
    @pytest.mark.parametrize("phase", WORLDS)
    def test_one_condition_holds_and_is_the_main_one(self, phase: JobPhase) -> None:
        status = said(WORLDS[phase])
        assert status.phase is phase
        wanted = HELD.get(phase)
        assert status.message, "kubectl get -o wide shows it"
        holding = [c for c in HELD.values() if condition(status, c).status == "True"]
        assert holding == ([] if wanted is None else [wanted])
        main = condition(status, wanted or JobCondition.RUNNING)
        assert (status.reason, status.message) == (main.reason, main.message)

    @pytest.mark.parametrize("phase", WHY_NOT_RUNNING)
    def test_why_it_does_not_train(self, phase: JobPhase) -> None:
        assert condition(said(WORLDS[phase]), JobCondition.RUNNING).reason == WHY_NOT_RUNNING[phase]

    @pytest.mark.parametrize("phase", WORLDS)
    def test_figures_of_training_are_told_while_it_trains(self, phase: JobPhase) -> None:
        slow = JobMetrics(step_seconds=0.1, slowdown=1.4, relative_time=1.3, slowest_rank=2)
        status = said(replace(WORLDS[phase], metrics=slow))
        running = phase is JobPhase.RUNNING
        assert status.slowdown == (1.4 if running else None)
        assert status.bottleneck == ("rank 2 on j-w2-0" if running else None)

    @pytest.mark.parametrize("phase", WORLDS)
    def test_when_it_began_and_ended(self, phase: JobPhase) -> None:
        status = said(WORLDS[phase])
        assert status.start_time == (None if phase is JobPhase.PENDING else NOW - 400)
        ended = {JobPhase.COMPLETE: NOW - 4, JobPhase.FAILED: NOW - 5}
        assert status.completion_time == ended.get(phase)

    def test_failure_goes_before_completion_and_both_before_a_wish_to_suspend(self) -> None:
        both = life(completed_at=NOW - 4, failed_reason="ScriptFailed")
        assert said(both).phase is JobPhase.FAILED
        wish = replace(life(completed_at=NOW - 4), job=build_job(suspend=True))
        assert said(wish).phase is JobPhase.COMPLETE

    def test_suspended_it_is_from_the_wish_on_until_it_is_resumed(self) -> None:
        assert said(replace(build_training(), job=build_job(suspend=True))).phase is JobPhase.SUSPENDED
        assert said(replace(suspended(pods=True), job=build_job())).phase is JobPhase.SUSPENDED

    def test_but_the_condition_waits_for_the_last_worker(self) -> None:
        leaving = condition(said(suspended(pods=True)), JobCondition.SUSPENDED)
        assert (leaving.status, leaving.message) == ("False", "spec.suspend is true; 5 workers are leaving")
        assert condition(said(suspended(pods=False)), JobCondition.SUSPENDED).message == "spec.suspend is true"
        assert condition(said(build_training()), JobCondition.SUSPENDED).message == ""

    def test_a_failure_that_another_version_wrote_is_told_too(self) -> None:
        status = said(life(failed_reason="Unheard", failed_message="of"))
        assert (status.reason, status.message) == (Reason.JOB_FAILED, "of")


class TestBefore:
    def test_figures_that_nobody_tells_now_stay(self) -> None:
        before = JobStatus(step=400, last_checkpoint_step=390, round=3)
        silent = replace(
            build_training(), workers=tuple(replace(view, heartbeat=None) for view in build_training().workers)
        )
        status = said(silent, before)
        assert (status.step, status.last_checkpoint_step, status.round) == (400, 390, 1)
        assert said(build_fresh(), before).round == 3
        zero = change_members(build_training(), progress={"step": 0}, checkpoint={"step": 0})
        assert (said(zero, before).step, said(zero, before).last_checkpoint_step) == (0, 0)

    def test_the_goodput_of_a_job_that_has_ended_stays(self) -> None:
        before = JobStatus(goodput=0.7)
        assert said(life(completed_at=NOW), before).goodput == 0.7
        assert said(life(failed_reason="ScriptFailed"), before).goodput == 0.7
        assert said(build_training(), before).goodput == 1.0

    def test_before_the_first_step_there_is_no_goodput(self) -> None:
        assert said(starting()).goodput is None

    def test_at_the_first_step_nothing_is_lost_yet(self) -> None:
        world = build_training()
        assert said(world.with_desired(world.desired.with_lifecycle(training_since=NOW))).goodput == 1.0

    def test_an_open_incident_costs_goodput_while_the_job_stands_still(self) -> None:
        world = recovering()
        (incident,) = world.state.incidents.open
        later = replace(world, now=NOW + 30)
        assert said(later).goodput == pytest.approx(1 - (NOW + 30 - incident.first_sign) / 330)
        live = later.with_desired(later.desired.with_incident(replace(incident, live=True)))
        assert said(live).goodput == 1.0, "it trains on"

    def test_a_young_operator_that_sees_an_incident_or_the_end_says_so(self) -> None:
        before = said(build_training())
        silent = tuple(replace(view, heartbeat=None) for view in build_training().workers)
        young = replace(recovering(), operator_age=1.0, workers=silent)
        assert said(young, before).phase is JobPhase.RECOVERING
        over = replace(life(completed_at=NOW), operator_age=1.0, workers=silent)
        assert said(over, before).phase is JobPhase.COMPLETE


class TestBlind:
    def test_it_is_as_it_was_but_for_what_hinders_it(self) -> None:
        before = said(build_training())
        status = build_unreadable_status(before, 1, "delete it", NOW + 9)
        assert status.phase is JobPhase.RUNNING
        blocked = condition(status, JobCondition.ACTION_BLOCKED)
        assert (blocked.status, blocked.message, blocked.last_transition_time) == ("True", "delete it", NOW + 9)
        others = [c for c in before.conditions if c.type != JobCondition.ACTION_BLOCKED]
        assert list(status.conditions) == [*others, blocked]

    def test_a_job_of_which_nothing_was_said_yet_is_pending(self) -> None:
        assert build_unreadable_status(JobStatus(), 1, "delete it", NOW).phase is JobPhase.PENDING


class TestWaiting:
    def why(self, world: Observation) -> ConditionStatus:
        return condition(said(world), JobCondition.RUNNING)

    def test_for_an_image(self) -> None:
        world = evaluate_job(build_fresh(), build_policy()).observation
        world = with_pods(world)
        world = change_worker(world, "j-w1-0", pod={"waiting_reason": "ErrImagePull", "waiting_message": "not there"})
        why = self.why(world)
        assert (why.status, why.reason) == ("False", Reason.IMAGE_PULL_FAILED)
        assert why.message == "worker j-w1-0: ErrImagePull: not there"

    def test_for_a_folder_that_another_job_writes_its_checkpoints_to(self) -> None:
        folder = CheckpointSpec(volume_claim_name="claim", sub_path="shared")
        world = build_fresh(job=build_job(2, 1, checkpoint=folder))
        held = replace(world, cluster_view=replace(world.cluster_view, folder_owner="first"))
        why = self.why(held)
        assert (why.status, why.reason) == ("False", Reason.FOLDER_IN_USE)
        for words in ("job first", "claim claim/shared", "spec.checkpoint.subPath", "spec.checkpoint.adopt: first"):
            assert words in why.message
        assert condition(said(held), JobCondition.RECONCILING).reason == Reason.FOLDER_IN_USE
        assert not evaluate_job(held, build_policy()).desired.state.placement.workers, (
            "nothing is made, and so nothing touched"
        )
        assert evaluate_job(world, build_policy()).desired.state.placement.workers
        began = evaluate_job(world, build_policy()).observation
        goes_on = replace(began, cluster_view=held.cluster_view)
        assert evaluate_job(goes_on, build_policy()).desired.state.placement.workers == began.state.placement.workers
        assert self.why(goes_on).reason != Reason.FOLDER_IN_USE

    def test_for_its_next_attempt_to_be_placed(self) -> None:
        world = build_fresh()
        failed = world.with_desired(world.desired.with_placement(attempts=2))
        why = self.why(failed)
        assert (why.status, why.reason) == ("False", Reason.SCHEDULING_TIMEOUT)
        assert why.message.endswith("(attempt 2); the next attempt comes shortly")
        behind = replace(failed, cluster_view=replace(failed.cluster_view, older_waiting_job="elder"))
        assert self.why(behind).message.endswith("the next attempt comes after elder, which is older")
        under_way = failed.with_desired(failed.desired.with_placement(placing_since=NOW - 1))
        assert self.why(under_way).reason == Reason.WAITING_FOR_PODS
        assert self.why(world).reason == Reason.WAITING_FOR_PODS

    @pytest.mark.parametrize(
        ("trouble", "reason"),
        [
            (BlockedAction("create j-w0-0", "quota", is_pod_creation=True), Reason.POD_DENIED),
            (BlockedAction("template", "quota"), Reason.POD_DENIED),
            (BlockedAction("write incident", "quota"), Reason.WAITING_FOR_PODS),
        ],
    )
    def test_for_leave_to_make_its_pods(self, trouble: BlockedAction, reason: Reason) -> None:
        why = self.why(replace(build_fresh(), blocked_actions=(trouble,)))
        assert (why.status, why.reason) == ("False", reason)

    def test_for_its_pods(self) -> None:
        why = self.why(build_fresh())
        assert (why.status, why.message) == ("False", "0 of 2 workers are ready")


class TestHindered:
    def test_three_are_told_and_more_are_counted(self) -> None:
        troubles = tuple(BlockedAction(f"thing {n}", "no") for n in range(5))

        def message(count: int) -> str:
            return condition(
                said(replace(build_training(), blocked_actions=troubles[:count])), JobCondition.ACTION_BLOCKED
            ).message

        assert message(0) == ""
        assert message(3) == "thing 0: no; thing 1: no; thing 2: no"
        assert message(5) == "thing 0: no; thing 1: no; thing 2: no; and 2 more"


def fewer() -> Observation:
    return build_training(4, 1, job=build_job(5, 1))


def local_sgd() -> Observation:
    world = build_training()
    chosen = LocalSgdChoice(NOW - 60, Bottleneck.COMMUNICATION, "the link is slow", "i")
    return world.with_desired(world.desired.with_adaptation(local_sgd=chosen))


def metered(**metrics: Any) -> Observation:
    return replace(build_training(), metrics=JobMetrics(step_seconds=0.1, **metrics))


class TestDegraded:
    def why(self, world: Observation, **of_policy: Any) -> ConditionStatus:
        return condition(said(world, **of_policy), JobCondition.DEGRADED)

    def test_why_fewer_train(self) -> None:
        assert self.why(fewer()).message == "4 of 5 workers train, until others have started"
        roomless = change_worker(fewer(), "j-w4-0", pod={"unschedulable_message": "0/6 nodes"})
        assert (
            self.why(roomless).message
            == "4 of 5 workers train, for lack of nodes; worker j-w4-0 cannot be scheduled: 0/6 nodes"
        )

    @pytest.mark.parametrize(
        ("pod", "words"),
        [
            (
                {"waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "s" not found'},
                'worker j-w4-0 cannot start: CreateContainerConfigError: secret "s" not found',
            ),
            ({"unschedulable_message": "0/6 nodes"}, "worker j-w4-0 cannot be scheduled: 0/6 nodes"),
            ({}, "worker j-w4-0 is on node-4, and has not started for more than 300 s: kubectl describe pod j-w4-0"),
        ],
    )
    def test_a_spare_that_cannot_start_is_none_and_it_is_said_why(self, pod: dict[str, Any], words: str) -> None:
        old = {"phase": "Pending", "created_at": NOW - 301}
        world = change_worker(build_training(), "j-w4-0", pod=old | pod)
        why = self.why(world)
        assert (why.reason, why.message[: len(words)]) == (Reason.WORKER_CANNOT_START, words)
        assert said(world).workers.spare == 0
        vacant = change_members(world, start={"first_step_at": None})
        assert words in (said(vacant).message or ""), "also while the others wait for it"

    def test_one_rank_waits_for_no_link(self) -> None:
        alone = replace(build_training(1, 0), metrics=JobMetrics(uniform_slowdown=2.0, wait_share=0.6))
        assert self.why(alone).reason == Reason.ALL_RANKS_SLOW

    @pytest.mark.parametrize(
        ("world", "reason"),
        [
            (fewer(), Reason.FEWER_REPLICAS),
            (local_sgd(), Reason.LOCAL_SGD_ACTIVE),
            (metered(relative_time=1.1, slowest_rank=2), Reason.STRAGGLER),
            (metered(uniform_slowdown=MIN_UNIFORM_SLOWDOWN), Reason.ALL_RANKS_SLOW),
            (metered(uniform_slowdown=2.0, wait_share=0.1), Reason.ALL_RANKS_SLOW),
            (metered(uniform_slowdown=2.0, wait_share=0.6), Reason.SLOW_COMMUNICATION),
            (build_training(spares=0, job=build_job(4, 1)), Reason.NO_SPARE),
        ],
    )
    def test_by_what_slows_or_endangers_it(self, world: Observation, reason: Reason) -> None:
        why = self.why(world)
        assert (why.status, why.reason) == ("True", reason)

    @pytest.mark.parametrize(
        "world",
        [
            build_training(),
            build_training(spares=0, job=build_job(4, 0)),
            metered(relative_time=1.09, slowest_rank=2),
            metered(uniform_slowdown=1.19),
        ],
    )
    def test_not_at_all(self, world: Observation) -> None:
        assert (self.why(world).status, self.why(world).reason) == ("False", Reason.HEALTHY)

    def test_a_pause_and_a_breaker_are_told_in_any_phase_and_all_else_while_it_trains(self) -> None:
        world = replace(recovering(), metrics=JobMetrics(relative_time=2.0, slowest_rank=2))
        assert (self.why(world).status, self.why(world).reason) == ("False", Reason.HEALTHY)
        paused = self.why(world, paused="maintenance")
        assert (paused.status, paused.reason) == ("True", Reason.PAUSED)
        (incident,) = world.state.incidents.open
        held = world.with_desired(world.desired.with_incident(replace(incident, verdict=QuarantineVerdict.BREAKER)))
        why = self.why(held, paused="maintenance")
        assert (why.status, why.reason) == ("True", Reason.QUARANTINE_BREAKER)

    def test_a_bottleneck_is_told_from_the_same_pace_on(self) -> None:
        assert said(metered(relative_time=1.1, slowest_rank=2)).bottleneck == "rank 2 on j-w2-0"
        assert said(metered(relative_time=1.09, slowest_rank=2)).bottleneck is None
        assert said(metered(relative_time=1.1)).bottleneck is None
        assert said(metered(slowest_rank=2)).bottleneck is None

    def test_whose_part_of_a_checkpoint_was_not_kept_is_told_where_it_is_known(self) -> None:
        def words(**checkpoint: Any) -> str:
            told = {"checkpoint": {"error": "no space", **checkpoint}}
            return self.why(
                change_worker(change_members(build_training(), checkpoint={"step": 0}), "j-w0-0", heartbeat=told)
            ).message

        assert words(failed_rank=0).startswith("rank 0 could not save")
        assert words(failed_rank=None).startswith("a rank could not save")
        assert words(age_seconds=0.0).endswith("the newest good one is of step 0, less than a minute old")
        assert words(age_seconds=60.0).endswith("of step 0, 1 min old")
        assert words(age_seconds=None).endswith("the newest good one is of step 0")

    def test_a_loss_that_is_not_finite_on_the_first_rank(self) -> None:
        world = change_worker(build_training(), "j-w0-0", heartbeat={"training": {"bad_loss": BadLoss(0, 3)}})
        assert self.why(world).reason == Reason.NON_FINITE_LOSS


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
    def test_why_they_are_not_there(self, unavailable: str, reason: Reason) -> None:
        world = replace(build_training(), metrics=JobMetrics(prometheus_error=unavailable))
        assert condition(said(world), JobCondition.METRICS_AVAILABLE).reason == reason

    def test_a_refusal_is_not_taken_for_silence(self) -> None:
        words = "Prometheus at x refuses the operator (HTTP 401): check token"
        found = condition(
            said(replace(build_training(), metrics=JobMetrics(prometheus_error=words, prometheus_denied=True))),
            JobCondition.METRICS_AVAILABLE,
        )
        assert (found.status, found.reason) == ("False", Reason.PROMETHEUS_ACCESS_DENIED)
        assert found.message.startswith(words)

    def test_sidecars_that_tell_no_figures_are_older_than_the_operator(self) -> None:
        def told(**changes: Any) -> ConditionStatus:
            world = replace(build_training(), metrics=JobMetrics(unreported_members=("j-w1-0",)))
            return condition(said(change_worker(world, "j-w1-0", **changes)), JobCondition.METRICS_AVAILABLE)

        assert (told().status, told().reason) == ("False", Reason.METRICS_MISSING)
        assert told().message.startswith("the sidecars of j-w1-0 are older than the operator")
        assert told(heartbeat={"progress": {"steps_in_round": 0}}).status == "True", "there is nothing to be told yet"
        assert told(silent_seconds=60.0).status == "True", "that nobody hears of it is told elsewhere"


class TestPaths:
    """Ranks 0 and 1 send each other what goes by planned ways."""

    def told(self, *reports: PathReport, membership: int = 1) -> ConditionStatus:
        world = build_training(2, 0)
        wanted = (PlannedPath(0, 1, "s1"), PlannedPath(1, 0, "s2"))
        paths = Paths(wanted, (Hop("10.0.0.1", "s1"), Hop("10.0.0.2", "s2")))
        world = world.with_desired(world.desired.with_plan(paths=paths))
        for one in reports:
            beat = {"paths": (one,), "membership": membership}
            world = change_worker(world, f"j-w{one.source}-0", heartbeat=beat)
        return condition(said(world), JobCondition.PATHS_IN_FORCE)

    def test_all_are_on_their_way(self) -> None:
        found = self.told(PathReport(0, 1, in_force=True), PathReport(1, 0, in_force=True))
        assert (found.status, found.reason, found.message) == ("True", Reason.ALL_FLOWS_ON_ROUTE, "2 flows")

    @pytest.mark.parametrize("fault", [fault for fault in PathFault if fault is not PathFault.NONE])
    def test_each_fault_is_explained(self, fault: PathFault) -> None:
        found = self.told(PathReport(0, 1, in_force=True), PathReport(1, 0, fault=fault))
        assert (found.status, found.reason) == ("False", Reason.ROUTED_BY_NETWORK)
        assert found.message.startswith(f"1 of 2 flows do not follow their planned paths: {fault} (1): ")

    def test_what_is_not_told_is_not_known(self) -> None:
        for reports in ((), (PathReport(0, 1, in_force=True),), (PathReport(0, 1), PathReport(1, 0, in_force=True))):
            found = self.told(*reports)
            assert (found.status, found.reason) == ("Unknown", Reason.NOT_REPORTED)

    def test_nor_what_is_told_of_another_membership_or_of_what_was_not_planned(self) -> None:
        both = PathReport(0, 1, in_force=True), PathReport(1, 0, in_force=True)
        assert self.told(*both, membership=7).status == "Unknown"
        assert self.told(both[0], PathReport(1, 7, fault=PathFault.FILTERED)).status == "Unknown"

    def test_a_job_without_planned_paths_has_no_such_condition(self) -> None:
        assert JobCondition.PATHS_IN_FORCE not in {found.type for found in said(build_training()).conditions}
