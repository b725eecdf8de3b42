"""Preflight checks of nodes, with kubelets that answer as a test specifies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import kopf
import pytest

from pacekeeper_operator.api.training_job import PreflightSpec
from pacekeeper_operator.kube.client import NODE_OBJECTS, NODE_PROBES, PODS, Object, ResourceKind
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.preflight import check_nodes
from pacekeeper_operator.services.shared.probe_claims import FLIGHTS_AT_ONCE, GPU_NODES_AT_ONCE, GPU_REST_SECONDS
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.effect_results import NodeCheck
from testing.kubernetes.fake_cluster import FakeCluster
from testing.kubernetes.schema import find_schema_errors, read_schema
from testing.kubernetes.stored_job import INSTALLATION
from testing.operators.virtual_time import Timeline, VirtualRuntime

SETTINGS = Settings(namespace="system")
SPEC = PreflightSpec(enabled=True)
USUAL: Mapping[str, Any] = {"core_seconds": 0.001}
SLOW: Mapping[str, Any] = {"core_seconds": 0.002}


class Cluster(FakeCluster):
    """Nodes whose probe pods end at once: each with the next of the node's statuses, the last one repeatedly."""

    def __init__(self, **statuses: list[Object]) -> None:
        super().__init__()
        self.words = statuses
        self.made: list[str] = []  # nodes of all pods, in the order of creation
        self.specs: list[Object] = []  # of the same
        self.fail_next = 0  # the number of creations of pods that fail
        for name in statuses:
            self.node(name)

    def node(self, name: str, **labels: str) -> None:
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        metadata = {"name": name, "uid": f"uid-{name}", "labels": labels}
        self._store((NODE_OBJECTS.plural, "", name), {"metadata": metadata, "spec": {}, "status": status})

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        if kind is PODS and self.fail_next:
            self.fail_next -= 1
            raise kopf.TemporaryError("the API server is away", delay=1)
        if kind is PODS:
            name = body["spec"]["nodeName"]
            self.made.append(name)
            self.specs.append(body["spec"])
            statuses = self.words[name]
            body = {**body, "status": statuses.pop(0) if len(statuses) > 1 else statuses[0]}
        return await super().create(kind, body, dry_run=dry_run)

    def pods(self) -> list[Object]:
        return [body for (plural, _, _), body in self.objects.items() if plural == PODS.plural]

    def probes(self) -> dict[str, Object]:
        found = {key[2]: body["spec"] for key, body in self.objects.items() if key[0] == NODE_PROBES.plural}
        for spec in found.values():
            assert find_schema_errors(spec, read_schema("nodeprobes")["spec"]) == []
        return found


def told(figures: Mapping[str, Any], phase: str = "Succeeded") -> Object:
    ended = {"terminated": {"exitCode": int(phase == "Failed"), "message": json.dumps(figures)}}
    return {"phase": phase, "podIP": "10.0.0.1", "containerStatuses": [{"state": ended}]}


class Place:
    def __init__(self, settings: Settings = SETTINGS, /, **statuses: list[Object]) -> None:
        self.cluster, self.timeline = Cluster(**statuses), Timeline()
        runtime = VirtualRuntime(self.timeline)
        self.operator = Operator(
            settings, self.cluster, JobRegistry(0.0), INSTALLATION, PrometheusClient("", "", ""), runtime
        )

    async def look(
        self, *nodes: str, seconds: float = 190.0, since: float | None = None, gpus: bool = True
    ) -> dict[str, NodeCheck]:
        made = self.operator.runtime.now() if since is None else since
        wanted = {name: f"uid-{name}" for name in nodes}
        task = asyncio.ensure_future(check_nodes(self.operator, wanted, SPEC, made, gpus=gpus))
        await self.timeline.run(seconds)
        assert task.done(), "the check takes too long"
        assert not self.cluster.pods(), "all pods are deleted"
        return {uid.removeprefix("uid-"): check for uid, check in task.result().items()}


