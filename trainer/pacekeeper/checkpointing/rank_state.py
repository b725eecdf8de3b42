"""Properties of a training state: whether two models match, and what each rank has individually."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pacekeeper.safe_serialization import pack_value, unpack_value
from pacekeeper_analysis.errors import InputError

RANK_STATE_BYTES = 16_384
"""Bytes reserved for a rank's individual state: random states (about 11 KiB) and its count of samples."""


def describe_models(models: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return name → shape and type of everything in the models' state_dicts. Two models match if this is equal."""
    return {
        f"{position}.{name}" if position else name: f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for position, model in enumerate(models)
        for name, tensor in model.items()
        if isinstance(tensor, torch.Tensor)
    }


def describe_differences(current: dict[str, str], saved: dict[str, str], max_named: int = 5) -> str:
    """Return the parameters in which two models differ, for messages; "": none."""
    differences = [f"{name} is missing in the checkpoint" for name in sorted(current.keys() - saved.keys())]
    differences += [f"{name} is in the checkpoint only" for name in sorted(saved.keys() - current.keys())]
    differences += [
        f"{name} is {current[name]}, in the checkpoint {saved[name]}"
        for name in sorted(current.keys() & saved.keys())
        if current[name] != saved[name]
    ]
    more = f"; and {len(differences) - max_named} more" if len(differences) > max_named else ""
    return "; ".join(differences[:max_named]) + more


def compute_fingerprint(description: dict[str, str]) -> int:
    return zlib.crc32(repr(sorted(description.items())).encode())


def capture_rank_state(samples: int) -> bytes:
    """Return this rank's random states (Python, numpy, torch, its GPU) and its number of used samples."""
    version, internal_state, gauss = random.getstate()
    state = {
        "python": (version, np.array(internal_state, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(legacy=True),  # scripts use the global generator
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # the call would start a GPU
        "samples": samples,
    }
    packed = pack_value(state)
    assert len(packed) <= RANK_STATE_BYTES
    return packed.ljust(RANK_STATE_BYTES, b"\0")


def restore_rank_state(packed: bytes) -> int:
    """Set the random states, and return the rank's samples. Raises InputError if they are invalid; some may be set."""
    state = unpack_value(packed)
    try:
        return _apply_rank_state(state)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(f"not a rank's random states and samples: {error!r}") from error


def _apply_rank_state(state: Any) -> int:
    version, internal_state, gauss = state["python"]
    random.setstate((version, tuple(internal_state.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    samples = state["samples"]
    if type(samples) is not int or samples < 0:
        raise ValueError(f"{samples!r} samples")
    return samples
