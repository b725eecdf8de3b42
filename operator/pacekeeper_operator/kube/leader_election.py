"""Leader election: only the operator that holds the Lease acts. The rules are those of Kubernetes' leader election.

*No clock is compared with another one.* The Lease is free when its object has not changed for its whole duration. The
observer measures that by its own monotonic clock; the times in the Lease are for people. A Lease without a holder is
waited out in the same way, and if there is none, one without a holder is created. It may have been edited or deleted by
hand while its holder still acts.

*A holder that cannot renew stops in time.* It acts for two thirds of the Lease's duration after the last successful
renewal. That time counts from before the request was sent. A successor has waited for the whole duration, so the holder
stops before it can be replaced. It acts again when it can renew, and fails with LeaseLost when another holder is named.

A successor begins at once only if the holder released the Lease: it has no holder and no renew time. So does a
container that restarted in the holder's pod.

*Sidecars are served a little longer than the operator acts:* until another operator may lead. Then the sidecars are
redirected to the holder of the Lease, so that none stays with an operator that does not act.
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
from ..api.formats import format_time
from ..api.names import GROUP
from ..async_runtime import OperatorRuntime, Superseded
from ..settings import Settings
from .client import LEASES, Cluster, Object

LEASE_NAME = "pacekeeper-operator"
LEASE_RENEW_DEADLINE_SHARE = 2 / 3
"""Share of the Lease's duration in which the holder acts after a renewal."""
LEASE_RETRY_PERIOD_SHARE = 1 / 5
"""Share of the Lease's duration between two renewals."""
LEASE_DOUBT_SHARE = 2 / 5
"""Share of the Lease's duration without a renewal after which its holder may be gone: two renewals are missing."""
LEASE_POLL_SHARE = 1 / 24
"""Share of the Lease's duration between two polls of a candidate. It bounds how long a released Lease stays free."""
LEASE_CUT_OFF_SHARE = 1 / 3
"""Share of the Lease's duration without an answer of the API server after which an operator is cut off."""
MIN_LEASE_POLL_SECONDS = 0.01
LEASE_ADDRESS_ANNOTATION = f"{GROUP}/leader-address"
"""Annotation of the Lease: where its holder serves sidecars, as address:port."""
MAX_LEASE_SECONDS = 300.0
"""The longest duration of a Lease that is waited out. The Lease's own may have been edited by hand."""
log = logging.getLogger(__name__)


class NotLeading(kopf.TemporaryError):
    """This operator may not act now: it does not hold the Lease, or could not renew it in time."""


class LeaseLost(Superseded):
    """Another operator holds the Lease, so this one has to exit."""


@dataclass(frozen=True)
class _LeaseRecord:
    """The Lease's object, and since when it has not changed, by the observer's own clock."""

    version: str  # its resourceVersion
    holder: str  # "": none
    address: str  # where the holder serves sidecars; "": unknown
    duration_seconds: float
    unchanged_since: float
    was_renewed: bool  # it has changed since it was first seen: its holder was alive then


