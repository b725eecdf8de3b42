"""Settings that launcher and operator pass to a rank in its environment: one frozen object, read once."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pacekeeper_analysis.errors import InputError
from pacekeeper_rank.record_ring import may_take_ring

from .runtime_folder import RuntimeFolder

RANK_LEFT_EXIT_CODE = 143
"""Exit code of a rank that left on request (SIGTERM, suspend), after its checkpoint: 128 + SIGTERM."""

_PEER_REPLICA_VARIABLE = "PACEKEEPER_PEER_REPLICA_MEGABYTES"


@dataclass(frozen=True)
class JobIdentity:
    """The job that a process belongs to. Checkpoints carry it; another job may use them only if it asks to."""

    name: str = ""
    """`namespace/name` of a TrainingJob.

    Without an operator it is the absolute path of the script, so that a restarted script is the same job. "": unknown,
    and nothing is checked.
    """
    uid: str = ""
    """UID of the TrainingJob, or of one `pacekeeper run --local`. A recreated job has a new one. "": unknown."""

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> JobIdentity:
        name, namespace = variables.get("PACEKEEPER_JOB", ""), variables.get("PACEKEEPER_NAMESPACE", "")
        if name and namespace:
            return cls(f"{namespace}/{name}", variables.get("PACEKEEPER_JOB_UID", ""))
        # The runtime folder of a local run has a unique name, which all its rounds share.
        return cls(name or _find_script_path(), variables.get("PACEKEEPER_RUNTIME", ""))

    @property
    def file_tag(self) -> str:
        """A tag for file names that distinguishes jobs and runs of one job."""
        return f"{self.name_tag}-{zlib.crc32(self.uid.encode()):08x}"

    @property
    def name_tag(self) -> str:
        """The part of `file_tag` that all runs of this job share."""
        return f"{zlib.crc32(self.name.encode()):08x}"


def _find_script_path() -> str:
    """Return the absolute path of the running program, or the working folder of an interactive session."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path(file).resolve() if file else Path.cwd())


@dataclass(frozen=True)
class Environment:
    """A rank's place in the job. Without a launcher: one rank, no runtime folder."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the ranks of this worker."""
    device_index: int = 0
    """Number of its GPU among those that it sees: LOCAL_RANK, as the script reads it."""
    round: int = 0
    runtime: RuntimeFolder | None = None
    """None: there is no launcher, or this process is a child of the rank, and nothing is recorded."""
    checkpoint_path: Path | None = None
    checkpoint_uri: str = ""
    """URI of an object store that holds the checkpoints instead of `checkpoint_path`; "": none."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only on request."""
    checkpoint_keep: int = 3
    checkpoint_adopt: str = ""
    """Name of another job whose checkpoints this one takes over; "": none."""
    checkpoint_read_only: bool = False
    """Whether checkpoints are only read, for example by an evaluation."""
    job: JobIdentity = JobIdentity()
    worker: str = ""
    """Name of this worker's pod; "": unknown."""
    node: str = ""
    """Name of this worker's node; "": unknown."""
    address: str = ""
    """Address at which other workers reach this worker; "": none."""
    peer_replica_megabytes: int = 200
    """Megabytes per second of snapshots that this worker's ranks may send to another node; 0: they send none."""
    peer_saves: bool = False
    """Whether `pacekeeper.auto` keeps saves of torch.distributed.checkpoint in memory."""
    native: bool = True
    """Whether work of each step may run in C (`pacekeeper_rank/native_recorder.py`)."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        """Read the environment. Raises InputError that names a variable with an invalid number."""
        path = variables.get("PACEKEEPER_CHECKPOINT_PATH")
        megabytes = _read_integer(variables, _PEER_REPLICA_VARIABLE, cls.peer_replica_megabytes)
        if megabytes < 0:
            raise InputError(
                f"{_PEER_REPLICA_VARIABLE}={megabytes}: set the megabytes per second of the network that "
                "snapshots may take on their way to another node, or 0 for none"
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
            runtime=runtime if runtime is not None and may_take_ring(runtime.ring(local_rank)) else None,
            checkpoint_path=Path(path) if path else None,
            checkpoint_uri=variables.get("PACEKEEPER_CHECKPOINT_URI", ""),
            checkpoint_every=_read_integer(variables, "PACEKEEPER_CHECKPOINT_EVERY", 0),
            checkpoint_keep=_read_integer(variables, "PACEKEEPER_CHECKPOINT_KEEP", 3),
            checkpoint_adopt=variables.get("PACEKEEPER_CHECKPOINT_ADOPT", ""),
            checkpoint_read_only=_read_integer(variables, "PACEKEEPER_CHECKPOINT_READ_ONLY", 0) != 0,
            job=JobIdentity.from_variables(variables),
            worker=variables.get("PACEKEEPER_WORKER", ""),
            node=variables.get("PACEKEEPER_NODE", ""),
            address=variables.get("PACEKEEPER_POD_IP", ""),
            peer_replica_megabytes=megabytes,
            peer_saves=_read_integer(variables, "PACEKEEPER_PEER_SAVES", 0) != 0,
            native=_read_integer(variables, "PACEKEEPER_NATIVE", 1) != 0,
        )


def _read_integer(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name) or str(default)
    try:
        return int(text)
    except ValueError as error:
        raise InputError(f"{name}={text!r} is not an integer; the launcher sets it, unset it otherwise") from error
