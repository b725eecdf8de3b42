"""The estimator next to today's rules: what it sees, asks for, and would do. Nothing follows it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.estimator.observations import MetricsWindow
from pacekeeper_analysis.estimator.proposal import REPLACE_REMEDY
from pacekeeper_analysis.protocol.plan import Stop, SyncMode
from pacekeeper_analysis.protocol.reports import Evidence, RankWindow
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest
from pacekeeper_analysis.stragglers.strategies import LOCAL_SGD_REMEDY, REBALANCE_REMEDY
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.effects import WriteIncident
from pacekeeper_operator.decide.evaluate import evaluate_job, list_effects
from pacekeeper_operator.decide.stragglers import shadow
from pacekeeper_operator.decide.stragglers.straggler import MAX_EVIDENCE_REQUEST_SECONDS
from pacekeeper_operator.state.desired_state import StragglerInvestigation
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.straggler_estimate import EstimatedFault, EstimatorMemory
from testing.operators.observations import NOW, build_job, build_policy, build_training, change_members

STEPS, SAMPLES = 32, 32
POLICY = build_policy()


class ShadowedJob:
    """A job of four ranks, passed over once a window of steps."""

    def __init__(self, observation: Observation | None = None) -> None:
        self.observation = build_training(4, 1, job=build_job(4, 1)) if observation is None else observation
        self.memory: EstimatorMemory | None = None
        self.slowdowns = np.ones(4)
        self.shares = np.full(4, float(SAMPLES))
        self.step, self.rng = 500, np.random.default_rng(0)
        self.late_rank: int | None = None  # whose answers are from a window later
        self.silent_worker = ""

    def draw_work(self) -> np.ndarray:
        noise = np.exp(0.02 * self.rng.standard_normal((STEPS, 4)))
        return np.asarray(0.1 * (0.05 + 0.95 * self.shares / SAMPLES) * self.slowdowns * noise)

    def run_pass(self) -> Observation:
        """Train for a window, and return the observation of the pass after it, with its requests."""
        self.step += STEPS
        own = self.draw_work()
        took = own.max(axis=1) + 0.01
        now = self.observation.now + float(took.sum())
        observation = change_members(self.observation, progress={"step": self.step, "steps_in_round": self.step})
        observation = replace(observation, now=now, evidence=self.answer(observation, own, took))
        means = MetricsWindow(
            last_step=self.step,
            steps=STEPS,
            compute_seconds=own.mean(axis=0),
            step_seconds=np.full(4, took.mean()),
            wait_seconds=took.mean() - own.mean(axis=0),
            samples=self.shares,
            baseline_seconds=0.11,
        )
        self.memory = shadow.advance_estimate(self.memory, observation, POLICY, means)
        observation = replace(observation, estimate=None if self.memory is None else self.memory.estimate)
        desired = shadow.update_estimator_request(observation, POLICY)
        self.observation = replace(observation.with_desired(desired), evidence=())
        return observation

    def answer(self, observation: Observation, own: np.ndarray, took: np.ndarray) -> tuple[Evidence, ...]:
        if (request := observation.requests.evidence) is None:
            return ()
        numbers = range(self.step - STEPS + 1, self.step + 1)
        late_numbers = range(self.step + 1, self.step + STEPS + 1)
        return tuple(
            Evidence(
                request.name,
                member.worker,
                observation.plan.round,
                (
                    RankWindow(
                        rank=rank,
                        steps=tuple(late_numbers if rank == self.late_rank else numbers),
                        step_seconds=tuple(took),
                        compute_seconds=tuple(own[:, rank]),
                        samples=(int(self.shares[rank]),) * STEPS,
                        sync_mode=SyncMode.SYNC,
                        baseline_seconds=0.11,
                        baseline_own_seconds=0.1,
                    ),
                ),
            )
            for rank, member in enumerate(observation.plan.members)
            if member.worker != self.silent_worker
        )

    def find_probability(self, fault: EstimatedFault) -> float:
        assert self.memory is not None
        return next(found.probability for found in self.memory.estimate.faults if found.fault is fault)


@pytest.fixture
def job() -> ShadowedJob:
    """A job whose noise is known."""
    job = ShadowedJob()
    for _ in range(6):
        job.run_pass()
    return job


def test_the_first_steps_are_requested_once_and_the_request_is_dropped_when_answered() -> None:
    job = ShadowedJob()
    assert job.run_pass().requests.evidence is None
    request = job.observation.requests.evidence
    assert request is not None
    assert request.parts == (EvidencePart.WINDOWS,)
    assert job.observation.plan == job.run_pass().plan, "requests raise no version"
    assert job.observation.requests.evidence is None
    for _ in range(10):
        assert job.run_pass().requests.evidence is None, "a healthy job is not asked again"


def test_the_same_steps_are_not_requested_twice(job: ShadowedJob) -> None:
    assert job.memory is not None
    job.slowdowns[0] = 1.3
    while job.observation.requests.evidence is None:
        job.run_pass()
    job.run_pass()
    assert job.memory.estimator.requested_step == job.step, "the answers cover these"


def test_answers_that_share_no_step_are_dropped_and_later_steps_requested() -> None:
    job = ShadowedJob()
    job.late_rank = 3
    job.run_pass()
    request = job.observation.requests.evidence
    job.run_pass()
    assert job.observation.requests.evidence is None, "nothing more will come"
    job.late_rank = None
    job.run_pass()
    assert job.observation.requests.evidence not in (None, request), "the steps are still lacking"
    job.run_pass()
    assert job.memory is not None
    assert job.memory.estimator.knows_noise


def test_a_worker_that_never_answers_blocks_no_other_request() -> None:
    job = ShadowedJob()
    job.silent_worker = "j-w2-0"
    job.run_pass()
    request, since = job.observation.requests.evidence, job.observation.now
    assert request is not None
    while job.observation.requests.evidence == request:
        assert job.observation.now - since < 2 * MAX_EVIDENCE_REQUEST_SECONDS
        job.run_pass()
    assert job.observation.now - since >= MAX_EVIDENCE_REQUEST_SECONDS


def test_a_request_ends_with_its_round(job: ShadowedJob) -> None:
    job.silent_worker, job.slowdowns[0] = "j-w2-0", 1.3
    while job.observation.requests.evidence is None:
        job.run_pass()
    job.observation = change_members(job.observation, round=2)
    job.run_pass()
    assert job.observation.requests.evidence is None, "some answers are from the round before"


def test_a_slow_rank_is_published_and_shares_would_be_changed(job: ShadowedJob) -> None:
    job.slowdowns[2] = 1.5
    for _ in range(3):
        observation = job.run_pass()
    assert job.find_probability(EstimatedFault.SLOW_WORKER) > 0.95
    assert job.find_probability(EstimatedFault.SLOW_LINK) < 0.05
    assert observation.estimate is not None
    slow = observation.estimate.faults[0]
    assert slow.rank == 2
    assert slow.slowdown == pytest.approx(1.5, rel=0.05)
    assert observation.estimate.sentences == (slow.sentence,)
    assert "rank 2" in slow.sentence
    assert [proposal.remedy for proposal in observation.estimate.proposals] == [REBALANCE_REMEDY]
    assert shadow.list_disagreements(observation, observation.desired) == ("Rebalance by the estimator",)
    shares = observation.estimate.proposals[0].shares
    assert shares is not None
    decided = observation.desired.with_plan(shares=shares)
    assert shadow.list_disagreements(observation, decided) == ()


def test_what_only_the_rules_do_is_a_disagreement(job: ShadowedJob) -> None:
    observation = job.run_pass()
    decided = observation.desired.with_plan(sync_mode=SyncMode.ASYNC_EDIT)
    assert shadow.list_disagreements(observation, decided) == (f"{LOCAL_SGD_REMEDY} by the rules",)
    assert shadow.list_disagreements(replace(observation, estimate=None), decided) == ()


def test_nothing_but_requests_follows_the_estimator(job: ShadowedJob) -> None:
    job.slowdowns[1] = 3.0
    for _ in range(4):
        observation = job.run_pass()
        with_estimate = evaluate_job(observation, POLICY)
        without = evaluate_job(replace(observation, estimate=None), POLICY)
        assert with_estimate.desired.plan == without.desired.plan
        assert with_estimate.desired.state.placement == without.desired.state.placement
        # Incidents have a sentence of the estimator.
        effects, usual = (
            [e for e in list_effects(result.observation, POLICY, {}) if not isinstance(e, WriteIncident)]
            for result in (with_estimate, without)
        )
        assert effects == usual


def test_the_rules_requests_come_first(job: ShadowedJob) -> None:
    observation = job.run_pass()
    assert observation.estimate is not None
    asked = replace(observation, estimate=replace(observation.estimate, wants_steps=True))
    request = EvidenceRequest("straggler-1-abc", (EvidencePart.WINDOWS,))
    other = asked.with_desired(asked.desired.with_requests(evidence=request))
    assert shadow.update_estimator_request(other, POLICY).requests.evidence == request
    own = shadow.update_estimator_request(asked, POLICY)
    assert own.requests.evidence_name.startswith("estimator-")
    investigated = asked.desired.with_adaptation(investigation=StragglerInvestigation(since=NOW))
    for busy in (
        replace(asked, metrics=replace(asked.metrics, unreported_members=("j-w0-0",))),
        asked.with_desired(asked.desired.with_plan(sync_mode=SyncMode.EDIT)),
        asked.with_desired(investigated),
    ):
        assert shadow.update_estimator_request(busy, POLICY) is busy.desired, "the rules weigh what is answered"


def test_a_new_worker_is_healthy_and_the_others_stay_known(job: ShadowedJob) -> None:
    job.slowdowns[:2] = 1.5
    for _ in range(4):
        job.run_pass()
    assert job.memory is not None
    assert (job.memory.estimator.workers.slow[:2] > 0.95).all()
    plan = job.observation.plan
    members = (plan.members[0], replace(plan.members[1], worker="j-w4-0"), *plan.members[2:])
    job.observation = job.observation.with_desired(
        job.observation.desired.with_plan(members=members, membership=plan.membership + 1)
    )
    first_step = {"restored_step": 0, "started_at": NOW - 2, "first_step_at": NOW - 1}
    job.observation = change_members(
        job.observation, membership=plan.membership + 1, round=2, start=first_step, training={"managed": True}
    )
    job.slowdowns[1] = 1.0
    job.run_pass()
    assert job.memory.estimator.workers.slow[0] > 0.95
    assert job.memory.estimator.workers.slow[1] < 0.5


def test_another_number_of_ranks_begins_again(job: ShadowedJob) -> None:
    before = job.memory
    smaller = ShadowedJob(build_training(2, 1))
    means = MetricsWindow(100, 8, np.full(2, 0.1), np.full(2, 0.1), np.zeros(2), np.full(2, 8.0), None)
    memory = shadow.advance_estimate(before, smaller.observation, POLICY, means)
    assert memory is not None
    assert memory.estimator.layout.ranks == 2


@pytest.mark.parametrize("reason", ["stopped", "untrained", "no means"])
def test_nothing_is_weighed_while_the_job_does_not_train(job: ShadowedJob, reason: str) -> None:
    observation, means = job.observation, None
    if reason == "stopped":
        observation = observation.with_desired(observation.desired.with_plan(stop=Stop.SUSPEND))
    elif reason == "untrained":
        observation = change_members(observation, start={"first_step_at": None}, progress={"step": None})
    assert shadow.advance_estimate(job.memory, observation, POLICY, means) is job.memory


@pytest.mark.parametrize(
    ("observation", "allowed"),
    [
        (build_training(4, 1), {REBALANCE_REMEDY, REPLACE_REMEDY}),
        (change_members(build_training(4, 1), training={"managed": False}), {REPLACE_REMEDY}),
    ],
    ids=["managed", "monitored"],
)
def test_only_what_the_job_permits_is_proposed(observation: Observation, allowed: set[str]) -> None:
    policy = build_policy(allow=frozenset({Remedy.REBALANCE, Remedy.REPLACE_WORKER}))
    means = MetricsWindow(100, 8, np.full(4, 0.1), np.full(4, 0.1), np.zeros(4), np.full(4, 8.0), None)
    memory = shadow.advance_estimate(None, observation, policy, means)
    assert memory is not None
    assert memory.setup.permitted == allowed
    assert memory.setup.replace_seconds is not None
