"""The end of a watched job's incidents. Their outcome is `Observed`, unless a pod was deleted because of them."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.estimator.parameters import EstimatorParameters

from ...api.incident import IncidentCause, IncidentOutcome, compute_saved_seconds
from ...state.desired_state import AvoidableLoss, DesiredState, Incident
from ...state.observation import Observation
from ...state.policy import Policy
from ..stragglers import verify
from . import rounds, slow_links
from .estimated_faults import FAULT_TO_CAUSE, find_fault, update_price


def verify_incidents(observation: Observation, policy: Policy) -> DesiredState:
    """Return the state with the incidents closed that are over, and with the present prices of the others."""
    desired = observation.desired
    for incident in observation.state.incidents.open:
        ended = _end_if_over(observation, incident)
        if ended is not None:
            desired = verify.close_incident(desired.with_incident(ended), ended, policy, observation.now)
            desired = _add_avoidable_loss(desired, ended)
        elif incident.cause in FAULT_TO_CAUSE.values():
            updated = update_price(observation, policy, incident)
            if incident.cause is IncidentCause.SLOW_COMMUNICATION:
                updated = slow_links.name_slow_link(observation, updated)
            desired = desired.with_incident(updated)
    return desired


def _add_avoidable_loss(desired: DesiredState, incident: Incident) -> DesiredState:
    standstill = None if incident.recovered is None else incident.recovered - incident.first_sign
    seconds, before = compute_saved_seconds(incident.remedies, standstill), desired.state.watched.avoidable
    if not seconds or incident.outcome is not IncidentOutcome.OBSERVED:  # a restart has kept it
        return desired
    return desired.with_watched(avoidable=AvoidableLoss(before.seconds + seconds, before.incidents + 1))


def _end_if_over(observation: Observation, incident: Incident) -> Incident | None:
    """Return the incident with its outcome; None: it is not over."""
    if incident.applied is not None:
        return _end_restart_if_over(observation, incident, incident.applied)
    observed = replace(incident, outcome=IncidentOutcome.OBSERVED)
    if observation.state.lifecycle.completed_at is not None:
        return observed
    if incident.cause in FAULT_TO_CAUSE.values():
        return replace(observed, recovered=observation.now) if _is_slowness_over(observation, incident) else None
    if incident.cause is IncidentCause.SLOW_STEPS:
        return replace(observed, recovered=observation.now) if _are_steps_fast(observation, incident) else None
    if incident.cause in verify.PERSISTENCE_CHECKS:
        lasts = verify.PERSISTENCE_CHECKS[incident.cause](observation, incident)
        return None if lasts else replace(observed, recovered=observation.now)
    if incident.cause in (IncidentCause.HANG, IncidentCause.NODE_LOST) and _has_stepped_since(observation, incident):
        return replace(observed, recovered=observation.now, steps_lost=0)
    evaluated = verify.evaluate_round(observation, incident)
    return None if evaluated.recovered is None else replace(evaluated, outcome=IncidentOutcome.OBSERVED)


def _end_restart_if_over(observation: Observation, incident: Incident, applied: float) -> Incident | None:
    """Return the incident with its outcome; None: it is not over. `applied`: when the deletion was decided."""
    if observation.state.lifecycle.completed_at is not None:
        pods = [view.pod for view in observation.workers if view.pod is not None]
        has_succeeded = bool(pods) and all(pod.phase == "Succeeded" for pod in pods)
        return replace(incident, outcome=IncidentOutcome.SUPERSEDED if has_succeeded else IncidentOutcome.FAILED)
    if _has_stepped_since(observation, incident):  # before the pod was deleted
        return replace(incident, recovered=observation.now, steps_lost=0, outcome=IncidentOutcome.SUPERSEDED)
    evaluated = verify.evaluate_round(observation, incident)
    if evaluated.recovered is not None:
        return evaluated
    is_late = observation.now - applied > rounds.MAX_RESTART_GAP_SECONDS
    # Ranks that still stand in pods from before were not restarted. Pods that wait for a node are no reason to judge.
    pods = [view.pod for view in observation.members if view.alive and view.pod is not None]
    remain = observation.progress.round == incident.round and any(pod.created_at < applied for pod in pods)
    return replace(incident, outcome=IncidentOutcome.INEFFECTIVE) if is_late and remain else None


def _has_stepped_since(observation: Observation, incident: Incident) -> bool:
    """Return whether the job has gone on by itself, in the same round, with all of its ranks.

    A report may be the first one of steps from before the hang.
    """
    progress, last_step = observation.progress, incident.last_step
    reports = [heartbeat.progress for heartbeat in progress.heartbeats]
    is_complete = len(reports) == len(observation.plan.members) and progress.round == incident.round
    return is_complete and all(
        report.step is not None
        and report.step > (-1 if last_step is None else last_step)
        and (report.step_ended_at is None or report.step_ended_at > incident.detected)
        for report in reports
    )


def _are_steps_fast(observation: Observation, incident: Incident) -> bool:
    """Return whether all ranks are as fast as in their early steps again, or a later round has begun."""
    slowdown = observation.metrics.uniform_slowdown
    is_fast = slowdown is not None and slowdown < observation.job.spec.detection.straggler_slowdown
    return is_fast or observation.progress.round > incident.round


def _is_slowness_over(observation: Observation, incident: Incident) -> bool:
    """Return whether the estimator excludes the fault, or a later round has begun. Without it, the fault lasts."""
    if observation.progress.round > incident.round:
        return True
    fault = find_fault(observation, incident.cause)
    if fault is None:
        return False
    is_other = incident.rank is not None and fault.rank != incident.rank
    return is_other or fault.probability < EstimatorParameters().doubt_probability
