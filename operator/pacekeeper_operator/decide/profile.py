"""Behaviour windows: when the ranks look into what they spend their time on, and what comes of it.

    an open incident that names no function, all ranks slow alike, or a person → `step`: a window stands in the plan
    the ranks' patterns → `errands`: they are localised, away from the loop    → `check`, `step`: the incident tells it

Nothing is waited for longer than the window and some seconds: what is missing is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pacekeeper_analysis.adapt import Bottleneck
from pacekeeper_analysis.behaviour.localise import Localization, describe_localization
from pacekeeper_analysis.diagnose.finding import FaultClass, Finding, SignalKind, merge_findings
from pacekeeper_analysis.plan import ProfileRequest, Stop, SyncMode

from ..api import IncidentCause, IncidentClass
from ..decision import Decision
from ..effects import Effect, SaveProfile, LocalizeProfile
from ..observation import LocalizedProfile, Observation, Policy
from ..state import DesiredState, Incident
from ..subject import IncidentKey
from . import straggler

PROFILED_CAUSES = frozenset({IncidentCause.STRAGGLER, IncidentCause.VOLATILE})
"""Of the incidents that a function may be behind."""
SELF_EXPLANATORY_CAUSES = frozenset({IncidentCause.GARBAGE, IncidentCause.UNEVEN_LENGTHS})
"""Of those that say by themselves what is slow."""
SLOWNESS_CAUSES = PROFILED_CAUSES | SELF_EXPLANATORY_CAUSES | {IncidentCause.SLOW_COMMUNICATION}
SLOW_WORK_BOTTLENECKS = frozenset({Bottleneck.COMPUTE, Bottleneck.VOLATILE})
"""What answers may show long before there is an incident: a dear remedy waits, and that nothing may be done."""
UNEXPLAINED_SLOWNESS_SECONDS = 6.0
"""For so long answers may show nothing that an incident can tell, while all ranks are slow."""
PROFILE_LEAD_SECONDS = 6.0
"""Before a window's first step: a step that was heard of is up to 3 s old, and a plan on its way as long at most."""
PROFILE_WINDOW_STEPS, MAX_PROFILE_WINDOW_SECONDS = 32, 20.0
"""Of a window: so many steps at least, and so long at most."""
MIN_PROFILE_WINDOW_SECONDS = 8.0
"""Of steps that are short: so many looks tell functions apart."""
PROFILE_ANSWER_SECONDS = 15.0
PROFILE_LATE_ANSWER_SECONDS = 3.0
"""After the newest answer: all ranks end a window with the same step, and who has not answered by then is not heard."""
LOCALIZATION_TIMEOUT_SECONDS = 60.0
PROFILE_RATE_WINDOW_SECONDS = 3600.0
PROFILE_NAME_PREFIX = "profile-"
"""Of a window's name; the plan's version behind it tells windows apart."""
MAX_INVESTIGATED_INCIDENTS = 32


def check_profile(observation: Observation, _policy: Policy) -> Decision | None:
    """What a window has shown where no incident was there to tell it."""
    done, profiling = _get_localization_result(observation), observation.state.profiling
    if done is None or not done.localization.explanations:
        return None
    if _find_target_incident(observation) is not None:
        return None
    found, threshold = done.localization, observation.job.spec.detection.straggler_slowdown
    if found.finding.fault is FaultClass.UNKNOWN and _compute_slowdown(found) < threshold:
        return None
    return Decision(
        incident_key=_build_incident_key(observation),
        class_=IncidentClass.PERFORMANCE,
        message=f"steps take {found.excess_seconds:.3f} s longer than usual: {_describe_culprit(found)}",
        first_sign=profiling.asked_at,
        evidence=describe_localization(found),
        live=True,
        last_step=observation.step,
        slowdown_before=_compute_slowdown(found),
        finding=merge_findings(None, found.finding),
    )


def advance_profile_window(observation: Observation, policy: Policy) -> DesiredState:
    """Begins a window where one is wanted; ends the one that has come to something, or to nothing."""
    draft, plan = observation.desired, observation.plan
    if observation.state.life.is_over or plan.stop is not Stop.NO:
        return _end_window(draft) if plan.profile is not None else draft
    if plan.profile is None:
        return _begin_window(observation.with_desired(_record_explained_slowdown(observation)), policy)
    done = _get_localization_result(observation)
    if done is not None:
        return _record_localization(observation, done)
    left = observation.state.profiling.until + (LOCALIZATION_TIMEOUT_SECONDS if observation.profile_answers else 0.0) - observation.now
    return _end_window(draft) if left < 0 or (_is_round_over(observation) and not observation.profile_answers) else draft


