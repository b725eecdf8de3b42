"""How a new round is written into the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pacekeeper_analysis.plan import Member, Plan

from .observation import Observation
from .state import Draft


def begin(observation: Observation, members: tuple[Member, ...]) -> Draft:
    """A new membership: the next round, above every round that one of the workers has seen."""
    draft, plan = observation.draft, observation.plan
    heartbeats = [view.heartbeat for view in observation.workers if view.heartbeat is not None]
    same = [member.worker for member in members] == [member.worker for member in plan.members]
    membership = max([plan.membership, *(beat.membership for beat in heartbeats)]) + 1
    return (
        draft.with_plan(
            membership=membership,
            round=max([draft.state.placement.round_seen, *(beat.round for beat in heartbeats)]) + 1,
            members=members,
            shares=plan.shares if same else None,
            evidence_request="",
            step_seconds=observation.step_seconds or plan.step_seconds,
            secret=_secret(observation, membership),
            store_port=_meeting_port(observation, members),
        )
        .with_life(finished=())
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


def _secret(observation: Observation, membership: int) -> str:
    """By which the members of this membership, and of no other, know each other; hex."""
    return hashlib.sha256(f"{observation.dice}/{membership}".encode()).hexdigest()


def _meeting_port(observation: Observation, members: Sequence[Member]) -> int:
    """Where the first member says that its launcher can serve the meeting; an older launcher says nothing."""
    first = observation.worker(members[0].worker) if members else None
    told = first.heartbeat.meeting_port if first is not None and first.heartbeat is not None else 0
    return told or Plan.store_port
