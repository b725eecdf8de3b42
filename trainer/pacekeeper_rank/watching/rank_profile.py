"""One profile window of a watched rank. This module is imported once a window is requested, and not before.

The training thread begins and ends the window, at ends of steps, so that all ranks sample the same steps. Another
thread writes down what was sampled. The reader reduces it to a pattern: the rank needs no numpy.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from ..profiling.function_names import FunctionNames
from ..profiling.sampled_window import SampledWindow
from ..recorder import Recorder
from .guard import guard
from .watch_folder import WatchFolder, write_json

MAX_WRITTEN_WAITS = 20_000
"""Waits of a window that are written: it ends early, rather than take more memory of the job."""
MAX_WRITTEN_DEPTH = 64
"""Innermost frames of a stack that are written."""


@dataclass(frozen=True)
class WindowRequest:
    """The content of `profile_request`: its fields, between spaces. Steps are those that this rank counts."""

    name: str
    first_step: int
    steps: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> WindowRequest:
        """Read the request. Raises ValueError."""
        name, first_step, steps, seconds = text.split()
        return cls(name, int(first_step), int(steps), float(seconds))


class RankProfile:
    """Takes the window of one request."""

    def __init__(self, folder: WatchFolder, slot: int, recorder: Recorder, request: WindowRequest) -> None:
        self._folder, self._slot, self._recorder = folder, slot, recorder
        self._request = request
        self._usual = recorder.step_ended
        self._window: SampledWindow | None = None
        self.is_over = False

    def arm(self) -> None:
        """Begin the window at the end of a step, in the training thread."""
        self._recorder.step_ended = self._end_step

    def stop(self) -> None:
        """Stop sampling before the interpreter exits."""
        self.is_over = True
        if self._window is not None:
            self._window.sampler.stop()

    def _end_step(self) -> None:
        recorder, request, now = self._recorder, self._request, time.monotonic()
        end = request.first_step + request.steps
        if self.is_over or (self._window is None and recorder.step >= end):  # missed
            self._disarm()
        elif self._window is None and recorder.step >= request.first_step:
            self._window = SampledWindow(recorder, end - recorder.step, request.seconds, now)
        elif self._window is not None and (self._window.is_over(now) or len(self._window.waits) >= MAX_WRITTEN_WAITS):
            self._disarm()
            self._window.stop()
            writer = threading.Thread(target=guard.run, args=("profile", self._write, self._window), daemon=True)
            writer.name = "pacekeeper-profile"
            writer.start()

    def _disarm(self) -> None:
        self.is_over = True
        self._recorder.step_ended = self._usual

    def _write(self, window: SampledWindow) -> None:
        between = window.began.ns, window.ended.ns
        samples, stacks = window.sampler.list_samples(FunctionNames().name_stack, between)
        names: dict[str, int] = {}
        numbered = [[names.setdefault(name, len(names)) for name in stack[-MAX_WRITTEN_DEPTH:]] for stack in stacks]
        content = {
            "request": self._request.name,
            "pid": os.getpid(),
            "began_ns": between[0],
            "ended_ns": between[1],
            "names": list(names),
            "stacks": numbered,
            "taken_ns": [sample.taken_ns for sample in samples],
            "ran_ns": [sample.ran_ns for sample in samples],
            "stack_of_sample": [sample.stack for sample in samples],
            "wait_begins_ns": [begin.ns for begin, _ in window.waits],
            "wait_ends_ns": [end.ns for _, end in window.waits],
        }
        write_json(self._folder.get_file("profiles", self._slot), content)
