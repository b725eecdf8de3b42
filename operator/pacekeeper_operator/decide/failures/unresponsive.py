"""Unresponsive workers: the launcher is stopped or stuck in the kernel, or ranks outlive SIGKILL.

Neither recovers by itself, and no round can begin on such a worker. No checkpoint waits for it. Its node is not blamed.
"""

from __future__ import annotations

from collections.abc import Iterator

from pacekeeper_analysis.protocol.reports import FaultKind

from ...api.incident import IncidentCause, IncidentClass
from ...formatting import format_list
from ...state.cluster_view import LAUNCHER_UNRESPONSIVE_SECONDS, WorkerView
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision
from . import lost_worker_decision
from .lost_worker_decision import LostWorker

UNRESPONSIVE_CONSEQUENCES = (FaultKind.STALLED, FaultKind.ROUND_FAILED, FaultKind.RANK_FAILED)
"""Faults that an unresponsive worker causes on its peers."""


def check_unresponsive_workers(observation: Observation, policy: Policy) -> Decision | None:
    """Replace all unresponsive workers, and settle the faults that they caused on their peers."""
    losses = tuple(_find_unresponsive(observation))
    if not losses:
        return None
    consequences = (
        observation.select_faults(*UNRESPONSIVE_CONSEQUENCES)
        if any(_is_assigned(observation, loss.view) for loss in losses)
        else ()
    )
    return lost_worker_decision.decide_lost_workers(
        observation, policy, losses, tuple(fault.name for fault in consequences)
    )


def has_unresponsive_member(observation: Observation) -> bool:
    """Return whether a member's launcher is silent or has ranks that outlive SIGKILL, so that no rendezvous can end."""
    return any(
        view.usable
        and view.heartbeat is not None
        and (view.heartbeat.launcher_silent_seconds > 0 or bool(view.heartbeat.unkillable_ranks))
        for view in observation.members
    )


def _find_unresponsive(observation: Observation) -> Iterator[LostWorker]:
    """Yield the unresponsive workers, members first: they block the others."""
    for view in (*observation.members, *observation.spares):
        reason = _describe_unresponsive(view)
        if reason and view.usable and view.name not in observation.state.lifecycle.finished_names:
            yield LostWorker(
                view,
                IncidentCause.WORKER_UNRESPONSIVE,
                IncidentClass.UNKNOWN,
                reason,
                _get_unresponsive_since(observation, view),
            )


def _describe_unresponsive(view: WorkerView) -> str:
    """Return how the worker is unresponsive; "": it is not."""
    if view.heartbeat is None:
        return ""
    if view.unresponsive:
        return (
            f"its launcher has been unresponsive for more than {LAUNCHER_UNRESPONSIVE_SECONDS:.0f} s, although its "
            "sidecar responds"
        )
    ranks = view.heartbeat.unkillable_ranks
    return f"its rank {format_list(ranks)} is still alive long after SIGKILL" if ranks else ""


def _get_unresponsive_since(observation: Observation, view: WorkerView) -> float:
    silent_seconds = view.heartbeat.launcher_silent_seconds if view.heartbeat is not None else 0.0
    return observation.now - silent_seconds


def _is_assigned(observation: Observation, view: WorkerView) -> bool:
    return any(member.worker == view.name for member in observation.plan.members)
