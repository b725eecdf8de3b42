"""Each invariant complains about what breaks it, and about nothing else: told by changes in a simulated API server."""

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
def court() -> CheckerHarness:
    court = CheckerHarness()
    court.write_state(court.desired)
    return court


# Plan and bookkeeping.


def test_a_job_that_goes_through_rounds_breaks_nothing(court: CheckerHarness) -> None:
    court.write_state(court.begin_round())
    court.write_state(court.begin_round("j-w0-0", "j-w2-0").count_restart(observations.NOW))
    court.write_state(court.desired.with_plan(checkpoint_request=1))
    assert court.violated_rules == []


def test_a_membership_that_falls_is_found(court: CheckerHarness) -> None:
    court.write_state(court.begin_round(membership=0))
    assert court.violated_rules == ["round numbers only grow"]


def test_a_round_that_comes_again_is_found(court: CheckerHarness) -> None:
    court.write_state(court.begin_round(round=1))
    assert court.violated_rules == ["round numbers only grow"]


def test_other_members_need_another_membership(court: CheckerHarness) -> None:
    court.write_state(court.begin_round("j-w0-0", "j-w2-0", membership=1, round=1))
    assert court.violated_rules == ["round numbers only grow"]


def test_a_person_may_write_what_he_likes(court: CheckerHarness) -> None:
    court.write_state(court.begin_round(membership=0, version=1), who="kubectl")
    court.write_state(court.begin_round())
    assert court.violated_rules == []


def test_a_plan_that_changes_needs_a_version(court: CheckerHarness) -> None:
    court.write_state(court.desired.with_plan(checkpoint_request=1, version=100))
    assert court.violated_rules == ["each change of the plan is a new version"]


def test_a_worker_holds_its_ranks_alone(court: CheckerHarness) -> None:
    court.write_state(court.begin_round("j-w0-0", "j-w0-0"))
    assert court.violated_rules == ["no two workers hold a rank"]


def test_who_was_given_up_gets_no_ranks(court: CheckerHarness) -> None:
    worker = court.desired.state.placement.workers[1]
    court.write_state(court.begin_round().with_worker(replace(worker, leaving="it is lost", dead=True)))
    assert court.violated_rules == ["ranks are assigned only to recorded workers that are not given up"]


def test_who_still_trains_may_get_ranks_once_more(court: CheckerHarness) -> None:
    worker = court.desired.state.placement.workers[1]
    court.write_state(court.begin_round().with_worker(replace(worker, leaving="it is slow")))
    assert court.violated_rules == []


def test_who_is_not_known_gets_no_ranks(court: CheckerHarness) -> None:
    court.write_state(court.begin_round("j-w0-0", "j-w7-0"))
    assert court.violated_rules == ["ranks are assigned only to recorded workers that are not given up"]


def test_an_incarnation_is_not_forgotten(court: CheckerHarness) -> None:
    court.write_state(court.desired.with_placement(incarnations={"0": 1, "1": 0, "2": 0}))
    court.write_state(court.desired.with_placement(incarnations={"0": 0, "1": 0, "2": 0}))
    assert court.violated_rules == ["a worker's name is never used again"]


def test_a_name_is_used_for_one_pod_only(court: CheckerHarness) -> None:
    court.create_pod("j-w0-0")  # the bookkeeping knows another UID
    assert court.violated_rules == ["a worker's name is never used again"]


