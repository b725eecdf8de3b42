"""Probes of a node by one of the operator's pods: when the next probe is due, and how a probe has ended.

A probe passes, fails, or is inconclusive. An unavailable registry, a missing pull secret, or a full node is no reason
to quarantine a node, or to hold it indefinitely. Nor is a check that other nodes fail, too. A node that is only slower
than others fails when a second probe confirms it: other work on it may have kept it busy for a moment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...api.node_probe import InconclusiveReason, ProbeResult
from ...api.node_quarantine import QuarantineStatus
from ...node_probe import GPUS
from .probe_measurements import describe_slowness
from .quarantine_steps import ProbePod, Quarantine

NODE_PROBE_POLL_SECONDS = 1.0
FIRST_NODE_PROBE_BACKOFF_SECONDS = 60.0
MAX_NODE_PROBE_BACKOFF_SECONDS = 3600.0
CLEAN_PROBE_PAUSE_SECONDS = 5.0
"""Seconds between probes that pass one after the other."""
MAX_RECORDED_PROBES = 10
_NO_ROOM_PATTERN = re.compile(
    r"OutOf|Evicted\b|TopologyAffinityError\b|UnexpectedAdmissionError\b.*requested number of devices unavailable",
    re.DOTALL,
)
"""Beginning of a kubelet's message that other pods use what the probe pod needs: the reason of the pod's status. For
devices the message counts, too, since the same reason stands for a missing driver."""


def evaluate_node_probe(
    probe: ProbeResult, pod: ProbePod | None, timeout: float, now: float, *, slow_before: bool = True
) -> ProbeResult | None:
    """Return the probe with its result; None: it is still running.

    `pod`: the probe pod; None: there is none (yet). `slow_before`: the probe before found the node slow, too.
    """
    ended, in_time = replace(probe, finished=now), now < probe.started + timeout
    if pod is not None and pod.phase == "Failed":
        is_decided = pod.inconclusive is not None or _has_passed_elsewhere(pod)
        if in_time and not is_decided and not all(peer.ended for peer in pod.group_peers):
            return None
        reason, detail = explain_inconclusive(pod)
        return _close_unsuccessful(ended, reason, f"{pod.message or 'failed without a word'}{detail}")
    if pod is not None and pod.phase == "Succeeded":
        if in_time and not all(peer.ended for peer in pod.group_peers):
            return None
        return _compare_with_group(replace(ended, metrics=pod.measurements), pod, slow_before)
    if in_time:
        return None
    waiting = f": {pod.message}" if pod is not None and pod.message else ""
    reason, detail = (InconclusiveReason.NOT_RUN, "") if pod is None or not pod.phase else explain_inconclusive(pod)
    return _close_unsuccessful(ended, reason, f"did not end within {timeout:.0f} s{waiting}{detail}")


def explain_inconclusive(pod: ProbePod) -> tuple[InconclusiveReason | None, str]:
    """Return why a probe that did not succeed is inconclusive, and a message; None: it shows a fault of the node.

    A check that all nodes fail is the installation's fault, so a check counts only if a pod on another node passed it.

    The GPU check is an exception. nvidia-smi lists the node's own GPUs, and in a full cluster no other node has a free
    GPU. So there it is enough that no other node fails in the same way.
    """
    if pod.inconclusive is not None:
        return pod.inconclusive, ""
    if _has_passed_elsewhere(pod):
        return None, ""
    check = pod.failed_check
    failing_peers = [peer.node for peer in pod.group_peers if _has_failed_check(peer, check)]
    if failing_peers:
        return InconclusiveReason.SHARED_FAILURE, f"; a probe pod on {failing_peers[0]} fails in the same way"
    if check == pod.failing_check:
        return InconclusiveReason.SHARED_FAILURE, "; nodes that are not suspected fail in the same way"
    if check == GPUS:
        return None, ""
    return InconclusiveReason.NO_COMPARISON, "; no probe pod on another node has passed the same check"


def failed_alike(pods: Sequence[ProbePod]) -> str:
    """Return the check that all pods on known-good nodes failed; "": there is none."""
    checks = {pod.failed_check for pod in pods}
    return checks.pop() if len(checks) == 1 else ""


def _has_passed_elsewhere(pod: ProbePod) -> bool:
    """Return whether a pod on another node passed the check that this pod failed."""
    return any(pod.failed_check in peer.passed_checks for peer in pod.group_peers)


def _has_failed_check(pod: ProbePod, check: str) -> bool:
    return pod.inconclusive is None and pod.phase != "" and pod.phase != "Succeeded" and pod.failed_check == check


def describe_pod_slowness(pod: ProbePod) -> str:
    """Return why the pod's node is slower than those of its group; "": it is not, or this cannot be determined."""
    measurements = {
        member.node: member.measurements for member in (pod, *pod.group_peers) if member.measurements is not None
    }
    return describe_slowness(pod.node, measurements)


