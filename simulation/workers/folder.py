"""A pod's runtime folder: the data that launcher, sidecar, and ranks exchange. It outlives all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pacekeeper.checkpointing.storage.checkpoint_status import NO_CHECKPOINT_STATUS, CheckpointStatus
from pacekeeper_analysis.protocol.plan import WorkerPlan
from pacekeeper_analysis.protocol.reports import FaultReport, Heartbeat
from pacekeeper_analysis.protocol.requests import WorkerRequests

from .volume import SavedState


@dataclass
class PodFolder:
    heartbeat: Heartbeat
    plan: WorkerPlan | None = None
    requests: WorkerRequests = field(default_factory=WorkerRequests)
    operator_contact_at: float = float("-inf")
    """Virtual seconds of the operator's last answer."""
    launcher_alive_at: float | None = None
    """Virtual seconds at which the launcher was last alive; None: it is not expected to be."""
    refusal: str = ""
    checkpoints: CheckpointStatus = NO_CHECKPOINT_STATUS
    faults: dict[str, FaultReport] = field(default_factory=dict)
    """By name. The sidecar removes delivered ones."""
    snapshot: SavedState | None = None
    """The snapshot in the pod's memory."""
