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

from ..api import Inconclusive, ProbeResult, QuarantinePhase, Sign, Verdict, Witness
from . import node_probes
from .node_census import Around, worth_a_look
from .node_steps import (
    Approve,
    Delete,
    EndProbe,
    Node,
    ProbePod,
    Quarantine,
    QuarantineStep,
    Release,
    Report,
    StartProbe,
    Wait,
    clock,
    told,
    unless_known,
    witnessed,
)

HOLD_SECONDS = 10.0
"""A confirmed suspicion waits so long from its first sign: others of the same power or network fault come meanwhile."""
SUSPICION_SECONDS = 600.0
"""What has come to nothing so long after its last sign is dropped."""
CLEARED_SECONDS = 600.0
"""For so long after a probe has passed, jobs alone bring about no other one."""
REPEAT_SECONDS = 60.0
"""A namespace's next word is no news before."""
MAX_SIGNS = 8
PROBES_AT_ONCE = 8
"""Of suspicions in the whole cluster; those that decide upon a release are bounded by the budget."""
LOOK_SECONDS = 5.0
RESYNC_SECONDS = 60.0
STAYS_TRIPPED_SECONDS = 300.0
"""From then on the breaker's word stays until the suspicion is dropped: the others may have been dropped before it."""


def consider(quarantine: Quarantine, node: Node, pod: ProbePod | None, around: Around, now: float) -> QuarantineStep:
    """The next step of a suspicion."""
    if quarantine.status.phase is QuarantinePhase.RELEASED:
        return Delete()
    if node.marked:
        return Release("its quarantine is not approved")
    witness = witness_of(quarantine, node)
    if quarantine.probe_runs:
        if witness is Witness.PROBE and quarantine.verdict is Verdict.BREAKER:
            witness = None  # it is asked anew: what a probe said while many failed is what this one may refute
        return _watch(quarantine, node, pod, witness, around.rules.probe_timeout, now)
    if quarantine.last_probe is not None and pod is not None:
        return EndProbe(quarantine.last_probe.pod)
    return _look(quarantine, around, now) if witness is None else _judge(quarantine, node, around, witness, now)


def witness_of(quarantine: Quarantine, node: Node) -> Witness | None:
    """Who confirms the suspicion; None: nobody yet. A sign that says the node is not Ready is held against the node."""
    signs, word = quarantine.open_signs, quarantine.last_word
    if any(sign.witness is Witness.GPU_SERIES for sign in signs):
        return Witness.GPU_SERIES
    if signs and (node.broken or not node.ready):
        return Witness.NODE_CONDITION
    if any(sign.witness is Witness.PROBE for sign in signs):  # before a job's start: decide.preflight
        return Witness.PROBE
    return Witness.PROBE if word is not None and word.passed is False else None


def said_by(quarantine: Quarantine) -> tuple[Witness, str] | None:
    """The witness that stands in a sign itself, and its words; None: it has none, so the status has to name it."""
    signs = quarantine.open_signs
    vouched = next((sign for sign in signs if sign.by_platform or sign.witness is Witness.GPU_SERIES), None)
    return None if vouched is None else (vouched.witness, vouched.reason)


def begins_a_probe(quarantine: Quarantine, step: QuarantineStep) -> bool:
    """Of a suspicion: only so many may run at once."""
    if not quarantine.suspicion or quarantine.probe_runs or not isinstance(step, Report):
        return False
    return replace(quarantine, status=step.status).probe_runs


def with_sign(signs: tuple[Sign, ...], sign: Sign) -> tuple[Sign, ...]:
    """The last of each namespace. What is no news changes nothing, however often it is said."""
    before = next((known for known in signs if known.namespace == sign.namespace), None)
    if before is not None and not _is_news(before, sign):
        return signs
    if before is not None:
        sign = replace(sign, since=before.first)
    others = [known for known in signs if known.namespace != sign.namespace]
    if len(others) == MAX_SIGNS:
        others.remove(next((known for known in others if known.witness is Witness.NONE), others[0]))
    return (*others, sign)


def allowed_nodes(nodes: int, max_nodes: int, max_share: float) -> int:
    """How many of `nodes` may be quarantined at once: by share, but one at least, and by count."""
    rounding = 1e-9  # 0.29 · 100 is 28.999…
    return min(max_nodes, max(1, math.floor(max_share * nodes + rounding)))


def _is_news(before: Sign, sign: Sign) -> bool:
    if before.incident == sign.incident:
        return False
    confirmed = before.witness is Witness.NONE and sign.witness in (Witness.GPU_SERIES, Witness.PROBE)
    stronger = (before.weak and not sign.weak) or confirmed
    return stronger or sign.at >= before.at + REPEAT_SECONDS