def mark_overtaken(probe: ProbeResult, now: float) -> ProbeResult:
    """Return the probe as ended without a result, since another witness has confirmed the suspicion."""
    ended = replace(probe, finished=now, message="another witness has confirmed the suspicion")
    return replace(ended, inconclusive=InconclusiveReason.SUPERSEDED)


def describe_probe_result(ended: ProbeResult) -> str:
    """Return the result as a predicate for a message: "passed", "failed: …", or "was inconclusive: …"."""
    if ended.inconclusive is not None:
        return f"was inconclusive: {ended.message}"
    return "passed" if ended.passed else f"failed: {ended.message}"


def add_probe(quarantine: Quarantine, now: float) -> QuarantineStatus:
    """Return the status with one more probe. It is written before the probe pod is created."""
    probe = ProbeResult(pod=f"probe-{quarantine.uid[:8]}-{int(now)}", started=now)
    return replace(quarantine.status, probes=(*quarantine.status.probes, probe)[-MAX_RECORDED_PROBES:])


def record_probe_result(quarantine: Quarantine, ended: ProbeResult) -> QuarantineStatus:
    """Return the status with the result of its last probe."""
    return replace(quarantine.status, probes=(*quarantine.status.probes[:-1], ended))


def count_clean_probes(probes: Sequence[ProbeResult]) -> int:
    """Return how many of the last conclusive probes passed in a row."""
    results = [probe.passed for probe in probes if probe.passed is not None]
    return len(results) if all(results) else results[::-1].index(False)


def is_refused_for_room(probe: ProbeResult) -> bool:
    """Return whether the kubelet refused the probe pod since other pods use the node's resources.

    Any user with pods on the node can cause this. A failed switch or power supply cannot: pods of an unreachable node
    stay pending, and a node that shuts down gives another reason.
    """
    return probe.inconclusive is InconclusiveReason.NOT_RUN and _NO_ROOM_PATTERN.match(probe.message) is not None


def compute_probe_due_time(probes: Sequence[ProbeResult]) -> float | None:
    """Return when the back-off after these unsuccessful probes ends; it doubles with each. None: there were none."""
    if not probes:
        return None
    back_off: float = FIRST_NODE_PROBE_BACKOFF_SECONDS * 2 ** (len(probes) - 1)
    ended_at = max(probe.finished or probe.started for probe in probes)
    return ended_at + min(back_off, MAX_NODE_PROBE_BACKOFF_SECONDS)


def _compare_with_group(ended: ProbeResult, pod: ProbePod, slow_before: bool) -> ProbeResult:
    """Return the result of a probe that passed all checks: it fails if its node is slower than those of its group."""
    slowness = describe_pod_slowness(pod)
    if not slowness:
        return replace(ended, passed=True, message=f"passed; {pod.message}" if pod.message else "passed")
    return _close_unsuccessful(ended, None if slow_before else InconclusiveReason.SLOW, f"slow: {slowness}")


def _close_unsuccessful(ended: ProbeResult, reason: InconclusiveReason | None, message: str) -> ProbeResult:
    """Return the result of an unsuccessful probe: a fault of its node, or inconclusive for `reason`."""
    return replace(ended, passed=None if reason is not None else False, inconclusive=reason, message=message)
