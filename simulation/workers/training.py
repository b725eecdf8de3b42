"""What jobs train: each job's script, and its rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..kubernetes.machine import Machine
from ..ports import SharedWorld
from .pod import WorkerPod
from .rank import SimulatedRank
from .rendezvous import SimulatedRendezvousServer
from .training_round import TrainingRound
from .training_script import TrainingScript


class SimulatedTraining(TrainingScript):
    """The training of one job."""

    def __init__(
        self, world: SharedWorld, uid: str, job: str, environment: dict[str, str], arguments: list[str]
    ) -> None:
        super().__init__(world, uid, job, environment, arguments)
        self.rounds: list[TrainingRound] = []
        """All rounds whose ranks have connected, in that order."""


class TrainingRegistry:
    """The trainings of all jobs."""

    def __init__(self, world: SharedWorld, nodes: Mapping[str, Machine]) -> None:
        self.on_rank_exit: list[Callable[[SimulatedRank], None]] = []
        """Called when a rank has exited."""
        self.on_exit: list[Callable[[WorkerPod], None]] = []
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
        self._nodes = nodes
        self._by_job: dict[str, SimulatedTraining] = {}
        self._stores: dict[tuple[str, int], TrainingRound] = {}

    def find_training(self, uid: str) -> SimulatedTraining | None:
        """Return a job's training; None: no worker of the job has run yet."""
        return self._by_job.get(uid)

    def get_or_create_training(self, worker: WorkerPod) -> SimulatedTraining:
        training = self._by_job.get(worker.job_uid)
        if training is None:
            training = SimulatedTraining(self._world, worker.job_uid, worker.job, worker.environment, worker.arguments)
            self._by_job[worker.job_uid] = training
        return training

    def find_round(self, address: str, port: int, rank: SimulatedRank) -> TrainingRound:
        """Return the round of the ranks that connect to this store."""
        training_round = self._stores.get((address, port))
        if training_round is None:
            training = self.get_or_create_training(rank.worker)
            training_round = self._stores[address, port] = TrainingRound(
                self._world,
                self._nodes,
                training,
                rank,
                address,
                on_start=training.rounds.append,
                on_step=self.on_step,
            )
        return training_round
