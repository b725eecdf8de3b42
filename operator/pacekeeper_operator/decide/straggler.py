"""A job that is slower than it needs to be: another way to train first, a spare where that mends too little.

The metrics of a look only raise a suspicion. Then all ranks are asked for their last steps, and
`pacekeeper_analysis.adapt` says what the trouble is and which ways to train fit it; here they are priced beside the
dearer remedies, and one is taken.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from pacekeeper_analysis import adapt, price, staged
from pacekeeper_analysis.adapt import Diagnosis, Bottleneck, Strategy
from pacekeeper_analysis.diagnose.finding import Finding, merge_findings
from pacekeeper_analysis.diagnose.windows import count_window_steps
from pacekeeper_analysis.plan import EvidencePart, Stop, SyncMode
from pacekeeper_analysis.price import Choice, Option

from ..api import IncidentCause, IncidentClass, Remedy, RequestedSyncMode
from ..decision import Action, Adapt, Decision, PlanTraffic, ReplaceWorker
from ..observation import PersistentSlowness, Observation, Policy
from ..state import DesiredState, StragglerInvestigation, FruitlessInvestigation
from ..subject import IncidentKey
from . import gpu_warning, links, other_ways, waits
from .pricing import estimate_exchange_seconds, build_replace_option, build_remedy_prices

EXACT_SYNC_MODE = SyncMode.SYNC
SPARE_FIRST_SLOWDOWN = adapt.MIN_BROKEN_RANK_SLOWDOWN
"""From this slowdown of a rank on, a spare that is due comes before shares, unless they mend it."""
VOLATILE_SLOWDOWN = 1.3
"""From this slowdown on, slow ranks that come and go are more than what processors shared with others always show."""
RECOVERED_SHARE = 0.5
"""A rank that has lost this part of its slowness since it was asked is getting well."""
MIN_WAITING_SHARE = 0.1
"""From this share of a step on, waits in which no rank works are worth a look at where they come from."""
WAITING_HYSTERESIS = 0.8
"""Times that, below which waits that are looked into are over: by nature many jobs wait for about a tenth of a step."""
MIN_EVIDENCE_REQUEST_SECONDS, MAX_EVIDENCE_REQUEST_SECONDS = 1.5, 120.0
"""Between two requests for evidence at least, and at most."""
EVIDENCE_ANSWER_SECONDS = 5.0
"""So long ranks may take to answer before they are asked anew."""
MIN_SLOW_WORKERS = 2
"""A rank that was slow on so many other workers lately is slow by what it does."""
WAITING_INVESTIGATION_SECONDS = 20.0
"""So long waits are looked into at least, before they are taken for the job's own way."""
BOTTLENECK_NAMING_SECONDS = 15.0
"""So long a trouble about which nothing can be done may take to show where it is, before it is told without."""
SIGNIFICANT_GROWTH_SHARE = 0.25
"""Of the threshold's excess: steps that are longer by so much than those that were looked into in vain are news. What
garbage and lengths cost is much less than the threshold when it is worth mending."""
LASTING_SLOWNESS_WINDOWS = 10
"""After so many, of figures, all ranks are known that are a little slow together: the first ones after four."""
FIRST_NEGATIVE_CACHE_SECONDS, MAX_NEGATIVE_CACHE_SECONDS = 60.0, 3600.0
"""After a look in vain, the next one that nothing new calls for; doubled each time."""
BOTTLENECK_TO_CAUSE = {
    Bottleneck.COMPUTE: IncidentCause.STRAGGLER,
    Bottleneck.COMMUNICATION: IncidentCause.SLOW_COMMUNICATION,
    Bottleneck.VOLATILE: IncidentCause.VOLATILE,
    Bottleneck.GARBAGE: IncidentCause.GARBAGE,
    Bottleneck.LENGTHS: IncidentCause.UNEVEN_LENGTHS,
}
BOTTLENECK_PRIOR_SECONDS = {Bottleneck.COMMUNICATION: links.SLOW_COMMUNICATION_PRIOR_SECONDS}
DEFAULT_PRIOR_SECONDS = 600.0
"""Mean durations before this cluster has a history: communication 24 minutes, compute 10 (Greyhound, ATC'25)."""


def check_stragglers(observation: Observation, policy: Policy) -> Decision | None:
    due = _is_spare_due(observation, policy)
    found = _diagnose_actionable(observation, policy, observation.job.spec.detection.straggler_slowdown if due else SPARE_FIRST_SLOWDOWN)
    if found is None:
        return None
    little = due or _get_lasting_slowness(observation) is not None if found.culprits else _shares_misfit(observation, found)
    if found.trouble is Bottleneck.NONE and little:  # but for long
        found = replace(found, trouble=Bottleneck.COMPUTE, slowdown=found.effects[Bottleneck.COMPUTE])
    if found.trouble is Bottleneck.NONE or _is_already_optimal(observation, found) or _is_explained_by_profile(observation, found):
        return None
    return _decide_remedy(observation, policy, found)


