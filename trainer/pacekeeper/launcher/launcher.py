"""The launcher's edge: gathers what is to be seen, asks `rounds.decide`, and carries out the commands."""

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
from datetime import timedelta
from functools import partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from pacekeeper import cgroup
from pacekeeper.keep.news import read_news
from pacekeeper.runtime import Runtime, Touched, elapsed, write_json
from pacekeeper_analysis.plan import Role, WorkerPlan
from pacekeeper_analysis.reports import FINISHED_MESSAGE, Fault, FaultKind, LauncherState

from . import processes
from .end_signals import handled_signals
from .gpu import GpuEvent, open_gpus
from .heartbeat import HeartbeatFile, MissedWrites, SignOfLife, next_beat
from .inspection import Inspector
from .log_files import ERROR_FILE, RankOutput, error_file
from .meeting import Status
from .nccl import crashed, has_gpus, plugin_after, plugin_environment, usable_plugin
from .network import bind, interface_of
from .outlet import LogStream, Outlet
from .path_finder import PathFinder
from .plans import PlanFile
from .probe import ProbeHost, Prober
from .rank import RankStart
from .rank_options import RankOptions, rank_environment
from .ranks import RankProcesses
from .rounds import (
    Command,
    Exit,
    Kill,
    Notify,
    RoundState,
    Seen,
    Start,
    Terminate,
    decide,
    exit_code_of,
    is_alone,
    report,
    signal_name,
)
from .settings import LauncherSettings
from .shim import why_missing
from .sockets import SocketFile
from .stdin import StandardInput
from .warm import ErrorStream, Warm, log_to, start_warm_anew
from .wire import MeetingClient, MeetingHost
from .words import describe

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

TICK = 0.05
"""Seconds between two looks at the plan file, the rings and the clock; all else wakes the launcher at once."""

_BIND_PAUSE = 0.2
_GPU_PERIOD = 1.0
_AGAIN = 0.5
"""Seconds after which a signal to end counts as a second one."""
_ASKED_BY_HAND = {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT}
_DRAIN = 0.2  # seconds between two looks whether the output is still to be waited for
_LINGER = 5.0  # how long the host of a meeting lets the others learn that all have finished
_STORE_TIMEOUT = timedelta(seconds=300)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Script:
    """What the user wants to run."""

    name: str  # path, or the name of a module
    is_module: bool
    arguments: tuple[str, ...]
    is_program: bool = False  # not Python's: `name` is what is executed
    options: RankOptions = field(default_factory=RankOptions)