class LeaderElector:
    """One operator's part in the leader election. Use `run_leader_election()`."""

    def __init__(self, cluster: Cluster, settings: Settings, runtime: OperatorRuntime) -> None:
        self.elected = asyncio.Event()
        """Set once this operator has led."""
        self.on_serving_changed: Callable[[bool], None] = lambda _: None
        """Called when serving sidecars begins (True) and ends (False)."""
        self.last_attempt_at = runtime.monotonic()
        """Time of the last attempt to take or renew the Lease, whether or not the API server answered."""
        self._cluster = cluster
        self._settings = settings
        self._runtime = runtime
        self._answered_at: float | None = None  # start of the last attempt that the API server answered
        self._changed = asyncio.Event()
        self._record: _LeaseRecord | None = None
        self._written = ""  # resourceVersion of this operator's last write of the Lease
        self._renewed_at: float | None = None  # None: it does not hold the Lease
        self._was_serving = False
        self._task: asyncio.Task[None] | None = None

    def is_leader(self) -> bool:
        """Return whether this operator may act at this moment."""
        return self._was_renewed_within(self._settings.lease_seconds * LEASE_RENEW_DEADLINE_SHARE)

    def require_leadership(self) -> None:
        """Raise NotLeading unless this operator may act. `Cluster` calls it before each write."""
        if not self.is_leader():
            raise NotLeading("this operator does not hold the Lease, or could not renew it", delay=1)

    def can_serve(self) -> bool:
        """Return whether no other operator can lead at this moment."""
        return self._was_renewed_within(self._settings.lease_seconds)

    def _was_renewed_within(self, seconds: float) -> bool:
        return self._renewed_at is not None and self._runtime.monotonic() < self._renewed_at + seconds

    @property
    def leader_address(self) -> str:
        """Where another operator leads, as address:port; "" if none leads or its address is unknown.

        It is also "" if no renewal of the Lease was seen: its holder may be gone.
        """
        return self._record.address if self._record is not None and self._has_live_leader() else ""

    @property
    def is_candidate(self) -> bool:
        """Whether this operator may lead next: it is not cut off from the API server, and no other holder is alive."""
        if self._answered_at is None:
            return False
        cut_off = self._runtime.monotonic() - self._answered_at >= self._settings.lease_seconds * LEASE_CUT_OFF_SHARE
        return not cut_off and not self._has_live_leader()

    def _has_live_leader(self) -> bool:
        record = self._record
        if record is None or not record.was_renewed or record.holder in ("", self._settings.identity):
            return False
        return self._runtime.monotonic() - record.unchanged_since < record.duration_seconds * LEASE_DOUBT_SHARE

    async def wait_for_change(self) -> None:
        """Return when this operator starts or stops leading, or has seen the Lease change."""
        await self._changed.wait()

    def start(self) -> None:
        """Try to take the Lease, and renew it, until `release`."""
        self._task = self._runtime.start_task(self._run(), "leader election")

    async def release(self) -> None:
        """Stop acting, and let the next operator begin at once."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._renewed_at, has_led, self._written = None, self._written, ""
        self._update_serving()
        if has_led:  # and the Lease may still name it, even if it could not renew in time
            try:
                await self._runtime.run_with_timeout(self._settings.lease_seconds, self._release_lease())
            except (kopf.TemporaryError, kopf.PermanentError, TimeoutError) as error:
                log.warning("could not release the Lease; it expires by itself: %r", error)

    async def _run(self) -> None:
        """Take and renew the Lease.

        Raises LeaseLost if another holder is named after this operator has led.
        """
        await self._try_acquire_or_renew()
        if not self.is_leader():
            log.info(
                "Lease %s/%s may have another holder; waiting until it is free", self._settings.namespace, LEASE_NAME
            )
        while not self.is_leader():
            await self._runtime.sleep(self._get_poll_delay())
            await self._try_acquire_or_renew()
        self.elected.set()
        while True:
            self._update_serving()
            await self._runtime.sleep(self._settings.lease_seconds * LEASE_RETRY_PERIOD_SHARE)
            await self._try_acquire_or_renew()
            if self._record is not None and self._is_lost(self._record):
                self._renewed_at, self._written = None, ""
                self._update_serving()
                reason = (
                    f"is now held by {self._record.holder}"
                    if self._record.holder
                    else "has had another holder since the last renewal"
                )
                raise LeaseLost(f"Lease {self._settings.namespace}/{LEASE_NAME} {reason}")

    def _is_lost(self, record: _LeaseRecord) -> bool:
        """Return whether another holder is named, or may have led and left while this operator could not renew.

        In both cases all that this operator remembers may be outdated.
        """
        if record.holder:
            return record.holder != self._settings.identity
        return not self.is_leader() and record.version != self._written

    def _get_poll_delay(self) -> float:
        """Return the seconds until a candidate's next attempt.

        That is when the Lease becomes free, or the poll interval if that is sooner.
        """
        poll_seconds = self._settings.lease_seconds * LEASE_POLL_SHARE
        if self._record is None:
            return poll_seconds
        remaining = self._record.unchanged_since + self._get_wait_seconds(self._record) - self._runtime.monotonic()
        return min(poll_seconds, max(remaining, MIN_LEASE_POLL_SECONDS)) if remaining > 0 else poll_seconds

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
        """Take or renew the Lease. Errors of the API server are logged, and the next attempt retries."""
        started_at = self.last_attempt_at = self._runtime.monotonic()
        try:
            acquired = await self._runtime.run_with_timeout(self._settings.lease_seconds / 3, self._acquire_or_renew())
        except (kopf.TemporaryError, kopf.PermanentError, TimeoutError) as error:
            log.warning("could not take or renew the Lease; retrying: %r", error)
            return
        self._answered_at = started_at
        if acquired:
            self._renewed_at = started_at

    async def _acquire_or_renew(self) -> bool:
        """Return whether this operator holds the Lease now.

        Raises Conflict if another write was faster.
        """
        lease = await self._cluster.find(LEASES, LEASE_NAME, self._settings.namespace)
        may_take = self._may_acquire(lease) if lease is not None else self.is_leader()
        holder = self._settings.identity if may_take else ""
        if lease is None:  # create one without a holder: it can be observed, its absence cannot
            written = self._observe(await self._cluster.create(LEASES, self._build_lease(holder)))
        elif may_take:
            written = self._observe(await self._cluster.replace(LEASES, self._build_lease(holder, lease)))
        if may_take:
            self._written = written.version
        return may_take

    def _may_acquire(self, lease: Object) -> bool:
        is_first = self._record is None
        record = self._observe(lease)
        is_ours = record.holder == self._settings.identity
        if self.is_leader():
            return is_ours or not record.holder
        if self.elected.is_set():
            return is_ours or record.version == self._written  # otherwise the Lease is lost
        if (is_ours and is_first) or _is_released(lease) or record.version == self._written:
            return True  # the last: no other operator has taken it since this one did, however long ago
        return self._runtime.monotonic() - record.unchanged_since >= self._get_wait_seconds(record)

    def _get_wait_seconds(self, record: _LeaseRecord) -> float:
        return max(self._settings.lease_seconds, record.duration_seconds)

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
        lease = await self._cluster.get(LEASES, LEASE_NAME, self._settings.namespace)
        if lease["spec"].get("holderIdentity") == self._settings.identity:
            lease["spec"] |= {"holderIdentity": None, "renewTime": None}
            await self._cluster.replace(LEASES, lease)

    def _build_lease(self, holder: str, current: Object | None = None) -> Object:
        metadata: Object = {"name": LEASE_NAME, "namespace": self._settings.namespace}
        if holder:
            metadata["annotations"] = {LEASE_ADDRESS_ANNOTATION: self._settings.pod_endpoint}
        if current is not None:
            metadata["resourceVersion"] = current["metadata"]["resourceVersion"]
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
async def run_leader_election(
    cluster: Cluster, settings: Settings, runtime: OperatorRuntime
) -> AsyncIterator[LeaderElector]:
    """Contend for the Lease while the context is open, and release it at the end.

    `runtime.failed` is set when the Lease is lost.
    """
    elector = LeaderElector(cluster, settings, runtime)
    elector.start()
    try:
        yield elector
    finally:
        await elector.release()


def _get_spec(lease: Object) -> Object:
    spec: Object = lease.get("spec") or {}
    return spec


def _is_released(lease: Object) -> bool:
    """Return whether its last holder released it, or it never had a holder."""
    return not _get_spec(lease).get("holderIdentity") and not _get_spec(lease).get("renewTime")


def _get_duration_seconds(lease: Object) -> float:
    """Return the Lease's duration in seconds, as the holder wrote it: its settings may differ.

    It is at most MAX_LEASE_SECONDS, as it may have been edited by hand.
    """
    seconds = _get_spec(lease).get("leaseDurationSeconds")
    return min(float(seconds), MAX_LEASE_SECONDS) if isinstance(seconds, int) else 0.0
