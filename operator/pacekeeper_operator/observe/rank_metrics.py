"""Metrics of a job's ranks, from the statistics that their sidecars send with each heartbeat.

Pure. Only ranks of the plan count, and a worker reports on its own ranks only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pacekeeper_analysis.estimator.observations import MetricsWindow
from pacekeeper_analysis.protocol.plan import Plan, SyncMode
from pacekeeper_analysis.protocol.reports import RankMetrics

from ..state.job_metrics import MIN_WAITING_SHARE, JobMetrics

RANK_ROW = np.dtype(
    [
        ("rank", np.int64),
        ("steps", np.int64),
        ("step_seconds", np.float64),
        ("compute_seconds", np.float64),
        ("compute_seconds_per_sample", np.float64),
        ("wait_seconds", np.float64),
        ("share", np.float64),
        ("first_steps_seconds", np.float64),
        ("last_step", np.int64),
    ]
)
"""The fields of `reports.RankMetrics` that decisions need.

0 stands for a value that is not known, and -1 for such a `last_step`: the first step may have number 0.
"""

RankRows = npt.NDArray[np.void]
"""One row per rank, of dtype RANK_ROW."""
ColumnValues = npt.NDArray[np.float64]
NO_RANK_ROWS = np.empty(0, RANK_ROW)
MIN_KNOWN_VALUE = 1e-9
"""Seconds (or samples) below this count as unknown: 0 means that nothing is known."""


def read_rank_rows(metrics: Sequence[RankMetrics]) -> RankRows:
    """Return the rows of a worker's report. The last entry of each rank counts."""
    by_rank = {entry.rank: entry for entry in metrics}
    rows = (_extract_row(entry) for entry in by_rank.values())
    return np.array(
        [(*(value or 0 for value in row[:-1]), -1 if row[-1] is None else row[-1]) for row in rows], RANK_ROW
    )


def summarize_ranks(plan_rows: PlanRankRows, plan: Plan, metrics: JobMetrics) -> JobMetrics:
    """Return `metrics` with the metrics of the ranks of the plan."""
    return replace(
        _compute_metrics(plan_rows.rows, metrics),
        steps=_count_common_steps(plan_rows.rows, plan),
        unreported_members=plan_rows.missing_workers,
    )


class PlanRankRows(NamedTuple):
    """The rows of the ranks of a plan."""

    rows: RankRows  # in the plan's order
    missing_workers: tuple[str, ...]  # members with a rank that has no row


def select_plan_rows(reported_rows: Mapping[str, RankRows], plan: Plan) -> PlanRankRows:
    """Return the rows of the plan's ranks. `reported_rows` are those of each worker that reports now."""
    member_rows, missing = [reported_rows.get(member.worker, NO_RANK_ROWS) for member in plan.members], []
    rows = _join_rows(member_rows)
    # Usually every worker reports all of its own ranks and no others.
    is_complete = all(len(part) == len(member.ranks) for part, member in zip(member_rows, plan.members, strict=True))
    if not is_complete or rows["rank"].tolist() != [rank for member in plan.members for rank in member.ranks]:
        for index, member in enumerate(plan.members):
            member_rows[index] = np.sort(
                member_rows[index][np.isin(member_rows[index]["rank"], member.ranks)], order="rank"
            )
            if len(member_rows[index]) < len(member.ranks):
                missing.append(member.worker)
        rows = _join_rows(member_rows)
    return PlanRankRows(rows, tuple(missing))


def _join_rows(parts: Sequence[RankRows]) -> RankRows:
    """Concatenate rows by their bytes.

    For thousands of short arrays numpy takes ten times as long, as it compares all fields.
    """
    return np.frombuffer(b"".join(part.tobytes() for part in parts), RANK_ROW)


def build_means(plan_rows: PlanRankRows, plan: Plan) -> MetricsWindow | None:
    """Return the means of the plan's ranks for the estimator, in the order of ranks.

    None: some are missing, of other shares than the plan's, or without the number of their last step.
    """
    rows = plan_rows.rows
    if (np.diff(rows["rank"]) < 0).any():
        rows = np.sort(rows, order="rank")
    if plan_rows.missing_workers or not _count_common_steps(rows, plan) or rows["last_step"].min() < 0:
        return None
    if rows["compute_seconds"].min() < MIN_KNOWN_VALUE or rows["step_seconds"].min() < MIN_KNOWN_VALUE:
        return None
    return MetricsWindow(
        last_step=int(rows["last_step"].min()),
        steps=int(rows["steps"].min()),
        compute_seconds=rows["compute_seconds"],
        step_seconds=rows["step_seconds"],
        wait_seconds=rows["wait_seconds"],
        samples=rows["share"],
        baseline_seconds=_compute_median(_drop_unknown(rows["first_steps_seconds"])),
        synchronous=plan.sync_mode is SyncMode.SYNC,
    )


