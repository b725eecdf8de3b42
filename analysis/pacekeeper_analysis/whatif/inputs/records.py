"""Records of Pacekeeper's own ranks: rings copied from a running job, and windows that sidecars send as evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.protocol.records import RING_RECORD, RING_STATE
from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.whatif.data_parallel import (
    ALL_REDUCE,
    COMPUTE,
    DATA,
    Instruction,
    LaunchCollective,
    RunWork,
    WaitForCollective,
    build_window,
    compute_transfer_seconds,
)
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.trace import GC, TraceError
from pacekeeper_analysis.whatif.window import RecordedWindow
from pacekeeper_rank.records import RING_HEADER_BYTES, RING_MAGIC, RecordKind, compute_ring_bytes

SECONDS_PER_NANOSECOND = 1e-9

RECORDED_PROGRAM: tuple[Instruction, ...] = (
    RunWork(DATA),
    RunWork(COMPUTE),
    RunWork(GC),
    LaunchCollective(ALL_REDUCE, "all"),
    WaitForCollective("all"),
)
"""A step in the records: own work of three kinds, followed by the part of the collectives that nothing overlapped."""

StepSeconds = Mapping[int, tuple[float, float, float, float]]
"""By step: seconds of the whole step, of own work (including loading and garbage collection), and of these two alone.
"""


def build_window_from_records(records: Mapping[int, NDArray[np.void]]) -> RecordedWindow:
    """Build the window of the steps that all ranks recorded.

    `records` are each rank's records (dtype `records.RING_RECORD`). No common clock is needed: the rank that waits
    least has not waited for another. Raises TraceError if ranks are missing or have no step in common.
    """
    return _assemble_window({rank: _group_by_step(rank, rank_records) for rank, rank_records in records.items()})


def build_window_from_evidence(windows: Sequence[RankWindow]) -> RecordedWindow:
    """Build the window from evidence of sidecars, in which loading and garbage collection are part of own work."""
    table: dict[int, StepSeconds] = {}
    for window in windows:
        times = zip(window.steps, window.step_seconds, window.compute_seconds, strict=True)
        table[window.rank] = {step: (total, compute, 0.0, 0.0) for step, total, compute in times}
    return _assemble_window(table)


def is_ring(path: Path) -> bool:
    """Return whether the file begins like a ring of records."""
    with path.open("rb") as file:
        return file.read(8) == RING_MAGIC.to_bytes(8, "little")


def read_ring(path: Path) -> tuple[int, NDArray[np.void]]:
    """Return the rank of a ring, and its records, oldest first. Raises TraceError if the file is damaged."""
    content = path.read_bytes()
    if len(content) < RING_HEADER_BYTES:
        raise TraceError(f"{path}: {len(content)} bytes are not a ring of records; copy the whole file")
    header = np.frombuffer(content[: RING_STATE.itemsize], RING_STATE)[0]
    if header["magic"] != RING_MAGIC or compute_ring_bytes(int(header["capacity"])) != len(content):
        raise TraceError(f"{path}: not a ring of records of this version, or truncated; copy the whole file")
    records = np.frombuffer(content, RING_RECORD, offset=RING_HEADER_BYTES)
    written = records[records["index"] > 0]
    return int(header["rank"]), written[np.argsort(written["index"])]


def _group_by_step(rank: int, records: NDArray[np.void]) -> StepSeconds:
    seconds = (records["end_ns"] - records["start_ns"]) * SECONDS_PER_NANOSECOND
    if len(records) and (seconds < 0).any():
        raise TraceError(
            f"rank {rank}, step {int(records['step'][np.argmax(seconds < 0)])}: a record ends before it begins"
        )

    def total(kind: RecordKind) -> dict[int, float]:
        sums: dict[int, float] = {}
        for step, value in zip(records["step"][records["kind"] == kind], seconds[records["kind"] == kind], strict=True):
            sums[int(step)] = sums.get(int(step), 0.0) + float(value)
        return sums

    step_seconds, own, data, gc_seconds = (
        total(kind) for kind in (RecordKind.STEP, RecordKind.COMPUTE, RecordKind.DATA, RecordKind.GC)
    )
    return {
        step: (step_seconds[step], own[step], data.get(step, 0.0), gc_seconds.get(step, 0.0))
        for step in step_seconds
        if step in own
    }


def _assemble_window(table: Mapping[int, StepSeconds]) -> RecordedWindow:
    if not table or sorted(table) != list(range(len(table))):
        rank_list = ", ".join(map(str, sorted(table))) or "none"
        raise TraceError(f"records of rank {rank_list}; give those of every rank from 0")
    steps = sorted(set.intersection(*(set(rank_steps) for rank_steps in table.values())))
    if not steps:
        raise TraceError("the ranks have recorded no step in common; read all rings at about the same time")
    times = np.array([[table[rank][step] for step in steps] for rank in sorted(table)])
    step_seconds, own, data, gc_seconds = (times[..., column] for column in range(times.shape[-1]))
    data, gc_seconds = np.minimum(data, own), np.minimum(gc_seconds, np.maximum(own - data, 0.0))
    transfer = np.broadcast_to(compute_transfer_seconds(np.maximum(step_seconds - own, 0.0)), step_seconds.shape)
    seconds: Array = np.stack([data, own - data - gc_seconds, gc_seconds, transfer])
    return build_window(RECORDED_PROGRAM, seconds, steps=steps, measured_seconds=step_seconds.mean(axis=0))
