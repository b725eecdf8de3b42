"""A job that is slower than it needs to be: another strategy first, a spare where that helps too little.

The metrics only begin an investigation, which asks all ranks for their last steps as evidence.
`pacekeeper_analysis.stragglers.strategies` names the bottleneck and the strategies that fit it. This module prices them
together with the more expensive remedies, and chooses one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from pacekeeper_analysis.failures.finding import Finding, merge_findings
from pacekeeper_analysis.protocol.plan import Stop, SyncMode
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest
from pacekeeper_analysis.stragglers import pipeline_stages, price, strategies
from pacekeeper_analysis.stragglers.mode_changes import VOLATILE_SLOWDOWN
from pacekeeper_analysis.stragglers.price import Choice, Option
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Diagnosis, Strategy
from pacekeeper_analysis.stragglers.windows import count_window_steps, sample_step_times

from ...api.incident import IncidentCause, IncidentClass
from ...api.training_job import Remedy, RequestedSyncMode
from ...state.desired_state import DesiredState, FruitlessInvestigation, StragglerInvestigation
from ...state.incident_key import IncidentKey
from ...state.job_metrics import MIN_WAITING_SHARE, PersistentSlowness
from ...state.job_requests import InvestigationRequest
from ...state.observation import Observation
from ...state.policy import Policy
from ..decision import Action, Adapt, Decision, PlanTraffic, ReplaceWorker
from ..failures import gpu_warning
from ..network import route_alternatives, slow_communication
from . import collective_waits, diagnosis_cache
from .diagnosis_cache import DiagnosisKey
from .pricing import build_remedy_prices, build_replace_option
from .starting_pods import find_starting_neighbor

EXACT_SYNC_MODE = SyncMode.SYNC
SPARE_FIRST_SLOWDOWN = strategies.MIN_BROKEN_RANK_SLOWDOWN
"""Slowdown of a rank from which a spare that is due comes before shares, unless these compensate it."""
RECOVERED_SHARE = 0.5
"""Share of a rank's slowness that it must have lost since the evidence request to count as recovering."""
WAITING_HYSTERESIS = 0.8
"""Factor on the least share of waits, below which investigated waits are over.

Many jobs wait for about a tenth of a step by nature.
"""
MIN_EVIDENCE_REQUEST_SECONDS, MAX_EVIDENCE_REQUEST_SECONDS = 1.5, 120.0
"""Seconds between two evidence requests, at least and at most."""
EVIDENCE_ANSWER_SECONDS = 5.0
"""Time that ranks may take to answer before they are asked again."""
MIN_SLOW_WORKERS = 2
"""Other workers on which a rank was slow recently, from which number on its slowness moves with it."""
WAITING_INVESTIGATION_SECONDS = 20.0
"""Least time that waits are investigated before they count as normal for the job."""
BOTTLENECK_NAMING_SECONDS = 15.0
"""Time that a bottleneck without a remedy may take to show its place, before it is reported without."""
SIGNIFICANT_GROWTH_SHARE = 0.25
"""Share of the threshold's excess by which steps must grow after an investigation without result to count as new.

Garbage collections and uneven lengths cost much less than the threshold when they are worth a remedy.
"""
LASTING_SLOWNESS_WINDOWS = 10
"""Windows of statistics after which all ranks that are slightly slow together are known: the first after four."""
FIRST_NEGATIVE_CACHE_SECONDS, MAX_NEGATIVE_CACHE_SECONDS = 60.0, 3600.0
"""Time from an investigation without result to the next one without new signs; doubled each time."""
BOTTLENECK_TO_CAUSE = {
    Bottleneck.COMPUTE: IncidentCause.STRAGGLER,
    Bottleneck.COMMUNICATION: IncidentCause.SLOW_COMMUNICATION,
    Bottleneck.VOLATILE: IncidentCause.VOLATILE,
    Bottleneck.GC: IncidentCause.GARBAGE_COLLECTION,
    Bottleneck.LENGTHS: IncidentCause.UNEVEN_LENGTHS,
}
BOTTLENECK_PRIOR_SECONDS = {Bottleneck.COMMUNICATION: slow_communication.SLOW_COMMUNICATION_PRIOR_SECONDS}
DEFAULT_PRIOR_SECONDS = 600.0
"""Mean duration before this cluster has a history: compute 10 minutes, communication 24 (Greyhound, ATC'25)."""


def check_stragglers(observation: Observation, policy: Policy) -> Decision | None:
    spare_due = _is_spare_due(observation, policy)
    diagnosis = _diagnose_actionable(
        observation, policy, observation.job.spec.detection.straggler_slowdown if spare_due else SPARE_FIRST_SLOWDOWN
    )
    if diagnosis is None:
        return None
    small_counts = (
        spare_due or _get_lasting_slowness(observation) is not None
        if diagnosis.culprits
        else _shares_misfit(observation, diagnosis)
    )
    if diagnosis.bottleneck is Bottleneck.NONE and small_counts:  # small, but persistent
        diagnosis = replace(diagnosis, bottleneck=Bottleneck.COMPUTE, slowdown=diagnosis.effects[Bottleneck.COMPUTE])
    if (
        diagnosis.bottleneck is Bottleneck.NONE
        or _is_already_optimal(observation, diagnosis)
        or _is_explained_by_profile(observation, diagnosis)
    ):
        return None
    return _decide_remedy(observation, policy, diagnosis)


def _diagnose_actionable(
    observation: Observation, policy: Policy, min_slowdown: float = SPARE_FIRST_SLOWDOWN
) -> Diagnosis | None:
    """Return the diagnosis, without a small bottleneck that no permitted strategy can remove.

    Otherwise it would hide a rank that is no slower than that.
    """
    diagnosis = diagnose_evidence(observation, min_slowdown)
    if diagnosis is None or diagnosis.bottleneck not in strategies.FREE_LASTING_REMEDIES:
        return diagnosis
    if diagnosis.slowdown >= observation.job.spec.detection.straggler_slowdown:
        return diagnosis
    irremovable = not policy.applies_remedies or all(
        strategy.refused for strategy in _list_permitted_strategies(observation, policy, diagnosis)
    )
    return replace(diagnosis, bottleneck=Bottleneck.NONE) if irremovable else diagnosis


