"""The mode that the job's spec requests (`spec.syncMode`); Auto leaves it to the operator."""

from __future__ import annotations

from pacekeeper_analysis.protocol.plan import Stop, SyncMode

from ...api.training_job import RequestedSyncMode
from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ...state.policy import Policy


def apply_requested_sync_mode(observation: Observation, _policy: Policy) -> DesiredState:
    """Return the state in the requested mode. Pauses and caps apply to remedies; this is the user's own choice."""
    desired, requested = observation.desired, observation.job.spec.sync_mode
    local_sgd = desired.state.adaptation.local_sgd
    if observation.plan.stop is not Stop.NO or observation.state.lifecycle.is_over:
        return desired
    if requested is RequestedSyncMode.AUTO and local_sgd is not None:
        return desired
    mode = SyncMode.SYNC if requested is RequestedSyncMode.AUTO else SyncMode(requested)
    if desired.plan.sync_mode is not mode:
        desired = (
            desired.with_plan(sync_mode=mode)
            .with_requests(evidence=None)
            .with_adaptation(
                mode_changes=desired.state.adaptation.mode_changes.with_change(observation.now),
                mode_reason=f"spec.syncMode is {requested}",
                investigation=None,
            )
        )
    return desired if local_sgd is None else desired.with_adaptation(local_sgd=None)
