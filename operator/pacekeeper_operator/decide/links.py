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
from pacekeeper_analysis.adapt import Diagnosis, Trouble
from pacekeeper_analysis.diagnose import link_probe, links
from pacekeeper_analysis.diagnose.finding import FaultClass, Finding, Witness, WitnessKind, join
from pacekeeper_analysis.diagnose.link_probe import Judgement, Party, Verdict
from pacekeeper_analysis.diagnose.links import SLOW_BYTES, Cell, Links, SpotKind
from pacekeeper_analysis.plan import EvidencePart

from ..api import Cause, Class, Remedy
from ..decision import Decision, ReplaceWorker
from ..network import Pair
from ..observation import FRESH_SECONDS, Observation, Policy, WorkerView
from ..state import MAX_LINK_VERDICTS, Draft, Incident, LinkLook, LinkSide, LinkVerdict
from ..subject import Subject
from . import blame
from .answers import Answers
from .pricing import replace_option, written
from .remedies import quarantine_node

FRESH_LOOK_SECONDS, LOOK_KEPT_SECONDS = 30.0, 600.0
"""What connections showed longer ago says nothing about what is slow now; and for so long it is shown to people."""
LOOK_SECONDS = 60.0
"""For so long after a decision the connections are asked again while they have not shown anything hot."""
ANSWER_SECONDS = 10.0
"""After the last turn of a probe: who has not answered by then does not count."""
PRIOR_SECONDS = 1440.0
"""Mean duration of slow communication before this cluster has a history (Greyhound, ATC'25)."""
HOUR = 3600.0
BEFORE_SECONDS = 3.0
"""So long a round for other ways waits for what the connections tell of the present ones."""
PACE_WINDOWS, PACE_SECONDS = 2, 12.0
"""Newest windows by which a pair is called slow or fast: what is so in one of them may be luck. And how old a round is
when its connections have as many."""
REPEATED = 2
"""Probes that found a node's side slow make it a suspect."""
MOST_SIDES = 8
ADVICE: Mapping[Verdict, str] = {
    Verdict.LINK: "look at the path between the two nodes: a bad cable or port, or a route that others share",
    Verdict.SENDER: "look at the node's network: its interface, what else sends from it, limits on its traffic",
    Verdict.RECEIVER: "look at the node's network: its interface, what else it receives, limits on its traffic",
    Verdict.NOTHING: "nothing is slow when it is tried alone: look at what else uses the network, the hosts' "
    "processors, or a network that NCCL has to itself",
}


def see(observation: Observation, _policy: Policy) -> Draft:
    """What the connections of all members show, once they have told."""
    draft, request = observation.draft, observation.plan.evidence_request
    if not _is_due(observation):
        return draft
    shown = look(observation)
    hottest = shown.hot[0] if shown.hot else None
    source, destination = hottest.pairs[0] if hottest else (-1, -1)
    sides = [LinkSide(rank, True, ratio) for rank, ratio in shown.row_ratio.items()]
    sides += [LinkSide(rank, False, ratio) for rank, ratio in shown.column_ratio.items()]
    seen = LinkLook(
        at=observation.now,
        request=request,
        kind=hottest.kind if hottest else None,
        source=source,
        destination=destination,
        hot=tuple(links.describe(spot) for spot in shown.hot),
        bytes_per_second=hottest.bytes_per_second if hottest else 0.0,
        known=shown.known,
        sides=tuple(sorted(sides, key=lambda side: -side.ratio)[:MOST_SIDES]),
    )
    return draft.with_adaptation(link=seen)


def look(observation: Observation) -> Links:
    """The delay matrix of the evidence that has come."""
    return _judged(Answers(observation.evidence), _nodes(observation))


@dataclass(frozen=True)
class Pace:
    """Of what one rank sends to another, in the two newest windows. Ratios: time for a byte over that of the
    connections' own first windows."""

    bytes_per_second: float  # while it was busy, in the newest
    least_ratio: float
    most_ratio: float


def paces(observation: Observation) -> Mapping[Pair, Pace]:
    """Of the pairs on different nodes, of which both windows are known and say enough; {}: not all have told yet."""
    if not is_told(observation):
        return {}
    cells, _ = _joined(Answers(observation.evidence), _nodes(observation))
    ratios: dict[Pair, list[float]] = defaultdict(list)
    rate: dict[Pair, float] = {}
    for cell in sorted(cells, key=lambda cell: cell.age):
        if cell.age < PACE_WINDOWS and not cell.same_node and cell.early_bytes and cell.acked_bytes >= SLOW_BYTES:
            pair = cell.source, cell.destination
            ratios[pair].append(math.exp(cell.delay - cell.early_delay))
            rate.setdefault(pair, cell.bytes_per_second)
    return {
        pair: Pace(rate[pair], min(known), max(known)) for pair, known in ratios.items() if len(known) == PACE_WINDOWS
    }


