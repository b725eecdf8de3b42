"""The quarantine service: writes next to other writers, and nodes that are released."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import kopf
import pytest
from prometheus_client import REGISTRY

from pacekeeper_operator.api.incident import ObjectRef
from pacekeeper_operator.api.names import FIELD_MANAGER_CORDON, TAINT_QUARANTINE
from pacekeeper_operator.api.node_quarantine import QuarantinePhase, QuarantineVerdict
from pacekeeper_operator.api.training_job import RemediationMode
from pacekeeper_operator.decide.nodes.quarantine_steps import Quarantine, TargetNode
from pacekeeper_operator.kube.client import (
    EVENTS,
    NODE_OBJECTS,
    NODE_QUARANTINES,
    PODS,
    Conflict,
    Denied,
    Listing,
    NotFound,
    Object,
    ResourceKind,
)
from pacekeeper_operator.node_probe import PROBE_SECRET_VARIABLE
from pacekeeper_operator.services import quarantine as service
from pacekeeper_operator.services.node_registry import NodeRegistry
from pacekeeper_operator.services.quarantine import NodeAccusation, raise_suspicion, release_all, run_quarantine_loop
from pacekeeper_operator.settings import Settings
from testing.kubernetes.fake_cluster import FakeCluster
from testing.operators.virtual_time import Timeline, VirtualRuntime

SETTINGS = Settings(namespace="system", quarantine_mode=RemediationMode.ACT, quarantine_max_share=1.0)
MARKS = {"unschedulable": True, "taints": [{"key": TAINT_QUARANTINE, "effect": "NoSchedule"}]}
OURS = [
    {"manager": FIELD_MANAGER_CORDON, "operation": "Apply", "fieldsV1": {"f:spec": {"f:unschedulable": {}}}},
]


class Cluster(FakeCluster):
    """Three nodes. It counts lists, and denies those of hidden kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[str] = []
        self.hidden: dict[str, Exception] = {}  # kinds that may not be listed
        self.deny_conditions = False
        for n in (1, 2, 3):
            self.node(f"node-{n}")

    def node(self, name: str, *, marked: bool = False, ready: bool = True, gpus: int = 0) -> None:
        metadata: Object = {"name": name, "uid": f"uid-{name}", "labels": {}}
        status = {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "allocatable": {"nvidia.com/gpu": str(gpus)},
        }
        if marked:
            metadata["managedFields"] = OURS
        self._store(("nodes", "", name), {"metadata": metadata, "spec": MARKS if marked else {}, "status": status})

    async def list_with_version(self, kind: ResourceKind, namespace: str = "", **named: Any) -> Listing:
        self.lists.append(kind.plural)
        if kind.plural in self.hidden and not namespace:
            raise self.hidden[kind.plural]
        return await super().list_with_version(kind, namespace, **named)

    async def apply(self, kind: ResourceKind, body: Object, *, manager: str, subresource: str = "") -> Object:
        if subresource and self.deny_conditions:
            raise Denied("nodes/status is forbidden")
        return await super().apply(kind, body, manager=manager, subresource=subresource)

    def marked(self) -> set[str]:
        nodes = (body for (plural, _, _), body in self.objects.items() if plural == NODE_OBJECTS.plural)
        return {body["metadata"]["name"] for body in nodes if TargetNode.parse(body).marked}

    def quarantines(self) -> dict[str, Quarantine]:
        found = (body for (plural, _, _), body in self.objects.items() if plural == NODE_QUARANTINES.plural)
        return {body["metadata"]["name"]: Quarantine.parse(body) for body in found}

    def events(self, kind: str = "") -> list[tuple[str, str, str]]:
        """Return reason, type, and note of the events about objects of this kind (default: all)."""
        found = [body for (plural, _, _), body in self.objects.items() if plural == EVENTS.plural]
        return [(b["reason"], b["type"], b["note"]) for b in found if kind in ("", b["regarding"]["kind"])]


