"""A job that changes how it trains: from the first sign to another mode, and back when the fault is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_analysis.protocol.reports import Evidence, RankWindow
from pacekeeper_analysis.stragglers.mode_changes import SYNC_MODE_COOL_DOWN_SECONDS
from pacekeeper_analysis.stragglers.step_model import KnownRelativeTimes
from pacekeeper_analysis.stragglers.strategies import Bottleneck
from pacekeeper_operator.api.conditions import JobCondition, Reason
from pacekeeper_operator.api.incident import IncidentCause, IncidentOutcome
from pacekeeper_operator.api.training_job import JobStatus, RemediationMode, Remedy, RequestedSyncMode
from pacekeeper_operator.decide.evaluate import PassResult, evaluate_job
from pacekeeper_operator.decide.lifecycle.status import build_job_status
from pacekeeper_operator.state import state_codec
from pacekeeper_operator.state.desired_state import LocalSgdChoice
from pacekeeper_operator.state.job_metrics import JobMetrics, PersistentSlowness
from pacekeeper_operator.state.job_requests import RevertRequest
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy
from pacekeeper_operator.state.restart_estimates import RestartMeasurements
from testing.operators.observations import (
    build_evidence,
    build_job,
    build_policy,
    build_training,
    change_members,
    list_decisions,
)

STEPS = 32
OWN, FIRST = 0.07, 0.1
"""Seconds of a rank's own work in a step, and of the job's first steady steps."""
SLOW_LINK = JobMetrics(
    step_seconds=0.3, relative_time=1.01, slowdown=1.01, wait_share=0.75, uniform_slowdown=3.0, throughput=32 / 0.3
)
WELL = JobMetrics(
    step_seconds=FIRST, relative_time=1.01, slowdown=1.01, wait_share=0.02, uniform_slowdown=1.0, throughput=32 / FIRST
)


def windows(  # noqa: PLR0913  # options of a harness: each caller names what it varies
    request: str,
    *,
    own: Sequence[float] = (OWN,) * 4,
    exposed: float = FIRST - OWN,
    garbage: dict[int, Sequence[int]] | None = None,
    shares: tuple[int, ...] = (8, 8, 8, 8),
    mode: SyncMode = SyncMode.SYNC,
    drawn: Any = 1.0,
    lengths: Any = None,
    balanceable: bool = True,
    first: float = FIRST,
    transfer: float | tuple[float, ...] = 0.0,
) -> tuple[Evidence, ...]:
    """Return windows of four ranks with `own` seconds of work in a step, in `exposed` seconds of which all wait.

    garbage: steps of the window in which a rank collects garbage for a tenth of a second. drawn: factors of the own
    work, shape (STEPS, 4). lengths: of the samples: shape (STEPS, 4, samples). balanceable: the loaders know them.
    """
    noise = np.random.default_rng(1).normal(1.0, 0.005, (STEPS, 4))
    pauses = np.array(
        [[0.1 if step in (garbage or {}).get(rank, ()) else 0.0 for rank in range(4)] for step in range(STEPS)]
    )
    work = noise * np.array(own) * drawn + pauses
    together = work.max(axis=1, keepdims=True) + exposed
    step = np.broadcast_to(together, work.shape) if mode is SyncMode.SYNC else work
    return build_evidence(
        request,
        (
            RankWindow(
                rank,
                tuple(range(468, 468 + STEPS)),
                tuple(step[:, rank].tolist()),
                tuple(work[:, rank].tolist()),
                (shares[rank],) * STEPS,
                gc_seconds=tuple(pauses[:, rank].tolist()),
                lengths=() if lengths is None else tuple(lengths[:, rank].sum(axis=1).tolist()),
                squares=()
                if lengths is None or not balanceable
                else tuple(np.square(lengths[:, rank]).sum(axis=1).tolist()),
                sync_mode=mode,
                transfers=(transfer if isinstance(transfer, tuple) else (transfer,) * 4)
                if mode is not SyncMode.SYNC
                else (),
                baseline_seconds=first,
            )
            for rank in range(4)
        ),
    )


def slow_ranks_in_turn(depth: float) -> Any:
    """Return `drawn` of `windows` where in each step another rank takes 1 + `depth` times as long."""
    return 1.0 + depth * np.eye(4)[np.random.default_rng(3).integers(0, 4, STEPS)]


def advance_observation(result: PassResult, observation: Observation, seconds: float, **changes: Any) -> Observation:
    return replace(observation.with_desired(result.desired), now=observation.now + seconds, **changes)


def answer_request(result: PassResult, observation: Observation, **windows_options: Any) -> Observation:
    """Return the observation a second later, when the ranks have answered the current request."""
    request = result.desired.requests.evidence_name
    assert request
    return advance_observation(result, observation, 1.0, evidence=windows(request, **windows_options))


def evaluate_after_answers(
    observation: Observation, policy: Policy | None = None, **windows_options: Any
) -> tuple[PassResult, Observation]:
    """Evaluate the ranks' answers to the request that the metrics cause, twice if needed."""
    policy = policy or build_policy()
    observation = answer_request(evaluate_job(observation, policy), observation, **windows_options)
    result = evaluate_job(observation, policy)
    if not list_decisions(result):
        observation = advance_observation(result, observation, 6.0)
        observation = answer_request(evaluate_job(observation, policy), observation, **windows_options)
        result = evaluate_job(observation, policy)
    return result, observation


