"""Other routes through the fabric as a remedy of slow communication, in addition to other strategies."""

from __future__ import annotations

from pacekeeper_analysis.stragglers.price import Choice, Option

from ...api.fabric import PathControl
from ...api.training_job import Remedy
from ...state.observation import Observation
from ...state.policy import Policy
from ..stragglers.pricing import build_plan_traffic_option
from . import paths, route_reports


def build_alternative_option(observation: Observation, policy: Policy, slowdown: float) -> Option | None:
    """Return the option of other routes for a job with this slowdown of its steps; None: no routes are planned.

    If flows have just shown slow links that joint planning has not seen yet, a full repair is expected: the option is
    awaited.
    """
    network = observation.cluster_view.network
    if network is None or network.traffic is None or network.spec.path_control.mode is not PathControl.PROBE:
        return None
    if route_reports.has_unplanned_slow_links(observation):
        return build_plan_traffic_option(observation, policy)
    proposal = paths.get_due_reroute(observation)
    if proposal is None:
        return build_plan_traffic_option(
            observation, policy, refused="no other way through the fabric wins what it costs"
        )
    return build_plan_traffic_option(
        observation, policy, slowdown_after=1.0 + (slowdown - 1.0) * (1.0 - proposal.recovered_share)
    )


def is_reroute_awaited(observation: Observation, choice: Choice) -> bool:
    """Return whether other routes will be taken once the loss reaches their price, or joint planning finds them."""
    price = next((price for price in choice.prices if price.option.remedy == Remedy.PLAN_TRAFFIC), None)
    if price is None or price.option.refused or choice.chosen not in (None, price):
        return False
    if route_reports.has_unplanned_slow_links(observation):
        return True
    return not price.due and price.gain_seconds > price.option.cost_seconds
