"""Progress of the job."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .training_config import TrainingConfig


@dataclass
class Progress:
    """Counters of the job, exact at sync points.

    In Local-SGD modes a rank adds its own steps, each as a global batch.
    """

    step: int = 0
    """Completed steps of the job: the number of global batches in the samples that it has used."""
    samples: int = 0
    """Samples that the whole job has used."""
    answered_request: int = 0
    """The last checkpoint request that was answered."""
    training_config: TrainingConfig = field(default_factory=TrainingConfig)
    """Training config in force; its mode may lag behind the requested one."""
    own_samples: int = 0
    """This rank's part of `samples`."""
    global_batch: int = 0
    origin: int = 0
    """Samples from which global batches are counted: not 0 if an earlier round had another global batch."""
    _sync_point_step: int = 0
    _sync_point_samples: int = 0

    def begin_round(self, global_batch: int) -> None:
        """Prepare the counters for the first step of a round."""
        if global_batch != self.global_batch:
            self.origin = self.samples - self.step * global_batch
        self.global_batch = global_batch
        self._sync_point_step, self._sync_point_samples = self.step, self.samples

    def count_step(self, own_samples: int) -> None:
        """Count a step that this rank has completed."""
        self.step += 1
        self.samples += self.global_batch
        self.own_samples += own_samples

    def settle(self, used: int) -> None:
        """Set the exact counters at a sync point: all ranks together have used `used` samples since the last one."""
        self.samples = self._sync_point_samples = self._sync_point_samples + used
        self.step = self._sync_point_step = self.count_whole_batches(self.samples)

    @property
    def sync_point_step(self) -> int:
        """`step` at the last sync point."""
        return self._sync_point_step

    def count_whole_batches(self, samples: int) -> int:
        return (samples - self.origin) // self.global_batch

    def compute_samples_at(self, step: int) -> int:
        return self.origin + step * self.global_batch

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "samples": self.samples,
            "answered_request": self.answered_request,
            "training_config": asdict(self.training_config),
            "global_batch": self.global_batch,
            "origin": self.origin,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.samples, self.answered_request = state["step"], state["samples"], state["answered_request"]
        self.training_config = TrainingConfig.from_state(state["training_config"])
        self.global_batch, self.origin = state["global_batch"], state["origin"]
