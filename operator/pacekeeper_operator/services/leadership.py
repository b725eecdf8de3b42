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
from ..runtime import Runtime, Superseded
from ..settings import Settings

LEASE = "pacekeeper-operator"
RENEW_SHARE = 2 / 3
"""Of the Lease's duration: so long the holder acts after a renewal."""
RETRY_SHARE = 1 / 5
"""Of the Lease's duration: the pause between two renewals."""
DOUBT_SHARE = 2 / 5
"""Of the Lease's duration: two renewals that have not come. Whoever it names may have gone."""
LOOK_SHARE = 1 / 24
"""Of the Lease's duration: how often whoever waits for it looks. One that is given back lies there no longer."""
CUT_OFF_SHARE = 1 / 3
"""Of the Lease's duration: who has had no answer for so long is cut off."""
SHORTEST_PAUSE_SECONDS = 0.01
ADDRESS = f"{GROUP}/address"
"""Annotation of the Lease: where its holder serves sidecars, address:port."""
LONGEST_SECONDS = 300.0
"""No record is waited out for longer, whatever somebody has written into it."""
log = logging.getLogger(__name__)


class NotLeading(kopf.TemporaryError):
    """This operator may not act now: it does not hold the Lease, or could not renew it in time."""


class LeaseLost(Superseded):
    """Another operator holds the Lease: this one has to end."""


@dataclass(frozen=True)
class _Seen:
    """The Lease's object, and since when it has been the same, by the observer's own clock."""

    version: str  # its resourceVersion
    holder: str  # whom it names; "": nobody
    address: str  # where that one serves; "": it does not say
    lasts: float  # seconds
    since: float
    renewed: bool  # it has changed since it was first seen: whom it names was alive then


