"""CASSINI's time shifts (NSDI 2024): jobs that communicate by turns with computing are shifted against each other.

On a circle of one common period each link is asked for so much in each slot; what is above its capacity is *excess*,
and shifts are chosen for the least of it. CASSINI chooses them link by link and joins them over a graph of jobs and
links, which must have no circle; here one job after the other moves to its best shift, until none gains, which copes
with any graph. Ways stay those of ECMP.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pacekeeper_analysis.fabric.load import Floats, LinkUsage
from pacekeeper_analysis.fabric.topology import Ints

from .clusters import TrafficJob
from .speeds import busy_slots

SWEEPS = 8


def shifted(used: LinkUsage, jobs: Sequence[TrafficJob], start: Ints) -> Ints:
    """Of each job, slots: those of `start`, made better."""
    shifts = start.copy()
    parts = _parts_of_contended(used, len(jobs))
    busy = busy_slots(jobs, shifts).astype(float)
    asked = parts @ busy
    for _ in range(SWEEPS):
        gained = False
        for number in np.flatnonzero(parts.any(axis=0)).tolist():
            links = np.flatnonzero(parts[:, number])
            part = parts[links, number, None]
            others = asked[links] - part * busy[number]
            choices = busy_slots([jobs[number]] * jobs[number].period, np.arange(jobs[number].period)).astype(float)
            excess = np.array([np.maximum(0.0, others + part * choice - 1.0).sum() for choice in choices])
            best = int(excess.argmin())
            if excess[best] < excess[shifts[number] % jobs[number].period] - 1e-9:
                shifts[number], busy[number], gained = best, choices[best], True
                asked[links] = others + part * choices[best]
        if not gained:
            break
    return shifts


def _parts_of_contended(used: LinkUsage, jobs: int) -> Floats:
    """(links, jobs): which part of it a job asks for, of those links that all jobs together would overload."""
    asked = np.bincount(used.link, used.part, len(used.capacity))
    row = np.cumsum(asked > used.capacity) - 1
    contended = (asked > used.capacity)[used.link]
    parts = np.zeros((int(row[-1]) + 1, jobs))
    link = used.link[contended]
    parts[row[link], used.entity[contended]] = used.part[contended] / used.capacity[link]
    return parts
