"""Examples of other people's training loops under `pacekeeper run --local 2`, with a scripted fault."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pacekeeper.launcher.command import launch_locally
from pacekeeper.launcher.launcher import Script
from pacekeeper_rank.forking.warm_server import import_modules

from .launchers import fork_process, wait_until_true
from .ranks import PREIMPORTS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CRASHING = Path(__file__).parents[1] / "scripts" / "crashing.py"
RANKS = 2
TRAINING_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class TrainingOutcome:
    """What a run has come to."""

    exit_code: int
    log: str
    folder: Path

    def count_steps(self, rank: int, round_: int) -> int:
        """Optimizer steps of the rank in the round."""
        path = self.folder / f"steps.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return sum(line.split()[0] == str(round_) for line in lines)

    def read_records(self, rank: int) -> NDArray[np.void]:
        """Of the last round."""
        records: NDArray[np.void] = np.load(self.folder / f"records.{rank}.npy")
        return records

    def read_state(self, rank: int) -> NDArray[np.void]:
        """Of the rank's ring, when the script had ended."""
        state: NDArray[np.void] = np.load(self.folder / f"state.{rank}.npy")
        return state

    def read_weights(self, rank: int) -> dict[str, Tensor]:
        """At the script's end; of a sharded model, the rank's own part."""
        weights: dict[str, Tensor] = torch.load(self.folder / f"weights.{rank}", weights_only=True)
        return weights


def run_example(example: str, folder: Path, crash: str = "", **environment: str) -> TrainingOutcome:
    """Runs the example (or the script of an absolute path) to its end. crash: as `scripts/crashing.py` has it."""
    folder.mkdir(parents=True, exist_ok=True)
    import_modules(PREIMPORTS)
    variables = {
        "FOLDER": str(folder),
        "CRASH": crash,
        "PACEKEEPER_CHECKPOINT_PATH": str(folder / "checkpoints"),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    script = Script(str(CRASHING), False, (str(EXAMPLES / example),))
    pid = fork_process(lambda: launch_locally(script, ranks=RANKS, restarts=3), folder / "log", variables)
    status: list[int] = []

    def ended() -> bool:
        exited_pid, exit_status = os.waitpid(pid, os.WNOHANG)
        status.append(exit_status)
        return bool(exited_pid)

    try:
        wait_until_true(ended, f"{example} ends", TRAINING_TIMEOUT_SECONDS)
    except AssertionError as error:
        os.killpg(pid, 9)
        raise AssertionError(f"{error}\n{(folder / 'log').read_text()}") from None
    return TrainingOutcome(os.waitstatus_to_exitcode(status[-1]), (folder / "log").read_text(errors="replace"), folder)


def assert_same_weights(first: TrainingOutcome, second: TrainingOutcome) -> None:
    """On each rank, to the last bit."""
    for rank in range(RANKS):
        first_weights, second_weights = first.read_weights(rank), second.read_weights(rank)
        assert first_weights.keys() == second_weights.keys()
        for name, weight in first_weights.items():
            assert torch.equal(weight, second_weights[name]), f"rank {rank}: {name}"
