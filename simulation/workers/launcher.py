"""A launcher's edge, simulated: it sees, asks the real `rounds.decide`, and carries out the commands."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from pacekeeper.launcher.gpu import GpuEvent, Timing
from pacekeeper.launcher.heartbeat import next_beat
from pacekeeper.launcher.launcher import gpu_fault
from pacekeeper.launcher.rounds import (
    Command,
    Exit,
    Kill,
    Notify,
    RoundState,
    Seen,
    Start,
    Terminate,
    decide,
    report,
)
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.launcher.watch import BETWEEN_LOOKS, Look, Watch
from pacekeeper.launcher.words import describe
from pacekeeper.observe.windows import RankHistory
from pacekeeper_analysis.plan import Role, WorkerPlan
from pacekeeper_analysis.reports import FINISHED_MESSAGE, Fault, GpuHealth, LauncherState

from ..loop import Process
from .meeting import Guest, Host
from .rank import LEFT, MISTAKE, SIGKILL, Rank, Stand

if TYPE_CHECKING:
    from ..world import World
    from .worker import Worker

SAFETY = 5.0
"""Seconds between two looks where nothing says that there is something to be seen."""
CLOSELY = 0.25
"""The same while ranks stand still. The real launcher looks every 0.05 s."""
_SIGTERM = -15
_IMPORTS = (1.0, 3.0)
"""Seconds from the container's start until the launcher follows the plan."""
_READS = (0.0, 0.05)
"""Seconds until it sees a new plan."""
_SCRIPT_STARTS = (0.3, 1.2)
_KILLS = (0.01, 0.08)
_COMES_AGAIN = 1.0
_STORE_TIMEOUT = 300.0
"""Seconds until a rank that cannot reach the store of its round gives up."""
_PROBES = (0.1, 1.0)
"""Seconds that probes of neighbours take: with an answer of all, and without."""
_PHASE_DEADLINE = 150.0
"""Seconds that a rank may take for what its steps say nothing of, such as the first of them. By itself it is half an
hour, whose end no run would live to see."""
_GPU_PERIOD = 1.0
_GPU_LOOKS = Timing().check
_LINGER, _LOOKS_AROUND = 5.0, 0.1


