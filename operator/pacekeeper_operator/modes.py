"""How a change of mode is remembered with the job."""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.adapt import Bottleneck
from pacekeeper_analysis.plan import SyncMode

from .state import DesiredState, LocalSgdChoice


def enter_local_sgd(desired: DesiredState, bottleneck: Bottleneck, reason: str, incident: str, now: float) -> DesiredState:
    """After the plan of `draft` has got a Local-SGD mode: since when and why."""
    return desired.with_adaptation(
        local_sgd=LocalSgdChoice(now, bottleneck, reason, incident),
        mode_changes=desired.state.adaptation.mode_changes.with_change(now),
        mode_reason=reason,
    )


def revert_to_sync(desired: DesiredState, reason: str) -> DesiredState:
    """The plan in mode Sync again, and why. What led away from it may come back at once: only the mode that mends is
    held, so that a trouble that comes and goes costs a job no more than the time to notice it."""
    plan = replace(desired.plan, version=desired.plan.version + 1, sync_mode=SyncMode.SYNC, evidence_request="")
    return replace(desired, plan=plan).with_adaptation(
        local_sgd=None,
        mode_reason=reason,
        vain=None,
        tolerated_pace=0.0,
        tolerated_behind=0.0,
    )


def give_up_local_sgd(desired: DesiredState, reason: str, now: float) -> DesiredState:
    """In mode Sync again, which stays for a time: the other has not helped."""
    changes = desired.state.adaptation.mode_changes.with_change(now)
    return revert_to_sync(desired, reason).with_adaptation(mode_changes=changes)


def reject_local_sgd(desired: DesiredState, words: str, now: float) -> DesiredState:
    """In mode Sync again, because the ranks cannot follow the other: it is not tried again with this script."""
    reason = f"the ranks refuse {desired.plan.sync_mode}: {words}"
    return give_up_local_sgd(desired, reason, now).with_adaptation(mode_refusal=words)