def evaluate_after_metrics(metrics: JobMetrics = SLOW_LINK, **windows_options: Any) -> tuple[PassResult, Observation]:
    return evaluate_after_answers(
        change_members(replace(build_training(), metrics=metrics), training={"sync_mode": "Sync"}), **windows_options
    )


def enter_local_mode() -> tuple[PassResult, Observation]:
    """Return the state after a slow link, with the ranks in the requested mode."""
    result, observation = evaluate_after_metrics(exposed=0.25)
    assert result.desired.plan.sync_mode is SyncMode.ASYNC_EDIT
    return result, change_members(observation, training={"sync_mode": "AsyncEDiT"})


class TestStartOfLocalSgd:
    def test_a_slow_link_starts_local_sgd_without_a_new_round(self) -> None:
        result, _ = evaluate_after_metrics(exposed=0.25)
        plan = result.desired.plan
        assert (plan.sync_mode, plan.membership) == (SyncMode.ASYNC_EDIT, 1)
        assert result.desired.requests.evidence is None
        assert plan.sync_seconds > 1.0
        (incident,) = result.desired.state.incidents.current
        assert (incident.cause, incident.remedy, incident.live) == (
            IncidentCause.SLOW_COMMUNICATION,
            Remedy.LOCAL_SGD,
            True,
        )
        assert incident.rank is None
        assert incident.slowdown_before == pytest.approx(0.32 / 0.1, rel=0.1)
        assert {price.name for price in incident.remedies} == {"LocalSGD"}
        degraded = next(
            c
            for c in build_job_status(result.observation, build_policy(), JobStatus()).conditions
            if c.type == JobCondition.DEGRADED
        )
        assert (degraded.status, degraded.reason) == ("True", Reason.LOCAL_SGD_ACTIVE)

    def test_one_answer_is_not_enough(self) -> None:
        observation = change_members(replace(build_training(), metrics=SLOW_LINK), training={"sync_mode": "Sync"})
        once = evaluate_job(
            answer_request(evaluate_job(observation, build_policy()), observation, exposed=0.25), build_policy()
        )
        assert once.desired.plan.sync_mode is SyncMode.SYNC
        assert not list_decisions(once)

    def test_the_reason_for_the_mode_survives_a_restart_of_the_operator(self) -> None:
        result, observation = enter_local_mode()
        adaptation = result.desired.state.adaptation.local_sgd
        assert adaptation is not None
        assert (adaptation.bottleneck, adaptation.since) == (Bottleneck.COMMUNICATION, observation.now)
        read = state_codec.decode_state(state_codec.encode_state(result.desired, "j"), "j").desired
        assert read.is_stored_as(result.desired)

    @pytest.mark.parametrize(
        ("first", "mode"), [(FIRST, SyncMode.ASYNC_EDIT), (0.17, SyncMode.SYNC), (0, SyncMode.SYNC)]
    )
    def test_ranks_that_are_slow_in_turn_start_local_sgd_unless_they_always_were(
        self, first: float, mode: SyncMode
    ) -> None:
        result, _ = evaluate_after_metrics(drawn=slow_ranks_in_turn(1.0), first=first)
        assert result.desired.plan.sync_mode is mode
        assert [i.cause for i in result.desired.state.incidents.current] == [IncidentCause.VOLATILE] * (
            mode is not SyncMode.SYNC
        )

    @pytest.mark.parametrize(
        ("depth", "first", "mode"),
        [(0.25, 0.06, SyncMode.ASYNC_EDIT), (0.25, 0.07, SyncMode.SYNC), (0.35, 0.1, SyncMode.SYNC)],
    )
    def test_slight_turns_start_local_sgd_only_if_steps_take_much_longer_than_the_first(
        self, depth: float, first: float, mode: SyncMode
    ) -> None:
        """Each turn costs 0.09 s."""
        result, _ = evaluate_after_metrics(drawn=slow_ranks_in_turn(depth), first=first, exposed=0.002)
        assert result.desired.plan.sync_mode is mode

    def test_garbage_collections_are_planned_and_training_stays_exact(self) -> None:
        result, _ = evaluate_after_metrics(exposed=0.02, garbage={rank: range(2 * rank, STEPS, 8) for rank in range(4)})
        plan = result.desired.plan
        assert plan.sync_mode is SyncMode.SYNC
        assert plan.gc_every > 0
        assert result.desired.state.incidents.current[0].remedy is Remedy.PLAN_GC

    @pytest.mark.parametrize(
        ("changes", "allow", "message"),
        [({}, {Remedy.REBALANCE}, "spec.remediation.allow"), ({"managed": False}, set(Remedy), "library")],
    )
    def test_where_local_sgd_is_not_allowed_one_incident_records_the_slowness(
        self, changes: dict[str, Any], allow: set[Remedy], message: str
    ) -> None:
        policy, training = build_policy(allow=frozenset(allow)), {"sync_mode": "Sync", **changes}
        observation = change_members(replace(build_training(), metrics=SLOW_LINK), training=training)
        result, observation = evaluate_after_answers(observation, policy, exposed=0.25)
        assert result.desired.plan.sync_mode is SyncMode.SYNC
        (incident,) = result.desired.state.incidents.current
        assert incident.remedy is None
        assert incident.outcome is IncidentOutcome.INEFFECTIVE
        assert message in next(price.reason for price in incident.remedies if price.name == "LocalSGD")
        assert not evaluate_job(advance_observation(result, observation, 10.0), policy).desired.requests.evidence_name

    def test_a_rank_at_half_speed_gets_fewer_samples_and_no_local_sgd(self) -> None:
        result, _ = evaluate_after_metrics(replace(WELL, relative_time=2.0), own=(OWN, OWN, 2 * OWN, OWN))
        assert result.desired.plan.sync_mode is SyncMode.SYNC
        assert result.desired.plan.shares is not None
        assert result.desired.plan.shares[2] < 6

    def test_no_action_follows_if_shares_are_as_good_as_whole_samples_allow(self) -> None:
        shares = (10, 9, 4, 9)
        observation = change_members(
            replace(build_training(), metrics=replace(WELL, relative_time=2.2)), training={"sync_mode": "Sync"}
        )
        observation = observation.with_desired(observation.desired.with_plan(shares=shares))
        own = tuple(OWN / 8 * share * slow for share, slow in zip(shares, (1, 1, 2.2, 1), strict=True))
        observation = answer_request(evaluate_job(observation, build_policy()), observation, own=own, shares=shares)
        result = evaluate_job(replace(observation, now=observation.now + 6.0), build_policy())
        assert result.desired.state.adaptation.investigation is None, "the investigation is over"
        assert result.desired.plan.sync_mode is SyncMode.SYNC
        assert not any(worker.leaving for worker in result.desired.state.placement.workers), "no spare takes over"

    def test_shares_whose_straggler_has_recovered_become_equal_again(self) -> None:
        observation = change_members(replace(build_training(), metrics=WELL), training={"sync_mode": "Sync"})
        observation = observation.with_desired(observation.desired.with_plan(shares=(10, 9, 4, 9)))
        own = tuple(OWN / 8 * share for share in (10, 9, 4, 9))
        observation = answer_request(
            evaluate_job(observation, build_policy()), observation, own=own, shares=(10, 9, 4, 9)
        )
        assert evaluate_job(observation, build_policy()).desired.plan.shares == (8, 8, 8, 8)


