"""The next step for a node that jobs blame. The node is untouched until a witness outside the jobs' pods confirms it.

A job can report anything about the node that its pods run on. So its report only raises a suspicion. What decides is
the node's own condition, GPU series that the platform vouches for, or one of the operator's probe pods on that node.
A confirmed suspicion is delayed for a moment, in which a fault that many nodes share becomes visible.

Nodes that fail together are held together, until each of the others is settled: a probe has passed on it, or its
suspicion was dropped. That one node recovers first shows nothing about those that still boot. The last node is decided
by what was observed of it since. That it is not Ready does not count: it may take longest to boot, and no pod is placed
on it anyway.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile

from ...api.node_probe import InconclusiveReason, ProbeResult
from ...api.node_quarantine import NodeSuspicion, QuarantinePhase, QuarantineVerdict, Witness
from . import node_probes
from .quarantine_steps import (
    ApproveQuarantine,
    DeleteQuarantine,
    EndProbe,
    ProbePod,
    Quarantine,
    QuarantineStep,
    ReleaseNode,
    RequeueAfter,
    StartProbe,
    TargetNode,
    WriteQuarantineStatus,
    add_witness_condition,
    build_status_write,
    format_clock_time,
    skip_if_written,
)
from .quarantine_usage import QuarantineContext, is_worth_probing

CONFIRMED_SUSPICION_HOLD_SECONDS = 10.0
"""Seconds that a confirmed suspicion waits from its first sign. Other nodes with the same power or network fault become
suspect in this time."""
SUSPICION_TTL_SECONDS = 600.0
"""Seconds after its last sign when a suspicion without a result is dropped."""
CLEARED_NODE_TTL_SECONDS = 600.0
"""Seconds after a passed probe in which jobs alone cannot cause another one."""
REPEATED_SIGN_SECONDS = 60.0
"""Seconds before which a namespace's repeated sign is ignored."""
MAX_NODE_SIGNS = 8
MAX_CONCURRENT_SUSPICION_PROBES = 8
"""Concurrent probes of suspicions in the whole cluster. The budget bounds those that decide about a release."""
SUSPICION_POLL_SECONDS = 5.0
SUSPICION_RESYNC_SECONDS = 60.0
BREAKER_LATCH_SECONDS = 300.0
"""Seconds after the last sign from which on the breaker's verdict stays until the suspicion is dropped. The suspicions
of the other nodes may have been dropped earlier."""


def decide_suspicion_step(
    quarantine: Quarantine, node: TargetNode, pod: ProbePod | None, context: QuarantineContext, now: float
) -> QuarantineStep:
    """Return the next step of a suspicion. `pod`: that of the last probe, if it exists."""
    if quarantine.status.phase is QuarantinePhase.RELEASED:
        return DeleteQuarantine()
    if node.marked:
        return ReleaseNode("its quarantine is not approved")
    witness = find_witness(quarantine, node)
    if quarantine.is_probing:
        if witness is Witness.PROBE and quarantine.verdict is QuarantineVerdict.BREAKER:
            witness = None  # probed again: this probe may refute the one that failed while many nodes did
        return _watch_probe(quarantine, node, pod, witness, context.rules.probe_timeout, now)
    if quarantine.last_probe is not None and pod is not None:
        return EndProbe(quarantine.last_probe.pod)
    return (
        _decide_unconfirmed(quarantine, context, now)
        if witness is None
        else _decide_confirmed(quarantine, node, context, witness, now)
    )


def find_witness(quarantine: Quarantine, node: TargetNode) -> Witness | None:
    """Return the witness that confirms the suspicion; None: there is none yet.

    A node's condition is read from the node as it is now, not from the signs.
    """
    signs, probe = quarantine.open_signs, quarantine.last_conclusive_probe
    if any(sign.witness is Witness.GPU_SERIES for sign in signs):
        return Witness.GPU_SERIES
    if signs and (node.broken or not node.ready):
        return Witness.NODE_CONDITION
    if any(sign.witness is Witness.PROBE for sign in signs):  # by a preflight: placement.preflight
        return Witness.PROBE
    return Witness.PROBE if probe is not None and probe.passed is False else None


def find_sign_witness(quarantine: Quarantine) -> tuple[Witness, str] | None:
    """Return the witness that a sign itself names, and its reason; None: the status must name the witness."""
    signs = quarantine.open_signs
    vouched = next((sign for sign in signs if sign.is_from_platform or sign.witness is Witness.GPU_SERIES), None)
    return None if vouched is None else (vouched.witness, vouched.reason)


