"""Revert to mode Sync, live, once the reason for a Local-SGD mode is over.

The ranks are asked for evidence of that from time to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis.protocol.plan import Stop, SyncMode
from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest
from pacekeeper_analysis.stragglers import mode_changes, strategies

from ...api.training_job import Remedy
from ...state import sync_mode_changes
from ...state.desired_state import DesiredState, LocalSgdChoice
from ...state.job_requests import RevertRequest
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
    if observation.requests.evidence is None or len(windows) != observation.plan.world_size:
        return None
    desired, progress = observation.desired.with_requests(evidence=None), observation.requests.revert or RevertRequest()
    strategy = mode_changes.propose_lasting_revert(
        windows,
        threshold=observation.job.spec.detection.straggler_slowdown,
        bottleneck=local_sgd.bottleneck,
        global_batch=observation.progress.global_batch,
    )
    if strategy is None:
        desired = desired.with_requests(revert=replace(progress, clear_answers=0, first_clear_step=None))
        return _space_out_syncs(observation.with_desired(desired), windows, local_sgd)
    step = observation.progress.step or 0
    since = step if progress.first_clear_step is None else progress.first_clear_step
    progress = replace(progress, clear_answers=progress.clear_answers + 1, first_clear_step=since)
    is_confirmed = mode_changes.is_mode_change_confirmed(local_sgd.bottleneck, progress.clear_answers, since, step)
    if not is_confirmed or not desired.state.adaptation.mode_changes.allows(observation.now):
        return desired.with_requests(revert=progress)
    plan = strategy.apply_to(desired.plan)
    if policy.find_refusal(Remedy.REBALANCE):
        plan = replace(plan, shares=None)
    return sync_mode_changes.revert_to_sync(replace(desired, plan=plan), strategy.reason)


def _space_out_syncs(
    observation: Observation, windows: Sequence[RankWindow], local_sgd: LocalSgdChoice
) -> DesiredState:
    """Return the state with a longer sync interval, for a bottleneck that lasts."""
    desired, plan = observation.desired, observation.plan
    if plan.sync_mode is not SyncMode.ASYNC_EDIT:
        return desired
    elapsed = observation.now - local_sgd.since
    seconds = strategies.lengthen_sync_interval(
        windows,
        plan.sync_seconds,
        elapsed,
        threshold=observation.job.spec.detection.straggler_slowdown,
        global_batch=observation.progress.global_batch,
    )
    return desired if seconds == plan.sync_seconds else desired.with_plan(sync_seconds=seconds)


def _request_evidence(observation: Observation, local_sgd: LocalSgdChoice) -> DesiredState:
    now, requests = observation.now, observation.requests
    progress = requests.revert or RevertRequest()
    # Twice as often as in an investigation: a mode that is not exact should not outlast its reason.
    pause = (
        MIN_EVIDENCE_REQUEST_SECONDS
        if progress.clear_answers
        else max(MIN_EVIDENCE_REQUEST_SECONDS, compute_evidence_pause(now - local_sgd.since) / 2)
    )
    last = local_sgd.since if progress.requested_at is None else max(progress.requested_at, local_sgd.since)
    if now - last < pause:
        return observation.desired
    parts = (
        EvidencePart.WINDOWS,
        *((EvidencePart.LINKS,) if slow_communication.needs_link_evidence(observation) else ()),
    )
    return observation.desired.with_requests(
        evidence=EvidenceRequest(requests.build_next_name("revert-to-sync", observation.nonce), parts),
        issued=requests.issued + 1,
        revert=replace(progress, requested_at=now),
    )
