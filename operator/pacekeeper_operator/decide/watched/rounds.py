"""The course of a watched job: when its rounds trained first, and when it has ended."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.protocol.reports import Heartbeat

from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ...state.policy import Policy
from .described_plan import UNWATCHED_MEMBER, end_round, explain_end

MAX_RESTART_GAP_SECONDS = 600.0
"""Time without a running pod after which a job counts as ended. Kubernetes restarts pods at most every 6 minutes."""


def record_progress(observation: Observation, _policy: Policy) -> DesiredState:
    """Return the state with the first steps of the job and of its round, and with the ends of rounds and job."""
    desired, lifecycle = observation.desired, observation.state.lifecycle
    if lifecycle.start_time is None and observation.plan.members:  # it may have begun long before it was observed
        created = (view.pod.created_at for view in observation.workers if view.pod is not None)
        desired = desired.with_lifecycle(start_time=min(created, default=observation.now))
    desired = desired.with_watched(
        rounds=tuple(explain_end(round_, desired.state.incidents.open) for round_ in desired.state.watched.rounds)
    )
    desired = _record_first_step(observation.with_desired(desired))
    return _record_end(observation.with_desired(desired))


def find_training_since(observation: Observation) -> float | None:
    """Return when every described rank had completed the present round's first step; None: some have not."""
    heartbeats = _list_member_heartbeats(observation)
    times = [
        heartbeat.start.first_step_at
        for heartbeat in heartbeats
        if heartbeat is not None
        and heartbeat.round == observation.plan.round
        and heartbeat.start.first_step_at is not None
    ]
    return max(times) if times and len(times) == len(heartbeats) else None


def _list_member_heartbeats(observation: Observation) -> list[Heartbeat | None]:
    names = (member.worker for member in observation.plan.members if member.worker != UNWATCHED_MEMBER)
    views = map(observation.find_worker, names)
    return [None if view is None else view.heartbeat for view in views]


def _record_first_step(observation: Observation) -> DesiredState:
    desired, rounds, since = observation.desired, observation.state.watched.rounds, find_training_since(observation)
    if since is None or not rounds or None not in (rounds[-1].first_step, rounds[-1].resumed_from):
        return desired
    reports = [heartbeat.watched for heartbeat in _list_member_heartbeats(observation) if heartbeat is not None]
    steps = {rank.resumed_from for report in reports if report is not None for rank in report.ranks} - {None}
    resumed_from = min(filter(None, steps), default=None)  # ranks may describe it later than their first step
    if rounds[-1].first_step is not None:
        last = replace(rounds[-1], resumed_from=resumed_from)
        return desired if resumed_from is None else desired.with_watched(rounds=(*rounds[:-1], last))
    last = replace(rounds[-1], first_step=since, resumed_from=resumed_from)
    if observation.state.lifecycle.training_since is None:
        desired = desired.with_lifecycle(training_since=since)
    return desired.with_watched(rounds=(*rounds[:-1], last))


def _record_end(observation: Observation) -> DesiredState:
    """Record that the job has ended, or that it has pods again.

    It has ended once all of its pods have succeeded, or none has run for as long as a controller may wait.
    """
    desired, lifecycle = observation.desired, observation.state.lifecycle
    if any(view.alive for view in observation.workers):
        if lifecycle.completed_at is None and lifecycle.stopped_at is None:
            return desired
        return desired.with_lifecycle(completed_at=None, stopped_at=None)
    if lifecycle.stopped_at is None:
        desired = desired.with_lifecycle(stopped_at=observation.now)
    stopped_at = desired.state.lifecycle.stopped_at or observation.now
    pods = [view.pod for view in observation.workers if view.pod is not None]
    has_succeeded = bool(pods) and all(pod.phase == "Succeeded" for pod in pods)
    is_over = has_succeeded or observation.now - stopped_at >= MAX_RESTART_GAP_SECONDS
    if is_over and lifecycle.completed_at is None and observation.clock_agrees:
        rounds = desired.state.watched.rounds
        last_step, incidents = observation.progress.step, () if has_succeeded else desired.state.incidents.open
        ended = tuple(end_round(last, incidents, stopped_at, last_step) for last in rounds[-1:])
        return desired.with_watched(rounds=(*rounds[:-1], *ended)).with_lifecycle(completed_at=observation.now)
    return desired
