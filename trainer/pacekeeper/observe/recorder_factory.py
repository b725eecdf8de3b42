"""Creates a rank's recorder and monitor of collectives, with the C extension if it is available."""

from __future__ import annotations

import logging

from pacekeeper.environment import Environment

from .collectives.collective_monitor import CollectiveMonitor
from .collectives.communicators import Communicators
from .record_ring import RingWriter
from .recorder import NoRing, Recorder

try:
    from . import native_recorder as native_recorder
except ImportError as error:  # not built, or not for this Python: recording works without it
    native_recorder = None  # type: ignore[assignment]
    NATIVE_UNAVAILABLE_REASON = str(error)
else:
    NATIVE_UNAVAILABLE_REASON = ""

log = logging.getLogger(__name__)


def open_recorder(environment: Environment) -> Recorder:
    """Return the rank's recorder, on its ring if a launcher has created one."""
    if environment.runtime is None:
        return Recorder(NoRing())
    path = environment.runtime.ring(environment.local_rank)
    if not path.exists():
        return Recorder(NoRing())
    communicators = Communicators(environment.runtime.communicators_file(environment.local_rank))
    if native_recorder is not None and environment.native:
        return native_recorder.NativeRecorder(native_recorder.NativeRing(path), communicators=communicators)
    log.info("this rank records without the C extension: %s", NATIVE_UNAVAILABLE_REASON or "PACEKEEPER_NATIVE=0")
    return Recorder(RingWriter(path), communicators=communicators)


def create_collective_monitor(recorder: Recorder) -> CollectiveMonitor:
    """Return the monitor of collectives of this recorder's rank."""
    if native_recorder is not None and isinstance(recorder, native_recorder.NativeRecorder):
        return native_recorder.NativeCollectiveMonitor(recorder)
    return CollectiveMonitor(recorder)
