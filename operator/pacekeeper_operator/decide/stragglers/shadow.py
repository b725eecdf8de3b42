"""The estimator next to today's rules: it sees the same, and nothing follows what it proposes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from pacekeeper_analysis.estimator.estimator import JobLayout, StragglerEstimator
from pacekeeper_analysis.estimator.forecast import StepForecast
from pacekeeper_analysis.estimator.observations import MetricsWindow, StepWindow
from pacekeeper_analysis.estimator.parameters import PROBABLE
from pacekeeper_analysis.estimator.proposal import REPLACE_REMEDY, TrainingSetup, propose_strategies
from pacekeeper_analysis.protocol.plan import Stop, SyncMode
from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest
from pacekeeper_analysis.stragglers import strategies

from ...api.incident import IncidentCause
from ...api.training_job import Remedy, RequestedSyncMode
from ...state.desired_state import DesiredState
from ...state.observation import Observation
from ...state.policy import Policy
from ...state.straggler_estimate import EstimatedFault, EstimatorMemory, FaultEstimate, StragglerEstimate
from ..network import slow_communication
from . import straggler

REQUEST_KIND = "estimator"
REMEDIES = (
    strategies.REBALANCE_REMEDY,
    strategies.LOCAL_SGD_REMEDY,
    strategies.PLAN_GC_REMEDY,
    strategies.BALANCE_LENGTHS_REMEDY,
    REPLACE_REMEDY,
)


def advance_estimate(
    memory: EstimatorMemory | None, observation: Observation, policy: Policy, means: MetricsWindow | None
) -> EstimatorMemory | None:
    """Return the memory with what this pass observes. `means`: of the plan's ranks.

    None: they are not known, or of other shares than the plan's. Then nothing is weighed.
    """
    plan, progress, now = observation.plan, observation.progress, observation.now
    if plan.stop is not Stop.NO or progress.training_since is None or means is None:
        return memory
    memory = _follow_request(_follow_plan(memory, observation, policy, means), observation)
    estimator, estimate, position = memory.estimator, memory.estimate, memory.estimator.position
    answers = _collect_answers(observation, estimate)
    window = StepWindow.from_rank_windows(answers)
    if window is not None:
        # The next request is for later steps: the same ones would tell nothing new.
        estimator = estimator.observe_steps(window, now).request_steps(progress.step or 0)
    else:
        estimator = estimator.observe_metrics(means, progress.step or 0, now)
    wants_steps = estimator.wants_steps
    if window is not None or estimator.position != position or _may_propose(memory):
        result = propose_strategies(estimator, memory.setup, memory.account, fresh=window is not None)
        wants_steps = wants_steps or result.wants_steps
        memory = replace(memory, account=result.account)
        estimate = replace(
            estimate,
            faults=tuple(_describe_faults(estimator)),
            proposals=estimate.proposals if window is None and not result.proposals else result.proposals,
        )
    if answers or now - memory.request_since >= straggler.MAX_EVIDENCE_REQUEST_SECONDS:
        # Late answers may share no step with the others. Neither these nor missing ones may block further requests.
        estimate = replace(estimate, settled_request=observation.requests.evidence_name)
    estimate = replace(estimate, wants_steps=wants_steps and (progress.step or 0) > estimator.requested_step)
    return replace(memory, estimator=estimator, estimate=estimate)


def _may_propose(memory: EstimatorMemory) -> bool:
    """Return whether time alone may change what is proposed."""
    in_sync = memory.setup.mode is SyncMode.SYNC and memory.account.local is None
    return not in_sync or bool(memory.estimator.workers.slow.max() >= PROBABLE)


def update_estimator_request(observation: Observation, _policy: Policy) -> DesiredState:
    """Request the steps that the estimator lacks, and drop settled requests.

    The rules must not notice: nothing is requested where they weigh answers, or may want to ask.
    """
    desired, estimate, evidence = observation.desired, observation.estimate, observation.requests.evidence
    if evidence is not None:
        is_own = evidence.name.startswith(f"{REQUEST_KIND}-")
        settled = estimate is not None and estimate.settled_request == evidence.name
        return desired.with_requests(evidence=None) if is_own and settled else desired
    if estimate is None or not estimate.wants_steps or _may_ask_themselves(observation):
        return desired
    name = desired.requests.build_next_name(REQUEST_KIND, observation.nonce)
    return desired.with_requests(
        evidence=EvidenceRequest(name, (EvidencePart.WINDOWS,)), issued=desired.requests.issued + 1
    )


def _may_ask_themselves(observation: Observation) -> bool:
    adaptation = observation.state.adaptation
    return (
        not straggler.is_steady(observation)
        or observation.plan.sync_mode is not SyncMode.SYNC
        or adaptation.investigation is not None
        or adaptation.route_trial is not None
        or slow_communication.needs_pair_throughput(observation.desired, observation.now)
    )


def list_disagreements(observation: Observation, decided: DesiredState) -> tuple[str, ...]:
    """Return the remedies that only the estimator proposes in this pass, or only the rules apply.

    `observation`: before the pass. Each is "<remedy> by the estimator" or "<remedy> by the rules".
    """
    if observation.estimate is None:
        return ()
    proposed = {proposal.remedy for proposal in observation.estimate.proposals}
    before, after = observation.plan, decided.plan
    changes = {
        strategies.REBALANCE_REMEDY: before.shares != after.shares and before.membership == after.membership,
        strategies.LOCAL_SGD_REMEDY: after.sync_mode not in {SyncMode.SYNC, before.sync_mode},
        strategies.SYNC_REMEDY: after.sync_mode is SyncMode.SYNC is not before.sync_mode,
        strategies.PLAN_GC_REMEDY: before.gc_every != after.gc_every,
        strategies.BALANCE_LENGTHS_REMEDY: before.sequence_cost != after.sequence_cost,
        REPLACE_REMEDY: any(
            incident.cause is IncidentCause.STRAGGLER
            and incident.remedy == Remedy.REPLACE_WORKER
            and incident.applied == observation.now
            for incident in decided.state.incidents.current
        ),
    }
    applied = {remedy for remedy, is_change in changes.items() if is_change}
    return (
        *(f"{remedy} by the estimator" for remedy in sorted(proposed - applied)),
        *(f"{remedy} by the rules" for remedy in sorted(applied - proposed)),
    )


def _follow_plan(
    memory: EstimatorMemory | None, observation: Observation, policy: Policy, means: MetricsWindow
) -> EstimatorMemory:
    """Return the memory for the plan as it is now: of this membership, round, and strategy."""
    plan, now = observation.plan, observation.now
    nproc = observation.job.spec.nproc_per_node
    workers = tuple(member.worker for member in plan.members for _ in member.ranks)[::nproc]
    setup = _describe_setup(observation, policy)
    managed = straggler.is_managed(observation)
    share = float(means.samples.mean()) if managed and means.samples.min() > 0 else 1.0
    layout = JobLayout(plan.world_size, nproc, share, managed)
    if memory is None or replace(memory.estimator.layout, equal_share=share) != layout:
        estimator = StragglerEstimator.create(layout, now)
        estimate = StragglerEstimate((), settled_request=observation.requests.evidence_name)
        return EstimatorMemory(
            plan.membership, observation.progress.round, workers, setup, estimator, estimate=estimate
        )
    estimator, account = memory.estimator, memory.account
    if layout != estimator.layout:
        estimator = replace(estimator, layout=layout)
    is_new_round = (memory.membership, memory.round) != (plan.membership, observation.progress.round)
    if is_new_round:
        replaced = [index for index, pair in enumerate(zip(workers, memory.workers, strict=True)) if len({*pair}) > 1]
        estimator = estimator.begin_round(replaced, now)
        lost = account.lost_seconds.copy()
        lost[[index for index in replaced if index < len(lost)]] = 0.0
        account = replace(account, lost_seconds=lost, counted_step=-1, healthy_step=-1)
    before = memory.setup
    if setup.mode is SyncMode.SYNC is not before.mode:
        estimator = estimator.return_to_sync()
    elif setup.shares != before.shares:
        equal = (round(share),) * layout.ranks
        estimator = estimator.probe_fixed_share(before.shares or equal, setup.shares or equal).forget_expectations()
    elif (setup.mode, setup.gc_every, setup.balanced) != (before.mode, before.gc_every, before.balanced):
        estimator = estimator.forget_expectations()
    estimate = memory.estimate if setup == before else replace(memory.estimate, proposals=())
    if is_new_round:  # some of its answers are from the round before
        estimate = replace(estimate, settled_request=observation.requests.evidence_name)
    return replace(
        memory,
        membership=plan.membership,
        round=observation.progress.round,
        workers=workers,
        setup=setup,
        estimator=estimator,
        account=account,
        estimate=estimate,
    )


def _describe_setup(observation: Observation, policy: Policy) -> TrainingSetup:
    plan, managed = observation.plan, straggler.is_managed(observation)
    permitted = {remedy for remedy in REMEDIES if not policy.find_refusal(Remedy(remedy))}
    if not managed:
        permitted &= {REPLACE_REMEDY}
    if observation.job.spec.sync_mode is not RequestedSyncMode.AUTO or observation.state.adaptation.mode_refusal:
        permitted -= {strategies.LOCAL_SGD_REMEDY}
    if observation.state.adaptation.local_sgd is not None:  # otherwise the job's spec wants its mode
        permitted |= {strategies.SYNC_REMEDY}
    if observation.state.adaptation.shares_refusal:
        permitted -= {strategies.REBALANCE_REMEDY}
    has_spare = any(view.warm for view in observation.spares) and not observation.is_budget_spent(policy)
    return TrainingSetup(
        mode=plan.sync_mode,
        shares=None if plan.shares is None else tuple(plan.shares),
        gc_every=plan.gc_every,
        balanced=plan.sequence_cost is not None,
        sync_seconds=plan.sync_seconds,
        sync_every=plan.sync_every,
        permitted=frozenset(permitted),
        replace_seconds=observation.restarts.estimate_exchange_seconds() if has_spare else None,
    )


def _follow_request(memory: EstimatorMemory, observation: Observation) -> EstimatorMemory:
    """Return the memory with the time at which the open evidence request was first seen."""
    name = observation.requests.evidence_name
    return memory if name == memory.request else replace(memory, request=name, request_since=observation.now)


def _collect_answers(observation: Observation, estimate: StragglerEstimate) -> tuple[RankWindow, ...]:
    """Return the answers of all ranks to the open evidence request if they are complete and new."""
    request = observation.requests.evidence
    if request is None or request.name == estimate.settled_request or not straggler.is_steady(observation):
        return ()
    windows = tuple(window for answer in observation.evidence for window in answer.windows)
    return windows if len(windows) >= observation.plan.world_size else ()


def _describe_faults(estimator: StragglerEstimator) -> Iterator[FaultEstimate]:
    workers, forecast = estimator.workers, StepForecast(estimator)
    worst = int(workers.slow.argmax())
    rank = worst * estimator.layout.ranks_per_worker + int(workers.slow_levels[worst].argmax())
    for fault, chain, group in (
        (EstimatedFault.SLOW_WORKER, workers, worst),
        (EstimatedFault.ROTATING_RANKS, estimator.rotation, 0),
        (EstimatedFault.SLOW_LINK, estimator.transfer, 0),
    ):
        is_worker, probability, job_slowdown = chain is workers, float(chain.slow[group]), None
        if estimator.knows_noise and probability > PROBABLE:
            job_slowdown = forecast.estimate_slowdown(worst if is_worker else None)
        slowdown, since = math.exp(float(chain.slow_levels[group].max())), float(chain.slow_onsets[group])
        yield FaultEstimate(fault, probability, slowdown, since, rank if is_worker else None, job_slowdown)
