"""Profile windows: when the ranks sample what they spend their time on, and what is done with the result.

1. `advance_profile_window` requests a window. Its reason is an open incident that names no function,
   a slowdown of all ranks alike, or a user's request.
2. The ranks send their patterns. `list_profile_effects` has them localized outside of the reconcile loop.
3. `check_profile` and `advance_profile_window` add the result to an incident.

Answers are awaited for the window and some seconds. The result reports which ones are missing.

The job's state records a window once it has ended. A new leader does not know a window that was open when the leader
changed. It drops the answers, and requests another window if the reason still holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pacekeeper_analysis.failures.finding import FaultClass, Finding, SignalKind, merge_findings
from pacekeeper_analysis.profiling.localize import Localization, describe_localization
from pacekeeper_analysis.protocol.plan import Stop, SyncMode
from pacekeeper_analysis.protocol.requests import ProfileRequest
from pacekeeper_analysis.stragglers.strategies import Bottleneck

from ...api.incident import IncidentCause, IncidentClass
from ...state.desired_state import DesiredState, Incident, Profiling
from ...state.effect_results import LocalizedProfile
from ...state.incident_key import IncidentKey
from ...state.job_requests import ProfileWindow
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Decision
from ..effects import Effect, LocalizeProfile, SaveProfile
from . import straggler

PROFILED_CAUSES = frozenset({IncidentCause.STRAGGLER, IncidentCause.VOLATILE})
"""Causes of incidents that a function may explain."""
SELF_EXPLANATORY_CAUSES = frozenset({IncidentCause.GARBAGE_COLLECTION, IncidentCause.UNEVEN_LENGTHS})
"""Causes of incidents that explain by themselves what is slow."""
SLOWNESS_CAUSES = PROFILED_CAUSES | SELF_EXPLANATORY_CAUSES | {IncidentCause.SLOW_COMMUNICATION}
SLOW_WORK_BOTTLENECKS = frozenset({Bottleneck.COMPUTE, Bottleneck.VOLATILE})
"""Bottlenecks that answers may show long before there is an incident: a remedy is too expensive, or not possible."""
UNEXPLAINED_SLOWNESS_SECONDS = 6.0
"""Time that all ranks may be slow while answers show nothing that an incident can report."""
PROFILE_LEAD_SECONDS = 6.0
"""Time before a window's first step: a reported step is up to 3 s old, and a request arrives within as long."""
PROFILE_WINDOW_STEPS, MAX_PROFILE_WINDOW_SECONDS = 32, 20.0
"""Least number of steps of a window, and its longest duration."""
MIN_PROFILE_WINDOW_SECONDS = 8.0
"""Least duration of a window of short steps: it gives enough samples to tell functions apart."""
PROFILE_ANSWER_SECONDS = 15.0
PROFILE_LATE_ANSWER_SECONDS = 3.0
"""Time after the newest answer: all ranks end a window with the same step, so later answers are ignored."""
LOCALIZATION_TIMEOUT_SECONDS = 60.0
PROFILE_RATE_WINDOW_SECONDS = 3600.0
MAX_INVESTIGATED_INCIDENTS = 32


def check_profile(observation: Observation, _policy: Policy) -> Decision | None:
    """Decide on an incident for what a window has shown, if there is none to report it."""
    result, window = _get_localization_result(observation), observation.requests.profile_window
    if result is None or window is None or not result.localization.explanations:
        return None
    if _find_target_incident(observation) is not None:
        return None
    localization, threshold = result.localization, observation.job.spec.detection.straggler_slowdown
    if localization.finding.fault is FaultClass.UNKNOWN and _compute_slowdown(localization) < threshold:
        return None
    return Decision(
        incident_key=_build_incident_key(observation, window),
        class_=IncidentClass.PERFORMANCE,
        message=f"steps take {localization.excess_seconds:.3f} s longer than usual: {_describe_culprit(localization)}",
        first_sign=window.requested_at,
        evidence=describe_localization(localization),
        live=True,
        last_step=observation.progress.step,
        slowdown_before=_compute_slowdown(localization),
        finding=merge_findings(None, localization.finding),
    )


