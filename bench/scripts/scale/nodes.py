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

from .api import STRATEGIC_MERGE_PATCH, Api
from .measurement import Measurement
from .world import API_PATH, PATIENT_SETTINGS, ScaleTestbed, create_testbed, format_node_name, log_progress

CONDITION = "GpuFault"
GPU_HAS_FALLEN_OFF = 79
"""The bus: an XID."""
STAGGER_SECONDS = 30.0
IDLE_SECONDS = 20.0
SETTLE_SECONDS = 30.0
"""All sidecars are back after an operator's restart."""
TIMEOUT_SECONDS = 180.0
BREAKER_SECONDS = 20.0
"""How long no node may be cordoned where the breaker has tripped."""
TAINT = "pacekeeper.dev/quarantine"
QUARANTINES = f"{API_PATH}/nodequarantines"
RAISED_LIMITS = {
    "PACEKEEPER_QUARANTINE_MODE": "Act",
    "PACEKEEPER_QUARANTINE_CONDITIONS": CONDITION,
    "PACEKEEPER_QUARANTINE_MAX_NODES": "10000",
    "PACEKEEPER_QUARANTINE_MAX_SHARE": "1.0",
    "PACEKEEPER_BREAKER_NODES": "10000",
}
SHIPPED_LIMITS = {name: value for name, value in RAISED_LIMITS.items() if "BREAKER" not in name}


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


def run_measurements(quick: bool) -> Sequence[Measurement]:
    return asyncio.run(_measure_nodes(QUICK if quick else FULL))