async def test_healthy_nodes_pass_and_are_not_probed_again() -> None:
    harness = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(USUAL)], d=[told(USUAL)])
    found = await harness.look("a", "b", "c")
    assert [check.passed for check in found.values()] == [True] * 3
    assert harness.cluster.made == ["a", "b", "c"]
    assert all(
        harness.cluster.probes()[name]["metrics"] == {"coreSeconds": 0.001} | build_zero_metrics() for name in "abc"
    )
    assert await harness.look("a", "b", "c") == found
    assert len(harness.cluster.made) == 3
    assert (await harness.look("a", "d"))["d"].passed, "healthy nodes are its companions"
    assert sorted(harness.cluster.made[3:]) == ["a", "b", "d"]


def build_zero_metrics() -> Object:
    names = ("slowestCoreSeconds", "cores", "heldBack", "idleCores", "throttled")
    return dict.fromkeys((*names, "memoryBytesPerSecond"), 0) | {"links": []}


async def test_probe_pods_get_the_installations_pull_secrets() -> None:
    harness = Place(replace(SETTINGS, image_pull_secrets="registry,mirror"), a=[told(USUAL)], b=[told(USUAL)])
    await harness.look("a", "b")
    assert [spec["imagePullSecrets"] for spec in harness.cluster.specs] == [
        [{"name": "registry"}, {"name": "mirror"}]
    ] * 2


async def test_a_node_that_is_slow_twice_fails_and_one_that_was_busy_for_a_moment_does_not() -> None:
    harness = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(SLOW)], d=[told(SLOW), told(USUAL)], e=[told(USUAL)])
    found = await harness.look("a", "b", "c", "d", "e")
    assert {name: check.passed for name, check in found.items()} == {
        "a": True,
        "b": True,
        "c": False,
        "d": True,
        "e": True,
    }
    assert "2.0 times as long" in found["c"].message
    assert harness.cluster.probes()["c"]["passed"] is False


@pytest.mark.parametrize(
    ("status", "passed", "message"),
    [
        (told({"unfit": "memory does not keep what is written"}, "Failed"), False, "memory does not keep"),
        ({"phase": "Failed", "reason": "OutOfpods"}, None, "OutOfpods"),
        ({"phase": "Running"}, False, "did not end within 90 s"),
        (told({"core_seconds": -1}), True, "termination message is invalid"),
        (told({}), True, "termination message is invalid"),
    ],
)
async def test_a_probe_pods_status_decides_the_check(status: Object, passed: bool | None, message: str) -> None:
    harness = Place(a=[told(USUAL)], b=[told(USUAL)], c=[status])
    check = (await harness.look("a", "b", "c"))["c"]
    assert check.passed is passed
    assert message in check.message
    assert harness.cluster.probes()["c"].get("passed") is passed


@pytest.mark.parametrize("check", ["network", "driver", ""])
async def test_a_failure_on_every_node_is_no_nodes_fault(check: str) -> None:
    unfit = told({"unfit": "it does not work", "check": check, "gpus": 1}, "Failed")
    harness = Place(a=[unfit], b=[unfit], c=[unfit])
    found = await harness.look("a", "b", "c")
    assert {check.passed for check in found.values()} == {None}
    assert "fails in the same way" in found["a"].message
    alone = Place(a=[told({"unfit": "no network", "check": "network"}, "Failed")])
    assert (await alone.look("a"))["a"].passed is None


async def test_if_most_pods_do_not_end_no_node_fails() -> None:
    harness = Place(a=[{"phase": "Running"}], b=[told(USUAL)], c=[{"phase": "Running"}])
    found = await harness.look("a", "b", "c")
    assert {name: check.passed for name, check in found.items()} == {"a": None, "b": True, "c": None}


async def test_a_pod_that_ends_at_the_last_poll_was_only_late() -> None:
    harness = Place(a=[told(USUAL)], b=[told(USUAL)], c=[{"phase": "Running"}, told(USUAL)])
    assert (await harness.look("a", "b", "c"))["c"].passed