class Lease:
    """The right to act, of one operator. Use `contend()`."""

    def __init__(self, cluster: Cluster, settings: Settings, runtime: Runtime) -> None:
        self.begun = asyncio.Event()
        """This operator has led."""
        self.turned: Callable[[bool], None] = lambda _: None
        """Told whenever sidecars are served from now on, or no longer."""
        self.looked_at = runtime.monotonic()
        """When it was looked at last, whether or not the API server answered."""
        self._cluster = cluster
        self._settings = settings
        self._runtime = runtime
        self._answered_at = -math.inf  # when the API server was asked last that has answered
        self._news = asyncio.Event()
        self._seen: _Seen | None = None
        self._written = ""  # resourceVersion that this operator's last taking or renewal has had
        self._renewed_at = -math.inf
        self._served = False
        self._keeper: asyncio.Task[None] | None = None

    def holds(self) -> bool:
        """Whether this operator may act at this moment."""
        return self._runtime.monotonic() < self._renewed_at + self._settings.lease_seconds * RENEW_SHARE

    def require(self) -> None:
        """Raises NotLeading unless this operator may act: `Cluster` asks before each write."""
        if not self.holds():
            raise NotLeading("this operator does not hold the Lease, or could not renew it", delay=1)

    def serves(self) -> bool:
        """Whether nobody else can lead at this moment."""
        return self._runtime.monotonic() < self._renewed_at + self._settings.lease_seconds

    @property
    def leader(self) -> str:
        """Where another operator leads, address:port; "": none does, or it does not say, or it is not known: a Lease
        that nobody has been seen to renew may be that of one which is gone."""
        return self._seen.address if self._seen is not None and self._another_lives() else ""

    @property
    def contends(self) -> bool:
        """Whether this operator may be the next to lead: one that is cut off from the API server will not, and none
        while another lives."""
        cut_off = self._runtime.monotonic() - self._answered_at >= self._settings.lease_seconds * CUT_OFF_SHARE
        return not cut_off and not self._another_lives()

    def _another_lives(self) -> bool:
        seen = self._seen
        if seen is None or not seen.renewed or seen.holder in ("", self._settings.identity):
            return False
        return self._runtime.monotonic() - seen.since < seen.lasts * DOUBT_SHARE

    async def news(self) -> None:
        """Returns when this operator leads or leads no more, or has seen the Lease change."""
        await self._news.wait()

    def start(self) -> None:
        """Try to get the Lease, and keep it, until `give_back`."""
        self._keeper = self._runtime.start(self._contend(), "the Lease's keeper")

    async def give_back(self) -> None:
        """Stop acting, and let the next one begin at once."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._renewed_at, has_led, self._written = -math.inf, self._written, ""
        self._tell()
        if has_led:  # and may be named still, even where it could not renew in time
            try:
                await self._runtime.within(self._settings.lease_seconds, self._release())
            except (kopf.TemporaryError, kopf.PermanentError, TimeoutError) as error:
                log.warning("the Lease could not be given back, and runs out by itself: %r", error)

    async def _contend(self) -> None:
        """Raises LeaseLost where another operator is named after this one has led."""
        await self._try()
        if not self.holds():
            log.info("Lease %s/%s may have another holder: waiting", self._settings.namespace, LEASE)
        while not self.holds():
            await self._runtime.sleep(self._pause())
            await self._try()
        self.begun.set()
        while True:
            self._tell()
            await self._runtime.sleep(self._settings.lease_seconds * RETRY_SHARE)
            await self._try()
            if self._seen is not None and self._is_lost(self._seen):
                self._renewed_at, self._written = -math.inf, ""
                self._tell()
                whose = f"is {self._seen.holder}'s now" if self._seen.holder else "has been another's meanwhile"
                raise LeaseLost(f"Lease {self._settings.namespace}/{LEASE} {whose}")

    def _is_lost(self, seen: _Seen) -> bool:
        """Another operator is named, or may have led and left while this one could not renew: all that it remembers
        would be old."""
        if seen.holder:
            return seen.holder != self._settings.identity
        return not self.holds() and seen.version != self._written

    def _pause(self) -> float:
        """Until the next look of one who waits: as soon as the Lease is free, and often before."""
        often = self._settings.lease_seconds * LOOK_SHARE
        if self._seen is None:
            return often
        left = self._seen.since + self._waits_for(self._seen) - self._runtime.monotonic()
        return min(often, max(left, SHORTEST_PAUSE_SECONDS)) if left > 0 else often

    def _tell(self) -> None:
        metrics.LEADER.set(self.holds())
        if self.serves() != self._served:
            self._served = not self._served
            self.turned(self._served)
            self._say()

    def _say(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _try(self) -> None:
        """Take or renew the Lease. Whatever the API server says against it, another try may do better."""
        began = self.looked_at = self._runtime.monotonic()
        try:
            taken = await self._runtime.within(self._settings.lease_seconds / 3, self._take())
        except (kopf.TemporaryError, kopf.PermanentError, TimeoutError) as error:
            log.warning("the Lease can be neither taken nor renewed, and is tried again: %r", error)
            return
        self._answered_at = began
        if taken:
            self._renewed_at = began

    async def _take(self) -> bool:
        """False: it may have another holder. Raises Conflict where somebody was faster."""
        found = await self._cluster.find(LEASES, LEASE, self._settings.namespace)
        may_take = self._may_take(found) if found is not None else self.holds()
        holder = self._settings.identity if may_take else ""
        if found is None:  # one that names nobody can be watched; that there is none cannot
            written = self._saw(await self._cluster.create(LEASES, self._body(holder)))
        elif may_take:
            written = self._saw(await self._cluster.replace(LEASES, self._body(holder, found)))
        if may_take:
            self._written = written.version
        return may_take

    def _may_take(self, found: Object) -> bool:
        first = self._seen is None
        seen = self._saw(found)
        ours = seen.holder == self._settings.identity
        if self.holds():
            return ours or not seen.holder
        if self.begun.is_set():
            return ours or seen.version == self._written  # else it is lost
        if (ours and first) or _is_left(found) or seen.version == self._written:
            return True  # the last: nobody has taken it since this operator did, however long ago
        return self._runtime.monotonic() - seen.since >= self._waits_for(seen)

    def _waits_for(self, seen: _Seen) -> float:
        return max(self._settings.lease_seconds, seen.lasts)

    def _saw(self, lease: Object) -> _Seen:
        metadata = lease["metadata"]
        if self._seen is None or self._seen.version != metadata["resourceVersion"]:
            self._seen = _Seen(
                version=metadata["resourceVersion"],
                holder=_spec(lease).get("holderIdentity") or "",
                address=(metadata.get("annotations") or {}).get(ADDRESS, ""),
                lasts=_lasts(lease),
                since=self._runtime.monotonic(),
                renewed=self._seen is not None,
            )
            self._say()
        return self._seen

    async def _release(self) -> None:
        found = await self._cluster.get(LEASES, LEASE, self._settings.namespace)
        if found["spec"].get("holderIdentity") == self._settings.identity:
            found["spec"] |= {"holderIdentity": None, "renewTime": None}
            await self._cluster.replace(LEASES, found)

    def _body(self, holder: str, found: Object | None = None) -> Object:
        metadata: Object = {"name": LEASE, "namespace": self._settings.namespace}
        if holder:
            metadata["annotations"] = {ADDRESS: self._settings.pod_endpoint}
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
async def contend(cluster: Cluster, settings: Settings, runtime: Runtime) -> AsyncIterator[Lease]:
    """Tries to get the Lease and keeps it while inside, and gives it back. `runtime.failed` is set when it is lost."""
    lease = Lease(cluster, settings, runtime)
    lease.start()
    try:
        yield lease
    finally:
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
