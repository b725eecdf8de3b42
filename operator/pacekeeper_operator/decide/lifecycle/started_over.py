"""Training that started over: a round began from the start although the job had completed steps.

The job trains on, so nothing is done about it. The Incident names the likely cause, and what keeps the state next time.
"""

from __future__ import annotations

from ...api.incident import IncidentCause, IncidentClass
from ...formatting import shorten_text
from ...pods.manifests import identify_checkpoint_folder
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision

MAX_CHECKPOINT_ERROR_CHARACTERS = 300


def check_started_over(observation: Observation, policy: Policy) -> Decision | None:  # noqa: ARG001
    """Record that the present round began from the start although an earlier one had completed steps.

    Of a script that does not report from which step it continued, nothing is known. Steps before the first checkpoint
    is due are lost as the job's owner has chosen; the Incident of the fault counts them.
    """
    progress, earlier_step = observation.progress, observation.state.lifecycle.earlier_step
    if progress.resumed_step != 0 or progress.training_since is None:
        return None
    if earlier_step is None or earlier_step < observation.job.spec.checkpoint.every_steps:
        return None
    cause = _find_likely_cause(observation)
    message = (
        f"round {progress.round} began from the start, although the job had completed step {earlier_step}: {cause}"
    )
    return Decision(
        IncidentKey(IncidentCause.STARTED_OVER, progress.round),
        IncidentClass.APPLICATION,
        message,
        progress.training_since,
        evidence=(message,),
        live=True,
        last_step=earlier_step,
    )


def _find_likely_cause(observation: Observation) -> str:
    """Return the likely cause, and the remedy."""
    checkpoint, progress = observation.job.spec.checkpoint, observation.progress
    errors = (view.heartbeat.checkpoint.error for view in observation.members if view.heartbeat is not None)
    error = shorten_text(next(filter(None, errors), ""), MAX_CHECKPOINT_ERROR_CHARACTERS)
    if error:
        return f"checkpoints could not be saved ({error})"
    if progress.checkpoint_step is not None:
        return (
            f"the ranks found a checkpoint of step {progress.checkpoint_step}, and did not load it. Call job.restore "
            "with all objects that the job trains with before its first step"
        )
    if checkpoint.read_only:
        return "spec.checkpoint.readOnly is set, so the job saves no checkpoints. Remove it from a job that trains"
    if not (checkpoint.uri or checkpoint.volume_claim_name or identify_checkpoint_folder(observation.job)):
        return (
            f"spec.checkpoint.path ({checkpoint.path}) is probably on no volume that outlives a pod. Set "
            "spec.checkpoint.uri or spec.checkpoint.volumeClaimName"
        )
    return (
        "the ranks found no checkpoint. Check that the folder of spec.checkpoint was not emptied or exchanged, and "
        "that the script calls job.restore before its first step"
    )
