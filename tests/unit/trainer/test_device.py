"""Which device a rank takes, and what it reports where there is none for it."""

from __future__ import annotations

import pytest
import torch

from pacekeeper.device import choose_device
from pacekeeper_analysis.errors import InputError


@pytest.mark.parametrize(
    ("wanted", "local_rank", "gpus", "device"),
    [
        (None, 3, 0, "cpu"),
        (None, 3, 4, "cuda:3"),
        ("cpu", 3, 4, "cpu"),
        ("cpu:0", 3, 4, "cpu"),
        ("cuda", 1, 4, "cuda:1"),
        ("cuda:0", 1, 1, "cuda:0"),  # ranks that share one
        (torch.device("cuda", 2), 0, 4, "cuda:2"),
    ],
)
def test_a_rank_takes_its_own_gpu_or_the_one_that_is_set(
    wanted: str | torch.device | None, local_rank: int, gpus: int, device: str
) -> None:
    assert choose_device(wanted, local_rank, gpus) == torch.device(device)


@pytest.mark.parametrize(
    ("wanted", "local_rank", "gpus", "message"),
    [
        (None, 4, 4, "LOCAL_RANK=4: this process sees 4 GPUs; start one rank per GPU"),
        ("cuda:4", 0, 4, "device='cuda:4': this process sees 4 GPUs"),
        ("cuda", 0, 0, "device='cuda': this process sees no GPU"),
        ("mps", 0, 0, "device='mps' is not supported; take"),
        ("gpu", 0, 0, "device='gpu' is unknown; take"),
    ],
)
def test_a_missing_device_is_named(wanted: str | None, local_rank: int, gpus: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        choose_device(wanted, local_rank, gpus)
    assert message in str(caught.value)
