"""Converts traces of the PyTorch profiler (Kineto), one file per rank, to the published schema.

A profiled step of a data-parallel rank becomes four operations:

    forward-compute        from the step's beginning (including loading) to the first operation of the backward pass
    backward-compute       to the last operation of the backward pass
    grads-reduce-scatter   from there to the optimizer: the part of the collectives that nothing overlaps
    optimizer              to the step's end

Forward and backward are the rank's own work. Time in which a collective is in progress and nothing else runs is
subtracted. Its smallest share over all ranks has no late rank as its cause, and becomes a fifth operation,
params-all-gather (FSDP). Clocks of different hosts may differ: a collective ends on all ranks of its group at once,
which aligns them.

Parts that cannot be read, or do not fit the rest, are left out. Notes report them as warnings of the analysis.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.whatif.inputs.damaged_trace import read_trace
from pacekeeper_analysis.whatif.trace import (
    ALL_GATHER,
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    REDUCE_SCATTER,
    JobTrace,
    TraceError,
    TraceMetadata,
    build_trace_from_columns,
)

PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,15})")
BACKWARD_OPERATION = "autograd::engine::evaluate_function"
OPTIMIZER_STEP = "Optimizer.step#"
COLLECTIVE_NAME = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):", re.IGNORECASE)

MAX_TIMESTAMP_MICROSECONDS = 1e18
"""Upper limit of microseconds since the epoch, or since the start of the host: thousands of years."""

Group = tuple[int, ...]
"""Global ranks of a process group. () if the trace does not contain the group."""

MAX_GROUPS_NAMED = 6
MAX_NUMBERS_NAMED = 5

Spans = NDArray[np.float64]
"""Begin and end of time spans, [span, 2], in seconds."""


@dataclass(frozen=True)
class RankTrace:
    """The part of one rank's trace that the analysis needs. All times are in seconds by the rank's own clock."""

    rank: int
    world_size: int
    steps: dict[int, tuple[float, float]]
    """Begin and end of each profiled step."""
    operations: Spans
    """Operations of the rank itself, sorted by begin."""
    backward: Spans
    """Operations of the backward pass."""
    optimizer: Spans
    collectives: Spans
    """Collectives in the order in which they ended."""
    groups: tuple[Group, ...]
    """The group of each of these collectives."""
    own_groups: frozenset[Group]
    """The groups that contain the rank, if they have more than one rank."""
    notes: tuple[str, ...] = ()
    """What of the trace is left out, for people."""

    def shift_clock(self, seconds: float) -> RankTrace:
        """Return the trace by a clock that is `seconds` ahead."""
        return replace(
            self,
            steps={step: (begin + seconds, end + seconds) for step, (begin, end) in self.steps.items()},
            operations=self.operations + seconds,
            backward=self.backward + seconds,
            optimizer=self.optimizer + seconds,
            collectives=self.collectives + seconds,
        )


def read_kineto(paths: Sequence[Path]) -> tuple[JobTrace, tuple[str, ...]]:
    """Read the traces of all ranks of a job. Returns the trace, and notes on what is left out.

    Raises TraceError if ranks are missing or occur twice, or a trace has no steps, backward passes or optimizer.
    """
    ranks = sorted((read_rank(path) for path in paths), key=lambda trace: trace.rank)
    world = ranks[0].world_size
    if world != len(ranks) or [trace.rank for trace in ranks] != list(range(world)):
        rank_list = ", ".join(str(trace.rank) for trace in ranks)
        raise TraceError(f"the job has {world} ranks, the traces are of rank {rank_list}; give one trace of each")
    notes = [note for trace in ranks for note in trace.notes]
    aligned, alignment_notes = align_clocks(ranks)
    steps_of = [set(trace.steps) for trace in aligned]
    common = sorted(set.intersection(*steps_of))
    if uncommon := sorted(set.union(*steps_of).difference(common)):
        alignment_notes.append(f"left out: {_format_list('step', uncommon)}, which not every rank's trace has")
    rows: list[tuple[int, int, str, float, float]] = []
    incomplete = ""
    for step in common:
        try:
            rows += _build_step_rows(aligned, step)
        except TraceError as error:
            incomplete = f"left out: {error}"
            alignment_notes.append(incomplete)
    if not rows:
        raise TraceError(incomplete or "no step was profiled on every rank; profile the same steps everywhere")
    steps, dp_rank, optype, start, duration = (np.array(column) for column in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), dtype=np.int64)
    of_chunk = np.where(optype == OPTIMIZER, -1, 0)
    columns = {"step": steps, "dp_rank": dp_rank, "stage": zeros, "rank": dp_rank, "optype": optype, "seq_id": zeros}
    columns |= {"mc": of_chunk, "mb_id": of_chunk, "start_ts": start, "duration": duration}
    return build_trace_from_columns(columns, TraceMetadata(dp_size=world, world_size=world)), (*notes, *alignment_notes)


def read_rank(path: Path) -> RankTrace:
    """Read one rank's trace (.json or .json.gz)."""
    content, notes = _read_content(path)
    info = content.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world_size = (info.get(key) for key in ("rank", "world_size"))
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise TraceError(f"{path} does not contain its rank; profile after torch.distributed.init_process_group")
    events, timeless = _list_timed_events(content, path)
    if timeless:
        count, name = sum(timeless.values()), next(iter(timeless))
        notes.append(f"{count} events have no times and are left out, such as {name!r}")
    by_name = _read_process_groups(info)
    steps, spans = _collect_cpu_spans(events)
    for name, recorded in (("step", steps), ("backward pass", spans["backward"]), ("optimizer", spans["optimizer"])):
        if not recorded:
            raise TraceError(f"{path} shows no {name}; profile CPU activities, profiler.step() after each step")
    if any(event.get("cat") == "kernel" for event in events):
        steps, spans = _collect_gpu_spans(events, steps, spans)
    tables = {
        name: np.array(sorted(span[:2] for span in named_spans)).reshape(-1, 2) for name, named_spans in spans.items()
    }
    collectives = sorted(spans["collectives"], key=lambda span: span[1])
    tables["collectives"] = np.array([span[:2] for span in collectives]).reshape(-1, 2)
    groups = tuple(by_name.get(name, ()) for *_, name in collectives)
    own_groups = frozenset(group for group in by_name.values() if len(group) > 1)
    prefixed_notes = tuple(f"{path.name}: {note}" for note in notes)
    return RankTrace(rank, world_size, steps, **tables, groups=groups, own_groups=own_groups, notes=prefixed_notes)


