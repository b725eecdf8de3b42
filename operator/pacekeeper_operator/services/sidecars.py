"""What sidecars may ask and tell: who they are, their part of the plan, faults, evidence."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from zlib import crc32

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import EvidencePart, Member, Plan, ProbeRequest, WorkerPlan
from pacekeeper_analysis.reports import Evidence, FaultReport, FaultKind, Heartbeat, LauncherState

from ..cluster import Cluster
from ..limits import RateLimiter
from ..observe.faults import shorten_fault
from ..observe.figures import needs_immediate_pass, read_rank_rows
from ..observe.memory import WorkerContact, JobCache, JobRegistry
from ..observe.store import Key
from ..runtime import OperatorRuntime
from .tokens import Forbidden, PodIdentity, TokenReviewer, TooManyRequests

MAX_POLL_SECONDS = 30.0
POLL_HOLD_SECONDS = (3.0, 5.0, 8.0, 12.0, 20.0, MAX_POLL_SECONDS)
MAX_POLLS_PER_SECOND = 170.0
"""Of all workers together: of those holds, the shortest that keeps them to so many. One of a worker with eight GPUs
costs a millisecond, so that they take a fifth of a core."""
GOLDEN_RATIO = 0.6180339887498949
"""Of a circle between one worker's moment and the next one's: however many there are, they lie far apart."""
JOB_KNOWN_TIMEOUT_SECONDS = 2.0
"""So long a call waits for its job to be known, before its sender is asked to send it again. After a restart all come
at once, and each that has to come again costs as much as one that waits."""
FAULT_ACK_TIMEOUT_SECONDS = 2.0
"""So long a fault waits to be dealt with before its sender is asked to send it again."""
WORKER_CALL_BURST = 64
WORKER_CALLS_PER_SECOND = 20.0
"""Of one worker: more is a sidecar that runs wild."""
WORKER_CALL_COST_SECONDS = 0.1 / WORKER_CALLS_PER_SECOND
"""What a call brings with it counts as one more for each so many that it takes to read, so that one worker has a tenth
of the event loop in the long run. Of a worker with 128 ranks a heartbeat takes 2 ms, a stall's report 30, the largest
evidence 120, which is asked for every 1.5 s at most: 17 calls a second in all."""
MAX_HELD_PROFILE_BYTES = 256 * 2**20
"""Of all behaviour windows that are out: 10,000 ranks send 160 MB."""
MAX_OPEN_FAULT_BYTES, GUARANTEED_FAULT_BYTES = 64 * 2**20, 2**18
"""Bytes of all jobs' faults that are not dealt with yet. Beyond that they are taken in few words, and of a worker as
many as the second: nobody else's may keep a hang from being judged, which takes a stall of each worker."""
MAX_COUNTER_JUMP = 10**6
"""Of the plan's membership and round, which are older where bookkeeping was restored."""
MAX_OPERATION_BYTES = 192 * 2**20
"""Of the collectives that all jobs' ranks have told of: 1,024 ranks send 180 MB at most."""
MAX_FAULT_NAME_CHARACTERS = 253
"""Characters of a fault's name."""
MAX_FAULT_AGE_SECONDS = 3600.0
"""No fault was noticed longer ago than this; its sender says so within seconds as soon as the operator answers."""
MAX_ROUND_AGE_SECONDS = 90 * 86400.0
"""No round began longer ago than this."""
_WORKER_NAME = re.compile(r"(?P<job>.+)-w\d+-\d+")
_ERROR_FIELDS = (
    *("launcher_silent_seconds", "unkillable_ranks", "checkpoint_failed_rank", "checkpoint_error"),
    *("refused", "bad_loss_rank"),
)
_WAKING_FIELDS = (*_ERROR_FIELDS, *("state", "round", "membership", "first_step_at", "checkpoint_request", "restarts", "sync_mode"))
"""Fields of a heartbeat whose change the reconcile loop wants to know of at once; figures have their own rule."""


_HEALTHY_HEARTBEAT = Heartbeat()


class RetryLater(Exception):
    """The operator has not read the job, or has not dealt with the fault: to be sent again."""


@dataclass(frozen=True)
class Caller:
    """A worker that has proved who it is."""

    namespace: str
    job: str
    worker: str


