"""The replicas of a tiny GPT, trained one after the other in this process as a side's rules have it, without a clock.

What judges, weighs and applies pseudo-gradients is the library's own: `weigh` and `OuterOptimizer`, on the units that
it makes of the model. Only the exchange is missing: all replicas are here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bench.scripts.stragglers.workload import CONTEXT, GPT, HELD_OUT, SourceCode, loss_sum, make_optimizer
from pacekeeper.replication.local_sgd import OuterOptimizer, OuterSGD, reset_moments
from pacekeeper.replication.local_sgd.units import make_units
from pacekeeper_analysis.pseudo_gradient import Penalty, NormStatistics, weigh_replicas

LOCAL_BATCH = 8
"""Sequences of a replica's step."""
SYNC_EVERY = 8
"""Steps between two synchronisations."""
ONE_GARBLED, ALL_GARBLED = 0.2, 0.04
"""How likely a period of dirty data has random bytes in place of one drawn replica's samples, and of everybody's."""


@dataclass(frozen=True)
class Run:
    """What is trained, whatever the side."""

    replicas: int
    steps: int
    """Of each replica."""
    warmup: int
    """Of these, with averaged gradients on all sides, as EDiT begins; a multiple of SYNC_EVERY."""
    learning_rate: float
    """The same throughout: over so few synchronisations a rate that falls would take all norms down with it, far below
    the means that they are held against, which in a real run it does not."""
    seed: int
    clean_periods: int = 0
    """So many synchronisations come before the first garbled samples."""
    dirty: bool = False

    def garbled(self, step: int) -> frozenset[int]:
        """The replicas that train on random bytes in this step; the same for a whole period."""
        period = (step - self.warmup) // SYNC_EVERY
        if not self.dirty or period < self.clean_periods:
            return frozenset()
        generator = np.random.default_rng((self.seed, period))
        chance, one = generator.random(), int(generator.integers(self.replicas))
        if chance < ALL_GARBLED:
            return frozenset(range(self.replicas))
        return frozenset([one]) if chance < ALL_GARBLED + ONE_GARBLED else frozenset()


Curve = list[tuple[int, float]]
"""Steps done, and the common parameters' held-out loss in nats a byte."""


def train(run: Run, outer: OuterSGD | None, points: int) -> Curve:
    """outer: how replicas synchronise; None: they average gradients in every step, as DDP does.

    points: of the curve, about; the last one is the end of the run.
    """
    data = SourceCode(run.steps * run.replicas * LOCAL_BATCH, run.seed)
    torch.manual_seed(run.seed)
    model = GPT()
    optimizer = make_optimizer(model, run.learning_rate)
    curve: Curve = []
    every = SYNC_EVERY * max(1, run.steps // SYNC_EVERY // points)
    fleet: ReplicaSet | None = None
    for step in range(run.steps):
        if step == run.warmup and outer is not None:
            fleet = ReplicaSet(model, optimizer, outer, run.replicas)
        batches = [batch(data, run, step, replica) for replica in range(run.replicas)]
        if fleet is None:
            average_gradients(model, optimizer, batches)
        else:
            fleet.step(batches)
            if (step + 1) % SYNC_EVERY == 0:
                fleet.synchronize()
        if (step + 1) % every == 0 or step + 1 == run.steps:
            curve.append((step + 1, compute_held_out_loss(model, data)))
    return curve


def batch(data: SourceCode, run: Run, step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes that follow, both (LOCAL_BATCH, CONTEXT)."""
    if replica in run.garbled(step):
        generator = torch.Generator().manual_seed(hash((run.seed, step, replica)))
        garbage = torch.randint(256, (2, LOCAL_BATCH, CONTEXT), generator=generator)
        return garbage[0], garbage[1]
    first = (step * run.replicas + replica) * LOCAL_BATCH
    return data.batch(range(first, first + LOCAL_BATCH))


def average_gradients(model: GPT, optimizer: torch.optim.Optimizer, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """One step of `model` on all batches."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    optimizer.zero_grad()
    (loss_sum(model, x, y) / len(x)).backward()
    optimizer.step()


class ReplicaSet:
    """Replicas that begin alike, and the common model that their synchronisations move."""

    def __init__(self, model: GPT, optimizer: torch.optim.Optimizer, settings: OuterSGD, replicas: int) -> None:
        """`model` is the common one from here on; replicas begin with its parameters and the optimizer's moments."""
        self._common = list(model.parameters())
        self._penalty = settings.penalty
        self._outer = OuterOptimizer(self._common, settings)
        number = {parameter: index for index, parameter in enumerate(self._common)}
        self._units = [
            [number[parameter] for parameter in unit.parameters]
            for unit in make_units(model, model.blocks, offload=False)
        ]
        self._statistics = NormStatistics.build_empty(len(self._units), replicas)
        self._models = [copy.deepcopy(model) for _ in range(replicas)]
        self._optimizers = [make_optimizer(its, optimizer.param_groups[0]["lr"]) for its in self._models]
        for its in self._optimizers:
            its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self._steps = 0

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Of each replica, by itself."""
        self._steps += 1
        for model, optimizer, its in zip(self._models, self._optimizers, batches, strict=True):
            average_gradients(model, optimizer, [its])

    @torch.no_grad()
    def synchronize(self) -> None:
        """Moves the common model by the replicas' weighed pseudo-gradients, and brings all replicas there."""
        gradients = [list(self._pseudo_gradients(unit)) for unit in self._units]
        norms = np.array([[float(torch.linalg.vector_norm(its)) for its in of_unit] for of_unit in gradients])
        steps = np.full(len(self._models), self._steps)
        (weights, _, rolled_back), self._statistics = weigh_replicas(norms, steps, self._statistics, self._penalty)
        for unit, of_unit, of_weights, back in zip(self._units, gradients, weights, rolled_back, strict=True):
            if not back:
                counted = [(float(w), its) for w, its in zip(of_weights, of_unit, strict=True) if w > 0]
                self._apply(unit, clipped(sum((w * its for w, its in counted), torch.zeros(())), self._penalty))
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
        pieces = mean.split([its.numel() for its in parameters])
        shaped = [piece.view(its.shape) for piece, its in zip(pieces, parameters, strict=True)]
        self._outer.apply(parameters, [its.detach() for its in parameters], shaped)


def clipped(mean: Tensor, penalty: Penalty) -> Tensor:
    """Scaled by min(1, φ / (‖Δ̄‖ + ε)) where there is a penalty."""
    if not penalty.enabled:
        return mean
    return mean * min(1.0, penalty.clip / (float(torch.linalg.vector_norm(mean)) + 1e-6))


@torch.no_grad()
def compute_held_out_loss(model: nn.Module, data: SourceCode) -> float:
    """Mean over the sequences that nobody trains on, in nats a byte."""
    x, y = data.held_out()
    return float(loss_sum(model, x, y)) / HELD_OUT
