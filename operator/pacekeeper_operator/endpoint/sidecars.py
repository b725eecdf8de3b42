"""The service behind the sidecars' endpoint: authentication, their part of the plan, faults, evidence."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol
from zlib import crc32

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.plan import Member, Plan
from pacekeeper_analysis.protocol.poll import PollAnswer
from pacekeeper_analysis.protocol.reports import Evidence, FaultKind, FaultReport, Heartbeat, LauncherState
from pacekeeper_analysis.protocol.requests import EvidencePart, ProbeRequest

from ..async_runtime import OperatorRuntime
from ..kube.client import Cluster
from ..limits import RateLimiter
from ..observe.faults import shorten_fault
from ..observe.job_cache import JobCache, JobRegistry, WorkerContact
from ..observe.rank_metrics import needs_immediate_pass, read_rank_rows
from ..pods.checkpoint_server import build_checkpoint_server_name
from .token_review import Forbidden, PodIdentity, TokenReviewer, TooManyRequests

MAX_POLL_SECONDS = 30.0
POLL_HOLD_SECONDS = (3.0, 5.0, 8.0, 12.0, 20.0, MAX_POLL_SECONDS)
MAX_POLLS_PER_SECOND = 170.0
"""Upper limit of polls per second over all workers: of the hold durations, the shortest that respects it is chosen.

A poll of a worker with eight GPUs costs 1 ms, so that polls take a fifth of a core.
"""
GOLDEN_RATIO = 0.6180339887498949
"""Phase difference between consecutive workers: it spreads the phases evenly for any number of workers."""
JOB_KNOWN_TIMEOUT_SECONDS = 2.0
"""Maximum seconds that a call waits for its job to be known, before the sender has to retry.

After a restart all workers call at once, and a retry costs as much as a waiting call.
"""
FAULT_ACK_TIMEOUT_SECONDS = 2.0
"""Maximum seconds that a fault waits to be settled, before the sender has to retry."""
WORKER_CALL_BURST = 64
WORKER_CALLS_PER_SECOND = 20.0
"""Rate limit of one worker. A sidecar that exceeds it is faulty."""
WORKER_CALL_COST_SECONDS = 0.1 / WORKER_CALLS_PER_SECOND
"""CPU seconds that count as one more call, so that one worker gets at most a tenth of the event loop in the long run.

For a worker with 128 ranks, a heartbeat takes 2 ms and the report of a stall 30 ms. The largest evidence takes 120 ms,
and is requested every 1.5 s at most. The sum is 17 calls per second.
"""
MAX_HELD_PROFILE_BYTES = 256 * 2**20
"""Total size of all open profile windows: 10,000 ranks send 160 MB."""
MAX_OPEN_FAULT_BYTES, GUARANTEED_FAULT_BYTES = 64 * 2**20, 2**18
"""Total bytes of all jobs' unsettled faults, and the bytes that each worker may always use.

Above the total, faults are shortened, and limited to the second value per worker. Other jobs' faults must not prevent
the diagnosis of a hang, which needs a stall from each worker.
"""
MAX_COUNTER_JUMP = 10**6
"""Maximum lead of a heartbeat's membership, round, and plan version over the plan's.

They may be ahead after a restored backup.
"""
MAX_OPERATION_BYTES = 192 * 2**20
"""Total size of the collectives that all jobs' ranks have reported: 1,024 ranks send 180 MB at most."""
MAX_FAULT_NAME_CHARACTERS = 253
"""Maximum length of a fault's name."""
MAX_FAULT_AGE_SECONDS = 3600.0
"""Maximum age of a fault when it arrives. A sender delivers it within seconds once the operator responds."""
MAX_ROUND_AGE_SECONDS = 90 * 86400.0
"""Maximum age of a round."""
_WORKER_NAME = re.compile(r"(?P<job>.+)-(?:w\d+-\d+|checkpoints-[0-9a-f]{8})")
"""A worker, or a checkpoint server."""
_ERROR_FIELDS = (
    *("launcher_silent_seconds", "unkillable_ranks", "checkpoint.failed_rank", "checkpoint.error"),
    *("training.refused", "training.bad_loss"),
)
_get_errors = attrgetter(*_ERROR_FIELDS)
_get_waking_fields = attrgetter(
    *_ERROR_FIELDS,
    *("state", "round", "membership", "restarts", "start.first_step_at", "checkpoint.request", "training.sync_mode"),
    "watched_ranks",
)
"""Returns the fields of a heartbeat whose change wakes the reconcile loop at once. Metrics have their own rule."""


