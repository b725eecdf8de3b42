"""What a rank is doing, told to its ring: steps, own work, phases, and how long it waited for its peers.

**Own work.** The COMPUTE record of a step is as long as the step without the rank's *exposed waits for its peers*:

- the time its training thread was blocked in `Work.wait` (all that FSDP2, barriers and object collectives do on CPU);
- the *tail* of a backward pass: from its last entry into a collective to the end of the pass. This is DDP, whose
reducer
  overlaps all buckets but the last with the backward pass and then waits for them in C++. What a script reduces
  asynchronously outside of a backward pass has its tail at the optimizer's step;
- DDP's broadcasts of buffers, whole, since C++ waits for them at once.

Loading data is own work: it is the rank's, and grows with its share of the batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

from pacekeeper.environment import Environment
from pacekeeper_analysis.records import Collective, Kind, Phase

from .ring import RingWriter

Loaded = TypeVar("Loaded")

# Plain numbers: an enumeration's member takes a call in Python to be looked up.
_STEP, _COMPUTE, _DATA, _LENGTHS = int(Kind.STEP), int(Kind.COMPUTE), int(Kind.DATA), int(Kind.LENGTHS)


class Recorder:
    """Writes one rank's records. All times are nanoseconds of CLOCK_MONOTONIC."""

    def __init__(self, ring: RingWriter | NoRing) -> None:
        self.ring = ring
        self.step = 0
        """The step that is under way: the number it will have when it is complete."""
        self.phase = Phase.START
        self.mode = 0
        """Position in plan.SyncMode of the mode in force."""
        self.steered = False
        """Whether a `Job` says when a step is complete; otherwise the optimizer's hooks do."""
        self._training_thread = threading.get_ident()
        self._step_start = time.monotonic_ns()
        self._waits: list[int] = []
        self._last_wait_end = 0
        self.last_entry = 0
        """When the rank last entered a collective in which the last to arrive makes the others wait."""
        self.before_optimizer: Callable[[], None] = _nothing

    def end_step(self, samples: int = 0, now: int | None = None, lengths: tuple[float, float] | None = None) -> None:
        """The optimizer has stepped: `samples` of this rank went into it (0: unknown), with these `lengths` in sum and
        squares in sum (None, or squares of 0: unknown)."""
        end = time.monotonic_ns() if now is None else now
        start, self._step_start = self._step_start, end
        own = max(0, end - start - sum(self._waits))
        self._waits.clear()
        if lengths is not None:
            self.ring.write(_LENGTHS, start, end, self.step, self.phase, lengths[0], nbytes=round(lengths[1]))
        self.ring.write(_STEP, start, end, self.step, self.phase, samples, flags=self.mode)
        self.ring.write(_COMPUTE, start, start + own, self.step, self.phase, samples)
        self.ring.end_step(self.step, end)
        self.step += 1
        if self.phase is Phase.START:
            self.enter(Phase.TRAIN, end)

    @property
    def last_step_end(self) -> int:
        return self._step_start

    def restart_clock(self, step: int) -> None:
        """The next step to complete is `step`, and it begins now."""
        self.step = step
        self._step_start = time.monotonic_ns()
        self._waits.clear()

    def enter(self, phase: Phase, now: int | None = None) -> None:
        self.phase = phase
        self.ring.enter_phase(phase, now)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """A phase other than training. Its time is no part of any step's."""
        before, start = self.phase, time.monotonic_ns()
        waits = len(self._waits)
        self.enter(phase, start)
        try:
            yield
        finally:
            del self._waits[waits:]
            self.end_phase(before, start)

    def end_phase(self, before: Phase, start: int) -> None:
        """The present phase, begun at `start`, is over and the one `before` it goes on."""
        phase, end = self.phase, time.monotonic_ns()
        self._step_start += end - start
        self.enter(before, end)
        self.ring.write(Kind.PHASE, start, end, self.step, phase)

    def load(self, fetch: Callable[[], Loaded]) -> Loaded:
        """Waits for the loader: a phase with a deadline of its own, and part of the step. Nested calls count once."""
        if self.phase is Phase.DATA:
            return fetch()
        before, start = self.phase, time.monotonic_ns()
        self.enter(Phase.DATA, start)
        try:
            return fetch()
        finally:
            end = time.monotonic_ns()
            self.enter(before, end)
            self.ring.write(_DATA, start, end, self.step, before)
            self.ring.end_load(end - start)

    def waited(self, start: int, end: int) -> None:
        """The calling thread was blocked on its peers; other threads than the training one cost the step nothing."""
        if threading.get_ident() == self._training_thread:
            self._waits.append(end - start)
            self._last_wait_end = end

    def waited_elsewhere(self, duration: int) -> None:
        """C++ has waited for the peers in the training thread's stead, `duration` ns long."""
        self._waits.append(duration)

    def reduced(self) -> None:
        """Closes the tail: C++ has waited for what was last entered, until now."""
        entry, self.last_entry = self.last_entry, 0
        if entry > max(self._step_start, self._last_wait_end):
            self._waits.append(time.monotonic_ns() - entry)

    def optimizer_begins(self) -> None:
        """What was reduced outside of a backward pass has come by now."""
        self.before_optimizer()
        self.reduced()


class NoRing:
    """Stands in where no launcher has made a ring: takes every call and keeps nothing."""

    def __init__(self) -> None:
        self.state: Any = SimpleNamespace()

    def write(self, *args: Any, **fields: Any) -> None: ...

    def enter_phase(self, phase: Phase, now_ns: int | None = None) -> None: ...

    def enter_collective(self, collective: Collective | int, group: int, sequence: int, now_ns: int) -> None: ...

    def leave_collective(self) -> None: ...

    def end_load(self, duration_ns: int) -> None: ...

    def end_step(self, step: int, now_ns: int) -> None: ...


def _nothing() -> None: ...


def open_recorder(environment: Environment) -> Recorder:
    """The rank's recorder: on its ring, where a launcher has made one."""
    if environment.runtime is None:
        return Recorder(NoRing())
    path = environment.runtime.ring(environment.local_rank)
    return Recorder(RingWriter(path) if path.exists() else NoRing())
