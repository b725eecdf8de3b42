"""The loop over all NodeQuarantines, and what wakes it. No daemon each: kopf would add a finalizer of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from ..api import GROUP, VERSION
from ..services.operator import Operator
from ..services.quarantine import watch_over


@kopf.on.startup()
async def start(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    memo.quarantines = operator.runtime.start(watch_over(operator.fleet), "quarantines")


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    memo.quarantines.cancel()
    await asyncio.gather(memo.quarantines, return_exceptions=True)


@kopf.on.event(GROUP, VERSION, "nodequarantines")
async def quarantine_changed(memo: kopf.Memo, body: kopf.Body, type: str | None, **_: Any) -> None:
    operator: Operator = memo.operator
    operator.fleet.quarantines.hear(body, deleted=type == "DELETED")