def diagnose_evidence(observation: Observation, min_slowdown: float = SPARE_FIRST_SLOWDOWN) -> Diagnosis | None:
    """Return the diagnosis of the evidence; None: it is incomplete.

    In a Local-SGD mode, None also means that no rank takes `min_slowdown` × its peers' time.
    """
    if observation.state.adaptation.investigation is None or observation.requests.evidence is None:
        return None  # or the answers are from before a change in this pass
    if not is_steady(observation):
        return None
    windows = tuple(window for evidence in observation.evidence for window in evidence.windows)
    if len(windows) != observation.plan.world_size:
        return None
    threshold = observation.job.spec.detection.straggler_slowdown
    if observation.plan.sync_mode is EXACT_SYNC_MODE:
        if collective_waits.can_have_pipeline_stages(observation):
            return None  # the next answer includes the collectives of its ranks
        slowness = _get_lasting_slowness(observation)
        relative_times = None if slowness is None else slowness.relative_times
        staged_diagnosis = collective_waits.diagnose_stages(observation)
        suppressed = (Bottleneck.COMMUNICATION,) if observation.plan.world_size == 1 else ()  # it has no peers
        diagnosis = staged_diagnosis or diagnosis_cache.diagnose_answers(
            observation.evidence, threshold, relative_times, suppressed
        )
        if (
            diagnosis is None
            or diagnosis.bottleneck is not Bottleneck.VOLATILE
            or not _is_usual_volatility(diagnosis, threshold)
        ):
            return diagnosis
        if staged_diagnosis is not None:
            return pipeline_stages.exclude_bottleneck(staged_diagnosis, Bottleneck.VOLATILE, threshold)
        return diagnosis_cache.diagnose_answers(
            observation.evidence, threshold, relative_times, (Bottleneck.VOLATILE, *suppressed)
        )
    return strategies.diagnose_broken_ranks(
        windows, observation.plan, threshold=min_slowdown, global_batch=observation.progress.global_batch
    )


def _is_explained_by_profile(observation: Observation, diagnosis: Diagnosis) -> bool:
    """Return whether a profile window explains, or will explain, why all ranks' own work takes longer.

    Then their transfers are no evidence.
    """
    profiling = observation.state.profiling
    reported = bool(profiling.reporting_incident) and profiling.round == observation.progress.round
    has_window = observation.requests.profile is not None or reported
    return has_window and diagnosis.bottleneck is Bottleneck.COMMUNICATION and has_all_work_grown(observation)


def has_all_work_grown(observation: Observation) -> bool:
    """Return whether own work has grown since the first steady steps on most ranks: that delays transfers, too."""
    windows = [window for answer in observation.evidence for window in answer.windows if window.steps]
    growth = [
        float(np.median(window.compute_seconds)) / window.baseline_own_seconds
        for window in windows
        if window.baseline_own_seconds
    ]
    return bool(growth) and float(np.median(growth)) >= observation.job.spec.detection.straggler_slowdown


def _is_usual_volatility(diagnosis: Diagnosis, threshold: float) -> bool:
    """Return whether slow ranks that come and go are normal for the job.

    They are if steps have not grown by the threshold since its first steady steps. They also are if the slowdown is
    small and steps are not much longer than those.
    """
    baseline_seconds, step_seconds = diagnosis.window.baseline_seconds, float(np.median(diagnosis.window.step_seconds))
    if baseline_seconds is None:
        return True
    is_small = diagnosis.slowdown < VOLATILE_SLOWDOWN and step_seconds < VOLATILE_SLOWDOWN * baseline_seconds
    return is_small or step_seconds < threshold * baseline_seconds


def _is_already_optimal(observation: Observation, diagnosis: Diagnosis) -> bool:
    """Return whether lengths or garbage collections are planned already, and cannot be planned better."""
    plan = observation.plan
    planned = {Bottleneck.LENGTHS: plan.sequence_cost is not None, Bottleneck.GC: plan.gc_every > 0}
    return planned.get(diagnosis.bottleneck, False) and all(
        strategy.refused for strategy in _list_strategies(observation, diagnosis)
    )


