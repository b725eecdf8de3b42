"""Traces small enough to work out on paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from pacekeeper_analysis.whatif import (
    JobTrace,
    Operation,
    TraceMetadata,
    WhatIf,
    analyze_window,
    build_trace_from_columns,
    build_window_from_trace,
)
from pacekeeper_analysis.whatif.synthetic import JobShape, list_operations, make_trace
from pacekeeper_analysis.whatif.trace import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    REDUCE_SCATTER,
    SEPARATE_ALL_REDUCE,
)

# Two stages, two data-parallel ranks, one microbatch; transfers take no time. All computations take 1 s forward and
# 2 s backward, but 3 s and 6 s on stage 1 of rank 1. Reduce-scatter and optimizer take 0.5 s each.   rank 0: F0
# 0-1, F1 1-2, B1 2-4, B0 4-6         rank 1: F0 0-1, F1 1-4, B1 4-10, B0 10-12 Reduce-scatter: stage 0 waits for
# rank 1 until 12, stage 1 until 10. Optimizers: 12.5-13 and 10.5-11.
ROWS = [
    # dp_rank, stage, optype, start, end
    (0, 0, "forward-compute", 0.0, 1.0),
    (0, 0, "forward-send", 1.0, 1.0),
    (0, 1, "forward-recv", 0.0, 1.0),
    (0, 1, "forward-compute", 1.0, 2.0),
    (0, 1, "backward-compute", 2.0, 4.0),
    (0, 1, "backward-send", 4.0, 4.0),
    (0, 0, "backward-recv", 1.0, 4.0),
    (0, 0, "backward-compute", 4.0, 6.0),
    (1, 0, "forward-compute", 0.0, 1.0),
    (1, 0, "forward-send", 1.0, 1.0),
    (1, 1, "forward-recv", 0.0, 1.0),
    (1, 1, "forward-compute", 1.0, 4.0),
    (1, 1, "backward-compute", 4.0, 10.0),
    (1, 1, "backward-send", 10.0, 10.0),
    (1, 0, "backward-recv", 1.0, 10.0),
    (1, 0, "backward-compute", 10.0, 12.0),
    (0, 0, "grads-reduce-scatter", 6.0, 12.5),
    (1, 0, "grads-reduce-scatter", 12.0, 12.5),
    (0, 1, "grads-reduce-scatter", 4.0, 10.5),
    (1, 1, "grads-reduce-scatter", 10.0, 10.5),
    (0, 0, "optimizer", 12.5, 13.0),
    (1, 0, "optimizer", 12.5, 13.0),
    (0, 1, "optimizer", 10.5, 11.0),
    (1, 1, "optimizer", 10.5, 11.0),
]


@pytest.fixture
def paper() -> WhatIf:
    return analyze_window(build_window_from_trace(build_paper_trace()))


def build_paper_trace() -> JobTrace:
    dp_rank, stage, optype, start, end = (np.array(column) for column in zip(*ROWS, strict=True))
    rows = len(ROWS)
    computes = np.isin(optype, ["forward-compute", "backward-compute", "grads-reduce-scatter"])
    columns = {
        "step": np.full(rows, 7),
        "dp_rank": dp_rank,
        "stage": stage,
        "rank": stage * 2 + dp_rank,
        "optype": optype,
        "seq_id": np.zeros(rows, dtype=int),
        "mc": np.where(computes, 0, -1),
        "mb_id": np.where(computes, 0, -1),
        "start_ts": start,
        "duration": end - start,
    }
    return build_trace_from_columns(columns, TraceMetadata(dp_size=2, pp_size=2, world_size=4))


def test_recorded_and_ideal_step_are_computed(paper: WhatIf) -> None:
    assert paper.step_s == pytest.approx([13.0])
    # Means: forward (1+1+1+3)/4 = 1.5, backward (2+2+2+6)/4 = 3; so 1.5 + 1.5 + 3 + 3 + 0.5 + 0.5.
    assert paper.ideal_step_s == pytest.approx(10.0)
    assert paper.slowdown == pytest.approx(1.3)
    assert paper.waste == pytest.approx(1 - 1 / 1.3)
    assert paper.launch_slowdown == pytest.approx(1.0)


def test_the_slowdown_is_split_into_parts(paper: WhatIf) -> None:
    parts = paper.decomposition
    assert parts is not None
    assert parts.slowdown_by_type[FORWARD] == pytest.approx(1.1)  # rank 1: 1 + 3 + 3 + 3 + 1
    assert parts.slowdown_by_type[BACKWARD] == pytest.approx(1.2)  # rank 1: 1.5 + 1.5 + 6 + 2 + 1
    assert parts.slowdown_by_replica == pytest.approx([1.0, 1.3])
    assert parts.slowdown_by_stage == pytest.approx([0.85, 1.45])  # 1 + 1.5 + 3 + 2 + 1; rank 1: 1.5 + 3 + 6 + 3 + 1
    assert parts.slowdown_by_worker == pytest.approx(np.array([[0.85, 1.0], [0.85, 1.3]]))


def test_the_slow_worker_is_blamed(paper: WhatIf) -> None:
    parts = paper.decomposition
    assert parts is not None
    assert parts.worst_workers.workers == ((1, 1),)
    assert parts.worst_workers.ideal_step_s == pytest.approx([8.5])  # rank 1: 1 + 1.5 + 3 + 2 + 1
    assert parts.worst_workers.share == pytest.approx(1.5)
    assert parts.last_stage.share == pytest.approx(1.5)  # both ranks 1 + 1.5 + 3 + 2 + 1


def test_nothing_is_decomposed_below_the_threshold() -> None:
    shape = JobShape(dp=2, pp=1, microbatches=1, steps=3)
    operations = list_operations(shape)
    whatif = analyze_window(build_window_from_trace(make_trace(shape, operations, np.ones((len(operations), 2, 3)))))
    assert whatif.slowdown == pytest.approx(1.0)
    assert whatif.decomposition is None


@pytest.mark.parametrize(
    ("shape", "rounds"),
    [
        # (microbatches · chunks + stages - 1) pairs of forward and backward: the bubble of 1F1B, and of its
        # interleaved form.
        (JobShape(dp=1, pp=4, microbatches=8), 11),
        (JobShape(dp=1, pp=4, vpp=2, microbatches=8), 19),
        (JobShape(dp=2, pp=2, vpp=3, microbatches=4), 13),
        (JobShape(dp=1, pp=1, microbatches=5), 5),
    ],
)
def test_the_pipeline_bubble_is_computed(shape: JobShape, rounds: int) -> None:
    operations = list_operations(shape)
    one = np.array([1.0 if operation.type in (FORWARD, BACKWARD) else 0.0 for operation in operations])
    seconds = np.broadcast_to(one[:, None, None], (len(operations), shape.dp, shape.steps))
    whatif = analyze_window(build_window_from_trace(make_trace(shape, operations, seconds)))
    assert whatif.step_s == pytest.approx(2.0 * rounds)


@pytest.mark.parametrize(("overlapped", "exposed"), [(True, 5.0), (False, 6.0)])
def test_overlapped_gradients_start_before_the_last_backward(overlapped: bool, exposed: float) -> None:
    """Two chunks whose gradients take 3 s each. The last backwards end at 15 s (chunk 1) and 16 s (chunk 0):
    overlapped, the reduce-scatters run from 15 to 18 and from 18 to 21; otherwise from 16 to 22."""
    shape = JobShape(dp=2, pp=1, vpp=2, microbatches=4, overlapped=overlapped)
    operations = list_operations(shape)
    takes = {FORWARD: 1.0, BACKWARD: 1.0, REDUCE_SCATTER: 3.0, SEPARATE_ALL_REDUCE: 0.25}
    each = np.array([takes.get(operation.type, 0.0) for operation in operations])
    seconds = np.broadcast_to(each[:, None, None], (len(operations), shape.dp, shape.steps))
    whatif = analyze_window(build_window_from_trace(make_trace(shape, operations, seconds)))
    assert whatif.step_s == pytest.approx(16.0 + exposed + (0.25 if overlapped else 0.0))


def test_gradients_are_reduced_with_one_data_parallel_rank_and_sequence_parallelism() -> None:
    """dp 1 and dsp 2: the gradients' collectives are there; dp 1 and dsp 1: they are no part of the step."""
    shape = JobShape(dp=1, pp=1, microbatches=1, steps=1)
    with_peer = JobShape(dp=2, pp=1, microbatches=1, steps=1)
    operations = list_operations(with_peer)
    trace = make_trace(with_peer, operations, np.ones((len(operations), 2, 1)))
    only_rank = trace.select_rows(trace.dp_rank == 0)
    sequence_parallel = replace(only_rank, metadata=TraceMetadata(dp_size=1, dsp_size=2))
    single = replace(only_rank, metadata=shape.metadata)
    # forward, backward, gc, layernorm, embedding, clip and optimizer take 1 s each; all-gather and reduce-scatter
    # too.
    assert analyze_window(build_window_from_trace(sequence_parallel)).step_s == pytest.approx([9.0])
    assert analyze_window(build_window_from_trace(single)).step_s == pytest.approx([7.0])


