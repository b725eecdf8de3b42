"""Watches a training script from within its rank, without its help: collectives, optimizer steps, data, garbage.

What it costs is measured by bench/overhead.py.
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
from pacekeeper_analysis.records import RecordKind, Phase

from .behaviour import start_rank_profiler
from .clock import HostClock, Mark
from .collectives import CollectiveMonitor, start_collective_monitor
from .flight import start_flight_monitor
from .garbage import time_collections
from .opening import open_recorder, create_collective_monitor
from .recorder import OpenPhase, NoRing, Recorder

MIN_RECORDED_GC_NS = 100_000
"""Collections below this are noise."""

_FULL_GC_GENERATION = 2
"""The generation of garbage that has all objects."""

_recorder: Recorder | None = None


def get_recorder() -> Recorder:
    """This rank's recorder. The first call starts the watching, where a launcher has made a ring."""
    global _recorder
    if _recorder is None:
        environment = Environment.read()
        _recorder = open_recorder(environment)
        if not isinstance(_recorder.ring, NoRing):
            watcher = create_collective_monitor(_recorder)
            start_collective_monitor(watcher)
            start_flight_monitor(_recorder.ring.state)
            _record_loaders(_recorder)
            stop_timing = _record_gc(_recorder)
            _record_compilation(_recorder)
            _record_file_access(_recorder)
            _record_group_end(_recorder)
            start_rank_profiler(_recorder, environment)
            _detach_when_forked(_recorder, watcher, stop_timing)
    return _recorder


def record_optimizer_steps() -> None:
    """Takes the step of an optimizer for the step of the job: for scripts that only import `auto`."""
    watched = get_recorder()
    if isinstance(watched.ring, NoRing):
        return
    watched.restart_clock(1)
    register_optimizer_step_pre_hook(watched.begin_optimizer_step)
    register_optimizer_step_post_hook(watched.end_optimizer_step)


def mark_script_end() -> None:
    """The script has ended; its threads and its exit handlers may not have."""
    if _recorder is not None:
        _recorder.enter_phase(Phase.FINISHED)


def _detach_when_forked(recorder: Recorder, watcher: CollectiveMonitor, stop_timing: Callable[[], None]) -> None:
    """What the rank forks (a DataLoader's workers, a pool) is not the rank: what is watched ends there."""

    def leave() -> None:
        with contextlib.suppress(ValueError):  # the script has taken gc's callbacks away
            stop_timing()
        watcher.stop()
        recorder.detach_in_child()

    os.register_at_fork(after_in_child=leave)


def _record_loaders(recorder: Recorder) -> None:
    torch_internals.time_loader(recorder.load)


def _record_gc(recorder: Recorder) -> Callable[[], None]:
    """Collections of everything, as a plan has them; on a device, as long as they leave it without work. Those of the
    young are part of the work: a plan that collects everything in their place may take longer. Returns what ends it."""
    begun: Mark | None = None

    def begins(generation: int) -> None:
        nonlocal begun
        begun = recorder.clock.mark() if generation == _FULL_GC_GENERATION and recorder.is_wait_counted else None

    def collected(start: int, end: int, generation: int) -> None:
        if generation != _FULL_GC_GENERATION:
            return
        if isinstance(recorder.clock, HostClock):
            recorder.ring.write(RecordKind.GARBAGE, start, end, recorder.step, recorder.phase)
        elif begun is not None:
            recorder.record_gc(begun, recorder.clock.mark())

    return time_collections(collected, at_least_ns=MIN_RECORDED_GC_NS, begins=begins)


def _record_compilation(recorder: Recorder) -> None:
    """torch.compile works in the middle of a step, for minutes: a phase of its own, known from its first use on."""
    compile_ = torch.compile
    begun: list[OpenPhase] = []

    def started(_: Any) -> None:
        begun.append(recorder.begin_phase(Phase.COMPILE))

    def ended(_: Any) -> None:
        recorder.end_phase(begun.pop())

    def compile_and_watch(*args: Any, **options: Any) -> Any:
        torch_internals.on_compilation(started, ended)  # compiling imports it anyway
        return compile_(*args, **options)

    torch.compile = compile_and_watch


def _record_file_access(recorder: Recorder) -> None:
    """Scripts keep and bring back their state in the middle of training, and volumes may be slow."""

    def during(phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != recorder.training_thread or recorder.phase is not Phase.TRAIN:
                return function(*args, **options)
            with recorder.run_phase(phase):
                return function(*args, **options)

        return call

    # In both places, so that a pickle of a function finds the very same one.
    torch.save = torch.serialization.save = during(Phase.CHECKPOINT, torch.save)
    torch.load = torch.serialization.load = during(Phase.RESTORE, torch.load)


def _record_group_end(recorder: Recorder) -> None:
    """A rank that has left its process group may export and upload without a deadline; a new group trains again."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_and_note(*args: Any, **options: Any) -> None:
        destroy(*args, **options)
        if not dist.is_initialized() and recorder.phase is Phase.TRAIN:  # a group of before the first step is no end
            recorder.enter_phase(Phase.FINISHED)

    def made(_: Any) -> None:
        if recorder.phase is Phase.FINISHED:
            recorder.enter_phase(Phase.TRAIN)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_and_note
    torch_internals.on_new_process_group(made)
