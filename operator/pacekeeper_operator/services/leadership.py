"""One operator acts: whoever holds the Lease. By the rules of Kubernetes' own leader election, so that two never do.

*No clock is compared with another's.* The Lease is free when its object has not changed for as long as it lasts, as
watched here by a clock that never jumps; what times stand in it is for people. A Lease that names nobody is waited out
in the same way, and one is made where there is none: it may have been edited or deleted by hand while its holder acts.

*Who cannot renew stops in time.* The holder acts for two thirds of the Lease's duration after the last renewal that
succeeded, counted from before it was sent; whoever takes over has waited for the whole of it. So it stops before it
could be replaced, goes on by itself when it can, and ends, by an error of its keeper, when somebody else is named.

Only a holder that leaves well lets the next one begin at once (it leaves no name and no time), and so does a container
that ended in the same pod.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import kopf

from .. import metrics
from ..api import format_time
from ..cluster import LEASES, Cluster, Object
from ..runtime import Runtime
from ..settings import Settings

LEASE = "pacekeeper-operator"
RENEW_SHARE = 2 / 3
"""Of the Lease's duration: so long the holder acts after a renewal."""
RETRY_SHARE = 1 / 5
"""Of the Lease's duration: the pause between two tries to take or renew it."""
LONGEST_SECONDS = 300.0
"""No record is waited out for longer, whatever somebody has written into it."""
log = logging.getLogger(__name__)


class NotLeading(kopf.TemporaryError):
    """This operator may not act now: it does not hold the Lease, or could not renew it in time."""


class LeaseLost(Exception):
    """Another operator holds the Lease: this one has to end."""


@dataclass(frozen=True)
class _Seen:
    """The Lease's object, and since when it has been the same, by the observer's own clock."""

    version: str  # its resourceVersion
    holder: str  # whom it names; "": nobody
    since: float


class Lease:
    """The right to act, of one operator. Use `hold()`."""

    def __init__(self, cluster: Cluster, settings: Settings, runtime: Runtime) -> None:
        self._cluster = cluster
        self._settings = settings
        self._runtime = runtime
        self._seen: _Seen | None = None
        self._acts_until = -math.inf

    def holds(self) -> bool:
        """Whether this operator may act at this moment."""
        return self._runtime.monotonic() < self._acts_until

    def require(self) -> None:
        """Raises NotLeading unless this operator may act: `Cluster` asks before each write."""
        if not self.holds():
            raise NotLeading("this operator could not renew its Lease, and does nothing until it can", delay=1)

    async def acquire(self) -> None:
        """Returns as soon as this operator may act."""
        await self._try()
        if not self.holds():
            log.info("Lease %s/%s may have another holder: waiting", self._settings.namespace, LEASE)
        while not self.holds():
            await self._runtime.sleep(self._settings.lease_seconds * RETRY_SHARE)
            await self._try()

    async def keep(self) -> None:
        """Renew until cancelled. Raises LeaseLost where another operator is named."""
        while True:
            metrics.LEADER.set(self.holds())
            await self._runtime.sleep(self._settings.lease_seconds * RETRY_SHARE)
            await self._try()
            if self._seen is not None and self._seen.holder not in ("", self._settings.identity):
                self._acts_until = -math.inf
                metrics.LEADER.set(0)
                raise LeaseLost(f"Lease {self._settings.namespace}/{LEASE} is {self._seen.holder}'s now")

    async def give_back(self) -> None:
        """Stop acting, and let the next one begin at once."""
        held, self._acts_until = self.holds(), -math.inf
        metrics.LEADER.set(0)
        if held:
            try:
                await self._runtime.within(self._settings.lease_seconds, self._release())
            except (kopf.TemporaryError, kopf.PermanentError, TimeoutError) as error:
                log.warning("the Lease could not be given back, and runs out by itself: %r", error)

    async def _try(self) -> None:
        """Take or renew the Lease. Whatever the API server says against it, another try may do better."""
        began = self._runtime.monotonic()
        try:
            taken = await self._runtime.within(self._settings.lease_seconds / 3, self._take())
        except (kopf.TemporaryError, kopf.PermanentError, TimeoutError) as error:
            log.warning("the Lease can be neither taken nor renewed, and is tried again: %r", error)
            return
        if taken:
            self._acts_until = began + self._settings.lease_seconds * RENEW_SHARE

    async def _take(self) -> bool:
        """False: it may have another holder. Raises Conflict where somebody was faster."""
        found = await self._cluster.find(LEASES, LEASE, self._settings.namespace)
        may_take = self._may_take(found) if found is not None else self.holds()
        holder = self._settings.identity if may_take else ""
        if found is None:  # one that names nobody can be watched; that there is none cannot
            self._saw(await self._cluster.create(LEASES, self._body(holder)))
        elif may_take:
            self._saw(await self._cluster.replace(LEASES, self._body(holder, found)))
        return may_take

    def _may_take(self, found: Object) -> bool:
        first = self._seen is None
        seen = self._saw(found)
        ours = seen.holder == self._settings.identity
        if self.holds():
            return ours or not seen.holder
        if (ours and first) or _is_left(found):
            return True
        return self._runtime.monotonic() - seen.since >= max(self._settings.lease_seconds, _lasts(found))

    def _saw(self, lease: Object) -> _Seen:
        version, holder = lease["metadata"]["resourceVersion"], _spec(lease).get("holderIdentity") or ""
        if self._seen is None or self._seen.version != version:
            self._seen = _Seen(version, holder, self._runtime.monotonic())
        return self._seen

    async def _release(self) -> None:
        found = await self._cluster.get(LEASES, LEASE, self._settings.namespace)
        if found["spec"].get("holderIdentity") == self._settings.identity:
            found["spec"] |= {"holderIdentity": None, "renewTime": None}
            await self._cluster.replace(LEASES, found)

    def _body(self, holder: str, found: Object | None = None) -> Object:
        metadata = {"name": LEASE, "namespace": self._settings.namespace}
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
async def hold(cluster: Cluster, settings: Settings, runtime: Runtime) -> AsyncIterator[Lease]:
    """Waits for the Lease, keeps it while inside, and gives it back. `runtime.failed` is set when it is lost."""
    lease = Lease(cluster, settings, runtime)
    await lease.acquire()
    keeper = runtime.start(lease.keep(), "the Lease's keeper")
    try:
        yield lease
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await lease.give_back()


def _spec(lease: Object) -> Object:
    spec: Object = lease.get("spec") or {}
    return spec


def _is_left(lease: Object) -> bool:
    """Its last holder has left it well, or nobody ever held it."""
    return not _spec(lease).get("holderIdentity") and not _spec(lease).get("renewTime")


def _lasts(lease: Object) -> float:
    """Seconds, by the holder's own word: it may have other settings. Bounded, as anybody may have written it."""
    seconds = _spec(lease).get("leaseDurationSeconds")
    return min(float(seconds), LONGEST_SECONDS) if isinstance(seconds, int) else 0.0
