"""Each checker reports what violates its rule, and nothing else, from changes in a simulated API server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import kopf
import pytest

from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.incident import IncidentCause, IncidentClass, IncidentOutcome
from pacekeeper_operator.api.names import (
    FIELD_MANAGER_CORDON,
    LABEL_JOB,
    LABEL_NO_QUARANTINE,
    LABEL_PROBE,
    PAUSE_CONFIG_MAP,
)
from pacekeeper_operator.kube.leader_election import LEASE_NAME
from pacekeeper_operator.state.desired_state import DesiredState, Incident
from simulation.checkers import behavior
from simulation.kubernetes.api.requests import Request
from simulation.kubernetes.containers import SHARED
from simulation.world import EPOCH
from testing.operators import observations
from testing.simulated.checker_harness import OPERATOR, CheckerHarness


@pytest.fixture
def harness() -> CheckerHarness:
    harness = CheckerHarness()
    harness.write_state(harness.desired)
    return harness


# Plan and state.


def test_a_job_that_goes_through_rounds_violates_no_rule(harness: CheckerHarness) -> None:
    harness.write_state(harness.begin_round())
    harness.write_state(harness.begin_round("j-w0-0", "j-w2-0").count_restart(observations.NOW))
    harness.write_state(harness.desired.with_plan(checkpoint_request=1))
    assert harness.violated_rules == []


def test_a_membership_that_decreases_is_found(harness: CheckerHarness) -> None:
    harness.write_state(harness.begin_round(membership=0))
    assert harness.violated_rules == ["round numbers only grow"]


def test_a_repeated_round_is_found(harness: CheckerHarness) -> None:
    harness.write_state(harness.begin_round(round=1))
    assert harness.violated_rules == ["round numbers only grow"]


def test_other_members_need_another_membership(harness: CheckerHarness) -> None:
    harness.write_state(harness.begin_round("j-w0-0", "j-w2-0", membership=1, round=1))
    assert harness.violated_rules == ["round numbers only grow"]


def test_users_may_write_any_plan(harness: CheckerHarness) -> None:
    harness.write_state(harness.begin_round(membership=0, version=1), who="kubectl")
    harness.write_state(harness.begin_round())
    assert harness.violated_rules == []


def test_a_plan_that_changes_needs_a_version(harness: CheckerHarness) -> None:
    harness.write_state(harness.desired.with_plan(checkpoint_request=1, version=100))
    assert harness.violated_rules == ["each change of the plan is a new version"]


def test_two_workers_with_the_same_ranks_are_found(harness: CheckerHarness) -> None:
    harness.write_state(harness.begin_round("j-w0-0", "j-w0-0"))
    assert harness.violated_rules == ["no two workers hold a rank"]


def test_a_worker_that_was_given_up_gets_no_ranks(harness: CheckerHarness) -> None:
    worker = harness.desired.state.placement.workers[1]
    harness.write_state(harness.begin_round().with_worker(replace(worker, leaving="it is lost", dead=True)))
    assert harness.violated_rules == ["ranks are assigned only to recorded workers that are not given up"]


def test_a_worker_that_still_trains_may_get_ranks_once_more(harness: CheckerHarness) -> None:
    worker = harness.desired.state.placement.workers[1]
    harness.write_state(harness.begin_round().with_worker(replace(worker, leaving="it is slow")))
    assert harness.violated_rules == []


def test_an_unknown_worker_gets_no_ranks(harness: CheckerHarness) -> None:
    harness.write_state(harness.begin_round("j-w0-0", "j-w7-0"))
    assert harness.violated_rules == ["ranks are assigned only to recorded workers that are not given up"]


def test_an_incarnation_is_not_forgotten(harness: CheckerHarness) -> None:
    harness.write_state(harness.desired.with_placement(incarnations={"0": 1, "1": 0, "2": 0}))
    harness.write_state(harness.desired.with_placement(incarnations={"0": 0, "1": 0, "2": 0}))
    assert harness.violated_rules == ["a worker's name is never used again"]


def test_a_name_is_used_for_one_pod_only(harness: CheckerHarness) -> None:
    harness.create_pod("j-w0-0")  # the state has another UID
    assert harness.violated_rules == ["a worker's name is never used again"]


def write_closed_incident(harness: CheckerHarness, outcome: IncidentOutcome | None) -> DesiredState:
    return harness.desired.with_incident(
        Incident(
            "i",
            IncidentCause.CRASH,
            IncidentClass.UNKNOWN,
            1,
            "m",
            observations.NOW,
            observations.NOW,
            observations.NOW,
            outcome=outcome,
        )
    )


def test_a_changed_outcome_is_found(harness: CheckerHarness) -> None:
    harness.write_state(write_closed_incident(harness, None))
    harness.write_state(write_closed_incident(harness, IncidentOutcome.RECOVERED))
    assert harness.violated_rules == []
    harness.write_state(write_closed_incident(harness, IncidentOutcome.SUPERSEDED))
    assert harness.violated_rules == ["the outcome of an incident never changes"]


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_a_changed_final_phase_is_found(harness: CheckerHarness, phase: str) -> None:
    for now in ("Running", phase, "Recovering"):
        harness.api.patch("trainingjobs", "j", "ns", {"status": {"phase": now}}, subresource="status", manager=OPERATOR)
    assert harness.violated_rules == ["a job that is Complete or Failed stays so"]


def test_restarts_are_counted_within_their_window(harness: CheckerHarness) -> None:
    harness.checker._history.jobs[harness.job.uid].allowed_restarts = (3, 3)
    for seconds in (0.0, 1.0, 2.0, 3601.0, 3601.5):  # the first two have left the window by then
        harness.write_state(harness.desired.count_restart(observations.NOW + seconds))
    assert harness.violated_rules == []
    harness.write_state(harness.desired.count_restart(observations.NOW + 3601.7))
    assert harness.violated_rules == ["never more restarts than spec.remediation allows"]


def test_nothing_restarts_while_paused(harness: CheckerHarness) -> None:
    harness.api.create("configmaps", {"metadata": {"name": PAUSE_CONFIG_MAP, "namespace": "pacekeeper-system"}})
    harness.wait(10.0)
    harness.write_state(harness.desired.count_restart(observations.NOW))  # it may not have received the pause
    assert harness.violated_rules == []
    harness.wait(60.0)
    harness.write_state(harness.desired.count_restart(observations.NOW))
    assert harness.violated_rules == ["no fault is remedied while remedies are paused"]


def test_an_unbounded_state_is_found(harness: CheckerHarness) -> None:
    harness.write_state(harness.desired.settle_faults(tuple(f"fault-{i}" for i in range(4000))))
    assert harness.violated_rules == []
    harness.write_state(harness.desired.settle_faults(tuple(f"{i} {'x' * 100}" for i in range(4000))))
    assert harness.violated_rules == ["bookkeeping is bounded"]


# Objects that follow from the state.


def test_a_pod_whose_name_is_not_in_the_state_is_found(harness: CheckerHarness) -> None:
    harness.write_state(harness.desired.with_placement(workers=(*harness.desired.state.placement.workers[:2],)))
    harness.create_pod("j-w2-0")  # needed until a moment ago
    assert harness.violated_rules == []
    harness.create_pod("j-w3-0")
    assert harness.violated_rules == ["a pod is created only if the bookkeeping has its name"]


def test_a_pod_created_long_after_it_was_needed_is_found(harness: CheckerHarness) -> None:
    harness.write_state(harness.desired.with_placement(workers=(*harness.desired.state.placement.workers[:2],)))
    harness.wait(300.0)
    harness.create_pod("j-w2-0")
    assert harness.violated_rules == ["a pod is created only if the bookkeeping has its name"]


def record_pod_uid(harness: CheckerHarness, name: str) -> None:
    """Create the pod of that worker and record its UID."""
    workers = harness.desired.state.placement.workers
    harness.write_state(
        harness.desired.with_placement(workers=tuple(replace(w, uid="") if w.name == name else w for w in workers))
    )
    pod = harness.create_pod(name)
    worker = harness.desired.state.placement.find_worker(name)
    assert worker is not None
    harness.write_state(harness.desired.with_worker(replace(worker, uid=pod["metadata"]["uid"])))


def test_a_pod_is_deleted_after_its_worker_was_given_up(harness: CheckerHarness) -> None:
    record_pod_uid(harness, "j-w0-0")
    harness.checker.violations.clear()  # the changed UID
    worker = harness.desired.state.placement.find_worker("j-w0-0")
    assert worker is not None
    harness.write_state(harness.desired.with_worker(replace(worker, leaving="it is lost")))
    harness.api.delete("pods", "j-w0-0", "ns", manager=OPERATOR)
    assert harness.violated_rules == []


@pytest.mark.parametrize("grace", [0, 30])
def test_a_deleted_pod_of_a_staying_worker_is_found(harness: CheckerHarness, grace: int) -> None:
    record_pod_uid(harness, "j-w0-0")
    harness.checker.violations.clear()
    harness.api.delete("pods", "j-w0-0", "ns", grace=grace, manager=OPERATOR)
    assert harness.violated_rules == ["a pod is deleted only if the bookkeeping gives its worker up"]


def test_others_may_delete_a_pod(harness: CheckerHarness) -> None:
    record_pod_uid(harness, "j-w0-0")
    harness.checker.violations.clear()
    harness.api.delete("pods", "j-w0-0", "ns", manager="kubectl")
    assert harness.violated_rules == []


def write_incident(harness: CheckerHarness, outcome: str = "") -> None:
    reference = {"name": "j", "namespace": "ns", "uid": harness.job.uid}
    spec = {"jobRef": reference, "cause": "crash", "class": "Unknown", "round": 1, "message": "m"}
    if harness.api.get("incidents", "i", "ns") is None:
        body = {"metadata": {"name": "i", "namespace": "ns"}, "spec": spec}
        harness.api.create("incidents", body, manager=OPERATOR)
    if outcome:
        harness.api.patch(
            "incidents", "i", "ns", {"status": {"outcome": outcome}}, subresource="status", manager=OPERATOR
        )


def test_an_incident_is_written_first(harness: CheckerHarness) -> None:
    write_incident(harness)
    assert harness.violated_rules == ["an Incident agrees with the bookkeeping"]


def test_an_incident_ends_with_the_outcome_in_the_state(harness: CheckerHarness) -> None:
    harness.write_state(write_closed_incident(harness, None))
    write_incident(harness)
    assert harness.violated_rules == []
    write_incident(harness, "Recovered")
    assert harness.violated_rules == ["an Incident agrees with the bookkeeping"]


def test_a_changed_outcome_of_an_incident_object_is_found(harness: CheckerHarness) -> None:
    harness.write_state(write_closed_incident(harness, IncidentOutcome.RECOVERED))
    write_incident(harness, "Recovered")
    assert harness.violated_rules == []
    write_incident(harness, "Superseded")
    assert "the outcome of an incident never changes" in harness.violated_rules


# Nodes.


def test_a_regular_quarantine_violates_no_rule(harness: CheckerHarness) -> None:
    harness.create_node()
    harness.request_quarantine()
    harness.suspect()
    harness.set_ready("node-1", False)
    harness.approve()
    harness.taint()
    assert harness.violated_rules == []


def test_a_quarantine_without_a_suspicion_is_found(harness: CheckerHarness) -> None:
    harness.create_node()
    harness.suspect()
    assert harness.violated_rules == ["a NodeQuarantine is created only if a job's bookkeeping requests it"]


def test_a_manual_quarantine_needs_no_suspicion(harness: CheckerHarness) -> None:
    harness.create_node()
    harness.suspect(who="kubectl")
    harness.approve(who="kubectl")
    harness.taint()
    assert harness.violated_rules == []


def test_a_quarantine_without_a_witness_is_found(harness: CheckerHarness) -> None:
    harness.create_node()
    harness.wait(2000.0)
    harness.request_quarantine()
    harness.suspect()
    harness.approve()
    assert harness.violated_rules == ["no node is quarantined without a witness"]


@pytest.mark.parametrize(("message", "allowed"), [("no space left", True), (f"network: {SHARED}", False)])
def test_only_a_conclusive_failed_probe_is_a_witness(harness: CheckerHarness, message: str, allowed: bool) -> None:
    node = harness.create_node()
    harness.wait(2000.0)
    harness.request_quarantine()
    harness.suspect()
    metadata = {"name": "probe", "namespace": "pacekeeper-system", "labels": {LABEL_PROBE: node["metadata"]["uid"]}}
    harness.api.create("pods", {"metadata": metadata, "spec": {"containers": [{"name": "probe", "image": "i"}]}})
    ended = {"name": "probe", "state": {"terminated": {"exitCode": 1, "message": message}}}
    status = {"status": {"phase": "Failed", "containerStatuses": [ended]}}
    harness.api.patch("pods", "probe", "pacekeeper-system", status, subresource="status")
    harness.approve()
    assert harness.violated_rules == ([] if allowed else ["no node is quarantined without a witness"])


@pytest.mark.parametrize("shown", [True, False])
def test_a_series_is_a_witness_only_if_it_shows_something_new(harness: CheckerHarness, shown: bool) -> None:
    harness.create_node()
    harness.wait(2000.0)
    if shown:
        cast(Any, harness.world).prometheus.last_error["node-1"] = harness.world.now()
    harness.request_quarantine()
    sign = {"namespace": "ns", "incident": "i", "reason": "XID 79", "at": format_time(harness.world.wall_time())}
    harness.suspect(suspicions=[{**sign, "witness": "GpuSeries"}])
    harness.approve()
    assert harness.violated_rules == ([] if shown else ["no node is quarantined without a witness"])


def test_a_quarantine_of_the_slowest_node_to_recover_is_found(harness: CheckerHarness) -> None:
    quarantine_nodes(harness, "node-1", "node-2", "node-3")
    for name in ("node-1", "node-2", "node-3"):
        harness.api.patch("nodequarantines", name, "", {"spec": {"reason": "it is lost"}}, manager=OPERATOR)
    probes = [{"pod": "p", "started": format_time(EPOCH), "finished": format_time(EPOCH), "passed": True}]
    for name in ("node-1", "node-2"):
        harness.set_ready(name, True)
        status = {"status": {"probes": probes}}
        harness.api.patch("nodequarantines", name, "", status, subresource="status", manager=OPERATOR)
    harness.approve("node-3")
    expected = "no node is quarantined for being the last of many simultaneous failures to recover"
    assert harness.violated_rules == [expected]


def quarantine_nodes(harness: CheckerHarness, *names: str) -> None:
    for name in names:
        harness.create_node(name)
    for name in names:
        harness.request_quarantine(name)
        harness.suspect(name)
        harness.set_ready(name, False)


def test_more_nodes_than_the_budget_allows_are_found(harness: CheckerHarness) -> None:
    quarantine_nodes(harness, "node-1", "node-2")
    harness.approve("node-1")
    assert harness.violated_rules == []
    harness.approve("node-2")
    assert harness.violated_rules == ["never more quarantines than the budget allows"]


def test_many_simultaneous_quarantines_are_found(harness: CheckerHarness) -> None:
    quarantine_nodes(harness, "node-1", "node-2", "node-3")
    harness.approve("node-1")
    assert harness.violated_rules == ["no node is quarantined while many fail at once"]


def test_a_quarantine_while_paused_is_found(harness: CheckerHarness) -> None:
    quarantine_nodes(harness, "node-1")
    harness.api.create("configmaps", {"metadata": {"name": PAUSE_CONFIG_MAP, "namespace": "pacekeeper-system"}})
    harness.wait(60.0)
    harness.approve()
    assert harness.violated_rules == ["no node is quarantined while remedies are paused"]


def test_a_mark_without_a_quarantine_is_found(harness: CheckerHarness) -> None:
    harness.create_node()
    harness.taint()
    assert harness.violated_rules == ["a node is marked only under its own approved NodeQuarantine"]


def test_a_mark_on_a_new_node_of_the_same_name_is_found(harness: CheckerHarness) -> None:
    harness.create_node()
    harness.suspect(who="kubectl")
    harness.approve(who="kubectl")
    harness.api.delete("nodes", "node-1")
    harness.create_node()
    harness.taint()
    assert harness.violated_rules == ["a node is marked only under its own approved NodeQuarantine"]


def test_a_quarantine_of_an_opted_out_node_is_found(harness: CheckerHarness) -> None:
    harness.create_node(metadata={"labels": {LABEL_NO_QUARANTINE: ""}})
    harness.suspect(who="kubectl")
    harness.approve(who="kubectl")
    harness.wait(60.0)
    harness.taint()
    assert harness.violated_rules == ["a node with the opt-out label is never marked"]


def test_removing_marks_of_others_is_found(harness: CheckerHarness) -> None:
    harness.create_node()
    harness.suspect(who="kubectl")
    harness.approve(who="kubectl")
    harness.api.patch("nodes", "node-1", "", {"spec": {"taints": [{"key": "theirs", "effect": "NoSchedule"}]}})
    harness.taint()
    assert harness.violated_rules == ["others' cordons and taints are untouched"]


def test_removing_cordons_of_others_is_found(harness: CheckerHarness) -> None:
    harness.create_node()
    harness.api.patch("nodes", "node-1", "", {"spec": {"unschedulable": True}}, manager="kubectl")
    harness.api.patch("nodes", "node-1", "", {"spec": {"unschedulable": None}}, manager=FIELD_MANAGER_CORDON)
    assert harness.violated_rules == []  # no account of the operator
    harness.api.patch("nodes", "node-1", "", {"spec": {"unschedulable": True}}, manager="kubectl")
    harness.api.patch("nodes", "node-1", "", {"spec": {"unschedulable": None}}, manager=OPERATOR)
    assert harness.violated_rules == ["others' cordons and taints are untouched"]


def test_deleting_a_quarantine_before_its_marks_is_found(harness: CheckerHarness) -> None:
    harness.create_node()
    harness.suspect(who="kubectl")
    harness.approve(who="kubectl")
    harness.taint()
    harness.api.delete("nodequarantines", "node-1", manager=OPERATOR)
    assert harness.violated_rules == ["a NodeQuarantine is deleted once its node has no marks of it"]


# Operators.


def hold_lease(harness: CheckerHarness, holder: str = OPERATOR) -> None:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 10}
    body = {"metadata": {"name": LEASE_NAME, "namespace": "pacekeeper-system"}, "spec": spec}
    if harness.api.get("leases", LEASE_NAME, "pacekeeper-system") is None:
        harness.api.create("leases", body, manager=holder)
    else:
        harness.api.patch("leases", LEASE_NAME, "pacekeeper-system", {"spec": spec}, manager=holder)


def send(
    harness: CheckerHarness,
    method: str = "PUT",
    place: str = OPERATOR,
    seconds: float = 0.0,
    after: Callable[[], object] = lambda: None,
    **query: str,
) -> None:
    harness.wait(seconds)
    after()
    path = "/apis/pacekeeper.dev/v1alpha1/namespaces/ns/trainingjobstates/j"
    harness.api.notify_observers(Request(place, method, path, query, {}, ""))


@pytest.mark.parametrize(
    ("send_request", "allowed"),
    [
        (lambda harness: send(harness), True),
        (lambda harness: send(harness, seconds=9.0), True),
        (lambda harness: send(harness, seconds=11.0), False),
        (lambda harness: send(harness, place="operator-1"), False),
        (
            lambda harness: send(harness, after=lambda: harness.api.delete("leases", LEASE_NAME, "pacekeeper-system")),
            True,
        ),
        (lambda harness: send(harness, after=lambda: hold_lease(harness, "operator-1")), False),
        (lambda harness: send(harness, "GET", place="operator-1"), True),
        (lambda harness: send(harness, place="operator-1", fieldManager="kopf"), True),
    ],
    ids=["holder", "late", "too late", "another", "deleted by hand", "replaced", "another reads", "kopf"],
)
def test_only_the_holder_of_the_lease_writes(
    harness: CheckerHarness, send_request: Callable[[CheckerHarness], None], allowed: bool
) -> None:
    hold_lease(harness)
    send_request(harness)
    harness.check_world()
    assert harness.violated_rules == ([] if allowed else ["only the holder of the Lease writes"])


def test_an_operator_with_too_many_requests_is_found(harness: CheckerHarness) -> None:
    for _ in range(behavior.MAX_REQUESTS_PER_MINUTE + 1):
        send(harness, "GET")
    harness.wait(60.0)
    harness.check_world()
    assert harness.violated_rules == ["operators send no unnecessary requests"]


def test_an_unexpected_error_is_found(harness: CheckerHarness) -> None:
    log = logging.getLogger("pacekeeper_operator.runtime.effect_runner")
    try:
        raise KeyError("what")
    except KeyError:
        log.exception("an errand has failed")
    harness.check_world()
    assert harness.violated_rules == ["no step of the operator fails unexpectedly"]


@pytest.mark.parametrize(
    ("level", "error", "allowed"),
    [
        (logging.ERROR, kopf.TemporaryError("the API server is away"), True),
        (logging.CRITICAL, kopf.TemporaryError("the API server is away"), False),
        (logging.ERROR, ValueError("a bug"), False),
    ],
)
def test_only_temporary_errors_below_critical_are_allowed(
    harness: CheckerHarness, level: int, error: Exception, allowed: bool
) -> None:
    logging.getLogger("pacekeeper_operator.async_runtime").log(level, "it has died", exc_info=error)
    harness.check_world()
    assert harness.violated_rules == ([] if allowed else ["no step of the operator fails unexpectedly"])


def test_an_error_of_a_task_is_found(harness: CheckerHarness) -> None:
    harness.world.loop.call_exception_handler({"message": "never retrieved", "exception": ValueError()})
    harness.check_world()
    assert harness.violated_rules == ["no step of the operator fails unexpectedly"]


def test_a_step_that_fails_is_found(harness: CheckerHarness) -> None:
    condition = {"type": "ActionBlocked", "status": "True", "reason": "ActionFailed"}
    condition |= {"message": "reconcile step: verify", "lastTransitionTime": format_time(EPOCH)}
    status = {"status": {"conditions": [condition]}}
    harness.api.patch("trainingjobs", "j", "ns", status, subresource="status", manager=OPERATOR)
    assert harness.violated_rules == ["no step of the operator fails unexpectedly"]


def test_a_violation_is_reported_once(harness: CheckerHarness) -> None:
    for _ in range(3):
        harness.world.loop.call_exception_handler({"message": "never retrieved", "exception": None})
        harness.check_world()
    assert len(harness.violated_rules) == 1


def test_pods_of_other_jobs_are_not_checked(harness: CheckerHarness) -> None:
    metadata = {"name": "other", "namespace": "ns", "labels": {LABEL_JOB: "j"}}
    harness.api.create("pods", {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}]}})
    assert harness.violated_rules == []
