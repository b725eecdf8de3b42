"""Looks at the Python stack of the training thread from another thread, at uneven times: it keeps no step's beat."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType

import numpy as np

from pacekeeper_analysis.behaviour.reduce import Looks

HERTZ = 50.0
MOST_LOOKS = 4096
"""A window that never ends costs no more."""
DEEPEST = 128

Codes = tuple[CodeType, ...]
"""A stack, outermost first."""


class Sampler:
    """One window's looks, from its making until `stop`."""

    def __init__(self, thread: int, is_training: Callable[[], bool]) -> None:
        """thread: identity of the training thread. is_training: whether now is part of a step: other times are left
        out."""
        self._thread = thread
        self._is_training = is_training
        self._clock = _processor_clock(thread)
        self._stacks: dict[tuple[int, ...], int] = {}
        """By identity: equal code may stand in two files."""
        self._codes: list[Codes] = []
        self._looks: list[tuple[int, int, int]] = []
        self._left_out = 0
        self._over = threading.Event()
        self._random = random.Random(thread)  # the script's own generator is left alone
        self._runner = threading.Thread(target=self._run, name="pacekeeper-looks", daemon=True)
        self._runner.start()

    @property
    def left_out_seconds(self) -> float:
        """About so long other phases have taken."""
        return self._left_out / HERTZ

    def stop(self) -> None:
        """No further look begins."""
        self._over.set()

    def looks(self, name: Callable[[Codes], tuple[str, ...]], between: tuple[int, int]) -> Looks:
        """Those of the steps between these times (ns of CLOCK_MONOTONIC). `name`: the frames of a stack."""
        stacks = [name(codes) for codes in self._codes]
        taken = [look for look in self._looks if between[0] <= look[0] < between[1] and stacks[look[2]]]
        columns = np.array(taken, np.int64).reshape(-1, 3)
        return Looks(columns[:, 0], columns[:, 1], columns[:, 2], [stack or ("?",) for stack in stacks])

    def _run(self) -> None:
        while len(self._looks) < MOST_LOOKS and not self._over.wait(self._random.uniform(0.5, 1.5) / HERTZ):
            if self._is_training():
                self._look()
            else:
                self._left_out += 1

    def _look(self) -> None:
        frame = sys._current_frames().get(self._thread)
        codes: list[CodeType] = []
        while frame is not None and len(codes) < DEEPEST:
            codes.append(frame.f_code)
            frame = frame.f_back
        if codes:
            stack = self._stacks.setdefault(tuple(map(id, codes)), len(self._codes))
            if stack == len(self._codes):
                self._codes.append(tuple(reversed(codes)))
            ran = 0 if self._clock is None else time.clock_gettime_ns(self._clock)
            self._looks.append((time.monotonic_ns(), ran, stack))


def _processor_clock(thread: int) -> int | None:
    """Of a thread's processor time; None: there is none."""
    try:
        clock = time.pthread_getcpuclockid(thread)
        time.clock_gettime_ns(clock)
    except (AttributeError, OSError):
        return None
    return clock
