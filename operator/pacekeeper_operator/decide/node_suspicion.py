"""What a node that jobs blame needs next. It is untouched until a witness outside of the jobs' own pods has spoken.

A job can be made to say anything about the node that its pods are on. So its word only raises a suspicion; what decides
is the node's own condition, GPU series that the platform vouches for, or a probe pod of the operator's on that node.
A confirmed suspicion is held back for a moment, in which a fault that many nodes share shows as one.

Nodes that fail together are held together, until each of the others is settled: a probe has passed on it, or its
suspicion has been given up. That one of them is back first shows nothing of those that still boot. The last one is
judged by what has been seen of it since, and that it is not Ready is no such thing: it may just take longest to boot,
and no pod comes to it anyway.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import takewhile

from ..api import InconclusiveReason, ProbeResult, QuarantinePhase, NodeSuspicion, QuarantineVerdict, Witness
from . import node_probes
from .node_census import QuarantineContext, is_worth_probing
from .node_steps import (
    ApproveQuarantine,
    DeleteQuarantine,
    EndProbe,
    TargetNode,
    ProbePod,
    Quarantine,
    QuarantineStep,
    ReleaseNode,
    WriteQuarantineStatus,
    StartProbe,
    RequeueAfter,
    format_clock_time,
    build_status_write,
    skip_if_written,
    add_witness_condition,
)

CONFIRMED_SUSPICION_HOLD_SECONDS = 10.0
"""A confirmed suspicion waits so long from its first sign: others of the same power or network fault come meanwhile."""
SUSPICION_TTL_SECONDS = 600.0
"""What has come to nothing so long after its last sign is dropped."""
CLEARED_NODE_TTL_SECONDS = 600.0
"""For so long after a probe has passed, jobs alone bring about no other one."""
REPEATED_SIGN_SECONDS = 60.0
"""A namespace's next word is no news before."""
MAX_NODE_SIGNS = 8
MAX_CONCURRENT_SUSPICION_PROBES = 8
"""Of suspicions in the whole cluster; those that decide upon a release are bounded by the budget."""
SUSPICION_POLL_SECONDS = 5.0
SUSPICION_RESYNC_SECONDS = 60.0
BREAKER_LATCH_SECONDS = 300.0
"""From then on the breaker's word stays until the suspicion is dropped: the others may have been dropped before it."""


def decide_suspicion_step(quarantine: Quarantine, node: TargetNode, pod: ProbePod | None, context: QuarantineContext, now: float) -> QuarantineStep:
    """The next step of a suspicion."""
    if quarantine.status.phase is QuarantinePhase.RELEASED:
        return DeleteQuarantine()
    if node.marked:
        return ReleaseNode("its quarantine is not approved")
    witness = find_witness(quarantine, node)
    if quarantine.is_probing:
        if witness is Witness.PROBE and quarantine.verdict is QuarantineVerdict.BREAKER:
            witness = None  # it is asked anew: what a probe said while many failed is what this one may refute
        return _watch_probe(quarantine, node, pod, witness, context.rules.probe_timeout, now)
    if quarantine.last_probe is not None and pod is not None:
        return EndProbe(quarantine.last_probe.pod)
    return _decide_unconfirmed(quarantine, context, now) if witness is None else _decide_confirmed(quarantine, node, context, witness, now)


def find_witness(quarantine: Quarantine, node: TargetNode) -> Witness | None:
    """Who confirms the suspicion; None: nobody yet. A sign that says the node is not Ready is held against the node."""
    signs, word = quarantine.open_signs, quarantine.last_conclusive_probe
    if any(sign.witness is Witness.GPU_SERIES for sign in signs):
        return Witness.GPU_SERIES
    if signs and (node.broken or not node.ready):
        return Witness.NODE_CONDITION
    if any(sign.witness is Witness.PROBE for sign in signs):  # before a job's start: decide.preflight
        return Witness.PROBE
    return Witness.PROBE if word is not None and word.passed is False else None


def find_sign_witness(quarantine: Quarantine) -> tuple[Witness, str] | None:
    """The witness that stands in a sign itself, and its words; None: it has none, so the status has to name it."""
    signs = quarantine.open_signs
    vouched = next((sign for sign in signs if sign.is_from_platform or sign.witness is Witness.GPU_SERIES), None)
    return None if vouched is None else (vouched.witness, vouched.reason)


