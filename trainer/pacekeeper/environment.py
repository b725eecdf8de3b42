"""What launcher and operator tell a rank through its environment; one frozen object, read once."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pacekeeper_analysis.errors import InputError

from .runtime import RuntimeFolder

RANK_LEFT_EXIT_CODE = 143
"""Exit code of a rank that was told to leave (SIGTERM, suspend), after its checkpoint: 128 + SIGTERM."""

_PEER_REPLICA_VARIABLE = "PACEKEEPER_NEIGHBOUR_MEGABYTES"


@dataclass(frozen=True)
class JobIdentity:
    """Which job a process belongs to: its checkpoints carry this, and no other job may use them unasked."""

    name: str = ""
    """`namespace/name` of a TrainingJob. Without an operator: the absolute path of the script, so that the same script
    started again is the same job. "": unknown, and nothing is checked."""
    uid: str = ""
    """Of the TrainingJob, or of one `pacekeeper run --local`: applied again, a job has a new one. "": unknown."""

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> JobIdentity:
        name, namespace = variables.get("PACEKEEPER_JOB", ""), variables.get("PACEKEEPER_NAMESPACE", "")
        if name and namespace:
            return cls(f"{namespace}/{name}", variables.get("PACEKEEPER_JOB_UID", ""))
        # The runtime folder of a local run has a name of its own, which all its rounds share.
        return cls(name or _find_script_path(), variables.get("PACEKEEPER_RUNTIME", ""))

    @property
    def file_tag(self) -> str:
        """In file names: tells apart both jobs and runs of one job."""
        return f"{self.name_tag}-{zlib.crc32(self.uid.encode()):08x}"

    @property
    def name_tag(self) -> str:
        """The part of `mark` that all runs of this job share."""
        return f"{zlib.crc32(self.name.encode()):08x}"


def _find_script_path() -> str:
    """The absolute path of the program that runs; of an interactive session, its working folder."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(file).resolve() if file else Path.cwd())


@dataclass(frozen=True)
class Environment:
    """A rank's place in the job. Without a launcher: one rank, no runtime folder."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Which of this worker's ranks it is."""
    device_index: int = 0
    """Number of its GPU among those that it sees: LOCAL_RANK, as the script reads it."""
    round: int = 0
    runtime: RuntimeFolder | None = None
    """None: no launcher is there, or this process is not the rank but a child of it, and nothing is recorded."""
    checkpoint_path: Path | None = None
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: none but those that are asked for."""
    checkpoint_keep: int = 3
    checkpoint_adopt: str = ""
    """Name of another job whose checkpoints this one takes over; "": of none."""
    checkpoint_read_only: bool = False
    """Whether checkpoints are only read, as by an evaluation."""
    job: JobIdentity = JobIdentity()
    worker: str = ""
    """Name of this worker's pod; "": it has none."""
    node: str = ""
    """Where it runs; "": that is not known."""
    address: str = ""
    """Of the worker, where other workers reach it; "": they do not."""
    peer_replica_megabytes: int = 200
    """A second, that this worker's ranks send at most of their snapshots to another node; 0: they send none."""
    native: bool = True
    """Whether what is repeated in each step may be done in C (`observe/fast.py`)."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        """Raises InputError that names the variable which is no number."""
        path = variables.get("PACEKEEPER_CHECKPOINT_PATH")
        megabytes = _read_integer(variables, _PEER_REPLICA_VARIABLE, cls.peer_replica_megabytes)
        if megabytes < 0:
            raise InputError(
                f"{_PEER_REPLICA_VARIABLE}={megabytes}: give the megabytes a second that snapshots may take of the "
                "network on their way to another node, or 0 for none"
            )
        runtime = RuntimeFolder.from_environment(variables) if variables.get("PACEKEEPER_RUNTIME") else None
        device_index = _read_integer(variables, "LOCAL_RANK", 0)
        local_rank = _read_integer(variables, "PACEKEEPER_LOCAL_RANK", device_index)
        return cls(
            rank=_read_integer(variables, "RANK", 0),
            world_size=_read_integer(variables, "WORLD_SIZE", 1),
            local_rank=local_rank,
            device_index=device_index,
            round=_read_integer(variables, "PACEKEEPER_ROUND", 0),
            runtime=runtime if runtime is not None and runtime.is_rank_process(local_rank) else None,
            checkpoint_path=Path(path) if path else None,
            checkpoint_every=_read_integer(variables, "PACEKEEPER_CHECKPOINT_EVERY", 0),
            checkpoint_keep=_read_integer(variables, "PACEKEEPER_CHECKPOINT_KEEP", 3),
            checkpoint_adopt=variables.get("PACEKEEPER_CHECKPOINT_ADOPT", ""),
            checkpoint_read_only=_read_integer(variables, "PACEKEEPER_CHECKPOINT_READ_ONLY", 0) != 0,
            job=JobIdentity.from_variables(variables),
            worker=variables.get("PACEKEEPER_WORKER", ""),
            node=variables.get("PACEKEEPER_NODE", ""),
            address=variables.get("PACEKEEPER_POD_IP", ""),
            peer_replica_megabytes=megabytes,
            native=_read_integer(variables, "PACEKEEPER_NATIVE", 1) != 0,
        )


def _read_integer(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name) or str(default)
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{name}={text!r} is not a whole number; the launcher sets it, unset it otherwise") from error
