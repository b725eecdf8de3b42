"""What a rank's process waits for that no other rank gives: a child process, a file, a socket, a clock.

By what the kernel says where its main thread sleeps (`wchan`), by the processes below it, and by where its other Python
threads are. A rank that waits for a lock which only its own idle threads could release waits for nothing of the kind.
"""

from __future__ import annotations

from pathlib import Path

from pacekeeper_analysis.reports import DEBUGGER_WAIT

from .processes import is_traced, read_fields, read_text

_DEBUGGER_FILE_PARTS = ("/bdb.py", "/pdb.py", "/debugpy/", "/pydevd")
"""Parts of paths of files that a thread is in while somebody looks into it."""
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
"""Parts of names of functions in the kernel, and what a thread that sleeps in one waits for."""
_IDLE_FILE_PARTS = ("/threading.py", "/queue.py", "/concurrent/futures/", "/torch/", "/pacekeeper/")
"""Parts of paths of files in which threads of others wait for work, or for ranks."""


def describe_wait(pid: int, main_thread: str, dump: str) -> str:
    """What the main thread of process `pid` waits for that no rank gives; "": nothing of the kind.

    `dump`: of faulthandler, with the stacks of all threads, of which `main_thread` (0x…) is one; "": there is none.
    """
    if is_traced(pid) or any(part in dump for part in _DEBUGGER_FILE_PARTS):
        return DEBUGGER_WAIT
    children = list_descendants(pid)
    place = read_text(Path(f"/proc/{pid}/wchan"))
    if "futex" not in place:
        words = next((words for part, words in _KERNEL_WAIT_FUNCTIONS if part in place), "")
        if words == "a child process" and children:
            return f"{words} ({_format_process_name(children[0])})"
        return words or (f"a file or device ({place})" if place not in ("", "0") else "something outside of the job")
    if children:
        return f"one of its threads or child processes ({_format_process_name(children[0])})"
    if not dump:
        return "something that its stack does not tell"
    busy = [frame for frame in list_innermost_frames(dump, main_thread) if not any(part in frame for part in _IDLE_FILE_PARTS)]
    return f"its thread at {busy[0]}" if busy else ""


def list_innermost_frames(dump: str, main_thread: str) -> list[str]:
    """Where each thread of a faulthandler dump but the main one is."""
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
    """Processes below `pid` that live."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for task in _list_tasks(parent):
            children = [int(word) for word in read_text(task / "children").split()]
            alive = [child for child in children if _is_alive(child)]
            found += alive
            waiting += alive
    return found


def _is_alive(pid: int) -> bool:
    return read_fields(Path(f"/proc/{pid}/stat"))[:1] not in ([], ["Z"])


def count_helper_ticks(pid: int) -> int:
    """Processor time of a process's threads but the main one, and of all that is or was below it, in clock ticks."""
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
