"""A job's script: what its ranks train, what that costs, and its volume."""

from __future__ import annotations

import math

from ..ports import SharedWorld
from .volume import CheckpointVolume

REPLICA_RANKS = "REPLICA_RANKS"


class TrainingScript:
    """The script of one job, by its UID. Times are seconds."""

    def __init__(
        self, world: SharedWorld, uid: str, job: str, environment: dict[str, str], arguments: list[str]
    ) -> None:
        random = world.create_random(f"training {uid}")
        self.uid = uid
        self.job = job
        self.last_step = int(arguments[arguments.index("--steps") + 1]) if "--steps" in arguments else None
        """Steps after which it ends; None: it does not."""
        self.checkpoint_every = int(environment.get("PACEKEEPER_CHECKPOINT_EVERY") or 0)
        self.snapshot_every = random.randint(5, 20)
        self.warmup_steps = 20
        self.replica_ranks = int(environment.get(REPLICA_RANKS) or 1)
        """It trains only with a multiple of this number of ranks."""
        self.samples = 8
        """Samples of each rank per step of its first round."""
        self.global_batch = 0
        """The script's global batch. It is fixed when the first round starts."""
        self.sample_seconds = random.uniform(0.05, 0.12)
        self.fixed_seconds = random.uniform(0.01, 0.05)
        if "STEP_SECONDS" in environment:
            self.sample_seconds, self.fixed_seconds = 0.0, float(environment["STEP_SECONDS"])
        self.communication_seconds = random.uniform(0.02, 0.06)
        self.failed_on: dict[str, None] = {}
        """Workers on which its script has failed before a first step, or seems to have."""
        self.mistakes_on: dict[str, None] = {}
        """Those of them on which it was an error in the source code."""
        self.outage_at = -math.inf
        """When a rank or a worker last failed at its start because of an outage (virtual seconds)."""
        self.volume = CheckpointVolume(int(environment.get("PACEKEEPER_CHECKPOINT_KEEP") or 3))
