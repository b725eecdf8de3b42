"""Slow communication, investigated: what the connections show, and a probe between launchers of the hottest place.

1. An investigation requests evidence with connections. `record_link_evidence` evaluates it, and the incident's finding
   names what is hot.
2. An incident is open, and a place is hot. `advance_link_probe` has the launchers measure it, with controls.
3. The launchers answer. `advance_link_probe` adds the result to the finding, and `check_slow_link_sides` replaces a
   worker, where that pays.

The incident and its cheap remedy do not wait for this. What launchers report decides only inside their job. A node
becomes a suspect once its side was slow in two probes, and the operator's own probe pod decides about it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind, merge_findings
from pacekeeper_analysis.network import delay_matrix, link_probe
from pacekeeper_analysis.network.delay_matrix import MIN_SLOW_CELL_BYTES, DelayCell, LinkDiagnosis, SpotKind
from pacekeeper_analysis.network.link_probe import LinkProbeResult, LinkProbeVerdict, ProbeParty
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_analysis.stragglers import price
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Diagnosis

from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy
from ...state.cluster_view import FRESH_WORKER_SECONDS, WorkerView
from ...state.desired_state import MAX_LINK_VERDICTS, DesiredState, Incident, LinkVerdict
from ...state.incident_key import IncidentKey
from ...state.job_requests import HottestPlace, LinkCheck, LinkSide
from ...state.network import RankPair
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision, ReplaceWorker
from ..nodes import quarantine_proposal
from ..remedies import quarantine_node
from ..stragglers.evidence_key import EvidenceKey
from ..stragglers.pricing import build_remedy_prices, build_replace_option

FRESH_LINK_EVIDENCE_SECONDS, LINK_EVIDENCE_TTL_SECONDS = 30.0, 600.0
"""Age up to which the connections' evidence applies to a present slowness, and up to which it is shown to people."""
LINK_EVIDENCE_REQUEST_SECONDS = 60.0
"""Time after a decision in which the connections are asked again while they have not shown anything hot."""
LINK_PROBE_ANSWER_SECONDS = 10.0
"""Time after the last turn of a probe: later answers do not count."""
SLOW_COMMUNICATION_PRIOR_SECONDS = 1440.0
"""Mean duration of slow communication before this cluster has a history (Greyhound, ATC'25)."""
LINK_PROBE_RATE_WINDOW_SECONDS = 3600.0
REROUTE_EVIDENCE_WAIT_SECONDS = 3.0
"""Time that a round for other routes waits for the connections' evidence about the present ones."""
THROUGHPUT_WINDOWS, THROUGHPUT_READY_SECONDS = 2, 12.0
"""Newest windows by which a pair is called slow or fast, since one of them may be chance.

The second value is the age of a round whose connections have as many windows.
"""
MIN_SLOW_PROBES = 2
"""Probes that found a node's side slow, from which number on it is a suspect."""
MAX_LINK_SIDES = 8
LINK_VERDICT_ADVICE: Mapping[LinkProbeVerdict, str] = {
    LinkProbeVerdict.LINK: "look at the path between the two nodes: a bad cable or port, or a route that others share",
    LinkProbeVerdict.SENDER: (
        "look at the node's network: its interface, what else sends from it, limits on its traffic"
    ),
    LinkProbeVerdict.RECEIVER: (
        "look at the node's network: its interface, what else it receives, limits on its traffic"
    ),
    LinkProbeVerdict.NOTHING: "nothing is slow when it is tried alone: look at what else uses the network, the hosts' "
    "processors, or a network that NCCL has to itself",
}


def record_link_evidence(observation: Observation, _policy: Policy) -> DesiredState:
    """Return the state with the evidence of all members' connections, once it is complete."""
    desired, request = observation.desired, observation.requests.evidence_name
    if not _has_new_evidence(observation):
        return desired
    diagnosis = compute_delay_matrix(observation)
    hottest = diagnosis.hot_spots[0] if diagnosis.hot_spots else None
    sides = [LinkSide(rank, True, ratio) for rank, ratio in diagnosis.row_ratio.items()]
    sides += [LinkSide(rank, False, ratio) for rank, ratio in diagnosis.column_ratio.items()]
    link_check = LinkCheck(
        at=observation.now,
        request=request,
        hottest=None if hottest is None else HottestPlace(hottest.kind, *hottest.pairs[0], hottest.bytes_per_second),
        hot_places=tuple(delay_matrix.describe_hot_spot(spot) for spot in diagnosis.hot_spots),
        conclusive=diagnosis.is_known,
        sides=tuple(sorted(sides, key=lambda side: -side.ratio)[:MAX_LINK_SIDES]),
    )
    return desired.with_requests(link_check=link_check)