def _diagnose_actionable(observation: Observation, policy: Policy, slow: float = SPARE_FIRST_SLOWDOWN) -> Diagnosis | None:
    """What the evidence says (`diagnose`), without the little that nobody may, or can, be rid of: named, it would hide
    a rank that is slow by no more."""
    found = diagnose_evidence(observation, slow)
    if found is None or found.trouble not in adapt.FREE_LASTING_REMEDIES:
        return found
    if found.slowdown >= observation.job.spec.detection.straggler_slowdown:
        return found
    stays = not policy.applies_remedies or all(way.refused for way in _list_permitted_strategies(observation, policy, found))
    return replace(found, trouble=Bottleneck.NONE) if stays else found


def diagnose_evidence(observation: Observation, slow: float = SPARE_FIRST_SLOWDOWN) -> Diagnosis | None:
    """What the evidence says; None: it is incomplete, or in a Local-SGD mode no rank takes `slow` × its peers' time."""
    if observation.state.adaptation.suspicion is None or not observation.plan.evidence_request:
        return None  # or what was answered is from before a change of this pass
    if not is_steady(observation):
        return None
    windows = tuple(window for evidence in observation.evidence for window in evidence.windows)
    if len(windows) != observation.plan.world_size:
        return None
    threshold = observation.job.spec.detection.straggler_slowdown
    if observation.plan.sync_mode is EXACT_SYNC_MODE:
        if waits.can_have_pipeline_stages(observation):
            return None  # the next answer tells what its ranks do together
        lasting = _get_lasting_slowness(observation)
        known = None if lasting is None else lasting.relative_times
        of_stages = waits.diagnose_stages(observation)
        alone = (Bottleneck.COMMUNICATION,) if observation.plan.world_size == 1 else ()  # it waits for nobody
        found = of_stages or adapt.diagnose_bottleneck(windows, threshold, known, suppressed=alone)
        if found is None or found.trouble is not Bottleneck.VOLATILE or not _is_usual_volatility(found, threshold):
            return found
        if of_stages is not None:
            return staged.exclude_bottleneck(of_stages, Bottleneck.VOLATILE, threshold)
        return adapt.diagnose_bottleneck(windows, threshold, known, suppressed=(Bottleneck.VOLATILE, *alone))
    return adapt.diagnose_broken_ranks(windows, observation.plan, threshold=slow, global_batch=observation.global_batch)


def _is_explained_by_profile(observation: Observation, found: Diagnosis) -> bool:
    """A behaviour window is to tell why all ranks' own work takes longer, or has told: their transfers say nothing."""
    profiling = observation.state.profiling
    told = bool(profiling.shown_in) and profiling.round == observation.round
    window = observation.plan.profile is not None or told
    return window and found.trouble is Bottleneck.COMMUNICATION and has_all_work_grown(observation)


def has_all_work_grown(observation: Observation) -> bool:
    """Own work takes longer than in the job's first steady steps, on most ranks: that makes transfers late, too."""
    windows = [window for answer in observation.evidence for window in answer.windows if window.steps]
    known = [w for w in windows if w.baseline_own_seconds > 0]
    grown = [float(np.median(window.compute_seconds)) / window.baseline_own_seconds for window in known]
    return bool(grown) and float(np.median(grown)) >= observation.job.spec.detection.straggler_slowdown


def _is_usual_volatility(found: Diagnosis, threshold: float) -> bool:
    """Ranks that are slow in turns are the job's own way since its first steady steps, or where it is by little and
    steps are not much longer than those."""
    first, now = found.window.baseline_seconds, float(np.median(found.window.step_seconds))
    little = found.slowdown < VOLATILE_SLOWDOWN and now < VOLATILE_SLOWDOWN * first
    return little or not now >= threshold * first > 0


def _is_already_optimal(observation: Observation, found: Diagnosis) -> bool:
    """Lengths and garbage that are planned, and cannot be planned better, are left alone."""
    plan = observation.plan
    planned = {Bottleneck.LENGTHS: plan.sequence_cost is not None, Bottleneck.GARBAGE: plan.garbage_every > 0}
    return planned.get(found.trouble, False) and all(way.refused for way in _list_strategies(observation, found))


