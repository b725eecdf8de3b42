"""Looks at nodes as they are carried out, with kubelets that answer as a test says."""

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
    """Nodes whose probe pods answer at once: each time with the next of their words, and at last with the last."""

    def __init__(self, **words: list[Object]) -> None:
        super().__init__()
        self.words = words
        self.made: list[str] = []  # nodes of all pods, in the order in which they were made
        self.specs: list[Object] = []  # of the same
        self.fail_next = 0  # so many creations of pods fail
        for name in words:
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
            words = self.words[name]
            body = {**body, "status": words.pop(0) if len(words) > 1 else words[0]}
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
    def __init__(self, settings: Settings = SETTINGS, /, **words: list[Object]) -> None:
        self.cluster, self.timeline = Cluster(**words), Timeline()
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
        assert task.done(), "it takes too long"
        assert not self.cluster.pods(), "nothing is left of it"
        return {uid.removeprefix("uid-"): check for uid, check in task.result().items()}


async def test_healthy_nodes_pass_and_are_not_looked_at_again() -> None:
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(USUAL)], d=[told(USUAL)])
    found = await place.look("a", "b", "c")
    assert [check.passed for check in found.values()] == [True] * 3
    assert place.cluster.made == ["a", "b", "c"]
    assert all(place.cluster.probes()[name]["metrics"] == {"coreSeconds": 0.001} | _rest() for name in "abc")
    assert await place.look("a", "b", "c") == found
    assert len(place.cluster.made) == 3
    assert (await place.look("a", "d"))["d"].passed, "it gets company of those that are known"
    assert sorted(place.cluster.made[3:]) == ["a", "b", "d"]


def _rest() -> Object:
    names = ("slowestCoreSeconds", "cores", "heldBack", "idleCores", "throttled")
    return dict.fromkeys((*names, "memoryBytesPerSecond"), 0) | {"links": []}


async def test_probe_pods_get_the_installations_pull_secrets() -> None:
    place = Place(replace(SETTINGS, image_pull_secrets="registry,mirror"), a=[told(USUAL)], b=[told(USUAL)])
    await place.look("a", "b")
    assert [spec["imagePullSecrets"] for spec in place.cluster.specs] == [
        [{"name": "registry"}, {"name": "mirror"}]
    ] * 2


async def test_a_node_that_is_slow_twice_fails_and_one_that_was_busy_for_a_moment_does_not() -> None:
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(SLOW)], d=[told(SLOW), told(USUAL)], e=[told(USUAL)])
    found = await place.look("a", "b", "c", "d", "e")
    assert {name: check.passed for name, check in found.items()} == {
        "a": True,
        "b": True,
        "c": False,
        "d": True,
        "e": True,
    }
    assert "2.0 times as long" in found["c"].message
    assert place.cluster.probes()["c"]["passed"] is False


@pytest.mark.parametrize(
    ("status", "passed", "words"),
    [
        (told({"unfit": "memory does not keep what is written"}, "Failed"), False, "memory does not keep"),
        ({"phase": "Failed", "reason": "OutOfpods"}, None, "OutOfpods"),
        ({"phase": "Running"}, False, "did not end within 90 s"),
        (told({"core_seconds": -1}), True, "termination message is invalid"),
        (told({}), True, "termination message is invalid"),
    ],
)
async def test_what_a_probe_pod_comes_to(status: Object, passed: bool | None, words: str) -> None:
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[status])
    check = (await place.look("a", "b", "c"))["c"]
    assert check.passed is passed
    assert words in check.message
    assert place.cluster.probes()["c"].get("passed") is passed


@pytest.mark.parametrize("check", ["network", "driver", ""])
async def test_what_fails_on_every_node_is_no_nodes_fault(check: str) -> None:
    unfit = told({"unfit": "it does not work", "check": check, "gpus": 1}, "Failed")
    place = Place(a=[unfit], b=[unfit], c=[unfit])
    found = await place.look("a", "b", "c")
    assert {check.passed for check in found.values()} == {None}
    assert "fails in the same way" in found["a"].message
    alone = Place(a=[told({"unfit": "no network", "check": "network"}, "Failed")])
    assert (await alone.look("a"))["a"].passed is None