Span = tuple[float, float, str]
"""Begin, end (seconds), and the name of the process group. "" if none, or not known."""
Event = dict[str, Any]


def _read_process_groups(info: dict[str, Any]) -> dict[str, Group]:
    """Return the ranks of the process groups, by torch's names for them."""
    groups = {}
    config = info.get("pg_config")
    for entry in config if isinstance(config, list) else ():
        ranks = entry.get("ranks") if isinstance(entry, dict) else None
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            groups[str(entry.get("pg_name"))] = tuple(sorted(ranks))
    return groups


def _list_timed_events(content: dict[str, Any], path: Path) -> tuple[list[Event], Counter[str]]:
    """Return the events with a duration, and the number of events without times, by name."""
    listed = content.get("traceEvents", [])
    if not isinstance(listed, list):
        raise TraceError(f"{path}: traceEvents is not a list; export the trace again")
    timed, timeless = [], Counter[str]()
    for event in listed:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        times = event.get("ts"), event.get("dur", 0.0)
        if (
            not all(isinstance(time, (int, float)) and abs(time) < MAX_TIMESTAMP_MICROSECONDS for time in times)
            or event.get("dur", 0) < 0
        ):
            timeless[str(event.get("name"))[:80]] += 1
        else:
            timed.append(event if isinstance(event.get("args"), dict) else {**event, "args": {}})
    earliest = _find_earliest(timed)
    for event in timed:
        if event["ts"] <= 0.0 < earliest:
            timeless[str(event.get("name"))[:80]] += 1
    return [event for event in timed if event["ts"] > 0.0 or earliest <= 0.0], timeless


