"""Runs commands, waits for conditions, and logs progress."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class ClusterError(Exception):
    """An error that the user can fix. The message contains the failure, and the log to read."""


_started = time.monotonic()


def log_progress(message: str) -> None:
    print(f"[{time.monotonic() - _started:6.1f} s] {message}", file=sys.stderr, flush=True)


@contextmanager
def log_step(what: str) -> Iterator[None]:
    """Log the start of a long step, and its duration at the end."""
    log_progress(f"{what} ...")
    start = time.monotonic()
    yield
    log_progress(f"{what}: done in {time.monotonic() - start:.1f} s")


def run_command(*command: str | Path, stdin: str | None = None, timeout: float = 60) -> str:
    """Run a command to its end and return its standard output. Raises ClusterError with its error output."""
    arguments = [str(part) for part in command]
    try:
        result = subprocess.run(arguments, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{' '.join(arguments)}` did not end within {timeout:.0f} s") from error
    if result.returncode != 0:
        raise ClusterError(
            f"`{' '.join(arguments)}` failed ({result.returncode}): {(result.stderr or result.stdout).strip()}"
        )
    return result.stdout


def is_successful(*command: str | Path) -> bool:
    return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode == 0


def run_shown(
    command: Sequence[str | Path], environment: dict[str, str] | None = None, folder: Path | None = None
) -> None:
    """Run a long command, with its output on standard error. Raises ClusterError if it fails."""
    arguments = [str(part) for part in command]
    result = subprocess.run(arguments, env=environment, cwd=folder, stdout=sys.stderr, check=False)
    if result.returncode != 0:
        raise ClusterError(f"`{' '.join(arguments)}` failed ({result.returncode}); its output is above")


def is_answering(url: str) -> bool:
    """Return whether a GET of `url` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def write_if_changed(path: Path, content: str) -> Path:
    """Write a file atomically, unless it has this content already.

    Some programs watch their configuration, and exit when it is touched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != content:
        unfinished = path.with_name(f"{path.name}.new")
        unfinished.write_text(content)
        unfinished.rename(path)
    return path


def wait_for(condition: Callable[[], bool], timeout: float, what: str, log: Path | None = None) -> None:
    """Wait until `condition()` holds, for at most `timeout` seconds. Raises ClusterError."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {timeout:.0f} s" + (f"; see {log}" if log else ""))
        time.sleep(0.1)
