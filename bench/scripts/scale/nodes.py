"""Many nodes fail at once: how long until the last one is tainted and cordoned.

1,500 nodes with a worker each. Those that fail get a condition that the platform names
(`policy.quarantine.conditions`); the time runs from the moment before the first one is written, and their writing is in
it. Breaker and budget are raised, so that all of them are to be quarantined: one after the other, many at once, and as
many over 30 s; then others by XIDs that dcgm-exporter shows, upon which their workers are to be replaced, too. At last
many fail at once with the breaker as it is shipped.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .api import STRATEGIC, Api
from .figure import Measurement
from .world import GROUP, PATIENT, ScaleTestbed, made, node_name, log_progress

CONDITION = "GpuFault"
GPU_HAS_FALLEN_OFF = 79
"""The bus: an XID."""
STAGGER_SECONDS = 30.0
IDLE_SECONDS = 20.0
SETTLE_SECONDS = 30.0
"""All sidecars are back after an operator's restart."""
PATIENCE_SECONDS = 180.0
STAYS_SECONDS = 20.0
"""For so long no node may be cordoned where the breaker has tripped."""
TAINT = "pacekeeper.dev/quarantine"
QUARANTINES = f"{GROUP}/nodequarantines"
RAISED = {
    "PACEKEEPER_QUARANTINE_MODE": "Act",
    "PACEKEEPER_QUARANTINE_CONDITIONS": CONDITION,
    "PACEKEEPER_QUARANTINE_MAX_NODES": "10000",
    "PACEKEEPER_QUARANTINE_MAX_SHARE": "1.0",
    "PACEKEEPER_BREAKER_NODES": "10000",
}
SHIPPED = {name: value for name, value in RAISED.items() if "BREAKER" not in name}


@dataclass(frozen=True)
class Size:
    nodes: int
    workers_of_job: int
    fail: tuple[tuple[int, float], ...]  # how many at once, and the goal in seconds
    single: int
    broken: int  # with the breaker as shipped


FULL = Size(1500, 100, ((150, 2.5), (375, 6.0), (750, 12.0)), 100, 750)
QUICK = Size(60, 15, ((6, 2.5), (15, 6.0), (30, 12.0)), 10, 30)
ANCHORS = {150: "NVSentinel: 62 s", 375: "NVSentinel: 155 s", 750: "NVSentinel: 304 s"}


def measured(quick: bool) -> Sequence[Measurement]:
    return asyncio.run(_measure(QUICK if quick else FULL))


