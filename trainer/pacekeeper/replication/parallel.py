"""Data parallelism for unequal shares: gradients are summed over the ranks, not averaged.

Each rank divides its loss sum by the weight of the whole global batch. The sum of the ranks' gradients is then the
gradient of the whole batch for any shares: g = Σ (n_i / n) · mean gradient of rank i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pacekeeper import torch_internals
from pacekeeper.torch_internals import GradBucket
from pacekeeper_analysis.errors import InputError

_BUCKET_BYTES = 250 << 20

_DDP_OPTIONS = (
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "init_sync",
)
_REFUSED_DDP_OPTIONS = {
    "device_ids": "is set to the job's device; see pk.init(device=…)",
    "output_device": "is set to the job's device; see pk.init(device=…)",
    "process_group": "is the group of all ranks; see pk.init(mesh=…)",
    "device_mesh": "is the mesh of all ranks; see pk.init(mesh=…)",
    "static_graph": "needs a first backward pass that reduces gradients, but one with several microbatches, or in a "
    "Local-SGD mode, does not; use find_unused_parameters=True instead",
}
_FSDP_OPTIONS = ("ignored_params", "mp_policy", "offload_policy", "reshard_after_forward", "shard_placement_fn")
_REFUSED_FSDP_OPTIONS = {"mesh": "is the job's; see pk.init(mesh=…)"}

Units = Callable[[Any], Iterable[nn.Module]]


def check_replicate_options(options: Mapping[str, Any]) -> None:
    """Raise InputError that names an option which `replicate` does not support."""
    _check_options("replicate", options, _DDP_OPTIONS, _REFUSED_DDP_OPTIONS)
    bucket_cap_mb = options.get("bucket_cap_mb")
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise InputError(f"replicate: bucket_cap_mb={bucket_cap_mb} must be above 0, or None for 25 MiB")


def check_shard_options(options: Mapping[str, Any]) -> None:
    """Raise InputError that names an option which `fully_shard` does not support."""
    _check_options("fully_shard", options, _FSDP_OPTIONS, _REFUSED_FSDP_OPTIONS)
    if any(parameter.requires_grad for parameter in options.get("ignored_params") or ()):
        raise InputError(
            "fully_shard: ignored_params has parameters that are trained, but FSDP2 would not reduce their gradients "
            "over the ranks; freeze them (requires_grad_(False)), or let them be sharded"
        )


def replicate_model(model: nn.Module, options: Mapping[str, Any]) -> DistributedDataParallel:
    """Wrap `model` as replicas with summed gradients. `options`: options of DistributedDataParallel. Collective."""
    device = next(model.parameters()).device
    device_ids = [device.index] if device.type == "cuda" else None
    replicated = DistributedDataParallel(model, device_ids=device_ids, **options)
    # A lambda, because DDP compares annotations with types, and those of this module are strings.
    replicated.register_comm_hook(dist.group.WORLD, lambda group, bucket: _sum_bucket(group, bucket))
    if not options.get("find_unused_parameters"):  # otherwise DDP never rebuilds its buckets
        _fix_buckets(replicated)
    return replicated


def shard_model(
    model: nn.Module, mesh: DeviceMesh, units: Iterable[nn.Module], options: Mapping[str, Any]
) -> nn.Module:
    """Shard `model` over the dimension "shard" of `mesh`, unit by unit, with summed gradients.

    If the mesh has a dimension "sync" before it, its ranks hold replicas of each other's shards, and gradients are
    summed over them, too. `options`: options of FSDP2's fully_shard. Collective.
    """
    names = mesh.mesh_dim_names or ()
    shards = mesh["shard"] if "sync" in names else mesh
    for unit in units:
        fully_shard(unit, mesh=shards, **options)
    fully_shard(model, mesh=shards, **options)
    all_reduce_hook = _SumOverReplicas(mesh.get_group("sync")) if "sync" in names and mesh["sync"].size() > 1 else None
    for module in _list_sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if all_reduce_hook is not None:
            module.set_all_reduce_hook(all_reduce_hook)
    return model


def synchronize_gradients(model: nn.Module, enabled: bool, local: bool = False) -> None:
    """Set whether the next backward pass reduces gradients over the ranks or only accumulates them.

    `local`: exclude other replicas, also from the forward pass. Whole replicas then reduce nothing, sharded ones inside
    their shard group.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled and not local
        if local:  # DDP would broadcast rank 0's buffers before a forward pass, once
            model.require_forward_param_sync = False
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        for module in _list_sharded_modules(model):
            for hook in torch_internals.list_all_reduce_hooks(module):
                if isinstance(hook, _SumOverReplicas):
                    hook.enabled = not local


def equalize_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers to all replicas, as DDP does before the next forward pass. Collective.

    Until then each rank has its own running means, and a checkpoint would contain those of an arbitrary rank.
    """
    if isinstance(model, DistributedDataParallel):
        torch_internals.broadcast_buffers(model, _BUCKET_BYTES)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the script's own module."""
    module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    return module


class _SumOverReplicas:
    """FSDP2's hook after the reduction over the shards, which sums the result over the replicas, in place.

    FSDP2 supports replicas (HSDP), but if it excludes them it keeps the gradients internally (`grad` stays None).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.enabled = True
        self._group = group

    def __call__(self, reduced: torch.Tensor) -> None:
        if self.enabled:
            dist.all_reduce(reduced, group=self._group)


def _list_sharded_modules(model: nn.Module) -> Iterable[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _check_options(call: str, options: Mapping[str, Any], supported: Iterable[str], refused: Mapping[str, str]) -> None:
    for name in options:
        if name in refused:
            raise InputError(f"{call}: {name} {refused[name]}")
        if name not in supported:
            raise InputError(f"{call}: the option {name!r} is unknown; it takes units, {', '.join(supported)}")


def _sum_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def _fix_buckets(replicated: DistributedDataParallel) -> None:
    """Make DDP build its gradient buckets now.

    It would do so after the first backward pass, in the order in which gradients arrive, and sum in another order from
    the second step on. A restored rank would then differ by rounding from one that was never interrupted. Zero
    gradients therefore arrive here in the order that DDP expects (last parameter first), and the buckets never change.
    """
    parameters = [parameter for parameter in replicated.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        replicated.reducer.prepare_for_backward([])
        aliases = [parameter.view_as(parameter) for parameter in reversed(parameters)]
        for alias in aliases:
            torch.autograd.backward([alias], [torch.zeros_like(alias)])
        torch_internals.rebuild_buckets(replicated)
    for parameter in parameters:
        parameter.grad = None
