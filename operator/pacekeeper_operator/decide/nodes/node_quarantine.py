"""The next step of a NodeQuarantine, computed from the quarantine, its node, and its probe pod.

A quarantined node carries two marks: our taint, and a cordon that our field manager owns. Each step leads to a state
from which the next one follows. So an operator that crashes between two steps, or in one, loses nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ...api.conditions import QuarantineCondition
from ...api.names import LABEL_NO_QUARANTINE
from ...api.node_probe import InconclusiveReason, ProbeResult
from ...api.node_quarantine import QuarantinePhase, QuarantineVerdict, Witness
from ...state.effect_results import QuarantineDecision
from . import node_probes
from .node_suspicion import decide_suspicion_step, find_sign_witness
from .quarantine_steps import (
    MAX_NODE_MESSAGE_CHARACTERS,
    AddFinalizer,
    DeleteQuarantine,
    EndProbe,
    FlagNode,
    HoldNode,
    ProbePod,
    Quarantine,
    QuarantineRules,
    QuarantineStep,
    ReleaseNode,
    RemoveFinalizer,
    RequeueAfter,
    StartProbe,
    TargetNode,
    WriteQuarantineStatus,
    add_witness_condition,
    build_status_write,
    format_clock_time,
    skip_if_written,
)
from .quarantine_usage import QuarantineContext

QUARANTINE_RESYNC_SECONDS = 60.0
MAX_UNABLE_PROBES = 5
"""Probes in a row without an image, or that fail as on other nodes, after which the node is released. A missing pull
secret, or a driver that no probe pod finds, must not keep a quarantine indefinitely."""


_PERSON_WITNESS = (Witness.PERSON, "a person created or approved the NodeQuarantine")


def decide_quarantine_step(
    quarantine: Quarantine, node: TargetNode | None, pod: ProbePod | None, context: QuarantineContext, now: float
) -> QuarantineStep:
    """Return the next step. `pod`: that of the last probe, if it exists. `now`: seconds since the epoch."""
    reason = _explain_release(quarantine, node, context.rules.release_probes)
    if quarantine.deleted or reason:
        return _end_quarantine(quarantine, node, pod, reason or "its NodeQuarantine was deleted", now)
    assert node is not None  # _explain_release returns a reason for a node that is gone
    if not quarantine.guarded:
        return AddFinalizer()
    if quarantine.is_suspicion:
        return decide_suspicion_step(quarantine, node, pod, context, now)
    if quarantine.node_uid is None:
        return WriteQuarantineStatus(
            replace(quarantine.status, phase=QuarantinePhase.PENDING, node_uid=node.uid, message="is new")
        )
    if not quarantine.spec.approved:
        return _await_approval(quarantine, node, now)
    return _enforce_quarantine(quarantine, node, pod, context.rules, now)


def build_quarantine_decision(quarantine: Quarantine, node_uid: str) -> QuarantineDecision:
    """Return the decision about a node whose NodeQuarantine exists, for the jobs that blame it."""
    name, verdict = quarantine.name, quarantine.verdict
    if quarantine.is_suspicion and verdict is QuarantineVerdict.CLEARED:
        return QuarantineDecision(verdict, f"{name} is untouched: {quarantine.status.message}")
    if quarantine.is_over or quarantine.node_uid not in (None, node_uid):
        return QuarantineDecision(QuarantineVerdict.RELEASING, f"an earlier quarantine of {name} is being released")
    if quarantine.spec.approved:
        return QuarantineDecision(QuarantineVerdict.QUARANTINED, f"{name} is quarantined")
    if not quarantine.is_suspicion or verdict is QuarantineVerdict.AWAITS_APPROVAL:
        return QuarantineDecision(QuarantineVerdict.AWAITS_APPROVAL, f"the quarantine of {name} waits for approval")
    return QuarantineDecision(verdict, f"{name} is untouched: {quarantine.status.message or 'its suspicion is new'}")


def _explain_release(quarantine: Quarantine, node: TargetNode | None, required_probes: int) -> str:
    """Return why the node must be released; "": it must not."""
    if node is None:
        return "the node does not exist any more"
    if quarantine.node_uid not in (None, node.uid):
        return "the node was recreated: it is not the one that was quarantined"
    if node.opted_out:
        return f"the node's label {LABEL_NO_QUARANTINE} forbids quarantines"
    if node_probes.count_clean_probes(_list_release_probes(quarantine)) >= required_probes:
        return f"{required_probes} probe pods in a row on the node have passed"
    if _count_unable_probes(quarantine) >= MAX_UNABLE_PROBES:
        last_message = _list_release_probes(quarantine)[-1].message
        return f"its time is over, and {MAX_UNABLE_PROBES} probe pods in a row could not check it: {last_message}"
    return ""


def _end_quarantine(
    quarantine: Quarantine, node: TargetNode | None, pod: ProbePod | None, reason: str, now: float
) -> QuarantineStep:
    """Return the next step of the release: remove the marks, the probe pod, the finalizer, and the object."""
    if node is not None and node.marked:
        return ReleaseNode(reason)
    if pod is not None and quarantine.last_probe is not None:
        return EndProbe(quarantine.last_probe.pod)
    if quarantine.deleted:
        return RemoveFinalizer() if quarantine.guarded else RequeueAfter(QUARANTINE_RESYNC_SECONDS)
    if quarantine.status.phase is not QuarantinePhase.RELEASED:
        write = build_status_write(quarantine, QuarantinePhase.RELEASED, QuarantineVerdict.RELEASING, reason, now)
        return replace(write, event="QuarantineEnded")
    return DeleteQuarantine()


def _await_approval(quarantine: Quarantine, node: TargetNode, now: float) -> QuarantineStep:
    """Return the next step of a quarantine that a person created and that is not approved."""
    if node.marked:
        return ReleaseNode("its quarantine is not approved")
    message = "waits for spec.approved to be set to true by the platform team; the node is untouched"
    write = build_status_write(quarantine, QuarantinePhase.PENDING, QuarantineVerdict.AWAITS_APPROVAL, message, now)
    return skip_if_written(quarantine, replace(write, event="ApprovalNeeded"), QUARANTINE_RESYNC_SECONDS)


def _enforce_quarantine(
    quarantine: Quarantine, node: TargetNode, pod: ProbePod | None, rules: QuarantineRules, now: float
) -> QuarantineStep:
    """Return the next step of an approved quarantine."""
    if not node.held:
        return HoldNode(repeated=quarantine.status.cordoned_at is not None)
    if quarantine.status.cordoned_at is None:
        return _begin_quarantine(quarantine, node, now)
    if quarantine.is_probing:
        return _watch_probe(quarantine, pod, rules, now)
    if quarantine.last_probe is not None and pod is not None:
        return EndProbe(quarantine.last_probe.pod)
    step = _continue_quarantine(quarantine, node, quarantine.status.cordoned_at, now)
    # Only where there is nothing else to do: a condition that cannot be set delays neither probes nor the release.
    if isinstance(step, RequeueAfter) and rules.condition and not node.flagged:
        return _build_flag(quarantine, quarantine.status.cordoned_at)
    return step


def _build_flag(quarantine: Quarantine, since: float) -> FlagNode:
    """Return our condition. Its reason is the witness of the fault; its message has the cause and a command."""
    conditions = quarantine.status.conditions
    witness = next((c.reason for c in conditions if c.type == QuarantineCondition.WITNESSED), "")
    command = f"kubectl describe nodequarantine {quarantine.name}"
    reason = quarantine.spec.reason[: MAX_NODE_MESSAGE_CHARACTERS - len(command) - 2]
    return FlagNode(witness or str(Witness.PERSON), f"{reason}; {command}", since)


def _begin_quarantine(quarantine: Quarantine, node: TargetNode, now: float) -> WriteQuarantineStatus:
    """Return the status of a node that was just marked."""
    begun = replace(quarantine, status=replace(quarantine.status, cordoned_at=now))
    write = _report_quarantined(begun, node, now + quarantine.spec.expires_after, now)
    if not any(c.type == QuarantineCondition.WITNESSED and c.status == "True" for c in quarantine.status.conditions):
        write = add_witness_condition(quarantine, write, *(find_sign_witness(quarantine) or _PERSON_WITNESS), now)
    return replace(write, event="NodeQuarantined", warning=True)


def _continue_quarantine(quarantine: Quarantine, node: TargetNode, since: float, now: float) -> QuarantineStep:
    """Return the next step of a quarantined node without a running probe."""
    due, next_probe_at = since + quarantine.spec.expires_after, _compute_next_probe_time(quarantine)
    if next_probe_at is not None:
        due = max(due, next_probe_at)
    if now >= due:
        begun = replace(quarantine, status=node_probes.add_probe(quarantine, now))
        message = "a probe pod decides whether the node is released"
        return build_status_write(begun, QuarantinePhase.PROBING, QuarantineVerdict.QUARANTINED, message, now)
    return skip_if_written(
        quarantine, _report_quarantined(quarantine, node, due, now), min(QUARANTINE_RESYNC_SECONDS, due - now)
    )


def _report_quarantined(quarantine: Quarantine, node: TargetNode, due: float, now: float) -> WriteQuarantineStatus:
    probes = _list_release_probes(quarantine)
    last_result = f"; the last one {node_probes.describe_probe_result(probes[-1])}" if probes else ""
    message = (
        f"is tainted and cordoned; a probe pod decides at {format_clock_time(due)} whether it is released{last_result}"
    )
    write = build_status_write(quarantine, QuarantinePhase.ACTIVE, QuarantineVerdict.QUARANTINED, message, now)
    return replace(write, status=replace(write.status, previously_cordoned=node.cordoned_by_others))


def _watch_probe(quarantine: Quarantine, pod: ProbePod | None, rules: QuarantineRules, now: float) -> QuarantineStep:
    """Return the next step of a quarantined node with a running probe."""
    probe = quarantine.last_probe
    assert probe is not None
    ended = node_probes.evaluate_node_probe(probe, pod, rules.probe_timeout, now)
    if ended is None:
        exists = pod is not None and pod.phase
        return RequeueAfter(node_probes.NODE_PROBE_POLL_SECONDS) if exists else StartProbe(probe.pod)
    updated = replace(quarantine, status=node_probes.record_probe_result(quarantine, ended))
    phase = QuarantinePhase.PROBING if ended.passed else QuarantinePhase.ACTIVE
    message = f"the probe pod {node_probes.describe_probe_result(ended)}"
    if ended.passed:
        message += (
            f"; {node_probes.count_clean_probes(_list_release_probes(updated))} in a row "
            f"of {rules.release_probes} wanted"
        )
    write = build_status_write(updated, phase, QuarantineVerdict.QUARANTINED, message, now)
    event = "ProbePassed" if ended.passed else "ProbeInconclusive" if ended.inconclusive else "ProbeFailed"
    return replace(write, event=event, warning=not ended.passed)


def _list_release_probes(quarantine: Quarantine) -> tuple[ProbeResult, ...]:
    """Return the ended probes that decide about the release: those that started after the quarantine began."""
    since = quarantine.status.cordoned_at
    if since is None:
        return ()
    return tuple(p for p in quarantine.status.probes if p.finished is not None and p.started >= since)


def _compute_next_probe_time(quarantine: Quarantine) -> float | None:
    """Return when the next probe may start: soon after one that passed, with a growing back-off after others.

    None: there was none yet.
    """
    probes = _list_release_probes(quarantine)
    passed = [i for i, probe in enumerate(probes) if probe.passed]
    if passed and passed[-1] == len(probes) - 1:
        return (probes[-1].finished or 0.0) + node_probes.CLEAN_PROBE_PAUSE_SECONDS
    return node_probes.compute_probe_due_time(probes[passed[-1] + 1 :] if passed else probes)


def _count_unable_probes(quarantine: Quarantine) -> int:
    """Return how many of the last probes in a row were inconclusive by the installation's fault."""
    probes = _list_release_probes(quarantine)
    installation = (InconclusiveReason.IMAGE, InconclusiveReason.SHARED_FAILURE)
    others = [i for i, probe in enumerate(probes) if probe.inconclusive not in installation]
    return len(probes) - (others[-1] + 1 if others else 0)
