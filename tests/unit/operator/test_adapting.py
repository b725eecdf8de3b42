"""A job that changes how it trains: from the first sign to another mode, and back when the trouble is over."""

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
from pacekeeper_operator.state.observation import Observation
from pacekeeper_operator.state.policy import Policy
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
    """Of four ranks with `own` seconds of work in a step; `exposed`: seconds of a step in which all wait.

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


def in_turns(depth: float) -> Any:
    """For `windows`: in each step another rank takes 1 + `depth` times as long."""
    return 1.0 + depth * np.eye(4)[np.random.default_rng(3).integers(0, 4, STEPS)]


def later(thought: PassResult, world: Observation, seconds: float, **changes: Any) -> Observation:
    return replace(world.with_desired(thought.desired), now=world.now + seconds, **changes)


def answered(thought: PassResult, world: Observation, **of_windows: Any) -> Observation:
    """A second later, when the ranks have answered the question that is out."""
    request = thought.desired.plan.evidence_request
    assert request
    return later(thought, world, 1.0, evidence=windows(request, **of_windows))


def looked_into(
    world: Observation, of_policy: Policy | None = None, **of_windows: Any
) -> tuple[PassResult, Observation]:
    """The pass upon the ranks' answers to what the metrics raise, the second one if need be; and the world it saw."""
    of_policy = of_policy or build_policy()
    world = answered(evaluate_job(world, of_policy), world, **of_windows)
    thought = evaluate_job(world, of_policy)
    if not list_decisions(thought):
        world = later(thought, world, 6.0)
        world = answered(evaluate_job(world, of_policy), world, **of_windows)
        thought = evaluate_job(world, of_policy)
    return thought, world


def decided(metrics: JobMetrics = SLOW_LINK, **of_windows: Any) -> tuple[PassResult, Observation]:
    return looked_into(
        change_members(replace(build_training(), metrics=metrics), training={"sync_mode": "Sync"}), **of_windows
    )


def in_local_mode() -> tuple[PassResult, Observation]:
    """After a slow link, with the ranks in the mode that was wanted."""
    thought, world = decided(exposed=0.25)
    assert thought.desired.plan.sync_mode is SyncMode.ASYNC_EDIT
    return thought, change_members(world, training={"sync_mode": "AsyncEDiT"})


