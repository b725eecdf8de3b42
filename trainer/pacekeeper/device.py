"""The device that a rank trains on."""

from __future__ import annotations

import torch

from pacekeeper_analysis.errors import InputError


def select_device(requested: str | torch.device | None, local_rank: int) -> torch.device:
    """Return the rank's device, and make it the current CUDA device: no tensor lands on the first GPU by mistake.

    `requested`: "cpu", "cuda" (the GPU with the number `local_rank`) or one GPU, such as "cuda:0". None takes a GPU if
    there is one. Raises InputError, also if the script has used another GPU before.
    """
    gpus = torch.cuda.device_count()
    device = choose_device(requested, local_rank, gpus)
    if device.type == "cuda":
        if torch.cuda.is_initialized() and torch.cuda.current_device() != device.index:
            raise InputError(
                f"device: the script already used cuda:{torch.cuda.current_device()}, but this rank has {device}; "
                "call pk.init before anything that uses CUDA"
            )
        torch.cuda.set_device(device)
    return device


def choose_device(requested: str | torch.device | None, local_rank: int, gpus: int) -> torch.device:
    """Return the device for `requested`, of the `gpus` that this process sees.

    Raises InputError that names the remedy.
    """
    try:
        device = torch.device(requested or ("cuda" if gpus else "cpu"))
    except RuntimeError as error:
        raise InputError(f'device={requested!r} is unknown; take "cpu", "cuda" or one GPU, such as "cuda:0"') from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise InputError(f'device={str(device)!r} is not supported; take "cpu", "cuda" or one GPU, such as "cuda:0"')
    if not gpus:
        raise InputError(f'device={str(device)!r}: this process sees no GPU; add GPUs to the pod, or set device="cpu"')
    index = local_rank if device.index is None else device.index
    if index >= gpus:
        source = f"LOCAL_RANK={local_rank}" if device.index is None else f"device={str(device)!r}"
        raise InputError(
            f"{source}: this process sees {gpus} GPUs; start one rank per GPU (spec.nprocPerNode, nvidia.com/gpu, "
            'CUDA_VISIBLE_DEVICES), or name the device that ranks share, such as pk.init(device="cuda:0")'
        )
    return torch.device("cuda", index)