def update_investigation(observation: Observation, policy: Policy) -> DesiredState:
    """Ask for evidence while the metrics look like trouble, and drop it when they no longer do."""
    if observation.state.life.is_over:
        return observation.desired
    observation = observation.with_desired(_reset_suppression(observation, policy))
    draft, suspicion, now = observation.desired, observation.state.adaptation.suspicion, observation.now
    if observation.plan.stop is not Stop.NO:
        return draft if suspicion is None else draft.with_adaptation(suspicion=None)
    if observation.plan.sync_mode is not EXACT_SYNC_MODE:
        return _investigate_broken(observation, policy)
    if not is_steady(observation):
        asking = bool(observation.plan.evidence_request)
        return _drop_investigation(draft) if asking or suspicion is not None else draft
    slow = _has_slow_rank(observation)
    waits = (_has_long_waits(observation) or _has_outdated_shares(observation)) and not _is_negatively_cached(observation)
    if suspicion is None:
        looked_into = _is_suppressed(observation) and not _is_spare_due(observation, policy)
        wanted = (slow and not looked_into) or waits
        return _request_evidence(observation, _begin_investigation(observation)) if wanted else draft
    grown = observation.step_seconds > suspicion.step_seconds * observation.job.spec.detection.straggler_slowdown
    if grown and (not slow or now - suspicion.since > WAITING_INVESTIGATION_SECONDS):  # another trouble, now
        suspicion = replace(suspicion, since=now, step=observation.step, step_seconds=observation.step_seconds)
    elif waits and not slow and _is_fruitless(observation, suspicion) and not _has_bottleneck(observation, policy):
        return _cache_negative_result(observation, suspicion.step_seconds)
    recovering = _has_recovered(observation, suspicion.asked_pace)
    if now - suspicion.asked_at <= (MIN_EVIDENCE_REQUEST_SECONDS if recovering else compute_evidence_pause(now - suspicion.since)):
        return draft
    if not slow and not waits:
        return _drop_investigation(draft)
    awaited = bool(observation.plan.evidence_request) and len(observation.evidence) < len(observation.plan.members)
    if awaited and now - suspicion.asked_at <= EVIDENCE_ANSWER_SECONDS:
        return draft
    found = None if recovering else _diagnose_actionable(observation, policy)  # what was answered is over
    if found is not None:
        shown = Bottleneck.NONE if _is_already_optimal(observation, found) else found.trouble
        if shown is suspicion.shown is Bottleneck.NONE and observation.step == suspicion.asked_step:
            return draft  # of the same steps the ranks would say the same
        clear_at = now if shown is Bottleneck.NONE else suspicion.clear_at
        suspicion = replace(suspicion, shown=shown, clear_at=clear_at)
        draft = _account_loss(observation.with_desired(draft), found)
        settled = _shares_fit(observation, found) or _is_beyond_remedy(observation, policy, found)
        if slow and settled and not _is_spare_due(observation.with_desired(draft), policy):
            return _suppress_current_times(_cache_negative_result(observation.with_desired(draft), observation.step_seconds), observation)
    return _request_evidence(observation.with_desired(draft), suspicion)


def _begin_investigation(observation: Observation) -> StragglerInvestigation:
    return StragglerInvestigation(since=observation.now, step=observation.step, step_seconds=observation.step_seconds)


def _reset_suppression(observation: Observation, policy: Policy) -> DesiredState:
    """What was let be is looked at anew once a remedy may be applied, or once no rank is slow any more."""
    draft, vain = observation.desired, observation.state.adaptation.vain
    if vain is not None and vain.forbidden and policy.applies_remedies:
        return draft.with_adaptation(vain=None, tolerated_pace=0.0, tolerated_behind=0.0)
    if vain is not None and _is_slowness_over(observation, vain):
        draft = draft.with_adaptation(vain=replace(vain, step_seconds=observation.step_seconds))
    adaptation = draft.state.adaptation
    settled = _are_ranks_alike(observation) and is_steady(observation) and not observation.metrics.unsettled
    if (adaptation.tolerated_pace or adaptation.loss is not None) and settled:
        if _has_outdated_shares(observation):
            draft = draft.with_adaptation(vain=None)
        return draft.with_adaptation(tolerated_pace=0.0, tolerated_behind=0.0, loss=None)
    return draft


def _is_slowness_over(observation: Observation, vain: FruitlessInvestigation) -> bool:
    """Nobody waits, and steps are faster than as they were looked into: what makes them as long again is news."""
    faster = 0 < observation.step_seconds * observation.job.spec.detection.straggler_slowdown <= vain.step_seconds
    return faster and observation.metrics.waiting is not None and not _has_long_waits(observation) and is_steady(observation)


def _account_loss(observation: Observation, found: Diagnosis) -> DesiredState:
    """With what slow ranks have cost until now, and cost from now on. One that is as slow as ever, and not named since
    it has fewer samples, costs what it was to cost with these: by few steps that is less, or more, by luck."""
    draft, adaptation = observation.desired, observation.state.adaptation
    if not found.culprits and (adaptation.loss is None or observation.has_straggler):
        return draft
    slowdown = found.effects[Bottleneck.COMPUTE] if found.culprits else 1.0
    return draft.with_adaptation(loss=adaptation.accumulate_loss(observation.now, slowdown, _find_first_sign(observation, found)))


