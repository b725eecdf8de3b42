"""What is proposed for a synthetic job, and when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.estimator.observations import StepWindow
from pacekeeper_analysis.estimator.proposal import (
    REPLACE_REMEDY,
    Account,
    DecisionResult,
    Proposal,
    TrainingSetup,
    propose_strategies,
)
from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.stragglers.length_cost import SequenceCost
from pacekeeper_analysis.stragglers.shares import ShareLimits
from pacekeeper_analysis.stragglers.strategies import (
    BALANCE_LENGTHS_REMEDY,
    LOCAL_SGD_REMEDY,
    PLAN_GC_REMEDY,
    REBALANCE_REMEDY,
    SYNC_REMEDY,
    Bottleneck,
)

from .synthetic_job import STEP_SECONDS, SyntheticJob

ALL = frozenset(
    {REBALANCE_REMEDY, LOCAL_SGD_REMEDY, SYNC_REMEDY, PLAN_GC_REMEDY, BALANCE_LENGTHS_REMEDY, REPLACE_REMEDY}
)


class ProposingJob(SyntheticJob):
    """A job of which each window of steps is followed by proposals."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.setup, self.account = TrainingSetup(permitted=ALL), Account()

    def propose(self, window: StepWindow | None = None) -> DecisionResult:
        """Train for a window, and return what is proposed."""
        window = self.draw_steps(8) if window is None else window
        self.estimator = self.estimator.observe_steps(window, self.now)
        result = propose_strategies(self.estimator, self.setup, self.account, fresh=True)
        self.account = result.account
        return result

    def train_until_proposed(self, remedy: str, windows: int = 40) -> Proposal:
        for _ in range(windows):
            found = [proposal for proposal in self.propose().proposals if proposal.remedy == remedy]
            if found:
                return found[0]
        raise AssertionError(f"{remedy} was not proposed")

    def train_healthy(self) -> None:
        for _ in range(6):
            assert self.propose().proposals == ()


@pytest.fixture
def job() -> ProposingJob:
    job = ProposingJob(samples=32)
    job.train_healthy()
    return job


def test_shares_follow_a_slow_rank_and_become_equal_again(job: ProposingJob) -> None:
    job.slowdowns = {1: 1.5}
    proposal = job.train_until_proposed(REBALANCE_REMEDY, 2)
    assert (proposal.bottleneck, proposal.rank) == (Bottleneck.COMPUTE, 1)
    assert proposal.shares is not None
    assert sum(proposal.shares) == 128
    assert proposal.shares[1] == min(proposal.shares) == pytest.approx(24, abs=2)
    assert proposal.slowdown_before == pytest.approx(1.45, abs=0.08)
    assert proposal.slowdown_after == pytest.approx(1.1, abs=0.04)
    job.setup, job.shares = replace(job.setup, shares=proposal.shares), np.array(proposal.shares, dtype=float)
    for _ in range(3):
        assert REBALANCE_REMEDY not in {p.remedy for p in job.propose().proposals}, "they fit"
    job.slowdowns = {}
    assert job.train_until_proposed(REBALANCE_REMEDY, 4).shares == (32, 32, 32, 32)


def test_shares_stay_within_limits_and_granularity(job: ProposingJob) -> None:
    job.slowdowns, job.setup = {1: 3.0}, replace(job.setup, limits=ShareLimits(minimum=16, maximum=40))
    proposal = job.train_until_proposed(REBALANCE_REMEDY, 2)
    assert proposal.shares is not None
    assert min(proposal.shares) == 16
    assert max(proposal.shares) <= 40
    coarse = ProposingJob(samples=32)
    for _ in range(6):
        coarse.propose(replace(coarse.draw_steps(8), granularity=8))
    coarse.slowdowns = {1: 1.5}
    found = [p for _ in range(3) for p in coarse.propose(replace(coarse.draw_steps(8), granularity=8)).proposals]
    assert found[0].shares is not None
    assert all(share % 8 == 0 for share in found[0].shares)


@pytest.mark.parametrize("remedy", [REBALANCE_REMEDY, REPLACE_REMEDY])
def test_what_is_refused_is_not_proposed(job: ProposingJob, remedy: str) -> None:
    job.slowdowns = {1: 1.5}
    job.setup = replace(job.setup, permitted=ALL - {remedy}, replace_seconds=1.0)
    proposed = {proposal.remedy for _ in range(10) for proposal in job.propose().proposals}
    assert remedy not in proposed
    assert proposed


def test_a_monitored_script_gets_a_spare_but_no_shares() -> None:
    job = ProposingJob(managed=False)
    job.train_healthy()
    job.slowdowns, job.setup = {1: 1.5}, replace(job.setup, replace_seconds=5.0)
    proposed = [proposal for _ in range(10) for proposal in job.propose().proposals]
    assert {proposal.remedy for proposal in proposed} == {REPLACE_REMEDY}


@pytest.mark.parametrize("price", [3.0, 10.0, 30.0])
def test_a_worker_is_replaced_once_it_has_cost_as_much_as_a_spare(job: ProposingJob, price: float) -> None:
    job.setup = replace(job.setup, replace_seconds=price, permitted=frozenset({REPLACE_REMEDY}))
    job.slowdowns, first_step = {2: 1.5}, job.step
    proposal = job.train_until_proposed(REPLACE_REMEDY)
    assert proposal.worker == 2
    lost = (job.step - first_step) * 0.5 * STEP_SECONDS
    assert lost == pytest.approx(price, abs=8 * 0.5 * STEP_SECONDS + 0.15 * price)


