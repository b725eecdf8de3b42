"""NodeQuarantines as they are carried out: what is written when others write too, and that nodes are handed back."""

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
    """Three nodes; what is listed is counted, and what must not be seen is not."""

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
        """Reason, type and note of those about objects of this kind (any)."""
        found = [body for (plural, _, _), body in self.objects.items() if plural == EVENTS.plural]
        return [(b["reason"], b["type"], b["note"]) for b in found if kind in ("", b["regarding"]["kind"])]


class Place:
    def __init__(self) -> None:
        self.cluster, self.timeline = Cluster(), Timeline()
        self.runtime = VirtualRuntime(self.timeline)

    def fleet(self, settings: Settings = SETTINGS) -> NodeRegistry:
        return NodeRegistry(self.cluster, self.runtime, settings)

    def blame(self, node: str = "node-1", **changes: Any) -> NodeAccusation:
        said = NodeAccusation(node, f"uid-{node}", "XID 79", ObjectRef("i", "team-a"), self.runtime.now())
        return replace(said, **changes)

    async def suspect(self, blame: NodeAccusation | None = None, settings: Settings = SETTINGS) -> QuarantineVerdict:
        return (await raise_suspicion(self.fleet(settings), blame or self.blame())).verdict

    async def by_hand(self, name: str = "node-1", *, approved: bool = True, reason: str = "it smells") -> None:
        spec = {"reason": reason, "approved": approved}
        await self.cluster.create(NODE_QUARANTINES, {"metadata": {"name": name}, "spec": spec})

    async def reconcile(self, name: str = "node-1", settings: Settings = SETTINGS) -> float:
        return await service.reconcile_node(self.fleet(settings), name)


@pytest.fixture
def place() -> Place:
    return Place()


