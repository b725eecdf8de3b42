"""A rank's recorder, and what sees its collectives: with the part in C where that is to be had."""

from __future__ import annotations

import logging

from pacekeeper.environment import Environment

from .collectives import CollectiveMonitor
from .communicators import Communicators
from .recorder import NoRing, Recorder
from .ring import RingWriter

try:
    from . import fast as fast
except ImportError as error:  # not built, or not for this Python: all is recorded without it
    fast = None  # type: ignore[assignment]
    NATIVE_UNAVAILABLE_REASON = str(error)
else:
    NATIVE_UNAVAILABLE_REASON = ""

log = logging.getLogger(__name__)


def open_recorder(environment: Environment) -> Recorder:
    """The rank's recorder: on its ring, where a launcher has made one."""
    if environment.runtime is None:
        return Recorder(NoRing())
    path = environment.runtime.ring(environment.local_rank)
    if not path.exists():
        return Recorder(NoRing())
    communicators = Communicators(environment.runtime.communicators_file(environment.local_rank))
    if fast is not None and environment.native:
        return fast.NativeRecorder(fast.NativeRing(path), communicators=communicators)
    log.info("this rank records in Python alone: %s", NATIVE_UNAVAILABLE_REASON or "PACEKEEPER_NATIVE=0")
    return Recorder(RingWriter(path), communicators=communicators)


def create_collective_monitor(recorder: Recorder) -> CollectiveMonitor:
    """What sees the collectives of this recorder's rank."""
    if fast is not None and isinstance(recorder, fast.NativeRecorder):
        return fast.NativeCollectiveMonitor(recorder)
    return CollectiveMonitor(recorder)
