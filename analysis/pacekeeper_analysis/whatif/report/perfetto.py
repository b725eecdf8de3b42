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

from pacekeeper_analysis.whatif.scenario import ALL_IDEAL, AS_RECORDED
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
    for replica in range(window.replicas):
        for kind, timeline in enumerate(("actual", "ideal")):
            pid = 2 * replica + kind + 1
            yield {
                "ph": "M",
                "name": "process_name",
                "pid": pid,
                "tid": 0,
                "args": {"name": f"dp {replica} {timeline}"},
            }
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
            for (stage, stream), tid in streams.items():
                yield _label("thread_name", pid, tid, name=f"stage {stage} {stream}")
                yield _label("thread_sort_index", pid, tid, sort_index=tid)
    origin = 0.0
    ideal = window.timeline(ALL_IDEAL, window.steps[0])
    for at in steps:
        starts, ends = _actual(window, at)
        for node, operation in enumerate(window.operations):
            tid = streams[operation.stage, _stream(operation.type)]
            args = {"step": window.steps[at], "index": operation.index, "microbatch": operation.microbatch}
            ready, end = (float(time.max()) for time in ideal[node])
            for replica in range(window.replicas):
                actual = (float(starts[node, replica]), float(ends[node, replica]))
                for kind, (begin, finish) in enumerate((actual, (ready, end))):
                    yield {
                        "ph": "X",
                        "name": operation.type,
                        "cat": f"stage {operation.stage}",
                        "pid": 2 * replica + kind + 1,
                        "tid": tid,
                        "ts": round((origin + begin) * 1e6, 3),
                        "dur": round(max(finish - begin, 0.0) * 1e6, 3),
                        "args": args,
                    }
        origin += float(ends.max()) * 1.02


def _label(kind: str, pid: int, tid: int, **args: str | int) -> Event:
    """A metadata event: the name or the place of a process or thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _actual(window: Window, at: int) -> tuple[Array, Array]:
    """Start and end of each operation in a step [operation, replica]: as measured, else as simulated."""
    shape = (len(window.operations), window.replicas)
    if window.recorded_at is not None:
        starts, ends = (times[..., at].reshape(shape) for times in window.recorded_at)
        return starts - starts.min(), ends - starts.min()
    timeline = window.timeline(AS_RECORDED, window.steps[at])
    mesh = (1, *window.mesh, 1)
    starts, ends = (
        np.array([np.broadcast_to(timeline[node][which], mesh).ravel() for node in range(shape[0])]) for which in (0, 1)
    )
    return starts, ends


def _streams(window: Window) -> dict[tuple[int, str], int]:
    """A thread for each stage and stream: operations of one stream never overlap."""
    found = {(operation.stage, _stream(operation.type)) for operation in window.operations}
    order = sorted(found, key=lambda item: (item[0], item[1] != "compute", item[1]))
    return {stream: tid for tid, stream in enumerate(order, start=1)}


def _stream(type_: str) -> str:
    """The stream that an operation of this type runs in."""
    if type_.endswith("-compute") or type_ in ("compute", "data", "gc", "optimizer"):
        return "compute"
    return type_