class TestIntoLocalSgd:
    def test_a_slow_link_is_answered_by_local_sgd_on_the_fly(self) -> None:
        thought, _ = decided(exposed=0.25)
        plan = thought.desired.plan
        assert (plan.sync_mode, plan.membership, plan.evidence_request) == (SyncMode.ASYNC_EDIT, 1, "")
        assert plan.sync_seconds > 1.0
        (incident,) = thought.desired.state.incidents.current
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
            for c in build_job_status(thought.observation, build_policy(), JobStatus()).conditions
            if c.type == JobCondition.DEGRADED
        )
        assert (degraded.status, degraded.reason) == ("True", Reason.LOCAL_SGD_ACTIVE)

    def test_one_answer_is_not_enough(self) -> None:
        world = change_members(replace(build_training(), metrics=SLOW_LINK), training={"sync_mode": "Sync"})
        once = evaluate_job(answered(evaluate_job(world, build_policy()), world, exposed=0.25), build_policy())
        assert once.desired.plan.sync_mode is SyncMode.SYNC
        assert not list_decisions(once)

    def test_what_it_was_for_is_remembered_over_a_restart_of_the_operator(self) -> None:
        thought, world = in_local_mode()
        adaptation = thought.desired.state.adaptation.local_sgd
        assert adaptation is not None
        assert (adaptation.bottleneck, adaptation.since) == (Bottleneck.COMMUNICATION, world.now)
        assert state_codec.decode_state(state_codec.encode_state(thought.desired, "j"), "j").desired == thought.desired

    @pytest.mark.parametrize(
        ("first", "mode"), [(FIRST, SyncMode.ASYNC_EDIT), (0.17, SyncMode.SYNC), (0, SyncMode.SYNC)]
    )
    def test_ranks_that_are_slow_in_turns_too_unless_they_have_always_been(self, first: float, mode: SyncMode) -> None:
        thought, _ = decided(drawn=in_turns(1.0), first=first)
        assert thought.desired.plan.sync_mode is mode
        assert [i.cause for i in thought.desired.state.incidents.current] == [IncidentCause.VOLATILE] * (
            mode is not SyncMode.SYNC
        )

    @pytest.mark.parametrize(
        ("depth", "first", "mode"),
        [(0.25, 0.06, SyncMode.ASYNC_EDIT), (0.25, 0.07, SyncMode.SYNC), (0.35, 0.1, SyncMode.SYNC)],
    )
    def test_a_little_in_turns_is_the_jobs_own_way_unless_steps_take_much_longer_than_the_first(
        self, depth: float, first: float, mode: SyncMode
    ) -> None:
        """Of 0.09 s each."""
        thought, _ = decided(drawn=in_turns(depth), first=first, exposed=0.002)
        assert thought.desired.plan.sync_mode is mode

    def test_garbage_collections_are_planned_and_training_stays_exact(self) -> None:
        thought, _ = decided(exposed=0.02, garbage={rank: range(2 * rank, STEPS, 8) for rank in range(4)})
        plan = thought.desired.plan
        assert plan.sync_mode is SyncMode.SYNC
        assert plan.gc_every > 0
        assert thought.desired.state.incidents.current[0].remedy is Remedy.PLAN_GC

    @pytest.mark.parametrize(
        ("changes", "allow", "words"),
        [({}, {Remedy.REBALANCE}, "spec.remediation.allow"), ({"managed": False}, set(Remedy), "library")],
    )
    def test_where_it_may_not_be_the_trouble_is_written_down_once(
        self, changes: dict[str, Any], allow: set[Remedy], words: str
    ) -> None:
        of_policy, training = build_policy(allow=frozenset(allow)), {"sync_mode": "Sync", **changes}
        world = change_members(replace(build_training(), metrics=SLOW_LINK), training=training)
        thought, world = looked_into(world, of_policy, exposed=0.25)
        assert thought.desired.plan.sync_mode is SyncMode.SYNC
        (incident,) = thought.desired.state.incidents.current
        assert incident.remedy is None
        assert incident.outcome is IncidentOutcome.INEFFECTIVE
        assert words in next(price.reason for price in incident.remedies if price.name == "LocalSGD")
        assert not evaluate_job(later(thought, world, 10.0), of_policy).desired.plan.evidence_request

    def test_a_rank_at_half_speed_gets_fewer_samples_and_no_local_sgd(self) -> None:
        thought, _ = decided(replace(WELL, relative_time=2.0), own=(OWN, OWN, 2 * OWN, OWN))
        assert thought.desired.plan.sync_mode is SyncMode.SYNC
        assert thought.desired.plan.shares is not None
        assert thought.desired.plan.shares[2] < 6

    def test_nor_when_its_shares_are_as_good_as_whole_samples_let_them_be(self) -> None:
        shares = (10, 9, 4, 9)
        world = change_members(
            replace(build_training(), metrics=replace(WELL, relative_time=2.2)), training={"sync_mode": "Sync"}
        )
        world = world.with_desired(world.desired.with_plan(shares=shares))
        own = tuple(OWN / 8 * share * slow for share, slow in zip(shares, (1, 1, 2.2, 1), strict=True))
        world = answered(evaluate_job(world, build_policy()), world, own=own, shares=shares)
        thought = evaluate_job(replace(world, now=world.now + 6.0), build_policy())
        assert thought.desired.state.adaptation.investigation is None, "and that settles it"
        assert thought.desired.plan.sync_mode is SyncMode.SYNC
        assert not any(worker.leaving for worker in thought.desired.state.placement.workers), "nor a spare"

    def test_shares_whose_straggler_has_recovered_become_equal_again(self) -> None:
        world = change_members(replace(build_training(), metrics=WELL), training={"sync_mode": "Sync"})
        world = world.with_desired(world.desired.with_plan(shares=(10, 9, 4, 9)))
        own = tuple(OWN / 8 * share for share in (10, 9, 4, 9))
        world = answered(evaluate_job(world, build_policy()), world, own=own, shares=(10, 9, 4, 9))
        assert evaluate_job(world, build_policy()).desired.plan.shares == (8, 8, 8, 8)