def is_probe_start(quarantine: Quarantine, step: QuarantineStep) -> bool:
    """Of a suspicion: only so many may run at once."""
    if not quarantine.is_suspicion or quarantine.is_probing or not isinstance(step, WriteQuarantineStatus):
        return False
    return replace(quarantine, status=step.status).is_probing


def with_sign(signs: tuple[NodeSuspicion, ...], sign: NodeSuspicion) -> tuple[NodeSuspicion, ...]:
    """The last of each namespace. What is no news changes nothing, however often it is said."""
    before = next((known for known in signs if known.namespace == sign.namespace), None)
    if before is not None and not _is_new_sign(before, sign):
        return signs
    if before is not None:
        sign = replace(sign, since=before.first_reported_at)
    others = [known for known in signs if known.namespace != sign.namespace]
    if len(others) == MAX_NODE_SIGNS:
        others.remove(next((known for known in others if known.witness is Witness.NONE), others[0]))
    return (*others, sign)


def count_allowed_nodes(nodes: int, max_nodes: int, max_share: float) -> int:
    """How many of `nodes` may be quarantined at once: by share, but one at least, and by count."""
    rounding = 1e-9  # 0.29 · 100 is 28.999…
    return min(max_nodes, max(1, math.floor(max_share * nodes + rounding)))


def _is_new_sign(before: NodeSuspicion, sign: NodeSuspicion) -> bool:
    if before.incident == sign.incident:
        return False
    confirmed = before.witness is Witness.NONE and sign.witness in (Witness.GPU_SERIES, Witness.PROBE)
    stronger = (before.weak and not sign.weak) or confirmed
    return stronger or sign.at >= before.at + REPEATED_SIGN_SECONDS


def _decide_unconfirmed(quarantine: Quarantine, context: QuarantineContext, now: float) -> QuarantineStep:
    """Nobody has confirmed it: a probe pod shall decide."""
    if quarantine.cleared_at is not None:
        return _retain_cleared(quarantine, quarantine.cleared_at, now)
    if now >= quarantine.last_sign_at + SUSPICION_TTL_SECONDS:
        return _drop_suspicion(quarantine, "nobody has confirmed the suspicion", now)
    if not is_worth_probing(quarantine):
        return _report_waiting(quarantine, "waits for the word of a second namespace", SUSPICION_TTL_SECONDS, now)
    due = node_probes.compute_probe_due_time(quarantine.inconclusive_probes)
    if now < due:
        last = node_probes.describe_probe_result(quarantine.inconclusive_probes[0])
        return _report_waiting(quarantine, f"the last probe {last}; the next one comes at {format_clock_time(due)}", due - now, now)
    if context.usage.count_probing(quarantine.name) >= MAX_CONCURRENT_SUSPICION_PROBES:
        return _report_waiting(quarantine, "waits for its turn to be probed", SUSPICION_POLL_SECONDS, now)
    probing = replace(quarantine, status=node_probes.add_probe(quarantine, now))
    return _report_suspected(probing, "a probe pod on the node decides whether it is quarantined", now)


def _watch_probe(
    quarantine: Quarantine, node: TargetNode, pod: ProbePod | None, witness: Witness | None, timeout: float, now: float
) -> QuarantineStep:
    """A probe is under way."""
    probe = quarantine.last_probe
    assert probe is not None
    slow_before = any(before.inconclusive is InconclusiveReason.SLOW for before in quarantine.status.probes[-2:-1])
    ended = node_probes.mark_overtaken(probe, now)
    if witness is None:
        result = node_probes.evaluate_node_probe(probe, pod, timeout, now, slow_before=slow_before)
        if result is None:
            made = pod is not None and pod.phase
            return RequeueAfter(node_probes.NODE_PROBE_POLL_SECONDS) if made else StartProbe(probe.pod, share_gpus=True)
        ended = result
    after = replace(quarantine, status=node_probes.record_probe_result(quarantine, ended))
    if ended.passed:
        return replace(_report_cleared(after, now), event="NodeCleared")
    event = {None: "ProbeFailed", InconclusiveReason.OVERTAKEN: ""}.get(ended.inconclusive, "ProbeInconclusive")
    words = f"the probe pod {node_probes.describe_probe_result(ended)}"
    if witness is None:
        found = _report_suspected(after, words, now)
    else:
        found = _report_confirmed(after, words, witness, _describe_evidence(after, node, witness), now, _get_suspect_verdict(after))
    return replace(found, event=event, warning=True)


