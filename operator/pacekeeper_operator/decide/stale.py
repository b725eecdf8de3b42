"""What says nothing new any more: faults of rounds that are over by our own doing, stalls that are over."""

from __future__ import annotations

from pacekeeper_analysis.plan import Stop
from pacekeeper_analysis.reports import Fault, FaultKind

from ..observation import Observation, Policy
from ..state import Draft


def step(observation: Observation, _policy: Policy) -> Draft:
    seated = frozenset(member.worker for member in observation.plan.members)
    stale = (fault.name for fault in observation.faults if _says_nothing(observation, fault, fault.worker in seated))
    return observation.draft.settle(tuple(stale))


def _says_nothing(observation: Observation, fault: Fault, seated: bool) -> bool:
    over = observation.state.life.over or observation.plan.stop is not Stop.NO
    if over or 0 < fault.membership < observation.plan.membership:
        return True
    if not seated:
        return fault.kind is not FaultKind.GPU_ERROR
    return fault.kind is FaultKind.STALLED and _is_over(observation, fault)


def _is_over(observation: Observation, stall: Fault) -> bool:
    """A later round has begun, or its worker has completed steps since."""
    view = observation.worker(stall.worker)
    step = view.heartbeat.step if view is not None and view.heartbeat is not None else 0
    return 0 < stall.round < observation.round or 0 <= stall.step < step