async def test_a_hanging_image_pull_is_inconclusive() -> None:
    waiting = {"state": {"waiting": {"reason": "ErrImagePull"}}}
    harness = Place(a=[told(USUAL)], b=[told(USUAL)], c=[{"phase": "Pending", "containerStatuses": [waiting]}])
    assert (await harness.look("a", "b", "c"))["c"].passed is None


async def test_a_node_without_comparison_is_not_slow() -> None:
    harness = Place(a=[told(SLOW)])
    check = (await harness.look("a"))["a"]
    assert check.passed
    assert "no other node of its kind" in check.message


async def test_only_nodes_of_one_kind_are_compared() -> None:
    harness = Place(a=[told(SLOW)], b=[told(USUAL)], c=[told(USUAL)])
    harness.cluster.node("a", **{"node.kubernetes.io/instance-type": "small"})
    assert all(check.passed for check in (await harness.look("a", "b", "c")).values())


async def test_probes_of_an_earlier_operator_are_deleted_and_invalid_results_ignored() -> None:
    harness = Place(a=[told(USUAL)])
    left: Object = {
        "name": "preflight-x-0-0",
        "namespace": "system",
        "labels": {"pacekeeper.dev/probe-group": "preflight-x"},
    }
    harness.cluster._store(("pods", "system", left["name"]), {"metadata": left, "spec": {"nodeName": "a"}})
    harness.cluster._store(("nodeprobes", "", "a"), {"metadata": {"name": "a", "uid": "p"}, "spec": {"at": "long ago"}})
    assert (await harness.look("a"))["a"].passed


async def test_a_recreated_node_is_probed_again() -> None:
    harness = Place(a=[told(USUAL)])
    await harness.look("a")
    harness.cluster.objects["nodes", "", "a"]["metadata"]["uid"] = "another"
    task = asyncio.ensure_future(check_nodes(harness.operator, {"a": "another"}, SPEC, harness.operator.runtime.now()))
    await harness.timeline.run(90)
    assert list(task.result()) == ["another"]
    assert harness.cluster.made == ["a", "a"]
    assert await harness.look("a") == {}, "the requested node is gone"


def list_requested_gpus(harness: Place) -> list[str]:
    """Return the GPUs that all pods have requested."""
    return [spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", "0") for spec in harness.cluster.specs]


async def test_a_job_without_gpus_does_not_probe_gpus() -> None:
    harness = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(USUAL)], d=[told(USUAL)])
    for name in "abcd":
        harness.cluster.objects["nodes", "", name]["status"]["allocatable"] = {"nvidia.com/gpu": "8"}
    assert all(check.passed for check in (await harness.look("a", "b", "c", gpus=False)).values())
    assert list_requested_gpus(harness) == ["0"] * 3
    assert harness.cluster.probes()["a"]["gpusSkipped"] is True
    await harness.look("a", "b", "c", gpus=False)
    assert len(harness.cluster.made) == 3, "the result is cached"
    await harness.look("a", "b", "c")
    assert list_requested_gpus(harness)[3:] == ["8"] * 3, "a job with GPUs needs more"
    await harness.look("a", "b", "c", gpus=False)
    assert len(harness.cluster.made) == 6
    await harness.look("d")
    beside = dict(zip(harness.cluster.made[6:], list_requested_gpus(harness)[6:], strict=True))
    assert beside.pop("d") == "8"
    assert set(beside.values()) == {"1"}, "one GPU of a companion shows that pods find the driver"


async def test_two_checks_of_the_same_nodes_take_turns() -> None:
    harness = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(USUAL)])
    wanted = {name: f"uid-{name}" for name in "abc"}
    tasks = [
        asyncio.ensure_future(check_nodes(harness.operator, wanted, SPEC, harness.operator.runtime.now()))
        for _ in range(2)
    ]
    await harness.timeline.run(10)
    assert tasks[0].result() == tasks[1].result()
    assert len(harness.cluster.made) == 3


UNFINISHED: Object = {"phase": "Running", "podIP": "10.0.0.1"}


