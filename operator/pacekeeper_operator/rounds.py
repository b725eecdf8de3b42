"""How a new round is written into the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pacekeeper_analysis import adapt
from pacekeeper_analysis.plan import Member, choose_rendezvous

from .observation import Observation
from .state import DesiredState


def begin_round(observation: Observation, members: tuple[Member, ...]) -> DesiredState:
    """A new membership: the next round, above every round that one of the workers has seen."""
    draft, plan = observation.desired, observation.plan
    heartbeats = [view.heartbeat for view in observation.workers if view.heartbeat is not None]
    same = [member.worker for member in members] == [member.worker for member in plan.members]
    membership = max([plan.membership, *(beat.membership for beat in heartbeats)]) + 1
    store_port, secret = _choose_rendezvous_endpoint(observation, members, membership)
    return (
        draft.with_plan(
            membership=membership,
            round=max([draft.state.placement.round_seen, *(beat.round for beat in heartbeats)]) + 1,
            members=members,
            shares=plan.shares if same else None,
            paths=plan.paths if same else None,
            evidence_request="",
            leaving=(),
            figures_band=adapt.compute_recovery_threshold(observation.job.spec.detection.straggler_slowdown) - 1,
            probe=None,
            step_seconds=observation.step_seconds or plan.step_seconds,
            store_port=store_port,
            secret=secret,
        )
        .with_lifecycle(finished=())
        .with_placement(
            placing_since=0.0, attempts=0, vacant_since=0.0, checkpoint_asked_at=0.0, begun_at=observation.now
        )
        .with_budget(in_membership=0)
        .with_adaptation(
            suspicion=None,
            loss=draft.state.adaptation.loss if same else None,
            vain=None,
            link=None,
            shares_refusal=draft.state.adaptation.shares_refusal if same else "",
            tolerated_pace=draft.state.adaptation.tolerated_pace if same else 0.0,
            tolerated_behind=draft.state.adaptation.tolerated_behind if same else 0.0,
        )
    )


def _choose_rendezvous_endpoint(observation: Observation, members: Sequence[Member], membership: int) -> tuple[int, str]:
    """Where the members meet, and the secret by which they, and nobody else, know each other there."""
    views = (observation.find_worker(member.worker) for member in members)
    ports = [view.heartbeat.meeting_port if view is not None and view.heartbeat is not None else 0 for view in views]
    return choose_rendezvous(ports, hashlib.sha256(f"{observation.nonce}/{membership}".encode()).hexdigest())