class TestLengths:
    """Sequences that cost as the square of their length, dealt as they come."""

    UNEVEN = replace(WELL, wait_share=0.3)

    def build_uneven_samples(self, seed: int) -> dict[str, Any]:
        lengths = np.rint(np.random.default_rng(seed).lognormal(6.0, 0.8, (STEPS, 4, 8)))
        squares = np.square(lengths).sum(axis=2)
        return {"lengths": lengths, "drawn": squares / squares.mean()}

    def balance_lengths(self) -> tuple[PassResult, Observation]:
        return evaluate_after_metrics(self.UNEVEN, **self.build_uneven_samples(1))

    def test_lengths_are_balanced_by_their_cost(self) -> None:
        result, _ = self.balance_lengths()
        plan = result.desired.plan
        assert (plan.sync_mode, plan.shares, plan.membership) == (SyncMode.SYNC, None, 1)
        assert plan.sequence_cost is not None
        fixed, per_token, per_token_squared = plan.sequence_cost
        assert max(fixed, 400 * per_token) < 0.05 * 400**2 * per_token_squared
        (incident,) = result.desired.state.incidents.current
        assert (incident.cause, incident.remedy) == (IncidentCause.UNEVEN_LENGTHS, Remedy.BALANCE_LENGTHS)
        assert incident.live
        read = state_codec.decode_state(state_codec.encode_state(result.desired, "j"), "j").desired
        assert read.is_stored_as(result.desired)

    def test_lengths_are_left_alone_where_single_samples_outweigh_the_others(self) -> None:
        """The windows stay as uneven; the fit to each of them differs by noise."""
        result, observation = self.balance_lengths()
        plan = result.desired.plan
        changed = 0
        for seed in range(30):
            observation = advance_observation(
                result, observation, 20.0, metrics=replace(self.UNEVEN, throughput=32 / 0.2), evidence=()
            )
            observation = change_members(observation, progress={"step": 560 + 40 * seed})
            request = result.desired.requests.evidence_name
            observation = replace(
                observation, evidence=windows(request, **self.build_uneven_samples(2 + seed)) if request else ()
            )
            result = evaluate_job(observation, build_policy())
            changed += result.desired.plan.sequence_cost != plan.sequence_cost
        assert not changed
        assert len(result.desired.state.incidents.closed) == 1
        assert result.desired.state.adaptation.fruitless_investigation is not None
        assert result.desired.state.adaptation.fruitless_investigation.cool_down_seconds > 100, (
            "investigations become rarer"
        )

    def build_slightly_uneven_samples(
        self, seed: int, *, known: bool = True, sigma: float = 0.15, **windows_options: Any
    ) -> dict[str, Any]:
        """Windows whose lengths cost 1.03 to 1.06 ×. known: to the loaders, which could balance them."""
        lengths = np.rint(np.random.default_rng(seed).lognormal(6.0, sigma, (STEPS, 4, 8)))
        costs = lengths.sum(axis=2)
        return {"lengths": lengths, "drawn": costs / costs.mean(), "balanceable": known, **windows_options}

    @pytest.mark.parametrize(
        ("known", "policy"),
        [
            pytest.param(False, build_policy(), id="the loaders do not publish them"),
            pytest.param(True, build_policy(allow=frozenset({Remedy.REBALANCE})), id="not allowed"),
            pytest.param(True, build_policy(mode=RemediationMode.RECOMMEND), id="only recommended"),
        ],
    )
    def test_lengths_that_cost_little_and_cannot_be_balanced_raise_no_incident(
        self, known: bool, policy: Policy
    ) -> None:
        """Lengths are balanced from 1.01 on. Otherwise requests become rarer, and no Incident is written."""
        observation = change_members(replace(build_training(), metrics=self.UNEVEN), training={"sync_mode": "Sync"})
        result = evaluate_job(observation, policy)
        for seed in range(30):
            observation = change_members(
                advance_observation(result, observation, 20.0, evidence=()), progress={"step": 560 + 40 * seed}
            )
            request = result.desired.requests.evidence_name
            evidence = windows(request, **self.build_slightly_uneven_samples(seed, known=known)) if request else ()
            result = evaluate_job(replace(observation, evidence=evidence), policy)
        assert not result.desired.state.incidents.current
        assert not result.desired.state.incidents.recommended
        assert result.desired.state.adaptation.fruitless_investigation is not None
        assert result.desired.state.adaptation.fruitless_investigation.cool_down_seconds > 100, (
            "investigations become rarer"
        )

    def test_lengths_that_cannot_be_balanced_hide_no_rank_that_is_slow_by_less(self) -> None:
        pace, second = 1.04, 0
        of_rank = tuple(OWN * (pace if rank == 2 else 1.0) for rank in range(4))
        observation = change_members(build_training(spares=1), training={"sync_mode": "Sync"})
        lasting = PersistentSlowness(KnownRelativeTimes({2: pace}, 0.003), observation.now - 60)
        metrics = replace(WELL, relative_time=pace, slowest_rank=2, persistent_slowness=lasting)
        observation = replace(observation, metrics=metrics).with_desired(
            observation.desired.with_budget(measurements=RestartMeasurements(exchange=(20.0,)))
        )
        result = evaluate_job(observation, build_policy())
        while not (taken := list_decisions(result)) and second < 3000:
            second += 20
            observation = change_members(
                advance_observation(result, observation, 20.0, evidence=()), progress={"step": 560 + 2 * second}
            )
            request = result.desired.requests.evidence_name
            answer_options = self.build_slightly_uneven_samples(second, known=False, sigma=0.25, own=of_rank)
            result = evaluate_job(
                replace(observation, evidence=windows(request, **answer_options) if request else ()), build_policy()
            )
        assert [(each.cause, each.remedy, each.rank) for each in taken] == [
            (IncidentCause.STRAGGLER, Remedy.REPLACE_WORKER, 2)
        ]

    @pytest.mark.parametrize("first", [0.11, 0.0], ids=["as in the first steps", "the first steps are unknown"])
    def test_ranks_that_always_scattered_hide_no_slightly_uneven_lengths(self, first: float) -> None:
        """In a large job whose ranks scatter, all wait for some rank in each step, for more than lengths cost."""
        drawn = np.random.default_rng(2).normal(1.0, 0.2, (STEPS, 4))
        of_lengths = self.build_slightly_uneven_samples(1, sigma=0.4)
        scatter = {**of_lengths, "drawn": of_lengths["drawn"] * drawn, "first": first, "exposed": 0.02}
        result, _ = evaluate_after_metrics(self.UNEVEN, **scatter)
        (incident,) = result.desired.state.incidents.current
        assert incident.remedy is Remedy.BALANCE_LENGTHS
        scatter = {"drawn": drawn, "first": first, "exposed": 0.02}
        assert not evaluate_after_metrics(self.UNEVEN, **scatter)[0].desired.state.incidents.current

    def test_a_gain_too_small_to_measure_counts_as_recovered_unless_steps_are_longer(self) -> None:
        for seconds, outcome in ((0.1, IncidentOutcome.RECOVERED), (0.104, IncidentOutcome.INEFFECTIVE)):
            result, observation = evaluate_after_metrics(
                self.UNEVEN, **self.build_slightly_uneven_samples(1, sigma=0.05), exposed=0.0
            )
            (incident,) = result.desired.state.incidents.current
            assert incident.remedy is Remedy.BALANCE_LENGTHS
            before, reference = incident.slowdown_before, incident.reference_seconds
            assert before is not None
            assert reference is not None
            assert 1.01 < before < 1.02
            observation = advance_observation(
                result, observation, 10.0, metrics=replace(WELL, throughput=32 / (reference * seconds / 0.1))
            )
            (incident,) = evaluate_job(
                change_members(observation, progress={"step": 560}), build_policy()
            ).desired.state.incidents.current
            assert incident.outcome is outcome

    def test_where_balancing_is_not_allowed_one_incident_records_the_slowness(self) -> None:
        policy = build_policy(allow=frozenset({Remedy.REBALANCE}))
        observation = change_members(replace(build_training(), metrics=self.UNEVEN), training={"sync_mode": "Sync"})
        result, observation = evaluate_after_answers(observation, policy, **self.build_uneven_samples(1))
        assert result.desired.plan.sequence_cost is None
        (incident,) = result.desired.state.incidents.current
        assert (incident.cause, incident.remedy) == (IncidentCause.UNEVEN_LENGTHS, None)
        (considered,) = incident.remedies
        assert considered.name == "BalanceLengths"
        assert "spec.remediation.allow" in considered.reason
        assert not evaluate_job(advance_observation(result, observation, 10.0), policy).desired.requests.evidence_name

    def test_a_plan_that_the_ranks_cannot_follow_is_taken_back(self) -> None:
        result, observation = self.balance_lengths()
        message = "sequence_cost: the lengths of samples are unknown"
        refused = evaluate_job(
            change_members(advance_observation(result, observation, 1.0), training={"refused": message}), build_policy()
        )
        assert refused.desired.plan.sequence_cost is None
        (incident,) = refused.desired.state.incidents.current
        assert incident.outcome is IncidentOutcome.INEFFECTIVE
        assert message in incident.evidence[-1]


