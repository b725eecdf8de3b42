"""The state of a training job, gathered from the registered objects by their names, and handed back to them.

In two forms. As the objects give it, it is quick to have, and fits the same number of ranks only: that of snapshots. By
the names of parameters, it fits any number of ranks: that of checkpoints.
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

from pacekeeper.exchange import broadcast_object
from pacekeeper.plain import pack_value, encode_tree, unpack_value
from pacekeeper.replication.parallel import equalize_buffers, unwrap_model
from pacekeeper.replication.replication import Replication
from pacekeeper_analysis.errors import InputError

from .manifests import Manifest
from .rank_state import capture_rank_state, describe_models, describe_differences, restore_rank_state

_RANK_STATE_NAME = "rank_state"
_OUTER_STATE_NAME = "pacekeeper.outer"
"""Name of an outer optimizer and what goes with it: there once the job has been in a Local-SGD mode, and optional."""


class TrainingState:
    """Of one rank."""

    def __init__(self, objects: Mapping[str, Any], replication: Replication, rank: int) -> None:
        """`objects`: what the script has registered, by the names that they have in checkpoints."""
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
        """Raises InputError where an object's state cannot be kept."""
        encode_tree(self.capture_local(), [])

    def explain_misfit(self, manifest: Manifest, in_part: bool = False) -> str:
        """Why a checkpoint is not of this training; "": it is.

        in_part: whether the training may have registered more than what is wanted here: an evaluation needs no
        optimizer.
        """
        ours, theirs = set(self._get_registered()), {name for name in manifest.objects if not name.startswith(_OUTER_STATE_NAME)}
        different = describe_differences(self.model_description, manifest.model)
        if not different and ours != theirs and not (in_part and ours < theirs):
            return f"registered are {sorted(ours)}, in the checkpoint {sorted(theirs)}"
        return different

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that is kept, in order."""
        return tuple(sorted(self._collect_objects()))

    # As the objects give it

    def capture_local(self) -> dict[str, Any]:
        """This rank's, as the objects give it. Where nothing is sharded, all ranks have the same."""
        return {name: item.state_dict() for name, item in self._collect_objects().items()}

    def describe_local(self, state: Mapping[str, Any]) -> dict[str, str]:
        """As `description`, of the models in what `own` gave: they may have grown since the round began."""
        return describe_models([state[name] for name in self._models])

    def explain_local_misfit(self, state: Any) -> str:
        """Why what a snapshot has is not what `restore_local` takes here; "": it is."""
        if not isinstance(state, dict):
            return "it has no objects"
        theirs = {name for name in state if not str(name).startswith(_OUTER_STATE_NAME)}
        if theirs != (ours := set(self._get_registered())):
            return f"registered are {sorted(ours)}, in the snapshot {sorted(map(str, theirs))}"
        for name, optimizer in self._optimizers.items():
            if (its := _count_group_parameters(state[name])) != (own := _count_group_parameters(optimizer.state_dict())):
                return f"{name}: it has groups of {own} parameters, in the snapshot of {its}"
        return describe_differences(self.model_description, self.describe_local(state))

    def restore_local(self, state: Mapping[str, Any], rank_state: bytes, slot: torch.Tensor | None = None) -> int:
        """What `own` and `capture_rank_state` gave; returns the rank's samples.

        slot: in which the tensors of `copiers` may lie; when this returns, none of theirs does.

        The tensors of models and optimizers stay where they are: a graph that was captured before, or whoever has their
        `data`, sees what they are now. Objects of the script's may keep what they are given. Raises whatever an object
        raises that does not take its part; those before it have taken theirs.
        """
        for name, item in self._collect_objects(state).items():
            with _load_in_place(item, slot):
                item.load_state_dict(state[name])
        return restore_rank_state(rank_state)

    @property
    def copying_objects(self) -> frozenset[str]:
        """Names in `own` of what `restore_local` leaves with memory of its own, whatever it is given."""
        return frozenset(self._models) | {name for name, its in self._optimizers.items() if _uses_torch_load(its)}

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return tuple(self._optimizers.values())

    @property
    def mesh(self) -> DeviceMesh | None:
        """Of the sharded tensors in `own`; None: there are none."""
        return self._replication.mesh["shard"] if self.sharded else None

    # By the names of parameters

    def capture_portable(self, samples: int) -> dict[str, Any]:
        """By the names of parameters, as torch.distributed.checkpoint wants it: for any number of ranks. Collective.

        samples: of this rank, since the job's beginning.
        """
        state = self._build_portable(self._collect_objects())
        state[f"{_RANK_STATE_NAME}.{self._rank}"] = self._pack_rank_state(samples)
        return state

    def restore_portable(self, manifest: Manifest, fill: Callable[[dict[str, Any]], None]) -> int:
        """What `portable` gave to the checkpoint of this manifest; returns the rank's samples. Collective.

        fill: puts the checkpoint's values into a state that has its names and shapes.
        """
        objects = self._collect_objects(manifest.objects)
        mine = f"{_RANK_STATE_NAME}.{self._rank % manifest.world_size}"
        state = {**self._build_portable(objects), mine: b""}
        fill(state)
        for name, item in objects.items():
            with _load_in_place(item):
                if isinstance(item, nn.Module):
                    set_model_state_dict(item, state[name])
                elif isinstance(item, torch.optim.Optimizer):
                    set_optimizer_state_dict(self._find_model(item), item, state[name])
                else:
                    item.load_state_dict(unpack_value(state[name]))
        packed, buffers = unpack_value(state[mine])
        for name, its in buffers.items():
            self._models[name].load_state_dict(its, strict=False)
        return restore_rank_state(packed)

    # Alike on all ranks

    def equalize_buffers(self) -> None:
        """Gives all replicas rank 0's buffers. Collective."""
        for model in self._wrapped_models:
            equalize_buffers(model)

    def equalize_other_objects(self, group: dist.ProcessGroup, excluded_types: tuple[type, ...]) -> None:
        """Gives all ranks rank 0's learning rates, schedules, gradient scalers and the like, which may count a rank's
        own steps. Collective.

        but: what is alike by itself, or is to differ.
        """
        others = {name: other.state_dict() for name, other in self._other_objects.items() if not isinstance(other, excluded_types)}
        others, settings = broadcast_object((others, self._replication.get_optimizer_settings()), group)
        for name, state in others.items():
            self._other_objects[name].load_state_dict(state)
        self._replication.set_optimizer_settings(settings)

    # The objects

    def _get_registered(self) -> dict[str, Any]:
        """Models first: their optimizers' states are told by their parameters."""
        return {**self._models, **self._optimizers, **self._other_objects}

    def _collect_objects(self, names: Container[str] | None = None) -> dict[str, Any]:
        """What is registered, and the outer optimizers and what their penalties have learnt, where there are any.

        names: of what is to be restored; they are made where it has them. Collective then. Where it has none, what
        there is of them begins anew: a newer state that was torn may have left it.
        """
        everything = self._get_registered()
        outer = self._replication.has_outer_state if names is None else f"{_OUTER_STATE_NAME}.0" in names
        if self._replication.has_outer_state and not outer:
            self._replication.reset_outer_state()
        if outer:
            for number, replicas in enumerate(self._replication.replicas):
                everything[f"{_OUTER_STATE_NAME}.{number}"] = replicas.outer
                everything[f"{_OUTER_STATE_NAME}.{number}.penalty"] = replicas
        return everything

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
        """What this rank has of its own.

        The buffers of sharded models are among it: FSDP leaves them to each rank, a checkpoint keeps one rank's only.
        """
        buffers = {}
        if self.sharded:
            for name, model in self._models.items():
                own = dict(model.named_buffers()).keys() & model.state_dict().keys()
                buffers[name] = {key: model.state_dict()[key].cpu() for key in own}
        return pack_value((capture_rank_state(samples), buffers))

    def _find_model(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        first = optimizer.param_groups[0]["params"][0]
        for model in self._models.values():
            if any(parameter is first for parameter in model.parameters()):
                return model
        raise InputError("register(): an optimizer without its model; register the model whose parameters it has")


@contextmanager
def _load_in_place(item: Any, slot: torch.Tensor | None = None) -> Iterator[None]:
    """What an optimizer loads inside goes into the tensors that it has; its own `load_state_dict` gives it others.

    What it has none for, and still lies in `slot`, is copied out of it.
    """
    if not isinstance(item, torch.optim.Optimizer):
        yield
        return
    moments = {parameter: dict(its) for parameter, its in item.state.items()}
    settings = [dict(group) for group in item.param_groups]
    yield
    for parameter, its in item.state.items():
        _preserve_tensors(its, moments.get(parameter, {}))
    for group, before in zip(item.param_groups, settings, strict=True):
        _preserve_tensors(group, before)
    if slot is not None:
        address = slot.untyped_storage().data_ptr()
        for key in item.state:
            item.state[key] = _copy_out(item.state[key], address)


def _uses_torch_load(optimizer: torch.optim.Optimizer) -> bool:
    """Its tensors are all in its `state` then."""
    own = type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return not own and "load_state_dict" not in vars(optimizer)


def _copy_out(value: Any, slot: int) -> Any:
    """`slot`: the address of the storage that no tensor in `value` is to lie in any longer."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        return value.clone() if local.untyped_storage().data_ptr() == slot else value
    if isinstance(value, dict):
        for key in value:
            value[key] = _copy_out(value[key], slot)
    elif type(value) in (list, tuple):
        return type(value)(_copy_out(its, slot) for its in value)
    return value


@torch.no_grad()
def _preserve_tensors(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Each of `before` takes the value, and the place, of the one in `now` that is like it."""
    for name, old in before.items():
        new = now.get(name)
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and _is_same_kind(old, new):
            old.copy_(new)
            now[name] = old


def _is_same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) != isinstance(other, DTensor):
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor) and one.placements != other.placements:
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _count_group_parameters(state: Mapping[str, Any]) -> list[int]:
    """Parameters in each group, of an optimizer's state; one that keeps it in another way has none."""
    return [len(group["params"]) for group in state.get("param_groups", ())]