class TestLengths:
    """Sequences that cost as the square of their length, dealt as they come."""

    UNEVEN = replace(WELL, wait_share=0.3)

    def of(self, seed: int) -> dict[str, Any]:
        lengths = np.rint(np.random.default_rng(seed).lognormal(6.0, 0.8, (STEPS, 4, 8)))
        squares = np.square(lengths).sum(axis=2)
        return {"lengths": lengths, "drawn": squares / squares.mean()}

    def balanced(self) -> tuple[PassResult, Observation]:
        return decided(self.UNEVEN, **self.of(1))

    def test_are_balanced_by_what_they_cost(self) -> None:
        thought, _ = self.balanced()
        plan = thought.desired.plan
        assert (plan.sync_mode, plan.shares, plan.membership) == (SyncMode.SYNC, None, 1)
        assert plan.sequence_cost is not None
        fixed, per_token, per_token_squared = plan.sequence_cost
        assert max(fixed, 400 * per_token) < 0.05 * 400**2 * per_token_squared
        (incident,) = thought.desired.state.incidents.current
        assert (incident.cause, incident.remedy) == (IncidentCause.UNEVEN_LENGTHS, Remedy.BALANCE_LENGTHS)
        assert incident.live
        assert state_codec.decode_state(state_codec.encode_state(thought.desired, "j"), "j").desired == thought.desired

    def test_and_left_alone_where_single_ones_outweigh_the_others(self) -> None:
        """The windows stay as uneven; what is fitted to each of them differs by noise."""
        thought, world = self.balanced()
        plan = thought.desired.plan
        changed = 0
        for look in range(30):
            world = later(thought, world, 20.0, metrics=replace(self.UNEVEN, throughput=32 / 0.2), evidence=())
            world = change_members(world, progress={"step": 560 + 40 * look})
            request = thought.desired.plan.evidence_request
            world = replace(world, evidence=windows(request, **self.of(2 + look)) if request else ())
            thought = evaluate_job(world, build_policy())
            changed += thought.desired.plan.sequence_cost != plan.sequence_cost
        assert not changed
        assert len(thought.desired.state.incidents.closed) == 1
        assert thought.desired.state.adaptation.fruitless_investigation is not None
        assert thought.desired.state.adaptation.fruitless_investigation.cool_down_seconds > 100, (
            "looked into ever more seldom"
        )

    def little(self, look: int, *, known: bool = True, sigma: float = 0.15, **of_windows: Any) -> dict[str, Any]:
        """Windows whose lengths cost 1.03 to 1.06 ×. known: to the loaders, which could balance them."""
        lengths = np.rint(np.random.default_rng(look).lognormal(6.0, sigma, (STEPS, 4, 8)))
        costs = lengths.sum(axis=2)
        return {"lengths": lengths, "drawn": costs / costs.mean(), "balanceable": known, **of_windows}

    @pytest.mark.parametrize(
        ("known", "of_policy"),
        [
            pytest.param(False, build_policy(), id="the loaders do not know them"),
            pytest.param(True, build_policy(allow=frozenset({Remedy.REBALANCE})), id="not allowed"),
            pytest.param(True, build_policy(mode=RemediationMode.RECOMMEND), id="only recommended"),
        ],
    )
    def test_and_where_they_cost_little_and_cannot_or_may_not_be(self, known: bool, of_policy: Policy) -> None:
        """Balanced they are from 1.01 on; where they are not, that is no reason to ask for ever, nor for a word."""
        world = change_members(replace(build_training(), metrics=self.UNEVEN), training={"sync_mode": "Sync"})
        thought = evaluate_job(world, of_policy)
        for look in range(30):
            world = change_members(later(thought, world, 20.0, evidence=()), progress={"step": 560 + 40 * look})
            request = thought.desired.plan.evidence_request
            evidence = windows(request, **self.little(look, known=known)) if request else ()
            thought = evaluate_job(replace(world, evidence=evidence), of_policy)
        assert not thought.desired.state.incidents.current
        assert not thought.desired.state.incidents.recommended
        assert thought.desired.state.adaptation.fruitless_investigation is not None
        assert thought.desired.state.adaptation.fruitless_investigation.cool_down_seconds > 100, (
            "looked into ever more seldom"
        )

    def test_that_nobody_can_balance_hide_no_rank_that_is_slow_by_less(self) -> None:
        pace, second = 1.04, 0
        of_rank = tuple(OWN * (pace if rank == 2 else 1.0) for rank in range(4))
        world = change_members(build_training(spares=1), training={"sync_mode": "Sync"})
        lasting = PersistentSlowness(KnownRelativeTimes({2: pace}, 0.003), world.now - 60)
        metrics = replace(WELL, relative_time=pace, slowest_rank=2, persistent_slowness=lasting)
        world = replace(world, metrics=metrics).with_desired(world.desired.with_budget(restart_seconds=20.0))
        thought = evaluate_job(world, build_policy())
        while not (taken := list_decisions(thought)) and second < 3000:
            second += 20
            world = change_members(later(thought, world, 20.0, evidence=()), progress={"step": 560 + 2 * second})
            request = thought.desired.plan.evidence_request
            told = self.little(second, known=False, sigma=0.25, own=of_rank)
            thought = evaluate_job(replace(world, evidence=windows(request, **told) if request else ()), build_policy())
        assert [(each.cause, each.remedy, each.rank) for each in taken] == [
            (IncidentCause.STRAGGLER, Remedy.REPLACE_WORKER, 2)
        ]

    @pytest.mark.parametrize("first", [0.11, 0.0], ids=["as in the first steps", "those are not known"])
    def test_ranks_that_have_always_come_and_gone_hide_none_that_are_little(self, first: float) -> None:
        """In a large job of ranks that scatter all wait for some rank in each step, for more than lengths cost."""
        drawn = np.random.default_rng(2).normal(1.0, 0.2, (STEPS, 4))
        of_lengths = self.little(1, sigma=0.4)
        scatter = {**of_lengths, "drawn": of_lengths["drawn"] * drawn, "first": first, "exposed": 0.02}
        thought, _ = decided(self.UNEVEN, **scatter)
        (incident,) = thought.desired.state.incidents.current
        assert incident.remedy is Remedy.BALANCE_LENGTHS
        scatter = {"drawn": drawn, "first": first, "exposed": 0.02}
        assert not decided(self.UNEVEN, **scatter)[0].desired.state.incidents.current

    def test_what_was_too_little_to_be_measured_has_helped_unless_steps_are_longer(self) -> None:
        for seconds, outcome in ((0.1, IncidentOutcome.RECOVERED), (0.104, IncidentOutcome.INEFFECTIVE)):
            thought, world = decided(self.UNEVEN, **self.little(1, sigma=0.05), exposed=0.0)
            (incident,) = thought.desired.state.incidents.current
            assert incident.remedy is Remedy.BALANCE_LENGTHS
            before, reference = incident.slowdown_before, incident.reference_seconds
            assert before is not None
            assert reference is not None
            assert 1.01 < before < 1.02
            world = later(thought, world, 10.0, metrics=replace(WELL, throughput=32 / (reference * seconds / 0.1)))
            (incident,) = evaluate_job(
                change_members(world, progress={"step": 560}), build_policy()
            ).desired.state.incidents.current
            assert incident.outcome is outcome

    def test_where_they_may_not_be_it_is_written_down_once(self) -> None:
        of_policy = build_policy(allow=frozenset({Remedy.REBALANCE}))
        world = change_members(replace(build_training(), metrics=self.UNEVEN), training={"sync_mode": "Sync"})
        thought, world = looked_into(world, of_policy, **self.of(1))
        assert thought.desired.plan.sequence_cost is None
        (incident,) = thought.desired.state.incidents.current
        assert (incident.cause, incident.remedy) == (IncidentCause.UNEVEN_LENGTHS, None)
        (considered,) = incident.remedies
        assert considered.name == "BalanceLengths"
        assert "spec.remediation.allow" in considered.reason
        assert not evaluate_job(later(thought, world, 10.0), of_policy).desired.plan.evidence_request

    def test_a_plan_that_the_ranks_cannot_follow_is_taken_back(self) -> None:
        thought, world = self.balanced()
        words = "sequence_cost: the lengths of samples are unknown"
        refused = evaluate_job(change_members(later(thought, world, 1.0), training={"refused": words}), build_policy())
        assert refused.desired.plan.sequence_cost is None
        (incident,) = refused.desired.state.incidents.current
        assert incident.outcome is IncidentOutcome.INEFFECTIVE
        assert words in incident.evidence[-1]


