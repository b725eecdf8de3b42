"""Other ways through the fabric as a remedy of slow communication, beside other ways to train."""

from __future__ import annotations

from pacekeeper_analysis.price import Choice, Option

from ..api import PathControl, Remedy
from ..observation import Observation, Policy
from . import paths, ways_seen
from .pricing import build_plan_traffic_option


def build_alternative_option(observation: Observation, policy: Policy, slowdown: float) -> Option | None:
    """`slowdown`: of the job's steps. None: nobody plans any ways.

    What flows have just shown, and joint planning has not seen yet, is expected to be mended: it is waited for.
    """
    network = observation.cluster_view.network
    if network is None or network.traffic is None or network.spec.path_control.mode is not PathControl.PROBE:
        return None
    if ways_seen.has_unplanned_slow_links(observation):
        return build_plan_traffic_option(observation, policy)
    due = paths.get_due_reroute(observation)
    if due is None:
        return build_plan_traffic_option(observation, policy, refused="no other way through the fabric wins what it costs")
    return build_plan_traffic_option(observation, policy, slowdown_after=1.0 + (slowdown - 1.0) * (1.0 - due.mends))


def is_reroute_awaited(observation: Observation, choice: Choice) -> bool:
    """They would be taken, or will be once the loss has reached their price, or once joint planning has found them."""
    price = next((price for price in choice.prices if price.option.remedy == Remedy.PLAN_TRAFFIC), None)
    if price is None or price.option.refused or choice.chosen not in (None, price):
        return False
    if ways_seen.has_unplanned_slow_links(observation):
        return True
    return not price.due and price.gain_seconds > price.option.cost_seconds
