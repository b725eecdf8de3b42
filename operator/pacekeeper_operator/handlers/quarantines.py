"""Starts and stops the loop over all NodeQuarantines. There is no daemon per object: kopf would add a finalizer."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from ..services.operator import Operator
from ..services.quarantine import run_quarantine_loop


@kopf.on.startup()
async def start_quarantine_loop(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    memo.quarantines = operator.runtime.start_task(_run_when_listed(operator), "quarantines")


@kopf.on.cleanup()
async def stop_quarantine_loop(memo: kopf.Memo, **_: Any) -> None:
    memo.quarantines.cancel()
    await asyncio.gather(memo.quarantines, return_exceptions=True)


async def _run_when_listed(operator: Operator) -> None:
    await operator.node_registry.nodes.listed.wait()  # use the operator's list: there may be thousands of nodes
    await run_quarantine_loop(operator.node_registry)