def is_probe_start(quarantine: Quarantine, step: QuarantineStep) -> bool:
    """Return whether `step` starts a probe of a suspicion, of which only some may run at once."""
    if not quarantine.is_suspicion or quarantine.is_probing or not isinstance(step, WriteQuarantineStatus):
        return False
    return replace(quarantine, status=step.status).is_probing


def with_sign(signs: tuple[NodeSuspicion, ...], sign: NodeSuspicion) -> tuple[NodeSuspicion, ...]:
    """Return `signs` with `sign`, one per namespace. A mere repetition changes nothing."""
    previous = next((existing for existing in signs if existing.namespace == sign.namespace), None)
    if previous is not None and not _is_new_sign(previous, sign):
        return signs
    if previous is not None:
        sign = replace(sign, since=previous.first_reported_at)
    others = [existing for existing in signs if existing.namespace != sign.namespace]
    if len(others) == MAX_NODE_SIGNS:
        others.remove(next((existing for existing in others if existing.witness is Witness.NONE), others[0]))
    return (*others, sign)


def count_allowed_nodes(nodes: int, max_nodes: int, max_share: float) -> int:
    """Return how many of `nodes` may be quarantined at once: by share, but at least one, and by count."""
    rounding = 1e-9  # 0.29 · 100 is 28.999…
    return min(max_nodes, max(1, math.floor(max_share * nodes + rounding)))


def _is_new_sign(previous: NodeSuspicion, sign: NodeSuspicion) -> bool:
    if previous.incident == sign.incident:
        return False
    confirmed = previous.witness is Witness.NONE and sign.witness in (Witness.GPU_SERIES, Witness.PROBE)
    stronger = (previous.weak and not sign.weak) or confirmed
    return stronger or sign.at >= previous.at + REPEATED_SIGN_SECONDS


def _decide_unconfirmed(quarantine: Quarantine, context: QuarantineContext, now: float) -> QuarantineStep:
    """Return the next step of a suspicion without a witness: a probe pod decides, when one is due."""
    if quarantine.cleared_at is not None:
        return _retain_cleared(quarantine, quarantine.cleared_at, now)
    if now >= quarantine.last_sign_at + SUSPICION_TTL_SECONDS:
        return _drop_suspicion(quarantine, "no witness has confirmed the suspicion", now)
    if not is_worth_probing(quarantine):
        return _report_waiting(quarantine, "waits for a report from a second namespace", SUSPICION_TTL_SECONDS, now)
    due = node_probes.compute_probe_due_time(quarantine.inconclusive_probes)
    if due is not None and now < due:
        last_result = node_probes.describe_probe_result(quarantine.inconclusive_probes[0])
        return _report_waiting(
            quarantine, f"the last probe {last_result}; the next one comes at {format_clock_time(due)}", due - now, now
        )
    if context.usage.count_probing(quarantine.name) >= MAX_CONCURRENT_SUSPICION_PROBES:
        return _report_waiting(quarantine, "waits for its turn to be probed", SUSPICION_POLL_SECONDS, now)
    probing = replace(quarantine, status=node_probes.add_probe(quarantine, now))
    return _report_suspected(probing, "a probe pod on the node decides whether it is quarantined", now)


def _watch_probe(
    quarantine: Quarantine, node: TargetNode, pod: ProbePod | None, witness: Witness | None, timeout: float, now: float
) -> QuarantineStep:
    """Return the next step of a suspicion with a running probe."""
    probe = quarantine.last_probe
    assert probe is not None
    slow_before = any(earlier.inconclusive is InconclusiveReason.SLOW for earlier in quarantine.status.probes[-2:-1])
    ended = node_probes.mark_overtaken(probe, now)
    if witness is None:
        result = node_probes.evaluate_node_probe(probe, pod, timeout, now, slow_before=slow_before)
        if result is None:
            exists = pod is not None and pod.phase
            return (
                RequeueAfter(node_probes.NODE_PROBE_POLL_SECONDS) if exists else StartProbe(probe.pod, share_gpus=True)
            )
        ended = result
    updated = replace(quarantine, status=node_probes.record_probe_result(quarantine, ended))
    if ended.passed:
        return replace(_report_cleared(updated, now), event="NodeCleared")
    event = {None: "ProbeFailed", InconclusiveReason.SUPERSEDED: ""}.get(ended.inconclusive, "ProbeInconclusive")
    message = f"the probe pod {node_probes.describe_probe_result(ended)}"
    if witness is None:
        write = _report_suspected(updated, message, now)
    else:
        write = _report_confirmed(
            updated, message, witness, _describe_evidence(updated, node, witness), now, _get_suspect_verdict(updated)
        )
    return replace(write, event=event, warning=True)