def incident(court: CheckerHarness, outcome: IncidentOutcome | None) -> DesiredState:
    return court.desired.with_incident(
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


def test_an_outcome_stays(court: CheckerHarness) -> None:
    court.write_state(incident(court, None))
    court.write_state(incident(court, IncidentOutcome.RECOVERED))
    assert court.violated_rules == []
    court.write_state(incident(court, IncidentOutcome.SUPERSEDED))
    assert court.violated_rules == ["the outcome of an incident never changes"]


@pytest.mark.parametrize("phase", ["Complete", "Failed"])
def test_the_end_is_final(court: CheckerHarness, phase: str) -> None:
    for now in ("Running", phase, "Recovering"):
        court.api.patch("trainingjobs", "j", "ns", {"status": {"phase": now}}, subresource="status", manager=OPERATOR)
    assert court.violated_rules == ["a job that is Complete or Failed stays so"]


def test_restarts_are_counted_within_their_window(court: CheckerHarness) -> None:
    court.checker._history.jobs[court.job.uid].allowed_restarts = (3, 3)
    for seconds in (0.0, 1.0, 2.0, 3601.0, 3601.5):  # the first two are forgotten by then
        court.write_state(court.desired.count_restart(observations.NOW + seconds))
    assert court.violated_rules == []
    court.write_state(court.desired.count_restart(observations.NOW + 3601.7))
    assert court.violated_rules == ["never more restarts than spec.remediation allows"]


def test_nothing_restarts_while_paused(court: CheckerHarness) -> None:
    court.api.create("configmaps", {"metadata": {"name": PAUSE_CONFIG_MAP, "namespace": "pacekeeper-system"}})
    court.wait(10.0)
    court.write_state(court.desired.count_restart(observations.NOW))  # it may not have heard
    assert court.violated_rules == []
    court.wait(60.0)
    court.write_state(court.desired.count_restart(observations.NOW))
    assert court.violated_rules == ["no fault is remedied while remedies are paused"]


def test_bookkeeping_is_bounded(court: CheckerHarness) -> None:
    court.write_state(court.desired.settle_faults(tuple(f"fault-{i}" for i in range(4000))))
    assert court.violated_rules == []
    court.write_state(court.desired.settle_faults(tuple(f"{i} {'x' * 100}" for i in range(4000))))
    assert court.violated_rules == ["bookkeeping is bounded"]


# What follows from it.


def test_a_pod_has_its_name_from_the_bookkeeping(court: CheckerHarness) -> None:
    court.write_state(court.desired.with_placement(workers=(*court.desired.state.placement.workers[:2],)))
    court.create_pod("j-w2-0")  # wanted until a moment ago
    assert court.violated_rules == []
    court.create_pod("j-w3-0")
    assert court.violated_rules == ["a pod is created only if the bookkeeping has its name"]


def test_a_pod_is_not_created_long_after_it_was_wanted(court: CheckerHarness) -> None:
    court.write_state(court.desired.with_placement(workers=(*court.desired.state.placement.workers[:2],)))
    court.wait(300.0)
    court.create_pod("j-w2-0")
    assert court.violated_rules == ["a pod is created only if the bookkeeping has its name"]


def with_uid(court: CheckerHarness, name: str) -> None:
    """The pod of that worker is there."""
    workers = court.desired.state.placement.workers
    court.write_state(
        court.desired.with_placement(workers=tuple(replace(w, uid="") if w.name == name else w for w in workers))
    )
    pod = court.create_pod(name)
    worker = court.desired.state.placement.find_worker(name)
    assert worker is not None
    court.write_state(court.desired.with_worker(replace(worker, uid=pod["metadata"]["uid"])))


def test_a_pod_is_deleted_after_its_worker_was_given_up(court: CheckerHarness) -> None:
    with_uid(court, "j-w0-0")
    court.checker.violations.clear()  # a uid that becomes another one
    worker = court.desired.state.placement.find_worker("j-w0-0")
    assert worker is not None
    court.write_state(court.desired.with_worker(replace(worker, leaving="it is lost")))
    court.api.delete("pods", "j-w0-0", "ns", manager=OPERATOR)
    assert court.violated_rules == []


@pytest.mark.parametrize("grace", [0, 30])
def test_a_pod_that_stays_is_not_deleted(court: CheckerHarness, grace: int) -> None:
    with_uid(court, "j-w0-0")
    court.checker.violations.clear()
    court.api.delete("pods", "j-w0-0", "ns", grace=grace, manager=OPERATOR)
    assert court.violated_rules == ["a pod is deleted only if the bookkeeping gives its worker up"]


def test_others_may_delete_a_pod(court: CheckerHarness) -> None:
    with_uid(court, "j-w0-0")
    court.checker.violations.clear()
    court.api.delete("pods", "j-w0-0", "ns", manager="kubectl")
    assert court.violated_rules == []


def write_incident(court: CheckerHarness, outcome: str = "") -> None:
    reference = {"name": "j", "namespace": "ns", "uid": court.job.uid}
    spec = {"jobRef": reference, "cause": "crash", "class": "Unknown", "round": 1, "message": "m"}
    if court.api.get("incidents", "i", "ns") is None:
        body = {"metadata": {"name": "i", "namespace": "ns"}, "spec": spec}
        court.api.create("incidents", body, manager=OPERATOR)
    if outcome:
        court.api.patch(
            "incidents", "i", "ns", {"status": {"outcome": outcome}}, subresource="status", manager=OPERATOR
        )


def test_an_incident_is_written_first(court: CheckerHarness) -> None:
    write_incident(court)
    assert court.violated_rules == ["an Incident agrees with the bookkeeping"]


def test_an_incident_ends_as_is_written(court: CheckerHarness) -> None:
    court.write_state(incident(court, None))
    write_incident(court)
    assert court.violated_rules == []
    write_incident(court, "Recovered")
    assert court.violated_rules == ["an Incident agrees with the bookkeeping"]


def test_the_outcome_of_an_incident_object_stays(court: CheckerHarness) -> None:
    court.write_state(incident(court, IncidentOutcome.RECOVERED))
    write_incident(court, "Recovered")
    assert court.violated_rules == []
    write_incident(court, "Superseded")
    assert "the outcome of an incident never changes" in court.violated_rules


# Nodes.


def test_a_quarantine_goes_its_way(court: CheckerHarness) -> None:
    court.create_node()
    court.request_quarantine()
    court.suspect()
    court.set_ready("node-1", False)
    court.approve()
    court.taint()
    assert court.violated_rules == []


def test_a_quarantine_is_asked_for(court: CheckerHarness) -> None:
    court.create_node()
    court.suspect()
    assert court.violated_rules == ["a NodeQuarantine is created only if a job's bookkeeping requests it"]


def test_a_person_needs_nobody(court: CheckerHarness) -> None:
    court.create_node()
    court.suspect(who="kubectl")
    court.approve(who="kubectl")
    court.taint()
    assert court.violated_rules == []


def test_a_quarantine_needs_a_witness(court: CheckerHarness) -> None:
    court.create_node()
    court.wait(2000.0)
    court.request_quarantine()
    court.suspect()
    court.approve()
    assert court.violated_rules == ["no node is quarantined without a witness"]


@pytest.mark.parametrize(("words", "fine"), [("no space left", True), (f"network: {SHARED}", False)])
def test_a_probe_that_has_failed_of_its_own_is_a_witness(court: CheckerHarness, words: str, fine: bool) -> None:
    node = court.create_node()
    court.wait(2000.0)
    court.request_quarantine()
    court.suspect()
    metadata = {"name": "probe", "namespace": "pacekeeper-system", "labels": {LABEL_PROBE: node["metadata"]["uid"]}}
    court.api.create("pods", {"metadata": metadata, "spec": {"containers": [{"name": "probe", "image": "i"}]}})
    ended = {"name": "probe", "state": {"terminated": {"exitCode": 1, "message": words}}}
    status = {"status": {"phase": "Failed", "containerStatuses": [ended]}}
    court.api.patch("pods", "probe", "pacekeeper-system", status, subresource="status")
    court.approve()
    assert court.violated_rules == ([] if fine else ["no node is quarantined without a witness"])


@pytest.mark.parametrize("shown", [True, False])
def test_a_series_is_a_witness_where_it_has_shown_something_new(court: CheckerHarness, shown: bool) -> None:
    court.create_node()
    court.wait(2000.0)
    if shown:
        cast(Any, court.world).prometheus.last_error["node-1"] = court.world.now()
    court.request_quarantine()
    sign = {"namespace": "ns", "incident": "i", "reason": "XID 79", "at": format_time(court.world.wall_time())}
    court.suspect(suspicions=[{**sign, "witness": "GpuSeries"}])
    court.approve()
    assert court.violated_rules == ([] if shown else ["no node is quarantined without a witness"])


def test_who_takes_longest_to_come_back_is_left_alone(court: CheckerHarness) -> None:
    quarantined(court, "node-1", "node-2", "node-3")
    for name in ("node-1", "node-2", "node-3"):
        court.api.patch("nodequarantines", name, "", {"spec": {"reason": "it is lost"}}, manager=OPERATOR)
    probes = [{"pod": "p", "started": format_time(EPOCH), "finished": format_time(EPOCH), "passed": True}]
    for name in ("node-1", "node-2"):
        court.set_ready(name, True)
        status = {"status": {"probes": probes}}
        court.api.patch("nodequarantines", name, "", status, subresource="status", manager=OPERATOR)
    court.approve("node-3")
    expected = "no node is quarantined for being the last of many simultaneous failures to recover"
    assert court.violated_rules == [expected]


def quarantined(court: CheckerHarness, *names: str) -> None:
    for name in names:
        court.create_node(name)
    for name in names:
        court.request_quarantine(name)
        court.suspect(name)
        court.set_ready(name, False)


def test_no_more_nodes_than_the_budget_allows(court: CheckerHarness) -> None:
    quarantined(court, "node-1", "node-2")
    court.approve("node-1")
    assert court.violated_rules == []
    court.approve("node-2")
    assert court.violated_rules == ["never more quarantines than the budget allows"]


def test_many_at_once_trip_the_breaker(court: CheckerHarness) -> None:
    quarantined(court, "node-1", "node-2", "node-3")
    court.approve("node-1")
    assert court.violated_rules == ["no node is quarantined while many fail at once"]


def test_no_quarantine_while_paused(court: CheckerHarness) -> None:
    quarantined(court, "node-1")
    court.api.create("configmaps", {"metadata": {"name": PAUSE_CONFIG_MAP, "namespace": "pacekeeper-system"}})
    court.wait(60.0)
    court.approve()
    assert court.violated_rules == ["no node is quarantined while remedies are paused"]


def test_a_mark_without_a_quarantine_is_found(court: CheckerHarness) -> None:
    court.create_node()
    court.taint()
    assert court.violated_rules == ["a node is marked only under its own approved NodeQuarantine"]


def test_a_mark_on_another_node_of_the_name_is_found(court: CheckerHarness) -> None:
    court.create_node()
    court.suspect(who="kubectl")
    court.approve(who="kubectl")
    court.api.delete("nodes", "node-1")
    court.create_node()
    court.taint()
    assert court.violated_rules == ["a node is marked only under its own approved NodeQuarantine"]


def test_a_node_that_has_opted_out_is_left_alone(court: CheckerHarness) -> None:
    court.create_node(metadata={"labels": {LABEL_NO_QUARANTINE: ""}})
    court.suspect(who="kubectl")
    court.approve(who="kubectl")
    court.wait(60.0)
    court.taint()
    assert court.violated_rules == ["a node with the opt-out label is never marked"]


def test_others_marks_stay(court: CheckerHarness) -> None:
    court.create_node()
    court.suspect(who="kubectl")
    court.approve(who="kubectl")
    court.api.patch("nodes", "node-1", "", {"spec": {"taints": [{"key": "theirs", "effect": "NoSchedule"}]}})
    court.taint()
    assert court.violated_rules == ["others' cordons and taints are untouched"]


def test_others_cordons_stay(court: CheckerHarness) -> None:
    court.create_node()
    court.api.patch("nodes", "node-1", "", {"spec": {"unschedulable": True}}, manager="kubectl")
    court.api.patch("nodes", "node-1", "", {"spec": {"unschedulable": None}}, manager=FIELD_MANAGER_CORDON)
    assert court.violated_rules == []  # nobody of ours
    court.api.patch("nodes", "node-1", "", {"spec": {"unschedulable": True}}, manager="kubectl")
    court.api.patch("nodes", "node-1", "", {"spec": {"unschedulable": None}}, manager=OPERATOR)
    assert court.violated_rules == ["others' cordons and taints are untouched"]


def test_a_quarantine_goes_last(court: CheckerHarness) -> None:
    court.create_node()
    court.suspect(who="kubectl")
    court.approve(who="kubectl")
    court.taint()
    court.api.delete("nodequarantines", "node-1", manager=OPERATOR)
    assert court.violated_rules == ["a NodeQuarantine is deleted once its node has no marks of it"]


# Operators.


def hold_lease(court: CheckerHarness, holder: str = OPERATOR) -> None:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 10}
    body = {"metadata": {"name": LEASE_NAME, "namespace": "pacekeeper-system"}, "spec": spec}
    if court.api.get("leases", LEASE_NAME, "pacekeeper-system") is None:
        court.api.create("leases", body, manager=holder)
    else:
        court.api.patch("leases", LEASE_NAME, "pacekeeper-system", {"spec": spec}, manager=holder)


