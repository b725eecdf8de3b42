"""One sample of a rank's process.

Its Python stack comes from faulthandler on a signal, its state and processor time from /proc.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from pacekeeper_analysis.protocol.reports import EXITED_PROCESS_STATES

from ..ranks.processes import has_signal_handler, read_fields
from ..ranks.rank import STACK_SIGNAL
from .stall_detector import ProcessSample
from .wait_reasons import count_helper_ticks, describe_wait

_STACK_TIMEOUT_SECONDS = 0.2
"""Seconds within which a stack must be written. A stopped process writes none."""
_STACK_POLL_INTERVAL_SECONDS = 0.01


class StackFile:
    """The file to which a rank appends its stacks: first a line that names its main thread, then the dumps."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def drop_dumps(self) -> int:
        """Drop the dumps so far, and return the offset at which the next one begins.

        A long stall has many dumps, and the file may be in memory.
        """
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
        """Return the main thread's name in dumps, and the newest dump of all threads; "" for what is missing."""
        head, _, dumps = self._path.read_text(errors="replace").partition("\n")
        return head.removeprefix("main thread "), dumps


def extract_main_stack(dump: str, main_thread: str) -> str:
    """Return the frames of one thread of a faulthandler dump in reverse order: innermost call last."""
    frames: list[str] = []
    in_main_thread = False
    for line in dump.splitlines():
        if "hread 0x" in line:
            in_main_thread = main_thread in line
        elif in_main_thread and line.startswith("  "):
            frames.append(line.strip())
    return "\n".join(reversed(frames))


async def sample_process(pid: int, file: StackFile) -> ProcessSample:
    """Sample the process. It takes `_STACK_TIMEOUT_SECONDS` at most."""
    state, ticks = read_process_state(pid)
    if state in ("T", *EXITED_PROCESS_STATES):
        return ProcessSample(state, ticks)
    # The process runs another program, the script has removed the handler, or a debugger has stopped the process.
    if state == "t" or not has_signal_handler(pid, STACK_SIGNAL):
        return ProcessSample(
            state, ticks, "", count_helper_ticks(pid), describe_wait(pid, "", "") if state != "R" else ""
        )
    offset, helper_ticks = file.drop_dumps(), count_helper_ticks(pid)
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return ProcessSample()
    main_thread, dump = "", ""
    size: int | None = None
    for _ in range(int(_STACK_TIMEOUT_SECONDS / _STACK_POLL_INTERVAL_SECONDS)):
        await asyncio.sleep(_STACK_POLL_INTERVAL_SECONDS)
        previous_size, size = size, file.size()
        if size > offset and size == previous_size:  # a dump is many small writes: it is complete when it stops growing
            main_thread, dump = file.read_dumps()
            break
    waits_for = describe_wait(pid, main_thread, dump) if state != "R" else ""
    return ProcessSample(state, ticks, extract_main_stack(dump, main_thread), helper_ticks, waits_for)


def read_process_state(pid: int) -> tuple[str, int]:
    """Return the state letter, and the main thread's processor time in clock ticks; ("", 0): no such process."""
    fields = read_fields(Path(f"/proc/{pid}/task/{pid}/stat"))
    return (fields[0], int(fields[11]) + int(fields[12])) if fields else ("", 0)
