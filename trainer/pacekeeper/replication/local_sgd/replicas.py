"""The replicas of a model, which train independently and synchronize periodically (EDiT, arXiv 2412.07210).

A synchronization begins between two steps with one small exchange, after which every rank has all weights. It continues
unit by unit during the next forward pass. A unit's forward pass waits only for its own all-reduce, while those of the
next units are in progress. `finish` completes the rest at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pacekeeper import torch_internals
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.stragglers.pseudo_gradient import NormStatistics, ReplicaWeights, weigh_replicas
from pacekeeper_rank.work_clock import Mark, WorkSpans, get_work_clock

from .equalize import reset_moments
from .forward import ForwardPass
from .outer_optimizer import OuterOptimizer
from .settings import OuterSGD
from .sync_units import make_units


@dataclass
class Synchronization:
    """One synchronization, as this rank saw it. Replicas are numbered by their rank in the sync group."""

    number: int
    """Number, from 1."""
    units: tuple[str, ...]
    """Names, in the order of the arrays below."""
    steps: NDArray[np.float64]
    """[replicas] steps of each since the last synchronization."""
    weights: NDArray[np.float64]
    """[units, replicas]"""
    replica_weights: NDArray[np.float64]
    """[replicas] mean over the units, weighted by their size."""
    anomalous: tuple[int, ...]
    """Replicas whose pseudo-gradient was excluded in at least one unit."""
    not_finite: tuple[int, ...]
    """Replicas whose pseudo-gradients are not finite: their inner optimizer states are reset."""
    rolled_back: tuple[str, ...]
    """Units that were reset to the last common parameters, because no replica's pseudo-gradient was valid."""
    started: Mark
    ended: Mark | None = None
    """End of the last unit; None: the synchronization is pending."""
    blocked_spans: WorkSpans = field(default_factory=WorkSpans)
    nbytes: int = 0
    """Bytes that this rank contributed to all-reduces."""

    @property
    def started_ns(self) -> int:
        """Start in ns of CLOCK_MONOTONIC, as `ended_ns`."""
        return self.started.ns

    @property
    def ended_ns(self) -> int | None:
        """End in ns; None: it is pending, or the device still works on it."""
        return self.ended.ns if self.ended is not None and self.started.reached and self.ended.reached else None

    @property
    def waited_ns(self) -> int:
        """Nanoseconds for which it blocked this rank's work, as far as the device has completed it.

        It consists of the exchange, the part of the all-reduces that no computation hid, and the updates.
        """
        return self.blocked_spans.ns


