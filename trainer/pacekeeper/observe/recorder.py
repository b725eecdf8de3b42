"""What a rank is doing, told to its ring: steps, own work, phases, and how long it waited for its peers.

**Own work.** The COMPUTE record of a step is as long as the step without the rank's *exposed waits for its peers*. Both
are measured by the rank's clock (clock.py): where a device does the work, a wait is as long as the device has nothing
else to do. Waits are

- `Work.wait` (all that FSDP2, barriers and object collectives do on CPU), collectives that a stream waits for as soon
  as they are launched, and FSDP2's waits for its other streams;
- the *tail* of a backward pass: from the last gradient to the end of the pass. This is DDP, whose reducer overlaps all
  buckets but the last with the backward pass and then waits for them in C++. What a script reduces asynchronously
  outside of a backward pass has its tail at the optimizer's step;
- DDP's broadcasts of buffers, whole, since C++ waits for them at once.

Loading data is own work: it is the rank's, and grows with its share of the batch.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from torch.optim import Optimizer

from pacekeeper.torch_internals import graph_task
from pacekeeper_analysis.records import Collective, RecordKind, Phase

from .clock import Clock, HostClock, HostMark, Mark, WorkSpans, get_work_clock
from .communicators import Communicators
from .ring import NO_PLACE, RingWriter

MAX_STEPS_AHEAD = 2
"""Steps that a rank is ahead of its device at most."""

Loaded = TypeVar("Loaded")

# Looked up once: an enumeration's member takes a call in Python each time.
_STEP, _COMPUTE, _DATA = int(RecordKind.STEP), int(RecordKind.COMPUTE), int(RecordKind.DATA)
_GARBAGE, _LENGTHS = int(RecordKind.GARBAGE), int(RecordKind.LENGTHS)
_START, _LOAD, _LOADING = Phase.START, Phase.LOAD, (Phase.LOAD, Phase.DATA)


@dataclass(slots=True)
class _RecordedStep:
    """One that is under way on the host; or done there, and still to be done by the device."""

    start: Mark
    waits: WorkSpans = field(default_factory=WorkSpans)
    """For peers."""
    other_phases: WorkSpans = field(default_factory=WorkSpans)
    """In other phases, waits included."""
    collections: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Collections that have left the device without work."""
    end: Mark | None = None
    number: int = 0
    phase: Phase = Phase.START
    mode: int = 0
    samples: int = 0
    lengths: tuple[float, float] | None = None

    @property
    def reached(self) -> bool:
        """Whether its end is."""
        assert self.end is not None
        # In the order of the work, by which the times of a device's marks are counted.
        if not (self.start.reached and self.waits.reached and self.other_phases.reached and self.end.reached):
            return False
        if not self.collections:
            return True
        return all(begun.reached and ended.reached for begun, ended in self.collections)  # may come just behind the end


@dataclass(frozen=True, slots=True)
class OpenPhase:
    """A phase other than training."""

    phase: Phase
    previous: Phase
    start_ns: int
    mark: Mark | None
    """None: in the course of another one."""