async def _measure(size: Size) -> list[Measurement]:
    figures: list[Measurement] = []
    async with made(size.nodes) as world, _watching(world.api) as seen:
        world.start_operator(RAISED | PATIENT)
        for index in range(size.nodes // size.workers_of_job):
            await world.make_job(f"job-{index:03}", size.workers_of_job)
        await world.wait_until_training(size.nodes)
        world.plane.stop_placing()
        world.restart_operator(RAISED)
        await asyncio.sleep(SETTLE_SECONDS)
        log_progress(f"{size.nodes} workers train; the operator has {world.memory_mb():.0f} MB")
        share = await world.idle_share(IDLE_SECONDS)
        log_progress(f"while nothing fails, the operator takes {share:.3f} of a core")
        figures.append(await _single(world, seen, size.single))
        for stagger in (0.0, STAGGER_SECONDS):
            for count, goal in size.fail:
                figures.append(await _blast(world, seen, count, goal, stagger))
        first = 0
        for count, goal in size.fail:  # each others: what a GPU has shown before is no news
            figures.append(await _xids(world, seen, range(first, first + count), goal))
            first += count
        world.restart_operator(SHIPPED)
        await asyncio.sleep(SETTLE_SECONDS)
        figures += await _breaker(world, seen, size.broken)
    return figures


@dataclass
class NodeObservations:
    """What the watches have told, by node."""

    marked_since: dict[str, float] = field(default_factory=dict)  # since when it is tainted and cordoned
    cordoned_ever: set[str] = field(default_factory=set)
    blocked_since: dict[str, float] = field(default_factory=dict)  # since when its NodeQuarantine says that the breaker tripped
    quarantines: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def node(self, _kind: str, body: dict[str, Any]) -> None:
        name, spec = body["metadata"]["name"], body["spec"]
        tainted = any(taint["key"] == TAINT for taint in spec.get("taints") or ())
        if tainted or spec.get("unschedulable"):
            self.cordoned_ever.add(name)
        if tainted and spec.get("unschedulable"):
            self.marked_since.setdefault(name, time.monotonic())
        else:
            self.marked_since.pop(name, None)
        self.changed.set()

    def quarantine(self, kind: str, body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        if kind == "DELETED":
            self.quarantines.discard(name)
            self.blocked_since.pop(name, None)
        else:
            self.quarantines.add(name)
            conditions = body.get("status", {}).get("conditions", ())
            if any(c["type"] == "Quarantined" and c["reason"] == "Breaker" for c in conditions):
                self.blocked_since.setdefault(name, time.monotonic())
        self.changed.set()


@asynccontextmanager
async def _watching(api: Api) -> AsyncIterator[NodeObservations]:
    seen = NodeObservations()
    tasks = [
        asyncio.create_task(api.watch("/api/v1/nodes", seen.node)),
        asyncio.create_task(api.watch(QUARANTINES, seen.quarantine)),
    ]
    try:
        yield seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _single(world: ScaleTestbed, seen: NodeObservations, count: int) -> Measurement:
    """One after the other; each from the moment before its condition is written."""
    seconds = []
    nodes = [node_name(i) for i in range(count)]
    for name in nodes:
        began = time.monotonic()
        await _write_condition(world.api, name, "True")
        held = await _wait_until(seen, partial(seen.marked_since.__contains__, name), f"{name} is held")
        seconds.append(seen.marked_since[name] - began if held else math.inf)
    await _mend(world, seen, nodes)
    seconds.sort()
    p99 = seconds[min(len(seconds) - 1, math.ceil(0.99 * len(seconds)) - 1)]
    median = statistics.median(seconds)
    log_progress(f"{count} nodes, one after the other: median {1e3 * median:.0f} ms, P99 {1e3 * p99:.0f} ms")
    return Measurement(f"one node, P99 of {count}", 1e3 * p99, 150.0, "ms")


async def _blast(world: ScaleTestbed, seen: NodeObservations, count: int, goal: float, stagger: float) -> Measurement:
    nodes = [node_name(i) for i in range(count)]
    used, began = world.processor_seconds(), time.monotonic()

    async def fail(index: int, name: str) -> None:
        await asyncio.sleep(index / count * stagger)
        await _write_condition(world.api, name, "True")

    writing = asyncio.gather(*(fail(index, name) for index, name in enumerate(nodes)))
    held = await _wait_until(seen, lambda: all(name in seen.marked_since for name in nodes), f"{count} nodes are held")
    await writing
    last = max(seen.marked_since[name] for name in nodes) - began if held else math.inf
    used = world.processor_seconds() - used
    how = f"over {stagger:.0f} s" if stagger else "at once"
    log_progress(f"{count} nodes {how}: {last:.2f} s, {used:.1f} s of a core, {world.memory_mb():.0f} MB")
    await _mend(world, seen, nodes)
    anchor = "" if stagger else ANCHORS.get(count, "")
    return Measurement(f"{count} nodes {how}", last - stagger * (count - 1) / count, goal, "s", anchor)


async def _xids(world: ScaleTestbed, seen: NodeObservations, which: range, goal: float) -> Measurement:
    """From the moment in which Prometheus shows them. Their workers are replaced, but find no room."""
    nodes, count = [node_name(i) for i in which], len(which)
    used, began = world.processor_seconds(), time.monotonic()
    world.prometheus.xids |= dict.fromkeys(nodes, GPU_HAS_FALLEN_OFF)
    held = await _wait_until(seen, lambda: all(name in seen.marked_since for name in nodes), f"{count} nodes with XIDs are held")
    last = max(seen.marked_since[name] for name in nodes) - began if held else math.inf
    log_progress(f"{count} nodes by XID: {last:.2f} s, {world.processor_seconds() - used:.1f} s of a core")
    world.prometheus.xids.clear()
    await _release(world, seen, nodes)
    return Measurement(f"{count} nodes at once by XID", last, goal, "s", ANCHORS.get(count, ""))


async def _breaker(world: ScaleTestbed, seen: NodeObservations, count: int) -> list[Measurement]:
    nodes, seen.cordoned_ever = [node_name(i) for i in range(count)], set()
    began = time.monotonic()
    writing = asyncio.gather(*(_write_condition(world.api, name, "True") for name in nodes))
    await _wait_until(seen, lambda: bool(seen.blocked_since), "the breaker's word")
    await writing
    await asyncio.sleep(STAYS_SECONDS)
    cordoned, told = len(seen.cordoned_ever), sorted(at - began for at in seen.blocked_since.values())
    shown = world.metrics().count('reason="Breaker"')
    first, last = (told[0], told[-1]) if told else (math.inf, math.inf)
    log_progress(
        f"{cordoned} of {count} nodes cordoned; said of {len(told)} after {first:.2f} to {last:.2f} s, "
        f"of {shown} in the metrics"
    )
    return [
        Measurement(f"nodes cordoned of {count} that fail at once, breaker as shipped", cordoned, 0, "nodes"),
        Measurement("the breaker's word in the first NodeQuarantine", first, 6.0, "s"),
        Measurement("nodes of which it is not said", count - len(told), 0, "nodes"),
    ]


async def _write_condition(api: Api, name: str, status: str) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    condition = {
        "type": CONDITION, "status": status, "reason": "XidError" if status == "True" else "Healthy",
        "message": "written by the bench", "lastHeartbeatTime": now, "lastTransitionTime": now,
    }  # fmt: skip
    await api.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition]}}, STRATEGIC)


async def _mend(world: ScaleTestbed, seen: NodeObservations, nodes: Sequence[str]) -> None:
    """Nothing is wrong with them any more, and they are released."""
    await world.api.all(_write_condition(world.api, name, "False") for name in nodes)
    await _release(world, seen, nodes)


async def _release(world: ScaleTestbed, seen: NodeObservations, nodes: Sequence[str]) -> None:
    await world.api.all(world.api.call("DELETE", f"{QUARANTINES}/{name}") for name in set(nodes) & seen.quarantines)
    if not await _wait_until(seen, lambda: not seen.quarantines and not seen.marked_since, "all are released"):
        raise RuntimeError("nodes are not released, so nothing more can be measured")


async def _wait_until(seen: NodeObservations, condition: Callable[[], bool], what: str) -> bool:
    """False: not within PATIENCE_SECONDS, which is said."""

    async def wait() -> None:
        while not condition():
            seen.changed.clear()
            await seen.changed.wait()

    try:
        await asyncio.wait_for(wait(), PATIENCE_SECONDS)
    except TimeoutError:
        log_progress(f"not within {PATIENCE_SECONDS:.0f} s: {what}; {len(seen.marked_since)} are held")
        return False
    return True
