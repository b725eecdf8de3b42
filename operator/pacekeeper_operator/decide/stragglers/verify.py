"""The end of open incidents, and their cost: measured, not assumed."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.stragglers import price
from pacekeeper_analysis.stragglers.windows import MIN_COMMON_STEPS

from ...api.incident import IncidentCause, IncidentClass, IncidentOutcome
from ...api.training_job import RemediationMode, Remedy
from ...state import sync_mode_changes
from ...state.desired_state import MAX_PAST_INCIDENTS, DesiredState, Incident, PastIncident, RouteTrial
from ...state.observation import Observation
from ...state.policy import Policy
from ..failures import gpu_warning, start_failed
from ..lifecycle import lifecycle, restart_breakdown
from ..network import route_trial
from ..nodes import node_leaving
from .straggler import get_window_steps, is_steady

REMEDY_MEASURE_SECONDS = 120.0
"""A live remedy that has not shown in the step time by then has not helped."""
REMEDY_SETTLE_WINDOWS = 1.5
"""Windows after a live change from which the metrics cover only the time since."""
SHARES_SETTLE_SECONDS = 2.0
"""Least time with new shares that shows their effect, in addition to MIN_COMMON_STEPS."""
HELPED_RATIO = 0.98
"""Ratio of two slowdowns. A smaller change is noise."""
GAIN_HORIZON_SECONDS = 600.0
"""Horizon of gains where the fault's duration is not known."""
PERSISTENCE_CHECKS = {
    IncidentCause.GPU_WARNING: gpu_warning.is_still_warned,
    IncidentCause.NODE_LEAVING: node_leaving.is_still_leaving,
}
"""Checks of whether an incident's reason to move a worker lasts, while nothing could be done about it."""


def verify_incidents(observation: Observation, policy: Policy) -> DesiredState:
    """Return the state with its incidents updated, and closed if they are over."""
    desired = observation.desired
    for incident in observation.state.incidents.open:
        updated = evaluate_incident(observation, incident)
        if updated == incident:
            continue
        desired = desired.with_incident(updated)
        trial = _get_route_trial(observation, updated)
        if trial is not None and updated.live and not incident.live:
            desired = route_trial.begin_trial_measurement(desired, updated)
        if updated.outcome is not None:
            desired = _revert_remedy(desired, updated, observation) if updated.live and trial is None else desired
            desired = (
                desired if trial is None else route_trial.conclude_route_trial(observation, desired, updated, trial)
            )
            desired = _close_incident(desired, updated, policy, observation.now)
    return desired


def evaluate_incident(observation: Observation, incident: Incident) -> Incident:
    """Return the incident with what is known by now; with an outcome once it is over."""
    state = observation.state
    if state.lifecycle.failed_reason:
        return replace(incident, outcome=IncidentOutcome.FAILED)
    if observation.job.spec.suspend or state.lifecycle.completed_at is not None:
        return replace(incident, outcome=IncidentOutcome.SUPERSEDED)
    if incident.mode is RemediationMode.RECOMMEND:
        return replace(incident, outcome=IncidentOutcome.RECOMMENDED)
    newer = start_failed.newest_incident(observation) if start_failed.is_about_start(incident) else None
    if newer is not None and newer.decided > incident.decided:
        return replace(incident, outcome=IncidentOutcome.SUPERSEDED)
    if incident.cause in PERSISTENCE_CHECKS:
        return _evaluate_move(observation, incident)
    trial = _get_route_trial(observation, incident)
    if incident.live:
        return (
            _evaluate_live_remedy(observation, incident)
            if trial is None
            else route_trial.evaluate_route_trial(observation, incident, trial)
        )
    evaluated = _evaluate_round(observation, incident)
    # A round for other routes is over once their value is known.
    return evaluated if evaluated.outcome is None or trial is None else replace(evaluated, outcome=None, live=True)


def _get_route_trial(observation: Observation, incident: Incident) -> RouteTrial | None:
    """Return the trial of the routes for which this incident's round was begun."""
    trial = observation.state.adaptation.route_trial
    return trial if trial is not None and trial.incident == incident.name else None


