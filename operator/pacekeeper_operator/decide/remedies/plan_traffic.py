"""Other ways through the fabric: a new membership with the same members. Its paths are planned later in this pass
(`decide.paths`); where nobody knows the fabric, a pair's ports are drawn anew. Whether they are better is found out in
the round (`decide.verify_ways`). Nothing was broken: no restart is burnt.
"""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.diagnose.link_probe import Verdict
from pacekeeper_analysis.plan import Paths

from ... import rounds
from ...decision import Decision, PlanTraffic
from ...observation import Observation
from ...state import MAX_LINK_VERDICTS, MAX_WAY_CHANGES, LinkVerdict, WayChange, WayTrial
from .. import paths
from .applied import Applied

WINS = 1.02
"""A job whose steps are not even so many times as long as by the ways to come makes way for others: nothing is to be
found out of it."""


def apply(action: PlanTraffic, decision: Decision, observation: Observation) -> Applied:
    draft, before = rounds.begin(observation, observation.plan.members), observation.state.adaptation.way_trial
    if action.back:
        assert before is not None
        trial = WayTrial("", draft.plan.membership, observation.step_seconds)
        back = draft.with_plan(paths=paths.put_back(observation, before.changes))
        return Applied(back.with_adaptation(way_trial=trial))
    if action.reroll is not None:
        # What the probe has told counts among those of this hour, though its round ends here.
        verdicts = (*draft.state.adaptation.link_verdicts, LinkVerdict(observation.now, Verdict.LINK))
        draft = draft.with_plan(paths=paths.rerolled(observation, action.reroll))
        draft = draft.with_adaptation(link_verdicts=verdicts[-MAX_LINK_VERDICTS:])
        after = draft.plan.paths
    else:
        network = observation.surroundings.network
        after = None if network is None else paths.planned(observation, network)
    name = decision.incident_name(observation.job)
    trial = WayTrial(
        name,
        draft.plan.membership,
        observation.step_seconds,
        draft.plan.sync_mode,
        _changes(action, observation, after),
    )
    wins = decision.slowdown_before is None or decision.slowdown_before >= WINS
    return Applied(draft.with_adaptation(way_trial=trial if wins else None))


def _changes(action: PlanTraffic, observation: Observation, after: Paths | None) -> tuple[WayChange, ...]:
    """(): there are more than are kept."""
    found = tuple(
        replace(change, bytes_per_second=action.paces.get((change.source, change.destination), 0.0))
        for change in paths.changes(observation.plan.paths, after)
    )
    return found if len(found) <= MAX_WAY_CHANGES else ()
