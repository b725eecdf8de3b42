"""The worker's ranks as the sidecar sees them: their rings, read when somebody asks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pacekeeper.observe.communicators import read_communicators
from pacekeeper.observe.operations import SENT_BY_A_WORKER, last_operations
from pacekeeper.observe.ring import RingReader
from pacekeeper.observe.windows import RankHistory
from pacekeeper.runtime import Runtime
from pacekeeper_analysis.communicators import Communicator, as_many_as_fit
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.operations import MOST_OPERATIONS, encode
from pacekeeper_analysis.plan import EvidencePart
from pacekeeper_analysis.reports import Evidence, RankOperations, RankWindow

from .figures import RankNow, seen


@dataclass
class Rank:
    """One rank here. Its history outlives its rounds; its ring does not."""

    ring: RingReader
    history: RankHistory
    state: np.void
    seen: int = 0  # index of the last record taken in


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
                    rank.seen = int(records["index"][-1])
                    rank.history.add(records)
                present.append(rank)
        return present

    def seen(self) -> list[RankNow]:
        """The ranks' figures now."""
        return [seen(int(rank.state["rank"]), rank.history, int(rank.state["share"])) for rank in self.look()]

    def evidence(
        self, request: str, worker: str, round_: int, parts: Collection[EvidencePart] = (EvidencePart.WINDOWS,)
    ) -> Evidence:
        """What is asked for of the ranks here."""
        ranks = self.look()
        evidence = Evidence(request=request, worker=worker, round=round_)
        if EvidencePart.WINDOWS in parts:
            evidence = replace(evidence, windows=self._windows(ranks))
        if EvidencePart.OPERATIONS in parts:
            known = self._communicators()
            evidence = replace(evidence, communicators=known, operations=_operations(ranks, known))
        return evidence

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
        history = RankHistory(self._window_steps)
        if known is not None and known.state["rank"] == state["rank"]:
            history = known.history
            history.start_round()
        rank = self._ranks[local_rank] = Rank(ring, history, state)
        return rank


def _operations(ranks: Sequence[Rank], known: Sequence[Communicator]) -> tuple[RankOperations, ...]:
    positions = {communicator.identity: position for position, communicator in enumerate(known)}
    most = min(MOST_OPERATIONS, SENT_BY_A_WORKER // max(1, len(ranks)))
    return tuple(
        RankOperations(int(rank.state["rank"]), encode(last_operations(rank.ring.records(), positions, most)))
        for rank in ranks
    )