@pytest.mark.parametrize("first_and_last_missing", [False, True])
def test_transfers_that_were_recorded_without_a_neighbor_change_nothing(first_and_last_missing: bool) -> None:
    """Some profilers record a transfer for every computation, also at the ends of the model (or all but the
    outermost)."""
    shape = JobShape(dp=2, pp=2, vpp=2, microbatches=4, steps=2)
    plain = list_operations(shape)
    everywhere = [*add_transfers_everywhere(plain, shape, first_and_last_missing)]
    assert len(everywhere) == len(plain) + 4 * (4 - first_and_last_missing)
    expected, found = (
        analyze_window(build_window_from_trace(make_trace(shape, operations, draw_durations(operations, shape)))).step_s
        for operations in (plain, everywhere)
    )
    assert found == pytest.approx(expected)


def add_transfers_everywhere(
    operations: list[Operation], shape: JobShape, outermost_missing: bool
) -> Iterator[Operation]:
    """Yield the operations with a transfer before and after every computation."""
    counts: Counter[tuple[str, int]] = Counter()
    computes: Counter[tuple[str, int]] = Counter()
    total = shape.microbatches * shape.vpp

    def number_operation(name: str, stage: int, like: Operation) -> Operation:
        counts[name, stage] += 1
        return replace(like, type=name, index=counts[name, stage] - 1)

    for operation in operations:
        if operation.type in (FORWARD_RECV, FORWARD_SEND, BACKWARD_RECV, BACKWARD_SEND):
            continue
        if operation.type not in (FORWARD, BACKWARD):
            yield operation
            continue
        place = operation.chunk * shape.pp + operation.stage
        at_start, at_end = place == 0, place == shape.pp * shape.vpp - 1
        receive, send = (FORWARD_RECV, FORWARD_SEND) if operation.type == FORWARD else (BACKWARD_RECV, BACKWARD_SEND)
        receives_nothing, sends_nothing = (at_start, at_end) if operation.type == FORWARD else (at_end, at_start)
        computes[operation.type, operation.stage] += 1
        number = computes[operation.type, operation.stage]
        if not (outermost_missing and receives_nothing and number == 1):
            yield number_operation(receive, operation.stage, operation)
        yield operation
        if not (outermost_missing and sends_nothing and number == total):
            yield number_operation(send, operation.stage, operation)


def draw_durations(operations: list[Operation], shape: JobShape) -> NDArray[np.float64]:
    """Draw computations of 1 to 3 s, different on each rank and step; transfers take no time."""
    seconds = np.zeros((len(operations), shape.dp, shape.steps))
    for node, operation in enumerate(operations):
        if operation.type in (FORWARD, BACKWARD):
            key = (operation.type == FORWARD, operation.stage, operation.index)
            seconds[node] = np.random.default_rng(hash(key) % 1000).uniform(1, 3, (shape.dp, shape.steps))
    return seconds
