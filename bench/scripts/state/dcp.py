"""torch's own checkpoints (DCP) of a model and its optimizer, as its documentation has it. Collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint


def build_state_dict(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved."""
    model, optimizer_state = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": optimizer_state}


def load_state(net: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = build_state_dict(net, optimizer)
    load_checkpoint(state, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