def _find_first_sign(observation: Observation, found: Diagnosis) -> float:
    """The first sign of the trouble that the answers show: of the metrics, or before that the steps that they tell of.
    In a Local-SGD mode these are drawn."""
    suspicion = observation.state.adaptation.suspicion
    assert suspicion is not None
    if observation.plan.sync_mode is not EXACT_SYNC_MODE:
        return suspicion.first_sign
    lasted = float(np.median(found.window.step_seconds, axis=1).sum())
    since = min(suspicion.first_sign, suspicion.asked_at - lasted)
    lasting, slow = observation.metrics.lasting, found.trouble in {Bottleneck.NONE, Bottleneck.COMPUTE} and found.culprits
    return min(since, lasting.since) if lasting is not None and slow and {*slow} <= {*lasting.relative_times.of_rank} else since


def _investigate_broken(observation: Observation, policy: Policy) -> DesiredState:
    """In a Local-SGD mode, where the way back asks the ranks now and then: since when has one been broken, or cost as
    much as a spare?"""
    draft, suspicion, pace = observation.desired, observation.state.adaptation.suspicion, observation.metrics.pace
    is_broken = pace is not None and pace >= SPARE_FIRST_SLOWDOWN
    if not (is_broken or _is_spare_due(observation, policy)) or not is_steady(observation):
        return draft if suspicion is None else draft.with_adaptation(suspicion=None)
    if suspicion is not None:
        return draft
    return draft.with_adaptation(suspicion=_begin_investigation(observation))


def compute_evidence_pause(elapsed: float) -> float:
    """A tenth of the time that it has gone on for, within limits: windows move on, and so does what they show."""
    return min(max(MIN_EVIDENCE_REQUEST_SECONDS, 0.1 * elapsed), MAX_EVIDENCE_REQUEST_SECONDS)


def is_steady(observation: Observation) -> bool:
    """All members train in the mode that is wanted, and tell how, in a round that is old enough for its windows."""
    if observation.training_since is None or observation.metrics.untold:
        return False
    if observation.sync_modes - {"", observation.plan.sync_mode}:
        return False
    busy = any(incident.recovered is None and not incident.live for incident in observation.state.incidents.open)
    return not busy and observation.steps_in_round >= get_window_steps(observation)


def get_window_steps(observation: Observation) -> int:
    """That are judged together, and that the metrics are of."""
    return count_window_steps(observation.job.spec.detection.window_steps, observation.step_seconds)


def _has_slow_rank(observation: Observation) -> bool:
    """Some rank's own work takes longer than its peers', by much or for long."""
    return observation.has_straggler or (observation.metrics.pace is not None and _get_lasting_slowness(observation) is not None)


def _get_lasting_slowness(observation: Observation) -> PersistentSlowness | None:
    """Ranks that are a little slower than their peers, window after window. In a script that is only watched they may
    differ by nature."""
    return observation.metrics.lasting if is_managed(observation) else None


def _are_ranks_alike(observation: Observation) -> bool:
    """No rank's does, as far as is known."""
    return observation.metrics.pace is not None and not _has_slow_rank(observation)


def _has_long_waits(observation: Observation) -> bool:
    """Even the rank that waits least waits for a good part of each step: for a link, or for slow ranks that change."""
    waiting, looked_into = observation.metrics.waiting, observation.state.adaptation.suspicion is not None
    return waiting is not None and waiting >= MIN_WAITING_SHARE * (WAITING_HYSTERESIS if looked_into else 1.0)


def _has_outdated_shares(observation: Observation) -> bool:
    """The ranks are alike, but their shares are not: the straggler for whom they were made has recovered."""
    shares = observation.plan.shares
    return _are_ranks_alike(observation) and shares is not None and max(shares) - min(shares) > 1


def _is_suppressed(observation: Observation) -> bool:
    """This pace of the slowest rank has been dealt with: mended by the present shares, or recommended upon.

    It may hide another rank that has become slow since, which shows in the own work of a step. Shares that were made
    for a slower rank may not fit one that has recovered in part.
    """
    adaptation, pace, behind = observation.state.adaptation, observation.metrics.pace, observation.metrics.behind
    if not adaptation.tolerated_pace or pace is None or pace >= adaptation.tolerated_pace * 1.1:
        return False
    if _is_remedy_measured(observation):
        return True
    if observation.plan.shares is not None and pace <= adaptation.tolerated_pace / 1.1:
        return False
    worst = max(adaptation.tolerated_behind, observation.job.spec.detection.straggler_slowdown) * 1.1
    return behind is None or behind < worst


def _is_remedy_measured(observation: Observation) -> bool:
    """A live remedy has been applied, and the metrics are in part of the time before it."""
    return any(i.live and i.class_ is IncidentClass.PERFORMANCE for i in observation.state.incidents.open)


def _shares_fit(observation: Observation, found: Diagnosis) -> bool:
    """The present shares have mended most of what a slow rank costs, and no others would win anything."""
    exact = [way for way in _list_strategies(observation, found) if way.mode is EXACT_SYNC_MODE]
    if observation.plan.shares is None or _is_remedy_measured(observation) or not all(way.refused for way in exact):
        return False
    if found.trouble is Bottleneck.NONE:
        return True
    return bool(adapt.explain_exact_preference(found, exact)) and max(found.rank_slowdown) < SPARE_FIRST_SLOWDOWN


