"""The worker's ranks as the sidecar sees them: their rings, read when somebody asks."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pacekeeper.observe.communicators import read_communicators
from pacekeeper.observe.operations import SENT_BY_A_WORKER, last_operations
from pacekeeper.observe.ring import RingReader
from pacekeeper.observe.transport import open_transport
from pacekeeper.observe.windows import RankHistory
from pacekeeper.runtime import Runtime
from pacekeeper_analysis.communicators import Communicator, as_many_as_fit
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.operations import MOST_OPERATIONS, encode
from pacekeeper_analysis.plan import EvidencePart
from pacekeeper_analysis.reports import MOST_FLOWS, Evidence, FlowWindow, RankOperations, RankWindow
from pacekeeper_analysis.transport import flows

from .figures import RankNow, seen

STEPS_SECONDS = 30.0
"""For so long NCCL measures steps after each question for links: the next ones come sooner."""

log = logging.getLogger(__name__)


@dataclass
class Rank:
    """One rank here. Its history outlives its rounds; its ring does not."""

    ring: RingReader
    history: RankHistory
    state: np.void
    seen: int = 0  # index of the last record taken in
    lost: int = 0  # records that were overwritten before they were read, in all of its rounds here


class RankRings:
    """All ranks of this worker, by local rank."""

    def __init__(self, runtime: Runtime, window_steps: int) -> None:
        self._runtime = runtime
        self._window_steps = window_steps
        self._ranks: dict[int, Rank] = {}

    def look(self) -> list[Rank]:
        """Take in what is new, and return the ranks that have a ring now."""
        present = []
        for path in sorted(self._runtime.rings.iterdir()):
            rank = self._open(int(path.name)) if path.name.isdecimal() else None
            if rank is not None:
                rank.state = rank.ring.state()
                records = rank.ring.records(since=rank.seen)
                if len(records):
                    _take(rank, records)
                present.append(rank)
        return present

    def seen(self) -> list[RankNow]:
        """The ranks' figures now."""
        return [seen(int(rank.state["rank"]), rank.history, int(rank.state["share"])) for rank in self.look()]

    def evidence(
        self, request: str, worker: str, round_: int, parts: Collection[EvidencePart] = (EvidencePart.WINDOWS,)
    ) -> Evidence:
        """What is asked for of the ranks here.

        NCCL tells its flows exactly only while somebody asks: the first question for links has it begin.
        """
        ranks = self.look()
        evidence = Evidence(request=request, worker=worker, round=round_)
        if EvidencePart.WINDOWS in parts:
            evidence = replace(evidence, windows=self._windows(ranks))
        if EvidencePart.OPERATIONS in parts:
            known = self._communicators()
            evidence = replace(evidence, communicators=known, operations=_operations(ranks, known))
        if EvidencePart.LINKS in parts:
            evidence = replace(evidence, flows=self._flows(time.monotonic_ns()))
        return evidence

    def _flows(self, now_ns: int) -> tuple[FlowWindow, ...]:
        """The largest ones; () where NCCL's plugin does not run."""
        found = [flow for local, rank in self._ranks.items() for flow in self._flows_of(local, rank, now_ns)]
        return tuple(sorted(found, key=lambda flow: -flow.sent_bytes)[:MOST_FLOWS])

    def _flows_of(self, local_rank: int, rank: Rank, now_ns: int) -> tuple[FlowWindow, ...]:
        try:
            transport = open_transport(self._runtime.transport(local_rank))
            if transport is None:
                return ()
            transport.measure_steps(now_ns + int(STEPS_SECONDS * 1e9))
        except (InputError, OSError) as error:
            log.warning("rank %d's transfers over NCCL are unknown: %s", rank.state["rank"], error)
            return ()
        return flows(transport.operations(), transport.communicators(), int(rank.state["rank"]), now_ns)

    def _communicators(self) -> tuple[Communicator, ...]:
        """Of the ranks here, each once; where they are too many, the newest of each rank."""
        of_ranks = [read_communicators(self._runtime.communicators_of(local)) for local in self._ranks]
        newest_first = [each for at in itertools.zip_longest(*map(reversed, of_ranks)) for each in at if each]
        return as_many_as_fit({each.identity: each for each in newest_first}.values())

    @staticmethod
    def _windows(ranks: Sequence[Rank]) -> tuple[RankWindow, ...]:
        return tuple(
            rank.history.window(
                int(rank.state["rank"]),
                steered=bool(rank.state["sync_mode"] >= 0),
                share_grain=max(1, int(rank.state["share_grain"])),
            )
            for rank in ranks
        )

    def _open(self, local_rank: int) -> Rank | None:
        known = self._ranks.get(local_rank)
        if known is not None and known.ring.is_current:
            return known
        try:
            ring = RingReader(self._runtime.ring(local_rank))
        except (FileNotFoundError, InputError):  # a round ends or begins right now
            return None
        state = ring.state()
        rank = Rank(ring, RankHistory(self._window_steps), state)
        if known is not None and known.state["rank"] == state["rank"]:
            rank.history, rank.lost = known.history, known.lost
            rank.history.start_round()
        self._ranks[local_rank] = rank
        return rank


def _take(rank: Rank, records: NDArray[np.void]) -> None:
    """Take in what is new, and notice what is missing before it; what there was before the first look is not lost."""
    missing = int(records["index"][0]) - 1 - rank.seen
    if missing and rank.seen:
        if not rank.lost:
            log.warning(
                "rank %d: %d records were overwritten before they were read, and are in none of its figures; give the "
                "sidecar more processor time, if this comes again (pacekeeper_rank_lost_records_total)",
                rank.state["rank"],
                missing,
            )
        rank.lost += missing
    rank.history.add(records, behind_gap=missing > 0)
    rank.seen = int(records["index"][-1])


def _operations(ranks: Sequence[Rank], known: Sequence[Communicator]) -> tuple[RankOperations, ...]:
    positions = {communicator.identity: position for position, communicator in enumerate(known)}
    most = min(MOST_OPERATIONS, SENT_BY_A_WORKER // max(1, len(ranks)))
    return tuple(
        RankOperations(int(rank.state["rank"]), encode(last_operations(rank.ring.records(), positions, most)))
        for rank in ranks
    )
