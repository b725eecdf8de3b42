"""A slow link in a fabric whose topology is unknown: its pair gets other ports, which may take another route.

The next round shows whether they do (`route_trial`). If it is no better, the link is probed and its ports are drawn
again, a few times.
"""

from __future__ import annotations

from pacekeeper_analysis.network.link_probe import LinkProbeVerdict
from pacekeeper_analysis.stragglers import price

from ...api.fabric import PathControl
from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...state.incident_key import IncidentKey
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision, PlanTraffic
from ..stragglers.pricing import build_plan_traffic_option, build_remedy_prices
from . import paths, slow_communication

MAX_PORT_DRAWS = 4
"""Draws for a pair. If this many have not helped, all routes are slow, or there is only one."""


def check_port_reroll(observation: Observation, policy: Policy) -> Decision | None:
    network, link_check = observation.cluster_view.network, observation.requests.link_check
    if (
        network is None
        or network.spec.path_control.mode is not PathControl.REROLL
        or link_check is None
        or not link_check.probe
        or link_check.hottest is None
    ):
        return None
    result, incident = (
        slow_communication.get_probe_result(observation),
        observation.state.incidents.find(link_check.incident),
    )
    pair = link_check.hottest.source, link_check.hottest.destination
    if result is None or result.verdict is not LinkProbeVerdict.LINK or incident is None:
        return None
    if paths.count_port_draws(observation, pair) >= MAX_PORT_DRAWS or paths.reroll_ports(observation, pair) is None:
        return None
    slowdown = slow_communication.get_remaining_slowdown(incident)
    elapsed = observation.now - incident.first_sign
    past = observation.cluster_view.past_durations.get(IncidentCause.SLOW_COMMUNICATION, ())
    choice = price.choose_remedy(
        (build_plan_traffic_option(observation, policy),),
        slowdown=slowdown,
        lost_seconds=elapsed * price.compute_loss_rate(slowdown),
        remaining_seconds=price.estimate_remaining_seconds(
            elapsed, past, slow_communication.SLOW_COMMUNICATION_PRIOR_SECONDS
        ),
    )
    if choice.chosen is None:
        return None
    return Decision(
        incident_key=IncidentKey(IncidentCause.SLOW_COMMUNICATION, observation.progress.round),
        class_=IncidentClass.PERFORMANCE,
        message=f"the link {pair[0]} → {pair[1]} is slow, and other ports may take another route: {result.message}",
        first_sign=incident.first_sign,
        actions=(PlanTraffic(reroll=pair, rates={pair: link_check.hottest.bytes_per_second}),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=(*incident.remedies, *build_remedy_prices(choice.prices, choice.chosen)),
        evidence=incident.evidence,
        continued_incident=incident.name if incident.outcome is None else "",
        last_step=observation.progress.step,
        slowdown_before=slowdown,
        slowdown_after=1.0,
        reference_seconds=incident.reference_seconds,
        predicted_gain=choice.chosen.gain_seconds,
        finding=incident.finding,
    )
