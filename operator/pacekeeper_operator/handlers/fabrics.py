"""Starts and stops the loop over Fabrics."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from ..services.fabrics import run_fabric_loop
from ..services.operator import Operator


@kopf.on.startup()
async def start_fabric_loop(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    memo.fabrics = operator.runtime.start_task(run_fabric_loop(operator), "fabrics")


@kopf.on.cleanup()
async def stop_fabric_loop(memo: kopf.Memo, **_: Any) -> None:
    memo.fabrics.cancel()
    await asyncio.gather(memo.fabrics, return_exceptions=True)