class TestLookingInVain:
    WAITS = replace(WELL, wait_share=0.3)

    def vain(self) -> tuple[PassResult, Observation]:
        """A job that has always waited like this was looked into."""
        world = change_members(replace(build_training(), metrics=self.WAITS), training={"sync_mode": "Sync"})
        world = answered(evaluate_job(world, build_policy()), world)
        thought = evaluate_job(world, build_policy())
        assert not list_decisions(thought)
        world = change_members(later(thought, world, 30.0), progress={"step": 600})
        return evaluate_job(world, build_policy()), world

    def test_a_job_that_has_always_waited_is_left_alone(self) -> None:
        thought, world = self.vain()
        assert not thought.desired.plan.evidence_request
        assert thought.desired.state.adaptation.investigation is None
        quiet = evaluate_job(later(thought, world, 20.0), build_policy())
        assert quiet.desired == thought.desired

    def test_but_not_while_the_answers_begin_to_show_something(self) -> None:
        """A link that becomes slow just when patience is over."""
        world = change_members(replace(build_training(), metrics=self.WAITS), training={"sync_mode": "Sync"})
        thought = evaluate_job(world, build_policy())
        world = later(thought, world, 15.0, evidence=windows(thought.desired.plan.evidence_request, exposed=0.25))
        thought = evaluate_job(world, build_policy())
        world = later(thought, world, 15.0, evidence=windows(thought.desired.plan.evidence_request, exposed=0.25))
        assert evaluate_job(world, build_policy()).desired.plan.sync_mode is SyncMode.ASYNC_EDIT

    def test_steps_that_grow_while_it_is_looked_into_are_news(self) -> None:
        """They must not be taken for what was found to be nothing."""
        world = change_members(replace(build_training(), metrics=self.WAITS), training={"sync_mode": "Sync"})
        world = later(evaluate_job(world, build_policy()), world, 30.0, metrics=SLOW_LINK)
        thought = evaluate_job(world, build_policy())
        assert thought.desired.state.adaptation.fruitless_investigation is None
        assert thought.desired.plan.evidence_request
        assert thought.desired.state.adaptation.investigation is not None
        assert thought.desired.state.adaptation.investigation.since == world.now

    @pytest.mark.parametrize("longer", [1.01, 1.03, 3.0])
    def test_it_is_looked_into_again_at_once_when_its_steps_grow(self, longer: float) -> None:
        """By what little of their trouble is dealt with, too."""
        thought, world = self.vain()
        worse = later(thought, world, 5.0, metrics=replace(self.WAITS, step_seconds=longer * FIRST))
        assert bool(evaluate_job(worse, build_policy()).desired.plan.evidence_request) is (longer > 1.025)

    def test_what_is_longer_by_luck_is_news_a_few_times(self) -> None:
        """Windows' mean steps that scatter by 2 %, for an hour, in a job that has always waited."""
        random, thought, world = np.random.default_rng(0), *self.vain()
        looks, looking = 0, False
        for _ in range(720):
            metrics = replace(self.WAITS, step_seconds=FIRST * (1 + 0.02 * random.standard_normal()))
            world = change_members(later(thought, world, 5.0, metrics=metrics, evidence=()), progress={"step": 560})
            request = thought.desired.plan.evidence_request
            thought = evaluate_job(replace(world, evidence=windows(request) if request else ()), build_policy())
            began = thought.desired.state.adaptation.investigation is not None
            looks, looking = looks + (began and not looking), began
        assert looks <= 7
        assert not thought.desired.state.incidents.current


