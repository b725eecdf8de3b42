"""Profiles on one machine: once a rank is slow, which function takes its time. Pure, but for the container."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from pacekeeper_analysis.profiling.localize import describe_localization, localize_fault
from pacekeeper_analysis.profiling.pattern import ProfileAnswer, RankPattern
from pacekeeper_analysis.protocol.requests import ProfileRequest

LIVE_PROFILE_LEAD_SECONDS = 1.0
"""Time before a window's first step: ranks look for requests four times a second."""
LIVE_PROFILE_SECONDS, MIN_LIVE_PROFILE_STEPS = 8.0, 32
"""Duration of a window, which ends with the later of both: enough samples to tell functions apart."""
LIVE_PROFILE_PATIENCE_SECONDS = 60.0
"""Time after which missing answers are not awaited any more."""


class ProfiledContainer(Protocol):
    """What takes the profiles: `container.WatchedContainer`."""

    def request_profile(self, request: ProfileRequest) -> None:
        """Ask the present ranks for a profile window."""

    def read_patterns(self, request: str, known: Set[int]) -> Mapping[int, RankPattern]:
        """Return what ranks have answered, without those that are `known`."""


class SlowRankProfile:
    """Takes one window for each set of slow ranks."""

    def __init__(self, container: ProfiledContainer) -> None:
        self._container = container
        self._request: ProfileRequest | None = None
        self._until = 0.0
        self._answers: dict[int, bytes] = {}
        self._profiled: set[tuple[int, ...]] = set()

    def follow(
        self, slow: tuple[int, ...], steps: int, step_seconds: float | None, ranks: int, now: float
    ) -> Sequence[str]:
        """Return sentences about a window that has a result.

        `slow`: ranks that are slow now; `steps`: that the ranks have completed; `ranks`: their number; `now`: seconds,
        monotonic.
        """
        if self._request is None:
            if slow and slow not in self._profiled and step_seconds:
                self._profiled.add(slow)
                self._begin(steps, step_seconds, now)
            return ()
        for rank, pattern in self._container.read_patterns(self._request.name, self._answers.keys()).items():
            self._answers[rank] = ProfileAnswer(pattern).to_bytes()
        if len(self._answers) < ranks and now < self._until:
            return ()
        answers, self._request, self._answers = sorted(self._answers.items()), None, {}
        return describe_localization(localize_fault(answers, ranks)) if answers else ()

    def _begin(self, steps: int, step_seconds: float, now: float) -> None:
        window_steps = max(MIN_LIVE_PROFILE_STEPS, math.ceil(LIVE_PROFILE_SECONDS / step_seconds))
        self._request = ProfileRequest(
            name=f"live-{len(self._profiled)}",
            first_step=steps + 2 + math.ceil(LIVE_PROFILE_LEAD_SECONDS / step_seconds),
            steps=window_steps,
            seconds=window_steps * step_seconds,
        )
        self._until = now + LIVE_PROFILE_LEAD_SECONDS + 2 * self._request.seconds + LIVE_PROFILE_PATIENCE_SECONDS
        self._container.request_profile(self._request)
