"""Behaviour windows: when the ranks look into what they spend their time on, and what comes of it.

    an open incident that names no function, all ranks slow alike, or a person → `step`: a window stands in the plan
    the ranks' patterns → `errands`: they are localised, away from the loop    → `check`, `step`: the incident tells it

Nothing is waited for longer than the window and some seconds: what is missing is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pacekeeper_analysis.adapt import Trouble
from pacekeeper_analysis.behaviour.localise import Localisation, sentences
from pacekeeper_analysis.diagnose.finding import FaultClass, Finding, WitnessKind, join
from pacekeeper_analysis.plan import Profile, Stop, SyncMode

from ..api import Cause, Class
from ..decision import Decision
from ..effects import Effect, KeepBehaviour, Localise
from ..observation import Localised, Observation, Policy
from ..state import Draft, Incident
from ..subject import Subject
from . import straggler

CAUSES = frozenset({Cause.STRAGGLER, Cause.VOLATILE})
"""Of the incidents that a function may be behind."""
NAMED = frozenset({Cause.GARBAGE, Cause.UNEVEN_LENGTHS})
"""Of those that say by themselves what is slow."""
SLOWNESS = CAUSES | NAMED | {Cause.SLOW_COMMUNICATION}
SLOW_WORK = frozenset({Trouble.COMPUTE, Trouble.VOLATILE})
"""What answers may show long before there is an incident: a dear remedy waits, and that nothing may be done."""
LASTING_SECONDS = 6.0
"""For so long answers may show nothing that an incident can tell, while all ranks are slow."""
LEAD_SECONDS = 6.0
"""Before a window's first step: a step that was heard of is up to 3 s old, and a plan on its way as long at most."""
STEPS, SECONDS = 32, 20.0
"""Of a window: so many steps at least, and so long at most."""
ENOUGH_SECONDS = 8.0
"""Of steps that are short: so many looks tell functions apart."""
ANSWER_SECONDS = 15.0
LATE_SECONDS = 3.0
"""After the newest answer: all ranks end a window with the same step, and who has not answered by then is not heard."""
LOCALISE_SECONDS = 60.0
HOUR = 3600.0
PREFIX = "profile-"
"""Of a window's name; the plan's version behind it tells windows apart."""
MOST_LOOKED_INTO = 32


def check(observation: Observation, _policy: Policy) -> Decision | None:
    """What a window has shown where no incident was there to tell it."""
    done, profiling = _done(observation), observation.state.profiling
    if done is None or not done.localisation.explanations:
        return None
    if _told_by(observation) is not None:
        return None
    found, threshold = done.localisation, observation.job.spec.detection.straggler_slowdown
    if found.finding.fault is FaultClass.UNKNOWN and _slowdown(found) < threshold:
        return None
    return Decision(
        subject=_subject(observation),
        class_=Class.PERFORMANCE,
        message=f"steps take {found.excess_seconds:.3f} s longer than usual: {_culprit(found)}",
        first_sign=profiling.asked_at,
        evidence=sentences(found),
        live=True,
        last_step=observation.step,
        slowdown_before=_slowdown(found),
        finding=join(None, found.finding),
    )


def step(observation: Observation, policy: Policy) -> Draft:
    """Begins a window where one is wanted; ends the one that has come to something, or to nothing."""
    draft, plan = observation.draft, observation.plan
    if observation.state.life.over or plan.stop is not Stop.NO:
        return _end(draft) if plan.profile is not None else draft
    if plan.profile is None:
        return _begin(observation.with_draft(_explained(observation)), policy)
    done = _done(observation)
    if done is not None:
        return _tell(observation, done)
    left = observation.state.profiling.until + (LOCALISE_SECONDS if observation.patterns else 0.0) - observation.now
    return _end(draft) if left < 0 or (_cut_off(observation) and not observation.patterns) else draft