class TestMeasured:
    @pytest.mark.parametrize(
        ("seconds", "outcome"),
        [(0.09, IncidentOutcome.RECOVERED), (0.15, IncidentOutcome.MITIGATED), (0.35, IncidentOutcome.INEFFECTIVE)],
    )
    def test_by_the_samples_a_second(self, seconds: float, outcome: IncidentOutcome) -> None:
        thought, world = in_local_mode()
        world = later(thought, world, 10.0, metrics=replace(WELL, throughput=32 / seconds))
        early = evaluate_job(world, build_policy())
        assert early.desired.state.incidents.open
        (incident,) = evaluate_job(
            change_members(world, progress={"step": 560}), build_policy()
        ).desired.state.incidents.current
        assert incident.outcome is outcome
        assert incident.slowdown_after == pytest.approx(max(1.0, seconds / 0.1), rel=0.1)

    def test_what_has_not_helped_is_taken_back(self) -> None:
        thought, world = in_local_mode()
        world = later(thought, world, 10.0, metrics=replace(SLOW_LINK, throughput=32 / 0.35))
        back = evaluate_job(change_members(world, progress={"step": 560}), build_policy())
        assert back.desired.plan.sync_mode is SyncMode.SYNC
        assert back.desired.state.adaptation.local_sgd is None
        assert not back.desired.state.adaptation.mode_changes.allows(world.now + SYNC_MODE_COOL_DOWN_SECONDS)
        world = change_members(later(back, world, 5.0, metrics=SLOW_LINK), training={"sync_mode": "Sync"})
        held, world = looked_into(world, exposed=0.25)
        held, world = looked_into(later(held, world, 6.0), exposed=0.25)
        assert held.desired.plan.sync_mode is SyncMode.SYNC
        assert not list_decisions(held), "nothing to write down while the mode is only held"

    def test_ranks_that_refuse_it_go_on_in_sync_and_are_not_asked_again(self) -> None:
        thought, world = in_local_mode()
        world = change_members(later(thought, world, 1.0), training={"refused": "the mesh has no dimension sync"})
        refused = evaluate_job(world, build_policy())
        assert refused.desired.plan.sync_mode is SyncMode.SYNC
        (incident,) = refused.desired.state.incidents.current
        assert incident.outcome is IncidentOutcome.INEFFECTIVE
        assert "no dimension sync" in incident.evidence[-1]
        world = change_members(
            later(refused, world, 3600.0),
            training={"refused": "", "sync_mode": "Sync"},
            progress={"steps_in_round": 600},
        )
        thought, _ = looked_into(world, exposed=0.25)
        assert thought.desired.plan.sync_mode is SyncMode.SYNC


