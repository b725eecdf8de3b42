"""The processes that run ranks: one in this virtual environment, one in that of torchft, which is made when missing."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from testcluster.settings import CACHE

from ..host_process import HostFailedError, HostProcess
from .run import Outcome, Run
from .sides import LEAVING_OUT_SIDES, TORCHFT_SIDES

TORCHFT_VERSION = "0.2.0"
MAX_ERROR_OUTPUT_CHARACTERS = 2000
"""Characters of a failure that are kept."""
PREIMPORTS = {
    "torchft": ("torchft.local_sgd", "torchft.coordination"),
    "pacekeeper": ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "pacekeeper.job"),
}


class RunFailedError(RuntimeError):
    """A run gave no result, twice. That is a result of its side too."""


@dataclass(frozen=True)
class Failure:
    """A run that gave no result, in one of its tries."""

    side: str
    scenario: str
    seed: int
    attempt: int
    reason: str


class Hosts:
    """Runs ranks in the environment that their side needs; one run at a time."""

    def __init__(self, logs: Path) -> None:
        self._processes = {
            kind: HostProcess(python, ["-m", f"{__package__}.host", *PREIMPORTS[kind]], logs / f"{kind}.log")
            for kind, python in (("torchft", prepare_torchft_python), ("pacekeeper", lambda: Path(sys.executable)))
        }
        self.failures: list[Failure] = []

    def perform(self, run: Run, timeout: float, tries: int = 2) -> list[Outcome]:
        """The outcomes in rank order. Raises RunFailedError with the first rank's traceback, or the host's log."""
        for attempt in range(1, tries + 1):
            try:
                return self._perform(run, timeout)
            except RunFailedError as error:
                log_progress(f"failed, attempt {attempt} of {tries}: {error}")
                self.failures.append(
                    Failure(run.side, run.scenario, run.seed, attempt, str(error)[-MAX_ERROR_OUTPUT_CHARACTERS:])
                )
        raise RunFailedError(self.failures[-1].reason)

    def _perform(self, run: Run, timeout: float) -> list[Outcome]:
        kind = "torchft" if run.side in (*TORCHFT_SIDES, *LEAVING_OUT_SIDES) else "pacekeeper"
        try:
            answer = self._processes[kind].request({"run": run.to_json(), "timeout": timeout})
        except HostFailedError as error:
            raise RunFailedError(f"{run}: {error}") from error
        if "error" in answer:
            raise RunFailedError(f"{run}: {answer['error']}")
        return [Outcome.from_json(outcome) for outcome in answer]

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


@contextmanager
def start_hosts() -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="pacekeeper-bench-") as folder:
        hosts = Hosts(Path(folder))
        try:
            yield hosts
        finally:
            hosts.close()


def prepare_torchft_python() -> Path:
    """torchft with the very torch that we run on, kept outside the checkout by both versions."""
    torch = metadata.version("torch").split("+")[0]
    folder = CACHE / f"venv-torchft-{TORCHFT_VERSION}-torch-{torch}"
    python, ready = folder / "bin/python", folder / ".ready"
    if not ready.exists():
        log_progress(f"making an environment with torchft {TORCHFT_VERSION} and torch {torch} …")
        _run_command(sys.executable, "-m", "venv", "--clear", folder)
        packages = (f"torchft=={TORCHFT_VERSION}", f"torch=={torch}", "numpy")
        uv = Path(sys.executable).with_name("uv")
        if uv.exists():
            _run_command(uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python, *packages)
        else:
            _run_command(python, "-m", "pip", "install", "--quiet", *packages)
        ready.touch()
    return python


def log_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _run_command(*command: Any) -> None:
    subprocess.run([str(part) for part in command], check=True, timeout=1800)
