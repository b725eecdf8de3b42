"""Pods of watched jobs that Kubernetes has ended, and what distinguishes them from crashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.reports import FaultReport, LauncherState
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass
from pacekeeper_operator.api.training_job import JobKind
from pacekeeper_operator.decide.watched.evaluate import evaluate_watched_job
from pacekeeper_operator.observe.views import view_pod
from pacekeeper_operator.runtime.watched_jobs import build_watch_policy
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.desired_state import Incident, WatchedRound
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import (
    NOW,
    build_crash,
    build_job,
    build_stall,
    build_training,
    change_members,
    change_worker,
)
from testing.operators.watched_pods import build_pod_body

POLICY = build_watch_policy(Settings())
VICTIM = "j-w1-0"
RESET = "RuntimeError: Connection reset by peer"
EVICTED = {
    "disruption_reason": "TerminationByKubelet",
    "phase": "Failed",
    "exit_reason": "Evicted",
    "exit_message": "The node was low on resource: memory.",
    "disrupted_at": NOW - 3.0,
}
DELETED = {"deleting": True, "disrupted_at": NOW - 3.0}
KILLED = build_crash(VICTIM, 1, exit_code=-15, noticed_at=NOW - 2.5)
PEER = build_crash("j-w0-0", 0, exit_code=1, error=RESET, noticed_at=NOW - 2.4)


def build_watched(pod: Mapping[str, Any] | None = None, *faults: FaultReport, **changes: Any) -> Observation:
    """Return four pods with a rank each, of which one is as in `pod`."""
    observation = build_training(4, 0, job=replace(build_job(4, 0), kind=JobKind.WATCHED_JOB))
    present = tuple(f"process-{rank}" for rank in range(4))
    desired = observation.desired.with_watched(present=present, rounds=(WatchedRound(1, NOW - 350, NOW - 300),))
    observation = change_worker(observation.with_desired(desired), VICTIM, pod=pod, **changes)
    return replace(observation, faults=faults)


def list_incidents(observation: Observation) -> list[Incident]:
    return list(evaluate_watched_job(observation, POLICY).desired.state.incidents.current)


@pytest.mark.parametrize(
    ("pod", "words"),
    [
        (EVICTED, "TerminationByKubelet): Evicted: The node was low on resource"),
        ({"deleting": True, "disruption_reason": "PreemptionByScheduler", "disrupted_at": NOW - 3}, "Preemption"),
        (DELETED, "its pod was deleted; Kubernetes does not record by whom"),
        ({"phase": "Failed", "exit_reason": "NodeShutdown", "exit_message": "going down"}, "NodeShutdown: going down"),
    ],
    ids=["evicted", "preempted", "deleted", "without condition"],
)
def test_the_end_of_a_pod_is_a_disruption_and_no_crash(pod: dict[str, Any], words: str) -> None:
    faults = (KILLED, PEER, build_stall("j-w2-0", 2))
    (incident,) = list_incidents(build_watched(pod, *faults))
    assert (incident.cause, incident.class_) == (IncidentCause.WORKER_LOST, IncidentClass.DISRUPTION)
    assert words in incident.message
    assert (incident.rank, incident.worker, incident.applied) == (1, VICTIM, None)
    assert incident.first_sign == pod.get("disrupted_at", KILLED.noticed_at)


def test_what_follows_later_in_the_round_is_no_crash_either() -> None:
    """The controller deletes the other pods, too, and their ranks end."""
    observation = evaluate_watched_job(build_watched(EVICTED), POLICY).observation
    for name in ("j-w0-0", "j-w2-0"):
        observation = change_worker(observation, name, pod={"deleting": True, "disrupted_at": NOW + 4})
    late = build_crash("j-w0-0", 0, exit_code=-15, noticed_at=NOW + 5)
    observation = replace(observation, now=NOW + 20, faults=(KILLED, PEER, late))
    (incident,) = list_incidents(observation)
    assert incident.worker == VICTIM


@pytest.mark.parametrize(
    ("pod", "fault"),
    [
        (DELETED, build_crash("j-w0-0", 0, exit_code=1, error="ValueError: x", noticed_at=NOW - 2.8)),
        (DELETED, build_crash(VICTIM, 1, exit_code=-9, noticed_at=NOW - 4)),
        (EVICTED | {"disrupted_at": None}, build_crash("j-w0-0", 0, exit_code=-9, noticed_at=NOW - 4)),
        (DELETED, build_crash(VICTIM, 1, exit_code=-9, noticed_at=NOW - 4, out_of_memory=True)),
    ],
    ids=["error in the second of the deletion", "killed before", "another pod's", "out of memory"],
)
def test_a_crash_that_came_first_explains_the_deletion(pod: dict[str, Any], fault: FaultReport) -> None:
    (incident,) = list_incidents(build_watched(pod, fault))
    assert incident.cause in (IncidentCause.CRASH, IncidentCause.OUT_OF_MEMORY)


def test_a_hang_that_came_first_explains_the_deletion() -> None:
    stalls = [build_stall(f"j-w{rank}-0", rank, culprit=rank == 3) for rank in range(4)]
    observation = evaluate_watched_job(build_watched(None, *stalls), POLICY).observation
    observation = replace(observation, now=NOW + 60, faults=())
    (incident,) = list_incidents(change_worker(observation, VICTIM, pod={"deleting": True, "disrupted_at": NOW + 59}))
    assert incident.cause is IncidentCause.HANG


@pytest.mark.parametrize(
    "observation",
    [
        build_watched({"phase": "Succeeded", "deleting": True, "disrupted_at": NOW - 3}),
        change_members(build_watched(DELETED), state=LauncherState.FINISHED),
        build_watched(gone=True),
        build_watched(DELETED | {"disrupted_at": NOW - 360}),
        build_watched(DELETED).with_desired(build_watched().desired.with_watched(present=("a", "", "b", "c"))),
        build_watched(silent_seconds=600.0),
    ],
    ids=["succeeded", "finished", "not listed", "before the round", "of an earlier round", "silent"],
)
def test_what_proves_no_disruption_is_reported_as_none(observation: Observation) -> None:
    assert list_incidents(observation) == []


def test_a_pod_that_is_gone_when_its_peers_stop_is_a_disruption() -> None:
    (incident,) = list_incidents(build_watched(None, PEER, gone=True))
    assert (incident.cause, incident.worker) == (IncidentCause.WORKER_LOST, VICTIM)


def test_a_lost_node_needs_a_silent_pod_and_a_condition_and_may_come_back() -> None:
    observation = build_watched(None, build_stall("j-w0-0", 0), silent_seconds=30.0)
    nodes = dict(observation.cluster_view.nodes)
    nodes["node-1"] = replace(nodes["node-1"], ready=False)
    observation = replace(observation, cluster_view=replace(observation.cluster_view, nodes=nodes))
    assert list_incidents(change_worker(observation, VICTIM, silent_seconds=1.0)) == []
    result = evaluate_watched_job(observation, POLICY)
    (incident,) = result.desired.state.incidents.current
    assert (incident.cause, incident.class_) == (IncidentCause.NODE_LOST, IncidentClass.INFRASTRUCTURE)
    assert incident.first_sign == NOW - 30
    back = change_members(replace(result.observation, now=NOW + 40, faults=()), progress={"step": 600})
    (incident,) = list_incidents(change_worker(back, VICTIM, silent_seconds=0.5))
    assert incident.recovered == NOW + 40


def test_the_time_of_a_disruption_is_that_of_the_request() -> None:
    """A deletion timestamp is the end of the grace period."""
    body = build_pod_body("a")
    body["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:30Z", "deletionGracePeriodSeconds": 30}
    deleted = view_pod(body)
    condition = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": "2025-12-31T23:59:58Z"}
    body["status"]["conditions"] = [condition]
    evicted = view_pod(body)
    assert deleted.disrupted_at is not None
    assert (deleted.disrupted_at + 30, evicted.disrupted_at) == (deleted.delete_by, deleted.disrupted_at - 2)
    assert view_pod(build_pod_body("a")).disrupted_at is None