def _decide_confirmed(
    quarantine: Quarantine, node: TargetNode, context: QuarantineContext, witness: Witness, now: float
) -> QuarantineStep:
    """Return the next step of a suspicion with a witness.

    A tripped breaker is reported at once. That it does not trip shows only after a delay.
    """
    if quarantine.status.phase is QuarantinePhase.PENDING:
        return RequeueAfter(SUSPICION_RESYNC_SECONDS)
    evidence, tripped = (
        _describe_evidence(quarantine, node, witness),
        _explain_breaker(quarantine, node, context, witness, now),
    )
    if tripped and witness is Witness.PROBE and node.ready and _is_reprobe_due(quarantine, context, now):
        probing = replace(quarantine, status=node_probes.add_probe(quarantine, now))
        return _report_suspected(
            probing, "it failed with many others: another probe decides whether it has recovered", now
        )
    first_sign = min((sign.at for sign in quarantine.open_signs), default=0.0)
    if now < first_sign + CONFIRMED_SUSPICION_HOLD_SECONDS and not tripped and not context.is_breaker_disabled:
        message = f"waits {CONFIRMED_SUSPICION_HOLD_SECONDS:.0f} s, in which a fault that many nodes share would show"
        write = _report_confirmed(quarantine, message, witness, evidence, now)
        return skip_if_written(quarantine, write, max(0.0, first_sign + CONFIRMED_SUSPICION_HOLD_SECONDS - now))
    verdict, message = _choose_verdict(quarantine, context, tripped)
    if verdict is QuarantineVerdict.QUARANTINED:
        if find_sign_witness(quarantine) == (
            witness,
            evidence,
        ):  # a sign already shows the reason for the approval
            return ApproveQuarantine()
        approving = _report_confirmed(quarantine, "is to be quarantined", witness, evidence, now)
        return ApproveQuarantine() if approving.status == quarantine.status else approving
    if verdict is QuarantineVerdict.AWAITS_APPROVAL:
        write = build_status_write(quarantine, QuarantinePhase.PENDING, QuarantineVerdict.AWAITS_APPROVAL, message, now)
        return replace(add_witness_condition(quarantine, write, witness, evidence, now), event="ApprovalNeeded")
    if now >= quarantine.last_sign_at + SUSPICION_TTL_SECONDS:
        return _drop_suspicion(quarantine, message, now)
    write = build_status_write(quarantine, QuarantinePhase.BLOCKED, verdict, message, now)
    witnessed = add_witness_condition(quarantine, write, witness, evidence, now)
    is_new = quarantine.verdict is not verdict
    return skip_if_written(
        quarantine,
        replace(witnessed, event="QuarantineBlocked" if is_new else "", warning=True),
        SUSPICION_POLL_SECONDS,
    )


def _choose_verdict(quarantine: Quarantine, context: QuarantineContext, tripped: str) -> tuple[QuarantineVerdict, str]:
    """Return the verdict on a confirmed suspicion, and its message."""
    rules = context.rules
    if tripped:
        return QuarantineVerdict.BREAKER, tripped
    if context.pause_reason:
        return QuarantineVerdict.PAUSED, context.pause_reason
    # A request for approval uses no budget, but people must not be flooded with requests either.
    used = context.usage.count_used_budget(quarantine.name, include_requests=not rules.acts)
    nodes = context.node_count or 0
    allowed = count_allowed_nodes(nodes, rules.max_nodes, rules.max_share)
    if used >= allowed:
        return QuarantineVerdict.BUDGET_SPENT, f"the budget of {allowed} of {nodes} nodes is spent"
    if rules.acts:
        return QuarantineVerdict.QUARANTINED, ""
    message = "waits for spec.approved to be set to true by the platform team; the node is untouched"
    return QuarantineVerdict.AWAITS_APPROVAL, message


def _explain_breaker(
    quarantine: Quarantine, node: TargetNode, context: QuarantineContext, witness: Witness, now: float
) -> str:
    """Return why the node is held as one of many that failed together; "": it is decided on by itself."""
    threshold, is_tripped = context.rules.breaker_nodes, quarantine.verdict is QuarantineVerdict.BREAKER
    if not is_tripped and context.usage.count_failing_together(quarantine) < threshold:
        return ""
    unsettled = context.usage.count_unsettled(quarantine)
    is_latched = is_tripped and now >= quarantine.last_sign_at + BREAKER_LATCH_SECONDS
    if unsettled or is_latched or threshold <= 1:
        return f"the breaker has tripped at {threshold} nodes: many fail at once, probably by a cause that they share"
    if not _has_own_fault_since(quarantine, node, witness, context.usage.get_last_cleared_at(quarantine.name)):
        return "it failed with many others, which have recovered: it is untouched until it shows its own fault"
    return ""


