"""One operator acts: whoever holds the Lease. A lost Lease ends the process, so that two never act at once."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import kopf

from .. import metrics
from ..api import format_time, parse_time
from ..cluster import LEASES, Cluster, Conflict, Object
from ..settings import Settings

LEASE = "pacekeeper-operator"
log = logging.getLogger(__name__)


@asynccontextmanager
async def hold(cluster: Cluster, settings: Settings, lost: asyncio.Event) -> AsyncIterator[None]:
    """Waits for the Lease, keeps it while inside, and gives it back. `lost` is set when it could not be kept."""
    await _acquire(cluster, settings)
    metrics.LEADER.set(1)
    keeper = asyncio.create_task(_keep(cluster, settings, lost), name="lease keeper")
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if not lost.is_set():
            await _give_back(cluster, settings)


async def _acquire(cluster: Cluster, settings: Settings) -> None:
    waiting = False
    while True:
        try:
            if await _take(cluster, settings):
                return
        except kopf.TemporaryError as error:
            log.warning("the Lease cannot be taken yet: %s", error)
        if not waiting:
            log.info("another operator holds Lease %s/%s: waiting", settings.namespace, LEASE)
            waiting = True
        await asyncio.sleep(settings.lease_seconds / 5)


async def _keep(cluster: Cluster, settings: Settings, lost: asyncio.Event) -> None:
    held = time.monotonic()
    while not lost.is_set():
        await asyncio.sleep(settings.lease_seconds / 3)
        try:
            if not await _take(cluster, settings):
                log.error("the Lease is another operator's now")
                lost.set()
            held = time.monotonic()
        except kopf.TemporaryError as error:
            # While nobody can write the Lease, nobody else can take it: holding on is safe until it can be.
            if time.monotonic() - held > settings.lease_seconds:
                log.warning("the Lease could not be renewed for %.0f s: %s", time.monotonic() - held, error)


async def _take(cluster: Cluster, settings: Settings) -> bool:
    """Take or renew the Lease; False: somebody else holds it. Raises kopf.TemporaryError."""
    found = await cluster.find(LEASES, LEASE, settings.namespace)
    now = time.time()
    if found is None:
        try:
            await cluster.create(LEASES, _body(settings, now))
        except Conflict:
            return False
        return True
    spec = found["spec"]
    holder = spec.get("holderIdentity")
    expires = parse_time(spec["renewTime"]) + spec["leaseDurationSeconds"] if spec.get("renewTime") else 0.0
    if holder and holder != settings.identity and now < expires:
        return False
    body = _body(settings, now)
    body["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
    try:
        await cluster.replace(LEASES, body)
    except Conflict:
        return False
    return True


async def _give_back(cluster: Cluster, settings: Settings) -> None:
    try:
        found = await cluster.get(LEASES, LEASE, settings.namespace)
        if found["spec"].get("holderIdentity") == settings.identity:
            found["spec"]["holderIdentity"] = ""
            await cluster.replace(LEASES, found)
    except (kopf.TemporaryError, kopf.PermanentError) as error:
        log.warning("the Lease could not be given back, and runs out by itself: %s", error)


def _body(settings: Settings, now: float) -> Object:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": LEASE, "namespace": settings.namespace},
        "spec": {
            "holderIdentity": settings.identity,
            "leaseDurationSeconds": math.ceil(settings.lease_seconds),
            "renewTime": format_time(now),
        },
    }
