"""One optimizer step of a rank, as the training script sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .data.loader import Draw, Weight


class Peers(Protocol):
    """What a step asks of the ranks that it has to do with."""

    def synchronise_gradients(self, wanted: bool) -> None:
        """Whether the next backward pass reduces gradients or only adds them up."""

    def computing(self) -> None:
        """The step's last forward pass is under way: what concerns the ranks' common course may be exchanged now."""

    def total_weight(self, weight: float | None, samples: int) -> tuple[dist.Work, torch.Tensor] | float:
        """Of the batch that the gradient is the mean over, or what will have it when it is waited for.

        weight: of this rank's part; None: its samples count.
        """

    def wait(self, work: dist.Work) -> None: ...

    def due(self, step: Step, every: int) -> bool: ...

    def checkpoint_if_due(self) -> None: ...


class Step:
    """What `Job.steps` yields."""

    def __init__(
        self, peers: Peers, number: int, draw: Draw, microbatches: Iterator[Any], weigh: Weight | None
    ) -> None:
        self.number = number
        """Of this step, from 1: the job has completed so many when this one is complete. In Local-SGD modes, where
        ranks make different numbers of steps, this rank's count from the last synchronisation on."""
        self.samples = draw.samples
        """Of this rank."""
        self.weight = float(draw.samples)
        """Of this rank's samples; their number where the loader has no `weight`."""
        self.lengths = draw.lengths
        """Of this rank's samples, and their squares, in sum (0: only the `weight` is known); None: nothing is known."""
        self._peers = peers
        self._draw = draw
        self._used = 0
        self._batches = microbatches
        self._loss: torch.Tensor | None = None
        if weigh is not None:
            batches = list(microbatches)
            self._batches = iter(batches)
            counted = (batch for batch, size in zip(batches, draw.sizes, strict=True) if size)
            self.weight = float(sum(float(weigh(batch)) for batch in counted))
            self.lengths = self.lengths or (self.weight, 0.0)
        self._total = peers.total_weight(None if weigh is None else self.weight, draw.samples)

    @property
    def total_weight(self) -> float:
        """What the loss sums are to be divided by: the weight of the whole batch that the gradient is the mean over.

        In Sync, that is the global batch, over all ranks; in Local-SGD modes the part of this rank's replica. Infinite
        for a microbatch that only stands in so that the ranks of a sharded replica run equally many.
        """
        weight = math.inf if self._stands_in else self.batch_weight
        if self._used == self._draw.microbatches:  # the loss is divided by this, so the forward pass has begun
            self._peers.computing()
        return weight

    @property
    def batch_weight(self) -> float:
        """Of the whole batch that the gradient is the mean over."""
        if not isinstance(self._total, float):
            work, total = self._total
            self._peers.wait(work)
            self._total = float(total.item())
        return self._total

    def microbatches(self) -> Iterator[Any]:
        """This rank's share of the batch. Gradients are added up, and reduced over the ranks with the last one."""
        while self._used < self._draw.microbatches:
            batch = next(self._batches)
            self._used += 1
            self._peers.synchronise_gradients(self._used == self._draw.microbatches)
            yield batch

    def add_loss(self, loss: torch.Tensor) -> None:
        """Reports the sum of the losses of a microbatch, for `Job.loss`, metrics and the operator.

        From a GPU it comes to the host a step or two later, and nothing waits for it.
        """
        if not self._stands_in:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def due(self, name: str, every: int) -> bool:
        """Whether `name` ("eval", say) is to happen now, on all ranks alike: each `every` steps of the job.

        Ask when the optimizer has stepped. In Local-SGD modes the answer is yes at the next synchronisation, which
        then happens before it is given: the parameters are the same on all ranks.
        """
        if every < 1:
            raise ValueError(f"every={every} of {name!r} must be at least 1 step")
        return self._peers.due(self, every)

    def checkpoint(self) -> None:
        """Takes the checkpoint here where one is due; otherwise the end of the step does."""
        self._peers.checkpoint_if_due()

    @property
    def loss_sum(self) -> torch.Tensor | None:
        """Sum of this rank's reported losses, of one element, where it was computed; None: none was reported."""
        return self._loss

    def finish(self) -> None:
        """Raises RuntimeError where the script left microbatches out: its peers would wait for their gradients."""
        count = self._draw.microbatches
        if self._used < count:
            raise RuntimeError(
                f"step {self.number}: {count - self._used} of {count} microbatches were not used; "
                "iterate over step.microbatches() to the end"
            )
        _ = self.batch_weight  # where the script did not ask for it, the peers did

    @property
    def _stands_in(self) -> bool:
        return 0 < self._used <= self._draw.microbatches and self._draw.sizes[self._used - 1] == 0
