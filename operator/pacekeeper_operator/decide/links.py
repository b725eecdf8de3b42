"""Slow communication, looked into: what the connections show, and a probe between launchers of the hottest place.

    suspicion → evidence with connections → `see` → the incident's finding names what is hot
    open incident, something hot          → `probe`: the launchers measure it, with controls
    their answers                         → `probe`: the finding says what they told; `check`: a swap, where it pays

The incident and its cheap remedy wait for none of this. What launchers say decides inside their job only: a node is
named as a suspect once its side was slow in two probes, and the operator's own probe pod has the last word on it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pacekeeper_analysis import price
from pacekeeper_analysis.adapt import Diagnosis, Bottleneck
from pacekeeper_analysis.diagnose import link_probe, links
from pacekeeper_analysis.diagnose.finding import FaultClass, Finding, Signal, SignalKind, merge_findings
from pacekeeper_analysis.diagnose.link_probe import LinkProbeResult, ProbeParty, LinkProbeVerdict
from pacekeeper_analysis.diagnose.links import MIN_SLOW_CELL_BYTES, DelayCell, LinkDiagnosis, SpotKind
from pacekeeper_analysis.plan import EvidencePart

from ..api import IncidentCause, IncidentClass, Remedy
from ..decision import Decision, ReplaceWorker
from ..network import RankPair
from ..observation import FRESH_WORKER_SECONDS, Observation, Policy, WorkerView
from ..state import MAX_LINK_VERDICTS, DesiredState, Incident, LinkCheck, LinkSide, LinkVerdict
from ..subject import IncidentKey
from . import blame
from .answers import EvidenceKey
from .pricing import build_replace_option, build_remedy_prices
from .remedies import quarantine_node

FRESH_LINK_EVIDENCE_SECONDS, LINK_EVIDENCE_TTL_SECONDS = 30.0, 600.0
"""What connections showed longer ago says nothing about what is slow now; and for so long it is shown to people."""
LINK_EVIDENCE_REQUEST_SECONDS = 60.0
"""For so long after a decision the connections are asked again while they have not shown anything hot."""
LINK_PROBE_ANSWER_SECONDS = 10.0
"""After the last turn of a probe: who has not answered by then does not count."""
SLOW_COMMUNICATION_PRIOR_SECONDS = 1440.0
"""Mean duration of slow communication before this cluster has a history (Greyhound, ATC'25)."""
LINK_PROBE_RATE_WINDOW_SECONDS = 3600.0
REROUTE_EVIDENCE_WAIT_SECONDS = 3.0
"""So long a round for other ways waits for what the connections tell of the present ones."""
THROUGHPUT_WINDOWS, THROUGHPUT_READY_SECONDS = 2, 12.0
"""Newest windows by which a pair is called slow or fast: what is so in one of them may be luck. And how old a round is
when its connections have as many."""
MIN_SLOW_PROBES = 2
"""Probes that found a node's side slow make it a suspect."""
MAX_LINK_SIDES = 8
LINK_VERDICT_ADVICE: Mapping[LinkProbeVerdict, str] = {
    LinkProbeVerdict.LINK: "look at the path between the two nodes: a bad cable or port, or a route that others share",
    LinkProbeVerdict.SENDER: "look at the node's network: its interface, what else sends from it, limits on its traffic",
    LinkProbeVerdict.RECEIVER: "look at the node's network: its interface, what else it receives, limits on its traffic",
    LinkProbeVerdict.NOTHING: "nothing is slow when it is tried alone: look at what else uses the network, the hosts' "
    "processors, or a network that NCCL has to itself",
}


def record_link_evidence(observation: Observation, _policy: Policy) -> DesiredState:
    """What the connections of all members show, once they have told."""
    draft, request = observation.desired, observation.plan.evidence_request
    if not _has_new_evidence(observation):
        return draft
    shown = compute_delay_matrix(observation)
    hottest = shown.hot[0] if shown.hot else None
    source, destination = hottest.pairs[0] if hottest else (-1, -1)
    sides = [LinkSide(rank, True, ratio) for rank, ratio in shown.row_ratio.items()]
    sides += [LinkSide(rank, False, ratio) for rank, ratio in shown.column_ratio.items()]
    seen = LinkCheck(
        at=observation.now,
        request=request,
        kind=hottest.kind if hottest else None,
        source=source,
        destination=destination,
        hot=tuple(links.describe_hot_spot(spot) for spot in shown.hot),
        bytes_per_second=hottest.bytes_per_second if hottest else 0.0,
        known=shown.is_known,
        sides=tuple(sorted(sides, key=lambda side: -side.ratio)[:MAX_LINK_SIDES]),
    )
    return draft.with_adaptation(link=seen)


def compute_delay_matrix(observation: Observation) -> LinkDiagnosis:
    """The delay matrix of the evidence that has come."""
    return _analyze_links(EvidenceKey(observation.evidence), _list_worker_nodes(observation))


@dataclass(frozen=True)
class PairThroughput:
    """Of what one rank sends to another, in the two newest windows. Ratios: time for a byte over that of the
    connections' own first windows."""

    bytes_per_second: float  # while it was busy, in the newest
    min_ratio: float
    max_ratio: float


def measure_pair_throughputs(observation: Observation) -> Mapping[RankPair, PairThroughput]:
    """Of the pairs on different nodes, of which both windows are known and say enough; {}: not all have told yet."""
    if not has_link_evidence(observation):
        return {}
    cells, _ = _join_cells(EvidenceKey(observation.evidence), _list_worker_nodes(observation))
    ratios: dict[RankPair, list[float]] = defaultdict(list)
    rate: dict[RankPair, float] = {}
    for cell in sorted(cells, key=lambda cell: cell.age):
        if cell.age < THROUGHPUT_WINDOWS and not cell.same_node and cell.early_bytes and cell.acked_bytes >= MIN_SLOW_CELL_BYTES:
            pair = cell.source, cell.destination
            ratios[pair].append(math.exp(cell.delay - cell.early_delay))
            rate.setdefault(pair, cell.bytes_per_second)
    return {
        pair: PairThroughput(rate[pair], min(known), max(known)) for pair, known in ratios.items() if len(known) == THROUGHPUT_WINDOWS
    }


def measure_pair_rates(observation: Observation) -> Mapping[RankPair, float]:
    """Bytes a second of the same pairs."""
    return {pair: pace.bytes_per_second for pair, pace in measure_pair_throughputs(observation).items()}


def needs_pair_throughput(draft: DesiredState, now: float) -> bool:
    """Ways are to be compared: whoever asks the ranks asks for their connections, too."""
    trial = draft.state.adaptation.way_trial
    old = trial is not None and bool(trial.since) and now - trial.since >= THROUGHPUT_READY_SECONDS
    after = old and trial is not None and not trial.slower and trial.has_rates
    return after or now - draft.state.adaptation.ways_asked_at <= REROUTE_EVIDENCE_WAIT_SECONDS


def find_hot_pairs(observation: Observation) -> Mapping[RankPair, float]:
    """Pairs of the hot places, and their time for a byte over the usual."""
    return {pair: spot.ratio for spot in compute_delay_matrix(observation).hot for pair in spot.pairs}


def prefetch_delay_matrix(observation: Observation) -> None:
    """Find out what `see` will ask for: in a large job that takes seconds."""
    if _has_new_evidence(observation):
        compute_delay_matrix(observation)


def _has_new_evidence(observation: Observation) -> bool:
    """All have told of their connections, and that has not been looked at. What is being probed stays until it is
    told."""
    before = observation.state.adaptation.link
    if before is not None and (before.probe or before.request == observation.plan.evidence_request):
        return False
    return has_link_evidence(observation)


def has_link_evidence(observation: Observation) -> bool:
    """The connections have been asked for, and all members have answered."""
    plan = observation.plan
    asked = bool(plan.evidence_request) and EvidencePart.LINKS in plan.evidence_parts
    return asked and len(observation.evidence) >= len(plan.members)


def _list_worker_nodes(observation: Observation) -> tuple[tuple[str, str], ...]:
    return tuple((view.name, view.node) for view in observation.workers)


@lru_cache(maxsize=2)
def _analyze_links(answers: EvidenceKey, nodes: tuple[tuple[str, str], ...]) -> LinkDiagnosis:
    return links.diagnose_links(*_join_cells(answers, nodes))


@lru_cache(maxsize=2)
def _join_cells(answers: EvidenceKey, nodes: tuple[tuple[str, str], ...]) -> tuple[Sequence[DelayCell], int]:
    return links.join_link_ends(answers.evidence, dict(nodes))


def needs_link_evidence(observation: Observation) -> bool:
    """Whether the next question is to ask for connections: an incident is open, and nothing hot has been seen yet."""
    incident, seen = _find_open_incident(observation), observation.state.adaptation.link
    if incident is None or observation.now - incident.decided > LINK_EVIDENCE_REQUEST_SECONDS:
        return False
    return seen is None or not (seen.hot or seen.probe)


def build_communication_finding(observation: Observation, found: Diagnosis) -> Finding | None:
    """Of slow communication; None: it is another trouble."""
    if found.trouble is not Bottleneck.COMMUNICATION:
        return None
    steps = f"steps take {found.slowdown:.2f} × as long as they need, and the ranks' own work has not grown"
    before = "communication takes longer than in the job's first steady steps"
    witnesses = [Signal(SignalKind.TIMES, steps), Signal(SignalKind.HISTORY, before)]
    seen = observation.state.adaptation.link
    if seen is None or not seen.known or observation.now - seen.at > FRESH_LINK_EVIDENCE_SECONDS:
        return merge_findings(None, Finding(FaultClass.NETWORK, "", tuple(witnesses)))
    words = "; ".join(seen.hot) or "no connection is much slower than the others"
    transport = Signal(SignalKind.TRANSPORT, words)
    return merge_findings(None, Finding(FaultClass.NETWORK, _describe_culprit(seen), (*witnesses, transport)))


def advance_link_probe(observation: Observation, policy: Policy) -> DesiredState:
    """Begin a probe where one is called for; and once its answers are there, write down what they told."""
    draft, seen = observation.desired, observation.state.adaptation.link
    if seen is None:
        return draft
    if not seen.probe:
        return _begin_probe(observation, policy, seen)
    answer = get_probe_result(observation)
    if answer is None:
        return draft
    if draft.plan.probe is not None:
        draft = draft.with_plan(probe=None)
    view = _find_slow_worker(observation, answer.verdict)
    verdict = LinkVerdict(observation.now, answer.verdict)
    if view is not None:
        verdict = replace(verdict, worker=view.name, node=view.node)
    earlier = (*draft.state.adaptation.link_verdicts, verdict)[-MAX_LINK_VERDICTS:]
    if answer.verdict is LinkProbeVerdict.REVERSED:  # the other way is what is to be asked about
        turned = replace(
            seen, kind=SpotKind.PAIR, source=seen.destination, destination=seen.source, incident="", probe=""
        )
        asked = draft.with_adaptation(link=turned, link_verdicts=earlier)
        return _begin_probe(observation.with_desired(asked), policy, turned)  # at once: the incident waits for nothing else
    draft = draft.with_adaptation(link=replace(seen, probe=""), link_verdicts=earlier)
    incident = draft.state.incidents.find(seen.incident)
    if incident is None:
        return draft
    draft = draft.with_incident(_add_probe_result(incident, seen, answer))
    return _propose_quarantine(observation.with_desired(draft), policy, incident, verdict)


def check_slow_link_sides(observation: Observation, policy: Policy) -> Decision | None:
    """Where one worker's side is slow: a spare in its place, where that pays beside what has been done."""
    seen = observation.state.adaptation.link
    answer = None if seen is None or not seen.probe else get_probe_result(observation)
    if seen is None or answer is None or (view := _find_slow_worker(observation, answer.verdict)) is None:
        return None
    incident = observation.state.incidents.find(seen.incident)
    if incident is None or view.record.leaving:
        return None
    now = get_remaining_slowdown(incident)
    if now < observation.job.spec.detection.straggler_slowdown:
        return None
    elapsed = observation.now - incident.first_sign
    past = observation.cluster_view.past_durations.get(IncidentCause.SLOW_COMMUNICATION, ())
    spent = "no restart is left in this window" if observation.is_budget_spent(policy) else ""
    choice = price.choose_remedy(
        (build_replace_option(observation, policy, refused=spent),),
        slowdown=now,
        lost_seconds=elapsed * price.compute_loss_rate(now),
        remaining_seconds=price.estimate_remaining_seconds(elapsed, past, SLOW_COMMUNICATION_PRIOR_SECONDS),
    )
    if choice.chosen is None:
        return None
    still_open = incident.outcome is None
    subject = IncidentKey(IncidentCause.SLOW_COMMUNICATION, observation.round, worker=view.name)
    words = f"{_describe_side(seen, answer.verdict)} is slow: {answer.words}"
    return Decision(
        incident_key=subject,
        class_=IncidentClass.PERFORMANCE,
        message=words,
        first_sign=incident.first_sign,
        actions=(ReplaceWorker(view.name, _describe_side(seen, answer.verdict) + " is slow", dead=False),),
        remedy=Remedy.REPLACE_WORKER,
        remedies=(*incident.remedies, *build_remedy_prices(choice.prices, choice.chosen)),
        evidence=incident.evidence,
        worker=view.name,
        node=view.node or None,
        continued_incident=incident.name if still_open else "",
        last_step=observation.step,
        slowdown_before=now,
        slowdown_after=1.0,
        reference_seconds=incident.reference_seconds,
        predicted_gain=choice.chosen.gain_seconds,
        finding=_add_probe_result(incident, seen, answer).finding,
    )


def _begin_probe(observation: Observation, policy: Policy, seen: LinkCheck) -> DesiredState:
    draft, incident, now = observation.desired, _find_open_incident(observation), observation.now
    if now - seen.at > LINK_EVIDENCE_TTL_SECONDS:
        return draft.with_adaptation(link=None)
    if now - seen.at > FRESH_LINK_EVIDENCE_SECONDS or seen.incident or incident is None or not seen.hot or not policy.applies_remedies:
        return draft
    lately = [verdict for verdict in draft.state.adaptation.link_verdicts if verdict.at > now - LINK_PROBE_RATE_WINDOW_SECONDS]
    if len(lately) >= policy.link_probes_per_hour:
        return draft
    source, destination = _find_rank_party(observation, seen.source), _find_rank_party(observation, seen.destination)
    if source is None or destination is None or source == destination:
        return draft
    name = f"probe-{draft.plan.version + 1}"
    asked = link_probe.plan_probe(name, source, destination, _choose_control_parties(observation, source, destination))
    begun = replace(seen, incident=incident.name, probe=name, probed_at=now)
    return draft.with_plan(probe=asked).with_adaptation(link=begun)


def get_probe_result(observation: Observation) -> LinkProbeResult | None:
    """What the probe that is out has told; None: some have not answered, and have time left."""
    seen, plan = observation.state.adaptation.link, observation.plan
    assert seen is not None
    if plan.probe is None or plan.probe.name != seen.probe:
        return LinkProbeResult(LinkProbeVerdict.UNTOLD, "the workers changed before it was answered")
    asked = {
        worker: {target.worker for target in targets}
        for worker, targets in zip(plan.probe.sources, plan.probe.targets, strict=True)
    }
    answers = {
        told.worker: [of for of in told.probes if of.target in asked.get(told.worker, ())]
        for told in observation.probes
    }
    waited = observation.now - seen.probed_at - link_probe.estimate_probe_seconds(plan.probe)
    if any(source not in answers for source in plan.probe.sources) and waited < LINK_PROBE_ANSWER_SECONDS:
        return None
    source, destination = observation.find_worker_of_rank(seen.source), observation.find_worker_of_rank(seen.destination)
    return link_probe.evaluate_probe(answers, source or "", destination or "")


def _add_probe_result(incident: Incident, seen: LinkCheck, result: LinkProbeResult) -> Incident:
    """With what the probe told. One that could not tell is no witness, and is written down all the same."""
    evidence = (*incident.evidence, f"a probe of the way from rank {seen.source} to rank {seen.destination}: "
                f"{result.verdict}. {result.words}")  # fmt: skip
    if result.verdict is LinkProbeVerdict.UNTOLD or incident.finding is None:
        return replace(incident, evidence=evidence)
    witness = Signal(SignalKind.PROBE, result.words)
    culprit = _describe_side(seen, result.verdict)
    better = Finding(FaultClass.NETWORK, culprit, (witness,), advice=LINK_VERDICT_ADVICE[result.verdict])
    return replace(incident, evidence=evidence, finding=merge_findings(incident.finding, better))


def _propose_quarantine(observation: Observation, policy: Policy, incident: Incident, verdict: LinkVerdict) -> DesiredState:
    """The node whose side was slow once more is named to the platform, which looks at it by itself."""
    again = [
        earlier
        for earlier in observation.state.adaptation.link_verdicts
        if earlier.node and earlier.node == verdict.node and earlier.at > observation.now - policy.restart_window
    ]
    if len(again) < MIN_SLOW_PROBES:
        return observation.desired
    reason = f"its side was slow in {len(again)} probes between this job's workers"
    action = blame.propose_quarantine(observation, policy, verdict.node, reason)
    return observation.desired if action.withheld else quarantine_node.request_quarantine(observation, action, incident.name)


def _find_open_incident(observation: Observation) -> Incident | None:
    """The open one of slow communication."""
    found = (i for i in observation.state.incidents.open if i.cause is IncidentCause.SLOW_COMMUNICATION)
    return next(found, None)


def get_remaining_slowdown(incident: Incident) -> float:
    """The job's slowdown now: as measured, or as expected of the remedy that is in force."""
    if incident.slowdown_after is not None:
        return incident.slowdown_after
    applied = incident.remedy is not None and incident.applied is not None
    after = incident.predicted_after if applied else incident.slowdown_before
    return 1.0 if after is None else after


def _find_slow_worker(observation: Observation, verdict: LinkProbeVerdict) -> WorkerView | None:
    """The worker whose side is slow."""
    seen = observation.state.adaptation.link
    rank = {LinkProbeVerdict.SENDER: seen.source, LinkProbeVerdict.RECEIVER: seen.destination}.get(verdict) if seen else None
    worker = None if rank is None else observation.find_worker_of_rank(rank)
    return None if worker is None else observation.find_worker(worker)


def _find_rank_party(observation: Observation, rank: int) -> ProbeParty | None:
    """The launcher of this rank; None: it cannot be asked."""
    worker = observation.find_worker_of_rank(rank)
    view = None if worker is None else observation.find_worker(worker)
    return None if view is None else _find_worker_party(view)


def _find_worker_party(view: WorkerView) -> ProbeParty | None:
    if view.heartbeat is None or not view.heartbeat.probe_port or view.silent_seconds > FRESH_WORKER_SECONDS:
        return None
    if view.pod is None or not view.pod.address or view.record.leaving:
        return None
    host = f"[{view.pod.address}]" if ":" in view.pod.address else view.pod.address
    return ProbeParty(view.name, f"{host}:{view.heartbeat.probe_port}")


def _choose_control_parties(observation: Observation, source: ProbeParty, destination: ProbeParty) -> tuple[ProbeParty, ...]:
    """Members on nodes of their own, neither the source's nor the destination's, to compare with."""
    taken = {view.node for view in observation.members if view.name in (source.worker, destination.worker)}
    found: list[ProbeParty] = []
    for view in observation.members:
        party = None if not view.node or view.node in taken else _find_worker_party(view)
        if party is not None and len(found) < link_probe.MAX_CONTROL_WORKERS:
            found.append(party)
            taken.add(view.node)
    return tuple(found)


def _describe_culprit(seen: LinkCheck) -> str:
    match seen.kind:
        case None:
            return ""
        case SpotKind.PAIR:
            return f"between rank {seen.source} and rank {seen.destination}"
        case kind:
            return _describe_side(seen, LinkProbeVerdict(kind.value))


def _describe_side(seen: LinkCheck, verdict: LinkProbeVerdict) -> str:
    """For people; "": nobody."""
    return {
        LinkProbeVerdict.LINK: f"link {seen.source} → {seen.destination}",
        LinkProbeVerdict.SENDER: f"the sender side of rank {seen.source}'s worker",
        LinkProbeVerdict.RECEIVER: f"the receiver side of rank {seen.destination}'s worker",
    }.get(verdict, "")
