"""How fast a job's all-reduces have gone on, from the times that its rank 0 wrote down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper_analysis.fabric.load import Floats

WINDOW_SECONDS, STEP_SECONDS = 2.0, 0.1
"""Seconds over which a rate is measured, and between two polls."""
RECOVERED_RATE_SHARE = 0.9
"""Part of the best rate that counts as reached."""


@dataclass(frozen=True)
class Progress:
    """Over all rounds. Times: seconds, monotonic, in order."""

    times: Floats
    done: Floats  # all-reduces that had ended by then
    ends: Floats  # the times at which one ended
    rests: bool  # none is in progress

    @classmethod
    def read(cls, lines: Iterable[str]) -> Progress:
        """`lines`: "began", "ended" or "rests", and when. A line that is not whole yet is left out."""
        events = [line.split() for line in lines if line.endswith("\n")]
        times = np.array([float(time) for _, time in events])
        ended = np.array([event == "ended" for event, _ in events], dtype=bool)
        rests = not events or events[-1][0] == "rests"
        return cls(times, np.cumsum(ended).astype(float), times[ended], rests)

    def has_ended_since(self, time: float) -> bool:
        """An all-reduce has ended since."""
        return bool((self.ends > time).any())

    def measure_rate(self, begin: float, end: float) -> float:
        """All-reduces a second; of those in progress at either time the part that lies between counts."""
        first, last = np.interp([begin, end], self.times, self.done)
        return float(last - first) / (end - begin)

    def find_longest_pause(self, since: float) -> float:
        """Seconds between two ends of all-reduces, from the last end before `since` on."""
        index = int(np.searchsorted(self.ends, since, side="right")) - 1
        return float(np.diff(self.ends[max(index, 0) :]).max(initial=0.0))


def compute_recovery_seconds(jobs: Sequence[Progress], best: Sequence[float], since: float, until: float) -> float:
    """Seconds from `since` on after which all jobs come near their `best` pace, and on the whole keep it until `until`;
    inf: they never do. A single stop of a moment, like one of TCP's time-outs, undoes no recovery."""
    for start in np.arange(since, until - WINDOW_SECONDS, STEP_SECONDS):
        rates = [
            (job.measure_rate(start, end), best_rate)
            for job, best_rate in zip(jobs, best, strict=True)
            for end in (start + WINDOW_SECONDS, until)
        ]
        if all(rate >= RECOVERED_RATE_SHARE * best_rate for rate, best_rate in rates):
            return float(start - since)
    return float("inf")
