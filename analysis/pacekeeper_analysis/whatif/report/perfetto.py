"""Timelines for Perfetto: the recorded run, and the run without stragglers, one above the other.

The format is the JSON array of trace events that Perfetto and chrome://tracing read (complete events, microseconds).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper_analysis.whatif.scenario import IDEAL_SCENARIO, RECORDED_SCENARIO, WhatIfScenario
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.window import RecordedWindow

MAX_PERFETTO_EVENTS = 400_000
"""Upper limit of events, above which Perfetto is slow. Of longer windows the slowest steps are written."""

Event = dict[str, Any]


def write_perfetto(path: Path, window: RecordedWindow, slowdown_per_step: Array) -> tuple[int, ...]:
    """Write the timelines of the steps that fit, the slowest ones. Returns their numbers."""
    chosen = choose_steps(window, slowdown_per_step)
    content = json.dumps(
        {"traceEvents": list(generate_events(window, chosen)), "displayTimeUnit": "ms"}, separators=(",", ":")
    )
    with gzip.GzipFile(path, "wb", compresslevel=5, mtime=0) as file:
        file.write(content.encode())
    return tuple(window.steps[index] for index in chosen)


def choose_steps(window: RecordedWindow, slowdown_per_step: Array) -> list[int]:
    """Return indices of the slowest steps whose events stay below MAX_PERFETTO_EVENTS, in time order."""
    events_per_step = 2 * len(window.operations) * window.replicas
    count = max(1, min(len(window.steps), MAX_PERFETTO_EVENTS // events_per_step))
    return sorted(np.argsort(-slowdown_per_step, kind="stable")[:count].tolist())


def generate_events(window: RecordedWindow, steps: list[int]) -> Iterator[Event]:
    """Yield trace events of the steps (indices). Processes are data-parallel ranks, threads are streams of a stage."""
    streams = _group_by_stream(window)
    ideal = _simulate_times(window, IDEAL_SCENARIO, window.steps[0])
    for replica in range(window.replicas):
        for kind in ("actual", "ideal"):
            pid = _number_process(replica, kind)
            yield _build_label("process_name", pid, 0, name=f"dp {replica} {kind}")
            yield _build_label("process_sort_index", pid, 0, sort_index=pid)
            for tid, (stage, stream) in enumerate(streams, start=1):
                yield _build_label("thread_name", pid, tid, name=f"stage {stage} {stream}")
                yield _build_label("thread_sort_index", pid, tid, sort_index=tid)
    origin = 0.0
    for index in steps:
        actual = _get_actual_times(window, index)
        for replica in range(window.replicas):
            for kind, (starts, ends) in (("actual", actual), ("ideal", ideal)):
                for tid, nodes in enumerate(streams.values(), start=1):
                    track = (_number_process(replica, kind), tid)
                    yield from _generate_track(
                        window, index, nodes, starts[nodes, replica], ends[nodes, replica], origin, track
                    )
        origin += 1.02 * float(max(actual[1].max(), ideal[1].max()))


def _generate_track(
    window: RecordedWindow,
    step_index: int,
    nodes: list[int],
    starts: Array,
    ends: Array,
    origin: float,
    track: tuple[int, int],
) -> Iterator[Event]:
    """Yield the operations of one stream in one step without overlaps, which viewers show as nested calls."""
    busy_until = 0.0
    for index in np.argsort(starts, kind="stable"):
        operation, begin = window.operations[nodes[index]], max(float(starts[index]), busy_until)
        busy_until = max(float(ends[index]), begin)
        microbatch = {} if operation.microbatch is None else {"microbatch": operation.microbatch}
        yield {
            "ph": "X",
            "name": operation.type,
            "cat": f"stage {operation.stage}",
            "pid": track[0],
            "tid": track[1],
            "ts": round((origin + begin) * 1e6, 3),
            "dur": round((busy_until - begin) * 1e6, 3),
            "args": {"step": window.steps[step_index], "index": operation.index, **microbatch},
        }


def _number_process(replica: int, kind: str) -> int:
    return 2 * replica + (1 if kind == "actual" else 2)


def _build_label(kind: str, pid: int, tid: int, **args: str | int) -> Event:
    """Build a metadata event: the name or the position of a process or thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _get_actual_times(window: RecordedWindow, index: int) -> tuple[Array, Array]:
    """Return start and end of each operation in a step [operation, replica]: as measured, else as simulated."""
    if window.recorded_at is None:
        return _simulate_times(window, RECORDED_SCENARIO, window.steps[index])
    shape = (len(window.operations), window.replicas)
    starts, ends = (times[..., index].reshape(shape) for times in window.recorded_at)
    return starts - starts.min(), ends - starts.min()


def _simulate_times(window: RecordedWindow, scenario: WhatIfScenario, step: int) -> tuple[Array, Array]:
    """Return start and end of each operation in a scenario [operation, replica]."""
    timeline, shape = window.simulate_timeline(scenario, step), (1, *window.mesh, 1)
    nodes = range(len(window.operations))
    starts, ends = (
        np.array([np.broadcast_to(timeline[node][side], shape).ravel() for node in nodes]) for side in (0, 1)
    )
    return starts, ends


def _group_by_stream(window: RecordedWindow) -> dict[tuple[int, str], list[int]]:
    """Return the operations of each (stage, stream), in display order."""
    streams: dict[tuple[int, str], list[int]] = {}
    for node, operation in enumerate(window.operations):
        streams.setdefault((operation.stage, _name_stream(operation.type)), []).append(node)
    return dict(sorted(streams.items(), key=lambda item: (item[0][0], item[0][1] != "compute", item[0][1])))


def _name_stream(type_: str) -> str:
    """Return the stream that an operation of this type runs in."""
    if type_.endswith("-compute") or type_ in ("compute", "data", "gc", "optimizer"):
        return "compute"
    return type_