def _has_own_fault_since(quarantine: Quarantine, node: TargetNode, witness: Witness, since: float | None) -> bool:
    """Return whether the node has its own fault. A probe that failed while the others were down does not show one."""
    if witness is Witness.NODE_CONDITION:
        return bool(node.broken)
    if witness is Witness.PROBE:
        probe = quarantine.last_conclusive_probe
        sign_times = [sign.at for sign in quarantine.open_signs if sign.witness is Witness.PROBE]
        if probe is not None and probe.passed is False:
            sign_times.append(probe.started)
        return since is None or max(sign_times, default=-math.inf) >= since
    return True


def _is_reprobe_due(quarantine: Quarantine, context: QuarantineContext, now: float) -> bool:
    """Return whether to probe a node again that failed with many. Its verdict is written first."""
    if (
        quarantine.verdict is not QuarantineVerdict.BREAKER
        or context.usage.count_probing(quarantine.name) >= MAX_CONCURRENT_SUSPICION_PROBES
    ):
        return False
    since_passed = [*takewhile(lambda probe: not probe.passed, reversed(quarantine.status.probes))]
    due = node_probes.compute_probe_due_time(since_passed)
    return due is None or now >= due


def _report_confirmed(
    quarantine: Quarantine,
    message: str,
    witness: Witness,
    evidence: str,
    now: float,
    verdict: QuarantineVerdict = QuarantineVerdict.SUSPECTED,
) -> WriteQuarantineStatus:
    write = build_status_write(quarantine, QuarantinePhase.SUSPECTED, verdict, message, now)
    return add_witness_condition(quarantine, write, witness, evidence, now)


def _get_suspect_verdict(quarantine: Quarantine) -> QuarantineVerdict:
    return QuarantineVerdict.BREAKER if quarantine.verdict is QuarantineVerdict.BREAKER else QuarantineVerdict.SUSPECTED


def _report_suspected(quarantine: Quarantine, message: str, now: float) -> WriteQuarantineStatus:
    """Return the status of a suspicion: without a witness, unless its last conclusive probe failed.

    The breaker's verdict stays while the node is probed.
    """
    probe = quarantine.last_conclusive_probe
    verdict = _get_suspect_verdict(quarantine)
    if probe is not None and probe.passed is False:
        return _report_confirmed(quarantine, message, Witness.PROBE, _describe_failed_probe(probe), now, verdict)
    write = build_status_write(quarantine, QuarantinePhase.SUSPECTED, verdict, message, now)
    return add_witness_condition(quarantine, write, None, message, now)


def _describe_evidence(quarantine: Quarantine, node: TargetNode, witness: Witness) -> str:
    probe = quarantine.last_conclusive_probe
    if witness is Witness.PROBE and probe is not None and not probe.passed:
        return _describe_failed_probe(probe)
    if witness is Witness.NODE_CONDITION:
        return node.broken or "the node is not Ready"
    return next((sign.reason for sign in quarantine.open_signs if sign.witness is witness), "")


def _describe_failed_probe(probe: ProbeResult) -> str:
    return f"a probe pod {node_probes.describe_probe_result(probe)}"


def _report_waiting(quarantine: Quarantine, message: str, seconds: float, now: float) -> QuarantineStep:
    remaining = quarantine.last_sign_at + SUSPICION_TTL_SECONDS - now
    return skip_if_written(quarantine, _report_suspected(quarantine, message, now), max(0.0, min(seconds, remaining)))


def _report_cleared(quarantine: Quarantine, now: float) -> WriteQuarantineStatus:
    message = "a probe pod on the node has passed: the node is untouched"
    write = build_status_write(quarantine, QuarantinePhase.CLEARED, QuarantineVerdict.CLEARED, message, now)
    return add_witness_condition(quarantine, write, None, message, now)


def _retain_cleared(quarantine: Quarantine, since: float, now: float) -> QuarantineStep:
    """Keep a cleared suspicion for a while, so that jobs that keep blaming the node do not cause endless probes."""
    remaining = since + CLEARED_NODE_TTL_SECONDS - now
    return (
        skip_if_written(quarantine, _report_cleared(quarantine, now), remaining)
        if remaining > 0
        else DeleteQuarantine()
    )


def _drop_suspicion(quarantine: Quarantine, reason: str, now: float) -> WriteQuarantineStatus:
    message = f"the suspicion is dropped and the node untouched: {reason}"
    return replace(
        build_status_write(quarantine, QuarantinePhase.RELEASED, QuarantineVerdict.CLEARED, message, now),
        event="SuspicionDropped",
    )
