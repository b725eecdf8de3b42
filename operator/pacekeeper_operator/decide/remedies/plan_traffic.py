"""Other ways through the fabric: a new membership with the same members. Its paths are planned later in this pass
(`decide.paths`); where nobody knows the fabric, a pair's ports are drawn anew. Nothing was broken: no restart is burnt.
"""

from __future__ import annotations

from pacekeeper_analysis.diagnose.link_probe import Verdict

from ... import rounds
from ...decision import Decision, PlanTraffic
from ...observation import Observation
from ...state import MAX_LINK_VERDICTS, LinkVerdict
from .. import paths
from .applied import Applied


def apply(action: PlanTraffic, _decision: Decision, observation: Observation) -> Applied:
    draft = rounds.begin(observation, observation.plan.members)
    if action.reroll is None:
        return Applied(draft)
    # What the probe has told counts among those of this hour, though its round ends here.
    verdicts = (*draft.state.adaptation.link_verdicts, LinkVerdict(observation.now, Verdict.LINK))
    drawn = draft.with_plan(paths=paths.rerolled(observation, action.reroll))
    return Applied(drawn.with_adaptation(link_verdicts=verdicts[-MAX_LINK_VERDICTS:]))
