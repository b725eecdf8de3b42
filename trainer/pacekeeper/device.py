"""The device that a rank trains on."""

from __future__ import annotations

import torch

from pacekeeper_analysis.errors import InputError


def select_device(wanted: str | torch.device | None, local_rank: int) -> torch.device:
    """The rank's device, which CUDA uses from now on wherever none is named: nothing lands on the first GPU by mistake.

    wanted: "cpu", "cuda" (the GPU with the number of `local_rank`) or one GPU, such as "cuda:0"; None: a GPU where
    there is one. Raises InputError, also where the script has used another GPU before.
    """
    gpus = torch.cuda.device_count()
    device = choose_device(wanted, local_rank, gpus)
    if device.type == "cuda":
        if torch.cuda.is_initialized() and torch.cuda.current_device() != device.index:
            raise InputError(
                f"device: the script has used cuda:{torch.cuda.current_device()} already, this rank's is {device}; "
                "call pk.init before anything that uses CUDA"
            )
        torch.cuda.set_device(device)
    return device


def choose_device(wanted: str | torch.device | None, local_rank: int, gpus: int) -> torch.device:
    """`gpus`: that this process sees. Raises InputError that names the remedy."""
    try:
        device = torch.device(wanted or ("cuda" if gpus else "cpu"))
    except RuntimeError as error:
        raise InputError(f'device={wanted!r} is unknown; take "cpu", "cuda" or one GPU, such as "cuda:0"') from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise InputError(f'device={str(device)!r} is not supported; take "cpu", "cuda" or one GPU, such as "cuda:0"')
    if not gpus:
        raise InputError(f'device={str(device)!r}: this process sees no GPU; give the pod some, or take device="cpu"')
    index = local_rank if device.index is None else device.index
    if index >= gpus:
        told = f"LOCAL_RANK={local_rank}" if device.index is None else f"device={str(device)!r}"
        raise InputError(
            f"{told}: this process sees {gpus} GPUs; start one rank a GPU (spec.nprocPerNode, nvidia.com/gpu, "
            'CUDA_VISIBLE_DEVICES), or name the device that ranks share, such as pk.init(device="cuda:0")'
        )
    return torch.device("cuda", index)
