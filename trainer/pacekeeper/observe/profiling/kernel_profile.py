"""Kernels of the GPU with known begin and end, by torch's profiler."""

from __future__ import annotations

import contextlib
import time

from pacekeeper import torch_internals
from pacekeeper_analysis.profiling.pattern import TimeOwner

from .known_spans import Span


class KernelProfile:
    """Activity of the GPU from creation until `stop`, by torch's profiler, without the host's."""

    def __init__(self) -> None:
        """Start the profile. Raises RuntimeError if another profiler runs."""
        self._profile = torch_internals.start_kernel_profile()
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._given_up = False
        self._stay = torch_internals.call_before_other_profile(self._profile, self._give_up)

    def stop(self) -> None:
        if not self._given_up:
            self._stay()
            self._profile.stop()

    def _give_up(self) -> None:
        """Abandon the profile, because the script's own profiler begins."""
        self._given_up = True
        with contextlib.suppress(RuntimeError):
            self._profile.stop()

    def read_spans(self) -> list[Span]:
        """Return the spans, after `stop`.

        Empty if the script has begun to profile: a part would look like an idle GPU.
        """
        if self._given_up:
            return []
        activities = torch_internals.list_device_activities(self._profile)
        return [
            (
                classify_activity(name),
                shorten_kernel_name(name),
                start - self._epoch_ns,
                start - self._epoch_ns + duration,
            )
            for name, start, duration in activities
        ]


def classify_activity(activity: str) -> TimeOwner:
    """Return the owner of a GPU activity by the name that CUDA gives it."""
    if "nccl" in activity.lower():
        return TimeOwner.COLLECTIVE
    return TimeOwner.GPU_MEMORY if activity.startswith(("Memcpy", "Memset")) else TimeOwner.GPU_COMPUTE


def shorten_kernel_name(activity: str) -> str:
    """Return a kernel's name without template arguments: "void at::native::add<float>(…)" is "at::native::add"."""
    if activity.startswith(("Memcpy", "Memset")):
        return activity
    name = activity.removeprefix("void ")
    for bracket in ("<", "("):
        head, separator, _ = name.partition(bracket)
        if separator and head.strip():
            name = head.strip()
    return name