def update_investigation(observation: Observation, policy: Policy) -> DesiredState:
    """Ask for evidence while the metrics show a bottleneck, and drop the investigation when they no longer do."""
    if observation.state.lifecycle.is_over:
        return observation.desired
    observation = observation.with_desired(_reset_suppression(observation, policy))
    # Nothing is investigated while the job stops, in a Local-SGD mode, or while it is not steady.
    desired, investigation, now = observation.desired, observation.state.adaptation.investigation, observation.now
    if observation.plan.stop is not Stop.NO:
        return desired if investigation is None else desired.with_adaptation(investigation=None)
    if observation.plan.sync_mode is not EXACT_SYNC_MODE:
        return _investigate_broken(observation, policy)
    if not is_steady(observation):
        is_requested = observation.requests.evidence is not None
        return _drop_investigation(desired) if is_requested or investigation is not None else desired
    slow = _has_slow_rank(observation)
    waits = (_has_long_waits(observation) or _has_outdated_shares(observation)) and not _is_negatively_cached(
        observation
    )
    # Begin an investigation for a slow rank or for waits, unless they are suppressed.
    if investigation is None:
        suppressed = _is_suppressed(observation) and not _is_spare_due(observation, policy)
        needs_investigation = (slow and not suppressed) or waits
        return _begin_with_request(observation) if needs_investigation else desired
    # Restart it for another bottleneck, or end it without result.
    step_seconds, threshold = observation.progress.step_seconds, observation.job.spec.detection.straggler_slowdown
    grown = step_seconds is not None and step_seconds > (investigation.step_seconds or 0.0) * threshold
    if grown and (not slow or now - investigation.since > WAITING_INVESTIGATION_SECONDS):  # another bottleneck, now
        investigation = replace(investigation, since=now, step=observation.progress.step, step_seconds=step_seconds)
    elif waits and not slow and _is_fruitless(observation, investigation) and not _has_bottleneck(observation, policy):
        return _cache_negative_result(observation, investigation.step_seconds)
    # Wait for the next request to be due, and for the answers to the last one.
    last_request, seconds_since = observation.requests.investigation, _compute_seconds_since_request(observation)
    recovering = last_request is not None and _has_recovered(observation, last_request.relative_time)
    pause = MIN_EVIDENCE_REQUEST_SECONDS if recovering else compute_evidence_pause(now - investigation.since)
    if seconds_since <= pause:
        return desired
    if not slow and not waits:
        return _drop_investigation(desired)
    awaited = observation.requests.evidence is not None and len(observation.evidence) < len(observation.plan.members)
    if awaited and seconds_since <= EVIDENCE_ANSWER_SECONDS:
        return desired
    # Record what the answers show, and stop if nothing is left to do.
    diagnosis = None if recovering else _diagnose_actionable(observation, policy)  # the answers are outdated
    if diagnosis is not None:
        bottleneck = Bottleneck.NONE if _is_already_optimal(observation, diagnosis) else diagnosis.bottleneck
        if (
            bottleneck is investigation.last_bottleneck is Bottleneck.NONE
            and last_request is not None
            and observation.progress.step == last_request.step
        ):
            return desired  # the same steps would give the same answers
        clear_at = now if bottleneck is Bottleneck.NONE else _get_last_clear_time(observation)
        if bottleneck is not investigation.last_bottleneck:  # else the investigation is unchanged, and is not written
            investigation = replace(investigation, last_bottleneck=bottleneck, last_clear_at=clear_at)
        desired = _account_loss(observation.with_desired(desired), diagnosis)
        desired = _record_clear_time(desired, clear_at)
        settled = _shares_fit(observation, diagnosis) or _is_beyond_remedy(observation, policy, diagnosis)
        if slow and settled and not _is_spare_due(observation.with_desired(desired), policy):
            return _suppress_current_times(
                _cache_negative_result(observation.with_desired(desired), step_seconds),
                observation,
            )
    return _request_evidence(observation.with_desired(desired), investigation)


def _begin_with_request(observation: Observation) -> DesiredState:
    desired = _begin_investigation(observation)
    investigation = desired.state.adaptation.investigation
    assert investigation is not None
    return _request_evidence(observation.with_desired(desired), investigation)


def _begin_investigation(observation: Observation) -> DesiredState:
    investigation = StragglerInvestigation(
        since=observation.now, step=observation.progress.step, step_seconds=observation.progress.step_seconds
    )
    return observation.desired.with_requests(investigation=None).with_adaptation(investigation=investigation)


def _compute_seconds_since_request(observation: Observation) -> float:
    """Return the time since the last evidence request of this investigation; infinity: this leader has made none."""
    last_request = observation.requests.investigation
    return math.inf if last_request is None else observation.now - last_request.requested_at


def _record_clear_time(desired: DesiredState, clear_at: float | None) -> DesiredState:
    """Return the state with the time of the last answer without a bottleneck. It is not written."""
    last_request = desired.requests.investigation
    if last_request is None:
        return desired
    return desired.with_requests(investigation=replace(last_request, last_clear_at=clear_at))


def _get_first_sign(observation: Observation) -> float:
    """Return the first sign of the bottleneck that the last answers show."""
    investigation, clear_at = observation.state.adaptation.investigation, _get_last_clear_time(observation)
    assert investigation is not None
    return investigation.since if clear_at is None else max(investigation.since, clear_at)


def _get_last_clear_time(observation: Observation) -> float | None:
    """Return when an answer last showed no bottleneck; None: none has in this investigation."""
    investigation, last_request = observation.state.adaptation.investigation, observation.requests.investigation
    recorded = None if investigation is None else investigation.last_clear_at
    latest = None if last_request is None else last_request.last_clear_at
    return recorded if latest is None else latest


def _reset_suppression(observation: Observation, policy: Policy) -> DesiredState:
    """Return the state without suppression once a remedy may be applied, or once no rank is slow any more."""
    desired, fruitless = observation.desired, observation.state.adaptation.fruitless_investigation
    if fruitless is not None and fruitless.forbidden and policy.applies_remedies:
        return desired.with_adaptation(
            fruitless_investigation=None, suppressed_relative_time=None, suppressed_peer_slowdown=None
        )
    if fruitless is not None and _is_slowness_over(observation, fruitless):
        desired = desired.with_adaptation(
            fruitless_investigation=replace(fruitless, step_seconds=observation.progress.step_seconds)
        )
    adaptation = desired.state.adaptation
    settled = _are_ranks_alike(observation) and is_steady(observation) and not observation.metrics.needs_more_windows
    if (adaptation.suppressed_relative_time is not None or adaptation.loss is not None) and settled:
        if _has_outdated_shares(observation):
            desired = desired.with_adaptation(fruitless_investigation=None)
        return desired.with_adaptation(suppressed_relative_time=None, suppressed_peer_slowdown=None, loss=None)
    return desired


def _is_slowness_over(observation: Observation, fruitless: FruitlessInvestigation) -> bool:
    """Return whether ranks no longer wait and steps are faster than the investigated ones.

    Steps that become as long again count as new.
    """
    step_seconds, threshold = observation.progress.step_seconds, observation.job.spec.detection.straggler_slowdown
    if step_seconds is None or fruitless.step_seconds is None:
        return False
    return (
        step_seconds * threshold <= fruitless.step_seconds
        and observation.metrics.wait_share is not None
        and not _has_long_waits(observation)
        and is_steady(observation)
    )


