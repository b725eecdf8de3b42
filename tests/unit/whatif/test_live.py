"""Windows of live jobs with stages: from the records of ranks to S by stage and rank."""

import dataclasses

import numpy as np
import pytest

from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.whatif import analyze_window
from pacekeeper_analysis.whatif.live import RankSteps, build_window_from_operations
from pacekeeper_analysis.whatif.trace import TraceError
from pacekeeper_rank.records import Collective
from testing.training.pipeline_job import PipelineShape, build_steady_work, record_steps

SHAPES = [
    PipelineShape(stages=2, data=2, tensor=2),
    PipelineShape(stages=4, data=2, tensor=1),
    PipelineShape(stages=3, data=1, tensor=2),
    PipelineShape(stages=1, data=4, tensor=1),
    PipelineShape(stages=1, data=2, tensor=2),
    PipelineShape(stages=2, data=3, tensor=3, microbatches=2),
]


def compute_slowdown_by_rank(shape: PipelineShape, **how: object) -> dict[int, float]:
    """Return S_w of each rank."""
    ranks, _ = record_steps(shape, 6, build_steady_work(**how))  # type: ignore[arg-type]  # of each case
    live = build_window_from_operations(ranks)
    found = analyze_window(live.window).decomposition
    assert found is not None
    return {rank: float(found.slowdown_by_worker[worker]) for worker, rank in live.worker_ranks.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_simulation_takes_as_long_as_the_job(shape: PipelineShape) -> None:
    ranks, walls = record_steps(shape, 6, build_steady_work(slow=[1], factor=1.5))
    found = analyze_window(build_window_from_operations(ranks).window)
    assert found.step_s == pytest.approx(walls, rel=0.02)
    assert found.launch_slowdown == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_healthy_job_has_nothing_to_decompose(shape: PipelineShape) -> None:
    ranks, _ = record_steps(shape, 6, build_steady_work())
    found = analyze_window(build_window_from_operations(ranks).window)
    assert found.slowdown == pytest.approx(1.0, abs=0.02)
    assert found.decomposition is None


@pytest.mark.parametrize("shape", SHAPES[:1] + SHAPES[5:], ids=str)
@pytest.mark.parametrize("slow", [0, 3, 6])
def test_a_slow_rank_is_the_slowest_worker(shape: PipelineShape, slow: int) -> None:
    slowdowns = compute_slowdown_by_rank(shape, slow=[slow], factor=2.0)
    assert max(slowdowns, key=slowdowns.__getitem__) == slow
    others = [value for rank, value in slowdowns.items() if rank != slow]
    assert slowdowns[slow] > 1.2
    assert slowdowns[slow] > 1.1 * max(others)


def test_a_slow_stage_is_distinguished_from_slow_replicas() -> None:
    shape = PipelineShape(stages=4, data=2, tensor=1)
    last = [rank for rank in shape.ranks if shape.get_coordinates(rank)[0] == 3]
    ranks, _ = record_steps(shape, 6, build_steady_work(slow=last, factor=1.6))
    found = analyze_window(build_window_from_operations(ranks).window)
    assert found.decomposition is not None
    assert int(np.argmax(found.decomposition.slowdown_by_stage)) == 3
    assert found.decomposition.slowdown_by_stage[3] > 1.15
    assert found.decomposition.last_stage.share > 0.8
    assert np.ptp(found.decomposition.slowdown_by_replica) < 0.01


def test_a_slow_transfer_is_communication() -> None:
    shape = PipelineShape(stages=2, data=2, tensor=1)
    ranks, _ = record_steps(shape, 8, build_steady_work())
    slow = []
    for of in ranks:
        operations = of.operations.copy()
        gradients = operations["collective"] == Collective.ALL_REDUCE
        late = gradients & (operations["step"] >= 5) & (operations["group"] == 0)
        operations["end"][late] += 0.05
        operations["wait"][late] += 0.05
        after = gradients & (operations["step"] >= 5) & (operations["group"] == 2)
        operations["start"][after] += 0.05
        operations["end"][after] += 0.05
        seconds = {step: value + (0.05 if step >= 5 else 0.0) for step, value in of.step_seconds.items()}
        slow.append(dataclasses.replace(of, operations=operations, step_seconds=seconds))
    found = analyze_window(build_window_from_operations(slow).window)
    assert found.slowdown_per_step[6] > found.slowdown_per_step[2] * 1.2
    assert found.decomposition is not None
    assert (
        max(found.decomposition.slowdown_by_type, key=found.decomposition.slowdown_by_type.__getitem__) == "all-reduce"
    )


def test_clocks_are_not_compared() -> None:
    """All times are since each rank's own beginning of the step: there is no other."""
    names = set(RankSteps.__dataclass_fields__)
    assert names == {"rank", "operations", "communicators", "step_seconds"}


def test_a_step_in_which_a_rank_ran_other_work_is_left_out() -> None:
    ranks, _ = record_steps(PipelineShape(), 6, build_steady_work())
    odd = ranks[3].operations
    ranks[3] = dataclasses.replace(ranks[3], operations=np.delete(odd, np.flatnonzero(odd["step"] == 2)[0]))
    window = build_window_from_operations(ranks).window
    assert window.steps == (0, 1, 3, 4, 5)
    assert window.skipped[0].step == 2
    assert "rank 3" in window.skipped[0].reason


def test_a_step_whose_duration_one_rank_does_not_know_is_no_common_step() -> None:
    ranks, _ = record_steps(PipelineShape(), 6, build_steady_work())
    ranks[0] = dataclasses.replace(ranks[0], step_seconds={n: s for n, s in ranks[0].step_seconds.items() if n != 5})
    assert build_window_from_operations(ranks).window.steps == (0, 1, 2, 3, 4)


class TestUndecided:
    def test_missing_ranks_are_reported(self) -> None:
        ranks, _ = record_steps(PipelineShape(), 6, build_steady_work())
        with pytest.raises(TraceError, match="rank 0, 1, 2"):
            build_window_from_operations(ranks[:3] + ranks[4:])

    def test_no_ranks_are_reported(self) -> None:
        with pytest.raises(TraceError, match="none"):
            build_window_from_operations([])

    def test_too_few_steps_are_reported(self) -> None:
        ranks, _ = record_steps(PipelineShape(), 2, build_steady_work())
        with pytest.raises(TraceError, match="2 steps in common"):
            build_window_from_operations(ranks)

    def test_an_unknown_group_is_reported(self) -> None:
        ranks, _ = record_steps(PipelineShape(), 6, build_steady_work())
        ranks[0] = dataclasses.replace(ranks[0], communicators=())
        with pytest.raises(TraceError, match="not known"):
            build_window_from_operations(ranks)

    def test_a_group_of_only_some_replicas_is_reported(self) -> None:
        ranks, _ = record_steps(PipelineShape(stages=1, data=4, tensor=1), 6, build_steady_work())
        pair = [Communicator(7, "0-2"), *ranks[0].communicators[1:]]
        with pytest.raises(TraceError, match="equal parts"):
            build_window_from_operations([dataclasses.replace(of, communicators=pair) for of in ranks])

    def test_a_peer_outside_of_the_job_is_reported(self) -> None:
        ranks, _ = record_steps(PipelineShape(), 6, build_steady_work())
        operations = ranks[0].operations.copy()
        operations["peer"][operations["collective"] == Collective.SEND] = 99
        ranks[0] = dataclasses.replace(ranks[0], operations=operations)
        with pytest.raises(TraceError, match=r"sends"):
            build_window_from_operations(ranks)

    def test_ranks_that_wait_for_each_other_are_reported(self) -> None:
        ranks, _ = record_steps(PipelineShape(stages=2, data=1, tensor=1), 6, build_steady_work())
        operations = ranks[0].operations.copy()
        operations["collective"][operations["collective"] == Collective.SEND] = Collective.RECV
        ranks[0] = dataclasses.replace(ranks[0], operations=operations)
        with pytest.raises(TraceError, match="wait"):
            build_window_from_operations(ranks)
