"""Flows that share a link while others are empty: other ways for them, where joint planning finds that all jobs win
more by it together than their rounds cost."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.price import Price

from ..api import Cause, Class, PathControl, Remedy
from ..decision import Decision, PlanTraffic
from ..network import Network, Replanned
from ..observation import Observation, Policy
from ..subject import Subject
from . import paths
from .pricing import plan_traffic_option, written
from .straggler import steady


def check(observation: Observation, policy: Policy) -> Decision | None:
    network = observation.surroundings.network
    due = None if network is None else _due(observation, network)
    if network is None or due is None or not steady(observation):
        return None
    if paths.planned(observation, network) == observation.plan.paths:
        return None  # what is planned cannot be followed: for want of ports, or of a spine's address
    option = plan_traffic_option(observation, policy)
    subject = Subject(Cause.SLOW_COMMUNICATION, observation.round)
    known = observation.state.incidents.names()
    earlier = max((subject.number_of(name, observation.job) for name in known), default=0)
    if option.refused or (earlier and not policy.acts):
        return None  # nothing may be done, or it has been said
    of_this_job = due.gain_seconds / observation.plan.world_size
    words = f"wins all jobs {due.gain_seconds:.0f} s of their ranks' time, and costs {due.cost_seconds:.0f} s of it"
    price = Price(option, of_this_job, True, words)
    return Decision(
        subject=replace(subject, number=1 + earlier),
        class_=Class.PERFORMANCE,
        message=f"its flows share links of the fabric while others are free: other ways {words}",
        first_sign=observation.now,
        actions=(PlanTraffic(),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=written((price,), price),
        last_step=observation.step,
        slowdown_before=due.slowdown,
        slowdown_after=1.0,
        predicted_gain=of_this_job,
    )


def _due(observation: Observation, network: Network) -> Replanned | None:
    """What has been planned for this very membership."""
    name = observation.job.namespace, observation.job.name
    if network.traffic is None or network.spec.path_control.mode is not PathControl.PROBE:
        return None
    looked_at = network.jobs.get(name)
    if looked_at is None or looked_at.membership != observation.plan.membership:
        return None
    return network.traffic.due.get(name)
