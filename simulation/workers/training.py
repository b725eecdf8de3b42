"""What jobs train: each one's script and its costs, its volume, and the runs of its rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from .run import Run
from .volume import Volume

if TYPE_CHECKING:
    from ..world import World
    from .meeting import Host
    from .rank import Rank
    from .worker import Worker


REPLICA_RANKS = "REPLICA_RANKS"


class Training:
    """Of one job, that is of one uid. Times are seconds."""

    def __init__(self, world: World, uid: str, job: str, environment: dict[str, str], arguments: list[str]) -> None:
        random = world.random(f"training {uid}")
        self.uid = uid
        self.job = job
        self.until = int(arguments[arguments.index("--steps") + 1]) if "--steps" in arguments else None
        """Steps after which it ends; None: it does not."""
        self.checkpoint_every = int(environment.get("PACEKEEPER_CHECKPOINT_EVERY") or 0)
        self.snapshot_every = random.randint(5, 20)
        self.warmup_steps = 20
        self.replica_ranks = int(environment.get(REPLICA_RANKS) or 1)
        """It trains with any multiple of so many ranks, and with no other number."""
        self.samples = 8
        """Of each rank in a step of its first round."""
        self.global_batch = 0
        """Of the script: fixed when its first round begins."""
        self.sample_seconds = random.uniform(0.05, 0.12)
        self.fixed_seconds = random.uniform(0.01, 0.05)
        if "STEP_SECONDS" in environment:
            self.sample_seconds, self.fixed_seconds = 0.0, float(environment["STEP_SECONDS"])
        self.communication_seconds = random.uniform(0.02, 0.06)
        self.failed_on: dict[str, None] = {}
        """Workers on which its script has failed before a first step, or seems to have."""
        self.mistakes_on: dict[str, None] = {}
        """Those of them on which it was an error in the script's text."""
        self.outage_at = -math.inf
        """When a rank or a worker last ended at its start because of an outage (virtual seconds)."""
        self.runs: list[Run] = []
        """All rounds whose ranks have met, in that order."""
        self.volume = Volume(int(environment.get("PACEKEEPER_CHECKPOINT_KEEP") or 3))


class Trainings:
    """Of all jobs."""

    def __init__(self, world: World) -> None:
        self.on_rank_exit: list[Callable[[Rank], None]] = []
        """Called when a rank has ended."""
        self.on_exit: list[Callable[[Worker], None]] = []
        """Called when a worker's trainer has ended."""
        self.on_step: list[Callable[[Run], None]] = []
        """Called when ranks have come to an ordinal after at least a step, and when they have restored their state."""
        self.outage = ""
        """Error of each rank that starts: what all need of their surroundings is away. "": nothing is."""
        self.outage_at_import = False
        """Whether workers end of it before their ranks start."""
        self.hosts: dict[str, Host] = {}
        """Launchers that serve a meeting, by address:port."""
        self._world = world
        self._by_job: dict[str, Training] = {}
        self._stores: dict[tuple[str, int], Run] = {}

    def of_job(self, uid: str) -> Training | None:
        """None: no worker of this job has run yet."""
        return self._by_job.get(uid)

    def of_worker(self, worker: Worker) -> Training:
        found = self._by_job.get(worker.job_uid)
        if found is None:
            found = Training(self._world, worker.job_uid, worker.job, worker.environment, worker.arguments)
            self._by_job[worker.job_uid] = found
        return found

    def run_at(self, address: str, port: int, rank: Rank) -> Run:
        """Of the ranks that meet at this store."""
        found = self._stores.get((address, port))
        if found is None:
            found = self._stores[address, port] = Run(self._world, rank.worker.training, rank, address)
        return found