def _account_loss(observation: Observation, diagnosis: Diagnosis) -> DesiredState:
    """Return the state with the loss by slow ranks until now, and its rate from now on.

    A rank may be as slow as before, but no culprit any more since it has fewer samples. It keeps the rate that was
    predicted for these. A few steps show less or more by chance.
    """
    desired, adaptation = observation.desired, observation.state.adaptation
    if not diagnosis.culprits and (adaptation.loss is None or observation.has_straggler):
        return desired
    slowdown = diagnosis.effects[Bottleneck.COMPUTE] if diagnosis.culprits else 1.0
    return desired.with_adaptation(
        loss=adaptation.accumulate_loss(observation.now, slowdown, _find_first_sign(observation, diagnosis))
    )


def _find_first_sign(observation: Observation, diagnosis: Diagnosis) -> float:
    """Return the first sign of the bottleneck: in the metrics, or before that in the steps that the answers cover.

    In a Local-SGD mode, these steps are a sample.
    """
    if observation.plan.sync_mode is not EXACT_SYNC_MODE:
        return _get_first_sign(observation)
    covered_seconds = float(np.median(diagnosis.window.step_seconds, axis=1).sum())
    last_request = observation.requests.investigation
    requested_at = observation.now if last_request is None else last_request.requested_at
    since = min(_get_first_sign(observation), requested_at - covered_seconds)
    slowness, slow_ranks = (
        observation.metrics.persistent_slowness,
        diagnosis.bottleneck in {Bottleneck.NONE, Bottleneck.COMPUTE} and diagnosis.culprits,
    )
    return (
        min(since, slowness.since)
        if slowness is not None and slow_ranks and {*slow_ranks} <= {*slowness.relative_times.relative_times}
        else since
    )


def _investigate_broken(observation: Observation, policy: Policy) -> DesiredState:
    """Return the state with the time since when a rank is broken, or has cost as much as a spare, in a Local-SGD mode.

    There, `revert_to_sync` requests the evidence.
    """
    desired, investigation, relative_time = (
        observation.desired,
        observation.state.adaptation.investigation,
        observation.metrics.relative_time,
    )
    is_broken = relative_time is not None and relative_time >= SPARE_FIRST_SLOWDOWN
    if not (is_broken or _is_spare_due(observation, policy)) or not is_steady(observation):
        return desired if investigation is None else desired.with_adaptation(investigation=None)
    if investigation is not None:
        return desired
    return _begin_investigation(observation)


def compute_evidence_pause(elapsed: float) -> float:
    """Return the seconds between requests: a tenth of `elapsed`, within limits.

    Windows move on, and so does what they show.
    """
    return min(max(MIN_EVIDENCE_REQUEST_SECONDS, 0.1 * elapsed), MAX_EVIDENCE_REQUEST_SECONDS)


def is_steady(observation: Observation) -> bool:
    """Return whether all members train in the wanted mode and report it, in a round as old as a window.

    No incident must be waiting for a round to recover.
    """
    if observation.progress.training_since is None or observation.metrics.unreported_members:
        return False
    if observation.progress.sync_modes - {"", observation.plan.sync_mode}:
        return False
    busy = any(incident.recovered is None and not incident.live for incident in observation.state.incidents.open)
    return not busy and observation.progress.steps_in_round >= get_window_steps(observation)


def get_window_steps(observation: Observation) -> int:
    """Return the number of steps that are judged together, and that the metrics cover."""
    return count_window_steps(observation.job.spec.detection.window_steps, observation.progress.step_seconds)


def _has_slow_rank(observation: Observation) -> bool:
    """Return whether some rank's own work takes longer than its peers', by much or persistently."""
    return observation.has_straggler or (
        observation.metrics.relative_time is not None and _get_lasting_slowness(observation) is not None
    )


def _get_lasting_slowness(observation: Observation) -> PersistentSlowness | None:
    """Return the ranks that are slightly slower than their peers, window after window.

    In a monitored script, ranks may differ by nature.
    """
    return observation.metrics.persistent_slowness if is_managed(observation) else None


def _are_ranks_alike(observation: Observation) -> bool:
    """Return whether no rank is slow, as far as is known."""
    return observation.metrics.relative_time is not None and not _has_slow_rank(observation)


def _has_long_waits(observation: Observation) -> bool:
    """Return whether even the rank that waits least waits for a good part of each step.

    It waits for a link, or for slow ranks that change.
    """
    wait_share, investigated = observation.metrics.wait_share, observation.state.adaptation.investigation is not None
    return wait_share is not None and wait_share >= MIN_WAITING_SHARE * (WAITING_HYSTERESIS if investigated else 1.0)


def _has_outdated_shares(observation: Observation) -> bool:
    """Return whether the ranks are alike but their shares are not: the straggler behind them has recovered."""
    shares = observation.plan.shares
    return _are_ranks_alike(observation) and shares is not None and max(shares) - min(shares) > 1


def _is_suppressed(observation: Observation) -> bool:
    """Return whether this relative step time of the slowest rank is suppressed.

    It is compensated by the present shares, or a remedy was recommended for it. It may hide another rank that has
    become slow since, which shows in the own work of a step. Shares that were made for a slower rank may not fit one
    that has recovered in part.
    """
    adaptation, relative_time, peer_slowdown = (
        observation.state.adaptation,
        observation.metrics.relative_time,
        observation.metrics.peer_slowdown,
    )
    if (
        adaptation.suppressed_relative_time is None
        or relative_time is None
        or relative_time >= adaptation.suppressed_relative_time * 1.1
    ):
        return False
    if _is_remedy_measured(observation):
        return True
    if observation.plan.shares is not None and relative_time <= adaptation.suppressed_relative_time / 1.1:
        return False
    limit = max(adaptation.suppressed_peer_slowdown or 0.0, observation.job.spec.detection.straggler_slowdown) * 1.1
    return peer_slowdown is None or peer_slowdown < limit


def _is_remedy_measured(observation: Observation) -> bool:
    """Return whether a live remedy has been applied, and the metrics still cover time before it."""
    return any(
        incident.live and incident.class_ is IncidentClass.PERFORMANCE for incident in observation.state.incidents.open
    )