def advance_profile_window(observation: Observation, policy: Policy) -> DesiredState:
    """Begin a window where one is wanted, and end the pending one once it has a result or has timed out."""
    desired, window = observation.desired, observation.requests.profile_window
    if observation.state.lifecycle.is_over or observation.plan.stop is not Stop.NO:
        return _end_window(desired)
    if window is None:
        return _begin_window(observation.with_desired(_record_explained_slowdown(observation)), policy)
    result = _get_localization_result(observation)
    if result is not None:
        return _record_localization(observation, window, result)
    extra = LOCALIZATION_TIMEOUT_SECONDS if observation.profile_answers else 0.0
    return (
        _end_window(desired)
        if observation.now > window.until + extra
        or (_is_round_over(observation, window) and not observation.profile_answers)
        else desired
    )


def list_profile_effects(observation: Observation) -> Iterator[Effect]:
    """Yield the effects of a profile window.

    Its answers are localized once all have arrived or the time is over. The result is saved once an incident reports
    it.
    """
    profile, window = observation.requests.profile, observation.requests.profile_window
    is_pending = observation.profile_answers and _get_localization_result(observation) is None
    if profile is not None and window is not None and is_pending:
        complete = observation.profile_answers >= observation.plan.world_size
        if complete or _is_late(observation, window) or _is_round_over(observation, window):
            yield LocalizeProfile(profile.name, observation.plan.world_size)
    result, profiling = observation.localized_profile, observation.state.profiling
    if (
        result is not None
        and result.page
        and result.window == profiling.reported_window
        and profiling.reporting_incident
    ):
        yield SaveProfile(result.window, profiling.reporting_incident)


def _is_late(observation: Observation, window: ProfileWindow) -> bool:
    """Return whether no further answers are awaited: the time is over, or none has arrived for a while."""
    last = observation.last_profile_answer_at
    is_silent = last is None or observation.now >= last + PROFILE_LATE_ANSWER_SECONDS
    return is_silent or observation.now >= window.until


def _begin_window(observation: Observation, policy: Policy) -> DesiredState:
    desired, profiling, now = observation.desired, observation.state.profiling, observation.now
    user_requested = (
        bool(observation.job.profile_request) and observation.job.profile_request != profiling.followed_annotation
    )
    is_limited = len(_list_recent_times(profiling, now)) >= policy.profiles_per_hour
    if observation.progress.training_since is None or (is_limited and not user_requested):
        return desired
    incident = _find_unexplained_incident(observation)
    uniform_slowdown = _measure_uniform_slowdown(observation)
    if user_requested:
        reason = "requested by a user"
    elif not straggler.is_steady(observation):
        return desired
    elif incident is not None:
        reason = f"{incident.name} names no function"
    elif uniform_slowdown is not None:
        reason = f"all ranks take {uniform_slowdown:.2f} × the time of their early steps"
    elif _has_slow_work(observation):
        reason = "the ranks' evidence shows slow work, and names no function"
    else:
        return desired
    request = _plan_window(observation)
    step_seconds = observation.progress.step_seconds or 0.0
    lead_seconds = (request.first_step - (observation.progress.step or 0)) * step_seconds
    window_seconds = max(min(request.steps * step_seconds, request.seconds), step_seconds)
    window = ProfileWindow(
        requested_at=now,
        until=now
        + min(
            max(lead_seconds, PROFILE_LEAD_SECONDS) + 1.5 * window_seconds + PROFILE_ANSWER_SECONDS,
            PROFILE_RATE_WINDOW_SECONDS,
        ),
        round=observation.progress.round,
        incident="" if incident is None else incident.name,
        reason=reason,
        annotation=observation.job.profile_request if user_requested else "",
        uniform_slowdown=max(uniform_slowdown or 0.0, profiling.uniform_slowdown),
    )
    return desired.with_requests(profile=request, profile_window=window, issued=desired.requests.issued + 1)


def _list_recent_times(profiling: Profiling, now: float) -> tuple[float, ...]:
    """Return the times of the windows of the last hour that the operator chose to open."""
    return tuple(at for at in profiling.requested_times if at > now - PROFILE_RATE_WINDOW_SECONDS)