class SidecarService:
    """Serves the sidecars of all jobs."""

    def __init__(
        self,
        cluster: Cluster,
        jobs: JobRegistry,
        runtime: OperatorRuntime,
        is_pod_alive: Callable[[PodIdentity], bool] = lambda _holder: False,
    ) -> None:
        """`stays`: see `Tokens`."""
        self._jobs = jobs
        self._runtime = runtime
        self._token_reviewer = TokenReviewer(cluster, runtime, is_pod_alive)
        self._calls = RateLimiter[Caller](WORKER_CALLS_PER_SECOND, WORKER_CALL_BURST)
        self._polls: dict[Caller, asyncio.Timeout] = {}

    async def authenticate(self, token: str, source: str) -> Caller:
        """`source`: the address that the token came from. Raises Unauthenticated, Forbidden, TooManyRequests or RetryLater."""
        caller = await self._wait_for_caller(await self._token_reviewer.review(token, source))
        self._check_rate(caller)
        return caller

    def recheck_rate(self, caller: Caller) -> None:
        """Of a call that was let in a while ago: those that came with it may have cost too much since. Raises
        TooManyRequests."""
        self._calls.refund(caller)
        self._check_rate(caller)

    def _check_rate(self, caller: Caller) -> None:
        if not self._calls.take(caller, self._runtime.monotonic()):
            raise TooManyRequests(
                f"{caller.worker} calls more than {WORKER_CALLS_PER_SECOND:.0f} times a second, or sends what takes as long"
            )

    @contextmanager
    def charge_time(self, caller: Caller) -> Iterator[None]:
        """What is done inside, without waiting for anything, counts by the processor's time that it takes. At most as
        much as is allowed at once."""
        began = self._runtime.thread_seconds()
        try:
            yield
        finally:
            calls = (self._runtime.thread_seconds() - began) / WORKER_CALL_COST_SECONDS
            self._calls.charge(caller, min(calls, WORKER_CALL_BURST))

    async def _wait_for_caller(self, holder: PodIdentity) -> Caller:
        """The worker that this pod is, once it is known. Raises Forbidden or RetryLater."""
        with suppress(TimeoutError):
            return await self._runtime.run_with_timeout(JOB_KNOWN_TIMEOUT_SECONDS, self._wait_until_known(holder))
        return self._identify_worker(holder)

    async def _wait_until_known(self, holder: PodIdentity) -> Caller:
        match = _WORKER_NAME.fullmatch(holder.pod)
        while True:
            try:
                return self._identify_worker(holder)
            except RetryLater:
                assert match is not None  # or it would be forbidden
                await self._jobs.wait_for_change(holder.namespace, match["job"])

    def _identify_worker(self, holder: PodIdentity) -> Caller:
        """The worker that this pod is. Raises Forbidden or RetryLater."""
        match = _WORKER_NAME.fullmatch(holder.pod)
        if match is None:
            raise Forbidden(f"pod {holder.namespace}/{holder.pod} is not a worker")
        job = self._jobs.find(holder.namespace, match["job"])
        if job is None or job.desired is None:
            raise RetryLater(f"no job {holder.namespace}/{match['job']} is known (yet)")
        worker = job.desired.state.placement.find_worker(holder.pod)
        if worker is None:
            raise Forbidden(f"pod {holder.namespace}/{holder.pod} is not a worker of job {match['job']}")
        if not worker.uid:
            raise RetryLater(f"worker {holder.pod} is about to be written down")
        if worker.uid != holder.uid:
            raise Forbidden(f"the token is of another pod that was called {holder.pod}")
        return Caller(holder.namespace, match["job"], holder.pod)

    def count_ranks(self, caller: Caller) -> int:
        """That a worker of the caller's job has when it is a member."""
        job = self._get_job(caller).job
        return 1 if job is None else job.spec.nproc_per_node

    async def poll(
        self,
        caller: Caller,
        heartbeat: Heartbeat,
        after: int,
        wait: float,
        most: float = 0.0,
        unheard: Callable[[], float] | None = None,
    ) -> WorkerPlan | None:
        """The caller's part of the first plan with a version > `after`; None: there is none within `wait` seconds, or
        within up to `most` where there are many workers. `unheard`: seconds since its machine has shown that it is
        there, now or when the connection ended; None: only what it says shows that. Raises Forbidden, InputError.
        """
        _require_own_worker(caller, heartbeat.worker)
        job = self._get_job(caller)
        _check_counters(heartbeat, job.plan)
        contact = self._record_heartbeat(job, caller, heartbeat)
        if wait <= 0:
            return _get_plan_part(job, caller, after)
        contact.open_polls += 1
        self._jobs.adjust_held_polls(job, 1)
        try:
            async with self._replace_poll(caller):
                await self._runtime.run_with_timeout(self._choose_hold_seconds(contact, wait, most), _wait_for_plan(job, caller, after))
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            contact.is_cut_off = True  # its connection has ended, and perhaps it has, too
            job.wake.set()
            raise
        finally:
            contact.open_polls -= 1
            self._jobs.adjust_held_polls(job, -1)
            if unheard is not None:
                contact.last_seen_at = max(contact.last_seen_at, self._runtime.now() - unheard())
        return _get_plan_part(job, caller, after)

    def _choose_hold_seconds(self, contact: WorkerContact, wait: float, most: float) -> float:
        """Seconds. With few workers `wait`. With many, until the worker's own moment comes round: so the polls of one
        job, whose steps are all the same, do not come together."""
        hold = next((hold for hold in POLL_HOLD_SECONDS if len(self._polls) <= hold * MAX_POLLS_PER_SECOND), MAX_POLL_SECONDS)
        hold = min(hold, most, MAX_POLL_SECONDS)
        if hold <= wait:
            return min(wait, MAX_POLL_SECONDS)
        until = (contact.poll_phase * hold - self._runtime.monotonic()) % hold
        return until if until >= wait else min(until + hold, most)

    async def receive_fault(self, caller: Caller, fault: FaultReport) -> None:
        """Returns once what was decided about the fault is written. Raises RetryLater, TooManyRequests, Forbidden, InputError."""
        _require_own_worker(caller, fault.worker)
        _check_fault_name(fault)
        job = self._get_job(caller)
        if _is_settled(job, fault):
            return
        with self.charge_time(caller):
            fault = _convert_fault_time(_filter_own_ranks(fault, job.plan, caller), self._runtime.now())
        workers, known = 0 if job.desired is None else len(job.desired.state.placement.workers), fault.name in job.faults
        if not known and sum(each.faults.total_bytes for _, each in self._jobs) > MAX_OPEN_FAULT_BYTES:
            fault = shorten_fault(fault)
            if fault.kind is not FaultKind.STALLED and job.faults.get_worker_bytes(fault.worker) > GUARANTEED_FAULT_BYTES:
                raise TooManyRequests(f"other faults are being looked into: send fault {fault.name} again later")
        if why := job.faults.add(fault, workers):
            raise TooManyRequests(f"{why}: send fault {fault.name} again later")
        if not known:  # one that is sent again says nothing new
            job.wake.set()
        try:
            await self._runtime.run_with_timeout(FAULT_ACK_TIMEOUT_SECONDS, _wait_until_settled(job, fault))
        except TimeoutError:
            raise RetryLater(f"fault {fault.name} is being looked into") from None

    def needs_evidence(self, caller: Caller, request: str) -> bool:
        """Whether this request is out, and goes to this worker: other answers are of no use to anybody. Raises RetryLater
        where too many collectives are held."""
        plan = self._get_job(caller).plan
        if plan is None or not request or _find_member(plan, caller) is None:
            return False
        if _is_probe_source(plan.probe, request, caller.worker):
            return True
        if request != plan.evidence_request:
            return False
        holds = sum(map(_count_operation_bytes, self._jobs)) if EvidencePart.OPERATIONS in plan.evidence_parts else 0
        if holds > MAX_OPERATION_BYTES:
            raise RetryLater("other jobs' collectives are being looked into")
        return True

    def receive_evidence(self, caller: Caller, evidence: Evidence) -> None:
        """Dropped are answers to a request that is no longer out, and words about others' ranks. Raises Forbidden."""
        _require_own_worker(caller, evidence.worker)
        job = self._get_job(caller)
        member = None if job.plan is None else _find_member(job.plan, caller)
        if job.plan is None or member is None:
            return
        probe = job.plan.probe
        if probe is not None and _is_probe_source(probe, evidence.request, caller.worker):
            job.probes[caller.worker] = replace(
                evidence, windows=(), communicators=(), operations=(), links=(), flows=()
            )
            if len(job.probes) >= len(probe.sources):
                job.wake.set()
        if evidence.request != job.plan.evidence_request:
            return
        own = tuple(window for window in evidence.windows if window.rank in member.ranks)
        links = tuple(link for link in evidence.links if link.rank in member.ranks)
        flows = tuple(flow for flow in evidence.flows if flow.rank in member.ranks)
        operations = {of.rank: of for of in evidence.operations if of.rank in member.ranks}
        with self.charge_time(caller):
            known = EvidencePart.OPERATIONS in job.plan.evidence_parts and all(
                each.fits_world_size(job.plan.world_size) for each in evidence.communicators
            )
        job.evidence[caller.worker] = replace(
            evidence,
            windows=own,
            links=links,
            flows=flows,
            communicators=evidence.communicators if known else (),
            operations=tuple(operations.values()) if known else (),
            probes=(),
        )
        if len(job.evidence) >= len(job.plan.members):
            job.wake.set()

    def needs_profile_answer(self, caller: Caller, window: str, rank: int) -> bool:
        """Whether this behaviour window is out, and the rank is the caller's. Raises RetryLater where too many patterns are
        held."""
        job = self._get_job(caller)
        profile = None if job.plan is None else job.plan.profile
        if job.plan is None or profile is None or profile.name != window:
            return False
        member = _find_member(job.plan, caller)
        if member is None or rank not in member.ranks:
            return False
        if sum(each.profile_answer_bytes for _, each in self._jobs) > MAX_HELD_PROFILE_BYTES:
            raise RetryLater("other jobs' behaviour windows are being looked into")
        return True

    def receive_profile_answer(self, caller: Caller, window: str, rank: int, data: bytes) -> None:
        job = self._get_job(caller)
        if job.plan is None or job.plan.profile is None or job.plan.profile.name != window:
            return
        job.profile_answer_bytes += len(data) - len(job.profile_answers.get(rank, b""))
        job.profile_answers[rank] = data
        job.last_profile_answer_at = self._runtime.now()
        if len(job.profile_answers) >= job.plan.world_size:
            job.wake.set()

    def end_polls(self) -> None:
        """All polls that are held end now, without a plan: this operator no longer leads."""
        for held in self._polls.values():
            held.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def _replace_poll(self, caller: Caller) -> AsyncIterator[None]:
        """A worker's new poll ends its older one, by TimeoutError: whoever polls anew no longer waits there."""
        older = self._polls.get(caller)
        if older is not None:
            older.reschedule(asyncio.get_running_loop().time())
        async with asyncio.timeout(None) as scope:
            self._polls[caller] = scope
            try:
                yield
            finally:
                if self._polls.get(caller) is scope:
                    del self._polls[caller]

    def _get_job(self, caller: Caller) -> JobCache:
        """Raises RetryLater where the job has gone since its worker was let in."""
        job = self._jobs.find(caller.namespace, caller.job)
        if job is None:
            raise RetryLater(f"no job {caller.namespace}/{caller.job} is known any more")
        return job

    def _record_heartbeat(self, job: JobCache, caller: Caller, said: Heartbeat) -> WorkerContact:
        now, figures = self._runtime.now(), read_rank_rows(said.figures)
        said = replace(said, figures=())
        self._jobs.mark_reporting(job, now)
        contact = job.contacts.get(caller.worker)
        if contact is None:
            heard = _convert_heartbeat_times(said, None, now)
            phase = (crc32(f"{caller.namespace}/{caller.job}".encode()) / 2**32 + GOLDEN_RATIO * len(job.contacts)) % 1
            contact = WorkerContact(heard, now, state_since=now, raw_heartbeat=said, rank_rows=figures, poll_phase=phase)
            job.contacts[caller.worker] = contact
            if _needs_pass(job, said):
                job.wake.set()
            return contact
        slow = math.inf if job.job is None else job.job.spec.detection.straggler_slowdown
        if needs_immediate_pass(contact.rank_rows, figures, job.metrics, slow):
            job.wake.set()
        if any(getattr(contact.raw_heartbeat, name) != getattr(said, name) for name in _WAKING_FIELDS):
            job.wake.set()
        if contact.raw_heartbeat.state is not said.state:
            contact.state_since = now
        if contact.raw_heartbeat.step < said.step:
            contact.stepped_at = now
        contact.heartbeat = _convert_heartbeat_times(said, contact, now)
        contact.raw_heartbeat, contact.last_seen_at, contact.rank_rows, contact.is_cut_off = said, now, figures, False
        return contact