class TestBroken:
    """A rank that becomes so slow that nothing but a spare helps, while a slow link has brought AsyncEDiT about."""

    def looks(self, slow: float, seconds: float) -> PassResult:
        thought, world = in_local_mode()
        world = replace(world, metrics=replace(WELL, relative_time=slow))
        for _ in range(int(seconds / 2)):
            request = thought.desired.plan.evidence_request
            own = (OWN, OWN, slow * OWN, OWN)
            asked = windows(request, own=own, mode=SyncMode.ASYNC_EDIT, transfer=0.25) if request else ()
            world = later(thought, world, 2.0, evidence=asked)
            thought = evaluate_job(world, build_policy())
            if list_decisions(thought):
                break
        return thought

    def test_goes_once_the_loss_is_worth_it(self) -> None:
        thought = self.looks(5.0, seconds=600)
        (decision,) = list_decisions(thought)
        assert (decision.cause, decision.remedy, decision.rank) == (IncidentCause.STRAGGLER, Remedy.REPLACE_WORKER, 2)
        assert decision.slowdown_before is not None
        assert decision.slowdown_before > 1.2
        assert any("rank 2 5.0" in sentence for sentence in decision.evidence)
        (leaving,) = (worker.name for worker in thought.desired.state.placement.workers if worker.leaving)
        assert leaving == "j-w2-0"
        assert thought.desired.plan.sync_mode is SyncMode.ASYNC_EDIT, "the link is as slow as before"

    def test_a_rank_that_is_only_slow_stays(self) -> None:
        assert not list_decisions(self.looks(2.5, seconds=600))


