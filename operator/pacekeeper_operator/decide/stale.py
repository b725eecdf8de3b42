"""What says nothing new any more: faults of rounds that are over by our own doing, stalls that are over, deaths of
ranks that have lost a peer which is given up."""

from __future__ import annotations

from pacekeeper_analysis.diagnose.crash import is_peer_loss
from pacekeeper_analysis.plan import Stop
from pacekeeper_analysis.reports import FaultReport, FaultKind

from ..observation import Observation, Policy
from ..state import DesiredState

UNKNOWN_MEMBERSHIP_WAIT_SECONDS = 60.0
"""So long a fault of a membership waits that was never begun, as the bookkeeping has it: that may be restored."""


def settle_superseded_faults(observation: Observation, _policy: Policy) -> DesiredState:
    seated = frozenset(member.worker for member in observation.plan.members)
    stale = (fault.name for fault in observation.faults if _is_superseded(observation, fault, fault.worker in seated))
    return observation.desired.settle_faults(tuple(stale))


def _is_superseded(observation: Observation, fault: FaultReport, assigned: bool) -> bool:
    over = observation.state.life.is_over or observation.plan.stop is not Stop.NO
    if over or 0 < fault.membership < observation.plan.membership:
        return True
    if fault.membership > observation.plan.membership and not observation.is_younger(fault, UNKNOWN_MEMBERSHIP_WAIT_SECONDS):
        return True
    if not assigned:
        return fault.kind is not FaultKind.GPU_ERROR
    if fault.kind is FaultKind.RANK_FAILED:
        return _has_lost_peer(fault) and _has_given_up_member(observation)
    return fault.kind is FaultKind.STALLED and _is_stall_over(observation, fault)


def _has_lost_peer(fault: FaultReport) -> bool:
    return not fault.out_of_memory and is_peer_loss(fault.exit_code, fault.error)


def _has_given_up_member(observation: Observation) -> bool:
    """A member is lost, and its loss is dealt with: the next membership ends the round, and peers whose connections
    break meanwhile are no crashes."""
    return any(view.record.leaving and not view.can_checkpoint for view in observation.members)


def _is_stall_over(observation: Observation, stall: FaultReport) -> bool:
    """A later round has begun, or its worker has completed steps since."""
    view = observation.find_worker(stall.worker)
    step = view.heartbeat.step if view is not None and view.heartbeat is not None else 0
    return 0 < stall.round < observation.round or 0 <= stall.step < step
