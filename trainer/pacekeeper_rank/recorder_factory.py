"""Creates a rank's recorder and monitor of collectives, with the C extension if it is available."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from . import torch_internals
from .collectives.collective_monitor import CollectiveMonitor
from .collectives.communicators import Communicators
from .record_ring import RingWriter
from .recorder import Recorder, Recording

log = logging.getLogger(__name__)

try:
    if sys.version_info < (3, 11) or "t" in sys.abiflags:
        raise ImportError("the C extension is for Python 3.11 and later, with the GIL")
    from . import native_recorder as native_recorder
except ImportError as error:  # not built, or not for this Python: recording works without it
    native_recorder = None  # type: ignore[assignment]
    NATIVE_UNAVAILABLE_REASON = str(error)
else:
    NATIVE_UNAVAILABLE_REASON = ""


def open_recorder(ring: Path, communicators: Path, *, native: bool = True) -> Recorder:
    """Return the recorder of a rank whose ring exists at `ring`. Raises as `record_ring.open_ring`.

    `communicators`: file in which it publishes the groups that it communicates in. `native`: whether the work of each
    step may run in C.
    """
    groups = Communicators(communicators)
    if not torch_internals.can_report_collectives():
        recorder = Recorder(RingWriter(ring), communicators=groups)
        recorder.recording = Recording.STEPS_ONLY
        return recorder
    if native and native_recorder is not None:
        return native_recorder.NativeRecorder(native_recorder.NativeRing(ring), communicators=groups)
    log.info("this rank records without the C extension: %s", NATIVE_UNAVAILABLE_REASON or "PACEKEEPER_NATIVE=0")
    return Recorder(RingWriter(ring), communicators=groups)


def create_collective_monitor(recorder: Recorder) -> CollectiveMonitor:
    """Return the monitor of collectives of this recorder's rank."""
    if native_recorder is not None and isinstance(recorder, native_recorder.NativeRecorder):
        return native_recorder.NativeCollectiveMonitor(recorder)
    return CollectiveMonitor(recorder)
