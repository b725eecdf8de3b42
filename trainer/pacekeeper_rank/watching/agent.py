"""torchrun's agent, or one that is built on it: it reports how its ranks ended, and samples their processes."""

from __future__ import annotations

import atexit
import time
from typing import Any

from .guard import guard
from .process_monitor import start_process_monitor
from .watch_folder import WatchFolder, write_json

MAX_MESSAGE_CHARACTERS = 2000


class WatchedAgent:
    """The agent of one container."""

    def __init__(self, folder: WatchFolder) -> None:
        self._folder = folder

    def report_exits(self, result: Any) -> None:
        """Write how the ranks ended. `result`: torch's RunProcsResult; without failures, all ended with code 0."""
        failures = {
            str(local_rank): {
                "pid": failure.pid,
                "exit_code": failure.exitcode,
                "at": float(failure.timestamp),
                "message": str(failure.message)[-MAX_MESSAGE_CHARACTERS:],
            }
            for local_rank, failure in result.failures.items()
        }
        write_json(self._folder.get_file("exits", time.time_ns()), {"at": time.time(), "failures": failures})


def start_agent() -> WatchedAgent | None:
    """Return this process's agent; None: there is no runtime folder."""
    folder = WatchFolder.from_environment()
    if folder is None:
        return None
    monitor = start_process_monitor(folder.create())
    guard.on_break = lambda *_: monitor.stop()
    atexit.register(monitor.stop)
    return WatchedAgent(folder)
