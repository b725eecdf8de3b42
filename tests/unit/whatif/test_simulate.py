"""The engine against a plain simulator without columns, and scenarios against durations changed by
hand."""

from __future__ import annotations

import numpy as np
import pytest

from pacekeeper_analysis.whatif import (
    IDEAL,
    IDEAL_SCENARIO,
    PEERS,
    RECORDED,
    RECORDED_SCENARIO,
    UNINTERRUPTED,
    FixedSeconds,
    OperationSelection,
    RecordedWindow,
    ScaledSeconds,
    build_window_from_trace,
)
from pacekeeper_analysis.whatif import data_parallel as dp
from pacekeeper_analysis.whatif import window as window_module
from pacekeeper_analysis.whatif.graph import GraphBuilder, OperationGraph
from pacekeeper_analysis.whatif.simulate import Array, Timeline, simulate_graph
from pacekeeper_analysis.whatif.synthetic import JobShape, draw_healthy_seconds, list_operations, make_trace

SHAPES = [
    JobShape(dp=3, pp=3, microbatches=5, steps=4),
    JobShape(dp=2, pp=2, vpp=2, microbatches=4, steps=3, overlapped=True),
    JobShape(dp=1, pp=4, microbatches=2, steps=2),
    JobShape(dp=5, pp=1, microbatches=3, steps=2),
]


@pytest.fixture(params=SHAPES, ids=str)
def window(request: pytest.FixtureRequest) -> RecordedWindow:
    shape: JobShape = request.param
    operations = list_operations(shape)
    seconds = draw_healthy_seconds(operations, shape, noise=0.3, rng=np.random.default_rng(4))
    return build_window_from_trace(make_trace(shape, operations, seconds))


def simulate_plainly(graph: OperationGraph, seconds: Array) -> Array:
    """Run one operation after the other, until no time changes. seconds: [operation, replica, step]."""
    size, replicas, steps = seconds.shape
    longest = np.empty(steps)
    for step in range(steps):
        ends = np.zeros((size, replicas))
        while True:
            before = ends.copy()
            for unit in graph.units:
                starts = [max([ends[a, r] for a in unit.predecessors], default=0.0) for r in range(replicas)]
                for replica in range(replicas):
                    start = max(starts) if unit.across else starts[replica]
                    for member in unit.members:
                        ends[member, replica] = start + seconds[member, replica, step]
            if (ends == before).all():
                break
        longest[step] = max(ends[node, replica] for node in graph.final for replica in range(replicas))
    return longest


def test_recorded_seconds_are_simulated(window: RecordedWindow) -> None:
    assert window.simulate_step_seconds([RECORDED_SCENARIO])[0] == pytest.approx(
        simulate_plainly(window.graph, window.seconds)
    )


def test_every_kind_of_change_is_simulated(window: RecordedWindow) -> None:
    recorded, ideal = window.seconds, np.broadcast_to(window.ideal[:, None, None], window.seconds.shape)
    last = window.replicas - 1
    of_type, stages = (np.array([getattr(node, name) for node in window.operations]) for name in ("type", "stage"))
    last_stage = int(stages.max())
    operation, replica, step = np.indices(recorded.shape)
    stage = stages[operation]
    forward, backward = of_type[operation] == "forward-compute", of_type[operation] == "backward-compute"
    on_last_stage = np.where(stage == last_stage, ideal, recorded)
    cases = [
        (IDEAL_SCENARIO, ideal),
        (
            IDEAL_SCENARIO.with_change(OperationSelection(types=["forward-compute"]), takes=RECORDED),
            np.where(forward, recorded, ideal),
        ),
        (
            RECORDED_SCENARIO.with_change(OperationSelection(workers=[(last, last_stage)]), takes=IDEAL),
            np.where((replica == last) & (stage == last_stage), ideal, recorded),
        ),
        (
            RECORDED_SCENARIO.with_change(
                OperationSelection(stages=[0], steps=[window.steps[-1]]), takes=FixedSeconds(0.07)
            ),
            np.where((stage == 0) & (step == len(window.steps) - 1), 0.07, recorded),
        ),
        (
            RECORDED_SCENARIO.with_change(
                OperationSelection(types=["backward-compute"]), takes=ScaledSeconds(2.0, fixed=0.01)
            ),
            np.where(backward, 0.01 + 2 * (recorded - 0.01), recorded),
        ),
        (
            RECORDED_SCENARIO.with_change(OperationSelection(stages=[last_stage]), takes=IDEAL).with_change(
                OperationSelection(replicas=[0]), takes=ScaledSeconds(0.5)
            ),
            np.where(replica == 0, 0.5 * on_last_stage, on_last_stage),
        ),
    ]
    if last > 0:
        peers = np.median(recorded[:, :last], axis=1, keepdims=True)
        cases.append(
            (
                RECORDED_SCENARIO.with_change(OperationSelection(replicas=[last]), takes=PEERS),
                np.where(replica == last, peers, recorded),
            )
        )
    together = window.simulate_step_seconds([scenario for scenario, _ in cases])
    for (scenario, changed), seconds in zip(cases, together, strict=True):
        assert seconds == pytest.approx(simulate_plainly(window.graph, changed)), scenario


