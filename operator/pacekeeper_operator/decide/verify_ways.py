"""Whether other ways are better: a round that was begun for them is measured, and what is no better is not kept.

    a round is due      → the connections tell their pace by the ways so far, or have had their time: `is_known_before`
    first step by them  → from then on it is measured: what the round itself took is none of its slowness
    steady, and told    → the pace of the connections that go another way beside that of before, where it is known, and
                          else the time of a step: `judge`
    no better           → not tried again for a while: `conclude`
    steps are longer    → the ways of before come back, once that pays: `check`

Who asks the ranks for something else meanwhile asks for their connections, too (`links.pace_is_wanted`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from pacekeeper_analysis import price
from pacekeeper_analysis.plan import EvidencePart

from ..api import Cause, Class, Outcome, Remedy
from ..decision import Decision, PlanTraffic
from ..observation import Observation, Policy
from ..state import MAX_WAYS_TRIED, Draft, Incident, WayTrial, WayTried
from ..subject import Subject
from . import links, paths
from .pricing import plan_traffic_option, written
from .straggler import earlier, steady
from .traffic import HORIZON_SECONDS

BETTER = 1.1
"""× the pace of before, for a way to be better."""
NOISE = 0.02
"""Steps that have changed by less are as they were."""
LINKS_SECONDS = 30.0
"""So long the connections may take to tell their pace: afterwards the steps alone say how it goes."""
MEASURE_SECONDS = 120.0
TRY_AGAIN_SECONDS = 1800.0
"""So long what was no better is not tried again, and so long the way back is open."""
LATELY_SECONDS = 30.0
"""Before a round the connections are not asked again within so long."""
AGAIN_SECONDS = 5.0
"""Between two questions of our own: a window of the connections' figures."""
REQUEST = "ways-"


def is_known_before(observation: Observation) -> bool:
    """The connections have told their pace by the ways so far, or have had their time to."""
    ago = observation.now - observation.state.adaptation.ways_asked_at
    return links.is_told(observation) or links.BEFORE_SECONDS < ago <= LATELY_SECONDS


def went_on(draft: Draft, incident: Incident) -> Draft:
    """With the first step by other ways: what the round has cost, and since when they are measured."""
    trial = draft.state.adaptation.way_trial
    assert trial is not None
    assert incident.recovered is not None
    seconds = incident.recovered - incident.decided
    lost = draft.state.budget.lost_seconds + seconds
    draft = draft.with_budget(lost_seconds=lost, restart_seconds=seconds)
    return draft.with_adaptation(way_trial=replace(trial, since=incident.recovered))


def judge(observation: Observation, incident: Incident, trial: WayTrial) -> Incident:
    """The incident with what is known by now, since its round's first step; with an outcome once that is enough."""
    if observation.plan.membership != trial.membership or observation.plan.sync_mode is not trial.sync_mode:
        return replace(incident, outcome=Outcome.SUPERSEDED, shown="the job has changed before it was measured")
    found, before = _measured(observation, trial), incident.slowdown_before or 1.0
    if found is None:
        if observation.now - trial.since <= MEASURE_SECONDS or observation.metrics.untold:
            return incident
        return replace(incident, outcome=Outcome.MITIGATED, shown="what they are worth could not be measured")
    after = max(1.0, before * found.slower)
    limit = observation.job.spec.detection.straggler_slowdown
    outcome = Outcome.RECOVERED if after < limit else Outcome.MITIGATED
    return replace(
        incident,
        slowdown_after=after,
        measured_gain=(price.loss_rate(before) - price.loss_rate(after)) * HORIZON_SECONDS,
        outcome=outcome if found.better else Outcome.NOT_HELPED,
        shown=f"{found.words}: {'kept' if found.better else 'no better, and not tried again for a while'}",
    )


def conclude(observation: Observation, draft: Draft, incident: Incident, trial: WayTrial) -> Draft:
    """With what follows from the outcome for ways to come."""
    found = _measured(observation, trial) if incident.outcome is Outcome.NOT_HELPED else None
    if found is None:
        return draft.with_adaptation(way_trial=None)
    tried = tuple(WayTried(observation.now, c.source, c.destination, c.spine, c.draw) for c in trial.changes)
    is_worse = found.slower > 1 + NOISE and trial.changes
    return draft.with_adaptation(
        ways_tried=(*draft.state.adaptation.ways_tried, *tried)[-MAX_WAYS_TRIED:],
        way_trial=replace(trial, slower=found.slower) if is_worse else None,
    )


