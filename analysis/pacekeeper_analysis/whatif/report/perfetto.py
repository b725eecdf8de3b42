"""Timelines for Perfetto: what happened, and what would have happened without stragglers, one above the other.

The format is the JSON array of trace events that Perfetto and chrome://tracing read (complete events, microseconds).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper_analysis.whatif.scenario import ALL_IDEAL, AS_RECORDED, Scenario
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.window import Window

MOST_EVENTS = 400_000
"""Perfetto becomes slow beyond that; of longer windows the slowest steps are written."""

Event = dict[str, Any]


def write_perfetto(path: Path, window: Window, slowdown_per_step: Array) -> tuple[int, ...]:
    """Writes the timelines of the steps that fit, the slowest ones first chosen. Returns their numbers."""
    chosen = steps_that_fit(window, slowdown_per_step)
    content = json.dumps({"traceEvents": list(events(window, chosen)), "displayTimeUnit": "ms"}, separators=(",", ":"))
    with gzip.GzipFile(path, "wb", compresslevel=5, mtime=0) as file:
        file.write(content.encode())
    return tuple(window.steps[at] for at in chosen)


def steps_that_fit(window: Window, slowdown_per_step: Array) -> list[int]:
    """Indices of the slowest steps whose events stay below MOST_EVENTS, in time order."""
    each = 2 * len(window.operations) * window.replicas
    count = max(1, min(len(window.steps), MOST_EVENTS // each))
    return sorted(np.argsort(-slowdown_per_step, kind="stable")[:count].tolist())


def events(window: Window, steps: list[int]) -> Iterator[Event]:
    """Trace events of the steps (indices): processes are data-parallel ranks, threads are streams of a stage."""
    streams = _streams(window)
    ideal = _simulated(window, ALL_IDEAL, window.steps[0])
    for replica in range(window.replicas):
        for kind in ("actual", "ideal"):
            pid = _process(replica, kind)
            yield _label("process_name", pid, 0, name=f"dp {replica} {kind}")
            yield _label("process_sort_index", pid, 0, sort_index=pid)
            for tid, (stage, stream) in enumerate(streams, start=1):
                yield _label("thread_name", pid, tid, name=f"stage {stage} {stream}")
                yield _label("thread_sort_index", pid, tid, sort_index=tid)
    origin = 0.0
    for at in steps:
        actual = _actual(window, at)
        for replica in range(window.replicas):
            for kind, (starts, ends) in (("actual", actual), ("ideal", ideal)):
                for tid, nodes in enumerate(streams.values(), start=1):
                    track = (_process(replica, kind), tid)
                    yield from _track(window, at, nodes, starts[nodes, replica], ends[nodes, replica], origin, track)
        origin += 1.02 * float(max(actual[1].max(), ideal[1].max()))


def _track(
    window: Window, at: int, nodes: list[int], starts: Array, ends: Array, origin: float, track: tuple[int, int]
) -> Iterator[Event]:
    """The operations of one stream in one step, one after the other: viewers take overlaps for calls inside calls."""
    free = 0.0
    for index in np.argsort(starts, kind="stable"):
        operation, begin = window.operations[nodes[index]], max(float(starts[index]), free)
        free = max(float(ends[index]), begin)
        yield {
            "ph": "X",
            "name": operation.type,
            "cat": f"stage {operation.stage}",
            "pid": track[0],
            "tid": track[1],
            "ts": round((origin + begin) * 1e6, 3),
            "dur": round((free - begin) * 1e6, 3),
            "args": {"step": window.steps[at], "index": operation.index, "microbatch": operation.microbatch},
        }


def _process(replica: int, kind: str) -> int:
    return 2 * replica + (1 if kind == "actual" else 2)


def _label(kind: str, pid: int, tid: int, **args: str | int) -> Event:
    """A metadata event: the name or the place of a process or thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _actual(window: Window, at: int) -> tuple[Array, Array]:
    """Start and end of each operation in a step [operation, replica]: as measured, else as simulated."""
    if window.recorded_at is None:
        return _simulated(window, AS_RECORDED, window.steps[at])
    shape = (len(window.operations), window.replicas)
    starts, ends = (times[..., at].reshape(shape) for times in window.recorded_at)
    return starts - starts.min(), ends - starts.min()


def _simulated(window: Window, scenario: Scenario, step: int) -> tuple[Array, Array]:
    """Start and end of each operation in a scenario [operation, replica]."""
    timeline, shape = window.timeline(scenario, step), (1, *window.mesh, 1)
    nodes = range(len(window.operations))
    starts, ends = (
        np.array([np.broadcast_to(timeline[node][which], shape).ravel() for node in nodes]) for which in (0, 1)
    )
    return starts, ends


def _streams(window: Window) -> dict[tuple[int, str], list[int]]:
    """The operations of each (stage, stream), in the order in which the streams are shown."""
    streams: dict[tuple[int, str], list[int]] = {}
    for node, operation in enumerate(window.operations):
        streams.setdefault((operation.stage, _stream(operation.type)), []).append(node)
    return dict(sorted(streams.items(), key=lambda item: (item[0][0], item[0][1] != "compute", item[0][1])))


def _stream(type_: str) -> str:
    """The stream that an operation of this type runs in."""
    if type_.endswith("-compute") or type_ in ("compute", "data", "gc", "optimizer"):
        return "compute"
    return type_