class TestSuspect:
    async def test_an_answer_for_a_node_that_was_made_anew_is_none(self, place: Place) -> None:
        assert await place.suspect() is QuarantineVerdict.SUSPECTED
        other = place.blame(uid="another", incident=ObjectRef("j", "team-b"))
        assert await place.suspect(other) is QuarantineVerdict.RELEASING
        assert len(place.cluster.quarantines()["node-1"].spec.suspicions) == 1

    async def test_whoever_deletes_a_suspicion_has_ended_it(self, place: Place) -> None:
        """While it goes, and when it has gone. What was held back before is none that somebody has deleted."""
        paused = await raise_suspicion(place.fleet(replace(SETTINGS, paused=True)), place.blame())
        assert (paused.verdict, paused.recorded) == (QuarantineVerdict.PAUSED, False)
        ruling = await raise_suspicion(place.fleet(), place.blame())
        assert (ruling.verdict, ruling.recorded) == (QuarantineVerdict.SUSPECTED, True)
        raised = place.blame(recorded=ruling.recorded)
        assert (await raise_suspicion(place.fleet(), raised)) == ruling, "it stands"

        await place.cluster.delete(NODE_QUARANTINES, "node-1")
        assert await place.suspect(raised) is QuarantineVerdict.CLEARED
        assert await place.suspect() is QuarantineVerdict.RELEASING, "another one is to be said again then"
        await place.reconcile()
        assert await place.suspect(raised) is QuarantineVerdict.CLEARED
        assert not place.cluster.quarantines()

    async def test_one_by_hand_is_no_word_of_the_job(self, place: Place) -> None:
        await place.by_hand(approved=False)
        await place.reconcile()
        ruling = await raise_suspicion(place.fleet(), place.blame())
        assert (ruling.verdict, ruling.recorded) == (QuarantineVerdict.AWAITS_APPROVAL, False)

    async def test_nothing_is_said_into_one_that_is_approved(self, place: Place) -> None:
        await place.by_hand()
        before = place.cluster.version
        assert await place.suspect() is QuarantineVerdict.QUARANTINED
        assert place.cluster.version == before

    async def test_the_same_word_is_written_once(self, place: Place) -> None:
        blame = place.blame()
        await place.suspect(blame)
        before = place.cluster.version
        await place.suspect(blame)
        assert place.cluster.version == before

    async def test_of_two_who_are_the_first_both_get_an_answer(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await place.suspect()
        find = place.cluster.find

        async def blind_once(kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
            return None if kind is NODE_QUARANTINES else await find(kind, name, namespace)

        monkeypatch.setattr(place.cluster, "find", blind_once)
        assert await place.suspect(place.blame(incident=ObjectRef("j", "team-b"))) is QuarantineVerdict.SUSPECTED
        assert [sign.namespace for sign in place.cluster.quarantines()["node-1"].spec.suspicions] == ["team-a"]

    async def test_while_remedies_are_paused_by_the_settings_nothing_is_raised(self, place: Place) -> None:
        paused = replace(SETTINGS, paused=True)
        assert await place.suspect(settings=paused) is QuarantineVerdict.PAUSED
        assert place.cluster.quarantines() == {}


class TestReconcile:
    async def test_there_is_nothing_to_do_for_one_that_is_not_there(self, place: Place) -> None:
        assert await place.reconcile() == math.inf

    async def test_a_quarantine_by_hand_marks_the_node_and_tells_both_why(self, place: Place) -> None:
        await place.by_hand()
        assert await place.reconcile() > 0
        assert place.cluster.marked() == {"node-1"}
        (of_node,) = place.cluster.events("Node")
        (of_quarantine,) = place.cluster.events("NodeQuarantine")
        assert of_node == of_quarantine
        assert of_node[:2] == ("NodeQuarantined", "Warning")
        assert of_node[2].endswith("(it smells)")
        regarding = [body["regarding"] for key, body in place.cluster.objects.items() if key[0] == EVENTS.plural]
        assert {(one["kind"], one["apiVersion"]) for one in regarding} == {
            ("Node", "v1"),
            ("NodeQuarantine", "pacekeeper.dev/v1alpha1"),
        }

    async def test_a_mark_that_is_taken_away_comes_back_with_a_warning(self, place: Place) -> None:
        await place.by_hand()
        await place.reconcile()
        place.cluster.objects["nodes", "", "node-1"]["spec"]["taints"] = []
        await place.reconcile()
        assert place.cluster.marked() == {"node-1"}
        assert ("QuarantineRestored", "Warning") in {event[:2] for event in place.cluster.events("Node")}

    async def test_only_where_a_node_may_be_touched_is_the_cluster_looked_at(self, place: Place) -> None:
        await place.by_hand("node-2")
        await place.reconcile("node-2")
        assert place.cluster.lists == []
        await place.suspect(place.blame(is_weak=True))
        await place.reconcile()
        assert place.cluster.lists == ["nodequarantines"]
        place.cluster.lists.clear()
        place.cluster.node("node-3", ready=False)
        await place.suspect(place.blame("node-3"))
        await place.reconcile("node-3")
        assert "nodes" in place.cluster.lists

    @pytest.mark.parametrize(
        ("mode", "marked"), [(RemediationMode.ACT, {"node-1"}), (RemediationMode.RECOMMEND, set())]
    )
    async def test_the_platforms_mode_caps_what_is_done_to_nodes(
        self, place: Place, mode: RemediationMode, marked: set[str]
    ) -> None:
        settings = replace(SETTINGS, mode=mode)
        place.cluster.node("node-1", ready=False)
        await place.suspect(settings=settings)
        for _ in range(4):  # confirmed, held back for a while, approved, marked
            await place.reconcile(settings=settings)
            place.timeline.now += 60.0
        assert place.cluster.marked() == marked

    async def test_one_that_cannot_be_read_does_not_hide_the_others(self, place: Place) -> None:
        await place.cluster.create(NODE_QUARANTINES, {"metadata": {"name": "node-2"}, "spec": {"reason": 7}})
        await place.suspect()
        await place.reconcile()
        assert [key[2][:6] for key in place.cluster.objects if key[0] == PODS.plural] == ["probe-"]


class TestProbe:
    async def probe(self, place: Place, gpus: int, *, share: bool = True) -> Object:
        place.cluster.node("node-1", gpus=gpus)
        if share:
            await place.suspect()
        else:
            await place.by_hand()
        await place.reconcile()
        if not share:
            place.timeline.now += 3600.0
            await place.reconcile()
            await place.reconcile()
        place.timeline.now += 30.0  # its company never has an address: it goes without
        await place.reconcile()
        (body,) = (
            body
            for (plural, _, _), body in place.cluster.objects.items()
            if plural == PODS.plural and body["spec"]["nodeName"] == "node-1"
        )
        container: Object = body["spec"]["containers"][0]
        return container

    async def test_a_node_without_gpus_is_asked_for_none(self, place: Place) -> None:
        container = await self.probe(place, 0)
        assert container["command"][-1] == "--gpus=0"
        assert "nvidia.com/gpu" not in container["resources"]["limits"]

    async def test_where_pods_may_not_be_seen_one_gpu_is_asked_for(self, place: Place) -> None:
        place.cluster.hidden["pods"] = Denied("pods is forbidden")
        assert (await self.probe(place, 8))["command"][-1] == "--gpus=1"

    async def test_a_node_that_is_held_has_all_its_gpus_for_the_probe(self, place: Place) -> None:
        """Nobody else is there: it decides about the release."""
        place.cluster.hidden["pods"] = Denied("pods is forbidden")
        assert (await self.probe(place, 8, share=False))["command"][-1] == "--gpus=8"


FLAGGING = replace(SETTINGS, repair_condition="PacekeeperFaulty")


class TestCondition:
    def conditions(self, place: Place) -> dict[str, Object]:
        return {one["type"]: one for one in place.cluster.objects["nodes", "", "node-1"]["status"]["conditions"]}

    async def test_by_default_there_is_none(self, place: Place) -> None:
        await place.by_hand()
        await place.reconcile()
        assert place.cluster.marked() == {"node-1"}
        assert self.conditions(place).keys() == {"Ready"}

    async def test_it_is_set_with_a_quarantine_and_says_by_whom_and_why(self, place: Place) -> None:
        await place.by_hand()
        await place.reconcile(settings=FLAGGING)
        found = self.conditions(place)
        assert found.keys() == {"Ready", "PacekeeperFaulty"}, "what others say of the node stays"
        flag = found["PacekeeperFaulty"]
        assert (flag["status"], flag["reason"]) == ("True", "Person")
        assert flag["message"] == "it smells; kubectl describe nodequarantine node-1"
        before = place.cluster.version
        await place.reconcile(settings=FLAGGING)
        assert place.cluster.version == before, "once is enough"

    async def test_a_suspicion_and_one_that_waits_for_a_person_set_none(self, place: Place) -> None:
        await place.suspect(settings=FLAGGING)
        await place.reconcile(settings=FLAGGING)
        await place.by_hand("node-2", approved=False)
        await place.reconcile("node-2", settings=FLAGGING)
        assert self.conditions(place).keys() == {"Ready"}

    async def test_it_comes_back_where_somebody_takes_it_away(self, place: Place) -> None:
        await place.by_hand()
        await place.reconcile(settings=FLAGGING)
        place.cluster.objects["nodes", "", "node-1"]["status"]["conditions"].pop()
        await place.reconcile(settings=FLAGGING)
        assert self.conditions(place).keys() == {"Ready", "PacekeeperFaulty"}

    @pytest.mark.parametrize("by_command", [False, True])
    async def test_the_release_takes_it_away(self, place: Place, by_command: bool) -> None:
        await place.by_hand()
        await place.reconcile(settings=FLAGGING)
        if by_command:
            task = asyncio.ensure_future(release_all(place.cluster, place.runtime, 30, FLAGGING))
            await place.timeline.run(29)
            await task
        else:
            await place.cluster.delete(NODE_QUARANTINES, "node-1")
            await place.reconcile(settings=FLAGGING)
        assert self.conditions(place).keys() == {"Ready"}
        assert (place.cluster.marked(), place.cluster.quarantines()) == (set(), {})

    async def test_one_of_the_same_type_that_is_somebody_elses_is_left_alone(self, place: Place) -> None:
        conditions = place.cluster.objects["nodes", "", "node-1"]["status"]["conditions"]
        conditions.append({"type": "PacekeeperFaulty", "status": "True"})
        await release_all(place.cluster, place.runtime, 30, FLAGGING)
        assert self.conditions(place).keys() == {"Ready", "PacekeeperFaulty"}
        assert place.cluster.events() == []

    async def test_an_operator_that_dies_before_it_is_taken_away_goes_on(self, place: Place) -> None:
        await place.by_hand()
        await place.reconcile(settings=FLAGGING)
        await place.cluster.delete(NODE_QUARANTINES, "node-1")
        place.cluster.deny_conditions = True
        with pytest.raises(Denied):
            await place.reconcile(settings=FLAGGING)
        assert place.cluster.marked() == set(), "the node takes pods again, in any case"
        assert place.cluster.quarantines(), "and is not forgotten"
        place.cluster.deny_conditions = False
        await place.reconcile(settings=FLAGGING)
        assert self.conditions(place).keys() == {"Ready"}
        assert not place.cluster.quarantines()

    async def test_one_that_cannot_be_set_delays_no_probe(self, place: Place) -> None:
        place.cluster.deny_conditions = True
        await place.by_hand()
        with pytest.raises(Denied):
            await place.reconcile(settings=FLAGGING)
        assert place.cluster.marked() == {"node-1"}
        await place.timeline.run(FLAGGING.quarantine_expires_after + 1)
        await place.reconcile(settings=FLAGGING)
        assert place.cluster.quarantines()["node-1"].status.phase is QuarantinePhase.PROBING


class TestReleaseAll:
    async def test_marks_without_a_quarantine_are_swept(self, place: Place) -> None:
        place.cluster.node("node-2", marked=True)
        await release_all(place.cluster, place.runtime, 30)
        assert place.cluster.marked() == set()
        assert [event[:2] for event in place.cluster.events()] == [("NodeReleased", "Normal")]

    async def test_where_the_definitions_are_gone_nothing_is_left(self, place: Place) -> None:
        place.cluster.hidden["nodequarantines"] = NotFound("the server could not find the requested resource")
        await release_all(place.cluster, place.runtime, 30)

    async def test_what_is_left_after_the_time_is_named(self, place: Place) -> None:
        await place.by_hand()
        await place.reconcile()
        place.cluster.objects[NODE_QUARANTINES.plural, "", "node-1"]["metadata"]["finalizers"].append("somebody's")
        task = asyncio.ensure_future(release_all(place.cluster, place.runtime, 30))
        await place.timeline.run(31)
        with pytest.raises(TimeoutError, match="not released within 30 s: node-1"):
            await task
        assert place.cluster.marked() == set(), "the node is, at least"


class TestWatchOver:
    async def run(self, place: Place, seconds: float) -> None:
        watching = run_quarantine_loop(place.fleet())
        task = place.runtime.start_task(watching, "quarantines")
        await place.timeline.run(seconds)
        assert not task.done()
        task.cancel()

    async def test_marks_that_nobody_answers_for_are_swept_once_at_the_start(self, place: Place) -> None:
        place.cluster.node("node-2", marked=True)
        place.cluster.node("node-3", marked=True)
        await place.by_hand("node-3")
        await self.run(place, 200)
        assert place.cluster.marked() == {"node-3"}
        assert place.cluster.lists.count("nodes") == 1

    async def test_marks_whose_quarantine_goes_by_force_are_taken_away_while_it_runs(self, place: Place) -> None:
        await place.by_hand()
        fleet = place.fleet()
        watching = place.runtime.start_task(run_quarantine_loop(fleet), "quarantines")
        await place.timeline.run(3)
        assert place.cluster.marked() == {"node-1"}
        gone = place.cluster.objects.pop((NODE_QUARANTINES.plural, "", "node-1"))
        fleet.quarantines.apply_event(gone, deleted=True)
        await place.timeline.run(3)
        assert place.cluster.marked() == set()
        assert "NodeReleased" in {event[0] for event in place.cluster.events("Node")}
        watching.cancel()

    async def test_marks_that_come_while_it_runs_without_a_quarantine_go(self, place: Place) -> None:
        """Like those of a restored backup; one whose NodeQuarantine a watch has not told of yet stays."""
        fleet = place.fleet()
        watching = place.runtime.start_task(run_quarantine_loop(fleet), "quarantines")
        await place.timeline.run(3)
        await place.by_hand("node-3")
        for name in ("node-2", "node-3"):
            place.cluster.node(name, marked=True)
            fleet.nodes.apply_event(place.cluster.objects[NODE_OBJECTS.plural, "", name], deleted=False)
        await place.timeline.run(3)
        assert place.cluster.marked() == {"node-3"}
        watching.cancel()

    async def test_the_sweep_is_tried_again_until_it_is_done(self, place: Place) -> None:
        place.cluster.node("node-2", marked=True)
        place.cluster.failures["nodes"] = [kopf.TemporaryError("429")]
        await self.run(place, 1)
        assert place.cluster.marked() == {"node-2"}
        await self.run(place, 10)
        assert place.cluster.marked() == set()

    async def test_a_bug_of_ours_ends_nothing(self, place: Place) -> None:
        place.cluster.hidden["nodes"] = ZeroDivisionError("a bug of ours")
        await self.run(place, 20)
        assert place.cluster.lists.count("nodes") > 2

    async def test_a_change_is_looked_at_at_once(self, place: Place) -> None:
        fleet = place.fleet()
        watching = place.runtime.start_task(run_quarantine_loop(fleet), "quarantines")
        await place.timeline.run(1)
        await place.by_hand()
        await place.timeline.run(1)
        assert place.cluster.marked() == set(), "nobody has told of it"
        fleet.quarantines.apply_event(place.cluster.objects[NODE_QUARANTINES.plural, "", "node-1"], deleted=False)
        await place.timeline.run(1)
        assert place.cluster.marked() == {"node-1"}
        watching.cancel()

    async def test_all_there_are_are_shown_to_prometheus_until_they_are_gone(self, place: Place) -> None:
        labels = {"nodequarantine": "node-1", "phase": "Active", "reason": "Quarantined"}
        await place.by_hand()
        await place.by_hand("node-2", approved=True)
        place.cluster.objects["nodequarantines", "", "node-2"]["status"] = {"phase": "Rubbish"}
        fleet = place.fleet()
        watching = place.runtime.start_task(run_quarantine_loop(fleet), "quarantines")
        await place.timeline.run(2)
        assert REGISTRY.get_sample_value("pacekeeper_node_quarantine", labels) == 1
        for name in ("node-1", "node-2"):
            fleet.quarantines.apply_event(place.cluster.objects.pop(("nodequarantines", "", name)), deleted=True)
        await place.timeline.run(2)
        assert REGISTRY.get_sample_value("pacekeeper_node_quarantine", labels) is None
        watching.cancel()

    async def test_two_writers_end_in_one_state(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        await place.by_hand()
        patch = place.cluster.patch
        refused: list[str] = []

        async def refuses_once(kind: ResourceKind, name: str, body: Any, namespace: str = "", **named: Any) -> Object:
            if kind is NODE_QUARANTINES and not refused:
                refused.append(name)
                raise Conflict("somebody else has written")
            return await patch(kind, name, body, namespace, **named)

        monkeypatch.setattr(place.cluster, "patch", refuses_once)
        await place.reconcile()
        assert place.cluster.marked() == {"node-1"}
        assert place.cluster.quarantines()["node-1"].status.phase is QuarantinePhase.ACTIVE