_HEALTHY_HEARTBEAT = Heartbeat()


class WatchedCallers(Protocol):
    """The pods of watched jobs."""

    jobs: JobRegistry

    def find_job(self, identity: PodIdentity) -> str | None:
        """Return the name of the watched job of this very pod; None: it is not watched, or not known yet."""


class RetryLater(Exception):
    """The operator has not loaded the job, or has not settled the fault: send again."""


@dataclass(frozen=True)
class Caller:
    """An authenticated worker, or the pod of its job's checkpoint server."""

    namespace: str
    job: str
    worker: str
    watched: bool = False  # its job is a WatchedJob
    serves_checkpoints: bool = False  # it has no ranks, and reads only the plan


class SidecarService:
    """Serves the sidecars of all jobs."""

    def __init__(
        self,
        cluster: Cluster,
        jobs: JobRegistry,
        runtime: OperatorRuntime,
        is_pod_alive: Callable[[PodIdentity], bool] = lambda _identity: False,
        watched: WatchedCallers | None = None,
    ) -> None:
        """Create the service. `is_pod_alive`: see `TokenReviewer`. `watched` None: no job is watched."""
        self._jobs = jobs
        self._watched = watched
        self._runtime = runtime
        self._token_reviewer = TokenReviewer(cluster, runtime, is_pod_alive)
        self._calls = RateLimiter[Caller](WORKER_CALLS_PER_SECOND, WORKER_CALL_BURST)
        self._polls: dict[Caller, asyncio.Timeout] = {}

    async def authenticate(self, token: str, source: str) -> Caller:
        """Return the worker that sends `token` from the address `source`.

        Raises Unauthenticated, Forbidden, TooManyRequests or RetryLater.
        """
        caller = await self._wait_for_caller(await self._token_reviewer.review(token, source))
        self._check_rate(caller)
        return caller

    def recheck_rate(self, caller: Caller) -> None:
        """Check the rate of a call that was admitted earlier: concurrent calls may have used up the budget since.

        Raises TooManyRequests.
        """
        self._calls.refund(caller)
        self._check_rate(caller)

    def _check_rate(self, caller: Caller) -> None:
        if not self._calls.take(caller, self._runtime.monotonic()):
            raise TooManyRequests(
                f"{caller.worker} calls more than {WORKER_CALLS_PER_SECOND:.0f} times a second, or sends what "
                "takes as long"
            )

    @contextmanager
    def charge_time(self, caller: Caller) -> Iterator[None]:
        """Charge the CPU time of the context, which must not await, to the caller's rate.

        The charge is limited to one burst.
        """
        start_seconds = self._runtime.thread_seconds()
        try:
            yield
        finally:
            calls = (self._runtime.thread_seconds() - start_seconds) / WORKER_CALL_COST_SECONDS
            self._calls.charge(caller, min(calls, WORKER_CALL_BURST))

    async def _wait_for_caller(self, identity: PodIdentity) -> Caller:
        """Return the worker of this pod, once it is known. Raises Forbidden or RetryLater."""
        with suppress(TimeoutError):
            return await self._runtime.run_with_timeout(JOB_KNOWN_TIMEOUT_SECONDS, self._wait_until_known(identity))
        return self._identify_worker(identity)

    async def _wait_until_known(self, identity: PodIdentity) -> Caller:
        match = _WORKER_NAME.fullmatch(identity.pod)
        while True:
            try:
                return self._identify_worker(identity)
            except RetryLater:
                if match is None:  # the pod of a watched job: it is tried again
                    raise
                await self._jobs.wait_for_change(identity.namespace, match["job"])

    def _identify_worker(self, identity: PodIdentity) -> Caller:
        """Return the worker of this pod. Raises Forbidden or RetryLater."""
        match, watched_job = _WORKER_NAME.fullmatch(identity.pod), None
        if self._watched is not None:
            watched_job = self._watched.find_job(identity)
            if watched_job is None and match is None:
                raise RetryLater(f"pod {identity.namespace}/{identity.pod} is not known as watched yet")
        if self._watched is not None and watched_job is not None:
            watched_cache = self._watched.jobs.find(identity.namespace, watched_job)
            if watched_cache is None or watched_cache.desired is None:
                raise RetryLater(f"watched job {identity.namespace}/{watched_job} is not loaded yet")
            return Caller(identity.namespace, watched_job, identity.pod, watched=True)
        if match is None:
            raise Forbidden(f"pod {identity.namespace}/{identity.pod} is not a worker")
        job = self._jobs.find(identity.namespace, match["job"])
        if job is None or job.desired is None:
            raise RetryLater(f"job {identity.namespace}/{match['job']} is not known yet")
        if identity.pod == _find_checkpoint_server_name(job):
            return Caller(identity.namespace, match["job"], identity.pod, serves_checkpoints=True)
        worker = job.desired.state.placement.find_worker(identity.pod)
        if worker is None:
            raise Forbidden(f"pod {identity.namespace}/{identity.pod} is not a worker of job {match['job']}")
        if not worker.uid:
            raise RetryLater(f"worker {identity.pod} is not recorded yet")
        if worker.uid != identity.uid:
            raise Forbidden(f"the token belongs to an earlier pod named {identity.pod}")
        return Caller(identity.namespace, match["job"], identity.pod)

    def count_ranks(self, caller: Caller) -> int:
        """Return the ranks of one member of the caller's job."""
        job = self._get_job(caller).job
        return 1 if job is None else job.spec.nproc_per_node

    async def poll(
        self,
        caller: Caller,
        heartbeat: Heartbeat,
        after: int,
        wait: float,
        max_wait: float = 0.0,
        get_silent_seconds: Callable[[], float | None] | None = None,
        received: str | None = None,
    ) -> PollAnswer | None:
        """Return what is new for the caller; None: there is nothing in time.

        New is its part of the first plan with a version > `after`, or a part of the requests whose identity differs
        from `received`. `received` None: an older sidecar, which reads no requests. The limit is `wait` seconds, or up
        to `max_wait` if there are many workers. `get_silent_seconds` returns the seconds since the worker's machine was
        last seen, now or when the connection ended; None: unknown. Without it, only heartbeats show that. Raises
        Forbidden, InputError.
        """
        job = self._get_job(caller)
        if caller.serves_checkpoints:
            return _build_answer(job, caller, after, None)
        _require_own_worker(caller, heartbeat.worker)
        _check_counters(heartbeat, job.plan)
        contact = self._record_heartbeat(job, caller, heartbeat)
        if wait <= 0:
            return _build_answer(job, caller, after, received)
        contact.open_polls += 1
        self._get_registry(caller).adjust_held_polls(job, 1)
        try:
            async with self._replace_poll(caller):
                return await self._runtime.run_with_timeout(
                    self._choose_hold_seconds(contact, wait, max_wait), _wait_for_answer(job, caller, after, received)
                )
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            contact.is_cut_off = True  # its connection has ended, perhaps because the worker has
            job.wake.set()
            raise
        finally:
            contact.open_polls -= 1
            self._get_registry(caller).adjust_held_polls(job, -1)
            if get_silent_seconds is not None:
                contact.last_seen_at = max(contact.last_seen_at, self._runtime.now() - (get_silent_seconds() or 0.0))

    def _choose_hold_seconds(self, contact: WorkerContact, wait: float, max_wait: float) -> float:
        """Return how long to hold a poll: `wait` with few workers, else until the worker's own phase.

        The phases spread the polls of one job, whose steps are all equal.
        """
        hold = next(
            (hold for hold in POLL_HOLD_SECONDS if len(self._polls) <= hold * MAX_POLLS_PER_SECOND), MAX_POLL_SECONDS
        )
        hold = min(hold, max_wait, MAX_POLL_SECONDS)
        if hold <= wait:
            return min(wait, MAX_POLL_SECONDS)
        remaining = (contact.poll_phase * hold - self._runtime.monotonic()) % hold
        return remaining if remaining >= wait else min(remaining + hold, max_wait)

    async def receive_fault(self, caller: Caller, fault: FaultReport) -> None:
        """Return once the decision about the fault is stored.

        Raises RetryLater, TooManyRequests, Forbidden, InputError.
        """
        _require_own_worker(caller, fault.worker)
        _check_fault_name(fault)
        job = self._get_job(caller)
        if _is_settled(job, fault):
            return
        with self.charge_time(caller):
            fault = _convert_fault_time(_filter_own_ranks(fault, job.plan, caller), self._runtime.now())
        workers, is_known = (
            0 if job.desired is None else len(job.desired.state.placement.workers),
            fault.name in job.faults,
        )
        if not is_known and sum(cache.faults.total_bytes for cache in self._list_caches()) > MAX_OPEN_FAULT_BYTES:
            fault = shorten_fault(fault)
            if (
                fault.kind is not FaultKind.STALLED
                and job.faults.get_worker_bytes(fault.worker) > GUARANTEED_FAULT_BYTES
            ):
                raise TooManyRequests(f"other faults are being investigated: send fault {fault.name} again later")
        if reason := job.faults.add(fault, workers):
            raise TooManyRequests(f"{reason}: send fault {fault.name} again later")
        if not is_known:  # a retry contains nothing new
            job.wake.set()
        try:
            await self._runtime.run_with_timeout(FAULT_ACK_TIMEOUT_SECONDS, _wait_until_settled(job, fault))
        except TimeoutError:
            raise RetryLater(f"fault {fault.name} is being investigated") from None

    def needs_evidence(self, caller: Caller, request: str) -> bool:
        """Return whether this request is open and addresses this worker; other answers are not used.

        Raises RetryLater if too many collectives are held.
        """
        job = self._get_job(caller)
        requests = job.requests
        if job.plan is None or not request or _find_member(job.plan, caller) is None:
            return False
        if _is_probe_source(requests.probe, request, caller.worker):
            return True
        if request != requests.evidence_name:
            return False
        held_bytes = (
            sum(map(_count_operation_bytes, self._list_caches()))
            if EvidencePart.OPERATIONS in requests.evidence_parts
            else 0
        )
        if held_bytes > MAX_OPERATION_BYTES:
            raise RetryLater("other jobs' collectives are being analyzed")
        return True

    def receive_evidence(self, caller: Caller, evidence: Evidence) -> None:
        """Store evidence.

        Answers to closed requests and reports about other workers' ranks are dropped. Raises Forbidden.
        """
        _require_own_worker(caller, evidence.worker)
        job = self._get_job(caller)
        member = None if job.plan is None else _find_member(job.plan, caller)
        if job.plan is None or member is None:
            return
        probe = job.requests.probe
        if probe is not None and _is_probe_source(probe, evidence.request, caller.worker):
            job.probes[caller.worker] = replace(
                evidence, windows=(), communicators=(), operations=(), links=(), flows=()
            )
            if len(job.probes) >= len(probe.sources):
                job.wake.set()
        if evidence.request != job.requests.evidence_name:
            return
        windows = tuple(window for window in evidence.windows if window.rank in member.ranks)
        links = tuple(link for link in evidence.links if link.rank in member.ranks)
        flows = tuple(flow for flow in evidence.flows if flow.rank in member.ranks)
        operations = {entry.rank: entry for entry in evidence.operations if entry.rank in member.ranks}
        with self.charge_time(caller):
            accepted = EvidencePart.OPERATIONS in job.requests.evidence_parts and all(
                communicator.fits_world_size(job.plan.world_size) for communicator in evidence.communicators
            )
        job.evidence[caller.worker] = replace(
            evidence,
            windows=windows,
            links=links,
            flows=flows,
            communicators=evidence.communicators if accepted else (),
            operations=tuple(operations.values()) if accepted else (),
            probes=(),
        )
        if len(job.evidence) >= len(job.plan.members):
            job.wake.set()

    def needs_profile_answer(self, caller: Caller, window: str, rank: int) -> bool:
        """Return whether this profile window is open and the rank is the caller's.

        Raises RetryLater if too many patterns are held.
        """
        job = self._get_job(caller)
        profile = job.requests.profile
        if job.plan is None or profile is None or profile.name != window:
            return False
        member = _find_member(job.plan, caller)
        if member is None or rank not in member.ranks:
            return False
        if sum(cache.profile.total_bytes for cache in self._list_caches()) > MAX_HELD_PROFILE_BYTES:
            raise RetryLater("other jobs' profile windows are being analyzed")
        return True

    def receive_profile_answer(self, caller: Caller, window: str, rank: int, data: bytes) -> None:
        job = self._get_job(caller)
        profile = job.requests.profile
        if job.plan is None or profile is None or profile.name != window:
            return
        job.profile.add(rank, data, self._runtime.now())
        if len(job.profile.by_rank) >= job.plan.world_size:
            job.wake.set()

    def end_polls(self) -> None:
        """End all held polls without a plan: this operator no longer leads."""
        for timeout in self._polls.values():
            timeout.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def _replace_poll(self, caller: Caller) -> AsyncIterator[None]:
        """End the worker's older poll, by TimeoutError: a worker that polls again no longer waits there."""
        older = self._polls.get(caller)
        if older is not None:
            older.reschedule(asyncio.get_running_loop().time())
        async with asyncio.timeout(None) as timeout:
            self._polls[caller] = timeout
            try:
                yield
            finally:
                if self._polls.get(caller) is timeout:
                    del self._polls[caller]

    def _get_registry(self, caller: Caller) -> JobRegistry:
        return self._watched.jobs if caller.watched and self._watched is not None else self._jobs

    def _list_caches(self) -> list[JobCache]:
        """Return the caches of all jobs, which share some limits."""
        registries = (self._jobs,) if self._watched is None else (self._jobs, self._watched.jobs)
        return [cache for registry in registries for _, cache in registry]

    def _get_job(self, caller: Caller) -> JobCache:
        """Return the caller's job. Raises RetryLater if it is gone since the worker authenticated."""
        job = self._get_registry(caller).find(caller.namespace, caller.job)
        if job is None:
            raise RetryLater(f"job {caller.namespace}/{caller.job} is no longer known")
        return job

    def _record_heartbeat(self, job: JobCache, caller: Caller, heartbeat: Heartbeat) -> WorkerContact:
        now, rank_rows = self._runtime.now(), read_rank_rows(heartbeat.rank_metrics)
        heartbeat = replace(heartbeat, rank_metrics=())
        self._get_registry(caller).mark_reporting(job, now)
        contact = job.contacts.get(caller.worker)
        if contact is None:
            converted = _convert_heartbeat_times(heartbeat, None, now)
            phase = (crc32(f"{caller.namespace}/{caller.job}".encode()) / 2**32 + GOLDEN_RATIO * len(job.contacts)) % 1
            contact = WorkerContact(
                converted, now, state_since=now, raw_heartbeat=heartbeat, rank_rows=rank_rows, poll_phase=phase
            )
            job.contacts[caller.worker] = contact
            if _needs_pass(job, heartbeat):
                job.wake.set()
            return contact
        straggler_slowdown = math.inf if job.job is None else job.job.spec.detection.straggler_slowdown
        if needs_immediate_pass(contact.rank_rows, rank_rows, job.metrics, straggler_slowdown):
            job.wake.set()
        if _get_waking_fields(contact.raw_heartbeat) != _get_waking_fields(heartbeat):
            job.wake.set()
        if contact.raw_heartbeat.state is not heartbeat.state:
            contact.state_since = now
        step, last_step = heartbeat.progress.step, contact.raw_heartbeat.progress.step
        if step is not None and (last_step is None or last_step < step):
            contact.stepped_at = now
        contact.heartbeat = _convert_heartbeat_times(heartbeat, contact, now)
        contact.raw_heartbeat, contact.last_seen_at, contact.rank_rows, contact.is_cut_off = (
            heartbeat,
            now,
            rank_rows,
            False,
        )
        return contact


