"""The engine against a plain simulator that knows nothing of columns, and scenarios against durations changed by
hand."""

from __future__ import annotations

import numpy as np
import pytest

from pacekeeper_analysis.whatif import (
    ALL_IDEAL,
    AS_RECORDED,
    IDEAL,
    PEERS,
    RECORDED,
    UNINTERRUPTED,
    Scaled,
    Seconds,
    Where,
    Window,
    window_from_trace,
)
from pacekeeper_analysis.whatif import data_parallel as dp
from pacekeeper_analysis.whatif import window as window_module
from pacekeeper_analysis.whatif.graph import Graph, GraphBuilder
from pacekeeper_analysis.whatif.simulate import Array, Timeline, simulate
from pacekeeper_analysis.whatif.synthetic import Shape, make_trace, operations_of, usual_seconds

SHAPES = [
    Shape(dp=3, pp=3, microbatches=5, steps=4),
    Shape(dp=2, pp=2, vpp=2, microbatches=4, steps=3, overlapped=True),
    Shape(dp=1, pp=4, microbatches=2, steps=2),
    Shape(dp=5, pp=1, microbatches=3, steps=2),
]


@pytest.fixture(params=SHAPES, ids=str)
def window(request: pytest.FixtureRequest) -> Window:
    shape: Shape = request.param
    operations = operations_of(shape)
    seconds = usual_seconds(operations, shape, noise=0.3, rng=np.random.default_rng(4))
    return window_from_trace(make_trace(shape, operations, seconds))


def plain_step_seconds(graph: Graph, seconds: Array) -> Array:
    """One operation after the other, again and again until no time changes. seconds: [operation, replica, step]."""
    size, replicas, steps = seconds.shape
    longest = np.empty(steps)
    for step in range(steps):
        ends = np.zeros((size, replicas))
        while True:
            before = ends.copy()
            for unit in graph.units:
                starts = [max([ends[a, r] for a in unit.after], default=0.0) for r in range(replicas)]
                for replica in range(replicas):
                    start = max(starts) if unit.across else starts[replica]
                    for member in unit.members:
                        ends[member, replica] = start + seconds[member, replica, step]
            if (ends == before).all():
                break
        longest[step] = max(ends[node, replica] for node in graph.final for replica in range(replicas))
    return longest


def test_as_recorded(window: Window) -> None:
    assert window.step_seconds([AS_RECORDED])[0] == pytest.approx(plain_step_seconds(window.graph, window.seconds))


def test_every_kind_of_change(window: Window) -> None:
    recorded, ideal = window.seconds, np.broadcast_to(window.ideal[:, None, None], window.seconds.shape)
    last = window.replicas - 1
    of_type, stages = (np.array([getattr(node, name) for node in window.operations]) for name in ("type", "stage"))
    last_stage = int(stages.max())
    operation, replica, step = np.indices(recorded.shape)
    stage = stages[operation]
    forward, backward = of_type[operation] == "forward-compute", of_type[operation] == "backward-compute"
    on_last_stage = np.where(stage == last_stage, ideal, recorded)
    cases = [
        (ALL_IDEAL, ideal),
        (ALL_IDEAL.but(Where(types=["forward-compute"]), takes=RECORDED), np.where(forward, recorded, ideal)),
        (
            AS_RECORDED.but(Where(workers=[(last, last_stage)]), takes=IDEAL),
            np.where((replica == last) & (stage == last_stage), ideal, recorded),
        ),
        (
            AS_RECORDED.but(Where(stages=[0], steps=[window.steps[-1]]), takes=Seconds(0.07)),
            np.where((stage == 0) & (step == len(window.steps) - 1), 0.07, recorded),
        ),
        (
            AS_RECORDED.but(Where(types=["backward-compute"]), takes=Scaled(2.0, fixed=0.01)),
            np.where(backward, 0.01 + 2 * (recorded - 0.01), recorded),
        ),
        (
            AS_RECORDED.but(Where(stages=[last_stage]), takes=IDEAL).but(Where(replicas=[0]), takes=Scaled(0.5)),
            np.where(replica == 0, 0.5 * on_last_stage, on_last_stage),
        ),
    ]
    if last > 0:
        peers = np.median(recorded[:, :last], axis=1, keepdims=True)
        cases.append((AS_RECORDED.but(Where(replicas=[last]), takes=PEERS), np.where(replica == last, peers, recorded)))
    together = window.step_seconds([scenario for scenario, _ in cases])
    for (scenario, changed), seconds in zip(cases, together, strict=True):
        assert seconds == pytest.approx(plain_step_seconds(window.graph, changed)), scenario