class TestFruitlessInvestigation:
    WAITS = replace(WELL, wait_share=0.3)

    def investigate_without_result(self) -> tuple[PassResult, Observation]:
        """Return a job that always waited like this, after an investigation."""
        observation = change_members(replace(build_training(), metrics=self.WAITS), training={"sync_mode": "Sync"})
        observation = answer_request(evaluate_job(observation, build_policy()), observation)
        result = evaluate_job(observation, build_policy())
        assert not list_decisions(result)
        observation = change_members(advance_observation(result, observation, 30.0), progress={"step": 600})
        return evaluate_job(observation, build_policy()), observation

    def test_a_job_that_always_waited_is_left_alone(self) -> None:
        result, observation = self.investigate_without_result()
        assert not result.desired.requests.evidence_name
        assert result.desired.state.adaptation.investigation is None
        quiet = evaluate_job(advance_observation(result, observation, 20.0), build_policy())
        assert quiet.desired == result.desired

    def test_an_investigation_goes_on_while_answers_begin_to_show_something(self) -> None:
        """The link becomes slow just when the investigation is about to end."""
        observation = change_members(replace(build_training(), metrics=self.WAITS), training={"sync_mode": "Sync"})
        result = evaluate_job(observation, build_policy())
        observation = advance_observation(
            result, observation, 15.0, evidence=windows(result.desired.requests.evidence_name, exposed=0.25)
        )
        result = evaluate_job(observation, build_policy())
        observation = advance_observation(
            result, observation, 15.0, evidence=windows(result.desired.requests.evidence_name, exposed=0.25)
        )
        assert evaluate_job(observation, build_policy()).desired.plan.sync_mode is SyncMode.ASYNC_EDIT

    def test_steps_that_grow_during_an_investigation_start_it_again(self) -> None:
        """The investigation must not count them as its result."""
        observation = change_members(replace(build_training(), metrics=self.WAITS), training={"sync_mode": "Sync"})
        observation = advance_observation(
            evaluate_job(observation, build_policy()), observation, 30.0, metrics=SLOW_LINK
        )
        result = evaluate_job(observation, build_policy())
        assert result.desired.state.adaptation.fruitless_investigation is None
        assert result.desired.requests.evidence_name
        assert result.desired.state.adaptation.investigation is not None
        assert result.desired.state.adaptation.investigation.since == observation.now

    @pytest.mark.parametrize("longer", [1.01, 1.03, 3.0])
    def test_longer_steps_start_a_new_investigation_at_once(self, longer: float) -> None:
        """Also a small growth starts it, if a remedy exists for it."""
        result, observation = self.investigate_without_result()
        worse = advance_observation(result, observation, 5.0, metrics=replace(self.WAITS, step_seconds=longer * FIRST))
        assert bool(evaluate_job(worse, build_policy()).desired.requests.evidence_name) is (longer > 1.025)

    def test_steps_that_are_longer_by_chance_start_few_investigations(self) -> None:
        """For an hour, mean steps of windows scatter by 2 % in a job that always waited."""
        random, result, observation = np.random.default_rng(0), *self.investigate_without_result()
        investigations, was_investigating = 0, False
        for _ in range(720):
            metrics = replace(self.WAITS, step_seconds=FIRST * (1 + 0.02 * random.standard_normal()))
            observation = change_members(
                advance_observation(result, observation, 5.0, metrics=metrics, evidence=()), progress={"step": 560}
            )
            request = result.desired.requests.evidence_name
            result = evaluate_job(replace(observation, evidence=windows(request) if request else ()), build_policy())
            is_investigating = result.desired.state.adaptation.investigation is not None
            investigations, was_investigating = (
                investigations + (is_investigating and not was_investigating),
                is_investigating,
            )
        assert investigations <= 7
        assert not result.desired.state.incidents.current


