"""A copy of the state in the host's memory: training goes on with the state while the copy is being written."""

from __future__ import annotations

from typing import Any

import torch

from pacekeeper.torch_internals import tree_map_only


def stage(state: dict[str, Any]) -> dict[str, Any]:
    """`state` with copies of its tensors in the host's memory; of sharded ones, of this rank's part."""
    staged: dict[str, Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
    return staged
