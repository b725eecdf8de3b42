"""Each class of fault by its effect on the patterns, and the answer "unknown" where too little is explained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper_analysis.failures.finding import FaultClass, SignalKind
from pacekeeper_analysis.profiling.localize import Localization, localize_fault
from pacekeeper_analysis.profiling.pattern import ProcessSetup, ProfileAnswer, RankPattern
from testing.training.patterns import (
    BACKWARD_FUNCTION,
    FORWARD_FUNCTION,
    GC_FUNCTION,
    HEALTHY_WORK,
    LOAD_FUNCTION,
    SLOW_FUNCTION,
    WAIT_FUNCTION,
    FunctionSeconds,
    build_answers,
    build_pattern,
    scale_work,
)

USUAL = ProcessSetup(threads=2, processors=2.0, ranks=1, throttled=0.0, ran=0.9, delayed=0.01)


def localize_job(
    *works: FunctionSeconds, early: FunctionSeconds | None = HEALTHY_WORK, setups: dict[int, ProcessSetup] | None = None
) -> Localization:
    """Ranks with these works, which wait for the slowest of them and 0.02 s for the transfer."""
    step = max(sum(work.values()) for work in works) + 0.02
    given = setups or {}
    now = [build_pattern(rank, work, step, setup=given.get(rank, USUAL)) for rank, work in enumerate(works)]
    before = None if early is None else [build_pattern(r, early, sum(early.values()) + 0.02) for r in range(len(works))]
    return localize_fault(build_answers(now, before), len(works))


def list_kinds(found: Localization) -> frozenset[SignalKind]:
    return found.finding.signal_kinds


class TestOneRank:
    def test_a_function_of_its_own_is_code(self) -> None:
        found = localize_job(HEALTHY_WORK, HEALTHY_WORK, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2}, HEALTHY_WORK)
        assert found.finding.fault is FaultClass.CODE
        assert found.finding.culprit == "train.py:augment on rank 2"
        assert found.explanations[0].ranks == (2,)
        assert found.explanations[0].saved_seconds == pytest.approx(0.2, abs=0.002)
        assert found.explained == pytest.approx(1.0, abs=0.02)
        assert list_kinds(found) >= {SignalKind.TIMES, SignalKind.PROFILE}

    def test_a_function_that_was_slow_in_early_steps_too_is_found_by_the_peers(self) -> None:
        assert (
            localize_job(HEALTHY_WORK, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2}, early=None).finding.culprit
            == "train.py:augment on rank 1"
        )

    def test_two_ranks_show_which_of_them_is_slow(self) -> None:
        assert (
            localize_job({**HEALTHY_WORK, SLOW_FUNCTION: 0.2}, HEALTHY_WORK).finding.culprit
            == "train.py:augment on rank 0"
        )

    def test_all_functions_equally_slower_are_its_machine(self) -> None:
        found = localize_job(HEALTHY_WORK, scale_work(HEALTHY_WORK, 1.5), HEALTHY_WORK, HEALTHY_WORK)
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.HARDWARE, "rank 1")
        assert len(list_kinds(found)) >= 2

    def test_a_slow_machine_slows_most_the_functions_that_need_its_cores(self) -> None:
        """Functions that wait for memory are slowed less, and the others' sum is less than half of the mean growth."""
        slow = {
            function: seconds * (2.0 if function == BACKWARD_FUNCTION else 1.3)
            for function, seconds in HEALTHY_WORK.items()
        }
        found = localize_job(HEALTHY_WORK, slow, HEALTHY_WORK, HEALTHY_WORK)
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.HARDWARE, "rank 1")

    def test_one_function_is_not_its_machine_where_chance_makes_the_others_longer(self) -> None:
        """Few samples: the others seem to be a third longer, and a sample or two fell into the function before, too."""
        usual = {**HEALTHY_WORK, SLOW_FUNCTION: 0.01}
        found = localize_job(usual, {**scale_work(HEALTHY_WORK, 1.3), SLOW_FUNCTION: 0.3}, usual, early=usual)
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.CODE, "train.py:augment on rank 1")

    def test_other_processes_on_its_processors_are_a_signal(self) -> None:
        found = localize_job(
            HEALTHY_WORK, scale_work(HEALTHY_WORK, 1.5), HEALTHY_WORK, setups={1: replace(USUAL, delayed=0.3)}
        )
        assert found.finding.fault is FaultClass.HARDWARE
        assert SignalKind.PROCESS in list_kinds(found)

    def test_a_quota_is_its_configuration(self) -> None:
        throttled = replace(USUAL, processors=0.65, throttled=0.8, delayed=0.3)
        found = localize_job(HEALTHY_WORK, HEALTHY_WORK, scale_work(HEALTHY_WORK, 1.5), setups={2: throttled})
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.CONFIGURATION, "rank 2")
        assert "0.65 processors" in str(found.finding.signals)

    def test_fewer_threads_than_its_peers_are_its_configuration(self) -> None:
        found = localize_job(
            HEALTHY_WORK, HEALTHY_WORK, scale_work(HEALTHY_WORK, 1.5), setups={2: replace(USUAL, threads=1)}
        )
        assert found.finding.fault is FaultClass.CONFIGURATION
        assert SignalKind.SETTINGS in list_kinds(found)

    def test_a_slow_loader_is_data(self) -> None:
        found = localize_job(HEALTHY_WORK, {**HEALTHY_WORK, LOAD_FUNCTION: 0.3}, HEALTHY_WORK)
        assert (found.finding.fault, found.finding.culprit) == (
            FaultClass.DATA,
            "train.py:Samples.__getitem__ on rank 1",
        )

    def test_longer_samples_are_data(self) -> None:
        step = sum(HEALTHY_WORK.values()) * 1.4 + 0.02
        long = build_pattern(0, scale_work(HEALTHY_WORK, 1.4), step, length=1400, follows_lengths=0.9)
        usual = [build_pattern(rank, HEALTHY_WORK, step, length=1000, follows_lengths=0.9) for rank in (1, 2, 3)]
        found = localize_fault(build_answers([long, *usual]), 4)
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.DATA, "rank 0")

    def test_a_function_that_is_nearly_all_of_the_work_and_idles_is_code(self) -> None:
        """A processor that is slow would be in use for longer."""
        work = {SLOW_FUNCTION: 0.4, FORWARD_FUNCTION: 0.005}
        slow = {SLOW_FUNCTION: 0.8, FORWARD_FUNCTION: 0.005}
        idle = frozenset({SLOW_FUNCTION})
        now = [build_pattern(rank, slow if rank == 1 else work, 0.83, idle=idle) for rank in range(3)]
        assert localize_fault(build_answers(now), 3).finding.fault is FaultClass.CODE
        busy = [build_pattern(rank, slow if rank == 1 else work, 0.83) for rank in range(3)]
        assert localize_fault(build_answers(busy), 3).finding.fault is FaultClass.HARDWARE

    def test_shares_that_hide_a_slow_rank_do_not_prevent_the_finding(self) -> None:
        """A rank at 1.6 × with 5 of 26 samples, where its peers have 7 each, is as quick in a step as they are."""
        slow = build_pattern(0, scale_work(HEALTHY_WORK, 1.6 * 5 / 7), 0.44, samples=5)
        found = localize_fault(
            build_answers([slow, *(build_pattern(rank, HEALTHY_WORK, 0.44, samples=7) for rank in (1, 2, 3))]), 4
        )
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.HARDWARE, "rank 0")
        assert "1.60 ×" in str(found.finding.signals)

    def test_two_faults_at_once_are_both_found(self) -> None:
        found = localize_job(
            HEALTHY_WORK,
            {**HEALTHY_WORK, SLOW_FUNCTION: 0.25},
            HEALTHY_WORK,
            scale_work(HEALTHY_WORK, 1.5),
            HEALTHY_WORK,
        )
        assert [(e.finding.fault, e.ranks) for e in found.explanations] == [
            (FaultClass.CODE, (1,)),
            (FaultClass.HARDWARE, (3,)),
        ]
        assert set(found.suspects) == {1, 3}

    def test_the_same_on_two_ranks_is_one_finding(self) -> None:
        found = localize_job(
            HEALTHY_WORK,
            {**HEALTHY_WORK, SLOW_FUNCTION: 0.25},
            HEALTHY_WORK,
            {**HEALTHY_WORK, SLOW_FUNCTION: 0.2},
            HEALTHY_WORK,
        )
        assert [e.ranks for e in found.explanations] == [(1, 3)]
        assert found.finding.culprit == "train.py:augment on ranks 1, 3"


