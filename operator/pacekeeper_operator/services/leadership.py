"""One operator acts: whoever holds the Lease. By the rules of Kubernetes' own leader election, so that two never do.

*No clock is compared with another's.* The Lease is free when its object has not changed for as long as it lasts, as
watched here by a clock that never jumps; what times stand in it is for people. A Lease that names nobody is waited out
in the same way, and one is made where there is none: it may have been edited or deleted by hand while its holder acts.

*Who cannot renew stops in time.* The holder acts for two thirds of the Lease's duration after the last renewal that
succeeded, counted from before it was sent; whoever takes over has waited for the whole of it. So it stops before it
could be replaced, goes on by itself when it can, and ends, by an error of its keeper, when somebody else is named.

Only a holder that leaves well lets the next one begin at once (it leaves no name and no time), and so does a container
that ended in the same pod.

*Sidecars are served a little longer than is acted:* until another may lead. Then they are sent away, to whom the Lease
names, so that none stays with an operator that does nothing for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import kopf

from .. import metrics
from ..api import GROUP, format_time
from ..cluster import LEASES, Cluster, Object
from ..runtime import OperatorRuntime, Superseded
from ..settings import Settings

LEASE_NAME = "pacekeeper-operator"
LEASE_RENEW_DEADLINE_SHARE = 2 / 3
"""Of the Lease's duration: so long the holder acts after a renewal."""
LEASE_RETRY_PERIOD_SHARE = 1 / 5
"""Of the Lease's duration: the pause between two renewals."""
LEASE_DOUBT_SHARE = 2 / 5
"""Of the Lease's duration: two renewals that have not come. Whoever it names may have gone."""
LEASE_POLL_SHARE = 1 / 24
"""Of the Lease's duration: how often whoever waits for it looks. One that is given back lies there no longer."""
LEASE_CUT_OFF_SHARE = 1 / 3
"""Of the Lease's duration: who has had no answer for so long is cut off."""
MIN_LEASE_POLL_SECONDS = 0.01
LEASE_ADDRESS_ANNOTATION = f"{GROUP}/address"
"""Annotation of the Lease: where its holder serves sidecars, address:port."""
MAX_LEASE_SECONDS = 300.0
"""No record is waited out for longer, whatever somebody has written into it."""
log = logging.getLogger(__name__)


class NotLeading(kopf.TemporaryError):
    """This operator may not act now: it does not hold the Lease, or could not renew it in time."""


class LeaseLost(Superseded):
    """Another operator holds the Lease: this one has to end."""


@dataclass(frozen=True)
class _LeaseRecord:
    """The Lease's object, and since when it has been the same, by the observer's own clock."""

    version: str  # its resourceVersion
    holder: str  # whom it names; "": nobody
    address: str  # where that one serves; "": it does not say
    duration_seconds: float  # seconds
    unchanged_since: float
    was_renewed: bool  # it has changed since it was first seen: whom it names was alive then


