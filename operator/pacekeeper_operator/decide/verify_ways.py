"""Whether other ways are better: a round that was begun for them is measured, and what is no better is not kept.

    a round is due      → the connections tell their pace by the ways so far, or have had their time: `is_baseline_known`
    first step by them  → from then on it is measured: what the round itself took is none of its slowness
    steady, and told    → the pace of the connections that go another way beside that of before, where it is known, and
                          else the time of a step: `judge`
    no better           → not tried again for a while: `conclude`
    steps are longer    → the ways of before come back, once that pays: `check`

Who asks the ranks for something else meanwhile asks for their connections, too (`links.needs_pair_throughput`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from pacekeeper_analysis import price
from pacekeeper_analysis.plan import EvidencePart

from ..api import IncidentCause, IncidentClass, IncidentOutcome, Remedy
from ..decision import Decision, PlanTraffic
from ..observation import Observation, Policy
from ..state import MAX_FAILED_ROUTES, DesiredState, Incident, RouteTrial, FailedRoute
from ..subject import IncidentKey
from . import links, paths
from .pricing import build_plan_traffic_option, build_remedy_prices
from .straggler import get_last_incident_number, is_steady
from .traffic import TRAFFIC_HORIZON_SECONDS

BETTER_ROUTE_RATIO = 1.1
"""× the pace of before, for a way to be better."""
STEP_TIME_NOISE = 0.02
"""Steps that have changed by less are as they were."""
THROUGHPUT_WAIT_SECONDS = 30.0
"""So long the connections may take to tell their pace: afterwards the steps alone say how it goes."""
ROUTE_TRIAL_MEASURE_SECONDS = 120.0
TRIED_ROUTE_TTL_SECONDS = 1800.0
"""So long what was no better is not tried again, and so long the way back is open."""
REROUTE_EVIDENCE_TTL_SECONDS = 30.0
"""Before a round the connections are not asked again within so long."""
ROUTE_EVIDENCE_PERIOD_SECONDS = 5.0
"""Between two questions of our own: a window of the connections' figures."""
ROUTE_EVIDENCE_PREFIX = "ways-"


def is_baseline_known(observation: Observation) -> bool:
    """The connections have told their pace by the ways so far, or have had their time to."""
    ago = observation.now - observation.state.adaptation.ways_asked_at
    return links.has_link_evidence(observation) or links.REROUTE_EVIDENCE_WAIT_SECONDS < ago <= REROUTE_EVIDENCE_TTL_SECONDS


def begin_trial_measurement(draft: DesiredState, incident: Incident) -> DesiredState:
    """With the first step by other ways: what the round has cost, and since when they are measured."""
    trial = draft.state.adaptation.way_trial
    assert trial is not None
    assert incident.recovered is not None
    seconds = incident.recovered - incident.decided
    lost = draft.state.budget.lost_seconds + seconds
    draft = draft.with_budget(lost_seconds=lost, restart_seconds=seconds)
    return draft.with_adaptation(way_trial=replace(trial, since=incident.recovered))


def evaluate_route_trial(observation: Observation, incident: Incident, trial: RouteTrial) -> Incident:
    """The incident with what is known by now, since its round's first step; with an outcome once that is enough."""
    if observation.plan.membership != trial.membership or observation.plan.sync_mode is not trial.sync_mode:
        return replace(incident, outcome=IncidentOutcome.SUPERSEDED, shown="the job has changed before it was measured")
    found, before = _measure_trial(observation, trial), incident.slowdown_before or 1.0
    if found is None:
        if observation.now - trial.since <= ROUTE_TRIAL_MEASURE_SECONDS or observation.metrics.untold:
            return incident
        return replace(incident, outcome=IncidentOutcome.MITIGATED, shown="what they are worth could not be measured")
    after = max(1.0, before * found.step_time_ratio)
    limit = observation.job.spec.detection.straggler_slowdown
    outcome = IncidentOutcome.RECOVERED if after < limit else IncidentOutcome.MITIGATED
    return replace(
        incident,
        slowdown_after=after,
        measured_gain=(price.compute_loss_rate(before) - price.compute_loss_rate(after)) * TRAFFIC_HORIZON_SECONDS,
        outcome=outcome if found.is_better else IncidentOutcome.NOT_HELPED,
        shown=f"{found.summary}: {'kept' if found.is_better else 'no better, and not tried again for a while'}",
    )


def conclude_route_trial(observation: Observation, draft: DesiredState, incident: Incident, trial: RouteTrial) -> DesiredState:
    """With what follows from the outcome for ways to come."""
    found = _measure_trial(observation, trial) if incident.outcome is IncidentOutcome.NOT_HELPED else None
    if found is None:
        return draft.with_adaptation(way_trial=None)
    tried = tuple(FailedRoute(observation.now, c.source, c.destination, c.spine, c.draw) for c in trial.changes)
    is_worse = found.step_time_ratio > 1 + STEP_TIME_NOISE and trial.changes
    return draft.with_adaptation(
        ways_tried=(*draft.state.adaptation.ways_tried, *tried)[-MAX_FAILED_ROUTES:],
        way_trial=replace(trial, slower=found.step_time_ratio) if is_worse else None,
    )


