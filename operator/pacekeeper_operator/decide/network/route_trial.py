"""Trials of other routes: a round that was begun for them is measured, and routes that are no better are not kept.

1. A round is due. The connections report their throughput by the present routes, or have had their time to
   (`is_baseline_known`).
2. The first step by the new routes is complete. The measurement begins now, so that it does not include the round
   itself (`begin_trial_measurement`).
3. The job is steady and has reported. `evaluate_route_trial` compares the throughput of connections that have changed
   their route with that before, where it is known, and else the time of a step.
4. The routes are no better. They are not tried again for a while (`conclude_route_trial`).
5. Steps are longer. The earlier routes are restored, once that pays (`check_worse_routes`).

Evidence requests of other modules include the connections at that time (`slow_communication.needs_pair_throughput`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest
from pacekeeper_analysis.stragglers import price

from ...api.incident import IncidentCause, IncidentClass, IncidentOutcome
from ...api.training_job import Remedy
from ...state.desired_state import MAX_FAILED_ROUTES, DesiredState, FailedRoute, Incident, RouteTrial
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ...state.restart_estimates import RestartKind
from ...state.routes import TRIED_ROUTE_TTL_SECONDS
from ..decision import Decision, PlanTraffic
from ..stragglers.pricing import build_plan_traffic_option, build_remedy_prices
from ..stragglers.straggler import get_last_incident_number, is_steady
from . import paths, slow_communication
from .traffic import TRAFFIC_HORIZON_SECONDS

BETTER_ROUTE_RATIO = 1.1
"""Throughput of a better route, × that before, at least."""
STEP_TIME_NOISE = 0.02
"""Share by which the step time must change to count as changed."""
THROUGHPUT_WAIT_SECONDS = 30.0
"""Time that the connections may take to report their throughput. Afterwards, the step time alone decides."""
ROUTE_TRIAL_MEASURE_SECONDS = 120.0
REROUTE_EVIDENCE_TTL_SECONDS = 30.0
"""Time in which the connections are not asked again before a round."""
ROUTE_EVIDENCE_PERIOD_SECONDS = 5.0
"""Time between two requests of this module: a window of the connections' statistics."""
ROUTE_EVIDENCE_KIND = "routes"
"""First part of the names of this module's requests."""


def is_baseline_known(observation: Observation) -> bool:
    """Return whether the connections have reported their throughput by the present routes, or had the time to."""
    requested_at = observation.requests.connections_requested_at
    return slow_communication.has_link_evidence(observation) or (
        requested_at is not None
        and slow_communication.REROUTE_EVIDENCE_WAIT_SECONDS
        < observation.now - requested_at
        <= REROUTE_EVIDENCE_TTL_SECONDS
    )


def begin_trial_measurement(desired: DesiredState, incident: Incident) -> DesiredState:
    """Return the state at the first step by other routes, with the cost of their round. The measurement begins."""
    trial = desired.state.adaptation.route_trial
    assert trial is not None
    assert incident.recovered is not None
    seconds = incident.recovered - incident.decided
    lost = desired.state.budget.lost_seconds + seconds
    measurements = desired.state.budget.measurements
    if incident.measured_cost is not None:  # otherwise, rounds in between have failed
        measurements = measurements.add_restart(RestartKind.SAME_WORKERS, seconds)
    desired = desired.with_budget(lost_seconds=lost, measurements=measurements)
    return desired.with_adaptation(route_trial=replace(trial, since=incident.recovered))


