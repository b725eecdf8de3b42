"""Flows that share a link while others are empty: other ways for them, where joint planning finds that all jobs win
more by it together than their rounds cost."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.price import Price

from ..api import IncidentCause, IncidentClass, Remedy
from ..decision import Decision, PlanTraffic
from ..observation import Observation, Policy
from ..subject import IncidentKey
from . import links, paths, verify_ways, ways_seen
from .pricing import build_plan_traffic_option, build_remedy_prices
from .straggler import get_last_incident_number, is_steady


def check_replanned_routes(observation: Observation, policy: Policy) -> Decision | None:
    due = paths.get_due_reroute(observation)
    if due is None or not is_steady(observation) or ways_seen.has_new_slow_links(observation):
        return None  # what the connections show is weighed with the ranks' own evidence, against other ways to train
    if policy.applies_remedies and not verify_ways.is_baseline_known(observation):
        return None
    option = build_plan_traffic_option(observation, policy)
    subject = IncidentKey(IncidentCause.SLOW_COMMUNICATION, observation.round)
    if option.refused or (get_last_incident_number(observation, subject) and not policy.applies_remedies):
        return None  # nothing may be done, or it has been said
    of_this_job = due.gain_seconds / observation.plan.world_size
    words = f"wins all jobs {due.gain_seconds:.0f} s of their ranks' time, and costs {due.cost_seconds:.0f} s of it"
    price = Price(option, of_this_job, True, words)
    return Decision(
        incident_key=replace(subject, number=1 + get_last_incident_number(observation, subject)),
        class_=IncidentClass.PERFORMANCE,
        message=f"its flows share links of the fabric while others are free: other ways {words}",
        first_sign=observation.now,
        actions=(PlanTraffic(rates=links.measure_pair_rates(observation)),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=build_remedy_prices((price,), price),
        last_step=observation.step,
        slowdown_before=due.slowdown,
        slowdown_after=1.0,
        predicted_gain=of_this_job,
    )
