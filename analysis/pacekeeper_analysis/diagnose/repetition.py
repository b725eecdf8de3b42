"""Rounds that end again and again at the same step: the script, or its data, and no restart helps."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ..reports import FaultReport, Position
from .crash import is_peer_consequence
from .hang import OUTSIDE_COLLECTIVES_SECONDS, HangKind, HangVerdict

_EXTERNAL_KILL_SIGNALS = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
_MAX_HANGS_ENDED_SOON = 2
"""Hangs at one step that end their rounds as soon as they are found."""
_SCRIPT_HANG_KINDS = (HangKind.NEVER_ENTERED, HangKind.MISMATCH, HangKind.KERNEL)


@dataclass(frozen=True)
class RepeatedFailure:
    """How often rounds in a row have ended at the furthest step that any of them has come to."""

    step: Position = -1  # last completed one, the furthest so far; -1: none is known
    ends: int = 0
    round: int = 0  # the last one that counts

    def with_failure(self, fault: FaultReport) -> RepeatedFailure:
        """With the end of another round by a rank's failure. What something else may have caused does not count: a peer
        that was gone, a kill from outside."""
        from_outside = fault.exit_code in _EXTERNAL_KILL_SIGNALS and not fault.out_of_memory
        return self if from_outside or is_peer_consequence(fault) else self._with_end(fault.step, fault)

    def with_hang(self, verdict: HangVerdict, stalls: Sequence[FaultReport]) -> RepeatedFailure | None:
        """Return the same for a round that a hang ends. Stopped processes and links do not count.

        None: do not end the round yet. A hang that has ended two rounds at its step may be a long wait, and has more
        time before it ends a third one.
        """
        newest, culprits = max(stalls, key=lambda fault: fault.round), frozenset(verdict.ranks)
        states = [rank for fault in stalls for rank in fault.ranks if rank.rank in culprits]
        if not states or verdict.kind not in _SCRIPT_HANG_KINDS:
            return self
        after = self._with_end(min(rank.step for rank in states), newest)
        is_early = after is not self and max(rank.waiting_seconds for rank in states) < OUTSIDE_COLLECTIVES_SECONDS
        return None if is_early and after.ends > _MAX_HANGS_ENDED_SOON else after

    def reaches_limit(self, limit: int) -> bool:
        """Return whether rounds have ended at this step `limit` times or more. 0: there is no limit."""
        return 0 < limit <= self.ends

    def has_just_reached_limit(self, limit: int) -> bool:
        return 0 < limit == self.ends

    def __str__(self) -> str:
        return f"{self.ends} rounds have ended after step {self.step}, and none has come further"

    def _with_end(self, step: int, fault: FaultReport) -> RepeatedFailure:
        """Before its first step of a round a rank may lack what others give (names, storage): that does not count, nor
        do ends before the furthest step."""
        if not fault.completed_step or fault.round <= self.round or step < max(0, self.step):
            return self
        return RepeatedFailure(step, self.ends + 1 if step == self.step else 1, fault.round)
