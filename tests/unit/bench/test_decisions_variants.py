"""Policies of the decisions bench: which are played, without which parts, and with which constants."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from bench import decisions
from bench.scripts.decisions import draw, policies, sensitivity
from bench.scripts.decisions.draw import Scenario
from bench.scripts.decisions.noise import NoiseModel
from bench.scripts.decisions.ours import PERSISTENT_SLOWNESS
from bench.scripts.decisions.outcome import run_calm_scenario, run_policies
from bench.scripts.decisions.outcome_statistics import compute_calm_rates, format_markdown
from bench.scripts.decisions.policies import NEVER, OURS, DecidingEntry, Variant
from bench.scripts.decisions.policy_run import Act, Now, PassIntervals
from bench.scripts.decisions.world import CALM, CostModel, Segment, Setup, Spare, Strain, Timeline, TrainingStrategy
from pacekeeper_operator.api.incident import IncidentCause

SLIGHTLY_SLOW = Strain(slow=((2, 1.07),), movable=True)


@dataclass(frozen=True)
class StubParameters:
    act_at_second: int = 100
    probability: float = 0.6
    note: str = "no number"

    def __post_init__(self) -> None:
        if self.probability > 1:
            raise ValueError("a probability is at most 1")


@dataclass
class Stub:
    """Takes smaller shares for rank 2 at one second, and raises an alarm for it."""

    scenario: Scenario
    world: CostModel
    pass_intervals: PassIntervals
    ablated: frozenset[str]
    parameters: StubParameters
    acts: list[Act] = field(default_factory=list)
    alarms: list[tuple[int, IncidentCause]] = field(default_factory=list)
    quarantines: int = 0
    failures: list[str] = field(default_factory=list)
    passes: int = 0
    questions: int = 3
    due: int = 0

    def choose_setup(self, now: Now) -> Setup:
        self.due = self.parameters.act_at_second
        if now.second < self.due or self.acts or "shares" in self.ablated:
            return now.setup
        samples = self.scenario.job.samples
        self.acts.append(Act(now.second, IncidentCause.STRAGGLER, "Rebalance", 2, 1.1, 1.0))
        self.alarms.append((now.second, IncidentCause.STRAGGLER))
        shares = (samples, samples + 1, samples - 1, samples)
        return replace(now.setup, strategy=TrainingStrategy(shares=shares))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a further deciding policy."""
    entries = cast(MutableMapping[str, DecidingEntry], policies.DECIDING_POLICIES)
    monkeypatch.setitem(entries, "stub", DecidingEntry(Stub, StubParameters(), frozenset({"shares"})))
    return "stub"


def build_scenario(strain: Strain, onset: int = 90, seconds: int = 400) -> Scenario:
    drawn = draw.draw_scenario(4000, ranks=4)
    job = replace(
        drawn.job, noise=0.01, hiccups=0.0, samples=32, fixed_seconds=0.0, sample_seconds=0.015, transfer_seconds=0.05
    )
    timeline = Timeline((Segment(0, onset, CALM), Segment(onset, onset + seconds, strain)))
    job = replace(job, spare=Spare.NONE, phase_seconds=0)
    return replace(drawn, job=job, timeline=timeline, kind="rank", evidence_delay_seconds=0)


class TestDecidingPolicies:
    def test_any_policy_with_acts_and_alarms_is_scored_like_ours(self, stub: str) -> None:
        found = run_policies(build_scenario(Strain(slow=((2, 1.3),), movable=True)), {stub: Variant(stub)})
        assert set(found.lost) == {stub, NEVER}
        assert found.lost[stub] < found.injected
        assert set(found.decisions) == {stub}
        decided = found.decisions[stub]
        assert (decided.questions, decided.false_alarms, decided.remedies) == (3, 0, ("100: Rebalance",))
        assert len(decided.gains) == 1
        assert found.cpu_seconds[stub] > 0

    def test_without_faults_its_alarms_are_false(self, stub: str) -> None:
        calm = draw.draw_healthy_scenario(1, 0.5, 4)
        found = run_calm_scenario(calm, PassIntervals(), {stub: Variant(stub), NEVER: Variant(NEVER)})
        rates = compute_calm_rates([found], stub)
        assert (rates["hours"], rates["alarms an hour"], rates["requests an hour"]) == (0.5, 2.0, 6.0)
        assert rates["seconds lost an hour"] > 0
        assert set(found.decisions) == {stub}

    def test_a_part_that_is_ablated_does_nothing(self, stub: str) -> None:
        found = run_policies(build_scenario(SLIGHTLY_SLOW), {stub: Variant(stub, frozenset({"shares"}))})
        assert found.lost[stub] == found.injected
        with pytest.raises(ValueError, match="stub has no part x"):
            Variant(stub, frozenset({"x"})).begin(build_scenario(CALM), CostModel(build_scenario(CALM).job))

    def test_ours_can_be_played_without_persistent_slowness(self) -> None:
        variants = {OURS: Variant(OURS), "without": Variant(OURS, frozenset({PERSISTENT_SLOWNESS}))}
        found = run_policies(build_scenario(SLIGHTLY_SLOW), variants)
        assert found.decisions[OURS].remedies
        assert not found.decisions["without"].remedies