class LeaderElector:
    """The right to act, of one operator. Use `contend()`."""

    def __init__(self, cluster: Cluster, settings: Settings, runtime: OperatorRuntime) -> None:
        self.elected = asyncio.Event()
        """This operator has led."""
        self.on_serving_changed: Callable[[bool], None] = lambda _: None
        """Told whenever sidecars are served from now on, or no longer."""
        self.last_attempt_at = runtime.monotonic()
        """When it was looked at last, whether or not the API server answered."""
        self._cluster = cluster
        self._settings = settings
        self._runtime = runtime
        self._answered_at = -math.inf  # when the API server was asked last that has answered
        self._changed = asyncio.Event()
        self._record: _LeaseRecord | None = None
        self._written = ""  # resourceVersion that this operator's last taking or renewal has had
        self._renewed_at = -math.inf
        self._was_serving = False
        self._task: asyncio.Task[None] | None = None

    def is_leader(self) -> bool:
        """Whether this operator may act at this moment."""
        return self._runtime.monotonic() < self._renewed_at + self._settings.lease_seconds * LEASE_RENEW_DEADLINE_SHARE

    def require_leadership(self) -> None:
        """Raises NotLeading unless this operator may act: `Cluster` asks before each write."""
        if not self.is_leader():
            raise NotLeading("this operator does not hold the Lease, or could not renew it", delay=1)

    def can_serve(self) -> bool:
        """Whether nobody else can lead at this moment."""
        return self._runtime.monotonic() < self._renewed_at + self._settings.lease_seconds

    @property
    def leader_address(self) -> str:
        """Where another operator leads, address:port; "": none does, or it does not say, or it is not known: a Lease
        that nobody has been seen to renew may be that of one which is gone."""
        return self._record.address if self._record is not None and self._has_live_leader() else ""

    @property
    def is_candidate(self) -> bool:
        """Whether this operator may be the next to lead: one that is cut off from the API server will not, and none
        while another lives."""
        cut_off = self._runtime.monotonic() - self._answered_at >= self._settings.lease_seconds * LEASE_CUT_OFF_SHARE
        return not cut_off and not self._has_live_leader()

    def _has_live_leader(self) -> bool:
        seen = self._record
        if seen is None or not seen.was_renewed or seen.holder in ("", self._settings.identity):
            return False
        return self._runtime.monotonic() - seen.unchanged_since < seen.duration_seconds * LEASE_DOUBT_SHARE

    async def wait_for_change(self) -> None:
        """Returns when this operator leads or leads no more, or has seen the Lease change."""
        await self._changed.wait()

    def start(self) -> None:
        """Try to get the Lease, and keep it, until `give_back`."""
        self._task = self._runtime.start_task(self._run(), "the Lease's keeper")

    async def release(self) -> None:
        """Stop acting, and let the next one begin at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._renewed_at, has_led, self._written = -math.inf, self._written, ""
        self._update_serving()
        if has_led:  # and may be named still, even where it could not renew in time
            try:
                await self._runtime.run_with_timeout(self._settings.lease_seconds, self._release_lease())
            except (kopf.TemporaryError, kopf.PermanentError, TimeoutError) as error:
                log.warning("the Lease could not be given back, and runs out by itself: %r", error)

    async def _run(self) -> None:
        """Raises LeaseLost where another operator is named after this one has led."""
        await self._try_acquire_or_renew()
        if not self.is_leader():
            log.info("Lease %s/%s may have another holder: waiting", self._settings.namespace, LEASE_NAME)
        while not self.is_leader():
            await self._runtime.sleep(self._get_poll_delay())
            await self._try_acquire_or_renew()
        self.elected.set()
        while True:
            self._update_serving()
            await self._runtime.sleep(self._settings.lease_seconds * LEASE_RETRY_PERIOD_SHARE)
            await self._try_acquire_or_renew()
            if self._record is not None and self._is_lost(self._record):
                self._renewed_at, self._written = -math.inf, ""
                self._update_serving()
                whose = f"is {self._record.holder}'s now" if self._record.holder else "has been another's meanwhile"
                raise LeaseLost(f"Lease {self._settings.namespace}/{LEASE_NAME} {whose}")

    def _is_lost(self, seen: _LeaseRecord) -> bool:
        """Another operator is named, or may have led and left while this one could not renew: all that it remembers
        would be old."""
        if seen.holder:
            return seen.holder != self._settings.identity
        return not self.is_leader() and seen.version != self._written

    def _get_poll_delay(self) -> float:
        """Until the next look of one who waits: as soon as the Lease is free, and often before."""
        often = self._settings.lease_seconds * LEASE_POLL_SHARE
        if self._record is None:
            return often
        left = self._record.unchanged_since + self._get_wait_seconds(self._record) - self._runtime.monotonic()
        return min(often, max(left, MIN_LEASE_POLL_SECONDS)) if left > 0 else often

    def _update_serving(self) -> None:
        metrics.LEADER.set(self.is_leader())
        if self.can_serve() != self._was_serving:
            self._was_serving = not self._was_serving
            self.on_serving_changed(self._was_serving)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _try_acquire_or_renew(self) -> None:
        """Take or renew the Lease. Whatever the API server says against it, another try may do better."""
        began = self.last_attempt_at = self._runtime.monotonic()
        try:
            taken = await self._runtime.run_with_timeout(self._settings.lease_seconds / 3, self._acquire_or_renew())
        except (kopf.TemporaryError, kopf.PermanentError, TimeoutError) as error:
            log.warning("the Lease can be neither taken nor renewed, and is tried again: %r", error)
            return
        self._answered_at = began
        if taken:
            self._renewed_at = began

    async def _acquire_or_renew(self) -> bool:
        """False: it may have another holder. Raises Conflict where somebody was faster."""
        found = await self._cluster.find(LEASES, LEASE_NAME, self._settings.namespace)
        may_take = self._may_acquire(found) if found is not None else self.is_leader()
        holder = self._settings.identity if may_take else ""
        if found is None:  # one that names nobody can be watched; that there is none cannot
            written = self._observe(await self._cluster.create(LEASES, self._build_lease(holder)))
        elif may_take:
            written = self._observe(await self._cluster.replace(LEASES, self._build_lease(holder, found)))
        if may_take:
            self._written = written.version
        return may_take

    def _may_acquire(self, found: Object) -> bool:
        first = self._record is None
        seen = self._observe(found)
        ours = seen.holder == self._settings.identity
        if self.is_leader():
            return ours or not seen.holder
        if self.elected.is_set():
            return ours or seen.version == self._written  # else it is lost
        if (ours and first) or _is_released(found) or seen.version == self._written:
            return True  # the last: nobody has taken it since this operator did, however long ago
        return self._runtime.monotonic() - seen.unchanged_since >= self._get_wait_seconds(seen)

    def _get_wait_seconds(self, seen: _LeaseRecord) -> float:
        return max(self._settings.lease_seconds, seen.duration_seconds)

    def _observe(self, lease: Object) -> _LeaseRecord:
        metadata = lease["metadata"]
        if self._record is None or self._record.version != metadata["resourceVersion"]:
            self._record = _LeaseRecord(
                version=metadata["resourceVersion"],
                holder=_get_spec(lease).get("holderIdentity") or "",
                address=(metadata.get("annotations") or {}).get(LEASE_ADDRESS_ANNOTATION, ""),
                duration_seconds=_get_duration_seconds(lease),
                unchanged_since=self._runtime.monotonic(),
                was_renewed=self._record is not None,
            )
            self._notify()
        return self._record

    async def _release_lease(self) -> None:
        found = await self._cluster.get(LEASES, LEASE_NAME, self._settings.namespace)
        if found["spec"].get("holderIdentity") == self._settings.identity:
            found["spec"] |= {"holderIdentity": None, "renewTime": None}
            await self._cluster.replace(LEASES, found)

    def _build_lease(self, holder: str, found: Object | None = None) -> Object:
        metadata: Object = {"name": LEASE_NAME, "namespace": self._settings.namespace}
        if holder:
            metadata["annotations"] = {LEASE_ADDRESS_ANNOTATION: self._settings.pod_endpoint}
        if found is not None:
            metadata["resourceVersion"] = found["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": math.ceil(self._settings.lease_seconds),
                "renewTime": format_time(self._runtime.now()),
            },
        }


@asynccontextmanager
async def run_leader_election(cluster: Cluster, settings: Settings, runtime: OperatorRuntime) -> AsyncIterator[LeaderElector]:
    """Tries to get the Lease and keeps it while inside, and gives it back. `runtime.failed` is set when it is lost."""
    lease = LeaderElector(cluster, settings, runtime)
    lease.start()
    try:
        yield lease
    finally:
        await lease.release()


def _get_spec(lease: Object) -> Object:
    spec: Object = lease.get("spec") or {}
    return spec


def _is_released(lease: Object) -> bool:
    """Its last holder has left it well, or nobody ever held it."""
    return not _get_spec(lease).get("holderIdentity") and not _get_spec(lease).get("renewTime")


def _get_duration_seconds(lease: Object) -> float:
    """Seconds, by the holder's own word: it may have other settings. Bounded, as anybody may have written it."""
    seconds = _get_spec(lease).get("leaseDurationSeconds")
    return min(float(seconds), MAX_LEASE_SECONDS) if isinstance(seconds, int) else 0.0