def send(
    court: CheckerHarness,
    method: str = "PUT",
    place: str = OPERATOR,
    seconds: float = 0.0,
    after: Callable[[], object] = lambda: None,
    **query: str,
) -> None:
    court.wait(seconds)
    after()
    path = "/apis/pacekeeper.dev/v1alpha1/namespaces/ns/trainingjobstates/j"
    court.api.notify_observers(Request(place, method, path, query, {}, ""))


@pytest.mark.parametrize(
    ("say", "fine"),
    [
        (lambda court: send(court), True),
        (lambda court: send(court, seconds=9.0), True),
        (lambda court: send(court, seconds=11.0), False),
        (lambda court: send(court, place="operator-1"), False),
        (lambda court: send(court, after=lambda: court.api.delete("leases", LEASE_NAME, "pacekeeper-system")), True),
        (lambda court: send(court, after=lambda: hold_lease(court, "operator-1")), False),
        (lambda court: send(court, "GET", place="operator-1"), True),
        (lambda court: send(court, place="operator-1", fieldManager="kopf"), True),
    ],
    ids=["holder", "late", "too late", "another", "deleted by hand", "replaced", "another reads", "kopf"],
)
def test_who_writes_holds_the_lease(court: CheckerHarness, say: Callable[[CheckerHarness], None], fine: bool) -> None:
    hold_lease(court)
    say(court)
    court.check_world()
    assert court.violated_rules == ([] if fine else ["only the holder of the Lease writes"])


