"""A slow link in a fabric that nobody knows: other ports for that pair, which may lead another way.

Whether they do, the next round shows (`verify_ways`): where it is no better, the link is probed and rolled again, a few
times.
"""

from __future__ import annotations

from pacekeeper_analysis import price
from pacekeeper_analysis.diagnose.link_probe import LinkProbeVerdict

from ..api import IncidentCause, IncidentClass, PathControl, Remedy
from ..decision import Decision, PlanTraffic
from ..observation import Observation, Policy
from ..subject import IncidentKey
from . import links, paths
from .pricing import build_plan_traffic_option, build_remedy_prices

MAX_PORT_DRAWS = 4
"""Of a pair: where so many have led nowhere, all ways are slow, or there is one alone."""


def check_port_reroll(observation: Observation, policy: Policy) -> Decision | None:
    network, seen = observation.cluster_view.network, observation.state.adaptation.link
    if network is None or network.spec.path_control.mode is not PathControl.REROLL or seen is None or not seen.probe:
        return None
    told, incident = links.get_probe_result(observation), observation.state.incidents.find(seen.incident)
    pair = seen.source, seen.destination
    if told is None or told.verdict is not LinkProbeVerdict.LINK or incident is None:
        return None
    if paths.count_port_draws(observation, pair) >= MAX_PORT_DRAWS or paths.reroll_ports(observation, pair) is None:
        return None
    now = links.get_remaining_slowdown(incident)
    elapsed = observation.now - incident.first_sign
    past = observation.cluster_view.past_durations.get(IncidentCause.SLOW_COMMUNICATION, ())
    choice = price.choose_remedy(
        (build_plan_traffic_option(observation, policy),),
        slowdown=now,
        lost_seconds=elapsed * price.compute_loss_rate(now),
        remaining_seconds=price.estimate_remaining_seconds(elapsed, past, links.SLOW_COMMUNICATION_PRIOR_SECONDS),
    )
    if choice.chosen is None:
        return None
    return Decision(
        incident_key=IncidentKey(IncidentCause.SLOW_COMMUNICATION, observation.round),
        class_=IncidentClass.PERFORMANCE,
        message=f"the link {pair[0]} → {pair[1]} is slow, and other ports may lead another way: {told.words}",
        first_sign=incident.first_sign,
        actions=(PlanTraffic(reroll=pair, rates={pair: seen.bytes_per_second}),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=(*incident.remedies, *build_remedy_prices(choice.prices, choice.chosen)),
        evidence=incident.evidence,
        continued_incident=incident.name if incident.outcome is None else "",
        last_step=observation.step,
        slowdown_before=now,
        slowdown_after=1.0,
        reference_seconds=incident.reference_seconds,
        predicted_gain=choice.chosen.gain_seconds,
        finding=incident.finding,
    )
