"""The pod of a watched job that hangs is deleted only where its controller restarts all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.training_job import JobKind, RemediationMode
from pacekeeper_operator.decide.effects import DeleteWatchedPod
from pacekeeper_operator.decide.watched.evaluate import evaluate_watched_job, list_watched_effects
from pacekeeper_operator.decide.watched.pod_restart import POD_RESTART_CHECKS, find_controller_refusal
from pacekeeper_operator.observe.pod_controllers import read_job_policy, read_job_set_policy
from pacekeeper_operator.runtime.watched_jobs import build_watch_policy
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import Incident, RequestedPodRestart
from pacekeeper_operator.state.effect_results import PodController, PodRestartFacts, PodRestartRefusal
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import NOW, build_crash, build_job, build_stall, build_training, change_worker

POLICY = build_watch_policy(Settings())
NAME = "j-r1-hang-u1d2c"
"""Name that a hang in the first round has."""
HANG = Incident(
    NAME, IncidentCause.HANG, IncidentClass.UNKNOWN, 1, "rank 1 blocks all others", NOW - 310, NOW - 305, NOW - 305
)
HANG = replace(HANG, mode=RemediationMode.RECOMMEND, rank=1, worker="j-w1-0", last_step=500)
JOB: dict[str, Any] = {"metadata": {"name": "train"}, "spec": {"backoffLimit": 0}}
JOB_SET: dict[str, Any] = {"metadata": {"name": "set"}, "spec": {"failurePolicy": {"maxRestarts": 3}}}


def build_facts(job: dict[str, Any] = JOB, job_set: dict[str, Any] | None = JOB_SET, **changes: Any) -> PodRestartFacts:
    controller = PodController(
        "Job train", read_job_policy(job), None if job_set is None else read_job_set_policy(job_set)
    )
    return replace(PodRestartFacts("uid-1", controller=controller, is_in_one_job_set=True), **changes)


def build_hang(waiting: float = 301.0, facts: PodRestartFacts | None = None, culprit: int = 1) -> Observation:
    """Return a watched job of two pods with one rank each, which hangs because of `culprit`."""
    observation = build_training(2, 0, job=replace(build_job(2, 0), kind=JobKind.WATCHED_JOB))
    stalls = []
    for rank in range(2):
        stall = build_stall(f"j-w{rank}-0", rank, culprit=rank == culprit)
        stalls.append(replace(stall, ranks=(replace(stall.ranks[0], waiting_seconds=waiting),)))
    observation = observation.with_desired(observation.desired.with_incident(HANG))
    return replace(observation, faults=tuple(stalls), pod_restart=facts or build_facts())


def get_hang(observation: Observation) -> Incident:
    incident = observation.state.incidents.find(NAME)
    assert incident is not None
    return incident


def evaluate(observation: Observation) -> tuple[Incident, list[DeleteWatchedPod]]:
    """Return the incident after a pass, and the deletions that it requests."""
    result = evaluate_watched_job(observation, POLICY)
    assert result.failed_steps == ()
    effects = list_watched_effects(result.observation, {})
    return get_hang(result.observation), [effect for effect in effects if isinstance(effect, DeleteWatchedPod)]


def change_body(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the object with these fields: `spec__name`."""
    changed = {name: dict(part) for name, part in body.items()}
    for path, value in changes.items():
        part, _, name = path.partition("__")
        changed.setdefault(part, {})[name] = value
    return changed


def build_rules(*rules: dict[str, Any], **policy: Any) -> dict[str, Any]:
    return change_body(JOB_SET, spec__failurePolicy={"maxRestarts": 3, "rules": list(rules), **policy})