class TestSensitivity:
    def test_each_constant_is_halved_and_doubled(self, stub: str) -> None:
        variants = sensitivity.build_variants(Variant(stub))
        assert {name: variant.parameters for name, variant in variants.items()} == {
            "stub": None,
            "stub, act_at_second × 0.5": StubParameters(act_at_second=50),
            "stub, act_at_second × 2": StubParameters(act_at_second=200),
            "stub, probability × 0.5": StubParameters(probability=0.3),
        }

    def test_the_table_shows_the_cost_at_each_value(self, stub: str) -> None:
        scenario = build_scenario(Strain(slow=((2, 1.3),), movable=True))
        outcome = run_policies(scenario, sensitivity.build_variants(Variant(stub)))
        lines = list(sensitivity.format_sensitivity([outcome], stub))
        assert len(lines) == 2 + 2
        usual, late = (outcome.compute_times(name) for name in (stub, "stub, act_at_second × 2"))
        assert usual < late
        assert f"| act_at_second | 100 | {outcome.compute_times('stub, act_at_second × 0.5'):.3f} /" in lines[2]
        assert f"| {usual:.3f} / {usual:.2f} / {usual:.2f} | {late:.3f} /" in lines[2]
        assert lines[2].endswith("| 1, 0, 0 |"), "at second 50, nothing is slow yet"
        assert f"| {sensitivity.NOT_VALID} | 0, 0, – |" in lines[3]

    @pytest.mark.parametrize(("value", "factor", "expected"), [(1, 0.5, 1), (3, 2.0, 6), (0.3, 0.5, 0.15)])
    def test_integers_stay_integers(self, value: float, factor: float, expected: float) -> None:
        scaled = sensitivity.scale_value(value, factor)
        assert scaled == expected
        assert type(scaled) is type(value)


class TestSettings:
    @pytest.mark.parametrize(
        ("environment", "message"),
        [
            ({"POLICIES": "ours,his"}, "POLICIES=ours,his: no policy his; there are: ours, "),
            ({"SEEDS": "4000", "ABLATE": "x"}, "ABLATE=x: no part x; ours has persistent slowness"),
            ({"SEEDS": "4000", "NOISE": "pink"}, "NOISE=pink: give some of independent, correlated, heavy, hiccups"),
            ({"CALM": "5:1"}, "CALM=5:1: give hours for 4, 64, or 1024 ranks"),
            ({"CALM": "4"}, "CALM=4: give hours"),
            ({"CALM": "4:0"}, "CALM=4:0: give hours"),
            ({"CALM": "4:1", "SEEDS": "4000"}, "CALM: fault-free hours are a run of their own; leave SEEDS out"),
            ({"CALM": "4:1", "POLICIES": "never act"}, "POLICIES=never act: give one that decides: ours"),
            ({"CALM": "4:1", "SENSITIVITY": "1"}, "SENSITIVITY: give the SEEDS to play"),
            ({"NOISE": "heavy"}, "NOISE=heavy: give SEEDS, CALM, or a locked SALT with it"),
        ],
    )
    def test_what_is_not_valid_is_refused(self, environment: dict[str, str], message: str) -> None:
        with pytest.raises(SystemExit) as caught:
            decisions.read_settings(environment)
        assert str(caught.value).startswith(message)

    def test_policies_noise_and_parts_are_selected(self) -> None:
        settings = decisions.read_settings(
            {
                "SEEDS": "4000",
                "POLICIES": "ours, never act",
                "ABLATE": PERSISTENT_SLOWNESS,
                "NOISE": "heavy,correlated",
            }
        )
        assert settings.variants == {OURS: Variant(OURS, frozenset({PERSISTENT_SLOWNESS})), NEVER: Variant(NEVER)}
        assert settings.noise_models == (NoiseModel.HEAVY, NoiseModel.CORRELATED)
        assert [scenario.noise_model for scenario in decisions._draw_scenarios(settings)] == [*settings.noise_models]

    def test_calm_hours_are_of_many_jobs(self) -> None:
        settings = decisions.read_settings({"CALM": "4:12", "NOISE": "heavy"})
        lots = [scenario for scenario, _ in decisions._draw_calm_lots(settings)]
        assert [scenario.timeline.end / 3600 for scenario in lots] == [5.0, 5.0, 2.0]
        assert len({scenario.job.step_seconds for scenario in lots}) == 3
        assert {scenario.noise_model for scenario in lots} == {NoiseModel.HEAVY}


def test_a_markdown_table_has_all_columns() -> None:
    rows = {"a": {"n": 1.0}, "b": {"n": 2.0, "m": 0.5}}
    assert list(format_markdown(rows)) == ["| | n | m |", "|---|---|---|", "| a | 1 |  |", "| b | 2 | 0.5 |"]
