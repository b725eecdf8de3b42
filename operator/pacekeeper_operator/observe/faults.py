"""Faults that workers have reported and that are still open.

They are bounded, so that no worker fills the operator's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from sys import getsizeof

from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport

MAX_FAULTS_PER_WORKER = 32
MAX_FAULT_BYTES_PER_WORKER = 4 * 2**20
SHORTENED_FAULT_CHARACTERS = 500
MAX_JOB_FAULTS_PER_WORKER = 4
MAX_JOB_FAULTS_BASE = 64
"""Open faults of one job: this many for each of its workers, in addition to the base."""


class OpenFaults(Mapping[str, FaultReport]):
    """Open faults by name. Earlier faults stay; one beyond a limit is rejected, and sent again by its worker.

    Of a worker's stalls only the newest is kept: it reports everything again, and a rank may rightly keep thousands
    waiting for half an hour.
    """

    def __init__(self) -> None:
        self.total_bytes = 0
        """Approximate bytes of all faults."""
        self._faults: dict[str, FaultReport] = {}
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._stalls: dict[str, FaultReport] = {}  # by worker

    def add(self, fault: FaultReport, workers: int) -> str:
        """Add a fault, and return why it is rejected; "" if it is not, is known, or is superseded.

        `workers` is the number of the job's workers.
        """
        if fault.name in self._faults or self.is_superseded(fault):
            return ""
        before = self._stalls.get(fault.worker) if fault.kind is FaultKind.STALLED else None
        count, size = (0, 0) if before is None else (1, _estimate_bytes(before))  # of the stall that it replaces
        if self._count[fault.worker] - count >= MAX_FAULTS_PER_WORKER:
            return f"worker {fault.worker} has {MAX_FAULTS_PER_WORKER} faults that are not dealt with yet"
        if self._bytes[fault.worker] - size + _estimate_bytes(fault) > MAX_FAULT_BYTES_PER_WORKER:
            return f"worker {fault.worker} has faults of {MAX_FAULT_BYTES_PER_WORKER} bytes that are not dealt with yet"
        if len(self._faults) - count >= MAX_JOB_FAULTS_PER_WORKER * workers + MAX_JOB_FAULTS_BASE:
            return f"the job has {len(self._faults)} faults that are not dealt with yet"
        if before is not None:
            del self._faults[before.name]
            self._count[fault.worker] -= count
            self._bytes[fault.worker] -= size
            self.total_bytes -= size
        self._insert(fault)
        return ""

    def get_worker_bytes(self, worker: str) -> int:
        """Return the approximate bytes of a worker's faults."""
        return self._bytes[worker]

    def is_superseded(self, fault: FaultReport) -> bool:
        """Return whether a later stall of the same worker is known."""
        newest = self._stalls.get(fault.worker)
        return (
            fault.kind is FaultKind.STALLED
            and newest is not None
            and _get_stall_order(fault) < _get_stall_order(newest)
        )

    def retain(self, wanted: Callable[[FaultReport], bool]) -> None:
        """Keep only the faults for which `wanted` is true."""
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
        size = _estimate_bytes(fault)
        self._bytes[fault.worker] += size
        self.total_bytes += size
        if fault.kind is FaultKind.STALLED:
            self._stalls[fault.worker] = fault


def shorten_fault(fault: FaultReport) -> FaultReport:
    """Return the fault reduced to what diagnosis needs: the innermost call of each stack."""
    ranks = tuple(
        replace(rank, stack=rank.stack.strip().rpartition("\n")[2][-SHORTENED_FAULT_CHARACTERS:])
        for rank in fault.ranks
    )
    return replace(fault, error=fault.error[-SHORTENED_FAULT_CHARACTERS:], ranks=ranks, ras="", transfers="")


def _get_stall_order(stall: FaultReport) -> tuple[int, int, float]:
    return stall.membership, stall.round, stall.noticed_at


def _estimate_bytes(fault: FaultReport) -> int:
    """Return the approximate bytes of a fault.

    Its long parts are text; one unusual character makes Python use four bytes for each.
    """
    texts = (fault.error, fault.ras, fault.transfers, *fault.unreachable, *fault.missing)
    total = sum(map(getsizeof, texts)) + 256 * (len(fault.blocked) + 2)
    total += sum(512 + getsizeof(state.stack) + getsizeof(state.entered) for state in fault.ranks)
    return total + sum(256 + getsizeof(group.name) + getsizeof(group.members) for group in fault.communicators)
