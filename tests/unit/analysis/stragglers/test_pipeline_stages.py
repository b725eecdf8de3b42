"""The bottleneck of a job with stages."""

import dataclasses

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.operations import encode_operations
from pacekeeper_analysis.protocol.reports import Evidence, RankOperations, RankWindow
from pacekeeper_analysis.stragglers import pipeline_stages, strategies
from pacekeeper_analysis.stragglers.strategies import Bottleneck
from testing.training.pipeline_job import OwnSeconds, PipelineShape, build_steady_work, record_steps

SHAPE = PipelineShape(stages=2, data=3, tensor=1)
THRESHOLD = 1.1


def build_answers(shape: PipelineShape, work: OwnSeconds, steps: int = 10) -> list[Evidence]:
    """The answers of the sidecars: one rank a worker."""
    ranks, _ = record_steps(shape, steps, work)
    found = []
    for of in ranks:
        own = tuple(sum(work(of.rank, step, part) for part in ("forward", "backward")) for step in of.step_seconds)
        numbers = tuple(of.step_seconds)
        window = RankWindow(of.rank, numbers, tuple(of.step_seconds.values()), own, (0,) * len(numbers))
        operations = RankOperations(of.rank, encode_operations(of.operations))
        found.append(
            Evidence("r", f"w{of.rank}", 1, (window,), communicators=tuple(of.communicators), operations=(operations,))
        )
    return found


def diagnose_answers(given: list[Evidence]) -> strategies.Diagnosis:
    live = pipeline_stages.build_live_window(given)
    assert live is not None
    found = pipeline_stages.diagnose_staged_job(
        live, [window for answer in given for window in answer.windows], THRESHOLD
    )
    assert found is not None
    return found


def slow_last_stage(rank: int, step: int, part: str) -> float:
    """No straggler: that stage has more to do."""
    return build_steady_work()(rank, step, part) * (1.6 if SHAPE.get_coordinates(rank)[0] == 1 else 1.0)


def test_a_stage_with_more_to_do_is_no_straggler() -> None:
    given = build_answers(SHAPE, slow_last_stage)
    plain = strategies.diagnose_bottleneck([window for answer in given for window in answer.windows], THRESHOLD)
    assert plain is not None
    assert plain.culprits, "without stages these ranks seem slow"
    found = diagnose_answers(given)
    assert found.bottleneck is Bottleneck.NONE
    assert found.culprits == ()
    assert "stage 1 1." in found.evidence[1]


def test_a_slow_rank_of_a_light_stage_is_found() -> None:
    def slow_rank(rank: int, step: int, part: str) -> float:
        return slow_last_stage(rank, step, part) * (2.0 if rank == 1 else 1.0)

    found = diagnose_answers(build_answers(SHAPE, slow_rank))
    assert found.bottleneck is Bottleneck.COMPUTE
    assert found.culprits == (1,)
    assert found.rank_slowdown[1] == pytest.approx(2.0, rel=0.02)
    assert found.slowdown > 1.15
    assert "other ranks: rank 1 1.98 ×" in found.evidence[0]


def test_a_rank_that_is_slowed_periodically_is_evaluated_over_some_steps() -> None:
    """A processor quota: every second step takes its rank 1.8 times as long."""
    found = diagnose_answers(
        build_answers(
            SHAPE, lambda r, s, p: build_steady_work()(r, s, p) * (1.8 if r == 1 and s % 2 else 1.0), steps=16
        )
    )
    assert (found.bottleneck, found.culprits) == (Bottleneck.COMPUTE, (1,))


def test_ranks_that_are_slow_in_turns_are_volatile() -> None:
    def slow_in_turns(rank: int, step: int, part: str) -> float:
        return slow_last_stage(rank, step, part) * (3.0 if step % 6 == rank else 1.0)

    found = diagnose_answers(build_answers(SHAPE, slow_in_turns, steps=24))
    assert (found.bottleneck, found.culprits) == (Bottleneck.VOLATILE, ())
    assert found.effects[Bottleneck.COMPUTE] == 1.0


def test_the_gain_is_no_more_than_the_graph_allows() -> None:
    """A rank that is slow in a stage with little to do costs less than its own slowdown."""
    found = diagnose_answers(build_answers(SHAPE, lambda r, s, p: slow_last_stage(r, s, p) * (1.3 if r == 1 else 1.0)))
    assert found.culprits == (1,)
    assert found.slowdown < 1.3


def test_one_replica_has_no_peers() -> None:
    found = diagnose_answers(
        build_answers(PipelineShape(stages=2, data=1, tensor=1), build_steady_work(slow=[1], factor=2.0))
    )
    assert found.culprits == ()
    assert found.bottleneck is Bottleneck.NONE


def test_jobs_without_stages_are_evaluated_as_before() -> None:
    assert (
        pipeline_stages.build_live_window(build_answers(PipelineShape(stages=1, data=4, tensor=1), build_steady_work()))
        is None
    )


def test_unreadable_evidence_is_no_window() -> None:
    given = build_answers(SHAPE, build_steady_work())
    with pytest.raises(InputError):
        RankOperations(0, "!")
    silent = dataclasses.replace(given[0], operations=(RankOperations(0, ""),))
    assert pipeline_stages.build_live_window([silent, *given[1:]]) is None
    assert pipeline_stages.build_live_window([dataclasses.replace(answer, operations=()) for answer in given]) is None
    assert pipeline_stages.build_live_window(given[1:]) is None


def test_the_jobs_own_imbalance_hides_no_other_bottleneck() -> None:
    found = diagnose_answers(build_answers(SHAPE, slow_last_stage))
    quiet = dict.fromkeys(found.effects, 1.0)
    for other, expected in ((1.2, Bottleneck.COMMUNICATION), (1.05, Bottleneck.NONE)):
        effects = {**quiet, Bottleneck.VOLATILE: 1.25, Bottleneck.COMMUNICATION: other}
        in_turns = dataclasses.replace(found, bottleneck=Bottleneck.VOLATILE, slowdown=1.25, effects=effects)
        remaining = pipeline_stages.exclude_bottleneck(in_turns, Bottleneck.VOLATILE, THRESHOLD)
        assert (remaining.bottleneck, remaining.slowdown) == (expected, other)
        assert remaining.effects == effects