async def _measure_nodes(size: Size) -> list[Measurement]:
    measurements: list[Measurement] = []
    async with create_testbed(size.nodes) as testbed, _watch_nodes(testbed.api) as observations:
        testbed.start_operator(RAISED_LIMITS | PATIENT_SETTINGS)
        for index in range(size.nodes // size.workers_of_job):
            await testbed.make_job(f"job-{index:03}", size.workers_of_job)
        await testbed.wait_until_training(size.nodes)
        testbed.plane.stop_placing()
        testbed.restart_operator(RAISED_LIMITS)
        await asyncio.sleep(SETTLE_SECONDS)
        log_progress(f"{size.nodes} workers train; the operator has {testbed.read_memory_mb():.0f} MB")
        share = await testbed.measure_idle_share(IDLE_SECONDS)
        log_progress(f"while nothing fails, the operator takes {share:.3f} of a core")
        measurements.append(await _measure_single_nodes(testbed, observations, size.single))
        for stagger in (0.0, STAGGER_SECONDS):
            for count, goal in size.fail:
                measurements.append(await _measure_many_nodes(testbed, observations, count, goal, stagger))
        first_node = 0
        for count, goal in size.fail:  # other nodes each time: an XID that a GPU has shown before does not count again
            measurements.append(await _measure_xids(testbed, observations, range(first_node, first_node + count), goal))
            first_node += count
        testbed.restart_operator(SHIPPED_LIMITS)
        await asyncio.sleep(SETTLE_SECONDS)
        measurements += await _measure_breaker(testbed, observations, size.broken)
    return measurements


@dataclass
class NodeObservations:
    """What the watches have received, by node."""

    marked_since: dict[str, float] = field(default_factory=dict)  # since when it is tainted and cordoned
    cordoned_ever: set[str] = field(default_factory=set)
    blocked_since: dict[str, float] = field(
        default_factory=dict
    )  # since when its NodeQuarantine reports that the breaker tripped
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
            if any(condition["type"] == "Quarantined" and condition["reason"] == "Breaker" for condition in conditions):
                self.blocked_since.setdefault(name, time.monotonic())
        self.changed.set()


@asynccontextmanager
async def _watch_nodes(api: Api) -> AsyncIterator[NodeObservations]:
    observations = NodeObservations()
    tasks = [
        asyncio.create_task(api.watch("/api/v1/nodes", observations.node)),
        asyncio.create_task(api.watch(QUARANTINES, observations.quarantine)),
    ]
    try:
        yield observations
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _measure_single_nodes(testbed: ScaleTestbed, observations: NodeObservations, count: int) -> Measurement:
    """One after the other; each from the moment before its condition is written."""
    seconds = []
    nodes = [format_node_name(i) for i in range(count)]
    for name in nodes:
        start = time.monotonic()
        await _write_condition(testbed.api, name, "True")
        is_held = await _wait_until(
            observations, partial(observations.marked_since.__contains__, name), f"{name} is held"
        )
        seconds.append(observations.marked_since[name] - start if is_held else math.inf)
    await _restore_nodes(testbed, observations, nodes)
    seconds.sort()
    p99 = seconds[min(len(seconds) - 1, math.ceil(0.99 * len(seconds)) - 1)]
    median = statistics.median(seconds)
    log_progress(f"{count} nodes, one after the other: median {1e3 * median:.0f} ms, P99 {1e3 * p99:.0f} ms")
    return Measurement(f"one node, P99 of {count}", 1e3 * p99, 150.0, "ms")


async def _measure_many_nodes(
    testbed: ScaleTestbed, observations: NodeObservations, count: int, goal: float, stagger: float
) -> Measurement:
    nodes = [format_node_name(i) for i in range(count)]
    used_seconds, start = testbed.read_processor_seconds(), time.monotonic()

    async def fail(index: int, name: str) -> None:
        await asyncio.sleep(index / count * stagger)
        await _write_condition(testbed.api, name, "True")

    writing = asyncio.gather(*(fail(index, name) for index, name in enumerate(nodes)))
    are_held = await _wait_until(
        observations, lambda: all(name in observations.marked_since for name in nodes), f"{count} nodes are held"
    )
    await writing
    last_seconds = max(observations.marked_since[name] for name in nodes) - start if are_held else math.inf
    used_seconds = testbed.read_processor_seconds() - used_seconds
    timing = f"over {stagger:.0f} s" if stagger else "at once"
    log_progress(
        f"{count} nodes {timing}: {last_seconds:.2f} s, {used_seconds:.1f} s of a core, "
        f"{testbed.read_memory_mb():.0f} MB"
    )
    await _restore_nodes(testbed, observations, nodes)
    anchor = "" if stagger else ANCHORS.get(count, "")
    return Measurement(f"{count} nodes {timing}", last_seconds - stagger * (count - 1) / count, goal, "s", anchor)


async def _measure_xids(
    testbed: ScaleTestbed, observations: NodeObservations, indices: range, goal: float
) -> Measurement:
    """From the moment in which Prometheus shows them. Their workers are replaced, but cannot be placed."""
    nodes, count = [format_node_name(i) for i in indices], len(indices)
    used_before, start = testbed.read_processor_seconds(), time.monotonic()
    testbed.prometheus.xids |= dict.fromkeys(nodes, GPU_HAS_FALLEN_OFF)
    are_held = await _wait_until(
        observations,
        lambda: all(name in observations.marked_since for name in nodes),
        f"{count} nodes with XIDs are held",
    )
    last_seconds = max(observations.marked_since[name] for name in nodes) - start if are_held else math.inf
    log_progress(
        f"{count} nodes by XID: {last_seconds:.2f} s, {testbed.read_processor_seconds() - used_before:.1f} s of a core"
    )
    testbed.prometheus.xids.clear()
    await _release_nodes(testbed, observations, nodes)
    return Measurement(f"{count} nodes at once by XID", last_seconds, goal, "s", ANCHORS.get(count, ""))


async def _measure_breaker(testbed: ScaleTestbed, observations: NodeObservations, count: int) -> list[Measurement]:
    nodes, observations.cordoned_ever = [format_node_name(i) for i in range(count)], set()
    start = time.monotonic()
    writing = asyncio.gather(*(_write_condition(testbed.api, name, "True") for name in nodes))
    await _wait_until(observations, lambda: bool(observations.blocked_since), "the breaker's report")
    await writing
    await asyncio.sleep(BREAKER_SECONDS)
    cordoned, blocked_after = (
        len(observations.cordoned_ever),
        sorted(at - start for at in observations.blocked_since.values()),
    )
    reported_count = testbed.read_metrics().count('reason="Breaker"')
    first, last = (blocked_after[0], blocked_after[-1]) if blocked_after else (math.inf, math.inf)
    log_progress(
        f"{cordoned} of {count} nodes cordoned; reported for {len(blocked_after)} after {first:.2f} to {last:.2f} s, "
        f"of {reported_count} in the metrics"
    )
    return [
        Measurement(f"nodes cordoned of {count} that fail at once, breaker as shipped", cordoned, 0, "nodes"),
        Measurement("the breaker's report in the first NodeQuarantine", first, 6.0, "s"),
        Measurement("nodes without the breaker's report", count - len(blocked_after), 0, "nodes"),
    ]


async def _write_condition(api: Api, name: str, status: str) -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    condition = {
        "type": CONDITION, "status": status, "reason": "XidError" if status == "True" else "Healthy",
        "message": "written by the bench", "lastHeartbeatTime": now, "lastTransitionTime": now,
    }  # fmt: skip
    await api.call(
        "PATCH", f"/api/v1/nodes/{name}/status", {"status": {"conditions": [condition]}}, STRATEGIC_MERGE_PATCH
    )


async def _restore_nodes(testbed: ScaleTestbed, observations: NodeObservations, nodes: Sequence[str]) -> None:
    """Nothing is wrong with them any more, and they are released."""
    await testbed.api.all(_write_condition(testbed.api, name, "False") for name in nodes)
    await _release_nodes(testbed, observations, nodes)


async def _release_nodes(testbed: ScaleTestbed, observations: NodeObservations, nodes: Sequence[str]) -> None:
    await testbed.api.all(
        testbed.api.call("DELETE", f"{QUARANTINES}/{name}") for name in set(nodes) & observations.quarantines
    )
    if not await _wait_until(
        observations, lambda: not observations.quarantines and not observations.marked_since, "all are released"
    ):
        raise RuntimeError("nodes are not released, so nothing more can be measured")


async def _wait_until(observations: NodeObservations, condition: Callable[[], bool], description: str) -> bool:
    """False: not within TIMEOUT_SECONDS, which is logged."""

    async def wait() -> None:
        while not condition():
            observations.changed.clear()
            await observations.changed.wait()

    try:
        await asyncio.wait_for(wait(), TIMEOUT_SECONDS)
    except TimeoutError:
        log_progress(f"not within {TIMEOUT_SECONDS:.0f} s: {description}; {len(observations.marked_since)} are held")
        return False
    return True
