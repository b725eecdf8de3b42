"""A rank that persistently holds the others back: batch shares first, a spare where shares mend too little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pacekeeper_analysis import price, shares
from pacekeeper_analysis.diagnose import straggler
from pacekeeper_analysis.diagnose.straggler import StragglerVerdict, Window
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.price import Option
from pacekeeper_analysis.shares import Balance

from ..api import Cause, Class, Remedy
from ..decision import Action, Decision, Rebalance, ReplaceWorker
from ..observation import Observation, Policy
from ..state import Draft, Suspicion
from .pricing import SPARE_SECONDS, replace_option, written

BROKEN = 3.0
"""A rank so many times slower than its peers is broken rather than slow: shares tide the job over, a spare mends it."""
ASK_AGAIN_SECONDS = 5.0
"""Between two requests for evidence: windows move on, and the loss that a dear remedy waits for grows."""
PRIOR_SECONDS = 600.0
"""Mean duration of a compute fault, before this cluster has a history (Greyhound, ATC'25)."""


def check(observation: Observation, policy: Policy) -> Decision | None:
    found = judge(observation)
    return None if found is None or not found.verdict.culprits else _decide(observation, policy, found)


@dataclass(frozen=True)
class Finding:
    """The windows of all ranks, and what they say. `verdict` is of equal shares: no change of shares hides anybody."""

    window: Window
    verdict: StragglerVerdict
    seconds_now: float  # expected step time of own work, with the present shares
    seconds_replaced: float  # the same, were the culprits as fast as their peers

    @property
    def slowdown(self) -> float:
        """Against the pace of the culprits' peers, which is what replacing them can win."""
        return max(1.0, self.seconds_now / self.seconds_replaced)


def judge(observation: Observation) -> Finding | None:
    """What the evidence says; None: it is not complete."""
    windows = tuple(window for evidence in observation.evidence for window in evidence.windows)
    window = straggler.align(windows)
    if window is None or window.compute_seconds.shape[1] != observation.plan.world_size:
        return None
    cost = window.cost_per_sample
    mean_share = max(1.0, float(window.samples.mean()))
    alike = replace(window, compute_seconds=cost * mean_share, samples=np.full_like(window.samples, round(mean_share)))
    verdict = straggler.find(alike, observation.job.spec.detection.straggler_slowdown)
    peers = np.delete(cost, list(verdict.culprits), axis=1)
    pace = cost.copy()
    if peers.shape[1]:
        pace[:, list(verdict.culprits)] = np.median(peers, axis=1, keepdims=True)
    present = np.maximum(window.samples[-1], 1)
    return Finding(
        window,
        verdict,
        seconds_now=float((cost * present).max(axis=1).mean()),
        seconds_replaced=float((pace * mean_share).max(axis=1).mean()),
    )


def suspect(observation: Observation) -> Draft:
    """Ask for evidence while the metrics look like a straggler, and drop it when they no longer do."""
    draft, state = observation.draft, observation.state
    asking = bool(observation.plan.evidence_request)
    if not _steady(observation):
        return _drop(draft) if asking or state.suspicion is not None else draft
    slow = observation.metrics.pace is not None and (
        observation.metrics.pace >= observation.job.spec.detection.straggler_slowdown
    )
    if state.suspicion is None:
        if not slow or _tolerated(observation):
            return draft
        return _ask(draft, Suspicion(since=observation.now), observation.now)
    if not slow and observation.now - state.suspicion.asked_at > ASK_AGAIN_SECONDS:
        return _drop(draft)
    if observation.now - state.suspicion.asked_at > ASK_AGAIN_SECONDS:
        return _ask(draft, state.suspicion, observation.now)
    return draft


def _ask(draft: Draft, suspicion: Suspicion, now: float) -> Draft:
    request = f"straggler-{draft.plan.version + 1}"
    return draft.with_plan(evidence_request=request).with_state(
        suspicion=replace(suspicion, request=request, asked_at=now)
    )


def _drop(draft: Draft) -> Draft:
    changed = draft.with_state(suspicion=None)
    return changed.with_plan(evidence_request="") if draft.plan.evidence_request else changed


def _steady(observation: Observation) -> bool:
    """All members train, in a round that is old enough for its windows to be its own."""
    if observation.training_since is None or observation.metrics.unavailable:
        return False
    window = observation.job.spec.detection.window_steps
    steps = [view.heartbeat.steps_in_round for view in observation.members if view.heartbeat is not None]
    busy = any(incident.recovered is None and not incident.live for incident in observation.state.open_incidents)
    return not busy and min(steps, default=0) >= window


def _tolerated(observation: Observation) -> bool:
    """This pace of the slowest rank has been dealt with: mended by the present shares, or recommended upon."""
    limit, pace = observation.state.tolerated_pace, observation.metrics.pace
    return limit > 0 and pace is not None and pace < limit * 1.1


def _decide(observation: Observation, policy: Policy, found: Finding) -> Decision | None:
    assert observation.state.suspicion is not None
    culprit = max(found.verdict.culprits, key=lambda rank: found.verdict.rank_slowdown[rank])
    worker = observation.worker_of_rank(culprit)
    balance, refused = _balance(found)
    after = balance.seconds_after / found.seconds_replaced if balance else found.slowdown
    rebalance = Option(Remedy.REBALANCE, 0.0, max(1.0, after), policy.refusal(Remedy.REBALANCE) or refused)
    slow = found.verdict.rank_slowdown[culprit]
    mended = not rebalance.refused and (slow < BROKEN or after < observation.job.spec.detection.straggler_slowdown)
    move = replace_option(observation, policy, refused=f"shares mend it to {after:.2f} ×" if mended else "")
    move = replace(move, cost_seconds=observation.restart_seconds + SPARE_SECONDS)  # it waits for a checkpoint
    elapsed = observation.now - observation.state.suspicion.since
    lost = elapsed * price.loss_rate(found.slowdown)
    remaining = price.expected_remaining(elapsed, observation.surroundings.past_seconds, PRIOR_SECONDS)
    choice = price.choose((rebalance, move), found.slowdown, lost, remaining)
    view = None if worker is None else observation.worker(worker)
    if choice.chosen is None or worker is None or view is None or view.record.leaving:
        return None
    chosen = choice.chosen.option
    action: Action
    if chosen is rebalance and balance is not None:
        action = Rebalance(balance.shares, mended)
    else:
        action = ReplaceWorker(worker, f"rank {culprit} is too slow for shares to mend", dead=False, disruption=True)
    return Decision(
        cause=Cause.STRAGGLER,
        class_=Class.PERFORMANCE,
        round=observation.round,
        message=f"rank {culprit} on {worker} takes {slow:.2f} × its peers' time a sample",
        first_sign=observation.state.suspicion.since,
        actions=(action,),
        remedy=Remedy(chosen.remedy),
        remedies=written(choice.prices, choice.chosen),
        evidence=(
            f"S = {found.verdict.slowdown:.2f} over {len(found.window.steps)} steps; S_w by rank: "
            f"{_listed(found.verdict.rank_effect)}",
            f"time a sample over the peers', by rank: {_listed(found.verdict.rank_slowdown)}",
            f"the rank at its peers' pace: {found.verdict.gain_replaced:.2f} × faster",
        ),
        rank=culprit,
        worker=worker,
        node=view.record.node or None,
        occurrence=1 + _earlier(observation),
        continues=_open_incident(observation, culprit),
        live=chosen is rebalance,
        last_step=observation.step,
        slowdown_before=found.slowdown,
        slowdown_after=chosen.slowdown_after,
        predicted_gain=choice.chosen.gain_seconds if math.isfinite(choice.chosen.gain_seconds) else None,
    )


def _balance(found: Finding) -> tuple[Balance | None, str]:
    current = found.window.shares
    if min(current) < 1:
        return None, "the script does not use the library, so its shares cannot be changed"
    try:
        return shares.balance(found.window.cost_per_sample, current), ""
    except InputError as error:
        return None, str(error)


def _open_incident(observation: Observation, rank: int) -> str:
    """Name of the incident of this straggler that is still open: shares have not mended it."""
    names = (i.name for i in observation.state.open_incidents if i.cause is Cause.STRAGGLER and i.rank == rank)
    return next(names, "")


def _earlier(observation: Observation) -> int:
    """Incidents of this kind in this round that are known: shares first, a spare later."""
    prefix = f"{observation.job.name}-r{observation.round}-straggler"
    state = observation.state
    names = {*state.closed, *state.recommended, *(incident.name for incident in state.incidents)}
    return sum(name.startswith(prefix) for name in names)


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
