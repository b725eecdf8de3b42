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
from pacekeeper_analysis.records import Kind, Phase

from .behaviour import watch_behaviour
from .clock import HostClock, Mark
from .collectives import Watcher, watch_collectives
from .flight import watch_flight
from .garbage import time_collections
from .opening import open_recorder, watcher_of
from .recorder import Begun, NoRing, Recorder

GARBAGE_NS = 100_000
"""Collections below this are noise."""

_EVERYTHING = 2
"""The generation of garbage that has all objects."""

_recorder: Recorder | None = None


def recorder() -> Recorder:
    """This rank's recorder. The first call starts the watching, where a launcher has made a ring."""
    global _recorder
    if _recorder is None:
        environment = Environment.read()
        _recorder = open_recorder(environment)
        if not isinstance(_recorder.ring, NoRing):
            watcher = watcher_of(_recorder)
            watch_collectives(watcher)
            watch_flight(_recorder.ring.state)
            _watch_loaders(_recorder)
            stop_timing = _watch_garbage(_recorder)
            _watch_compilation(_recorder)
            _watch_files(_recorder)
            _watch_end(_recorder)
            watch_behaviour(_recorder, environment)
            _leave_to_parent_when_forked(_recorder, watcher, stop_timing)
    return _recorder


def watch_steps() -> None:
    """Takes the step of an optimizer for the step of the job: for scripts that only import `auto`."""
    watched = recorder()
    if isinstance(watched.ring, NoRing):
        return
    watched.restart_clock(1)
    register_optimizer_step_pre_hook(watched.before_optimizer)
    register_optimizer_step_post_hook(watched.after_optimizer)


def note_end() -> None:
    """The script has ended; its threads and its exit handlers may not have."""
    if _recorder is not None:
        _recorder.enter(Phase.FINISHED)


def _leave_to_parent_when_forked(watched: Recorder, watcher: Watcher, stop_timing: Callable[[], None]) -> None:
    """What the rank forks (a DataLoader's workers, a pool) is not the rank: what is watched ends there."""

    def leave() -> None:
        with contextlib.suppress(ValueError):  # the script has taken gc's callbacks away
            stop_timing()
        watcher.stop()
        watched.leave_to_parent()

    os.register_at_fork(after_in_child=leave)


def _watch_loaders(watched: Recorder) -> None:
    torch_internals.time_loader(watched.load)


def _watch_garbage(watched: Recorder) -> Callable[[], None]:
    """Collections of everything, as a plan has them; on a device, as long as they leave it without work. Those of the
    young are part of the work: a plan that collects everything in their place may take longer. Returns what ends it."""
    begun: Mark | None = None

    def begins(generation: int) -> None:
        nonlocal begun
        begun = watched.clock.mark() if generation == _EVERYTHING and watched.counts else None

    def collected(start: int, end: int, generation: int) -> None:
        if generation != _EVERYTHING:
            return
        if isinstance(watched.clock, HostClock):
            watched.ring.write(Kind.GARBAGE, start, end, watched.step, watched.phase)
        elif begun is not None:
            watched.collected(begun, watched.clock.mark())

    return time_collections(collected, at_least_ns=GARBAGE_NS, begins=begins)


def _watch_compilation(watched: Recorder) -> None:
    """torch.compile works in the middle of a step, for minutes: a phase of its own, known from its first use on."""
    compile_ = torch.compile
    begun: list[Begun] = []

    def started(_: Any) -> None:
        begun.append(watched.begin_phase(Phase.COMPILE))

    def ended(_: Any) -> None:
        watched.end_phase(begun.pop())

    def compile_and_watch(*args: Any, **options: Any) -> Any:
        torch_internals.on_compilation(started, ended)  # compiling imports it anyway
        return compile_(*args, **options)

    torch.compile = compile_and_watch


def _watch_files(watched: Recorder) -> None:
    """Scripts keep and bring back their state in the middle of training, and volumes may be slow."""

    def during(phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != watched.training_thread or watched.phase is not Phase.TRAIN:
                return function(*args, **options)
            with watched.during(phase):
                return function(*args, **options)

        return call

    # In both places, so that a pickle of a function finds the very same one.
    torch.save = torch.serialization.save = during(Phase.CHECKPOINT, torch.save)
    torch.load = torch.serialization.load = during(Phase.RESTORE, torch.load)


def _watch_end(watched: Recorder) -> None:
    """A rank that has left its process group may export and upload without a deadline; a new group trains again."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_and_note(*args: Any, **options: Any) -> None:
        destroy(*args, **options)
        if not dist.is_initialized() and watched.phase is Phase.TRAIN:  # a group of before the first step is no end
            watched.enter(Phase.FINISHED)

    def made(_: Any) -> None:
        if watched.phase is Phase.FINISHED:
            watched.enter(Phase.TRAIN)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_and_note
    torch_internals.on_new_process_group(made)