def _is_beyond_remedy(observation: Observation, policy: Policy, found: Diagnosis) -> bool:
    """What is slow is so by little, and nothing that may be done would win anything. Of a node's ranks some are known
    before the others, whom all would wait for without them."""
    lasting = _get_lasting_slowness(observation)
    if lasting is None or observation.has_straggler or found.trouble is not Bottleneck.NONE:
        return False
    if observation.now - lasting.since < LASTING_SLOWNESS_WINDOWS * get_window_steps(observation) * observation.step_seconds:
        return False
    if not price.is_worth_change(found.effects[Bottleneck.COMPUTE], 1.0, price.MIN_LASTING_WIN):  # by one answer, more may be luck
        return True
    spare = _build_spare_option(observation, policy, observation.metrics.slowest_rank)
    return bool(spare.refused) and all(way.refused for way in _list_strategies(observation, found))


def _shares_misfit(observation: Observation, found: Diagnosis) -> bool:
    """The straggler for whom they were made has recovered, and others would win something."""
    return _has_outdated_shares(observation) and any(not way.refused for way in _list_strategies(observation, found))


def _is_negatively_cached(observation: Observation) -> bool:
    """Waits have been looked into, and steps have not become longer since; nor had they when the look that is under way
    began: it ends as the last one did, or what is longer by luck would be news each time."""
    vain, suspicion = observation.state.adaptation.vain, observation.state.adaptation.suspicion
    if vain is None or observation.now - vain.at > vain.hold:
        return False
    longest = max(observation.step_seconds, 0.0 if suspicion is None else suspicion.step_seconds)
    return longest < vain.step_seconds * (1.0 + SIGNIFICANT_GROWTH_SHARE * (observation.job.spec.detection.straggler_slowdown - 1.0))


def _is_fruitless(observation: Observation, suspicion: StragglerInvestigation) -> bool:
    """A whole window of steps has been done since the first sign, and shows no trouble. While the job evaluates, or
    writes a checkpoint, none are."""
    done = observation.step - suspicion.step >= get_window_steps(observation)
    quiet = suspicion.shown in (None, Bottleneck.NONE)
    return quiet and done and observation.now - suspicion.since > WAITING_INVESTIGATION_SECONDS


def _has_bottleneck(observation: Observation, policy: Policy) -> bool:
    """The answers at hand show trouble, which those before them did not."""
    found = _diagnose_actionable(observation, policy)
    return found is not None and found.trouble is not Bottleneck.NONE and not _is_already_optimal(observation, found)


def suppress_bottleneck(observation: Observation, *, forbidden: bool) -> DesiredState:
    """After trouble was written down without a remedy being applied: it is not looked into at once again.

    forbidden: a remedy was only recommended, because none may be applied now.
    """
    return _suppress_current_times(_cache_negative_result(observation, observation.step_seconds, forbidden), observation)


def _suppress_current_times(draft: DesiredState, observation: Observation) -> DesiredState:
    """The ranks' pace as it is now is looked into only once it changes."""
    metrics = observation.metrics
    return draft.with_adaptation(tolerated_pace=metrics.pace or 0.0, tolerated_behind=metrics.behind or 0.0)


def _cache_negative_result(observation: Observation, step_seconds: float, forbidden: bool = False) -> DesiredState:
    """`step_seconds`: that were looked into; longer ones are news."""
    before = observation.state.adaptation.vain
    hold = FIRST_NEGATIVE_CACHE_SECONDS if before is None else min(2 * before.hold, MAX_NEGATIVE_CACHE_SECONDS)
    return _drop_investigation(observation.desired).with_adaptation(vain=FruitlessInvestigation(observation.now, hold, step_seconds, forbidden))


def _request_evidence(observation: Observation, suspicion: StragglerInvestigation) -> DesiredState:
    draft, now = observation.desired, observation.now
    request = f"straggler-{draft.plan.version + 1}"
    slow_links = suspicion.shown is Bottleneck.COMMUNICATION or links.needs_pair_throughput(draft, now)
    most = waits.SECOND_REQUEST_MAX_RANKS if suspicion.request else waits.FIRST_REQUEST_MAX_RANKS
    collectives = draft.plan.world_size <= most
    asked = {EvidencePart.WINDOWS: True, EvidencePart.OPERATIONS: collectives, EvidencePart.LINKS: slow_links}
    parts = tuple(part for part, wanted in asked.items() if wanted)
    return draft.with_plan(evidence_request=request, evidence_parts=parts).with_adaptation(
        suspicion=replace(
            suspicion,
            request=request,
            asked_at=now,
            asked_step=observation.step,
            asked_pace=observation.metrics.pace or 0.0,
        )
    )


def _drop_investigation(draft: DesiredState) -> DesiredState:
    changed = draft.with_adaptation(suspicion=None)
    return changed.with_plan(evidence_request="") if draft.plan.evidence_request else changed