def advance_route_trial(observation: Observation, policy: Policy) -> DesiredState:
    """Asks for the connections where they are to be measured and nobody has asked; forgets what is too old."""
    draft, now, adaptation = observation.desired, observation.now, observation.state.adaptation
    tried = tuple(one for one in adaptation.ways_tried if now - one.at < TRIED_ROUTE_TTL_SECONDS)
    if tried != adaptation.ways_tried:
        draft = draft.with_adaptation(ways_tried=tried)
    if adaptation.way_trial is not None and _is_trial_over(observation, adaptation.way_trial):
        draft = draft.with_adaptation(way_trial=None)
    asked = now - adaptation.ways_asked_at <= REROUTE_EVIDENCE_TTL_SECONDS or links.has_link_evidence(observation)
    if not asked and policy.applies_remedies and is_steady(observation) and paths.get_due_reroute(observation) is not None:
        draft = draft.with_adaptation(ways_asked_at=now)
    return _request_link_evidence(observation.with_desired(draft))


def check_worse_routes(observation: Observation, policy: Policy) -> Decision | None:
    """The ways of before, where steps have become longer without them, and have lost by now what a round costs."""
    trial = observation.state.adaptation.way_trial
    if trial is None or not trial.slower or trial.membership != observation.plan.membership or not is_steady(observation):
        return None
    slower = min(trial.slower, observation.step_seconds / trial.step_seconds)  # it may have passed
    if paths.restore_paths(observation, trial.changes) == observation.plan.paths:
        return None
    choice = price.choose_remedy(
        (build_plan_traffic_option(observation, policy),),
        slowdown=slower,
        lost_seconds=(observation.now - trial.since) * price.compute_loss_rate(slower),
        remaining_seconds=TRAFFIC_HORIZON_SECONDS,
    )
    if choice.chosen is None:
        return None
    subject = IncidentKey(IncidentCause.SLOW_COMMUNICATION, observation.round)
    return Decision(
        incident_key=replace(subject, number=1 + get_last_incident_number(observation, subject)),
        class_=IncidentClass.PERFORMANCE,
        message=f"steps take {slower:.2f} × as long by the ways that were tried: those of before come back",
        first_sign=trial.since,
        actions=(PlanTraffic(revert=True),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=build_remedy_prices(choice.prices, choice.chosen),
        last_step=observation.step,
        slowdown_before=slower,
        slowdown_after=1.0,
        predicted_gain=choice.chosen.gain_seconds,
    )


def _request_link_evidence(observation: Observation) -> DesiredState:
    """Of our own, where nobody else asks any: again where the answers have said too little."""
    draft, now = observation.desired, observation.now
    request, asked_at = draft.plan.evidence_request, draft.state.adaptation.ways_asked_at
    if not links.needs_pair_throughput(draft, now):
        return draft.with_plan(evidence_request="") if request.startswith(ROUTE_EVIDENCE_PREFIX) else draft
    again = request.startswith(ROUTE_EVIDENCE_PREFIX) and links.has_link_evidence(observation) and now - asked_at >= ROUTE_EVIDENCE_PERIOD_SECONDS
    if (request and not again) or draft.state.adaptation.suspicion is not None or not is_steady(observation):
        return draft
    parts = (EvidencePart.WINDOWS, EvidencePart.LINKS)
    draft = draft.with_plan(evidence_request=f"{ROUTE_EVIDENCE_PREFIX}{draft.plan.version + 1}", evidence_parts=parts)
    return draft.with_adaptation(ways_asked_at=now)


@dataclass(frozen=True)
class _RouteTrialResult:
    step_time_ratio: float  # the time of a step over that of before
    throughput_ratio: float | None  # the pace of the connections over that of before, in the middle; None: not known
    summary: str

    @property
    def is_better(self) -> bool:
        return self.step_time_ratio < 1 - STEP_TIME_NOISE if self.throughput_ratio is None else self.throughput_ratio >= BETTER_ROUTE_RATIO


def _measure_trial(observation: Observation, trial: RouteTrial) -> _RouteTrialResult | None:
    """None: not yet."""
    if not trial.since or not is_steady(observation) or not trial.step_seconds or not observation.step_seconds:
        return None
    slower = observation.step_seconds / trial.step_seconds
    words = f"steps took {trial.step_seconds:.3g} s before, and {observation.step_seconds:.3g} s now"
    now = links.measure_pair_throughputs(observation)
    pairs = [(c, now[c.source, c.destination]) for c in trial.changes if (c.source, c.destination) in now]
    known = [(change, pace.bytes_per_second) for change, pace in pairs if change.bytes_per_second]
    if known:
        change, pace = min(known, key=lambda pair: pair[0].bytes_per_second)
        slowest = f"from rank {change.source} to rank {change.destination}"
        rates = f"{change.bytes_per_second / 1e6:.3g} MB/s before, and {pace / 1e6:.3g} MB/s now"
        faster = median(pace / change.bytes_per_second for change, pace in known)
        return _RouteTrialResult(slower, faster, f"{slowest} {rates}; {words}")
    awaited = trial.has_rates and observation.now - trial.since <= THROUGHPUT_WAIT_SECONDS
    return None if awaited else _RouteTrialResult(slower, None, words)


def _is_trial_over(observation: Observation, trial: RouteTrial) -> bool:
    """Another membership goes by other ways; those of before are in force again; or nobody has needed the way back."""
    if trial.membership != observation.plan.membership:
        return True
    if not trial.incident:
        return observation.training_since is not None
    return bool(trial.slower) and observation.now - trial.since > TRIED_ROUTE_TTL_SECONDS
