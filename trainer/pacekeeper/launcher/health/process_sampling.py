"""One sample of a rank's process.

Its Python stack comes from faulthandler on a signal, its state and processor time from /proc.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from pacekeeper.health.stack_file import StackFile, extract_main_stack
from pacekeeper.health.stall_detector import ProcessSample
from pacekeeper_analysis.protocol.reports import EXITED_PROCESS_STATES
from pacekeeper_rank.watching.process_files import STACK_SIGNAL

from ..ranks.processes import has_signal_handler, read_fields
from .wait_reasons import count_helper_ticks, describe_wait

_STACK_TIMEOUT_SECONDS = 0.2
"""Seconds within which a stack must be written. A stopped process writes none."""
_STACK_POLL_INTERVAL_SECONDS = 0.01


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