def _find_earliest(events: Sequence[Event]) -> float:
    """Return the earliest plausible time, in microseconds, of the profiled steps.

    Nothing begins earlier before the first step than the steps take in total. The profiler gives time 0 to events whose
    time it has lost. But a clock may also begin with 0.
    """
    steps = [event for event in events if PROFILER_STEP.fullmatch(str(event.get("name", ""))) and event["ts"] > 0.0]
    if not steps:
        return 0.0
    begin = min(float(event["ts"]) for event in steps)
    return begin - (max(float(event["ts"]) + float(event.get("dur", 0.0)) for event in steps) - begin)


def _get_correlation(event: Event) -> int | None:
    """Return the number that a launch shares with the launched operation. None if it has none."""
    number = event["args"].get("correlation")
    return number if type(number) is int else None


def _collect_cpu_spans(events: Sequence[Event]) -> tuple[dict[int, tuple[float, float]], dict[str, list[Span]]]:
    """Collect steps and spans as the CPU recorded them."""
    steps: dict[int, tuple[float, float]] = {}
    spans: dict[str, list[Span]] = {"operations": [], "backward": [], "optimizer": [], "collectives": []}
    for event in events:
        name, category = str(event.get("name", "")), event.get("cat")
        if category not in ("cpu_op", "user_annotation"):
            continue
        if match := PROFILER_STEP.fullmatch(name):
            steps[int(match[1])] = _get_span(event)[:2]
        elif COLLECTIVE_NAME.match(name):
            spans["collectives"].append(_get_span(event))
        elif name.startswith(OPTIMIZER_STEP):
            spans["optimizer"].append(_get_span(event))
        elif category == "cpu_op" and not name.startswith("c10d::"):
            spans["operations"].append(_get_span(event))
            if name.startswith(BACKWARD_OPERATION):
                spans["backward"].append(_get_span(event))
    return steps, spans


def _collect_gpu_spans(
    events: Sequence[Event], steps: dict[int, tuple[float, float]], spans: dict[str, list[Span]]
) -> tuple[dict[int, tuple[float, float]], dict[str, list[Span]]]:
    """Collect steps and spans as the GPU recorded them.

    A kernel belongs to the step and the pass in which the CPU launched it.
    """
    launched = {
        number: float(event["ts"]) * 1e-6
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and (number := _get_correlation(event)) is not None
    }
    backward, optimizer = _merge_spans(spans["backward"]), _merge_spans(spans["optimizer"])
    on_gpu: dict[str, list[Span]] = {"operations": [], "backward": [], "optimizer": [], "collectives": []}
    last: dict[int, float] = {}
    first = float("inf")
    for event in events:
        number = _get_correlation(event)
        launch = None if number is None else launched.get(number)
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset") or launch is None:
            continue
        step = next((number for number, (begin, end) in steps.items() if begin <= launch < end), None)
        if step is None:
            continue
        span = _get_span(event)
        first, last[step] = min(first, span[0]), max(last.get(step, 0.0), span[1])
        if "nccl" in str(event.get("name", "")).lower():
            on_gpu["collectives"].append(span)
            continue
        on_gpu["operations"].append(span)
        for name, passes in (("backward", backward), ("optimizer", optimizer)):
            if _contains_instant(passes, launch):
                on_gpu[name].append(span)
    # A step lasts from the end of the previous one to its own last kernel, so that time in which a GPU waits for its
    # loader counts.
    begins = [first, *(last[step] for step in sorted(last))]
    return {step: (begin, last[step]) for begin, step in zip(begins, sorted(last), strict=False)}, on_gpu


def _get_span(event: Event) -> Span:
    begin = float(event["ts"]) * 1e-6
    group = event["args"].get("Process Group Name", "")
    return begin, begin + float(event.get("dur", 0.0)) * 1e-6, group if isinstance(group, str) else ""


