"""The mode that the job's spec wants (`spec.syncMode`); Auto leaves it to the operator."""

from __future__ import annotations

from pacekeeper_analysis.plan import Stop, SyncMode

from ..api import RequestedSyncMode
from ..observation import Observation, Policy
from ..state import DesiredState


def apply_requested_sync_mode(observation: Observation, _policy: Policy) -> DesiredState:
    """The draft in the wanted mode. Pauses and caps are about remedies; this is the user's own choice."""
    draft, wanted = observation.desired, observation.job.spec.sync_mode
    own = draft.state.adaptation.local_sgd
    if observation.plan.stop is not Stop.NO or observation.state.life.is_over:
        return draft
    if wanted is RequestedSyncMode.AUTO and own is not None:
        return draft
    mode = SyncMode.SYNC if wanted is RequestedSyncMode.AUTO else SyncMode(wanted)
    if draft.plan.sync_mode is not mode:
        draft = draft.with_plan(sync_mode=mode, evidence_request="").with_adaptation(
            mode_changes=draft.state.adaptation.mode_changes.with_change(observation.now),
            mode_reason=f"spec.syncMode is {wanted}",
            suspicion=None,
        )
    return draft if own is None else draft.with_adaptation(local_sgd=None)
