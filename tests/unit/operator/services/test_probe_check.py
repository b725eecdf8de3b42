"""Probes of nodes that are not suspected: whether probe pods can pass at all, and what follows otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from pacekeeper_operator.api.node_probe import InconclusiveReason
from pacekeeper_operator.api.training_job import RemediationMode
from pacekeeper_operator.decide.nodes.node_probes import explain_inconclusive
from pacekeeper_operator.decide.nodes.quarantine_steps import ProbePod
from pacekeeper_operator.kube.client import EVENTS, PODS, Denied, Object
from pacekeeper_operator.services import probe_check
from pacekeeper_operator.services.probe_check import AGAIN_SECONDS, FIRST_SECONDS, MOST_NODES, PERIOD_SECONDS
from pacekeeper_operator.settings import Settings
from tests.unit.operator.test_preflight_service import USUAL, Place, told, with_gpus

SETTINGS = Settings(namespace="system", quarantine_mode=RemediationMode.ACT)
PASSES = told(USUAL)
NO_NETWORK = told({"unfit": "the API server cannot be reached", "check": "network"}, "Failed")
NO_ROOM: Object = {"phase": "Failed", "reason": "OutOfcpu", "message": "not enough cpu"}
NO_IMAGE: Object = {
    "phase": "Pending",
    "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}],
}


class CheckBench:
    def __init__(self, settings: Settings = SETTINGS, /, **probe_results: Object) -> None:
        self.place = Place(settings, **{name: [result] for name, result in probe_results.items()})
        self.operator, self.cluster = self.place.operator, self.place.cluster
        self.operator.paused = ""

    async def check(self) -> None:
        task = asyncio.ensure_future(probe_check.check_probes(self.operator))
        await self.place.timeline.run(MOST_NODES * 70.0)
        await task
        assert not self.cluster.pods(), "all pods are deleted"
        assert all("passed" not in probe for probe in self.cluster.probes().values()), "it is no preflight"

    def list_events(self) -> list[tuple[str, str]]:
        found = [body for (plural, _, _), body in self.cluster.objects.items() if plural == EVENTS.plural]
        return [(body["reason"], body["type"]) for body in found]

    def set_results(self, results: Mapping[str, Object]) -> None:
        self.cluster.words = {name: [results.get(name, PASSES)] for name in self.cluster.words}


def read_metric() -> float | None:
    return REGISTRY.get_sample_value("pacekeeper_probes_cannot_pass")


async def test_one_node_that_passes_is_enough() -> None:
    bench = CheckBench(a=PASSES, b=PASSES, c=PASSES)
    await bench.check()
    assert len(bench.cluster.made) == 1
    assert (bench.operator.node_registry.failing_check, read_metric(), bench.list_events()) == ("", 0, [])


@pytest.mark.parametrize(
    ("result", "check"), [(NO_NETWORK, "network"), (NO_IMAGE, "runs"), ({"phase": "Pending"}, "runs")]
)
async def test_a_failure_on_known_good_nodes_is_reported_until_a_probe_passes(result: Object, check: str) -> None:
    bench = CheckBench(a=result, b=result, c=result, d=result)
    for _ in range(2):
        await bench.check()
    assert (bench.operator.node_registry.failing_check, read_metric()) == (check, 1)
    assert bench.list_events() == [("ProbesCannotPass", "Warning")], "once"
    assert len(bench.cluster.made) == 2 * MOST_NODES
    bench.set_results({})
    await bench.check()
    assert (bench.operator.node_registry.failing_check, read_metric()) == ("", 0)
    assert bench.list_events()[1:] == [("ProbesPassAgain", "Normal")]


async def test_a_single_broken_node_is_no_failure_of_the_check() -> None:
    for broken in "abc":
        bench = CheckBench(a=PASSES, b=PASSES, c=PASSES)
        bench.set_results({broken: NO_NETWORK})
        await bench.check()
        assert bench.operator.node_registry.failing_check == ""
    different = CheckBench(a=NO_NETWORK, b=told({"unfit": "memory", "check": "memory"}, "Failed"))
    await different.check()
    assert different.operator.node_registry.failing_check == "", "they fail different checks"


async def test_results_of_preflights_stay() -> None:
    bench = CheckBench(a=PASSES, b=PASSES, c=PASSES)
    await bench.place.look("a", "b", "c", seconds=30.0)
    before, made = bench.cluster.probes(), len(bench.cluster.made)
    task = asyncio.ensure_future(probe_check.check_probes(bench.operator))
    await bench.place.timeline.run(30)
    await task
    assert len(bench.cluster.made) == made + 1
    assert bench.cluster.probes() == before


async def test_a_probe_that_does_not_fit_changes_nothing() -> None:
    bench = CheckBench(a=NO_NETWORK)
    await bench.check()
    bench.set_results({"a": NO_ROOM})
    await bench.check()
    assert bench.operator.node_registry.failing_check == "network", "unchanged"


async def test_a_refused_probe_pod_is_a_failure_of_the_check() -> None:
    bench = CheckBench(a=PASSES, b=PASSES)
    bench.cluster.refusals[PODS.plural] = [Denied('RuntimeClass "nvidia" not found'), Denied("again")]
    await bench.check()
    assert (bench.operator.node_registry.failing_check, bench.list_events()) == (
        "runs",
        [("ProbesCannotPass", "Warning")],
    )


def build_pod(name: str, node: str, gpus: str = "0", **labels: str) -> Object:
    container = {"name": "trainer", "image": "i", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    metadata = {"name": name, "namespace": "team", "uid": name, "labels": labels, "resourceVersion": "1"}
    metadata |= {"creationTimestamp": "2026-11-01T00:00:00Z"}
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": [container]}, "status": {"phase": "Running"}}


async def test_only_nodes_that_are_free_and_unsuspected_are_probed() -> None:
    bench = CheckBench(a=PASSES, b=PASSES, c=PASSES, d=PASSES, e=PASSES)
    operator, objects = bench.operator, bench.cluster.objects
    with_gpus(bench.place, "a", "b")
    nodes = {name: objects["nodes", "", name] for name in "abcde"}
    nodes["c"]["spec"]["unschedulable"] = True
    operator.node_registry.quarantines.update(
        {"metadata": {"name": "d", "uid": "q", "resourceVersion": "1"}, "spec": {"reason": "XID 79"}}
    )
    chosen = probe_check._choose_nodes(operator, nodes)
    assert (set(chosen[:2]), chosen[2:]) == ({"a", "b"}, ["e"]), "those with GPUs first"
    operator.stores.pods.update(build_pod("worker", "a", **{"pacekeeper.dev/job": "j"}))
    assert probe_check._choose_nodes(operator, nodes) == ["b", "e"]
    objects["pods", "team", "other"] = build_pod("other", "b", "8")
    await bench.place.timeline.run(0)
    task = asyncio.ensure_future(probe_check.check_probes(operator))
    await bench.place.timeline.run(30)
    await task
    assert bench.cluster.made == ["e"], "all GPUs of b are taken"
    objects["pods", "team", "other"] = build_pod("other", "b", "7")
    task = asyncio.ensure_future(probe_check.check_probes(operator))
    await bench.place.timeline.run(30)
    await task
    assert bench.cluster.made == ["e", "b"]
    assert bench.cluster.specs[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


async def test_the_check_repeats_hourly_and_sooner_while_probes_fail() -> None:
    bench = CheckBench(a=NO_NETWORK)
    watching = asyncio.ensure_future(probe_check.watch_over(bench.operator))
    await bench.place.timeline.run(FIRST_SECONDS + 10)
    assert len(bench.cluster.made) == 1
    bench.set_results({})
    await bench.place.timeline.run(AGAIN_SECONDS + 10)
    assert len(bench.cluster.made) == 2
    await bench.place.timeline.run(PERIOD_SECONDS)
    assert len(bench.cluster.made) == 3
    bench.operator.paused = "for the night"
    await bench.place.timeline.run(3 * PERIOD_SECONDS)
    assert len(bench.cluster.made) == 3
    watching.cancel()


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(mode=RemediationMode.RECOMMEND, quarantine_mode=RemediationMode.ACT)]
)
async def test_no_check_runs_where_no_node_may_be_quarantined(settings: Settings) -> None:
    bench = CheckBench(settings, a=PASSES)
    watching = asyncio.ensure_future(probe_check.watch_over(bench.operator))
    await bench.place.timeline.run(3 * PERIOD_SECONDS)
    assert watching.done()
    assert not bench.cluster.made


@pytest.mark.parametrize("check", ["gpus", "network", "driver", ""])
def test_a_check_that_known_good_nodes_fail_convicts_no_node_unless_another_passes(check: str) -> None:
    """In a full cluster no other node can show that the check passes there; a free node has shown that it fails."""
    failed = ProbePod(phase="Failed", reported_check=check, has_gpus=True)
    assert explain_inconclusive(replace(failed, failing_check=check or "runs"))[0] is InconclusiveReason.SHARED_FAILURE
    other = ProbePod(phase="Succeeded", has_gpus=True)
    assert explain_inconclusive(replace(failed, failing_check=check or "runs", group_peers=(other,)))[0] is None
    assert explain_inconclusive(replace(failed, reported_check="gpus", failing_check="memory"))[0] is None
