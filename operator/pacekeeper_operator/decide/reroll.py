"""A slow link in a fabric that nobody knows: other ports for that pair, which may lead another way.

Whether they do, the next round shows (`verify_ways`): where it is no better, the link is probed and rolled again, a few
times.
"""

from __future__ import annotations

from pacekeeper_analysis import price
from pacekeeper_analysis.diagnose.link_probe import Verdict

from ..api import Cause, Class, PathControl, Remedy
from ..decision import Decision, PlanTraffic
from ..observation import Observation, Policy
from ..subject import Subject
from . import links, paths
from .pricing import plan_traffic_option, written

MOST_DRAWS = 4
"""Of a pair: where so many have led nowhere, all ways are slow, or there is one alone."""


def check(observation: Observation, policy: Policy) -> Decision | None:
    network, seen = observation.surroundings.network, observation.state.adaptation.link
    if network is None or network.spec.path_control.mode is not PathControl.REROLL or seen is None or not seen.probe:
        return None
    told, incident = links.told(observation), observation.state.incidents.find(seen.incident)
    pair = seen.source, seen.destination
    if told is None or told.verdict is not Verdict.LINK or incident is None:
        return None
    if paths.draws(observation, pair) >= MOST_DRAWS or paths.rerolled(observation, pair) is None:
        return None
    now = links.left(incident)
    elapsed = observation.now - incident.first_sign
    past = observation.surroundings.past_seconds.get(Cause.SLOW_COMMUNICATION, ())
    choice = price.choose(
        (plan_traffic_option(observation, policy),),
        slowdown=now,
        lost_seconds=elapsed * price.loss_rate(now),
        remaining_seconds=price.expected_remaining(elapsed, past, links.PRIOR_SECONDS),
    )
    if choice.chosen is None:
        return None
    return Decision(
        subject=Subject(Cause.SLOW_COMMUNICATION, observation.round),
        class_=Class.PERFORMANCE,
        message=f"the link {pair[0]} → {pair[1]} is slow, and other ports may lead another way: {told.words}",
        first_sign=incident.first_sign,
        actions=(PlanTraffic(reroll=pair, paces={pair: seen.bytes_per_second}),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=(*incident.remedies, *written(choice.prices, choice.chosen)),
        evidence=incident.evidence,
        continues=incident.name if incident.outcome is None else "",
        last_step=observation.step,
        slowdown_before=now,
        slowdown_after=1.0,
        reference_seconds=incident.reference_seconds,
        predicted_gain=choice.chosen.gain_seconds,
        finding=incident.finding,
    )