def evaluate_route_trial(observation: Observation, incident: Incident, trial: RouteTrial) -> Incident:
    """Return the incident with what is known since its round's first step; with an outcome once that is enough."""
    if observation.plan.membership != trial.membership or observation.plan.sync_mode is not trial.sync_mode:
        return replace(
            incident, outcome=IncidentOutcome.SUPERSEDED, remedy_result="the job has changed before it was measured"
        )
    result, before = _measure_trial(observation, trial), incident.slowdown_before or 1.0
    if result is None:
        has_time = trial.since is not None and observation.now - trial.since <= ROUTE_TRIAL_MEASURE_SECONDS
        if has_time or observation.metrics.unreported_members:
            return incident
        return replace(incident, outcome=IncidentOutcome.MITIGATED, remedy_result="their effect could not be measured")
    after = max(1.0, before * result.step_time_ratio)
    limit = observation.job.spec.detection.straggler_slowdown
    outcome = IncidentOutcome.RECOVERED if after < limit else IncidentOutcome.MITIGATED
    return replace(
        incident,
        slowdown_after=after,
        measured_gain=(price.compute_loss_rate(before) - price.compute_loss_rate(after)) * TRAFFIC_HORIZON_SECONDS,
        outcome=outcome if result.is_better else IncidentOutcome.INEFFECTIVE,
        remedy_result=f"{result.summary}: "
        f"{'kept' if result.is_better else 'no better, and not tried again for a while'}",
    )


def conclude_route_trial(
    observation: Observation, desired: DesiredState, incident: Incident, trial: RouteTrial
) -> DesiredState:
    """Return the state with what follows from the outcome for later routes."""
    result = _measure_trial(observation, trial) if incident.outcome is IncidentOutcome.INEFFECTIVE else None
    if result is None:
        return desired.with_adaptation(route_trial=None)
    failed = tuple(
        FailedRoute(observation.now, change.source, change.destination, change.spine, change.draw)
        for change in trial.changes
    )
    is_worse = result.step_time_ratio > 1 + STEP_TIME_NOISE and trial.changes
    return desired.with_adaptation(
        failed_routes=(*desired.state.adaptation.failed_routes, *failed)[-MAX_FAILED_ROUTES:],
        route_trial=replace(trial, slowdown=result.step_time_ratio) if is_worse else None,
    )


def advance_route_trial(observation: Observation, policy: Policy) -> DesiredState:
    """Ask for the connections if they are to be measured and no request is pending, and drop what is too old."""
    desired, now, adaptation = observation.desired, observation.now, observation.state.adaptation
    remaining = tuple(route for route in adaptation.failed_routes if now - route.at < TRIED_ROUTE_TTL_SECONDS)
    if remaining != adaptation.failed_routes:
        desired = desired.with_adaptation(failed_routes=remaining)
    if adaptation.route_trial is not None and _is_trial_over(observation, adaptation.route_trial):
        desired = desired.with_adaptation(route_trial=None)
    requested_at = observation.requests.connections_requested_at
    is_requested = (
        requested_at is not None and now - requested_at <= REROUTE_EVIDENCE_TTL_SECONDS
    ) or slow_communication.has_link_evidence(observation)
    if (
        not is_requested
        and policy.applies_remedies
        and is_steady(observation)
        and paths.get_due_reroute(observation) is not None
    ):
        desired = desired.with_requests(connections_requested_at=now)
    return _request_link_evidence(observation.with_desired(desired))


