"""CASSINI's time shifts (NSDI 2024): jobs that communicate by turns with computing are shifted against each other.

On a circle of one common period each link has a demand in each slot; what is above its capacity is *excess*,
and shifts are chosen for the least of it. CASSINI chooses them link by link and joins them over a graph of jobs and
links, which must have no circle; here one job after the other moves to its best shift, until none gains, which copes
with any graph. Routes stay those of ECMP.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pacekeeper_analysis.fabric.load import Floats, LinkUsage
from pacekeeper_analysis.fabric.topology import Ints

from .clusters import TrafficJob
from .speeds import compute_busy_slots

MAX_SWEEPS = 8


def shift_jobs(usage: LinkUsage, jobs: Sequence[TrafficJob], start: Ints) -> Ints:
    """Of each job, slots: those of `start`, made better."""
    shifts = start.copy()
    parts = _compute_contended_parts(usage, len(jobs))
    busy = compute_busy_slots(jobs, shifts).astype(float)
    demand = parts @ busy
    for _ in range(MAX_SWEEPS):
        improved = False
        for number in np.flatnonzero(parts.any(axis=0)).tolist():
            links = np.flatnonzero(parts[:, number])
            job_part = parts[links, number, None]
            other_demand = demand[links] - job_part * busy[number]
            choices = compute_busy_slots([jobs[number]] * jobs[number].period, np.arange(jobs[number].period)).astype(
                float
            )
            excess = np.array([np.maximum(0.0, other_demand + job_part * choice - 1.0).sum() for choice in choices])
            best = int(excess.argmin())
            if excess[best] < excess[shifts[number] % jobs[number].period] - 1e-9:
                shifts[number], busy[number], improved = best, choices[best], True
                demand[links] = other_demand + job_part * choices[best]
        if not improved:
            break
    return shifts


def _compute_contended_parts(usage: LinkUsage, jobs: int) -> Floats:
    """(links, jobs): which part of it a job demands, of those links that all jobs together would overload."""
    demand = np.bincount(usage.link, usage.part, len(usage.capacity))
    row = np.cumsum(demand > usage.capacity) - 1
    contended = (demand > usage.capacity)[usage.link]
    parts = np.zeros((int(row[-1]) + 1, jobs))
    link = usage.link[contended]
    parts[row[link], usage.entity[contended]] = usage.part[contended] / usage.capacity[link]
    return parts
