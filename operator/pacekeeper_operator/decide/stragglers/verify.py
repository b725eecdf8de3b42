"""The end of open incidents, and their cost: measured, not assumed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.stragglers import price
from pacekeeper_analysis.stragglers.windows import MIN_COMMON_STEPS

from ...api.incident import IncidentCause, IncidentClass, IncidentOutcome
from ...api.training_job import RemediationMode, Remedy
from ...state import sync_mode_changes
from ...state.desired_state import MAX_PAST_INCIDENTS, DesiredState, Incident, PastIncident, RouteTrial
from ...state.observation import Observation
from ...state.policy import Policy
from ...state.restart_estimates import RestartKind
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
MAX_CHANCE_ERRORS = 2.0
"""A difference of two mean step times that is larger than this many standard errors is not chance."""
UNMEASURED_RATIO_ERROR = 0.01
"""Standard error of the ratio of two step times whose noise is not known."""
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
        if not incident.live and incident.recovered is None and updated.recovered is not None:
            desired = (
                _record_round(desired, updated)
                if trial is None
                else route_trial.begin_trial_measurement(desired, updated)
            )
        if updated.outcome is not None:
            desired = _revert_remedy(desired, updated, observation) if updated.live and trial is None else desired
            desired = (
                desired if trial is None else route_trial.conclude_route_trial(observation, desired, updated, trial)
            )
            desired = close_incident(desired, updated, policy, observation.now)
    return desired


def evaluate_incident(observation: Observation, incident: Incident) -> Incident:
    """Return the incident with what is known by now; with an outcome once it is over."""
    state = observation.state
    if state.lifecycle.failed_reason:
        return replace(incident, outcome=IncidentOutcome.FAILED)
    if observation.job.spec.suspend or state.lifecycle.completed_at is not None:
        return replace(incident, outcome=IncidentOutcome.SUPERSEDED)
    if incident.cause is IncidentCause.STARTED_OVER:
        return replace(
            incident, recovered=observation.now, steps_lost=incident.last_step, outcome=IncidentOutcome.OBSERVED
        )
    if incident.mode is RemediationMode.RECOMMEND:
        return replace(incident, outcome=IncidentOutcome.RECOMMENDED)
    newer = start_failed.newest_incident(observation) if start_failed.is_about_start(incident) else None
    if newer is not None and newer.decided > incident.decided:
        return replace(incident, outcome=IncidentOutcome.SUPERSEDED)
    if incident.cause in PERSISTENCE_CHECKS:
        return evaluate_move(observation, incident)
    trial = _get_route_trial(observation, incident)
    if incident.live and trial is not None:
        return route_trial.evaluate_route_trial(observation, incident, trial)
    if incident.live:
        has_begun_round = incident.recovered is not None
        return (_evaluate_new_round if has_begun_round else _evaluate_live_remedy)(observation, incident)
    evaluated = evaluate_round(observation, incident)
    # A round for other routes is over once their value is known.
    return evaluated if evaluated.outcome is None or trial is None else replace(evaluated, outcome=None, live=True)


def _get_route_trial(observation: Observation, incident: Incident) -> RouteTrial | None:
    """Return the trial of the routes for which this incident's round was begun."""
    trial = observation.state.adaptation.route_trial
    return trial if trial is not None and trial.incident == incident.name else None


def evaluate_move(observation: Observation, incident: Incident) -> Incident:
    """End the incident once its worker holds no ranks and the others have gone on, or once its reason is gone."""
    if incident.applied is None:
        closed = replace(incident, recovered=observation.now, outcome=IncidentOutcome.RECOVERED)
        return incident if PERSISTENCE_CHECKS[incident.cause](observation, incident) else closed
    holds_ranks = any(member.worker == incident.worker for member in observation.plan.members)
    if incident.rank is None and not holds_ranks:
        return replace(incident, recovered=observation.now, steps_lost=0, outcome=IncidentOutcome.RECOVERED)
    return incident if holds_ranks else evaluate_round(observation, incident)


def evaluate_round(observation: Observation, incident: Incident) -> Incident:
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
    training = replace(
        incident,
        recovered=recovered,
        steps_lost=steps_lost,
        restart=breakdown,
        measured_cost=(
            _measure_cost(observation, incident, recovered, restored_step)
            if _is_first_round_since(observation, incident)
            else None
        ),
        outcome=IncidentOutcome.RECOVERED,
    )
    # A job that was only slow has recovered once its steps are faster.
    is_measured = incident.class_ is IncidentClass.PERFORMANCE and incident.reference_seconds is not None
    return replace(training, outcome=None, live=True) if is_measured else training