def _record_explained_slowdown(observation: Observation) -> DesiredState:
    """Record the slowdown of all ranks if its cause is named: only steps that are slower still need a window."""
    uniform_slowdown, recorded = observation.metrics.uniform_slowdown, observation.state.profiling.uniform_slowdown
    is_explained = any(
        incident.cause in SELF_EXPLANATORY_CAUSES | {IncidentCause.SLOW_COMMUNICATION} and not _has_no_culprit(incident)
        for incident in observation.state.incidents.open
    )
    return (
        observation.desired.with_profiling(uniform_slowdown=uniform_slowdown)
        if is_explained and uniform_slowdown and uniform_slowdown > recorded
        else observation.desired
    )


def _plan_window(observation: Observation) -> ProfileRequest:
    """Return a request for the same steps of all ranks, far enough ahead for each of them to have received it."""
    step_seconds = max(observation.progress.step_seconds or 0.0, 1e-3)
    return ProfileRequest(
        name=observation.requests.build_next_name("profile", observation.nonce),
        first_step=(observation.progress.step or 0) + 2 + math.ceil(PROFILE_LEAD_SECONDS / step_seconds),
        steps=max(PROFILE_WINDOW_STEPS, math.ceil(MIN_PROFILE_WINDOW_SECONDS / step_seconds)),
        seconds=min(MAX_PROFILE_WINDOW_SECONDS, max(MIN_PROFILE_WINDOW_SECONDS, PROFILE_WINDOW_STEPS * step_seconds)),
        sources=observation.job.spec.detection.profile.sources,
    )


def _find_unexplained_incident(observation: Observation) -> Incident | None:
    """Return the newest incident about slowness in this round that has not been investigated."""
    return next(
        (
            incident
            for incident in reversed(observation.state.incidents.current)
            if (
                incident.cause in PROFILED_CAUSES
                or (incident.cause is IncidentCause.SLOW_COMMUNICATION and _has_no_culprit(incident))
            )
            and incident.round == observation.progress.round
            and incident.name not in observation.state.profiling.investigated
            and (incident.finding is None or SignalKind.PROFILE not in incident.finding.signal_kinds)
        ),
        None,
    )


def _has_slow_work(observation: Observation) -> bool:
    """Return whether a window is needed without an incident.

    Some rank's work is slow, no incident reports it (yet), and this round had no window. Or all ranks have been slow
    for some time, while the answers show changing bottlenecks.
    """
    investigation, profiling = observation.state.adaptation.investigation, observation.state.profiling
    if investigation is None:
        return False
    uniformly_slow = (observation.metrics.uniform_slowdown or 0.0) >= observation.job.spec.detection.straggler_slowdown
    lasts = uniformly_slow and observation.now - investigation.since >= UNEXPLAINED_SLOWNESS_SECONDS
    reported = any(
        incident.cause in SLOWNESS_CAUSES and incident.round == observation.progress.round
        for incident in observation.state.incidents.current
    )
    profiled = bool(profiling.requested_times) and profiling.round == observation.progress.round
    return (investigation.last_bottleneck in SLOW_WORK_BOTTLENECKS or lasts) and not reported and not profiled


def _has_no_culprit(incident: Incident) -> bool:
    return incident.finding is not None and not incident.finding.culprit


def _measure_uniform_slowdown(observation: Observation) -> float | None:
    """Return how slow all ranks are alike, against their early steps.

    None: they are not, or that is known and has not grown by as much again.
    """
    threshold = observation.job.spec.detection.straggler_slowdown
    uniform_slowdown, relative_time = observation.metrics.uniform_slowdown, observation.metrics.relative_time
    if uniform_slowdown is None or uniform_slowdown < threshold * observation.state.profiling.uniform_slowdown:
        return None
    grown = straggler.has_all_work_grown(observation)
    has_straggler = relative_time is not None and relative_time >= threshold and not grown
    changed = observation.plan.shares is not None or observation.plan.sync_mode is not SyncMode.SYNC
    investigation = observation.state.adaptation.investigation
    bottleneck = Bottleneck.NONE if investigation is None else investigation.last_bottleneck
    investigated = bottleneck is not Bottleneck.NONE and not grown  # the investigation may explain it
    return None if has_straggler or changed or investigated else uniform_slowdown


