"""The simulated I/O of a launcher: it observes, calls the real `rounds.decide_commands`, and executes the commands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np

from pacekeeper.health.fault_formatting import describe_fault
from pacekeeper.health.stall_detector import (
    PROCESS_SAMPLE_INTERVAL_SECONDS,
    ProcessSample,
    RankInspection,
    StallDetector,
)
from pacekeeper.launcher.health.gpu_monitor import GpuEvent, NvmlTiming
from pacekeeper.launcher.health.heartbeat import RankZeroNotes, build_next_heartbeat
from pacekeeper.launcher.launcher import build_gpu_fault
from pacekeeper.launcher.rendezvous.rounds import (
    ExitLauncher,
    KillRanks,
    LauncherCommand,
    LauncherObservation,
    NotifyFault,
    RoundState,
    StartRound,
    TerminateRanks,
    build_participant_report,
    decide_commands,
)
from pacekeeper.launcher.settings import LauncherSettings
from pacekeeper.observe.rank_history import RankHistory
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.reports import FINISHED_MESSAGE, FaultReport, GpuHealth, LauncherState

from ..loop import Process
from .pod import MISTAKE, WorkerPod
from .rank import SIGKILL_EXIT_CODE, TERMINATED_EXIT_CODE, SimulatedRank, StallReason
from .rendezvous import SimulatedRendezvousClient, SimulatedRendezvousServer
from .worker_world import WorkerWorld

IDLE_POLL_SECONDS = 5.0
"""Seconds between two ticks without an event."""
STALLED_POLL_SECONDS = 0.25
"""The same while ranks are stalled. The real launcher's tick is 0.05 s."""
_SIGTERM_EXIT_CODE = -15
_IMPORT_SECONDS = (1.0, 3.0)
"""Seconds from the container's start until the launcher follows the plan."""
_PLAN_READ_SECONDS = (0.0, 0.05)
"""Seconds until it sees a new plan."""
_SCRIPT_START_SECONDS = (0.3, 1.2)
_KILL_SECONDS = (0.01, 0.08)
_STORE_RETRY_SECONDS = 1.0
_STORE_TIMEOUT_SECONDS = 300.0
"""Seconds until a rank that cannot reach the store of its round gives up."""
_PEER_PROBE_SECONDS = (0.1, 1.0)
"""Seconds that probes of peers take: if all answer, and otherwise."""
_PHASE_DEADLINE_SECONDS = 150.0
"""Deadline of a rank's phases other than training, such as its first step. The default is half an hour, which no run
would reach."""
_GPU_ERROR_NOTICE_SECONDS = 1.0
_GPU_CHECK_INTERVAL_SECONDS = NvmlTiming().check_interval
_LINGER_SECONDS, _LINGER_POLL_SECONDS = 5.0, 0.1