class TestMeasuredEffect:
    @pytest.mark.parametrize(
        ("seconds", "outcome"),
        [(0.09, IncidentOutcome.RECOVERED), (0.15, IncidentOutcome.MITIGATED), (0.35, IncidentOutcome.INEFFECTIVE)],
    )
    def test_the_outcome_is_measured_in_samples_per_second(self, seconds: float, outcome: IncidentOutcome) -> None:
        result, observation = enter_local_mode()
        observation = advance_observation(result, observation, 10.0, metrics=replace(WELL, throughput=32 / seconds))
        early = evaluate_job(observation, build_policy())
        assert early.desired.state.incidents.open
        (incident,) = evaluate_job(
            change_members(observation, progress={"step": 560}), build_policy()
        ).desired.state.incidents.current
        assert incident.outcome is outcome
        assert incident.slowdown_after == pytest.approx(max(1.0, seconds / 0.1), rel=0.1)

    def test_a_mode_that_did_not_help_is_reverted(self) -> None:
        result, observation = enter_local_mode()
        observation = advance_observation(result, observation, 10.0, metrics=replace(SLOW_LINK, throughput=32 / 0.35))
        back = evaluate_job(change_members(observation, progress={"step": 560}), build_policy())
        assert back.desired.plan.sync_mode is SyncMode.SYNC
        assert back.desired.state.adaptation.local_sgd is None
        assert not back.desired.state.adaptation.mode_changes.allows(observation.now + SYNC_MODE_COOL_DOWN_SECONDS)
        observation = change_members(
            advance_observation(back, observation, 5.0, metrics=SLOW_LINK), training={"sync_mode": "Sync"}
        )
        later_result, observation = evaluate_after_answers(observation, exposed=0.25)
        later_result, observation = evaluate_after_answers(
            advance_observation(later_result, observation, 6.0), exposed=0.25
        )
        assert later_result.desired.plan.sync_mode is SyncMode.SYNC
        assert not list_decisions(later_result), "nothing is written while the mode is only held"

    def test_ranks_that_refuse_the_mode_stay_in_sync_and_receive_no_second_request(self) -> None:
        result, observation = enter_local_mode()
        observation = change_members(
            advance_observation(result, observation, 1.0), training={"refused": "the mesh has no dimension sync"}
        )
        refused = evaluate_job(observation, build_policy())
        assert refused.desired.plan.sync_mode is SyncMode.SYNC
        (incident,) = refused.desired.state.incidents.current
        assert incident.outcome is IncidentOutcome.INEFFECTIVE
        assert "no dimension sync" in incident.evidence[-1]
        observation = change_members(
            advance_observation(refused, observation, 3600.0),
            training={"refused": "", "sync_mode": "Sync"},
            progress={"steps_in_round": 600},
        )
        result, _ = evaluate_after_answers(observation, exposed=0.25)
        assert result.desired.plan.sync_mode is SyncMode.SYNC


