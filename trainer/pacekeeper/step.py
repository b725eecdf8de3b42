"""One optimizer step of a rank, as the training script sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pacekeeper_analysis.errors import InputError

from .data.loader import StepBatch


class StepPeers(Protocol):
    """What a step asks of the ranks that it has to do with."""

    def synchronize_gradients(self, wanted: bool) -> None:
        """Whether the next backward pass reduces gradients or only adds them up."""

    def computing(self) -> None:
        """The step's last forward pass is under way: what the ranks have to agree on may be exchanged now."""

    def total_weight(self, weight: float | None, samples: int) -> tuple[dist.Work, torch.Tensor] | float:
        """Of the batch that the gradient is the mean over, or what will have it when it is waited for.

        weight: of this rank's part; None: its samples count.
        """

    def wait(self, work: dist.Work) -> None: ...

    def due(self, step: Step, name: str, every: int) -> bool: ...

    def checkpoint_if_due(self) -> None: ...


class Step:
    """What `Job.steps` yields."""

    def __init__(self, peers: StepPeers, number: int, draw: StepBatch, microbatches: Iterator[Any]) -> None:
        self.number = number
        """Of this step, from 1: the job has completed so many when this one is complete. In Local-SGD modes, where
        ranks make different numbers of steps, this rank's count from the last synchronisation on."""
        self.samples = draw.samples
        """Of this rank."""
        self.weight = float(draw.samples) if draw.weight is None else draw.weight
        """Of this rank's samples; their number where the loader has no `weight`."""
        self.lengths = draw.lengths or (None if draw.weight is None else (draw.weight, 0.0))
        """Of this rank's samples, and their squares, in sum (0: only the `weight` is known); None: nothing is known."""
        self._peers = peers
        self._draw = draw
        self._used = self._passed = 0
        self._batches = microbatches
        self._loss: torch.Tensor | None = None
        self._total = peers.total_weight(draw.weight, draw.samples)

    def microbatches(self) -> Iterator[Any]:
        """This rank's share of the batch. Gradients are added up, and reduced over the ranks with the last one."""
        while self._used < self._draw.microbatches:
            batch = next(self._batches)
            self._used += 1
            self._peers.synchronize_gradients(self._used == self._draw.microbatches)
            yield batch

    def backward(self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Adds the gradient of this microbatch's part of the batch's mean loss.

        loss: the sum of the microbatch's losses (over its samples, or what the loader's `weight` counts), several of
        one model added up. It is reported, as by `add_loss`.
        scaler: by which float16's gradients are scaled; `scaler.step(optimizer)` then steps.
        Raises RuntimeError where a microbatch before this one had no backward pass.
        """
        if self._used > self._passed + 1 or not self._used:
            raise RuntimeError(
                f"step {self.number}: a backward pass behind {self._used} microbatches, {self._passed} of which had "
                "theirs; call step.backward(loss) in the loop over step.microbatches(), for each of them"
            )
        self._passed = self._used
        self.add_loss(loss)
        mean = loss / self.total_weight
        (mean if scaler is None else scaler.scale(mean)).backward()

    @property
    def total_weight(self) -> float:
        """For scripts that call `loss.backward()` themselves: what the sum of a microbatch's losses is divided by then,
        the weight of the whole batch that the gradient is the mean over.

        In Sync, that is the global batch, over all ranks; in Local-SGD modes the part of this rank's replica. Infinite
        for a microbatch that only stands in so that the ranks of a sharded replica run equally many.
        """
        weight = math.inf if self._is_padding else self.batch_weight
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

    def add_loss(self, loss: torch.Tensor) -> None:
        """Reports the sum of the losses of a microbatch, for `Job.loss`, metrics and the operator: `backward` does so
        itself.

        From a GPU it comes to the host a step or two later, and nothing waits for it.
        """
        if not self._is_padding:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def due(self, name: str, every: int) -> bool:
        """Whether `name` ("eval", say) is to happen now, on all ranks alike: each `every` steps of the job.

        Ask when the optimizer has stepped, on the ranks that want to know: on one of them alone, if you like. In
        Local-SGD modes the answer is yes at the next synchronisation, and the parameters are the same on all ranks
        then; what is asked for the first time at a synchronisation is due at the one after it. Who asks before the
        optimizer has stepped gets a RuntimeError from `optimizer.step`.
        """
        if every < 1:
            raise InputError(f"every={every} of {name!r} must be at least 1 step")
        return self._peers.due(self, name, every)

    def checkpoint(self) -> None:
        """Takes the checkpoint here where one is due; otherwise the end of the step does. On all ranks, or on none."""
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
        if 0 < self._passed < count:
            raise RuntimeError(f"step {self.number}: the last of {count} microbatches had no backward pass")
        _ = self.batch_weight  # where the script did not ask for it, the peers did

    @property
    def _is_padding(self) -> bool:
        return 0 < self._used <= self._draw.microbatches and self._draw.sizes[self._used - 1] == 0
