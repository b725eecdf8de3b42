"""The process that runs one side's ranks (`host`), in the virtual environment that it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..host_process import HostFailedError, HostProcess
from ..stragglers.hosts import MAX_ERROR_OUTPUT_CHARACTERS, prepare_torchft_python


class SideFailedError(RuntimeError):
    """A side gave nothing back. That is a result of its own too."""


class RankHost:
    """Has a module's functions called by all ranks."""

    def __init__(self, module: str, python: Path | None, logs: Path) -> None:
        """`python`: None: of torchft's environment."""
        arguments = ["-m", f"{__package__}.host", module]
        self._process = HostProcess(lambda: python or prepare_torchft_python(), arguments, logs / f"{module}.log")

    def call(self, function: str, timeout: float, **arguments: Any) -> list[Any]:
        """What each rank gave back, in rank order. Raises SideFailedError with a traceback, or the host's log."""
        try:
            answer = self._process.request({"function": function, "arguments": arguments, "timeout": timeout})
        except HostFailedError as error:
            raise SideFailedError(f"{function}: {str(error)[-MAX_ERROR_OUTPUT_CHARACTERS:]}") from error
        if isinstance(answer, dict):
            raise SideFailedError(f"{function}: {answer['error'][-MAX_ERROR_OUTPUT_CHARACTERS:]}")
        ranks: list[Any] = answer
        return ranks

    def close(self) -> None:
        self._process.close()


@contextmanager
def start_hosts(logs: Path) -> Iterator[tuple[RankHost, RankHost]]:
    """Of ours and of torch's own checkpoints, which are in one environment, and of torchft."""
    ours, torchft = RankHost("with_pacekeeper", Path(sys.executable), logs), RankHost("with_torchft", None, logs)
    try:
        yield ours, torchft
    finally:
        ours.close()
        torchft.close()
