"""What jobs train: each job's script and its costs, its volume, and its rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .training_round import TrainingRound
from .volume import CheckpointVolume

if TYPE_CHECKING:
    from ..world import World
    from .rank import SimulatedRank
    from .rendezvous import SimulatedRendezvousServer
    from .worker import SimulatedWorker


REPLICA_RANKS = "REPLICA_RANKS"


class SimulatedTraining:
    """The training of one job, by its UID. Times are seconds."""

    def __init__(self, world: World, uid: str, job: str, environment: dict[str, str], arguments: list[str]) -> None:
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
        self.rounds: list[TrainingRound] = []
        """All rounds whose ranks have connected, in that order."""
        self.volume = CheckpointVolume(int(environment.get("PACEKEEPER_CHECKPOINT_KEEP") or 3))


class TrainingRegistry:
    """The trainings of all jobs."""

    def __init__(self, world: World) -> None:
        self.on_rank_exit: list[Callable[[SimulatedRank], None]] = []
        """Called when a rank has exited."""
        self.on_exit: list[Callable[[SimulatedWorker], None]] = []
        """Called when a worker's trainer has exited."""
        self.on_step: list[Callable[[TrainingRound], None]] = []
        """Called at each sync point after a step, and when the ranks have restored their state."""
        self.outage = ""
        """Error of each rank that starts during an outage; "": there is none."""
        self.outage_at_import = False
        """Whether workers fail with it before their ranks start."""
        self.rendezvous_servers: dict[str, SimulatedRendezvousServer] = {}
        """Launchers that serve a rendezvous, by address:port."""
        self._world = world
        self._by_job: dict[str, SimulatedTraining] = {}
        self._stores: dict[tuple[str, int], TrainingRound] = {}

    def find_training(self, uid: str) -> SimulatedTraining | None:
        """Return a job's training; None: no worker of the job has run yet."""
        return self._by_job.get(uid)

    def get_or_create_training(self, worker: SimulatedWorker) -> SimulatedTraining:
        training = self._by_job.get(worker.job_uid)
        if training is None:
            training = SimulatedTraining(self._world, worker.job_uid, worker.job, worker.environment, worker.arguments)
            self._by_job[worker.job_uid] = training
        return training

    def find_round(self, address: str, port: int, rank: SimulatedRank) -> TrainingRound:
        """Return the round of the ranks that connect to this store."""
        training_round = self._stores.get((address, port))
        if training_round is None:
            training_round = self._stores[address, port] = TrainingRound(
                self._world, rank.worker.training, rank, address
            )
        return training_round