def start_check(harness: Place, *nodes: str, gpus: bool = True) -> asyncio.Task[dict[str, NodeCheck]]:
    wanted = {name: f"uid-{name}" for name in nodes}
    return asyncio.ensure_future(check_nodes(harness.operator, wanted, SPEC, harness.operator.runtime.now(), gpus=gpus))


def finish_probes(harness: Place, answer: Object) -> None:
    """Set the status of all pods that run, and of all that are created later."""
    for body in harness.cluster.pods():
        body["status"] = answer
    harness.cluster.words = {name: [answer] for name in harness.cluster.words}


async def test_jobs_on_different_nodes_do_not_wait_for_each_other() -> None:
    harness = Place(**{name: [UNFINISHED] for name in "abc"}, **{name: [told(USUAL)] for name in "def"})
    slow, quick = start_check(harness, "a", "b", "c"), start_check(harness, "d", "e", "f")
    await harness.timeline.run(10)
    assert not slow.done()
    assert all(check.passed for check in quick.result().values())
    finish_probes(harness, told(USUAL))
    await harness.timeline.run(10)
    assert slow.done()
    assert not harness.cluster.pods()


async def test_a_node_and_its_companions_are_probed_by_one_job_at_a_time() -> None:
    harness = Place(**{name: [UNFINISHED] for name in "abcd"})
    first, second = start_check(harness, "a"), start_check(harness, "a", "d")
    await harness.timeline.run(5)
    assert sorted(harness.cluster.made) == ["a", "b", "c"], "d has no comparison: it waits for companions"
    finish_probes(harness, told(USUAL))
    await harness.timeline.run(10)
    assert all(task.done() for task in (first, second))
    assert "no other node" not in str(second.result())
    assert second.result()["uid-d"].passed
    assert harness.cluster.made.count("a") == 2, "for itself, and as a companion"
    assert not harness.cluster.pods()


async def test_probes_of_a_running_check_are_not_deleted_by_the_next_job() -> None:
    harness = Place(**{name: [UNFINISHED] for name in "abc"}, **{name: [told(USUAL)] for name in "def"})
    start_check(harness, "a", "b", "c")
    await harness.timeline.run(5)
    running = [body["metadata"]["name"] for body in harness.cluster.pods()]
    start_check(harness, "d", "e", "f")
    await harness.timeline.run(5)
    assert [body["metadata"]["name"] for body in harness.cluster.pods()] == running
    finish_probes(harness, told(USUAL))
    await harness.timeline.run(10)


async def test_concurrent_checks_are_bounded() -> None:
    names = [f"n{i:02}" for i in range(18)]
    harness = Place(**{name: [UNFINISHED] for name in names})
    for i in range(0, 18, 3):
        start_check(harness, *names[i : i + 3])
    await harness.timeline.run(5)
    assert len(harness.cluster.made) == 3 * FLIGHTS_AT_ONCE
    finish_probes(harness, told(USUAL))
    await harness.timeline.run(10)
    assert set(harness.cluster.made) == set(names)


def with_gpus(harness: Place, *names: str) -> None:
    for name in names:
        harness.cluster.objects["nodes", "", name]["status"]["allocatable"] = {"nvidia.com/gpu": "8"}


def list_nodes_with_held_gpus(harness: Place) -> set[str]:
    """Return the nodes whose GPUs probe pods hold."""
    return {
        body["spec"]["nodeName"]
        for body in harness.cluster.pods()
        if "nvidia.com/gpu" in body["spec"]["containers"][0]["resources"]["limits"]
    }


