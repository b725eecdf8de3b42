"""The loop over all NodeQuarantines, and what wakes it. No daemon each: kopf would add a finalizer of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from ..api import GROUP, TAINT_QUARANTINE, VERSION
from ..services.operator import Operator
from ..services.quarantine import watch_over


@kopf.on.startup()
async def start(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    memo.quarantines_changed = asyncio.Event()
    work = watch_over(operator.cluster, operator.runtime, operator.settings, memo.quarantines_changed)
    memo.quarantines = operator.runtime.start(work, "quarantines")


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    memo.quarantines.cancel()
    await asyncio.gather(memo.quarantines, return_exceptions=True)


@kopf.on.event(GROUP, VERSION, "nodequarantines")
async def quarantine_changed(memo: kopf.Memo, **_: Any) -> None:
    memo.quarantines_changed.set()


def _concerns_quarantines(spec: kopf.Spec, status: kopf.Status, **_: Any) -> bool:
    """It carries our taint, or is not Ready, which may be what a suspicion waits for."""
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))
    return not ready or any(taint["key"] == TAINT_QUARANTINE for taint in spec.get("taints", ()))


@kopf.on.event("", "v1", "nodes", when=_concerns_quarantines)
async def node_changed(memo: kopf.Memo, **_: Any) -> None:
    memo.quarantines_changed.set()
