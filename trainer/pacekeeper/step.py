"""One optimizer step of the job, as the training script sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .loader import Draw

if TYPE_CHECKING:
    from .job import Job


class Step:
    """What `Job.steps` yields."""

    def __init__(self, job: Job, number: int, draw: Draw, microbatches: Iterator[Any]) -> None:
        self.number = number
        """Of this step, from 1: the job has completed so many when this one is complete."""
        self.samples = draw.samples
        """Of this rank."""
        self.weight = 0.0
        """Of this rank's samples; their number where the loader has no `weight`."""
        self._job = job
        self._draw = draw
        self._left = draw.microbatches
        self._batches = microbatches
        self._loss: torch.Tensor | None = None
        self._sum: tuple[dist.Work, torch.Tensor] | None = None
        self._total = 0.0
        self._weigh()

    @property
    def total_weight(self) -> float:
        """What the loss sums are to be divided by: the weight of the whole global batch, over all ranks."""
        if self._sum is not None:
            work, total = self._sum
            self._sum = None
            self._job.agreement.wait(work)
            self._total = float(total.item())
        return self._total

    def microbatches(self) -> Iterator[Any]:
        """This rank's share of the batch. Gradients are added up, and reduced over the ranks with the last one."""
        while self._left:
            batch = next(self._batches)
            self._left -= 1
            self._job.synchronise_gradients(self._left == 0)
            yield batch

    def add_loss(self, loss: torch.Tensor) -> None:
        """Reports the sum of the losses of a microbatch, for `Job.loss`, metrics and the operator.

        On a GPU the end of the step waits for it, so leave it out on most steps there.
        """
        self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def due(self, name: str, every: int) -> bool:
        """Whether `name` ("eval", say) is to happen now, on all ranks alike: each `every` steps."""
        if every < 1:
            raise ValueError(f"every={every} of {name!r} must be at least 1 step")
        return self.number % every == 0

    def checkpoint(self) -> None:
        """Takes the checkpoint here where one is due; otherwise the end of the step does."""
        self._job.checkpoint_if_due()

    @property
    def loss_sum(self) -> float | None:
        """Sum of this rank's reported losses; None: none was reported."""
        return None if self._loss is None else float(self._loss.item())

    def finish(self) -> None:
        """Raises RuntimeError where the script left microbatches out: its peers would wait for their gradients."""
        if self._left:
            raise RuntimeError(
                f"step {self.number}: {self._left} of {self._draw.microbatches} microbatches were not used; "
                "iterate over step.microbatches() to the end"
            )
        _ = self.total_weight  # where the script did not ask for it, the peers did

    def _weigh(self) -> None:
        weigh = self._job.loader.weight
        if weigh is None:
            self.weight = float(self.samples)
            self._total = float(self._job.loader.global_batch_size)
            return
        batches = list(self._batches)
        self._batches = iter(batches)
        self.weight = float(sum(float(weigh(batch)) for batch in batches))
        total = torch.tensor([self.weight], dtype=torch.float64)
        self._sum = (self._job.agreement.start_sum(total), total)
