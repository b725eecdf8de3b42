"""Other routes through the fabric: a new membership with the same members.

Its paths are planned later in this pass (`network.paths`). Without a description of the fabric, a pair's ports are
drawn again. The round measures whether the new routes are better (`network.route_trial`). No rank failed, so this uses
no restart of the budget.
"""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.network.link_probe import LinkProbeVerdict
from pacekeeper_analysis.protocol.plan import Paths

from ...state import rounds
from ...state.desired_state import MAX_LINK_VERDICTS, MAX_ROUTE_CHANGES, LinkVerdict, RouteChange, RouteTrial
from ...state.observation import Observation
from ..decision import Decision, PlanTraffic
from ..network import paths
from .action_result import ActionResult

MIN_REROUTE_SLOWDOWN = 1.02
"""Predicted ratio of step times, old routes to new ones. Below it, the job changes routes for the sake of other jobs,
and its own round is not measured."""


def apply_plan_traffic(action: PlanTraffic, decision: Decision, observation: Observation) -> ActionResult:
    desired, previous_trial = (
        rounds.begin_round(observation, observation.plan.members),
        observation.state.adaptation.route_trial,
    )
    if action.revert:
        assert previous_trial is not None
        trial = RouteTrial("", desired.plan.membership, observation.progress.step_seconds)
        reverted = desired.with_plan(paths=paths.restore_paths(observation, previous_trial.changes))
        return ActionResult(reverted.with_adaptation(route_trial=trial))
    if action.reroll is not None:
        # Count the probe's verdict among those of this hour, although its round ends here.
        verdicts = (*desired.state.adaptation.link_verdicts, LinkVerdict(observation.now, LinkProbeVerdict.LINK))
        desired = desired.with_plan(paths=paths.reroll_ports(observation, action.reroll))
        desired = desired.with_adaptation(link_verdicts=verdicts[-MAX_LINK_VERDICTS:])
        after = desired.plan.paths
    else:
        network = observation.cluster_view.network
        after = None if network is None else paths.plan_job_paths(observation, network)
    incident_name = decision.incident_name(observation.job)
    trial = RouteTrial(
        incident_name,
        desired.plan.membership,
        observation.progress.step_seconds,
        desired.plan.sync_mode,
        _list_route_changes(action, observation, after),
    )
    wins = decision.slowdown_before is None or decision.slowdown_before >= MIN_REROUTE_SLOWDOWN
    return ActionResult(desired.with_adaptation(route_trial=trial if wins else None))


def _list_route_changes(action: PlanTraffic, observation: Observation, after: Paths | None) -> tuple[RouteChange, ...]:
    """Return the flows whose routes change; (): there are more than `MAX_ROUTE_CHANGES`."""
    changes = tuple(
        replace(change, bytes_per_second=action.rates.get((change.source, change.destination)))
        for change in paths.list_path_changes(observation.plan.paths, after)
    )
    return changes if len(changes) <= MAX_ROUTE_CHANGES else ()