def _decide_confirmed(quarantine: Quarantine, node: TargetNode, context: QuarantineContext, witness: Witness, now: float) -> QuarantineStep:
    """A witness has spoken. That too many fail at once is said at once; that they do not shows only after a while."""
    if quarantine.status.phase is QuarantinePhase.PENDING:
        return RequeueAfter(SUSPICION_RESYNC_SECONDS)
    evidence, tripped = _describe_evidence(quarantine, node, witness), _explain_breaker(quarantine, node, context, witness, now)
    if tripped and witness is Witness.PROBE and node.ready and _is_reprobe_due(quarantine, context, now):
        probing = replace(quarantine, status=node_probes.add_probe(quarantine, now))
        return _report_suspected(probing, "it failed with many others: another probe decides whether it is well again", now)
    first_sign = min((sign.at for sign in quarantine.open_signs), default=0.0)
    if now < first_sign + CONFIRMED_SUSPICION_HOLD_SECONDS and not tripped and not context.is_breaker_disabled:
        words = f"is held back for {CONFIRMED_SUSPICION_HOLD_SECONDS:.0f} s, in which a fault of many nodes would show"
        found = _report_confirmed(quarantine, words, witness, evidence, now)
        return skip_if_written(quarantine, found, max(0.0, first_sign + CONFIRMED_SUSPICION_HOLD_SECONDS - now))
    verdict, words = _choose_verdict(quarantine, context, tripped)
    if verdict is QuarantineVerdict.QUARANTINED:
        if find_sign_witness(quarantine) == (witness, evidence):  # that is written: nobody has to be told by whom it was approved
            return ApproveQuarantine()
        approving = _report_confirmed(quarantine, "is to be quarantined", witness, evidence, now)
        return ApproveQuarantine() if approving.status == quarantine.status else approving
    if verdict is QuarantineVerdict.AWAITS_APPROVAL:
        found = build_status_write(quarantine, QuarantinePhase.PENDING, QuarantineVerdict.AWAITS_APPROVAL, words, now)
        return replace(add_witness_condition(quarantine, found, witness, evidence, now), event="ApprovalNeeded")
    if now >= quarantine.last_sign_at + SUSPICION_TTL_SECONDS:
        return _drop_suspicion(quarantine, words, now)
    found = build_status_write(quarantine, QuarantinePhase.HELD, verdict, words, now)
    held = add_witness_condition(quarantine, found, witness, evidence, now)
    fresh = quarantine.verdict is not verdict
    return skip_if_written(
        quarantine, replace(held, event="QuarantineHeldBack" if fresh else "", warning=True), SUSPICION_POLL_SECONDS
    )


def _choose_verdict(quarantine: Quarantine, context: QuarantineContext, tripped: str) -> tuple[QuarantineVerdict, str]:
    """What becomes of a confirmed suspicion, and the words for it."""
    rules = context.rules
    if tripped:
        return QuarantineVerdict.BREAKER, tripped
    if context.pause_reason:
        return QuarantineVerdict.PAUSED, context.pause_reason
    # A request to a person takes nothing from the budget, but people are not to be flooded with requests either.
    spent = context.usage.count_used_budget(quarantine.name, include_requests=not rules.acts)
    allowed = count_allowed_nodes(context.node_count, rules.max_nodes, rules.max_share)
    if spent >= allowed:
        return QuarantineVerdict.BUDGET_SPENT, f"the budget of {allowed} of {context.node_count} nodes is spent"
    if rules.acts:
        return QuarantineVerdict.QUARANTINED, ""
    waits = "waits for spec.approved to be set to true by the platform team; the node is untouched"
    return QuarantineVerdict.AWAITS_APPROVAL, waits


def _explain_breaker(quarantine: Quarantine, node: TargetNode, context: QuarantineContext, witness: Witness, now: float) -> str:
    """Why the node is held as one of many that failed at once; "": it is judged for itself."""
    many, known = context.rules.breaker_nodes, quarantine.verdict is QuarantineVerdict.BREAKER
    if not known and context.usage.count_failing_together(quarantine) < many:
        return ""
    others = context.usage.count_unsettled(quarantine)
    stays = known and now >= quarantine.last_sign_at + BREAKER_LATCH_SECONDS
    if others or stays or many <= 1:
        return f"the breaker has tripped at {many} nodes: many fail at once, by no fault of their own"
    if not _has_own_fault_since(quarantine, node, witness, context.usage.get_last_cleared_at(quarantine.name)):
        return "it failed with many others, which are well again: it is left alone until it shows a fault of its own"
    return ""


