"""Records of Pacekeeper's own ranks: rings copied from a running job, and the windows that sidecars send as
evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.records import RING_HEADER_BYTES, RING_MAGIC, RING_RECORD, RING_STATE, RecordKind, compute_ring_bytes
from pacekeeper_analysis.reports import RankWindow
from pacekeeper_analysis.whatif.data_parallel import (
    ALL_REDUCE,
    COMPUTE,
    DATA,
    Instruction,
    LaunchCollective,
    RunWork,
    WaitForCollective,
    compute_transfer_seconds,
    build_window,
)
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.trace import GC, TraceError
from pacekeeper_analysis.whatif.window import RecordedWindow

SECONDS_PER_NANOSECOND = 1e-9

RECORDED_PROGRAM: tuple[Instruction, ...] = (RunWork(DATA), RunWork(COMPUTE), RunWork(GC), LaunchCollective(ALL_REDUCE, "all"), WaitForCollective("all"))
"""A step as the records tell it: own work of three kinds, then what of the collectives nothing overlapped."""

StepSeconds = Mapping[int, tuple[float, float, float, float]]
"""By step: seconds of the whole step, of own work (loading and garbage collection included), of those two alone."""


def build_window_from_records(records: Mapping[int, NDArray[np.void]]) -> RecordedWindow:
    """The window of the steps that all ranks have recorded.

    records: each rank's records (`records.RECORD`). Needs no common clock: the rank that waits least has waited for
    nobody. Raises TraceError where ranks are missing or have no step in common.
    """
    return _assemble_window({rank: _group_by_step(rank, of_rank) for rank, of_rank in records.items()})


def build_window_from_evidence(windows: Sequence[RankWindow]) -> RecordedWindow:
    """The same from the windows that sidecars send, in which loading and garbage collection are part of own work."""
    table: dict[int, StepSeconds] = {}
    for of_rank in windows:
        times = zip(of_rank.steps, of_rank.step_seconds, of_rank.compute_seconds, strict=True)
        table[of_rank.rank] = {step: (whole, own, 0.0, 0.0) for step, whole, own in times}
    return _assemble_window(table)


def is_ring(path: Path) -> bool:
    """Whether the file begins like a ring of records."""
    with path.open("rb") as file:
        return file.read(8) == RING_MAGIC.to_bytes(8, "little")


def read_ring(path: Path) -> tuple[int, NDArray[np.void]]:
    """The rank of a ring, and its records from the oldest to the newest. Raises TraceError where the file is
    damaged."""
    content = path.read_bytes()
    if len(content) < RING_HEADER_BYTES:
        raise TraceError(f"{path}: {len(content)} bytes are no ring of records; copy the whole file")
    header = np.frombuffer(content[: RING_STATE.itemsize], RING_STATE)[0]
    if header["magic"] != RING_MAGIC or compute_ring_bytes(int(header["capacity"])) != len(content):
        raise TraceError(f"{path}: not a ring of records of this version, or cut off; copy the whole file")
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

    whole, own, data, garbage = (total(kind) for kind in (RecordKind.STEP, RecordKind.COMPUTE, RecordKind.DATA, RecordKind.GARBAGE))
    return {
        step: (whole[step], own[step], data.get(step, 0.0), garbage.get(step, 0.0)) for step in whole if step in own
    }


def _assemble_window(table: Mapping[int, StepSeconds]) -> RecordedWindow:
    if not table or sorted(table) != list(range(len(table))):
        found = ", ".join(map(str, sorted(table))) or "none"
        raise TraceError(f"records of rank {found}; give those of every rank from 0")
    steps = sorted(set.intersection(*(set(of_rank) for of_rank in table.values())))
    if not steps:
        raise TraceError("the ranks have recorded no step in common; read all rings at about the same time")
    times = np.array([[table[rank][step] for step in steps] for rank in sorted(table)])
    whole, own, data, garbage = (times[..., column] for column in range(times.shape[-1]))
    data, garbage = np.minimum(data, own), np.minimum(garbage, np.maximum(own - data, 0.0))
    transfer = np.broadcast_to(compute_transfer_seconds(np.maximum(whole - own, 0.0)), whole.shape)
    seconds: Array = np.stack([data, own - data - garbage, garbage, transfer])
    return build_window(RECORDED_PROGRAM, seconds, steps=steps, measured_seconds=whole.mean(axis=0))
