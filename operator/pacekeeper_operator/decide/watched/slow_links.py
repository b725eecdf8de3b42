"""Where a slow link of a watched job is: by the kernel's counters of the ranks' connections, which sidecars sample.

1. The estimator holds a slow link for probable. `request_link_evidence` asks for the connections' counters.
2. `record_slow_links` evaluates the answers, by the delay matrix that TrainingJobs use.
3. `name_slow_link` adds the place to the Incident that is open by then.

No launcher runs that could probe the place. Where the counters do not suffice, the place stays unknown.
"""

from __future__ import annotations

from dataclasses import replace

from pacekeeper_analysis.estimator.parameters import PROBABLE
from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind, merge_findings
from pacekeeper_analysis.network.delay_matrix import SpotKind
from pacekeeper_analysis.network.link_probe import LinkProbeVerdict
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest

from ...state.cluster_view import WorkerView
from ...state.desired_state import DesiredState, Incident
from ...state.job_requests import LinkCheck
from ...state.observation import Observation
from ...state.policy import Policy
from ...state.straggler_estimate import EstimatedFault, FaultEstimate
from ..network import slow_communication
from ..network.slow_communication import FRESH_LINK_EVIDENCE_SECONDS, THROUGHPUT_READY_SECONDS
from ..stragglers import straggler

LINK_REQUEST_KIND = "links"
LinkPlace = tuple[SpotKind, int | None, int | None]
"""What is slow, and the ranks of its source and destination; None: all."""


def request_link_evidence(observation: Observation, policy: Policy) -> DesiredState:
    """Return the state with a request for the connections' counters if a slow link is probable.

    While no place is hot, it asks again once the answer consists of new windows. A place that is known stays fresh by
    further requests. A request that some pods do not answer is dropped: the estimator has requests of its own.
    """
    desired, now = observation.desired, observation.now
    evidence, link_check = desired.requests.evidence, desired.requests.link_check
    requested_at = desired.requests.connections_requested_at
    is_new_due = requested_at is None or now - requested_at >= (
        FRESH_LINK_EVIDENCE_SECONDS if get_hot_check(observation) is not None else THROUGHPUT_READY_SECONDS
    )
    is_wanted = policy.observes_links and find_slow_link(observation) is not None
    if evidence is not None:
        is_answered = link_check is not None and link_check.request == evidence.name
        is_over = is_answered or is_new_due or not is_wanted
        is_own = evidence.name.startswith(f"{LINK_REQUEST_KIND}-")
        return desired.with_requests(evidence=None) if is_own and is_over else desired
    if not is_wanted or not is_new_due or not straggler.is_steady(observation):
        return desired
    name = desired.requests.build_next_name(LINK_REQUEST_KIND, observation.nonce)
    return desired.with_requests(
        evidence=EvidenceRequest(name, (EvidencePart.LINKS,)),
        issued=desired.requests.issued + 1,
        connections_requested_at=now,
    )


def record_slow_links(observation: Observation, policy: Policy) -> DesiredState:
    """Return the state with what the answers show of the connections, once all pods have answered.

    An answer with too little traffic shows nothing: what an earlier one has shown stays. All of it is dropped once no
    link is probably slow, and what is from before this slowness or round.
    """
    before, fault, round_began = (
        observation.requests.link_check,
        find_slow_link(observation),
        observation.progress.training_since,
    )
    desired = slow_communication.record_link_evidence(observation, policy)
    link_check = desired.requests.link_check
    if before is not None and link_check is not None and not link_check.conclusive:
        link_check = replace(before, request=link_check.request)
    if fault is None or round_began is None or (link_check and link_check.at < max(fault.since, round_began)):
        link_check = None
    return desired if link_check == desired.requests.link_check else desired.with_requests(link_check=link_check)


def name_slow_link(observation: Observation, incident: Incident) -> Incident:
    """Return the open incident about slow communication with the place, once the connections show it."""
    check = get_hot_check(observation)
    is_named = incident.finding is not None and SignalKind.TRANSPORT in incident.finding.signal_kinds
    if check is None or is_named:
        return incident
    finding = merge_findings(incident.finding, build_transport_finding(check))
    return replace(incident, evidence=(*incident.evidence, *check.hot_places), finding=finding)


def find_slow_link(observation: Observation) -> FaultEstimate | None:
    """Return the slow link that is more probable than not; None: there is none."""
    faults = () if observation.estimate is None else observation.estimate.faults
    is_link = (fault for fault in faults if fault.fault is EstimatedFault.SLOW_LINK)
    return next((fault for fault in is_link if fault.probability > PROBABLE), None)


def get_hot_check(observation: Observation) -> LinkCheck | None:
    """Return the evidence about the present slowness that shows where it is; None: it is not known."""
    check = observation.requests.link_check
    if check is None or check.hottest is None:
        return None
    is_old = observation.now - check.at > slow_communication.LINK_EVIDENCE_TTL_SECONDS
    return None if is_old else check


def identify_place(observation: Observation) -> LinkPlace | None:
    """Return where the slow link is; None: it is not known."""
    check = get_hot_check(observation)
    hottest = None if check is None else check.hottest
    return None if hottest is None else (hottest.kind, hottest.source, hottest.destination)


def build_transport_finding(check: LinkCheck) -> Finding:
    """Return what the connections alone show. A side of a node comes with advice; of a pair, either end may be slow."""
    assert check.hottest is not None
    kind = check.hottest.kind
    return Finding(
        FaultClass.NETWORK,
        slow_communication.describe_culprit(check.hottest),
        (Signal(SignalKind.TRANSPORT, "; ".join(check.hot_places)),),
        advice="" if kind is SpotKind.PAIR else slow_communication.LINK_VERDICT_ADVICE[LinkProbeVerdict(kind.value)],
    )


def find_slow_side(observation: Observation) -> WorkerView | None:
    """Return the pod of which one side is slow; None: a link between two pods is, or the place is not known."""
    check = get_hot_check(observation)
    hottest = None if check is None else check.hottest
    if hottest is None or hottest.kind not in (SpotKind.SENDER, SpotKind.RECEIVER):
        return None
    rank = hottest.source if hottest.kind is SpotKind.SENDER else hottest.destination
    worker = observation.find_worker_of_rank(rank)
    return None if worker is None else observation.find_worker(worker)


def describe_slow_link(observation: Observation) -> str:
    """Return the place of the slow link as the subject of a sentence, for people."""
    check = get_hot_check(observation)
    if check is None or check.hottest is None:
        return "a slow link"
    hottest = check.hottest
    source, destination = (_describe_end(observation, rank) for rank in (hottest.source, hottest.destination))
    return {
        SpotKind.LINK: f"the slow link from {source} to {destination}",
        SpotKind.SENDER: f"the slow sending side of {source}",
        SpotKind.RECEIVER: f"the slow receiving side of {destination}",
        SpotKind.PAIR: f"the slow path from {source} to {destination}",
    }[hottest.kind]


def _describe_end(observation: Observation, rank: int) -> str:
    worker = observation.find_worker_of_rank(rank)
    view = None if worker is None else observation.find_worker(worker)
    if view is None:
        return f"rank {rank}"
    return f"rank {rank} on {view.name}" + (f" ({view.node})" if view.node else "")
