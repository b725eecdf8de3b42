"""Traces of the PyTorch profiler (Kineto), one file a rank, turned into the published schema.

A profiled step of a data-parallel rank becomes four operations:

    forward-compute        from the step's beginning (loading included) to the first operation of the backward pass
    backward-compute       to the last operation of the backward pass
    grads-reduce-scatter   from there to the optimizer: what is left of the collectives once nothing overlaps them
    optimizer              to the step's end

Forward and backward are the rank's own work: time in which a collective is under way and nothing else runs is taken
out, and its smallest share over all ranks, which is nobody's lateness, becomes a fifth operation, params-all-gather
(FSDP). Clocks of different hosts need not agree: a collective ends on all ranks at once, which aligns them.
"""

from __future__ import annotations

import bisect
import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.whatif.trace import (
    ALL_GATHER,
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    REDUCE_SCATTER,
    Metadata,
    Trace,
    TraceError,
    trace_from_columns,
)

STEP = re.compile(r"ProfilerStep#(\d{1,15})")
BACKWARD_OPERATION = "autograd::engine::evaluate_function"
OPTIMIZER_STEP = "Optimizer.step#"
COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):", re.IGNORECASE)

LATEST = 1e18
"""Microseconds since the epoch, or since the host was started: thousands of years."""

Spans = NDArray[np.float64]
"""Begin and end of spans of time, [span, 2], in seconds."""


@dataclass(frozen=True)
class RankTrace:
    """What the analysis needs of one rank's trace. All times in seconds by the rank's own clock."""

    rank: int
    world_size: int
    steps: dict[int, tuple[float, float]]
    """Begin and end of each profiled step."""
    operations: Spans
    """Operations of the rank itself, by begin."""
    backward: Spans
    """Those of the backward pass."""
    optimizer: Spans
    collectives: Spans
    """In the order in which they ended."""

    def shifted(self, seconds: float) -> RankTrace:
        """By a clock that is `seconds` ahead."""
        return replace(
            self,
            steps={step: (begin + seconds, end + seconds) for step, (begin, end) in self.steps.items()},
            operations=self.operations + seconds,
            backward=self.backward + seconds,
            optimizer=self.optimizer + seconds,
            collectives=self.collectives + seconds,
        )


def read_kineto(paths: Sequence[Path]) -> Trace:
    """Reads the traces of all ranks of a job.

    Raises TraceError where ranks are missing or doubled, or a trace has no steps, backward passes or optimizer.
    """
    ranks = sorted((read_rank(path) for path in paths), key=lambda trace: trace.rank)
    world = ranks[0].world_size
    if world != len(ranks) or [trace.rank for trace in ranks] != list(range(world)):
        found = ", ".join(str(trace.rank) for trace in ranks)
        raise TraceError(f"the job has {world} ranks, the traces are of rank {found}; give one trace of each")
    aligned = align_clocks(ranks)
    common = sorted(set.intersection(*(set(trace.steps) for trace in aligned)))
    rows: list[tuple[int, int, str, float, float]] = []
    for step in common:
        rows += _step_rows(aligned, step)
    if not rows:
        raise TraceError("no step was profiled on every rank; profile the same steps everywhere")
    steps, dp_rank, optype, start, duration = (np.array(column) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), dtype=np.int64)
    of_chunk = np.where(optype == OPTIMIZER, -1, 0)
    columns = {"step": steps, "dp_rank": dp_rank, "stage": zeros, "rank": dp_rank, "optype": optype, "seq_id": zeros}
    columns |= {"mc": of_chunk, "mb_id": of_chunk, "start_ts": start, "duration": duration}
    return trace_from_columns(columns, Metadata(dp_size=world, world_size=world))