class SimulatedLauncher(Process):
    """The launcher of one worker, from its container's start to its end.

    `on_rank_end` and `on_trainer_end`: called when a rank has exited, and when the launcher has, with code and message.
    """

    def __init__(
        self,
        world: WorkerWorld,
        worker: WorkerPod,
        on_rank_end: Callable[[SimulatedRank], None],
        on_trainer_end: Callable[[int, str], None],
    ) -> None:
        super().__init__(world.loop, f"{worker.name}/launcher")
        self.state = RoundState()
        self.ranks: list[SimulatedRank] = []
        """Ranks of the newest round here, by local rank, including exited ones."""
        self.settings = LauncherSettings.from_environment(
            {**worker.environment, "PACEKEEPER_WORKER": worker.name, "PACEKEEPER_POD_IP": worker.address}
        )
        self.over = False
        self._world = world
        self._worker = worker
        self._on_rank_end = on_rank_end
        self._on_trainer_end = on_trainer_end
        self._folder = worker.folder
        self._random = world.create_random(f"launcher {worker.name}")
        self._is_following = False
        self._silent_since = 0.0
        self._end_requested = False
        self._woken = False
        self._tick_at = math.inf
        self._rendezvous_client = SimulatedRendezvousClient(
            world, world.trainings.rendezvous_servers, self, worker.node, worker.name, self.wake
        )
        self._rendezvous_server: SimulatedRendezvousServer | None = None
        self._stores_opened = 0
        self._stall_detector: StallDetector | None = None
        self._inspection = 0
        self._inspecting = False
        self._gpu_faults: dict[str, None] = {}
        self._gpus: tuple[GpuHealth, ...] = ()
        self._exit_command: ExitLauncher | None = None

    def start(self) -> None:
        self.call_after(self._random.uniform(*_IMPORT_SECONDS), self._start_following)

    def _start_following(self) -> None:
        trainings = self._world.trainings
        if trainings.outage and trainings.outage_at_import:
            self._worker.training.outage_at = self._world.now()
            self._on_trainer_end(1, trainings.outage)
            return
        incarnation = f"{int(1000 * self._world.wall_time(self._worker.node)):x}"
        self.settings = replace(self.settings, incarnation=incarnation, phase_deadline=_PHASE_DEADLINE_SECONDS)
        rendezvous_port = self._random.randint(32768, 60999)
        self._folder.heartbeat = replace(self._folder.heartbeat, rendezvous_port=rendezvous_port)
        self._is_following = True
        self._run_tick()

    # Events from outside.

    def wake(self) -> None:
        """Run a tick soon: there may be something to observe."""
        if self._is_following and not self._woken and not self.over:
            self._woken = True
            self.call_after(0.0, self._run_tick)

    def read_plan(self) -> None:
        """Observe a new plan soon."""
        self.call_after(self._random.uniform(*_PLAN_READ_SECONDS), self.wake)

    def end(self) -> None:
        """Handle SIGTERM."""
        self.call_after(0.0, self._handle_end_signal)

    def _handle_end_signal(self) -> None:
        self._end_requested = True
        if self._is_following:
            self.wake()
        else:
            self._on_trainer_end(TERMINATED_EXIT_CODE, "")

    def pause(self) -> None:
        self.refresh_heartbeat()
        self._silent_since = self._world.now()
        super().pause()

    def kill(self) -> None:
        if not self.paused:
            self._silent_since = self._world.now()
        super().kill()

    def report_gpu_error(self, event: GpuEvent) -> None:
        self.call_after(self._random.uniform(0.0, _GPU_ERROR_NOTICE_SECONDS), self._take_gpu_error, event)

    def set_gpu_health(self, gpus: tuple[GpuHealth, ...]) -> None:
        """Set what NVML reports from now on."""
        self._gpus = gpus
        self.call_after(self._random.uniform(0.0, _GPU_CHECK_INTERVAL_SECONDS), self._check_gpus)

    def get_last_alive_at(self) -> float | None:
        """Return when it was last alive (virtual seconds); None: it is not expected to be."""
        if not self._is_following or self.over:
            return None
        return self._silent_since if self.paused or self.dead else self._world.now()

    def refresh_heartbeat(self) -> None:
        """Write the present heartbeat."""
        if self._is_following and not self.over and not self.paused and not self.dead:
            self._write_heartbeat(self._world.now())

    # A tick.

    def _run_tick(self) -> None:
        self._woken = False
        if self.over:
            return
        now, plan = self._world.now(), self._folder.plan
        self.state, commands = decide_commands(self.state, self._gather_observation(plan, now), now, self.settings)
        for command in commands:
            self._execute(command)
        self._update_rendezvous(plan)
        self._check_for_stalls(self._write_heartbeat(now), now)
        if self._exit_command is not None:
            self._close_rendezvous(self._exit_command)
        elif commands:
            self.wake()
        else:
            self._plan_next_tick(now)

    def _gather_observation(self, plan: WorkerPlan | None, now: float) -> LauncherObservation:
        return LauncherObservation(
            wall_time=self._world.wall_time(self._worker.node),
            plan=plan,
            view=self._rendezvous_client.view,
            ranks=[rank.observe() for rank in self.ranks],
            end_requested=self._end_requested,
            operator_age=now - self._folder.operator_contact_at,
            peers_age=now - self._get_last_peer_report_time(plan),
        )

    def _get_last_peer_report_time(self, plan: WorkerPlan | None) -> float:
        if plan is None or plan.workers <= 1:
            return self._world.now()
        if self._rendezvous_server is not None and plan.serves_store:
            return self._rendezvous_server.get_last_peer_report_time(self._worker.name)
        return self._rendezvous_client.view_received_at

    def _plan_next_tick(self, now: float) -> None:
        """Schedule the next tick in case nothing happens until then."""
        at = min(at for at in self._iterate_deadlines(now) if at > now)
        if at < self._tick_at:
            self._tick_at = at
            self.call_after(at - now, self._tick, at)

    def _tick(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = math.inf
            self.wake()

    def _iterate_deadlines(self, now: float) -> list[float]:
        """Return the times at which `decide_commands` may change its decision, or ranks are to be polled."""
        state, settings = self.state, self.settings
        times = [now + IDLE_POLL_SECONDS, state.gathering_since + settings.gather_timeout]
        if any(
            rank.is_alive and (rank.stalls or rank.training_round is None or rank.training_round.is_stalled)
            for rank in self.ranks
        ):
            times.append(now + STALLED_POLL_SECONDS)
        if state.failure is not None:
            times.append(state.failed_at + settings.settle_timeout)
        if state.running is not None and state.leaving_since is not None:
            times.append(state.leaving_since + settings.grace)
        if state.running is not None and state.ending_since is not None:
            times.append(state.kill_at if state.killed_at is None else state.killed_at + settings.kill_timeout + 0.01)
        if state.running is not None or state.stage is LauncherState.LOST:
            last_contact_at = max(self._folder.operator_contact_at, self._get_last_peer_report_time(self._folder.plan))
            times.append(last_contact_at + settings.contact_timeout + 0.01)
        return times

    def _execute(self, command: LauncherCommand) -> None:
        world = self._world
        match command:
            case StartRound():
                self._start_round(command)
            case TerminateRanks():
                for rank in self.ranks:
                    rank.leaving = True
                    if rank.training_round is None:  # the library's signal handler is not installed yet
                        world.call_after(self._random.uniform(*_KILL_SECONDS), rank.end, _SIGTERM_EXIT_CODE)
            case KillRanks():
                self._stop_stall_detector()
                for rank in self.ranks:
                    world.call_after(self._random.uniform(*_KILL_SECONDS), rank.end, SIGKILL_EXIT_CODE)
            case NotifyFault():
                self._notify_fault(command.fault)
            case ExitLauncher():
                self._exit_command = command

    def _notify_fault(self, fault: FaultReport) -> None:
        self._world.log.record(self._worker.name, describe_fault(fault))
        self._folder.faults[fault.name] = fault
        self._worker.sidecar.check_faults()

    # Rounds.

    def _start_round(self, command: StartRound) -> None:
        plan, now = command.plan, self._world.now()
        states = self._build_states(now)
        earlier_seconds = plan.step_seconds
        if self._stall_detector is not None:
            earlier_seconds = self._stall_detector.step_seconds(states) or earlier_seconds
        self._stop_stall_detector()
        earlier_ranks = {rank.local: rank for rank in self.ranks}
        self.ranks = []
        for local, number in enumerate(plan.ranks):
            rank = SimulatedRank(
                self._worker, local, number, command.round, plan.membership, plan.world_size, self._on_rank_end
            )
            rank.history = _continue_history(earlier_ranks.get(local), rank, self._worker.window_steps)
            self.ranks.append(rank)
            until = now + _STORE_TIMEOUT_SECONDS
            self._world.call_after(self._random.uniform(*_SCRIPT_START_SECONDS), self._join_store, rank, command, until)
        self._stall_detector = StallDetector(
            self.settings, self._measure_step_seconds, self._is_stopped, earlier_seconds
        )

    def _join_store(self, rank: SimulatedRank, command: StartRound, until: float) -> None:
        """Join the round's store, from the rank's script."""
        world, plan = self._world, command.plan
        if not rank.is_alive:
            return
        server = world.trainings.rendezvous_servers.get(plan.store)
        if rank.stalls:
            world.call_after(_STORE_RETRY_SECONDS, self._join_store, rank, command, until)
        elif world.trainings.outage:
            self._worker.training.outage_at = world.now()
            rank.end(1, world.trainings.outage)
        elif self._worker.script_fails or plan.world_size % self._worker.training.replica_ranks:
            self._worker.training.failed_on[self._worker.name] = None
            if self._worker.script_error == MISTAKE:
                self._worker.training.mistakes_on[self._worker.name] = None
            rank.end(1, self._worker.script_error)
        elif (
            server is not None and not server.process.paused and world.network.can_reach(self._worker.node, server.node)
        ):
            world.trainings.find_round(plan.store.rpartition(":")[0], command.port, rank).join(rank)
        elif world.now() > until:
            rank.end(1, "torch.distributed.DistStoreError: timed out")
        else:
            world.call_after(_STORE_RETRY_SECONDS, self._join_store, rank, command, until)

    def _update_rendezvous(self, plan: WorkerPlan | None) -> None:
        """Join the plan's rendezvous, serve it if the plan assigns it here, and report this launcher's state."""
        client = self._rendezvous_client
        if plan is None or plan.role is not WorkerRole.MEMBER or self.state.membership != plan.membership:
            client.leave()
            return
        if plan.serves_store:
            if self._rendezvous_server is None or self._rendezvous_server.place != plan.store:
                if self._rendezvous_server is not None:
                    self._rendezvous_server.close()
                self._rendezvous_server = SimulatedRendezvousServer(
                    self._world,
                    self._world.trainings.rendezvous_servers,
                    self,
                    self._worker.node,
                    plan.store,
                    self._open_store,
                )
            self._rendezvous_server.admit(plan.membership, plan.secret)
        client.join(plan.store, plan.membership, plan.secret)
        client.send_report(build_participant_report(self.state, plan, self.settings))

    def _build_states(self, now: float) -> dict[int, np.void]:
        """Return the states of the ranks that have reached their peers, by local rank."""
        return {
            rank.local: rank.training_round.build_state(rank, now)
            for rank in self.ranks
            if rank.training_round is not None
        }

    def _open_store(self) -> int:
        self._stores_opened += 1
        return 10_000 + self._stores_opened

    def _close_rendezvous(self, exit_: ExitLauncher) -> None:
        """Close the rendezvous. After success, the server first waits until the others have been informed."""
        self.over = True
        self._stop_stall_detector()
        for rank in self.ranks:
            rank.end(SIGKILL_EXIT_CODE)
        self._world.log.record(self._worker.name, f"ends with code {exit_.code}: {exit_.reason}")
        self._linger(exit_.code, self._world.now() + (_LINGER_SECONDS if exit_.code == 0 else 0.0))

    def _linger(self, code: int, until: float) -> None:
        if (
            self._rendezvous_server is not None
            and self._rendezvous_server.has_peers(self._worker.name)
            and self._world.now() < until
        ):
            self.call_after(_LINGER_POLL_SECONDS, self._linger, code, until)
            return
        if self._rendezvous_server is not None:
            self._rendezvous_server.close()
        self._rendezvous_client.leave()
        finished = code == 0 and self.state.stage is LauncherState.FINISHED
        self._on_trainer_end(code, FINISHED_MESSAGE if finished else "")

    # Reports.

    def _write_heartbeat(self, now: float) -> dict[int, np.void]:
        """Write the heartbeat, and return the ranks' states that it contains."""
        folder, wall = self._folder, self._world.wall_time(self._worker.node)
        states = self._build_states(now)
        notes = RankZeroNotes(folder.refusal, folder.checkpoints)
        folder.heartbeat = build_next_heartbeat(
            folder.heartbeat, self.state, folder.plan, states.values(), wall, now, notes
        )
        self._worker.sidecar.check_heartbeat()
        return states

    def _check_for_stalls(self, states: dict[int, np.void], now: float) -> None:
        detector = self._stall_detector
        if detector is None or self.state.running is None or self.state.ending_since is not None:
            return
        if detector.check(states, now) and not self._inspecting:
            detector.begin_report(now)
            self._inspecting = True
            plan = self._folder.plan
            peers = () if plan is None else plan.peer_addresses
            unreachable = [address for address in peers if not self._can_reach(address)]
            seconds = max(PROCESS_SAMPLE_INTERVAL_SECONDS, _PEER_PROBE_SECONDS[bool(unreachable)])
            first_samples = self._inspect_ranks(now)
            self.call_after(
                seconds, self._report_stall, self._inspection, detector, states, first_samples, unreachable, self.state
            )

    def _report_stall(
        self,
        inspection: int,
        detector: StallDetector,
        states: dict[int, np.void],
        first_samples: dict[int, ProcessSample],
        unreachable: list[str],
        state: RoundState,
    ) -> None:
        if inspection == self._inspection:
            self._inspecting = False
            now, wall = self._world.now(), self._world.wall_time(self._worker.node)
            found = RankInspection(first_samples, self._inspect_ranks(now), unreachable)
            self._notify_fault(detector.build_fault(state, states, found, now, wall))

    def _stop_stall_detector(self) -> None:
        self._inspection += 1
        self._inspecting = False

    def _inspect_ranks(self, now: float) -> dict[int, ProcessSample]:
        return {rank.local: rank.inspect_process(now) for rank in self.ranks if rank.is_alive}

    def _can_reach(self, address: str) -> bool:
        node = self._world.network.addresses.get(address)
        return node is not None and self._world.network.can_reach(self._worker.node, node)

    def _measure_step_seconds(self, local: int) -> float | None:
        window = self.ranks[local].history.build_window(self.ranks[local].number)
        return max(
            (median(durations) for durations in (window.step_seconds, window.transfers) if durations), default=None
        )

    def _is_stopped(self, local: int) -> bool:
        return StallReason.STOPPED in self.ranks[local].stalls

    def _check_gpus(self) -> None:
        if self._is_following and not self.over:
            self._folder.heartbeat = replace(self._folder.heartbeat, gpus=self._gpus)
            self._worker.sidecar.check_heartbeat()

    def _take_gpu_error(self, event: GpuEvent) -> None:
        if not self._is_following or self.over:
            return
        fault = build_gpu_fault(event, self.state, self.settings, self._world.wall_time(self._worker.node))
        if fault.name not in self._gpu_faults:
            self._gpu_faults[fault.name] = None
            self._notify_fault(fault)


def _continue_history(previous: SimulatedRank | None, rank: SimulatedRank, window_steps: int) -> RankHistory:
    """Return the rank's history as the sidecar keeps it: over all rounds with the same rank at this local rank."""
    if previous is None or previous.number != rank.number or previous.training_round is None:
        return RankHistory(window_steps)
    previous.history.start_round()
    return previous.history