def compute_delay_matrix(observation: Observation) -> LinkDiagnosis:
    """Return the delay matrix of the present evidence."""
    return _analyze_links(EvidenceKey(observation.evidence), _list_worker_nodes(observation))


@dataclass(frozen=True)
class PairThroughput:
    """Throughput from one rank to another, in the two newest windows.

    Ratios: time per byte over that of the connections' own first windows.
    """

    bytes_per_second: float  # while it was busy, in the newest window
    min_ratio: float
    max_ratio: float


def measure_pair_throughputs(observation: Observation) -> Mapping[RankPair, PairThroughput]:
    """Return the throughput of pairs on different nodes with enough data in both windows; {}: answers are missing."""
    if not has_link_evidence(observation):
        return {}
    cells, _ = _join_cells(EvidenceKey(observation.evidence), _list_worker_nodes(observation))
    ratios: dict[RankPair, list[float]] = defaultdict(list)
    rates: dict[RankPair, float] = {}
    for cell in sorted(cells, key=lambda cell: cell.age):
        if (
            cell.age < THROUGHPUT_WINDOWS
            and not cell.same_node
            and cell.early_bytes is not None
            and cell.acked_bytes >= MIN_SLOW_CELL_BYTES
        ):
            pair = cell.source, cell.destination
            ratios[pair].append(math.exp(cell.delay - cell.early_delay))
            rates.setdefault(pair, cell.bytes_per_second)
    return {
        pair: PairThroughput(rates[pair], min(pair_ratios), max(pair_ratios))
        for pair, pair_ratios in ratios.items()
        if len(pair_ratios) == THROUGHPUT_WINDOWS
    }


def measure_pair_rates(observation: Observation) -> Mapping[RankPair, float]:
    """Return the bytes a second of the same pairs."""
    return {pair: throughput.bytes_per_second for pair, throughput in measure_pair_throughputs(observation).items()}


def needs_pair_throughput(desired: DesiredState, now: float) -> bool:
    """Return whether routes are to be compared, so that every evidence request includes the connections."""
    trial, requested_at = desired.state.adaptation.route_trial, desired.requests.connections_requested_at
    needs_new_rates = (
        trial is not None
        and trial.since is not None
        and now - trial.since >= THROUGHPUT_READY_SECONDS
        and trial.slowdown is None
        and trial.has_rates
    )
    return needs_new_rates or (requested_at is not None and now - requested_at <= REROUTE_EVIDENCE_WAIT_SECONDS)


def find_hot_pairs(observation: Observation) -> Mapping[RankPair, float]:
    """Return the pairs of the hot places, and their time per byte over the usual."""
    return {pair: spot.ratio for spot in compute_delay_matrix(observation).hot_spots for pair in spot.pairs}


def prefetch_delay_matrix(observation: Observation) -> None:
    """Compute in advance what `record_link_evidence` will need: in a large job that takes seconds."""
    if _has_new_evidence(observation):
        compute_delay_matrix(observation)


def _has_new_evidence(observation: Observation) -> bool:
    """Return whether all members have reported their connections, and that is not evaluated yet.

    Evidence whose hottest place is being probed stays until the probe is answered.
    """
    link_check = observation.requests.link_check
    if link_check is not None and (link_check.probe or link_check.request == observation.requests.evidence_name):
        return False
    return has_link_evidence(observation)


def has_link_evidence(observation: Observation) -> bool:
    """Return whether the connections have been asked for, and all members have answered."""
    is_requested = EvidencePart.LINKS in observation.requests.evidence_parts
    return is_requested and len(observation.evidence) >= len(observation.plan.members)


def _list_worker_nodes(observation: Observation) -> tuple[tuple[str, str], ...]:
    return tuple((view.name, view.node) for view in observation.workers)


@lru_cache(maxsize=2)
def _analyze_links(evidence_key: EvidenceKey, nodes: tuple[tuple[str, str], ...]) -> LinkDiagnosis:
    return delay_matrix.diagnose_links(*_join_cells(evidence_key, nodes))


@lru_cache(maxsize=2)
def _join_cells(evidence_key: EvidenceKey, nodes: tuple[tuple[str, str], ...]) -> tuple[Sequence[DelayCell], int]:
    return delay_matrix.join_link_ends(evidence_key.evidence, dict(nodes))


