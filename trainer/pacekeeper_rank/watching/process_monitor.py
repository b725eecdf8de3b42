"""Samples the rank processes of a container: their states, processor time, and sockets; out-of-memory kills.

A sidecar cannot see these processes. So one process of the container does it, elected by a lock: the agent if there is
one, else a rank. It also asks ranks for their stacks by a signal if their own thread does not answer.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .guard import guard
from .process_files import (
    SOCKET_SCAN_INTERVAL_SECONDS,
    STACK_SIGNAL,
    catches_stack_signal,
    count_oom_kills,
    drop_dumps,
    list_socket_inodes,
    read_process_state,
)
from .slot_lock import take_lock
from .watch_folder import WatchFolder, write_json

TICK_INTERVAL_SECONDS = 0.5
SIGNAL_AFTER_SECONDS = 1.0
"""Seconds in which a rank's own thread may answer a request for its stack, before a signal asks for it."""
FILE_TIME_RESOLUTION_NS = 100_000_000
"""Upper limit of the time between two changes that the kernel may give the same time."""
_CANNOT_ANSWER = ("", "T", "t", "Z", "X")
"""States of processes that write no stack: gone, stopped, or traced."""


class ProcessMonitor:
    """Samples the processes while this process holds the lock."""

    def __init__(self, folder: WatchFolder) -> None:
        self._folder = folder
        self._elected = False
        self._ranks: dict[str, dict[str, int]] = {}
        self._ranks_folder = str(folder.root / "ranks")
        self._ranks_changed_ns = self._ranks_read_ns = 0
        self._sockets: dict[str, int] | None = None
        self._sockets_due = 0.0
        self._request, self._request_at = "", 0.0
        self._signaled: set[str] = set()

    def tick(self, now: float | None = None) -> None:
        """Sample once, if this process is the elected one. `now`: seconds, monotonic; None: the present time."""
        now = time.monotonic() if now is None else now
        if not self._elected:
            self._elected = take_lock(self._folder.lock("monitor"))
            if not self._elected:
                return
        ranks = self._read_ranks()
        states = {slot: read_process_state(rank["pid"]) for slot, rank in ranks.items()}
        self._write_processes(ranks, states)
        self._request_stacks(ranks, states, now)
        if now >= self._sockets_due:
            self._sockets_due = now + SOCKET_SCAN_INTERVAL_SECONDS
            self._write_sockets(ranks)

    def _read_ranks(self) -> dict[str, dict[str, int]]:
        """Return process ID and global rank by slot, of the ranks that have registered.

        Files are replaced, which changes their folder. Two changes may have the same time, as the kernel counts it.
        """
        changed, now = os.stat(self._ranks_folder).st_mtime_ns, time.time_ns()
        if changed != self._ranks_changed_ns or changed >= self._ranks_read_ns - FILE_TIME_RESOLUTION_NS:
            self._ranks, self._ranks_changed_ns, self._ranks_read_ns = self._parse_ranks(), changed, now
        return self._ranks

    def _parse_ranks(self) -> dict[str, dict[str, int]]:
        ranks = {}
        for path in (self._folder.root / "ranks").glob("[0-9]*.json"):
            try:
                content: Any = json.loads(path.read_text())
                ranks[path.stem] = {"pid": int(content["pid"]), "rank": int(content["rank"])}
            except (OSError, ValueError, KeyError, TypeError):
                continue  # it is being removed, or is not a rank's
        return ranks

    def _write_processes(self, ranks: dict[str, dict[str, int]], states: dict[str, tuple[str, int]]) -> None:
        samples = {
            slot: {"pid": rank["pid"], "state": states[slot][0], "cpu_ticks": states[slot][1]}
            for slot, rank in ranks.items()
        }
        content = {"at": time.time(), "by": os.getpid(), "oom_kills": count_oom_kills(), "ranks": samples}
        write_json(self._folder.processes, content)

    def _request_stacks(self, ranks: dict[str, dict[str, int]], states: dict[str, tuple[str, int]], now: float) -> None:
        """Send the stack signal to ranks that have not answered the newest request."""
        request = self._folder.read_stack_request()
        if request != self._request:
            self._request, self._request_at = request, now
            self._signaled.clear()
        if not request or now - self._request_at < SIGNAL_AFTER_SECONDS:
            return
        for slot, rank in ranks.items():
            is_able = states[slot][0] not in _CANNOT_ANSWER and slot not in self._signaled
            if is_able and not self._has_answered(slot) and catches_stack_signal(rank["pid"]):
                self._signaled.add(slot)
                drop_dumps(self._folder.stack_dump(int(slot)))
                os.kill(rank["pid"], STACK_SIGNAL)

    def _has_answered(self, slot: str) -> bool:
        try:
            answer: Any = json.loads(self._folder.get_file("stacks", slot).read_text())
            return bool(answer["request"] == self._request)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _write_sockets(self, ranks: dict[str, dict[str, int]]) -> None:
        """Write which rank holds which socket, by inode, if that has changed."""
        sockets = {str(inode): rank["rank"] for rank in ranks.values() for inode in list_socket_inodes(rank["pid"])}
        if sockets != self._sockets:
            write_json(self._folder.sockets, sockets)
            self._sockets = sockets


@dataclass
class WatchThread:
    """The thread of the watch in a process. It calls its tasks at each tick, until `stop` or the end of the watching.

    There is one for all tasks: to wake with cold caches costs more than what a task does.
    """

    tasks: Mapping[str, Callable[[], object]]
    """By the name that an error is reported with, in the order in which they are called."""

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pacekeeper-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop before the interpreter exits. The thread may be inside a task, for which this waits briefly."""
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(TICK_INTERVAL_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(TICK_INTERVAL_SECONDS) and guard.active:
            for name, task in self.tasks.items():
                guard.run(name, task)


def start_process_monitor(folder: WatchFolder) -> WatchThread:
    """Start a thread that samples the processes as soon as it is elected."""
    thread = WatchThread({"process monitor": ProcessMonitor(folder).tick})
    thread.start()
    return thread
