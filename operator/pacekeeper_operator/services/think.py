"""One pass over a job, without effects: from what there is to the plan and bookkeeping that shall be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pacekeeper_analysis.plan import Stop
from pacekeeper_analysis.reports import FaultKind

from ..act import apply
from ..api import Class, Mode, incident_name
from ..decide import CHECKS, gpu_error, membership, stages, straggler, verify, way_back, workforce
from ..decide.workforce import Staffing
from ..decision import Decision
from ..observation import Observation, Policy
from ..state import Draft, Incident, State

MAX_DECISIONS = 100
"""A pass ends, whatever the checks say."""
MAX_EVIDENCE = 4000
"""Characters of one piece of evidence: bookkeeping and Incidents must stay small."""


@dataclass(frozen=True)
class Thought:
    """What a pass has come to."""

    observation: Observation  # under the new draft
    staffing: Staffing
    decisions: tuple[Decision, ...] = ()

    @property
    def draft(self) -> Draft:
        return self.staffing.draft


def think(observation: Observation, policy: Policy) -> Thought:
    """Pure: the same observation leads to the same thought."""
    observation = observation.with_draft(_settle_stale(observation))
    observation = observation.with_draft(replace(observation.draft, state=gpu_error.learn(observation)))
    observation = observation.with_draft(stages.step(observation))
    observation = observation.with_draft(verify.step(observation, policy))
    decisions: tuple[Decision, ...] = ()
    if not observation.state.finished_for_good and observation.plan.stop is Stop.NO:
        observation, decisions = _decide(observation, policy)
        observation = observation.with_draft(straggler.suspect(observation, policy))
        observation = observation.with_draft(way_back.step(observation, policy))
        observation = observation.with_draft(membership.step(observation))
        observation = observation.with_draft(membership.allow_restarts(observation.draft, policy, observation.now))
    observation = observation.with_draft(verify.step(observation, policy))
    staffing = workforce.staff(observation)
    return Thought(observation.with_draft(staffing.draft), staffing, decisions)


def _settle_stale(observation: Observation) -> Draft:
    """Faults of rounds that are over by our own doing, and those of a job that stops, say nothing new; nor do stalls
    that are over."""
    draft = observation.draft
    seated = {member.worker for member in draft.plan.members}
    steps = {view.name: view.heartbeat.step for view in observation.members if view.heartbeat is not None}
    over = draft.state.finished_for_good or draft.plan.stop is not Stop.NO
    stale = tuple(
        fault.name
        for fault in observation.faults
        if over
        or 0 < fault.membership < draft.plan.membership
        or (fault.worker not in seated and fault.kind is not FaultKind.GPU_ERROR)
        or (
            fault.kind is FaultKind.STALLED
            and (0 < fault.round < observation.round or 0 <= fault.step < steps.get(fault.worker, 0))
        )
    )
    return replace(draft, state=draft.state.settle(stale)) if stale else draft


def _decide(observation: Observation, policy: Policy) -> tuple[Observation, tuple[Decision, ...]]:
    """Ask each check until it has nothing new to say, under the draft that the decisions before have left."""
    made: list[Decision] = []
    for check in CHECKS:
        while len(made) < MAX_DECISIONS:
            decision = check(observation, policy)
            if decision is None or any(_same_fault(decision, earlier) for earlier in made):
                break
            if _known(observation, policy, decision):
                settled = _settle(observation.state, decision)
                if settled == observation.state:
                    break
                observation = observation.with_draft(replace(observation.draft, state=settled))
                continue
            observation = _carry_out(observation, policy, decision)
            made.append(decision)
            if observation.state.finished_for_good:
                return observation, tuple(made)
    return observation, tuple(made)


def _same_fault(one: Decision, other: Decision) -> bool:
    """One pass decides once upon one fault; what is left of it is the next pass's."""
    return (one.cause, one.round, one.worker, one.rank) == (other.cause, other.round, other.worker, other.rank)


def _name(observation: Observation, decision: Decision) -> str:
    return decision.continues or incident_name(observation.job, decision.round, decision.cause, decision.occurrence)


def _settle(state: State, decision: Decision) -> State:
    """What the decision deals with is news no longer."""
    state = state.settle(decision.settles)
    seen = {value.key: value.value for value in decision.gpu_seen}
    return replace(state, gpu_values={**state.gpu_values, **seen}) if seen else state


def _known(observation: Observation, policy: Policy, decision: Decision) -> bool:
    """It has been dealt with; what was only recommended is dealt with as long as nothing more is allowed."""
    state, name = observation.state, _name(observation, decision)
    if decision.continues:
        before = state.incident(name)
        return before is not None and before.remedy == decision.remedy
    if state.incident(name) is not None or name in state.closed:
        return name not in state.recommended or not policy.acts
    return name in state.recommended and not policy.acts


def _carry_out(observation: Observation, policy: Policy, decision: Decision) -> Observation:
    """Write the decision down as an Incident and, where it may be, act upon it."""
    draft = replace(observation.draft, state=_settle(observation.state, decision))
    words: list[str] = []
    applied = None
    if policy.acts:
        for action in decision.actions:
            done = apply(action, decision, observation.with_draft(draft))
            draft = done.draft
            words += [done.words] if done.words else []
        applied = observation.now
    if decision.class_ is Class.PERFORMANCE and not (policy.acts and decision.actions):
        draft = straggler.left_alone(observation.with_draft(draft), forbidden=not policy.acts)
    incident = _open(observation, policy, decision, applied, tuple(words))
    state = draft.state.with_incident(incident)
    state = replace(state, recommended=tuple(name for name in state.recommended if name != incident.name))
    return observation.with_draft(replace(draft, state=state))


def _open(
    observation: Observation, policy: Policy, decision: Decision, applied: float | None, words: tuple[str, ...]
) -> Incident:
    before = observation.state.incident(decision.continues)
    paused = (f"not applied: {policy.paused}",) if policy.paused else ()
    return Incident(
        name=_name(observation, decision),
        cause=decision.cause,
        class_=decision.class_,
        round=decision.round,
        message=decision.message,
        first_sign=min(decision.first_sign, observation.now),
        detected=observation.now if before is None else before.detected,
        decided=observation.now,
        mode=Mode.ACT if policy.acts else Mode.RECOMMEND,
        rank=decision.rank,
        worker=decision.worker,
        node=decision.node,
        evidence=tuple(text[-MAX_EVIDENCE:] for text in (*decision.evidence, *words, *paused) if text),
        remedy=decision.remedy,
        remedies=decision.remedies,
        applied=applied,
        last_step=decision.last_step,
        slowdown_before=decision.slowdown_before,
        reference_seconds=decision.reference_seconds,
        predicted_gain=decision.predicted_gain,
        live=decision.live,
    )