def _shares_fit(observation: Observation, diagnosis: Diagnosis) -> bool:
    """Return whether the present shares compensate most of a slow rank's cost, and no others would win anything."""
    exact_strategies = [
        strategy for strategy in _list_strategies(observation, diagnosis) if strategy.mode is EXACT_SYNC_MODE
    ]
    if (
        observation.plan.shares is None
        or _is_remedy_measured(observation)
        or not all(strategy.refused for strategy in exact_strategies)
    ):
        return False
    if diagnosis.bottleneck is Bottleneck.NONE:
        return True
    return (
        bool(strategies.explain_exact_preference(diagnosis, exact_strategies))
        and max(diagnosis.rank_slowdown) < SPARE_FIRST_SLOWDOWN
    )


def _is_beyond_remedy(observation: Observation, policy: Policy, diagnosis: Diagnosis) -> bool:
    """Return whether a slight, persistent slowness has no permitted remedy that would win anything.

    It waits until all slow ranks are known. Some ranks of a node are detected before its others, for which all would
    still wait.
    """
    slowness = _get_lasting_slowness(observation)
    if slowness is None or observation.has_straggler or diagnosis.bottleneck is not Bottleneck.NONE:
        return False
    if observation.now - slowness.since < LASTING_SLOWNESS_WINDOWS * get_window_steps(observation) * (
        observation.progress.step_seconds or 0.0
    ):
        return False
    if not price.is_worth_change(
        diagnosis.effects[Bottleneck.COMPUTE], 1.0, price.MIN_LASTING_WIN
    ):  # by one answer, more may be chance
        return True
    spare = _build_spare_option(observation, policy, observation.metrics.slowest_rank)
    return bool(spare.refused) and all(strategy.refused for strategy in _list_strategies(observation, diagnosis))


def _shares_misfit(observation: Observation, diagnosis: Diagnosis) -> bool:
    """Return whether the straggler behind the present shares has recovered, and others would win something."""
    return _has_outdated_shares(observation) and any(
        not strategy.refused for strategy in _list_strategies(observation, diagnosis)
    )


def _is_negatively_cached(observation: Observation) -> bool:
    """Return whether waits have been investigated, and steps have not grown since.

    They had not grown when the present investigation began, either: it ends as the last one did. Otherwise steps that
    are longer by chance would count as new each time.
    """
    fruitless, investigation = (
        observation.state.adaptation.fruitless_investigation,
        observation.state.adaptation.investigation,
    )
    if fruitless is None or observation.now - fruitless.at > fruitless.cool_down_seconds:
        return False
    if fruitless.step_seconds is None:
        return False
    times = (observation.progress.step_seconds, None if investigation is None else investigation.step_seconds)
    limit = fruitless.step_seconds * (
        1.0 + SIGNIFICANT_GROWTH_SHARE * (observation.job.spec.detection.straggler_slowdown - 1.0)
    )
    return all(seconds is None or seconds < limit for seconds in times)


def _is_fruitless(observation: Observation, investigation: StragglerInvestigation) -> bool:
    """Return whether a whole window of steps since the first sign shows no bottleneck.

    While the job evaluates or writes a checkpoint, it completes no steps.
    """
    window_complete = observation.progress.count_steps_since(investigation.step) >= get_window_steps(observation)
    is_clear = investigation.last_bottleneck in (None, Bottleneck.NONE)
    return is_clear and window_complete and observation.now - investigation.since > WAITING_INVESTIGATION_SECONDS


def _has_bottleneck(observation: Observation, policy: Policy) -> bool:
    """Return whether the present answers show a bottleneck, which those before them did not."""
    diagnosis = _diagnose_actionable(observation, policy)
    return (
        diagnosis is not None
        and diagnosis.bottleneck is not Bottleneck.NONE
        and not _is_already_optimal(observation, diagnosis)
    )


def suppress_bottleneck(observation: Observation, *, forbidden: bool) -> DesiredState:
    """Return the state after an incident was opened without a remedy being applied: it is suppressed for a time.

    `forbidden`: a remedy was only recommended, because none may be applied now.
    """
    return _suppress_current_times(
        _cache_negative_result(observation, observation.progress.step_seconds, forbidden), observation
    )


def _suppress_current_times(desired: DesiredState, observation: Observation) -> DesiredState:
    """Return the state in which the ranks' present relative step times are suppressed until they change."""
    metrics = observation.metrics
    return desired.with_adaptation(
        suppressed_relative_time=metrics.relative_time, suppressed_peer_slowdown=metrics.peer_slowdown
    )


def _cache_negative_result(
    observation: Observation, step_seconds: float | None, forbidden: bool = False
) -> DesiredState:
    """Return the state with a negative result. `step_seconds`: what was investigated; longer steps count as new."""
    previous = observation.state.adaptation.fruitless_investigation
    cool_down = (
        FIRST_NEGATIVE_CACHE_SECONDS
        if previous is None
        else min(2 * previous.cool_down_seconds, MAX_NEGATIVE_CACHE_SECONDS)
    )
    return _drop_investigation(observation.desired).with_adaptation(
        fruitless_investigation=FruitlessInvestigation(observation.now, cool_down, step_seconds, forbidden)
    )


def _request_evidence(observation: Observation, investigation: StragglerInvestigation) -> DesiredState:
    """Return the state with the next evidence request.

    An earlier leader may have seen answers without a bottleneck until now. Then the next bottleneck begins now.
    """
    desired, now, requests = observation.desired, observation.now, observation.requests
    last_request = requests.investigation
    slow_links = investigation.last_bottleneck is Bottleneck.COMMUNICATION or slow_communication.needs_pair_throughput(
        desired, now
    )
    max_ranks = (
        collective_waits.FIRST_REQUEST_MAX_RANKS if last_request is None else collective_waits.SECOND_REQUEST_MAX_RANKS
    )
    collectives = desired.plan.world_size <= max_ranks
    wanted_parts = {EvidencePart.WINDOWS: True, EvidencePart.OPERATIONS: collectives, EvidencePart.LINKS: slow_links}
    parts = tuple(part for part, is_wanted in wanted_parts.items() if is_wanted)
    is_unknown = last_request is None and investigation.last_bottleneck is Bottleneck.NONE
    return desired.with_requests(
        evidence=EvidenceRequest(requests.build_next_name("straggler", observation.nonce), parts),
        issued=requests.issued + 1,
        investigation=InvestigationRequest(
            now,
            observation.progress.step,
            observation.metrics.relative_time,
            now if is_unknown else None if last_request is None else last_request.last_clear_at,
        ),
    ).with_adaptation(investigation=investigation)