async def test_where_hardly_a_pod_ends_it_is_no_nodes_fault() -> None:
    place = Place(a=[{"phase": "Running"}], b=[told(USUAL)], c=[{"phase": "Running"}])
    found = await place.look("a", "b", "c")
    assert {name: check.passed for name, check in found.items()} == {"a": None, "b": True, "c": None}


async def test_a_pod_that_ends_when_it_is_looked_at_once_more_was_only_late() -> None:
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[{"phase": "Running"}, told(USUAL)])
    assert (await place.look("a", "b", "c"))["c"].passed


async def test_a_pull_that_hangs_says_nothing_about_the_node() -> None:
    waiting = {"state": {"waiting": {"reason": "ErrImagePull"}}}
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[{"phase": "Pending", "containerStatuses": [waiting]}])
    assert (await place.look("a", "b", "c"))["c"].passed is None


async def test_alone_a_node_is_not_slow() -> None:
    place = Place(a=[told(SLOW)])
    check = (await place.look("a"))["a"]
    assert check.passed
    assert "no other node of its kind" in check.message


async def test_only_nodes_of_one_kind_are_held_against_each_other() -> None:
    place = Place(a=[told(SLOW)], b=[told(USUAL)], c=[told(USUAL)])
    place.cluster.node("a", **{"node.kubernetes.io/instance-type": "small"})
    assert all(check.passed for check in (await place.look("a", "b", "c")).values())


async def test_what_an_operator_before_has_left_goes_and_what_cannot_be_read_is_nothing() -> None:
    place = Place(a=[told(USUAL)])
    left: Object = {
        "name": "preflight-x-0-0",
        "namespace": "system",
        "labels": {"pacekeeper.dev/probe-group": "preflight-x"},
    }
    place.cluster._store(("pods", "system", left["name"]), {"metadata": left, "spec": {"nodeName": "a"}})
    place.cluster._store(("nodeprobes", "", "a"), {"metadata": {"name": "a", "uid": "p"}, "spec": {"at": "long ago"}})
    assert (await place.look("a"))["a"].passed


async def test_a_node_that_was_made_anew_is_another_one() -> None:
    place = Place(a=[told(USUAL)])
    await place.look("a")
    place.cluster.objects["nodes", "", "a"]["metadata"]["uid"] = "another"
    task = asyncio.ensure_future(check_nodes(place.operator, {"a": "another"}, SPEC, place.operator.runtime.now()))
    await place.timeline.run(90)
    assert list(task.result()) == ["another"]
    assert place.cluster.made == ["a", "a"]
    assert await place.look("a") == {}, "the one that was meant is gone"


def asked(place: Place) -> list[str]:
    """GPUs that the pods made so far have asked for."""
    return [spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", "0") for spec in place.cluster.specs]


async def test_a_job_without_gpus_leaves_those_of_its_nodes_alone() -> None:
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(USUAL)], d=[told(USUAL)])
    for name in "abcd":
        place.cluster.objects["nodes", "", name]["status"]["allocatable"] = {"nvidia.com/gpu": "8"}
    assert all(check.passed for check in (await place.look("a", "b", "c", gpus=False)).values())
    assert asked(place) == ["0"] * 3
    assert place.cluster.probes()["a"]["gpusSkipped"] is True
    await place.look("a", "b", "c", gpus=False)
    assert len(place.cluster.made) == 3, "that is known"
    await place.look("a", "b", "c")
    assert asked(place)[3:] == ["8"] * 3, "for a job with GPUs it says too little"
    await place.look("a", "b", "c", gpus=False)
    assert len(place.cluster.made) == 6
    await place.look("d")
    beside = dict(zip(place.cluster.made[6:], asked(place)[6:], strict=True))
    assert beside.pop("d") == "8"
    assert set(beside.values()) == {"1"}, "company shows with one that pods find the driver"