def _contains_instant(merged: list[tuple[float, float]], instant: float) -> bool:
    """Return whether one of the sorted spans contains an instant."""
    index = bisect.bisect_right(merged, (instant, float("inf"))) - 1
    return index >= 0 and merged[index][0] <= instant <= merged[index][1]


def align_clocks(ranks: Sequence[RankTrace]) -> tuple[list[RankTrace], list[str]]:
    """Return the traces by one clock, and notes: a collective of a group ended on all of its ranks at the same instant.

    Raises TraceError if a rank has no collectives.
    """
    for trace in ranks:
        if not len(trace.collectives):
            raise TraceError(f"rank {trace.rank} recorded no collectives; profile the same steps everywhere")
    groups_known = all(group for trace in ranks for group in trace.groups)
    shared = {group for trace in ranks for group in (trace.groups if groups_known else ()) if len(group) > 1}
    notes = _describe_groups(set().union(*(trace.own_groups for trace in ranks)), groups_known)
    offsets = {0: 0.0}
    while True:  # from rank 0 on, through groups with common ranks
        reached = {
            rank: (first, group)
            for group in sorted(shared)
            for first in [next((rank for rank in group if rank in offsets), None)]
            if first is not None
            for rank in group
            if rank not in offsets and rank < len(ranks)
        }
        if not reached:
            break
        for rank, (first, group) in reached.items():
            offsets[rank] = offsets[first] + _estimate_offset(ranks[first], ranks[rank], group, notes)
    for trace in ranks:
        if trace.rank not in offsets:
            offsets[trace.rank] = _estimate_offset(ranks[0], trace, (), notes)
    return [trace.shift_clock(offsets[trace.rank]) for trace in ranks], notes


def _describe_groups(groups: set[Group], groups_known: bool) -> list[str]:
    if len(groups) <= 1:
        return []
    named = "; ".join(" ".join(map(str, group)) for group in sorted(groups)[:MAX_GROUPS_NAMED])
    remainder = f" and {len(groups) - MAX_GROUPS_NAMED} more" if len(groups) > MAX_GROUPS_NAMED else ""
    description = (
        f"the ranks communicate in {len(groups)} groups ({named}{remainder}), "
        "and all of them are treated as data-parallel"
    )
    caveat = "" if groups_known else "; the traces do not contain the group of a collective, so clocks may be off"
    return [description + caveat]


def _estimate_offset(reference: RankTrace, other: RankTrace, group: Group, notes: list[str]) -> float:
    """Return the seconds by which the clock of `reference` is ahead of that of `other`.

    The collectives of `group` are compared. () means all.
    """
    differences, mismatches = [], []
    for step in sorted(reference.steps.keys() & other.steps.keys()):
        ends = [_select_ends(trace, group, *trace.steps[step]) for trace in (reference, other)]
        differences.append(_compute_differences(*ends))
        if len(ends[0]) != len(ends[1]):
            mismatches.append((step, len(ends[1]), len(ends[0])))
    all_differences = np.concatenate(differences) if differences else np.empty(0)
    if not len(all_differences):  # none of them is in a step
        unbounded = (-np.inf, np.inf)
        all_differences = _compute_differences(
            _select_ends(reference, group, *unbounded), _select_ends(other, group, *unbounded)
        )
    if mismatches:
        step, count, reference_count = mismatches[0]
        notes.append(
            f"rank {other.rank} has a different number of collectives than rank {reference.rank} in "
            f"{len(mismatches)} of {len(differences)} steps ({count} and {reference_count} in step {step}); "
            "clocks are aligned by those that both have"
        )
    return float(np.median(all_differences)) if len(all_differences) else 0.0


