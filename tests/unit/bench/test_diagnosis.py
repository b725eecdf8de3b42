"""What counts as right in the bench of diagnosis, and the properties of its perturbed copies."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from bench.scripts.diagnosis import rules
from bench.scripts.diagnosis.days import Steps, scale_to_step_time
from bench.scripts.diagnosis.faults import Truth, list_faults
from bench.scripts.diagnosis.hosts import RANKS, RANKS_A_HOST
from bench.scripts.diagnosis.perturb import perturb_recording
from bench.scripts.diagnosis.record import Recording, measure_relative_time
from bench.scripts.diagnosis.replay import (
    Outcome,
    ReplayVerdict,
    apply_succession_rule,
    compute_quantile,
    count_confident_and_wrong,
    count_right_verdicts,
)
from bench.scripts.diagnosis.thresholds import TRIED_THRESHOLDS, UNCHANGED_THRESHOLD, Threshold, choose_thresholds
from pacekeeper_analysis.failures.finding import FaultClass, Finding

NETWORK, CODE = frozenset({FaultClass.NETWORK}), frozenset({FaultClass.CODE})
LINK, EGRESS, INGRESS = (
    Truth(NETWORK, source=0, destination=1),
    Truth(NETWORK, source=0),
    Truth(NETWORK, destination=1),
)
STEPS = 40


def build_finding(culprit: str, fault: FaultClass = FaultClass.NETWORK) -> Finding:
    return Finding(fault, culprit)


class TestTruth:
    @pytest.mark.parametrize(
        ("truth", "right", "wrong"),
        [
            (Truth(CODE, (3,)), ["rank 3", "train.py:augment on rank 3"], ["rank 2", "ranks 2, 3", "all ranks", ""]),
            (Truth(CODE, (2, 3)), ["rank 2", "ranks 2, 3"], ["rank 4", "ranks 2, 4"]),
            (Truth(CODE), ["all ranks", "train.py:augment on all ranks"], ["rank 1", ""]),
            (LINK, ["link 1 → 3", "between rank 3 and rank 0"], ["link 2 → 0", "link 0 → 4", "rank 0", ""]),
            (EGRESS, ["the sender side of rank 1's worker", "link 0 → 4"], ["the receiver side of rank 1's worker"]),
            (INGRESS, ["the receiver side of rank 2's worker", "link 0 → 2"], ["link 2 → 0"]),
            (EGRESS, ["links of ranks 0, 2"], ["links of ranks 4, 6"]),
        ],
    )
    def test_a_truth_accepts_the_right_culprits_only(self, truth: Truth, right: list[str], wrong: list[str]) -> None:
        assert [culprit for culprit in right if not truth.is_named(build_finding(culprit))] == []
        assert [culprit for culprit in wrong if truth.is_named(build_finding(culprit))] == []

    def test_rules_that_name_only_ranks_are_compared_by_rank(self) -> None:
        assert Truth(CODE, (2, 3)).is_blamed(frozenset({2}))
        assert not Truth(CODE, (2, 3)).is_blamed(frozenset({2, 4}))
        assert Truth(CODE).is_blamed(frozenset(range(RANKS)))
        assert not LINK.is_blamed(frozenset({0}))

    def test_every_fault_has_its_own_name_and_a_truth_at_each_place(self) -> None:
        faults = list_faults()
        assert len({fault.name for fault in faults}) == len(faults)
        assert all(fault.truths(place) for fault in faults for place in range(3))


def build_recording(own: float = 0.05) -> Recording:
    """Build a recording of one second per line and eight steps per second."""
    reports: list[dict[str, Any]] = []
    for second in range(1, STEPS // 8 + 1):
        steps = list(range(8 * second))
        for host in range(RANKS // RANKS_A_HOST):
            ranks = range(RANKS_A_HOST * host, RANKS_A_HOST * (host + 1))
            windows = [
                {
                    "rank": rank,
                    "steps": steps,
                    "step_seconds": [0.12] * len(steps),
                    "compute_seconds": [own * (2 if rank == 3 else 1)] * len(steps),
                    "samples": [0] * len(steps),
                    "baseline_own_seconds": own,
                    "baseline_seconds": 0.1,
                }
                for rank in ranks
            ]
            evidence = {"windows": windows, "operations": [], "links": []}
            reports.append({"at": 1000.0 + second, "worker": f"host-{host}", "evidence": evidence})
            fault = {"noticed_at": 1000.0 + second}
            reports.append({"at": 1000.0 + second, "worker": f"host-{host}", "fault": fault})
    return Recording("slow", 0, 1000.0, 1010.0, reports, {0: b"{}"}, 1005.0, 0.0)


def test_a_busy_machine_is_detected_by_the_pace_of_its_steps() -> None:
    assert measure_relative_time(build_recording().reports) == pytest.approx(1.2)
    assert (
        measure_relative_time([report for report in build_recording().reports if "evidence" not in report]) == math.inf
    )


def test_recordings_of_busy_hours_are_scaled_to_one_pace() -> None:
    slow = [Steps(np.full((4, RANKS), 0.2, np.float32), np.full((4, RANKS), 0.1, np.float32))]
    (same,) = scale_to_step_time(slow, 0.1)
    assert same.step[0, 0] == pytest.approx(0.1)
    assert same.own[0, 0] == pytest.approx(0.05)


class TestPerturbedCopies:
    def test_a_copy_is_a_function_of_its_seed(self) -> None:
        assert perturb_recording(build_recording(), (), 1) == perturb_recording(build_recording(), (), 1)
        assert perturb_recording(build_recording(), (), 1) != perturb_recording(build_recording(), (), 2)

    def test_a_step_takes_the_same_time_in_all_answers_that_contain_it(self) -> None:
        seen: dict[tuple[int, int], set[float]] = {}
        for report in perturb_recording(build_recording(), (), 3).reports:
            for window in report.get("evidence", {}).get("windows", ()):
                for step, seconds in zip(window["steps"], window["compute_seconds"], strict=True):
                    seen.setdefault((window["rank"], step), set()).add(round(seconds, 12))
        assert all(len(values) == 1 for values in seen.values())
        assert len({value for values in seen.values() for value in values}) > 100

    def test_clocks_differ_by_minutes_and_stalls_keep_their_age(self) -> None:
        copy = perturb_recording(build_recording(), (), 4)
        clocks = {report["worker"]: report["clock"] for report in copy.reports}
        assert max(map(abs, clocks.values())) > 60
        reports = [report for report in copy.reports if "fault" in report]
        late = [report["at"] + report["clock"] - report["fault"]["noticed_at"] for report in reports]
        assert all(0 <= seconds <= 1 for seconds in late)


class TestRules:
    def test_all_rules_blame_a_rank_at_half_speed(self) -> None:
        now, early = np.array([0.05] * 3 + [0.1] + [0.051] * 4), np.full(8, 0.05)
        assert {rule(now, early) for rule in rules.RULES.values()} == {frozenset({3})}
        assert rules.blame_far_from_median(early, early) == rules.blame_by_relative_score(early, early) == frozenset()
        assert rules.blame_by_individual_score(2 * early, early) == frozenset(range(8))

    def test_alarms_are_counted_as_they_begin(self) -> None:
        calm, slow = np.full(8, 0.05), np.array([0.05] * 7 + [0.1])
        table = np.array([calm, slow, slow, calm, slow])
        assert rules.count_alarms(table, calm, rules.blame_by_relative_score) == 2

    def test_the_first_blamed_rank_of_a_recording_counts(self) -> None:
        assert rules.find_first_blamed(build_recording(), rules.blame_by_relative_score, after=2.0) == (
            2.0,
            frozenset({3}),
        )


def build_outcome(fault: str, right: bool, copy: int) -> Outcome:
    verdict = ReplayVerdict(5.0, "rank 3", "Code", frozenset({"Times", "Waits"}), named=right, classed=right)
    return Outcome(fault, False, 0, copy, False, verdict, verdict, {})


class TestConfidence:
    def test_confidence_follows_the_rule_of_succession(self) -> None:
        shares = count_right_verdicts(
            [build_outcome("a", True, 0), build_outcome("a", True, 1), build_outcome("a", False, 2)]
        )
        assert shares == {("Code", frozenset({"Times", "Waits"})): (3, 2)}
        assert apply_succession_rule(3, 2) == pytest.approx(0.6)

    def test_confidence_for_a_fault_comes_from_the_other_faults(self) -> None:
        """Its own wrong verdicts must not lower the confidence in similar evidence."""
        others = [build_outcome("a", True, copy) for copy in range(40)]
        wrong = [build_outcome("b", False, copy) for copy in range(5)]
        assert count_confident_and_wrong([*others, *wrong]) == 5
        assert count_confident_and_wrong(wrong) == 0

    def test_quantiles_of_delays_may_be_infinite(self) -> None:
        assert compute_quantile([1.0, float("inf"), 2.0], 0.5) == 2.0
        assert compute_quantile([], 0.5) == float("inf")


class TestThresholds:
    def test_the_threshold_for_a_fault_is_the_best_one_for_the_others(self) -> None:
        """The doubled threshold fits only the fault that is left out; the halved one is as good as the current one."""
        half, twice = Threshold("m", "LIMIT", 0.5), Threshold("m", "LIMIT", 2.0)
        found = choose_thresholds(
            {
                half: {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 0.0]},
                UNCHANGED_THRESHOLD: {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 0.0]},
                twice: {"a": [1.0, 1.0], "b": [-1.0, 0.0], "c": [1.0, 1.0]},
            }
        )
        assert found.as_it_is == pytest.approx(4 / 6)
        assert found.left_out == pytest.approx(2 / 6)
        assert found.chosen == {"as they are": 2, "LIMIT × 2": 1}

    def test_each_tried_threshold_exists(self) -> None:
        for threshold in TRIED_THRESHOLDS[1:]:
            assert getattr(import_module(threshold.module), threshold.name) > 0
