"""Back to mode Sync, once what has led to a Local-SGD mode is over: asked of the ranks now and then, live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper_analysis import adapt
from pacekeeper_analysis.adapt import Trouble
from pacekeeper_analysis.plan import EvidencePart, Plan, Stop, SyncMode
from pacekeeper_analysis.reports import RankWindow

from .. import modes
from ..api import Remedy
from ..observation import Observation, Policy
from ..state import Draft, LocalSgd
from . import links
from .straggler import ASK_SECONDS, WILD, pause_between_questions, steady

ANSWERS = 2
"""So many answers in a row must say that it is over: one may be luck."""
STEPS = 32
"""Over so many steps answers must say that slow ranks come and go no more: in a window of eight, all ranks may have
been spared, or hit alike."""

MORE_THAN_A_STEP = 1.3
"""A synchronisation does more than the all-reduce of a step, so the S that is reckoned from its time is too high by
about this. A link that is still a little slow brings the mode back, and each such return doubles the time it stays."""


def step(observation: Observation, policy: Policy) -> Draft:
    """The draft with the next question, or in mode Sync again."""
    draft, adaptation = observation.draft, observation.state.adaptation.local_sgd
    if adaptation is None or observation.plan.stop is not Stop.NO:
        return draft
    if observation.refused:
        return modes.refused(draft, observation.refused, observation.now)
    if not steady(observation):
        return draft
    return _judge(observation, policy, adaptation) or _ask(observation, adaptation)


def _judge(observation: Observation, policy: Policy, adaptation: LocalSgd) -> Draft | None:
    """The draft after a complete answer; None: there is none."""
    windows = tuple(window for evidence in observation.evidence for window in evidence.windows)
    if not observation.plan.evidence_request or len(windows) != observation.plan.world_size:
        return None
    draft = observation.draft.with_plan(evidence_request="")
    way = adapt.way_back(
        windows,
        threshold=observation.job.spec.detection.straggler_slowdown,
        trouble=adaptation.trouble,
        global_batch=observation.global_batch,
        usual={
            Trouble.VOLATILE: 1 + (WILD - 1) / 2 if adaptation.trouble is Trouble.VOLATILE else WILD,
            Trouble.COMMUNICATION: MORE_THAN_A_STEP,
        },
    )
    if way is None:
        stays = draft.with_adaptation(local_sgd=replace(adaptation, over=0))
        return replace(stays, plan=_rarer(observation, stays.plan, windows, adaptation))
    since = adaptation.over_since if adaptation.over else observation.step
    adaptation = replace(adaptation, over=adaptation.over + 1, over_since=since)
    sure = adaptation.over >= ANSWERS and (
        adaptation.trouble is not Trouble.VOLATILE or observation.step >= adaptation.over_since + STEPS
    )
    if not sure or not draft.state.adaptation.mode_changes.allows(observation.now):
        return draft.with_adaptation(local_sgd=adaptation)
    plan = way.applied_to(draft.plan)
    if policy.refusal(Remedy.REBALANCE):
        plan = replace(plan, shares=None)
    return modes.left(replace(draft, plan=plan), way.reason)


def _rarer(observation: Observation, plan: Plan, windows: Sequence[RankWindow], adaptation: LocalSgd) -> Plan:
    """The plan for a trouble that lasts."""
    if plan.sync_mode is not SyncMode.ASYNC_EDIT:
        return plan
    stayed = observation.now - adaptation.since
    seconds = adapt.rarer(
        windows,
        plan.sync_seconds,
        stayed,
        threshold=observation.job.spec.detection.straggler_slowdown,
        global_batch=observation.global_batch,
    )
    return replace(plan, sync_seconds=seconds)


def _ask(observation: Observation, adaptation: LocalSgd) -> Draft:
    now = observation.now
    # Twice as often as what slows a job down is asked for: a mode that is not exact should not outlast its reason.
    pause = ASK_SECONDS if adaptation.over else max(ASK_SECONDS, pause_between_questions(now - adaptation.since) / 2)
    if now - max(adaptation.asked_at, adaptation.since) < pause:
        return observation.draft
    request = f"way-back-{observation.plan.version + 1}"
    parts = (EvidencePart.WINDOWS, *((EvidencePart.LINKS,) if links.wanted(observation) else ()))
    return observation.draft.with_plan(evidence_request=request, evidence_parts=parts).with_adaptation(
        local_sgd=replace(adaptation, asked_at=now)
    )