def _get_localization_result(observation: Observation) -> LocalizedProfile | None:
    """Return the result of the pending window."""
    profile, result = observation.requests.profile, observation.localized_profile
    return result if result is not None and profile is not None and result.window == profile.name else None


def _is_round_over(observation: Observation, window: ProfileWindow) -> bool:
    """Return whether the ranks that were asked are gone."""
    return observation.progress.round != window.round


def _record_localization(observation: Observation, window: ProfileWindow, result: LocalizedProfile) -> DesiredState:
    """Add the result to the incident that it is for. `check_profile` has opened one where there was none."""
    desired, incident = observation.desired, _find_target_incident(observation)
    localization = result.localization
    if incident is not None:
        evidence = (*incident.evidence, *describe_localization(localization))
        desired = desired.with_incident(
            replace(incident, evidence=evidence, finding=_join_findings(incident, localization.finding))
        )
        return _end_window(desired).with_profiling(reported_window=result.window, reporting_incident=incident.name)
    incident_name = _build_incident_key(observation, window).incident_name(observation.job)
    reporting_incident = incident_name if desired.state.incidents.find(incident_name) is not None else ""
    return _end_window(desired).with_profiling(reported_window=result.window, reporting_incident=reporting_incident)


def _find_target_incident(observation: Observation) -> Incident | None:
    """Return the incident that the window is for, or one about slowness that was opened since."""
    incidents, window = observation.state.incidents, observation.requests.profile_window
    if window is None:
        return None
    target = incidents.find(window.incident)
    opened_since = (
        incident
        for incident in reversed(incidents.current)
        if incident.cause in SLOWNESS_CAUSES and incident.decided >= window.requested_at
    )
    return target or next((incident for incident in opened_since if incident.round == observation.progress.round), None)


def _join_findings(incident: Incident, finding: Finding) -> Finding | None:
    """Merge both findings. A named link already explains long transfers, and uneven lengths explain waits."""
    previous = incident.finding
    if incident.cause in SELF_EXPLANATORY_CAUSES and previous is not None:
        return previous
    if previous is None or finding.fault is FaultClass.UNKNOWN:
        return merge_findings(None, finding) if previous is None else previous
    if finding.fault is FaultClass.NETWORK and previous.fault is FaultClass.NETWORK and previous.culprit:
        finding = replace(finding, culprit=previous.culprit, advice=previous.advice)
    return merge_findings(previous, finding)


def _end_window(desired: DesiredState) -> DesiredState:
    """Return the state without the open window, if any, and with the record that it was open."""
    window, profiling = desired.requests.profile_window, desired.state.profiling
    if window is None:
        return desired
    times = _list_recent_times(profiling, window.requested_at)
    investigated = (*profiling.investigated, window.incident) if window.incident else profiling.investigated
    return desired.with_requests(profile=None, profile_window=None).with_profiling(
        round=window.round,
        reason=window.reason,
        requested_times=times if window.annotation else (*times, window.requested_at),
        investigated=investigated[-MAX_INVESTIGATED_INCIDENTS:],
        uniform_slowdown=window.uniform_slowdown,
        followed_annotation=window.annotation or profiling.followed_annotation,
    )


def _build_incident_key(observation: Observation, window: ProfileWindow) -> IncidentKey:
    """Return the key of the open window's incident. The time of the window tells it apart from earlier ones."""
    occurrence = int(window.requested_at)
    return IncidentKey(IncidentCause.SLOW_STEPS, observation.progress.round, occurrence=occurrence)


def _describe_culprit(localization: Localization) -> str:
    finding = localization.finding
    return finding.culprit if finding.fault is not FaultClass.UNKNOWN else "the cause is not known"


def _compute_slowdown(localization: Localization) -> float:
    usual_seconds = localization.step_seconds - localization.excess_seconds
    return localization.step_seconds / usual_seconds if usual_seconds > 0 else 1.0