def _has_own_fault_since(quarantine: Quarantine, node: TargetNode, witness: Witness, since: float) -> bool:
    """A fault of the node's own. A probe that failed while the others were away does not show one."""
    if witness is Witness.NODE_CONDITION:
        return bool(node.broken)
    if witness is Witness.PROBE:
        word = quarantine.last_conclusive_probe
        signs = [sign.at for sign in quarantine.open_signs if sign.witness is Witness.PROBE]
        return max([*signs, word.started if word is not None and word.passed is False else 0.0]) >= since
    return True


def _is_reprobe_due(quarantine: Quarantine, context: QuarantineContext, now: float) -> bool:
    """Whether a node that failed with many is to be probed once more. First its being held is written down."""
    if quarantine.verdict is not QuarantineVerdict.BREAKER or context.usage.count_probing(quarantine.name) >= MAX_CONCURRENT_SUSPICION_PROBES:
        return False
    since_passed = [*takewhile(lambda probe: not probe.passed, reversed(quarantine.status.probes))]
    return now >= node_probes.compute_probe_due_time(since_passed)


def _report_confirmed(
    quarantine: Quarantine,
    words: str,
    witness: Witness,
    evidence: str,
    now: float,
    verdict: QuarantineVerdict = QuarantineVerdict.SUSPECTED,
) -> WriteQuarantineStatus:
    found = build_status_write(quarantine, QuarantinePhase.SUSPECTED, verdict, words, now)
    return add_witness_condition(quarantine, found, witness, evidence, now)


def _get_suspect_verdict(quarantine: Quarantine) -> QuarantineVerdict:
    return QuarantineVerdict.BREAKER if quarantine.verdict is QuarantineVerdict.BREAKER else QuarantineVerdict.SUSPECTED


def _report_suspected(quarantine: Quarantine, words: str, now: float) -> WriteQuarantineStatus:
    """Without a witness, unless a probe that has just failed is in it. One of many stays one while it is looked at."""
    word = quarantine.last_conclusive_probe
    verdict = _get_suspect_verdict(quarantine)
    if word is not None and word.passed is False:
        return _report_confirmed(quarantine, words, Witness.PROBE, _describe_failed_probe(word), now, verdict)
    found = build_status_write(quarantine, QuarantinePhase.SUSPECTED, verdict, words, now)
    return add_witness_condition(quarantine, found, None, words, now)


def _describe_evidence(quarantine: Quarantine, node: TargetNode, witness: Witness) -> str:
    word = quarantine.last_conclusive_probe
    if witness is Witness.PROBE and word is not None and not word.passed:
        return _describe_failed_probe(word)
    if witness is Witness.NODE_CONDITION:
        return node.broken or "the node is not Ready"
    return next((s.reason for s in quarantine.open_signs if s.witness is witness), "")


def _describe_failed_probe(word: ProbeResult) -> str:
    return f"a probe pod {node_probes.describe_probe_result(word)}"


def _report_waiting(quarantine: Quarantine, words: str, seconds: float, now: float) -> QuarantineStep:
    left = quarantine.last_sign_at + SUSPICION_TTL_SECONDS - now
    return skip_if_written(quarantine, _report_suspected(quarantine, words, now), max(0.0, min(seconds, left)))


def _report_cleared(quarantine: Quarantine, now: float) -> WriteQuarantineStatus:
    words = "a probe pod on the node has passed: the node is untouched"
    found = build_status_write(quarantine, QuarantinePhase.CLEARED, QuarantineVerdict.CLEARED, words, now)
    return add_witness_condition(quarantine, found, None, words, now)


def _retain_cleared(quarantine: Quarantine, since: float, now: float) -> QuarantineStep:
    """So that jobs which blame the node without end bring about no probes without end."""
    left = since + CLEARED_NODE_TTL_SECONDS - now
    return skip_if_written(quarantine, _report_cleared(quarantine, now), left) if left > 0 else DeleteQuarantine()


def _drop_suspicion(quarantine: Quarantine, why: str, now: float) -> WriteQuarantineStatus:
    words = f"the suspicion is dropped and the node untouched: {why}"
    return replace(build_status_write(quarantine, QuarantinePhase.RELEASED, QuarantineVerdict.CLEARED, words, now), event="SuspicionDropped")
