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
from pacekeeper_analysis.reports import RankFigures

from ..decide.straggler import WAITING
from ..observation import Metrics

ROW = np.dtype(
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
"""`reports.RankFigures`, as far as decisions need them."""

Rows = npt.NDArray[np.void]
"""One a rank, of dtype ROW."""
Values = npt.NDArray[np.float64]
NOTHING = np.empty(0, ROW)
SHORTEST = 1e-9
"""Seconds (or samples) below this are none: 0 says that nothing is known."""


def read(figures: Sequence[RankFigures]) -> Rows:
    """What a worker says; the last of its words about each rank."""
    by_rank = {each.rank: each for each in figures}
    return np.array([_values(each) for each in by_rank.values()], ROW)


def metrics(told: Told, plan: Plan, known: Metrics) -> Metrics:
    """What the ranks of the plan say, beside what is `known` already."""
    return replace(_of_rows(told.rows, known), steps=_steps(told.rows, plan), untold=told.untold)


class Told(NamedTuple):
    """Of the ranks of a plan."""

    rows: Rows  # in the plan's order
    untold: tuple[str, ...]  # members of which some rank's is missing


def of_plan(heard: Mapping[str, Rows], plan: Plan) -> Told:
    """heard: of each worker that is heard now."""
    told, untold = [heard.get(member.worker, NOTHING) for member in plan.members], []
    rows = _joined(told)
    # Most often every worker tells of all of its own ranks and of no other.
    whole = all(len(of) == len(member.ranks) for of, member in zip(told, plan.members, strict=True))
    if not whole or rows["rank"].tolist() != [rank for member in plan.members for rank in member.ranks]:
        for place, member in enumerate(plan.members):
            told[place] = np.sort(told[place][np.isin(told[place]["rank"], member.ranks)], order="rank")
            if len(told[place]) < len(member.ranks):
                untold.append(member.worker)
        rows = _joined(told)
    return Told(rows, tuple(untold))


def _joined(told: Sequence[Rows]) -> Rows:
    """By their bytes: for thousands of short ones numpy takes ten times as long, since it compares all their fields."""
    return np.frombuffer(b"".join(of.tobytes() for of in told), ROW)


def matters(before: Rows, now: Rows, last: Metrics, slow: float) -> bool:
    """Whether what one worker says now is to be looked at before the next look is due: some rank of its has become slow
    (`slow` × the usual own work a sample), or is so no more; or the least wait of all ranks may have crossed WAITING.

    before: what it said at last. last: what the last look has found.
    """
    if last.per_sample and _is_slow(before, slow * last.per_sample) != _is_slow(now, slow * last.per_sample):
        return True
    if last.waiting is None:
        return False
    if last.waiting >= WAITING:
        return bool((_waiting(now) < WAITING).any())
    least = now[now["rank"] == last.waits_least]
    return bool((_waiting(least) >= WAITING).any())


def _of_rows(rows: Rows, known: Metrics) -> Metrics:
    own, shares = _known(rows["compute_seconds"]), _known(rows["share"])
    paces = _known(rows["compute_seconds_per_sample"])
    usual = _median(np.delete(paces, paces.argmax()) if len(paces) > 1 else paces)  # of the slowest rank's peers
    slowest = rows[rows["compute_seconds_per_sample"].argmax()] if usual else None
    stepping, waiting = _stepping(rows), _waiting(rows)
    grown = stepping[stepping["first_steps_seconds"] > SHORTEST]
    return replace(
        known,
        slowdown=float(own.max() / own.mean()) if len(own) else None,
        pace=float(slowest["compute_seconds_per_sample"] / usual) if usual and slowest is not None else None,
        behind=float(own.max() / (usual * shares.mean())) if usual and len(own) and len(shares) else None,
        step_seconds=_median(stepping["step_seconds"]),
        per_sample=usual,
        slowest_rank=None if slowest is None else int(slowest["rank"]),
        waiting=float(waiting.min()) if len(waiting) else None,
        waits_least=int(stepping["rank"][waiting.argmin()]) if len(waiting) else None,
        throughput=float((stepping["share"] / stepping["step_seconds"]).sum()) if len(shares) else None,
        uniform=float((grown["step_seconds"] / grown["first_steps_seconds"]).min()) if len(grown) else None,
    )


def _steps(rows: Rows, plan: Plan) -> int:
    """That the figures of the rank with the fewest are of; 0: some rank tells of another share than the plan's."""
    if not len(rows) or (plan.shares is not None and (rows["share"] != np.array(plan.shares)[rows["rank"]]).any()):
        return 0
    return int(rows["steps"].min())


_values = attrgetter(*(ROW.names or ()))


def _known(values: Values) -> Values:
    return values[values > SHORTEST]


def _median(values: Values) -> float | None:
    return float(np.median(values)) if len(values) else None


def _stepping(rows: Rows) -> Rows:
    """The ranks that have taken steps."""
    return rows[rows["step_seconds"] > SHORTEST]


def _waiting(rows: Rows) -> Values:
    """Their waits as shares of a step."""
    stepping = _stepping(rows)
    return np.asarray(stepping["wait_seconds"] / stepping["step_seconds"])


def _is_slow(rows: Rows, seconds: float) -> bool:
    return bool((rows["compute_seconds_per_sample"] >= seconds).any())
