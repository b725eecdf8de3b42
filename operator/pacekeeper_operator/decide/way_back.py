"""Back to mode Sync, once what has led to a Local-SGD mode is over: asked of the ranks now and then, live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis import adapt
from pacekeeper_analysis.adapt import Bottleneck
from pacekeeper_analysis.plan import EvidencePart, Plan, Stop, SyncMode
from pacekeeper_analysis.reports import RankWindow

from .. import modes
from ..api import Remedy
from ..observation import Observation, Policy
from ..state import DesiredState, LocalSgdChoice
from . import links
from .straggler import MIN_EVIDENCE_REQUEST_SECONDS, VOLATILE_SLOWDOWN, compute_evidence_pause, is_steady

MIN_REVERT_ANSWERS = 2
"""So many answers in a row must say that it is over: one may be luck."""
MIN_REVERT_STEPS = 32
"""Over so many steps answers must say that slow ranks come and go no more: in a window of eight, all ranks may have
been spared, or hit alike."""

SYNC_COST_RATIO = 1.3
"""A synchronisation does more than the all-reduce of a step, so the S that is reckoned from its time is too high by
about this. A link that is still a little slow brings the mode back, and each such return doubles the time it stays."""


def consider_revert_to_sync(observation: Observation, policy: Policy) -> DesiredState:
    """The draft with the next question, or in mode Sync again."""
    draft, adaptation = observation.desired, observation.state.adaptation.local_sgd
    if adaptation is None or observation.plan.stop is not Stop.NO:
        return draft
    if observation.refusal:
        return modes.reject_local_sgd(draft, observation.refusal, observation.now)
    if not is_steady(observation):
        return draft
    return _evaluate_answers(observation, policy, adaptation) or _request_evidence(observation, adaptation)


def _evaluate_answers(observation: Observation, policy: Policy, adaptation: LocalSgdChoice) -> DesiredState | None:
    """The draft after a complete answer; None: there is none."""
    windows = tuple(window for evidence in observation.evidence for window in evidence.windows)
    if not observation.plan.evidence_request or len(windows) != observation.plan.world_size:
        return None
    draft = observation.desired.with_plan(evidence_request="")
    way = adapt.propose_revert_to_sync(
        windows,
        threshold=observation.job.spec.detection.straggler_slowdown,
        bottleneck=adaptation.trouble,
        global_batch=observation.global_batch,
        usual_slowdowns={
            Bottleneck.VOLATILE: 1 + (VOLATILE_SLOWDOWN - 1) / 2 if adaptation.trouble is Bottleneck.VOLATILE else VOLATILE_SLOWDOWN,
            Bottleneck.COMMUNICATION: SYNC_COST_RATIO,
        },
    )
    if way is None:
        stays = draft.with_adaptation(local_sgd=replace(adaptation, over=0))
        return replace(stays, plan=_space_out_syncs(observation, stays.plan, windows, adaptation))
    since = adaptation.over_since if adaptation.over else observation.step
    adaptation = replace(adaptation, over=adaptation.over + 1, over_since=since)
    sure = adaptation.over >= MIN_REVERT_ANSWERS and (
        adaptation.trouble is not Bottleneck.VOLATILE or observation.step >= adaptation.over_since + MIN_REVERT_STEPS
    )
    if not sure or not draft.state.adaptation.mode_changes.allows(observation.now):
        return draft.with_adaptation(local_sgd=adaptation)
    plan = way.apply_to(draft.plan)
    if policy.find_refusal(Remedy.REBALANCE):
        plan = replace(plan, shares=None)
    return modes.revert_to_sync(replace(draft, plan=plan), way.reason)


def _space_out_syncs(observation: Observation, plan: Plan, windows: Sequence[RankWindow], adaptation: LocalSgdChoice) -> Plan:
    """The plan for a trouble that lasts."""
    if plan.sync_mode is not SyncMode.ASYNC_EDIT:
        return plan
    stayed = observation.now - adaptation.since
    seconds = adapt.lengthen_sync_interval(
        windows,
        plan.sync_seconds,
        stayed,
        threshold=observation.job.spec.detection.straggler_slowdown,
        global_batch=observation.global_batch,
    )
    return replace(plan, sync_seconds=seconds)


def _request_evidence(observation: Observation, adaptation: LocalSgdChoice) -> DesiredState:
    now = observation.now
    # Twice as often as what slows a job down is asked for: a mode that is not exact should not outlast its reason.
    pause = MIN_EVIDENCE_REQUEST_SECONDS if adaptation.over else max(MIN_EVIDENCE_REQUEST_SECONDS, compute_evidence_pause(now - adaptation.since) / 2)
    if now - max(adaptation.asked_at, adaptation.since) < pause:
        return observation.desired
    request = f"way-back-{observation.plan.version + 1}"
    parts = (EvidencePart.WINDOWS, *((EvidencePart.LINKS,) if links.needs_link_evidence(observation) else ()))
    return observation.desired.with_plan(evidence_request=request, evidence_parts=parts).with_adaptation(
        local_sgd=replace(adaptation, asked_at=now)
    )
