"""The worker's ranks as the sidecar sees them: their rings, read on demand."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pacekeeper.observe.collectives.communicator_file import read_communicators
from pacekeeper.observe.collectives.nccl_transport import open_transport
from pacekeeper.observe.collectives.operations import MAX_OPERATIONS_PER_WORKER, select_last_operations
from pacekeeper.observe.rank_history import MeasuredSteps, RankHistory
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.communicators import Communicator, truncate_communicators
from pacekeeper_analysis.protocol.operations import MAX_OPERATIONS, encode_operations
from pacekeeper_analysis.protocol.reports import MAX_WORKER_FLOWS, Evidence, FlowWindow, RankOperations, RankWindow
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_analysis.protocol.transport import collect_flow_windows

from .rank_metrics import CurrentRankMetrics, measure_rank

NCCL_STEP_MEASUREMENT_SECONDS = 30.0
"""Seconds for which NCCL measures steps after each request for links. The next requests come sooner."""

log = logging.getLogger(__name__)


@dataclass
class ObservedRank:
    """One rank of this worker. Its history outlives its rounds; its ring does not."""

    ring: RingReader
    history: RankHistory
    state: np.void
    last_record: int = 0  # index of the last record that was read
    lost_records: int = 0  # records that were overwritten before they were read, in all of its rounds here
    earlier_rounds: MeasuredSteps = field(default_factory=MeasuredSteps)

    @property
    def measured(self) -> MeasuredSteps:
        """The measured steps of its present ring, summed."""
        return self.history.measured.subtract(self.earlier_rounds)


class RankRings:
    """All ranks of this worker, by local rank."""

    def __init__(self, runtime: RuntimeFolder, window_steps: int) -> None:
        self._runtime = runtime
        self._window_steps = window_steps
        self._ranks: dict[int, ObservedRank] = {}
        self.selected: frozenset[int] | None = None
        """Local ranks that count; None: all that have a ring."""

    def get_rank(self, local_rank: int) -> ObservedRank | None:
        """Return a rank as of the last `refresh`; None: it has had no ring."""
        return self._ranks.get(local_rank)

    def refresh(self) -> list[ObservedRank]:
        """Read new records, and return the ranks that have a ring now; none if the folder cannot be read."""
        try:
            paths = sorted(self._runtime.rings.iterdir())
        except OSError:  # it is not complete yet, or a process of the container has damaged it
            return []
        present = []
        for path in paths:
            rank = self._open_rank(int(path.name)) if self._is_selected(path.name) else None
            if rank is None:
                continue
            try:
                rank.state = rank.ring.state()
                records = rank.ring.records(since=rank.last_record)
                if len(records):
                    _add_records(rank, records)
            except (ValueError, IndexError, OverflowError) as error:  # the rank has written what no rank records
                log.warning("%s is ignored: %s", path, error)
                del self._ranks[int(path.name)]
                continue
            present.append(rank)
        return present

    def _is_selected(self, name: str) -> bool:
        return name.isdecimal() and (self.selected is None or int(name) in self.selected)

    def measure_metrics(self) -> list[CurrentRankMetrics]:
        """Return the ranks' present metrics."""
        return [
            measure_rank(int(rank.state["rank"]), rank.history, int(rank.state["share"]) or None)
            for rank in self.refresh()
        ]

    def build_evidence(
        self, request: str, worker: str, round_: int, parts: Collection[EvidencePart] = (EvidencePart.WINDOWS,)
    ) -> Evidence:
        """Build the requested evidence of the ranks here.

        NCCL measures its flows exactly only while they are requested: the first request for links starts it.
        """
        ranks = self.refresh()
        evidence = Evidence(request=request, worker=worker, round=round_)
        if EvidencePart.WINDOWS in parts:
            evidence = replace(evidence, windows=self._build_windows(ranks))
        if EvidencePart.OPERATIONS in parts:
            communicators = self._collect_communicators()
            evidence = replace(
                evidence, communicators=communicators, operations=_encode_operations(ranks, communicators)
            )
        if EvidencePart.LINKS in parts:
            evidence = replace(evidence, flows=self._collect_flows(time.monotonic_ns()))
        return evidence

    def _collect_flows(self, now_ns: int) -> tuple[FlowWindow, ...]:
        """Return the largest flows; () if NCCL's plugin does not run."""
        flows = [flow for local, rank in self._ranks.items() for flow in self._read_flows(local, rank, now_ns)]
        return tuple(sorted(flows, key=lambda flow: -flow.sent_bytes)[:MAX_WORKER_FLOWS])

    def _read_flows(self, local_rank: int, rank: ObservedRank, now_ns: int) -> tuple[FlowWindow, ...]:
        try:
            transport = open_transport(self._runtime.transport(local_rank))
            if transport is None:
                return ()
            transport.measure_steps(now_ns + int(NCCL_STEP_MEASUREMENT_SECONDS * 1e9))
        except (InputError, OSError) as error:
            log.warning("rank %d's transfers over NCCL are unknown: %s", rank.state["rank"], error)
            return ()
        return collect_flow_windows(transport.operations(), transport.communicators(), int(rank.state["rank"]), now_ns)

    def _collect_communicators(self) -> tuple[Communicator, ...]:
        """Return the communicators of the ranks here, each once. If there are too many, the newest of each rank."""
        by_rank = [read_communicators(self._runtime.communicators_file(local)) for local in self._ranks]
        newest_first = [
            communicator
            for row in itertools.zip_longest(*map(reversed, by_rank))
            for communicator in row
            if communicator
        ]
        return truncate_communicators({communicator.identity: communicator for communicator in newest_first}.values())

    @staticmethod
    def _build_windows(ranks: Sequence[ObservedRank]) -> tuple[RankWindow, ...]:
        return tuple(
            rank.history.build_window(
                int(rank.state["rank"]),
                managed=bool(rank.state["sync_mode"] >= 0),
                share_granularity=max(1, int(rank.state["share_granularity"])),
            )
            for rank in ranks
        )

    def _open_rank(self, local_rank: int) -> ObservedRank | None:
        previous = self._ranks.get(local_rank)
        if previous is not None and previous.ring.is_current:
            return previous
        try:
            ring = RingReader(self._runtime.ring(local_rank))
            state = ring.state()
        except (OSError, InputError):  # a round is just ending or starting, or the file is no ring
            return None
        rank = ObservedRank(ring, RankHistory(self._window_steps), state)
        if previous is not None and previous.state["rank"] == state["rank"]:
            rank.history, rank.lost_records = previous.history, previous.lost_records
            rank.earlier_rounds = rank.history.measured
            rank.history.start_round()
        self._ranks[local_rank] = rank
        return rank


def _add_records(rank: ObservedRank, records: NDArray[np.void]) -> None:
    """Add new records and count missing ones. Records from before the first read do not count as lost."""
    missing = int(records["index"][0]) - 1 - rank.last_record
    if missing and rank.last_record:
        if not rank.lost_records:
            log.warning(
                "rank %d: %d records were overwritten before they were read, and are missing in its metrics; if this "
                "recurs (pacekeeper_rank_lost_records_total), give the sidecar more processor time",
                rank.state["rank"],
                missing,
            )
        rank.lost_records += missing
    rank.history.add(records, behind_gap=missing > 0)
    rank.last_record = int(records["index"][-1])


def _encode_operations(
    ranks: Sequence[ObservedRank], communicators: Sequence[Communicator]
) -> tuple[RankOperations, ...]:
    positions = {communicator.identity: position for position, communicator in enumerate(communicators)}
    limit = min(MAX_OPERATIONS, MAX_OPERATIONS_PER_WORKER // max(1, len(ranks)))
    return tuple(
        RankOperations(
            int(rank.state["rank"]), encode_operations(select_last_operations(rank.ring.records(), positions, limit))
        )
        for rank in ranks
    )