RESTART_ONE = {"name": "a", "action": "RestartJob"}
CONTROLLERS = [
    # A Job creates the deleted pod again, until its backoffLimit is used up.
    (True, change_body(JOB, spec__backoffLimit=6), None, ""),
    (True, change_body(JOB, spec__backoffLimit=None, status__failed=5), None, ""),
    (True, change_body(JOB, spec__backoffLimit=2, status__failed=2), None, "backoffLimit of 2 is used up"),
    (True, change_body(JOB, spec__backoffLimit=1, status__uncountedTerminatedPods={"failed": ["x"]}), None, "used up"),
    (False, change_body(JOB, spec__backoffLimit=6), None, "only this pod"),
    (False, change_body(JOB, spec__backoffLimit=6), JOB_SET, "only this pod"),
    (True, change_body(JOB, spec__podFailurePolicy={"rules": []}), None, "by how it ends"),
    (True, change_body(JOB, spec__podReplacementPolicy="Failed"), None, "by how it ends"),
    (True, change_body(JOB, spec__podReplacementPolicy="TerminatingOrFailed", spec__backoffLimit=1), None, ""),
    (True, change_body(JOB, spec__backoffLimitPerIndex=3), None, "backoffLimitPerIndex"),
    (True, change_body(JOB, spec__managedBy="kueue.x-k8s.io/multikueue"), None, "kueue.x-k8s.io/multikueue manages"),
    (True, change_body(JOB, spec__suspend=True), None, "suspended"),
    (True, change_body(JOB, metadata__deletionTimestamp="2026-01-01T00:00:00Z"), None, "being deleted"),
    (True, change_body(JOB, status__conditions=[{"type": "FailureTarget", "status": "True"}]), None, "FailureTarget"),
    # A JobSet restarts all of its Jobs once one of them has failed.
    (False, JOB, None, "would fail"),
    (False, JOB, JOB_SET, ""),
    (False, change_body(JOB, spec__backoffLimit=1, status__failed=1), JOB_SET, ""),
    (False, JOB, change_body(JOB_SET, spec__failurePolicy=None), "no failurePolicy"),
    (False, JOB, change_body(JOB_SET, status__restartsCountTowardsMax=3), "3 of 3 restarts"),
    (False, JOB, change_body(JOB_SET, status__restarts=3), "3 of 3 restarts"),
    (False, JOB, change_body(JOB_SET, status__restarts=9, status__restartsCountTowardsMax=2), ""),
    (
        False,
        JOB,
        change_body(JOB_SET, status__replicatedJobsStatus=[{"jobRestartsCountTowardsMax": [2, 1]}]),
        "3 of 3 restarts",
    ),
    (False, JOB, build_rules(restartStrategy="InPlaceRestart"), "InPlaceRestart"),
    (False, JOB, build_rules(restartStrategy="BlockingRecreate"), ""),
    (False, JOB, build_rules({"name": "a", "action": "FailJobSet"}), "FailJobSet"),
    (False, JOB, build_rules(RESTART_ONE), "RestartJob"),
    (False, JOB, build_rules({**RESTART_ONE, "onJobFailureReasons": ["PodFailurePolicy"]}), ""),
    (False, JOB, build_rules({**RESTART_ONE, "onJobFailureReasons": ["BackoffLimitExceeded"]}), "demands RestartJob"),
    (False, JOB, build_rules({**RESTART_ONE, "targetReplicatedJobs": ["driver"]}), ""),
    (False, JOB, build_rules({"name": "a", "action": "RestartJobSet"}, RESTART_ONE), ""),
    (False, JOB, build_rules({**RESTART_ONE, "onJobFailureMessagePatterns": ["x"]}), "conditions that are not known"),
    (False, JOB, build_rules({"name": "a", "action": "RestartJobSetAndIgnoreMaxRestarts"}, maxRestarts=0), ""),
    (False, JOB, change_body(JOB_SET, status__terminalState="Failed"), "its state is Failed"),
    (False, JOB, change_body(JOB_SET, spec__managedBy="acme.io/x"), "acme.io/x manages"),
]


@pytest.mark.parametrize(("holds_all", "job", "job_set", "reason"), CONTROLLERS)
def test_a_pod_is_deleted_only_if_that_restarts_all_ranks(
    holds_all: bool, job: dict[str, Any], job_set: dict[str, Any] | None, reason: str
) -> None:
    found = find_controller_refusal(build_facts(job, job_set), holds_all_ranks=holds_all)
    assert (reason in found) if reason else found == ""


def test_other_controllers_and_shared_ones_are_refused() -> None:
    for facts, reason in (
        (build_facts(has_other_trainings=True), "other trainings"),
        (build_facts(is_in_one_job_set=False), "other JobSets"),
        (build_facts(controller=None), "no controller"),
        (build_facts(controller=PodController("PyTorchJob train")), "PyTorchJob train is not known to restart all"),
    ):
        assert reason in find_controller_refusal(facts, holds_all_ranks=False)


def test_the_decision_is_written_with_the_incident() -> None:
    result = evaluate_watched_job(build_hang(), POLICY)
    incident, deletions = evaluate(build_hang())
    assert (incident.applied, incident.mode, incident.remedy) == (NOW, RemediationMode.ACT, "RestartRanks")
    assert incident.remedy_result == "pod j-w1-0 is deleted: JobSet set restarts all its Jobs"
    (restart,) = result.desired.state.watched.restarts
    assert (restart.incident, restart.uid, restart.last_step) == (NAME, "uid-1", 500)
    assert deletions == [DeleteWatchedPod("j-w1-0", "uid-1", NAME)]


def change_restarts(observation: Observation, *restarts: RequestedPodRestart) -> Observation:
    return observation.with_desired(observation.desired.with_watched(restarts=restarts))


def build_restarts(count: int, step: int) -> list[RequestedPodRestart]:
    return [RequestedPodRestart(f"hang-0{number}", "p", "u", NOW - 600, step) for number in range(count)]


REFUSED = {
    "remedies-are-applied": (build_hang(facts=build_facts(hold_reason="the watch is switched off")), "switched off"),
    "pod-is-watched": (change_worker(build_hang(), "j-w1-0", pod={"job": "train"}), "belongs to a TrainingJob"),
    "all-ranks-stand-still": (change_worker(build_hang(), "j-w0-0", silent_seconds=60.0), "not all pods"),
    "controller-restarts-all-ranks": (build_hang(facts=build_facts(job_set=None)), "would fail"),
    "restarts-are-left": (change_restarts(build_hang(), *build_restarts(10, 3)), "10 pods"),
    "restarts-help": (change_restarts(build_hang(), *build_restarts(3, 500)), "at the same step"),
    "hang-lasts": (build_hang(299.0), "for 300 s"),
}


