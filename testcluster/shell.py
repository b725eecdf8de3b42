"""Running commands, waiting for conditions and telling the user how far things are."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class ClusterError(Exception):
    """Something that the user can act upon: the message says what, and which log to read."""


_started = time.monotonic()


def log_progress(message: str) -> None:
    print(f"[{time.monotonic() - _started:6.1f} s] {message}", file=sys.stderr, flush=True)


@contextmanager
def log_step(what: str) -> Iterator[None]:
    """Announce a long step, and how long it took when it is done."""
    log_progress(f"{what} ...")
    before = time.monotonic()
    yield
    log_progress(f"{what}: done in {time.monotonic() - before:.1f} s")


def run_command(*command: str | Path, stdin: str | None = None, timeout: float = 60) -> str:
    """Run a command to its end and return its standard output; a failure becomes a ClusterError with its last words."""
    arguments = [str(part) for part in command]
    try:
        done = subprocess.run(arguments, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{' '.join(arguments)}` did not end within {timeout:.0f} s") from error
    if done.returncode != 0:
        raise ClusterError(
            f"`{' '.join(arguments)}` failed ({done.returncode}): {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def is_successful(*command: str | Path) -> bool:
    return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode == 0


def run_shown(
    command: Sequence[str | Path], environment: dict[str, str] | None = None, folder: Path | None = None
) -> None:
    """Run a long command whose output the user wants to see (on standard error)."""
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, env=environment, cwd=folder, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(arguments)}` failed ({done.returncode}); its output is above")


def is_answering(url: str) -> bool:
    """Whether a GET of `url` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def write_if_changed(path: Path, content: str) -> Path:
    """Write a file, wholly or not at all, unless it has this content already.

    Some programs watch their configuration and end when it is touched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != content:
        unfinished = path.with_name(f"{path.name}.new")
        unfinished.write_text(content)
        unfinished.rename(path)
    return path


def wait_for(condition: Callable[[], bool], timeout: float, what: str, log: Path | None = None) -> None:
    """Wait until `condition()` holds, for at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {timeout:.0f} s" + (f"; see {log}" if log else ""))
        time.sleep(0.1)
