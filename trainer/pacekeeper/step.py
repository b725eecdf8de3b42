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
    """What a step needs from the ranks that it works with."""

    def synchronize_gradients(self, enabled: bool) -> None:
        """Set whether the next backward pass reduces gradients (`enabled`) or only accumulates them."""

    def computing(self) -> None:
        """Signal that the last forward pass of the step runs: the exchange of rank reports may begin now."""

    def total_weight(self, weight: float | None, samples: int) -> tuple[dist.Work, torch.Tensor] | float:
        """Return the weight of the batch that the gradient is averaged over, or the pending sum of it.

        `weight`: weight of this rank's part. None: the number of its samples.
        """

    def wait(self, work: dist.Work) -> None: ...

    def due(self, step: Step, name: str, every: int) -> bool: ...

    def checkpoint_if_due(self) -> None: ...


class Step:
    """One optimizer step, which `Job.steps` yields."""

    def __init__(self, peers: StepPeers, number: int, batch: StepBatch, microbatches: Iterator[Any]) -> None:
        self.number = number
        """Number of this step, from 1.

        When it is complete, the job has completed this many steps. In Local-SGD modes ranks make different numbers of
        steps: this rank's own steps count from the last synchronization on.
        """
        self.samples = batch.samples
        """Samples of this rank."""
        self.weight = float(batch.samples) if batch.weight is None else batch.weight
        """Weight of this rank's samples; the number of samples if the loader has no `weight`."""
        self.lengths = batch.lengths or (None if batch.weight is None else (batch.weight, None))
        """Sums of lengths of this rank's samples and of their squares (None: only `weight` is known); None: unknown."""
        self._peers = peers
        self._draw = batch
        self._used = self._passed = 0
        self._batches = microbatches
        self._loss: torch.Tensor | None = None
        self._total = peers.total_weight(batch.weight, batch.samples)

    def microbatches(self) -> Iterator[Any]:
        """Yield this rank's share of the batch.

        Gradients accumulate; the last microbatch reduces them over the ranks.
        """
        while self._used < self._draw.microbatches:
            batch = next(self._batches)
            self._used += 1
            self._peers.synchronize_gradients(self._used == self._draw.microbatches)
            yield batch

    def backward(self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Add the gradient of this microbatch's part of the batch's mean loss.

        `loss`: sum of the microbatch's losses (over its samples, or over what the loader's `weight` counts). Several
        losses of one model are added up. It is reported as by `add_loss`.
        `scaler`: scaler of float16 gradients. Call `scaler.step(optimizer)` afterwards.

        Raises RuntimeError if an earlier microbatch had no backward pass.
        """
        if self._used > self._passed + 1 or not self._used:
            raise RuntimeError(
                f"step {self.number}: backward pass after {self._used} microbatches, of which only {self._passed} had "
                "one; call step.backward(loss) in the loop over step.microbatches(), for each of them"
            )
        self._passed = self._used
        self.add_loss(loss)
        mean = loss / self.total_weight
        (mean if scaler is None else scaler.scale(mean)).backward()

    @property
    def total_weight(self) -> float:
        """Divisor of the sum of a microbatch's losses, for scripts that call `loss.backward()` themselves.

        It is the weight of the whole batch that the gradient is averaged over. In Sync, that is the global batch over
        all ranks; in Local-SGD modes the part of this rank's replica. It is infinite for a padding microbatch, which
        exists only so that the ranks of a sharded replica run equally many.
        """
        weight = math.inf if self._is_padding else self.batch_weight
        if self._used == self._draw.microbatches:  # the loss is divided by this: the forward pass has begun
            self._peers.computing()
        return weight

    @property
    def batch_weight(self) -> float:
        """Weight of the whole batch that the gradient is averaged over."""
        if not isinstance(self._total, float):
            work, total = self._total
            self._peers.wait(work)
            self._total = float(total.item())
        return self._total

    def add_loss(self, loss: torch.Tensor) -> None:
        """Report the sum of the losses of a microbatch for `Job.loss`, metrics and the operator.

        `backward` calls it. A loss on a GPU reaches the host a step or two later; nothing waits for it.
        """
        if not self._is_padding:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def due(self, name: str, every: int) -> bool:
        """Return whether `name` (for example "eval") is due now on all ranks alike: every `every` steps of the job.

        Call it after the optimizer has stepped, on all ranks that need the answer; one is enough. In Local-SGD modes
        the answer is True at the next synchronization, when the parameters are the same on all ranks. A name that is
        first used at a synchronization is due at the one after it. After a call before the optimizer has stepped,
        `optimizer.step` raises RuntimeError.
        """
        if every < 1:
            raise InputError(f"every={every} of {name!r} must be at least 1 step")
        return self._peers.due(self, name, every)

    def checkpoint(self) -> None:
        """Write the checkpoint here if one is due, instead of at the end of the step.

        Call it on all ranks, or on none.
        """
        self._peers.checkpoint_if_due()

    @property
    def loss_sum(self) -> torch.Tensor | None:
        """Sum of this rank's reported losses: one element, on the device that computed it. None: none was reported."""
        return self._loss

    def finish(self) -> None:
        """Check that the script used all microbatches, without which other ranks would wait for gradients.

        Raises RuntimeError otherwise.
        """
        count = self._draw.microbatches
        if self._used < count:
            raise RuntimeError(
                f"step {self.number}: {count - self._used} of {count} microbatches were not used; "
                "iterate over step.microbatches() to the end"
            )
        if 0 < self._passed < count:
            raise RuntimeError(f"step {self.number}: the last of {count} microbatches had no backward pass")
        _ = self.batch_weight  # the sum is collective: wait for it even if the script did not read it

    @property
    def _is_padding(self) -> bool:
        return 0 < self._used <= self._draw.microbatches and self._draw.sizes[self._used - 1] == 0