def rates(observation: Observation) -> Mapping[Pair, float]:
    """Bytes a second of the same pairs."""
    return {pair: pace.bytes_per_second for pair, pace in paces(observation).items()}


def pace_is_wanted(draft: Draft, now: float) -> bool:
    """Ways are to be compared: whoever asks the ranks asks for their connections, too."""
    trial = draft.state.adaptation.way_trial
    old = trial is not None and bool(trial.since) and now - trial.since >= PACE_SECONDS
    after = old and trial is not None and not trial.slower and trial.knows_paces
    return after or now - draft.state.adaptation.ways_asked_at <= BEFORE_SECONDS


def hot_pairs(observation: Observation) -> Mapping[Pair, float]:
    """Pairs of the hot places, and their time for a byte over the usual."""
    return {pair: spot.ratio for spot in look(observation).hot for pair in spot.pairs}


def look_ahead(observation: Observation) -> None:
    """Find out what `see` will ask for: in a large job that takes seconds."""
    if _is_due(observation):
        look(observation)


def _is_due(observation: Observation) -> bool:
    """All have told of their connections, and that has not been looked at. What is being probed stays until it is
    told."""
    before = observation.state.adaptation.link
    if before is not None and (before.probe or before.request == observation.plan.evidence_request):
        return False
    return is_told(observation)


def is_told(observation: Observation) -> bool:
    """The connections have been asked for, and all members have answered."""
    plan = observation.plan
    asked = bool(plan.evidence_request) and EvidencePart.LINKS in plan.evidence_parts
    return asked and len(observation.evidence) >= len(plan.members)


def _nodes(observation: Observation) -> tuple[tuple[str, str], ...]:
    return tuple((view.name, view.node) for view in observation.workers)


@lru_cache(maxsize=2)
def _judged(answers: Answers, nodes: tuple[tuple[str, str], ...]) -> Links:
    return links.judge(*_joined(answers, nodes))


@lru_cache(maxsize=2)
def _joined(answers: Answers, nodes: tuple[tuple[str, str], ...]) -> tuple[Sequence[Cell], int]:
    return links.join(answers.evidence, dict(nodes))


def wanted(observation: Observation) -> bool:
    """Whether the next question is to ask for connections: an incident is open, and nothing hot has been seen yet."""
    incident, seen = _incident(observation), observation.state.adaptation.link
    if incident is None or observation.now - incident.decided > LOOK_SECONDS:
        return False
    return seen is None or not (seen.hot or seen.probe)


def finding(observation: Observation, found: Diagnosis) -> Finding | None:
    """Of slow communication; None: it is another trouble."""
    if found.trouble is not Trouble.COMMUNICATION:
        return None
    steps = f"steps take {found.slowdown:.2f} × as long as they need, and the ranks' own work has not grown"
    before = "communication takes longer than in the job's first steady steps"
    witnesses = [Witness(WitnessKind.TIMES, steps), Witness(WitnessKind.HISTORY, before)]
    seen = observation.state.adaptation.link
    if seen is None or not seen.known or observation.now - seen.at > FRESH_LOOK_SECONDS:
        return join(None, Finding(FaultClass.NETWORK, "", tuple(witnesses)))
    words = "; ".join(seen.hot) or "no connection is much slower than the others"
    transport = Witness(WitnessKind.TRANSPORT, words)
    return join(None, Finding(FaultClass.NETWORK, _culprit(seen), (*witnesses, transport)))