def _select_ends(trace: RankTrace, group: Group, begin: float, end: float) -> NDArray[np.float64]:
    """Return the ends, in order, of the group's collectives whose middle is between two instants."""
    middle = trace.collectives.mean(axis=1)
    chosen = (begin <= middle) & (middle < end)
    if group:
        chosen &= np.array([trace_group == group for trace_group in trace.groups], dtype=bool)
    return np.asarray(trace.collectives[chosen, 1])


def _compute_differences(ends: NDArray[np.float64], other_ends: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the differences between the ends of the same collectives on two ranks.

    If one rank has more, the surplus is contiguous: those without which the rest fits best.
    """
    surplus = len(ends) - len(other_ends)
    if surplus < 0:
        return -_compute_differences(other_ends, ends)
    candidates = (
        np.concatenate([ends[:start], ends[start + surplus :]]) - other_ends
        for start in range(len(other_ends) + 1 if surplus else 1)
    )
    return min(
        candidates,
        key=lambda difference: float(np.abs(difference - np.median(difference)).sum()) if len(difference) else 0.0,
    )


def _format_list(noun: str, numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:MAX_NUMBERS_NAMED]))
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed}{' …' if len(numbers) > MAX_NUMBERS_NAMED else ''}"


def _build_step_rows(ranks: Sequence[RankTrace], step: int) -> list[tuple[int, int, str, float, float]]:
    """Return the rows of a step: (step, dp_rank, optype, start, duration)."""
    origin = min(trace.steps[step][0] for trace in ranks)
    rows: list[tuple[int, int, str, float, float]] = []
    waits = []
    for trace in ranks:
        begin, end = trace.steps[step]
        backward, optimizer = (_select_spans(spans, begin, end) for spans in (trace.backward, trace.optimizer))
        if not len(backward) or not len(optimizer):
            raise TraceError(f"step {step}, of which rank {trace.rank} shows no backward pass or no optimizer")
        first, last, update = float(backward[0, 0]), float(backward[:, 1].max()), float(optimizer[0, 0])
        exposed = _compute_exposed_seconds(trace, begin, first), _compute_exposed_seconds(trace, first, last)
        waits.append(sum(exposed))
        rows += [
            (step, trace.rank, FORWARD, begin - origin, first - begin - exposed[0]),
            (step, trace.rank, BACKWARD, first - origin, last - first - exposed[1]),
            (step, trace.rank, REDUCE_SCATTER, last - origin, max(update - last, 0.0)),
            (step, trace.rank, OPTIMIZER, update - origin, end - update),
        ]
    rows += [(step, trace.rank, ALL_GATHER, 0.0, min(waits)) for trace in ranks]
    return rows


def _compute_exposed_seconds(trace: RankTrace, begin: float, end: float) -> float:
    """Return the seconds from `begin` to `end` in which a collective is in progress and the rank is idle."""
    collectives, operations = (
        _merge_spans(_clip_spans(spans, begin, end)) for spans in (trace.collectives, trace.operations)
    )
    return _sum_lengths(collectives) - (
        _sum_lengths(collectives) + _sum_lengths(operations) - _sum_lengths(_merge_spans([*collectives, *operations]))
    )


def _select_spans(spans: Spans, begin: float, end: float) -> Spans:
    """Return the spans whose middle is between two instants, because adjacent steps touch each other."""
    middle = spans.mean(axis=1)
    return np.asarray(spans[(begin <= middle) & (middle < end)])


def _clip_spans(spans: Spans, begin: float, end: float) -> Spans:
    """Return the parts of the spans between two instants."""
    inside = spans[(spans[:, 1] > begin) & (spans[:, 0] < end)]
    return np.asarray(np.clip(inside, begin, end))


def _merge_spans(spans: Spans | list[Any]) -> list[tuple[float, float]]:
    """Return the same time as spans that do not overlap."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((float(begin), float(end)) for begin, end, *_ in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _sum_lengths(spans: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _read_content(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the readable content of the trace, and notes on the rest."""
    try:
        readable = read_trace(path.read_bytes())
    except InputError as error:
        raise TraceError(f"{path} is not a readable profiler trace ({error}); export it again") from error
    return readable.content, readable.notes
