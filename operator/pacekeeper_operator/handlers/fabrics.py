"""The loop over Fabrics."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from ..services.fabrics import watch_over
from ..services.operator import Operator


@kopf.on.startup()
async def start(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    memo.fabrics = operator.runtime.start(watch_over(operator), "fabrics")


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    memo.fabrics.cancel()
    await asyncio.gather(memo.fabrics, return_exceptions=True)