def probe(observation: Observation, policy: Policy) -> Draft:
    """Begin a probe where one is called for; and once its answers are there, write down what they told."""
    draft, seen = observation.draft, observation.state.adaptation.link
    if seen is None:
        return draft
    if not seen.probe:
        return _begin(observation, policy, seen)
    answer = told(observation)
    if answer is None:
        return draft
    if draft.plan.probe is not None:
        draft = draft.with_plan(probe=None)
    view = _blamed(observation, answer.verdict)
    verdict = LinkVerdict(observation.now, answer.verdict)
    if view is not None:
        verdict = replace(verdict, worker=view.name, node=view.node)
    earlier = (*draft.state.adaptation.link_verdicts, verdict)[-MAX_LINK_VERDICTS:]
    if answer.verdict is Verdict.REVERSED:  # the other way is what is to be asked about
        turned = replace(
            seen, kind=SpotKind.PAIR, source=seen.destination, destination=seen.source, incident="", probe=""
        )
        asked = draft.with_adaptation(link=turned, link_verdicts=earlier)
        return _begin(observation.with_draft(asked), policy, turned)  # at once: the incident waits for nothing else
    draft = draft.with_adaptation(link=replace(seen, probe=""), link_verdicts=earlier)
    incident = draft.state.incidents.find(seen.incident)
    if incident is None:
        return draft
    draft = draft.with_incident(_improved(incident, seen, answer))
    return _suspected(observation.with_draft(draft), policy, incident, verdict)


def check(observation: Observation, policy: Policy) -> Decision | None:
    """Where one worker's side is slow: a spare in its place, where that pays beside what has been done."""
    seen = observation.state.adaptation.link
    answer = None if seen is None or not seen.probe else told(observation)
    if seen is None or answer is None or (view := _blamed(observation, answer.verdict)) is None:
        return None
    incident = observation.state.incidents.find(seen.incident)
    if incident is None or view.record.leaving:
        return None
    now = left(incident)
    if now < observation.job.spec.detection.straggler_slowdown:
        return None
    elapsed = observation.now - incident.first_sign
    past = observation.surroundings.past_seconds.get(Cause.SLOW_COMMUNICATION, ())
    spent = "no restart is left in this window" if observation.budget_is_spent(policy) else ""
    choice = price.choose(
        (replace_option(observation, policy, refused=spent),),
        slowdown=now,
        lost_seconds=elapsed * price.loss_rate(now),
        remaining_seconds=price.expected_remaining(elapsed, past, PRIOR_SECONDS),
    )
    if choice.chosen is None:
        return None
    still_open = incident.outcome is None
    subject = Subject(Cause.SLOW_COMMUNICATION, observation.round, worker=view.name)
    words = f"{_side(seen, answer.verdict)} is slow: {answer.words}"
    return Decision(
        subject=subject,
        class_=Class.PERFORMANCE,
        message=words,
        first_sign=incident.first_sign,
        actions=(ReplaceWorker(view.name, _side(seen, answer.verdict) + " is slow", dead=False),),
        remedy=Remedy.REPLACE_WORKER,
        remedies=(*incident.remedies, *written(choice.prices, choice.chosen)),
        evidence=incident.evidence,
        worker=view.name,
        node=view.node or None,
        continues=incident.name if still_open else "",
        last_step=observation.step,
        slowdown_before=now,
        slowdown_after=1.0,
        reference_seconds=incident.reference_seconds,
        predicted_gain=choice.chosen.gain_seconds,
        finding=_improved(incident, seen, answer).finding,
    )


def _begin(observation: Observation, policy: Policy, seen: LinkLook) -> Draft:
    draft, incident, now = observation.draft, _incident(observation), observation.now
    if now - seen.at > LOOK_KEPT_SECONDS:
        return draft.with_adaptation(link=None)
    if now - seen.at > FRESH_LOOK_SECONDS or seen.incident or incident is None or not seen.hot or not policy.acts:
        return draft
    lately = [verdict for verdict in draft.state.adaptation.link_verdicts if verdict.at > now - HOUR]
    if len(lately) >= policy.link_probes_an_hour:
        return draft
    source, destination = _party(observation, seen.source), _party(observation, seen.destination)
    if source is None or destination is None or source == destination:
        return draft
    name = f"probe-{draft.plan.version + 1}"
    asked = link_probe.layout(name, source, destination, _others(observation, source, destination))
    begun = replace(seen, incident=incident.name, probe=name, probed_at=now)
    return draft.with_plan(probe=asked).with_adaptation(link=begun)


def told(observation: Observation) -> Judgement | None:
    """What the probe that is out has told; None: some have not answered, and have time left."""
    seen, plan = observation.state.adaptation.link, observation.plan
    assert seen is not None
    if plan.probe is None or plan.probe.name != seen.probe:
        return Judgement(Verdict.UNTOLD, "the workers changed before it was answered")
    asked = {
        worker: {target.worker for target in targets}
        for worker, targets in zip(plan.probe.sources, plan.probe.targets, strict=True)
    }
    answers = {
        told.worker: [of for of in told.probes if of.target in asked.get(told.worker, ())]
        for told in observation.probes
    }
    waited = observation.now - seen.probed_at - link_probe.seconds(plan.probe)
    if any(source not in answers for source in plan.probe.sources) and waited < ANSWER_SECONDS:
        return None
    source, destination = observation.worker_of_rank(seen.source), observation.worker_of_rank(seen.destination)
    return link_probe.judge(answers, source or "", destination or "")


