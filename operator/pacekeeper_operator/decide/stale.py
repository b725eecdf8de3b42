"""What says nothing new any more: faults of rounds that are over by our own doing, stalls that are over, deaths of
ranks that have lost a peer which is given up."""

from __future__ import annotations

from pacekeeper_analysis.diagnose.crash import lost_a_peer
from pacekeeper_analysis.plan import Stop
from pacekeeper_analysis.reports import Fault, FaultKind

from ..observation import Observation, Policy
from ..state import Draft

UNHEARD_OF_SECONDS = 60.0
"""So long a fault of a membership waits that was never begun, as the bookkeeping has it: that may be restored."""


def step(observation: Observation, _policy: Policy) -> Draft:
    seated = frozenset(member.worker for member in observation.plan.members)
    stale = (fault.name for fault in observation.faults if _says_nothing(observation, fault, fault.worker in seated))
    return observation.draft.settle(tuple(stale))


def _says_nothing(observation: Observation, fault: Fault, seated: bool) -> bool:
    over = observation.state.life.over or observation.plan.stop is not Stop.NO
    if over or 0 < fault.membership < observation.plan.membership:
        return True
    if fault.membership > observation.plan.membership and not observation.is_younger(fault, UNHEARD_OF_SECONDS):
        return True
    if not seated:
        return fault.kind is not FaultKind.GPU_ERROR
    if fault.kind is FaultKind.RANK_FAILED:
        return _lost_a_peer(fault) and _somebody_is_given_up(observation)
    return fault.kind is FaultKind.STALLED and _is_over(observation, fault)


def _lost_a_peer(fault: Fault) -> bool:
    return not fault.out_of_memory and lost_a_peer(fault.exit_code, fault.error)


def _somebody_is_given_up(observation: Observation) -> bool:
    """A member is lost, and its loss is dealt with: the next membership ends the round, and peers whose connections
    break meanwhile are no crashes."""
    return any(view.record.leaving and not view.trains for view in observation.members)


def _is_over(observation: Observation, stall: Fault) -> bool:
    """A later round has begun, or its worker has completed steps since."""
    view = observation.worker(stall.worker)
    step = view.heartbeat.step if view is not None and view.heartbeat is not None else 0
    return 0 < stall.round < observation.round or 0 <= stall.step < step