def test_an_operator_that_runs_hot_is_found(court: CheckerHarness) -> None:
    for _ in range(behavior.MAX_REQUESTS_PER_MINUTE + 1):
        send(court, "GET")
    court.wait(60.0)
    court.check_world()
    assert court.violated_rules == ["operators send no unnecessary requests"]


def test_an_error_that_nobody_expected_is_found(court: CheckerHarness) -> None:
    log = logging.getLogger("pacekeeper_operator.runtime.effect_runner")
    try:
        raise KeyError("what")
    except KeyError:
        log.exception("an errand has failed")
    court.check_world()
    assert court.violated_rules == ["no step of the operator fails unexpectedly"]


@pytest.mark.parametrize(
    ("level", "error", "fine"),
    [
        (logging.ERROR, kopf.TemporaryError("the API server is away"), True),
        (logging.CRITICAL, kopf.TemporaryError("the API server is away"), False),
        (logging.ERROR, ValueError("a bug"), False),
    ],
)
def test_no_error_is_fine_but_what_says_something_and_ends_nothing(
    court: CheckerHarness, level: int, error: Exception, fine: bool
) -> None:
    logging.getLogger("pacekeeper_operator.async_runtime").log(level, "it has died", exc_info=error)
    court.check_world()
    assert court.violated_rules == ([] if fine else ["no step of the operator fails unexpectedly"])


