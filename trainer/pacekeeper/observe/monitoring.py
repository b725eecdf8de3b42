"""Monitors a training script from within its rank, without changes to it: collectives, steps, data loading, gc.

bench/overhead.py measures its cost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pacekeeper import torch_internals
from pacekeeper.environment import Environment
from pacekeeper_analysis.protocol.records import Phase, RecordKind

from .collectives.collective_monitor import CollectiveMonitor, start_collective_monitor
from .collectives.flight_recorder import start_flight_monitor
from .gc_schedule import time_collections
from .profiling import start_rank_profiler
from .recorder import NoRing, OpenPhase, Recorder
from .recorder_factory import create_collective_monitor, open_recorder
from .work_clock import HostClock, Mark

MIN_RECORDED_GC_NS = 100_000
"""Collections shorter than this are noise."""

_FULL_GC_GENERATION = 2
"""The generation of garbage collection that covers all objects."""

_recorder: Recorder | None = None


def get_recorder() -> Recorder:
    """Return this rank's recorder. The first call starts monitoring, if a launcher has created a ring."""
    global _recorder
    if _recorder is None:
        environment = Environment.read()
        _recorder = open_recorder(environment)
        if not isinstance(_recorder.ring, NoRing):
            monitor = create_collective_monitor(_recorder)
            start_collective_monitor(monitor)
            start_flight_monitor(_recorder.ring.state)
            _record_loaders(_recorder)
            stop_timing = _record_gc(_recorder)
            _record_compilation(_recorder)
            _record_file_access(_recorder)
            _record_group_end(_recorder)
            start_rank_profiler(_recorder, environment)
            _detach_when_forked(_recorder, monitor, stop_timing)
    return _recorder


def record_optimizer_steps() -> None:
    """Count optimizer steps as steps of the job, for scripts that only import `pacekeeper.auto`."""
    recorder = get_recorder()
    if isinstance(recorder.ring, NoRing):
        return
    recorder.restart_clock(1)
    register_optimizer_step_pre_hook(recorder.begin_optimizer_step)
    register_optimizer_step_post_hook(recorder.end_optimizer_step)


def mark_script_end() -> None:
    """Record that the script has ended; its threads and exit handlers may still run."""
    if _recorder is not None:
        _recorder.enter_phase(Phase.FINISHED)


def _detach_when_forked(recorder: Recorder, monitor: CollectiveMonitor, stop_timing: Callable[[], None]) -> None:
    """End monitoring in processes that the rank forks (a DataLoader's workers, a pool): they are not the rank."""

    def leave() -> None:
        with contextlib.suppress(ValueError):  # the script has removed gc's callbacks
            stop_timing()
        monitor.stop()
        recorder.detach_in_child()

    os.register_at_fork(after_in_child=leave)


def _record_loaders(recorder: Recorder) -> None:
    torch_internals.time_loader(recorder.load)


def _record_gc(recorder: Recorder) -> Callable[[], None]:
    """Record full collections, as a plan schedules them; on a device, only the time in which it idles.

    Return what ends it.

    Young collections are part of the work: full collections that replace them by plan may take longer.
    """
    start_mark: Mark | None = None

    def begins(generation: int) -> None:
        nonlocal start_mark
        start_mark = recorder.clock.mark() if generation == _FULL_GC_GENERATION and recorder.is_wait_counted else None

    def collected(start: int, end: int, generation: int) -> None:
        if generation != _FULL_GC_GENERATION:
            return
        if isinstance(recorder.clock, HostClock):
            recorder.ring.write(RecordKind.GC, start, end, recorder.step, recorder.phase)
        elif start_mark is not None:
            recorder.record_gc(start_mark, recorder.clock.mark())

    return time_collections(collected, min_ns=MIN_RECORDED_GC_NS, on_begin=begins)


def _record_compilation(recorder: Recorder) -> None:
    """Record compilation by torch.compile, which takes minutes within a step, as a separate phase."""
    compile_function = torch.compile
    open_phases: list[OpenPhase] = []

    def started(_: Any) -> None:
        open_phases.append(recorder.begin_phase(Phase.COMPILE))

    def ended(_: Any) -> None:
        recorder.end_phase(open_phases.pop())

    def compile_and_watch(*args: Any, **options: Any) -> Any:
        torch_internals.on_compilation(started, ended)  # compilation imports it anyway
        return compile_function(*args, **options)

    torch.compile = compile_and_watch


def _record_file_access(recorder: Recorder) -> None:
    """Record phases of torch.save and torch.load: scripts may call them during training, and volumes may be slow."""

    def during(phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != recorder.training_thread or recorder.phase is not Phase.TRAIN:
                return function(*args, **options)
            with recorder.run_phase(phase):
                return function(*args, **options)

        return call

    # In both places, so that a pickle of a function finds the same object.
    torch.save = torch.serialization.save = during(Phase.CHECKPOINT, torch.save)
    torch.load = torch.serialization.load = during(Phase.RESTORE, torch.load)


def _record_group_end(recorder: Recorder) -> None:
    """Record the end of training at the end of the process group; a new group trains again.

    A rank without a group may export and upload without a deadline.
    """
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_and_note(*args: Any, **options: Any) -> None:
        destroy(*args, **options)
        if not dist.is_initialized() and recorder.phase is Phase.TRAIN:  # not for a group before the first step
            recorder.enter_phase(Phase.FINISHED)

    def made(_: Any) -> None:
        if recorder.phase is Phase.FINISHED:
            recorder.enter_phase(Phase.TRAIN)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_and_note
    torch_internals.on_new_process_group(made)