def _needs_pass(job: JobCache, said: Heartbeat) -> bool:
    """Whether a worker's first words are news: after a restart members come one by one, and the last of them completes
    the picture, unless one is in trouble."""
    complete = job.plan is None or len(job.contacts) >= len(job.plan.members)
    well = said.state is LauncherState.RUNNING and all(getattr(said, name) == getattr(_HEALTHY_HEARTBEAT, name) for name in _ERROR_FIELDS)
    return complete or not well


def _count_operation_bytes(of: tuple[Key, JobCache]) -> int:
    return sum(len(rank.operations) for told in of[1].evidence.values() for rank in told.operations)


async def _wait_for_plan(job: JobCache, caller: Caller, after: int) -> None:
    while job.plan is None or job.plan.version <= after:
        await job.plan_waiters.wait(caller.worker)


def _get_plan_part(job: JobCache, caller: Caller, after: int) -> WorkerPlan | None:
    return job.plan.build_worker_plan(caller.worker) if job.plan is not None and job.plan.version > after else None


def _find_member(plan: Plan, caller: Caller) -> Member | None:
    return next((member for member in plan.members if member.worker == caller.worker), None)


async def _wait_until_settled(job: JobCache, fault: FaultReport) -> None:
    while not _is_settled(job, fault) and not job.faults.is_superseded(fault):
        await job.fault_waiters.wait(fault.worker)


