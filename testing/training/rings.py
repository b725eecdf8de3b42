"""Rings of records of a job of four ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.protocol.records import RING_RECORD, RING_STATE
from pacekeeper_rank.records import RING_HEADER_BYTES, RING_MAGIC, RecordKind, compute_ring_bytes

OWN_MS = (100, 100, 200, 100)
REDUCE_MS = 20
STEPS = range(5, 13)


def build_records(rank: int, steps: range = STEPS, data_ms: int = 10) -> NDArray[np.void]:
    """A job in which rank 2 takes twice as long as its peers; every rank's clock begins somewhere else."""
    step_ms = max(OWN_MS) + REDUCE_MS
    rows = []
    for step in steps:
        begin = 1_000_000 * (7_000 * rank + step_ms * step)
        for kind, milliseconds in (
            (RecordKind.DATA, data_ms),
            (RecordKind.COMPUTE, OWN_MS[rank]),
            (RecordKind.STEP, step_ms),
        ):
            rows.append((kind, step, begin, begin + 1_000_000 * milliseconds))
    table = np.zeros(len(rows), RING_RECORD)
    table["index"] = np.arange(1, len(rows) + 1)
    for name, column in zip(("kind", "step", "start_ns", "end_ns"), zip(*rows, strict=True), strict=True):
        table[name] = column
    return table


def write_ring(path: Path, rank: int, capacity: int = 64, round_: int = 0) -> None:
    header = np.zeros((), RING_STATE)
    header["magic"], header["capacity"] = RING_MAGIC, capacity
    header["rank"], header["round"] = rank, round_
    body = np.zeros(capacity, RING_RECORD)
    records = build_records(rank)
    body[: len(records)] = np.roll(records, 5)  # the oldest record need not come first
    path.write_bytes(header.tobytes().ljust(RING_HEADER_BYTES, b"\0") + body.tobytes())
    assert path.stat().st_size == compute_ring_bytes(capacity)
