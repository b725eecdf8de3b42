"""What holds a job with stages back."""

import dataclasses

import pytest

from pacekeeper_analysis import adapt, staged
from pacekeeper_analysis.adapt import Trouble
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.operations import encode
from pacekeeper_analysis.reports import Evidence, RankOperations, RankWindow
from tests.support.pipeline_job import Shape, Work, record, steady

SHAPE = Shape(stages=2, data=3, tensor=1)
THRESHOLD = 1.1


def answers(shape: Shape, work: Work, steps: int = 10) -> list[Evidence]:
    """What the sidecars would answer: one rank a worker."""
    ranks, _ = record(shape, steps, work)
    found = []
    for of in ranks:
        own = tuple(sum(work(of.rank, step, part) for part in ("forward", "backward")) for step in of.step_seconds)
        numbers = tuple(of.step_seconds)
        window = RankWindow(of.rank, numbers, tuple(of.step_seconds.values()), own, (0,) * len(numbers))
        operations = RankOperations(of.rank, encode(of.operations))
        found.append(
            Evidence("r", f"w{of.rank}", 1, (window,), communicators=tuple(of.communicators), operations=(operations,))
        )
    return found


def diagnose(given: list[Evidence]) -> adapt.Diagnosis:
    live = staged.live_window(given)
    assert live is not None
    found = staged.diagnose(live, [window for answer in given for window in answer.windows], THRESHOLD)
    assert found is not None
    return found


def heavy_last_stage(rank: int, step: int, part: str) -> float:
    """No straggler: that stage has more to do."""
    return steady()(rank, step, part) * (1.6 if SHAPE.place(rank)[0] == 1 else 1.0)


def test_a_stage_with_more_to_do_is_no_straggler() -> None:
    given = answers(SHAPE, heavy_last_stage)
    plain = adapt.diagnose([window for answer in given for window in answer.windows], THRESHOLD)
    assert plain is not None
    assert plain.culprits, "without stages these ranks look slow"
    found = diagnose(given)
    assert found.trouble is Trouble.NONE
    assert found.culprits == ()
    assert "stage 1 1." in found.evidence[1]


def test_a_slow_rank_of_a_light_stage_is_found() -> None:
    def work(rank: int, step: int, part: str) -> float:
        return heavy_last_stage(rank, step, part) * (2.0 if rank == 1 else 1.0)

    found = diagnose(answers(SHAPE, work))
    assert found.trouble is Trouble.COMPUTE
    assert found.culprits == (1,)
    assert found.rank_slowdown[1] == pytest.approx(2.0, rel=0.02)
    assert found.slowdown > 1.15
    assert "other ranks: rank 1 1.98 ×" in found.evidence[0]


def test_what_holds_a_rank_up_now_and_then_is_judged_over_some_steps() -> None:
    """A processor quota: every second step takes its rank 1.8 times as long."""
    found = diagnose(answers(SHAPE, lambda r, s, p: steady()(r, s, p) * (1.8 if r == 1 and s % 2 else 1.0), steps=16))
    assert (found.trouble, found.culprits) == (Trouble.COMPUTE, (1,))


def test_ranks_that_are_slow_in_turns_are_volatile() -> None:
    def in_turns(rank: int, step: int, part: str) -> float:
        return heavy_last_stage(rank, step, part) * (3.0 if step % 6 == rank else 1.0)

    found = diagnose(answers(SHAPE, in_turns, steps=24))
    assert (found.trouble, found.culprits) == (Trouble.VOLATILE, ())
    assert found.effects[Trouble.COMPUTE] == 1.0


def test_no_more_is_won_than_the_graph_allows() -> None:
    """A rank that is slow in a stage with little to do costs less than its own slowdown."""
    found = diagnose(answers(SHAPE, lambda r, s, p: heavy_last_stage(r, s, p) * (1.3 if r == 1 else 1.0)))
    assert found.culprits == (1,)
    assert found.slowdown < 1.3


def test_one_replica_has_no_peers() -> None:
    found = diagnose(answers(Shape(stages=2, data=1, tensor=1), steady(slow=[1], factor=2.0)))
    assert found.culprits == ()
    assert found.trouble is Trouble.NONE


def test_jobs_without_stages_are_judged_as_they_were() -> None:
    assert staged.live_window(answers(Shape(stages=1, data=4, tensor=1), steady())) is None


def test_what_cannot_be_read_is_no_window() -> None:
    given = answers(SHAPE, steady())
    with pytest.raises(InputError):
        RankOperations(0, "!")
    silent = dataclasses.replace(given[0], operations=(RankOperations(0, ""),))
    assert staged.live_window([silent, *given[1:]]) is None
    assert staged.live_window([dataclasses.replace(answer, operations=()) for answer in given]) is None
    assert staged.live_window(given[1:]) is None


def test_what_is_the_jobs_own_way_hides_no_other_trouble() -> None:
    found = diagnose(answers(SHAPE, heavy_last_stage))
    quiet = dict.fromkeys(found.effects, 1.0)
    for other, trouble in ((1.2, Trouble.COMMUNICATION), (1.05, Trouble.NONE)):
        effects = {**quiet, Trouble.VOLATILE: 1.25, Trouble.COMMUNICATION: other}
        in_turns = dataclasses.replace(found, trouble=Trouble.VOLATILE, slowdown=1.25, effects=effects)
        beside = staged.without(in_turns, Trouble.VOLATILE, THRESHOLD)
        assert (beside.trouble, beside.slowdown) == (trouble, other)
        assert beside.effects == effects