def _drop_investigation(desired: DesiredState) -> DesiredState:
    return desired.with_adaptation(investigation=None).with_requests(evidence=None, investigation=None)


def _decide_remedy(observation: Observation, policy: Policy, diagnosis: Diagnosis) -> Decision | None:
    assert observation.state.adaptation.investigation is not None
    culprit = _find_culprit(diagnosis)
    worker = None if culprit is None else observation.find_worker_of_rank(culprit)
    view = None if worker is None else observation.find_worker(worker)
    if culprit is not None and (
        view is None or view.record.leaving or not _is_holding_up_peers(observation, diagnosis, culprit)
    ):
        return None
    incident_key = IncidentKey(BOTTLENECK_TO_CAUSE[diagnosis.bottleneck], observation.progress.round, rank=culprit)
    choice, action = _weigh_remedies(observation, policy, diagnosis, culprit)
    chosen = choice.chosen
    if route_alternatives.is_reroute_awaited(observation, choice):
        return None
    unsure = (
        diagnosis.bottleneck is not observation.state.adaptation.investigation.last_bottleneck
        or _is_mode_in_cool_down(observation)
    )
    if chosen is None and (
        diagnosis.bottleneck is Bottleneck.COMPUTE or unsure or get_last_incident_number(observation, incident_key)
    ):
        return None  # an expensive remedy waits until it pays, a mode for its cool-down; the rest is reported
    finding = _build_finding(observation, diagnosis, culprit)
    if (
        chosen is None
        and not finding.culprit
        and (diagnosis.slowdown < VOLATILE_SLOWDOWN or _is_bottleneck_recent(observation, diagnosis))
    ):
        return None  # there is no culprit (yet) and no remedy, and shared networks are like that
    return Decision(
        incident_key=replace(incident_key, occurrence=1 + get_last_incident_number(observation, incident_key)),
        class_=IncidentClass.PERFORMANCE,
        message=_build_message(diagnosis, culprit, worker),
        first_sign=_find_first_sign(observation, diagnosis),
        actions=() if action is None else (action,),
        remedy=None if chosen is None else Remedy(chosen.option.remedy),
        remedies=build_remedy_prices(choice.prices, chosen),
        evidence=(
            *diagnosis.evidence,
            *gpu_warning.describe_gpu_signs(observation, view),
            *(() if observation.estimate is None else observation.estimate.sentences),
        ),
        rank=culprit,
        worker=worker,
        node=None if view is None else view.record.node or None,
        continued_incident=_find_open_incident(observation, incident_key.cause, culprit),
        live=not isinstance(action, ReplaceWorker | PlanTraffic),
        last_step=observation.progress.step,
        slowdown_before=diagnosis.slowdown,
        slowdown_after=None if chosen is None else chosen.option.slowdown_after,
        reference_seconds=diagnosis.step_seconds / diagnosis.slowdown,
        steps_before=sample_step_times(diagnosis.window),
        predicted_gain=chosen.gain_seconds if chosen is not None and math.isfinite(chosen.gain_seconds) else None,
        finding=finding,
    )


def _find_culprit(diagnosis: Diagnosis) -> int | None:
    """Return the slowest rank if slow ranks are the bottleneck."""
    ranks = diagnosis.culprits if diagnosis.bottleneck is Bottleneck.COMPUTE else ()
    return max(ranks, key=lambda rank: diagnosis.rank_slowdown[rank], default=None)


def _is_bottleneck_recent(observation: Observation, diagnosis: Diagnosis) -> bool:
    """Return whether the bottleneck is so recent that the connections' windows may still name its place."""
    link_check = observation.requests.link_check
    return (
        link_check is not None
        and link_check.conclusive
        and observation.now - _find_first_sign(observation, diagnosis) < BOTTLENECK_NAMING_SECONDS
    )


def _is_holding_up_peers(observation: Observation, diagnosis: Diagnosis, culprit: int) -> bool:
    return diagnosis.bottleneck is not Bottleneck.COMPUTE or collective_waits.is_holding_up_peers(
        observation, diagnosis, culprit
    )


def _build_finding(observation: Observation, diagnosis: Diagnosis, culprit: int | None) -> Finding:
    link_finding = slow_communication.build_communication_finding(observation, diagnosis)
    if link_finding is None:
        work_finding = collective_waits.build_wait_finding(observation, diagnosis, culprit)
        function_finding = _find_slow_function(observation, culprit)
        return work_finding if function_finding is None else merge_findings(work_finding, function_finding)
    group_finding = collective_waits.find_slow_groups(observation)
    return link_finding if group_finding is None else merge_findings(group_finding, link_finding)


def _find_slow_function(observation: Observation, culprit: int | None) -> Finding | None:
    """Return what a profile window of this round has shown of this rank."""
    profile, profiling = observation.localized_profile, observation.state.profiling
    if profile is None or profile.window != profiling.reported_window or profiling.round != observation.progress.round:
        return None
    return next(
        (explanation.finding for explanation in profile.localization.explanations if culprit in explanation.ranks), None
    )


