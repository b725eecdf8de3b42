"""The bill: what jobs used their GPUs for in a period, by team, job, node, and cause; and how good predictions were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from .gpu_account import DayAndNode, Tally

MIN_PREDICTIONS_FOR_SPREAD = 4
"""Predictions from which on quartiles are given: fewer have none."""


@dataclass(frozen=True)
class JobAccount:
    """One job's account, as its WatchedJob stores it."""

    namespace: str
    kind: str
    name: str
    team: str  # "": not known
    days: Mapping[str, Tally]  # by ISO date, UTC
    nodes: Mapping[DayAndNode, float] = field(default_factory=dict)  # GPU seconds lost, by the node that caused it
    saved: float = 0.0  # GPU seconds that remedies would have kept in the period, as predicted


@dataclass(frozen=True)
class JobLine:
    """One job's part of the bill."""

    job: JobAccount
    tally: Tally  # in the period


@dataclass(frozen=True)
class PredictionRecord:
    """How the predicted gains of applied remedies compare with what was measured. Ratios are predicted / measured."""

    count: int
    median: float | None = None  # None: there was none
    quartiles: tuple[float, float] | None = None  # None: too few


@dataclass(frozen=True)
class Bill:
    """The sums of a period. Lines and nodes are sorted by what was lost, the largest first."""

    since: str  # ISO date, UTC: the first day
    lines: tuple[JobLine, ...]
    total: Tally
    teams: Mapping[str, Tally]
    nodes: tuple[tuple[str, float], ...]  # GPU seconds lost in the period
    saved: float  # GPU seconds in the period
    predictions: PredictionRecord


def sum_bill(
    jobs: Sequence[JobAccount], since: str, predictions: Sequence[tuple[float, float]], team: str | None = None
) -> Bill:
    """Return the bill of the days from `since` (ISO date, UTC) on.

    `predictions`: (predicted, measured) gains in seconds of training of remedies that were applied to TrainingJobs of
    this cluster. `team` None: all teams.
    """
    tallies = [(job, _sum_tallies([day for date, day in job.days.items() if date >= since])) for job in jobs]
    lines = [JobLine(job, tally) for job, tally in tallies if tally.held and team in (None, job.team)]
    lines.sort(key=lambda line: (line.tally.useful - line.tally.held, line.job.namespace, line.job.name))
    teams: dict[str, Tally] = defaultdict(Tally)
    nodes: dict[str, float] = defaultdict(float)
    for line in lines:
        teams[line.job.team] += line.tally
        for (day, node), seconds in line.job.nodes.items():
            nodes[node] += seconds if day >= since else 0.0
    return Bill(
        since=since,
        lines=tuple(lines),
        total=_sum_tallies([line.tally for line in lines]),
        teams=dict(sorted(teams.items(), key=lambda item: item[1].useful - item[1].held)),
        nodes=tuple(sorted(filter(lambda item: item[1], nodes.items()), key=lambda item: (-item[1], item[0]))),
        saved=sum(line.job.saved for line in lines),
        predictions=_compare_predictions(predictions),
    )


def _sum_tallies(tallies: Sequence[Tally]) -> Tally:
    return sum(tallies, Tally())


def _compare_predictions(predictions: Sequence[tuple[float, float]]) -> PredictionRecord:
    ratios = [predicted / measured for predicted, measured in predictions if predicted > 0 and measured > 0]
    if not ratios:
        return PredictionRecord(0)
    if len(ratios) < MIN_PREDICTIONS_FOR_SPREAD:
        return PredictionRecord(len(ratios), median(ratios))
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return PredictionRecord(len(ratios), median(ratios), (low, high))
