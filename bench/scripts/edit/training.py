"""The replicas of a tiny GPT, trained one after the other in this process as a side's rules have it, without a clock.

What checks, weighs and applies pseudo-gradients is the library's own: `weigh` and `OuterOptimizer`, on the units that
it makes of the model. Only the exchange is missing: all replicas are here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bench.scripts.stragglers.workload import (
    CONTEXT,
    GPT,
    HELD_OUT_SEQUENCES,
    SourceCode,
    compute_loss_sum,
    make_optimizer,
)
from pacekeeper.replication.local_sgd import OuterOptimizer, OuterSGD, reset_moments
from pacekeeper.replication.local_sgd.sync_units import make_units
from pacekeeper_analysis.stragglers.pseudo_gradient import NormStatistics, Penalty, weigh_replicas

LOCAL_BATCH = 8
"""Sequences of a replica's step."""
SYNC_EVERY = 8
"""Steps between two synchronizations."""
ONE_GARBLED, ALL_GARBLED = 0.2, 0.04
"""The probability that dirty data replaces one drawn replica's samples by random bytes, and all replicas'."""


@dataclass(frozen=True)
class Run:
    """What is trained on every side."""

    replicas: int
    steps: int
    """Of each replica."""
    warmup: int
    """Of these, with averaged gradients on all sides, as EDiT begins; a multiple of SYNC_EVERY."""
    learning_rate: float
    """The same throughout: over so few synchronizations a rate that falls would take all norms down with it, far below
    the means that they are held against, which in a real run it does not."""
    seed: int
    clean_periods: int = 0
    """Synchronizations before the first garbled samples."""
    dirty: bool = False

    def draw_garbled_replicas(self, step: int) -> frozenset[int]:
        """The replicas that train on random bytes in this step; the same for a whole period."""
        period = (step - self.warmup) // SYNC_EVERY
        if not self.dirty or period < self.clean_periods:
            return frozenset()
        generator = np.random.default_rng((self.seed, period))
        draw, replica = generator.random(), int(generator.integers(self.replicas))
        if draw < ALL_GARBLED:
            return frozenset(range(self.replicas))
        return frozenset([replica]) if draw < ALL_GARBLED + ONE_GARBLED else frozenset()


Curve = list[tuple[int, float]]
"""Steps done, and the common parameters' held-out loss in nats a byte."""