def _find_checkpoint_server_name(job: JobCache) -> str:
    """Return the name of the pod that serves the job's checkpoints; "": there is to be none."""
    server = None if job.plan is None else job.plan.checkpoint_server
    return "" if server is None or job.job is None else build_checkpoint_server_name(job.job, server.secret)


def _needs_pass(job: JobCache, heartbeat: Heartbeat) -> bool:
    """Return whether a worker's first heartbeat needs a pass.

    After a restart members report one by one. Only the last one, which completes the set, or an unhealthy one does.
    """
    complete = job.plan is None or len(job.contacts) >= len(job.plan.members)
    healthy = heartbeat.state is LauncherState.RUNNING and _get_errors(heartbeat) == _get_errors(_HEALTHY_HEARTBEAT)
    return complete or not healthy


def _count_operation_bytes(cache: JobCache) -> int:
    return sum(len(rank.operations) for evidence in cache.evidence.values() for rank in evidence.operations)


async def _wait_for_answer(job: JobCache, caller: Caller, after: int, received: str | None) -> PollAnswer:
    while (answer := _build_answer(job, caller, after, received)) is None:
        await job.poll_waiters.wait(caller.worker)
    return answer


def _build_answer(job: JobCache, caller: Caller, after: int, received: str | None) -> PollAnswer | None:
    """Return what the caller has not received yet; None: nothing."""
    if job.plan is None:
        return None
    plan = job.plan.build_worker_plan(caller.worker) if job.plan.version > after else None
    requests = job.requests.build_worker_requests(caller.worker, is_member=job.plan.has_member(caller.worker))
    is_new = received is not None and requests.identity != received
    return PollAnswer(plan, requests if is_new else None) if plan is not None or is_new else None


