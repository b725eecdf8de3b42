"""The replicas of a model, which train by themselves and meet in synchronisations (EDiT, arXiv 2412.07210).

A synchronisation begins between two steps with one small exchange, from which every rank knows all weights, and goes
on unit by unit while the next forward pass runs: a unit's forward pass waits for its own all-reduce only, and those of
the next units are under way meanwhile. `finish` completes the rest at once.
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
from pacekeeper.observe.clock import Mark, WorkSpans, get_work_clock
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.pseudo_gradient import NormStatistics, ReplicaWeights, weigh_replicas

from .equalise import reset_moments
from .forward import ForwardPass
from .outer import OuterOptimizer
from .settings import OuterSGD
from .units import make_units


@dataclass
class Synchronization:
    """One synchronisation, as this rank saw it. Replicas are numbered by their rank in the sync group."""

    number: int
    """From 1."""
    units: tuple[str, ...]
    """Names, in the order of the arrays below."""
    steps: NDArray[np.float64]
    """[replicas] that each has done since the last one."""
    weights: NDArray[np.float64]
    """[units, replicas]"""
    replica_weights: NDArray[np.float64]
    """[replicas] mean over the units, by their size."""
    anomalous: tuple[int, ...]
    """Replicas whose pseudo-gradient did not count in one unit at least."""
    not_finite: tuple[int, ...]
    """Of these, the ones that have gone bad altogether: their inner moments are reset."""
    rolled_back: tuple[str, ...]
    """Units that went back to where they were, since no replica's pseudo-gradient was good."""
    started: Mark
    ended: Mark | None = None
    """The last unit is complete; None: it is pending."""
    blocked_spans: WorkSpans = field(default_factory=WorkSpans)
    nbytes: int = 0
    """That this rank gave into all-reduces."""

    @property
    def started_ns(self) -> int:
        """CLOCK_MONOTONIC, as `ended_ns`."""
        return self.started.ns

    @property
    def ended_ns(self) -> int:
        """0: it is pending, or the device is still at it."""
        return self.ended.ns if self.ended is not None and self.started.reached and self.ended.reached else 0

    @property
    def waited_ns(self) -> int:
        """That it held up this rank's work: exchange, what of the all-reduces no computation hid, updates. What the
        device has done of it by now."""
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
        """
        forward: of the model, with the units that are synchronised one at a time; its blocks, say. What none of them
        has is one more, and comes first. Parameters that need no gradient are left out.
        sync_group: ranks with the same position in their shard groups; every rank's parameters have the same shapes.
        shard_group: ranks that share this replica; None: it is whole.
        after: of the model whose units are complete before any of this one's is, so that all ranks launch the
        all-reduces of a group in one order, whichever model they call first; None: there is none.
        """
        self.settings = settings
        self._forward = forward
        self._model = forward.model
        _reshard_modules(self._model)
        self._units = make_units(self._model, forward.units, settings.offload)
        if not self._units:
            raise InputError("model: no parameter needs a gradient; there is nothing to synchronise")
        self.outer = OuterOptimizer([p for unit in self._units for p in unit.parameters], settings)
        """Its state belongs to a checkpoint; it is whole when nothing is pending."""
        self.last: Synchronization | None = None
        """The newest synchronisation; pending or complete."""
        self._sync_group = sync_group
        self._shard_group = shard_group
        self._predecessor = predecessor
        self._statistics = NormStatistics.build_empty(len(self._units), sync_group.size())
        self._number = 0
        self._weights: ReplicaWeights
        self._norm_bounds: NDArray[np.float64]
        self._incomplete_units: deque[int] = deque()
        """Units that are not complete, in order; the first `_launched` of them are under way."""
        self._launched = 0
        self._inner_optimizers: list[torch.optim.Optimizer] = []
        self._running = False
        forward.complete = self._complete_up_to

    @property
    def is_running(self) -> bool:
        """Whether the replicas train by themselves: between `start` and `stop`."""
        return self._running

    @property
    def is_pending(self) -> bool:
        """Whether a synchronisation has begun and not every unit is complete."""
        return bool(self._incomplete_units)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Tells which optimizer trains the model.

        It never steps with a synchronisation pending: whatever no forward pass has completed is completed before. Its
        moments are reset when this replica's parameters were not finite.
        """
        self._inner_optimizers.append(optimizer)
        optimizer.register_step_pre_hook(self._finish_before_step)

    def start(self) -> None:
        """From now on the replicas train by themselves. Their parameters must be the same now.

        Again, while running (parameters were loaded, say): these are the common ones now. Raises RuntimeError while a
        synchronisation is pending.
        """
        self._require_none_pending("start")
        _reshard_modules(self._model)
        for unit in self._units:
            unit.save_parameters()
        self._running = True

    def stop(self) -> None:
        """No more: frees the last common parameters. The outer momentum stays. Raises RuntimeError while pending."""
        self._require_none_pending("stop")
        self._running = False
        for unit in self._units:
            unit.free_parameters()

    def begin(self, steps: int, asynchronous: bool = False, samples: float | None = None) -> Synchronization:
        """Begins a synchronisation, between two steps. Collective over the replicas and their shards.

        steps: that this replica has done since the last one.
        asynchronous: replicas may have done different numbers of steps (A-EDiT).
        samples: that this replica (all its shards together) has used since then, or their weight, such as valid
        tokens; None: every step has used as many.
        One that is still pending is finished before. Units whose forward passes run in compiled code, or on some
        replica did not come since the last one, are complete when this returns: on all replicas alike, so that none is
        left waiting for what its peers launch later. Raises RuntimeError before `start`, or where the numbers of steps
        must be equal and are not.
        """
        self.finish()
        clock = get_work_clock()
        started = clock.mark()
        if not self._running:
            raise RuntimeError("begin(): start() comes first, while the parameters are the same on all replicas")
        _reshard_modules(self._model)
        begun, self._forward.begun_modules = self._forward.begun_modules, set()
        unseen = self._count_up_to({unit.module for unit in self._units} - begun)
        norms, done, used, unseen = self._exchange_norms(steps, steps if samples is None else samples, unseen)
        if not asynchronous and len(set(done.tolist())) > 1:
            raise RuntimeError(f"replicas did {done.tolist()} steps: only asynchronous ones may differ")
        self._weights, self._statistics = weigh_replicas(norms, done, self._statistics, self.settings.penalty, used)
        with np.errstate(invalid="ignore"):
            self._norm_bounds = np.where(self._weights.weights > 0, self._weights.weights * norms, 0).sum(axis=1)
        self._number += 1
        self.last = self._build_synchronization(norms, done, started)
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
        """Completes what is pending, now. Returns the newest synchronisation; None: there was none yet."""
        while self._incomplete_units:
            self._complete_first()
        return self.last

    def state_dict(self) -> dict[str, Any]:
        """What the penalty has learnt: the same on all ranks. The outer optimizer is apart."""
        return {"number": self._number, "statistics": self._statistics.to_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the same number of replicas and units; with others, the penalty learns anew."""
        self._number = state["number"]
        statistics = NormStatistics.from_dict(state["statistics"])
        fits = statistics.shape == self._statistics.shape
        self._statistics = statistics if fits else NormStatistics.build_empty(*self._statistics.shape)

    def reset(self) -> None:
        """Outer optimizer and penalty have learnt nothing yet."""
        self.outer.reset()
        self._number = 0
        self._statistics = NormStatistics.build_empty(*self._statistics.shape)

    def _complete_up_to(self, module: nn.Module) -> None:
        """Every unit that the forward pass of `module` needs, and those before it.

        A second call, when activation checkpointing computes the module again, finds nothing to do.
        """
        if not self._incomplete_units:
            return
        needed = {module, *_list_prefetched_modules(module)}
        self._complete_units(self._count_up_to(needed))
        if isinstance(module, FSDPModule):
            self._delay_gather(module)

    def _count_up_to(self, modules: set[nn.Module]) -> int:
        """Of the units, up to the last one that is one of these modules."""
        return max((number for number, unit in enumerate(self._units, 1) if unit.module in modules), default=0)

    def _complete_units(self, count: int) -> None:
        """The first `count` of them."""
        while self._incomplete_units and self._incomplete_units[0] < count:
            self._complete_first()

    def _delay_gather(self, module: FSDPModule) -> None:
        """FSDP2 gathers on streams of its own, which wait for updates of parameters only when a forward pass begins.

        module: perhaps one without parameters.
        """
        if self._units[0].device.type != "cpu":
            torch_internals.delay_gather(module, torch.accelerator.current_stream().record_event())

    def _finish_before_step(self, *_: Any) -> None:
        self.finish()

    @torch.no_grad()
    def _exchange_norms(
        self, steps: int, samples: float, unseen: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], int]:
        """Norms [units, replicas], steps [replicas], samples [replicas] and the largest `unseen`, from one all-gather.

        unseen: units up to the last one whose forward pass did not come on this replica.
        """
        squares = torch.stack([unit.compute_squared_norm().to(self._units[0].device) for unit in self._units])
        if self._shard_group is not None:
            dist.all_reduce(squares, group=self._shard_group)
        # Filled, not copied from the host, which would have to wait until the device has done all before it.
        counts = [squares.new_full((1,), number) for number in (steps, samples, unseen)]
        mine = torch.cat([squares.sqrt(), *counts])
        everybody = mine.new_empty(self._sync_group.size() * len(mine))
        dist.all_gather_into_tensor(everybody, mine, group=self._sync_group)
        table = everybody.view(-1, len(mine)).T.cpu().numpy()
        return table[:-3], table[-3], table[-2], int(table[-1].max())

    def _launch_ahead(self) -> None:
        """The all-reduces of the next units, `prefetch` of them."""
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
        """Completes the first unit that waits, and launches another one's all-reduce."""
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
            self._launch_ahead()  # before the update, so that the link has work meanwhile
            self._clip(mean, index)
            unit.apply(mean, self.outer)
        assert self.last is not None
        ended = clock.mark()
        self.last.blocked_spans.add(began, ended)
        if not self._incomplete_units:
            self.last.ended = ended
            self._forward.pending = False

    def _clip(self, mean: torch.Tensor, index: int) -> None:
        """Scales a unit's mean pseudo-gradient down to the norm φ.

        Its norm is at most Σ wᵢ Gᵢ, which every rank knows: mostly that is below φ, and no rank has to ask its shards.
        """
        penalty = self.settings.penalty
        if not penalty.enabled or self._norm_bounds[index] <= penalty.clip:
            return
        square = torch.linalg.vector_norm(mean, dtype=torch.float64).square()
        if self._shard_group is not None:
            dist.all_reduce(square, group=self._shard_group)
        mean.mul_((penalty.clip / (square.sqrt() + 1e-6)).clamp(max=1.0))  # on the device: the host goes on

    def _build_synchronization(self, norms: NDArray[np.float64], steps: NDArray[np.float64], started: Mark) -> Synchronization:
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
            rolled_back=tuple(name for name, back in zip(names, rolled_back, strict=True) if back),
            started=started,
        )

    def _require_none_pending(self, call: str) -> None:
        if self.is_pending:
            raise RuntimeError(f"{call}(): a synchronisation is pending; finish() comes first")


def _reshard_modules(model: nn.Module) -> None:
    """Frees gathered parameters (of a forward pass without backward, say): they are about to change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _list_prefetched_modules(module: nn.Module) -> set[nn.Module]:
    return torch_internals.list_prefetched_modules(module) if isinstance(module, FSDPModule) else set()
