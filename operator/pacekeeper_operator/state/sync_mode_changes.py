"""Changes of the sync mode, as they are remembered with the job."""

from __future__ import annotations

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.stragglers.strategies import Bottleneck

from .desired_state import DesiredState, LocalSgdChoice


def enter_local_sgd(
    desired: DesiredState, bottleneck: Bottleneck, reason: str, incident: str, now: float
) -> DesiredState:
    """Return the state after the plan in `desired` has got a Local-SGD mode, with the time and the reason."""
    return desired.with_requests(revert=None).with_adaptation(
        local_sgd=LocalSgdChoice(now, bottleneck, reason, incident),
        mode_changes=desired.state.adaptation.mode_changes.with_change(now),
        mode_reason=reason,
    )


def revert_to_sync(desired: DesiredState, reason: str) -> DesiredState:
    """Return the state with the plan in mode Sync again, and the reason.

    The bottleneck that led away from it may do so again at once: only a mode that helps has a cool-down. So a
    bottleneck that comes and goes costs a job no more than the time of its detection.
    """
    return (
        desired.with_plan(sync_mode=SyncMode.SYNC)
        .with_requests(evidence=None)
        .with_adaptation(
            local_sgd=None,
            mode_reason=reason,
            fruitless_investigation=None,
            suppressed_relative_time=None,
            suppressed_peer_slowdown=None,
        )
    )


def give_up_local_sgd(desired: DesiredState, reason: str, now: float) -> DesiredState:
    """Return the state in mode Sync again, with a cool-down: the other mode has not helped."""
    changes = desired.state.adaptation.mode_changes.with_change(now)
    return revert_to_sync(desired, reason).with_adaptation(mode_changes=changes)


def reject_local_sgd(desired: DesiredState, refusal: str, now: float) -> DesiredState:
    """Return the state in mode Sync again, because the ranks cannot follow the other mode.

    That mode is not tried again with this script.
    """
    reason = f"the ranks refuse {desired.plan.sync_mode}: {refusal}"
    return give_up_local_sgd(desired, reason, now).with_adaptation(mode_refusal=refusal)
