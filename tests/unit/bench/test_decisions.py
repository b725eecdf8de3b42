"""Decisions on a coarse clock: the world, the clairvoyant, what each policy does, and what is seen of a job."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from bench import decisions
from bench.scripts.decisions import clairvoyant, draw
from bench.scripts.decisions.draw import Scenario
from bench.scripts.decisions.kinds import KINDS
from bench.scripts.decisions.ours import Ours, PassIntervals, is_idle
from bench.scripts.decisions.outcome import Gain, Outcome, run_calm_scenario, run_policies
from bench.scripts.decisions.outcome_statistics import build_summary, format_table, format_worst
from bench.scripts.decisions.policies import OURS, POLICIES, SHARES_SECONDS, SkiRental
from bench.scripts.decisions.policy_run import Now, find_first_sign, run_policy
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


def scenario(
    strain: Strain, seconds: int = 120, job: JobCosts = JOB, depth: float = 1.8, **changes: object
) -> Scenario:
    over = LEAD_SECONDS + seconds
    segments = (Segment(0, LEAD_SECONDS, CALM), Segment(LEAD_SECONDS, over, strain), Segment(over, over + 60, CALM))
    return replace(Scenario(1, "rank", depth, "once", job, Timeline(segments)), **changes)  # type: ignore[arg-type]


def shortened(drawn: Scenario, seconds: int = 150) -> Scenario:
    """The same, broken off so many seconds after its onset."""
    until = drawn.timeline.onset + seconds
    kept = [replace(each, end=min(each.end, until)) for each in drawn.timeline.segments if each.begin < until]
    return replace(drawn, timeline=Timeline(tuple(kept)))


class TestWorld:
    def test_a_step_takes_what_its_last_rank_takes(self) -> None:
        world = CostModel(JOB)
        assert world.usual_seconds == pytest.approx(0.5)
        assert world.step_seconds(EQUAL_SHARES, TWICE) == pytest.approx(0.9)
        assert world.compute_loss(EQUAL_SHARES, TWICE) == pytest.approx(compute_loss_rate(1.8))
        assert world.step_seconds(TrainingStrategy(shares=(9, 9, 5, 9)), TWICE) == pytest.approx(0.6)
        assert world.step_seconds(world.choose_best_exact(TWICE), TWICE) == pytest.approx(0.6)

    def test_local_sgd_waits_for_nobody_but_at_its_synchronisations(self) -> None:
        seconds = CostModel(JOB).step_seconds(LOCAL_SGD, TWICE)
        assert 0.4 * 4 / 3.5 < seconds < 0.4 * 4 / 3.5 * 1.04
        assert CostModel(JOB).synchronisation_seconds(CALM) == pytest.approx(1.3 * (0.4 * 2 / 3 + 0.1) - 0.4 / 3)
        assert CostModel(JOB).step_seconds(LOCAL_SGD, SLOW_LINK) < 0.43

    def test_what_local_sgd_wins_counts_only_where_exact_training_cannot_mend_it(self) -> None:
        world = CostModel(JOB)
        assert world.compute_loss(LOCAL_SGD, SLOW_LINK) == 0.0
        assert world.compute_loss(LOCAL_SGD, TWICE) == world.compute_loss(world.choose_best_exact(TWICE), TWICE) > 0, (
            "shares mend most of it"
        )
        weak = Strain(transfer_seconds=0.05)
        assert world.compute_loss(LOCAL_SGD, weak) == world.compute_loss(EQUAL_SHARES, weak) > 0, (
            "not worth leaving exact training"
        )
        alike = Strain(all_slow=1.5)
        assert world.compute_loss(LOCAL_SGD, alike) == world.compute_loss(EQUAL_SHARES, alike) > 0, (
            "it is no remedy of that"
        )

    @pytest.mark.parametrize("kind", sorted(KINDS))
    @pytest.mark.parametrize("ranks", [4, 64])
    def test_a_kind_makes_steps_as_long_as_it_is_told(self, kind: str, ranks: int) -> None:
        job = replace(JOB, workers=ranks // 4, ranks_each=4) if ranks > 4 else JOB
        strain = KINDS[kind].make(job, 1.5, np.random.default_rng(0))
        assert CostModel(job).step_seconds(EQUAL_SHARES, strain) / CostModel(job).usual_seconds == pytest.approx(
            1.5, rel=0.06
        )

    def test_what_can_be_planned_is_planned_by_the_best_way(self) -> None:
        world = CostModel(JOB)
        pauses, uneven = Strain(gc_seconds=1.0), Strain(lengths=0.3)
        assert world.step_seconds(world.choose_best_exact(pauses), pauses) == pytest.approx(0.5 + 1.0 / 20)
        assert world.step_seconds(world.choose_best_exact(uneven), uneven) == pytest.approx(0.5)


class TestPhases:
    """Evaluations and checkpoints: no step is done in them, and none is slow."""

    JOB = replace(JOB, phase_every=60, phase_seconds=15)

    def test_it_has_trained_for_the_rest_of_the_time(self) -> None:
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

    def test_nothing_is_lost_in_them_and_they_tell_nothing(self) -> None:
        of, world = scenario(TWICE, job=self.JOB), CostModel(self.JOB)
        course = run_policy(of, world, POLICIES["never act"](of, world))
        whole = run_policy(scenario(TWICE), CostModel(JOB), POLICIES["never act"](of, world))
        assert course.cost() == pytest.approx(whole.cost() * (120 - 30) / 120)
        late = find_first_sign(scenario(TWICE)) - LEAD_SECONDS
        assert find_first_sign(of) == LEAD_SECONDS + (late if late <= 15 else late + 15)
        sight = SampledMetrics(world, 1)
        sight.extend(0.0, EQUAL_SHARES, CALM)
        assert sight.count_done_steps(45.2) == sight.count_done_steps(59.9) == pytest.approx(90, abs=1)
        assert sight.count_done_steps(70.2) == pytest.approx(110, abs=1)

    def test_the_clairvoyant_loses_nothing_in_them_either(self) -> None:
        dead = replace(self.JOB, spare=Spare.DEAD)
        of = scenario(TWICE, 600, dead)
        assert clairvoyant.compute_least_cost(of, CostModel(dead)) == pytest.approx(450 * compute_loss_rate(0.6 / 0.5))
        found = run_policies(of)
        assert found.lost[OURS] >= found.least - 1e-9
        assert found.times <= 1.3


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

    def test_takes_the_spare_where_that_is_less_than_what_shares_leave(self) -> None:
        left = compute_loss_rate(0.6 / 0.5)
        for seconds in (60, 600):
            of = scenario(TWICE, seconds)
            assert clairvoyant.compute_least_cost(of, CostModel(JOB)) == pytest.approx(min(20, seconds * left))
        dead = replace(JOB, spare=Spare.DEAD)
        assert clairvoyant.compute_least_cost(scenario(TWICE, 600, dead), CostModel(dead)) == pytest.approx(600 * left)

    @pytest.mark.parametrize("seed", range(16))
    def test_is_beaten_by_no_policy(self, seed: int) -> None:
        of = shortened(draw.draw_scenario(seed, ranks=4))
        found = run_policies(of)
        for name, lost in found.lost.items():
            assert lost >= found.least - 1e-9, (name, of.description)
        assert not found.failures

    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_whom_policies_are_held_against_is_not_below_it(self, kind: str) -> None:
        of = draw.draw_scenario(3, kind, 64)
        world = CostModel(of.job)
        assert (
            clairvoyant.compute_informed_cost(of, world)
            >= clairvoyant.compute_least_cost(of, world, find_first_sign(of)) - 1e-9
        )

    def test_and_keeps_what_it_has_done_about_what_comes_and_goes(self) -> None:
        """Balanced lengths cost nothing where there are none: only the first time they are uneven costs anything."""
        uneven = Strain(lengths=0.5)
        bounds = [0, *range(LEAD_SECONDS, LEAD_SECONDS + 601, 60)]
        parts = itertools.pairwise(bounds)
        segments = tuple(Segment(*part, uneven if number % 2 else CALM) for number, part in enumerate(parts))
        of = replace(scenario(uneven, 60), timeline=Timeline(segments))
        once = replace(of, timeline=Timeline(segments[:3]))
        costs = [clairvoyant.compute_informed_cost(each, CostModel(JOB)) for each in (once, of)]
        assert costs[0] > 0
        assert costs[1] == pytest.approx(costs[0])


class TestPolicies:
    @staticmethod
    def plays(name: str, of: Scenario) -> tuple[list[TrainingStrategy], list[bool], int]:
        """The ways, whether the spare is in force, and how long it stood."""
        world = CostModel(of.job)
        course = run_policy(of, world, POLICIES[name](of, world))
        return [setup.strategy for setup in course.setups], [setup.moved for setup in course.setups], course.stood

    def test_never_act(self) -> None:
        ways, moved, stood = self.plays("never act", scenario(TWICE))
        assert (set(ways), any(moved), stood) == ({EQUAL_SHARES}, False, 0)

    def test_always_restart(self) -> None:
        ways, moved, stood = self.plays("always restart", scenario(TWICE))
        assert (set(ways), stood) == ({EQUAL_SHARES}, 20)
        assert moved.index(True) == find_first_sign(scenario(TWICE)) + 20 + 1
        _, moved, stood = self.plays("always restart", scenario(TWICE, job=replace(JOB, spare=Spare.NONE)))
        assert (any(moved), stood) == (False, 20), "which does not help"

    def test_shares_only(self) -> None:
        of = scenario(TWICE)
        ways, moved, stood = self.plays("shares only", of)
        late = find_first_sign(of) - LEAD_SECONDS
        assert {way.shares for way in ways[LEAD_SECONDS + late + 1 : LEAD_SECONDS + 120]} == {
            CostModel(JOB).choose_best_exact(TWICE).shares
        }
        assert ways[0] == ways[-1] == EQUAL_SHARES
        assert (any(moved), stood) == (False, 0)

    def test_by_old_metrics_all_see_it_as_much_later(self) -> None:
        fresh, old = (scenario(TWICE, 240, evidence_delay_seconds=seconds) for seconds in (0, 15))
        assert find_first_sign(old) == find_first_sign(fresh) + 15
        begins = [
            next(n for n, way in enumerate(self.plays("shares only", of)[0]) if way.shares) for of in (fresh, old)
        ]
        assert begins[1] == begins[0] + 15
        lost = [clairvoyant.compute_informed_cost(of, CostModel(JOB)) for of in (fresh, old)]
        assert lost[1] == pytest.approx(lost[0]), "from its first sign on"

    def test_greyhound_goes_from_level_to_level_as_the_loss_grows(self) -> None:
        of = scenario(TWICE, 900)
        ways, moved, stood = self.plays("Greyhound's levels", of)
        shares, spare = next(n for n, way in enumerate(ways) if way.shares), moved.index(True)
        begin, rate = find_first_sign(of), compute_loss_rate(1.8)
        assert (shares - begin) * rate == pytest.approx(SHARES_SECONDS, abs=1.0)
        lost = (shares - begin) * rate + (spare - stood - shares) * compute_loss_rate(1.2)
        assert lost == pytest.approx(JOB.restart_seconds, abs=1.5)
        assert ways[-1] == EQUAL_SHARES

    def test_ski_rental_waits_for_its_multiple(self) -> None:
        def begins(times: float) -> int:
            of = scenario(TWICE, 3000)
            world = CostModel(JOB)
            course = run_policy(of, world, SkiRental(of, world, times))
            return [setup.moved for setup in course.setups].index(True) - course.stood

        assert begins(2.0) - begins(1.0) == pytest.approx(20 / compute_loss_rate(1.2), abs=2)


class TestOurs:
    @staticmethod
    def plays(of: Scenario) -> tuple[Ours, list[TrainingStrategy], list[bool], int]:
        world = CostModel(of.job)
        ours = Ours(of, world)
        course = run_policy(of, world, ours)
        assert not ours.failures
        return ours, [setup.strategy for setup in course.setups], [setup.moved for setup in course.setups], course.stood

    def test_shares_first_and_the_spare_when_it_is_due(self) -> None:
        ours, ways, moved, stood = self.plays(scenario(TWICE, 400))
        assert [act.remedy for act in ours.acts] == [Remedy.REBALANCE, Remedy.REPLACE_WORKER]
        assert {act.rank for act in ours.acts} == {2}
        assert any(way.shares is not None for way in ways)
        assert (moved[-1], stood) == (True, 20)
        assert ways[-1].shares in (None, (8, 8, 8, 8))

    def test_a_dead_spare_is_not_taken(self) -> None:
        _, _, moved, stood = self.plays(scenario(TWICE, 400, replace(JOB, spare=Spare.DEAD)))
        assert (any(moved), stood) == (False, 0)

    def test_local_sgd_for_a_slow_link_and_back(self) -> None:
        ours, ways, _, _ = self.plays(scenario(SLOW_LINK, 200, depth=2.0))
        assert ours.acts[0].remedy == Remedy.LOCAL_SGD
        assert ways[-1].mode is EQUAL_SHARES.mode

    @pytest.mark.parametrize("ranks", [2, 4, 64])
    def test_a_node_is_exchanged_whatever_the_jobs_size(self, ranks: int) -> None:
        job = replace(JOB, workers=ranks)
        if ranks == 64:
            job = replace(JOB, workers=8, ranks_each=8, samples=32, sample_seconds=0.0125)
        strain = KINDS["node"].make(job, 1.8, np.random.default_rng(0))
        _, _, moved, _ = self.plays(scenario(strain, 400, job))
        assert moved[-1]

    def test_a_pass_over_a_calm_job_changes_nothing_and_may_be_left_out(self) -> None:
        of = scenario(TWICE)
        seen = list[Observation]()

        class Watched(Ours):
            def _observe(self, now: Now, end: int) -> Observation:
                seen.append(super()._observe(now, end))
                return seen[-1]

        ours = Watched(of, CostModel(JOB))
        run_policy(of, CostModel(JOB), ours)
        calm = [observation for observation in seen if is_idle(observation, ours.rules)]
        assert 20 < len(calm) < len(seen)
        for observation in calm[5:]:
            draft, before = evaluate_job(observation, ours.rules).desired, observation.desired
            assert draft.plan == before.plan
            assert draft.state.adaptation == before.state.adaptation
            assert draft.state.incidents == before.state.incidents

    @pytest.mark.parametrize("seed", [100, 103, 109])
    def test_nothing_is_done_where_nothing_is_wrong(self, seed: int) -> None:
        """At noise of 1 and 3 %. At 8 % with hiccups shares follow luck once in some hours (docs/benchmarks.md)."""
        calm = draw.draw_healthy_scenario(seed, 0.5, 4)
        assert calm.job.noise <= 0.03
        found = run_calm_scenario(calm, PassIntervals(every=10))
        assert (found.false_alarms, found.exchanges, found.quarantines) == (0, 0, 0)

    def test_days_are_looked_at_for_long_enough_to_find_who_is_a_little_slow(self) -> None:
        of, looked = draw.draw_healthy_scenario(10_000, 2.0, 4), list[tuple[int, bool]]()

        class Watched(Ours):
            def _observe(self, now: Now, end: int) -> Observation:
                observation = super()._observe(now, end)
                looked.append((now.second, observation.metrics.needs_more_windows))
                return observation

        run_policy(of, CostModel(of.job), Watched(of, CostModel(of.job), pass_intervals=decisions.RARE_PASSES))
        assert len(looked) < 200, "or a thousand days would take too long"
        settled = [second for second, unsettled in looked if not unsettled]
        assert {second // 1800 for second in settled} == {0, 1, 2, 3}


class TestSight:
    def test_a_rank_is_as_slow_as_it_is(self) -> None:
        sight = SampledMetrics(CostModel(JOB), 1)
        sight.extend(0.0, EQUAL_SHARES, CALM)
        sight.extend(100.0, EQUAL_SHARES, TWICE)
        before, within, after = (sight.build_rows(now) for now in (100.2, 103.0, 140.0))
        assert before is not None
        assert within is not None
        assert after is not None
        assert before["compute_seconds"].tolist() == pytest.approx([0.4] * 4)
        assert after["compute_seconds"].tolist() == pytest.approx([0.4, 0.4, 0.8, 0.4])
        assert 0.4 < within["compute_seconds"][2] < 0.8
        assert sight.count_done_steps(100.2) == pytest.approx(200, abs=1)

    def test_a_step_is_the_same_whenever_it_is_looked_at(self) -> None:
        sight = SampledMetrics(CostModel(replace(JOB, noise=0.1)), 1)
        sight.extend(0.0, EQUAL_SHARES, CALM)
        first, later = sight.build_windows(50.2)[0], sight.build_windows(51.2)[0]
        common = set(first.steps) & set(later.steps)
        assert len(common) >= 6
        for step in common:
            assert first.compute_seconds[first.steps.index(step)] == later.compute_seconds[later.steps.index(step)]

    def test_other_shares_leave_some_steps_and_another_mode_none(self) -> None:
        sight = SampledMetrics(CostModel(JOB), 1)
        sight.extend(0.0, EQUAL_SHARES, TWICE)
        sight.extend(100.0, TrainingStrategy(shares=(9, 9, 5, 9)), TWICE)
        assert [*dict.fromkeys(sight.build_windows(103.0)[2].samples)] == [8, 5]
        sight.extend(110.0, LOCAL_SGD, TWICE)
        window = sight.build_windows(111.5)[2]
        assert set(window.samples) == {8}
        assert window.sync_mode == LOCAL_SGD.mode
        assert not window.transfers
        assert len(sight.build_windows(175.0)[2].transfers) == 2


class TestDraw:
    def test_is_a_function_of_the_seed(self) -> None:
        assert draw.draw_scenario(5) == draw.draw_scenario(5) != draw.draw_scenario(6)

    def test_kinds_come_as_often_as_they_weigh_and_all_is_in_bounds(self) -> None:
        drawn = [draw.draw_scenario(seed) for seed in range(400)]
        links = sum(of.kind == "link" for of in drawn)
        assert links / 400 == pytest.approx(0.4, abs=0.07)
        assert {of.kind for of in drawn} == set(KINDS)
        assert {of.job.ranks for of in drawn} == {4, 64, 1024}
        assert all(1.05 <= of.depth <= 5.0 for of in drawn)
        onsets = {of.timeline.onset for of in drawn}
        assert len(onsets) > 200
        assert min(onsets) >= draw.LEAD_SECONDS_RANGE[0]
        assert max(onsets) < draw.LEAD_SECONDS_RANGE[1]
        assert {of.end for of in drawn} == {"once", "never", "flapping"}

    @pytest.mark.parametrize("words", ["", "x", "-4109", "5000", "4110-4109", "4100-8000"])
    def test_a_seed_of_no_size_is_refused(self, words: str) -> None:
        with pytest.raises(SystemExit, match=f"^SEEDS={words}: each is a thousand times"):
            decisions.read_sizes({"SEEDS": words})

    def test_what_is_asked_for(self) -> None:
        assert decisions.read_sizes({"SEEDS": "4109-4111,64030"}).seeds == [4109, 4110, 4111, 64030]
        assert decisions.read_sizes({}) is decisions.FULL
        assert decisions.read_sizes({"QUICK": "1"}) is decisions.QUICK


class TestFigures:
    @staticmethod
    def outcomes() -> list[Outcome]:
        of = scenario(TWICE)
        lost = dict.fromkeys(POLICIES, 50.0)
        found = Outcome(
            of,
            lost | {OURS: 20.0},
            18.0,
            lost | {OURS: 15.0},
            least=10.0,
            informed=12.0,
            gains=(Gain("Rebalance", 0.5, 0.4),),
        )
        return [found, replace(found, lost=lost | {OURS: 8.0}, gains=(Gain("LocalSGD", 0.5, 0.45),))]

    def test_of_two_scenarios(self) -> None:
        told = build_summary(self.outcomes(), [])
        assert told["removed"] == pytest.approx(1 - 28 / 100)
        assert told["removed_by_steps"] == pytest.approx(1 - 36 / 100)
        assert told["removed_at_most"] == pytest.approx(0.8)
        assert told["removed_of_removable"] == pytest.approx(0.72 / 0.8)
        assert told["times_the_clairvoyant"] == {"mean": 1.25, "95 %": 1.25, "most": 1.25}
        assert told["gains_predicted"] == {"all": (1, 2), "Rebalance": (0, 1), "LocalSGD": (1, 1)}
        holds = told["holds"]
        assert isinstance(holds, dict)
        assert not holds["no policy beats the clairvoyant"], "8 s are less than is possible"
        assert not holds["80% of gains within 20%"]
        assert holds["1.3 × on average"]

    def test_every_dimension_has_its_lines(self) -> None:
        lines = "\n".join([*format_table(self.outcomes()), *format_worst(self.outcomes())])
        for words in ("all", "kind rank", "ranks 4", "spare warm", "seed 1: rank 1.80 ×"):
            assert words in lines


def test_policies_are_asked_again_when_they_want_to_be() -> None:
    @dataclass
    class Sleeps:
        due: int = 0
        asked: list[int] = field(default_factory=list)

        def choose_setup(self, now: Now) -> Setup:
            self.asked.append(now.second)
            self.due = now.second + 50
            return now.setup

    policy = Sleeps()
    run_policy(scenario(TWICE), CostModel(JOB), policy)
    assert policy.asked[:4] == [0, 50, LEAD_SECONDS, LEAD_SECONDS + 50], "and when something changes"