class TestAllRanks:
    def test_a_function_that_has_grown_is_code(self) -> None:
        found = localize_job(*[{**HEALTHY_WORK, SLOW_FUNCTION: 0.1}] * 4)
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.CODE, "train.py:augment on all ranks")
        assert found.explained == pytest.approx(1.0, abs=0.02)
        assert list_kinds(found) >= {SignalKind.HISTORY, SignalKind.PROFILE}

    @pytest.mark.parametrize(("seconds", "named"), [(0.012, False), (0.03, True)])
    def test_only_growth_beyond_chance_is_named(self, seconds: float, named: bool) -> None:
        """3 % of a step, and 7 %."""
        found = localize_job(*[{**HEALTHY_WORK, SLOW_FUNCTION: seconds}] * 4)
        assert (found.finding.culprit == "train.py:augment on all ranks") == named

    def test_growth_on_all_ranks_is_not_found_without_early_steps(self) -> None:
        found = localize_job(*[{**HEALTHY_WORK, SLOW_FUNCTION: 0.1}] * 4, early=None)
        assert (found.finding.fault, found.explanations) == (FaultClass.UNKNOWN, ())

    def test_collections_are_code(self) -> None:
        found = localize_job(*[{**HEALTHY_WORK, GC_FUNCTION: 0.15}] * 3)
        assert found.finding.fault is FaultClass.CODE
        assert "PlanGC" in found.finding.advice

    def test_a_slow_loader_is_data(self) -> None:
        assert localize_job(*[{**HEALTHY_WORK, LOAD_FUNCTION: 0.2}] * 3).finding.fault is FaultClass.DATA

    def test_one_thread_is_configuration(self) -> None:
        setups = {rank: replace(USUAL, threads=1) for rank in range(3)}
        found = localize_job(*[scale_work(HEALTHY_WORK, 1.6)] * 3, setups=setups)
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.CONFIGURATION, "all ranks")
        assert "1 threads of an operation, in the early steps 2" in str(found.finding.signals)

    def test_one_thread_is_found_where_only_torch_computes(self) -> None:
        setups = {rank: replace(USUAL, threads=1) for rank in range(3)}
        found = localize_job(*[{**HEALTHY_WORK, BACKWARD_FUNCTION: 0.4}] * 3, setups=setups)
        assert found.finding.fault is FaultClass.CONFIGURATION

    def test_a_quota_is_configuration(self) -> None:
        setups = {rank: replace(USUAL, throttled=0.7) for rank in range(3)}
        assert (
            localize_job(*[scale_work(HEALTHY_WORK, 1.4)] * 3, setups=setups).finding.fault is FaultClass.CONFIGURATION
        )

    def test_busy_processors_are_hardware(self) -> None:
        setups = {rank: replace(USUAL, delayed=0.4) for rank in range(3)}
        assert localize_job(*[scale_work(HEALTHY_WORK, 1.4)] * 3, setups=setups).finding.fault is FaultClass.HARDWARE

    def test_all_functions_equally_slower_without_another_signal_are_unknown(self) -> None:
        found = localize_job(*[scale_work(HEALTHY_WORK, 1.4)] * 3)
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.UNKNOWN, "all ranks")

    def test_slow_in_turns_is_distinguished_from_slow_at_once(self) -> None:
        """Each of four ranks does it in every fourth step, and the others wait."""
        step, mine = 0.395 + 0.2, {**HEALTHY_WORK, SLOW_FUNCTION: 0.05}
        now = [build_pattern(rank, mine, step) for rank in range(4)]
        early = [build_pattern(rank, HEALTHY_WORK, 0.395) for rank in range(4)]
        found = localize_fault(build_answers(now, early), 4)
        assert found.finding.culprit == "train.py:augment on all ranks, in turns"
        assert found.explained == pytest.approx(1.0, abs=0.05)
        assert found.explanations[0].saved_seconds == pytest.approx(0.2, abs=0.01)

    def test_waits_of_all_ranks_are_the_transfer(self) -> None:
        now = [build_pattern(rank, HEALTHY_WORK, 0.6) for rank in range(4)]
        early = [build_pattern(rank, HEALTHY_WORK, 0.395) for rank in range(4)]
        found = localize_fault(build_answers(now, early), 4)
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.NETWORK, "all_reduce on all ranks")

    def test_a_rank_that_has_not_answered_may_be_waited_for(self) -> None:
        now = [build_pattern(rank, HEALTHY_WORK, 0.6) for rank in range(3)]
        early = [build_pattern(rank, HEALTHY_WORK, 0.395) for rank in range(3)]
        found = localize_fault(build_answers(now, early), 4)
        assert (found.finding.fault, found.explanations) == (FaultClass.UNKNOWN, ())
        assert found.remarks[0] == "3 of 4 ranks have answered"

    def test_a_throttled_rank_is_waited_for_even_if_another_has_not_answered(self) -> None:
        held = replace(USUAL, throttled=0.9)
        works = [HEALTHY_WORK, scale_work(HEALTHY_WORK, 1.3), HEALTHY_WORK]
        setups = [USUAL, held, USUAL]
        now = [
            build_pattern(rank, work, 0.7, setup=its)
            for rank, (work, its) in enumerate(zip(works, setups, strict=True))
        ]
        early = [build_pattern(rank, HEALTHY_WORK, 0.395) for rank in range(3)]
        found = localize_fault(build_answers(now, early), 4)
        assert (found.finding.fault, found.finding.culprit) == (FaultClass.CONFIGURATION, "rank 1")

    def test_transfers_of_a_throttled_rank_are_late_too(self) -> None:
        """They take more than its own work does, but its quota is named first."""
        throttled = {1: replace(USUAL, throttled=0.9, processors=0.5)}
        works = (HEALTHY_WORK, scale_work(HEALTHY_WORK, 2.0), HEALTHY_WORK, HEALTHY_WORK)
        now = [build_pattern(rank, work, 1.3, setup=throttled.get(rank, USUAL)) for rank, work in enumerate(works)]
        early = [build_pattern(rank, HEALTHY_WORK, 0.395) for rank in range(4)]
        found = localize_fault(build_answers(now, early), 4)
        assert [each.finding.fault for each in found.explanations] == [FaultClass.CONFIGURATION] * 2
        assert found.explanations[1].saved_seconds > found.explanations[0].saved_seconds
        assert found.finding.culprit == "rank 1"

    @pytest.mark.parametrize(
        ("throttled", "fault", "culprit"),
        [
            ((0.0, 0.0, 0.9, 0.9), FaultClass.CONFIGURATION, "ranks 2, 3"),
            ((0.5, 0.3, 0.9, 0.9), FaultClass.CONFIGURATION, "all ranks"),
            ((0.0, 0.0, 0.1, 0.1), FaultClass.NETWORK, "all_reduce on all ranks"),
        ],
    )
    @pytest.mark.parametrize("answered", [4, 3])
    def test_a_quota_whose_ranks_mostly_wait_shows_in_transfers_only(
        self, throttled: tuple[float, ...], fault: FaultClass, culprit: str, answered: int
    ) -> None:
        """The rank without an answer may be the slow one: then a network is not blamed, but a quota is."""
        setup = [replace(USUAL, throttled=part, processors=0.5) for part in throttled]
        now = [build_pattern(rank, HEALTHY_WORK, 0.9, setup=setup[rank]) for rank in range(4)][4 - answered :]
        early = [build_pattern(rank, HEALTHY_WORK, 0.395) for rank in range(4)][4 - answered :]
        found = localize_fault(build_answers(now, early), 4)
        if answered < 4 and fault is FaultClass.NETWORK:
            assert found.finding.fault is FaultClass.UNKNOWN
        else:
            assert (found.finding.fault, found.finding.culprit) == (fault, culprit)
            assert len(found.finding.signal_kinds) >= 2

    @pytest.mark.parametrize(
        ("throttled", "fault", "culprit"), [(0.6, FaultClass.CONFIGURATION, "all ranks"), (0.0, FaultClass.UNKNOWN, "")]
    )
    def test_waits_are_not_explained_by_work_in_turns_that_no_function_shows(
        self, throttled: float, fault: FaultClass, culprit: str
    ) -> None:
        """Own work has grown by a seventh of the waits, by a little in each of many functions."""
        crumbs = {(f"train.py:crumb_{i}", SLOW_FUNCTION[1]): 0.004 for i in range(40)}
        grown = {name: 1.3 * seconds for name, seconds in crumbs.items()}
        held = replace(USUAL, throttled=throttled, processors=0.5)
        now = [build_pattern(rank, {**HEALTHY_WORK, **grown}, 0.84, setup=held) for rank in range(8)]
        early = [build_pattern(rank, {**HEALTHY_WORK, **crumbs}, 0.555) for rank in range(8)]
        found = localize_fault(build_answers(now, early), 8)
        assert (found.finding.fault, found.finding.culprit) == (fault, culprit)

    def test_waits_for_a_slow_rank_are_no_transfer(self) -> None:
        found = localize_job(HEALTHY_WORK, HEALTHY_WORK, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2}, HEALTHY_WORK)
        assert all(e.finding.fault is not FaultClass.NETWORK for e in found.explanations)


