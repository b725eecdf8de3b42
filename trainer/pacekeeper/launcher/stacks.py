"""One look at a rank's process: its Python stack by faulthandler on a signal; its state and processor time by /proc."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from pacekeeper_analysis.reports import EXITED_PROCESS_STATES

from .processes import has_signal_handler, read_fields
from .rank import STACK_SIGNAL
from .waits import describe_wait, count_helper_ticks
from .watch import ProcessSample

_STACK_TIMEOUT_SECONDS = 0.2
"""Seconds that a stack may take to be written. A stopped process writes none."""
_STACK_POLL_INTERVAL_SECONDS = 0.01


class StackFile:
    """The file to which a rank appends its stacks: first a line that names its main thread, then dump after dump."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def drop_dumps(self) -> int:
        """Drops the dumps so far: of a stall that lasts there are many, and the file may lie in memory. Returns the
        offset at which the next one begins."""
        try:
            with self._path.open("rb+") as file:
                return file.truncate(len(file.readline()))
        except FileNotFoundError:
            return 0

    def size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def read_dumps(self) -> tuple[str, str]:
        """The main thread's name in dumps, and the newest dump of all threads; "" where it is not there (yet)."""
        head, _, dumps = self._path.read_text(errors="replace").partition("\n")
        return head.removeprefix("main thread "), dumps


def extract_main_stack(dump: str, main_thread: str) -> str:
    """The frames of one thread of a faulthandler dump, turned round: innermost call last."""
    frames: list[str] = []
    inside = False
    for line in dump.splitlines():
        if "hread 0x" in line:
            inside = main_thread in line
        elif inside and line.startswith("  "):
            frames.append(line.strip())
    return "\n".join(reversed(frames))


async def sample_process(pid: int, file: StackFile) -> ProcessSample:
    """One look at the process; never longer than `_PATIENCE`."""
    state, ticks = read_process_state(pid)
    if state in ("T", *EXITED_PROCESS_STATES):
        return ProcessSample(state, ticks)
    # It has become another program, the script has taken the handler away, or a debugger holds it.
    if state == "t" or not has_signal_handler(pid, STACK_SIGNAL):
        return ProcessSample(state, ticks, "", count_helper_ticks(pid), describe_wait(pid, "", "") if state != "R" else "")
    offset, helpers = file.drop_dumps(), count_helper_ticks(pid)
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return ProcessSample()
    main_thread, dump, size = "", "", -1
    for _ in range(int(_STACK_TIMEOUT_SECONDS / _STACK_POLL_INTERVAL_SECONDS)):
        await asyncio.sleep(_STACK_POLL_INTERVAL_SECONDS)
        before, size = size, file.size()
        if size > offset and size == before:  # a dump is many small writes: it is whole when it has stopped to grow
            main_thread, dump = file.read_dumps()
            break
    waits_for = describe_wait(pid, main_thread, dump) if state != "R" else ""
    return ProcessSample(state, ticks, extract_main_stack(dump, main_thread), helpers, waits_for)


def read_process_state(pid: int) -> tuple[str, int]:
    """State letter, and processor time of the main thread in clock ticks; ("", 0) where there is no such process."""
    fields = read_fields(Path(f"/proc/{pid}/task/{pid}/stat"))
    return (fields[0], int(fields[11]) + int(fields[12])) if fields else ("", 0)
