"""The trainer library, the launcher and the sidecar: the only packages that import torch.

    import pacekeeper as pk          # a managed script: pk.init() and what it returns
    import pacekeeper.auto           # a monitored script
    pacekeeper.PeerStorageWriter     # a script that saves by torch.distributed.checkpoint

Names are imported at their first use, so that launcher and sidecar start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `__getattr__` imports these at their first use, since most of them load torch
    from pacekeeper_analysis.stragglers.length_cost import SequenceCost
    from pacekeeper_analysis.stragglers.pseudo_gradient import Penalty

    from .checkpointing.peer_saves.storage_reader import PeerStorageReader
    from .checkpointing.peer_saves.storage_writer import PeerStorageWriter
    from .job import Job, Schedule, init
    from .job_settings import Checkpoints
    from .replication.local_sgd.settings import OuterSGD
    from .step import Step

__all__ = [
    "Checkpoints",
    "Job",
    "OuterSGD",
    "PeerStorageReader",
    "PeerStorageWriter",
    "Penalty",
    "Schedule",
    "SequenceCost",
    "Step",
    "init",
]

_MODULES = {
    "Checkpoints": ".job_settings",
    "Job": ".job",
    "OuterSGD": ".replication.local_sgd.settings",
    "PeerStorageReader": ".checkpointing.peer_saves.storage_reader",
    "PeerStorageWriter": ".checkpointing.peer_saves.storage_writer",
    "Penalty": "pacekeeper_analysis.stragglers.pseudo_gradient",
    "Schedule": ".job",
    "SequenceCost": "pacekeeper_analysis.stragglers.length_cost",
    "Step": ".step",
    "init": ".job",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
