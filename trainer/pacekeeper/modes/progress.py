"""How far the job is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .course import TrainingConfig


@dataclass
class Progress:
    """Exact at ordinals. In Local-SGD modes a rank counts its own steps on from there, each as a global batch."""

    step: int = 0
    """Completed steps of the job: as many global batches as it has used samples."""
    samples: int = 0
    """Used by the whole job."""
    answered_request: int = 0
    """The last checkpoint request that was answered."""
    training_config: TrainingConfig = field(default_factory=TrainingConfig)
    """In force; its mode may lag behind what is wanted."""
    own_samples: int = 0
    """This rank's part of `samples`."""
    global_batch: int = 0
    origin: int = 0
    """Samples from which on global batches are counted: not 0 where an earlier round had another global batch."""
    _sync_point_step: int = 0
    _sync_point_samples: int = 0

    def begin_round(self, global_batch: int) -> None:
        """The first step of a round is to come."""
        if global_batch != self.global_batch:
            self.origin = self.samples - self.step * global_batch
        self.global_batch = global_batch
        self._sync_point_step, self._sync_point_samples = self.step, self.samples

    def count_step(self, own_samples: int) -> None:
        """This rank has completed a step."""
        self.step += 1
        self.samples += self.global_batch
        self.own_samples += own_samples

    def settle(self, used: int) -> None:
        """An ordinal: all ranks together have used so many samples since the last one."""
        self.samples = self._sync_point_samples = self._sync_point_samples + used
        self.step = self._sync_point_step = self.count_whole_batches(self.samples)

    @property
    def sync_point_step(self) -> int:
        """`step` at the last ordinal."""
        return self._sync_point_step

    def count_whole_batches(self, samples: int) -> int:
        return (samples - self.origin) // self.global_batch

    def compute_samples_at(self, step: int) -> int:
        return self.origin + step * self.global_batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples": self.samples,
            "answered": self.answered_request,
            "course": asdict(self.training_config),
            "global_batch": self.global_batch,
            "origin": self.origin,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.samples, self.answered_request = state["step"], state["samples"], state["answered"]
        self.training_config = TrainingConfig.from_state(state["course"])
        self.global_batch, self.origin = state["global_batch"], state["origin"]