class Harness:
    def __init__(self) -> None:
        self.cluster, self.timeline = Cluster(), Timeline()
        self.runtime = VirtualRuntime(self.timeline)

    def build_registry(self, settings: Settings = SETTINGS) -> NodeRegistry:
        return NodeRegistry(self.cluster, self.runtime, settings)

    def build_accusation(self, node: str = "node-1", **changes: Any) -> NodeAccusation:
        accusation = NodeAccusation(node, f"uid-{node}", "XID 79", ObjectRef("i", "team-a"), self.runtime.now())
        return replace(accusation, **changes)

    async def raise_suspicion(
        self, accusation: NodeAccusation | None = None, settings: Settings = SETTINGS
    ) -> QuarantineVerdict:
        return (await raise_suspicion(self.build_registry(settings), accusation or self.build_accusation())).verdict

    async def create_by_hand(self, name: str = "node-1", *, approved: bool = True, reason: str = "it is noisy") -> None:
        spec = {"reason": reason, "approved": approved}
        await self.cluster.create(NODE_QUARANTINES, {"metadata": {"name": name}, "spec": spec})

    async def reconcile(self, name: str = "node-1", settings: Settings = SETTINGS) -> float:
        return await service.reconcile_node(self.build_registry(settings), name)


@pytest.fixture
def harness() -> Harness:
    return Harness()


