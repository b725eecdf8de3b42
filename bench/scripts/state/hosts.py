"""The process that runs one side's ranks (`host`), in the virtual environment that it needs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testcluster.settings import REPOSITORY

from ..stragglers.hosts import LAST_WORDS, torchft_python

END_SECONDS = 30.0


class SideFailedError(RuntimeError):
    """A side gave nothing back. That is a result of its own too."""


class Host:
    """Has a module's functions called by all ranks; started at the first call."""

    def __init__(self, module: str, logs: Path) -> None:
        self._module = module
        self._log = logs / f"{module}.log"
        self._process: subprocess.Popen[str] | None = None

    def call(self, function: str, timeout: float, **arguments: Any) -> list[Any]:
        """What each rank gave back, in rank order. Raises SideFailedError with a traceback, or the host's words."""
        try:
            process = self._process = self._process or self._start()
        except (OSError, subprocess.SubprocessError) as error:
            raise SideFailedError(f"its environment cannot be made: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):  # it has ended since the last call
            order = {"function": function, "arguments": arguments, "timeout": timeout}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            self._process = None
            raise SideFailedError(f"{function}: its host has ended: {self._log.read_text()[-LAST_WORDS:]}")
        answer: Any = json.loads(line)
        if isinstance(answer, dict):
            raise SideFailedError(f"{function}: {answer['error'][-LAST_WORDS:]}")
        ranks: list[Any] = answer
        return ranks

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
        python = torchft_python() if self._module == "with_torchft" else Path(sys.executable)
        with self._log.open("w") as log:
            return subprocess.Popen(
                [str(python), "-m", f"{__package__}.host", self._module],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )


@contextmanager
def hosts(logs: Path) -> Iterator[tuple[Host, Host]]:
    """Of ours and of torch's own checkpoints, which are in one environment, and of torchft."""
    ours, torchft = Host("with_pacekeeper", logs), Host("with_torchft", logs)
    try:
        yield ours, torchft
    finally:
        ours.close()
        torchft.close()
