"""Reads the stacks that faulthandler writes in a rank when a signal asks for them."""

from __future__ import annotations

from pathlib import Path


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
