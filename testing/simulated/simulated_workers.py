"""Simulated workers without an operator: a desk answers their sidecars from a plan that is made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import Evidence, FaultKind, FaultReport, Heartbeat
from pacekeeper_analysis.protocol.requests import Requests, WorkerRequests
from pacekeeper_operator.api.training_job import JobSpec, TrainingJob
from pacekeeper_operator.pods.manifests import Installation, build_worker_pod
from simulation.workers.training_round import TrainingRound
from simulation.workers.worker import SimulatedWorker
from simulation.world import NAMESPACE, World, WorldSettings

SECRET = "ab" * 32


class FakeEndpoint:
    """Answers as the operator's endpoint does, and writes everything down."""

    def __init__(self) -> None:
        self.plan = Plan()
        self.requests = Requests()
        self.is_unavailable = False
        self.heartbeats: dict[str, Heartbeat] = {}
        """The newest of each worker."""
        self.silences: list[tuple[str, float]] = []
        self.faults: list[FaultReport] = []
        self.evidence: list[Evidence] = []
        self._plan_changed = asyncio.Event()

    def give_plan(self, plan: Plan) -> None:
        self.plan = plan
        changed, self._plan_changed = self._plan_changed, asyncio.Event()
        changed.set()

    def give_requests(self, requests: Requests) -> None:
        self.requests = requests
        self.give_plan(self.plan)

    def open_client(self, _place: str, _source: str) -> FakeEndpoint:
        return self

    async def call(
        self, _method: str, path: str, query: Mapping[str, str], body: Any, _token: str, _leader: str = ""
    ) -> tuple[int, Any]:
        await asyncio.sleep(0.002)
        if self.is_unavailable:
            raise ConnectionRefusedError
        if path == "/v1/faults":
            self.faults.append(FaultReport.from_json(body))
            return 202, None
        if path.startswith("/v1/evidence/"):
            self.evidence.append(Evidence.from_json(body))
            return 202, None
        heartbeat = Heartbeat.from_json(body)
        self.heartbeats[heartbeat.worker] = heartbeat
        if heartbeat.launcher_silent_seconds:
            self.silences.append((heartbeat.worker, heartbeat.launcher_silent_seconds))
        if self.plan.version <= int(query.get("after", -1)) and not self._has_new_requests(heartbeat.worker, query):
            try:
                async with asyncio.timeout(float(query["wait"])):
                    await self._plan_changed.wait()
            except TimeoutError:
                return 204, None
        plan, requests = self.plan.build_worker_plan(heartbeat.worker), self._build_requests(heartbeat.worker)
        return 200, PollAnswer(plan, requests).to_json()

    def _has_new_requests(self, worker: str, query: Mapping[str, str]) -> bool:
        return self._build_requests(worker).identity != query["requests"]

    def _build_requests(self, worker: str) -> WorkerRequests:
        return self.requests.build_worker_requests(worker, is_member=self.plan.has_member(worker))


