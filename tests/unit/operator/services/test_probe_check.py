"""Probes of nodes that are not suspected: whether probe pods can pass at all, and what follows where they cannot."""

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


class Checked:
    def __init__(self, settings: Settings = SETTINGS, /, **words: Object) -> None:
        self.place = Place(settings, **{name: [answer] for name, answer in words.items()})
        self.operator, self.cluster = self.place.operator, self.place.cluster
        self.operator.paused = ""

    async def check(self) -> None:
        task = asyncio.ensure_future(probe_check.check_probes(self.operator))
        await self.place.timeline.run(MOST_NODES * 70.0)
        await task
        assert not self.cluster.pods(), "nothing is left of it"
        assert all("passed" not in probe for probe in self.cluster.probes().values()), "it is no preflight"

    def events(self) -> list[tuple[str, str]]:
        found = [body for (plural, _, _), body in self.cluster.objects.items() if plural == EVENTS.plural]
        return [(body["reason"], body["type"]) for body in found]

    def answer(self, words: Mapping[str, Object]) -> None:
        self.cluster.words = {name: [words.get(name, PASSES)] for name in self.cluster.words}


def shown() -> float | None:
    return REGISTRY.get_sample_value("pacekeeper_probes_cannot_pass")


async def test_one_node_that_passes_is_enough() -> None:
    checked = Checked(a=PASSES, b=PASSES, c=PASSES)
    await checked.check()
    assert len(checked.cluster.made) == 1
    assert (checked.operator.node_registry.failing_check, shown(), checked.events()) == ("", 0, [])


@pytest.mark.parametrize(
    ("answer", "check"), [(NO_NETWORK, "network"), (NO_IMAGE, "runs"), ({"phase": "Pending"}, "runs")]
)
async def test_what_fails_on_known_good_nodes_is_told_until_a_probe_passes(answer: Object, check: str) -> None:
    checked = Checked(a=answer, b=answer, c=answer, d=answer)
    for _ in range(2):
        await checked.check()
    assert (checked.operator.node_registry.failing_check, shown()) == (check, 1)
    assert checked.events() == [("ProbesCannotPass", "Warning")], "once"
    assert len(checked.cluster.made) == 2 * MOST_NODES
    checked.answer({})
    await checked.check()
    assert (checked.operator.node_registry.failing_check, shown()) == ("", 0)
    assert checked.events()[1:] == [("ProbesPassAgain", "Normal")]


async def test_a_node_that_is_broken_alone_shows_nothing_of_the_others() -> None:
    for broken in "abc":
        checked = Checked(a=PASSES, b=PASSES, c=PASSES)
        checked.answer({broken: NO_NETWORK})
        await checked.check()
        assert checked.operator.node_registry.failing_check == ""
    different = Checked(a=NO_NETWORK, b=told({"unfit": "memory", "check": "memory"}, "Failed"))
    await different.check()
    assert different.operator.node_registry.failing_check == "", "each fails in its own way"


async def test_what_preflights_know_of_a_node_stays() -> None:
    checked = Checked(a=PASSES, b=PASSES, c=PASSES)
    await checked.place.look("a", "b", "c", seconds=30.0)
    known, made = checked.cluster.probes(), len(checked.cluster.made)
    task = asyncio.ensure_future(probe_check.check_probes(checked.operator))
    await checked.place.timeline.run(30)
    await task
    assert len(checked.cluster.made) == made + 1
    assert checked.cluster.probes() == known


async def test_where_there_is_no_room_nothing_is_known() -> None:
    checked = Checked(a=NO_NETWORK)
    await checked.check()
    checked.answer({"a": NO_ROOM})
    await checked.check()
    assert checked.operator.node_registry.failing_check == "network", "as it was"


async def test_a_pod_that_the_api_server_refuses_does_not_pass_anywhere() -> None:
    checked = Checked(a=PASSES, b=PASSES)
    checked.cluster.refusals[PODS.plural] = [Denied('RuntimeClass "nvidia" not found'), Denied("again")]
    await checked.check()
    assert (checked.operator.node_registry.failing_check, checked.events()) == (
        "runs",
        [("ProbesCannotPass", "Warning")],
    )