def step(observation: Observation, policy: Policy) -> Draft:
    """Asks for the connections where they are to be measured and nobody has asked; forgets what is too old."""
    draft, now, adaptation = observation.draft, observation.now, observation.state.adaptation
    tried = tuple(one for one in adaptation.ways_tried if now - one.at < TRY_AGAIN_SECONDS)
    if tried != adaptation.ways_tried:
        draft = draft.with_adaptation(ways_tried=tried)
    if adaptation.way_trial is not None and _is_over(observation, adaptation.way_trial):
        draft = draft.with_adaptation(way_trial=None)
    asked = now - adaptation.ways_asked_at <= LATELY_SECONDS or links.is_told(observation)
    if not asked and policy.acts and steady(observation) and paths.due(observation) is not None:
        draft = draft.with_adaptation(ways_asked_at=now)
    return _with_a_question(observation.with_draft(draft))


def check(observation: Observation, policy: Policy) -> Decision | None:
    """The ways of before, where steps have become longer without them, and have lost by now what a round costs."""
    trial = observation.state.adaptation.way_trial
    if trial is None or not trial.slower or trial.membership != observation.plan.membership or not steady(observation):
        return None
    slower = min(trial.slower, observation.step_seconds / trial.step_seconds)  # it may have passed
    if paths.put_back(observation, trial.changes) == observation.plan.paths:
        return None
    choice = price.choose(
        (plan_traffic_option(observation, policy),),
        slowdown=slower,
        lost_seconds=(observation.now - trial.since) * price.loss_rate(slower),
        remaining_seconds=HORIZON_SECONDS,
    )
    if choice.chosen is None:
        return None
    subject = Subject(Cause.SLOW_COMMUNICATION, observation.round)
    return Decision(
        subject=replace(subject, number=1 + earlier(observation, subject)),
        class_=Class.PERFORMANCE,
        message=f"steps take {slower:.2f} × as long by the ways that were tried: those of before come back",
        first_sign=trial.since,
        actions=(PlanTraffic(back=True),),
        remedy=Remedy.PLAN_TRAFFIC,
        remedies=written(choice.prices, choice.chosen),
        last_step=observation.step,
        slowdown_before=slower,
        slowdown_after=1.0,
        predicted_gain=choice.chosen.gain_seconds,
    )


def _with_a_question(observation: Observation) -> Draft:
    """Of our own, where nobody else asks any: again where the answers have said too little."""
    draft, now = observation.draft, observation.now
    request, asked_at = draft.plan.evidence_request, draft.state.adaptation.ways_asked_at
    if not links.pace_is_wanted(draft, now):
        return draft.with_plan(evidence_request="") if request.startswith(REQUEST) else draft
    again = request.startswith(REQUEST) and links.is_told(observation) and now - asked_at >= AGAIN_SECONDS
    if (request and not again) or draft.state.adaptation.suspicion is not None or not steady(observation):
        return draft
    parts = (EvidencePart.WINDOWS, EvidencePart.LINKS)
    draft = draft.with_plan(evidence_request=f"{REQUEST}{draft.plan.version + 1}", evidence_parts=parts)
    return draft.with_adaptation(ways_asked_at=now)


@dataclass(frozen=True)
class _Measured:
    slower: float  # the time of a step over that of before
    faster: float | None  # the pace of the connections over that of before, in the middle; None: not known
    words: str

    @property
    def better(self) -> bool:
        return self.slower < 1 - NOISE if self.faster is None else self.faster >= BETTER


def _measured(observation: Observation, trial: WayTrial) -> _Measured | None:
    """None: not yet."""
    if not trial.since or not steady(observation) or not trial.step_seconds or not observation.step_seconds:
        return None
    slower = observation.step_seconds / trial.step_seconds
    words = f"steps took {trial.step_seconds:.3g} s before, and {observation.step_seconds:.3g} s now"
    now = links.paces(observation)
    pairs = [(c, now[c.source, c.destination]) for c in trial.changes if (c.source, c.destination) in now]
    known = [(change, pace.bytes_per_second) for change, pace in pairs if change.bytes_per_second]
    if known:
        change, pace = min(known, key=lambda pair: pair[0].bytes_per_second)
        slowest = f"from rank {change.source} to rank {change.destination}"
        rates = f"{change.bytes_per_second / 1e6:.3g} MB/s before, and {pace / 1e6:.3g} MB/s now"
        faster = median(pace / change.bytes_per_second for change, pace in known)
        return _Measured(slower, faster, f"{slowest} {rates}; {words}")
    awaited = trial.knows_paces and observation.now - trial.since <= LINKS_SECONDS
    return None if awaited else _Measured(slower, None, words)


def _is_over(observation: Observation, trial: WayTrial) -> bool:
    """Another membership goes by other ways; those of before are in force again; or nobody has needed the way back."""
    if trial.membership != observation.plan.membership:
        return True
    if not trial.incident:
        return observation.training_since is not None
    return bool(trial.slower) and observation.now - trial.since > TRY_AGAIN_SECONDS
