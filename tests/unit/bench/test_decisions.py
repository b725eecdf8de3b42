"""Decisions on a coarse clock: the cost model, the clairvoyant, each policy, and the metrics of a job."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from bench import decisions
from bench.scripts.decisions import clairvoyant, draw
from bench.scripts.decisions.draw import Scenario
from bench.scripts.decisions.kinds import KINDS
from bench.scripts.decisions.ours import Ours, is_idle
from bench.scripts.decisions.outcome import (
    USUAL_VARIANTS,
    Decisions,
    Gain,
    Outcome,
    run_calm_scenario,
    run_policies,
)
from bench.scripts.decisions.outcome_statistics import build_summary, compute_aggregates, format_table, format_worst
from bench.scripts.decisions.policies import NEVER, OURS, SHARES_SECONDS, USUAL_POLICIES, SkiRental, Variant
from bench.scripts.decisions.policy_run import Now, PassIntervals, find_first_sign, run_policy
from bench.scripts.decisions.sampled_metrics import SampledMetrics
from bench.scripts.decisions.world import (
    CALM,
    EQUAL_SHARES,
    LOCAL_SGD,
    CostModel,
    JobCosts,
    Segment,
    Setup,
    Spare,
    Strain,
    Timeline,
    TrainingStrategy,
)
from pacekeeper_analysis.stragglers.price import compute_loss_rate
from pacekeeper_operator.api.training_job import Remedy
from pacekeeper_operator.decide.evaluate import evaluate_job
from pacekeeper_operator.state.observation import Observation

JOB = JobCosts(
    workers=4,
    ranks_each=1,
    samples=8,
    sample_seconds=0.05,
    fixed_seconds=0.0,
    transfer_seconds=0.1,
    noise=0.0,
    hiccups=0.0,
    spare=Spare.WARM,
    restart_seconds=20,
)
"""Steps of half a second."""
LEAD_SECONDS = 90
TWICE = Strain(slow=((2, 2.0),), movable=True)
SLOW_LINK = Strain(transfer_seconds=0.5, movable=True)


def build_scenario(
    strain: Strain, seconds: int = 120, job: JobCosts = JOB, depth: float = 1.8, **changes: object
) -> Scenario:
    over = LEAD_SECONDS + seconds
    segments = (Segment(0, LEAD_SECONDS, CALM), Segment(LEAD_SECONDS, over, strain), Segment(over, over + 60, CALM))
    return replace(Scenario(1, "rank", depth, "once", job, Timeline(segments)), **changes)  # type: ignore[arg-type]


def shorten_scenario(drawn: Scenario, seconds: int = 150) -> Scenario:
    """Return the scenario, cut off this many seconds after its onset."""
    until = drawn.timeline.onset + seconds
    segments = [replace(each, end=min(each.end, until)) for each in drawn.timeline.segments if each.begin < until]
    return replace(drawn, timeline=Timeline(tuple(segments)))


class TestCostModel:
    def test_a_step_takes_what_its_last_rank_takes(self) -> None:
        model = CostModel(JOB)
        assert model.usual_seconds == pytest.approx(0.5)
        assert model.step_seconds(EQUAL_SHARES, TWICE) == pytest.approx(0.9)
        assert model.compute_loss(EQUAL_SHARES, TWICE) == pytest.approx(compute_loss_rate(1.8))
        assert model.step_seconds(TrainingStrategy(shares=(9, 9, 5, 9)), TWICE) == pytest.approx(0.6)
        assert model.step_seconds(model.choose_best_exact(TWICE), TWICE) == pytest.approx(0.6)

    def test_local_sgd_waits_only_at_its_synchronizations(self) -> None:
        seconds = CostModel(JOB).step_seconds(LOCAL_SGD, TWICE)
        assert 0.4 * 4 / 3.5 < seconds < 0.4 * 4 / 3.5 * 1.04
        assert CostModel(JOB).synchronisation_seconds(CALM) == pytest.approx(1.3 * (0.4 * 2 / 3 + 0.1) - 0.4 / 3)
        assert CostModel(JOB).step_seconds(LOCAL_SGD, SLOW_LINK) < 0.43

    def test_gains_of_local_sgd_count_only_where_exact_training_has_no_remedy(self) -> None:
        model = CostModel(JOB)
        assert model.compute_loss(LOCAL_SGD, SLOW_LINK) == 0.0
        assert model.compute_loss(LOCAL_SGD, TWICE) == model.compute_loss(model.choose_best_exact(TWICE), TWICE) > 0, (
            "shares mend most of it"
        )
        weak = Strain(transfer_seconds=0.05)
        assert model.compute_loss(LOCAL_SGD, weak) == model.compute_loss(EQUAL_SHARES, weak) > 0, (
            "not worth leaving exact training"
        )
        alike = Strain(all_slow=1.5)
        assert model.compute_loss(LOCAL_SGD, alike) == model.compute_loss(EQUAL_SHARES, alike) > 0, (
            "it is no remedy for that"
        )

    @pytest.mark.parametrize("kind", sorted(KINDS))
    @pytest.mark.parametrize("ranks", [4, 64])
    def test_a_strain_makes_steps_as_long_as_requested(self, kind: str, ranks: int) -> None:
        job = replace(JOB, workers=ranks // 4, ranks_each=4) if ranks > 4 else JOB
        strain = KINDS[kind].make(job, 1.5, np.random.default_rng(0))
        assert CostModel(job).step_seconds(EQUAL_SHARES, strain) / CostModel(job).usual_seconds == pytest.approx(
            1.5, rel=0.06
        )

    def test_plannable_strains_get_the_best_exact_strategy(self) -> None:
        model = CostModel(JOB)
        pauses, uneven = Strain(gc_seconds=1.0), Strain(lengths=0.3)
        assert model.step_seconds(model.choose_best_exact(pauses), pauses) == pytest.approx(0.5 + 1.0 / 20)
        assert model.step_seconds(model.choose_best_exact(uneven), uneven) == pytest.approx(0.5)


class TestPhases:
    """Evaluations and checkpoints contain no steps, and none is slow."""

    JOB = replace(JOB, phase_every=60, phase_seconds=15)

    def test_training_fills_the_rest_of_the_time(self) -> None:
        assert [self.JOB.compute_trained_seconds(until) for until in (0, 44, 45, 60, 61.5, 120)] == [
            0,
            44,
            45,
            45,
            46.5,
            90,
        ]
        assert [self.JOB.find_time(trained) for trained in (0, 44, 46.5, 91)] == [0, 44, 61.5, 121]
        assert [second for second in range(120) if not self.JOB.is_training(second)] == [
            *range(45, 60),
            *range(105, 120),
        ]

    def test_phases_cause_no_loss_and_no_evidence(self) -> None:
        scenario, model = build_scenario(TWICE, job=self.JOB), CostModel(self.JOB)
        played = run_policy(scenario, model, Variant(NEVER).begin(scenario, model))
        whole = run_policy(build_scenario(TWICE), CostModel(JOB), Variant(NEVER).begin(scenario, model))
        assert played.cost() == pytest.approx(whole.cost() * (120 - 30) / 120)
        late = find_first_sign(build_scenario(TWICE)) - LEAD_SECONDS
        assert find_first_sign(scenario) == LEAD_SECONDS + (late if late <= 15 else late + 15)
        metrics = SampledMetrics(model, 1)
        metrics.extend(0.0, EQUAL_SHARES, CALM)
        assert metrics.count_done_steps(45.2) == metrics.count_done_steps(59.9) == pytest.approx(90, abs=1)
        assert metrics.count_done_steps(70.2) == pytest.approx(110, abs=1)

    def test_the_clairvoyant_loses_nothing_in_phases(self) -> None:
        dead = replace(self.JOB, spare=Spare.DEAD)
        scenario = build_scenario(TWICE, 600, dead)
        assert clairvoyant.compute_least_cost(scenario, CostModel(dead)) == pytest.approx(
            450 * compute_loss_rate(0.6 / 0.5)
        )
        found = run_policies(scenario)
        assert found.lost[OURS] >= found.least - 1e-9
        assert found.compute_times(OURS) <= 1.3


class TestClairvoyant:
    def test_dynamic_programming_equals_trying_all(self) -> None:
        random = np.random.default_rng(1)
        for _ in range(200):
            seconds, restart = int(random.integers(1, 9)), int(random.integers(1, 5))
            earliest = int(random.integers(0, 3))
            rates = [tuple(map(float, pair)) for pair in random.random((seconds, 2))]
            stays, moved = zip(*rates, strict=True)
            exchanged = [
                sum(stays[:at]) + min(restart, seconds - at) + sum(moved[at + restart :])
                for at in range(earliest, seconds)
            ]
            found = clairvoyant.plan_exchange(rates, restart, can_exchange=True, earliest=earliest)  # type: ignore[arg-type]
            assert found == pytest.approx(min([sum(stays), *exchanged]))
            assert clairvoyant.plan_exchange(rates, restart, can_exchange=False) == pytest.approx(sum(stays))  # type: ignore[arg-type]

    def test_the_clairvoyant_takes_the_spare_if_it_costs_less_than_shares(self) -> None:
        left = compute_loss_rate(0.6 / 0.5)
        for seconds in (60, 600):
            scenario = build_scenario(TWICE, seconds)
            assert clairvoyant.compute_least_cost(scenario, CostModel(JOB)) == pytest.approx(min(20, seconds * left))
        dead = replace(JOB, spare=Spare.DEAD)
        assert clairvoyant.compute_least_cost(build_scenario(TWICE, 600, dead), CostModel(dead)) == pytest.approx(
            600 * left
        )

    @pytest.mark.parametrize("seed", range(16))
    def test_no_policy_beats_the_clairvoyant(self, seed: int) -> None:
        scenario = shorten_scenario(draw.draw_scenario(seed, ranks=4))
        found = run_policies(scenario)
        for name, lost in found.lost.items():
            assert lost >= found.least - 1e-9, (name, scenario.description)
        assert not found.decisions[OURS].failures

    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_the_informed_cost_is_not_below_the_clairvoyants(self, kind: str) -> None:
        scenario = draw.draw_scenario(3, kind, 64)
        model = CostModel(scenario.job)
        assert (
            clairvoyant.compute_informed_cost(scenario, model)
            >= clairvoyant.compute_least_cost(scenario, model, find_first_sign(scenario)) - 1e-9
        )

    def test_the_informed_policy_keeps_a_remedy_for_a_recurring_strain(self) -> None:
        """Balancing costs nothing while lengths are even: only the first time they are uneven has a cost."""
        uneven = Strain(lengths=0.5)
        bounds = [0, *range(LEAD_SECONDS, LEAD_SECONDS + 601, 60)]
        parts = itertools.pairwise(bounds)
        segments = tuple(Segment(*part, uneven if number % 2 else CALM) for number, part in enumerate(parts))
        scenario = replace(build_scenario(uneven, 60), timeline=Timeline(segments))
        once = replace(scenario, timeline=Timeline(segments[:3]))
        costs = [clairvoyant.compute_informed_cost(each, CostModel(JOB)) for each in (once, scenario)]
        assert costs[0] > 0
        assert costs[1] == pytest.approx(costs[0])


class TestPolicies:
    @staticmethod
    def play_policy(name: str, scenario: Scenario) -> tuple[list[TrainingStrategy], list[bool], int]:
        """Return the strategies, whether the spare is in force, and how long the job stood."""
        model = CostModel(scenario.job)
        played = run_policy(scenario, model, Variant(name).begin(scenario, model))
        return [setup.strategy for setup in played.setups], [setup.moved for setup in played.setups], played.stood

    def test_never_act_changes_nothing(self) -> None:
        strategies, moved, stood = self.play_policy("never act", build_scenario(TWICE))
        assert (set(strategies), any(moved), stood) == ({EQUAL_SHARES}, False, 0)

    def test_always_restart_takes_the_spare_at_once(self) -> None:
        strategies, moved, stood = self.play_policy("always restart", build_scenario(TWICE))
        assert (set(strategies), stood) == ({EQUAL_SHARES}, 20)
        assert moved.index(True) == find_first_sign(build_scenario(TWICE)) + 20 + 1
        _, moved, stood = self.play_policy("always restart", build_scenario(TWICE, job=replace(JOB, spare=Spare.NONE)))
        assert (any(moved), stood) == (False, 20), "the restart does not help"

    def test_shares_only_never_takes_the_spare(self) -> None:
        scenario = build_scenario(TWICE)
        strategies, moved, stood = self.play_policy("shares only", scenario)
        late = find_first_sign(scenario) - LEAD_SECONDS
        assert {strategy.shares for strategy in strategies[LEAD_SECONDS + late + 1 : LEAD_SECONDS + 120]} == {
            CostModel(JOB).choose_best_exact(TWICE).shares
        }
        assert strategies[0] == strategies[-1] == EQUAL_SHARES
        assert (any(moved), stood) == (False, 0)

    def test_delayed_metrics_delay_all_policies_by_the_same_time(self) -> None:
        fresh, old = (build_scenario(TWICE, 240, evidence_delay_seconds=seconds) for seconds in (0, 15))
        assert find_first_sign(old) == find_first_sign(fresh) + 15
        first_exchange = [
            next(n for n, strategy in enumerate(self.play_policy("shares only", scenario)[0]) if strategy.shares)
            for scenario in (fresh, old)
        ]
        assert first_exchange[1] == first_exchange[0] + 15
        lost = [clairvoyant.compute_informed_cost(scenario, CostModel(JOB)) for scenario in (fresh, old)]
        assert lost[1] == pytest.approx(lost[0]), "from its first sign on"

    def test_greyhound_moves_from_level_to_level_as_the_loss_grows(self) -> None:
        scenario = build_scenario(TWICE, 900)
        strategies, moved, stood = self.play_policy("Greyhound's levels", scenario)
        shares, spare = next(n for n, strategy in enumerate(strategies) if strategy.shares), moved.index(True)
        begin, rate = find_first_sign(scenario), compute_loss_rate(1.8)
        assert (shares - begin) * rate == pytest.approx(SHARES_SECONDS, abs=1.0)
        lost = (shares - begin) * rate + (spare - stood - shares) * compute_loss_rate(1.2)
        assert lost == pytest.approx(JOB.restart_seconds, abs=1.5)
        assert strategies[-1] == EQUAL_SHARES

    def test_ski_rental_waits_for_its_multiple(self) -> None:
        def find_first_exchange(times: float) -> int:
            scenario = build_scenario(TWICE, 3000)
            model = CostModel(JOB)
            played = run_policy(scenario, model, SkiRental(scenario, model, times))
            return [setup.moved for setup in played.setups].index(True) - played.stood

        assert find_first_exchange(2.0) - find_first_exchange(1.0) == pytest.approx(20 / compute_loss_rate(1.2), abs=2)


class TestOurs:
    @staticmethod
    def play_ours(scenario: Scenario) -> tuple[Ours, list[TrainingStrategy], list[bool], int]:
        model = CostModel(scenario.job)
        ours = Ours(scenario, model)
        played = run_policy(scenario, model, ours)
        assert not ours.failures
        return ours, [setup.strategy for setup in played.setups], [setup.moved for setup in played.setups], played.stood

    def test_shares_come_first_and_the_spare_when_it_pays(self) -> None:
        ours, strategies, moved, stood = self.play_ours(build_scenario(TWICE, 400))
        assert [act.remedy for act in ours.acts] == [Remedy.REBALANCE, Remedy.REPLACE_WORKER]
        assert {act.rank for act in ours.acts} == {2}
        assert any(strategy.shares is not None for strategy in strategies)
        assert (moved[-1], stood) == (True, 20)
        assert strategies[-1].shares in (None, (8, 8, 8, 8))

    def test_a_dead_spare_is_not_used(self) -> None:
        _, _, moved, stood = self.play_ours(build_scenario(TWICE, 400, replace(JOB, spare=Spare.DEAD)))
        assert (any(moved), stood) == (False, 0)

    def test_a_slow_link_starts_local_sgd_and_its_end_stops_it(self) -> None:
        ours, strategies, _, _ = self.play_ours(build_scenario(SLOW_LINK, 200, depth=2.0))
        assert ours.acts[0].remedy == Remedy.LOCAL_SGD
        assert strategies[-1].mode is EQUAL_SHARES.mode

    @pytest.mark.parametrize("ranks", [2, 4, 64])
    def test_a_node_is_exchanged_at_any_job_size(self, ranks: int) -> None:
        job = replace(JOB, workers=ranks)
        if ranks == 64:
            job = replace(JOB, workers=8, ranks_each=8, samples=32, sample_seconds=0.0125)
        strain = KINDS["node"].make(job, 1.8, np.random.default_rng(0))
        _, _, moved, _ = self.play_ours(build_scenario(strain, 400, job))
        assert moved[-1]

    def test_a_pass_over_a_calm_job_changes_nothing_and_may_be_skipped(self) -> None:
        scenario = build_scenario(TWICE)
        seen = list[Observation]()

        class CountingOurs(Ours):
            def _observe(self, now: Now, end: int) -> Observation:
                seen.append(super()._observe(now, end))
                return seen[-1]

        ours = CountingOurs(scenario, CostModel(JOB))
        run_policy(scenario, CostModel(JOB), ours)
        calm = [observation for observation in seen if is_idle(observation, ours.rules)]
        assert 20 < len(calm) < len(seen)
        for observation in calm[5:]:
            desired, before = evaluate_job(observation, ours.rules).desired, observation.desired
            assert desired.plan == before.plan
            assert desired.state.adaptation == before.state.adaptation
            assert desired.state.incidents == before.state.incidents

    @pytest.mark.parametrize("seed", [100, 103, 109])
    def test_a_healthy_job_is_not_changed(self, seed: int) -> None:
        """The noise is 1 or 3 %. At 8 % with hiccups, shares follow chance once in some hours (docs/benchmarks.md)."""
        calm = draw.draw_healthy_scenario(seed, 0.5, 4)
        assert calm.job.noise <= 0.03
        found = run_calm_scenario(calm, PassIntervals(every=10), USUAL_VARIANTS).decisions[OURS]
        assert (found.false_alarms, found.exchanges, found.quarantines) == (0, 0, 0)

    def test_days_are_simulated_long_enough_to_find_a_slightly_slow_rank(self) -> None:
        scenario, observed = draw.draw_healthy_scenario(10_000, 2.0, 4), list[tuple[int, bool]]()

        class CountingOurs(Ours):
            def _observe(self, now: Now, end: int) -> Observation:
                observation = super()._observe(now, end)
                observed.append((now.second, observation.metrics.needs_more_windows))
                return observation

        run_policy(
            scenario,
            CostModel(scenario.job),
            CountingOurs(scenario, CostModel(scenario.job), pass_intervals=decisions.RARE_PASSES),
        )
        assert len(observed) < 200, "a thousand days would take too long otherwise"
        settled = [second for second, unsettled in observed if not unsettled]
        assert {second // 1800 for second in settled} == {0, 1, 2, 3}


class TestSampledMetrics:
    def test_metrics_show_the_slowness_of_a_rank(self) -> None:
        metrics = SampledMetrics(CostModel(JOB), 1)
        metrics.extend(0.0, EQUAL_SHARES, CALM)
        metrics.extend(100.0, EQUAL_SHARES, TWICE)
        before, within, after = (metrics.build_rows(now) for now in (100.2, 103.0, 140.0))
        assert before is not None
        assert within is not None
        assert after is not None
        assert before["compute_seconds"].tolist() == pytest.approx([0.4] * 4)
        assert after["compute_seconds"].tolist() == pytest.approx([0.4, 0.4, 0.8, 0.4])
        assert 0.4 < within["compute_seconds"][2] < 0.8
        assert metrics.count_done_steps(100.2) == pytest.approx(200, abs=1)

    def test_a_step_is_the_same_whenever_it_is_read(self) -> None:
        metrics = SampledMetrics(CostModel(replace(JOB, noise=0.1)), 1)
        metrics.extend(0.0, EQUAL_SHARES, CALM)
        first, later = metrics.build_windows(50.2)[0], metrics.build_windows(51.2)[0]
        common = set(first.steps) & set(later.steps)
        assert len(common) >= 6
        for step in common:
            assert first.compute_seconds[first.steps.index(step)] == later.compute_seconds[later.steps.index(step)]

    def test_other_shares_keep_some_steps_and_another_mode_none(self) -> None:
        metrics = SampledMetrics(CostModel(JOB), 1)
        metrics.extend(0.0, EQUAL_SHARES, TWICE)
        metrics.extend(100.0, TrainingStrategy(shares=(9, 9, 5, 9)), TWICE)
        assert [*dict.fromkeys(metrics.build_windows(103.0)[2].samples)] == [8, 5]
        metrics.extend(110.0, LOCAL_SGD, TWICE)
        window = metrics.build_windows(111.5)[2]
        assert set(window.samples) == {8}
        assert window.sync_mode == LOCAL_SGD.mode
        assert not window.transfers
        assert len(metrics.build_windows(175.0)[2].transfers) == 2


class TestDrawnScenarios:
    def test_a_scenario_is_a_function_of_the_seed(self) -> None:
        assert draw.draw_scenario(5) == draw.draw_scenario(5) != draw.draw_scenario(6)

    def test_kinds_are_as_frequent_as_their_weights_and_values_are_in_bounds(self) -> None:
        drawn = [draw.draw_scenario(seed) for seed in range(400)]
        links = sum(scenario.kind == "link" for scenario in drawn)
        assert links / 400 == pytest.approx(0.4, abs=0.07)
        assert {scenario.kind for scenario in drawn} == set(KINDS)
        assert {scenario.job.ranks for scenario in drawn} == {4, 64, 1024}
        assert all(1.05 <= scenario.depth <= 5.0 for scenario in drawn)
        onsets = {scenario.timeline.onset for scenario in drawn}
        assert len(onsets) > 200
        assert min(onsets) >= draw.LEAD_SECONDS_RANGE[0]
        assert max(onsets) < draw.LEAD_SECONDS_RANGE[1]
        assert {scenario.end for scenario in drawn} == {"once", "never", "flapping"}

    @pytest.mark.parametrize("text", ["", "x", "-4109", "5000", "4110-4109", "4100-8000"])
    def test_an_invalid_seed_is_refused(self, text: str) -> None:
        with pytest.raises(SystemExit, match=f"^SEEDS={text}: each is a thousand times"):
            decisions.read_settings({"SEEDS": text})

    def test_sizes_are_read_from_the_environment(self) -> None:
        assert decisions.read_settings({"SEEDS": "4109-4111,64030"}).sizes.seeds == [4109, 4110, 4111, 64030]
        assert decisions.read_settings({}).sizes is decisions.FULL
        assert decisions.read_settings({"QUICK": "1"}).sizes is decisions.QUICK


class TestSummary:
    @staticmethod
    def build_outcomes() -> list[Outcome]:
        scenario = build_scenario(TWICE)
        lost = dict.fromkeys(USUAL_POLICIES, 50.0)
        found = Outcome(
            scenario,
            lost | {OURS: 20.0},
            lost | {OURS: 15.0},
            least=10.0,
            informed=12.0,
            decisions={OURS: Decisions(18.0, (Gain("Rebalance", 0.5, 0.4),), questions=4)},
            cpu_seconds=dict.fromkeys(USUAL_POLICIES, 0.5),
        )
        other = {OURS: Decisions(18.0, (Gain("LocalSGD", 0.5, 0.45),), false_alarms=1)}
        return [found, replace(found, lost=lost | {OURS: 8.0}, decisions=other)]

    def test_the_summary_of_two_scenarios(self) -> None:
        summary = build_summary(self.build_outcomes(), [], OURS)
        assert summary["removed"] == pytest.approx(1 - 28 / 100)
        assert summary["removed_by_steps"] == pytest.approx(1 - 36 / 100)
        assert summary["removed_at_most"] == pytest.approx(0.8)
        assert summary["removed_of_removable"] == pytest.approx(0.72 / 0.8)
        assert summary["times_the_clairvoyant"] == {"mean": 1.25, "95 %": 1.25, "most": 1.25}
        assert summary["gains_predicted"] == {"all": (1, 2), "Rebalance": (0, 1), "LocalSGD": (1, 1)}
        holds = summary["holds"]
        assert isinstance(holds, dict)
        assert not holds["no policy beats the clairvoyant"], "8 s are less than is possible"
        assert not holds["80% of gains within 20%"]
        assert holds["1.3 × on average"]

    def test_aggregates_name_no_scenario(self) -> None:
        assert compute_aggregates(self.build_outcomes(), OURS) == {
            "scenarios": 2,
            "mean": 1.25,
            "95 %": 1.25,
            "most": 1.25,
            "above 2": 0,
            "above 3": 0,
            "false alarms": 1,
            "wrong replacements": 0,
            "wrong quarantines": 0,
            "failures": 0,
            "requests a scenario": 2,
            "CPU seconds a scenario": 0.5,
        }
        never = compute_aggregates(self.build_outcomes(), NEVER)
        assert never["mean"] == pytest.approx(50 / 12)
        assert never["above 3"] == 2
        assert "false alarms" not in never, "it decides nothing"

    def test_every_dimension_has_lines(self) -> None:
        lines = "\n".join([*format_table(self.build_outcomes(), OURS), *format_worst(self.build_outcomes(), OURS)])
        for text in ("all", "kind rank", "ranks 4", "spare warm", "seed 1: rank 1.80 ×"):
            assert text in lines


def test_policies_choose_when_they_run_again() -> None:
    @dataclass
    class SleepingPolicy:
        due: int = 0
        asked: list[int] = field(default_factory=list)

        def choose_setup(self, now: Now) -> Setup:
            self.asked.append(now.second)
            self.due = now.second + 50
            return now.setup

    policy = SleepingPolicy()
    run_policy(build_scenario(TWICE), CostModel(JOB), policy)
    assert policy.asked[:4] == [0, 50, LEAD_SECONDS, LEAD_SECONDS + 50], "it runs when something changes, too"
