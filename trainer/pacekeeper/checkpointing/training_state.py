"""The state of a training job, gathered from the registered objects by name, and restored into them.

There are two forms. The local form is what the objects return: it is fast, and fits the same number of ranks only.
Snapshots use it. The portable form uses the names of parameters, and fits any number of ranks. Checkpoints use it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pacekeeper.object_collectives import broadcast_object
from pacekeeper.replication.parallel import equalize_buffers, unwrap_model
from pacekeeper.replication.replication import Replication
from pacekeeper.safe_serialization import encode_tree, pack_value, unpack_value
from pacekeeper_analysis.errors import InputError

from .rank_state import capture_rank_state, describe_differences, describe_models, restore_rank_state
from .storage.manifests import Manifest

_RANK_STATE_NAME = "rank_state"
_OUTER_STATE_NAME = "pacekeeper.outer"
"""Name of an outer optimizer and its penalty. It is optional, and exists once the job has been in a Local-SGD mode."""


class TrainingState:
    """Training state of one rank."""

    def __init__(self, objects: Mapping[str, Any], replication: Replication, rank: int) -> None:
        """Create it. `objects`: what the script has registered, by the names in checkpoints."""
        self._wrapped_models = [item for item in objects.values() if isinstance(item, nn.Module)]
        self._models = {name: unwrap_model(item) for name, item in objects.items() if isinstance(item, nn.Module)}
        self._optimizers = {name: item for name, item in objects.items() if isinstance(item, torch.optim.Optimizer)}
        self._other_objects = {
            name: item for name, item in objects.items() if not isinstance(item, (nn.Module, torch.optim.Optimizer))
        }
        self._replication = replication
        self._rank = rank
        self.sharded = any(isinstance(model, FSDPModule) for model in self._models.values())
        """Whether each rank has a part of it; otherwise all have the same."""
        self.model_description = describe_models([model.state_dict() for model in self._models.values()])

    def check_serializable(self) -> None:
        """Raise InputError if an object's state cannot be saved."""
        encode_tree(self.capture_local(), [])

    def explain_misfit(self, manifest: Manifest, in_part: bool = False) -> str:
        """Return why a checkpoint does not match this training; "": it does.

        `in_part`: whether the checkpoint may have more objects than are registered here: an evaluation needs no
        optimizer.
        """
        registered, saved = (
            set(self._get_registered()),
            {name for name in manifest.objects if not name.startswith(_OUTER_STATE_NAME)},
        )
        difference = describe_differences(self.model_description, manifest.model)
        if not difference and registered != saved and not (in_part and registered < saved):
            return f"registered are {sorted(registered)}, in the checkpoint {sorted(saved)}"
        return difference

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all saved objects, in order."""
        return tuple(sorted(self._collect_objects()))

    # The local form

    def capture_local(self) -> dict[str, Any]:
        """Return this rank's state as the objects give it. If nothing is sharded, it is the same on all ranks."""
        return {name: item.state_dict() for name, item in self._collect_objects().items()}

    def describe_local(self, state: Mapping[str, Any]) -> dict[str, str]:
        """Describe the models in `state`, as `model_description`: they may have grown since the round began."""
        return describe_models([state[name] for name in self._models])

    def explain_local_misfit(self, state: Any) -> str:
        """Return why a snapshot's state does not match `restore_local`; "": it does."""
        if not isinstance(state, dict):
            return "it has no objects"
        saved = {name for name in state if not str(name).startswith(_OUTER_STATE_NAME)}
        if saved != (registered := set(self._get_registered())):
            return f"registered are {sorted(registered)}, in the snapshot {sorted(map(str, saved))}"
        for name, optimizer in self._optimizers.items():
            if (saved_counts := _count_group_parameters(state[name])) != (
                own_counts := _count_group_parameters(optimizer.state_dict())
            ):
                return f"{name}: it has groups of {own_counts} parameters, in the snapshot {saved_counts}"
        return describe_differences(self.model_description, self.describe_local(state))

    def restore_local(self, state: Mapping[str, Any], rank_state: bytes, slot: torch.Tensor | None = None) -> int:
        """Restore what `capture_local` and `capture_rank_state` returned, and return the rank's samples.

        `slot`: memory that may contain the tensors of `copying_objects`; none of theirs remain there afterwards.

        The tensors of models and optimizers keep their memory: graphs captured before, and references to their `data`,
        see the new values. Other objects of the script may keep what they are given. Raises the error of an object that
        refuses its part; objects before it are already restored.
        """
        for name, item in self._collect_objects(state).items():
            with _load_in_place(item, slot):
                item.load_state_dict(state[name])
        return restore_rank_state(rank_state)

    @property
    def copying_objects(self) -> frozenset[str]:
        """Names in `capture_local` of objects that use their own memory after `restore_local`, for any input."""
        return frozenset(self._models) | {name for name, item in self._optimizers.items() if _uses_torch_load(item)}

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return tuple(self._optimizers.values())

    @property
    def mesh(self) -> DeviceMesh | None:
        """Mesh of the sharded tensors in `capture_local`; None: there are none."""
        return self._replication.mesh["shard"] if self.sharded else None

    # The portable form

    def capture_portable(self, samples: int) -> dict[str, Any]:
        """Return the state by names of parameters, as torch.distributed.checkpoint needs it, for any number of ranks.

        `samples`: this rank's samples since the job's beginning. Collective.
        """
        state = self._build_portable(self._collect_objects())
        state[f"{_RANK_STATE_NAME}.{self._rank}"] = self._pack_rank_state(samples)
        return state

    def restore_portable(self, manifest: Manifest, fill: Callable[[dict[str, Any]], None]) -> int:
        """Restore what `capture_portable` gave to the checkpoint of this manifest, and return the rank's samples.

        Collective.

        `fill`: puts the checkpoint's values into a state with its names and shapes.
        """
        objects = self._collect_objects(manifest.objects)
        rank_state_name = f"{_RANK_STATE_NAME}.{self._rank % manifest.world_size}"
        state = {**self._build_portable(objects), rank_state_name: b""}
        fill(state)
        for name, item in objects.items():
            with _load_in_place(item):
                if isinstance(item, nn.Module):
                    set_model_state_dict(item, state[name])
                elif isinstance(item, torch.optim.Optimizer):
                    set_optimizer_state_dict(self._find_model(item), item, state[name])
                else:
                    item.load_state_dict(unpack_value(state[name]))
        packed, buffers = unpack_value(state[rank_state_name])
        for name, model_buffers in buffers.items():
            self._models[name].load_state_dict(model_buffers, strict=False)
        return restore_rank_state(packed)

    # Equal on all ranks

    def equalize_buffers(self) -> None:
        """Copy rank 0's buffers to all replicas. Collective."""
        for model in self._wrapped_models:
            equalize_buffers(model)

    def equalize_other_objects(self, group: dist.ProcessGroup, excluded_types: tuple[type, ...]) -> None:
        """Copy rank 0's learning rates, schedules, gradient scalers and similar state to all ranks.

        Such state may count a rank's own steps.
        `excluded_types`: types that are equal anyway, or must differ. Collective.
        """
        states = {
            name: item.state_dict()
            for name, item in self._other_objects.items()
            if not isinstance(item, excluded_types)
        }
        states, settings = broadcast_object((states, self._replication.get_optimizer_settings()), group)
        for name, state in states.items():
            self._other_objects[name].load_state_dict(state)
        self._replication.set_optimizer_settings(settings)

    # The objects

    def _get_registered(self) -> dict[str, Any]:
        """Return the registered objects, models first: optimizer states refer to their parameters."""
        return {**self._models, **self._optimizers, **self._other_objects}

    def _collect_objects(self, names: Container[str] | None = None) -> dict[str, Any]:
        """Return the registered objects, and outer optimizers with the state of their penalties, if there are any.

        `names`: names in what is restored. Outer optimizers are created if it has them; the call is then collective. If
        it has none, existing ones are reset: a newer state that was torn may have left them.
        """
        objects = self._get_registered()
        needs_outer = self._replication.has_outer_state if names is None else f"{_OUTER_STATE_NAME}.0" in names
        if self._replication.has_outer_state and not needs_outer:
            self._replication.reset_outer_state()
        if needs_outer:
            for number, replicas in enumerate(self._replication.replicas):
                objects[f"{_OUTER_STATE_NAME}.{number}"] = replicas.outer
                objects[f"{_OUTER_STATE_NAME}.{number}.penalty"] = replicas
        return objects

    def _build_portable(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, item in objects.items():
            if isinstance(item, nn.Module):
                state[name] = get_model_state_dict(item)
            elif isinstance(item, torch.optim.Optimizer):
                state[name] = get_optimizer_state_dict(self._find_model(item), item)
            else:
                state[name] = pack_value(item.state_dict())
        return state

    def _pack_rank_state(self, samples: int) -> bytes:
        """Return this rank's individual state.

        It includes the buffers of sharded models: FSDP leaves them to each rank, and a checkpoint keeps one rank's
        only.
        """
        buffers = {}
        if self.sharded:
            for name, model in self._models.items():
                buffer_names = dict(model.named_buffers()).keys() & model.state_dict().keys()
                buffers[name] = {key: model.state_dict()[key].cpu() for key in buffer_names}
        return pack_value((capture_rank_state(samples), buffers))

    def _find_model(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        first_parameter = optimizer.param_groups[0]["params"][0]
        for model in self._models.values():
            if any(parameter is first_parameter for parameter in model.parameters()):
                return model
        raise InputError(
            "register(): an optimizer is registered without its model; register the model whose parameters it has"
        )


@contextmanager
def _load_in_place(item: Any, slot: torch.Tensor | None = None) -> Iterator[None]:
    """Make an optimizer load into its existing tensors; its own `load_state_dict` replaces them.

    A tensor without a counterpart that is still in `slot` is copied out of it.
    """
    if not isinstance(item, torch.optim.Optimizer):
        yield
        return
    old_states = {parameter: dict(parameter_state) for parameter, parameter_state in item.state.items()}
    old_groups = [dict(group) for group in item.param_groups]
    yield
    for parameter, parameter_state in item.state.items():
        _preserve_tensors(parameter_state, old_states.get(parameter, {}))
    for group, old_group in zip(item.param_groups, old_groups, strict=True):
        _preserve_tensors(group, old_group)
    if slot is not None:
        address = slot.untyped_storage().data_ptr()
        for key in item.state:
            item.state[key] = _copy_out(item.state[key], address)


def _uses_torch_load(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer loads as torch's own: its tensors are then all in its `state`."""
    overrides_load = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return not overrides_load and "load_state_dict" not in vars(optimizer)


def _copy_out(value: Any, address: int) -> Any:
    """Copy each tensor in `value` whose storage is at `address`."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        return value.clone() if local.untyped_storage().data_ptr() == address else value
    if isinstance(value, dict):
        for key in value:
            value[key] = _copy_out(value[key], address)
    elif type(value) in (list, tuple):
        return type(value)(_copy_out(element, address) for element in value)
    return value


@torch.no_grad()
def _preserve_tensors(current: dict[str, Any], previous: Mapping[str, Any]) -> None:
    """Copy each tensor of `current` into its counterpart in `previous`, and put that in its place."""
    for name, old in previous.items():
        new = current.get(name)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and _is_same_kind(old, new):
            old.copy_(new)
            current[name] = old


def _is_same_kind(first: torch.Tensor, second: torch.Tensor) -> bool:
    if isinstance(first, DTensor) != isinstance(second, DTensor):
        return False
    if isinstance(first, DTensor) and isinstance(second, DTensor) and first.placements != second.placements:
        return False
    return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)


def _count_group_parameters(state: Mapping[str, Any]) -> list[int]:
    """Return the number of parameters in each group of an optimizer's state; [] for an unknown format."""
    return [len(group["params"]) for group in state.get("param_groups", ())]
