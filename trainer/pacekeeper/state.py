"""The state of a training job as tensors and the rest: what snapshots copy and checkpoints write."""

from __future__ import annotations

import pickle
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

RANK_STATE_BYTES = 16_384
"""Room for what each rank has of its own: random states (about 11 KiB) and its count of samples."""


@dataclass(frozen=True)
class Shard:
    """How a sharded tensor was laid out; its mesh is the job's."""

    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """Stands in a skeleton for the `index`-th tensor."""

    index: int
    shard: Shard | None


def take_apart(state: Any, tensors: list[torch.Tensor]) -> Any:
    """Appends the tensors in nested dicts, lists and tuples to `tensors`, and returns the skeleton that is left.

    Of sharded tensors it takes this rank's part.
    """
    if isinstance(state, DTensor):
        tensors.append(state.to_local().detach())
        return Leaf(len(tensors) - 1, Shard(state.placements, state.shape, state.stride()))
    if isinstance(state, torch.Tensor):
        tensors.append(state.detach())
        return Leaf(len(tensors) - 1, None)
    if isinstance(state, dict):
        return {key: take_apart(value, tensors) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(take_apart(value, tensors) for value in state)
    return state


def put_together(skeleton: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> Any:
    """The state again. `mesh`: of the sharded tensors; None where there are none."""
    if isinstance(skeleton, Leaf):
        tensor = tensors[skeleton.index]
        if skeleton.shard is None:
            return tensor
        assert mesh is not None, "sharded tensors need the mesh that they are sharded over"
        shard = skeleton.shard
        local = tensor.to(mesh.device_type)
        return DTensor.from_local(
            local, mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride
        )
    if isinstance(skeleton, dict):
        return {key: put_together(value, tensors, mesh) for key, value in skeleton.items()}
    if isinstance(skeleton, (list, tuple)):
        return type(skeleton)(put_together(value, tensors, mesh) for value in skeleton)
    return skeleton


def describe(models: Sequence[nn.Module]) -> dict[str, str]:
    """Name → shape and type of everything the models hold: two models fit each other when this is equal."""
    return {
        f"{position}.{name}" if position else name: f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for position, model in enumerate(models)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }


def differences(ours: dict[str, str], theirs: dict[str, str], most: int = 5) -> str:
    """In which parameters two models differ, in words; "": in none."""
    found = [f"{name} is missing in the checkpoint" for name in sorted(ours.keys() - theirs.keys())]
    found += [f"{name} is in the checkpoint only" for name in sorted(theirs.keys() - ours.keys())]
    found += [
        f"{name} is {ours[name]}, in the checkpoint {theirs[name]}"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]
    more = f"; and {len(found) - most} more" if len(found) > most else ""
    return "; ".join(found[:most]) + more


def fingerprint(description: dict[str, str]) -> int:
    return zlib.crc32(repr(sorted(description.items())).encode())


def capture_rank_state(samples: int) -> bytes:
    """This rank's random states (Python, numpy, torch, its GPU) and how many samples it has used."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),  # the global generator is what scripts use
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else b"",
        "samples": samples,
    }
    packed = pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
    assert len(packed) + 8 <= RANK_STATE_BYTES
    return (len(packed).to_bytes(8, "little") + packed).ljust(RANK_STATE_BYTES, b"\0")


def restore_rank_state(packed: bytes) -> int:
    """Sets the random states; returns the rank's samples."""
    length = int.from_bytes(packed[:8], "little")
    state = pickle.loads(packed[8 : 8 + length])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))
    samples: int = state["samples"]
    return samples


def _bytes_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