def pod(name: str, node: str, gpus: str = "0", **labels: str) -> Object:
    container = {"name": "trainer", "image": "i", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    metadata = {"name": name, "namespace": "team", "uid": name, "labels": labels, "resourceVersion": "1"}
    metadata |= {"creationTimestamp": "2026-11-01T00:00:00Z"}
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": [container]}, "status": {"phase": "Running"}}


async def test_only_nodes_that_are_free_and_unsuspected_are_probed() -> None:
    checked = Checked(a=PASSES, b=PASSES, c=PASSES, d=PASSES, e=PASSES)
    operator, objects = checked.operator, checked.cluster.objects
    with_gpus(checked.place, "a", "b")
    nodes = {name: objects["nodes", "", name] for name in "abcde"}
    nodes["c"]["spec"]["unschedulable"] = True
    operator.node_registry.quarantines.update(
        {"metadata": {"name": "d", "uid": "q", "resourceVersion": "1"}, "spec": {"reason": "XID 79"}}
    )
    chosen = probe_check._choose_nodes(operator, nodes)
    assert (set(chosen[:2]), chosen[2:]) == ({"a", "b"}, ["e"]), "those with GPUs first"
    operator.stores.pods.update(pod("worker", "a", **{"pacekeeper.dev/job": "j"}))
    assert probe_check._choose_nodes(operator, nodes) == ["b", "e"]
    objects["pods", "team", "other"] = pod("other", "b", "8")
    await checked.place.timeline.run(0)
    task = asyncio.ensure_future(probe_check.check_probes(operator))
    await checked.place.timeline.run(30)
    await task
    assert checked.cluster.made == ["e"], "all GPUs of b are taken"
    objects["pods", "team", "other"] = pod("other", "b", "7")
    task = asyncio.ensure_future(probe_check.check_probes(operator))
    await checked.place.timeline.run(30)
    await task
    assert checked.cluster.made == ["e", "b"]
    assert checked.cluster.specs[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


async def test_it_comes_every_hour_and_sooner_while_probes_cannot_pass() -> None:
    checked = Checked(a=NO_NETWORK)
    watching = asyncio.ensure_future(probe_check.watch_over(checked.operator))
    await checked.place.timeline.run(FIRST_SECONDS + 10)
    assert len(checked.cluster.made) == 1
    checked.answer({})
    await checked.place.timeline.run(AGAIN_SECONDS + 10)
    assert len(checked.cluster.made) == 2
    await checked.place.timeline.run(PERIOD_SECONDS)
    assert len(checked.cluster.made) == 3
    checked.operator.paused = "for the night"
    await checked.place.timeline.run(3 * PERIOD_SECONDS)
    assert len(checked.cluster.made) == 3
    watching.cancel()


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(mode=RemediationMode.RECOMMEND, quarantine_mode=RemediationMode.ACT)]
)
async def test_where_no_node_may_be_quarantined_there_is_none(settings: Settings) -> None:
    checked = Checked(settings, a=PASSES)
    watching = asyncio.ensure_future(probe_check.watch_over(checked.operator))
    await checked.place.timeline.run(3 * PERIOD_SECONDS)
    assert watching.done()
    assert not checked.cluster.made


@pytest.mark.parametrize("check", ["gpus", "network", "driver", ""])
def test_what_known_good_nodes_fail_convicts_nobody_unless_another_node_passes_it(check: str) -> None:
    """In a full cluster no other node can show that the check passes there; a free node has shown that it fails."""
    failed = ProbePod(phase="Failed", reported_check=check, has_gpus=True)
    assert explain_inconclusive(replace(failed, failing_check=check or "runs"))[0] is InconclusiveReason.SHARED_FAILURE
    other = ProbePod(phase="Succeeded", has_gpus=True)
    assert explain_inconclusive(replace(failed, failing_check=check or "runs", group_peers=(other,)))[0] is None
    assert explain_inconclusive(replace(failed, reported_check="gpus", failing_check="memory"))[0] is None