def _weigh_remedies(
    observation: Observation, policy: Policy, diagnosis: Diagnosis, culprit: int | None
) -> tuple[Choice, Action | None]:
    """Return the prices of all remedies, and the action of the chosen one.

    The remedies are the strategies, a spare for a culprit, and other routes for slow communication.
    """
    adaptation, threshold = observation.state.adaptation, observation.job.spec.detection.straggler_slowdown
    since = _find_first_sign(observation, diagnosis)
    past = observation.cluster_view.past_durations.get(BOTTLENECK_TO_CAUSE[diagnosis.bottleneck], ())
    is_broken = culprit is not None and diagnosis.rank_slowdown[culprit] >= SPARE_FIRST_SLOWDOWN
    choose = partial(
        price.choose_remedy,
        slowdown=diagnosis.slowdown,
        lost_seconds=adaptation.accumulate_loss(observation.now, diagnosis.slowdown, since).seconds,
        remaining_seconds=price.estimate_remaining_seconds(
            observation.now - since, past, BOTTLENECK_PRIOR_SECONDS.get(diagnosis.bottleneck, DEFAULT_PRIOR_SECONDS)
        ),
        sufficient_slowdown=threshold,
        tolerable_slowdown=threshold if is_broken else math.inf,
    )
    candidates = _list_permitted_strategies(observation, policy, diagnosis)
    exact_preference = strategies.explain_exact_preference(diagnosis, candidates)
    options = [
        strategy.to_option(exact_preference if strategy.mode is not EXACT_SYNC_MODE else "") for strategy in candidates
    ]
    best = choose(options).chosen
    slowdown_after = diagnosis.slowdown if best is None else best.option.slowdown_after
    is_sufficient = (best is not None or bool(exact_preference)) and (not is_broken or slowdown_after < threshold)
    actions: list[Action] = [Adapt(strategy, diagnosis.bottleneck, is_sufficient) for strategy in candidates]
    if culprit is not None and diagnosis.bottleneck is Bottleneck.COMPUTE:
        spare = _build_spare_option(
            observation, policy, culprit, diagnosis.rank_slowdown[culprit], slowdown=diagnosis.slowdown
        )
        options.append(replace(spare, slowdown_after=_compute_slowdown_without(observation, diagnosis, culprit)))
        reason = f"rank {culprit} has cost as much as a spare does"
        actions.append(ReplaceWorker(observation.find_worker_of_rank(culprit) or "", reason, dead=False))
    reroute = route_alternatives.build_alternative_option(observation, policy, diagnosis.slowdown)
    if reroute is not None and diagnosis.bottleneck is Bottleneck.COMMUNICATION:
        options.append(reroute)
        actions.append(PlanTraffic(rates=slow_communication.measure_pair_rates(observation)))
    open_incidents = observation.state.incidents.open
    measured_remedies = {
        incident.remedy for incident in open_incidents if incident.live and incident.class_ is IncidentClass.PERFORMANCE
    }
    choice = choose(
        [_refuse_repetition(option) if option.remedy in measured_remedies else option for option in options]
    )
    return choice, None if choice.chosen is None else actions[choice.prices.index(choice.chosen)]


def _compute_slowdown_without(observation: Observation, diagnosis: Diagnosis, culprit: int) -> float:
    """Return the slowdown that remains without the culprit's worker: others may be as slow."""
    worker = observation.find_worker_of_rank(culprit)
    member = next((member for member in observation.plan.members if member.worker == worker), None)
    other_culprits = set(diagnosis.culprits) - set(() if member is None else member.ranks)
    return (
        strategies.estimate_remaining_slowdown(
            diagnosis, other_culprits, observation.job.spec.detection.straggler_slowdown
        )
        if other_culprits
        else 1.0
    )


def _refuse_repetition(option: Option) -> Option:
    """Refuse the option while its effect is measured. Other options stay possible."""
    return replace(option, refused=option.refused or "it has been applied, and is still measured")


def _build_spare_option(
    observation: Observation,
    policy: Policy,
    rank: int | None,
    last_relative_time: float = 1.0,
    slowdown: float = 1.0,
) -> Option:
    """Return the option of a spare for a slow rank; None: it is not known which.

    `last_relative_time`: its relative step time in its last answer. `slowdown`: what it costs the job until the
    exchange begins.
    """
    if _are_ranks_alike(observation) or _has_recovered(observation, last_relative_time):
        refused = "no rank is so slow any more"
    else:
        refused = _explain_stay(observation, policy, rank)
    # What remains of a rank that is surely slow may be little. For one that is slightly slow, it may be chance.
    min_win = price.MIN_LASTING_WIN if observation.has_straggler else price.MIN_REMEDY_WIN
    option = build_replace_option(observation, policy, refused=refused)
    return replace(option, cost_seconds=observation.restarts.estimate_exchange_seconds(slowdown), min_win=min_win)


def _has_recovered(observation: Observation, last_relative_time: float | None) -> bool:
    """Return whether the slowest rank has lost RECOVERED_SHARE of its slowness since the evidence request.

    It took `last_relative_time` × its peers' time then; None: it was not known. The metrics are current, but means over
    a window. Before that share of a window is done, they cannot have fallen that far. For a rank that has just become
    slow, they still rise.
    """
    relative_time, last_request = observation.metrics.relative_time, observation.requests.investigation
    if relative_time is None or last_relative_time is None:
        return False
    steps_since = (
        get_window_steps(observation)
        if observation.state.adaptation.investigation is None
        else observation.progress.count_steps_since(None if last_request is None else last_request.step)
    )
    is_covered = steps_since >= RECOVERED_SHARE * get_window_steps(observation)
    return is_covered and relative_time - 1.0 < RECOVERED_SHARE * (last_relative_time - 1.0)


def _is_spare_due(observation: Observation, policy: Policy) -> bool:
    """Return whether slow ranks have cost as much by now as a spare that is available.

    They may be compensated in part. The effect of an earlier remedy is measured first.
    """
    loss = observation.state.adaptation.loss
    if loss is None or not policy.applies_remedies or _is_remedy_measured(observation):
        return False
    spare = _build_spare_option(observation, policy, observation.metrics.slowest_rank, slowdown=loss.slowdown)
    is_worth_it = (
        price.is_worth_change(loss.slowdown, 1.0, spare.min_win)
        and loss.compute_seconds(observation.now) >= spare.cost_seconds
    )
    return is_worth_it and not spare.refused