def needs_link_evidence(observation: Observation) -> bool:
    """Return whether the next request is to include connections: an incident is open, and nothing hot was seen."""
    incident, link_check = _find_open_incident(observation), observation.requests.link_check
    if incident is None or observation.now - incident.decided > LINK_EVIDENCE_REQUEST_SECONDS:
        return False
    return link_check is None or not (link_check.hot_places or link_check.probe)


def build_communication_finding(observation: Observation, diagnosis: Diagnosis) -> Finding | None:
    """Return the finding about slow communication; None: it is another bottleneck."""
    if diagnosis.bottleneck is not Bottleneck.COMMUNICATION:
        return None
    steps_text = f"steps take {diagnosis.slowdown:.2f} × as long as they need, and the ranks' own work has not grown"
    history_text = "communication takes longer than in the job's first steady steps"
    signals = [Signal(SignalKind.TIMES, steps_text), Signal(SignalKind.HISTORY, history_text)]
    link_check = observation.requests.link_check
    if link_check is None or not link_check.conclusive or observation.now - link_check.at > FRESH_LINK_EVIDENCE_SECONDS:
        return merge_findings(None, Finding(FaultClass.NETWORK, "", tuple(signals)))
    places_text = "; ".join(link_check.hot_places) or "no connection is much slower than the others"
    transport = Signal(SignalKind.TRANSPORT, places_text)
    return merge_findings(
        None, Finding(FaultClass.NETWORK, describe_culprit(link_check.hottest), (*signals, transport))
    )


def advance_link_probe(observation: Observation, policy: Policy) -> DesiredState:
    """Begin a probe where one is called for, and record its result once its answers are there."""
    desired, link_check = observation.desired, observation.requests.link_check
    if link_check is None:
        return desired
    if not link_check.probe:
        return _begin_probe(observation, policy, link_check)
    result = get_probe_result(observation)
    if result is None:
        return desired
    desired = desired.with_requests(probe=None)
    view = _find_slow_worker(observation, result.verdict)
    verdict = LinkVerdict(observation.now, result.verdict)
    if view is not None:
        verdict = replace(verdict, worker=view.name, node=view.node)
    verdicts = (*desired.state.adaptation.link_verdicts, verdict)[-MAX_LINK_VERDICTS:]
    hottest = link_check.hottest
    if result.verdict is LinkProbeVerdict.REVERSED and hottest is not None:  # the opposite direction is to be probed
        opposite = HottestPlace(SpotKind.PAIR, hottest.destination, hottest.source, hottest.bytes_per_second)
        reversed_check = replace(link_check, hottest=opposite, incident="", probe="")
        updated = desired.with_requests(link_check=reversed_check).with_adaptation(link_verdicts=verdicts)
        return _begin_probe(
            observation.with_desired(updated), policy, reversed_check
        )  # at once: the incident waits for nothing else
    desired = desired.with_requests(link_check=replace(link_check, probe="")).with_adaptation(link_verdicts=verdicts)
    incident = desired.state.incidents.find(link_check.incident)
    if incident is None or hottest is None:
        return desired
    desired = desired.with_incident(_add_probe_result(incident, hottest, result))
    return _propose_quarantine(observation.with_desired(desired), policy, incident, verdict)