def list_profile_effects(observation: Observation) -> Iterator[Effect]:
    """To localise what has come, once all of it has or the time is over; to keep it where an incident tells of it."""
    profile, profiling = observation.plan.profile, observation.state.profiling
    if profile is not None and observation.profile_answers and _get_localization_result(observation) is None:
        complete = observation.profile_answers >= observation.plan.world_size
        late = observation.now >= min(profiling.until, observation.last_profile_answer_at + PROFILE_LATE_ANSWER_SECONDS)
        if complete or late or _is_round_over(observation):
            yield LocalizeProfile(profile.name, observation.plan.world_size)
    done = observation.localized_profile
    if done is not None and done.page and done.window == profiling.shown and profiling.shown_in:
        yield SaveProfile(done.window, profiling.shown_in)


def _begin_window(observation: Observation, policy: Policy) -> DesiredState:
    draft, profiling, now = observation.desired, observation.state.profiling, observation.now
    by_hand = bool(observation.job.profile_wanted) and observation.job.profile_wanted != profiling.answered
    lately = tuple(at for at in profiling.asked if at > now - PROFILE_RATE_WINDOW_SECONDS)
    if observation.training_since is None or (not by_hand and len(lately) >= policy.profiles_per_hour):
        return draft
    incident = _find_unexplained_incident(observation)
    uniform = _measure_uniform_slowdown(observation)
    if by_hand:
        reason = "asked for by hand"
    elif not straggler.is_steady(observation):
        return draft
    elif incident is not None:
        reason = f"{incident.name} names no function"
    elif uniform:
        reason = f"all ranks take {uniform:.2f} × the time of their early steps"
    elif _has_slow_work(observation):
        reason = "answers show slow work, and name no function"
    else:
        return draft
    window = _plan_window(observation)
    ahead = (window.first_step - observation.step) * observation.step_seconds
    longest = max(min(window.steps * observation.step_seconds, window.seconds), observation.step_seconds)
    looked = profiling.looked_into if incident is None else (*profiling.looked_into, incident.name)
    return draft.with_plan(profile=window).with_profiling(
        incident="" if incident is None else incident.name,
        round=observation.round,
        asked_at=now,
        until=now + min(max(ahead, PROFILE_LEAD_SECONDS) + 1.5 * longest + PROFILE_ANSWER_SECONDS, PROFILE_RATE_WINDOW_SECONDS),
        reason=reason,
        asked=lately if by_hand else (*lately, now),
        looked_into=looked[-MAX_INVESTIGATED_INCIDENTS:],
        uniform=max(uniform, profiling.uniform),
        answered=observation.job.profile_wanted if by_hand else profiling.answered,
    )


def _record_explained_slowdown(observation: Observation) -> DesiredState:
    """How slow all ranks are with a cause that is named needs no window: only steps that are slower still do."""
    uniform, known = observation.metrics.uniform, observation.state.profiling.uniform
    named = any(
        incident.cause in SELF_EXPLANATORY_CAUSES | {IncidentCause.SLOW_COMMUNICATION} and not _has_no_culprit(incident)
        for incident in observation.state.incidents.open
    )
    return (
        observation.desired.with_profiling(uniform=uniform)
        if named and uniform and uniform > known
        else observation.desired
    )


def _plan_window(observation: Observation) -> ProfileRequest:
    """The same steps for all ranks, far enough ahead for each of them to have heard of it."""
    each = max(observation.step_seconds, 1e-3)
    return ProfileRequest(
        name=f"{PROFILE_NAME_PREFIX}{observation.plan.version + 1}",
        first_step=max(observation.step, 0) + 2 + math.ceil(PROFILE_LEAD_SECONDS / each),
        steps=max(PROFILE_WINDOW_STEPS, math.ceil(MIN_PROFILE_WINDOW_SECONDS / each)),
        seconds=min(MAX_PROFILE_WINDOW_SECONDS, max(MIN_PROFILE_WINDOW_SECONDS, PROFILE_WINDOW_STEPS * each)),
        sources=observation.job.spec.detection.profile.sources,
    )


def _find_unexplained_incident(observation: Observation) -> Incident | None:
    """The newest incident about slowness that is open, or just over, and has not been looked into."""
    return next(
        (
            incident
            for incident in reversed(observation.state.incidents.current)
            if (incident.cause in PROFILED_CAUSES or (incident.cause is IncidentCause.SLOW_COMMUNICATION and _has_no_culprit(incident)))
            and incident.round == observation.round
            and incident.name not in observation.state.profiling.looked_into
            and (incident.finding is None or SignalKind.BEHAVIOUR not in incident.finding.signal_kinds)
        ),
        None,
    )


