"""How fast a rank steps, and by which step of it the clock of AsyncEDiT is up."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

import torch
import torch.distributed as dist

from .agreement import Agreement
from .course import joins

_RECENT_STEPS = 8


class Pace:
    """Of one rank. The ranks that share a replica make equally many steps: their first one decides for all of them."""

    def __init__(self, agreement: Agreement, replica: dist.ProcessGroup | None) -> None:
        """`replica`: the ranks that share this one's; None: it has one for itself."""
        self._agreement = agreement
        self._replica = replica
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._step_began = self._ordinal = time.monotonic()
        self._decision: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def step_seconds(self) -> float:
        """Of a typical step lately, waits at ordinals left out; 0: not known yet."""
        return median(self._seconds) if self._seconds else 0.0

    def begin_interval(self) -> None:
        """The clock begins anew."""
        self._ordinal = time.monotonic()

    def begin_step(self) -> None:
        self._step_began = time.monotonic()

    def begin_decision(self, seconds: float) -> None:
        """Where ranks share a replica: the first one tells the others whether the present step will be the last."""
        if self._replica is None:
            return
        step = self.step_seconds
        wanted = joins(time.monotonic() - self._ordinal, step, seconds, ahead=step)
        decision = torch.tensor([float(wanted)])
        work = dist.broadcast(decision, group_src=0, group=self._replica, async_op=True)
        assert work is not None
        self._decision = (work, decision)

    def end_step(self) -> None:
        self._seconds.append(time.monotonic() - self._step_began)

    def is_up(self, seconds: float) -> bool:
        """Whether the step that has just ended is the last before the synchronisation, `seconds` after the one before.

        The same on all ranks of a replica.
        """
        if self._decision is None:
            return joins(time.monotonic() - self._ordinal, self.step_seconds, seconds)
        (work, decision), self._decision = self._decision, None
        self._agreement.wait(work)
        return bool(decision.item())