def test_an_error_of_a_task_is_found(court: CheckerHarness) -> None:
    court.world.loop.call_exception_handler({"message": "never retrieved", "exception": ValueError()})
    court.check_world()
    assert court.violated_rules == ["no step of the operator fails unexpectedly"]


def test_a_step_that_fails_is_found(court: CheckerHarness) -> None:
    condition = {"type": "ActionBlocked", "status": "True", "reason": "ActionFailed"}
    condition |= {"message": "reconcile step: verify", "lastTransitionTime": format_time(EPOCH)}
    status = {"status": {"conditions": [condition]}}
    court.api.patch("trainingjobs", "j", "ns", status, subresource="status", manager=OPERATOR)
    assert court.violated_rules == ["no step of the operator fails unexpectedly"]


def test_a_complaint_is_made_once(court: CheckerHarness) -> None:
    for _ in range(3):
        court.world.loop.call_exception_handler({"message": "never retrieved", "exception": None})
        court.check_world()
    assert len(court.violated_rules) == 1


def test_pods_of_no_job_of_ours_are_nobodys_business(court: CheckerHarness) -> None:
    metadata = {"name": "other", "namespace": "ns", "labels": {LABEL_JOB: "j"}}
    court.api.create("pods", {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}]}})
    assert court.violated_rules == []