def _is_probe_source(probe: ProbeRequest | None, request: str, worker: str) -> bool:
    """Whether it is this probe that the worker answers, and it is to take part."""
    return probe is not None and request == probe.name and worker in probe.sources


def _is_settled(job: JobCache, fault: FaultReport) -> bool:
    return job.desired is not None and fault.name in job.desired.state.incidents.settled_names


def _require_own_worker(caller: Caller, worker: str) -> None:
    if worker != caller.worker:
        raise Forbidden(f"{caller.worker} may not speak for {worker or 'nobody: say `worker`'}")


def _check_counters(heartbeat: Heartbeat, plan: Plan | None) -> None:
    """The next membership and round lie above all that are told of, and a plan has to hold them."""
    for name, known in (("membership", plan.membership), ("round", plan.round)) if plan is not None else ():
        if (told := getattr(heartbeat, name)) > known + MAX_COUNTER_JUMP:
            raise InputError(f"{name}: {told} is far above the plan's, {known}: delete the pod, and another is made")


def _check_fault_name(fault: FaultReport) -> None:
    """So that no worker takes another's names, and with them the answers that the other gets."""
    if not fault.name.startswith(f"{fault.worker}-") or len(fault.name) > MAX_FAULT_NAME_CHARACTERS:
        raise InputError(f"name: {fault.name[:MAX_FAULT_NAME_CHARACTERS]!r} must begin with {fault.worker}-, in {MAX_FAULT_NAME_CHARACTERS} characters")