class TestBack:
    def look(
        self, thought: PassResult, world: Observation, of_policy: Policy | None = None, **of_windows: Any
    ) -> tuple[PassResult, Observation]:
        """The next question, and the pass upon its answer."""
        of_policy = of_policy or build_policy()
        while not thought.desired.plan.evidence_request:
            world = later(thought, world, 1.0)
            thought = evaluate_job(world, of_policy)
        world = answered(thought, world, mode=SyncMode.ASYNC_EDIT, **of_windows)
        return evaluate_job(world, of_policy), world

    def test_when_the_link_is_well_twice_in_a_row(self) -> None:
        thought, world = in_local_mode()
        world = replace(world, metrics=WELL)
        thought, world = self.look(thought, world, transfer=0.25)
        assert thought.desired.plan.sync_mode is SyncMode.ASYNC_EDIT
        world = replace(world, now=world.now + SYNC_MODE_COOL_DOWN_SECONDS)
        thought, world = self.look(thought, world, transfer=0.03)
        assert thought.desired.plan.sync_mode is SyncMode.ASYNC_EDIT, "once may be luck"
        thought, world = self.look(thought, world, transfer=0.03)
        plan, state = thought.desired.plan, thought.desired.state
        assert (plan.sync_mode, plan.membership) == (SyncMode.SYNC, 1)
        assert plan.shares in (None, (8, 8, 8, 8))
        assert state.adaptation.local_sgd is None
        assert "synchronous step" in state.adaptation.mode_reason

    @pytest.mark.parametrize(("transfer", "mode"), [(0.08, SyncMode.SYNC), (0.15, SyncMode.ASYNC_EDIT)])
    def test_a_synchronisation_takes_longer_than_a_step_all_reduces(self, transfer: float, mode: SyncMode) -> None:
        thought, world = in_local_mode()
        world = replace(world, now=world.now + SYNC_MODE_COOL_DOWN_SECONDS, metrics=WELL)
        for _ in range(2):
            thought, world = self.look(thought, world, transfer=transfer)
        assert thought.desired.plan.sync_mode is mode

    def test_only_the_last_synchronisations_count(self) -> None:
        """Of a link that was slow for long."""
        thought, world = in_local_mode()
        world = replace(world, now=world.now + SYNC_MODE_COOL_DOWN_SECONDS, metrics=WELL)
        for _ in range(2):
            thought, world = self.look(thought, world, transfer=(*(0.25,) * 20, *(0.03,) * 4))
        assert thought.desired.plan.sync_mode is SyncMode.SYNC

    @pytest.mark.parametrize(("allow", "shares"), [(set(Remedy), True), ({Remedy.LOCAL_SGD}, False)])
    def test_to_other_shares_only_where_these_are_allowed(self, allow: set[Remedy], shares: bool) -> None:
        """A rank has become slow meanwhile."""
        thought, world = in_local_mode()
        world = change_members(
            replace(world, now=world.now + SYNC_MODE_COOL_DOWN_SECONDS, metrics=WELL), training={"global_batch": 128}
        )
        of_policy = build_policy(allow=frozenset(allow))
        own = (OWN, OWN, 1.25 * OWN, OWN)
        for _ in range(2):
            thought, world = self.look(thought, world, of_policy, transfer=0.03, own=own, shares=(32,) * 4)
        assert thought.desired.plan.sync_mode is SyncMode.SYNC
        assert (thought.desired.plan.shares is not None) == shares

    def test_not_before_the_mode_has_had_its_time(self) -> None:
        thought, world = in_local_mode()
        for _ in range(2):
            thought, world = self.look(thought, world, transfer=0.03)
        assert thought.desired.state.adaptation.local_sgd is not None
        assert world.now - thought.desired.state.adaptation.local_sgd.since < SYNC_MODE_COOL_DOWN_SECONDS
        assert thought.desired.plan.sync_mode is SyncMode.ASYNC_EDIT

    def test_a_link_that_comes_and_goes_is_followed_ever_more_slowly(self) -> None:
        thought, world = in_local_mode()
        hold = thought.desired.state.adaptation.mode_changes.hold_seconds
        world = change_members(later(thought, world, hold, metrics=WELL), progress={"step": 560})
        thought = evaluate_job(world, build_policy())
        assert not thought.desired.state.incidents.open, "measured"
        for _ in range(2):
            thought, world = self.look(thought, world, transfer=0.03)
        assert thought.desired.plan.sync_mode is SyncMode.SYNC
        world = change_members(later(thought, world, 5.0, metrics=SLOW_LINK), training={"sync_mode": "Sync"})
        again, world = looked_into(world, exposed=0.25)
        assert again.desired.plan.sync_mode is SyncMode.ASYNC_EDIT, "at once"
        assert again.desired.state.adaptation.mode_changes.hold_seconds == 2 * hold, "but not back"

    def test_questions_get_rarer_with_the_time(self) -> None:
        thought, world = in_local_mode()
        adaptation = thought.desired.state.adaptation.local_sgd
        assert adaptation is not None
        old = replace(adaptation, since=world.now - 600, requested_at=world.now)
        world = world.with_desired(thought.desired.with_adaptation(local_sgd=old))
        assert not evaluate_job(replace(world, now=world.now + 30), build_policy()).desired.plan.evidence_request
        assert evaluate_job(replace(world, now=world.now + 70), build_policy()).desired.plan.evidence_request

    @pytest.mark.parametrize("wanted", [RequestedSyncMode.EDIT, RequestedSyncMode.ASYNC_EDIT])
    def test_a_mode_that_the_spec_wants_is_put_in_force_and_stays(self, wanted: RequestedSyncMode) -> None:
        world = replace(build_training(job=build_job(sync_mode=wanted)), metrics=WELL)
        thought = evaluate_job(world, build_policy())
        assert thought.desired.plan.sync_mode is SyncMode(wanted)
        later_on = change_members(later(thought, world, 600.0), training={"sync_mode": str(wanted)})
        assert evaluate_job(later_on, build_policy()).desired.plan == thought.desired.plan

    def test_and_auto_takes_it_back(self) -> None:
        world = change_members(replace(build_training(), metrics=WELL), training={"sync_mode": "EDiT"})
        world = world.with_desired(world.desired.with_plan(sync_mode=SyncMode.EDIT))
        assert evaluate_job(world, build_policy()).desired.plan.sync_mode is SyncMode.SYNC

    def test_one_that_the_operator_chose_gives_way_to_the_spec(self) -> None:
        thought, world = in_local_mode()
        wanted = replace(world.with_desired(thought.desired), job=build_job(sync_mode=RequestedSyncMode.SYNC))
        after = evaluate_job(wanted, build_policy()).desired
        assert after.plan.sync_mode is SyncMode.SYNC
        assert after.state.adaptation.local_sgd is None

    def test_no_other_mode_is_chosen_against_the_spec(self) -> None:
        world = replace(build_training(job=build_job(sync_mode=RequestedSyncMode.SYNC)), metrics=SLOW_LINK)
        thought, _ = looked_into(change_members(world, training={"sync_mode": "Sync"}), exposed=0.25)
        assert thought.desired.plan.sync_mode is SyncMode.SYNC

    def test_it_outlasts_a_round(self) -> None:
        thought, world = in_local_mode()
        assert isinstance(thought.desired.state.adaptation.local_sgd, LocalSgdChoice)
        world = change_members(later(thought, world, 5.0, metrics=WELL), round=2, progress={"steps_in_round": 3})
        after = evaluate_job(world, build_policy()).desired
        assert after.plan.sync_mode is SyncMode.ASYNC_EDIT
        assert after.state.adaptation.local_sgd is not None
        assert not after.plan.evidence_request, "a young round says nothing of itself"
