"""Makes this process a watched rank: it gets a slot, a ring, a lock, and a thread that answers the reader."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..monitoring import start_monitoring
from ..record_ring import create_ring
from ..recorder import Recorder
from ..recorder_factory import open_recorder
from ..records import Phase
from .guard import guard
from .process_monitor import ProcessMonitor, WatchThread
from .profile_requests import ProfileRequests
from .rank_end import EndReporter
from .rank_stacks import StackResponder
from .slot_lock import take_slot
from .watch_folder import WatchFolder, write_json

WATCHED_RING_CAPACITY = 32_768
"""Records of a ring: 2 MiB, because its pages count against the job's memory limit."""
RESUME_STEP = 3
"""Step of the round at which the optimizer's state is read: by then the script has loaded its checkpoint."""


@dataclass
class RankIdentity:
    """The content of `ranks/<slot>.json`."""

    rank: int
    world_size: int
    slot: int
    pid: int
    restart: int
    started_at: float
    recording: str
    python: str
    torch: str
    rendezvous: str
    run_id: str
    resumed_from: int | None = None
    optimizer: str | None = None


class WatchedRank:
    """The rank that this process is."""

    def __init__(self, folder: WatchFolder, recorder: Recorder, description: RankIdentity) -> None:
        self._folder, self._recorder, self._description = folder, recorder, description
        self._steps = 0
        self._profiles = ProfileRequests(folder, description.slot, recorder)
        self._thread: WatchThread | None = None

    def start(self) -> None:
        """Publish the rank, and start its thread."""
        slot = self._description.slot
        for kind in ("broken", "profiles"):
            self._folder.get_file(kind, slot).unlink(missing_ok=True)  # of an earlier process in this slot
        guard.on_break = self._break_off
        EndReporter(self._folder.get_file("ends", slot), self._finish)
        os.register_at_fork(after_in_child=_end_in_child)
        self._recorder.restart_clock(1)
        self._publish()
        stacks = StackResponder(self._folder, slot)
        stacks.start()
        monitor = ProcessMonitor(self._folder)
        tasks = {"stacks": stacks.answer, "profile": self._profiles.poll, "process monitor": monitor.tick}
        self._thread = WatchThread(tasks)
        self._thread.start()

    def begin_step(self, optimizer: Any) -> None:
        """Handle an optimizer that begins a step."""
        self._recorder.begin_optimizer_step(optimizer)

    def end_step(self, optimizer: Any) -> None:
        """Handle an optimizer that has completed a step. The steps of the first optimizer are the job's."""
        self._recorder.end_optimizer_step(optimizer)
        if self._steps < RESUME_STEP:
            self._steps += 1
            if self._steps == RESUME_STEP:
                self._description.optimizer = type(optimizer).__name__
                self._description.resumed_from = read_earlier_steps(optimizer, RESUME_STEP)
                self._publish()

    def _publish(self) -> None:
        write_json(self._folder.get_file("ranks", self._description.slot), asdict(self._description))

    def _finish(self) -> None:
        self._recorder.enter_phase(Phase.FINISHED)
        self._stop_threads()

    def _break_off(self, hook: str, error: Exception) -> None:
        self._stop_threads()
        self._recorder.guard.disable(hook, error)

    def _stop_threads(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self._profiles.stop()


def start_rank() -> WatchedRank | None:
    """Make this process a rank; None: there is no runtime folder, or it has no free slot."""
    folder = WatchFolder.from_environment()
    if folder is None:
        return None
    _silence_log()
    folder.create()
    slot = take_slot(folder, _read_number("LOCAL_RANK"))
    if slot is None:
        return None
    rank, world_size = read_place()
    restart = _read_number("TORCHELASTIC_RESTART_COUNT") or 0
    create_ring(folder.ring(slot), rank, restart + 1, WATCHED_RING_CAPACITY)
    native = os.environ.get("PACEKEEPER_NATIVE") != "0"
    recorder = open_recorder(folder.ring(slot), folder.get_file("communicators", slot), native=native)
    guard.report_name, guard.on_break = str(slot), recorder.guard.disable
    start_monitoring(recorder, guard.break_off)
    description = RankIdentity(
        rank=rank,
        world_size=world_size,
        slot=slot,
        pid=os.getpid(),
        restart=restart,
        started_at=time.time(),
        recording=recorder.recording.value,
        python=sys.version.split()[0],
        torch=str(getattr(sys.modules.get("torch"), "__version__", "")),
        rendezvous=f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}",
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", ""),
    )
    watched = WatchedRank(folder, recorder, description)
    watched.start()
    return watched


def read_place() -> tuple[int, int]:
    """Return global rank and world size: those of the default process group, else those of the environment."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    groups = list(getattr(world, "pg_map", None) or ())
    if groups:
        return int(groups[0].rank()), int(groups[0].size())
    return _read_number("RANK") or 0, _read_number("WORLD_SIZE") or 1


def read_earlier_steps(optimizer: Any, steps: int) -> int | None:
    """Return how many steps the optimizer's state had counted before the last `steps` steps; None: it counts none.

    A count on a device is not read: the rank would wait for the device.
    """
    state: Any = next(iter(optimizer.state.values()), {})
    count = state.get("step") if hasattr(state, "get") else None
    if count is None or not getattr(count, "is_cpu", True):
        return None
    return max(0, int(count) - steps)


def _silence_log() -> None:
    """Keep this library's messages out of the script's output."""
    log = logging.getLogger(__name__.partition(".")[0])
    log.addHandler(logging.NullHandler())
    log.propagate = False


def _end_in_child() -> None:
    """End watching in a process that the rank has forked: it is not the rank."""
    guard.active = False


def _read_number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else None
