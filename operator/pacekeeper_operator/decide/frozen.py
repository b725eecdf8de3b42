"""A worker is there but cannot act: its launcher stands still, stopped whole or stuck in the kernel, or ranks on it
outlive SIGKILL. Neither mends itself, no round can begin on it, and no checkpoint waits for it; its node is not blamed.
"""

from __future__ import annotations

from collections.abc import Iterator

from pacekeeper_analysis.reports import FaultKind

from ..api import IncidentCause, IncidentClass
from ..decision import Decision
from ..observation import LAUNCHER_UNRESPONSIVE_SECONDS, Observation, Policy, WorkerView
from ..words import format_list
from . import loss
from .loss import LostWorker

UNRESPONSIVE_CONSEQUENCES = (FaultKind.STALLED, FaultKind.ROUND_FAILED, FaultKind.RANK_FAILED)
"""What a worker that stands still does to its peers."""


def check_unresponsive_workers(observation: Observation, policy: Policy) -> Decision | None:
    found = tuple(_find_unresponsive(observation))
    if not found:
        return None
    follows = observation.select_faults(*UNRESPONSIVE_CONSEQUENCES) if any(_is_assigned(observation, one.view) for one in found) else ()
    return loss.decide_lost_workers(observation, policy, found, tuple(fault.name for fault in follows))


def has_unresponsive_member(observation: Observation) -> bool:
    """A member is frozen, or its sidecar misses its launcher already: the others cannot meet now."""
    return any(
        view.usable
        and view.heartbeat is not None
        and (view.heartbeat.launcher_silent_seconds > 0 or bool(view.heartbeat.unkillable_ranks))
        for view in observation.members
    )


def _find_unresponsive(observation: Observation) -> Iterator[LostWorker]:
    """Members first: they hold the others up."""
    for view in (*observation.members, *observation.spares):
        words = _describe_unresponsive(view)
        if words and view.usable and view.name not in observation.state.life.finished_names:
            yield LostWorker(view, IncidentCause.WORKER_FROZEN, IncidentClass.UNKNOWN, words, _get_unresponsive_since(observation, view))


def _describe_unresponsive(view: WorkerView) -> str:
    """In words; "": it is not frozen."""
    if view.heartbeat is None:
        return ""
    if view.unresponsive:
        return f"its launcher has stood still for more than {LAUNCHER_UNRESPONSIVE_SECONDS:.0f} s, although its sidecar answers"
    ranks = view.heartbeat.unkillable_ranks
    return f"its rank {format_list(ranks)} is still there long after SIGKILL" if ranks else ""


def _get_unresponsive_since(observation: Observation, view: WorkerView) -> float:
    silent = view.heartbeat.launcher_silent_seconds if view.heartbeat is not None else 0.0
    return observation.now - silent


def _is_assigned(observation: Observation, view: WorkerView) -> bool:
    return any(member.worker == view.name for member in observation.plan.members)
