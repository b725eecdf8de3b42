"""Records what a rank does in its ring: steps, own work, phases, and waits for its peers.

**Own work.** The COMPUTE record of a step is the step's duration without the rank's *exposed waits for its peers*. Both
are measured by the rank's clock (work_clock.py): if a device does the work, a wait is the time in which the device has
nothing else to do. Waits are

- `Work.wait` (all waits of FSDP2, barriers and object collectives on CPU), collectives that a stream waits for as soon
  as they are launched, and FSDP2's waits for its other streams;
- the *tail* of a backward pass: from the last gradient to the end of the pass. This is DDP, whose reducer overlaps all
  buckets but the last with the backward pass and then waits for them in C++. What a script reduces asynchronously
  outside of a backward pass has its tail at the optimizer's step;
- DDP's broadcasts of buffers, as a whole, because C++ waits for them at once.

Data loading is own work: it is the rank's, and grows with its share of the batch.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, TypeVar

from torch.optim import Optimizer

from .collectives.communicators import Communicators
from .hook_guard import HookGuard
from .record_ring import NO_PLACE, RingWriter
from .records import MAX_STEPS_AHEAD, Collective, Phase, RecordKind
from .torch_internals import graph_task
from .work_clock import Clock, HostClock, HostMark, Mark, WorkSpans, get_work_clock

Loaded = TypeVar("Loaded")

# Looked up once: a member of an enumeration costs a Python call each time.
_STEP, _COMPUTE, _DATA = int(RecordKind.STEP), int(RecordKind.COMPUTE), int(RecordKind.DATA)
_GARBAGE, _LENGTHS = int(RecordKind.GC), int(RecordKind.LENGTHS)
_START, _LOAD, _LOADING = Phase.START, Phase.LOAD, (Phase.LOAD, Phase.DATA)


class _RecordedStep:
    """A step that the host executes, or has executed and the device has not."""

    # By hand: a dataclass has slots only from Python 3.10 on.
    __slots__ = (
        "collections",
        "end",
        "lengths",
        "mode",
        "number",
        "other_phases",
        "phase",
        "samples",
        "start",
        "waits",
    )

    def __init__(self, start: Mark) -> None:
        self.start = start
        self.waits = WorkSpans()
        """Waits for peers."""
        self.other_phases = WorkSpans()
        """Time in other phases, including waits."""
        self.collections: list[tuple[Mark, Mark]] = []
        """Garbage collections that have left the device without work."""
        self.end: Mark | None = None
        self.number = 0
        self.phase = _START
        self.mode = 0
        self.samples = 0
        self.lengths: tuple[float, float | None] | None = None

    @property
    def reached(self) -> bool:
        """Whether its end is reached."""
        assert self.end is not None
        # In the order of the work, by which the times of a device's marks are counted.
        if not (self.start.reached and self.waits.reached and self.other_phases.reached and self.end.reached):
            return False
        if not self.collections:
            return True
        return all(start.reached and end.reached for start, end in self.collections)  # may come just after the end


class Recording(str, Enum):
    """What is recorded of a rank, and how."""

    NATIVE = "Native"  # all, in C
    PURE = "Pure"  # all, in Python
    STEPS_ONLY = "StepsOnly"  # steps, loading, and phases, but neither collectives nor waits for peers


@dataclass(frozen=True)
class OpenPhase:
    """A phase other than training."""

    phase: Phase
    previous: Phase
    start_ns: int
    mark: Mark | None
    """None: it is nested in another phase."""


class Recorder:
    """Writes one rank's records. All times are nanoseconds of CLOCK_MONOTONIC."""

    def __init__(
        self, ring: RingWriter | NoRing, clock: Clock | None = None, communicators: Communicators | None = None
    ) -> None:
        """Create the recorder.

        `clock`: clock of the rank's work; None: the clock of the device that it works on when training begins.
        `communicators`: where its communicators are published; None: nowhere.
        """
        self.ring = ring
        self.communicators = communicators or Communicators(None)
        self.clock = clock or HostClock()
        self.step = 0
        """The present step: the number it will have when it is complete."""
        self.phase = Phase.START
        self.mode = 0
        """Position of the mode in force in plan.SYNC_MODES."""
        self.managed = False
        """Whether a `Job` reports when a step is complete; otherwise the optimizer's hooks do."""
        self.guard = HookGuard()
        """Of all hooks of this rank."""
        self.recording = Recording.PURE
        """With StepsOnly, waits for peers are not known, and so own work is not."""
        self.notice_ends: Callable[[], None] = _do_nothing
        """Records the collectives that have ended."""
        self.install_late_hooks: Callable[[], None] = _do_nothing
        """Installs the hooks of what the script has imported since the last call."""
        self.step_ended: Callable[[], None] = _do_nothing
        """Called at the end of each step, before the next one's work."""
        self.notice_wait: Callable[[Mark, Mark], None] = _ignore_wait
        """Called with each wait for peers."""
        self._owner: Callable[[], Optimizer | None] = _do_nothing
        """Weak reference to the optimizer whose steps are the job's."""
        self._finds_clock = clock is None
        self.training_thread = threading.get_ident()
        self._in_flight: deque[_RecordedStep] = deque()
        """Steps whose end the device may not have reached, oldest first."""
        self._computing: object = None
        """The stream that the script computes on."""
        self._waiting = False
        self._away = 0
        """Number of nested phases other than training."""
        self._unwaited = False
        """Whether nothing has waited for the collective that was entered last."""
        self._entry: Mark | None = None
        """Mark of that entry, or of the computed gradients if that is later; None: during a backward pass."""
        self._begin()

    def end_step(self, samples: int = 0, lengths: tuple[float, float | None] | None = None) -> None:
        """Complete the present step after the optimizer has stepped.

        `samples`: samples of this rank (0: unknown). `lengths`: sums of their lengths and of the squares; both, or
        only the latter, may be unknown (None). Waits until the device is at most MAX_STEPS_AHEAD steps behind.
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
        """End of the last step, or the beginning of the first one."""
        return self._step.start

    def restart_clock(self, step: int) -> None:
        """Begin step number `step` now."""
        self.step = step
        self._begin()

    def write_reached(self) -> None:
        """Write the steps whose end the device has reached."""
        in_flight = self._in_flight
        while in_flight and in_flight[0].reached:
            self._write(in_flight.popleft())

    def finish(self) -> None:
        """Wait for the device's present steps, and write them."""
        for step in self._in_flight:
            assert step.end is not None
            step.end.wait()
        self.write_reached()
        self.notice_ends()

    def stop_measuring(self) -> None:
        """Record steps only from now on: the hooks that measure waits for peers are inactive."""
        self.recording = Recording.STEPS_ONLY
        self.step_ended = _do_nothing
        self.notice_ends = _do_nothing
        self.notice_wait = _ignore_wait
        self.ring.leave_collective()

    def detach_in_child(self) -> None:
        """End the rank's records in a process that it has just forked.

        Hooks stay, but use neither the rank's files nor its device, which a fork must not use. The ring detaches itself
        (record_ring.py).
        """
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
        """Run a phase other than training. Its time is excluded from steps."""
        open_phase = self.begin_phase(phase)
        try:
            yield
        finally:
            self.end_phase(open_phase)

    def begin_phase(self, phase: Phase) -> OpenPhase:
        now = time.monotonic_ns()
        open_phase = OpenPhase(phase, self.phase, now, None if self._away else self.clock.mark())
        self._away += 1
        self.enter_phase(phase, now)
        return open_phase

    def end_phase(self, open_phase: OpenPhase) -> None:
        """End a phase, and resume the one before it."""
        end = time.monotonic_ns()
        self._away -= 1
        if open_phase.mark is not None:
            self._step.other_phases.add(open_phase.mark, self.clock.mark())
        self.enter_phase(open_phase.previous, end)
        self.ring.write(RecordKind.PHASE, open_phase.start_ns, end, self.step, open_phase.phase)

    def load(self, fetch: Callable[..., Loaded], *arguments: Any) -> Loaded:
        """Wait for the loader: a phase with its own deadline, and part of the step. Nested calls count once."""
        load = self.begin_load()
        try:
            return fetch(*arguments)
        finally:
            if load is not None:
                self.end_load(load)

    def begin_load(self) -> tuple[Phase, int] | None:
        """Begin to wait for the loader, and return what `end_load` needs; None: it is nested in such a wait."""
        previous = self.phase
        if previous in _LOADING:
            return None
        start = time.monotonic_ns()
        self.enter_phase(_LOAD, start)
        return previous, start

    def end_load(self, load: tuple[Phase, int]) -> None:
        """End a wait for the loader."""
        previous, start = load
        end = time.monotonic_ns()
        self.enter_phase(previous, end)
        self.ring.write(_DATA, start, end, self.step, previous)
        self.ring.end_load(end - start)

    @contextmanager
    def time_peer_wait(self) -> Iterator[None]:
        """Time a wait for peers, if it blocks the step's work.

        Waits on another stream, in another thread or phase, or nested in another wait do not count.
        """
        start = self.begin_wait()
        try:
            yield
        finally:
            self.end_wait(start)

    def begin_wait(self) -> Mark | None:
        """Begin a wait, as `time_peer_wait` at lower cost. None: it does not count."""
        if not self.is_wait_counted:
            return None
        self._waiting = True
        return self.clock.mark()

    def end_wait(self, start: Mark | None) -> None:
        """End the wait that began at `start`; None: it did not count."""
        if start is not None:
            self._waiting = False
            self.waited(start, self.clock.mark())

    @property
    def is_wait_counted(self) -> bool:
        """Whether a wait that begins here and now would count."""
        if self._waiting or self._away:
            return False
        # The nodes of a backward pass run in a thread of their device; the training thread waits for it.
        in_step = threading.get_ident() == self.training_thread or graph_task() >= 0
        return in_step and self.clock.stream == self._computing

    def waited(self, start: Mark, end: Mark) -> None:
        """Add a wait for peers from `start` to `end`."""
        self._step.waits.add(start, end)
        self._unwaited = False
        self.notice_wait(start, end)

    def record_gc(self, start: Mark, end: Mark) -> None:
        """Add a garbage collection during which the device continued with queued work."""
        self._step.collections.append((start, end))

    def entered(self, in_backward: bool) -> None:
        """Record that the rank has entered a collective that waits for the last rank, and continues."""
        if in_backward:
            self._unwaited, self._entry = True, None
        elif self.is_wait_counted:
            self._unwaited, self._entry = True, self.clock.mark()

    def backward_computed(self) -> None:
        """Record that all gradients of a backward pass are computed; their reduction may be incomplete."""
        if self._unwaited:
            self._entry = self.clock.mark()

    def reduced(self) -> None:
        """End the tail: C++ has waited until now for the collective that was entered last."""
        if self._unwaited and self._entry is not None:
            self.waited(self._entry, self.clock.mark())

    @property
    def tail_ns(self) -> int | None:
        """Time since which the rank only waits, on the host, for the collective that it entered last.

        None: it does not wait.
        """
        entry = self._entry
        return entry.ns if self._unwaited and isinstance(entry, HostMark) else None

    def optimizer_begins(self) -> None:
        """Record that reductions outside of a backward pass are complete."""
        self.notice_ends()
        self.reduced()

    def begin_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Prepare for a step of `optimizer`.

        Unless the rank is managed, the steps of the first optimizer are the job's. When it is deleted, those of the
        next one are: a script may train one model after the other.
        """
        if self.managed:
            return
        if self._owner() is None:
            self._owner = weakref.ref(optimizer)
        if self._owner() is optimizer:
            self.optimizer_begins()

    def end_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Handle a completed step of `optimizer`."""
        if self._owner() is optimizer and not self.managed:
            self.end_step()

    def _begin(self, mark: Mark | None = None) -> None:
        """Begin a step at `mark`; None: here, when training begins."""
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
        own_ns = max(0, end - start - step.waits.ns)
        for gc_start, gc_end in step.collections:
            write(_GARBAGE, gc_start.ns, gc_end.ns, step.number, step.phase)
        if step.lengths is not None:
            tokens, squares = step.lengths
            write(_LENGTHS, start, end, step.number, step.phase, tokens, nbytes=round(squares or 0.0))
        write(_STEP, start, end, step.number, step.phase, step.samples, flags=step.mode)
        if self.recording is not Recording.STEPS_ONLY:
            write(_COMPUTE, start, start + own_ns, step.number, step.phase, step.samples)


def build_open_step(start_ns: int, waits_ns: int) -> _RecordedStep:
    """Build a step in progress by the host's clock, in which the rank has waited `waits_ns`."""
    step = _RecordedStep(HostMark(start_ns))
    step.waits.add(HostMark(0), HostMark(waits_ns))
    return step


class NoRing:
    """Replacement for a rank without a ring: accepts every call and stores nothing."""

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
