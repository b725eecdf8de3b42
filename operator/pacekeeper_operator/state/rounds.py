"""The start of a new round in the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pacekeeper_analysis.protocol.plan import Member, choose_rendezvous
from pacekeeper_analysis.stragglers import strategies

from .desired_state import DesiredState
from .observation import Observation


def begin_round(observation: Observation, members: tuple[Member, ...]) -> DesiredState:
    """Return the desired state with a new membership. Its version and round are above all that a worker has seen."""
    desired, plan = observation.desired, observation.plan
    heartbeats = [view.heartbeat for view in observation.workers if view.heartbeat is not None]
    same_workers = [member.worker for member in members] == [member.worker for member in plan.members]
    membership = max([plan.membership, *(heartbeat.membership for heartbeat in heartbeats)]) + 1
    store_port, secret = _choose_rendezvous_endpoint(observation, members, membership)
    return (
        desired.with_plan(
            version=max([plan.version, *(heartbeat.plan_version for heartbeat in heartbeats)]) + 1,
            membership=membership,
            round=max([desired.state.placement.highest_round, *(heartbeat.round for heartbeat in heartbeats)]) + 1,
            members=members,
            shares=plan.shares if same_workers else None,
            paths=plan.paths if same_workers else None,
            leaving=(),
            metrics_deadband=strategies.compute_recovery_threshold(observation.job.spec.detection.straggler_slowdown)
            - 1,
            step_seconds=observation.progress.step_seconds or plan.step_seconds,
            store_port=store_port,
            secret=secret,
        )
        .with_requests(evidence=None, probe=None, link_check=None)
        .with_lifecycle(finished=())
        .with_placement(
            placing_since=None, attempts=0, vacant_since=None, checkpoint_requested_at=None, begun_at=observation.now
        )
        .with_budget(membership_restarts=0)
        .with_adaptation(
            investigation=None,
            loss=desired.state.adaptation.loss if same_workers else None,
            fruitless_investigation=None,
            shares_refusal=desired.state.adaptation.shares_refusal if same_workers else "",
            suppressed_relative_time=desired.state.adaptation.suppressed_relative_time if same_workers else None,
            suppressed_peer_slowdown=desired.state.adaptation.suppressed_peer_slowdown if same_workers else None,
        )
    )


def _choose_rendezvous_endpoint(
    observation: Observation, members: Sequence[Member], membership: int
) -> tuple[int, str]:
    """Return the port of the rendezvous, and the secret by which its members authenticate each other."""
    views = (observation.find_worker(member.worker) for member in members)
    ports = [
        view.heartbeat.rendezvous_port if view is not None and view.heartbeat is not None else None for view in views
    ]
    return choose_rendezvous(ports, hashlib.sha256(f"{observation.nonce}/{membership}".encode()).hexdigest())