def _improved(incident: Incident, seen: LinkLook, told: Judgement) -> Incident:
    """With what the probe told. One that could not tell is no witness, and is written down all the same."""
    evidence = (*incident.evidence, f"a probe of the way from rank {seen.source} to rank {seen.destination}: "
                f"{told.verdict}. {told.words}")  # fmt: skip
    if told.verdict is Verdict.UNTOLD or incident.finding is None:
        return replace(incident, evidence=evidence)
    witness = Witness(WitnessKind.PROBE, told.words)
    culprit = _side(seen, told.verdict)
    better = Finding(FaultClass.NETWORK, culprit, (witness,), advice=ADVICE[told.verdict])
    return replace(incident, evidence=evidence, finding=join(incident.finding, better))


def _suspected(observation: Observation, policy: Policy, incident: Incident, verdict: LinkVerdict) -> Draft:
    """The node whose side was slow once more is named to the platform, which looks at it by itself."""
    again = [
        earlier
        for earlier in observation.state.adaptation.link_verdicts
        if earlier.node and earlier.node == verdict.node and earlier.at > observation.now - policy.restart_window
    ]
    if len(again) < REPEATED:
        return observation.draft
    reason = f"its side was slow in {len(again)} probes between this job's workers"
    action = blame.propose(observation, policy, verdict.node, reason)
    return observation.draft if action.withheld else quarantine_node.want(observation, action, incident.name)


def _incident(observation: Observation) -> Incident | None:
    """The open one of slow communication."""
    found = (i for i in observation.state.incidents.open if i.cause is Cause.SLOW_COMMUNICATION)
    return next(found, None)


def left(incident: Incident) -> float:
    """The job's slowdown now: as measured, or as expected of the remedy that is in force."""
    if incident.slowdown_after is not None:
        return incident.slowdown_after
    applied = incident.remedy is not None and incident.applied is not None
    after = incident.predicted_after if applied else incident.slowdown_before
    return 1.0 if after is None else after


def _blamed(observation: Observation, verdict: Verdict) -> WorkerView | None:
    """The worker whose side is slow."""
    seen = observation.state.adaptation.link
    rank = {Verdict.SENDER: seen.source, Verdict.RECEIVER: seen.destination}.get(verdict) if seen else None
    worker = None if rank is None else observation.worker_of_rank(rank)
    return None if worker is None else observation.worker(worker)


def _party(observation: Observation, rank: int) -> Party | None:
    """The launcher of this rank; None: it cannot be asked."""
    worker = observation.worker_of_rank(rank)
    view = None if worker is None else observation.worker(worker)
    return None if view is None else _address(view)


def _address(view: WorkerView) -> Party | None:
    if view.heartbeat is None or not view.heartbeat.probe_port or view.silent_seconds > FRESH_SECONDS:
        return None
    if view.pod is None or not view.pod.address or view.record.leaving:
        return None
    host = f"[{view.pod.address}]" if ":" in view.pod.address else view.pod.address
    return Party(view.name, f"{host}:{view.heartbeat.probe_port}")


def _others(observation: Observation, source: Party, destination: Party) -> tuple[Party, ...]:
    """Members on nodes of their own, neither the source's nor the destination's, to compare with."""
    taken = {view.node for view in observation.members if view.name in (source.worker, destination.worker)}
    found: list[Party] = []
    for view in observation.members:
        party = None if not view.node or view.node in taken else _address(view)
        if party is not None and len(found) < link_probe.MOST_OTHERS:
            found.append(party)
            taken.add(view.node)
    return tuple(found)


def _culprit(seen: LinkLook) -> str:
    match seen.kind:
        case None:
            return ""
        case SpotKind.PAIR:
            return f"between rank {seen.source} and rank {seen.destination}"
        case kind:
            return _side(seen, Verdict(kind.value))


def _side(seen: LinkLook, verdict: Verdict) -> str:
    """For people; "": nobody."""
    return {
        Verdict.LINK: f"link {seen.source} → {seen.destination}",
        Verdict.SENDER: f"the sender side of rank {seen.source}'s worker",
        Verdict.RECEIVER: f"the receiver side of rank {seen.destination}'s worker",
    }.get(verdict, "")
