"""Faults that workers have told of and that are not dealt with yet: bounded, so that no worker fills the operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from sys import getsizeof

from pacekeeper_analysis.reports import FaultReport, FaultKind

MAX_FAULTS_PER_WORKER = 32
MAX_FAULT_BYTES_PER_WORKER = 4 * 2**20
SHORTENED_FAULT_CHARACTERS = 500
MAX_JOB_FAULTS_PER_WORKER = 4
MAX_JOB_FAULTS_BASE = 64
"""Of one job: so many for each of its workers, and so many beside."""


class OpenFaults(Mapping[str, FaultReport]):
    """By name. What came first stays; what is too much is not taken, and comes again once there is room.

    Of a worker's stalls the newest one only: it tells all anew, and a rank may keep thousands waiting rightly for half
    an hour.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        """Bytes of them all, about."""
        self._faults: dict[str, FaultReport] = {}
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._stalls: dict[str, FaultReport] = {}  # by worker

    def add(self, fault: FaultReport, workers: int) -> str:
        """Why it is not taken; "": it is, or was before, or is told anew. `workers`: how many the job has."""
        if fault.name in self._faults or self.is_superseded(fault):
            return ""
        before = self._stalls.get(fault.worker) if fault.kind is FaultKind.STALLED else None
        count, weight = (0, 0) if before is None else (1, _estimate_bytes(before))  # of the one whose place it takes
        if self._count[fault.worker] - count >= MAX_FAULTS_PER_WORKER:
            return f"worker {fault.worker} has {MAX_FAULTS_PER_WORKER} faults that are not dealt with yet"
        if self._bytes[fault.worker] - weight + _estimate_bytes(fault) > MAX_FAULT_BYTES_PER_WORKER:
            return f"worker {fault.worker} has faults of {MAX_FAULT_BYTES_PER_WORKER} bytes that are not dealt with yet"
        if len(self._faults) - count >= MAX_JOB_FAULTS_PER_WORKER * workers + MAX_JOB_FAULTS_BASE:
            return f"the job has {len(self._faults)} faults that are not dealt with yet"
        if before is not None:
            del self._faults[before.name]
            self._count[fault.worker] -= count
            self._bytes[fault.worker] -= weight
            self.total_bytes -= weight
        self._insert(fault)
        return ""

    def get_worker_bytes(self, worker: str) -> int:
        """Bytes of this worker's, about."""
        return self._bytes[worker]

    def is_superseded(self, fault: FaultReport) -> bool:
        """By a later stall of its worker's."""
        newest = self._stalls.get(fault.worker)
        return fault.kind is FaultKind.STALLED and newest is not None and _get_stall_order(fault) < _get_stall_order(newest)

    def retain(self, wanted: Callable[[FaultReport], bool]) -> None:
        """Forget all others."""
        faults = [fault for fault in self._faults.values() if wanted(fault)]
        self._faults, self._count, self._bytes, self._stalls, self.total_bytes = {}, Counter(), Counter(), {}, 0
        for fault in faults:
            self._insert(fault)

    def __getitem__(self, name: str) -> FaultReport:
        return self._faults[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._faults)

    def __len__(self) -> int:
        return len(self._faults)

    def _insert(self, fault: FaultReport) -> None:
        self._faults[fault.name] = fault
        self._count[fault.worker] += 1
        weight = _estimate_bytes(fault)
        self._bytes[fault.worker] += weight
        self.total_bytes += weight
        if fault.kind is FaultKind.STALLED:
            self._stalls[fault.worker] = fault


def shorten_fault(fault: FaultReport) -> FaultReport:
    """What it takes to judge it: of each stack the innermost call."""
    ranks = tuple(replace(rank, stack=rank.stack.strip().rpartition("\n")[2][-SHORTENED_FAULT_CHARACTERS:]) for rank in fault.ranks)
    return replace(fault, error=fault.error[-SHORTENED_FAULT_CHARACTERS:], ranks=ranks, ras="", transfers="")


def _get_stall_order(stall: FaultReport) -> tuple[int, int, float]:
    return stall.membership, stall.round, stall.noticed_at


def _estimate_bytes(fault: FaultReport) -> int:
    """About the bytes that it holds. What is long in it is text, of which one odd character has each take four."""
    texts = (fault.error, fault.ras, fault.transfers, *fault.unreachable, *fault.missing)
    held = sum(map(getsizeof, texts)) + 256 * (len(fault.blocked) + 2)
    held += sum(512 + getsizeof(state.stack) + getsizeof(state.entered) for state in fault.ranks)
    return held + sum(256 + getsizeof(group.name) + getsizeof(group.members) for group in fault.communicators)
