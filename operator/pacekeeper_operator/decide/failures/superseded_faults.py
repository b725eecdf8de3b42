"""Superseded faults, which no check evaluates any longer.

They are faults of a former membership or of a stopping job, stalls that are over, and crashes of ranks whose lost peer
is already being replaced.
"""

from __future__ import annotations

from pacekeeper_analysis.failures.crash import is_peer_loss
from pacekeeper_analysis.protocol.plan import Stop
from pacekeeper_analysis.protocol.reports import FaultKind, FaultReport

from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ...state.policy import Policy

UNKNOWN_MEMBERSHIP_WAIT_SECONDS = 60.0
"""Seconds before a fault of a membership above the plan's is settled. The job's state may be about to be restored to
that membership."""


def settle_superseded_faults(observation: Observation, _policy: Policy) -> DesiredState:
    """Settle the faults that need no decision any more."""
    assigned = frozenset(member.worker for member in observation.plan.members)
    stale = (fault.name for fault in observation.faults if _is_superseded(observation, fault, fault.worker in assigned))
    return observation.desired.settle_faults(tuple(stale))


def _is_superseded(observation: Observation, fault: FaultReport, assigned: bool) -> bool:
    is_ending = observation.state.lifecycle.is_over or observation.plan.stop is not Stop.NO
    if is_ending or 0 < fault.membership < observation.plan.membership:
        return True
    if fault.membership > observation.plan.membership and not observation.is_younger(
        fault, UNKNOWN_MEMBERSHIP_WAIT_SECONDS
    ):
        return True
    if not assigned:
        return fault.kind is not FaultKind.GPU_ERROR
    if fault.kind is FaultKind.RANK_FAILED:
        return _has_lost_peer(fault) and _has_given_up_member(observation)
    return fault.kind is FaultKind.STALLED and _is_stall_over(observation, fault)


def _has_lost_peer(fault: FaultReport) -> bool:
    return not fault.out_of_memory and is_peer_loss(fault.exit_code, fault.error)


def _has_given_up_member(observation: Observation) -> bool:
    """Return whether a lost member is already being replaced.

    The next membership ends the round. Peers whose connections break until then have not crashed.
    """
    return any(view.record.leaving and not view.can_checkpoint for view in observation.members)


def _is_stall_over(observation: Observation, stall: FaultReport) -> bool:
    """Return whether a later round has begun, or the worker has completed steps since."""
    view = observation.find_worker(stall.worker)
    step = view.heartbeat.progress.step if view is not None and view.heartbeat is not None else None
    has_stepped = step is not None and stall.step is not None and stall.step < step
    return 0 < stall.round < observation.progress.round or has_stepped