def _filter_own_ranks(fault: FaultReport, plan: Plan | None, caller: Caller) -> FaultReport:
    """Without words about others' ranks, and with one about each rank: the last; without groups of ranks that the job
    does not have."""
    member = None if plan is None else _find_member(plan, caller)
    if plan is None or member is None:
        return replace(fault, ranks=(), communicators=())
    states = {state.rank: state for state in fault.ranks if state.rank in member.ranks}
    groups = tuple(each for each in fault.communicators if each.fits_world_size(plan.world_size))
    return replace(fault, ranks=tuple(states.values()), communicators=groups)


def _convert_heartbeat_times(said: Heartbeat, before: WorkerContact | None, received: float) -> Heartbeat:
    """What the worker says as before stays the same moment here, however long messages take."""

    def ours(name: str) -> float:
        at: float = getattr(said, name)
        if before is not None and getattr(before.raw_heartbeat, name) == at:
            same: float = getattr(before.heartbeat, name)
            return same
        return _convert_time(at, said.sent_at, received, MAX_ROUND_AGE_SECONDS) if at else 0.0

    return replace(said, round_started_at=ours("round_started_at"), first_step_at=ours("first_step_at"))


def _convert_fault_time(fault: FaultReport, received: float) -> FaultReport:
    at = _convert_time(fault.noticed_at, fault.sent_at, received, MAX_FAULT_AGE_SECONDS)
    return replace(fault, noticed_at=at)


def _convert_time(at: float, sent_at: float, received: float, reach: float) -> float:
    """A sender's time on the receiver's clock: as long before the receipt as it was before the sending.

    Never after the receipt, and `reach` seconds before at most: what a worker says moves nothing further.
    """
    age = (sent_at or received) - at
    return received - min(reach, max(0.0, age))