def read_rank(path: Path) -> RankTrace:
    """Reads one rank's trace (.json or .json.gz)."""
    content = _content(path)
    about = content.get("distributedInfo")
    rank, world_size = (about.get(key) if isinstance(about, dict) else None for key in ("rank", "world_size"))
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise TraceError(f"{path} does not say its rank; profile after torch.distributed.init_process_group")
    events = _events(content, path)
    steps, spans = _by_processor(events)
    for name, missing in (("step", steps), ("backward pass", spans["backward"]), ("optimizer", spans["optimizer"])):
        if not missing:
            raise TraceError(f"{path} shows no {name}; profile CPU activities, profiler.step() after each step")
    if any(event.get("cat") == "kernel" for event in events):
        steps, spans = _by_gpu(events, steps, spans)
    tables = {name: np.array(sorted(found)).reshape(-1, 2) for name, found in spans.items()}
    tables["collectives"] = tables["collectives"][np.argsort(tables["collectives"][:, 1], kind="stable")]
    return RankTrace(rank, world_size, steps, **tables)


Span = tuple[float, float]
Event = dict[str, Any]


def _events(content: dict[str, Any], path: Path) -> list[Event]:
    """Those that have lasted for a while. Raises TraceError where one's times are none."""
    listed = content.get("traceEvents", [])
    if not isinstance(listed, list):
        raise TraceError(f"{path}: traceEvents is no list; export the trace again")
    found = []
    for event in listed:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        times = event.get("ts"), event.get("dur", 0.0)
        if not all(isinstance(time, (int, float)) and abs(time) < LATEST for time in times) or event.get("dur", 0) < 0:
            name = str(event.get("name"))[:80]
            raise TraceError(f"{path}: ts and dur of event {name!r} must be microseconds; export the trace again")
        found.append(event if isinstance(event.get("args"), dict) else {**event, "args": {}})
    return found


def _correlation(event: Event) -> int | None:
    """The same of a launch and of what was launched; None: it has none."""
    number = event["args"].get("correlation")
    return number if type(number) is int else None


def _by_processor(events: Sequence[Event]) -> tuple[dict[int, Span], dict[str, list[Span]]]:
    """Steps and spans as the processor saw them."""
    steps: dict[int, Span] = {}
    spans: dict[str, list[Span]] = {"operations": [], "backward": [], "optimizer": [], "collectives": []}
    for event in events:
        name, category = str(event.get("name", "")), event.get("cat")
        if category not in ("cpu_op", "user_annotation"):
            continue
        if match := STEP.fullmatch(name):
            steps[int(match[1])] = _span(event)
        elif COLLECTIVE.match(name):
            spans["collectives"].append(_span(event))
        elif name.startswith(OPTIMIZER_STEP):
            spans["optimizer"].append(_span(event))
        elif category == "cpu_op" and not name.startswith("c10d::"):
            spans["operations"].append(_span(event))
            if name.startswith(BACKWARD_OPERATION):
                spans["backward"].append(_span(event))
    return steps, spans


def _by_gpu(
    events: Sequence[Event], steps: dict[int, Span], spans: dict[str, list[Span]]
) -> tuple[dict[int, Span], dict[str, list[Span]]]:
    """The same as the GPU saw them: a kernel belongs to the step and the pass in which the processor launched it."""
    launched = {
        number: float(event["ts"]) * 1e-6
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and (number := _correlation(event)) is not None
    }
    backward, optimizer = _merged(spans["backward"]), _merged(spans["optimizer"])
    on_gpu: dict[str, list[Span]] = {"operations": [], "backward": [], "optimizer": [], "collectives": []}
    last: dict[int, float] = {}
    first = float("inf")
    for event in events:
        number = _correlation(event)
        launch = None if number is None else launched.get(number)
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or launch is None:
            continue
        step = next((number for number, (begin, end) in steps.items() if begin <= launch < end), None)
        if step is None:
            continue
        span = _span(event)
        first, last[step] = min(first, span[0]), max(last.get(step, 0.0), span[1])
        if "nccl" in str(event.get("name", "")).lower():
            on_gpu["collectives"].append(span)
            continue
        on_gpu["operations"].append(span)
        for name, passes in (("backward", backward), ("optimizer", optimizer)):
            if _contains(passes, launch):
                on_gpu[name].append(span)
    # A step lasts from the end of the one before to its own last kernel, so that a GPU that waits for its loader
    # counts.
    begins = [first, *(last[step] for step in sorted(last))]
    return {step: (begin, last[step]) for begin, step in zip(begins, sorted(last), strict=False)}, on_gpu


