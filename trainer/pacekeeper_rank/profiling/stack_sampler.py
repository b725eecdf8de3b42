"""Samples the Python stack of the training thread from another thread, at random times that no step can match."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType
from typing import NamedTuple

STACK_SAMPLING_HERTZ = 50.0
MAX_STACK_SAMPLES = 4096
"""Limit that bounds the cost of a window that never ends."""
MAX_SAMPLED_STACK_DEPTH = 128

CodeStack = tuple[CodeType, ...]
"""A stack, outermost frame first."""


class StackSample(NamedTuple):
    """The stack at one time."""

    taken_ns: int  # of CLOCK_MONOTONIC
    ran_ns: int  # processor time of the thread until then; 0: unknown
    stack: int  # position in the list of stacks


class StackSampler:
    """Samples of one window, from creation until `stop`."""

    def __init__(self, thread: int, is_training: Callable[[], bool]) -> None:
        """Start sampling. `thread`: identity of the training thread.

        `is_training`: returns whether the present time is part of a step; other times are skipped.
        """
        self._thread = thread
        self._is_training = is_training
        self._clock = _find_thread_clock(thread)
        self._stacks: dict[tuple[int, ...], int] = {}
        """By identity: equal code may be in two files."""
        self._codes: list[CodeStack] = []
        self._samples: list[StackSample] = []
        self._skipped = 0
        self._error: Exception | None = None
        self._over = threading.Event()
        self._random = random.Random(thread)  # does not affect the script's own generator
        self._runner = threading.Thread(target=self._run, name="pacekeeper-stack-sampler", daemon=True)
        self._runner.start()

    @property
    def skipped_seconds(self) -> float:
        """Approximate duration of other phases."""
        return self._skipped / STACK_SAMPLING_HERTZ

    def stop(self) -> None:
        """Stop before the next sample."""
        self._over.set()

    def list_samples(
        self, name: Callable[[CodeStack], tuple[str, ...]], between: tuple[int, int]
    ) -> tuple[list[StackSample], list[tuple[str, ...]]]:
        """Return the samples between these times (ns of CLOCK_MONOTONIC), and all stacks.

        `name` returns the frames of a stack; (): it does not count. Raises the error that has ended the sampling.
        """
        if self._error is not None:
            raise self._error
        stacks = [name(codes) for codes in self._codes]
        selected = [
            sample for sample in self._samples if between[0] <= sample.taken_ns < between[1] and stacks[sample.stack]
        ]
        return selected, [stack or ("?",) for stack in stacks]

    def _run(self) -> None:
        try:
            self._sample()
        except Exception as error:  # the thread must print nothing
            self._error = error

    def _sample(self) -> None:
        while len(self._samples) < MAX_STACK_SAMPLES and not self._over.wait(
            self._random.uniform(0.5, 1.5) / STACK_SAMPLING_HERTZ
        ):
            if self._is_training():
                self._sample_stack()
            else:
                self._skipped += 1

    def _sample_stack(self) -> None:
        frame = sys._current_frames().get(self._thread)
        codes: list[CodeType] = []
        while frame is not None and len(codes) < MAX_SAMPLED_STACK_DEPTH:
            codes.append(frame.f_code)
            frame = frame.f_back
        if codes:
            stack = self._stacks.setdefault(tuple(map(id, codes)), len(self._codes))
            if stack == len(self._codes):
                self._codes.append(tuple(reversed(codes)))
            ran = 0 if self._clock is None else time.clock_gettime_ns(self._clock)
            self._samples.append(StackSample(time.monotonic_ns(), ran, stack))


def _find_thread_clock(thread: int) -> int | None:
    """Return the clock of a thread's processor time; None: there is none."""
    try:
        clock = time.pthread_getcpuclockid(thread)
        time.clock_gettime_ns(clock)
    except (AttributeError, OSError):
        return None
    return clock