@pytest.mark.parametrize("name", [name for name, _ in POD_RESTART_CHECKS])
def test_each_check_alone_keeps_the_pod_and_says_why(name: str) -> None:
    observation, reason = REFUSED[name]
    incident, deletions = evaluate(observation)
    assert (incident.applied, deletions) == (None, [])
    assert incident.remedy_result.startswith("not restarted: ")
    assert reason in incident.remedy_result


@pytest.mark.parametrize(
    "observation",
    [
        replace(build_hang(), pod_restart=None),
        replace(build_hang(), pod_restart=replace(build_facts(), uid="uid-of-its-successor")),
        build_hang(culprit=0),  # the present reports blame another rank
        replace(build_hang(), faults=build_hang().faults[1:]),  # some ranks have not reported now
        change_worker(build_hang(), "j-w0-0", heartbeat={"progress": {"step": 501}}),
        change_restarts(build_hang(), RequestedPodRestart(NAME, "j-w1-0", "uid-1", NOW - 60, 500)),
    ],
)
def test_without_certain_evidence_nothing_is_done(observation: Observation) -> None:
    incident, deletions = evaluate(observation)
    assert (incident.applied, deletions) == (None, [])


def build_applied(**changes: Any) -> Observation:
    """Return the job some passes after the decision, with the pod still there."""
    observation = evaluate_watched_job(build_hang(), POLICY).observation
    return replace(observation, faults=(), pod_restart=None, **changes)


def test_the_next_operator_carries_out_what_is_written() -> None:
    incident, deletions = evaluate(build_applied())
    assert incident.outcome is None
    assert [deletion.uid for deletion in deletions] == ["uid-1"]
    for done in (
        change_worker(build_applied(), "j-w1-0", pod={"deleting": True}),
        change_worker(build_applied(), "j-w1-0", pod={"uid": "uid-of-its-successor"}),
        change_worker(build_applied(), "j-w1-0", heartbeat={"progress": {"step": 501}}),
        change_worker(build_applied(), "j-w1-0", silent_seconds=60.0),
    ):
        assert evaluate(done)[1] == []


def test_a_refusal_right_before_the_deletion_withdraws_it_for_good() -> None:
    refused = build_applied(pod_restart_refusal=PodRestartRefusal(NAME, "remedies are paused"))
    incident, deletions = evaluate(refused)
    assert (incident.applied, deletions) == (None, [])
    assert incident.remedy_result == "not restarted: remedies are paused"
    again = replace(refused.with_desired(evaluate_watched_job(refused, POLICY).desired), faults=build_hang().faults)
    assert evaluate(replace(again, pod_restart=build_facts()))[1] == []


def test_ranks_that_end_by_the_deletion_are_no_crashes() -> None:
    ends = build_crash("j-w0-0", 0, noticed_at=NOW + 1), build_crash("j-w1-0", 1, noticed_at=NOW - 60)
    result = evaluate_watched_job(replace(build_applied(), now=NOW + 10, faults=ends), POLICY)
    causes = [incident.cause for incident in result.desired.state.incidents.current]
    crash = next(incident for incident in result.desired.state.incidents.current if incident.cause != "hang")
    assert (len(causes), crash.rank) == (2, 1), "only the rank that ended before"


@pytest.mark.parametrize(
    ("seconds", "changes", "outcome"),
    [
        (599, {}, None),
        (601, {}, IncidentOutcome.INEFFECTIVE),  # the old ranks still stand
        (601, {"pod": {"created_at": NOW + 1}}, None),  # new pods that wait for the others
        (100, {"lifecycle": "Succeeded"}, IncidentOutcome.SUPERSEDED),
        (100, {"lifecycle": "Failed"}, IncidentOutcome.FAILED),
        (100, {"heartbeat": {"progress": {"step": 501}}}, IncidentOutcome.SUPERSEDED),
        (100, {"round": 2}, IncidentOutcome.RECOVERED),
    ],
)
def test_the_outcome_is_measured(seconds: float, changes: dict[str, Any], outcome: IncidentOutcome | None) -> None:
    observation = build_applied(now=NOW + seconds)
    phase, round_ = changes.pop("lifecycle", None), changes.pop("round", None)
    for name in ("j-w0-0", "j-w1-0"):
        pod = {"phase": phase} if phase else changes.get("pod", {})
        heartbeat: dict[str, Any] = dict(changes.get("heartbeat", {}))
        if round_:
            heartbeat |= {"round": 2, "start": {"first_step_at": NOW + 90, "restored_step": 400}}
        observation = change_worker(observation, name, pod=pod, heartbeat=heartbeat)
    if phase:
        observation = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW + 90))
    incident = get_hang(evaluate_watched_job(observation, POLICY).observation)
    assert incident.outcome == outcome
    if outcome is IncidentOutcome.RECOVERED:
        assert (incident.recovered, incident.steps_lost) == (NOW + 90, 100)
