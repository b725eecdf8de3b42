"""Flows that share a link while others are empty: other ways for them, where joint planning finds that all jobs win
more by it together than their rounds cost."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.price import Price

from ..api import Cause, Class, Remedy
from ..decision import Decision, PlanTraffic
from ..observation import Observation, Policy
from ..subject import Subject
from . import links, paths, verify_ways, ways_seen
from .pricing import plan_traffic_option, written
from .straggler import earlier, steady


def check(observation: Observation, policy: Policy) -> Decision | None:
    due = paths.due(observation)
    if due is None or not steady(observation) or ways_seen.blamed(observation):
        return None  # what the connections show is weighed with the ranks' own evidence, against other ways to train
    if policy.acts and not verify_ways.is_known_before(observation):
        return None
    option = plan_traffic_option(observation, policy)
    subject = Subject(Cause.SLOW_COMMUNICATION, observation.round)
    if option.refused or (earlier(observation, subject) and not policy.acts):
        return None  # nothing may be done, or it has been said
    of_this_job = due.gain_seconds / observation.plan.world_size
    words = f"wins all jobs {due.gain_seconds:.0f} s of their ranks' time, and costs {due.cost_seconds:.0f} s of it"
    price = Price(option, of_this_job, True, words)
    return Decision(
        subject=replace(subject, number=1 + earlier(observation, subject)),
        class_=Class.PERFORMANCE,
        message=f"its flows share links of the fabric while others are free: other ways {words}",
        first_sign=observation.now,
        actions=(PlanTraffic(paces=links.rates(observation)),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=written((price,), price),
        last_step=observation.step,
        slowdown_before=due.slowdown,
        slowdown_after=1.0,
        predicted_gain=of_this_job,
    )