def check_slow_link_sides(observation: Observation, policy: Policy) -> Decision | None:
    """Decide to replace a worker whose side is slow, where that pays in addition to what has been done."""
    link_check = observation.requests.link_check
    result = None if link_check is None or not link_check.probe else get_probe_result(observation)
    if link_check is None or link_check.hottest is None or result is None:
        return None
    view = _find_slow_worker(observation, result.verdict)
    if view is None:
        return None
    incident = observation.state.incidents.find(link_check.incident)
    if incident is None or view.record.leaving:
        return None
    slowdown = get_remaining_slowdown(incident)
    if slowdown < observation.job.spec.detection.straggler_slowdown:
        return None
    elapsed = observation.now - incident.first_sign
    past = observation.cluster_view.past_durations.get(IncidentCause.SLOW_COMMUNICATION, ())
    refusal = "no restart is left in this window" if observation.is_budget_spent(policy) else ""
    choice = price.choose_remedy(
        (build_replace_option(observation, policy, refused=refusal),),
        slowdown=slowdown,
        lost_seconds=elapsed * price.compute_loss_rate(slowdown),
        remaining_seconds=price.estimate_remaining_seconds(elapsed, past, SLOW_COMMUNICATION_PRIOR_SECONDS),
    )
    if choice.chosen is None:
        return None
    still_open = incident.outcome is None
    incident_key = IncidentKey(IncidentCause.SLOW_COMMUNICATION, observation.progress.round, worker=view.name)
    message = f"{_describe_side(link_check.hottest, result.verdict)} is slow: {result.message}"
    return Decision(
        incident_key=incident_key,
        class_=IncidentClass.PERFORMANCE,
        message=message,
        first_sign=incident.first_sign,
        actions=(
            ReplaceWorker(view.name, _describe_side(link_check.hottest, result.verdict) + " is slow", dead=False),
        ),
        remedy=Remedy.REPLACE_WORKER,
        remedies=(*incident.remedies, *build_remedy_prices(choice.prices, choice.chosen)),
        evidence=incident.evidence,
        worker=view.name,
        node=view.node or None,
        continued_incident=incident.name if still_open else "",
        last_step=observation.progress.step,
        slowdown_before=slowdown,
        slowdown_after=1.0,
        reference_seconds=incident.reference_seconds,
        predicted_gain=choice.chosen.gain_seconds,
        finding=_add_probe_result(incident, link_check.hottest, result).finding,
    )


def _begin_probe(observation: Observation, policy: Policy, link_check: LinkCheck) -> DesiredState:
    desired, incident, now = observation.desired, _find_open_incident(observation), observation.now
    if now - link_check.at > LINK_EVIDENCE_TTL_SECONDS:
        return desired.with_requests(link_check=None)
    if (
        now - link_check.at > FRESH_LINK_EVIDENCE_SECONDS
        or link_check.incident
        or incident is None
        or link_check.hottest is None
        or not policy.applies_remedies
    ):
        return desired
    recent_verdicts = [
        verdict
        for verdict in desired.state.adaptation.link_verdicts
        if verdict.at > now - LINK_PROBE_RATE_WINDOW_SECONDS
    ]
    if len(recent_verdicts) >= policy.link_probes_per_hour:
        return desired
    source, destination = (
        _find_rank_party(observation, link_check.hottest.source),
        _find_rank_party(observation, link_check.hottest.destination),
    )
    if source is None or destination is None or source == destination:
        return desired
    name = desired.requests.build_next_name("probe", observation.nonce)
    probe = link_probe.plan_probe(name, source, destination, _choose_control_parties(observation, source, destination))
    updated = replace(link_check, incident=incident.name, probe=name, probed_at=now)
    return desired.with_requests(probe=probe, issued=desired.requests.issued + 1, link_check=updated)


def get_probe_result(observation: Observation) -> LinkProbeResult | None:
    """Return the result of the pending probe; None: some have not answered, and have time left."""
    link_check, request = observation.requests.link_check, observation.requests.probe
    assert link_check is not None
    hottest = link_check.hottest
    if hottest is None or request is None or request.name != link_check.probe:
        return LinkProbeResult(LinkProbeVerdict.INCONCLUSIVE, "the workers changed before it was answered")
    wanted_targets = {
        worker: {target.worker for target in targets}
        for worker, targets in zip(request.sources, request.targets, strict=True)
    }
    answers = {
        report.worker: [probe for probe in report.probes if probe.target in wanted_targets.get(report.worker, ())]
        for report in observation.probes
    }
    patience = link_probe.estimate_probe_seconds(request) + LINK_PROBE_ANSWER_SECONDS
    has_time = link_check.probed_at is not None and observation.now - link_check.probed_at < patience
    if has_time and any(source not in answers for source in request.sources):
        return None
    source, destination = (
        observation.find_worker_of_rank(hottest.source),
        observation.find_worker_of_rank(hottest.destination),
    )
    return link_probe.evaluate_probe(answers, source or "", destination or "")


def _add_probe_result(incident: Incident, hottest: HottestPlace, result: LinkProbeResult) -> Incident:
    """Return the incident with the probe's result. An inconclusive one is no signal, but is recorded as well."""
    evidence = (*incident.evidence, f"a probe of the path from rank {hottest.source} to "
                f"rank {hottest.destination}: {result.verdict}. {result.message}")  # fmt: skip
    if result.verdict is LinkProbeVerdict.INCONCLUSIVE or incident.finding is None:
        return replace(incident, evidence=evidence)
    signal = Signal(SignalKind.PROBE, result.message)
    culprit = _describe_side(hottest, result.verdict)
    probe_finding = Finding(FaultClass.NETWORK, culprit, (signal,), advice=LINK_VERDICT_ADVICE[result.verdict])
    return replace(incident, evidence=evidence, finding=merge_findings(incident.finding, probe_finding))


