"""How a job's ranks train, by the figures that their sidecars send with each heartbeat: what its `Metrics` say of it.

Pure. Only ranks of the plan count, and a worker speaks for its own only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pacekeeper_analysis.plan import Plan
from pacekeeper_analysis.reports import RankMetrics

from ..decide.straggler import MIN_WAITING_SHARE
from ..observation import JobMetrics

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
    ]
)
"""`reports.RankMetrics`, as far as decisions need them."""

RankRows = npt.NDArray[np.void]
"""One a rank, of dtype ROW."""
ColumnValues = npt.NDArray[np.float64]
NO_RANK_ROWS = np.empty(0, RANK_ROW)
MIN_KNOWN_VALUE = 1e-9
"""Seconds (or samples) below this are none: 0 says that nothing is known."""


def read_rank_rows(figures: Sequence[RankMetrics]) -> RankRows:
    """What a worker says; the last of its words about each rank."""
    by_rank = {each.rank: each for each in figures}
    return np.array([_extract_row(each) for each in by_rank.values()], RANK_ROW)


def summarize_ranks(plan_rows: PlanRankRows, plan: Plan, known: JobMetrics) -> JobMetrics:
    """What the ranks of the plan say, beside what is `known` already."""
    return replace(_compute_metrics(plan_rows.rows, known), steps=_count_common_steps(plan_rows.rows, plan), untold=plan_rows.missing_workers)


class PlanRankRows(NamedTuple):
    """Of the ranks of a plan."""

    rows: RankRows  # in the plan's order
    missing_workers: tuple[str, ...]  # members of which some rank's is missing


def select_plan_rows(reported_rows: Mapping[str, RankRows], plan: Plan) -> PlanRankRows:
    """heard: of each worker that is heard now."""
    told, untold = [reported_rows.get(member.worker, NO_RANK_ROWS) for member in plan.members], []
    rows = _join_rows(told)
    # Most often every worker tells of all of its own ranks and of no other.
    whole = all(len(of) == len(member.ranks) for of, member in zip(told, plan.members, strict=True))
    if not whole or rows["rank"].tolist() != [rank for member in plan.members for rank in member.ranks]:
        for place, member in enumerate(plan.members):
            told[place] = np.sort(told[place][np.isin(told[place]["rank"], member.ranks)], order="rank")
            if len(told[place]) < len(member.ranks):
                untold.append(member.worker)
        rows = _join_rows(told)
    return PlanRankRows(rows, tuple(untold))


def _join_rows(told: Sequence[RankRows]) -> RankRows:
    """By their bytes: for thousands of short ones numpy takes ten times as long, since it compares all their fields."""
    return np.frombuffer(b"".join(of.tobytes() for of in told), RANK_ROW)


def needs_immediate_pass(before: RankRows, now: RankRows, last: JobMetrics, slow: float) -> bool:
    """Whether what one worker says now is to be looked at before the next look is due: some rank of its has become slow
    (`slow` × the usual own work a sample), or is so no more; or the least wait of all ranks may have crossed WAITING.

    before: what it said at last. last: what the last look has found.
    """
    if last.per_sample and _has_slow_rank(before, slow * last.per_sample) != _has_slow_rank(now, slow * last.per_sample):
        return True
    if last.waiting is None:
        return False
    if last.waiting >= MIN_WAITING_SHARE:
        return bool((_compute_wait_shares(now) < MIN_WAITING_SHARE).any())
    least = now[now["rank"] == last.waits_least]
    return bool((_compute_wait_shares(least) >= MIN_WAITING_SHARE).any())


def _compute_metrics(rows: RankRows, known: JobMetrics) -> JobMetrics:
    own, shares = _drop_unknown(rows["compute_seconds"]), _drop_unknown(rows["share"])
    paces = _drop_unknown(rows["compute_seconds_per_sample"])
    usual = _compute_median(np.delete(paces, paces.argmax()) if len(paces) > 1 else paces)  # of the slowest rank's peers
    slowest = rows[rows["compute_seconds_per_sample"].argmax()] if usual else None
    stepping, waiting = _select_stepping(rows), _compute_wait_shares(rows)
    grown = stepping[stepping["first_steps_seconds"] > MIN_KNOWN_VALUE]
    return replace(
        known,
        slowdown=float(own.max() / own.mean()) if len(own) else None,
        pace=float(slowest["compute_seconds_per_sample"] / usual) if usual and slowest is not None else None,
        behind=float(own.max() / (usual * shares.mean())) if usual and len(own) and len(shares) else None,
        step_seconds=_compute_median(stepping["step_seconds"]),
        per_sample=usual,
        slowest_rank=None if slowest is None else int(slowest["rank"]),
        waiting=float(waiting.min()) if len(waiting) else None,
        waits_least=int(stepping["rank"][waiting.argmin()]) if len(waiting) else None,
        throughput=float((stepping["share"] / stepping["step_seconds"]).sum()) if len(shares) else None,
        uniform=float((grown["step_seconds"] / grown["first_steps_seconds"]).min()) if len(grown) else None,
    )


def _count_common_steps(rows: RankRows, plan: Plan) -> int:
    """That the figures of the rank with the fewest are of; 0: some rank tells of another share than the plan's."""
    if not len(rows) or (plan.shares is not None and (rows["share"] != np.array(plan.shares)[rows["rank"]]).any()):
        return 0
    return int(rows["steps"].min())


_extract_row = attrgetter(*(RANK_ROW.names or ()))


def _drop_unknown(values: ColumnValues) -> ColumnValues:
    return values[values > MIN_KNOWN_VALUE]


def _compute_median(values: ColumnValues) -> float | None:
    return float(np.median(values)) if len(values) else None


def _select_stepping(rows: RankRows) -> RankRows:
    """The ranks that have taken steps."""
    return rows[rows["step_seconds"] > MIN_KNOWN_VALUE]


def _compute_wait_shares(rows: RankRows) -> ColumnValues:
    """Their waits as shares of a step."""
    stepping = _select_stepping(rows)
    return np.asarray(stepping["wait_seconds"] / stepping["step_seconds"])


def _has_slow_rank(rows: RankRows, seconds: float) -> bool:
    return bool((rows["compute_seconds_per_sample"] >= seconds).any())
