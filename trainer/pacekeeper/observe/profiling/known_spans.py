"""Spans with known begin and end, and steps, by the rank's own records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.profiling.pattern import TimeOwner
from pacekeeper_analysis.profiling.reduce import KnownSpans
from pacekeeper_rank.records import MAX_STEPS_AHEAD, Collective, Phase, RecordKind

GC_SPAN_NAME = "(garbage collection)"
PEER_WAIT_SPAN_NAME = "(wait for peers)"
"""Name of a wait during which no collective has ended."""

Span = tuple[TimeOwner, str, int, int]
"""Owner, name, start and end in ns of CLOCK_MONOTONIC."""


@dataclass(frozen=True)
class WindowSteps:
    """The steps of a window, oldest first, without other phases."""

    first: int
    seconds: NDArray[np.float64]
    own_seconds: NDArray[np.float64]
    lengths: NDArray[np.float64]  # (): not all are known


def select_steps(records: NDArray[np.void], between: tuple[int, int]) -> WindowSteps | None:
    """Return the steps that have begun and ended in this time; None: there are none."""
    steps = records[(records["kind"] == RecordKind.STEP) & (records["phase"] == Phase.TRAIN)]
    steps = steps[(steps["start_ns"] >= between[0]) & (steps["end_ns"] <= between[1])]
    if not len(steps):
        return None
    own_seconds = {
        int(record["start_ns"]): _compute_duration(record) for record in records[records["kind"] == RecordKind.COMPUTE]
    }
    totals = {int(record["step"]): float(record["value"]) for record in records[records["kind"] == RecordKind.LENGTHS]}
    lengths = [totals[int(step["step"])] for step in steps if int(step["step"]) in totals]
    return WindowSteps(
        first=int(steps["step"][0]),
        seconds=(steps["end_ns"] - steps["start_ns"]) * 1e-9,
        own_seconds=np.array([own_seconds.get(int(step["start_ns"]), _compute_duration(step)) for step in steps]),
        lengths=np.array(lengths if len(lengths) == len(steps) else []),
    )


def find_complete_start(records: NDArray[np.void]) -> int:
    """Return the beginning (ns) of the first step with complete records in the ring; 0: none were overwritten.

    `records`: records of the ring, oldest first. The oldest one may be of a step that a device completed after the host
    had begun the next ones.
    """
    if not len(records) or records["index"][0] == 1:
        return 0
    steps = records[(records["kind"] == RecordKind.STEP) & (records["start_ns"] >= records["end_ns"][0])]
    return int(steps["start_ns"][MAX_STEPS_AHEAD]) if len(steps) > MAX_STEPS_AHEAD else int(records["end_ns"].max())


def collect_known_spans(
    records: NDArray[np.void],
    waits: Sequence[tuple[int, int]],
    kernels: Sequence[Span],
    between: tuple[int, int],
) -> KnownSpans:
    """Return all spans with a known owner. `waits`: waits for peers, on the host's clock."""
    spans = [*_list_recorded_spans(records), *_name_waits(waits, records), *_clip_to_steps(kernels, records)]
    spans = [
        (owner, name, max(start, between[0]), min(end, between[1]))
        for owner, name, start, end in spans
        if end > between[0] and start < between[1]
    ]
    names = list(dict.fromkeys(name for _, name, _, _ in spans))
    position = {name: i for i, name in enumerate(names)}
    return KnownSpans(
        owner=np.array([owner for owner, *_ in spans], np.uint8),
        start_ns=np.array([start for *_, start, _ in spans], np.int64),
        end_ns=np.array([end for *_, end in spans], np.int64),
        name=np.array([position[name] for _, name, _, _ in spans], np.int64),
        names=names,
    )


def _list_recorded_spans(records: NDArray[np.void]) -> Iterator[Span]:
    """Yield data loading and garbage collections that were part of a step."""
    training = records[records["phase"] == Phase.TRAIN]
    for kind, owner, name in (
        (RecordKind.DATA, TimeOwner.DATA, ""),
        (RecordKind.GC, TimeOwner.GC, GC_SPAN_NAME),
    ):
        for record in training[training["kind"] == kind]:
            yield owner, name, int(record["start_ns"]), int(record["end_ns"])


def _name_waits(waits: Sequence[tuple[int, int]], records: NDArray[np.void]) -> Iterator[Span]:
    """Yield each wait, named after the collective that ended with it, or last before its end."""
    collectives = records[records["kind"] == RecordKind.COLLECTIVE]
    collectives = collectives[np.argsort(collectives["end_ns"], kind="stable")]
    for start, end in waits:
        index = int(np.searchsorted(collectives["end_ns"], end + 1_000_000)) - 1
        has_collective = index >= 0 and collectives["end_ns"][index] >= start
        name = Collective(int(collectives["collective"][index])).name.lower() if has_collective else PEER_WAIT_SPAN_NAME
        yield TimeOwner.COLLECTIVE, name, start, end


def _clip_to_steps(kernels: Sequence[Span], records: NDArray[np.void]) -> Iterator[Span]:
    """Yield the parts of kernels within steps: the GPU works in an evaluation, too."""
    steps = records[(records["kind"] == RecordKind.STEP) & (records["phase"] == Phase.TRAIN)]
    starts, ends = steps["start_ns"].astype(np.int64), steps["end_ns"].astype(np.int64)
    first_steps = np.searchsorted(ends, [start for *_, start, _ in kernels], side="right").tolist()
    end_steps = np.searchsorted(starts, [end for *_, end in kernels], side="left").tolist()
    for (owner, name, start, end), first_step, end_step in zip(kernels, first_steps, end_steps, strict=True):
        for step in range(first_step, end_step):
            yield owner, name, max(start, int(starts[step])), min(end, int(ends[step]))


def _compute_duration(record: np.void) -> float:
    return float(record["end_ns"] - record["start_ns"]) * 1e-9
