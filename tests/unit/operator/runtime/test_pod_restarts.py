"""The restart of a watched job that hangs, from end to end: stalls of sidecars, and the pod in the API server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport
from pacekeeper_operator.api.names import LABEL_WATCH_RESTART, WATCH_CONFIG_MAP
from pacekeeper_operator.api.training_job import RemediationMode
from pacekeeper_operator.endpoint import sidecars
from pacekeeper_operator.kube.client import CONFIG_MAPS, JOBS, NAMESPACES, PODS, ResourceKind
from pacekeeper_operator.services.operator import PAUSE_UNKNOWN
from pacekeeper_operator.settings import Settings
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.observations import NOW, build_stall
from testing.operators.watched_pods import JOB_OWNER, build_pod_body, describe_ranks
from testing.operators.watching_operator import WatchingOperator

JOB_SETS = ResourceKind("/apis/jobset.x-k8s.io/v1alpha2", "jobsets")
JOB_SET_OWNER = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "name": "set",
    "uid": "set-uid",
    "controller": True,
}
PODS_OF_RANKS = {"train-a": [0, 1], "train-b": [2, 3]}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(sidecars, "FAULT_ACK_TIMEOUT_SECONDS", 0.01)
    return FakeCluster()


async def create_objects(cluster: FakeCluster) -> None:
    """Create a JobSet that restarts all of its Jobs, in a namespace that has enabled restarts."""
    await cluster.create(NAMESPACES, {"metadata": {"name": "ns", "labels": {LABEL_WATCH_RESTART: "enabled"}}})
    data = {"enabled": "true", "ca.crt": "PEM"}
    namespace = Settings().namespace
    await cluster.create(CONFIG_MAPS, {"metadata": {"name": WATCH_CONFIG_MAP, "namespace": namespace}, "data": data})
    await cluster.create(
        JOB_SETS,
        {
            "metadata": {"name": "set", "namespace": "ns", "uid": "set-uid"},
            "spec": {"failurePolicy": {"maxRestarts": 3}},
        },
    )
    await cluster.create(
        JOBS,
        {
            "metadata": {"name": "train", "namespace": "ns", "uid": "job-uid", "ownerReferences": [JOB_SET_OWNER]},
            "spec": {"backoffLimit": 0},
        },
    )
    for name in PODS_OF_RANKS:
        await create_pod(cluster, name)


async def create_pod(cluster: FakeCluster, name: str) -> None:
    labels = {"jobset.sigs.k8s.io/jobset-name": "set"}
    await cluster.create(PODS, build_pod_body(name, JOB_OWNER, labels=labels))


async def start_operator(
    cluster: FakeCluster, *, at: float = 0.0, restart: bool = True, paused: str = ""
) -> WatchingOperator:
    watching = WatchingOperator(cluster, watch_restart=restart)
    watching.operator.paused = paused
    watching.move_time(at)
    await watching.start()
    await report_all(watching)
    return watching


async def report_all(watching: WatchingOperator, step: int = 500) -> None:
    for pod, ranks in PODS_OF_RANKS.items():
        if ("pods", "ns", pod) in watching.cluster.objects:
            await watching.report(pod, describe_ranks(ranks, 4), step=step)


async def report_hang(watching: WatchingOperator, seconds: float) -> None:
    """Report that rank 2 has blocked all others for `seconds`, and run a pass."""
    watching.move_time(seconds)
    await report_all(watching)
    for pod, ranks in PODS_OF_RANKS.items():
        states = (build_stall(pod, rank, culprit=rank == 2).ranks[0] for rank in ranks)
        stalled = tuple(
            replace(state, rank=rank, process_state="S", waiting_seconds=seconds)
            for rank, state in zip(ranks, states, strict=True)
        )
        name, at = f"{pod}-stalled-{seconds:.0f}", NOW + seconds - 0.1
        await watching.report_fault(FaultReport(name, FaultKind.STALLED, pod, 1, at, step=500, ranks=stalled))
    await watching.run_pass()


def list_pods(cluster: FakeCluster) -> list[str]:
    return sorted(name for kind, _, name in cluster.objects if kind == "pods")


def get_incident(cluster: FakeCluster) -> dict[str, Any]:
    (incident,) = (body for (kind, _, _), body in cluster.objects.items() if kind == "incidents")
    return incident


async def start_hang(cluster: FakeCluster, *, restart: bool = True) -> WatchingOperator:
    """Start an operator whose job hangs: for a moment, then for some more seconds."""
    await create_objects(cluster)
    watching = await start_operator(cluster, restart=restart)
    for _ in range(2):
        await watching.run_pass()
    await report_hang(watching, 4.0)
    await report_hang(watching, 8.0)
    return watching


async def test_the_pod_of_a_rank_that_hangs_for_long_is_deleted_and_the_next_round_is_measured(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = await start_hang(cluster)
    assert "if all ranks stand still for 300 s" in get_incident(cluster)["status"]["message"]
    delete = cluster.delete

    async def check_and_delete(kind: ResourceKind, name: str, namespace: str = "", **options: Any) -> None:
        (state,) = (body for (plural, _, _), body in cluster.objects.items() if plural == "trainingjobstates")
        assert [restart["pod"] for restart in state["state"]["watched"]["restarts"]] == [name], "written before"
        assert options == {
            "uid": "uid-train-b",
            "version": cluster.objects["pods", "ns", name]["metadata"]["resourceVersion"],
        }
        await delete(kind, name, namespace, **options)

    monkeypatch.setattr(cluster, "delete", check_and_delete)
    await report_hang(watching, 301.0)
    assert list_pods(cluster) == ["train-a"]
    status = get_incident(cluster)["status"]
    assert (status["mode"], status["remedy"], status.get("outcome")) == ("Act", "RestartRanks", None)
    assert status["message"] == "pod train-b is deleted: JobSet set restarts all its Jobs"
    monkeypatch.undo()
    await cluster.delete(PODS, "train-a", "ns")  # the JobSet creates its Jobs again
    for name in ("train-c", "train-d"):
        await create_pod(cluster, name)
    watching.move_time(320.0)
    await watching.run_pass()
    for name, ranks in (("train-c", [0, 1]), ("train-d", [2, 3])):
        await watching.report(name, describe_ranks(ranks, 4, started_at=NOW + 310, resumed_from=400), step=5)
    for _ in range(2):
        await watching.run_pass()
    assert get_incident(cluster)["status"]["outcome"] == "Recovered"
    assert list_pods(cluster) == ["train-c", "train-d"]


@pytest.mark.parametrize("change", ["chart", "namespace", "breaker", "pause", "recommend", "job-set"])
async def test_each_of_them_keeps_the_pod(cluster: FakeCluster, change: str) -> None:
    watching = await start_hang(cluster, restart=change != "chart")
    if change == "namespace":
        await cluster.patch(NAMESPACES, "ns", {"metadata": {"labels": {LABEL_WATCH_RESTART: "disabled"}}})
    elif change == "breaker":
        await cluster.patch(CONFIG_MAPS, WATCH_CONFIG_MAP, {"data": {"enabled": "false"}}, Settings().namespace)
    elif change == "pause":
        watching.operator.paused = "maintenance"
    elif change == "recommend":
        watching.operator.settings = replace(watching.operator.settings, mode=RemediationMode.RECOMMEND)
    elif change == "job-set":
        await cluster.patch(JOB_SETS, "set", {"status": {"restarts": 3}}, "ns")
    await report_hang(watching, 301.0)
    assert list_pods(cluster) == ["train-a", "train-b"]
    status = get_incident(cluster)["status"]
    assert (status["mode"], status.get("applied")) == ("Recommend", None)


async def test_an_api_server_that_refuses_does_not_end_the_observation(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = await start_hang(cluster)

    async def fail(kind: ResourceKind, *_: Any, **__: Any) -> None:
        raise kopf.TemporaryError(f"{kind.plural} are forbidden")

    monkeypatch.setattr(cluster, "collect", fail)
    await report_hang(watching, 301.0)
    assert list_pods(cluster) == ["train-a", "train-b"]


async def die_before_deletion(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an operator decide about a hang, and lose the API server before it deletes the pod."""
    watching = await start_hang(cluster)

    async def die(*_: Any, **__: Any) -> None:
        raise kopf.TemporaryError("the connection is lost")

    with monkeypatch.context() as dying:
        dying.setattr(cluster, "delete", die)
        await report_hang(watching, 301.0)


