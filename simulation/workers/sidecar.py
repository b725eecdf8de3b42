"""The simulated I/O of a sidecar.

It has the loops of `pacekeeper.sidecar.sidecar` between the runtime folder and the operator.

Changes wake them. The real ones poll every 0.05 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from pacekeeper.health.rank_metrics import CurrentRankMetrics, MetricsReporter, measure_rank
from pacekeeper.sidecar.launcher_monitor import MIN_SILENCE_SECONDS, LauncherSilence
from pacekeeper.sidecar.leader_address import LeaderAddress, parse_named_leader
from pacekeeper.sidecar.operator_client import OPERATOR_ANSWER_SECONDS, OperatorUnavailable, RequestRejected
from pacekeeper.sidecar.settings import SidecarSettings
from pacekeeper.sidecar.sidecar import FINAL_REPORT_SECONDS, RING_POLL_INTERVAL_SECONDS, select_urgent_fields
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport, LauncherState, RankMetrics

from ..loop import Process
from ..operators.endpoint import EndpointReply
from .launcher import SimulatedLauncher
from .pod import WorkerPod
from .rank import SimulatedRank
from .worker_world import WorkerWorld

_SIDECAR_START_SECONDS = (0.3, 0.8)
"""Seconds from the container's start to the first call."""
_CHANGE_NOTICE_SECONDS = (0.02, 0.1)
"""Seconds until it notices a change."""
_LAUNCHER_POLL_SECONDS = 0.5
"""Seconds between two checks of a silent launcher."""
_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.2, 5.0
_TOKEN_SECONDS = 2_880.0
"""Age at which the kubelet renews the token."""
_FINAL_STATUSES = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class SimulatedSidecar(Process):
    """One run of a worker's sidecar container."""

    def __init__(self, world: WorkerWorld, worker: WorkerPod, launcher: SimulatedLauncher, number: int) -> None:
        super().__init__(world.loop, f"{worker.name}/sidecar")
        self._world = world
        self._worker = worker
        self._launcher = launcher
        self._folder = worker.folder
        self._random = world.create_random(f"sidecar {worker.name} {number}")
        self._clients = {
            purpose: world.endpoint.open_client(worker.node, worker.address)
            for purpose in ("poll", "tell", "faults", "evidence")
        }
        self._leader = LeaderAddress()
        self.serves = False
        """Whether its ports are open."""
        self._loops: list[asyncio.Task[None]] = []
        self._metrics = MetricsReporter()
        self._last_report: tuple[Any, ...] | None = None
        self._changed = asyncio.Event()
        self._evidence_requested = asyncio.Event()
        self._delivering: dict[str, None] = {}
        self._silence = LauncherSilence()
        self._polls_launcher = False
        self._token, self._token_until = "", -1.0

    def start(self) -> None:
        self.call_after(self._random.uniform(*_SIDECAR_START_SECONDS), self._start_loops)

    def _start_loops(self) -> None:
        self.serves = True
        coroutines = {"poll": self._poll_plan(), "tell": self._send_changes(), "evidence": self._answer_requests()}
        self._loops = [self.spawn(loop, name=f"{self._worker.name}/{name}") for name, loop in coroutines.items()]
        self._poll_ranks()
        self.check_heartbeat()
        self.check_faults()
        self._check_evidence_request()
        self.check_launcher()

    def end(self) -> None:
        """Handle SIGTERM: send the final reports, and exit."""
        self.call_after(0.0, self._handle_end_signal)

    def _handle_end_signal(self) -> None:
        for loop in self._loops:
            loop.cancel()
        self.spawn(self._send_final_reports(), name=f"{self._worker.name}/part")

    # Observations.

    def check_heartbeat(self) -> None:
        """Wake the sender if the heartbeat has urgent changes."""
        if self.serves and not self._changed.is_set() and self._select_urgent_fields() != self._last_report:
            self._changed.set()

    def _poll_ranks(self) -> None:
        plan = self._folder.plan
        deadband = WorkerPlan.metrics_deadband if plan is None else plan.metrics_deadband
        self._metrics.update([_measure_rank(rank) for rank in self._list_ranks()], deadband, self._world.now())
        self.check_heartbeat()
        self.call_after(RING_POLL_INTERVAL_SECONDS, self._poll_ranks)

    def _list_ranks(self) -> list[SimulatedRank]:
        return [rank for rank in self._launcher.ranks if rank.training_round is not None]

    def check_faults(self) -> None:
        """Start the delivery of new faults."""
        if not self.serves:
            return
        for name in self._folder.faults:
            if name not in self._delivering:
                self._delivering[name] = None
                self.call_after(self._random.uniform(*_CHANGE_NOTICE_SECONDS), self._start_delivery, name)

    def check_launcher(self) -> None:
        """Start polling the launcher, which may be silent."""
        if self.serves and not self._polls_launcher:
            self._polls_launcher = True
            self._poll_launcher()

    def _poll_launcher(self) -> None:
        launcher, now = self._launcher, self._world.now()
        alive_at = launcher.get_last_alive_at()
        self._silence.update(None if alive_at is None else int(1e9 * alive_at), now)
        self.check_heartbeat()
        self._polls_launcher = alive_at is not None and (launcher.paused or launcher.dead)
        if self._polls_launcher:
            self.call_after(_LAUNCHER_POLL_SECONDS, self._poll_launcher)

    def _build_heartbeat(self) -> dict[str, Any]:
        """Return the heartbeat to send now."""
        self._launcher.refresh_heartbeat()
        seconds = self._silence.seconds
        heartbeat = replace(
            self._folder.heartbeat,
            rank_metrics=self._falsify_metrics(self._metrics.take_report()),
            launcher_silent_seconds=round(seconds, 1) if seconds >= MIN_SILENCE_SECONDS else 0.0,
            sent_at=self._world.wall_time(self._worker.node),
        )
        return heartbeat.to_json()

    def _falsify_metrics(self, all_metrics: tuple[RankMetrics, ...]) -> tuple[RankMetrics, ...]:
        match self._worker.wrong_metrics:
            case "huge":
                return tuple(
                    replace(metrics, compute_seconds=1e9, compute_seconds_per_sample=1e8) for metrics in all_metrics
                )
            case "foreign":
                return tuple(replace(metrics, rank=rank) for metrics in all_metrics for rank in range(metrics.rank + 8))
        return all_metrics

    def _select_urgent_fields(self) -> tuple[Any, ...]:
        """Return what of the heartbeat cannot wait for the next poll."""
        return select_urgent_fields(self._folder.heartbeat, self._silence.seconds, self._metrics.urgent_changes)

    # Loops.

    async def _poll_plan(self) -> None:
        backoff = self._create_backoff()
        while True:
            try:
                await self._poll("poll", SidecarSettings.poll_seconds)
                backoff.reset()
            except (OperatorUnavailable, RequestRejected):
                await backoff.sleep()

    async def _send_changes(self) -> None:
        backoff = self._create_backoff()
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._random.uniform(*_CHANGE_NOTICE_SECONDS))
            self._changed.clear()
            while (fields := self._select_urgent_fields()) != self._last_report:
                try:
                    await self._poll("tell", 0.0)
                    self._last_report = fields
                    backoff.reset()
                except (OperatorUnavailable, RequestRejected):
                    await backoff.sleep()

    def _start_delivery(self, name: str) -> None:
        self.spawn(self._deliver_fault(name), name=f"{self._worker.name}/{name}")

    async def _deliver_fault(self, name: str) -> None:
        backoff = self._create_backoff()
        fault = self._folder.faults.get(name)
        while fault is not None:
            try:
                await self._send_fault(fault)
                break
            except OperatorUnavailable:
                await backoff.sleep()
            except RequestRejected as error:
                self._world.log.record(self._worker.name, f"fault {name} dropped: {error}")
                break
        self._folder.faults.pop(name, None)
        self._delivering.pop(name, None)

    async def _send_fault(self, fault: FaultReport) -> None:
        report = replace(fault, sent_at=self._world.wall_time(self._worker.node))
        await self._post_json("faults", "/v1/faults", report.to_json(), {}, OPERATOR_ANSWER_SECONDS)

    async def _answer_requests(self) -> None:
        answered = ""
        backoff = self._create_backoff()
        while True:
            await self._evidence_requested.wait()
            self._evidence_requested.clear()
            while (request := self._get_evidence_request()) not in ("", answered):
                await asyncio.sleep(self._random.uniform(*_CHANGE_NOTICE_SECONDS))
                evidence = self._build_evidence(request)
                try:
                    await self._post_json(
                        "evidence", f"/v1/evidence/{request}", evidence.to_json(), {}, OPERATOR_ANSWER_SECONDS
                    )
                    answered = request
                    backoff.reset()
                except RequestRejected:
                    answered = request
                except OperatorUnavailable:
                    await backoff.sleep()

    def _get_evidence_request(self) -> str:
        plan, request = self._folder.plan, self._folder.requests.evidence
        is_member = plan is not None and plan.role is WorkerRole.MEMBER
        return request.name if request is not None and is_member else ""

    def _check_evidence_request(self) -> None:
        if self._get_evidence_request():
            self._evidence_requested.set()

    def _build_evidence(self, request: str) -> Evidence:
        windows = tuple(rank.build_window() for rank in self._list_ranks())
        return Evidence(request, self._worker.name, self._folder.heartbeat.round, windows)

    async def _send_final_reports(self) -> None:
        """Send the last heartbeat and faults. The launcher exits before its sidecar is stopped, so they are final."""
        backoff = self._create_backoff()
        try:
            async with asyncio.timeout(FINAL_REPORT_SECONDS):
                while (fields := self._select_urgent_fields()) != self._last_report:
                    try:
                        await self._poll("tell", 0.0)
                        self._last_report = fields
                    except (OperatorUnavailable, RequestRejected):
                        await backoff.sleep()
                await asyncio.gather(*(self._deliver_fault(name) for name in list(self._folder.faults)))
        except TimeoutError:
            pass
        self.kill()

    # Calls.

    async def _poll(self, purpose: str, wait: float) -> None:
        folder = self._folder
        after = -1 if folder.plan is None else folder.plan.version
        known_requests = folder.requests.identity
        query = {"after": str(after), "wait": f"{wait:g}", "requests": known_requests}
        answer = await self._post_json(
            purpose, "/v1/plan", self._build_heartbeat(), query, wait + OPERATOR_ANSWER_SECONDS
        )
        news = PollAnswer() if answer is None else PollAnswer.from_json(answer)
        if news.requests is not None and known_requests == folder.requests.identity:
            folder.requests = news.requests
        if news.plan is not None and (folder.plan is None or news.plan.version > folder.plan.version):
            folder.plan = news.plan
            self._launcher.read_plan()
        self._check_evidence_request()
        self._record_contact()

    def _record_contact(self) -> None:
        self._folder.operator_contact_at = self._world.now()
        if self._folder.heartbeat.state is LauncherState.LOST:
            self._launcher.wake()

    async def _post_json(
        self, purpose: str, path: str, body: dict[str, Any], query: Mapping[str, str], seconds: float
    ) -> Any:
        """Return the parsed answer; None: it has no content. Raises OperatorUnavailable or RequestRejected."""
        leader = self._leader.address
        status, answer = await self._call_operator(purpose, leader, path, body, query, seconds)
        named_leader = parse_named_leader(answer) if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        if named_leader is not None:
            self._leader.update(named_leader, self._world.now())
            if self._leader.address not in ("", leader):
                status, answer = await self._call_operator(purpose, self._leader.address, path, body, query, seconds)
        if status == HTTPStatus.OK:
            return answer
        if status < HTTPStatus.MULTIPLE_CHOICES:
            return None
        if status in _FINAL_STATUSES:
            raise RequestRejected(f"{path}: status {status}: {answer}")
        raise OperatorUnavailable(f"{path}: status {status}: {answer}")

    async def _call_operator(
        self, purpose: str, leader: str, path: str, body: dict[str, Any], query: Mapping[str, str], seconds: float
    ) -> EndpointReply:
        """Call the operator at `leader` ("": the Service). Raises OperatorUnavailable."""
        try:
            async with asyncio.timeout(seconds):
                return await self._clients[purpose].call("POST", path, query, body, self._get_token(), leader)
        except (TimeoutError, OSError) as error:
            if leader:
                self._leader.mark_unreachable(leader, self._world.now())
            raise OperatorUnavailable(f"{path}: {error!r}") from error

    def _get_token(self) -> str:
        if self._world.now() >= self._token_until:
            self._token = self._world.api.mint_token(self._worker.pod)
            self._token_until = self._world.now() + _TOKEN_SECONDS
        return self._token

    def _create_backoff(self) -> _SimulatedBackoff:
        return _SimulatedBackoff(self._random.uniform)


def _measure_rank(rank: SimulatedRank) -> CurrentRankMetrics:
    return measure_rank(rank.number, rank.history, None if rank.segment is None else rank.segment.share)


class _SimulatedBackoff:
    """The same delays as the real back-off."""

    def __init__(self, uniform: Callable[[float, float], float]) -> None:
        self._uniform = uniform
        self._next = _FIRST_BACKOFF_SECONDS

    def reset(self) -> None:
        self._next = _FIRST_BACKOFF_SECONDS

    async def sleep(self) -> None:
        await asyncio.sleep(self._next * self._uniform(0.5, 1.0))
        self._next = min(2 * self._next, _MAX_BACKOFF_SECONDS)