async def test_two_looks_take_turns() -> None:
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(USUAL)])
    wanted = {name: f"uid-{name}" for name in "abc"}
    looks = [
        asyncio.ensure_future(check_nodes(place.operator, wanted, SPEC, place.operator.runtime.now())) for _ in range(2)
    ]
    await place.timeline.run(10)
    assert looks[0].result() == looks[1].result()
    assert len(place.cluster.made) == 3


HANGS: Object = {"phase": "Running", "podIP": "10.0.0.1"}


def begin(place: Place, *nodes: str, gpus: bool = True) -> asyncio.Task[dict[str, NodeCheck]]:
    wanted = {name: f"uid-{name}" for name in nodes}
    return asyncio.ensure_future(check_nodes(place.operator, wanted, SPEC, place.operator.runtime.now(), gpus=gpus))


def finish(place: Place, answer: Object) -> None:
    """All pods that run, and all that are made from now on."""
    for body in place.cluster.pods():
        body["status"] = answer
    place.cluster.words = {name: [answer] for name in place.cluster.words}


async def test_jobs_on_different_nodes_do_not_wait_for_each_other() -> None:
    place = Place(**{name: [HANGS] for name in "abc"}, **{name: [told(USUAL)] for name in "def"})
    slow, quick = begin(place, "a", "b", "c"), begin(place, "d", "e", "f")
    await place.timeline.run(10)
    assert not slow.done()
    assert all(check.passed for check in quick.result().values())
    finish(place, told(USUAL))
    await place.timeline.run(10)
    assert slow.done()
    assert not place.cluster.pods()


async def test_a_node_is_looked_at_by_one_job_at_a_time_and_its_company_is_not_asked_by_another() -> None:
    place = Place(**{name: [HANGS] for name in "abcd"})
    first, second = begin(place, "a"), begin(place, "a", "d")
    await place.timeline.run(5)
    assert sorted(place.cluster.made) == ["a", "b", "c"], "d alone could not be told to be slow: it waits for company"
    finish(place, told(USUAL))
    await place.timeline.run(10)
    assert all(task.done() for task in (first, second))
    assert "no other node" not in str(second.result())
    assert second.result()["uid-d"].passed
    assert place.cluster.made.count("a") == 2, "for itself, and as company"
    assert not place.cluster.pods()


async def test_what_a_look_has_under_way_is_not_swept_away_by_the_next_job() -> None:
    place = Place(**{name: [HANGS] for name in "abc"}, **{name: [told(USUAL)] for name in "def"})
    begin(place, "a", "b", "c")
    await place.timeline.run(5)
    running = [body["metadata"]["name"] for body in place.cluster.pods()]
    begin(place, "d", "e", "f")
    await place.timeline.run(5)
    assert [body["metadata"]["name"] for body in place.cluster.pods()] == running
    finish(place, told(USUAL))
    await place.timeline.run(10)


async def test_few_jobs_are_looked_at_at_a_time_however_many_there_are() -> None:
    names = [f"n{i:02}" for i in range(18)]
    place = Place(**{name: [HANGS] for name in names})
    for i in range(0, 18, 3):
        begin(place, *names[i : i + 3])
    await place.timeline.run(5)
    assert len(place.cluster.made) == 3 * FLIGHTS_AT_ONCE
    finish(place, told(USUAL))
    await place.timeline.run(10)
    assert set(place.cluster.made) == set(names)


def with_gpus(place: Place, *names: str) -> None:
    for name in names:
        place.cluster.objects["nodes", "", name]["status"]["allocatable"] = {"nvidia.com/gpu": "8"}


def holding(place: Place) -> set[str]:
    """Nodes whose GPUs probe pods hold."""
    return {
        body["spec"]["nodeName"]
        for body in place.cluster.pods()
        if "nvidia.com/gpu" in body["spec"]["containers"][0]["resources"]["limits"]
    }


