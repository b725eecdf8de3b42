"""The watched container as its sidecar reports it: heartbeat, ranks, and faults until the operator has them.

Nothing is written into the container's folder, whose processes are not trusted. A sidecar that restarts finds the same
ends of ranks again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from pacekeeper.health.rank_metrics import CurrentRankMetrics
from pacekeeper.observe.profiling.path_hashes import hide_own_path, map_path_hashes
from pacekeeper.watch.container import ContainerState, WatchedContainer
from pacekeeper_analysis.profiling.pattern import ProfileAnswer
from pacekeeper_analysis.protocol.plan import WorkerPlan
from pacekeeper_analysis.protocol.reports import Evidence, FaultKind, FaultReport, Heartbeat
from pacekeeper_analysis.protocol.requests import (
    EvidencePart,
    EvidenceRequest,
    ProfileRequest,
    SourceNaming,
    WorkerRequests,
)
from pacekeeper_analysis.protocol.watched_container import RankDescription
from pacekeeper_analysis.protocol.watched_report import (
    MAX_VERSION_CHARACTERS,
    MAX_WATCHED_RANKS,
    MAX_WATCHED_WORLD_SIZE,
    RecordingLevel,
    ReportedProgress,
    ReportedRank,
    WatchedReport,
)

from .connection_sampler import CONNECTION_SAMPLE_INTERVAL_SECONDS, ConnectionSampler
from .delivery import RetryBackoff, deliver_report
from .monitor import Monitor, SidecarLoop
from .operator_client import OperatorClient

WATCHED_READ_INTERVAL_SECONDS = 0.25
"""Seconds between two reads of the container. The first of several deaths is known as well as that."""
MAX_PENDING_FAULTS = 64
"""Faults that wait for the operator. The oldest stay: they show the first cause."""

log = logging.getLogger(__name__)


class ContainerMonitor(Monitor):
    """Reads a watched container, and keeps what is to be reported of it. No launcher follows the operator's answers."""

    poll_interval_seconds = WATCHED_READ_INTERVAL_SECONDS

    def __init__(self, container: WatchedContainer, worker: str, connections: ConnectionSampler | None = None) -> None:
        """`connections` None: they are not sampled."""
        self._container = container
        self._connections = connections
        self._round: tuple[ReportedRank, ...] = ()
        self._first_step_at: float | None = None
        self._first_step = 0
        """Step from which the ranks have resumed: they count their own steps, and the heartbeat those of the job."""
        self._stalled_steps: int | None = None  # complete ones when the ranks stalled; None: they do not stall
        self._stall_changes = 0
        """Changes when the ranks stall, and when they go on: the steps until then are to be reported at once."""
        self._heartbeat = Heartbeat(worker=worker, watched=WatchedReport())
        self.reported_progress: ReportedProgress | None = None
        """What the script has reported of its progress."""
        self._faults: dict[str, FaultReport] = {}
        self._profile: ProfileRequest | None = None

    @property
    def heartbeat(self) -> Heartbeat:
        return self._heartbeat

    @property
    def urgent_changes(self) -> int:
        return self._stall_changes

    def check(self, now: float, wall: float, *, is_over: bool = False) -> None:
        try:
            state = self._container.read(now, wall, is_over=is_over)
        except OSError as error:  # a process of the container has damaged its folder
            log.warning("the container cannot be read: %s", error)
            return
        ranks = describe_ranks(state)
        processes = tuple(replace(rank, resumed_from=None, broken="") for rank in ranks)
        if processes != self._round:
            self._round, self._first_step_at, self._stalled_steps = processes, None, None
        steps = state.heartbeat.progress.steps_in_round
        if self._first_step_at is None and steps:
            self._first_step_at = self._container.measure_first_step(now, wall)
        self._first_step = max((rank.resumed_from or 0 for rank in ranks), default=0)
        start = replace(state.heartbeat.start, first_step_at=self._first_step_at)
        described = {rank.rank for rank in ranks}
        sums = tuple(each for each in self._container.sum_steps() if each.rank in described)
        self._heartbeat = replace(
            state.heartbeat,
            start=start,
            watched=WatchedReport(ranks, sums),
            reported_progress=self.reported_progress,
            rank_metrics=(),
        )
        self._count_stalls(steps, any(fault.kind is FaultKind.STALLED for fault in state.faults))
        for fault in state.faults:
            if len(self._faults) < MAX_PENDING_FAULTS:
                blocked = fault if self._connections is None else self._connections.add_blocked(fault, now)
                self._faults[fault.name] = self._shift_stall(blocked)

    def _count_stalls(self, steps: int, has_stalled: bool) -> None:
        """Count that the ranks have stalled, or go on after a stall. `steps`: complete ones of this round."""
        if has_stalled:
            self._stall_changes, self._stalled_steps = self._stall_changes + 1, steps
        elif self._stalled_steps is not None and steps > self._stalled_steps:
            self._stall_changes, self._stalled_steps = self._stall_changes + 1, None

    def measure_metrics(self) -> Sequence[CurrentRankMetrics]:
        """Return the present metrics of the ranks that are described."""
        described = {rank.rank for rank in self._round}
        measured = self._container.rings.measure_metrics() if described else []
        return [self._shift_metrics(metrics) for metrics in measured if metrics.metrics.rank in described]

    def build_evidence(self, request: EvidenceRequest, plan: WorkerPlan | None) -> Evidence | None:
        del plan  # it only describes
        worker, round_ = self.heartbeat.worker, self.heartbeat.round
        evidence = self._container.rings.build_evidence(request.name, worker, round_, request.parts)
        windows = (
            replace(window, steps=tuple(step + self._first_step for step in window.steps))
            for window in evidence.windows
        )
        samples = self._connections if EvidencePart.LINKS in request.parts else None
        links = () if samples is None else samples.windows()
        return replace(evidence, windows=tuple(windows), links=links)

    def list_loops(self, client: OperatorClient) -> Iterable[SidecarLoop]:
        sampling = () if self._connections is None else (partial(self._sample_connections, self._connections),)
        return (*sampling, partial(self._deliver_profiles, client))

    def store_answer(self, requests: WorkerRequests | None, plan: WorkerPlan | None) -> None:
        del plan  # it only describes
        self._profile = self._profile if requests is None else requests.profile

    async def _sample_connections(self, connections: ConnectionSampler) -> None:
        while True:
            connections.sample(time.monotonic())
            await asyncio.sleep(CONNECTION_SAMPLE_INTERVAL_SECONDS)

    async def _deliver_profiles(self, client: OperatorClient) -> None:
        """Pass each request for a profile window on to the ranks, and send what they answer, each rank once."""
        requested, sent, backoff = "", set[int](), RetryBackoff()
        while True:
            await asyncio.sleep(WATCHED_READ_INTERVAL_SECONDS)
            request = self._profile
            if request is None:
                continue
            if request.name != requested:
                requested, sent = request.name, set()
                self._request_profile(request)
            for rank, answer in self._build_profile_answers(request, sent).items():
                sending = client.send_pattern(request.name, rank, answer)
                if await deliver_report(sending, f"profile of rank {rank}", backoff):
                    sent.add(rank)

    def _request_profile(self, request: ProfileRequest) -> None:
        """Ask the ranks for a profile window. `request`: with steps of the job."""
        own_step = max(0, request.first_step - self._first_step)
        self._container.request_profile(replace(request, first_step=own_step))

    def _build_profile_answers(self, request: ProfileRequest, known: Set[int]) -> dict[int, bytes]:
        """Return the ranks' new answers, without those of `known` ranks.

        The log says which path a hash stands for, where paths are hidden.
        """
        answers = {}
        try:
            patterns = self._container.read_patterns(request.name, known)
        except OSError as error:  # a process of the container has damaged its folder
            log.warning("profile %s cannot be read: %s", request.name, error)
            return {}
        for rank, pattern in patterns.items():
            pattern = replace(pattern, round=self.heartbeat.round, first_step=pattern.first_step + self._first_step)
            answer = ProfileAnswer(pattern)
            if request.sources is SourceNaming.HASH:
                paths = map_path_hashes(answer.names)
                log.info("profile %s: %s", request.name, ", ".join(f"{key} is {path}" for key, path in paths.items()))
                answer = answer.rename_functions(hide_own_path, SourceNaming.HASH)
            answers[rank] = answer.to_bytes()
        return answers

    def list_faults(self) -> Iterable[str]:
        return self._faults

    def read_fault(self, name: str) -> FaultReport | None:
        return self._faults.get(name)

    def drop_fault(self, name: str) -> None:
        self._faults.pop(name, None)

    def _shift_stall(self, fault: FaultReport) -> FaultReport:
        """Return a stall with the numbers of the job's steps, with which the operator compares heartbeats."""
        if fault.kind is not FaultKind.STALLED:
            return fault
        ranks = tuple(replace(rank, step=self._shift_step(rank.step)) for rank in fault.ranks)
        return replace(fault, step=self._shift_step(fault.step), ranks=ranks)

    def _shift_step(self, step: int | None) -> int | None:
        return None if step is None else step + self._first_step

    def _shift_metrics(self, current: CurrentRankMetrics) -> CurrentRankMetrics:
        """Return the metrics with the number of the job's step."""
        last_step = self._shift_step(current.metrics.last_step)
        return replace(current, metrics=replace(current.metrics, last_step=last_step))


def describe_ranks(state: ContainerState) -> tuple[ReportedRank, ...]:
    """Return the present ranks as they are reported; those beyond the limits are left out."""
    broken = {report.pid: f"{report.hook}: {report.error}" for report in state.broken}
    ranks = (_describe_rank(rank, broken) for rank in state.ranks)
    return tuple(rank for rank in ranks if rank is not None)[:MAX_WATCHED_RANKS]


def _describe_rank(rank: RankDescription, broken: Mapping[int, str]) -> ReportedRank | None:
    if not rank.rank < rank.world_size <= MAX_WATCHED_WORLD_SIZE:
        return None
    return ReportedRank(
        rank.rank,
        rank.world_size,
        rank.pid,
        rank.started_at,
        RecordingLevel(rank.recording),
        rendezvous="" if rank.rendezvous == ":" else rank.rendezvous,
        run_id=rank.run_id,
        resumed_from=rank.resumed_from,
        python=rank.python[:MAX_VERSION_CHARACTERS],
        torch=rank.torch[:MAX_VERSION_CHARACTERS],
        broken=broken.get(rank.pid, ""),
    )