def _has_slow_work(observation: Observation) -> bool:
    """Some rank's, of which no incident tells (yet), and which was not looked into in this round; or whatever slows all
    ranks for so long, while answers show now this and now that."""
    suspicion, profiling = observation.state.adaptation.suspicion, observation.state.profiling
    if suspicion is None:
        return False
    slow = (observation.metrics.uniform or 0.0) >= observation.job.spec.detection.straggler_slowdown
    lasts = slow and observation.now - suspicion.since >= UNEXPLAINED_SLOWNESS_SECONDS
    told = any(i.cause in SLOWNESS_CAUSES and i.round == observation.round for i in observation.state.incidents.current)
    looked_into = bool(profiling.asked) and profiling.round == observation.round
    return (suspicion.shown in SLOW_WORK_BOTTLENECKS or lasts) and not told and not looked_into


def _has_no_culprit(incident: Incident) -> bool:
    return incident.finding is not None and not incident.finding.culprit


def _measure_uniform_slowdown(observation: Observation) -> float:
    """How slow all ranks are alike, against their early steps; 0: they are not, or that is known, and has not grown by
    as much again."""
    threshold = observation.job.spec.detection.straggler_slowdown
    uniform, pace = observation.metrics.uniform, observation.metrics.pace
    if uniform is None or uniform < threshold * observation.state.profiling.uniform:
        return 0.0
    grown = straggler.has_all_work_grown(observation)
    one = pace is not None and pace >= threshold and not grown
    changed = observation.plan.shares is not None or observation.plan.sync_mode is not SyncMode.SYNC
    suspicion = observation.state.adaptation.suspicion
    shown = Bottleneck.NONE if suspicion is None else suspicion.shown
    looked_into = shown is not Bottleneck.NONE and not grown  # it may tell by itself
    return 0.0 if one or changed or looked_into else uniform


def _get_localization_result(observation: Observation) -> LocalizedProfile | None:
    """What the window that is out has come to."""
    profile, done = observation.plan.profile, observation.localized_profile
    return done if done is not None and profile is not None and done.window == profile.name else None


def _is_round_over(observation: Observation) -> bool:
    """The ranks that were asked are no more."""
    return observation.round != observation.state.profiling.round


def _record_localization(observation: Observation, done: LocalizedProfile) -> DesiredState:
    """Into the incident that it is for; `check` has opened one where there was none."""
    draft, incident = observation.desired, _find_target_incident(observation)
    found = done.localization
    if incident is not None:
        evidence = (*incident.evidence, *describe_localization(found))
        draft = draft.with_incident(replace(incident, evidence=evidence, finding=_join_findings(incident, found.finding)))
        return _end_window(draft).with_profiling(shown=done.window, shown_in=incident.name)
    opened = _build_incident_key(observation).incident_name(observation.job)
    told = opened if draft.state.incidents.find(opened) is not None else ""
    return _end_window(draft).with_profiling(shown=done.window, shown_in=told)


def _find_target_incident(observation: Observation) -> Incident | None:
    """The incident that the window is for, or one about slowness that was opened meanwhile."""
    incidents, profiling = observation.state.incidents, observation.state.profiling
    meant = incidents.find(profiling.incident)
    since = (i for i in reversed(incidents.current) if i.cause in SLOWNESS_CAUSES and i.decided >= profiling.asked_at)
    return meant or next((i for i in since if i.round == observation.round), None)


def _join_findings(incident: Incident, found: Finding) -> Finding | None:
    """What both say. That transfers take long is known where a link is named, and who waits where lengths are."""
    before = incident.finding
    if incident.cause in SELF_EXPLANATORY_CAUSES and before is not None:
        return before
    if before is None or found.fault is FaultClass.UNKNOWN:
        return merge_findings(None, found) if before is None else before
    if found.fault is FaultClass.NETWORK and before.fault is FaultClass.NETWORK and before.culprit:
        found = replace(found, culprit=before.culprit, advice=before.advice)
    return merge_findings(before, found)


def _end_window(draft: DesiredState) -> DesiredState:
    return draft.with_plan(profile=None).with_profiling(incident="", until=0.0)


def _build_incident_key(observation: Observation) -> IncidentKey:
    """Of the window that is out."""
    assert observation.plan.profile is not None
    number = int(observation.plan.profile.name.removeprefix(PROFILE_NAME_PREFIX))
    return IncidentKey(IncidentCause.SLOW_STEPS, observation.round, occurrence=number)


def _describe_culprit(found: Localization) -> str:
    finding = found.finding
    return finding.culprit if finding.fault is not FaultClass.UNKNOWN else "why is not known"


def _compute_slowdown(found: Localization) -> float:
    usual = found.step_seconds - found.excess_seconds
    return found.step_seconds / usual if usual > 0 else 1.0