def _span(event: Event) -> Span:
    begin = float(event["ts"]) * 1e-6
    return begin, begin + float(event.get("dur", 0.0)) * 1e-6


def _contains(merged: list[Span], instant: float) -> bool:
    """Whether one of the sorted spans contains an instant."""
    at = bisect.bisect_right(merged, (instant, float("inf"))) - 1
    return at >= 0 and merged[at][0] <= instant <= merged[at][1]


def align_clocks(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces by one clock: the n-th collective ended on all ranks at the same instant."""
    counts = {len(trace.collectives) for trace in ranks}
    if len(counts) > 1 or counts == {0}:
        raise TraceError(
            "the ranks recorded different numbers of collectives, or none; profile the same steps everywhere"
        )
    ends = np.array([trace.collectives[:, 1] for trace in ranks])
    offsets = np.median(ends[0] - ends, axis=1)
    return [trace.shifted(float(offset)) for trace, offset in zip(ranks, offsets, strict=True)]


def _step_rows(ranks: Sequence[RankTrace], step: int) -> list[tuple[int, int, str, float, float]]:
    """The rows of a step: (step, dp_rank, optype, start, duration)."""
    origin = min(trace.steps[step][0] for trace in ranks)
    rows: list[tuple[int, int, str, float, float]] = []
    waits = []
    for trace in ranks:
        begin, end = trace.steps[step]
        backward, optimizer = (_of_step(spans, begin, end) for spans in (trace.backward, trace.optimizer))
        if not len(backward) or not len(optimizer):
            raise TraceError(
                f"step {step}, rank {trace.rank} has no backward pass or no optimizer; leave that step out"
            )
        first, last, update = float(backward[0, 0]), float(backward[:, 1].max()), float(optimizer[0, 0])
        exposed = _exposed(trace, begin, first), _exposed(trace, first, last)
        waits.append(sum(exposed))
        rows += [
            (step, trace.rank, FORWARD, begin - origin, first - begin - exposed[0]),
            (step, trace.rank, BACKWARD, first - origin, last - first - exposed[1]),
            (step, trace.rank, REDUCE_SCATTER, last - origin, max(update - last, 0.0)),
            (step, trace.rank, OPTIMIZER, update - origin, end - update),
        ]
    rows += [(step, trace.rank, ALL_GATHER, 0.0, min(waits)) for trace in ranks]
    return rows


def _exposed(trace: RankTrace, begin: float, end: float) -> float:
    """Seconds between `begin` and `end` in which a collective is under way and the rank itself does nothing."""
    collectives, operations = (_merged(_within(spans, begin, end)) for spans in (trace.collectives, trace.operations))
    return _length(collectives) - (
        _length(collectives) + _length(operations) - _length(_merged([*collectives, *operations]))
    )


def _of_step(spans: Spans, begin: float, end: float) -> Spans:
    """The spans whose middle lies between two instants: neighbouring steps touch each other."""
    middle = spans.mean(axis=1)
    return np.asarray(spans[(begin <= middle) & (middle < end)])


def _within(spans: Spans, begin: float, end: float) -> Spans:
    """The parts of the spans between two instants."""
    inside = spans[(spans[:, 1] > begin) & (spans[:, 0] < end)]
    return np.asarray(np.clip(inside, begin, end))


def _merged(spans: Spans | list[Any]) -> list[tuple[float, float]]:
    """The same time as spans that do not overlap."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((float(begin), float(end)) for begin, end in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _length(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _content(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        content = parse_json(text)
    except (EOFError, gzip.BadGzipFile, ValueError) as error:
        raise TraceError(f"{path} is not a readable profiler trace ({error}); export it again") from error
    if not isinstance(content, dict):
        raise TraceError(f"{path} is not a trace of the PyTorch profiler; use export_chrome_trace")
    return content
