"""torch's own checkpoints (DCP) of a model and its optimizer, as its documentation has it. Collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint


def portable(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved."""
    model, its = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": its}


def bring_back(net: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = portable(net, optimizer)
    load_checkpoint(state, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
