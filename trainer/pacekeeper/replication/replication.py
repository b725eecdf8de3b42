"""The job's models on all ranks: the same after every step, or replicas that train independently and synchronize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pacekeeper_analysis.errors import InputError

from . import parallel
from .local_sgd import ForwardPass, OuterSGD, Replicas, Synchronization, equalize_replicas

_SYNC_DIMENSION, _SHARD_DIMENSION = "sync", "shard"


class Replication:
    """One rank's part in replication."""

    def __init__(self, rank: int, shape: Mapping[str, int], device: torch.device) -> None:
        """Create it without groups.

        `shape`: ranks in the dimensions "sync" and "shard"; shard groups consist of consecutive ranks.
        `device`: device that this rank trains on.
        """
        self.shape = dict(shape)
        self.is_local = False
        """Whether the replicas train independently."""
        self._rank = rank
        self._device = device
        self._models: list[_ReplicatedModel] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._outer = OuterSGD()
        self._replicas: list[Replicas] = []

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Mesh of both dimensions. The first access is collective."""
        ranks = torch.arange(self.shape[_SYNC_DIMENSION] * self.shape[_SHARD_DIMENSION]).view(
            self.shape[_SYNC_DIMENSION], self.shape[_SHARD_DIMENSION]
        )
        return DeviceMesh.from_group(
            [self.sync_group, self.shard_group],
            self._device.type,
            mesh=ranks,
            mesh_dim_names=(_SYNC_DIMENSION, _SHARD_DIMENSION),
        )

    @cached_property
    def sync_group(self) -> dist.ProcessGroup:
        """Group of the ranks that hold the same part of their replicas as this one."""
        position = self._rank % self.shape[_SHARD_DIMENSION]
        return _create_group(range(position, dist.get_world_size(), self.shape[_SHARD_DIMENSION]), _SYNC_DIMENSION)

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        """Group of the ranks that share this one's replica."""
        first = self._rank - self._rank % self.shape[_SHARD_DIMENSION]
        return _create_group(range(first, first + self.shape[_SHARD_DIMENSION]), _SHARD_DIMENSION)

    def create_groups(self) -> None:
        """Create the groups of a mesh that shards. Collective.

        Every such job needs them. They are created when all ranks come together, and split from NCCL's communicator,
        not while the first model is built.
        """
        if self.shape[_SHARD_DIMENSION] > 1:
            _ = self.mesh

    # Objects of the script

    def replicate(self, model: nn.Module, units: parallel.Units, options: Mapping[str, Any]) -> nn.Module:
        parallel.check_replicate_options(options)
        if self.shape[_SHARD_DIMENSION] > 1:
            raise InputError('mesh: it has "shard" ranks; use job.fully_shard(model, units=…), or leave "shard" out')
        forward = ForwardPass(model.to(self._device), units(model))
        return self._add_model(forward, parallel.replicate_model(model, options))

    def fully_shard(self, model: nn.Module, units: parallel.Units, options: Mapping[str, Any]) -> nn.Module:
        parallel.check_shard_options(options)
        modules = list(units(model))
        sharded = parallel.shard_model(model, self.mesh, modules, options)
        return self._add_model(ForwardPass(model, modules), sharded)

    def add_optimizer(self, optimizer: torch.optim.Optimizer, outer: OuterSGD | None) -> None:
        """Add an optimizer. `outer`: settings for all models; None: unchanged."""
        self._optimizers.append(optimizer)
        self._outer = outer or self._outer

    def check_local_sgd(self) -> None:
        """Raise InputError if replicas of this script cannot train independently."""
        if not self._optimizers:
            raise InputError("sync_mode: Local-SGD needs the optimizer; pass it to job.optimizer(…) in the script")
        if not self._models:
            raise InputError("sync_mode: Local-SGD needs the model; use job.replicate(…) or job.fully_shard(…)")

    # Training

    def synchronize_gradients(self, enabled: bool) -> None:
        """Set whether the next backward pass reduces gradients or accumulates them.

        A local mode reduces within the replica.
        """
        for model in self._models:
            parallel.synchronize_gradients(model.wrapped, enabled, self.is_local)

    def start(self) -> None:
        """Switch from Sync to Local-SGD, with the present parameters as the common ones."""
        for replicas in self.replicas:
            replicas.start()
        self.is_local = True

    def begin(self, steps: int, asynchronous: bool, weight: float) -> None:
        """Begin a synchronization. `steps`, `weight`: of this replica's batches since the last one. Collective."""
        self.finish()  # for all models before any begins: peers complete the last one in their forward passes
        for replicas in self._replicas:
            replicas.begin(steps, asynchronous, weight)

    def finish(self) -> None:
        """Complete the synchronization; otherwise the next forward pass or at the latest the optimizer's step does."""
        for replicas in self._replicas:
            replicas.finish()

    def stop(self) -> None:
        """Switch from Local-SGD to Sync, with one state for all replicas. Collective."""
        self.equalize()
        for replicas in self._replicas:
            replicas.stop()
        self.is_local = False

    def equalize(self) -> None:
        """Bring all replicas to one state: parameters, optimizer states and buffers. Collective."""
        self.finish()
        if not self.is_local or self.shape[_SYNC_DIMENSION] == 1:
            return
        modules = [model.forward.model for model in self._models]
        for optimizer in self._optimizers:
            equalize_replicas(optimizer, modules, self.sync_group)
            modules = []  # buffers once

    @property
    def newest_synchronizations(self) -> list[Synchronization]:
        """The last synchronization of each model that has had one."""
        return [replicas.last for replicas in self._replicas if replicas.last is not None]

    # State

    @property
    def models(self) -> list[nn.Module]:
        """The wrapped models, as the script has them."""
        return [model.wrapped for model in self._models]

    @property
    def replicas(self) -> list[Replicas]:
        """One for each model, created at the first access, since their momentum takes memory. Collective then."""
        if not self._replicas:
            shards = self.shard_group if self.shape[_SHARD_DIMENSION] > 1 else None
            for model in self._models:
                predecessor = self._replicas[-1] if self._replicas else None
                replicas = Replicas(model.forward, self.sync_group, shards, self._outer, predecessor)
                for optimizer in self._optimizers:
                    replicas.attach(optimizer)
                self._replicas.append(replicas)
        return self._replicas

    def get_optimizer_settings(self) -> list[list[dict[str, Any]]]:
        """Return the settings of the optimizers' parameter groups, such as learning rates."""
        return [
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]

    def set_optimizer_settings(self, settings: list[list[dict[str, Any]]]) -> None:
        """Apply what `get_optimizer_settings` returned on another rank."""
        for optimizer, groups in zip(self._optimizers, settings, strict=True):
            for group, group_settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(group_settings)

    @property
    def has_outer_state(self) -> bool:
        return bool(self._replicas)

    def reset_outer_state(self) -> None:
        """Reset outer optimizers and penalties of the replicas to their initial state."""
        for replicas in self._replicas:
            replicas.reset()

    def _add_model(self, forward: ForwardPass, wrapped: nn.Module) -> nn.Module:
        self._models.append(_ReplicatedModel(forward, wrapped))
        return wrapped


@dataclass(frozen=True)
class _ReplicatedModel:
    forward: ForwardPass
    """Forward pass of the script's own module."""
    wrapped: nn.Module


def _create_group(ranks: range, name: str) -> dist.ProcessGroup:
    """Create a group.

    Collective over all ranks, each of which creates its own: NCCL splits the communicator by group.
    """
    if len(ranks) == dist.get_world_size():
        group: Any = dist.group.WORLD
    else:
        group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"pacekeeper {name}")
    assert isinstance(group, dist.ProcessGroup)
    return group