def _explain_stay(observation: Observation, policy: Policy, rank: int | None) -> str:
    """Return why this rank gets no other worker now, or any more; "": it may."""
    window_start, present_worker = (
        observation.now - policy.restart_window,
        None if rank is None else observation.find_worker_of_rank(rank),
    )
    if observation.is_budget_spent(policy):
        return "no restart is left in this window"
    window_seconds = get_window_steps(observation) * (observation.progress.step_seconds or 0.0)
    starting = None if present_worker is None else find_starting_neighbor(observation, present_worker, window_seconds)
    if starting is not None:
        return f"{starting} of this job starts on the same machine, which passes"
    slow_workers = {
        incident.worker
        for incident in observation.state.incidents.past
        if incident.cause is IncidentCause.STRAGGLER and incident.rank == rank and incident.at > window_start
    }
    other_workers = sorted(worker for worker in slow_workers if worker is not None and worker != present_worker)
    return (
        f"it was slow on {', '.join(other_workers)}, too: look at the script"
        if len(other_workers) >= MIN_SLOW_WORKERS
        else ""
    )


def _list_strategies(observation: Observation, diagnosis: Diagnosis) -> tuple[Strategy, ...]:
    """Return the strategies from mode Sync. From a Local-SGD mode, the only one is to revert to Sync."""
    if observation.plan.sync_mode is not EXACT_SYNC_MODE:
        return ()
    threshold = observation.job.spec.detection.straggler_slowdown
    plan = observation.plan
    return diagnosis_cache.list_strategies(DiagnosisKey(diagnosis), threshold, plan.sequence_cost, plan.gc_every)


def _list_permitted_strategies(observation: Observation, policy: Policy, diagnosis: Diagnosis) -> list[Strategy]:
    """Return the strategies, with a refusal for each one that this job may not take."""
    return [
        replace(strategy, refused=strategy.refused or _explain_refusal(observation, policy, diagnosis, strategy))
        for strategy in _list_strategies(observation, diagnosis)
    ]


def _explain_refusal(observation: Observation, policy: Policy, diagnosis: Diagnosis, strategy: Strategy) -> str:
    """Return why this job may not take the strategy (now); "": it may."""
    assert observation.state.adaptation.investigation is not None
    if refusal := policy.find_refusal(Remedy(strategy.remedy)):
        return refusal
    if strategy.mode is not EXACT_SYNC_MODE and observation.job.spec.sync_mode is not RequestedSyncMode.AUTO:
        return f"spec.syncMode is {observation.job.spec.sync_mode}"
    if not is_managed(observation):
        return "the script does not use the library, so it cannot be managed"
    if strategy.remedy == Remedy.REBALANCE and observation.state.adaptation.shares_refusal:
        return f"the ranks refused it: {observation.state.adaptation.shares_refusal}"
    if strategy.mode is EXACT_SYNC_MODE:
        return _explain_deferral(observation, policy, diagnosis, strategy)
    if diagnosis.bottleneck is not observation.state.adaptation.investigation.last_bottleneck:
        return "the next steps have to show the same first"
    if any(view.heartbeat is not None and not view.heartbeat.training.sync_mode for view in observation.members):
        return "the ranks do not report the mode that they train in: is their library older than the operator?"
    if observation.state.adaptation.mode_refusal:
        return f"the ranks refused it: {observation.state.adaptation.mode_refusal}"
    mode_changes = observation.state.adaptation.mode_changes
    if mode_changes.changed_at is not None and _is_mode_in_cool_down(observation):
        seconds = mode_changes.changed_at + mode_changes.hold_seconds - observation.now
        return f"the mode has changed recently and stays for another {seconds:.0f} s"
    return ""


def _explain_deferral(observation: Observation, policy: Policy, diagnosis: Diagnosis, strategy: Strategy) -> str:
    """Return why shares are deferred in favor of a spare; "": they are not.

    Shares that win a little of a small slowdown leave less than what a spare is chosen for, as long as it lasts.
    """
    culprit = _find_culprit(diagnosis)
    if (
        culprit is None
        or strategy.remedy != Remedy.REBALANCE
        or price.is_worth_change(diagnosis.slowdown, strategy.slowdown_after)
    ):
        return ""
    is_better = _compute_slowdown_without(observation, diagnosis, culprit) < strategy.slowdown_after
    if not is_better or _build_spare_option(observation, policy, culprit).refused:
        return ""
    return "it wins so little that a spare is the better remedy, once it is due"


def is_managed(observation: Observation) -> bool:
    """Return whether the script uses the library and so follows the plan, as far as is reported."""
    return all(view.heartbeat is None or view.heartbeat.training.managed for view in observation.members)


def _is_mode_in_cool_down(observation: Observation) -> bool:
    return not observation.state.adaptation.mode_changes.allows(observation.now)


def _build_message(diagnosis: Diagnosis, culprit: int | None, worker: str | None) -> str:
    if culprit is not None and diagnosis.bottleneck is Bottleneck.COMPUTE:
        return f"rank {culprit} on {worker} takes {diagnosis.rank_slowdown[culprit]:.2f} × its peers' time a sample"
    causes = {
        Bottleneck.COMPUTE: "the shares of the batch do not fit the ranks",
        Bottleneck.COMMUNICATION: "communication takes longer than in the job's first steady steps",
        Bottleneck.VOLATILE: "slow ranks come and go, and all wait for each of them",
        Bottleneck.GC: "garbage collections of different ranks fall into different steps, and all wait for each",
        Bottleneck.LENGTHS: "sequence lengths are dealt unevenly over the ranks",
    }
    return f"steps take {diagnosis.slowdown:.2f} × as long as they need: {causes[diagnosis.bottleneck]}"


def _find_open_incident(observation: Observation, cause: IncidentCause, rank: int | None) -> str:
    """Return the name of the open incident of this bottleneck, which its remedy has not removed; "": none."""
    names = (
        incident.name
        for incident in observation.state.incidents.open
        if incident.cause is cause and incident.rank == rank
    )
    return next(names, "")


def get_last_incident_number(observation: Observation, incident_key: IncidentKey) -> int:
    """Return the highest number of this bottleneck's incidents in this round: shares come first, a spare later."""
    names = observation.state.incidents.list_names()
    return max((incident_key.find_occurrence(name, observation.job) for name in names), default=0)