def errands(observation: Observation) -> Iterator[Effect]:
    """To localise what has come, once all of it has or the time is over; to keep it where an incident tells of it."""
    profile, profiling = observation.plan.profile, observation.state.profiling
    if profile is not None and observation.patterns and _done(observation) is None:
        complete = observation.patterns >= observation.plan.world_size
        late = observation.now >= min(profiling.until, observation.patterns_at + LATE_SECONDS)
        if complete or late or _cut_off(observation):
            yield Localise(profile.name, observation.plan.world_size)
    done = observation.localised
    if done is not None and done.page and done.window == profiling.shown and profiling.shown_in:
        yield KeepBehaviour(done.window, profiling.shown_in)


def _begin(observation: Observation, policy: Policy) -> Draft:
    draft, profiling, now = observation.draft, observation.state.profiling, observation.now
    by_hand = bool(observation.job.profile_wanted) and observation.job.profile_wanted != profiling.answered
    lately = tuple(at for at in profiling.asked if at > now - HOUR)
    if observation.training_since is None or (not by_hand and len(lately) >= policy.profiles_an_hour):
        return draft
    incident = _nameless(observation)
    uniform = _all_slow(observation)
    if by_hand:
        reason = "asked for by hand"
    elif not straggler.steady(observation):
        return draft
    elif incident is not None:
        reason = f"{incident.name} names no function"
    elif uniform:
        reason = f"all ranks take {uniform:.2f} × the time of their early steps"
    elif _slow_work(observation):
        reason = "answers show slow work, and name no function"
    else:
        return draft
    window = _window(observation)
    ahead = (window.first_step - observation.step) * observation.step_seconds
    longest = max(min(window.steps * observation.step_seconds, window.seconds), observation.step_seconds)
    looked = profiling.looked_into if incident is None else (*profiling.looked_into, incident.name)
    return draft.with_plan(profile=window).with_profiling(
        incident="" if incident is None else incident.name,
        round=observation.round,
        asked_at=now,
        until=now + min(max(ahead, LEAD_SECONDS) + 1.5 * longest + ANSWER_SECONDS, HOUR),
        reason=reason,
        asked=lately if by_hand else (*lately, now),
        looked_into=looked[-MOST_LOOKED_INTO:],
        uniform=max(uniform, profiling.uniform),
        answered=observation.job.profile_wanted if by_hand else profiling.answered,
    )


def _explained(observation: Observation) -> Draft:
    """How slow all ranks are with a cause that is named needs no window: only steps that are slower still do."""
    uniform, known = observation.metrics.uniform, observation.state.profiling.uniform
    named = any(
        incident.cause in NAMED | {Cause.SLOW_COMMUNICATION} and not _names_nobody(incident)
        for incident in observation.state.incidents.open
    )
    return (
        observation.draft.with_profiling(uniform=uniform)
        if named and uniform and uniform > known
        else observation.draft
    )


def _window(observation: Observation) -> Profile:
    """The same steps for all ranks, far enough ahead for each of them to have heard of it."""
    each = max(observation.step_seconds, 1e-3)
    return Profile(
        name=f"{PREFIX}{observation.plan.version + 1}",
        first_step=max(observation.step, 0) + 2 + math.ceil(LEAD_SECONDS / each),
        steps=max(STEPS, math.ceil(ENOUGH_SECONDS / each)),
        seconds=min(SECONDS, max(ENOUGH_SECONDS, STEPS * each)),
        sources=observation.job.spec.detection.profile.sources,
    )


def _nameless(observation: Observation) -> Incident | None:
    """The newest incident about slowness that is open, or just over, and has not been looked into."""
    return next(
        (
            incident
            for incident in reversed(observation.state.incidents.current)
            if (incident.cause in CAUSES or (incident.cause is Cause.SLOW_COMMUNICATION and _names_nobody(incident)))
            and incident.round == observation.round
            and incident.name not in observation.state.profiling.looked_into
            and (incident.finding is None or WitnessKind.BEHAVIOUR not in incident.finding.kinds)
        ),
        None,
    )