def test_one_replica_recorded_and_all_others_ideal(window: Window) -> None:
    for replica, seconds in enumerate(window.each_replica_alone()):
        alone = np.broadcast_to(window.ideal[:, None, None], window.seconds.shape).copy()
        alone[:, replica] = window.seconds[:, replica]
        assert seconds == pytest.approx(plain_step_seconds(window.graph, alone))


def test_blocks_change_nothing(window: Window, monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = [AS_RECORDED, ALL_IDEAL, AS_RECORDED.but(Where(stages=[0]), takes=IDEAL)]
    whole, alone = window.step_seconds(scenarios), window.each_replica_alone()
    monkeypatch.setattr(window_module, "COLUMNS_AT_ONCE", 1)
    assert (window.step_seconds(scenarios) == whole).all()
    assert (window.each_replica_alone() == alone).all()


def test_replicas_apart_do_not_wait() -> None:
    graph = GraphBuilder()
    compute = graph.operation("compute")
    reduce = graph.operation("reduce", after=[compute])
    graph.start_together([reduce], across=(0,))
    seconds = np.array([[[1.0], [3.0]], [[0.5], [0.5]]])
    built = graph.build()
    assert simulate(built, seconds[:, None]).ravel().tolist() == [3.5, 3.5]
    assert simulate(built.apart([False, True]), seconds[:, None]).ravel().tolist() == [1.5, 3.5]


def test_groups_along_one_axis_of_a_mesh() -> None:
    """Ranks (sync, shard) 2 x 2: a collective along the shard axis waits for one's own row only."""
    graph = GraphBuilder()
    compute = graph.operation("compute")
    gather = graph.operation("gather", after=[compute])
    graph.start_together([gather], across=(1,))
    compute_s = np.array([[1.0, 2.0], [3.0, 7.0]])
    seconds = np.stack([compute_s, np.ones((2, 2))])[:, None, :, :, None]
    assert simulate(graph.build(), seconds)[0, :, :, 0].tolist() == [[3.0, 3.0], [8.0, 8.0]]


def test_timeline_shows_waiting() -> None:
    graph = GraphBuilder()
    first, second = graph.operation("first"), graph.operation("second")
    send, receive = graph.operation("send", after=[first]), graph.operation("receive", after=[second])
    graph.start_together([send, receive])
    timeline: Timeline = {}
    seconds = np.array([1.0, 4.0, 0.5, 0.25]).reshape(4, 1, 1, 1)
    simulate(graph.build(), seconds, timeline)
    times = {node: (float(start.max()), float(end.max())) for node, (start, end) in timeline.items()}
    assert times == {first: (0.0, 1.0), second: (0.0, 4.0), send: (1.0, 4.5), receive: (4.0, 4.25)}


def test_a_circle_is_named() -> None:
    graph = GraphBuilder()
    egg = graph.operation("egg")
    hen = graph.operation("hen", after=[egg])
    graph.wait(egg, on=hen)
    with pytest.raises(ValueError, match=r"in a circle: .*egg"):
        graph.build()


def test_uninterrupted_takes_out_pauses_only() -> None:
    """One pause of 0.4 s in a step of rank 1; rank 0, which is always slower, stays as it is."""
    program: list[dp.Instruction] = [dp.Run(dp.FORWARD)]
    seconds = np.tile([[1.05], [1.0]], (1, 1, 9))
    seconds[0, 1, 4] += 0.4
    window = dp.window(program, seconds)
    recorded, uninterrupted = window.finish(
        [AS_RECORDED, AS_RECORDED.but(Where(types=[dp.FORWARD]), takes=UNINTERRUPTED)]
    )
    assert recorded[1, 4] == pytest.approx(1.4)
    assert uninterrupted[0] == pytest.approx(1.05)
    assert uninterrupted[1] == pytest.approx(1.0)


def test_a_replica_that_does_not_exist() -> None:
    window = dp.window([dp.Run()], np.ones((1, 2, 3)))
    with pytest.raises(ValueError, match=r"replicas \[5\] of a job with 2"):
        window.step_seconds([AS_RECORDED.but(Where(replicas=[5]), takes=Seconds(1.0))])


def test_no_peers_left() -> None:
    shape = Shape(dp=1, pp=1, microbatches=1, steps=1)
    operations = operations_of(shape)
    window = window_from_trace(make_trace(shape, operations, np.ones((len(operations), 1, 1))))
    with pytest.raises(ValueError, match="no peers left"):
        window.step_seconds([AS_RECORDED.but(Where(replicas=[0]), takes=PEERS)])
