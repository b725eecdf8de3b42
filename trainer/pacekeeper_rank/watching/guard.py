"""Keeps errors of this library away from the script: the first one ends the watching of this process.

Hooks stay installed and become inactive. A hook that removes itself while torch iterates over its hooks would end the
script.
"""

from __future__ import annotations

import os
import sys
from _collections_abc import Callable  # loaded already, unlike collections.abc


class Guard:
    """Runs the library's functions in one process."""

    def __init__(self) -> None:
        self.active = True
        """False: hooks return at once."""
        self.report_name = f"process-{os.getpid()}"
        """Name of the report in `broken/`: the slot, once the process is a rank."""
        self.on_break: Callable[[str, Exception], None] | None = None
        """Called after the first error, with the hook and the error: it stops threads and other hooks."""

    def run(self, hook: str, function: Callable[..., object], *arguments: object) -> object:
        """Return what `function` returns; None if it fails, or if the library is inactive.

        `hook`: names what failed in the report. An exception of the script's own signal handlers, which may run at any
        time, is raised.
        """
        if not self.active:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            if _is_of_script(error):
                raise
            self.break_off(hook, error)
            return None

    def break_off(self, hook: str, error: Exception) -> None:
        """Deactivate the library in this process, and report why."""
        if not self.active:
            return
        self.active = False
        for react in (self._report, self.on_break):
            try:
                if react is not None:
                    react(hook, error)
            except Exception:
                continue  # nothing more can be done, and the script must not notice

    def _report(self, hook: str, error: Exception) -> None:
        if os.environ.get("PACEKEEPER_WATCH_DEBUG"):
            sys.stderr.write(f"pacekeeper: watching ended in {hook}: {error!r}\n")
        import time

        from .watch_folder import WatchFolder, write_json

        folder = WatchFolder.from_environment()
        if folder is not None:
            report = {"pid": os.getpid(), "at": time.time(), "hook": hook, "error": repr(error)[:2000]}
            write_json(folder.create().get_file("broken", self.report_name), report)


def _is_of_script(error: Exception) -> bool:
    """Return whether a signal handler of the script has raised `error`, in the middle of this library's code."""
    try:
        from ..hook_guard import is_raised_by_signal_handler
    except Exception:
        return False  # the library is incomplete, which is an error of its own
    return is_raised_by_signal_handler(error)


guard = Guard()