def _slow_work(observation: Observation) -> bool:
    """Some rank's, of which no incident tells (yet), and which was not looked into in this round; or whatever slows all
    ranks for so long, while answers show now this and now that."""
    suspicion, profiling = observation.state.adaptation.suspicion, observation.state.profiling
    if suspicion is None:
        return False
    slow = (observation.metrics.uniform or 0.0) >= observation.job.spec.detection.straggler_slowdown
    lasts = slow and observation.now - suspicion.since >= LASTING_SECONDS
    told = any(i.cause in SLOWNESS and i.round == observation.round for i in observation.state.incidents.current)
    looked_into = bool(profiling.asked) and profiling.round == observation.round
    return (suspicion.shown in SLOW_WORK or lasts) and not told and not looked_into


def _names_nobody(incident: Incident) -> bool:
    return incident.finding is not None and not incident.finding.culprit


def _all_slow(observation: Observation) -> float:
    """How slow all ranks are alike, against their early steps; 0: they are not, or that is known, and has not grown by
    as much again."""
    threshold = observation.job.spec.detection.straggler_slowdown
    uniform, pace = observation.metrics.uniform, observation.metrics.pace
    if uniform is None or uniform < threshold * observation.state.profiling.uniform:
        return 0.0
    grown = straggler.all_work_has_grown(observation)
    one = pace is not None and pace >= threshold and not grown
    changed = observation.plan.shares is not None or observation.plan.sync_mode is not SyncMode.SYNC
    suspicion = observation.state.adaptation.suspicion
    shown = Trouble.NONE if suspicion is None else suspicion.shown
    looked_into = shown is not Trouble.NONE and not grown  # it may tell by itself
    return 0.0 if one or changed or looked_into else uniform


def _done(observation: Observation) -> Localised | None:
    """What the window that is out has come to."""
    profile, done = observation.plan.profile, observation.localised
    return done if done is not None and profile is not None and done.window == profile.name else None


def _cut_off(observation: Observation) -> bool:
    """The ranks that were asked are no more."""
    return observation.round != observation.state.profiling.round


def _tell(observation: Observation, done: Localised) -> Draft:
    """Into the incident that it is for; `check` has opened one where there was none."""
    draft, incident = observation.draft, _told_by(observation)
    found = done.localisation
    if incident is not None:
        evidence = (*incident.evidence, *sentences(found))
        draft = draft.with_incident(replace(incident, evidence=evidence, finding=_joined(incident, found.finding)))
        return _end(draft).with_profiling(shown=done.window, shown_in=incident.name)
    opened = _subject(observation).incident_name(observation.job)
    told = opened if draft.state.incidents.find(opened) is not None else ""
    return _end(draft).with_profiling(shown=done.window, shown_in=told)


def _told_by(observation: Observation) -> Incident | None:
    """The incident that the window is for, or one about slowness that was opened meanwhile."""
    incidents, profiling = observation.state.incidents, observation.state.profiling
    meant = incidents.find(profiling.incident)
    since = (i for i in reversed(incidents.current) if i.cause in SLOWNESS and i.decided >= profiling.asked_at)
    return meant or next((i for i in since if i.round == observation.round), None)


def _joined(incident: Incident, found: Finding) -> Finding | None:
    """What both say. That transfers take long is known where a link is named, and who waits where lengths are."""
    before = incident.finding
    if incident.cause in NAMED and before is not None:
        return before
    if before is None or found.fault is FaultClass.UNKNOWN:
        return join(None, found) if before is None else before
    if found.fault is FaultClass.NETWORK and before.fault is FaultClass.NETWORK and before.culprit:
        found = replace(found, culprit=before.culprit, advice=before.advice)
    return join(before, found)


def _end(draft: Draft) -> Draft:
    return draft.with_plan(profile=None).with_profiling(incident="", until=0.0)


def _subject(observation: Observation) -> Subject:
    """Of the window that is out."""
    assert observation.plan.profile is not None
    number = int(observation.plan.profile.name.removeprefix(PREFIX))
    return Subject(Cause.SLOW_STEPS, observation.round, number=number)


def _culprit(found: Localisation) -> str:
    finding = found.finding
    return finding.culprit if finding.fault is not FaultClass.UNKNOWN else "why is not known"


def _slowdown(found: Localisation) -> float:
    usual = found.step_seconds - found.excess_seconds
    return found.step_seconds / usual if usual > 0 else 1.0
