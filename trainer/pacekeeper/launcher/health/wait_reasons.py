"""What a rank's process waits for that no other rank provides: a child process, a file, a socket, a clock.

The sources are the kernel function in which its main thread sleeps (`wchan`), its descendant processes, and the frames
of its other Python threads. A rank that waits for a lock that only its own idle threads could release does not count.
"""

from __future__ import annotations

from pathlib import Path

from pacekeeper_analysis.protocol.reports import DEBUGGER_WAIT

from ..ranks.processes import is_traced, read_fields, read_text

_DEBUGGER_FILE_PARTS = ("/bdb.py", "/pdb.py", "/debugpy/", "/pydevd")
"""Parts of the paths of files in which a thread is while it is being debugged."""
_KERNEL_WAIT_FUNCTIONS = (
    ("nanosleep", "a clock (sleep)"),
    ("do_wait", "a child process"),
    ("pipe", "a pipe"),
    ("poll", "a socket or pipe"),
    ("select", "a socket or pipe"),
    ("inet", "a socket"),
    ("tcp", "a socket"),
    ("unix", "a socket"),
    ("sk_", "a socket"),
)
"""Parts of the names of kernel functions, and what a thread that sleeps in one waits for."""
_IDLE_FILE_PARTS = ("/threading.py", "/queue.py", "/concurrent/futures/", "/torch/", "/pacekeeper/", "pacekeeper_rank/")
"""Parts of the paths of files in which idle threads wait for work, or for ranks."""


def describe_wait(pid: int, main_thread: str, dump: str) -> str:
    """Return what the main thread of process `pid` waits for that no rank provides; "": nothing.

    `dump`: of faulthandler, with the stacks of all threads, including `main_thread` (0x…); "": there is none.
    """
    if is_traced(pid) or any(part in dump for part in _DEBUGGER_FILE_PARTS):
        return DEBUGGER_WAIT
    children = list_descendants(pid)
    wait_function = read_text(Path(f"/proc/{pid}/wchan"))
    if "futex" not in wait_function:
        reason = next((reason for part, reason in _KERNEL_WAIT_FUNCTIONS if part in wait_function), "")
        if reason == "a child process" and children:
            return f"{reason} ({_format_process_name(children[0])})"
        return reason or (
            f"a file or device ({wait_function})" if wait_function not in ("", "0") else "something outside of the job"
        )
    if children:
        return f"one of its threads or child processes ({_format_process_name(children[0])})"
    if not dump:
        return "something that its stack does not show"
    busy = [
        frame
        for frame in list_innermost_frames(dump, main_thread)
        if not any(part in frame for part in _IDLE_FILE_PARTS)
    ]
    return f"its thread at {busy[0]}" if busy else ""


def list_innermost_frames(dump: str, main_thread: str) -> list[str]:
    """Return the innermost frame of each thread of a faulthandler dump, except the main one."""
    frames, thread = [], ""
    for line in dump.splitlines():
        if "hread 0x" in line:
            thread = line
        elif thread and line.startswith("  "):
            if not main_thread or main_thread not in thread:
                frames.append(line.strip())
            thread = ""
    return frames


def list_descendants(pid: int) -> list[int]:
    """Return the live descendant processes of `pid`."""
    descendants: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        for task in _list_tasks(parent):
            children = [int(word) for word in read_text(task / "children").split()]
            alive = [child for child in children if _is_alive(child)]
            descendants += alive
            pending += alive
    return descendants


def _is_alive(pid: int) -> bool:
    return read_fields(Path(f"/proc/{pid}/stat"))[:1] not in ([], ["Z"])


def count_helper_ticks(pid: int) -> int:
    """Count the clock ticks of a process's threads except the main one, and of all present and past descendants."""
    threads = [read_fields(task / "stat")[11:13] for task in _list_tasks(pid) if task.name != str(pid)]
    processes = [read_fields(Path(f"/proc/{child}/stat"))[11:15] for child in list_descendants(pid)]
    ended = read_fields(Path(f"/proc/{pid}/stat"))[13:15]
    return sum(int(ticks) for times in (*threads, *processes, ended) for ticks in times)


def _list_tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _format_process_name(pid: int) -> str:
    return f"{pid} {read_text(Path(f'/proc/{pid}/comm')).strip()}"
