"""What a NodeQuarantine needs next, one step at a time, from the quarantine, its node and its probe pod as they are.

A quarantined node carries two marks: our taint, and a cordon of which our field manager is an owner. Every step leads
to a state from which the next one follows, so that an operator that dies between two steps, or in one, loses nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ..api import (
    LABEL_NO_QUARANTINE,
    Inconclusive,
    ProbeResult,
    QuarantineCondition,
    QuarantinePhase,
    Verdict,
    Witness,
)
from ..observation import Ruling
from . import node_probes
from .node_census import Around
from .node_steps import (
    MAX_MESSAGE,
    Delete,
    EndProbe,
    Flag,
    Guard,
    Hold,
    Node,
    ProbePod,
    Quarantine,
    QuarantineStep,
    Release,
    Report,
    Rules,
    StartProbe,
    Unguard,
    Wait,
    clock,
    told,
    unless_known,
    witnessed,
)
from .node_suspicion import consider, said_by

RESYNC_SECONDS = 60.0
UNPROVEN_PROBES = 5
"""So many probes in a row without an image, or that fail as they fail on other nodes, release the node: no quarantine
is for ever for want of a pull secret, or of a driver that probe pods find."""


_PERSON = (Witness.PERSON, "somebody has made or approved the NodeQuarantine")


def decide(
    quarantine: Quarantine, node: Node | None, pod: ProbePod | None, around: Around, now: float
) -> QuarantineStep:
    """The next step. `pod`: of the last probe, if it exists. `now`: seconds since the epoch."""
    why = _why(quarantine, node, around.rules.release_probes)
    if quarantine.deleted or why:
        return _end(quarantine, node, pod, why or "its NodeQuarantine was deleted", now)
    assert node is not None  # _why has dealt with a node that is gone
    if not quarantine.guarded:
        return Guard()
    if quarantine.suspicion:
        return consider(quarantine, node, pod, around, now)
    if quarantine.node_uid is None:
        return Report(replace(quarantine.status, phase=QuarantinePhase.PENDING, node_uid=node.uid, message="is new"))
    if not quarantine.spec.approved:
        return _await_approval(quarantine, node, now)
    return _quarantine(quarantine, node, pod, around.rules, now)


def ruling(quarantine: Quarantine, node_uid: str) -> Ruling:
    """Of a node whose NodeQuarantine exists."""
    name, verdict = quarantine.name, quarantine.verdict
    if quarantine.suspicion and verdict is Verdict.CLEARED:
        return Ruling(verdict, f"{name} is untouched: {quarantine.status.message}")
    if quarantine.over or quarantine.node_uid not in (None, node_uid):
        return Ruling(Verdict.RELEASING, f"an earlier quarantine of {name} is just being released")
    if quarantine.spec.approved:
        return Ruling(Verdict.QUARANTINED, f"{name} is quarantined")
    if not quarantine.suspicion or verdict is Verdict.AWAITS_APPROVAL:
        return Ruling(Verdict.AWAITS_APPROVAL, f"the quarantine of {name} waits for approval")
    return Ruling(verdict, f"{name} is untouched: {quarantine.status.message or 'its suspicion is new'}")


def _why(quarantine: Quarantine, node: Node | None, wanted: int) -> str:
    """Why the node is to be released; "": it is not."""
    if node is None:
        return "the node does not exist any more"
    if quarantine.node_uid not in (None, node.uid):
        return "the node was created anew: it is not the one that was meant"
    if node.opted_out:
        return f"the node's label {LABEL_NO_QUARANTINE} forbids quarantines"
    if node_probes.clean_in_a_row(_release_probes(quarantine)) >= wanted:
        return f"{wanted} probe pods in a row on the node have passed"
    if _unable(quarantine) >= UNPROVEN_PROBES:
        last = _release_probes(quarantine)[-1].message
        return f"its time is over, and {UNPROVEN_PROBES} probe pods in a row could not look at it: {last}"
    return ""


def _end(quarantine: Quarantine, node: Node | None, pod: ProbePod | None, why: str, now: float) -> QuarantineStep:
    if node is not None and node.marked:
        return Release(why)
    if pod is not None and quarantine.last_probe is not None:
        return EndProbe(quarantine.last_probe.pod)
    if quarantine.deleted:
        return Unguard() if quarantine.guarded else Wait(RESYNC_SECONDS)
    if quarantine.status.phase is not QuarantinePhase.RELEASED:
        released = told(quarantine, QuarantinePhase.RELEASED, Verdict.RELEASING, why, now)
        return replace(released, event="QuarantineEnded")
    return Delete()


def _await_approval(quarantine: Quarantine, node: Node, now: float) -> QuarantineStep:
    """Somebody has made it by hand."""
    if node.marked:
        return Release("its quarantine is not approved")
    words = "waits for spec.approved to be set to true by the platform team; the node is untouched"
    found = told(quarantine, QuarantinePhase.PENDING, Verdict.AWAITS_APPROVAL, words, now)
    return unless_known(quarantine, replace(found, event="ApprovalNeeded"), RESYNC_SECONDS)


def _quarantine(quarantine: Quarantine, node: Node, pod: ProbePod | None, rules: Rules, now: float) -> QuarantineStep:
    """It is approved."""
    if not node.held:
        return Hold(again=quarantine.status.cordoned_at is not None)
    if quarantine.status.cordoned_at is None:
        return _begin(quarantine, node, now)
    if quarantine.probe_runs:
        return _watch(quarantine, pod, rules, now)
    if quarantine.last_probe is not None and pod is not None:
        return EndProbe(quarantine.last_probe.pod)
    step = _keep(quarantine, node, quarantine.status.cordoned_at, now)
    # Only where there is nothing else to do: a condition that cannot be set delays neither probes nor the release.
    if isinstance(step, Wait) and rules.condition and not node.flagged:
        return _flag(quarantine, quarantine.status.cordoned_at)
    return step


def _flag(quarantine: Quarantine, since: float) -> Flag:
    """The reason is who has confirmed that the node is bad; the message says why, and where to look."""
    conditions = quarantine.status.conditions
    witness = next((c.reason for c in conditions if c.type == QuarantineCondition.WITNESSED), "")
    where = f"kubectl describe nodequarantine {quarantine.name}"
    why = quarantine.spec.reason[: MAX_MESSAGE - len(where) - 2]
    return Flag(witness or str(Witness.PERSON), f"{why}; {where}", since)


def _begin(quarantine: Quarantine, node: Node, now: float) -> Report:
    """The node has just been marked."""
    since = replace(quarantine, status=replace(quarantine.status, cordoned_at=now))
    found = _held(since, node, now + quarantine.spec.expires_after, now)
    if not any(c.type == QuarantineCondition.WITNESSED and c.status == "True" for c in quarantine.status.conditions):
        found = witnessed(quarantine, found, *(said_by(quarantine) or _PERSON), now)
    return replace(found, event="NodeQuarantined", warning=True)


def _keep(quarantine: Quarantine, node: Node, since: float, now: float) -> QuarantineStep:
    """The node is held, and no probe is under way."""
    due = max(since + quarantine.spec.expires_after, _back_off(quarantine))
    if now >= due:
        begun = replace(quarantine, status=node_probes.begun(quarantine, now))
        words = "a probe pod decides whether the node is released"
        return told(begun, QuarantinePhase.PROBING, Verdict.QUARANTINED, words, now)
    return unless_known(quarantine, _held(quarantine, node, due, now), min(RESYNC_SECONDS, due - now))


def _held(quarantine: Quarantine, node: Node, due: float, now: float) -> Report:
    probes = _release_probes(quarantine)
    last = f"; the last one {node_probes.in_words(probes[-1])}" if probes else ""
    words = f"is tainted and cordoned; a probe pod decides at {clock(due)} whether it is released{last}"
    found = told(quarantine, QuarantinePhase.ACTIVE, Verdict.QUARANTINED, words, now)
    return replace(found, status=replace(found.status, previously_cordoned=node.cordoned_by_others))


def _watch(quarantine: Quarantine, pod: ProbePod | None, rules: Rules, now: float) -> QuarantineStep:
    """A probe is under way."""
    probe = quarantine.last_probe
    assert probe is not None
    ended = node_probes.result(probe, pod, rules.probe_timeout, now)
    if ended is None:
        made = pod is not None and pod.phase
        return Wait(node_probes.PROBE_POLL_SECONDS) if made else StartProbe(probe.pod)
    after = replace(quarantine, status=node_probes.finished(quarantine, ended))
    phase = QuarantinePhase.PROBING if ended.passed else QuarantinePhase.ACTIVE
    words = f"the probe pod {node_probes.in_words(ended)}"
    if ended.passed:
        words += f"; {node_probes.clean_in_a_row(_release_probes(after))} in a row of {rules.release_probes} wanted"
    found = told(after, phase, Verdict.QUARANTINED, words, now)
    event = "ProbePassed" if ended.passed else "ProbeInconclusive" if ended.inconclusive else "ProbeFailed"
    return replace(found, event=event, warning=not ended.passed)


def _release_probes(quarantine: Quarantine) -> tuple[ProbeResult, ...]:
    """Those that have ended and decide upon the release: what was seen before the quarantine began does not."""
    since = quarantine.status.cordoned_at
    if since is None:
        return ()
    return tuple(p for p in quarantine.status.probes if p.finished is not None and p.started >= since)


def _back_off(quarantine: Quarantine) -> float:
    """When the next probe may come: soon after one that has passed, ever later after others."""
    probes = _release_probes(quarantine)
    passed = [i for i, probe in enumerate(probes) if probe.passed]
    if passed and passed[-1] == len(probes) - 1:
        return (probes[-1].finished or 0.0) + node_probes.CLEAN_PAUSE
    return node_probes.due_after(probes[passed[-1] + 1 :] if passed else probes)


def _unable(quarantine: Quarantine) -> int:
    """How many of the last probes in a row could not look, by the installation's fault."""
    probes = _release_probes(quarantine)
    installation = (Inconclusive.IMAGE, Inconclusive.SHARED)
    others = [i for i, probe in enumerate(probes) if probe.inconclusive not in installation]
    return len(probes) - (others[-1] + 1 if others else 0)
