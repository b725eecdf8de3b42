"""Pods as the API server returns them, and what follows from workers' reports."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_analysis.protocol.reports import FINISHED_MESSAGE, Heartbeat
from pacekeeper_analysis.protocol.requests import EvidenceRequest
from pacekeeper_operator.api.training_job import JobPhase
from pacekeeper_operator.observe.gather import build_observation, collect_cluster_view
from pacekeeper_operator.observe.job_cache import JobCache, JobRegistry, WorkerContact
from pacekeeper_operator.observe.peer_jobs import NodeSnapshot
from pacekeeper_operator.observe.views import view_node, view_pod
from pacekeeper_operator.observe.waiters import Waiters
from pacekeeper_operator.pods.node_health import NodeHealthRules
from pacekeeper_operator.state.cluster_view import ClusterView
from pacekeeper_operator.state.desired_state import DesiredState, Placement, State
from testing.operators.observations import NOW, build_crash, build_job, build_training


def build_pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "j-w0-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": "node-1"},
        "status": {"phase": "Running", "podIP": "10.0.0.1", **status},
    }


def build_container_status(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "state": state}


def test_the_pod_set_of_a_pod_is_its_label() -> None:
    pod = build_pod()
    assert view_pod(pod).pod_set == ""
    pod["metadata"]["labels"] = {"kueue.x-k8s.io/podset": "spares"}
    assert view_pod(pod).pod_set == "spares"


def test_a_running_pod_is_parsed() -> None:
    view = view_pod(build_pod(containerStatuses=[build_container_status("trainer", running={})]))
    assert (view.node, view.address, view.ended, view.deleting) == ("node-1", "10.0.0.1", False, False)


def test_the_exit_code_is_the_trainers_not_the_sidecars() -> None:
    ended = build_container_status(
        "trainer", terminated={"exitCode": 137, "reason": "OOMKilled", "message": "last words"}
    )
    other = build_container_status("debug", terminated={"exitCode": 0})
    view = view_pod(build_pod(containerStatuses=[other, ended]))
    assert (view.exit_code, view.exit_reason, view.exit_message) == (137, "OOMKilled", "last words")


@pytest.mark.parametrize(
    ("code", "message", "finished"),
    [(0, f"mine\n{FINISHED_MESSAGE}\n", True), (0, "mine", False), (1, FINISHED_MESSAGE, False)],
)
def test_finished_ranks_are_read_from_the_termination_message(code: int, message: str, finished: bool) -> None:
    ended = build_container_status("trainer", terminated={"exitCode": code, "message": message})
    assert view_pod(build_pod(containerStatuses=[ended])).finished is finished


@pytest.mark.parametrize("field", ["initContainerStatuses", "containerStatuses"])
def test_the_waiting_reason_of_a_container_is_read(field: str) -> None:
    waiting = {"reason": "ErrImagePull", "message": "no such host"}
    assert (
        view_pod(build_pod(**{field: [build_container_status("x", waiting=waiting)]})).waiting_message == "no such host"
    )
    harmless = {"reason": "PodInitializing"}
    assert not view_pod(build_pod(**{field: [build_container_status("x", waiting=harmless)]})).waiting_reason


def test_a_missing_image_names_its_container() -> None:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "s" not found'}
    assert (
        view_pod(build_pod(initContainerStatuses=[build_container_status("fetch", waiting=waiting)])).waiting_container
        == "fetch"
    )


def build_failed_init(code: int = 3, **status: Any) -> dict[str, Any]:
    """Build a pod whose init container has failed, and whose trainer never ran."""
    sidecar = build_container_status("pacekeeper-sidecar", terminated={"exitCode": 137})
    fetch = build_container_status(
        "fetch", terminated={"exitCode": code, "reason": "Error", "message": "no such bucket"}
    )
    waiting = build_container_status("trainer", waiting={"reason": "PodInitializing"})
    return build_pod(initContainerStatuses=[sidecar, fetch], containerStatuses=[waiting], phase="Failed", **status)


def test_a_failed_init_container_explains_a_trainer_that_never_ran() -> None:
    view = view_pod(build_failed_init())
    assert (view.failed_init_container, view.exit_code, view.exit_message) == ("fetch", 3, "no such bucket")
    assert view_pod(build_failed_init(0)).exit_code is None
    evicted = view_pod(build_failed_init(137, reason="Evicted", message="The node was low on resource: memory."))
    assert (evicted.failed_init_container, evicted.exit_code, evicted.exit_reason) == ("", None, "Evicted")


@pytest.mark.parametrize(
    ("reason", "message", "own"),
    [
        ("Evicted", 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ', True),
        ("Evicted", "Pod ephemeral local storage usage exceeds the total limit of containers 2Gi. ", True),
        ("Evicted", 'Container trainer exceeded its local ephemeral storage limit "2Gi". ', True),
        (
            "Evicted",
            "The node was low on resource: ephemeral-storage. Threshold quantity: 1, available: 0. "
            "Container trainer was using 90Gi, request is 0, has larger consumption of ephemeral-storage. ",
            True,
        ),
        ("Evicted", "The node was low on resource: memory. Container trainer was using 9Gi, request is 8Gi. ", False),
        ("Evicted", "The node had condition: [DiskPressure]. ", False),
        ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline", True),
        ("Terminated", "Pod was terminated in response to imminent node shutdown.", False),
        ("OutOfcpu", "Node didn't have enough resource: cpu", False),
    ],
)
def test_evictions_by_the_pods_own_doing_are_recognized(reason: str, message: str, own: bool) -> None:
    view = view_pod(build_pod(phase="Failed", reason=reason, message=message))
    assert view.self_inflicted_reason == (f"{reason}: {message.strip()}" if own else "")


def test_disruption_and_deletion_are_read() -> None:
    body = build_pod(conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}])
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    view = view_pod(body)
    assert (view.disruption_reason, view.deleting) == ("EvictionByEvictionAPI", True)


def test_an_unschedulable_pod_is_recognized() -> None:
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/6 nodes"}
    assert view_pod(build_pod(conditions=[reason])).unschedulable_message == "0/6 nodes"


def test_a_node_is_parsed() -> None:
    node = {
        "metadata": {"name": "n", "uid": "u"},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "Unknown"}],
            "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
            "nodeInfo": {"bootID": "b-1"},
        },
    }
    view = view_node(node, NodeHealthRules())
    assert (view.ready, view.address, view.boot_id) == (False, "192.0.2.1", "b-1")
    assert view.labels == {}


def test_only_topology_labels_of_a_node_are_stored() -> None:
    labels = {"topology.kubernetes.io/zone": "z", "fabric.topograph.run/tier-0": "l", "kubernetes.io/os": "linux"}
    node = {"metadata": {"name": "n", "uid": "u", "labels": {**labels, "example.com/rack": "r"}}}
    assert sorted(view_node(node, NodeHealthRules()).labels) == [
        "fabric.topograph.run/tier-0",
        "topology.kubernetes.io/zone",
    ]
    assert view_node(node, NodeHealthRules(), ("example.com/rack",)).labels["example.com/rack"] == "r"


def test_silence_counts_from_the_operators_start() -> None:
    observation = build_training()
    memory = JobCache(observation.job, observation.desired)
    seen = build_observation(NOW - 4, memory, (), ClusterView(), NOW)
    assert {view.silent_seconds for view in seen.workers} == {4.0}
    memory.contacts["j-w0-0"] = WorkerContact(Heartbeat(worker="j-w0-0"), NOW - 3)
    memory.contacts["j-w1-0"] = WorkerContact(Heartbeat(worker="j-w1-0"), NOW - 30, open_polls=1)
    seen = build_observation(NOW - 60, memory, (), ClusterView(), NOW)
    assert [view.silent_seconds for view in seen.workers[:3]] == [3.0, 0.0, 60.0]


async def test_handled_faults_are_forgotten_once_they_are_written() -> None:
    observation = build_training()
    memory = JobCache(observation.job)
    fault = build_crash("j-w0-0", 0)
    memory.faults.add(fault, workers=1)
    memory.publish(observation.desired, "1")
    assert memory.faults
    memory.publish(observation.desired.settle_faults((fault.name,)), "2")
    assert not memory.faults


async def test_an_older_job_goes_first_but_not_indefinitely() -> None:
    memory = JobRegistry(0.0)
    older = memory.get_or_create(replace(build_job(), name="older"))
    waiting = DesiredState(Plan(), State(placement=Placement(attempts=2, template_accepted=1)))
    older.update(desired=waiting)
    older.update(phase=JobPhase.PENDING)
    younger = replace(build_job(), uid="other", created_at=NOW)

    def waits(attempts: int) -> bool:
        desired = replace(waiting, state=State(placement=Placement(attempts=attempts)))
        return bool(collect_cluster_view(memory, younger, desired, NodeSnapshot(), NOW).older_waiting_job)

    assert not waits(0)  # its first attempt is free
    assert waits(2)
    assert not waits(1)  # the older one has had its turn and failed once more
    younger = replace(younger, namespace="another")
    assert not waits(2), "tenants do not wait for each other"
    younger = replace(younger, namespace="ns")
    older.update(desired=waiting.with_placement(template_accepted=0))
    assert not waits(2), "it cannot have pods at all"


async def test_polls_return_for_a_new_plan_and_fault_reports_for_any_new_state() -> None:
    """A change does not search thousands of polls that it does not concern."""
    observation = build_training()
    memory = JobCache(observation.job)
    memory.publish(observation.desired, "1")
    reasons = list[str]()

    async def wait(readers: Waiters, what: str) -> None:
        await readers.wait("j-w0-0")
        reasons.append(what)

    tasks = [
        asyncio.create_task(wait(memory.poll_waiters, "poll")),
        asyncio.create_task(wait(memory.fault_waiters, "fault")),
    ]
    await asyncio.sleep(0)
    memory.publish(observation.desired.settle_faults(("j-w0-0-1",)), "2")
    await asyncio.wait_for(tasks[1], 60)
    assert reasons == ["fault"]
    memory.publish(observation.desired.with_requests(evidence=EvidenceRequest("why")), "3")
    await asyncio.wait_for(tasks[0], 60)
    assert reasons == ["fault", "poll"]
