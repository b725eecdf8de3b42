"""Slow ranks and links of a watched job, by the estimator alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pacekeeper_analysis.estimator.parameters import PROBABLE, EstimatorParameters
from pacekeeper_analysis.failures.finding import (
    FaultClass,
    Finding,
    Signal,
    SignalKind,
    add_confidence,
    merge_findings,
)
from pacekeeper_analysis.stragglers import price
from pacekeeper_analysis.stragglers.price import Choice

from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...state.desired_state import Incident
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ...state.straggler_estimate import EstimatedFault, FaultEstimate
from ..decision import Decision
from ..failures import gpu_warning
from ..stragglers import straggler
from ..stragglers.pricing import build_remedy_prices, build_replace_option
from . import slow_links

FAULT_TO_CAUSE = {
    EstimatedFault.SLOW_WORKER: IncidentCause.STRAGGLER,
    EstimatedFault.ROTATING_RANKS: IncidentCause.VOLATILE,
    EstimatedFault.SLOW_LINK: IncidentCause.SLOW_COMMUNICATION,
}


@dataclass(frozen=True)
class Suspect:
    """What a person would do something about."""

    fault: EstimatedFault
    rank: int | None
    worker: str | None
    place: slow_links.LinkPlace | None


def check_estimated_faults(observation: Observation, policy: Policy) -> Decision | None:
    """Decide on the first fault on which the estimator's rule would act, and that has no open incident."""
    if observation.estimate is None or not straggler.is_steady(observation):
        return None
    for fault in observation.estimate.faults:
        is_open = any(
            incident.cause is FAULT_TO_CAUSE[fault.fault] and incident.rank == fault.rank
            for incident in observation.state.incidents.open
        )
        if _is_certain(fault) and not is_open:
            return _decide_fault(observation, policy, fault)
    return None


def _is_certain(fault: FaultEstimate) -> bool:
    """Return whether the fault is certain, and costs as much as its remedy must at least win.

    Steps that are a little longer, by links or by ranks in turns, are no reason to leave exact training.
    """
    parameters, slowdown = EstimatorParameters(), fault.job_slowdown
    if slowdown is None or fault.probability < parameters.action_probability:
        return False
    if fault.fault is EstimatedFault.SLOW_WORKER:
        return price.compute_loss_rate(slowdown) >= parameters.min_lasting_gain
    return slowdown >= parameters.exact_preference_ratio


def find_fault(observation: Observation, cause: IncidentCause) -> FaultEstimate | None:
    """Return what the estimator knows of the faults of this cause; None: nothing yet."""
    faults = () if observation.estimate is None else observation.estimate.faults
    return next((fault for fault in faults if FAULT_TO_CAUSE[fault.fault] is cause), None)


def list_suspects(observation: Observation) -> tuple[FaultEstimate, ...]:
    """Return the faults that are more probable than not, the most probable first."""
    faults = () if observation.estimate is None else observation.estimate.faults
    return tuple(sorted((f for f in faults if f.probability > PROBABLE), key=lambda fault: -fault.probability))


def identify_suspects(observation: Observation) -> frozenset[Suspect]:
    """Return which faults are more probable than not, and where, without how probable they are."""
    return frozenset(
        Suspect(
            fault.fault,
            fault.rank,
            None if fault.rank is None else observation.find_worker_of_rank(fault.rank),
            slow_links.identify_place(observation) if fault.fault is EstimatedFault.SLOW_LINK else None,
        )
        for fault in list_suspects(observation)
    )


def describe_fault(observation: Observation, fault: FaultEstimate) -> str:
    """Return a sentence about the fault, for people."""
    if fault.rank is not None:
        worker = observation.find_worker_of_rank(fault.rank)
        return f"rank {fault.rank} on {worker} takes {fault.slowdown:.2f} × its peers' time"
    if fault.fault is EstimatedFault.SLOW_LINK:
        return f"{slow_links.describe_slow_link(observation)} makes steps {fault.slowdown:.2f} × as long"
    return f"another rank takes {fault.slowdown:.2f} × its peers' time in each step"


