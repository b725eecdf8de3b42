"""Profiler traces written by hand; tests/distributed/test_whatif_kineto.py records real ones (without GPUs)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pacekeeper_analysis.whatif import TraceError, Window
from pacekeeper_analysis.whatif.inputs import load
from pacekeeper_analysis.whatif.trace import ALL_GATHER, BACKWARD, FORWARD, OPTIMIZER, REDUCE_SCATTER

MS = 1e-3


def cpu_events(forward: float, wait: float, shift: float) -> Iterator[dict[str, Any]]:
    """Two steps: own forward, backward 4 ms, a reduce of 2 ms once the last rank is there, optimizer 1 ms."""
    begin = shift
    for step in (3, 4):
        backward = begin + forward
        reduce = backward + 4
        update = reduce + wait + 2
        yield event("user_annotation", f"ProfilerStep#{step}", begin, update + 1 - begin)
        yield event("cpu_op", "aten::mm", begin, forward)
        yield event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", backward, 4)
        yield event("user_annotation", "gloo:all_reduce", reduce, wait + 2)
        yield event("user_annotation", "Optimizer.step#SGD.step", update, 1)
        begin = update + 1


def gpu_events(forward: float, wait: float, shift: float) -> Iterator[dict[str, Any]]:
    """The same on a GPU that runs 5 ms behind the processor, which launches everything at once; a gather of 1 ms is
    exposed in the forward."""
    begin, correlation = shift, 100
    for step in (3, 4):
        end = begin + forward + 1 + 4 + wait + 2 + 1
        yield event("user_annotation", f"ProfilerStep#{step}", begin, end - begin)
        yield event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin + 0.4, 0.2, tid=2)
        yield event("user_annotation", "Optimizer.step#SGD.step", begin + 0.7, 0.2)
        at = begin + 5
        for launch, name, length in (
            (0.1, "ncclDevKernel_AllGather_RING_LL", 1.0),
            (0.2, "ampere_sgemm_128x64", forward),
            (0.5, "ampere_sgemm_64x64", 4.0),
            (0.65, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", wait + 2),
            (0.8, "multi_tensor_apply_kernel", 1.0),
        ):
            correlation += 1
            yield event("cuda_runtime", "cudaLaunchKernel", begin + launch, 0.01, correlation=correlation)
            yield event("kernel", name, at, length, correlation=correlation)
            at += length
        begin = end


def event(category: str, name: str, begin_ms: float, length_ms: float, tid: int = 1, **args: int) -> dict[str, Any]:
    times = {"ts": begin_ms * 1e3, "dur": length_ms * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "args": args} | times


def write_job(folder: Path, events: Any, world_size: int = 2) -> list[Path]:
    """Rank 0 takes 10 ms for its forward and rank 1 takes 16; their clocks differ by an hour."""
    paths = []
    for rank, (forward, wait) in enumerate(((10.0, 6.0), (16.0, 0.0))):
        content = {
            "distributedInfo": {"rank": rank, "world_size": world_size},
            "traceEvents": list(events(forward, wait, shift=3_600_000.0 * rank)),
        }
        paths.append(folder / f"{rank}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


def milliseconds(window: Window) -> dict[str, list[float]]:
    """By type: own milliseconds of each rank in the last step."""
    nodes = enumerate(window.operations)
    return {operation.type: [float(value) / MS for value in window.seconds[node, :, -1]] for node, operation in nodes}


def test_own_times_of_a_cpu_job(tmp_path: Path) -> None:
    window = load(write_job(tmp_path, cpu_events)).window
    assert window.steps == (3, 4)
    own = milliseconds(window)
    assert own[FORWARD] == pytest.approx([10, 16], abs=1e-3)
    assert own[BACKWARD] == pytest.approx([4, 4], abs=1e-3)
    assert own[REDUCE_SCATTER] == pytest.approx([2, 2], abs=1e-3)
    assert own[OPTIMIZER] == pytest.approx([1, 1], abs=1e-3)
    assert window.measured_s == pytest.approx([23 * MS] * 2)


def test_own_times_of_a_gpu_job(tmp_path: Path) -> None:
    own = milliseconds(load(write_job(tmp_path, gpu_events)).window)
    assert own[ALL_GATHER] == pytest.approx([1, 1], abs=1e-3)
    assert own[FORWARD] == pytest.approx([10, 16], abs=1e-3)
    assert own[BACKWARD] == pytest.approx([4, 4], abs=1e-3)
    assert own[REDUCE_SCATTER] == pytest.approx([2, 2], abs=1e-3)
    assert own[OPTIMIZER] == pytest.approx([1, 1], abs=1e-3)


def test_a_trace_without_ranks_steps_or_peers_is_refused(tmp_path: Path) -> None:
    paths = write_job(tmp_path, cpu_events)
    content = json.loads(paths[0].read_text())
    for change, message in (
        ({"distributedInfo": None}, "does not say its rank"),
        ({"traceEvents": []}, "shows no step"),
        ({"distributedInfo": {"rank": 0, "world_size": 3}}, "the job has 3 ranks, the traces are of rank 0, 1"),
        ({"traceEvents": [e for e in content["traceEvents"] if "gloo" not in e["name"]]}, "numbers of collectives"),
    ):
        paths[0].write_text(json.dumps(content | change))
        with pytest.raises(TraceError, match=message):
            load(paths)


@pytest.mark.parametrize(("key", "value"), [("dur", [0]), ("ts", "now"), ("dur", -1.0), ("ts", 1e300), ("ts", None)])
def test_an_event_without_times_names_its_trace(tmp_path: Path, key: str, value: object) -> None:
    events = [one | {key: value} if one["name"] == "aten::mm" else one for one in cpu_events(5.0, 0.0, 0.0)]
    path = tmp_path / "0.json"
    path.write_text(json.dumps({"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}))
    with pytest.raises(TraceError, match=r"0\.json: ts and dur of event 'aten::mm' must be microseconds"):
        load([path])
