"""The sides by name. Their modules are imported in the rank, since each needs packages that other sides do without."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from .run import Outcome, Place, Run

Side = Callable[[Run, Place], Outcome]

PLAIN_SIDES = {"ddp": "ddp:train_ddp"}
TORCHFT_SIDES = {"torchft_local_sgd": "with_torchft:train_local_sgd", "torchft_diloco": "with_torchft:train_diloco"}
LEAVING_OUT_SIDES = {"torchft_without_late": "with_torchft:train_without_late"}
OUR_SIDES = {
    "shares": "with_pacekeeper:train_shares",
    "edit": "with_pacekeeper:train_edit",
    "aedit": "with_pacekeeper:train_aedit",
}
ALTERNATING_RUNS = {"cost_of_sync": "alternate:compare_sync", "cost_of_edit": "alternate:compare_edit"}
"""Not sides of their own: ours in this mode against DDP, in turns."""
SWITCHING_RUNS = {"switches": "with_pacekeeper:train_switching"}
"""Ours, from one mode to the next."""

SYNCHRONOUS_SIDES = ("ddp", "shares")
"""Synchronize in each step."""
SIDES = (*PLAIN_SIDES, *TORCHFT_SIDES, *OUR_SIDES)


def find_side(name: str) -> Side:
    module, function = {
        **PLAIN_SIDES,
        **TORCHFT_SIDES,
        **OUR_SIDES,
        **LEAVING_OUT_SIDES,
        **ALTERNATING_RUNS,
        **SWITCHING_RUNS,
    }[name].split(":")
    side: Side = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    return side
