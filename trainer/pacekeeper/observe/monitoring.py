"""Starts monitoring in a rank of a TrainingJob, or of `pacekeeper run`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pacekeeper.environment import Environment
from pacekeeper_rank import monitoring
from pacekeeper_rank.recorder import NoRing, Recorder
from pacekeeper_rank.recorder_factory import open_recorder
from pacekeeper_rank.records import Phase

from .profiling.rank_profiler import start_rank_profiler

_recorder: Recorder | None = None


def get_recorder() -> Recorder:
    """Return this rank's recorder. The first call starts monitoring, if a launcher has created a ring."""
    global _recorder
    if _recorder is None:
        environment = Environment.read()
        _recorder = open_rank_recorder(environment)
        if not isinstance(_recorder.ring, NoRing):
            monitoring.start_monitoring(_recorder)
            start_rank_profiler(_recorder, environment)
    return _recorder


def open_rank_recorder(environment: Environment) -> Recorder:
    """Return the rank's recorder, on its ring if a launcher has created one."""
    runtime, slot = environment.runtime, environment.local_rank
    if runtime is None or not runtime.ring(slot).exists():
        return Recorder(NoRing())
    return open_recorder(runtime.ring(slot), runtime.communicators_file(slot), native=environment.native)


@contextmanager
def show_phase(phase: Phase) -> Iterator[None]:
    """Show a phase other than training, if this rank is monitored and this thread trains: it may wait for long."""
    recorder = _recorder
    if recorder is None or threading.get_ident() != recorder.training_thread or recorder.phase is not Phase.TRAIN:
        yield
        return
    with recorder.run_phase(phase):
        yield


def record_optimizer_steps() -> None:
    """Count optimizer steps as steps of the job, for scripts that only import `pacekeeper.auto`."""
    recorder = get_recorder()
    if not isinstance(recorder.ring, NoRing):
        monitoring.record_optimizer_steps(recorder)


def mark_script_end() -> None:
    """Record that the script has ended; its threads and exit handlers may still run."""
    if _recorder is not None:
        _recorder.enter_phase(Phase.FINISHED)