def _decide_remedy(observation: Observation, policy: Policy, found: Diagnosis) -> Decision | None:
    assert observation.state.adaptation.suspicion is not None
    culprit = _find_culprit(found)
    worker = None if culprit is None else observation.find_worker_of_rank(culprit)
    view = None if worker is None else observation.find_worker(worker)
    if culprit is not None and (view is None or view.record.leaving or not _is_holding_up_peers(observation, found, culprit)):
        return None
    subject = IncidentKey(BOTTLENECK_TO_CAUSE[found.trouble], observation.round, rank=-1 if culprit is None else culprit)
    choice, action = _weigh_remedies(observation, policy, found, culprit)
    chosen = choice.chosen
    if other_ways.is_reroute_awaited(observation, choice):
        return None
    unsure = found.trouble is not observation.state.adaptation.suspicion.shown or _is_mode_in_cool_down(observation)
    if chosen is None and (found.trouble is Bottleneck.COMPUTE or unsure or get_last_incident_number(observation, subject)):
        return None  # a dear remedy waits for the loss to be worth it, a mode for its time; the rest is known
    finding = _build_finding(observation, found, culprit)
    if chosen is None and not finding.culprit and (found.slowdown < VOLATILE_SLOWDOWN or _is_bottleneck_recent(observation, found)):
        return None  # nobody is named (yet), nothing can be done, and networks that others use are like that
    return Decision(
        incident_key=replace(subject, number=1 + get_last_incident_number(observation, subject)),
        class_=IncidentClass.PERFORMANCE,
        message=_build_message(found, culprit, worker),
        first_sign=_find_first_sign(observation, found),
        actions=() if action is None else (action,),
        remedy=None if chosen is None else Remedy(chosen.option.remedy),
        remedies=build_remedy_prices(choice.prices, chosen),
        evidence=(*found.evidence, *gpu_warning.describe_gpu_signs(observation, view)),
        rank=culprit,
        worker=worker,
        node=None if view is None else view.record.node or None,
        continued_incident=_find_open_incident(observation, subject.cause, culprit),
        live=not isinstance(action, ReplaceWorker | PlanTraffic),
        last_step=observation.step,
        slowdown_before=found.slowdown,
        slowdown_after=None if chosen is None else chosen.option.slowdown_after,
        reference_seconds=found.step_seconds / found.slowdown,
        predicted_gain=chosen.gain_seconds if chosen is not None and math.isfinite(chosen.gain_seconds) else None,
        finding=finding,
    )


def _find_culprit(found: Diagnosis) -> int | None:
    """The slowest rank, where slow ranks are what it is."""
    ranks = found.culprits if found.trouble is Bottleneck.COMPUTE else ()
    return max(ranks, key=lambda rank: found.rank_slowdown[rank], default=None)


def _is_bottleneck_recent(observation: Observation, found: Diagnosis) -> bool:
    """The trouble, for the windows of connections that may still name its place."""
    seen = observation.state.adaptation.link
    return seen is not None and seen.known and observation.now - _find_first_sign(observation, found) < BOTTLENECK_NAMING_SECONDS


def _is_holding_up_peers(observation: Observation, found: Diagnosis, culprit: int) -> bool:
    return found.trouble is not Bottleneck.COMPUTE or waits.is_holding_up_peers(observation, found, culprit)


def _build_finding(observation: Observation, found: Diagnosis, culprit: int | None) -> Finding:
    of_links = links.build_communication_finding(observation, found)
    if of_links is None:
        of_work = waits.build_wait_finding(observation, found, culprit)
        function = _find_slow_function(observation, culprit)
        return of_work if function is None else merge_findings(of_work, function)
    of_groups = waits.find_slow_groups(observation)
    return of_links if of_groups is None else merge_findings(of_groups, of_links)


def _find_slow_function(observation: Observation, culprit: int | None) -> Finding | None:
    """What a behaviour window of this round has shown of this rank."""
    done, profiling = observation.localized_profile, observation.state.profiling
    if done is None or done.window != profiling.shown or profiling.round != observation.round:
        return None
    return next((each.finding for each in done.localization.explanations if culprit in each.ranks), None)


