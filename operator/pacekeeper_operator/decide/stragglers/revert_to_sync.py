"""Revert to mode Sync, live, once the reason for a Local-SGD mode is over.

The ranks are asked for evidence of that from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis.protocol.plan import EvidencePart, Plan, Stop, SyncMode
from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.stragglers import mode_changes, strategies

from ...api.training_job import Remedy
from ...state import sync_mode_changes
from ...state.desired_state import DesiredState, LocalSgdChoice
from ...state.observation import Observation
from ...state.policy import Policy
from ..network import slow_communication
from .straggler import MIN_EVIDENCE_REQUEST_SECONDS, compute_evidence_pause, is_steady


def consider_revert_to_sync(observation: Observation, policy: Policy) -> DesiredState:
    """Return the state with the next evidence request, or in mode Sync again."""
    desired, local_sgd = observation.desired, observation.state.adaptation.local_sgd
    if local_sgd is None or observation.plan.stop is not Stop.NO:
        return desired
    if observation.progress.refusal:
        return sync_mode_changes.reject_local_sgd(desired, observation.progress.refusal, observation.now)
    if not is_steady(observation):
        return desired
    return _evaluate_answers(observation, policy, local_sgd) or _request_evidence(observation, local_sgd)


def _evaluate_answers(observation: Observation, policy: Policy, local_sgd: LocalSgdChoice) -> DesiredState | None:
    """Return the state after a complete answer; None: there is none."""
    windows = tuple(window for evidence in observation.evidence for window in evidence.windows)
    if not observation.plan.evidence_request or len(windows) != observation.plan.world_size:
        return None
    desired = observation.desired.with_plan(evidence_request="")
    strategy = mode_changes.propose_lasting_revert(
        windows,
        threshold=observation.job.spec.detection.straggler_slowdown,
        bottleneck=local_sgd.bottleneck,
        global_batch=observation.progress.global_batch,
    )
    if strategy is None:
        updated = desired.with_adaptation(local_sgd=replace(local_sgd, clear_answers=0, first_clear_step=None))
        return replace(updated, plan=_space_out_syncs(observation, updated.plan, windows, local_sgd))
    step = observation.progress.step or 0
    since = step if local_sgd.first_clear_step is None else local_sgd.first_clear_step
    local_sgd = replace(local_sgd, clear_answers=local_sgd.clear_answers + 1, first_clear_step=since)
    is_confirmed = mode_changes.is_mode_change_confirmed(local_sgd.bottleneck, local_sgd.clear_answers, since, step)
    if not is_confirmed or not desired.state.adaptation.mode_changes.allows(observation.now):
        return desired.with_adaptation(local_sgd=local_sgd)
    plan = strategy.apply_to(desired.plan)
    if policy.find_refusal(Remedy.REBALANCE):
        plan = replace(plan, shares=None)
    return sync_mode_changes.revert_to_sync(replace(desired, plan=plan), strategy.reason)


def _space_out_syncs(
    observation: Observation, plan: Plan, windows: Sequence[RankWindow], local_sgd: LocalSgdChoice
) -> Plan:
    """Return the plan with a longer sync interval, for a bottleneck that lasts."""
    if plan.sync_mode is not SyncMode.ASYNC_EDIT:
        return plan
    elapsed = observation.now - local_sgd.since
    seconds = strategies.lengthen_sync_interval(
        windows,
        plan.sync_seconds,
        elapsed,
        threshold=observation.job.spec.detection.straggler_slowdown,
        global_batch=observation.progress.global_batch,
    )
    return replace(plan, sync_seconds=seconds)


def _request_evidence(observation: Observation, local_sgd: LocalSgdChoice) -> DesiredState:
    now = observation.now
    # Twice as often as in an investigation: a mode that is not exact should not outlast its reason.
    pause = (
        MIN_EVIDENCE_REQUEST_SECONDS
        if local_sgd.clear_answers
        else max(MIN_EVIDENCE_REQUEST_SECONDS, compute_evidence_pause(now - local_sgd.since) / 2)
    )
    last = local_sgd.since if local_sgd.requested_at is None else max(local_sgd.requested_at, local_sgd.since)
    if now - last < pause:
        return observation.desired
    request = f"revert-to-sync-{observation.plan.version + 1}"
    parts = (
        EvidencePart.WINDOWS,
        *((EvidencePart.LINKS,) if slow_communication.needs_link_evidence(observation) else ()),
    )
    return observation.desired.with_plan(evidence_request=request, evidence_parts=parts).with_adaptation(
        local_sgd=replace(local_sgd, requested_at=now)
    )