def test_one_replica_is_recorded_and_all_others_are_ideal(window: RecordedWindow) -> None:
    for replica, seconds in enumerate(window.simulate_single_replicas()):
        single = np.broadcast_to(window.ideal[:, None, None], window.seconds.shape).copy()
        single[:, replica] = window.seconds[:, replica]
        assert seconds == pytest.approx(simulate_plainly(window.graph, single))


def test_blocks_change_nothing(window: RecordedWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = [
        RECORDED_SCENARIO,
        IDEAL_SCENARIO,
        RECORDED_SCENARIO.with_change(OperationSelection(stages=[0]), takes=IDEAL),
    ]
    whole, single = window.simulate_step_seconds(scenarios), window.simulate_single_replicas()
    monkeypatch.setattr(window_module, "MAX_COLUMNS_SIMULATED", 1)
    assert (window.simulate_step_seconds(scenarios) == whole).all()
    assert (window.simulate_single_replicas() == single).all()


def test_independent_replicas_do_not_wait() -> None:
    graph = GraphBuilder()
    compute = graph.add_operation("compute")
    reduce = graph.add_operation("reduce", after=[compute])
    graph.start_together([reduce], across=(0,))
    seconds = np.array([[[1.0], [3.0]], [[0.5], [0.5]]])
    built = graph.build()
    assert simulate_graph(built, seconds[:, None]).ravel().tolist() == [3.5, 3.5]
    assert simulate_graph(built.with_independent_replicas([False, True]), seconds[:, None]).ravel().tolist() == [
        1.5,
        3.5,
    ]


def test_groups_along_one_axis_of_a_mesh_wait_for_their_own_members() -> None:
    """Ranks (sync, shard) 2 x 2: a collective along the shard axis waits only for its own row."""
    graph = GraphBuilder()
    compute = graph.add_operation("compute")
    gather = graph.add_operation("gather", after=[compute])
    graph.start_together([gather], across=(1,))
    compute_s = np.array([[1.0, 2.0], [3.0, 7.0]])
    seconds = np.stack([compute_s, np.ones((2, 2))])[:, None, :, :, None]
    assert simulate_graph(graph.build(), seconds)[0, :, :, 0].tolist() == [[3.0, 3.0], [8.0, 8.0]]


def test_timeline_shows_waiting() -> None:
    graph = GraphBuilder()
    first, second = graph.add_operation("first"), graph.add_operation("second")
    send, receive = graph.add_operation("send", after=[first]), graph.add_operation("receive", after=[second])
    graph.start_together([send, receive])
    timeline: Timeline = {}
    seconds = np.array([1.0, 4.0, 0.5, 0.25]).reshape(4, 1, 1, 1)
    simulate_graph(graph.build(), seconds, timeline)
    times = {node: (float(start.max()), float(end.max())) for node, (start, end) in timeline.items()}
    assert times == {first: (0.0, 1.0), second: (0.0, 4.0), send: (1.0, 4.5), receive: (4.0, 4.25)}


def test_a_cycle_is_named() -> None:
    graph = GraphBuilder()
    egg = graph.add_operation("egg")
    hen = graph.add_operation("hen", after=[egg])
    graph.add_wait(egg, on=hen)
    with pytest.raises(ValueError, match=r"in a cycle: .*egg"):
        graph.build()


def test_an_uninterrupted_scenario_removes_pauses_only() -> None:
    """One pause of 0.4 s in a step of rank 1; rank 0, which is always slower, stays as it is."""
    program: list[dp.Instruction] = [dp.RunWork(dp.FORWARD)]
    seconds = np.tile([[1.05], [1.0]], (1, 1, 9))
    seconds[0, 1, 4] += 0.4
    window = dp.build_window(program, seconds)
    recorded, uninterrupted = window.simulate_finish(
        [RECORDED_SCENARIO, RECORDED_SCENARIO.with_change(OperationSelection(types=[dp.FORWARD]), takes=UNINTERRUPTED)]
    )
    assert recorded[1, 4] == pytest.approx(1.4)
    assert uninterrupted[0] == pytest.approx(1.05)
    assert uninterrupted[1] == pytest.approx(1.0)


def test_a_missing_replica_is_rejected() -> None:
    window = dp.build_window([dp.RunWork()], np.ones((1, 2, 3)))
    with pytest.raises(ValueError, match=r"replicas \[5\] of a job with 2"):
        window.simulate_step_seconds(
            [RECORDED_SCENARIO.with_change(OperationSelection(replicas=[5]), takes=FixedSeconds(1.0))]
        )


def test_a_scenario_without_peers_is_rejected() -> None:
    shape = JobShape(dp=1, pp=1, microbatches=1, steps=1)
    operations = list_operations(shape)
    window = build_window_from_trace(make_trace(shape, operations, np.ones((len(operations), 1, 1))))
    with pytest.raises(ValueError, match="no peers left"):
        window.simulate_step_seconds([RECORDED_SCENARIO.with_change(OperationSelection(replicas=[0]), takes=PEERS)])
