"""How a change of mode is remembered with the job."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.adapt import Trouble
from pacekeeper_analysis.plan import SyncMode

from .state import Draft, LocalSgd


def entered(draft: Draft, trouble: Trouble, reason: str, incident: str, now: float) -> Draft:
    """After the plan of `draft` has got a Local-SGD mode: since when and why."""
    return draft.with_adaptation(
        local_sgd=LocalSgd(now, trouble, reason, incident),
        mode_changes=draft.state.adaptation.mode_changes.changed(now),
        mode_reason=reason,
    )


def left(draft: Draft, reason: str) -> Draft:
    """The plan in mode Sync again, and why. What led away from it may come back at once: only the mode that mends is
    held, so that a trouble that comes and goes costs a job no more than the time to notice it."""
    plan = replace(draft.plan, version=draft.plan.version + 1, sync_mode=SyncMode.SYNC, evidence_request="")
    return replace(draft, plan=plan).with_adaptation(
        local_sgd=None,
        mode_reason=reason,
        vain=None,
        tolerated_pace=0.0,
        tolerated_behind=0.0,
    )


def given_up(draft: Draft, reason: str, now: float) -> Draft:
    """In mode Sync again, which stays for a time: the other has not helped."""
    changes = draft.state.adaptation.mode_changes.changed(now)
    return left(draft, reason).with_adaptation(mode_changes=changes)


def refused(draft: Draft, words: str, now: float) -> Draft:
    """In mode Sync again, because the ranks cannot follow the other: it is not tried again with this script."""
    reason = f"the ranks refuse {draft.plan.sync_mode}: {words}"
    return given_up(draft, reason, now).with_adaptation(mode_refusal=words)
