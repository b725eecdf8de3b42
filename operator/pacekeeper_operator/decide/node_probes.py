"""Probes of a node by a pod of the operator's own: when the next one is due, and what one has come to.

A probe passes, or fails, or says nothing about its node: a registry that is away, a missing pull secret or a full node
are no reason to quarantine a node, nor to hold one for ever. Nor is what other nodes fail, too. A node that is only
slow beside others fails when a second probe says the same: its neighbours may have been busy for a moment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ..api import Inconclusive, ProbeResult, QuarantineStatus
from ..probe import GPUS
from .node_figures import slow
from .node_steps import ProbePod, Quarantine

PROBE_POLL_SECONDS = 1.0
FIRST_BACK_OFF = 60.0
LONGEST_BACK_OFF = 3600.0
CLEAN_PAUSE = 5.0
"""Between probes that pass one after the other."""
MAX_PROBES = 10
_NO_ROOM = re.compile(
    r"OutOf|Evicted\b|TopologyAffinityError\b|UnexpectedAdmissionError\b.*requested number of devices unavailable",
    re.DOTALL,
)
"""How a kubelet says, first of all, that others have taken what the pod needs: the reason of the pod's status, and for
devices the words, too, since that reason also stands for a driver that is away."""


def result(
    probe: ProbeResult, pod: ProbePod | None, timeout: float, now: float, *, slow_before: bool = True
) -> ProbeResult | None:
    """The probe as it has ended; None: it goes on. `pod`: None, if there is none (yet). `slow_before`: the one before
    has found the node slow, too."""
    ended, in_time = replace(probe, finished=now), now < probe.started + timeout
    if pod is not None and pod.phase == "Failed":
        told = pod.inconclusive is not None or _passed_elsewhere(pod)
        if in_time and not told and not all(other.ended for other in pod.others):
            return None
        reason, why = unshared(pod)
        return _judged(ended, reason, f"{pod.message or 'failed without a word'}{why}")
    if pod is not None and pod.phase == "Succeeded":
        if in_time and not all(other.ended for other in pod.others):
            return None
        return _compared(replace(ended, figures=pod.figures), pod, slow_before)
    if in_time:
        return None
    waiting = f": {pod.message}" if pod is not None and pod.message else ""
    reason, why = (Inconclusive.NOT_RUN, "") if pod is None or not pod.phase else unshared(pod)
    return _judged(ended, reason, f"did not end within {timeout:.0f} s{waiting}{why}")


def unshared(pod: ProbePod) -> tuple[Inconclusive | None, str]:
    """Why a probe that has not succeeded says nothing about its node, and words for it; None: it does. What all nodes
    fail is the installation's fault, so a check counts only where a pod on another node has passed it.

    GPUs that nvidia-smi lists are the node's own, and in a full cluster no other node has one to spare: there it is
    enough that no other node fails in the same way.
    """
    if pod.inconclusive is not None:
        return pod.inconclusive, ""
    if _passed_elsewhere(pod):
        return None, ""
    check = pod.failed_check
    alike = [other.node for other in pod.others if _fails(other, check)]
    if alike:
        return Inconclusive.SHARED, f"; a probe pod on {alike[0]} fails in the same way"
    if check == pod.failing_check:
        return Inconclusive.SHARED, "; nodes that are not suspected fail in the same way"
    if check == GPUS:
        return None, ""
    return Inconclusive.ALONE, "; no probe pod on another node has passed the same check"


def failed_alike(pods: Sequence[ProbePod]) -> str:
    """The check that pods on known-good nodes have all failed; "": there is none."""
    checks = {pod.failed_check for pod in pods}
    return checks.pop() if len(checks) == 1 else ""


def _passed_elsewhere(pod: ProbePod) -> bool:
    """On another node, the check in which this one has failed."""
    return any(pod.failed_check in other.passed_checks for other in pod.others)


def _fails(pod: ProbePod, check: str) -> bool:
    return pod.inconclusive is None and pod.phase != "" and pod.phase != "Succeeded" and pod.failed_check == check


def slowness(pod: ProbePod) -> str:
    """Why its node is slow beside those of its circle; "": it is not, or that cannot be told."""
    figures = {one.node: one.figures for one in (pod, *pod.others) if one.figures is not None}
    return slow(pod.node, figures)


def overtaken(probe: ProbeResult, now: float) -> ProbeResult:
    """Nobody needs its answer any more."""
    ended = replace(probe, finished=now, message="another witness has spoken meanwhile")
    return replace(ended, inconclusive=Inconclusive.OVERTAKEN)


def in_words(ended: ProbeResult) -> str:
    if ended.inconclusive is not None:
        return f"has said nothing about the node: {ended.message}"
    return "passed" if ended.passed else f"failed: {ended.message}"


def begun(quarantine: Quarantine, now: float) -> QuarantineStatus:
    """With one more probe. It is written down before its pod is made."""
    probe = ProbeResult(pod=f"probe-{quarantine.uid[:8]}-{int(now)}", started=now)
    return replace(quarantine.status, probes=(*quarantine.status.probes, probe)[-MAX_PROBES:])


def finished(quarantine: Quarantine, ended: ProbeResult) -> QuarantineStatus:
    """With the last probe as it has ended."""
    return replace(quarantine.status, probes=(*quarantine.status.probes[:-1], ended))


def clean_in_a_row(probes: Sequence[ProbeResult]) -> int:
    """How many of the last ones have passed; those that have said nothing are passed over."""
    said = [probe.passed for probe in probes if probe.passed is not None]
    return len(said) if all(said) else said[::-1].index(False)


def refused_for_room(probe: ProbeResult) -> bool:
    """The kubelet was there, and others have left no room on its node. Whoever has pods there can bring that about; a
    switch or a power supply that fails cannot: pods of a node that is away just wait, and one that is being shut down
    says so."""
    return probe.inconclusive is Inconclusive.NOT_RUN and _NO_ROOM.match(probe.message) is not None


def due_after(probes: Sequence[ProbeResult]) -> float:
    """When the back-off behind so many probes in vain is over; it doubles with each. 0: there were none."""
    if not probes:
        return 0.0
    back_off: float = FIRST_BACK_OFF * 2 ** (len(probes) - 1)
    ended = max(probe.finished or probe.started for probe in probes)
    return ended + min(back_off, LONGEST_BACK_OFF)


def _compared(ended: ProbeResult, pod: ProbePod, slow_before: bool) -> ProbeResult:
    """All checks have passed; whether the node is slow is told by the others of its circle."""
    words = slowness(pod)
    if not words:
        return replace(ended, passed=True, message=f"passed; {pod.message}" if pod.message else "passed")
    return _judged(ended, None if slow_before else Inconclusive.SLOW, f"slow: {words}")


def _judged(ended: ProbeResult, reason: Inconclusive | None, message: str) -> ProbeResult:
    """It has not succeeded: by its node's fault, or by `reason`."""
    return replace(ended, passed=None if reason is not None else False, inconclusive=reason, message=message)
