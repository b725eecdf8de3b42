"""What a NodeQuarantine needs next, one step at a time, from the quarantine, its node and its probe pod as they are.

A quarantined node carries two marks: our taint, and a cordon of which our field manager is an owner. Every step leads
to a state from which the next one follows, so that an operator that dies between two steps, or in one, loses nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ..api import (
    LABEL_NO_QUARANTINE,
    InconclusiveReason,
    ProbeResult,
    QuarantineCondition,
    QuarantinePhase,
    QuarantineVerdict,
    Witness,
)
from ..observation import QuarantineDecision
from . import node_probes
from .node_census import QuarantineContext
from .node_steps import (
    MAX_NODE_MESSAGE_CHARACTERS,
    DeleteQuarantine,
    EndProbe,
    FlagNode,
    AddFinalizer,
    HoldNode,
    TargetNode,
    ProbePod,
    Quarantine,
    QuarantineStep,
    ReleaseNode,
    WriteQuarantineStatus,
    QuarantineRules,
    StartProbe,
    RemoveFinalizer,
    RequeueAfter,
    format_clock_time,
    build_status_write,
    skip_if_written,
    add_witness_condition,
)
from .node_suspicion import decide_suspicion_step, find_sign_witness

QUARANTINE_RESYNC_SECONDS = 60.0
MAX_UNABLE_PROBES = 5
"""So many probes in a row without an image, or that fail as they fail on other nodes, release the node: no quarantine
is for ever for want of a pull secret, or of a driver that probe pods find."""


_PERSON_WITNESS = (Witness.PERSON, "somebody has made or approved the NodeQuarantine")


def decide_quarantine_step(
    quarantine: Quarantine, node: TargetNode | None, pod: ProbePod | None, context: QuarantineContext, now: float
) -> QuarantineStep:
    """The next step. `pod`: of the last probe, if it exists. `now`: seconds since the epoch."""
    why = _explain_release(quarantine, node, context.rules.release_probes)
    if quarantine.deleted or why:
        return _end_quarantine(quarantine, node, pod, why or "its NodeQuarantine was deleted", now)
    assert node is not None  # _why has dealt with a node that is gone
    if not quarantine.guarded:
        return AddFinalizer()
    if quarantine.is_suspicion:
        return decide_suspicion_step(quarantine, node, pod, context, now)
    if quarantine.node_uid is None:
        return WriteQuarantineStatus(replace(quarantine.status, phase=QuarantinePhase.PENDING, node_uid=node.uid, message="is new"))
    if not quarantine.spec.approved:
        return _await_approval(quarantine, node, now)
    return _enforce_quarantine(quarantine, node, pod, context.rules, now)


def build_quarantine_decision(quarantine: Quarantine, node_uid: str) -> QuarantineDecision:
    """Of a node whose NodeQuarantine exists."""
    name, verdict = quarantine.name, quarantine.verdict
    if quarantine.is_suspicion and verdict is QuarantineVerdict.CLEARED:
        return QuarantineDecision(verdict, f"{name} is untouched: {quarantine.status.message}")
    if quarantine.is_over or quarantine.node_uid not in (None, node_uid):
        return QuarantineDecision(QuarantineVerdict.RELEASING, f"an earlier quarantine of {name} is just being released")
    if quarantine.spec.approved:
        return QuarantineDecision(QuarantineVerdict.QUARANTINED, f"{name} is quarantined")
    if not quarantine.is_suspicion or verdict is QuarantineVerdict.AWAITS_APPROVAL:
        return QuarantineDecision(QuarantineVerdict.AWAITS_APPROVAL, f"the quarantine of {name} waits for approval")
    return QuarantineDecision(verdict, f"{name} is untouched: {quarantine.status.message or 'its suspicion is new'}")


def _explain_release(quarantine: Quarantine, node: TargetNode | None, wanted: int) -> str:
    """Why the node is to be released; "": it is not."""
    if node is None:
        return "the node does not exist any more"
    if quarantine.node_uid not in (None, node.uid):
        return "the node was created anew: it is not the one that was meant"
    if node.opted_out:
        return f"the node's label {LABEL_NO_QUARANTINE} forbids quarantines"
    if node_probes.count_clean_probes(_list_release_probes(quarantine)) >= wanted:
        return f"{wanted} probe pods in a row on the node have passed"
    if _count_unable_probes(quarantine) >= MAX_UNABLE_PROBES:
        last = _list_release_probes(quarantine)[-1].message
        return f"its time is over, and {MAX_UNABLE_PROBES} probe pods in a row could not look at it: {last}"
    return ""


def _end_quarantine(quarantine: Quarantine, node: TargetNode | None, pod: ProbePod | None, why: str, now: float) -> QuarantineStep:
    if node is not None and node.marked:
        return ReleaseNode(why)
    if pod is not None and quarantine.last_probe is not None:
        return EndProbe(quarantine.last_probe.pod)
    if quarantine.deleted:
        return RemoveFinalizer() if quarantine.guarded else RequeueAfter(QUARANTINE_RESYNC_SECONDS)
    if quarantine.status.phase is not QuarantinePhase.RELEASED:
        released = build_status_write(quarantine, QuarantinePhase.RELEASED, QuarantineVerdict.RELEASING, why, now)
        return replace(released, event="QuarantineEnded")
    return DeleteQuarantine()


def _await_approval(quarantine: Quarantine, node: TargetNode, now: float) -> QuarantineStep:
    """Somebody has made it by hand."""
    if node.marked:
        return ReleaseNode("its quarantine is not approved")
    words = "waits for spec.approved to be set to true by the platform team; the node is untouched"
    found = build_status_write(quarantine, QuarantinePhase.PENDING, QuarantineVerdict.AWAITS_APPROVAL, words, now)
    return skip_if_written(quarantine, replace(found, event="ApprovalNeeded"), QUARANTINE_RESYNC_SECONDS)


def _enforce_quarantine(quarantine: Quarantine, node: TargetNode, pod: ProbePod | None, rules: QuarantineRules, now: float) -> QuarantineStep:
    """It is approved."""
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
    """The reason is who has confirmed that the node is bad; the message says why, and where to look."""
    conditions = quarantine.status.conditions
    witness = next((c.reason for c in conditions if c.type == QuarantineCondition.WITNESSED), "")
    where = f"kubectl describe nodequarantine {quarantine.name}"
    why = quarantine.spec.reason[: MAX_NODE_MESSAGE_CHARACTERS - len(where) - 2]
    return FlagNode(witness or str(Witness.PERSON), f"{why}; {where}", since)


def _begin_quarantine(quarantine: Quarantine, node: TargetNode, now: float) -> WriteQuarantineStatus:
    """The node has just been marked."""
    since = replace(quarantine, status=replace(quarantine.status, cordoned_at=now))
    found = _report_quarantined(since, node, now + quarantine.spec.expires_after, now)
    if not any(c.type == QuarantineCondition.WITNESSED and c.status == "True" for c in quarantine.status.conditions):
        found = add_witness_condition(quarantine, found, *(find_sign_witness(quarantine) or _PERSON_WITNESS), now)
    return replace(found, event="NodeQuarantined", warning=True)


def _continue_quarantine(quarantine: Quarantine, node: TargetNode, since: float, now: float) -> QuarantineStep:
    """The node is held, and no probe is under way."""
    due = max(since + quarantine.spec.expires_after, _compute_next_probe_time(quarantine))
    if now >= due:
        begun = replace(quarantine, status=node_probes.add_probe(quarantine, now))
        words = "a probe pod decides whether the node is released"
        return build_status_write(begun, QuarantinePhase.PROBING, QuarantineVerdict.QUARANTINED, words, now)
    return skip_if_written(quarantine, _report_quarantined(quarantine, node, due, now), min(QUARANTINE_RESYNC_SECONDS, due - now))


def _report_quarantined(quarantine: Quarantine, node: TargetNode, due: float, now: float) -> WriteQuarantineStatus:
    probes = _list_release_probes(quarantine)
    last = f"; the last one {node_probes.describe_probe_result(probes[-1])}" if probes else ""
    words = f"is tainted and cordoned; a probe pod decides at {format_clock_time(due)} whether it is released{last}"
    found = build_status_write(quarantine, QuarantinePhase.ACTIVE, QuarantineVerdict.QUARANTINED, words, now)
    return replace(found, status=replace(found.status, previously_cordoned=node.cordoned_by_others))


def _watch_probe(quarantine: Quarantine, pod: ProbePod | None, rules: QuarantineRules, now: float) -> QuarantineStep:
    """A probe is under way."""
    probe = quarantine.last_probe
    assert probe is not None
    ended = node_probes.evaluate_node_probe(probe, pod, rules.probe_timeout, now)
    if ended is None:
        made = pod is not None and pod.phase
        return RequeueAfter(node_probes.NODE_PROBE_POLL_SECONDS) if made else StartProbe(probe.pod)
    after = replace(quarantine, status=node_probes.record_probe_result(quarantine, ended))
    phase = QuarantinePhase.PROBING if ended.passed else QuarantinePhase.ACTIVE
    words = f"the probe pod {node_probes.describe_probe_result(ended)}"
    if ended.passed:
        words += f"; {node_probes.count_clean_probes(_list_release_probes(after))} in a row of {rules.release_probes} wanted"
    found = build_status_write(after, phase, QuarantineVerdict.QUARANTINED, words, now)
    event = "ProbePassed" if ended.passed else "ProbeInconclusive" if ended.inconclusive else "ProbeFailed"
    return replace(found, event=event, warning=not ended.passed)


def _list_release_probes(quarantine: Quarantine) -> tuple[ProbeResult, ...]:
    """Those that have ended and decide upon the release: what was seen before the quarantine began does not."""
    since = quarantine.status.cordoned_at
    if since is None:
        return ()
    return tuple(p for p in quarantine.status.probes if p.finished is not None and p.started >= since)


def _compute_next_probe_time(quarantine: Quarantine) -> float:
    """When the next probe may come: soon after one that has passed, ever later after others."""
    probes = _list_release_probes(quarantine)
    passed = [i for i, probe in enumerate(probes) if probe.passed]
    if passed and passed[-1] == len(probes) - 1:
        return (probes[-1].finished or 0.0) + node_probes.CLEAN_PROBE_PAUSE_SECONDS
    return node_probes.compute_probe_due_time(probes[passed[-1] + 1 :] if passed else probes)


def _count_unable_probes(quarantine: Quarantine) -> int:
    """How many of the last probes in a row could not look, by the installation's fault."""
    probes = _list_release_probes(quarantine)
    installation = (InconclusiveReason.IMAGE, InconclusiveReason.SHARED)
    others = [i for i, probe in enumerate(probes) if probe.inconclusive not in installation]
    return len(probes) - (others[-1] + 1 if others else 0)