class TestUnknown:
    def test_less_than_half_explained_is_unknown(self) -> None:
        """A third of the excess in one function, the rest in a hundred small ones."""
        crumbs = {(f"train.py:crumb_{i}", SLOW_FUNCTION[1]): 0.003 for i in range(100)}
        found = localize_job(HEALTHY_WORK, {**HEALTHY_WORK, SLOW_FUNCTION: 0.13, **crumbs}, HEALTHY_WORK)
        assert found.finding.fault is FaultClass.UNKNOWN
        assert 0.25 < found.explained < 0.5
        assert "of the 0.430 s" in found.finding.signals[0].message
        assert found.finding.signal_kinds >= {SignalKind.TIMES, SignalKind.PROFILE}

    def test_healthy_ranks_are_unknown(self) -> None:
        found = localize_job(*[HEALTHY_WORK] * 4)
        assert (found.finding.fault, found.finding.culprit, found.explanations) == (FaultClass.UNKNOWN, "", ())
        assert found.finding.signal_kinds == {SignalKind.TIMES, SignalKind.PROFILE}
        assert "most of a step goes into " in found.finding.signals[1].message

    def test_missing_and_broken_answers_are_reported(self) -> None:
        given = build_answers(
            [
                build_pattern(rank, {**HEALTHY_WORK, SLOW_FUNCTION: 0.2} if rank == 1 else HEALTHY_WORK, 0.6)
                for rank in range(3)
            ]
        )
        lying = ProfileAnswer(build_pattern(9, HEALTHY_WORK, 0.6)).to_bytes()
        found = localize_fault([*given, (3, b"{"), (4, lying)], 6)
        assert found.finding.culprit == "train.py:augment on rank 1"
        assert found.reported == 3
        assert "3 of 6 ranks have answered" in found.remarks
        assert any("rank 4: pattern.rank: 9" in remark for remark in found.remarks)

    def test_no_answers_are_unknown(self) -> None:
        found = localize_fault([], 4)
        assert (found.finding.fault, found.reported, found.expected) == (FaultClass.UNKNOWN, 0, 4)

    def test_a_single_rank_is_compared_with_its_early_steps(self) -> None:
        assert localize_job({**HEALTHY_WORK, SLOW_FUNCTION: 0.2}).finding.culprit == "train.py:augment on all ranks"

    def test_wrong_settings_are_mentioned(self) -> None:
        blocking = replace(USUAL, variables=("CUDA_LAUNCH_BLOCKING=1",))
        found = localize_job(*[HEALTHY_WORK] * 2, setups={0: blocking, 1: blocking})
        assert any("CUDA_LAUNCH_BLOCKING=1" in remark for remark in found.remarks)


def test_noise_of_samples_blames_no_rank() -> None:
    """Shares from 500 samples differ by a hundredth or two."""
    random = np.random.default_rng(0)

    def build_noisy_pattern(rank: int) -> RankPattern:
        work = {f: max(0.0, s + float(random.normal(0, 0.006))) for f, s in HEALTHY_WORK.items()}
        total = sum(work.values())
        return build_pattern(rank, {f: s * 0.375 / total for f, s in work.items()}, 0.4)

    for _ in range(20):
        found = localize_fault(
            build_answers([build_noisy_pattern(r) for r in range(8)], [build_noisy_pattern(r) for r in range(8)]), 8
        )
        assert found.finding.culprit == ""


def test_waits_in_another_ranks_columns_do_not_count_as_own_work() -> None:
    found = localize_job({**HEALTHY_WORK, WAIT_FUNCTION: 0.02}, {**HEALTHY_WORK, WAIT_FUNCTION: 0.02}, early=None)
    assert found.explanations == ()