def needs_immediate_pass(before: RankRows, now: RankRows, last: JobMetrics, slow: float) -> bool:
    """Return whether a worker's report needs a pass before the next one is due.

    It does if one of its ranks has become slow (`slow` × the usual own work per sample), or is not slow any more. It
    also does if the least wait of all ranks may have crossed MIN_WAITING_SHARE. `before` is its previous report, and
    `last` the result of the last pass.
    """
    if last.seconds_per_sample and _has_slow_rank(before, slow * last.seconds_per_sample) != _has_slow_rank(
        now, slow * last.seconds_per_sample
    ):
        return True
    if last.wait_share is None:
        return False
    if last.wait_share >= MIN_WAITING_SHARE:
        return bool((_compute_wait_shares(now) < MIN_WAITING_SHARE).any())
    least_waiting = now[now["rank"] == last.least_waiting_rank]
    return bool((_compute_wait_shares(least_waiting) >= MIN_WAITING_SHARE).any())


def _compute_metrics(rows: RankRows, metrics: JobMetrics) -> JobMetrics:
    compute_seconds, shares = _drop_unknown(rows["compute_seconds"]), _drop_unknown(rows["share"])
    per_sample = _drop_unknown(rows["compute_seconds_per_sample"])
    usual_seconds = _compute_median(
        np.delete(per_sample, per_sample.argmax()) if len(per_sample) > 1 else per_sample
    )  # of the peers of the slowest rank
    slowest = rows[rows["compute_seconds_per_sample"].argmax()] if usual_seconds else None
    stepping, wait_shares = _select_stepping(rows), _compute_wait_shares(rows)
    comparable = stepping[stepping["first_steps_seconds"] > MIN_KNOWN_VALUE]
    return replace(
        metrics,
        slowdown=float(compute_seconds.max() / compute_seconds.mean()) if len(compute_seconds) else None,
        relative_time=float(slowest["compute_seconds_per_sample"] / usual_seconds)
        if usual_seconds and slowest is not None
        else None,
        peer_slowdown=float(compute_seconds.max() / (usual_seconds * shares.mean()))
        if usual_seconds and len(compute_seconds) and len(shares)
        else None,
        step_seconds=_compute_median(stepping["step_seconds"]),
        seconds_per_sample=usual_seconds,
        slowest_rank=None if slowest is None else int(slowest["rank"]),
        wait_share=float(wait_shares.min()) if len(wait_shares) else None,
        least_waiting_rank=int(stepping["rank"][wait_shares.argmin()]) if len(wait_shares) else None,
        throughput=float((stepping["share"] / stepping["step_seconds"]).sum()) if len(shares) else None,
        uniform_slowdown=float((comparable["step_seconds"] / comparable["first_steps_seconds"]).min())
        if len(comparable)
        else None,
    )


def _count_common_steps(rows: RankRows, plan: Plan) -> int:
    """Return the steps that the statistics of every rank cover.

    It is 0 if some rank reports another share than the plan's.
    """
    if not len(rows) or (plan.shares is not None and (rows["share"] != np.array(plan.shares)[rows["rank"]]).any()):
        return 0
    return int(rows["steps"].min())


_extract_row = attrgetter(*(RANK_ROW.names or ()))


def _drop_unknown(values: ColumnValues) -> ColumnValues:
    return values[values > MIN_KNOWN_VALUE]


def _compute_median(values: ColumnValues) -> float | None:
    """Return the median; None: there are no values. For few of them, `np.median` takes several times as long."""
    if not len(values):
        return None
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def _select_stepping(rows: RankRows) -> RankRows:
    """Return the ranks that have taken steps."""
    return rows[rows["step_seconds"] > MIN_KNOWN_VALUE]


def _compute_wait_shares(rows: RankRows) -> ColumnValues:
    """Return the waits as shares of a step."""
    stepping = _select_stepping(rows)
    return np.asarray(stepping["wait_seconds"] / stepping["step_seconds"])


def _has_slow_rank(rows: RankRows, seconds: float) -> bool:
    return bool((rows["compute_seconds_per_sample"] >= seconds).any())