def _is_first_round_since(observation: Observation, incident: Incident) -> bool:
    """Return whether the present round is the first one since the incident.

    If rounds between them have failed, for example because the storage was away, the time until this one's first step
    is not the cost of one restart.
    """
    return observation.progress.round == incident.round + 1


def _measure_cost(observation: Observation, incident: Incident, recovered: float, restored_step: int) -> float:
    """Return the seconds of training from the decision to the first step of the new round.

    They are the time that has passed, without the useful steps in it at their time without this fault. Steps that are
    repeated add to it. Launchers restart crashed ranks before the operator decides.
    """
    since = incident.first_sign if incident.cause is IncidentCause.CRASH else incident.decided
    useful_steps = 1 if incident.last_step is None else restored_step + 1 - incident.last_step
    step_seconds = incident.reference_seconds or observation.progress.step_seconds
    return max(0.0, recovered - since - useful_steps * (step_seconds or 0.0))


def _evaluate_new_round(observation: Observation, incident: Incident) -> Incident:
    """End the incident of a slow job once the steps of its new round have been measured, or cannot be."""
    assert incident.recovered is not None
    ended = replace(incident, outcome=IncidentOutcome.RECOVERED)
    training_since = observation.progress.training_since
    if training_since is not None and training_since > incident.recovered:
        return ended  # a later round
    ratio = _measure_step_time_ratio(observation, incident)
    if ratio is not None:
        return _conclude_measurement(observation, incident, ratio)
    is_late = observation.now - incident.recovered > REMEDY_MEASURE_SECONDS
    return ended if is_late and not observation.metrics.unreported_members else incident


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
    ratio = _measure_step_time_ratio(observation, incident)
    if ratio is not None and (_has_settled(observation, incident) or _shows_gain_early(observation, incident, ratio)):
        return _conclude_measurement(observation, incident, ratio)
    window = REMEDY_SETTLE_WINDOWS * get_window_steps(observation)
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


@dataclass(frozen=True)
class StepTimeRatio:
    """The mean step time since a remedy, over that before it, for the same work: a step of the whole job."""

    value: float
    error: float  # standard error

    @property
    def is_gain(self) -> bool:
        """Whether steps are faster by more than chance."""
        return self.value < 1.0 - MAX_CHANCE_ERRORS * self.error

    def has_helped(self, predicted: float) -> bool:
        """Return whether the remedy has helped. If as little was `predicted` as chance is, no growth suffices."""
        can_show = predicted < 1.0 - MAX_CHANCE_ERRORS * self.error
        return self.is_gain or (not can_show and self.value <= 1.0 + MAX_CHANCE_ERRORS * self.error)


def _measure_step_time_ratio(observation: Observation, incident: Incident) -> StepTimeRatio | None:
    """Return the ratio as far as the metrics show it; None: not known yet."""
    after_seconds, sample = _compute_step_seconds(observation), incident.steps_before
    if after_seconds is None or not is_steady(observation):
        return None
    if sample is not None:
        error = sample.compute_ratio_error(after_seconds, observation.metrics.steps or get_window_steps(observation))
        return StepTimeRatio(after_seconds / sample.mean_seconds, error)
    if not incident.reference_seconds:
        return None
    before_seconds = incident.reference_seconds * (incident.slowdown_before or 1.0)
    return StepTimeRatio(after_seconds / before_seconds, UNMEASURED_RATIO_ERROR)


def _compute_step_seconds(observation: Observation) -> float | None:
    """Return the mean time of a step's worth of samples of the whole job; None: not known."""
    metrics, batch = observation.metrics, observation.progress.global_batch
    if metrics.throughput and batch:
        return batch / metrics.throughput
    return metrics.step_seconds if observation.plan.sync_mode is SyncMode.SYNC else None


