"""Starts and stops the loop over JobSets that the operator runs, if the installation allows that."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from ..runtime.jobsets import run_jobset_loop
from ..services.operator import Operator


@kopf.on.startup()
async def start_jobset_loop(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    if operator.settings.jobsets_enabled:
        memo.jobsets = operator.runtime.start_task(run_jobset_loop(operator), "JobSets")


@kopf.on.cleanup()
async def stop_jobset_loop(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    if operator.settings.jobsets_enabled:
        memo.jobsets.cancel()
        await asyncio.gather(memo.jobsets, return_exceptions=True)
