"""What `init` is asked for, checked before a rank joins anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import SYNC_MODES, SyncMode

from .keep.checkpoints import CheckpointFolder
from .modes.course import TrainingConfig


@dataclass(frozen=True)
class Checkpoints:
    """Where checkpoints go, and how often. A TrainingJob says it in spec.checkpoint; here for scripts without one."""

    path: Path | str
    every: int = 100
    """Steps; 0: only those that are asked for."""
    keep: int = 3
    """The newest ones; older ones are deleted."""
    adopt: str = ""
    """Name of another job, as the refusal to use its folder says it: this one takes its checkpoints over."""
    read_only: bool = False
    """As for an evaluation: `restore` loads the newest checkpoint of whichever job, of which a part may be registered.
    Nothing is written."""


@dataclass(frozen=True)
class JobSettings:
    """What `init` was asked for, checked."""

    device: torch.device
    mesh: dict[str, int]
    """Both dimensions' sizes."""
    replica_ranks: int
    """The job trains as exactly with any multiple of so many ranks."""
    seed: int
    folder: CheckpointFolder | None
    """None: there are no checkpoints."""
    checkpoint_every: int
    """Steps; 0: never."""
    snapshot_every: int | None
    """Steps; 0: never; None: as often as 1 % of the training time allows."""
    training_config: TrainingConfig | None
    """None: the script says nothing."""


def validate_training_config(sync_mode: str | None, sync_every: int, sync_seconds: float) -> TrainingConfig | None:
    """None: the script says nothing. Raises InputError."""
    if sync_mode is None:
        return None
    if sync_mode not in SYNC_MODES:
        raise InputError(f"sync_mode={sync_mode!r} is unknown; take one of {', '.join(SYNC_MODES)}")
    if sync_every < 1 or not sync_seconds > 0:
        raise InputError(f"sync_every={sync_every} must be 1 step or more, sync_seconds={sync_seconds} above 0")
    return TrainingConfig(SyncMode(sync_mode), sync_every, sync_seconds)


def resolve_mesh_shape(mesh: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Both dimensions' sizes. Raises InputError where they do not fit the ranks."""
    unknown = mesh.keys() - {"sync", "shard"}
    if unknown:
        raise InputError(f'mesh: {sorted(unknown)} unknown; its dimensions are "sync" and "shard"')
    shape = {"sync": 1, "shard": 1} | dict(mesh)
    rest = [name for name, size in shape.items() if size == -1]
    if len(rest) == 2:
        raise InputError("mesh: only one dimension can be -1 (all that are left)")
    fixed = shape["sync"] * shape["shard"] if not rest else shape["sync"] * shape["shard"] * -1
    if fixed < 1 or (rest and world_size % fixed) or (not rest and fixed != world_size):
        raise InputError(f"mesh: {dict(mesh)} does not fit {world_size} ranks; use -1 for all that are left")
    if rest:
        shape[rest[0]] = world_size // fixed
    return shape


def count_replica_ranks(mesh: Mapping[str, int], world_size: int) -> int:
    """Ranks of one replica where `mesh` takes any number of replicas; else all ranks of the job: with fewer there would
    be no such mesh, or no whole replica would be left."""
    return mesh.get("shard", 1) if mesh.get("sync") == -1 else world_size
