"""Looks at nodes as they are carried out, with kubelets that answer as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api import PreflightSpec
from pacekeeper_operator.cluster import NODE_PROBES, NODES, PODS, Kind, Object
from pacekeeper_operator.observation import NodeCheck
from pacekeeper_operator.observe.memory import Memory
from pacekeeper_operator.observe.prometheus import Prometheus
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.preflight import look
from pacekeeper_operator.settings import Settings
from tests.support.fake_cluster import FakeCluster
from tests.support.schema import faults, schema
from tests.support.virtual_time import Timeline, VirtualRuntime
from tests.support.written import INSTALLATION

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
        for name in words:
            self.node(name)

    def node(self, name: str, **labels: str) -> None:
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        metadata = {"name": name, "uid": f"uid-{name}", "labels": labels}
        self._store((NODES.plural, "", name), {"metadata": metadata, "spec": {}, "status": status})

    async def create(self, kind: Kind, body: Object, *, dry_run: bool = False) -> Object:
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
            assert faults(spec, schema("nodeprobes")["spec"]) == []
        return found


def told(figures: Mapping[str, Any], phase: str = "Succeeded") -> Object:
    ended = {"terminated": {"exitCode": int(phase == "Failed"), "message": json.dumps(figures)}}
    return {"phase": phase, "podIP": "10.0.0.1", "containerStatuses": [{"state": ended}]}


class Place:
    def __init__(self, settings: Settings = SETTINGS, **words: list[Object]) -> None:
        self.cluster, self.timeline = Cluster(**words), Timeline()
        runtime = VirtualRuntime(self.timeline)
        self.operator = Operator(settings, self.cluster, Memory(0.0), INSTALLATION, Prometheus("", "", ""), runtime)

    async def look(
        self, *nodes: str, seconds: float = 190.0, since: float | None = None, gpus: bool = True
    ) -> dict[str, NodeCheck]:
        made = self.operator.runtime.now() if since is None else since
        wanted = {name: f"uid-{name}" for name in nodes}
        task = asyncio.ensure_future(look(self.operator, wanted, SPEC, made, gpus=gpus))
        await self.timeline.run(seconds)
        assert task.done(), "it takes too long"
        assert not self.cluster.pods(), "nothing is left of it"
        return {uid.removeprefix("uid-"): check for uid, check in task.result().items()}


async def test_healthy_nodes_pass_and_are_not_looked_at_again() -> None:
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[told(USUAL)], d=[told(USUAL)])
    found = await place.look("a", "b", "c")
    assert [check.passed for check in found.values()] == [True] * 3
    assert place.cluster.made == ["a", "b", "c"]
    assert all(place.cluster.probes()[name]["figures"] == {"coreSeconds": 0.001} | _rest() for name in "abc")
    assert await place.look("a", "b", "c") == found
    assert len(place.cluster.made) == 3
    assert (await place.look("a", "d"))["d"].passed, "it gets company of those that are known"
    assert sorted(place.cluster.made[3:]) == ["a", "b", "d"]


def _rest() -> Object:
    names = ("slowestCoreSeconds", "cores", "heldBack", "idleCores", "throttled", "pressure", "frequency")
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
    assert "2.0 times as long" in found["c"].words
    assert place.cluster.probes()["c"]["passed"] is False


@pytest.mark.parametrize(
    ("status", "passed", "words"),
    [
        (told({"unfit": "memory does not keep what is written"}, "Failed"), False, "memory does not keep"),
        ({"phase": "Failed", "reason": "OutOfpods"}, None, "OutOfpods"),
        ({"phase": "Running"}, False, "did not end within 90 s"),
        (told({"core_seconds": -1}), True, "cannot be read"),
        (told({}), True, "cannot be read"),
    ],
)
async def test_what_a_probe_pod_comes_to(status: Object, passed: bool | None, words: str) -> None:
    place = Place(a=[told(USUAL)], b=[told(USUAL)], c=[status])
    check = (await place.look("a", "b", "c"))["c"]
    assert check.passed is passed
    assert words in check.words
    assert place.cluster.probes()["c"].get("passed") is passed


@pytest.mark.parametrize("check", ["network", "driver", ""])
async def test_what_fails_on_every_node_is_no_nodes_fault(check: str) -> None:
    unfit = told({"unfit": "it does not work", "check": check, "gpus": 1}, "Failed")
    place = Place(a=[unfit], b=[unfit], c=[unfit])
    found = await place.look("a", "b", "c")
    assert {check.passed for check in found.values()} == {None}
    assert "fails in the same way" in found["a"].words
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
    assert "no other node of its kind" in check.words


async def test_only_nodes_of_one_kind_are_held_against_each_other() -> None:
    place = Place(a=[told(SLOW)], b=[told(USUAL)], c=[told(USUAL)])
    place.cluster.node("a", **{"node.kubernetes.io/instance-type": "small"})
    assert all(check.passed for check in (await place.look("a", "b", "c")).values())


async def test_what_an_operator_before_has_left_goes_and_what_cannot_be_read_is_nothing() -> None:
    place = Place(a=[told(USUAL)])
    left: Object = {
        "name": "preflight-x-0-0",
        "namespace": "system",
        "labels": {"pacekeeper.dev/circle": "preflight-x"},
    }
    place.cluster._store(("pods", "system", left["name"]), {"metadata": left, "spec": {"nodeName": "a"}})
    place.cluster._store(("nodeprobes", "", "a"), {"metadata": {"name": "a", "uid": "p"}, "spec": {"at": "long ago"}})
    assert (await place.look("a"))["a"].passed


async def test_a_node_that_was_made_anew_is_another_one() -> None:
    place = Place(a=[told(USUAL)])
    await place.look("a")
    place.cluster.objects["nodes", "", "a"]["metadata"]["uid"] = "another"
    task = asyncio.ensure_future(look(place.operator, {"a": "another"}, SPEC, place.operator.runtime.now()))
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
    assert place.cluster.probes()["a"]["gpusLeftAlone"] is True
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
    looks = [asyncio.ensure_future(look(place.operator, wanted, SPEC, place.operator.runtime.now())) for _ in range(2)]
    await place.timeline.run(10)
    assert looks[0].result() == looks[1].result()
    assert len(place.cluster.made) == 3