def _look(quarantine: Quarantine, around: Around, now: float) -> QuarantineStep:
    """Nobody has confirmed it: a probe pod shall decide."""
    if quarantine.cleared_at is not None:
        return _keep_cleared(quarantine, quarantine.cleared_at, now)
    if now >= quarantine.last_sign + SUSPICION_SECONDS:
        return _drop(quarantine, "nobody has confirmed the suspicion", now)
    if not worth_a_look(quarantine):
        return _wait(quarantine, "waits for the word of a second namespace", SUSPICION_SECONDS, now)
    due = node_probes.due_after(quarantine.probes_in_vain)
    if now < due:
        last = node_probes.in_words(quarantine.probes_in_vain[0])
        return _wait(quarantine, f"the last probe {last}; the next one comes at {clock(due)}", due - now, now)
    if around.census.probing(quarantine.name) >= PROBES_AT_ONCE:
        return _wait(quarantine, "waits for its turn to be probed", LOOK_SECONDS, now)
    probing = replace(quarantine, status=node_probes.begun(quarantine, now))
    return _suspected(probing, "a probe pod on the node decides whether it is quarantined", now)


def _watch(
    quarantine: Quarantine, node: Node, pod: ProbePod | None, witness: Witness | None, timeout: float, now: float
) -> QuarantineStep:
    """A probe is under way."""
    probe = quarantine.last_probe
    assert probe is not None
    slow_before = any(before.inconclusive is Inconclusive.SLOW for before in quarantine.status.probes[-2:-1])
    ended = node_probes.overtaken(probe, now)
    if witness is None:
        result = node_probes.result(probe, pod, timeout, now, slow_before=slow_before)
        if result is None:
            made = pod is not None and pod.phase
            return Wait(node_probes.PROBE_POLL_SECONDS) if made else StartProbe(probe.pod, share=True)
        ended = result
    after = replace(quarantine, status=node_probes.finished(quarantine, ended))
    if ended.passed:
        return replace(_cleared(after, now), event="NodeCleared")
    event = {None: "ProbeFailed", Inconclusive.OVERTAKEN: ""}.get(ended.inconclusive, "ProbeInconclusive")
    words = f"the probe pod {node_probes.in_words(ended)}"
    if witness is None:
        found = _suspected(after, words, now)
    else:
        found = _confirmed(after, words, witness, _evidence(after, node, witness), now, _standing(after))
    return replace(found, event=event, warning=True)


def _judge(quarantine: Quarantine, node: Node, around: Around, witness: Witness, now: float) -> QuarantineStep:
    """A witness has spoken. That too many fail at once is said at once; that they do not shows only after a while."""
    if quarantine.status.phase is QuarantinePhase.PENDING:
        return Wait(RESYNC_SECONDS)
    evidence, tripped = _evidence(quarantine, node, witness), _tripped(quarantine, node, around, witness, now)
    if tripped and witness is Witness.PROBE and node.ready and _is_due_again(quarantine, around, now):
        probing = replace(quarantine, status=node_probes.begun(quarantine, now))
        return _suspected(probing, "it failed with many others: another probe decides whether it is well again", now)
    first_sign = min((sign.at for sign in quarantine.open_signs), default=0.0)
    if now < first_sign + HOLD_SECONDS and not tripped and not around.unbroken:
        words = f"is held back for {HOLD_SECONDS:.0f} s, in which a fault of many nodes would show"
        found = _confirmed(quarantine, words, witness, evidence, now)
        return unless_known(quarantine, found, max(0.0, first_sign + HOLD_SECONDS - now))
    verdict, words = _verdict(quarantine, around, tripped)
    if verdict is Verdict.QUARANTINED:
        if said_by(quarantine) == (witness, evidence):  # that is written: nobody has to be told by whom it was approved
            return Approve()
        approving = _confirmed(quarantine, "is to be quarantined", witness, evidence, now)
        return Approve() if approving.status == quarantine.status else approving
    if verdict is Verdict.AWAITS_APPROVAL:
        found = told(quarantine, QuarantinePhase.PENDING, Verdict.AWAITS_APPROVAL, words, now)
        return replace(witnessed(quarantine, found, witness, evidence, now), event="ApprovalNeeded")
    if now >= quarantine.last_sign + SUSPICION_SECONDS:
        return _drop(quarantine, words, now)
    found = told(quarantine, QuarantinePhase.HELD, verdict, words, now)
    held = witnessed(quarantine, found, witness, evidence, now)
    fresh = quarantine.verdict is not verdict
    return unless_known(
        quarantine, replace(held, event="QuarantineHeldBack" if fresh else "", warning=True), LOOK_SECONDS
    )


def _verdict(quarantine: Quarantine, around: Around, tripped: str) -> tuple[Verdict, str]:
    """What becomes of a confirmed suspicion, and the words for it."""
    rules = around.rules
    if tripped:
        return Verdict.BREAKER, tripped
    if around.paused:
        return Verdict.PAUSED, around.paused
    # A request to a person takes nothing from the budget, but people are not to be flooded with requests either.
    spent = around.census.spent(quarantine.name, asked_too=not rules.acts)
    allowed = allowed_nodes(around.nodes, rules.max_nodes, rules.max_share)
    if spent >= allowed:
        return Verdict.BUDGET_SPENT, f"the budget of {allowed} of {around.nodes} nodes is spent"
    if rules.acts:
        return Verdict.QUARANTINED, ""
    waits = "waits for spec.approved to be set to true by the platform team; the node is untouched"
    return Verdict.AWAITS_APPROVAL, waits