async def test_an_operator_that_dies_before_the_deletion_is_succeeded_by_one_that_deletes(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await die_before_deletion(cluster, monkeypatch)
    assert list_pods(cluster) == ["train-a", "train-b"]
    for paused, left in ((PAUSE_UNKNOWN, ["train-a", "train-b"]), ("", ["train-a"])):
        successor = await start_operator(cluster, at=310.0, paused=paused)
        await successor.run_pass()
        assert list_pods(cluster) == left
    assert get_incident(cluster)["status"]["mode"] == "Act"


async def test_an_operator_that_dies_after_the_deletion_is_succeeded_by_one_that_deletes_no_other_pod(
    cluster: FakeCluster,
) -> None:
    watching = await start_hang(cluster)
    await report_hang(watching, 301.0)
    successor_pod = build_pod_body("train-b", labels={"jobset.sigs.k8s.io/jobset-name": "set"})
    successor_pod["metadata"]["uid"] = "uid-of-the-next"
    await cluster.create(PODS, successor_pod)
    successor = await start_operator_without(cluster, "train-b", at=310.0)
    for _ in range(2):
        await successor.run_pass()
    assert list_pods(cluster) == ["train-a", "train-b"]


async def start_operator_without(cluster: FakeCluster, pod: str, at: float) -> WatchingOperator:
    """Start the next operator, to which `pod` does not report."""
    watching = WatchingOperator(cluster, watch_restart=True)
    watching.move_time(at)
    await watching.start()
    for name in PODS_OF_RANKS.keys() - {pod}:
        await watching.report(name, describe_ranks(PODS_OF_RANKS[name], 4))
    return watching


async def test_what_has_changed_since_the_decision_withdraws_it(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await die_before_deletion(cluster, monkeypatch)
    await cluster.patch(JOB_SETS, "set", {"spec": {"suspend": True}}, "ns")
    successor = await start_operator(cluster, at=310.0)
    for _ in range(3):
        await successor.run_pass()
    assert list_pods(cluster) == ["train-a", "train-b"]
    status = get_incident(cluster)["status"]
    assert (status["mode"], status.get("applied")) == ("Recommend", None)
    assert status["message"] == "not restarted: JobSet set restarts nothing: it is suspended"
