"""Profiler traces written by hand; tests/distributed/test_whatif_kineto.py records real ones (without GPUs)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pacekeeper_analysis.whatif import RecordedWindow, TraceError
from pacekeeper_analysis.whatif.inputs import load_window
from pacekeeper_analysis.whatif.trace import ALL_GATHER, BACKWARD, FORWARD, OPTIMIZER, REDUCE_SCATTER

MS = 1e-3
Events = Callable[[float, float, float], Iterator[dict[str, Any]]]


def build_cpu_events(forward: float, wait: float, shift: float) -> Iterator[dict[str, Any]]:
    """Two steps: own forward, backward 4 ms, a reduce of 2 ms once the last rank is there, optimizer 1 ms."""
    begin = shift
    for step in (3, 4):
        backward = begin + forward
        reduce = backward + 4
        update = reduce + wait + 2
        yield build_event("user_annotation", f"ProfilerStep#{step}", begin, update + 1 - begin)
        yield build_event("cpu_op", "aten::mm", begin, forward)
        yield build_event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", backward, 4)
        yield build_event("user_annotation", "gloo:all_reduce", reduce, wait + 2)
        yield build_event("user_annotation", "Optimizer.step#SGD.step", update, 1)
        begin = update + 1


def build_gpu_events(forward: float, wait: float, shift: float) -> Iterator[dict[str, Any]]:
    """The same on a GPU that runs 5 ms behind the processor, which launches everything at once. A gather of 1 ms is
    exposed in the forward."""
    begin, correlation = shift, 100
    for step in (3, 4):
        end = begin + forward + 1 + 4 + wait + 2 + 1
        yield build_event("user_annotation", f"ProfilerStep#{step}", begin, end - begin)
        yield build_event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin + 0.4, 0.2, tid=2)
        yield build_event("user_annotation", "Optimizer.step#SGD.step", begin + 0.7, 0.2)
        at = begin + 5
        for launch, name, length in (
            (0.1, "ncclDevKernel_AllGather_RING_LL", 1.0),
            (0.2, "ampere_sgemm_128x64", forward),
            (0.5, "ampere_sgemm_64x64", 4.0),
            (0.65, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", wait + 2),
            (0.8, "multi_tensor_apply_kernel", 1.0),
        ):
            correlation += 1
            yield build_event("cuda_runtime", "cudaLaunchKernel", begin + launch, 0.01, correlation=correlation)
            yield build_event("kernel", name, at, length, correlation=correlation)
            at += length
        begin = end


def build_event(
    category: str, name: str, begin_ms: float, length_ms: float, tid: int = 1, **args: object
) -> dict[str, Any]:
    times = {"ts": begin_ms * 1e3, "dur": length_ms * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "args": args} | times


def write_job(folder: Path, events: Events, world_size: int = 2, hours: tuple[int, int] = (0, 1)) -> list[Path]:
    """Rank 0 takes 10 ms for its forward and rank 1 takes 16; `hours`: at which their clocks begin."""
    paths = []
    for rank, (forward, wait) in enumerate(((10.0, 6.0), (16.0, 0.0))):
        content = {
            "distributedInfo": {"rank": rank, "world_size": world_size},
            "traceEvents": list(events(forward, wait, 3_600_000.0 * hours[rank])),
        }
        paths.append(folder / f"{rank}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


def compute_milliseconds(window: RecordedWindow) -> dict[str, list[float]]:
    """Return the own milliseconds of each rank in the last step, by type."""
    nodes = enumerate(window.operations)
    return {operation.type: [float(value) / MS for value in window.seconds[node, :, -1]] for node, operation in nodes}


def test_own_times_of_a_cpu_job(tmp_path: Path) -> None:
    window = load_window(write_job(tmp_path, build_cpu_events)).window
    assert window.steps == (3, 4)
    own = compute_milliseconds(window)
    assert own[FORWARD] == pytest.approx([10, 16], abs=1e-3)
    assert own[BACKWARD] == pytest.approx([4, 4], abs=1e-3)
    assert own[REDUCE_SCATTER] == pytest.approx([2, 2], abs=1e-3)
    assert own[OPTIMIZER] == pytest.approx([1, 1], abs=1e-3)
    assert window.measured_s == pytest.approx([23 * MS] * 2)


def test_own_times_of_a_gpu_job(tmp_path: Path) -> None:
    own = compute_milliseconds(load_window(write_job(tmp_path, build_gpu_events)).window)
    assert own[ALL_GATHER] == pytest.approx([1, 1], abs=1e-3)
    assert own[FORWARD] == pytest.approx([10, 16], abs=1e-3)
    assert own[BACKWARD] == pytest.approx([4, 4], abs=1e-3)
    assert own[REDUCE_SCATTER] == pytest.approx([2, 2], abs=1e-3)
    assert own[OPTIMIZER] == pytest.approx([1, 1], abs=1e-3)


def test_a_trace_without_ranks_steps_or_peers_is_rejected(tmp_path: Path) -> None:
    paths = write_job(tmp_path, build_cpu_events)
    content = json.loads(paths[0].read_text())
    for change, message in (
        ({"distributedInfo": None}, "does not contain its rank"),
        ({"traceEvents": []}, "shows no step"),
        ({"distributedInfo": {"rank": 0, "world_size": 3}}, "the job has 3 ranks, the traces are of rank 0, 1"),
        (
            {"traceEvents": [e for e in content["traceEvents"] if "gloo" not in e["name"]]},
            "rank 0 recorded no collectives",
        ),
    ):
        paths[0].write_text(json.dumps(content | change))
        with pytest.raises(TraceError, match=message):
            load_window(paths)


@pytest.mark.parametrize(("key", "value"), [("dur", [0]), ("ts", "now"), ("dur", -1.0), ("ts", 1e300), ("ts", None)])
def test_an_event_without_times_is_left_out_and_reported(tmp_path: Path, key: str, value: object) -> None:
    paths = write_job(tmp_path, build_cpu_events)
    content = json.loads(paths[0].read_text())
    content["traceEvents"] += [build_event("cpu_op", "aten::odd", 1.0, 1.0) | {key: value}] * 2
    paths[0].write_text(json.dumps(content))
    window = load_window(paths).window
    assert window.notes == ("0.json: 2 events have no times and are left out, such as 'aten::odd'",)
    assert compute_milliseconds(window)[FORWARD] == pytest.approx([10, 16], abs=1e-3)


def add_odd_name(name: str, text: bytes) -> bytes:
    """Return the trace with one more event that has this name, written as it is."""
    one = json.dumps(build_event("cpu_op", "NAME", 3_600_001.0, 0.5)).encode().replace(b"NAME", name.encode("latin-1"))
    return text.replace(b"}, {", b"}, " + one + b", {", 1)


LEFT_OUT = "1.json: 1 of {} events cannot be read and are left out"


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda text: add_odd_name("aten::\x01mm\n\x7f", text), ""),
        (lambda text: add_odd_name("aten::\xff", text), "1.json: 1 bytes are not UTF-8"),
        (lambda text: add_odd_name('operator "mm" of', text), LEFT_OUT.format(11)),
        (lambda text: add_odd_name('operator", "mm', text), LEFT_OUT.format(11)),
        (lambda text: add_odd_name("a tail of \\", text), LEFT_OUT.format(11)),
        (lambda text: text.replace(b'"args": {}', b'"args": {"bandwidth": inf, "more": [-nan, nan, -inf]}'), ""),
        (lambda text: text.replace(b'"args": {}', b'"args": {"bandwidth": Infinity, "more": NaN}'), ""),
        (lambda text: text[: text.rindex(b"Optimizer.step")], "1.json: the end is missing: what comes after 9 events"),
        (lambda text: text.removesuffix(b"]}"), "1.json: the end is missing: what comes after 10 events"),
        (lambda text: text.removesuffix(b"}"), ""),
        (lambda text: text[:-40] + b"}]}", LEFT_OUT.format(10)),
        (lambda text: gzip.compress(text)[:-6], "1.json: its compression is damaged after the last event"),
    ],
)
def test_the_readable_part_of_a_damaged_trace_is_analyzed(
    tmp_path: Path, damage: Callable[[bytes], bytes], expected: str
) -> None:
    paths = write_job(tmp_path, build_cpu_events)
    text = paths[1].read_bytes()
    paths[1].write_bytes(damage(text))
    assert paths[1].read_bytes() != text
    window = load_window(paths).window
    notes = [note for note in window.notes if note.startswith("1.json")]
    assert [note.startswith(expected) for note in notes] == [True] * bool(expected), notes
    assert compute_milliseconds(window)[FORWARD] == pytest.approx([10, 16], abs=1e-3)
    if window.steps == (3,):  # step 4 has lost its optimizer
        assert "left out: step 4, of which rank 1 shows no backward pass or no optimizer" in window.notes
    else:
        assert window.steps == (3, 4)


def test_a_trace_without_a_readable_part_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    for content in (b'{"traceEvents": [', b'{"traceEvents": [{"ph": "X" nonsense', b"{nonsense}", b"\x1f\x8bnonsense"):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="is not a readable profiler trace"):
            load_window([path])


@pytest.mark.parametrize("events", [build_cpu_events, build_gpu_events])
def test_an_event_without_a_time_does_not_shift_the_others(tmp_path: Path, events: Events) -> None:
    """The profiler gives it the time 0."""

    def build_damaged_events(forward: float, wait: float, shift: float) -> Iterator[dict[str, Any]]:
        listed = list(events(forward, wait, shift))
        for one in listed:
            if one["cat"] != "cuda_runtime" and not one["name"].startswith("ProfilerStep"):
                yield one | {"ts": 0.0, "dur": 5e12 if one["cat"] == "cpu_op" else one["dur"]}
        yield from listed

    (tmp_path / "whole").mkdir()
    whole = load_window(write_job(tmp_path / "whole", events, hours=(1, 2))).window
    window = load_window(write_job(tmp_path, build_damaged_events, hours=(1, 2))).window
    assert compute_milliseconds(window) == compute_milliseconds(whole)
    assert window.measured_s == pytest.approx(whole.measured_s)
    assert ["events have no times and are left out" in note for note in window.notes] == [True, True]


def test_a_step_that_one_rank_lacks_is_left_out_and_reported(tmp_path: Path) -> None:
    paths = write_job(tmp_path, build_cpu_events)
    paths[1].write_text(paths[1].read_text().replace("ProfilerStep#4", "ProfilerStep#5"))
    window = load_window(paths).window
    assert window.steps == (3,)
    assert window.notes == ("left out: steps 4, 5, which not every rank's trace has",)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("steps", [(3,), (3, 4)])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_extra_collective_on_one_rank_is_reported_and_the_clocks_are_right(
    tmp_path: Path, place: int, steps: tuple[int, ...], rank: int
) -> None:
    """For example, of a group without the other ranks: before, between, or behind those of all."""

    def build_extended_events(forward: float, wait: float, shift: float) -> Iterator[dict[str, Any]]:
        number = 2
        for one in build_cpu_events(forward, wait, shift):
            number += one["name"].startswith("ProfilerStep")
            end = (one["ts"] + one["dur"]) / 1e3
            if one["name"].startswith("gloo"):
                yield build_event("user_annotation", "gloo:all_reduce", end - 1.5, 0.5)
            if (wait == 0.0) == (rank == 1) and number in steps and one["name"].startswith("gloo"):
                yield build_event("user_annotation", "gloo:all_reduce", end - (1.9, 0.9, -0.1)[place], 0.05)
            yield one

    window = load_window(write_job(tmp_path, build_extended_events)).window
    (note,) = window.notes
    here, there = (3, 2) if rank == 1 else (2, 3)
    assert note == (
        f"rank 1 has a different number of collectives than rank 0 in {len(steps)} of 2 steps "
        f"({here} and {there} in step 3); clocks are aligned by those that both have"
    )
    assert window.steps == (3, 4)
    assert compute_milliseconds(window)[REDUCE_SCATTER] == pytest.approx([2, 2], abs=1e-3)


def build_mesh_events(rank: int) -> Iterator[dict[str, Any]]:
    """Of 2 × 2 ranks, TP and DP: rank 3 takes 6 ms longer, for which its TP peer waits, and then all."""
    shift, late = 3_600_000.0 * (rank + 1), 6.0 * (rank in (2, 3))
    for step in (3, 4):
        begin = shift + 30 * step
        own = 10.0 + 6.0 * (rank == 3)
        together = begin + 10 + late
        yield build_event("user_annotation", f"ProfilerStep#{step}", begin, 26)
        yield build_event("cpu_op", "aten::mm", begin, own)
        yield build_event("user_annotation", "nccl:all_reduce", begin + own, together + 1 - begin - own, group="tp")
        yield build_event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", together + 1, 4)
        yield build_event("user_annotation", "nccl:all_reduce", together + 5, begin + 24 - together - 5, group="dp")
        yield build_event("user_annotation", "Optimizer.step#SGD.step", begin + 25, 1)


@pytest.mark.parametrize("known", [True, False])
def test_groups_of_a_mesh_are_reported_and_the_rest_is_analyzed(tmp_path: Path, known: bool) -> None:
    members = {"tp": ([0, 1], [0, 1], [2, 3], [2, 3]), "dp": ([0, 2], [1, 3], [0, 2], [1, 3])}
    paths = []
    for rank in range(4):
        config = [{"pg_name": name, "ranks": ranks[rank]} for name, ranks in members.items()]
        config.append({"pg_name": "alone", "ranks": [rank]})
        events = [
            one | {"args": {"Process Group Name": one["args"]["group"]} if known and "group" in one["args"] else {}}
            for one in build_mesh_events(rank)
        ]
        content = {"distributedInfo": {"rank": rank, "world_size": 4, "pg_config": config}, "traceEvents": events}
        paths.append(tmp_path / f"{rank}.json")
        paths[-1].write_text(json.dumps(content))
    window = load_window(paths).window
    (note,) = window.notes
    assert note.startswith("the ranks communicate in 4 groups (0 1; 0 2; 1 3; 2 3), and all of them are treated as")
    assert note.endswith("clocks may be off") != known
    assert compute_milliseconds(window)[FORWARD] == pytest.approx([10, 10, 10, 16], abs=1e-3)
    if known:
        assert window.measured_s == pytest.approx([26 * MS] * 2)