def check_worse_routes(observation: Observation, policy: Policy) -> Decision | None:
    """Decide to restore the earlier routes if steps are longer and have lost by now what a round costs."""
    trial, step_seconds = observation.state.adaptation.route_trial, observation.progress.step_seconds
    if (
        trial is None
        or trial.slowdown is None
        or trial.since is None
        or trial.step_seconds is None
        or step_seconds is None
        or trial.membership != observation.plan.membership
        or not is_steady(observation)
    ):
        return None
    slowdown = min(trial.slowdown, step_seconds / trial.step_seconds)  # the slowdown may be over
    if paths.restore_paths(observation, trial.changes) == observation.plan.paths:
        return None
    choice = price.choose_remedy(
        (build_plan_traffic_option(observation, policy),),
        slowdown=slowdown,
        lost_seconds=(observation.now - trial.since) * price.compute_loss_rate(slowdown),
        remaining_seconds=TRAFFIC_HORIZON_SECONDS,
    )
    if choice.chosen is None:
        return None
    incident_key = IncidentKey(IncidentCause.SLOW_COMMUNICATION, observation.progress.round)
    return Decision(
        incident_key=replace(incident_key, occurrence=1 + get_last_incident_number(observation, incident_key)),
        class_=IncidentClass.PERFORMANCE,
        message=f"steps take {slowdown:.2f} × as long by the routes that were tried: the earlier routes are restored",
        first_sign=trial.since,
        actions=(PlanTraffic(revert=True),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=build_remedy_prices(choice.prices, choice.chosen),
        last_step=observation.progress.step,
        slowdown_before=slowdown,
        slowdown_after=1.0,
        predicted_gain=choice.chosen.gain_seconds,
    )


def _request_link_evidence(observation: Observation) -> DesiredState:
    """Request the connections if no other request is pending; again if the answers were not sufficient."""
    desired, now = observation.desired, observation.now
    requests = desired.requests
    request, requested_at = requests.evidence_name, requests.connections_requested_at
    if not slow_communication.needs_pair_throughput(desired, now):
        return desired.with_requests(evidence=None) if request.startswith(ROUTE_EVIDENCE_KIND) else desired
    again = (
        request.startswith(ROUTE_EVIDENCE_KIND)
        and slow_communication.has_link_evidence(observation)
        and (requested_at is None or now - requested_at >= ROUTE_EVIDENCE_PERIOD_SECONDS)
    )
    if (request and not again) or desired.state.adaptation.investigation is not None or not is_steady(observation):
        return desired
    name = requests.build_next_name(ROUTE_EVIDENCE_KIND, observation.nonce)
    return desired.with_requests(
        evidence=EvidenceRequest(name, (EvidencePart.WINDOWS, EvidencePart.LINKS)),
        issued=requests.issued + 1,
        connections_requested_at=now,
    )


@dataclass(frozen=True)
class _RouteTrialResult:
    step_time_ratio: float  # the step time over that before
    throughput_ratio: float | None  # the median throughput of the connections over that before; None: not known
    summary: str

    @property
    def is_better(self) -> bool:
        return (
            self.step_time_ratio < 1 - STEP_TIME_NOISE
            if self.throughput_ratio is None
            else self.throughput_ratio >= BETTER_ROUTE_RATIO
        )


def _measure_trial(observation: Observation, trial: RouteTrial) -> _RouteTrialResult | None:
    """Return the result of the trial; None: not known yet."""
    step_seconds = observation.progress.step_seconds
    if trial.since is None or trial.step_seconds is None or step_seconds is None or not is_steady(observation):
        return None
    step_time_ratio = step_seconds / trial.step_seconds
    steps_text = f"steps took {trial.step_seconds:.3g} s before, and {step_seconds:.3g} s now"
    throughputs = slow_communication.measure_pair_throughputs(observation)
    pairs = [
        (c, throughputs[c.source, c.destination]) for c in trial.changes if (c.source, c.destination) in throughputs
    ]
    measured = [
        (change.bytes_per_second, throughput.bytes_per_second, change)
        for change, throughput in pairs
        if change.bytes_per_second is not None
    ]
    if measured:
        before, now, change = min(measured, key=lambda rates: rates[0])
        slowest_flow = f"from rank {change.source} to rank {change.destination}"
        rates_text = f"{before / 1e6:.3g} MB/s before, and {now / 1e6:.3g} MB/s now"
        throughput_ratio = median(now / before for before, now, _ in measured)
        return _RouteTrialResult(step_time_ratio, throughput_ratio, f"{slowest_flow} {rates_text}; {steps_text}")
    awaited = trial.has_rates and observation.now - trial.since <= THROUGHPUT_WAIT_SECONDS
    return None if awaited else _RouteTrialResult(step_time_ratio, None, steps_text)


def _is_trial_over(observation: Observation, trial: RouteTrial) -> bool:
    """Return whether the trial is over.

    Another membership takes other routes, the earlier routes are in force again, or the time to restore them is over.
    """
    if trial.membership != observation.plan.membership:
        return True
    if not trial.incident:
        return observation.progress.training_since is not None
    if trial.slowdown is None or trial.since is None:
        return False
    return observation.now - trial.since > TRIED_ROUTE_TTL_SECONDS