def _tripped(quarantine: Quarantine, node: Node, around: Around, witness: Witness, now: float) -> str:
    """Why the node is held as one of many that failed at once; "": it is judged for itself."""
    many, known = around.rules.breaker_nodes, quarantine.verdict is Verdict.BREAKER
    if not known and around.census.failing_at_once(quarantine) < many:
        return ""
    others = around.census.unsettled(quarantine)
    stays = known and now >= quarantine.last_sign + STAYS_TRIPPED_SECONDS
    if others or stays or many <= 1:
        return f"the breaker has tripped at {many} nodes: many fail at once, by no fault of their own"
    if not _has_shown_since(quarantine, node, witness, around.census.cleared_last(quarantine.name)):
        return "it failed with many others, which are well again: it is left alone until it shows a fault of its own"
    return ""


def _has_shown_since(quarantine: Quarantine, node: Node, witness: Witness, since: float) -> bool:
    """A fault of the node's own. A probe that failed while the others were away does not show one."""
    if witness is Witness.NODE_CONDITION:
        return bool(node.broken)
    if witness is Witness.PROBE:
        word = quarantine.last_word
        signs = [sign.at for sign in quarantine.open_signs if sign.witness is Witness.PROBE]
        return max([*signs, word.started if word is not None and word.passed is False else 0.0]) >= since
    return True


def _is_due_again(quarantine: Quarantine, around: Around, now: float) -> bool:
    """Whether a node that failed with many is to be probed once more. First its being held is written down."""
    if quarantine.verdict is not Verdict.BREAKER or around.census.probing(quarantine.name) >= PROBES_AT_ONCE:
        return False
    since_passed = [*takewhile(lambda probe: not probe.passed, reversed(quarantine.status.probes))]
    return now >= node_probes.due_after(since_passed)


def _confirmed(
    quarantine: Quarantine,
    words: str,
    witness: Witness,
    evidence: str,
    now: float,
    verdict: Verdict = Verdict.SUSPECTED,
) -> Report:
    found = told(quarantine, QuarantinePhase.SUSPECTED, verdict, words, now)
    return witnessed(quarantine, found, witness, evidence, now)


def _standing(quarantine: Quarantine) -> Verdict:
    return Verdict.BREAKER if quarantine.verdict is Verdict.BREAKER else Verdict.SUSPECTED


def _suspected(quarantine: Quarantine, words: str, now: float) -> Report:
    """Without a witness, unless a probe that has just failed is in it. One of many stays one while it is looked at."""
    word = quarantine.last_word
    verdict = _standing(quarantine)
    if word is not None and word.passed is False:
        return _confirmed(quarantine, words, Witness.PROBE, _by_probe(word), now, verdict)
    found = told(quarantine, QuarantinePhase.SUSPECTED, verdict, words, now)
    return witnessed(quarantine, found, None, words, now)


def _evidence(quarantine: Quarantine, node: Node, witness: Witness) -> str:
    word = quarantine.last_word
    if witness is Witness.PROBE and word is not None and not word.passed:
        return _by_probe(word)
    if witness is Witness.NODE_CONDITION:
        return node.broken or "the node is not Ready"
    return next((s.reason for s in quarantine.open_signs if s.witness is witness), "")


def _by_probe(word: ProbeResult) -> str:
    return f"a probe pod {node_probes.in_words(word)}"


def _wait(quarantine: Quarantine, words: str, seconds: float, now: float) -> QuarantineStep:
    left = quarantine.last_sign + SUSPICION_SECONDS - now
    return unless_known(quarantine, _suspected(quarantine, words, now), max(0.0, min(seconds, left)))


def _cleared(quarantine: Quarantine, now: float) -> Report:
    words = "a probe pod on the node has passed: the node is untouched"
    found = told(quarantine, QuarantinePhase.CLEARED, Verdict.CLEARED, words, now)
    return witnessed(quarantine, found, None, words, now)


def _keep_cleared(quarantine: Quarantine, since: float, now: float) -> QuarantineStep:
    """So that jobs which blame the node without end bring about no probes without end."""
    left = since + CLEARED_SECONDS - now
    return unless_known(quarantine, _cleared(quarantine, now), left) if left > 0 else Delete()


def _drop(quarantine: Quarantine, why: str, now: float) -> Report:
    words = f"the suspicion is dropped and the node untouched: {why}"
    return replace(told(quarantine, QuarantinePhase.RELEASED, Verdict.CLEARED, words, now), event="SuspicionDropped")
