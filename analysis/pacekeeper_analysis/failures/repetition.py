"""Rounds that end repeatedly at the same step: the script or its data is at fault, and no restart helps."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..protocol.reports import FaultReport, Position
from .crash import is_peer_consequence
from .hang import OUTSIDE_COLLECTIVES_SECONDS, HangKind, HangVerdict

_EXTERNAL_KILL_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
_MAX_HANGS_ENDED_SOON = 2
"""Upper limit of hangs at one step whose rounds end as soon as the hang is found."""
_SCRIPT_HANG_KINDS = (HangKind.NEVER_ENTERED, HangKind.MISMATCH, HangKind.KERNEL)


@dataclass(frozen=True)
class RepeatedFailure:
    """How many rounds in a row have ended at the furthest step that any round reached."""

    step: Position | None = None  # last completed step, the furthest so far; None: none is known
    ends: int = 0
    round: int = 0  # the last round that counts

    def with_failure(self, fault: FaultReport) -> RepeatedFailure:
        """Return the count with one more round, which a rank's failure ended.

        Failures that may have an external cause do not count: a lost peer, or a kill from outside.
        """
        is_external = fault.exit_code in _EXTERNAL_KILL_SIGNALS and not fault.out_of_memory
        return self if is_external or is_peer_consequence(fault) else self._with_end(fault.step, fault)

    def with_hang(self, verdict: HangVerdict, stalls: Sequence[FaultReport]) -> RepeatedFailure | None:
        """Return the count with one more round, which a hang ended. Stopped processes and links do not count.

        None means: do not end the round yet. If hangs ended two rounds at a step, the next one may be a long wait, so
        it gets more time.
        """
        newest, culprits = max(stalls, key=lambda fault: fault.round), frozenset(verdict.ranks)
        states = [rank for fault in stalls for rank in fault.ranks if rank.rank in culprits]
        if not states or verdict.kind not in _SCRIPT_HANG_KINDS:
            return self
        updated = self._with_end(find_least_step(rank.step for rank in states), newest)
        is_early = updated is not self and max(rank.waiting_seconds for rank in states) < OUTSIDE_COLLECTIVES_SECONDS
        return None if is_early and updated.ends > _MAX_HANGS_ENDED_SOON else updated

    def reaches_limit(self, limit: int) -> bool:
        """Return whether `limit` rounds or more have ended at this step. A `limit` of 0 means no limit."""
        return 0 < limit <= self.ends

    def has_just_reached_limit(self, limit: int) -> bool:
        return 0 < limit == self.ends

    def __str__(self) -> str:
        return f"{self.ends} rounds have ended after step {self.step}, and none got further"

    def _with_end(self, step: int | None, fault: FaultReport) -> RepeatedFailure:
        """Return the count with a round that ended after `step`.

        A failure before a rank's first step in the round does not count, because a dependency (names, storage) may be
        missing. Ends before the furthest step do not count either.
        """
        if step is None or not fault.completed_step or fault.round <= self.round or step < (self.step or 0):
            return self
        return RepeatedFailure(step, self.ends + 1 if step == self.step else 1, fault.round)


def find_least_step(steps: Iterable[int | None]) -> int | None:
    """Return the last step that all ranks have completed, from the last one of each. None: some have completed none."""
    known = list(steps)
    return None if None in known else min((step for step in known if step is not None), default=None)