def test_without_fresh_steps_a_spare_waits_for_them(job: ProposingJob) -> None:
    job.setup = replace(job.setup, replace_seconds=8.0)
    job.slowdowns = {2: 1.5}
    for _ in range(4):
        job.propose()
    stale = replace(job.estimator, now=job.estimator.now + 10.0)
    result = propose_strategies(stale, replace(job.setup, replace_seconds=1.0), job.account, fresh=False)
    assert (result.proposals, result.wants_steps) == ((), True)


def test_a_slow_link_leads_to_local_sgd_and_back_after_a_fast_synchronization(job: ProposingJob) -> None:
    job.transfer = 0.5
    proposal = job.train_until_proposed(LOCAL_SGD_REMEDY, 3)
    assert proposal.bottleneck is Bottleneck.COMMUNICATION
    assert proposal.mode in {SyncMode.ASYNC_EDIT, SyncMode.EDIT}
    assert proposal.slowdown_before == pytest.approx(1.9, abs=0.1)
    job.synchronous = False
    job.setup = replace(job.setup, mode=SyncMode.ASYNC_EDIT, sync_seconds=proposal.sync_seconds or 10.0)
    for _ in range(3):
        assert all(p.remedy == LOCAL_SGD_REMEDY for p in job.propose().proposals), "the link is still slow"
    window = job.draw_steps(8)
    assert not job.propose(replace(window, transfer_seconds=None)).proposals, "no synchronization tells anything"
    job.transfer = 0.0
    assert [p.remedy for p in job.propose().proposals] == [SYNC_REMEDY]


def test_a_mode_that_the_owner_wants_is_kept(job: ProposingJob) -> None:
    job.synchronous = False
    job.setup = replace(job.setup, mode=SyncMode.ASYNC_EDIT, permitted=ALL - {SYNC_REMEDY})
    for _ in range(4):
        assert job.propose().proposals == ()


def test_a_link_that_costs_little_is_left_alone(job: ProposingJob) -> None:
    job.transfer = 0.04
    for _ in range(10):
        assert job.propose().proposals == ()
    assert job.estimator.transfer.slow[0] > 0.95


def test_rotating_ranks_lead_to_local_sgd(job: ProposingJob) -> None:
    job.rotating = 2.0
    proposal = job.train_until_proposed(LOCAL_SGD_REMEDY, 4)
    assert (proposal.bottleneck, proposal.mode) == (Bottleneck.VOLATILE, SyncMode.ASYNC_EDIT)
    job.synchronous, job.setup = False, replace(job.setup, mode=SyncMode.ASYNC_EDIT, sync_seconds=5.0)
    job.rotating = 1.0
    assert job.train_until_proposed(SYNC_REMEDY, 6).mode is SyncMode.SYNC


def test_a_rank_that_becomes_slow_in_a_local_sgd_mode_is_replaced(job: ProposingJob) -> None:
    job.transfer = 0.5
    job.train_until_proposed(LOCAL_SGD_REMEDY, 3)
    job.synchronous = False
    job.setup = replace(job.setup, mode=SyncMode.ASYNC_EDIT, sync_seconds=10.0, replace_seconds=3.0)
    job.slowdowns = {3: 4.0}
    assert job.train_until_proposed(REPLACE_REMEDY, 30).worker == 3


def test_an_absence_that_repeats_keeps_the_mode(job: ProposingJob) -> None:
    job.transfer = 0.5
    job.train_until_proposed(LOCAL_SGD_REMEDY, 3)
    job.account = replace(job.account, returned_at=job.now - 30.0, absences=(30.0,) * 8)
    job.synchronous, job.setup = False, replace(job.setup, mode=SyncMode.ASYNC_EDIT, sync_seconds=5.0)
    for _ in range(3):
        job.propose()
    assert job.account.local is not None
    job.account = replace(job.account, local=replace(job.account.local, began=job.account.local.since - 60.0))
    job.transfer = 0.0
    assert SYNC_REMEDY not in {p.remedy for p in job.propose().proposals}


def test_collections_of_different_ranks_are_planned(job: ProposingJob) -> None:
    def collect(window: StepWindow) -> StepWindow:
        pauses = np.where(job.rng.random(window.compute_seconds.shape) < 0.1, 0.2, 0.0)
        return replace(window, gc_seconds=pauses, compute_seconds=window.compute_seconds + pauses)

    found = [p for _ in range(4) for p in job.propose(collect(job.draw_steps(8))).proposals]
    planned = [proposal for proposal in found if proposal.remedy == PLAN_GC_REMEDY]
    assert planned[0].gc_every is not None
    assert 5 < planned[0].gc_every < 50, "as often as they were seen, and as usual"
    assert job.estimator.workers.slow.max() < 0.05
    job.setup = replace(job.setup, gc_every=10)
    assert not job.propose(collect(job.draw_steps(8))).proposals


@pytest.mark.parametrize("known", [True, False])
def test_lengths_that_the_loader_knows_are_balanced(job: ProposingJob, known: bool) -> None:
    cost = SequenceCost(0.0, 1e-3, 0.0) if known else None
    for _ in range(3):
        window = job.draw_steps(8)
        weights = np.exp(0.3 * job.rng.standard_normal(window.compute_seconds.shape))
        uneven = replace(window, weights=weights, compute_seconds=window.compute_seconds * weights, sequence_cost=cost)
        result = job.propose(uneven)
    assert [p.remedy for p in result.proposals] == ([BALANCE_LENGTHS_REMEDY] if known else [])


def test_nothing_is_proposed_before_anything_is_known() -> None:
    job = ProposingJob()
    job.observe_means()
    assert propose_strategies(job.estimator, job.setup, job.account, fresh=False).proposals == ()
