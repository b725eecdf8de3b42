"""Many nodes at once: who counts, who waits, and what it costs; and nodes that the platform itself says are broken."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf
import pytest

from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import LABEL_NO_QUARANTINE
from pacekeeper_operator.api.node_quarantine import QuarantineVerdict, Witness
from pacekeeper_operator.api.training_job import RemediationMode
from pacekeeper_operator.decide.nodes.node_suspicion import CONFIRMED_SUSPICION_HOLD_SECONDS
from pacekeeper_operator.kube.client import (
    CONFIG_MAPS,
    NODE_OBJECTS,
    NODE_QUARANTINES,
    ApiServerBusy,
    Conflict,
    Object,
    ResourceKind,
)
from pacekeeper_operator.services.node_registry import NodeRegistry
from pacekeeper_operator.services.quarantine import MAX_CONCURRENT_RECONCILES, run_quarantine_loop
from pacekeeper_operator.services.shared.node_priority import (
    MAX_NODE_PRIORITY_SECONDS,
    NODE_PRIORITY_SPACING_SECONDS,
    NODE_PRIORITY_THRESHOLD,
)
from pacekeeper_operator.settings import Settings
from testing.operators.virtual_time import Timeline, VirtualRuntime

from ..test_quarantine_service import Cluster

NODES_THERE = 40
FAULT = "GpuFault"


class Slow(Cluster):
    """Each call takes a while, as long as others are under way; what is written is told, later, by watches."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.timeline = timeline
        self.calls = self.under_way = self.most = 0
        self.fleet: NodeRegistry | None = None
        self.refuses: list[Exception] = []  # what the next approvals raise, after they are written
        for i in range(4, NODES_THERE + 1):
            self.node(f"node-{i}")

    async def _takes_time(self) -> None:
        self.calls += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await self.timeline.wait_for(0.01)
        self.under_way -= 1

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        await self._takes_time()
        done = self._told(kind, await super().create(kind, body, dry_run=dry_run))
        return self._unless_refused(kind, body, done)

    async def patch(self, kind: ResourceKind, name: str, body: Any, namespace: str = "", **named: Any) -> Object:
        await self._takes_time()
        done = self._told(kind, await super().patch(kind, name, body, namespace, **named))
        return self._unless_refused(kind, body, done)

    async def apply(self, kind: ResourceKind, body: Object, *, manager: str, subresource: str = "") -> Object:
        await self._takes_time()
        return self._told(kind, await super().apply(kind, body, manager=manager, subresource=subresource))

    async def find(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        self.calls += 1
        return await super().find(kind, name, namespace)

    def _unless_refused(self, kind: ResourceKind, body: Object, done: Object) -> Object:
        if kind is NODE_QUARANTINES and body.get("spec", {}).get("approved") and self.refuses:
            raise self.refuses.pop(0)
        return done

    def _told(self, kind: ResourceKind, body: Object) -> Object:
        if self.fleet is not None and kind in (NODE_OBJECTS, NODE_QUARANTINES):
            shelf = self.fleet.nodes if kind is NODE_OBJECTS else self.fleet.quarantines
            self.timeline.wait_for(0.005).add_done_callback(lambda _: shelf.apply_event(body, deleted=False))
        return body

    def breaks(self, name: str, at: float) -> None:
        """The platform writes its condition."""
        body = self.objects["nodes", "", name]
        condition = {"type": FAULT, "status": "True", "reason": "Xid79", "lastTransitionTime": format_time(at)}
        body["status"]["conditions"].append(condition)
        stored = self._store(("nodes", "", name), body)
        if self.fleet is not None:
            self.fleet.nodes.apply_event(stored, deleted=False)

    def mends(self, name: str) -> None:
        body = self.objects["nodes", "", name]
        body["status"]["conditions"] = [one for one in body["status"]["conditions"] if one["type"] != FAULT]
        stored = self._store(("nodes", "", name), body)
        if self.fleet is not None:
            self.fleet.nodes.apply_event(stored, deleted=False)


class Place:
    def __init__(self, **settings: Any) -> None:
        self.timeline = Timeline()
        self.runtime, self.cluster = VirtualRuntime(self.timeline), Slow(self.timeline)
        raised = {"quarantine_max_nodes": 1000, "quarantine_max_share": 1.0, "breaker_nodes": 1000}
        named = {"namespace": "system", "quarantine_mode": RemediationMode.ACT, "quarantine_conditions": (FAULT,)}
        self.settings = Settings(**{**named, **raised, **settings})
        self.fleet = self.cluster.fleet = NodeRegistry(self.cluster, self.runtime, self.settings)
        self._watching: asyncio.Task[Any] | None = None

    async def run(self, seconds: float) -> None:
        if self._watching is None:
            self._watching = self.runtime.start_task(run_quarantine_loop(self.fleet), "quarantines")
        await self.timeline.run(seconds)
        assert not self._watching.done()

    async def restart(self) -> None:
        """The operator dies where it stands, and another one begins."""
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self.fleet = self.cluster.fleet = NodeRegistry(self.cluster, self.runtime, self.settings)
        self._watching = None

    def breaks(self, *numbers: int) -> None:
        for i in numbers:
            self.cluster.breaks(f"node-{i}", self.runtime.now())

    def approved(self) -> set[str]:
        return {name for name, found in self.cluster.quarantines().items() if found.spec.approved}

    def held(self) -> set[str]:
        return self.cluster.marked()


def names(*numbers: int) -> set[str]:
    return {f"node-{i}" for i in numbers}


class TestPlatform:
    async def test_its_condition_quarantines_a_node_that_no_job_blames(self) -> None:
        place = Place()
        await place.run(1)
        place.breaks(7)
        await place.run(1)
        assert place.held() == names(7)
        found = place.cluster.quarantines()["node-7"]
        (sign,) = found.spec.suspicions
        assert (sign.namespace, sign.incident, sign.witness) == ("system", "", Witness.NODE_CONDITION)
        assert found.spec.incident_ref is None
        witnessed = next(c for c in found.status.conditions if c.type == "Witnessed")
        assert (witnessed.status, witnessed.reason) == ("True", "NodeCondition")
        assert witnessed.message == "condition GpuFault is True (Xid79)"

    async def test_where_the_breaker_may_trip_it_is_held_back_for_a_while(self) -> None:
        place = Place(breaker_nodes=3)
        await place.run(1)
        place.breaks(7)
        await place.run(CONFIRMED_SUSPICION_HOLD_SECONDS - 1)
        assert place.held() == set()
        await place.run(2)
        assert place.held() == names(7)

    async def test_that_too_many_fail_is_said_at_once_and_none_is_touched(self) -> None:
        place = Place(breaker_nodes=3)
        await place.run(1)
        place.breaks(*range(1, 31))
        await place.run(2)
        verdicts = [found.verdict for found in place.cluster.quarantines().values()]
        assert verdicts.count(QuarantineVerdict.BREAKER) >= 28, "the first ones were alone when they were looked at"
        await place.run(60)
        assert {found.verdict for found in place.cluster.quarantines().values()} == {QuarantineVerdict.BREAKER}
        assert place.held() == place.approved() == set()

    async def test_what_somebody_has_deleted_is_not_told_again(self) -> None:
        place = Place()
        await place.run(1)
        place.breaks(7)
        await place.run(1)
        await place.cluster.delete(NODE_QUARANTINES, "node-7")
        place.fleet.quarantines.apply_event(place.cluster.objects[NODE_QUARANTINES.plural, "", "node-7"], deleted=False)
        await place.run(100)
        assert place.held() == set()
        assert place.cluster.quarantines() == {}

    async def test_but_another_condition_is_be_it_of_the_same_second(self) -> None:
        """Conditions know seconds only."""
        place = Place()
        await place.run(1)
        at = place.runtime.now()
        place.cluster.breaks("node-7", at)
        await place.run(1)
        place.cluster.mends("node-7")
        await place.cluster.delete(NODE_QUARANTINES, "node-7")
        place.fleet.quarantines.apply_event(place.cluster.objects[NODE_QUARANTINES.plural, "", "node-7"], deleted=False)
        await place.run(70)  # a list shows that it is gone
        assert place.held() == set()
        place.cluster.breaks("node-7", at)
        await place.run(1)
        assert place.held() == names(7)

    async def test_a_node_with_the_opt_out_label_is_left_alone_and_so_is_an_old_condition(self) -> None:
        place = Place()
        place.cluster.objects["nodes", "", "node-8"]["metadata"]["labels"][LABEL_NO_QUARANTINE] = ""
        place.breaks(8)
        place.cluster.breaks("node-9", place.runtime.now() - 700)
        await place.run(30)
        assert place.cluster.quarantines() == {}

    async def test_while_remedies_are_paused_nothing_is_raised_and_afterwards_it_is(self) -> None:
        place = Place()
        await place.run(1)
        pause = {"metadata": {"name": "pacekeeper-pause", "namespace": "system"}}
        place.cluster._store((CONFIG_MAPS.plural, "system", "pacekeeper-pause"), pause)
        await place.run(2)
        place.breaks(7)
        await place.run(20)
        assert place.cluster.quarantines() == {}
        del place.cluster.objects[CONFIG_MAPS.plural, "system", "pacekeeper-pause"]
        await place.run(20)
        assert place.held() == names(7)


class TestManyAtOnce:
    async def test_a_budget_holds_exactly_however_many_ask(self) -> None:
        place = Place(quarantine_max_nodes=6)
        await place.run(1)
        place.breaks(*range(1, 31))
        await place.run(60)
        assert len(place.approved()) == len(place.held()) == 6
        verdicts = [found.verdict for found in place.cluster.quarantines().values()]
        assert verdicts.count(QuarantineVerdict.BUDGET_SPENT) == 24

    @pytest.mark.parametrize("error", [Conflict("has changed", delay=1), kopf.TemporaryError("no answer", delay=2)])
    async def test_and_where_nobody_knows_whether_an_approval_was_written(self, error: Exception) -> None:
        place = Place(quarantine_max_nodes=6)
        place.cluster.refuses = [error] * 4
        await place.run(1)
        place.breaks(*range(1, 31))
        await place.run(120)
        assert len(place.approved()) == len(place.held()) == 6

    @pytest.mark.parametrize("after", [0.012, 0.024, 0.036, 0.048, 0.06, 0.09, 0.15])
    async def test_and_where_the_operator_dies_amid_it(self, after: float) -> None:
        place = Place(quarantine_max_nodes=6)
        await place.run(1)
        place.breaks(*range(1, 31))
        await place.run(after)
        await place.restart()
        await place.run(60)
        assert len(place.approved()) == len(place.held()) == 6

    async def test_an_api_server_that_asks_for_a_pause_gets_it(self) -> None:
        place = Place()
        await place.run(1)
        place.cluster.refusals[NODE_QUARANTINES.plural] = [
            ApiServerBusy("too many requests", delay=7)
        ] * MAX_CONCURRENT_RECONCILES
        place.breaks(*range(1, 33))
        await place.run(1)
        before = place.cluster.calls
        await place.run(5)
        assert place.cluster.calls == before
        await place.run(10)
        assert len(place.held()) == 32

    async def test_three_writes_to_a_held_node_so_many_at_a_time_and_words_come_last(self) -> None:
        place = Place()
        await place.run(1)
        place.cluster.calls, place.cluster.most = 0, 0
        place.cluster.lists.clear()
        place.breaks(*range(1, 33))
        while len(place.held()) < 32:
            await place.run(0.01)
        assert place.cluster.most <= MAX_CONCURRENT_RECONCILES
        assert place.cluster.calls <= 32 * 3 + MAX_CONCURRENT_RECONCILES + 2, (
            "made as approved, tainted, cordoned; and the pause is read"
        )
        told = [found for found in place.cluster.quarantines().values() if found.status.cordoned_at is not None]
        assert len(told) <= MAX_CONCURRENT_RECONCILES
        assert place.cluster.lists == ["nodequarantines"]
        await place.run(5)
        assert all(found.status.cordoned_at is not None for found in place.cluster.quarantines().values())

    async def test_words_wait_for_as_long_as_more_of_them_fail_again_and_again(self) -> None:
        """Jobs raise their suspicions one after the other, and seldom does a node wait."""
        place = Place()
        await place.run(1)
        for first in range(1, 33, 8):
            place.breaks(*range(first, first + 8))
            await place.run(0.3)
        assert len(place.held()) == 32
        told = [found for found in place.cluster.quarantines().values() if found.status.cordoned_at is not None]
        assert len(told) <= NODE_PRIORITY_THRESHOLD
        await place.run(3)
        assert all(found.status.cordoned_at is not None for found in place.cluster.quarantines().values())


class TestFirst:
    """Where very many nodes wait to be held, all else that is to be done waits for them, but not for ever."""

    async def test_a_few_hold_up_nothing(self) -> None:
        place = Place()
        place.fleet.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD)
        await asyncio.wait_for(place.fleet.priority_gate.wait_for_turn(), 60)

    async def test_it_goes_on_once_they_are_done(self) -> None:
        place = Place()
        place.fleet.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        calm = asyncio.create_task(place.fleet.priority_gate.wait_for_turn())
        await place.timeline.run(1.0)
        assert not calm.done()
        place.fleet.priority_gate.set_backlog(0)
        await place.timeline.run(0.2)
        assert calm.done()

    async def test_those_that_had_to_wait_go_on_one_by_one_and_wait_again_where_others_fail_meanwhile(self) -> None:
        place = Place()
        place.fleet.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        waiting = [asyncio.create_task(place.fleet.priority_gate.wait_for_turn()) for _ in range(10)]
        await place.timeline.run(1.0)
        place.fleet.priority_gate.set_backlog(0)
        await place.timeline.run(3.5 * NODE_PRIORITY_SPACING_SECONDS)
        late = asyncio.create_task(place.fleet.priority_gate.wait_for_turn())
        await place.timeline.run(0)
        assert [one.done() for one in waiting] == 3 * [True] + 7 * [False]
        assert not late.done(), "nobody overtakes them"
        place.fleet.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        await place.timeline.run(1.0)
        assert sum(one.done() for one in waiting) <= 4
        place.fleet.priority_gate.set_backlog(0)
        await place.timeline.run(20 * NODE_PRIORITY_SPACING_SECONDS)
        assert all(one.done() for one in (*waiting, late))

    async def test_nodes_are_first_as_soon_as_there_is_news_of_them(self) -> None:
        """Between a suspicion that was raised and the look after its node nothing else begins."""
        place = Place()
        await place.run(1)
        place.breaks(*range(1, NODE_PRIORITY_THRESHOLD + 2))
        assert place.fleet.priority_gate.is_closed
        await place.run(10)
        assert not place.fleet.priority_gate.is_closed

    async def test_what_was_heard_while_another_led_keeps_nobody_waiting(self) -> None:
        place = Place()
        place.breaks(*range(1, NODE_PRIORITY_THRESHOLD + 2))
        await place.timeline.run(2 * MAX_NODE_PRIORITY_SECONDS)
        await place.run(0)
        place.breaks(*range(NODE_PRIORITY_THRESHOLD + 2, 2 * NODE_PRIORITY_THRESHOLD + 4))
        assert place.fleet.priority_gate.is_closed, "they have their own time"

    async def test_hundreds_that_ask_whether_remedies_are_paused_have_one_answer(self) -> None:
        place = Place()
        await asyncio.gather(*(place.fleet.get_pause_reason() for _ in range(100)))
        assert place.cluster.calls == 1

    async def test_and_after_a_while_whatever_becomes_of_them(self) -> None:
        place = Place()
        place.fleet.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        calm = asyncio.create_task(place.fleet.priority_gate.wait_for_turn())
        await place.timeline.run(MAX_NODE_PRIORITY_SECONDS - 1)
        assert not calm.done()
        await place.timeline.run(2)
        assert calm.done()
        await asyncio.wait_for(place.fleet.priority_gate.wait_for_turn(), 60)  # who comes then waits no more
        place.fleet.priority_gate.set_backlog(0)
        place.fleet.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        again = asyncio.create_task(place.fleet.priority_gate.wait_for_turn())
        await place.timeline.run(1)
        assert not again.done(), "these are others"
        again.cancel()

    async def test_who_waits_is_counted_and_forgotten(self) -> None:
        place = Place()
        await place.run(1)
        place.breaks(*range(1, NODES_THERE + 1))
        most = 0
        for _ in range(20):
            await place.run(0.01)
            most = max(most, place.fleet.priority_gate.backlog)
        assert most > NODE_PRIORITY_THRESHOLD
        await place.run(30)
        assert len(place.held()) == NODES_THERE
        assert place.fleet.priority_gate.backlog == 0
