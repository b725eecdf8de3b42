"""What is known of a training job's state: which models fit each other, and what each rank has of its own."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pacekeeper.plain import pack_value, unpack_value
from pacekeeper_analysis.errors import InputError

RANK_STATE_BYTES = 16_384
"""Room for what each rank has of its own: random states (about 11 KiB) and its count of samples."""


def describe_models(models: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name → shape and type of everything in the models' state_dicts: two models fit each other when this is equal."""
    return {
        f"{position}.{name}" if position else name: f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for position, model in enumerate(models)
        for name, tensor in model.items()
        if isinstance(tensor, torch.Tensor)
    }


def describe_differences(ours: dict[str, str], theirs: dict[str, str], max_named: int = 5) -> str:
    """In which parameters two models differ, in words; "": in none."""
    found = [f"{name} is missing in the checkpoint" for name in sorted(ours.keys() - theirs.keys())]
    found += [f"{name} is in the checkpoint only" for name in sorted(theirs.keys() - ours.keys())]
    found += [
        f"{name} is {ours[name]}, in the checkpoint {theirs[name]}"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name]
    ]
    more = f"; and {len(found) - max_named} more" if len(found) > max_named else ""
    return "; ".join(found[:max_named]) + more


def compute_fingerprint(description: dict[str, str]) -> int:
    return zlib.crc32(repr(sorted(description.items())).encode())


def capture_rank_state(samples: int) -> bytes:
    """This rank's random states (Python, numpy, torch, its GPU) and how many samples it has used."""
    version, words, gauss = random.getstate()
    state = {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.get_state(legacy=True),  # the global generator is what scripts use
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # asking would start a GPU
        "samples": samples,
    }
    packed = pack_value(state)
    assert len(packed) <= RANK_STATE_BYTES
    return packed.ljust(RANK_STATE_BYTES, b"\0")


def restore_rank_state(packed: bytes) -> int:
    """Sets the random states; returns the rank's samples. Raises InputError where they are none: some may be set."""
    state = unpack_value(packed)
    try:
        return _apply_rank_state(state)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(f"not a rank's random states and samples: {error!r}") from error


def _apply_rank_state(state: Any) -> int:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    samples = state["samples"]
    if type(samples) is not int or samples < 0:
        raise ValueError(f"{samples!r} samples")
    return samples
