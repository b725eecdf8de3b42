"""Simulated workers without an operator: a desk answers their sidecars from a plan that is made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pacekeeper_analysis.plan import Member, Plan
from pacekeeper_analysis.reports import Evidence, Fault, FaultKind, Heartbeat
from pacekeeper_operator.api import Job, JobSpec
from pacekeeper_operator.manifests import Installation, worker_pod
from simulation.workers.run import Run
from simulation.workers.worker import Worker
from simulation.world import NAMESPACE, World, WorldSettings

SECRET = "ab" * 32


class Desk:
    """Answers as the operator's endpoint does, and writes everything down."""

    def __init__(self) -> None:
        self.plan = Plan()
        self.away = False
        self.beats: dict[str, Heartbeat] = {}
        """The newest of each worker."""
        self.silences: list[tuple[str, float]] = []
        self.faults: list[Fault] = []
        self.evidence: list[Evidence] = []
        self._news = asyncio.Event()

    def give(self, plan: Plan) -> None:
        self.plan = plan
        news, self._news = self._news, asyncio.Event()
        news.set()

    def line(self, _place: str, _source: str) -> Desk:
        return self

    async def call(
        self, _method: str, path: str, query: Mapping[str, str], body: Any, _token: str, _leader: str = ""
    ) -> tuple[int, Any]:
        await asyncio.sleep(0.002)
        if self.away:
            raise ConnectionRefusedError
        if path == "/v1/faults":
            self.faults.append(Fault.from_json(body))
            return 202, None
        if path.startswith("/v1/evidence/"):
            self.evidence.append(Evidence.from_json(body))
            return 202, None
        beat = Heartbeat.from_json(body)
        self.beats[beat.worker] = beat
        if beat.launcher_silent_seconds:
            self.silences.append((beat.worker, beat.launcher_silent_seconds))
        if self.plan.version <= int(query["after"]):
            try:
                async with asyncio.timeout(float(query["wait"])):
                    await self._news.wait()
            except TimeoutError:
                return 204, None
        return 200, self.plan.part(beat.worker).to_json()


class Team:
    """The workers of one job, each on a node of its own, in a world without operators."""

    def __init__(self, seed: int = 1, *, arguments: Sequence[str] = (), every: int = 10, ranks: int = 1) -> None:
        self.world = World(seed, WorldSettings(operators=0))
        self.desk = Desk()
        self.world.endpoint = self.desk  # type: ignore[assignment]  # all that sidecars call
        self.workers: dict[str, Worker] = {}
        self.exits: dict[str, tuple[int, str]] = {}
        self.ranks = ranks
        container = {"name": "trainer", "image": "i", "args": list(arguments)}
        spec = {"template": {"spec": {"containers": [container]}}, "checkpoint": {"everySteps": every}}
        self.job = Job(NAMESPACE, "j", "uid-j", 1, JobSpec.parse({"replicas": 2, "nprocPerNode": ranks, **spec}))

    def start(self, *letters: str) -> None:
        """Workers `a`, `b`, …"""
        for letter in letters:
            place = len(self.workers)
            pod = worker_pod(self.job, place, 0, Installation("https://operator", "PEM"))
            pod["metadata"]["uid"] = f"uid-{letter}"
            node, address = f"node-{place}", f"10.0.0.{place + 1}"
            self.world.network.addresses[address] = node

            self.workers[letter] = self.world.launch(pod, node, address, partial(self._exited, letter))
            self.workers[letter].start()

    def _exited(self, letter: str, code: int, reason: str, message: str = "") -> None:  # noqa: ARG002  # as kubelets do
        self.exits[letter] = (code, reason)

    def __getitem__(self, letter: str) -> Worker:
        return self.workers[letter]

    def seat(self, *letters: str, restarts: int = 5, **changes: Any) -> None:
        """A new membership of these workers, in this order."""
        numbers = iter(range(self.ranks * len(letters)))
        members = tuple(
            Member(self[letter].name, self[letter].address, tuple(next(numbers) for _ in range(self.ranks)))
            for letter in letters
        )
        membership = self.desk.plan.membership + 1
        round_ = 1 + max((beat.round for beat in self.desk.beats.values()), default=0)
        self.change(
            membership=membership,
            round=round_,
            members=members,
            store_port=self.beat(letters[0]).meeting_port or 29400,
            restarts=restarts,
            secret=SECRET,
            **changes,
        )

    def change(self, **changes: Any) -> None:
        """The plan's next version."""
        self.desk.give(replace(self.desk.plan, version=self.desk.plan.version + 1, **changes))

    def beat(self, letter: str) -> Heartbeat:
        return self.desk.beats.get(self[letter].name, Heartbeat())

    def faults(self, kind: FaultKind) -> list[Fault]:
        return [fault for fault in self.desk.faults if fault.kind is kind]

    def letter(self, name: str) -> str:
        return next(letter for letter, worker in self.workers.items() if worker.name == name)

    @property
    def runs(self) -> list[Run]:
        """Whose ranks have met."""
        training = self.world.trainings.of_job("uid-j")
        return [] if training is None else training.runs

    @property
    def run(self) -> Run:
        """The newest."""
        return self.runs[-1]

    def wait(self, seconds: float) -> None:
        self.world.run(asyncio.sleep(seconds))

    def until(self, holds: Callable[[], object], within: float = 60.0) -> float:
        """Seconds until it holds."""
        began = self.world.now()
        while not holds():
            assert self.world.now() - began < within, "\n".join(map(str, self.world.story.lines[-40:]))
            self.wait(0.05)
        return self.world.now() - began

    def train(self, *letters: str, steps: int = 8, **changes: Any) -> None:
        """Starts these workers, seats them, and waits until so many steps are done."""
        self.start(*(letter for letter in letters if letter not in self.workers))
        self.until(lambda: all(self.beat(letter).meeting_port for letter in letters))
        self.seat(*letters, **changes)
        membership = self.desk.plan.membership
        self.until(lambda: all(self.beat(letter).membership == membership for letter in letters))
        self.step(steps)

    def step(self, count: int, within: float = 200.0) -> None:
        """Waits until so many more steps are done in the newest round."""
        membership = self.desk.plan.membership
        self.until(
            lambda: self.runs and self.run.membership == membership and not self.run.over and self.run.ordinals > 0
        )
        run, goal = self.run, self.run.step + count
        self.until(lambda: run.step >= goal, within)