def _weigh_remedies(
    observation: Observation, policy: Policy, found: Diagnosis, culprit: int | None
) -> tuple[Choice, Action | None]:
    """All remedies with their prices, and what the chosen one does: the ways to train, a spare for a culprit, for slow
    communication other ways through the fabric."""
    adaptation, threshold = observation.state.adaptation, observation.job.spec.detection.straggler_slowdown
    since = _find_first_sign(observation, found)
    past = observation.cluster_view.past_durations.get(BOTTLENECK_TO_CAUSE[found.trouble], ())
    broken = culprit is not None and found.rank_slowdown[culprit] >= SPARE_FIRST_SLOWDOWN
    choose = partial(
        price.choose_remedy,
        slowdown=found.slowdown,
        lost_seconds=adaptation.accumulate_loss(observation.now, found.slowdown, since).seconds,
        remaining_seconds=price.estimate_remaining_seconds(
            observation.now - since, past, BOTTLENECK_PRIOR_SECONDS.get(found.trouble, DEFAULT_PRIOR_SECONDS)
        ),
        mended=threshold,
        bearable=threshold if broken else math.inf,
    )
    ways = _list_permitted_strategies(observation, policy, found)
    exact = adapt.explain_exact_preference(found, ways)
    options = [way.to_option(exact if way.mode is not EXACT_SYNC_MODE else "") for way in ways]
    best = choose(options).chosen
    after = found.slowdown if best is None else best.option.slowdown_after
    mended = (best is not None or bool(exact)) and (not broken or after < threshold)
    actions: list[Action] = [Adapt(way, found.trouble, mended) for way in ways]
    if culprit is not None and found.trouble is Bottleneck.COMPUTE:
        spare = _build_spare_option(observation, policy, culprit, found.rank_slowdown[culprit])
        options.append(replace(spare, slowdown_after=_compute_slowdown_without(observation, found, culprit)))
        words = f"rank {culprit} has cost as much as a spare does"
        actions.append(ReplaceWorker(observation.find_worker_of_rank(culprit) or "", words, dead=False))
    around = other_ways.build_alternative_option(observation, policy, found.slowdown)
    if around is not None and found.trouble is Bottleneck.COMMUNICATION:
        options.append(around)
        actions.append(PlanTraffic(rates=links.measure_pair_rates(observation)))
    open_ = observation.state.incidents.open
    measured = {i.remedy for i in open_ if i.live and i.class_ is IncidentClass.PERFORMANCE}
    choice = choose([_refuse_repetition(option) if option.remedy in measured else option for option in options])
    return choice, None if choice.chosen is None else actions[choice.prices.index(choice.chosen)]


def _compute_slowdown_without(observation: Observation, found: Diagnosis, culprit: int) -> float:
    """What is left of the slowdown without the culprit's worker: others may be as slow."""
    worker = observation.find_worker_of_rank(culprit)
    member = next((member for member in observation.plan.members if member.worker == worker), None)
    others = set(found.culprits) - set(() if member is None else member.ranks)
    return adapt.estimate_remaining_slowdown(found, others, observation.job.spec.detection.straggler_slowdown) if others else 1.0


def _refuse_repetition(option: Option) -> Option:
    """The same does not come again while it is measured, and keeps nothing else off."""
    return replace(option, refused=option.refused or "it has been done, and is still measured")


def _build_spare_option(observation: Observation, policy: Policy, rank: int | None, answered: float = 1.0) -> Option:
    """For a slow rank; None: not known which. answered: how many times its peers' time it takes by its last answer."""
    if _are_ranks_alike(observation) or _has_recovered(observation, answered):
        refused = "no rank is so slow any more"
    else:
        refused = _explain_stay(observation, policy, rank)
    # What is left of a rank that is slow for sure may be little; of one that is a little slow, it may be luck.
    least = price.MIN_LASTING_WIN if observation.has_straggler else price.MIN_REMEDY_WIN
    option = build_replace_option(observation, policy, refused=refused)
    return replace(option, cost_seconds=estimate_exchange_seconds(observation), least_win=least)


def _has_recovered(observation: Observation, answered: float) -> bool:
    """Whether the slowest rank has lost RECOVERED of its slowness since it was asked, when it took `answered` times its
    peers' time. The figures are of now, but means over a window: before that part of one is done they cannot have
    fallen so far, and of a rank that has just become slow they are still rising."""
    pace, suspicion = observation.metrics.pace, observation.state.adaptation.suspicion
    since = get_window_steps(observation) if suspicion is None else observation.step - suspicion.asked_step
    is_told = since >= RECOVERED_SHARE * get_window_steps(observation)
    return is_told and pace is not None and pace - 1.0 < RECOVERED_SHARE * (answered - 1.0)


def _is_spare_due(observation: Observation, policy: Policy) -> bool:
    """Slow ranks, mended in part or not at all, have cost as much by now as a spare that could be taken. What was done
    before is measured first."""
    loss = observation.state.adaptation.loss
    if loss is None or not policy.applies_remedies or _is_remedy_measured(observation):
        return False
    spare = _build_spare_option(observation, policy, observation.metrics.slowest_rank)
    is_worth_it = price.is_worth_change(loss.slowdown, 1.0, spare.least_win) and loss.compute_seconds(observation.now) >= spare.cost_seconds
    return is_worth_it and not spare.refused


def _explain_stay(observation: Observation, policy: Policy, rank: int | None) -> str:
    """Why this rank gets no other worker (any more); "": it may."""
    since, here = observation.now - policy.restart_window, None if rank is None else observation.find_worker_of_rank(rank)
    if observation.is_budget_spent(policy):
        return "no restart is left in this window"
    slow_on = {
        past.worker
        for past in observation.state.incidents.past
        if past.cause is IncidentCause.STRAGGLER and past.rank == rank and past.at > since
    }
    others = sorted(worker for worker in slow_on if worker is not None and worker != here)
    return f"it was slow on {', '.join(others)}, too: look at the script" if len(others) >= MIN_SLOW_WORKERS else ""


