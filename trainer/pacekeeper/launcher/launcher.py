"""The I/O of the launcher: gather observations, call `rounds.decide_commands`, and execute the commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from string import Template

from pacekeeper import cgroup
from pacekeeper.checkpointing.storage.checkpoint_status import read_checkpoint_status
from pacekeeper.health.fault_formatting import describe_fault
from pacekeeper.runtime_folder import RequestsFile, RuntimeFolder, TouchedFile, read_boot_clock, write_json
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.reports import FINISHED_MESSAGE, FaultKind, FaultReport, LauncherState
from pacekeeper_rank.forking.handled_signals import read_handled_signals
from pacekeeper_rank.forking.rank_start import COMMUNICATORS_VARIABLE, RING_VARIABLE, RankStart

from .health.gpu_monitor import GpuEvent, open_gpu_monitor
from .health.heartbeat import HeartbeatFile, LivenessFile, RankZeroNotes, WriteFailures, build_next_heartbeat
from .health.inspection import Inspector
from .network.interfaces import bind_socket, find_interface
from .network.link_probes import LinkProber, LinkProbeServer
from .network.nccl_plugin import (
    build_plugin_environment,
    choose_next_plugin,
    find_usable_plugin,
    has_gpus,
    has_native_crash,
)
from .network.path_finder import PathFinder
from .network.path_shim import explain_missing_shim
from .network.sockets import SocketFile
from .ranks import processes
from .ranks.log_files import ERROR_FILE_VARIABLE, RankOutput, choose_error_file
from .ranks.output_writer import LogStream, OutputWriter
from .ranks.rank_options import RankOptions, build_rank_environment
from .ranks.rank_processes import RankProcesses
from .ranks.stdin import StandardInput
from .ranks.warm_process import CurrentStderr, WarmProcess, redirect_log, spawn_warm_process
from .rendezvous.plan_file import PlanFile
from .rendezvous.rendezvous import ParticipantStatus
from .rendezvous.rounds import (
    ExitLauncher,
    KillRanks,
    LauncherCommand,
    LauncherObservation,
    NotifyFault,
    RoundState,
    StartRound,
    TerminateRanks,
    build_participant_report,
    choose_exit_code,
    decide_commands,
    format_signal,
    is_partitioned,
)
from .rendezvous.transport import RendezvousClient, RendezvousServer
from .settings import LauncherSettings

LAUNCHER_TICK_SECONDS = 0.05
"""Seconds between two polls of the plan file, the rings, and the clock. Everything else wakes the launcher at once."""

_BIND_RETRY_SECONDS = 0.2
_STORE_CLOSE_SECONDS = 3.0
"""Seconds within which the store of the last round is closed. After that, ranks may reach it, and their round fails."""
_GPU_POLL_INTERVAL_SECONDS = 1.0
_SECOND_SIGNAL_SECONDS = 0.5
"""A signal counts as a second one if it arrives at least this many seconds after the first."""
_INTERACTIVE_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT}
_DRAIN_POLL_INTERVAL_SECONDS = 0.2  # seconds between two checks whether to keep waiting for the output
_PEER_LINGER_SECONDS = 5.0  # how long the rendezvous server waits until the others know that all have finished

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Script:
    """What the user runs."""

    name: str  # a path, or the name of a module
    is_module: bool
    arguments: tuple[str, ...]
    is_program: bool = False  # not a Python script: `name` is executed
    options: RankOptions = field(default_factory=RankOptions)


class Launcher:
    """The launcher of one worker, from its start to its exit code."""

    def __init__(
        self,
        script: Script,
        settings: LauncherSettings,
        runtime: RuntimeFolder,
        warm: WarmProcess,
        heartbeat: HeartbeatFile,
        liveness: LivenessFile,
    ) -> None:
        self._script = script
        self._settings = settings
        self._runtime = runtime
        self._warm = warm
        self._stdin = StandardInput(0 if sys.__stdin__ is not None else None)
        self._stdout = OutputWriter(1 if sys.stdout is not None else None, "standard output")
        self._stderr = OutputWriter(2 if sys.stderr is not None else None, "standard error")
        self._logged_outputs: list[OutputWriter] = []  # those whose reader has exited
        self._ranks = RankProcesses(
            warm, runtime, RankOutput(script.options, (self._stdout, self._stderr)), self._stdin.open
        )
        self._state = RoundState()
        self._plan = PlanFile(runtime.plan)
        self._requests = RequestsFile(runtime.requests)
        self._heartbeat = heartbeat
        self._liveness = liveness
        self._operator_contact = TouchedFile(runtime.operator_contact)
        self._write_failures = WriteFailures()
        self._pending_faults: list[FaultReport] = []
        self._wake = asyncio.Event()
        self._rendezvous_client = RendezvousClient(on_view=self._wake.set)
        self._rendezvous_server: RendezvousServer | None = None
        self._served_address = ""  # address of the rendezvous server, if it runs here
        self._reserved_listener: socket.socket | None = bind_socket(
            settings.address
        )  # until a plan places the rendezvous server here
        self._rendezvous_port: int = self._reserved_listener.getsockname()[1]
        self._store_listener: socket.socket | None = None  # at --master-port, for the stores of all rounds
        self._probe_listener = bind_socket(settings.address)
        self._probe_server = LinkProbeServer()
        self._prober = LinkProber(runtime.probes)
        self._sockets = SocketFile(runtime.sockets)
        self._paths = PathFinder(runtime, settings.address, explain_missing_shim(), has_gpus(), on_found=self._wake.set)
        self._inspector = Inspector(settings, self._ranks, self.notify)
        self._nccl_plugin = find_usable_plugin() if has_gpus() else None
        self._native_recording = True
        self._gpus = open_gpu_monitor()
        self._gpu_poll_at = 0.0
        self._gpu_faults: set[str] = set()
        self._end_requested_at: float | None = None  # when a signal requested the end, on the monotonic clock
        self._end_signal = signal.SIGTERM
        self._exit: ExitLauncher | None = None

    async def run(self) -> int:
        """Run until the end and return the launcher's exit code."""
        loop = asyncio.get_running_loop()
        for signum in read_handled_signals():
            # Not loop.add_signal_handler: the loop removes its handlers when it closes. One more Ctrl-C would then
            # change the exit code, or leave the runtime folder behind.
            signal.signal(signum, partial(self._receive_signal, loop))
        redirect_log(LogStream(self._stderr))
        loop.add_signal_handler(signal.SIGCHLD, self._wake.set)
        self._register_warm_reader()
        await self._probe_server.serve(self._probe_listener)
        try:
            while self._exit is None:
                await self._run_tick()
                tick = loop.call_later(LAUNCHER_TICK_SECONDS, self._wake.set)
                await self._wake.wait()
                tick.cancel()
                self._wake.clear()
        finally:
            loop.remove_reader(self._warm.connection)
            self._inspector.stop()
            self._prober.close()
            self._paths.close()
            self._probe_server.close()
            self._stdin.close()
            self._ranks.close()
            self._liveness.remove()
        if self._exit.code:
            self._ranks.export_error(os.environ)
        elif self._state.stage is LauncherState.FINISHED:
            publish_finish(os.environ)
        await self._close_rendezvous(self._exit.code)
        if self._exit.code == 0:
            self._log_processes("outlive the run", processes.list_adopted_processes(except_for=self._warm.pid))
        log.info("ends with code %d: %s", self._exit.code, self._exit.reason)
        await self._drain_output()
        redirect_log(CurrentStderr())
        return self._exit.code

    async def _drain_output(self) -> None:
        """Wait until the output is written. After a signal to end, wait for `_PEER_LINGER_SECONDS` at most."""
        for writer in (self._stdout, self._stderr):
            while not await asyncio.to_thread(writer.drain, _DRAIN_POLL_INTERVAL_SECONDS):
                if (
                    self._end_requested_at is not None
                    and time.monotonic() - self._end_requested_at >= _PEER_LINGER_SECONDS
                ):
                    break

    def give_up(self, reason: str) -> None:
        """End the ranks and the launcher with exit code 1."""
        self._exit = ExitLauncher(1, reason)
        self._wake.set()

    def _register_warm_reader(self) -> None:
        asyncio.get_running_loop().add_reader(self._warm.connection, self._wake.set)

    def _receive_warm_events(self, now: float) -> None:
        """Read the events of the warm process, and replace it if it has exited."""
        warm, limit = self._warm, self._settings.import_timeout
        try:
            self._ranks.receive_events()
        except EOFError:
            asyncio.get_running_loop().remove_reader(warm.connection)
            exit_status = warm.reap()
            if not warm.ready:
                self._exit = ExitLauncher(1, f"the process that forks the ranks exited during its start: {exit_status}")
                return
            log.warning(
                "the process that forks the ranks exited (%s), and the ranks with it; starting another one", exit_status
            )
            warm.connection.close()
            self._warm = spawn_warm_process(warm.import_needs, warm.interpreter, replaces_another=True)
            self._ranks.replace_warm_process(
                self._warm, f"the process that it was forked from has exited: {exit_status}"
            )
            self._register_warm_reader()
        else:
            # For the first one, the limit is that of the worker's start: a new image may be slow to read.
            if warm.replaces_another and not warm.ready and now - warm.started > limit:
                message = f"the process that forks the ranks has not started within {limit:g} s"
                self._exit = ExitLauncher(
                    1, f"{message}; check the storage of the image, or raise PACEKEEPER_IMPORT_SECONDS"
                )

    def _log_closed_outputs(self) -> None:
        for writer in (self._stdout, self._stderr):
            if writer.closed_reason and writer not in self._logged_outputs:
                self._logged_outputs.append(writer)
                log.warning("%s", writer.closed_reason)

    def _receive_signal(self, loop: asyncio.AbstractEventLoop, signum: int, _: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._handle_end_signal, signal.Signals(signum))

    def _handle_end_signal(self, signum: signal.Signals) -> None:
        """Let the ranks write a checkpoint and leave at the first signal; end them at once at the second.

        A terminal that closes may send several signals at nearly the same time: those count as one.
        """
        now = time.monotonic()
        if self._end_requested_at is None:
            self._end_requested_at, self._end_signal = now, signum
        elif now - self._end_requested_at >= _SECOND_SIGNAL_SECONDS and signum in _INTERACTIVE_SIGNALS:
            self._exit = ExitLauncher(choose_exit_code(signum), f"received {format_signal(signum)} again")
        self._wake.set()

    async def _run_tick(self) -> None:
        """Observe once, decide, and execute the commands. If there were commands, run the next tick at once."""
        with self._write_failures.suppress_errors("the liveness file"):
            self._liveness.touch(time.monotonic())
        self._write_pending_faults()
        self._log_closed_outputs()
        processes.reap_children(except_for=self._warm.pid)
        self._receive_warm_events(time.monotonic())
        plan = self._plan.read()
        previous = self._state
        observation = self._gather_observation(plan)
        self._state, commands = decide_commands(previous, observation, time.monotonic(), self._settings)
        if is_partitioned(self._state, observation):
            with self._write_failures.suppress_errors("that no peer is reachable"):
                self._runtime.partitioned.touch()
        if self._state.stage is not previous.stage:
            log.info("%s (membership %d, round %d)", self._state.stage, self._state.membership, self._state.round)
            if self._state.stage is LauncherState.FINISHED and (remaining := self._ranks.list_left_processes()):
                self._log_processes(
                    f"may run for {self._settings.linger:g} s more: the ranks have started them", remaining
                )
        if previous.running is not None and self._state.running is None:
            self._log_processes(
                f"outlive round {previous.running}", processes.list_adopted_processes(except_for=self._warm.pid)
            )
        for command in commands:
            self._execute(command)
        await self._update_rendezvous(plan)
        self._publish_state(plan, time.monotonic())
        if commands:
            self._wake.set()

    def _log_processes(self, description: str, commands: Mapping[int, str]) -> None:
        if commands:
            log.warning("processes %s: %s", description, processes.format_processes(commands))

    def _publish_state(self, plan: WorkerPlan | None, now: float) -> None:
        """Publish the heartbeat, the socket table, stalls, and GPU errors."""
        states = self._ranks.states()
        notes = RankZeroNotes(self._read_refusal(), read_checkpoint_status(self._runtime.checkpoints))
        last, ranks = self._heartbeat.last, states.values()
        heartbeat = build_next_heartbeat(last, self._state, plan, ranks, time.time(), now, notes)
        ports = {"rendezvous_port": self._rendezvous_port, "probe_port": self._probe_listener.getsockname()[1]}
        with self._write_failures.suppress_errors("the heartbeat"):
            self._heartbeat.write(
                replace(heartbeat, **ports, gpus=self._gpus.health, paths=self._paths.build_reports()), now
            )
        with self._write_failures.suppress_errors("which rank has which socket"):
            self._sockets.refresh(self._ranks.pids_by_rank(), now)
        if self._state.running is not None and self._state.ending_since is None:
            peers = plan.peer_addresses if plan is not None else ()
            pids = self._ranks.pids()
            self._paths.check_connections(now)
            stacks, ended = self._ranks.stack_files(), self._ranks.list_finished()
            self._inspector.check(self._state, states, pids, stacks, peers, now, ended)
        if now >= self._gpu_poll_at:
            self._gpu_poll_at = now + _GPU_POLL_INTERVAL_SECONDS
            for event in self._gpus.poll(now):
                fault = build_gpu_fault(event, self._state, self._settings, time.time())
                if fault.name not in self._gpu_faults:
                    self._gpu_faults.add(fault.name)
                    self.notify(fault)

    def _read_refusal(self) -> str:
        try:
            return self._runtime.refusal.read_text()
        except FileNotFoundError:
            return ""

    def _gather_observation(self, plan: WorkerPlan | None) -> LauncherObservation:
        return LauncherObservation(
            wall_time=time.time(),
            plan=plan,
            view=self._rendezvous_client.view,
            ranks=self._ranks.observe(),
            end_requested=self._end_requested_at is not None or self._runtime.terminating.exists(),
            end_signal=self._end_signal,
            operator_age=self._operator_contact.age(read_boot_clock(), time.time()),
            peers_age=self._peers_age(plan),
        )

    def _peers_age(self, plan: WorkerPlan | None) -> float:
        if plan is None or plan.workers <= 1:
            return 0.0
        if self._rendezvous_server is not None and plan.serves_store:
            contact_at = self._rendezvous_server.get_last_peer_report_time(self._settings.worker)
        else:
            contact_at = self._rendezvous_client.view_received_at
        return math.inf if contact_at is None else read_boot_clock() - contact_at

    def _execute(self, command: LauncherCommand) -> None:
        match command:
            case StartRound():
                self._start_round(command)
            case TerminateRanks():
                self._ranks.signal(self._end_signal)
            case KillRanks():
                self._inspector.stop()
                self._ranks.signal(signal.SIGKILL)
            case NotifyFault():
                self.notify(command.fault)
            case ExitLauncher():
                self._exit = command

    def notify(self, fault: FaultReport) -> None:
        """Log a fault and hand it to the sidecar. If the volume is full, the next ticks retry."""
        log.warning("%s", describe_fault(fault))
        self._pending_faults.append(fault)
        self._write_pending_faults()

    def _write_pending_faults(self) -> None:
        with self._write_failures.suppress_errors("a fault"):
            while self._pending_faults:
                write_json(self._runtime.fault(self._pending_faults[0].name), self._pending_faults[0].to_json())
                del self._pending_faults[0]

    async def _update_rendezvous(self, plan: WorkerPlan | None) -> None:
        """Serve the plan's rendezvous if the plan assigns it here, join it, and report this launcher's state."""
        if plan is None or plan.role is not WorkerRole.MEMBER or self._state.membership != plan.membership:
            self._rendezvous_client.leave()
            return
        self._probe_server.admit(plan.membership, plan.secret)
        self._prober.start_task(self._requests.read().probe, plan.membership, plan.secret)
        address, port = _split_address(plan.store)
        if plan.serves_store:
            if self._served_address != plan.store:
                await self._serve_rendezvous(plan.store)
            if self._rendezvous_server is not None:
                self._rendezvous_server.admit(plan.membership, plan.secret)
        self._rendezvous_client.join(address, port, plan.membership, plan.secret)
        report = build_participant_report(self._state, plan, self._settings)
        view = self._rendezvous_client.view
        last_round = view.round if view is not None and view.membership == plan.membership else 0
        if report.status is ParticipantStatus.READY and not (
            self._warm.ready and self._paths.ensure_searched(plan, last_round)
        ):
            report = replace(
                report, status=ParticipantStatus.ENDING
            )  # READY means that this launcher can fork, and has found its network paths
        self._rendezvous_client.report(report)

    async def _serve_rendezvous(self, address: str) -> None:
        if self._rendezvous_server is not None:
            await self._rendezvous_server.close()
            self._rendezvous_server, self._served_address = None, ""
        server = RendezvousServer(self._open_store)
        try:
            await server.serve(self._open_listener(*_split_address(address)))
        except OSError as error:
            log.warning("cannot serve the rendezvous at %s: %s; retrying", address, error)
            await asyncio.sleep(_BIND_RETRY_SECONDS)
        else:
            self._rendezvous_server, self._served_address = server, address

    def _open_listener(self, address: str, port: int) -> socket.socket:
        """Return a socket bound to this address. Raises OSError if the port is taken.

        The port that the heartbeat announces has been held since the launcher's start: on the node's own network,
        other processes need ports, too.
        """
        if self._reserved_listener is None or port != self._rendezvous_port:
            return bind_socket(address, port)
        listener, self._reserved_listener = self._reserved_listener, None
        return listener

    def _open_store(self) -> int:
        """Have the warm process serve a new store for the next round's process group. Return its port."""
        address, port = self._settings.address, self._script.options.master_port
        patience_seconds = _STORE_CLOSE_SECONDS if self._store_listener is not None else 0.0
        if self._store_listener is None and port:
            try:
                self._store_listener = socket.create_server((address, port), family=_choose_address_family(address))
            except OSError as error:
                log.warning("--master-port %d: %s; the ranks use another port", port, error.strerror)
        if self._store_listener is not None:
            listener = self._store_listener
        else:
            listener = socket.create_server((address, 0), family=_choose_address_family(address))
        try:
            self._warm.open_store(address, listener, patience_seconds)
            return int(listener.getsockname()[1])
        finally:
            if listener is not self._store_listener:
                listener.close()

    def _start_round(self, command: StartRound) -> None:
        log.info(
            "round %d starts with ranks %s of %d", command.round, list(command.plan.ranks), command.plan.world_size
        )
        self._inspector.stop()
        # What was measured here is newer. A worker that joins has no step time but the plan's.
        step_seconds = self._inspector.step_seconds(self._ranks.states()) or command.plan.step_seconds
        exit_codes = self._ranks.exit_codes()
        self._nccl_plugin = choose_next_plugin(self._nccl_plugin, exit_codes)
        if self._native_recording and has_native_crash(exit_codes):
            log.warning("a rank crashed in native code: from now on the ranks record in Python only")
            self._native_recording = False
        self._paths.apply(command.plan)
        starts = build_rank_starts(
            command,
            self._script,
            self._settings,
            self._runtime,
            self._nccl_plugin,
            self._native_recording,
            records_itself=self._warm.import_needs.uses_library,
        )
        self._ranks.start(starts)
        self._inspector = Inspector(self._settings, self._ranks, self.notify, step_seconds)

    async def _close_rendezvous(self, code: int) -> None:
        """Close the rendezvous. After success, the server first waits until the other launchers have been informed."""
        if self._rendezvous_server is not None:
            if code == 0:
                await self._rendezvous_server.wait_until_peers_leave(
                    self._settings.worker, patience=_PEER_LINGER_SECONDS
                )
            await self._rendezvous_server.close()
        self._rendezvous_client.leave()