def _find_member(plan: Plan, caller: Caller) -> Member | None:
    return next((member for member in plan.members if member.worker == caller.worker), None)


async def _wait_until_settled(job: JobCache, fault: FaultReport) -> None:
    while not _is_settled(job, fault) and not job.faults.is_superseded(fault):
        await job.fault_waiters.wait(fault.worker)


def _is_probe_source(probe: ProbeRequest | None, request: str, worker: str) -> bool:
    """Return whether `request` is this probe, and the worker takes part in it."""
    return probe is not None and request == probe.name and worker in probe.sources


def _is_settled(job: JobCache, fault: FaultReport) -> bool:
    return job.desired is not None and fault.name in job.desired.state.incidents.settled_names


def _require_own_worker(caller: Caller, worker: str) -> None:
    if worker != caller.worker or caller.serves_checkpoints:
        raise Forbidden(f"{caller.worker} may not report for {worker or 'an unnamed worker: set `worker`'}")


def _check_counters(heartbeat: Heartbeat, plan: Plan | None) -> None:
    """Raise InputError for implausible counters: the plan's next ones must exceed all reported ones."""
    if plan is None:
        return
    for name, planned in (("membership", plan.membership), ("round", plan.round), ("plan_version", plan.version)):
        if (reported := getattr(heartbeat, name)) > planned + MAX_COUNTER_JUMP:
            raise InputError(
                f"{name}: {reported} is far above the plan's, {planned}: delete the pod, and it is replaced"
            )


