"""Other ways through the fabric: a new membership with the same members. Its paths are planned later in this pass
(`decide.paths`); where nobody knows the fabric, a pair's ports are drawn anew. Whether they are better is found out in
the round (`decide.verify_ways`). Nothing was broken: no restart is burnt.
"""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.diagnose.link_probe import LinkProbeVerdict
from pacekeeper_analysis.plan import Paths

from ... import rounds
from ...decision import Decision, PlanTraffic
from ...observation import Observation
from ...state import MAX_LINK_VERDICTS, MAX_ROUTE_CHANGES, LinkVerdict, RouteChange, RouteTrial
from .. import paths
from .applied import ActionResult

MIN_REROUTE_SLOWDOWN = 1.02
"""A job whose steps are not even so many times as long as by the ways to come makes way for others: nothing is to be
found out of it."""


def apply_plan_traffic(action: PlanTraffic, decision: Decision, observation: Observation) -> ActionResult:
    draft, before = rounds.begin_round(observation, observation.plan.members), observation.state.adaptation.way_trial
    if action.revert:
        assert before is not None
        trial = RouteTrial("", draft.plan.membership, observation.step_seconds)
        back = draft.with_plan(paths=paths.restore_paths(observation, before.changes))
        return ActionResult(back.with_adaptation(way_trial=trial))
    if action.reroll is not None:
        # What the probe has told counts among those of this hour, though its round ends here.
        verdicts = (*draft.state.adaptation.link_verdicts, LinkVerdict(observation.now, LinkProbeVerdict.LINK))
        draft = draft.with_plan(paths=paths.reroll_ports(observation, action.reroll))
        draft = draft.with_adaptation(link_verdicts=verdicts[-MAX_LINK_VERDICTS:])
        after = draft.plan.paths
    else:
        network = observation.cluster_view.network
        after = None if network is None else paths.plan_job_paths(observation, network)
    name = decision.incident_name(observation.job)
    trial = RouteTrial(
        name,
        draft.plan.membership,
        observation.step_seconds,
        draft.plan.sync_mode,
        _list_route_changes(action, observation, after),
    )
    wins = decision.slowdown_before is None or decision.slowdown_before >= MIN_REROUTE_SLOWDOWN
    return ActionResult(draft.with_adaptation(way_trial=trial if wins else None))


def _list_route_changes(action: PlanTraffic, observation: Observation, after: Paths | None) -> tuple[RouteChange, ...]:
    """(): there are more than are kept."""
    found = tuple(
        replace(change, bytes_per_second=action.rates.get((change.source, change.destination), 0.0))
        for change in paths.list_path_changes(observation.plan.paths, after)
    )
    return found if len(found) <= MAX_ROUTE_CHANGES else ()
