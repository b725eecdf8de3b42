"""What survives a rank: snapshots in a pod's memory, checkpoints on a job's volume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SavedState:
    """A saved state of a job. `progress`: of `Progress.state_dict`."""

    step: int
    round: int
    progress: Mapping[str, Any] = field(repr=False)


class CheckpointVolume:
    """A job's folder of checkpoints. As in the library, the newest round owns it."""

    def __init__(self, keep: int) -> None:
        self.checkpoints: list[SavedState] = []
        """Published checkpoints, oldest first."""
        self.owner: object | None = None
        """The round that may publish."""
        self.fails = False
        """Whether writes fail."""
        self.slow = 0.0
        """Additional seconds per checkpoint."""
        self._max_checkpoints = keep

    @property
    def newest(self) -> SavedState | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def publish(self, saved: SavedState) -> None:
        """Publish a checkpoint of the owner. Older ones beyond the limit are deleted."""
        others = [checkpoint for checkpoint in self.checkpoints if checkpoint.step != saved.step]
        self.checkpoints = sorted([*others, saved], key=lambda state: state.step)[-self._max_checkpoints :]

    def tear_newest(self) -> None:
        """Corrupt the newest checkpoint, so that it is never restored."""
        del self.checkpoints[-1:]
