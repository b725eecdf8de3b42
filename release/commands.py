"""Runs commands, and shows what a release is busy with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_SHOWN_CHARACTERS = 4000
"""Of a command's output, in an error."""


class ReleaseError(Exception):
    """An error that the user can fix. The message names the remedy."""


@contextmanager
def log_step(what: str) -> Iterator[None]:
    """Print the start of a step, and its duration at the end."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def run_command(
    *command: str | Path, folder: Path | None = None, variables: Mapping[str, str] | None = None, timeout_seconds: float
) -> str:
    """Run a command to its end, and return its standard output. `variables` are added to the environment.

    Raises ReleaseError with the end of its output.
    """
    words = [str(word) for word in command]
    environment = {**os.environ, **(variables or {})}
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
    except FileNotFoundError as error:
        raise ReleaseError(f"{words[0]} is not installed, and a release needs it") from error
    except subprocess.TimeoutExpired as error:
        raise ReleaseError(f"`{' '.join(words)}` did not end within {timeout_seconds:.0f} s") from error
    if done.returncode != 0:
        output = (done.stderr + done.stdout).strip()[-_SHOWN_CHARACTERS:]
        raise ReleaseError(f"`{' '.join(words)}` failed ({done.returncode}):\n{output}")
    return done.stdout
