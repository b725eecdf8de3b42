"""Launchers and server together in a simulation: messages are slow, ranks die, launchers and the server restart.

In any order of events, a worker never starts a round twice or next to living ranks of another one. Once the events
end, all run in the same round, and stay in it.
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
    """A launcher's state machine with one rank that does what the test requests."""

    name: str
    incarnation: int = 0
    state: RoundState = field(default_factory=RoundState)
    plan: Plan = field(default_factory=Plan)
    view: RendezvousView | None = None
    rank: RankObservation | None = None
    dying: int = 0  # ticks that a killed rank still takes
    rounds: list[int] = field(default_factory=list)

    def build_settings(self) -> LauncherSettings:
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
        self.state, commands = decide_commands(self.state, seen, now, self.build_settings())
        for command in commands:
            match command:
                case StartRound():
                    assert self.rank is None or self.rank.is_gone, "a round started next to living ranks"
                    assert command.round not in self.rounds, "a round started twice"
                    self.rounds.append(command.round)
                    self.rank = RankObservation(0, completed_step=True, monitored=True)
                case KillRanks():
                    self.dying = self.dying or 2

    def fail(self) -> None:
        if self.rank is not None and not self.rank.is_gone:
            self.rank = replace(self.rank, exit_code=1)
            self.dying = 3

    def restart(self) -> None:
        """The launcher's process dies, its rank with it, and another replaces it; the plan is on disk."""
        self.incarnation += 1
        self.state, self.view, self.rank, self.dying, self.rounds = RoundState(), None, None, 0, []


class SimulatedJob:
    """Workers, a server, and two queues of messages for each pair: in order, but late."""

    def __init__(self, workers: int, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0.0
        self.workers = {name: FakeWorker(name) for name in "abcdefgh"[:workers]}
        self.rendezvous_by_membership: dict[int, Rendezvous] = {}
        self.reports: dict[str, ParticipantReport] = {}
        self.to_server: dict[str, list[ParticipantReport]] = {name: [] for name in self.workers}
        self.from_server: dict[str, list[RendezvousView]] = {name: [] for name in self.workers}

    def set_plan(self, plan: Plan, *names: str) -> None:
        for name in names or self.workers:
            self.workers[name].plan = plan

    def build_plan(self, membership: int) -> Plan:
        members = tuple(Member(name, "127.0.0.1", (rank,)) for rank, name in enumerate(self.workers))
        return Plan(version=membership, membership=membership, round=membership, members=members, restarts=10**6)

    def advance(self) -> None:
        self.now += TICK
        for name, worker in self.workers.items():
            worker.tick(self.now)
            if worker.state.membership is not None:
                report = build_participant_report(
                    worker.state, worker.plan.build_worker_plan(name), worker.build_settings()
                )
                if not self.to_server[name] or self.to_server[name][-1] != report:
                    self.to_server[name].append(report)
            if self.to_server[name] and self.chance.random() < 0.5:
                self._receive_report(self.to_server[name].pop(0))
            if self.from_server[name] and self.chance.random() < 0.5:
                worker.view = self.from_server[name].pop(0)

    def restart_server(self) -> None:
        """Lose the server's state. Connections break, and their messages are lost."""
        self.rendezvous_by_membership, self.reports = {}, {}
        for name in self.workers:
            self.disconnect(name)

    def disconnect(self, name: str) -> None:
        self.reports.pop(name, None)
        self.to_server[name].clear()
        self.from_server[name].clear()

    def _receive_report(self, report: ParticipantReport) -> None:
        self.reports[report.worker] = report
        membership = report.membership
        here = {name: one for name, one in self.reports.items() if one.membership == membership}
        before = self.rendezvous_by_membership.get(membership, Rendezvous(membership))
        rendezvous = advance_rendezvous(before, here)
        if rendezvous.stage is RendezvousStage.RUNNING and rendezvous.port is None:
            rendezvous = replace(rendezvous, port=PORT)
        self.rendezvous_by_membership[membership] = rendezvous
        for name, one in here.items() if rendezvous != before else [(report.worker, report)]:
            self.from_server[name].append(rendezvous.build_view(name, one.incarnation))

    def is_settled(self) -> bool:
        states = [worker.state for worker in self.workers.values()]
        return (
            all(state.stage is LauncherState.RUNNING and state.ending_since is None for state in states)
            and len({(state.membership, state.round) for state in states}) == 1
        )


@pytest.mark.parametrize("seed", range(40))
def test_all_workers_end_in_the_same_round(seed: int) -> None:
    chance = random.Random(seed)
    job = SimulatedJob(chance.randint(2, 5), chance)
    membership = 1
    job.set_plan(job.build_plan(membership))
    for _ in range(chance.randint(5, 25)):
        for _ in range(chance.randint(1, 40)):
            job.advance()
        victim = chance.choice(list(job.workers))
        match chance.choice(["fail", "fail", "several", "launcher", "host", "plan", "blip"]):
            case "fail":
                job.workers[victim].fail()
            case "several":
                for worker in job.workers.values():
                    worker.fail()
            case "launcher":
                job.workers[victim].restart()
                job.disconnect(victim)
            case "host":
                job.workers["a"].restart()
                job.restart_server()
            case "plan":
                membership += 1
                names = list(job.workers)
                chance.shuffle(names)
                for name in names:
                    job.set_plan(job.build_plan(membership), name)
                    for _ in range(chance.randint(0, 5)):
                        job.advance()
            case "blip":
                job.disconnect(victim)
    for _ in range(2_000):
        job.advance()
        if job.is_settled():
            break
    stages = {name: worker.state for name, worker in job.workers.items()}
    assert job.is_settled(), f"{stages}\n{job.rendezvous_by_membership}"
    before = {name: worker.state.round for name, worker in job.workers.items()}
    for _ in range(500):
        job.advance()
    assert {name: worker.state.round for name, worker in job.workers.items()} == before, "rounds without a reason"
