"""Arguments of `init`, checked before a rank joins a process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import SYNC_MODES, SyncMode

from .checkpointing.storage.checkpoint_storage import CheckpointStorage
from .sync.training_config import TrainingConfig


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often checkpoints are written. A TrainingJob sets this in spec.checkpoint; use it without one."""

    path: Path | str
    """Folder that all workers share, or the URI of an object store such as s3://bucket/folder."""
    every: int = 100
    """Steps between checkpoints; 0: only on request."""
    keep: int = 3
    """Number of newest checkpoints to keep; older ones are deleted."""
    adopt: str = ""
    """Name of another job whose checkpoints this one takes over, as in the error that refuses its folder."""
    read_only: bool = False
    """Whether checkpoints are only read, for example in an evaluation.

    `restore` loads the newest checkpoint of any job, and a script may register a part of its objects. Nothing is
    written.
    """


@dataclass(frozen=True)
class JobSettings:
    """Validated arguments of `init`."""

    device: torch.device
    mesh: dict[str, int]
    """Sizes of both dimensions."""
    replica_ranks: int
    """The job can train without loss of exactness with any multiple of this number of ranks."""
    seed: int
    folder: CheckpointStorage | None
    """None: no checkpoints."""
    checkpoint_every: int
    """Steps between checkpoints; 0: never."""
    snapshot_every: int | None
    """Steps between snapshots. 0: never. None: as often as 1 % of the training time allows."""
    training_config: TrainingConfig | None
    """None: the script does not set it."""


def validate_training_config(sync_mode: str | None, sync_every: int, sync_seconds: float) -> TrainingConfig | None:
    """Return the training config of the script, None if it sets none. Raises InputError."""
    if sync_mode is None:
        return None
    if sync_mode not in SYNC_MODES:
        raise InputError(f"sync_mode={sync_mode!r} is unknown; take one of {', '.join(SYNC_MODES)}")
    if sync_every < 1 or not sync_seconds > 0:
        raise InputError(f"sync_every={sync_every} must be 1 step or more, sync_seconds={sync_seconds} above 0")
    return TrainingConfig(SyncMode(sync_mode), sync_every, sync_seconds)


def resolve_mesh_shape(mesh: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the sizes of both dimensions. Raises InputError if they do not fit the number of ranks."""
    unknown = mesh.keys() - {"sync", "shard"}
    if unknown:
        raise InputError(f'mesh: {sorted(unknown)} unknown; its dimensions are "sync" and "shard"')
    shape = {"sync": 1, "shard": 1} | dict(mesh)
    wildcards = [name for name, size in shape.items() if size == -1]
    if len(wildcards) == 2:
        raise InputError("mesh: only one dimension can be -1 (all that are left)")
    fixed_size = shape["sync"] * shape["shard"] if not wildcards else shape["sync"] * shape["shard"] * -1
    if fixed_size < 1 or (wildcards and world_size % fixed_size) or (not wildcards and fixed_size != world_size):
        raise InputError(f"mesh: {dict(mesh)} does not fit {world_size} ranks; use -1 for all that are left")
    if wildcards:
        shape[wildcards[0]] = world_size // fixed_size
    return shape


def count_replica_ranks(mesh: Mapping[str, int], world_size: int) -> int:
    """Return the ranks of one replica if `mesh` takes any number of replicas, otherwise all ranks of the job.

    In the second case, with fewer ranks there is no such mesh or no whole replica.
    """
    return mesh.get("shard", 1) if mesh.get("sync") == -1 else world_size
