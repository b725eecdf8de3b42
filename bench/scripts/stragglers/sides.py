"""The sides by name. Their modules are imported in the rank, since each needs packages that other sides do without."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from .run import Outcome, Place, Run

Side = Callable[[Run, Place], Outcome]

PLAIN = {"ddp": "ddp:run"}
TORCHFT = {"torchft_local_sgd": "with_torchft:local_sgd", "torchft_diloco": "with_torchft:diloco"}
OURS = {"shares": "with_pacekeeper:shares"}
SIDES = (*PLAIN, *TORCHFT, *OURS)


def find(name: str) -> Side:
    module, function = {**PLAIN, **TORCHFT, **OURS}[name].split(":")
    side: Side = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    return side