def _propose_quarantine(
    observation: Observation, policy: Policy, incident: Incident, verdict: LinkVerdict
) -> DesiredState:
    """Report the node whose side was slow again as a suspect. The platform checks it itself."""
    slow_verdicts = [
        earlier
        for earlier in observation.state.adaptation.link_verdicts
        if earlier.node and earlier.node == verdict.node and earlier.at > observation.now - policy.restart_window
    ]
    if len(slow_verdicts) < MIN_SLOW_PROBES:
        return observation.desired
    reason = f"its side was slow in {len(slow_verdicts)} probes between this job's workers"
    action = quarantine_proposal.propose_quarantine(observation, policy, verdict.node, reason)
    return (
        observation.desired
        if action.withheld
        else quarantine_node.request_quarantine(observation, action, incident.name)
    )


def _find_open_incident(observation: Observation) -> Incident | None:
    """Return the open incident of slow communication."""
    open_incidents = (
        incident for incident in observation.state.incidents.open if incident.cause is IncidentCause.SLOW_COMMUNICATION
    )
    return next(open_incidents, None)


def get_remaining_slowdown(incident: Incident) -> float:
    """Return the job's present slowdown: as measured, or as expected of the remedy that is in force."""
    if incident.slowdown_after is not None:
        return incident.slowdown_after
    applied = incident.remedy is not None and incident.applied is not None
    after = incident.predicted_after if applied else incident.slowdown_before
    return 1.0 if after is None else after


def _find_slow_worker(observation: Observation, verdict: LinkProbeVerdict) -> WorkerView | None:
    link_check = observation.requests.link_check
    hottest = None if link_check is None else link_check.hottest
    rank = (
        None
        if hottest is None
        else {LinkProbeVerdict.SENDER: hottest.source, LinkProbeVerdict.RECEIVER: hottest.destination}.get(verdict)
    )
    worker = None if rank is None else observation.find_worker_of_rank(rank)
    return None if worker is None else observation.find_worker(worker)


def _find_rank_party(observation: Observation, rank: int) -> ProbeParty | None:
    """Return the launcher of this rank; None: it cannot be asked."""
    worker = observation.find_worker_of_rank(rank)
    view = None if worker is None else observation.find_worker(worker)
    return None if view is None else _find_worker_party(view)


def _find_worker_party(view: WorkerView) -> ProbeParty | None:
    if view.heartbeat is None or view.heartbeat.probe_port is None or view.silent_seconds > FRESH_WORKER_SECONDS:
        return None
    if view.pod is None or not view.pod.address or view.record.leaving:
        return None
    host = f"[{view.pod.address}]" if ":" in view.pod.address else view.pod.address
    return ProbeParty(view.name, f"{host}:{view.heartbeat.probe_port}")


def _choose_control_parties(
    observation: Observation, source: ProbeParty, destination: ProbeParty
) -> tuple[ProbeParty, ...]:
    """Return members on nodes of their own, other than those of source and destination, to compare with."""
    used_nodes = {view.node for view in observation.members if view.name in (source.worker, destination.worker)}
    parties: list[ProbeParty] = []
    for view in observation.members:
        party = None if not view.node or view.node in used_nodes else _find_worker_party(view)
        if party is not None and len(parties) < link_probe.MAX_CONTROL_WORKERS:
            parties.append(party)
            used_nodes.add(view.node)
    return tuple(parties)


def describe_culprit(hottest: HottestPlace | None) -> str:
    """Return what the connections' evidence blames, for people; "": nothing."""
    if hottest is None:
        return ""
    if hottest.kind is SpotKind.PAIR:
        return f"between rank {hottest.source} and rank {hottest.destination}"
    return _describe_side(hottest, LinkProbeVerdict(hottest.kind.value))


def _describe_side(hottest: HottestPlace, verdict: LinkProbeVerdict) -> str:
    """Return the slow side, for people; "": neither."""
    return {
        LinkProbeVerdict.LINK: f"link {hottest.source} → {hottest.destination}",
        LinkProbeVerdict.SENDER: f"the sender side of rank {hottest.source}'s worker",
        LinkProbeVerdict.RECEIVER: f"the receiver side of rank {hottest.destination}'s worker",
    }.get(verdict, "")
