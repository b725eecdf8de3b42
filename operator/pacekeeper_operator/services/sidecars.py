"""What sidecars may ask and tell: who they are, their part of the plan, faults, evidence."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pacekeeper_analysis.plan import WorkerPlan
from pacekeeper_analysis.reports import Evidence, Fault, Heartbeat

from ..api import TOKEN_AUDIENCE
from ..cluster import TOKEN_REVIEWS, Cluster
from ..observe.memory import Contact, JobMemory, Memory

REVIEW_SECONDS = 60.0
"""So long a token's review is believed: a revoked one is good for a minute more at most."""
MAX_REVIEWS = 20_000
MAX_POLL_SECONDS = 30.0
TAKE_SECONDS = 2.0
"""So long a fault waits to be dealt with before its sender is asked to send it again."""
_WORKER_NAME = re.compile(r"(?P<job>.+)-w\d+-\d+")
_WAKING = (
    *("state", "round", "membership", "first_step_at", "checkpoint_request", "restarts"),
    *("sync_mode", "refused", "bad_loss_rank"),
)
"""Fields of a heartbeat whose change the reconcile loop wants to know of at once."""


class Unauthenticated(Exception):
    """No good token."""


class Forbidden(Exception):
    """A good token of somebody who is not a worker of a job."""


class NotYet(Exception):
    """The operator has not read the job, or has not dealt with the fault: to be sent again."""


@dataclass(frozen=True)
class Caller:
    """A worker that has proved who it is."""

    namespace: str
    job: str
    worker: str


@dataclass(frozen=True)
class _Review:
    at: float
    namespace: str
    pod: str
    uid: str


class Sidecars:
    """Serves the sidecars of all jobs."""

    def __init__(self, cluster: Cluster, memory: Memory) -> None:
        self._cluster = cluster
        self._memory = memory
        self._reviews: dict[bytes, _Review] = {}

    async def authenticate(self, token: str) -> Caller:
        """Raises Unauthenticated, Forbidden or NotYet."""
        review = await self._review(token)
        match = _WORKER_NAME.fullmatch(review.pod)
        if match is None:
            raise Forbidden(f"pod {review.namespace}/{review.pod} is not a worker")
        job = self._memory.find(review.namespace, match["job"])
        if job is None or job.draft is None:
            raise NotYet(f"no job {review.namespace}/{match['job']} is known (yet)")
        worker = job.draft.state.placement.worker(review.pod)
        if worker is None:
            raise Forbidden(f"pod {review.namespace}/{review.pod} is not a worker of job {match['job']}")
        if not worker.uid:
            raise NotYet(f"worker {review.pod} is about to be written down")
        if worker.uid != review.uid:
            raise Forbidden(f"the token is of another pod that was called {review.pod}")
        return Caller(review.namespace, match["job"], review.pod)

    async def poll(self, caller: Caller, heartbeat: Heartbeat, after: int, wait: float) -> WorkerPlan | None:
        """The caller's part of the first plan with a version > `after`; None: there is none within `wait` seconds.

        Raises Forbidden.
        """
        _speaks_for_itself(caller, heartbeat.worker)
        job = self._job(caller)
        contact = self._hear(job, caller, heartbeat)
        contact.polling += 1
        try:
            async with asyncio.timeout(min(wait, MAX_POLL_SECONDS)), job.written:
                await job.written.wait_for(lambda: job.plan is not None and job.plan.version > after)
        except TimeoutError:
            return None
        finally:
            contact.polling -= 1
        assert job.plan is not None
        return job.plan.part(caller.worker)

    async def take_fault(self, caller: Caller, fault: Fault) -> None:
        """Returns once what was decided about the fault is written. Raises NotYet, Forbidden."""
        _speaks_for_itself(caller, fault.worker)
        job = self._job(caller)
        if job.draft is not None and fault.name in job.draft.state.incidents.settled:
            return
        job.faults[fault.name] = fault
        job.wake.set()
        try:
            async with asyncio.timeout(TAKE_SECONDS), job.written:
                await job.written.wait_for(
                    lambda: job.draft is not None and fault.name in job.draft.state.incidents.settled
                )
        except TimeoutError:
            raise NotYet(f"fault {fault.name} is being looked into") from None

    def take_evidence(self, caller: Caller, evidence: Evidence) -> None:
        """Answers to a request that is no longer out are of no use to anybody, and dropped. Raises Forbidden."""
        _speaks_for_itself(caller, evidence.worker)
        job = self._job(caller)
        if job.plan is not None and evidence.request == job.plan.evidence_request:
            job.evidence[caller.worker] = evidence
            if len(job.evidence) >= len(job.plan.members):
                job.wake.set()

    def _job(self, caller: Caller) -> JobMemory:
        job = self._memory.find(caller.namespace, caller.job)
        if job is None:
            raise NotYet(f"no job {caller.namespace}/{caller.job} is known (any more)")
        return job

    def _hear(self, job: JobMemory, caller: Caller, heartbeat: Heartbeat) -> Contact:
        contact = job.contacts.get(caller.worker)
        now = time.time()
        if contact is None:
            contact = job.contacts[caller.worker] = Contact(heartbeat, now, state_since=now)
            job.wake.set()
            return contact
        if any(getattr(contact.heartbeat, name) != getattr(heartbeat, name) for name in _WAKING):
            job.wake.set()
        if contact.heartbeat.state is not heartbeat.state:
            contact.state_since = now
        if contact.heartbeat.step < heartbeat.step:
            contact.stepped_at = now
        contact.heartbeat, contact.at = heartbeat, now
        return contact

    async def _review(self, token: str) -> _Review:
        if not token:
            raise Unauthenticated("send a service account token with audience pacekeeper as bearer token")
        digest = hashlib.sha256(token.encode()).digest()
        now = time.monotonic()
        known = self._reviews.get(digest)
        if known is not None and now - known.at < REVIEW_SECONDS:
            return known
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "metadata": {},
            "spec": {"token": token, "audiences": [TOKEN_AUDIENCE]},
        }
        status = (await self._cluster.create(TOKEN_REVIEWS, body)).get("status", {})
        review = _read(status, now)
        if len(self._reviews) >= MAX_REVIEWS:
            self._reviews = {d: r for d, r in self._reviews.items() if now - r.at < REVIEW_SECONDS}
        self._reviews[digest] = review
        return review


def _speaks_for_itself(caller: Caller, worker: str) -> None:
    if worker != caller.worker:
        raise Forbidden(f"{caller.worker} may not speak for {worker or 'nobody: say `worker`'}")


def _read(status: Mapping[str, Any], now: float) -> _Review:
    if not status.get("authenticated") or TOKEN_AUDIENCE not in status.get("audiences", ()):
        raise Unauthenticated(status.get("error") or f"the token is not good for audience {TOKEN_AUDIENCE}")
    user = status["user"]
    parts = user["username"].split(":")
    extra = user.get("extra", {})
    pod = extra.get("authentication.kubernetes.io/pod-name", [""])[0]
    uid = extra.get("authentication.kubernetes.io/pod-uid", [""])[0]
    if len(parts) != 4 or parts[:2] != ["system", "serviceaccount"] or not pod or not uid:
        raise Forbidden(f"{user['username']} is not bound to a pod")
    return _Review(now, parts[2], pod, uid)