class TestSuspicion:
    async def test_a_decision_for_a_recreated_node_does_not_exist(self, harness: Harness) -> None:
        assert await harness.raise_suspicion() is QuarantineVerdict.SUSPECTED
        other = harness.build_accusation(uid="another", incident=ObjectRef("j", "team-b"))
        assert await harness.raise_suspicion(other) is QuarantineVerdict.RELEASING
        assert len(harness.cluster.quarantines()["node-1"].spec.suspicions) == 1

    async def test_deleting_a_suspicion_ends_it(self, harness: Harness) -> None:
        """This holds during and after the deletion. A suspicion that was held back before does not count as deleted."""
        paused = await raise_suspicion(
            harness.build_registry(replace(SETTINGS, paused=True)), harness.build_accusation()
        )
        assert (paused.verdict, paused.recorded) == (QuarantineVerdict.PAUSED, False)
        decision = await raise_suspicion(harness.build_registry(), harness.build_accusation())
        assert (decision.verdict, decision.recorded) == (QuarantineVerdict.SUSPECTED, True)
        raised = harness.build_accusation(recorded=decision.recorded)
        assert (await raise_suspicion(harness.build_registry(), raised)) == decision, "the decision is unchanged"

        await harness.cluster.delete(NODE_QUARANTINES, "node-1")
        assert await harness.raise_suspicion(raised) is QuarantineVerdict.CLEARED
        assert await harness.raise_suspicion() is QuarantineVerdict.RELEASING, "a new suspicion waits for the release"
        await harness.reconcile()
        assert await harness.raise_suspicion(raised) is QuarantineVerdict.CLEARED
        assert not harness.cluster.quarantines()

    async def test_a_manual_quarantine_is_no_suspicion_of_the_job(self, harness: Harness) -> None:
        await harness.create_by_hand(approved=False)
        await harness.reconcile()
        decision = await raise_suspicion(harness.build_registry(), harness.build_accusation())
        assert (decision.verdict, decision.recorded) == (QuarantineVerdict.AWAITS_APPROVAL, False)

    async def test_an_approved_quarantine_takes_no_more_suspicions(self, harness: Harness) -> None:
        await harness.create_by_hand()
        before = harness.cluster.version
        assert await harness.raise_suspicion() is QuarantineVerdict.QUARANTINED
        assert harness.cluster.version == before

    async def test_a_repeated_suspicion_is_written_once(self, harness: Harness) -> None:
        accusation = harness.build_accusation()
        await harness.raise_suspicion(accusation)
        before = harness.cluster.version
        await harness.raise_suspicion(accusation)
        assert harness.cluster.version == before

    async def test_two_concurrent_first_suspicions_both_get_a_decision(
        self, harness: Harness, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await harness.raise_suspicion()
        find = harness.cluster.find

        async def blind_once(kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
            return None if kind is NODE_QUARANTINES else await find(kind, name, namespace)

        monkeypatch.setattr(harness.cluster, "find", blind_once)
        accusation = harness.build_accusation(incident=ObjectRef("j", "team-b"))
        decision = await raise_suspicion(harness.build_registry(), accusation)
        assert (decision.verdict, decision.recorded) == (QuarantineVerdict.SUSPECTED, False), "it is repeated later"
        assert [sign.namespace for sign in harness.cluster.quarantines()["node-1"].spec.suspicions] == ["team-a"]

    async def test_while_remedies_are_paused_no_suspicion_is_raised(self, harness: Harness) -> None:
        paused = replace(SETTINGS, paused=True)
        assert await harness.raise_suspicion(settings=paused) is QuarantineVerdict.PAUSED
        assert harness.cluster.quarantines() == {}


class TestReconcile:
    async def test_a_missing_quarantine_needs_nothing(self, harness: Harness) -> None:
        assert await harness.reconcile() == math.inf

    async def test_a_manual_quarantine_marks_the_node_and_emits_events_for_both_objects(self, harness: Harness) -> None:
        await harness.create_by_hand()
        assert await harness.reconcile() > 0
        assert harness.cluster.marked() == {"node-1"}
        (node_event,) = harness.cluster.events("Node")
        (quarantine_event,) = harness.cluster.events("NodeQuarantine")
        assert node_event == quarantine_event
        assert node_event[:2] == ("NodeQuarantined", "Warning")
        assert node_event[2].endswith("(it is noisy)")
        regarding = [body["regarding"] for key, body in harness.cluster.objects.items() if key[0] == EVENTS.plural]
        assert {(one["kind"], one["apiVersion"]) for one in regarding} == {
            ("Node", "v1"),
            ("NodeQuarantine", "pacekeeper.dev/v1alpha1"),
        }

    async def test_a_removed_mark_comes_back_with_a_warning(self, harness: Harness) -> None:
        await harness.create_by_hand()
        await harness.reconcile()
        harness.cluster.objects["nodes", "", "node-1"]["spec"]["taints"] = []
        await harness.reconcile()
        assert harness.cluster.marked() == {"node-1"}
        assert ("QuarantineRestored", "Warning") in {event[:2] for event in harness.cluster.events("Node")}

    async def test_the_cluster_is_listed_only_if_a_node_may_be_changed(self, harness: Harness) -> None:
        await harness.create_by_hand("node-2")
        await harness.reconcile("node-2")
        assert harness.cluster.lists == []
        await harness.raise_suspicion(harness.build_accusation(is_weak=True))
        await harness.reconcile()
        assert harness.cluster.lists == ["nodequarantines"]
        harness.cluster.lists.clear()
        harness.cluster.node("node-3", ready=False)
        await harness.raise_suspicion(harness.build_accusation("node-3"))
        await harness.reconcile("node-3")
        assert "nodes" in harness.cluster.lists

    @pytest.mark.parametrize(
        ("mode", "marked"), [(RemediationMode.ACT, {"node-1"}), (RemediationMode.RECOMMEND, set())]
    )
    async def test_the_platforms_mode_caps_what_is_done_to_nodes(
        self, harness: Harness, mode: RemediationMode, marked: set[str]
    ) -> None:
        settings = replace(SETTINGS, mode=mode)
        harness.cluster.node("node-1", ready=False)
        await harness.raise_suspicion(settings=settings)
        for _ in range(4):  # confirmed, delayed, approved, marked
            await harness.reconcile(settings=settings)
            harness.timeline.now += 60.0
        assert harness.cluster.marked() == marked

    async def test_an_invalid_quarantine_does_not_hide_the_others(self, harness: Harness) -> None:
        await harness.cluster.create(NODE_QUARANTINES, {"metadata": {"name": "node-2"}, "spec": {"reason": 7}})
        await harness.raise_suspicion()
        await harness.reconcile()
        assert [key[2][:6] for key in harness.cluster.objects if key[0] == PODS.plural] == ["probe-"]


class TestProbe:
    async def probe(self, harness: Harness, gpus: int, *, share: bool = True) -> Object:
        harness.cluster.node("node-1", gpus=gpus)
        if share:
            await harness.raise_suspicion()
        else:
            await harness.create_by_hand()
        await harness.reconcile()
        if not share:
            harness.timeline.now += 3600.0
            await harness.reconcile()
            await harness.reconcile()
        harness.timeline.now += 30.0  # its companion never has an address: the probe runs without it
        await harness.reconcile()
        (body,) = (
            body
            for (plural, _, _), body in harness.cluster.objects.items()
            if plural == PODS.plural and body["spec"]["nodeName"] == "node-1"
        )
        container: Object = body["spec"]["containers"][0]
        return container

    async def test_the_probe_of_a_node_without_gpus_requests_none(self, harness: Harness) -> None:
        container = await self.probe(harness, 0)
        assert container["command"][-1] == "--gpus=0"
        assert "nvidia.com/gpu" not in container["resources"]["limits"]

    async def test_without_the_right_to_list_pods_a_probe_requests_one_gpu(self, harness: Harness) -> None:
        harness.cluster.hidden["pods"] = Denied("pods is forbidden")
        assert (await self.probe(harness, 8))["command"][-1] == "--gpus=1"

    async def test_the_probe_of_a_quarantined_node_requests_all_gpus(self, harness: Harness) -> None:
        """No other pod runs there, and the probe decides about the release."""
        harness.cluster.hidden["pods"] = Denied("pods is forbidden")
        assert (await self.probe(harness, 8, share=False))["command"][-1] == "--gpus=8"

    async def test_pods_of_a_group_that_start_one_after_the_other_have_one_secret(self, harness: Harness) -> None:
        await self.probe(harness, 0)
        pods = [body for (plural, _, _), body in harness.cluster.objects.items() if plural == PODS.plural]
        secrets = [
            variable["value"]
            for body in pods
            for variable in body["spec"]["containers"][0]["env"]
            if variable["name"] == PROBE_SECRET_VARIABLE
        ]
        assert len(secrets) == len(pods) == 3, "the node and two companions"
        assert len(set(secrets)) == 1


FLAGGING = replace(SETTINGS, repair_condition="PacekeeperFaulty")


class TestCondition:
    def conditions(self, harness: Harness) -> dict[str, Object]:
        return {one["type"]: one for one in harness.cluster.objects["nodes", "", "node-1"]["status"]["conditions"]}

    async def test_by_default_no_condition_is_set(self, harness: Harness) -> None:
        await harness.create_by_hand()
        await harness.reconcile()
        assert harness.cluster.marked() == {"node-1"}
        assert self.conditions(harness).keys() == {"Ready"}

    async def test_a_quarantine_sets_the_condition_with_its_author_and_reason(self, harness: Harness) -> None:
        await harness.create_by_hand()
        await harness.reconcile(settings=FLAGGING)
        found = self.conditions(harness)
        assert found.keys() == {"Ready", "PacekeeperFaulty"}, "conditions of other controllers stay"
        flag = found["PacekeeperFaulty"]
        assert (flag["status"], flag["reason"]) == ("True", "Person")
        assert flag["message"] == "it is noisy; kubectl describe nodequarantine node-1"
        before = harness.cluster.version
        await harness.reconcile(settings=FLAGGING)
        assert harness.cluster.version == before, "it is applied once"

    async def test_unapproved_quarantines_set_no_condition(self, harness: Harness) -> None:
        await harness.raise_suspicion(settings=FLAGGING)
        await harness.reconcile(settings=FLAGGING)
        await harness.create_by_hand("node-2", approved=False)
        await harness.reconcile("node-2", settings=FLAGGING)
        assert self.conditions(harness).keys() == {"Ready"}

    async def test_a_removed_condition_comes_back(self, harness: Harness) -> None:
        await harness.create_by_hand()
        await harness.reconcile(settings=FLAGGING)
        harness.cluster.objects["nodes", "", "node-1"]["status"]["conditions"].pop()
        await harness.reconcile(settings=FLAGGING)
        assert self.conditions(harness).keys() == {"Ready", "PacekeeperFaulty"}

    @pytest.mark.parametrize("by_command", [False, True])
    async def test_the_release_removes_the_condition(self, harness: Harness, by_command: bool) -> None:
        await harness.create_by_hand()
        await harness.reconcile(settings=FLAGGING)
        if by_command:
            task = asyncio.ensure_future(release_all(harness.cluster, harness.runtime, 30, FLAGGING))
            await harness.timeline.run(29)
            await task
        else:
            await harness.cluster.delete(NODE_QUARANTINES, "node-1")
            await harness.reconcile(settings=FLAGGING)
        assert self.conditions(harness).keys() == {"Ready"}
        assert (harness.cluster.marked(), harness.cluster.quarantines()) == (set(), {})

    async def test_a_condition_of_another_controller_is_left_alone(self, harness: Harness) -> None:
        conditions = harness.cluster.objects["nodes", "", "node-1"]["status"]["conditions"]
        conditions.append({"type": "PacekeeperFaulty", "status": "True"})
        await release_all(harness.cluster, harness.runtime, 30, FLAGGING)
        assert self.conditions(harness).keys() == {"Ready", "PacekeeperFaulty"}
        assert harness.cluster.events() == []

    async def test_the_next_operator_removes_a_leftover_condition(self, harness: Harness) -> None:
        await harness.create_by_hand()
        await harness.reconcile(settings=FLAGGING)
        await harness.cluster.delete(NODE_QUARANTINES, "node-1")
        harness.cluster.deny_conditions = True
        with pytest.raises(Denied):
            await harness.reconcile(settings=FLAGGING)
        assert harness.cluster.marked() == set(), "the node takes pods again, in any case"
        assert harness.cluster.quarantines(), "the condition is removed later"
        harness.cluster.deny_conditions = False
        await harness.reconcile(settings=FLAGGING)
        assert self.conditions(harness).keys() == {"Ready"}
        assert not harness.cluster.quarantines()

    async def test_a_condition_that_cannot_be_set_delays_no_probe(self, harness: Harness) -> None:
        harness.cluster.deny_conditions = True
        await harness.create_by_hand()
        with pytest.raises(Denied):
            await harness.reconcile(settings=FLAGGING)
        assert harness.cluster.marked() == {"node-1"}
        await harness.timeline.run(FLAGGING.quarantine_expires_after + 1)
        await harness.reconcile(settings=FLAGGING)
        assert harness.cluster.quarantines()["node-1"].status.phase is QuarantinePhase.PROBING


class TestReleaseAll:
    async def test_marks_without_a_quarantine_are_removed(self, harness: Harness) -> None:
        harness.cluster.node("node-2", marked=True)
        await release_all(harness.cluster, harness.runtime, 30)
        assert harness.cluster.marked() == set()
        assert [event[:2] for event in harness.cluster.events()] == [("NodeReleased", "Normal")]

    async def test_without_the_definitions_release_succeeds(self, harness: Harness) -> None:
        harness.cluster.hidden["nodequarantines"] = NotFound("the server could not find the requested resource")
        await release_all(harness.cluster, harness.runtime, 30)

    async def test_nodes_left_at_the_timeout_are_named(self, harness: Harness) -> None:
        await harness.create_by_hand()
        await harness.reconcile()
        harness.cluster.objects[NODE_QUARANTINES.plural, "", "node-1"]["metadata"]["finalizers"].append("somebody's")
        task = asyncio.ensure_future(release_all(harness.cluster, harness.runtime, 30))
        await harness.timeline.run(31)
        with pytest.raises(TimeoutError, match="not released within 30 s: node-1"):
            await task
        assert harness.cluster.marked() == set(), "the node is, at least"


class TestLoop:
    async def run_loop(self, harness: Harness, seconds: float) -> None:
        loop = run_quarantine_loop(harness.build_registry())
        task = harness.runtime.start_task(loop, "quarantines")
        await harness.timeline.run(seconds)
        assert not task.done()
        task.cancel()

    async def test_marks_without_a_quarantine_are_removed_once_at_the_start(self, harness: Harness) -> None:
        harness.cluster.node("node-2", marked=True)
        harness.cluster.node("node-3", marked=True)
        await harness.create_by_hand("node-3")
        await self.run_loop(harness, 200)
        assert harness.cluster.marked() == {"node-3"}
        assert harness.cluster.lists.count("nodes") == 1

    async def test_marks_of_a_forcibly_deleted_quarantine_are_removed_by_the_loop(self, harness: Harness) -> None:
        await harness.create_by_hand()
        registry = harness.build_registry()
        task = harness.runtime.start_task(run_quarantine_loop(registry), "quarantines")
        await harness.timeline.run(3)
        assert harness.cluster.marked() == {"node-1"}
        gone = harness.cluster.objects.pop((NODE_QUARANTINES.plural, "", "node-1"))
        registry.quarantines.apply_event(gone, deleted=True)
        await harness.timeline.run(3)
        assert harness.cluster.marked() == set()
        assert "NodeReleased" in {event[0] for event in harness.cluster.events("Node")}
        task.cancel()

    async def test_new_marks_without_a_quarantine_are_removed_by_the_loop(self, harness: Harness) -> None:
        """A restored backup has such marks. One whose NodeQuarantine a watch has not reported yet stays."""
        registry = harness.build_registry()
        task = harness.runtime.start_task(run_quarantine_loop(registry), "quarantines")
        await harness.timeline.run(3)
        await harness.create_by_hand("node-3")
        for name in ("node-2", "node-3"):
            harness.cluster.node(name, marked=True)
            registry.nodes.apply_event(harness.cluster.objects[NODE_OBJECTS.plural, "", name], deleted=False)
        await harness.timeline.run(3)
        assert harness.cluster.marked() == {"node-3"}
        task.cancel()

    async def test_the_removal_of_marks_is_retried_until_it_succeeds(self, harness: Harness) -> None:
        harness.cluster.node("node-2", marked=True)
        harness.cluster.failures["nodes"] = [kopf.TemporaryError("429")]
        await self.run_loop(harness, 1)
        assert harness.cluster.marked() == {"node-2"}
        await self.run_loop(harness, 10)
        assert harness.cluster.marked() == set()

    async def test_a_defect_does_not_end_the_loop(self, harness: Harness) -> None:
        harness.cluster.hidden["nodes"] = ZeroDivisionError("a bug of ours")
        await self.run_loop(harness, 20)
        assert harness.cluster.lists.count("nodes") > 2

    async def test_a_change_is_handled_at_once(self, harness: Harness) -> None:
        registry = harness.build_registry()
        task = harness.runtime.start_task(run_quarantine_loop(registry), "quarantines")
        await harness.timeline.run(1)
        await harness.create_by_hand()
        await harness.timeline.run(1)
        assert harness.cluster.marked() == set(), "no watch has reported it"
        registry.quarantines.apply_event(harness.cluster.objects[NODE_QUARANTINES.plural, "", "node-1"], deleted=False)
        await harness.timeline.run(1)
        assert harness.cluster.marked() == {"node-1"}
        task.cancel()

    async def test_all_quarantines_have_series_until_they_are_deleted(self, harness: Harness) -> None:
        labels = {"nodequarantine": "node-1", "phase": "Active", "reason": "Quarantined"}
        await harness.create_by_hand()
        await harness.create_by_hand("node-2", approved=True)
        harness.cluster.objects["nodequarantines", "", "node-2"]["status"] = {"phase": "Rubbish"}
        registry = harness.build_registry()
        task = harness.runtime.start_task(run_quarantine_loop(registry), "quarantines")
        await harness.timeline.run(2)
        assert REGISTRY.get_sample_value("pacekeeper_node_quarantine", labels) == 1
        for name in ("node-1", "node-2"):
            registry.quarantines.apply_event(harness.cluster.objects.pop(("nodequarantines", "", name)), deleted=True)
        await harness.timeline.run(2)
        assert REGISTRY.get_sample_value("pacekeeper_node_quarantine", labels) is None
        task.cancel()

    async def test_two_writers_converge(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        await harness.create_by_hand()
        patch = harness.cluster.patch
        refused: list[str] = []

        async def refuses_once(kind: ResourceKind, name: str, body: Any, namespace: str = "", **named: Any) -> Object:
            if kind is NODE_QUARANTINES and not refused:
                refused.append(name)
                raise Conflict("the object has changed")
            return await patch(kind, name, body, namespace, **named)

        monkeypatch.setattr(harness.cluster, "patch", refuses_once)
        await harness.reconcile()
        assert harness.cluster.marked() == {"node-1"}
        assert harness.cluster.quarantines()["node-1"].status.phase is QuarantinePhase.ACTIVE
