"""A process that runs ranks in the virtual environment of one side, on request."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from testcluster.settings import REPOSITORY

MAX_ERROR_OUTPUT_CHARACTERS = 4000
"""Characters of its log that are reported when it has ended."""
END_SECONDS = 30.0


class HostFailedError(RuntimeError):
    """It gave no answer, or cannot be started."""


class HostProcess:
    """Answers a line of JSON with a line of JSON; started by the first request, and again by the next one if it has
    ended."""

    def __init__(self, python: Callable[[], Path], arguments: Sequence[str], log: Path) -> None:
        """
        python: of its environment, which is made when that is missing. arguments: of Python's. log: its other output.
        """
        self._python = python
        self._arguments = arguments
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def request(self, payload: Mapping[str, Any]) -> Any:
        """Its answer. Raises HostFailedError."""
        try:
            process = self._process = self._process or self._start()
        except (OSError, subprocess.SubprocessError) as error:
            raise HostFailedError(f"its environment cannot be made: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):  # it has ended since the last answer
            process.stdin.write(json.dumps(payload) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            self._process = None
            raise HostFailedError(f"its host has ended: {self._log.read_text()[-MAX_ERROR_OUTPUT_CHARACTERS:]}")
        return json.loads(line)

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("w") as log:
            return subprocess.Popen(
                [str(self._python()), *self._arguments],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
