"""What survives a rank: snapshots in a pod's memory, checkpoints on a job's volume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import TrainingRound


@dataclass(frozen=True)
class SavedState:
    """A state of a job. `progress`: as `modes.progress.Progress` tells it."""

    step: int
    round: int
    progress: Mapping[str, Any] = field(repr=False)


class CheckpointVolume:
    """A job's folder of checkpoints, as `keep.checkpoints` treats it: the newest round owns it."""

    def __init__(self, keep: int) -> None:
        self.checkpoints: list[SavedState] = []
        """Published ones, oldest first."""
        self.owner: TrainingRound | None = None
        """The run that may publish."""
        self.fails = False
        """Nothing can be written there."""
        self.slow = 0.0
        """Seconds that each checkpoint takes longer."""
        self._max_checkpoints = keep

    @property
    def newest(self) -> SavedState | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def publish(self, kept: SavedState) -> None:
        """The owner does. Older ones beyond `keep` are forgotten."""
        others = [older for older in self.checkpoints if older.step != kept.step]
        self.checkpoints = sorted([*others, kept], key=lambda each: each.step)[-self._max_checkpoints :]

    def tear_newest(self) -> None:
        """Its files no longer have their checksums, so that nobody restores it."""
        del self.checkpoints[-1:]
