"""The sides by name. Their modules are imported in the rank, since each needs packages that other sides do without."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from .run import Outcome, Place, Run

Side = Callable[[Run, Place], Outcome]

PLAIN = {"ddp": "ddp:run"}
TORCHFT = {"torchft_local_sgd": "with_torchft:local_sgd", "torchft_diloco": "with_torchft:diloco"}
LEAVING_OUT = {"torchft_without_late": "with_torchft:without_late"}
OURS = {"shares": "with_pacekeeper:shares", "edit": "with_pacekeeper:edit", "aedit": "with_pacekeeper:aedit"}
ALTERNATE = {"cost_of_sync": "alternate:sync", "cost_of_edit": "alternate:edit"}
"""Not sides of their own: ours in this mode against DDP, in turns."""
SWITCHES = {"switches": "with_pacekeeper:switches"}
"""Ours, from one mode to the next."""

EVERY_STEP = ("ddp", "shares")
"""Synchronise in each step."""
SIDES = (*PLAIN, *TORCHFT, *OURS)


def find(name: str) -> Side:
    module, function = {**PLAIN, **TORCHFT, **OURS, **LEAVING_OUT, **ALTERNATE, **SWITCHES}[name].split(":")
    side: Side = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    return side
