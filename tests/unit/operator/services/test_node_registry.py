"""Many failing nodes at once: budget, order, and cost; and nodes that the platform itself reports as broken."""

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

NODE_COUNT = 40
FAULT = "GpuFault"


class SlowCluster(Cluster):
    """Each call takes some time, and watches deliver writes later."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.timeline = timeline
        self.calls = self.running = self.max_running = 0
        self.registry: NodeRegistry | None = None
        self.approval_errors: list[Exception] = []  # raised by the next approvals, after they are written
        for i in range(4, NODE_COUNT + 1):
            self.node(f"node-{i}")

    async def _delay(self) -> None:
        self.calls += 1
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await self.timeline.wait_for(0.01)
        self.running -= 1

    async def create(self, kind: ResourceKind, body: Object, *, dry_run: bool = False) -> Object:
        await self._delay()
        done = self._deliver_event(kind, await super().create(kind, body, dry_run=dry_run))
        return self._raise_approval_error(kind, body, done)

    async def patch(self, kind: ResourceKind, name: str, body: Any, namespace: str = "", **options: Any) -> Object:
        await self._delay()
        done = self._deliver_event(kind, await super().patch(kind, name, body, namespace, **options))
        return self._raise_approval_error(kind, body, done)

    async def apply(self, kind: ResourceKind, body: Object, *, manager: str, subresource: str = "") -> Object:
        await self._delay()
        return self._deliver_event(kind, await super().apply(kind, body, manager=manager, subresource=subresource))

    async def find(self, kind: ResourceKind, name: str, namespace: str = "") -> Object | None:
        self.calls += 1
        return await super().find(kind, name, namespace)

    def _raise_approval_error(self, kind: ResourceKind, body: Object, done: Object) -> Object:
        if kind is NODE_QUARANTINES and body.get("spec", {}).get("approved") and self.approval_errors:
            raise self.approval_errors.pop(0)
        return done

    def _deliver_event(self, kind: ResourceKind, body: Object) -> Object:
        if self.registry is not None and kind in (NODE_OBJECTS, NODE_QUARANTINES):
            store = self.registry.nodes if kind is NODE_OBJECTS else self.registry.quarantines
            self.timeline.wait_for(0.005).add_done_callback(lambda _: store.apply_event(body, deleted=False))
        return body

    def set_fault(self, name: str, at: float) -> None:
        """Add the fault condition to a node, as the platform does."""
        body = self.objects["nodes", "", name]
        condition = {"type": FAULT, "status": "True", "reason": "Xid79", "lastTransitionTime": format_time(at)}
        body["status"]["conditions"].append(condition)
        stored = self._store(("nodes", "", name), body)
        if self.registry is not None:
            self.registry.nodes.apply_event(stored, deleted=False)

    def clear_fault(self, name: str) -> None:
        body = self.objects["nodes", "", name]
        body["status"]["conditions"] = [item for item in body["status"]["conditions"] if item["type"] != FAULT]
        stored = self._store(("nodes", "", name), body)
        if self.registry is not None:
            self.registry.nodes.apply_event(stored, deleted=False)


class RegistryBench:
    def __init__(self, **settings: Any) -> None:
        self.timeline = Timeline()
        self.runtime, self.cluster = VirtualRuntime(self.timeline), SlowCluster(self.timeline)
        limits = {"quarantine_max_nodes": 1000, "quarantine_max_share": 1.0, "breaker_nodes": 1000}
        required = {"namespace": "system", "quarantine_mode": RemediationMode.ACT, "quarantine_conditions": (FAULT,)}
        self.settings = Settings(**{**required, **limits, **settings})
        self.registry = self.cluster.registry = NodeRegistry(self.cluster, self.runtime, self.settings)
        self._watching: asyncio.Task[Any] | None = None

    async def run(self, seconds: float) -> None:
        if self._watching is None:
            self._watching = self.runtime.start_task(run_quarantine_loop(self.registry), "quarantines")
        await self.timeline.run(seconds)
        assert not self._watching.done()

    async def restart(self) -> None:
        """Stop the operator abruptly, and start another one."""
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        self.registry = self.cluster.registry = NodeRegistry(self.cluster, self.runtime, self.settings)
        self._watching = None

    def break_nodes(self, *numbers: int) -> None:
        for i in numbers:
            self.cluster.set_fault(f"node-{i}", self.runtime.now())

    def list_approved(self) -> set[str]:
        return {name for name, found in self.cluster.quarantines().items() if found.spec.approved}

    def list_held(self) -> set[str]:
        return self.cluster.marked()


def build_names(*numbers: int) -> set[str]:
    return {f"node-{i}" for i in numbers}


class TestNodeConditions:
    async def test_a_node_condition_quarantines_a_node_that_no_job_blames(self) -> None:
        bench = RegistryBench()
        await bench.run(1)
        bench.break_nodes(7)
        await bench.run(1)
        assert bench.list_held() == build_names(7)
        found = bench.cluster.quarantines()["node-7"]
        (suspicion,) = found.spec.suspicions
        assert (suspicion.namespace, suspicion.incident, suspicion.witness) == ("system", "", Witness.NODE_CONDITION)
        assert found.spec.incident_ref is None
        witnessed = next(c for c in found.status.conditions if c.type == "Witnessed")
        assert (witnessed.status, witnessed.reason) == ("True", "NodeCondition")
        assert witnessed.message == "condition GpuFault is True (Xid79)"

    async def test_a_quarantine_is_delayed_where_the_breaker_may_trip(self) -> None:
        bench = RegistryBench(breaker_nodes=3)
        await bench.run(1)
        bench.break_nodes(7)
        await bench.run(CONFIRMED_SUSPICION_HOLD_SECONDS - 1)
        assert bench.list_held() == set()
        await bench.run(2)
        assert bench.list_held() == build_names(7)

    async def test_the_breaker_reports_too_many_failures_at_once_and_no_node_is_changed(self) -> None:
        bench = RegistryBench(breaker_nodes=3)
        await bench.run(1)
        bench.break_nodes(*range(1, 31))
        await bench.run(2)
        verdicts = [found.verdict for found in bench.cluster.quarantines().values()]
        assert verdicts.count(QuarantineVerdict.BREAKER) >= 28, "no others had failed when the first ones were checked"
        await bench.run(60)
        assert {found.verdict for found in bench.cluster.quarantines().values()} == {QuarantineVerdict.BREAKER}
        assert bench.list_held() == bench.list_approved() == set()

    async def test_a_deleted_quarantine_is_not_raised_again(self) -> None:
        bench = RegistryBench()
        await bench.run(1)
        bench.break_nodes(7)
        await bench.run(1)
        await bench.cluster.delete(NODE_QUARANTINES, "node-7")
        bench.registry.quarantines.apply_event(
            bench.cluster.objects[NODE_QUARANTINES.plural, "", "node-7"], deleted=False
        )
        await bench.run(100)
        assert bench.list_held() == set()
        assert bench.cluster.quarantines() == {}

    async def test_a_new_condition_after_a_deletion_is_raised_even_in_the_same_second(self) -> None:
        """Times of conditions are in seconds."""
        bench = RegistryBench()
        await bench.run(1)
        at = bench.runtime.now()
        bench.cluster.set_fault("node-7", at)
        await bench.run(1)
        bench.cluster.clear_fault("node-7")
        await bench.cluster.delete(NODE_QUARANTINES, "node-7")
        bench.registry.quarantines.apply_event(
            bench.cluster.objects[NODE_QUARANTINES.plural, "", "node-7"], deleted=False
        )
        await bench.run(70)  # a list shows that it is deleted
        assert bench.list_held() == set()
        bench.cluster.set_fault("node-7", at)
        await bench.run(1)
        assert bench.list_held() == build_names(7)

    async def test_a_node_with_the_opt_out_label_or_an_old_condition_is_ignored(self) -> None:
        bench = RegistryBench()
        bench.cluster.objects["nodes", "", "node-8"]["metadata"]["labels"][LABEL_NO_QUARANTINE] = ""
        bench.break_nodes(8)
        bench.cluster.set_fault("node-9", bench.runtime.now() - 700)
        await bench.run(30)
        assert bench.cluster.quarantines() == {}

    async def test_a_condition_is_raised_after_a_pause_of_remedies(self) -> None:
        bench = RegistryBench()
        await bench.run(1)
        pause = {"metadata": {"name": "pacekeeper-pause", "namespace": "system"}}
        bench.cluster._store((CONFIG_MAPS.plural, "system", "pacekeeper-pause"), pause)
        await bench.run(2)
        bench.break_nodes(7)
        await bench.run(20)
        assert bench.cluster.quarantines() == {}
        del bench.cluster.objects[CONFIG_MAPS.plural, "system", "pacekeeper-pause"]
        await bench.run(20)
        assert bench.list_held() == build_names(7)


class TestManyAtOnce:
    async def test_the_budget_holds_exactly_for_many_nodes(self) -> None:
        bench = RegistryBench(quarantine_max_nodes=6)
        await bench.run(1)
        bench.break_nodes(*range(1, 31))
        await bench.run(60)
        assert len(bench.list_approved()) == len(bench.list_held()) == 6
        verdicts = [found.verdict for found in bench.cluster.quarantines().values()]
        assert verdicts.count(QuarantineVerdict.BUDGET_SPENT) == 24

    @pytest.mark.parametrize("error", [Conflict("has changed", delay=1), kopf.TemporaryError("no answer", delay=2)])
    async def test_the_budget_holds_where_the_result_of_an_approval_is_unknown(self, error: Exception) -> None:
        bench = RegistryBench(quarantine_max_nodes=6)
        bench.cluster.approval_errors = [error] * 4
        await bench.run(1)
        bench.break_nodes(*range(1, 31))
        await bench.run(120)
        assert len(bench.list_approved()) == len(bench.list_held()) == 6

    @pytest.mark.parametrize("after", [0.012, 0.024, 0.036, 0.048, 0.06, 0.09, 0.15])
    async def test_the_budget_holds_where_the_operator_restarts(self, after: float) -> None:
        bench = RegistryBench(quarantine_max_nodes=6)
        await bench.run(1)
        bench.break_nodes(*range(1, 31))
        await bench.run(after)
        await bench.restart()
        await bench.run(60)
        assert len(bench.list_approved()) == len(bench.list_held()) == 6

    async def test_the_operator_pauses_as_a_busy_api_server_requests(self) -> None:
        bench = RegistryBench()
        await bench.run(1)
        bench.cluster.refusals[NODE_QUARANTINES.plural] = [
            ApiServerBusy("too many requests", delay=7)
        ] * MAX_CONCURRENT_RECONCILES
        bench.break_nodes(*range(1, 33))
        await bench.run(1)
        before = bench.cluster.calls
        await bench.run(5)
        assert bench.cluster.calls == before
        await bench.run(10)
        assert len(bench.list_held()) == 32

    async def test_a_quarantine_takes_three_writes_and_statuses_are_written_last(self) -> None:
        bench = RegistryBench()
        await bench.run(1)
        bench.cluster.calls, bench.cluster.max_running = 0, 0
        bench.cluster.lists.clear()
        bench.break_nodes(*range(1, 33))
        while len(bench.list_held()) < 32:
            await bench.run(0.01)
        assert bench.cluster.max_running <= MAX_CONCURRENT_RECONCILES
        assert bench.cluster.calls <= 32 * 3 + MAX_CONCURRENT_RECONCILES + 2, (
            "create as approved, taint, cordon; and the pause is read"
        )
        recorded = [found for found in bench.cluster.quarantines().values() if found.status.cordoned_at is not None]
        assert len(recorded) <= MAX_CONCURRENT_RECONCILES
        assert bench.cluster.lists == ["nodequarantines"]
        await bench.run(5)
        assert all(found.status.cordoned_at is not None for found in bench.cluster.quarantines().values())

    async def test_statuses_wait_while_more_nodes_fail(self) -> None:
        """Jobs raise their suspicions one after the other, so that few nodes wait at a time."""
        bench = RegistryBench()
        await bench.run(1)
        for first in range(1, 33, 8):
            bench.break_nodes(*range(first, first + 8))
            await bench.run(0.3)
        assert len(bench.list_held()) == 32
        recorded = [found for found in bench.cluster.quarantines().values() if found.status.cordoned_at is not None]
        assert len(recorded) <= NODE_PRIORITY_THRESHOLD
        await bench.run(3)
        assert all(found.status.cordoned_at is not None for found in bench.cluster.quarantines().values())


@pytest.mark.parametrize(
    ("name", "spec"), [("node-1", None), ("node-1", {"reason": 7}), ("node-9", {"reason": "it is noisy"})]
)
async def test_without_a_readable_quarantine_or_its_node_nothing_is_approved(name: str, spec: Object | None) -> None:
    cluster = Cluster()
    if spec is not None:
        await cluster.create(NODE_QUARANTINES, {"metadata": {"name": name}, "spec": spec})
    registry = NodeRegistry(cluster, VirtualRuntime(Timeline()), Settings(namespace="system"))
    with pytest.raises(Conflict, match=f"the NodeQuarantine or the node {name} has changed"):
        await registry.decide_approval(name)


class TestNodePriority:
    """Where very many nodes wait for quarantine, other work waits for them, up to a timeout."""

    async def test_few_waiting_nodes_delay_nothing(self) -> None:
        bench = RegistryBench()
        bench.registry.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD)
        await asyncio.wait_for(bench.registry.priority_gate.wait_for_turn(), 60)

    async def test_other_work_continues_once_no_node_waits(self) -> None:
        bench = RegistryBench()
        bench.registry.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        waiter = asyncio.create_task(bench.registry.priority_gate.wait_for_turn())
        await bench.timeline.run(1.0)
        assert not waiter.done()
        bench.registry.priority_gate.set_backlog(0)
        await bench.timeline.run(0.2)
        assert waiter.done()

    async def test_waiting_work_continues_one_by_one_and_waits_again_for_new_nodes(self) -> None:
        bench = RegistryBench()
        bench.registry.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        waiting = [asyncio.create_task(bench.registry.priority_gate.wait_for_turn()) for _ in range(10)]
        await bench.timeline.run(1.0)
        bench.registry.priority_gate.set_backlog(0)
        await bench.timeline.run(3.5 * NODE_PRIORITY_SPACING_SECONDS)
        late = asyncio.create_task(bench.registry.priority_gate.wait_for_turn())
        await bench.timeline.run(0)
        assert [waiter.done() for waiter in waiting] == 3 * [True] + 7 * [False]
        assert not late.done(), "it does not overtake them"
        bench.registry.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        await bench.timeline.run(1.0)
        assert sum(waiter.done() for waiter in waiting) <= 4
        bench.registry.priority_gate.set_backlog(0)
        await bench.timeline.run(20 * NODE_PRIORITY_SPACING_SECONDS)
        assert all(waiter.done() for waiter in (*waiting, late))

    async def test_nodes_have_priority_as_soon_as_they_fail(self) -> None:
        """No other work begins between a suspicion and the check of its node."""
        bench = RegistryBench()
        await bench.run(1)
        bench.break_nodes(*range(1, NODE_PRIORITY_THRESHOLD + 2))
        assert bench.registry.priority_gate.is_closed
        await bench.run(10)
        assert not bench.registry.priority_gate.is_closed

    async def test_events_from_before_the_leadership_do_not_use_up_the_priority_time(self) -> None:
        bench = RegistryBench()
        bench.break_nodes(*range(1, NODE_PRIORITY_THRESHOLD + 2))
        await bench.timeline.run(2 * MAX_NODE_PRIORITY_SECONDS)
        await bench.run(0)
        bench.break_nodes(*range(NODE_PRIORITY_THRESHOLD + 2, 2 * NODE_PRIORITY_THRESHOLD + 4))
        assert bench.registry.priority_gate.is_closed, "they have their own timeout"

    async def test_concurrent_reads_of_the_pause_share_one_call(self) -> None:
        bench = RegistryBench()
        await asyncio.gather(*(bench.registry.get_pause_reason() for _ in range(100)))
        assert bench.cluster.calls == 1

    async def test_other_work_continues_after_a_timeout(self) -> None:
        bench = RegistryBench()
        bench.registry.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        waiter = asyncio.create_task(bench.registry.priority_gate.wait_for_turn())
        await bench.timeline.run(MAX_NODE_PRIORITY_SECONDS - 1)
        assert not waiter.done()
        await bench.timeline.run(2)
        assert waiter.done()
        await asyncio.wait_for(bench.registry.priority_gate.wait_for_turn(), 60)  # later work does not wait
        bench.registry.priority_gate.set_backlog(0)
        bench.registry.priority_gate.set_backlog(NODE_PRIORITY_THRESHOLD + 1)
        again = asyncio.create_task(bench.registry.priority_gate.wait_for_turn())
        await bench.timeline.run(1)
        assert not again.done(), "these are new nodes"
        again.cancel()

    async def test_waiting_nodes_are_counted_while_they_wait(self) -> None:
        bench = RegistryBench()
        await bench.run(1)
        bench.break_nodes(*range(1, NODE_COUNT + 1))
        largest = 0
        for _ in range(20):
            await bench.run(0.01)
            largest = max(largest, bench.registry.priority_gate.backlog)
        assert largest > NODE_PRIORITY_THRESHOLD
        await bench.run(30)
        assert len(bench.list_held()) == NODE_COUNT
        assert bench.registry.priority_gate.backlog == 0