async def test_free_gpus_of_few_nodes_are_held_at_a_time_and_the_next_job_looks_at_others() -> None:
    names = [f"n{i:02}" for i in range(24)]
    place = Place(**{name: [HANGS] for name in names})
    with_gpus(place, *names)
    tasks = [begin(place, *names[:12]), begin(place, *names[12:])]
    await place.timeline.run(5)
    assert len(place.cluster.pods()) == 24, "nobody waits for GPUs"
    assert 0 < len(holding(place)) <= GPU_NODES_AT_ONCE
    finish(place, told(USUAL))
    await place.timeline.run(10)
    assert all(task.done() for task in tasks)
    left = {name for name, probe in place.cluster.probes().items() if probe.get("gpusSkipped")}
    assert len(left) >= 24 - GPU_NODES_AT_ONCE
    made = len(place.cluster.made)
    await place.look(*names, seconds=10.0)
    after = {name for name, probe in place.cluster.probes().items() if probe.get("gpusSkipped")}
    assert after < left
    assert len(place.cluster.made) - made <= GPU_NODES_AT_ONCE, "not all of them once more"


async def test_a_nodes_free_gpus_rest_between_looks_however_often_a_job_is_made_anew() -> None:
    place = Place(**{name: [told(USUAL)] for name in "abc"})
    with_gpus(place, *"abc")
    spec = replace(SPEC, valid_for=60.0)
    wanted = {name: f"uid-{name}" for name in "abc"}
    for _ in range(20):
        task = asyncio.ensure_future(check_nodes(place.operator, wanted, spec, place.operator.runtime.now()))
        await place.timeline.run(70)
        assert all(check.passed for check in task.result().values())
    held = [gpus for gpus in asked(place) if gpus != "0"]
    assert len(asked(place)) == 60, "the nodes themselves are looked at each time"
    assert 3 <= len(held) <= 3 * (1 + 20 * 70 / GPU_REST_SECONDS)


async def test_a_node_whose_gpus_failed_is_not_cleared_by_a_look_without_them() -> None:
    unfit = told({"unfit": "a GPU is gone", "check": "gpus", "gpus": 8}, "Failed")
    place = Place(a=[unfit], b=[told({**USUAL, "gpus": 8})], c=[told({**USUAL, "gpus": 8})])
    with_gpus(place, *"abc")
    spec = replace(SPEC, valid_for=60.0)
    for _ in range(2):
        wanted = {name: f"uid-{name}" for name in "abc"}
        task = asyncio.ensure_future(check_nodes(place.operator, wanted, spec, place.operator.runtime.now()))
        await place.timeline.run(100)
        assert task.result()["uid-a"].passed is False
    of_a = [gpus for name, gpus in zip(place.cluster.made, asked(place), strict=True) if name == "a"]
    assert of_a == ["8", "8"]


async def test_a_look_that_fails_lets_go_of_its_nodes() -> None:
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(USUAL)])
    place.cluster.fail_next = 1
    with pytest.raises(kopf.TemporaryError):
        await place.look("a", "b", "c")
    assert all(check.passed for check in (await place.look("a", "b", "c")).values())


async def test_looks_that_fail_keep_no_gpus_from_others() -> None:
    place = Place(**{name: [told(USUAL)] for name in "abc"})
    with_gpus(place, *"abc")
    for _ in range(GPU_NODES_AT_ONCE):
        place.cluster.fail_next = 1
        with pytest.raises(kopf.TemporaryError):
            await place.look("a", "b", "c", seconds=5.0)
        await place.timeline.run(GPU_REST_SECONDS)
    await place.look("a", "b", "c", seconds=10.0)
    assert asked(place) == ["8"] * 3


async def test_what_people_delete_while_other_nodes_are_looked_at_is_looked_at_again_by_the_next_look() -> None:
    place = Place(**{name: [told(USUAL)] for name in "abcdef"})
    await place.look("a", "b", "c", seconds=10.0)
    finish(place, HANGS)
    under_way = begin(place, "a", "d", "e", "f")
    await place.timeline.run(5)
    del place.cluster.objects["nodeprobes", "", "a"]
    finish(place, told(USUAL))
    await place.timeline.run(10)
    assert set(under_way.result()) == {"uid-d", "uid-e", "uid-f"}
    assert (await place.look("a", seconds=10.0))["a"].passed
