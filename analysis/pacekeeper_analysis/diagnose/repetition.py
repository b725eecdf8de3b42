"""Rounds that end again and again at the same step: the script, or its data, and no restart helps."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ..reports import Fault, Position
from .crash import followed_from_peer
from .hang import HangKind, HangVerdict

PATIENCE_SECONDS = 300.0
"""A hang that has ended two rounds at the same step is waited out for so long before it ends a third one."""
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
_HANGS_OF_SCRIPTS = (HangKind.NEVER_ENTERED, HangKind.MISMATCH, HangKind.KERNEL)


@dataclass(frozen=True)
class Repetition:
    """How often rounds in a row have ended at the furthest step that any of them has come to."""

    step: Position = -1  # last completed one, the furthest so far; -1: none is known
    ends: int = 0
    round: int = 0  # the last one that counts

    def after(self, fault: Fault) -> Repetition:
        """With the end of another round by a rank's failure. What something else may have caused does not count: a peer
        that was gone, a kill from outside."""
        from_outside = fault.exit_code in _FROM_OUTSIDE and not fault.out_of_memory
        return self if from_outside or followed_from_peer(fault) else self._at(fault.step, fault)

    def after_hang(self, verdict: HangVerdict, stalls: Sequence[Fault]) -> Repetition:
        """The same by a hang, of which `stalls` tell. A process that was stopped, and a link, do not count."""
        newest = max(stalls, key=lambda fault: fault.round)
        steps = [rank.step for fault in stalls for rank in fault.ranks if rank.rank in verdict.ranks]
        return self._at(min(steps), newest) if steps and verdict.kind in _HANGS_OF_SCRIPTS else self

    def __str__(self) -> str:
        return f"{self.ends} rounds have ended after step {self.step}, and none has come further"

    def _at(self, step: int, fault: Fault) -> Repetition:
        """Before its first step of a round a rank may lack what others give (names, storage): that does not count, nor
        do ends before the furthest step."""
        if not fault.completed_step or fault.round <= self.round or step < max(0, self.step):
            return self
        return Repetition(step, self.ends + 1 if step == self.step else 1, fault.round)


def is_too_early(verdict: HangVerdict, stalls: Sequence[Fault], ends: int) -> bool:
    """Whether a hang that would be the end number `ends` at its step may turn out to be a long wait."""
    newest = {rank.rank: rank for fault in sorted(stalls, key=lambda each: each.noticed_at) for rank in fault.ranks}
    waited = [newest[rank].waiting_seconds for rank in verdict.ranks]
    return ends > 2 and bool(waited) and max(waited) < PATIENCE_SECONDS