def train_side(run: Run, outer: OuterSGD | None, points: int) -> Curve:
    """outer: how replicas synchronize; None: they average gradients in every step, as DDP does.

    points: of the curve, about; the last one is the end of the run.
    """
    data = SourceCode(run.steps * run.replicas * LOCAL_BATCH, run.seed)
    torch.manual_seed(run.seed)
    model = GPT()
    optimizer = make_optimizer(model, run.learning_rate)
    curve: Curve = []
    curve_interval = SYNC_EVERY * max(1, run.steps // SYNC_EVERY // points)
    replica_set: ReplicaSet | None = None
    for step in range(run.steps):
        if step == run.warmup and outer is not None:
            replica_set = ReplicaSet(model, optimizer, outer, run.replicas)
        batches = [make_batch(data, run, step, replica) for replica in range(run.replicas)]
        if replica_set is None:
            average_gradients(model, optimizer, batches)
        else:
            replica_set.step(batches)
            if (step + 1) % SYNC_EVERY == 0:
                replica_set.synchronize()
        if (step + 1) % curve_interval == 0 or step + 1 == run.steps:
            curve.append((step + 1, compute_held_out_loss(model, data)))
    return curve


def make_batch(data: SourceCode, run: Run, step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes that follow, both (LOCAL_BATCH, CONTEXT)."""
    if replica in run.draw_garbled_replicas(step):
        generator = torch.Generator().manual_seed(hash((run.seed, step, replica)))
        random_bytes = torch.randint(256, (2, LOCAL_BATCH, CONTEXT), generator=generator)
        return random_bytes[0], random_bytes[1]
    first = (step * run.replicas + replica) * LOCAL_BATCH
    return data.batch(range(first, first + LOCAL_BATCH))


def average_gradients(model: GPT, optimizer: torch.optim.Optimizer, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """One step of `model` on all batches."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer.zero_grad()
    (compute_loss_sum(model, x, y) / len(x)).backward()
    optimizer.step()


class ReplicaSet:
    """Replicas that begin alike, and the common model that their synchronizations move."""

    def __init__(self, model: GPT, optimizer: torch.optim.Optimizer, settings: OuterSGD, replicas: int) -> None:
        """`model` is the common one from here on; replicas begin with its parameters and the optimizer's moments."""
        self._common = list(model.parameters())
        self._penalty = settings.penalty
        self._outer = OuterOptimizer(self._common, settings)
        index_of = {parameter: index for index, parameter in enumerate(self._common)}
        self._units = [
            [index_of[parameter] for parameter in unit.parameters]
            for unit in make_units(model, model.blocks, offload=False)
        ]
        self._statistics = NormStatistics.build_empty(len(self._units), replicas)
        self._models = [copy.deepcopy(model) for _ in range(replicas)]
        self._optimizers = [make_optimizer(replica, optimizer.param_groups[0]["lr"]) for replica in self._models]
        for replica_optimizer in self._optimizers:
            replica_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self._steps = 0

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Of each replica, by itself."""
        self._steps += 1
        for model, optimizer, batch in zip(self._models, self._optimizers, batches, strict=True):
            average_gradients(model, optimizer, [batch])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Moves the common model by the replicas' weighed pseudo-gradients, and brings all replicas there."""
        gradients = [list(self._pseudo_gradients(unit)) for unit in self._units]
        norms = np.array(
            [[float(torch.linalg.vector_norm(gradient)) for gradient in unit_gradients] for unit_gradients in gradients]
        )
        steps = np.full(len(self._models), self._steps)
        (weights, _, rolled_back), self._statistics = weigh_replicas(norms, steps, self._statistics, self._penalty)
        for unit, unit_gradients, unit_weights, is_rolled_back in zip(
            self._units, gradients, weights, rolled_back, strict=True
        ):
            if not is_rolled_back:
                weighted = [
                    (float(weight), gradient)
                    for weight, gradient in zip(unit_weights, unit_gradients, strict=True)
                    if weight > 0
                ]
                self._apply(
                    unit,
                    clip_mean(
                        sum((weight * gradient for weight, gradient in weighted), torch.zeros(())), self._penalty
                    ),
                )
        for index, model in enumerate(self._models):
            if self._penalty.enabled and not np.isfinite(norms[:, index]).all():
                reset_moments(self._optimizers[index])
            for parameter, common in zip(model.parameters(), self._common, strict=True):
                parameter.copy_(common)
        self._steps = 0

    def _pseudo_gradients(self, unit: Sequence[int]) -> Iterator[Tensor]:
        """Of each replica, flat."""
        for model in self._models:
            parameters = list(model.parameters())
            yield torch.cat([(self._common[index] - parameters[index]).flatten() for index in unit])

    def _apply(self, unit: Sequence[int], mean: Tensor) -> None:
        parameters = [self._common[index] for index in unit]
        pieces = mean.split([parameter.numel() for parameter in parameters])
        shaped = [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]
        self._outer.apply(parameters, [parameter.detach() for parameter in parameters], shaped)


def clip_mean(mean: Tensor, penalty: Penalty) -> Tensor:
    """Scaled by min(1, φ / (‖Δ̄‖ + ε)) where there is a penalty."""
    if not penalty.enabled:
        return mean
    return mean * min(1.0, penalty.clip / (float(torch.linalg.vector_norm(mean)) + 1e-6))


@torch.no_grad()
def compute_held_out_loss(model: nn.Module, data: SourceCode) -> float:
    """Mean over the sequences that no replica trains on, in nats a byte."""
    x, y = data.held_out()
    return float(compute_loss_sum(model, x, y)) / HELD_OUT_SEQUENCES
