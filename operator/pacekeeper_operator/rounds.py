"""How a new round is written into the plan."""

from __future__ import annotations

from pacekeeper_analysis.plan import Member

from .observation import Observation
from .state import Draft


def begin(observation: Observation, members: tuple[Member, ...]) -> Draft:
    """A new membership: the next round, above every round that one of the workers has seen."""
    draft, plan = observation.draft, observation.plan
    heartbeats = [view.heartbeat for view in observation.workers if view.heartbeat is not None]
    same = [member.worker for member in members] == [member.worker for member in plan.members]
    return (
        draft.with_plan(
            membership=max([plan.membership, *(beat.membership for beat in heartbeats)]) + 1,
            round=max([draft.state.placement.round_seen, *(beat.round for beat in heartbeats)]) + 1,
            members=members,
            shares=plan.shares if same else None,
            evidence_request="",
        )
        .with_placement(placing_since=0.0, attempts=0, vacant_since=0.0, checkpoint_asked_at=0.0)
        .with_budget(in_membership=0)
        .with_adaptation(
            suspicion=None,
            vain=None,
            shares_refusal=draft.state.adaptation.shares_refusal if same else "",
            tolerated_pace=draft.state.adaptation.tolerated_pace if same else 0.0,
            tolerated_behind=draft.state.adaptation.tolerated_behind if same else 0.0,
        )
    )
