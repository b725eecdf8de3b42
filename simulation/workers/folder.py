"""A pod's runtime folder: what launcher, sidecar and ranks leave there for each other. It outlives all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pacekeeper.keep.news import NO_CHECKPOINT_STATUS, CheckpointStatus
from pacekeeper_analysis.plan import WorkerPlan
from pacekeeper_analysis.reports import FaultReport, Heartbeat

from .volume import SavedState


@dataclass
class PodFolder:
    heartbeat: Heartbeat
    plan: WorkerPlan | None = None
    operator_contact_at: float = float("-inf")
    """Virtual seconds of the operator's last answer."""
    launcher_alive_at: float | None = None
    """Virtual seconds of the launcher's last sign of life; None: none is expected."""
    refusal: str = ""
    checkpoints: CheckpointStatus = NO_CHECKPOINT_STATUS
    faults: dict[str, FaultReport] = field(default_factory=dict)
    """By name; the sidecar takes away what is delivered."""
    snapshot: SavedState | None = None
    """In the pod's memory."""
