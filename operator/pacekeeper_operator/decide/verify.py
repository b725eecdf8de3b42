"""Whether an open incident is over, and what it cost: measured, not assumed."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis import price
from pacekeeper_analysis.diagnose.windows import MIN_COMMON_STEPS

from .. import modes
from ..api import IncidentCause, IncidentClass, RemediationMode, IncidentOutcome, Remedy
from ..observation import Observation, Policy
from ..state import MAX_PAST_INCIDENTS, DesiredState, Incident, PastIncident, RouteTrial
from . import gpu_warning, node_leaving, restart, stages, start_failed, verify_ways
from .straggler import is_steady, get_window_steps

REMEDY_MEASURE_SECONDS = 120.0
"""A live remedy that has not shown in the step time by then has not helped."""
REMEDY_SETTLE_WINDOWS = 1.5
"""So many windows after a live change its figures are its own."""
SHARES_SETTLE_SECONDS = 2.0
"""So much of the time with new shares tells what they have mended, and MINIMAL_STEPS."""
HELPED_RATIO = 0.98
"""A slowdown that has changed by less is noise."""
GAIN_HORIZON_SECONDS = 600.0
"""Over which gains are reckoned where nothing is known of the fault's duration."""
PERSISTENCE_CHECKS = {IncidentCause.GPU_WARNING: gpu_warning.is_still_warned, IncidentCause.NODE_LEAVING: node_leaving.is_still_leaving}
"""Of incidents by which a worker is to move: whether the reason lasts, as long as nothing could be done about it."""


def verify_incidents(observation: Observation, policy: Policy) -> DesiredState:
    """The draft with what is known of its incidents by now."""
    draft = observation.desired
    for incident in observation.state.incidents.open:
        now = evaluate_incident(observation, incident)
        if now == incident:
            continue
        draft = draft.with_incident(now)
        trial = _get_route_trial(observation, now)
        if trial is not None and now.live and not incident.live:
            draft = verify_ways.begin_trial_measurement(draft, now)
        if now.outcome is not None:
            draft = _revert_remedy(draft, now, observation) if now.live and trial is None else draft
            draft = draft if trial is None else verify_ways.conclude_route_trial(observation, draft, now, trial)
            draft = _close_incident(draft, now, policy, observation.now)
    return draft


def evaluate_incident(observation: Observation, incident: Incident) -> Incident:
    """The incident with what is known of it by now; with an outcome once it is over."""
    state = observation.state
    if state.life.failed_reason:
        return replace(incident, outcome=IncidentOutcome.FAILED)
    if observation.job.spec.suspend or state.life.completed_at:
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
        return _evaluate_live_remedy(observation, incident) if trial is None else verify_ways.evaluate_route_trial(observation, incident, trial)
    over = _evaluate_round(observation, incident)
    # A round for other ways is over when it is known what they are worth.
    return over if over.outcome is None or trial is None else replace(over, outcome=None, live=True)


def _get_route_trial(observation: Observation, incident: Incident) -> RouteTrial | None:
    """Of the ways that this incident's round was begun for."""
    trial = observation.state.adaptation.way_trial
    return trial if trial is not None and trial.incident == incident.name else None


def _evaluate_move(observation: Observation, incident: Incident) -> Incident:
    """Over when its worker holds no ranks any more and the others have gone on, or the reason is gone."""
    if incident.applied is None:
        over = replace(incident, recovered=observation.now, outcome=IncidentOutcome.RECOVERED)
        return incident if PERSISTENCE_CHECKS[incident.cause](observation, incident) else over
    seated = any(member.worker == incident.worker for member in observation.plan.members)
    if incident.rank is None and not seated:
        return replace(incident, recovered=observation.now, steps_lost=0, outcome=IncidentOutcome.RECOVERED)
    return incident if seated else _evaluate_round(observation, incident)


def _evaluate_round(observation: Observation, incident: Incident) -> Incident:
    """Over when all members have completed the first step of a later round."""
    since = observation.training_since
    if since is None or observation.round <= incident.round:
        return incident
    restored = min(
        (view.heartbeat.restored_step for view in observation.members if view.heartbeat is not None), default=-1
    )
    lost = max(0, incident.last_step - max(restored, 0)) if incident.last_step >= 0 else 0
    recovered = max(since, incident.decided)
    beats = [view.heartbeat for view in observation.members if view.heartbeat is not None]
    parts = restart.break_down_restart(recovered - incident.first_sign, beats, observation.plan.world_size)
    return replace(incident, recovered=recovered, steps_lost=lost, restart=parts, outcome=IncidentOutcome.RECOVERED)


