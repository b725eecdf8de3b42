"""A pod's runtime folder: what launcher, sidecar and ranks leave there for each other. It outlives all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pacekeeper.keep.news import NO_NEWS, CheckpointNews
from pacekeeper_analysis.plan import WorkerPlan
from pacekeeper_analysis.reports import Fault, Heartbeat

from .volume import Kept


@dataclass
class Folder:
    heartbeat: Heartbeat
    plan: WorkerPlan | None = None
    contact: float = float("-inf")
    """Virtual seconds of the operator's last answer."""
    sign: float | None = None
    """Virtual seconds of the launcher's last sign of life; None: none is expected."""
    refused: str = ""
    checkpoints: CheckpointNews = NO_NEWS
    faults: dict[str, Fault] = field(default_factory=dict)
    """By name; the sidecar takes away what is delivered."""
    snapshot: Kept | None = None
    """In the pod's memory."""
