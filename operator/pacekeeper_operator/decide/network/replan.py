"""Flows that share a link while others are empty.

They get other routes if joint planning finds that all jobs together win more than their rounds cost.
"""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.stragglers.price import Price

from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision, PlanTraffic
from ..stragglers.pricing import build_plan_traffic_option, build_remedy_prices
from ..stragglers.straggler import get_last_incident_number, is_steady
from . import paths, route_reports, route_trial, slow_communication


def check_replanned_routes(observation: Observation, policy: Policy) -> Decision | None:
    proposal = paths.get_due_reroute(observation)
    if proposal is None or not is_steady(observation) or route_reports.has_new_slow_links(observation):
        return None  # evidence of connections is weighed with the ranks' own, against other strategies
    if policy.applies_remedies and not route_trial.is_baseline_known(observation):
        return None
    option = build_plan_traffic_option(observation, policy)
    incident_key = IncidentKey(IncidentCause.SLOW_COMMUNICATION, observation.progress.round)
    if option.refused or (get_last_incident_number(observation, incident_key) and not policy.applies_remedies):
        return None  # it may not be applied, or is recommended already
    own_gain = proposal.gain_seconds / observation.plan.world_size
    reason = (
        f"wins all jobs {proposal.gain_seconds:.0f} s of their ranks' time, "
        f"and costs {proposal.cost_seconds:.0f} s of it"
    )
    price = Price(option, own_gain, True, reason)
    return Decision(
        incident_key=replace(incident_key, occurrence=1 + get_last_incident_number(observation, incident_key)),
        class_=IncidentClass.PERFORMANCE,
        message=f"its flows share links of the fabric while others are free: a round for other routes {reason}",
        first_sign=observation.now,
        actions=(PlanTraffic(rates=slow_communication.measure_pair_rates(observation)),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=build_remedy_prices((price,), price),
        last_step=observation.progress.step,
        slowdown_before=proposal.slowdown,
        slowdown_after=1.0,
        predicted_gain=own_gain,
    )