def _decide_fault(observation: Observation, policy: Policy, fault: FaultEstimate) -> Decision:
    is_link = fault.fault is EstimatedFault.SLOW_LINK
    worker = None if fault.rank is None else observation.find_worker_of_rank(fault.rank)
    view = None if worker is None else observation.find_worker(worker)
    if is_link and (view := slow_links.find_slow_side(observation)) is not None:
        worker = view.name
    check = slow_links.get_hot_check(observation) if is_link else None
    places = () if check is None else check.hot_places
    key = IncidentKey(FAULT_TO_CAUSE[fault.fault], observation.progress.round, rank=fault.rank)
    slowdown = fault.job_slowdown or 1.0
    choice = _price_remedies(observation, policy, fault, slowdown)
    chosen, step_seconds = choice.chosen, observation.progress.step_seconds
    return Decision(
        incident_key=replace(key, occurrence=1 + straggler.get_last_incident_number(observation, key)),
        class_=IncidentClass.PERFORMANCE,
        message=describe_fault(observation, fault),
        first_sign=fault.since,
        remedy=None if chosen is None else Remedy(chosen.option.remedy),
        remedies=build_remedy_prices(choice.prices, chosen),
        evidence=(fault.sentence, *places, *gpu_warning.describe_gpu_signs(observation, view)),
        rank=fault.rank,
        worker=worker,
        node=None if view is None else view.record.node or None,
        live=True,
        last_step=observation.progress.step,
        slowdown_before=slowdown,
        slowdown_after=None if chosen is None else chosen.option.slowdown_after,
        reference_seconds=None if step_seconds is None else step_seconds / slowdown,
        predicted_gain=chosen.gain_seconds if chosen is not None and math.isfinite(chosen.gain_seconds) else None,
        finding=_build_finding(observation, fault),
    )


def update_price(observation: Observation, policy: Policy, incident: Incident) -> Incident:
    """Return an open incident of a slow rank with the remedy that has become worth its cost by now, if any has."""
    fault = find_fault(observation, incident.cause)
    slowdown = None if fault is None else fault.job_slowdown
    if incident.remedy is not None or fault is None or slowdown is None or fault.rank != incident.rank:
        return incident
    choice = _price_remedies(observation, policy, fault, slowdown)
    if choice.chosen is None:
        return incident
    return replace(
        incident,
        decided=observation.now,
        remedy=choice.chosen.option.remedy,
        remedies=build_remedy_prices(choice.prices, choice.chosen),
        slowdown_before=slowdown,
        predicted_after=choice.chosen.option.slowdown_after,
        predicted_gain=choice.chosen.gain_seconds,
    )


def _price_remedies(observation: Observation, policy: Policy, fault: FaultEstimate, slowdown: float) -> Choice:
    """Return what a spare would win and cost, by the rule that decides for TrainingJobs.

    Shares and Local-SGD need a script that uses the library, so that a watched job could have neither.
    """
    if fault.fault is not EstimatedFault.SLOW_WORKER:
        return Choice(None, ())
    elapsed = max(0.0, observation.now - fault.since)
    past = observation.cluster_view.past_durations.get(FAULT_TO_CAUSE[fault.fault], ())
    spare = replace(
        build_replace_option(observation, policy),
        cost_seconds=observation.restarts.estimate_exchange_seconds(slowdown),
        min_win=price.MIN_LASTING_WIN,
    )
    return price.choose_remedy(
        (spare,),
        slowdown,
        elapsed * price.compute_loss_rate(slowdown),
        price.estimate_remaining_seconds(elapsed, past, straggler.DEFAULT_PRIOR_SECONDS),
    )


def _build_finding(observation: Observation, fault: FaultEstimate) -> Finding:
    is_link = fault.fault is EstimatedFault.SLOW_LINK
    finding = add_confidence(
        Finding(
            FaultClass.NETWORK if is_link else FaultClass.UNKNOWN,
            "" if fault.rank is None else f"rank {fault.rank}",
            (Signal(SignalKind.TIMES, f"{describe_fault(observation, fault)}, with P = {fault.probability:.3f}"),),
        )
    )
    check = slow_links.get_hot_check(observation) if is_link else None
    return finding if check is None else merge_findings(finding, slow_links.build_transport_finding(check))
