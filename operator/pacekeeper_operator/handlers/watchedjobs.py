"""Starts and stops the loops over watched jobs, if jobs are watched at all."""

from __future__ import annotations

import asyncio
from typing import Any

import kopf

from ..runtime.watched_jobs import run_watched_jobs
from ..services.operator import Operator


@kopf.on.startup()
async def start_watched_jobs_loop(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    if operator.settings.watch_enabled:
        memo.watched_jobs = operator.runtime.start_task(run_watched_jobs(operator), "watched jobs")


@kopf.on.cleanup()
async def stop_watched_jobs_loop(memo: kopf.Memo, **_: Any) -> None:
    operator: Operator = memo.operator
    if operator.settings.watch_enabled:
        memo.watched_jobs.cancel()
        await asyncio.gather(memo.watched_jobs, return_exceptions=True)