async def test_free_gpus_of_few_nodes_are_held_at_a_time_and_the_next_job_probes_others() -> None:
    names = [f"n{i:02}" for i in range(24)]
    harness = Place(**{name: [UNFINISHED] for name in names})
    with_gpus(harness, *names)
    tasks = [start_check(harness, *names[:12]), start_check(harness, *names[12:])]
    await harness.timeline.run(5)
    assert len(harness.cluster.pods()) == 24, "no check waits for GPUs"
    assert 0 < len(list_nodes_with_held_gpus(harness)) <= GPU_NODES_AT_ONCE
    finish_probes(harness, told(USUAL))
    await harness.timeline.run(10)
    assert all(task.done() for task in tasks)
    left = {name for name, probe in harness.cluster.probes().items() if probe.get("gpusSkipped")}
    assert len(left) >= 24 - GPU_NODES_AT_ONCE
    made = len(harness.cluster.made)
    await harness.look(*names, seconds=10.0)
    after = {name for name, probe in harness.cluster.probes().items() if probe.get("gpusSkipped")}
    assert after < left
    assert len(harness.cluster.made) - made <= GPU_NODES_AT_ONCE, "not all of them once more"


async def test_free_gpus_of_a_node_are_not_probed_again_soon_for_a_recreated_job() -> None:
    harness = Place(**{name: [told(USUAL)] for name in "abc"})
    with_gpus(harness, *"abc")
    spec = replace(SPEC, valid_for=60.0)
    wanted = {name: f"uid-{name}" for name in "abc"}
    for _ in range(20):
        task = asyncio.ensure_future(check_nodes(harness.operator, wanted, spec, harness.operator.runtime.now()))
        await harness.timeline.run(70)
        assert all(check.passed for check in task.result().values())
    nodes_with_held_gpus = [gpus for gpus in list_requested_gpus(harness) if gpus != "0"]
    assert len(list_requested_gpus(harness)) == 60, "the nodes themselves are probed each time"
    assert 3 <= len(nodes_with_held_gpus) <= 3 * (1 + 20 * 70 / GPU_REST_SECONDS)


async def test_a_node_whose_gpus_failed_is_not_cleared_by_a_check_without_gpus() -> None:
    unfit = told({"unfit": "a GPU is gone", "check": "gpus", "gpus": 8}, "Failed")
    harness = Place(a=[unfit], b=[told({**USUAL, "gpus": 8})], c=[told({**USUAL, "gpus": 8})])
    with_gpus(harness, *"abc")
    spec = replace(SPEC, valid_for=60.0)
    for _ in range(2):
        wanted = {name: f"uid-{name}" for name in "abc"}
        task = asyncio.ensure_future(check_nodes(harness.operator, wanted, spec, harness.operator.runtime.now()))
        await harness.timeline.run(100)
        assert task.result()["uid-a"].passed is False
    probe_of_a = [
        gpus for name, gpus in zip(harness.cluster.made, list_requested_gpus(harness), strict=True) if name == "a"
    ]
    assert probe_of_a == ["8", "8"]


async def test_a_failed_check_releases_its_nodes() -> None:
    harness = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(USUAL)])
    harness.cluster.fail_next = 1
    with pytest.raises(kopf.TemporaryError):
        await harness.look("a", "b", "c")
    assert all(check.passed for check in (await harness.look("a", "b", "c")).values())


async def test_failed_checks_release_gpus() -> None:
    harness = Place(**{name: [told(USUAL)] for name in "abc"})
    with_gpus(harness, *"abc")
    for _ in range(GPU_NODES_AT_ONCE):
        harness.cluster.fail_next = 1
        with pytest.raises(kopf.TemporaryError):
            await harness.look("a", "b", "c", seconds=5.0)
        await harness.timeline.run(GPU_REST_SECONDS)
    await harness.look("a", "b", "c", seconds=10.0)
    assert list_requested_gpus(harness) == ["8"] * 3


async def test_a_probe_deleted_during_a_check_is_repeated_by_the_next_check() -> None:
    harness = Place(**{name: [told(USUAL)] for name in "abcdef"})
    await harness.look("a", "b", "c", seconds=10.0)
    finish_probes(harness, UNFINISHED)
    under_way = start_check(harness, "a", "d", "e", "f")
    await harness.timeline.run(5)
    del harness.cluster.objects["nodeprobes", "", "a"]
    finish_probes(harness, told(USUAL))
    await harness.timeline.run(10)
    assert set(under_way.result()) == {"uid-d", "uid-e", "uid-f"}
    assert (await harness.look("a", seconds=10.0))["a"].passed
