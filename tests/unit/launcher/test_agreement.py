"""Launchers and host together in a made-up world: messages are slow, ranks die, launchers and the host start again.

Whatever the order, a worker never starts a round twice or beside living ranks of another one, and once the world is
quiet all run in the same round, and stay in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from pacekeeper.launcher.rendezvous.rendezvous import (
    ParticipantReport,
    Rendezvous,
    RendezvousStage,
    RendezvousView,
    advance_rendezvous,
)
from pacekeeper.launcher.rendezvous.rounds import (
    KillRanks,
    LauncherObservation,
    RankObservation,
    RoundState,
    StartRound,
    build_participant_report,
    decide_commands,
)
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_analysis.protocol.reports import LauncherState

TICK = 0.02
PORT = 1


@dataclass
class FakeWorker:
    """A launcher's state machine with one rank that does what the test says."""

    name: str
    incarnation: int = 0
    state: RoundState = field(default_factory=RoundState)
    plan: Plan = field(default_factory=Plan)
    view: RendezvousView | None = None
    rank: RankObservation | None = None
    dying: int = 0  # ticks that a killed rank still takes
    rounds: list[int] = field(default_factory=list)

    def settings(self) -> LauncherSettings:
        return LauncherSettings(worker=self.name, address="127.0.0.1", incarnation=str(self.incarnation))

    def tick(self, now: float) -> None:
        if self.dying:
            self.dying -= 1
            if not self.dying:
                assert self.rank is not None
                self.rank = replace(self.rank, is_gone=True, exit_code=self.rank.exit_code or -9)
        seen = LauncherObservation(
            wall_time=now,
            plan=self.plan.build_worker_plan(self.name),
            view=self.view,
            ranks=() if self.rank is None else (self.rank,),
            operator_age=0.0,
            peers_age=0.0,
        )
        self.state, commands = decide_commands(self.state, seen, now, self.settings())
        for command in commands:
            match command:
                case StartRound():
                    assert self.rank is None or self.rank.is_gone, "a round started beside living ranks"
                    assert command.round not in self.rounds, "a round started twice"
                    self.rounds.append(command.round)
                    self.rank = RankObservation(0, completed_step=True, monitored=True)
                case KillRanks():
                    self.dying = self.dying or 2

    def fail(self) -> None:
        if self.rank is not None and not self.rank.is_gone:
            self.rank = replace(self.rank, exit_code=1)
            self.dying = 3

    def start_again(self) -> None:
        """The launcher's process dies, its rank with it, and another takes its place; the plan is on disk."""
        self.incarnation += 1
        self.state, self.view, self.rank, self.dying, self.rounds = RoundState(), None, None, 0, []


class World:
    """Workers, a host, and two queues of messages for each pair: in order, but late."""

    def __init__(self, workers: int, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.workers = {name: FakeWorker(name) for name in "abcdefgh"[:workers]}
        self.halls: dict[int, Rendezvous] = {}
        self.reports: dict[str, ParticipantReport] = {}
        self.to_host: dict[str, list[ParticipantReport]] = {name: [] for name in self.workers}
        self.from_host: dict[str, list[RendezvousView]] = {name: [] for name in self.workers}

    def give(self, plan: Plan, *names: str) -> None:
        for name in names or self.workers:
            self.workers[name].plan = plan

    def plan(self, membership: int) -> Plan:
        members = tuple(Member(name, "127.0.0.1", (rank,)) for rank, name in enumerate(self.workers))
        return Plan(version=membership, membership=membership, round=membership, members=members, restarts=10**6)

    def turn(self) -> None:
        self.now += TICK
        for name, worker in self.workers.items():
            worker.tick(self.now)
            if worker.state.membership is not None:
                said = build_participant_report(worker.state, worker.plan.build_worker_plan(name), worker.settings())
                if not self.to_host[name] or self.to_host[name][-1] != said:
                    self.to_host[name].append(said)
            if self.to_host[name] and self.chance.random() < 0.5:
                self._arrive(self.to_host[name].pop(0))
            if self.from_host[name] and self.chance.random() < 0.5:
                worker.view = self.from_host[name].pop(0)

    def restart_host(self) -> None:
        """What the host knew is lost; connections break, and what was under way with them."""
        self.halls, self.reports = {}, {}
        for name in self.workers:
            self.disconnect(name)

    def disconnect(self, name: str) -> None:
        self.reports.pop(name, None)
        self.to_host[name].clear()
        self.from_host[name].clear()

    def _arrive(self, said: ParticipantReport) -> None:
        self.reports[said.worker] = said
        membership = said.membership
        here = {name: one for name, one in self.reports.items() if one.membership == membership}
        before = self.halls.get(membership, Rendezvous(membership))
        meeting = advance_rendezvous(before, here)
        if meeting.stage is RendezvousStage.RUNNING and meeting.port is None:
            meeting = replace(meeting, port=PORT)
        self.halls[membership] = meeting
        for name, one in here.items() if meeting != before else [(said.worker, said)]:
            self.from_host[name].append(meeting.build_view(name, one.incarnation))

    def settled(self) -> bool:
        states = [worker.state for worker in self.workers.values()]
        return (
            all(state.stage is LauncherState.RUNNING and state.ending_since is None for state in states)
            and len({(state.membership, state.round) for state in states}) == 1
        )


@pytest.mark.parametrize("seed", range(40))
def test_in_the_end_all_run_in_the_same_round(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance.randint(2, 5), chance)
    membership = 1
    world.give(world.plan(membership))
    for _ in range(chance.randint(5, 25)):
        for _ in range(chance.randint(1, 40)):
            world.turn()
        victim = chance.choice(list(world.workers))
        match chance.choice(["fail", "fail", "several", "launcher", "host", "plan", "blip"]):
            case "fail":
                world.workers[victim].fail()
            case "several":
                for worker in world.workers.values():
                    worker.fail()
            case "launcher":
                world.workers[victim].start_again()
                world.disconnect(victim)
            case "host":
                world.workers["a"].start_again()
                world.restart_host()
            case "plan":
                membership += 1
                names = list(world.workers)
                chance.shuffle(names)
                for name in names:
                    world.give(world.plan(membership), name)
                    for _ in range(chance.randint(0, 5)):
                        world.turn()
            case "blip":
                world.disconnect(victim)
    for _ in range(2_000):
        world.turn()
        if world.settled():
            break
    stages = {name: worker.state for name, worker in world.workers.items()}
    assert world.settled(), f"{stages}\n{world.halls}"
    before = {name: worker.state.round for name, worker in world.workers.items()}
    for _ in range(500):
        world.turn()
    assert {name: worker.state.round for name, worker in world.workers.items()} == before, "rounds without a reason"