def _evaluate_live_remedy(observation: Observation, incident: Incident) -> Incident:
    """Over when a whole window of steps in the new way to train has been measured."""
    if awaits_worker(incident) and not stages.is_complete(observation):
        return incident
    if incident.class_ is not IncidentClass.PERFORMANCE:
        return replace(incident, recovered=observation.now, outcome=IncidentOutcome.RECOVERED)
    if incident.remedy is None:
        if _is_link_probed(observation, incident):
            return incident
        return replace(incident, recovered=observation.now, outcome=IncidentOutcome.NOT_HELPED)
    if observation.round > incident.round:
        return replace(incident, recovered=observation.now, steps_lost=0, outcome=IncidentOutcome.SUPERSEDED)
    if observation.refusal:
        words = (*incident.evidence, f"the ranks do not follow the plan: {observation.refusal}")
        return replace(incident, evidence=words, outcome=IncidentOutcome.NOT_HELPED)
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
            outcome=outcome if _has_helped(before, after) else IncidentOutcome.NOT_HELPED,
        )
    patience = max(REMEDY_MEASURE_SECONDS, 2 * window * observation.step_seconds)
    if observation.now - incident.decided > patience and not observation.metrics.untold:
        return replace(incident, outcome=IncidentOutcome.NOT_HELPED)
    return incident


def awaits_worker(incident: Incident) -> bool:
    """Return whether it is about a worker without ranks that was given up: it is over when another one is there."""
    is_replaced = incident.remedy == Remedy.REPLACE_WORKER and incident.applied is not None
    return incident.live and is_replaced and incident.cause in (IncidentCause.WORKER_LOST, IncidentCause.WORKER_FROZEN)


def _has_helped(before: float, after: float) -> bool:
    """Slowdowns. Where all of it is no more than noise, no fall shows; but then it must not have become larger."""
    return HELPED_RATIO * after <= before if _is_noise(before) else after < HELPED_RATIO * before


def _is_noise(slowdown: float) -> bool:
    return HELPED_RATIO * slowdown <= 1.0


def _is_link_probed(observation: Observation, incident: Incident) -> bool:
    """Its remedy, if there is any, waits for what a probe of the link tells."""
    seen = observation.state.adaptation.link
    return seen is not None and bool(seen.probe) and seen.incident == incident.name


def _has_settled(observation: Observation, incident: Incident) -> bool:
    """Whether the figures are of the time since. Those of other shares say themselves how many steps they are of."""
    if incident.remedy == Remedy.REBALANCE and observation.plan.shares is not None:
        seconds = observation.metrics.steps * observation.step_seconds
        enough = observation.metrics.steps >= MIN_COMMON_STEPS and seconds >= SHARES_SETTLE_SECONDS
        return enough and observation.now > incident.decided  # before, they were held against another plan
    return observation.step >= incident.last_step + REMEDY_SETTLE_WINDOWS * get_window_steps(observation)


def _measure_slowdown(observation: Observation, incident: Incident) -> float | None:
    """What is left of the slowdown. Shares are judged by the ranks' own work, all else by the samples a second; so are
    shares for what is no more than noise, which own work shows less of than of luck."""
    metrics = observation.metrics
    if incident.remedy == Remedy.REBALANCE and not _is_noise(incident.slowdown_before or 1.0):
        return metrics.behind
    if not metrics.throughput or not incident.reference_seconds or not is_steady(observation):
        return None
    return observation.global_batch / metrics.throughput / incident.reference_seconds


def _revert_remedy(draft: DesiredState, incident: Incident, observation: Observation) -> DesiredState:
    """The plan without a mode that has not helped, or without what the ranks cannot follow."""
    if incident.outcome is not IncidentOutcome.NOT_HELPED or incident.remedy is None:
        return draft
    adaptation = draft.state.adaptation.local_sgd
    if adaptation is None or adaptation.incident != incident.name:
        if not observation.refusal:
            return draft
        if incident.remedy == Remedy.REBALANCE:
            draft = draft.with_adaptation(shares_refusal=observation.refusal, tolerated_pace=0.0)
        return draft.with_plan(shares=None, garbage_every=0, sequence_cost=None)
    if observation.refusal:
        return modes.reject_local_sgd(draft, observation.refusal, observation.now)
    return modes.give_up_local_sgd(draft, f"{draft.plan.sync_mode} has not helped", observation.now)


def _close_incident(draft: DesiredState, incident: Incident, policy: Policy, now: float) -> DesiredState:
    state = draft.state
    acted = incident.outcome is not IncidentOutcome.RECOMMENDED
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
    if acted:
        draft = draft.with_incidents(closed=(*incidents.closed, incident.name)[-MAX_PAST_INCIDENTS:])
    else:
        draft = draft.with_incidents(recommended=(*incidents.recommended, incident.name)[-MAX_PAST_INCIDENTS:])
    draft = draft.with_incidents(past=(*recent, past)[-MAX_PAST_INCIDENTS:])
    if not new_round:
        return draft
    stood = 0.0 if incident.cause is IncidentCause.STRAGGLER else seconds  # it trained, if slowly
    draft = draft.with_budget(lost_seconds=state.budget.lost_seconds + stood)
    took = _compute_round_seconds(incident, state.placement.begun_at)
    if incident.remedy == Remedy.REPLACE_WORKER:
        return draft.with_budget(exchange_seconds=took)
    return draft.with_budget(restart_seconds=took)


def _compute_round_seconds(incident: Incident, begun_at: float) -> float:
    """What the remedy took, without the wait for a worker that was not there yet when it was decided. Crashed ranks are
    restarted by their launchers, before anything is decided here."""
    assert incident.recovered is not None
    if incident.cause is IncidentCause.CRASH:
        return incident.recovered - incident.first_sign
    return max(0.0, incident.recovered - max(incident.decided, begun_at))