def build_gpu_fault(event: GpuEvent, state: RoundState, settings: LauncherSettings, wall: float) -> FaultReport:
    """Build the fault of a GPU event. The same XID of the same GPU has the same name within a round.

    A kernel with a wild pointer causes thousands of XIDs. If each were a fault, the operator would not get to the exit
    of the rank itself. `wall`: seconds since the epoch.
    """
    suffix = f"{event.gpu}-xid-{event.xid}".replace(" ", "-")
    return FaultReport(
        name=f"{settings.worker}-{settings.incarnation}-r{state.round}-gpu-{suffix}".lower(),
        kind=FaultKind.GPU_ERROR,
        worker=settings.worker,
        round=state.round,
        membership=0 if state.membership is None else state.membership,
        noticed_at=wall,
        error=event.text,
        xid=event.xid,
    )


def build_rank_starts(
    command: StartRound,
    script: Script,
    settings: LauncherSettings,
    runtime: RuntimeFolder,
    profiler: Path | None = None,
    native: bool = True,
    records_itself: bool = True,
) -> list[RankStart]:
    """Build the starts of a round's ranks, with the environment that torchrun would set.

    `profiler`: NCCL's profiler plugin, if the ranks run with it. `native`: whether they may record with the C part.
    `records_itself`: whether the script uses the library, so that the boot code of a payload leaves it alone.
    """
    plan = command.plan
    host, _ = _split_address(plan.store)
    environment = {
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(len(plan.ranks)),
        "GROUP_RANK": str(plan.ranks[0] * plan.workers // plan.world_size),  # of the worker
        "GROUP_WORLD_SIZE": str(plan.workers),
        "ROLE_NAME": script.options.role,
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(command.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(command.round - 1),  # scripts read it to detect their first start
        "TORCHELASTIC_MAX_RESTARTS": str(plan.restarts),
        "TORCHELASTIC_RUN_ID": script.options.run_id or os.environ.get("PACEKEEPER_JOB", "local"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "PACEKEEPER_ROUND": str(command.round),
        "PACEKEEPER_RUNTIME": str(runtime.root),
    }
    interface = find_interface(settings.address)
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    environment |= _build_flight_recorder_env(os.environ)
    if not native:
        environment["PACEKEEPER_NATIVE"] = "0"
    threads = _choose_thread_count(len(plan.ranks))
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return [
        RankStart(
            key=f"{command.round}-{local_rank}",
            rank=rank,
            round=command.round,
            script=script.name,
            is_module=script.is_module,
            arguments=[Template(text).safe_substitute(local_rank=local_rank) for text in script.arguments],
            environment={
                **environment,
                "RANK": str(rank),
                **build_rank_environment(script.options, local_rank, os.environ),
                "ROLE_RANK": str(rank),
                ERROR_FILE_VARIABLE: str(
                    choose_error_file(script.options, command.round - 1, local_rank, runtime.errors)
                ),
                RING_VARIABLE: str(runtime.ring(local_rank)),
                **({} if records_itself else {COMMUNICATORS_VARIABLE: str(runtime.communicators_file(local_rank))}),
                "PACEKEEPER_PATHS": str(runtime.paths_file(local_rank)),
                **build_plugin_environment(os.environ, profiler, runtime.transport(local_rank)),
            },
            ring_path=str(runtime.ring(local_rank)),
            stack_path=str(runtime.stack(local_rank)),
            threads=threads,
            is_program=script.is_program,
        )
        for local_rank, rank in enumerate(plan.ranks)
    ]


def _build_flight_recorder_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that turn on NCCL's flight recorder (`observe.flight_recorder`) if `environment` lacks them.

    The recorder keeps the last collectives, and whether each of them has started. Timing costs one more event per
    collective. It also makes NCCL's watchdog thread query each duration, which may hang in the CUDA driver, as torch
    warns. It is worth the cost: only timing distinguishes a kernel that never ends from a wait. The watchdog queries
    the same driver without timing, too. If that query hangs, the rank hangs, and is found sooner.
    """
    size_variables = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
    variables = {"TORCH_NCCL_ENABLE_TIMING": "1"}
    if not size_variables & environment.keys():
        variables["TORCH_FR_BUFFER_SIZE"] = "2000"  # torch's own default from 2.10 on
    return {name: value for name, value in variables.items() if name not in environment}


def _choose_thread_count(ranks: int) -> int | None:
    """Return the threads for a rank; None: torch's default. Ranks that share a worker get 1, as in torchrun."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    limit = cgroup.read_cpu_limit()
    if ranks > 1 or limit < 2:
        return 1
    return None if math.isinf(limit) else int(limit)


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _choose_address_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def publish_finish(environment: Mapping[str, str]) -> None:
    """Append to the container's termination message that the ranks have finished.

    It is the only proof of success that outlives the pod's processes. Outside Kubernetes, the file does not exist.
    """
    path = environment.get("PACEKEEPER_TERMINATION_LOG", "/dev/termination-log")
    with contextlib.suppress(OSError), open(path, "r+", encoding="utf-8") as file:
        file.seek(0, os.SEEK_END)
        file.write(f"{FINISHED_MESSAGE}\n")
