"""Monitors a training script from within its rank, without changes to it: collectives, steps, data loading, gc.

Nothing is imported that the script has not imported. bench/overhead.py measures the cost.
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

from . import torch_internals
from .collectives.collective_monitor import start_collective_monitor
from .collectives.flight_recorder import start_flight_monitor
from .gc_timing import time_collections
from .hook_guard import FailureReport, log_failure
from .recorder import OpenPhase, Recorder, Recording
from .recorder_factory import create_collective_monitor
from .records import Phase, RecordKind
from .tracebacks import hide_frame
from .work_clock import HostClock, Mark

MIN_RECORDED_GC_NS = 100_000
"""Collections shorter than this are noise."""

_FULL_GC_GENERATION = 2
"""The generation of garbage collection that covers all objects."""


def start_monitoring(recorder: Recorder, report_failure: FailureReport = log_failure) -> None:
    """Monitor this process, a rank, from now on. Call it once, after the script has imported torch.

    `recorder`: of `recorder_factory.open_recorder`, on a ring that `record_ring.create_ring` has created.
    `report_failure`: called once, when a hook has failed. No hook raises anything into the script.
    """
    guard = recorder.guard
    guard.report_failure = report_failure
    guard.call_when_disabled(recorder.stop_measuring)
    stops: list[Callable[[], None]] = []
    late_hooks: list[Callable[[], bool]] = [lambda: _record_loaders(recorder)]
    if recorder.recording is not Recording.STEPS_ONLY:
        monitor = create_collective_monitor(recorder)
        start_collective_monitor(monitor)
        start_flight_monitor(recorder.ring.state)
        stops.append(monitor.stop)
        if torch.backends.cuda.is_built():
            late_hooks.append(lambda: _record_fsdp_waits(recorder))
    stops.append(_record_gc(recorder))
    _record_compilation(recorder)
    _record_file_access(recorder)
    _record_group_end(recorder)
    recorder.install_late_hooks = LateHooks(late_hooks).install
    recorder.install_late_hooks()
    torch_internals.on_new_process_group(guard.protect("a new process group", lambda _: recorder.install_late_hooks()))
    _detach_when_forked(recorder, stops)


class LateHooks:
    """Hooks of parts of torch that the script may import later: they are installed once these are loaded."""

    def __init__(self, installers: list[Callable[[], bool]]) -> None:
        """Each of `installers` returns whether it has found what it hooks."""
        self._installers = installers

    def install(self) -> None:
        """Install what is loaded by now. Call it often: it costs nothing once all are installed."""
        if self._installers:
            self._installers = [install for install in self._installers if not install()]


def record_optimizer_steps(recorder: Recorder) -> None:
    """Count optimizer steps as steps of the job. Do not call it from within a hook of an optimizer."""
    recorder.restart_clock(1)
    begin_step, end_step = build_optimizer_hooks(recorder)
    register_optimizer_step_pre_hook(begin_step)
    register_optimizer_step_post_hook(end_step)


def build_optimizer_hooks(recorder: Recorder) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks before and after each step of any optimizer, which count steps of the job."""

    def end_step(optimizer: Any, *_: Any) -> None:
        recorder.end_optimizer_step(optimizer)
        recorder.install_late_hooks()

    protect = recorder.guard.protect
    return protect("an optimizer", recorder.begin_optimizer_step), protect("an optimizer", end_step)


def _detach_when_forked(recorder: Recorder, stops: list[Callable[[], None]]) -> None:
    """End monitoring in processes that the rank forks (a DataLoader's workers, a pool): they are not the rank."""

    def leave() -> None:
        recorder.guard.active = False
        for stop in stops:
            stop()
        recorder.detach_in_child()

    os.register_at_fork(after_in_child=recorder.guard.protect("a fork", leave, even_inactive=True))


def _record_loaders(recorder: Recorder) -> bool:
    def build(fetch_next: Callable[..., Any]) -> Callable[..., Any]:
        return recorder.guard.bracket(
            "DataLoader", fetch_next, recorder.begin_load, lambda load, *_: recorder.end_load(load)
        )

    return torch_internals.replace_fetch(build)


def _record_fsdp_waits(recorder: Recorder) -> bool:
    def time_stream_wait(stream: Any) -> contextlib.AbstractContextManager[None]:
        is_current = stream == torch.cuda.current_stream()
        return recorder.time_peer_wait() if is_current else contextlib.nullcontext()

    contexts = recorder.guard.build_contexts("FSDP2", time_stream_wait)
    return torch_internals.bracket_fsdp_waits(contexts, torch.cuda)


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

    protect = functools.partial(recorder.guard.protect, "gc")
    stop_timing = time_collections(protect(collected), min_ns=MIN_RECORDED_GC_NS, on_begin=protect(begins))

    def stop() -> None:
        with contextlib.suppress(ValueError):  # the script has removed gc's callbacks
            stop_timing()

    return stop


def _record_compilation(recorder: Recorder) -> None:
    """Record compilation by torch.compile, which takes minutes within a step, as a separate phase."""
    compile_function: Any = torch.compile
    open_phases: list[OpenPhase] = []

    def started(*_: Any) -> None:
        open_phases.append(recorder.begin_phase(Phase.COMPILE))

    def ended(*_: Any) -> None:
        if open_phases:
            recorder.end_phase(open_phases.pop())

    def notice_compiler(compile_: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile_)
        def call(*args: Any, **options: Any) -> Any:
            try:
                compiled = compile_(*args, **options)
            except BaseException as error:
                hide_frame(error)
                raise
            notice()  # the call has imported the compiler, and not used it yet
            is_decorator = (args[0] if args else options.get("model")) is None
            return notice_compiler(compiled) if is_decorator else compiled

        return call

    protect = functools.partial(recorder.guard.protect, "torch.compile")
    callbacks = protect(started), protect(ended, even_inactive=True)
    notice = protect(lambda: torch_internals.on_compilation(*callbacks))
    torch.compile = notice_compiler(compile_function)


def _record_file_access(recorder: Recorder) -> None:
    """Record phases of torch.save and torch.load: scripts may call them during training, and volumes may be slow."""

    def during(phase: Phase, function: Callable[..., Any]) -> Callable[..., Any]:
        def begin() -> OpenPhase | None:
            is_training = threading.get_ident() == recorder.training_thread and recorder.phase is Phase.TRAIN
            return recorder.begin_phase(phase) if is_training else None

        return recorder.guard.bracket(
            f"torch.{function.__name__}", function, begin, lambda open_phase, *_: recorder.end_phase(open_phase)
        )

    # In both places, so that a pickle of a function finds the same object.
    torch.save = torch.serialization.save = during(Phase.CHECKPOINT, torch.save)
    torch.load = torch.serialization.load = during(Phase.RESTORE, torch.load)


def _record_group_end(recorder: Recorder) -> None:
    """Record the end of training at the end of the process group; a new group trains again.

    A rank without a group may export and upload without a deadline.
    """

    def destroyed(*_: Any) -> None:
        if not dist.is_initialized() and recorder.phase is Phase.TRAIN:  # not for a group before the first step
            recorder.enter_phase(Phase.FINISHED)

    def made(_: Any) -> None:
        if recorder.phase is Phase.FINISHED:
            recorder.enter_phase(Phase.TRAIN)

    protect = recorder.guard.protect
    torch_internals.on_destroyed_process_group(protect("destroy_process_group", destroyed))
    torch_internals.on_new_process_group(protect("a new process group", made))