class SimulatedTeam:
    """The workers of one job, each on a node of its own, in a world without operators."""

    def __init__(self, seed: int = 1, *, arguments: Sequence[str] = (), every: int = 10, ranks: int = 1) -> None:
        self.world = World(seed, WorldSettings(operators=0))
        self.endpoint = FakeEndpoint()
        self.world.endpoint = self.endpoint  # type: ignore[assignment]  # all that sidecars call
        self.workers: dict[str, SimulatedWorker] = {}
        self.exits: dict[str, tuple[int, str]] = {}
        self.ranks = ranks
        container = {"name": "trainer", "image": "i", "args": list(arguments)}
        spec = {"template": {"spec": {"containers": [container]}}, "checkpoint": {"everySteps": every}}
        self.job = TrainingJob(
            NAMESPACE, "j", "uid-j", 1, JobSpec.parse({"replicas": 2, "nprocPerNode": ranks, **spec})
        )

    def start(self, *letters: str) -> None:
        """Workers `a`, `b`, …"""
        for letter in letters:
            ordinal = len(self.workers)
            pod = build_worker_pod(self.job, ordinal, 0, Installation("https://operator", "PEM"))
            pod["metadata"]["uid"] = f"uid-{letter}"
            node, address = f"node-{ordinal}", f"10.0.0.{ordinal + 1}"
            self.world.network.addresses[address] = node

            self.workers[letter] = self.world.create_worker(pod, node, address, partial(self._exited, letter))
            self.workers[letter].start()

    def _exited(self, letter: str, code: int, reason: str, message: str = "") -> None:  # noqa: ARG002  # as kubelets do
        self.exits[letter] = (code, reason)

    def __getitem__(self, letter: str) -> SimulatedWorker:
        return self.workers[letter]

    def assign_ranks(self, *letters: str, restarts: int = 5, **changes: Any) -> None:
        """A new membership of these workers, in this order."""
        ranks = iter(range(self.ranks * len(letters)))
        members = tuple(
            Member(self[letter].name, self[letter].address, tuple(next(ranks) for _ in range(self.ranks)))
            for letter in letters
        )
        membership = self.endpoint.plan.membership + 1
        round_ = 1 + max((heartbeat.round for heartbeat in self.endpoint.heartbeats.values()), default=0)
        self.change_plan(
            membership=membership,
            round=round_,
            members=members,
            store_port=self.get_heartbeat(letters[0]).rendezvous_port or 29400,
            restarts=restarts,
            secret=SECRET,
            **changes,
        )

    def change_plan(self, **changes: Any) -> None:
        """The plan's next version."""
        self.endpoint.give_plan(replace(self.endpoint.plan, version=self.endpoint.plan.version + 1, **changes))

    def get_heartbeat(self, letter: str) -> Heartbeat:
        return self.endpoint.heartbeats.get(self[letter].name, Heartbeat())

    def list_faults(self, kind: FaultKind) -> list[FaultReport]:
        return [fault for fault in self.endpoint.faults if fault.kind is kind]

    def find_letter(self, name: str) -> str:
        return next(letter for letter, worker in self.workers.items() if worker.name == name)

    @property
    def rounds(self) -> list[TrainingRound]:
        """Whose ranks have met."""
        training = self.world.trainings.find_training("uid-j")
        return [] if training is None else training.rounds

    @property
    def newest_round(self) -> TrainingRound:
        """The newest."""
        return self.rounds[-1]

    def wait(self, seconds: float) -> None:
        self.world.run(asyncio.sleep(seconds))

    def wait_until(self, condition: Callable[[], object], within: float = 60.0) -> float:
        """Seconds until it holds."""
        start = self.world.now()
        while not condition():
            assert self.world.now() - start < within, "\n".join(map(str, self.world.log.lines[-40:]))
            self.wait(0.05)
        return self.world.now() - start

    def start_and_train(self, *letters: str, steps: int = 8, **changes: Any) -> None:
        """Starts these workers, assigns their ranks, and waits until `steps` steps are done."""
        self.start(*(letter for letter in letters if letter not in self.workers))
        self.wait_until(lambda: all(self.get_heartbeat(letter).rendezvous_port for letter in letters))
        self.assign_ranks(*letters, **changes)
        membership = self.endpoint.plan.membership
        self.wait_until(lambda: all(self.get_heartbeat(letter).membership == membership for letter in letters))
        self.wait_for_steps(steps)

    def wait_for_steps(self, count: int, within: float = 200.0) -> None:
        """Waits until `count` more steps are done in the newest round."""
        membership = self.endpoint.plan.membership
        self.wait_until(
            lambda: (
                self.rounds
                and self.newest_round.membership == membership
                and not self.newest_round.over
                and self.newest_round.sync_points > 0
            )
        )
        training_round, goal = self.newest_round, self.newest_round.step + count
        self.wait_until(lambda: training_round.step >= goal, within)