def _conclude_measurement(observation: Observation, incident: Incident, ratio: StepTimeRatio) -> Incident:
    """End the incident by what the step times show."""
    before = incident.slowdown_before or 1.0
    after = max(1.0, before * ratio.value)
    predicted_after = incident.predicted_after or 1.0
    limit = observation.job.spec.detection.straggler_slowdown
    outcome = IncidentOutcome.RECOVERED if after < limit else IncidentOutcome.MITIGATED
    saved_rate = price.compute_loss_rate(before) - price.compute_loss_rate(after)
    predicted_rate = price.compute_loss_rate(before) - price.compute_loss_rate(predicted_after)
    is_predicted = incident.predicted_gain is not None and predicted_rate > 0
    horizon = (incident.predicted_gain or 0.0) / predicted_rate if is_predicted else GAIN_HORIZON_SECONDS
    return replace(
        incident,
        recovered=observation.now if incident.recovered is None else incident.recovered,
        steps_lost=incident.steps_lost or 0,
        slowdown_after=after,
        measured_gain=saved_rate * horizon,
        measured_cost=incident.measured_cost or 0.0,
        outcome=outcome if ratio.has_helped(predicted_after / before) else IncidentOutcome.INEFFECTIVE,
    )


def _is_link_probed(observation: Observation, incident: Incident) -> bool:
    """Return whether the incident's remedy, if there is any, waits for the result of a link probe."""
    link_check = observation.requests.link_check
    return link_check is not None and bool(link_check.probe) and link_check.incident == incident.name


def _has_settled(observation: Observation, incident: Incident) -> bool:
    """Return whether the metrics cover a whole window since the remedy, and nothing before it."""
    if observation.plan.shares is not None and incident.remedy == Remedy.REBALANCE and not observation.metrics.steps:
        return False  # some rank still trains with other shares
    needed_steps = REMEDY_SETTLE_WINDOWS * get_window_steps(observation)
    return observation.progress.count_steps_since(incident.last_step) >= needed_steps


def _shows_gain_early(observation: Observation, incident: Incident, ratio: StepTimeRatio) -> bool:
    """Return whether the first steps with other shares, which the metrics count, show that these have helped."""
    if incident.remedy != Remedy.REBALANCE or observation.plan.shares is None or not ratio.is_gain:
        return False
    seconds = observation.metrics.steps * (observation.progress.step_seconds or 0.0)
    enough = observation.metrics.steps >= MIN_COMMON_STEPS and seconds >= SHARES_SETTLE_SECONDS
    return enough and observation.now > incident.decided  # before, they were compared with another plan


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


def close_incident(desired: DesiredState, incident: Incident, policy: Policy, now: float) -> DesiredState:
    state = desired.state
    was_applied = incident.outcome is not IncidentOutcome.RECOMMENDED
    seconds = (incident.recovered or now) - incident.first_sign
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
    return desired.with_incidents(past=(*recent, past)[-MAX_PAST_INCIDENTS:])


def _record_round(desired: DesiredState, incident: Incident) -> DesiredState:
    """Return the state with the cost of the round that has ended this incident's standstill, or its slow steps."""
    assert incident.recovered is not None
    state = desired.state
    measurements, kind = state.budget.measurements, _get_restart_kind(incident)
    seconds, begun_at = _compute_round_seconds(incident, state.placement.begun_at), state.placement.begun_at
    is_measured = incident.measured_cost is not None
    if seconds is not None and is_measured:
        measurements = measurements.add_restart(kind, seconds)
    if kind is RestartKind.EXCHANGE and begun_at is not None and incident.steps_before is not None and is_measured:
        wait_seconds = max(0.0, min(begun_at, incident.recovered) - incident.decided)
        measurements = measurements.add_checkpoint_wait(wait_seconds / incident.steps_before.mean_seconds)
    # A job with a straggler trained, if slowly.
    stopped_seconds = 0.0 if kind is RestartKind.EXCHANGE else incident.recovered - incident.first_sign
    return desired.with_budget(lost_seconds=state.budget.lost_seconds + stopped_seconds, measurements=measurements)


def _get_restart_kind(incident: Incident) -> RestartKind:
    if incident.remedy != Remedy.REPLACE_WORKER:
        return RestartKind.SAME_WORKERS
    return RestartKind.EXCHANGE if incident.class_ is IncidentClass.PERFORMANCE else RestartKind.REPLACEMENT


def _compute_round_seconds(incident: Incident, begun_at: float | None) -> float | None:
    """Return the seconds that the remedy took, without the wait for a worker that was missing at the decision.

    None: clocks that differ do not show it. Launchers restart crashed ranks before the operator decides anything.
    """
    assert incident.recovered is not None
    decided = incident.decided if begun_at is None else max(incident.decided, begun_at)
    if incident.cause is IncidentCause.CRASH:
        return incident.recovered - incident.first_sign
    return incident.recovered - decided if incident.recovered > decided else None