class Launcher(Process):
    """Of one worker, from its container's start to its end."""

    def __init__(self, world: World, worker: Worker) -> None:
        super().__init__(world.loop, f"{worker.name}/launcher")
        self.state = RoundState()
        self.ranks: list[Rank] = []
        """Of the newest round here, in local order; gone ones included."""
        self.settings = LauncherSettings.from_environment(
            {**worker.environment, "PACEKEEPER_WORKER": worker.name, "PACEKEEPER_POD_IP": worker.address}
        )
        self.over = False
        self._world = world
        self._worker = worker
        self._folder = worker.folder
        self._random = world.random(f"launcher {worker.name}")
        self._follows = False
        self._silent_since = 0.0
        self._told_to_end = False
        self._woken = False
        self._tick_at = math.inf
        self._guest = Guest(world, self, worker.node, worker.name, self.wake)
        self._host: Host | None = None
        self._stores = 0
        self._watch: Watch | None = None
        self._inspection = 0
        self._inspecting = False
        self._gpu_faults: dict[str, None] = {}
        self._gpus: tuple[GpuHealth, ...] = ()
        self._exit: Exit | None = None

    def start(self) -> None:
        self.after(self._random.uniform(*_IMPORTS), self._begin)

    def _begin(self) -> None:
        trainings = self._world.trainings
        if trainings.outage and trainings.outage_at_import:
            self._worker.training.outage_at = self._world.now()
            self._worker.trainer_ends(1, trainings.outage)
            return
        incarnation = f"{int(1000 * self._world.wall(self._worker.node)):x}"
        self.settings = replace(self.settings, incarnation=incarnation, phase_deadline=_PHASE_DEADLINE)
        meeting_port = self._random.randint(32768, 60999)
        self._folder.heartbeat = replace(self._folder.heartbeat, meeting_port=meeting_port)
        self._follows = True
        self._turn()

    # What others do to it.

    def wake(self) -> None:
        """There may be something to be seen."""
        if self._follows and not self._woken and not self.over:
            self._woken = True
            self.after(0.0, self._turn)

    def read_plan(self) -> None:
        """There is a new one."""
        self.after(self._random.uniform(*_READS), self.wake)

    def end(self) -> None:
        """SIGTERM."""
        self.after(0.0, self._end)

    def _end(self) -> None:
        self._told_to_end = True
        if self._follows:
            self.wake()
        else:
            self._worker.trainer_ends(LEFT)

    def pause(self) -> None:
        self.refresh()
        self._silent_since = self._world.now()
        super().pause()

    def kill(self) -> None:
        if not self.paused:
            self._silent_since = self._world.now()
        super().kill()

    def gpu_error(self, event: GpuEvent) -> None:
        self.after(self._random.uniform(0.0, _GPU_PERIOD), self._take_gpu_error, event)

    def gpu_health(self, gpus: tuple[GpuHealth, ...]) -> None:
        """As NVML says from now on, whenever it is asked."""
        self._gpus = gpus
        self.after(self._random.uniform(0.0, _GPU_LOOKS), self._look_at_gpus)

    def sign(self) -> float | None:
        """When it has given its last sign of life (virtual seconds); None: none is expected."""
        if not self._follows or self.over:
            return None
        return self._silent_since if self.paused or self.dead else self._world.now()

    def refresh(self) -> None:
        """The heartbeat as it is written by now."""
        if self._follows and not self.over and not self.paused and not self.dead:
            self._write_heartbeat(self._world.now())

    # A turn.

    def _turn(self) -> None:
        self._woken = False
        if self.over:
            return
        now, plan = self._world.now(), self._folder.plan
        self.state, commands = decide(self.state, self._see(plan, now), now, self.settings)
        for command in commands:
            self._do(command)
        self._meet(plan)
        self._look_at_ranks(self._write_heartbeat(now), now)
        if self._exit is not None:
            self._part(self._exit)
        elif commands:
            self.wake()
        else:
            self._plan_tick(now)

    def _see(self, plan: WorkerPlan | None, now: float) -> Seen:
        return Seen(
            wall=self._world.wall(self._worker.node),
            plan=plan,
            view=self._guest.view,
            ranks=[rank.seen() for rank in self.ranks],
            told_to_end=self._told_to_end,
            operator_age=now - self._folder.contact,
            peers_age=now - self._peers_heard_at(plan),
        )

    def _peers_heard_at(self, plan: WorkerPlan | None) -> float:
        if plan is None or plan.workers <= 1:
            return self._world.now()
        if self._host is not None and plan.serves_store:
            return self._host.heard_others_at(self._worker.name)
        return self._guest.heard_at

    def _plan_tick(self, now: float) -> None:
        """The next look where nothing happens until then."""
        at = min(at for at in self._times(now) if at > now)
        if at < self._tick_at:
            self._tick_at = at
            self.after(at - now, self._tick, at)

    def _tick(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = math.inf
            self.wake()

    def _times(self, now: float) -> list[float]:
        """At which `decide` may do something else, and looks at ranks."""
        state, settings = self.state, self.settings
        times = [now + SAFETY, state.gathering_since + settings.gather_timeout]
        if any(rank.alive and (rank.still or rank.run is None or rank.run.stands) for rank in self.ranks):
            times.append(now + CLOSELY)
        if state.failure is not None:
            times.append(state.failed_at + settings.settle)
        if state.running and state.leaving_since is not None:
            times.append(state.leaving_since + settings.grace)
        if state.running and state.ending_since is not None:
            times.append(state.kill_at if state.killed_at is None else state.killed_at + settings.kill_timeout + 0.01)
        if state.running or state.stage is LauncherState.LOST:
            heard = max(self._folder.contact, self._peers_heard_at(self._folder.plan))
            times.append(heard + settings.contact_timeout + 0.01)
        return times

    def _do(self, command: Command) -> None:
        world = self._world
        match command:
            case Start():
                self._start_round(command)
            case Terminate():
                for rank in self.ranks:
                    rank.leaving = True
                    if rank.run is None:  # nothing of the library is there yet that hears the signal
                        world.after(self._random.uniform(*_KILLS), rank.end, _SIGTERM)
            case Kill():
                self._stop_watching()
                for rank in self.ranks:
                    world.after(self._random.uniform(*_KILLS), rank.end, SIGKILL)
            case Notify():
                self._notify(command.fault)
            case Exit():
                self._exit = command

    def _notify(self, fault: Fault) -> None:
        self._world.story.tell(self._worker.name, describe(fault))
        self._folder.faults[fault.name] = fault
        self._worker.sidecar.look_at_faults()

    # Rounds.

    def _start_round(self, command: Start) -> None:
        plan, now = command.plan, self._world.now()
        states = {rank.local: rank.state(now) for rank in self.ranks if rank.run is not None}
        earlier = plan.step_seconds
        if self._watch is not None:
            earlier = self._watch.step_seconds(states) or earlier
        self._stop_watching()
        before = {rank.local: rank for rank in self.ranks}
        self.ranks = []
        for local, number in enumerate(plan.ranks):
            rank = Rank(self._worker, local, number, command.round, plan.membership, plan.world_size)
            rank.history = _history(before.get(local), rank, self._worker.window_steps)
            self.ranks.append(rank)
            until = now + _STORE_TIMEOUT
            self._world.after(self._random.uniform(*_SCRIPT_STARTS), self._come, rank, command, until)
        self._watch = Watch(self.settings, self._longest_step, self._is_stopped, earlier)

    def _come(self, rank: Rank, command: Start, until: float) -> None:
        """The rank's script has come to where it meets its peers."""
        world, plan = self._world, command.plan
        if not rank.alive:
            return
        host = world.trainings.hosts.get(plan.store)
        if rank.still:
            world.after(_COMES_AGAIN, self._come, rank, command, until)
        elif world.trainings.outage:
            self._worker.training.outage_at = world.now()
            rank.end(1, world.trainings.outage)
        elif self._worker.script_fails or plan.world_size % self._worker.training.replica_ranks:
            self._worker.training.failed_on[self._worker.name] = None
            if self._worker.script_error == MISTAKE:
                self._worker.training.mistakes_on[self._worker.name] = None
            rank.end(1, self._worker.script_error)
        elif host is not None and not host.process.paused and world.network.reaches(self._worker.node, host.node):
            world.trainings.run_at(plan.store.rpartition(":")[0], command.port, rank).join(rank)
        elif world.now() > until:
            rank.end(1, "torch.distributed.DistStoreError: timed out")
        else:
            world.after(_COMES_AGAIN, self._come, rank, command, until)

    def _meet(self, plan: WorkerPlan | None) -> None:
        """Sits in the meeting that the plan names, serves it where the plan says so, and says how things stand."""
        guest = self._guest
        if plan is None or plan.role is not Role.MEMBER or self.state.membership != plan.membership:
            guest.leave()
            return
        if plan.serves_store:
            if self._host is None or self._host.place != plan.store:
                if self._host is not None:
                    self._host.close()
                self._host = Host(self._world, self, self._worker.node, plan.store, self._open_store)
            self._host.admit(plan.membership, plan.secret)
        guest.attend(plan.store, plan.membership, plan.secret)
        guest.say(report(self.state, plan, self.settings))

    def _open_store(self) -> int:
        self._stores += 1
        return 10_000 + self._stores

    def _part(self, exit_: Exit) -> None:
        """The host of a meeting that has finished stays until the others have heard so."""
        self.over = True
        self._stop_watching()
        for rank in self.ranks:
            rank.end(SIGKILL)
        self._world.story.tell(self._worker.name, f"ends with code {exit_.code}: {exit_.why}")
        self._linger(exit_.code, self._world.now() + (_LINGER if exit_.code == 0 else 0.0))

    def _linger(self, code: int, until: float) -> None:
        if self._host is not None and self._host.has_guests(self._worker.name) and self._world.now() < until:
            self.after(_LOOKS_AROUND, self._linger, code, until)
            return
        if self._host is not None:
            self._host.close()
        self._guest.leave()
        finished = code == 0 and self.state.stage is LauncherState.FINISHED
        self._worker.trainer_ends(code, FINISHED_MESSAGE if finished else "")

    # What it tells.

    def _write_heartbeat(self, now: float) -> dict[int, np.void]:
        """Its ranks' states, by which it is written."""
        folder, wall = self._folder, self._world.wall(self._worker.node)
        states = {rank.local: rank.state(now) for rank in self.ranks if rank.run is not None}
        folder.heartbeat = next_beat(
            folder.heartbeat, self.state, folder.plan, states.values(), wall, now, folder.refused, folder.checkpoints
        )
        self._worker.sidecar.look_at_heartbeat()
        return states

    def _look_at_ranks(self, states: dict[int, np.void], now: float) -> None:
        watch = self._watch
        if watch is None or not self.state.running or self.state.ending_since is not None:
            return
        if watch.look(states, now) and not self._inspecting:
            watch.begin_report(now)
            self._inspecting = True
            plan = self._folder.plan
            neighbours = () if plan is None else plan.neighbours
            unreachable = [address for address in neighbours if not self._reaches(address)]
            seconds = max(BETWEEN_LOOKS, _PROBES[bool(unreachable)])
            first = self._look(now)
            self.after(seconds, self._report, self._inspection, watch, states, first, unreachable, self.state)

    def _report(
        self,
        inspection: int,
        watch: Watch,
        states: dict[int, np.void],
        first: dict[int, Look],
        unreachable: list[str],
        state: RoundState,
    ) -> None:
        if inspection == self._inspection:
            self._inspecting = False
            now, wall = self._world.now(), self._world.wall(self._worker.node)
            self._notify(watch.report(state, states, (first, self._look(now)), unreachable, (), now, wall))

    def _stop_watching(self) -> None:
        self._inspection += 1
        self._inspecting = False

    def _look(self, now: float) -> dict[int, Look]:
        return {rank.local: rank.look(now) for rank in self.ranks if rank.alive}

    def _reaches(self, address: str) -> bool:
        there = self._world.network.addresses.get(address)
        return there is not None and self._world.network.reaches(self._worker.node, there)

    def _longest_step(self, local: int) -> float:
        window = self.ranks[local].history.window(self.ranks[local].number)
        return max((median(each) for each in (window.step_seconds, window.transfers) if each), default=0.0)

    def _is_stopped(self, local: int) -> bool:
        return Stand.STOPPED in self.ranks[local].still

    def _look_at_gpus(self) -> None:
        if self._follows and not self.over:
            self._folder.heartbeat = replace(self._folder.heartbeat, gpus=self._gpus)
            self._worker.sidecar.look_at_heartbeat()

    def _take_gpu_error(self, event: GpuEvent) -> None:
        if not self._follows or self.over:
            return
        fault = gpu_fault(event, self.state, self.settings, self._world.wall(self._worker.node))
        if fault.name not in self._gpu_faults:
            self._gpu_faults[fault.name] = None
            self._notify(fault)


def _history(before: Rank | None, rank: Rank, window_steps: int) -> RankHistory:
    """As the sidecar keeps it: over all rounds in which the same rank is at this place."""
    if before is None or before.number != rank.number or before.run is None:
        return RankHistory(window_steps)
    before.history.start_round()
    return before.history