class Recorder:
    """Writes one rank's records. All times are nanoseconds of CLOCK_MONOTONIC."""

    def __init__(
        self, ring: RingWriter | NoRing, clock: Clock | None = None, communicators: Communicators | None = None
    ) -> None:
        """clock: of the rank's work; None: that of the device which it is found to work on when training begins.
        communicators: those that it uses; None: nobody is told of them."""
        self.ring = ring
        self.communicators = communicators or Communicators(None)
        self.clock = clock or HostClock()
        self.step = 0
        """The step that is under way: the number it will have when it is complete."""
        self.phase = Phase.START
        self.mode = 0
        """Position in plan.SyncMode of the mode in force."""
        self.managed = False
        """Whether a `Job` says when a step is complete; otherwise the optimizer's hooks do."""
        self.notice_ends: Callable[[], None] = _do_nothing
        """Records the collectives that have ended."""
        self.step_ended: Callable[[], None] = _do_nothing
        """Called at the end of each step, before the next one's work."""
        self.notice_wait: Callable[[Mark, Mark], None] = _ignore_wait
        """Told of each wait for peers."""
        self._owner: Callable[[], Optimizer | None] = _do_nothing
        """The optimizer whose steps are the job's, as long as it is there."""
        self._finds_clock = clock is None
        self.training_thread = threading.get_ident()
        self._in_flight: deque[_RecordedStep] = deque()
        """Steps that the device may not have come to the end of; the oldest first."""
        self._computing: object = None
        """The stream that the script computes on."""
        self._waiting = False
        self._away = 0
        """Phases other than training that the rank is in, one within the other."""
        self._unwaited = False
        """Whether nothing has waited for the collective that was entered last."""
        self._entry: Mark | None = None
        """Where that was, or where the gradients were computed if that is later; None: during a backward pass."""
        self._begin()

    def end_step(self, samples: int = 0, lengths: tuple[float, float] | None = None) -> None:
        """The optimizer has stepped: `samples` of this rank went into it (0: unknown), with these `lengths` in sum and
        squares in sum (None, or squares of 0: unknown).

        Waits until the device is no more than AHEAD steps behind.
        """
        step = self._step
        step.end = end = self.clock.mark()
        step.number, step.phase, step.mode = self.step, self.phase, self.mode
        step.samples, step.lengths = samples, lengths
        self._in_flight.append(step)
        self.ring.end_step(self.step, time.monotonic_ns())
        self.step += 1
        if self.phase is _START:
            self.enter_phase(Phase.TRAIN)
            self._begin()
        else:
            self._begin(end)
        if len(self._in_flight) > MAX_STEPS_AHEAD and not self._in_flight[0].reached:
            self._in_flight[0].end.wait()  # type: ignore[union-attr]  # a step in flight has an end
        self.write_reached()
        self.step_ended()

    @property
    def last_end(self) -> Mark:
        """Of the last step; or the beginning of the first one."""
        return self._step.start

    def restart_clock(self, step: int) -> None:
        """The next step to complete is `step`, and it begins now."""
        self.step = step
        self._begin()

    def write_reached(self) -> None:
        """Writes down the steps that the device has come to the end of."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].reached:
            self._write(in_flight.popleft())

    def finish(self) -> None:
        """Waits for the steps that the device is at, and writes them down."""
        for step in self._in_flight:
            assert step.end is not None
            step.end.wait()
        self.write_reached()
        self.notice_ends()

    def detach_in_child(self) -> None:
        """Ends the rank's records in a process that it has just forked: hooks stay, and touch neither the rank's files
        nor its device, which no fork may use. The ring is left to the rank by itself (ring.py)."""
        self.clock, self._finds_clock = HostClock(), False
        self.communicators = Communicators(None)
        self.notice_ends = self.step_ended = _do_nothing
        self.notice_wait = _ignore_wait
        self._in_flight.clear()
        self._begin()

    def enter_phase(self, phase: Phase, now: int | None = None) -> None:
        self.phase = phase
        self.ring.enter_phase(phase, now)

    @contextmanager
    def run_phase(self, phase: Phase) -> Iterator[None]:
        """A phase other than training. Its time is no part of any step's."""
        begun = self.begin_phase(phase)
        try:
            yield
        finally:
            self.end_phase(begun)

    def begin_phase(self, phase: Phase) -> OpenPhase:
        now = time.monotonic_ns()
        begun = OpenPhase(phase, self.phase, now, None if self._away else self.clock.mark())
        self._away += 1
        self.enter_phase(phase, now)
        return begun

    def end_phase(self, begun: OpenPhase) -> None:
        """The phase is over, and the one before it goes on."""
        end = time.monotonic_ns()
        self._away -= 1
        if begun.mark is not None:
            self._step.other_phases.add(begun.mark, self.clock.mark())
        self.enter_phase(begun.previous, end)
        self.ring.write(RecordKind.PHASE, begun.start_ns, end, self.step, begun.phase)

    def load(self, fetch: Callable[..., Loaded], *arguments: Any) -> Loaded:
        """Waits for the loader: a phase with a deadline of its own, and part of the step. Nested calls count once."""
        if self.phase in _LOADING:
            return fetch(*arguments)
        before, start = self.phase, time.monotonic_ns()
        self.enter_phase(_LOAD, start)
        try:
            return fetch(*arguments)
        finally:
            end = time.monotonic_ns()
            self.enter_phase(before, end)
            self.ring.write(_DATA, start, end, self.step, before)
            self.ring.end_load(end - start)

    @contextmanager
    def time_peer_wait(self) -> Iterator[None]:
        """For the peers. Counts where the step's work is held up: not on another stream, in another thread or phase, or
        in the course of another wait."""
        start = self.begin_wait()
        try:
            yield
        finally:
            self.end_wait(start)

    def begin_wait(self) -> Mark | None:
        """As `waiting`, for what is too frequent for it. None: does not count."""
        if not self.is_wait_counted:
            return None
        self._waiting = True
        return self.clock.mark()

    def end_wait(self, start: Mark | None) -> None:
        """Of the wait that began at `start`, or did not count."""
        if start is not None:
            self._waiting = False
            self.waited(start, self.clock.mark())

    @property
    def is_wait_counted(self) -> bool:
        """Whether a wait that begins here and now would."""
        if self._waiting or self._away:
            return False
        # The nodes of a backward pass run in a thread of their device, for which the training thread waits.
        in_step = threading.get_ident() == self.training_thread or graph_task() >= 0
        return in_step and self.clock.stream == self._computing

    def waited(self, start: Mark, end: Mark) -> None:
        """For the peers, from `start` to `end`."""
        self._step.waits.add(start, end)
        self._unwaited = False
        self.notice_wait(start, end)

    def record_gc(self, start: Mark, end: Mark) -> None:
        """Python has collected garbage, while the device went on with what it had."""
        self._step.collections.append((start, end))

    def entered(self, in_backward: bool) -> None:
        """The rank has entered a collective in which the last to arrive makes the others wait, and goes on."""
        if in_backward:
            self._unwaited, self._entry = True, None
        elif self.is_wait_counted:
            self._unwaited, self._entry = True, self.clock.mark()

    def backward_computed(self) -> None:
        """All gradients of a backward pass are there; what reduces them may not be over."""
        if self._unwaited:
            self._entry = self.clock.mark()

    def reduced(self) -> None:
        """Closes the tail: C++ has waited for what was last entered, until now."""
        if self._unwaited and self._entry is not None:
            self.waited(self._entry, self.clock.mark())

    @property
    def tail_ns(self) -> int | None:
        """Since when the rank waits for what it entered last and goes on with nothing else, on the host; None: it does
        not."""
        entry = self._entry
        return entry.ns if self._unwaited and isinstance(entry, HostMark) else None

    def optimizer_begins(self) -> None:
        """What was reduced outside of a backward pass has come by now."""
        self.notice_ends()
        self.reduced()

    def begin_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """`optimizer` is about to step. Unless the rank is steered, the steps of the first one are the job's; when that
        is gone, those of the next one: a script may train one model after the other."""
        if self.managed:
            return
        if self._owner() is None:
            self._owner = weakref.ref(optimizer)
        if self._owner() is optimizer:
            self.optimizer_begins()

    def end_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """`optimizer` has stepped."""
        if self._owner() is optimizer and not self.managed:
            self.end_step()

    def _begin(self, mark: Mark | None = None) -> None:
        """A step begins, at `mark`; None: here, with training itself."""
        if mark is None:
            if self._finds_clock:
                self.clock = get_work_clock()
            mark = self.clock.mark()
        self._step = _RecordedStep(mark)
        self._computing = self.clock.stream
        self._unwaited = False

    def _write(self, step: _RecordedStep) -> None:
        assert step.end is not None
        write = self.ring.write
        start, end = step.start.ns + step.other_phases.ns, step.end.ns
        own = max(0, end - start - step.waits.ns)
        for begun, ended in step.collections:
            write(_GARBAGE, begun.ns, ended.ns, step.number, step.phase)
        if step.lengths is not None:
            tokens, squares = step.lengths
            write(_LENGTHS, start, end, step.number, step.phase, tokens, nbytes=round(squares))
        write(_STEP, start, end, step.number, step.phase, step.samples, flags=step.mode)
        write(_COMPUTE, start, start + own, step.number, step.phase, step.samples)


def build_open_step(start_ns: int, waits_ns: int) -> _RecordedStep:
    """One by the host's clock that is under way, in which the rank has waited so long."""
    step = _RecordedStep(HostMark(start_ns))
    step.waits.add(HostMark(0), HostMark(waits_ns))
    return step


class NoRing:
    """Stands in where no launcher has made a ring: takes every call and keeps nothing."""

    def __init__(self) -> None:
        self.state: Any = SimpleNamespace()

    def write(self, *args: Any, **fields: Any) -> None: ...

    def enter_phase(self, phase: Phase, now_ns: int | None = None) -> None: ...

    def take_place(self, _: int) -> int:
        return NO_PLACE

    def release_place(self, place: int) -> None: ...

    def enter_collective(
        self, collective: Collective | int, group: int, sequence: int, now_ns: int, place: int
    ) -> None: ...

    def leave_collective(self) -> None: ...

    def end_load(self, duration_ns: int) -> None: ...

    def end_step(self, step: int, now_ns: int) -> None: ...


def _do_nothing() -> None: ...


def _ignore_wait(start: Mark, end: Mark) -> None: ...