class Replicas:
    """This rank's replica (or its shard of one), and the others in its sync group."""

    def __init__(
        self,
        forward: ForwardPass,
        sync_group: dist.ProcessGroup,
        shard_group: dist.ProcessGroup | None,
        settings: OuterSGD,
        predecessor: Replicas | None = None,
    ) -> None:
        """Create the replica, not yet running.

        `forward`: forward pass of the model, with the units that are synchronized one at a time, for example its
        blocks. Parameters outside of them form one more unit, which comes first. Parameters that need no gradient are
        excluded.
        `sync_group`: ranks with the same position in their shard groups; every rank's parameters have the same shapes.
        `shard_group`: ranks that share this replica; None: it is not sharded.
        `predecessor`: replicas of the model whose units complete before those of this one, or None. All ranks then
        launch the all-reduces of a group in one order, whichever model they call first.
        """
        self.settings = settings
        self._forward = forward
        self._model = forward.model
        _reshard_modules(self._model)
        self._units = make_units(self._model, forward.units, settings.offload)
        if not self._units:
            raise InputError("model: no parameter needs a gradient; there is nothing to synchronize")
        self.outer = OuterOptimizer([p for unit in self._units for p in unit.parameters], settings)
        """Its state belongs to a checkpoint; it is consistent when nothing is pending."""
        self.last: Synchronization | None = None
        """The newest synchronization, pending or complete."""
        self._sync_group = sync_group
        self._shard_group = shard_group
        self._predecessor = predecessor
        self._statistics = NormStatistics.build_empty(len(self._units), sync_group.size())
        self._number = 0
        self._weights: ReplicaWeights
        self._norm_bounds: NDArray[np.float64]
        self._incomplete_units: deque[int] = deque()
        """Incomplete units, in order; the first `_launched` of them are in progress."""
        self._launched = 0
        self._inner_optimizers: list[torch.optim.Optimizer] = []
        self._running = False
        forward.complete = self._complete_up_to

    @property
    def is_running(self) -> bool:
        """Whether the replicas train independently: between `start` and `stop`."""
        return self._running

    @property
    def is_pending(self) -> bool:
        """Whether a synchronization has begun and not every unit is complete."""
        return bool(self._incomplete_units)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer that trains the model.

        It never steps while a synchronization is pending: units that no forward pass has completed are completed
        before. Its state is reset when this replica's parameters were not finite.
        """
        self._inner_optimizers.append(optimizer)
        optimizer.register_step_pre_hook(self._finish_before_step)

    def start(self) -> None:
        """Start independent training. All replicas must have the same parameters.

        A repeated call, for example after parameters were loaded, makes the present ones the common ones. Raises
        RuntimeError while a synchronization is pending.
        """
        self._require_none_pending("start")
        _reshard_modules(self._model)
        for unit in self._units:
            unit.save_parameters()
        self._running = True

    def stop(self) -> None:
        """Stop, and free the last common parameters. The outer momentum stays. Raises RuntimeError while pending."""
        self._require_none_pending("stop")
        self._running = False
        for unit in self._units:
            unit.free_parameters()

    def begin(self, steps: int, asynchronous: bool = False, samples: float | None = None) -> Synchronization:
        """Begin a synchronization between two steps. Collective over the replicas and their shards.

        `steps`: steps of this replica since the last one.
        `asynchronous`: replicas may have made different numbers of steps (A-EDiT).
        `samples`: samples that this replica (all its shards together) has used since then, or their weight, such as
        valid tokens. None: every step has used equally many.

        A pending synchronization is completed first. Some units are complete when this returns, on all replicas alike,
        so that none waits for what its peers launch later. These are units whose forward passes run in compiled code,
        or did not run on some replica since the last synchronization. Raises RuntimeError before `start`, or if the
        numbers of steps must be equal and are not.
        """
        self.finish()
        clock = get_work_clock()
        started = clock.mark()
        if not self._running:
            raise RuntimeError("begin(): call start() first, while the parameters are the same on all replicas")
        _reshard_modules(self._model)
        begun_modules, self._forward.begun_modules = self._forward.begun_modules, set()
        unseen = self._count_up_to({unit.module for unit in self._units} - begun_modules)
        norms, all_steps, all_samples, unseen = self._exchange_norms(
            steps, steps if samples is None else samples, unseen
        )
        if not asynchronous and len(set(all_steps.tolist())) > 1:
            raise RuntimeError(f"replicas made {all_steps.tolist()} steps: only asynchronous ones may differ")
        self._weights, self._statistics = weigh_replicas(
            norms, all_steps, self._statistics, self.settings.penalty, all_samples
        )
        with np.errstate(invalid="ignore"):
            self._norm_bounds = np.where(self._weights.weights > 0, self._weights.weights * norms, 0).sum(axis=1)
        self._number += 1
        self.last = self._build_synchronization(norms, all_steps, started)
        if self.settings.penalty.enabled and self._sync_group.rank() in self.last.not_finite:
            for optimizer in self._inner_optimizers:
                reset_moments(optimizer)
        self._incomplete_units.extend(range(len(self._units)))
        self._forward.pending = True
        self._launch_ahead()
        self.last.blocked_spans.add(started, clock.mark())
        self._complete_units(unseen)
        return self.last

    def finish(self) -> Synchronization | None:
        """Complete a pending synchronization, and return the newest one; None: there was none."""
        while self._incomplete_units:
            self._complete_first()
        return self.last

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the penalty: the same on all ranks. The outer optimizer's state is separate."""
        return {"number": self._number, "statistics": self._statistics.to_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the same number of replicas and units; with other numbers, the penalty is reset."""
        self._number = state["number"]
        statistics = NormStatistics.from_dict(state["statistics"])
        has_same_shape = statistics.shape == self._statistics.shape
        self._statistics = statistics if has_same_shape else NormStatistics.build_empty(*self._statistics.shape)

    def reset(self) -> None:
        """Reset outer optimizer and penalty to their initial state."""
        self.outer.reset()
        self._number = 0
        self._statistics = NormStatistics.build_empty(*self._statistics.shape)

    def _complete_up_to(self, module: nn.Module) -> None:
        """Complete every unit that the forward pass of `module` needs, and those before it.

        A second call, when activation checkpointing computes the module again, has no effect.
        """
        if not self._incomplete_units:
            return
        needed = {module, *_list_prefetched_modules(module)}
        self._complete_units(self._count_up_to(needed))
        if isinstance(module, FSDPModule):
            self._delay_gather(module)

    def _count_up_to(self, modules: set[nn.Module]) -> int:
        """Return the number of units up to the last one that is one of these modules."""
        return max((number for number, unit in enumerate(self._units, 1) if unit.module in modules), default=0)

    def _complete_units(self, count: int) -> None:
        """Complete the first `count` units."""
        while self._incomplete_units and self._incomplete_units[0] < count:
            self._complete_first()

    def _delay_gather(self, module: FSDPModule) -> None:
        """Delay FSDP2's gathering, whose streams wait for parameter updates only when a forward pass begins.

        `module` may have no parameters.
        """
        if self._units[0].device.type != "cpu":
            torch_internals.delay_gather(module, torch.accelerator.current_stream().record_event())

    def _finish_before_step(self, *_: Any) -> None:
        self.finish()

    @torch.no_grad()
    def _exchange_norms(
        self, steps: int, samples: float, unseen: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], int]:
        """Return norms [units, replicas], steps [replicas], samples [replicas] and the largest `unseen`.

        It takes one all-gather.

        `unseen`: units up to the last one whose forward pass did not run on this replica.
        """
        squares = torch.stack([unit.compute_squared_norm().to(self._units[0].device) for unit in self._units])
        if self._shard_group is not None:
            dist.all_reduce(squares, group=self._shard_group)
        # Filled, not copied from the host: a copy would wait until the device has completed all earlier work.
        counts = [squares.new_full((1,), number) for number in (steps, samples, unseen)]
        own_row = torch.cat([squares.sqrt(), *counts])
        gathered = own_row.new_empty(self._sync_group.size() * len(own_row))
        dist.all_gather_into_tensor(gathered, own_row, group=self._sync_group)
        table = gathered.view(-1, len(own_row)).T.cpu().numpy()
        return table[:-3], table[-3], table[-2], int(table[-1].max())

    def _launch_ahead(self) -> None:
        """Launch the all-reduces of the next units, up to `prefetch` of them."""
        while self._launched < min(self.settings.prefetch, len(self._incomplete_units)):
            self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        index = self._incomplete_units[self._launched]
        self._launched += 1
        if self._weights.rolled_back[index]:
            return
        unit = self._units[index]
        unit.launch(float(self._weights.weights[index, self._sync_group.rank()]), self._sync_group)
        assert self.last is not None
        self.last.nbytes += unit.nbytes

    @torch.no_grad()
    def _complete_first(self) -> None:
        """Complete the first waiting unit, and launch the all-reduce of another one."""
        if self._predecessor is not None:
            self._predecessor.finish()
        clock = get_work_clock()
        began = clock.mark()
        if self._launched == 0:
            self._launch_next()
        index = self._incomplete_units.popleft()
        self._launched -= 1
        unit = self._units[index]
        if self._weights.rolled_back[index]:
            unit.roll_back()
            self._launch_ahead()
        else:
            mean = unit.wait()
            self._launch_ahead()  # before the update, so that the link is busy during it
            self._clip(mean, index)
            unit.apply(mean, self.outer)
        assert self.last is not None
        ended = clock.mark()
        self.last.blocked_spans.add(began, ended)
        if not self._incomplete_units:
            self.last.ended = ended
            self._forward.pending = False

    def _clip(self, mean: torch.Tensor, index: int) -> None:
        """Scale a unit's mean pseudo-gradient down to the norm φ.

        Its norm is at most Σ wᵢ Gᵢ, which every rank can compute. Usually that is below φ, and no exchange between
        shards is needed.
        """
        penalty = self.settings.penalty
        if not penalty.enabled or self._norm_bounds[index] <= penalty.clip:
            return
        square = torch.linalg.vector_norm(mean, dtype=torch.float64).square()
        if self._shard_group is not None:
            dist.all_reduce(square, group=self._shard_group)
        mean.mul_((penalty.clip / (square.sqrt() + 1e-6)).clamp(max=1.0))  # on the device: the host does not wait

    def _build_synchronization(
        self, norms: NDArray[np.float64], steps: NDArray[np.float64], started: Mark
    ) -> Synchronization:
        weights, anomalous, rolled_back = self._weights
        sizes = np.array([unit.numel for unit in self._units], np.float64)
        names = tuple(unit.name for unit in self._units)
        return Synchronization(
            number=self._number,
            units=names,
            steps=steps,
            weights=weights,
            replica_weights=sizes @ weights / sizes.sum(),
            anomalous=tuple(np.flatnonzero(anomalous.any(axis=0)).tolist()),
            not_finite=tuple(np.flatnonzero(~np.isfinite(norms).all(axis=0)).tolist()),
            rolled_back=tuple(name for name, is_rolled_back in zip(names, rolled_back, strict=True) if is_rolled_back),
            started=started,
        )

    def _require_none_pending(self, call: str) -> None:
        if self.is_pending:
            raise RuntimeError(f"{call}(): a synchronization is pending; call finish() first")


def _reshard_modules(model: nn.Module) -> None:
    """Free gathered parameters (for example of a forward pass without backward), which are about to change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _list_prefetched_modules(module: nn.Module) -> set[nn.Module]:
    return torch_internals.list_prefetched_modules(module) if isinstance(module, FSDPModule) else set()