def _evaluate_move(observation: Observation, incident: Incident) -> Incident:
    """End the incident once its worker holds no ranks and the others have gone on, or once its reason is gone."""
    if incident.applied is None:
        closed = replace(incident, recovered=observation.now, outcome=IncidentOutcome.RECOVERED)
        return incident if PERSISTENCE_CHECKS[incident.cause](observation, incident) else closed
    holds_ranks = any(member.worker == incident.worker for member in observation.plan.members)
    if incident.rank is None and not holds_ranks:
        return replace(incident, recovered=observation.now, steps_lost=0, outcome=IncidentOutcome.RECOVERED)
    return incident if holds_ranks else _evaluate_round(observation, incident)


def _evaluate_round(observation: Observation, incident: Incident) -> Incident:
    """End the incident once all members have completed the first step of a later round."""
    since = observation.progress.training_since
    if since is None or observation.progress.round <= incident.round:
        return incident
    heartbeats = [view.heartbeat for view in observation.members if view.heartbeat is not None]
    restored_step = min((heartbeat.start.restored_step or 0 for heartbeat in heartbeats), default=0)
    steps_lost = 0 if incident.last_step is None else max(0, incident.last_step - restored_step)
    recovered = max(since, incident.decided)
    breakdown = restart_breakdown.break_down_restart(
        recovered - incident.first_sign, heartbeats, observation.plan.world_size
    )
    return replace(
        incident, recovered=recovered, steps_lost=steps_lost, restart=breakdown, outcome=IncidentOutcome.RECOVERED
    )


def _evaluate_live_remedy(observation: Observation, incident: Incident) -> Incident:
    """End the incident once a whole window of steps with the new strategy has been measured."""
    if awaits_worker(incident) and not lifecycle.is_complete(observation):
        return incident
    if incident.class_ is not IncidentClass.PERFORMANCE:
        return replace(incident, recovered=observation.now, outcome=IncidentOutcome.RECOVERED)
    if incident.remedy is None:
        if _is_link_probed(observation, incident):
            return incident
        return replace(incident, recovered=observation.now, outcome=IncidentOutcome.INEFFECTIVE)
    if observation.progress.round > incident.round:
        return replace(incident, recovered=observation.now, steps_lost=0, outcome=IncidentOutcome.SUPERSEDED)
    if observation.progress.refusal:
        evidence = (*incident.evidence, f"the ranks do not follow the plan: {observation.progress.refusal}")
        return replace(incident, evidence=evidence, outcome=IncidentOutcome.INEFFECTIVE)
    window = REMEDY_SETTLE_WINDOWS * get_window_steps(observation)
    before, after = incident.slowdown_before or 1.0, _measure_slowdown(observation, incident)
    if after is not None and _has_settled(observation, incident):
        after = max(1.0, after)
        limit = observation.job.spec.detection.straggler_slowdown
        outcome = IncidentOutcome.RECOVERED if after < limit else IncidentOutcome.MITIGATED
        return replace(
            incident,
            recovered=observation.now,
            steps_lost=0,
            slowdown_after=after,
            measured_gain=(price.compute_loss_rate(before) - price.compute_loss_rate(after)) * GAIN_HORIZON_SECONDS,
            outcome=outcome if _has_helped(before, after) else IncidentOutcome.INEFFECTIVE,
        )
    patience = max(REMEDY_MEASURE_SECONDS, 2 * window * (observation.progress.step_seconds or 0.0))
    if observation.now - incident.decided > patience and not observation.metrics.unreported_members:
        return replace(incident, outcome=IncidentOutcome.INEFFECTIVE)
    return incident


def awaits_worker(incident: Incident) -> bool:
    """Return whether the incident is about a given-up worker without ranks: it is over once another one is there."""
    is_replaced = incident.remedy == Remedy.REPLACE_WORKER and incident.applied is not None
    return (
        incident.live
        and is_replaced
        and incident.cause in (IncidentCause.WORKER_LOST, IncidentCause.WORKER_UNRESPONSIVE)
    )


def _has_helped(before: float, after: float) -> bool:
    """Return whether the slowdown has fallen. If all of it is noise, it only must not have grown."""
    return HELPED_RATIO * after <= before if _is_noise(before) else after < HELPED_RATIO * before


def _is_noise(slowdown: float) -> bool:
    return HELPED_RATIO * slowdown <= 1.0


def _is_link_probed(observation: Observation, incident: Incident) -> bool:
    """Return whether the incident's remedy, if there is any, waits for the result of a link probe."""
    link_check = observation.state.adaptation.link_check
    return link_check is not None and bool(link_check.probe) and link_check.incident == incident.name


