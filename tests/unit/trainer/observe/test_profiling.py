"""Names of functions and kernels, which of them are sent, and when a rank samples itself."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pacekeeper.environment import Environment
from pacekeeper.observe.profiling import machine_counters, path_hashes, rank_profiler
from pacekeeper.observe.profiling.kernel_profile import classify_activity, shorten_kernel_name
from pacekeeper.observe.profiling.known_spans import (
    PEER_WAIT_SPAN_NAME,
    collect_known_spans,
    find_complete_start,
    select_steps,
)
from pacekeeper.observe.profiling.rank_profiler import TrainingConditions
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper_analysis.profiling.pattern import TimeOwner
from pacekeeper_analysis.protocol.records import RING_RECORD
from pacekeeper_analysis.protocol.requests import ProfileRequest, WorkerRequests
from pacekeeper_rank.profiling import sampled_window
from pacekeeper_rank.profiling.function_names import FunctionNames
from pacekeeper_rank.profiling.stack_sampler import StackSampler
from pacekeeper_rank.record_ring import RingWriter, create_ring
from pacekeeper_rank.recorder import Recorder
from pacekeeper_rank.records import Collective, Phase, RecordKind
from pacekeeper_rank.work_clock import HostClock


class TestNames:
    def test_packages_are_named_as_installed_and_own_files_by_their_path(self) -> None:
        named = FunctionNames("/app/job")
        code = compile("def f(): pass", "/app/job/lib/data.py", "exec")
        assert named.name_function(code) == "./lib/data.py:<module>"
        assert named.name_function(compile("1", "/elsewhere/a/b/c.py", "exec")) == "./a/b/c.py:<module>"
        assert named.name_function(torch.nn.Linear.forward.__code__) == "torch/nn/modules/linear.py:Linear.forward"
        assert named.name_function(json.loads.__code__) == "json/__init__.py:loads"
        assert (
            named.name_function(path_hashes.hide_own_path.__code__)
            == "pacekeeper/observe/profiling/path_hashes.py:hide_own_path"
        )

    def test_stacks_begin_with_the_script(self) -> None:
        named = FunctionNames("/app")
        codes = [compile("1", name, "exec") for name in ("<frozen runpy>", "/app/train.py", "/app/model.py")]
        assert named.name_stack(codes) == ("./train.py:<module>", "./model.py:<module>")

    def test_only_paths_of_own_files_are_hidden(self) -> None:
        name = path_hashes.hide_own_path("./train.py:Samples.load")
        assert name == f"{path_hashes.hash_path('./train.py')}:Samples.load"
        assert "train" not in name
        assert path_hashes.hide_own_path("torch/nn/x.py:f") == "torch/nn/x.py:f"
        assert path_hashes.map_path_hashes(["./train.py:a", "./train.py:b", "torch/x.py:f"]) == {
            path_hashes.hash_path("./train.py"): "./train.py"
        }

    @pytest.mark.parametrize(
        ("activity", "owner", "name"),
        [
            ("void at::native::add<float>(int, float*)", TimeOwner.GPU_COMPUTE, "at::native::add"),
            (
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                TimeOwner.COLLECTIVE,
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            ),
            ("Memcpy HtoD (Pageable -> Device)", TimeOwner.GPU_MEMORY, "Memcpy HtoD (Pageable -> Device)"),
            ("(anonymous)", TimeOwner.GPU_COMPUTE, "(anonymous)"),
        ],
    )
    def test_kernel_names_are_shortened(self, activity: str, owner: TimeOwner, name: str) -> None:
        assert (classify_activity(activity), shorten_kernel_name(activity)) == (owner, name)


def build_records(*rows: dict[str, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    found = np.zeros(len(rows), RING_RECORD)
    for record, row in zip(found, rows, strict=True):
        for name, value in row.items():
            record[name] = value
    return found


STEP = {"kind": RecordKind.STEP, "phase": Phase.TRAIN}


class TestSpans:
    def test_only_whole_steps_of_the_window_count(self) -> None:
        given = build_records(
            *({**STEP, "step": n, "start_ns": n * 100, "end_ns": n * 100 + 90} for n in range(5)),
            {"kind": RecordKind.COMPUTE, "step": 2, "start_ns": 200, "end_ns": 250},
            {**STEP, "phase": Phase.START, "step": 3, "start_ns": 310, "end_ns": 320},
        )
        found = select_steps(given, (150, 395))
        assert found is not None
        assert found.first == 2
        assert found.seconds.tolist() == pytest.approx([90e-9, 90e-9])
        assert found.own_seconds.tolist() == pytest.approx([50e-9, 90e-9])
        assert select_steps(given, (495, 600)) is None

    def test_waits_have_the_name_of_the_collective_that_ended_with_them(self) -> None:
        reduced = {"kind": RecordKind.COLLECTIVE, "collective": Collective.ALL_REDUCE, "start_ns": 0, "end_ns": 100}
        loaded = {"kind": RecordKind.DATA, "phase": Phase.TRAIN, "start_ns": 500, "end_ns": 700}
        elsewhere = {"kind": RecordKind.DATA, "phase": Phase.EVALUATE, "start_ns": 500, "end_ns": 900}
        far = 10_000_000
        found = collect_known_spans(
            build_records(reduced, loaded, elsewhere), [(50, 101), (far, far + 5)], [], (60, far + 100)
        )
        assert [(found.names[n], o) for n, o in zip(found.name, found.owner, strict=True)] == [
            ("", TimeOwner.DATA),
            ("all_reduce", TimeOwner.COLLECTIVE),
            (PEER_WAIT_SPAN_NAME, TimeOwner.COLLECTIVE),
        ]
        assert found.start_ns.tolist() == [500, 60, far], "cut to the window"

    def test_gpu_work_of_an_evaluation_belongs_to_no_step(self) -> None:
        given = build_records(
            *({**STEP, "step": n, "start_ns": s, "end_ns": s + 100} for n, s in enumerate((0, 100, 2200)))
        )
        kernels = [(TimeOwner.GPU_COMPUTE, "gemm", at, at + 60) for at in (20, 170, 230, 1000, 2210)]
        found = collect_known_spans(given, [], kernels, (0, 2300))
        assert list(zip(found.start_ns.tolist(), found.end_ns.tolist(), strict=True)) == [
            *((20, 80), (170, 200), (2210, 2270)),
        ], "one that goes on in the evaluation has its part"
        across = collect_known_spans(given, [], [(TimeOwner.GPU_COMPUTE, "spin", 50, 2250)], (0, 2300))
        assert (across.end_ns - across.start_ns).sum() == 50 + 100 + 50

    def test_a_window_begins_with_the_first_step_that_the_ring_still_holds_whole(self) -> None:
        """The device may have been two steps behind what the host has written down."""
        rows = (
            row
            for n in range(1, 9)
            for row in (
                {"kind": RecordKind.DATA, "step": n, "start_ns": n * 100, "end_ns": n * 100 + 10},
                {**STEP, "step": n, "start_ns": n * 100, "end_ns": n * 100 + 100},
            )
        )
        given = build_records(*rows)
        given["index"] = np.arange(1, len(given) + 1)
        assert find_complete_start(given) == find_complete_start(given[:0]) == 0
        assert find_complete_start(given[1:]) == 400, "step 1 has lost its loading"
        assert find_complete_start(given[2:]) == 500
        assert find_complete_start(given[-2:]) == 900, "no step is sure to be whole"


@pytest.mark.usefixtures("python_or_c")
def test_the_end_of_a_window_longer_than_the_ring_is_reported(tmp_path: Path) -> None:
    """All of its steps and waits would be compared with what is left of them."""
    create_ring(RuntimeFolder(tmp_path).create().ring(0), rank=0, round_=1, capacity=64)
    recorder = Recorder(RingWriter(RuntimeFolder(tmp_path).ring(0)), HostClock())
    recorder.end_step()
    window = rank_profiler._OpenWindow(
        recorder, ProfileRequest("profile-1", 0), TrainingConditions(1, 0, 8), time.monotonic()
    )
    for _ in range(20):
        recorder.load(lambda: None)
        for _ in range(7):
            with recorder.time_peer_wait():
                recorder.ring.write(RecordKind.COLLECTIVE, 0, time.monotonic_ns(), recorder.step, Phase.TRAIN)
        recorder.end_step(8)
    window.stop()
    environment = Environment.read({"PACEKEEPER_RUNTIME": str(tmp_path)})
    found = window.build_pattern(environment, RuntimeFolder(tmp_path), FunctionNames("/none"))
    assert found is not None
    assert (found.first_step, found.steps) == (recorder.step - found.steps, 64 // 10 - 2)
    assert sum(function.share for function in found.function_patterns) == pytest.approx(1.0, abs=0.01)


class TestSampler:
    def test_only_one_thread_is_sampled_while_it_trains(self) -> None:
        training = threading.Event()
        over = threading.Event()

        def wait_in_training() -> None:
            over.wait(120)

        thread = threading.Thread(target=wait_in_training)
        thread.start()
        assert thread.ident is not None
        began = time.monotonic_ns()
        sampler = StackSampler(thread.ident, training.is_set)
        while sampler.skipped_seconds < 0.1:
            time.sleep(0.005)
        training.set()
        named = FunctionNames("/none")
        while len(sampler.list_samples(named.name_stack, (began, time.monotonic_ns()))[0]) < 5:
            time.sleep(0.005)
        sampler.stop()
        over.set()
        thread.join()
        _, stacks = sampler.list_samples(named.name_stack, (began, time.monotonic_ns()))
        assert all(stack[-1].startswith("threading.py:") for stack in stacks)
        assert any("trains" in frame for frame in stacks[0])
        assert sampler.list_samples(named.name_stack, (0, began))[0] == []


class TestConditions:
    def test_early_steps_hold_for_the_same_training_config(self) -> None:
        way = TrainingConditions(4, 0, 8)
        assert way.is_comparable(TrainingConditions(4, 0, 8))
        assert not way.is_comparable(TrainingConditions(3, 0, 8))
        assert not way.is_comparable(TrainingConditions(4, 1, 8))
        assert not way.is_comparable(TrainingConditions(4, 0, 5)), "another share"
        assert not way.is_comparable(TrainingConditions(4, 0, None)), "an unknown share"
        assert TrainingConditions(4, None, None).is_comparable(TrainingConditions(4, None, None)), "a monitored script"
        assert TrainingConditions(4, 2, 8).is_comparable(TrainingConditions(4, 2, 5)), (
            "leased samples change all the time"
        )


def test_the_requests_are_polled_periodically(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    file = rank_profiler._ProfileRequestReader(path)
    assert file.read_profile(0.0) is None
    write_json(path, WorkerRequests(profile=ProfileRequest("profile-1", 5)).to_json())
    assert file.read_profile(0.05) is None
    assert file.read_profile(0.3) == ProfileRequest("profile-1", 5)
    path.write_text("{")
    assert file.read_profile(0.6) is None


@pytest.mark.usefixtures("python_or_c")
def test_a_failure_at_the_end_of_a_step_ends_the_windows_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier_threads = set(threading.enumerate())  # a sampler of the test before may still end
    create_ring(tmp_path / "ring", rank=0, round_=1)
    recorder = Recorder(RingWriter(tmp_path / "ring"))
    runtime = RuntimeFolder(tmp_path).create()
    write_json(runtime.requests, WorkerRequests(profile=ProfileRequest("profile-1", 0)).to_json())
    environment = Environment.read({"PACEKEEPER_RUNTIME": str(tmp_path), "PACEKEEPER_RING": str(tmp_path / "ring")})
    rank_profiler.start_rank_profiler(recorder, environment)

    def fail_to_start(*_: object) -> StackSampler:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sampled_window, "StackSampler", fail_to_start)
    recorder.step_ended()
    monkeypatch.undo()
    recorder.step_ended()
    assert set(threading.enumerate()) <= earlier_threads


def test_the_machine_reports_its_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("SECRET", "1")
    before = machine_counters.read_machine_counters(threading.get_ident())
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        pass
    found = machine_counters.build_setup(before, machine_counters.read_machine_counters(threading.get_ident()))
    assert "CUDA_LAUNCH_BLOCKING=1" in found.variables
    assert not any("SECRET" in variable for variable in found.variables)
    assert found.threads == torch.get_num_threads()
    assert found.processors is not None
    assert found.processors > 0
    assert found.ran is not None
    assert found.ran > 0.05