def _list_strategies(observation: Observation, found: Diagnosis) -> tuple[Strategy, ...]:
    """From mode Sync on; out of a Local-SGD mode there is the way back alone."""
    if observation.plan.sync_mode is not EXACT_SYNC_MODE:
        return ()
    threshold = observation.job.spec.detection.straggler_slowdown
    plan = observation.plan
    return adapt.propose_strategies(found, threshold=threshold, sequence_cost=plan.sequence_cost, garbage_every=plan.garbage_every)


def _list_permitted_strategies(observation: Observation, policy: Policy, found: Diagnosis) -> list[Strategy]:
    """The same, refused as well where this job may not train in that way."""
    return [
        replace(way, refused=way.refused or _explain_refusal(observation, policy, found, way))
        for way in _list_strategies(observation, found)
    ]


def _explain_refusal(observation: Observation, policy: Policy, found: Diagnosis, strategy: Strategy) -> str:
    """Why this job may not train in that way (now); "": it may."""
    assert observation.state.adaptation.suspicion is not None
    if refusal := policy.find_refusal(Remedy(strategy.remedy)):
        return refusal
    if strategy.mode is not EXACT_SYNC_MODE and observation.job.spec.sync_mode is not RequestedSyncMode.AUTO:
        return f"spec.syncMode is {observation.job.spec.sync_mode}"
    if not is_managed(observation):
        return "the script does not use the library, so it cannot be steered"
    if strategy.remedy == Remedy.REBALANCE and observation.state.adaptation.shares_refusal:
        return f"the ranks refused it: {observation.state.adaptation.shares_refusal}"
    if strategy.mode is EXACT_SYNC_MODE:
        return _explain_deferral(observation, policy, found, strategy)
    if found.trouble is not observation.state.adaptation.suspicion.shown:
        return "the next steps have to show the same first"
    if any(view.heartbeat is not None and not view.heartbeat.sync_mode for view in observation.members):
        return "the ranks do not tell the mode that they train in: is their library older than the operator?"
    if observation.state.adaptation.mode_refusal:
        return f"the ranks refused it: {observation.state.adaptation.mode_refusal}"
    if _is_mode_in_cool_down(observation):
        last = observation.state.adaptation.mode_changes
        seconds = last.changed_at + last.hold_seconds - observation.now
        return f"the mode has changed lately and stays for another {seconds:.0f} s"
    return ""


def _explain_deferral(observation: Observation, policy: Policy, found: Diagnosis, strategy: Strategy) -> str:
    """Shares that mend a little of little leave less than a spare is taken for, for as long as it lasts."""
    culprit = _find_culprit(found)
    if culprit is None or strategy.remedy != Remedy.REBALANCE or price.is_worth_change(found.slowdown, strategy.slowdown_after):
        return ""
    is_better = _compute_slowdown_without(observation, found, culprit) < strategy.slowdown_after
    if not is_better or _build_spare_option(observation, policy, culprit).refused:
        return ""
    return "it wins so little that a spare is the better remedy, once it is due"


def is_managed(observation: Observation) -> bool:
    """Whether the script uses the library, as far as is heard, and so trains as the plan says."""
    return all(view.heartbeat is None or view.heartbeat.steered for view in observation.members)


def _is_mode_in_cool_down(observation: Observation) -> bool:
    return not observation.state.adaptation.mode_changes.allows(observation.now)


def _build_message(found: Diagnosis, culprit: int | None, worker: str | None) -> str:
    if culprit is not None and found.trouble is Bottleneck.COMPUTE:
        return f"rank {culprit} on {worker} takes {found.rank_slowdown[culprit]:.2f} × its peers' time a sample"
    words = {
        Bottleneck.COMPUTE: "the shares of the batch do not fit the ranks",
        Bottleneck.COMMUNICATION: "communication takes longer than in the job's first steady steps",
        Bottleneck.VOLATILE: "slow ranks come and go, and all wait for each of them",
        Bottleneck.GARBAGE: "garbage collections of different ranks fall into different steps, and all wait for each",
        Bottleneck.LENGTHS: "sequence lengths are dealt unevenly over the ranks",
    }
    return f"steps take {found.slowdown:.2f} × as long as they need: {words[found.trouble]}"


def _find_open_incident(observation: Observation, cause: IncidentCause, rank: int | None) -> str:
    """Name of the incident of this trouble that is still open: what was done has not mended it."""
    names = (i.name for i in observation.state.incidents.open if i.cause is cause and i.rank == rank)
    return next(names, "")


def get_last_incident_number(observation: Observation, subject: IncidentKey) -> int:
    """The highest number of an incident of this trouble in this round: shares first, a spare later."""
    names = observation.state.incidents.list_names()
    return max((subject.find_occurrence(name, observation.job) for name in names), default=0)