class Launcher:
    """One worker's launcher, from its start to its exit code."""

    def __init__(
        self,
        script: Script,
        settings: LauncherSettings,
        runtime: Runtime,
        warm: Warm,
        heartbeat: HeartbeatFile,
        sign: SignOfLife,
    ) -> None:
        self._script = script
        self._settings = settings
        self._runtime = runtime
        self._warm = warm
        self._stdin = StandardInput(0 if sys.__stdin__ is not None else -1)
        self._stdout = Outlet(1 if sys.stdout is not None else -1, "standard output")
        self._stderr = Outlet(2 if sys.stderr is not None else -1, "standard error")
        self._named: list[Outlet] = []  # whose reader has gone
        self._ranks = RankProcesses(
            warm, runtime, RankOutput(script.options, (self._stdout, self._stderr)), self._stdin.open
        )
        self._state = RoundState()
        self._plan = PlanFile(runtime.plan)
        self._heartbeat = heartbeat
        self._sign = sign
        self._contact = Touched(runtime.contact)
        self._volume = MissedWrites()
        self._unwritten: list[Fault] = []
        self._wake = asyncio.Event()
        self._client = MeetingClient(on_view=self._wake.set)
        self._host: MeetingHost | None = None
        self._hosting = ""  # address that the host serves
        self._held: socket.socket | None = bind(settings.address)  # until a plan wants the meeting to be here
        self._meeting_port: int = self._held.getsockname()[1]
        self._store: TCPStore | None = None  # of the newest round that is hosted here
        self._probe_listener = bind(settings.address)
        self._probe_host = ProbeHost()
        self._prober = Prober(runtime.probes)
        self._sockets = SocketFile(runtime.sockets)
        self._paths = PathFinder(runtime, settings.address, why_missing(), has_gpus(), on_found=self._wake.set)
        self._inspector = Inspector(settings, self._ranks, self.notify)
        self._profiler = usable_plugin() if has_gpus() else None
        self._native = True
        self._gpus = open_gpus()
        self._gpus_at = 0.0
        self._gpu_faults: set[str] = set()
        self._told_at: float | None = None  # when it was told to end, on the monotonic clock
        self._end_signal = signal.SIGTERM
        self._exit: Exit | None = None

    async def run(self) -> int:
        """The launcher's exit code."""
        loop = asyncio.get_running_loop()
        for signum in handled_signals():
            # Not by the loop, which gives its handlers up when it closes: one more Ctrl-C would then change the exit
            # code, or leave the runtime folder behind.
            signal.signal(signum, partial(self._receive_signal, loop))
        log_to(LogStream(self._stderr))
        loop.add_signal_handler(signal.SIGCHLD, self._wake.set)
        self._listen_to_warm()
        await self._probe_host.serve(self._probe_listener)
        try:
            while self._exit is None:
                await self._turn()
                tick = loop.call_later(TICK, self._wake.set)
                await self._wake.wait()
                tick.cancel()
                self._wake.clear()
        finally:
            loop.remove_reader(self._warm.connection)
            self._inspector.stop()
            self._prober.close()
            self._paths.close()
            self._probe_host.close()
            self._stdin.close()
            self._ranks.close()
            self._sign.end()
        if self._exit.code:
            self._ranks.pass_error_on(os.environ)
        elif self._state.stage is LauncherState.FINISHED:
            publish_finish(os.environ)
        await self._part_from_peers(self._exit.code)
        if self._exit.code == 0:
            self._name_processes("outlive the run", processes.adopted(except_for=self._warm.pid))
        log.info("ends with code %d: %s", self._exit.code, self._exit.why)
        await self._write_all()
        log_to(ErrorStream())
        return self._exit.code

    async def _write_all(self) -> None:
        """Waits for who reads our output, unless we are told to end: then for a moment only."""
        for outlet in (self._stdout, self._stderr):
            while not await asyncio.to_thread(outlet.drain, _DRAIN):
                if self._told_at is not None and time.monotonic() - self._told_at >= _LINGER:
                    break

    def give_up(self, why: str) -> None:
        """Ends the ranks and the launcher, as failed."""
        self._exit = Exit(1, why)
        self._wake.set()

    def _listen_to_warm(self) -> None:
        asyncio.get_running_loop().add_reader(self._warm.connection, self._wake.set)

    def _take_news(self, now: float) -> None:
        """What the warm process says; another one in its place where it has died."""
        warm, limit = self._warm, self._settings.import_timeout
        try:
            self._ranks.take_news()
        except EOFError:
            asyncio.get_running_loop().remove_reader(warm.connection)
            how = warm.bury()
            if not warm.ready:
                self._exit = Exit(1, f"the process that ranks are forked from ends while it starts: {how}")
                return
            log.warning("the process that ranks are forked from ends (%s), and they with it; another one starts", how)
            warm.connection.close()
            self._warm = start_warm_anew(warm.needs)
            self._ranks.change_warm(self._warm, f"the process that it was forked from has ended: {how}")
            self._listen_to_warm()
        else:
            if not warm.ready and now - warm.started > limit:
                words = f"the process that ranks are forked from has not started within {limit:g} s"
                self._exit = Exit(1, f"{words}; mend the storage of the image, or raise PACEKEEPER_IMPORT_SECONDS")

    def _name_closed_outlets(self) -> None:
        for outlet in (self._stdout, self._stderr):
            if outlet.closed_by_reader and outlet not in self._named:
                self._named.append(outlet)
                log.warning("%s", outlet.closed_by_reader)

    def _receive_signal(self, loop: asyncio.AbstractEventLoop, signum: int, _: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._end, signal.Signals(signum))

    def _end(self, signum: signal.Signals) -> None:
        """The first signal lets the ranks write a checkpoint and leave; a second one ends them at once. A terminal that
        is closed may send several in one moment."""
        now = time.monotonic()
        if self._told_at is None:
            self._told_at, self._end_signal = now, signum
        elif now - self._told_at >= _AGAIN and signum in _ASKED_BY_HAND:
            self._exit = Exit(exit_code_of(signum), f"told to end again ({signal_name(signum)})")
        self._wake.set()

    async def _turn(self) -> None:
        """One look at the world and what follows from it; again at once while something does."""
        with self._volume.tolerated("the sign of life"):
            self._sign.give(time.monotonic())
        self._hand_over_faults()
        self._name_closed_outlets()
        processes.reap(except_for=self._warm.pid)
        self._take_news(time.monotonic())
        plan = self._plan.read()
        before = self._state
        seen = self._see(plan)
        self._state, commands = decide(before, seen, time.monotonic(), self._settings)
        if is_alone(self._state, seen):
            with self._volume.tolerated("that no peer is heard"):
                self._runtime.alone.touch()
        if self._state.stage is not before.stage:
            log.info("%s (membership %d, round %d)", self._state.stage, self._state.membership, self._state.round)
            if self._state.stage is LauncherState.FINISHED and (left := self._ranks.left_behind()):
                self._name_processes(f"may go on for {self._settings.linger:g} s: the ranks have started them", left)
        if before.running and not self._state.running:
            self._name_processes(f"outlive round {before.running}", processes.adopted(except_for=self._warm.pid))
        for command in commands:
            self._do(command)
        await self._meet(plan)
        self._observe(plan, time.monotonic())
        if commands:
            self._wake.set()

    def _name_processes(self, what: str, found: Mapping[int, str]) -> None:
        if found:
            log.warning("processes %s: %s", what, processes.in_words(found))

    def _observe(self, plan: WorkerPlan | None, now: float) -> None:
        """What is to be told: the heartbeat, stalls, GPU errors."""
        states = self._ranks.states()
        checkpoints = read_news(self._runtime.checkpoints)
        last, ranks = self._heartbeat.last, states.values()
        beat = next_beat(last, self._state, plan, ranks, time.time(), now, self._refused(), checkpoints)
        ports = {"meeting_port": self._meeting_port, "probe_port": self._probe_listener.getsockname()[1]}
        with self._volume.tolerated("the heartbeat"):
            self._heartbeat.write(replace(beat, **ports, gpus=self._gpus.health, paths=self._paths.reports()), now)
        with self._volume.tolerated("which rank has which socket"):
            self._sockets.look(self._ranks.pids_by_rank(), now)
        if self._state.running and self._state.ending_since is None:
            neighbours = plan.neighbours if plan is not None else ()
            pids = self._ranks.pids()
            self._paths.look(now)
            stacks, ended = self._ranks.stack_files(), self._ranks.ended()
            self._inspector.look(self._state, states, pids, stacks, neighbours, now, ended)
        if now >= self._gpus_at:
            self._gpus_at = now + _GPU_PERIOD
            for event in self._gpus.poll(now):
                fault = gpu_fault(event, self._state, self._settings, time.time())
                if fault.name not in self._gpu_faults:
                    self._gpu_faults.add(fault.name)
                    self.notify(fault)

    def _refused(self) -> str:
        try:
            return self._runtime.refused.read_text()
        except FileNotFoundError:
            return ""

    def _see(self, plan: WorkerPlan | None) -> Seen:
        return Seen(
            wall=time.time(),
            plan=plan,
            view=self._client.view,
            ranks=self._ranks.seen(),
            told_to_end=self._told_at is not None,
            end_signal=self._end_signal,
            operator_age=self._contact.age(elapsed(), time.time()),
            peers_age=self._peers_age(plan),
        )

    def _peers_age(self, plan: WorkerPlan | None) -> float:
        if plan is None or plan.workers <= 1:
            return 0.0
        if self._host is not None and plan.serves_store:
            return elapsed() - self._host.heard_others_at(self._settings.worker)
        return elapsed() - self._client.heard_at

    def _do(self, command: Command) -> None:
        match command:
            case Start():
                self._start_round(command)
            case Terminate():
                self._ranks.signal(self._end_signal)
            case Kill():
                self._inspector.stop()
                self._ranks.signal(signal.SIGKILL)
            case Notify():
                self.notify(command.fault)
            case Exit():
                self._exit = command

    def notify(self, fault: Fault) -> None:
        """Hands a fault to the sidecar, as soon as there is room for it, and says it in the log."""
        log.warning("%s", describe(fault))
        self._unwritten.append(fault)
        self._hand_over_faults()

    def _hand_over_faults(self) -> None:
        with self._volume.tolerated("a fault"):
            while self._unwritten:
                write_json(self._runtime.fault(self._unwritten[0].name), self._unwritten[0].to_json())
                del self._unwritten[0]

    async def _meet(self, plan: WorkerPlan | None) -> None:
        """Sits in the meeting that the plan names, serves it where the plan says so, and says how things stand."""
        if plan is None or plan.role is not Role.MEMBER or self._state.membership != plan.membership:
            self._client.leave()
            return
        self._probe_host.admit(plan.membership, plan.secret)
        self._prober.follow(plan.probe, plan.membership, plan.secret)
        address, port = _split(plan.store)
        if plan.serves_store:
            if self._hosting != plan.store:
                await self._serve_meeting(plan.store)
            if self._host is not None:
                self._host.admit(plan.membership, plan.secret)
        self._client.attend(address, port, plan.membership, plan.secret)
        said = report(self._state, plan, self._settings)
        view = self._client.view
        seen = view.round if view is not None and view.membership == plan.membership else 0
        if said.status is Status.READY and not (self._warm.ready and self._paths.find(plan, seen)):
            said = replace(said, status=Status.ENDING)  # when all are ready, all can fork, and know their paths
        self._client.say(said)

    async def _serve_meeting(self, store: str) -> None:
        if self._host is not None:
            await self._host.close()
            self._host, self._hosting = None, ""
        host = MeetingHost(self._open_store)
        try:
            await host.serve(self._listener(*_split(store)))
        except OSError as error:
            log.warning("cannot serve the meeting at %s: %s; trying again", store, error)
            await asyncio.sleep(_BIND_PAUSE)
        else:
            self._host, self._hosting = host, store

    def _listener(self, address: str, port: int) -> socket.socket:
        """Raises OSError where the port is taken. The one that the heartbeat announces is not: it is held since the
        launcher's start, because on the node's own network others want ports, too."""
        if self._held is None or port != self._meeting_port:
            return bind(address, port)
        held, self._held = self._held, None
        return held

    def _open_store(self) -> int:
        """A fresh store for the process group of a new round; the one before ends, its ranks are gone."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

        self._store = None  # it frees the port that the user may have named
        listener = self._store_listener()
        port: int = listener.getsockname()[1]
        self._store = TCPStore(
            self._settings.address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        return port

    def _store_listener(self) -> socket.socket:
        address, wanted = self._settings.address, self._script.options.master_port
        try:
            return socket.create_server((address, wanted), family=_family(address))
        except OSError as error:
            if not wanted:
                raise
            log.warning("--master-port %d: %s; the ranks meet at another port", wanted, error.strerror)
            return socket.create_server((address, 0), family=_family(address))

    def _start_round(self, command: Start) -> None:
        log.info(
            "round %d starts with ranks %s of %d", command.round, list(command.plan.ranks), command.plan.world_size
        )
        self._inspector.stop()
        # What was measured here is newer; a worker that joins knows of the job's steps only what the plan says.
        earlier = self._inspector.step_seconds(self._ranks.states()) or command.plan.step_seconds
        ends = self._ranks.exit_codes()
        self._profiler = plugin_after(self._profiler, ends)
        if self._native and crashed(ends):
            log.warning("a rank ended by a fault of native code: from now on the ranks record in Python alone")
            self._native = False
        self._paths.put_in_force(command.plan)
        starts = rank_starts(command, self._script, self._settings, self._runtime, self._profiler, self._native)
        self._ranks.start(starts)
        self._inspector = Inspector(self._settings, self._ranks, self.notify, earlier)

    async def _part_from_peers(self, code: int) -> None:
        """The host of a meeting that has finished stays until the others have heard so."""
        if self._host is not None:
            if code == 0:
                await self._host.wait_until_alone(self._settings.worker, patience=_LINGER)
            await self._host.close()
        self._client.leave()


def gpu_fault(event: GpuEvent, state: RoundState, settings: LauncherSettings, wall: float) -> Fault:
    """The same XID of the same GPU is the same fault for as long as the round lasts: a kernel with a wild pointer makes
    thousands of them, before which the operator would never come to the rank's own end.

    `wall`: seconds since the epoch.
    """
    place = f"{event.gpu}-xid-{event.xid}".replace(" ", "-")
    return Fault(
        name=f"{settings.worker}-{settings.incarnation}-r{state.round}-gpu-{place}".lower(),
        kind=FaultKind.GPU_ERROR,
        worker=settings.worker,
        round=state.round,
        membership=max(state.membership, 0),
        noticed_at=wall,
        error=event.text,
        xid=event.xid,
    )


def rank_starts(
    command: Start,
    script: Script,
    settings: LauncherSettings,
    runtime: Runtime,
    profiler: Path | None = None,
    native: bool = True,
) -> list[RankStart]:
    """The ranks of a round, with the environment that torchrun would give them.

    profiler: NCCL's plugin, where the ranks are to run with it. native: whether they may record by the part in C.
    """
    plan = command.plan
    host, _ = _split(plan.store)
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
        "TORCHELASTIC_RESTART_COUNT": str(command.round - 1),  # scripts ask it whether this is their first start
        "TORCHELASTIC_MAX_RESTARTS": str(plan.restarts),
        "TORCHELASTIC_RUN_ID": script.options.run_id or os.environ.get("PACEKEEPER_JOB", "local"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "PACEKEEPER_ROUND": str(command.round),
        "PACEKEEPER_RUNTIME": str(runtime.root),
    }
    interface = interface_of(settings.address)
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    environment |= _flight_recorder(os.environ)
    if not native:
        environment["PACEKEEPER_NATIVE"] = "0"
    threads = _threads(len(plan.ranks))
    if threads:
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
                **rank_environment(script.options, local_rank, os.environ),
                "ROLE_RANK": str(rank),
                ERROR_FILE: str(error_file(script.options, command.round - 1, local_rank, runtime.errors)),
                "PACEKEEPER_RING": str(runtime.ring(local_rank)),
                "PACEKEEPER_PATHS": str(runtime.paths_of(local_rank)),
                **plugin_environment(os.environ, profiler, runtime.transport(local_rank)),
            },
            ring=str(runtime.ring(local_rank)),
            stack=str(runtime.stack(local_rank)),
            threads=threads,
            is_program=script.is_program,
        )
        for local_rank, rank in enumerate(plan.ranks)
    ]


def _flight_recorder(given: Mapping[str, str]) -> dict[str, str]:
    """What has NCCL's flight recorder keep its last collectives, and whether each of them has begun (`observe.flight`),
    unless the variables are `given` otherwise.

    Timing costs one more event a collective, and has NCCL's watchdog thread ask for each one's duration, which may hang
    in the CUDA driver (so torch warns). It is worth it: nothing else tells a kernel that never ends from a wait, the
    watchdog asks the same driver without timing, too, and where that hangs, the rank does, which is found sooner.
    """
    sizes = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
    wanted = {"TORCH_NCCL_ENABLE_TIMING": "1"}
    if not sizes & given.keys():
        wanted["TORCH_FR_BUFFER_SIZE"] = "2000"  # torch's own default from 2.10 on
    return {name: value for name, value in wanted.items() if name not in given}


def _threads(ranks: int) -> int:
    """Threads of a rank's operations; 0: torch's default. One where ranks share the worker, as torchrun has it."""
    if "OMP_NUM_THREADS" in os.environ:
        return 0
    limit = cgroup.cpu_limit()
    if ranks > 1 or limit < 2:
        return 1
    return 0 if math.isinf(limit) else int(limit)


def _split(store: str) -> tuple[str, int]:
    host, _, port = store.rpartition(":")
    return host.strip("[]"), int(port)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def publish_finish(environment: Mapping[str, str]) -> None:
    """Append to the container's termination message that the ranks have finished: the one proof of it that outlives
    the pod's processes. Outside of Kubernetes there is no such file."""
    path = environment.get("PACEKEEPER_TERMINATION_LOG", "/dev/termination-log")
    with contextlib.suppress(OSError), open(path, "r+", encoding="utf-8") as file:
        file.seek(0, os.SEEK_END)
        file.write(f"{FINISHED_MESSAGE}\n")
