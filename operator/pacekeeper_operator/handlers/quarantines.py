"""The loop over all NodeQuarantines. No daemon each: kopf would add a finalizer of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from ..services.operator import Operator
from ..services.quarantine import watch_over


@kopf.on.startup()
async def start(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    memo.quarantines = operator.runtime.start(_watch_over(operator), "quarantines")


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    memo.quarantines.cancel()
    await asyncio.gather(memo.quarantines, return_exceptions=True)


async def _watch_over(operator: Operator) -> None:
    await operator.fleet.nodes.listed.wait()  # with the operator's own list of them: there are thousands
    await watch_over(operator.fleet)