def _has_settled(observation: Observation, incident: Incident) -> bool:
    """Return whether the metrics cover the time since the remedy.

    With other shares, they include the number of steps that they cover.
    """
    if incident.remedy == Remedy.REBALANCE and observation.plan.shares is not None:
        seconds = observation.metrics.steps * (observation.progress.step_seconds or 0.0)
        enough = observation.metrics.steps >= MIN_COMMON_STEPS and seconds >= SHARES_SETTLE_SECONDS
        return enough and observation.now > incident.decided  # before, they were compared with another plan
    needed_steps = REMEDY_SETTLE_WINDOWS * get_window_steps(observation)
    return observation.progress.count_steps_since(incident.last_step) >= needed_steps


def _measure_slowdown(observation: Observation, incident: Incident) -> float | None:
    """Return the slowdown that remains; None: not known yet.

    Shares are judged by the ranks' own work, all other remedies by the samples per second. Shares against mere noise
    are judged by the latter, too: own work shows less effect than chance there.
    """
    metrics = observation.metrics
    if incident.remedy == Remedy.REBALANCE and not _is_noise(incident.slowdown_before or 1.0):
        return metrics.peer_slowdown
    if not metrics.throughput or not incident.reference_seconds or not is_steady(observation):
        return None
    return (observation.progress.global_batch or 0) / metrics.throughput / incident.reference_seconds


def _revert_remedy(desired: DesiredState, incident: Incident, observation: Observation) -> DesiredState:
    """Return the state without a mode that has not helped, or without what the ranks cannot follow."""
    if incident.outcome is not IncidentOutcome.INEFFECTIVE or incident.remedy is None:
        return desired
    local_sgd = desired.state.adaptation.local_sgd
    if local_sgd is None or local_sgd.incident != incident.name:
        if not observation.progress.refusal:
            return desired
        if incident.remedy == Remedy.REBALANCE:
            desired = desired.with_adaptation(
                shares_refusal=observation.progress.refusal, suppressed_relative_time=None
            )
        return desired.with_plan(shares=None, gc_every=0, sequence_cost=None)
    if observation.progress.refusal:
        return sync_mode_changes.reject_local_sgd(desired, observation.progress.refusal, observation.now)
    return sync_mode_changes.give_up_local_sgd(desired, f"{desired.plan.sync_mode} has not helped", observation.now)


def _close_incident(desired: DesiredState, incident: Incident, policy: Policy, now: float) -> DesiredState:
    state = desired.state
    was_applied = incident.outcome is not IncidentOutcome.RECOMMENDED
    seconds = (incident.recovered or now) - incident.first_sign
    new_round = incident.outcome is IncidentOutcome.RECOVERED and not incident.live
    past = PastIncident(
        cause=incident.cause,
        at=incident.detected,
        seconds=seconds,
        rank=incident.rank,
        worker=incident.worker,
        node=incident.node,
        class_=incident.class_,
    )
    recent = tuple(item for item in state.incidents.past if item.at > now - policy.restart_window)
    incidents = state.incidents
    if was_applied:
        desired = desired.with_incidents(closed=(*incidents.closed, incident.name)[-MAX_PAST_INCIDENTS:])
    else:
        desired = desired.with_incidents(recommended=(*incidents.recommended, incident.name)[-MAX_PAST_INCIDENTS:])
    desired = desired.with_incidents(past=(*recent, past)[-MAX_PAST_INCIDENTS:])
    if not new_round:
        return desired
    stopped_seconds = 0.0 if incident.cause is IncidentCause.STRAGGLER else seconds  # it trained, if slowly
    desired = desired.with_budget(lost_seconds=state.budget.lost_seconds + stopped_seconds)
    round_seconds = _compute_round_seconds(incident, state.placement.begun_at)
    if incident.remedy == Remedy.REPLACE_WORKER:
        return desired.with_budget(spare_restart_seconds=round_seconds)
    return desired.with_budget(restart_seconds=round_seconds)


def _compute_round_seconds(incident: Incident, begun_at: float | None) -> float | None:
    """Return the seconds that the remedy took, without the wait for a worker that was missing at the decision.

    None: clocks that differ do not show it. Launchers restart crashed ranks before the operator decides anything.
    """
    assert incident.recovered is not None
    decided = incident.decided if begun_at is None else max(incident.decided, begun_at)
    if incident.cause is IncidentCause.CRASH:
        return incident.recovered - incident.first_sign
    return incident.recovered - decided if incident.recovered > decided else None