class TestVerySlowRankInLocalMode:
    """A rank becomes so slow that only a spare helps, while AsyncEDiT is on because of a slow link."""

    def poll_slow_rank(self, slow: float, seconds: float) -> PassResult:
        result, observation = enter_local_mode()
        observation = replace(observation, metrics=replace(WELL, relative_time=slow))
        for _ in range(int(seconds / 2)):
            request = result.desired.requests.evidence_name
            own = (OWN, OWN, slow * OWN, OWN)
            evidence = windows(request, own=own, mode=SyncMode.ASYNC_EDIT, transfer=0.25) if request else ()
            observation = advance_observation(result, observation, 2.0, evidence=evidence)
            result = evaluate_job(observation, build_policy())
            if list_decisions(result):
                break
        return result

    def test_a_very_slow_rank_is_replaced_once_the_loss_is_worth_it(self) -> None:
        result = self.poll_slow_rank(5.0, seconds=600)
        (decision,) = list_decisions(result)
        assert (decision.cause, decision.remedy, decision.rank) == (IncidentCause.STRAGGLER, Remedy.REPLACE_WORKER, 2)
        assert decision.slowdown_before is not None
        assert decision.slowdown_before > 1.2
        assert any("rank 2 5.0" in sentence for sentence in decision.evidence)
        (leaving,) = (worker.name for worker in result.desired.state.placement.workers if worker.leaving)
        assert leaving == "j-w2-0"
        assert result.desired.plan.sync_mode is SyncMode.ASYNC_EDIT, "the link is as slow as before"

    def test_a_moderately_slow_rank_stays(self) -> None:
        assert not list_decisions(self.poll_slow_rank(2.5, seconds=600))