def _check_fault_name(fault: FaultReport) -> None:
    """Raise InputError unless the name is the worker's own: it must not receive another worker's answers."""
    if not fault.name.startswith(f"{fault.worker}-") or len(fault.name) > MAX_FAULT_NAME_CHARACTERS:
        raise InputError(
            f"name: {fault.name[:MAX_FAULT_NAME_CHARACTERS]!r} must begin with {fault.worker}-, in "
            f"{MAX_FAULT_NAME_CHARACTERS} characters"
        )


def _filter_own_ranks(fault: FaultReport, plan: Plan | None, caller: Caller) -> FaultReport:
    """Drop reports about other workers' ranks, and all but the last report per rank.

    Groups of ranks that the job does not have are dropped, too.
    """
    member = None if plan is None else _find_member(plan, caller)
    if plan is None or member is None:
        return replace(fault, ranks=(), communicators=())
    states = {state.rank: state for state in fault.ranks if state.rank in member.ranks}
    communicators = tuple(
        communicator for communicator in fault.communicators if communicator.fits_world_size(plan.world_size)
    )
    return replace(fault, ranks=tuple(states.values()), communicators=communicators)


def _convert_heartbeat_times(heartbeat: Heartbeat, previous: WorkerContact | None, received_at: float) -> Heartbeat:
    """Convert the times to the operator's clock. An unchanged time keeps its conversion in later heartbeats.

    `sent_at` becomes the time of the receipt.
    """

    def ours(name: str) -> float | None:
        at: float | None = getattr(heartbeat.start, name)
        if previous is not None and getattr(previous.raw_heartbeat.start, name) == at:
            converted: float | None = getattr(previous.heartbeat.start, name)
            return converted
        return None if at is None else _convert_time(at, heartbeat.sent_at, received_at, MAX_ROUND_AGE_SECONDS)

    start = replace(heartbeat.start, started_at=ours("started_at"), first_step_at=ours("first_step_at"))
    ended_at, sent_at = heartbeat.progress.step_ended_at, heartbeat.sent_at
    if ended_at is not None:
        ended_at = _convert_time(ended_at, sent_at, received_at, MAX_ROUND_AGE_SECONDS)
    progress = replace(heartbeat.progress, step_ended_at=ended_at)
    return replace(heartbeat, start=start, progress=progress, sent_at=None if sent_at is None else received_at)


def _convert_fault_time(fault: FaultReport, received_at: float) -> FaultReport:
    at = _convert_time(fault.noticed_at, fault.sent_at, received_at, MAX_FAULT_AGE_SECONDS)
    return replace(fault, noticed_at=at)


def _convert_time(at: float, sent_at: float | None, received_at: float, max_age: float) -> float:
    """Convert a sender's time to the receiver's clock, by its age when the message was sent.

    The result lies between `max_age` seconds before the receipt and the receipt, for any input.
    """
    age = (received_at if sent_at is None else sent_at) - at
    return received_at - min(max_age, max(0.0, age))