class TestReturnToSync:
    def evaluate_next_answer(
        self, result: PassResult, observation: Observation, policy: Policy | None = None, **windows_options: Any
    ) -> tuple[PassResult, Observation]:
        """Return the pass after the answer to the next request."""
        policy = policy or build_policy()
        while not result.desired.requests.evidence_name:
            observation = advance_observation(result, observation, 1.0)
            result = evaluate_job(observation, policy)
        observation = answer_request(result, observation, mode=SyncMode.ASYNC_EDIT, **windows_options)
        return evaluate_job(observation, policy), observation

    def test_training_returns_to_sync_when_the_link_is_well_twice_in_a_row(self) -> None:
        result, observation = enter_local_mode()
        observation = replace(observation, metrics=WELL)
        result, observation = self.evaluate_next_answer(result, observation, transfer=0.25)
        assert result.desired.plan.sync_mode is SyncMode.ASYNC_EDIT
        observation = replace(observation, now=observation.now + SYNC_MODE_COOL_DOWN_SECONDS)
        result, observation = self.evaluate_next_answer(result, observation, transfer=0.03)
        assert result.desired.plan.sync_mode is SyncMode.ASYNC_EDIT, "once may be chance"
        result, observation = self.evaluate_next_answer(result, observation, transfer=0.03)
        plan, state = result.desired.plan, result.desired.state
        assert (plan.sync_mode, plan.membership) == (SyncMode.SYNC, 1)
        assert plan.shares in (None, (8, 8, 8, 8))
        assert state.adaptation.local_sgd is None
        assert "synchronous step" in state.adaptation.mode_reason

    @pytest.mark.parametrize(("transfer", "mode"), [(0.08, SyncMode.SYNC), (0.15, SyncMode.ASYNC_EDIT)])
    def test_a_synchronization_may_take_longer_than_a_steps_all_reduce(self, transfer: float, mode: SyncMode) -> None:
        result, observation = enter_local_mode()
        observation = replace(observation, now=observation.now + SYNC_MODE_COOL_DOWN_SECONDS, metrics=WELL)
        for _ in range(2):
            result, observation = self.evaluate_next_answer(result, observation, transfer=transfer)
        assert result.desired.plan.sync_mode is mode

    def test_only_the_last_synchronizations_count(self) -> None:
        """The link was slow for long before."""
        result, observation = enter_local_mode()
        observation = replace(observation, now=observation.now + SYNC_MODE_COOL_DOWN_SECONDS, metrics=WELL)
        for _ in range(2):
            result, observation = self.evaluate_next_answer(result, observation, transfer=(*(0.25,) * 20, *(0.03,) * 4))
        assert result.desired.plan.sync_mode is SyncMode.SYNC

    @pytest.mark.parametrize(("allow", "shares"), [(set(Remedy), True), ({Remedy.LOCAL_SGD}, False)])
    def test_training_returns_with_other_shares_only_where_these_are_allowed(
        self, allow: set[Remedy], shares: bool
    ) -> None:
        """A rank has become slow at the same time."""
        result, observation = enter_local_mode()
        observation = change_members(
            replace(observation, now=observation.now + SYNC_MODE_COOL_DOWN_SECONDS, metrics=WELL),
            training={"global_batch": 128},
        )
        policy = build_policy(allow=frozenset(allow))
        own = (OWN, OWN, 1.25 * OWN, OWN)
        for _ in range(2):
            result, observation = self.evaluate_next_answer(
                result, observation, policy, transfer=0.03, own=own, shares=(32,) * 4
            )
        assert result.desired.plan.sync_mode is SyncMode.SYNC
        assert (result.desired.plan.shares is not None) == shares

    def test_training_does_not_return_before_the_cool_down(self) -> None:
        result, observation = enter_local_mode()
        for _ in range(2):
            result, observation = self.evaluate_next_answer(result, observation, transfer=0.03)
        assert result.desired.state.adaptation.local_sgd is not None
        assert observation.now - result.desired.state.adaptation.local_sgd.since < SYNC_MODE_COOL_DOWN_SECONDS
        assert result.desired.plan.sync_mode is SyncMode.ASYNC_EDIT

    def test_a_flapping_link_is_followed_more_and_more_slowly(self) -> None:
        result, observation = enter_local_mode()
        hold = result.desired.state.adaptation.mode_changes.hold_seconds
        observation = change_members(
            advance_observation(result, observation, hold, metrics=WELL), progress={"step": 560}
        )
        result = evaluate_job(observation, build_policy())
        assert not result.desired.state.incidents.open, "the effect is measured"
        for _ in range(2):
            result, observation = self.evaluate_next_answer(result, observation, transfer=0.03)
        assert result.desired.plan.sync_mode is SyncMode.SYNC
        observation = change_members(
            advance_observation(result, observation, 5.0, metrics=SLOW_LINK), training={"sync_mode": "Sync"}
        )
        again, observation = evaluate_after_answers(observation, exposed=0.25)
        assert again.desired.plan.sync_mode is SyncMode.ASYNC_EDIT, "at once"
        assert again.desired.state.adaptation.mode_changes.hold_seconds == 2 * hold, "but not back"

    def test_evidence_requests_become_rarer_over_time(self) -> None:
        result, observation = enter_local_mode()
        adaptation = result.desired.state.adaptation.local_sgd
        assert adaptation is not None
        old = replace(adaptation, since=observation.now - 600)
        desired = result.desired.with_adaptation(local_sgd=old).with_requests(revert=RevertRequest(observation.now))
        observation = observation.with_desired(desired)
        assert not evaluate_job(
            replace(observation, now=observation.now + 30), build_policy()
        ).desired.requests.evidence_name
        assert evaluate_job(
            replace(observation, now=observation.now + 70), build_policy()
        ).desired.requests.evidence_name

    @pytest.mark.parametrize("wanted", [RequestedSyncMode.EDIT, RequestedSyncMode.ASYNC_EDIT])
    def test_a_mode_that_the_spec_requests_is_set_and_stays(self, wanted: RequestedSyncMode) -> None:
        observation = replace(build_training(job=build_job(sync_mode=wanted)), metrics=WELL)
        result = evaluate_job(observation, build_policy())
        assert result.desired.plan.sync_mode is SyncMode(wanted)
        later_on = change_members(advance_observation(result, observation, 600.0), training={"sync_mode": str(wanted)})
        assert evaluate_job(later_on, build_policy()).desired.plan == result.desired.plan

    def test_auto_reverts_a_mode_that_the_spec_requested(self) -> None:
        observation = change_members(replace(build_training(), metrics=WELL), training={"sync_mode": "EDiT"})
        observation = observation.with_desired(observation.desired.with_plan(sync_mode=SyncMode.EDIT))
        assert evaluate_job(observation, build_policy()).desired.plan.sync_mode is SyncMode.SYNC

    def test_a_mode_that_the_operator_chose_gives_way_to_the_spec(self) -> None:
        result, observation = enter_local_mode()
        wanted = replace(observation.with_desired(result.desired), job=build_job(sync_mode=RequestedSyncMode.SYNC))
        after = evaluate_job(wanted, build_policy()).desired
        assert after.plan.sync_mode is SyncMode.SYNC
        assert after.state.adaptation.local_sgd is None

    def test_no_other_mode_is_chosen_against_the_spec(self) -> None:
        observation = replace(build_training(job=build_job(sync_mode=RequestedSyncMode.SYNC)), metrics=SLOW_LINK)
        result, _ = evaluate_after_answers(change_members(observation, training={"sync_mode": "Sync"}), exposed=0.25)
        assert result.desired.plan.sync_mode is SyncMode.SYNC

    def test_the_mode_outlasts_a_round(self) -> None:
        result, observation = enter_local_mode()
        assert isinstance(result.desired.state.adaptation.local_sgd, LocalSgdChoice)
        observation = change_members(
            advance_observation(result, observation, 5.0, metrics=WELL), round=2, progress={"steps_in_round": 3}
        )
        after = evaluate_job(observation, build_policy()).desired
        assert after.plan.sync_mode is SyncMode.ASYNC_EDIT
        assert after.state.adaptation.local_sgd is not None
        assert not after.requests.evidence_name, "a new round shows nothing yet"
