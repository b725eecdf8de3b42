"""The operator ends in order, even if a task fails in the last seconds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import kopf
import pytest

from pacekeeper_operator.__main__ import _PodEnvironment
from pacekeeper_operator.kube.client import ResourceVersionExpired
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.settings import Settings


@pytest.mark.parametrize("is_ending", [True, False])
async def test_a_watch_failure_during_shutdown_is_no_failure_of_the_operator(
    is_ending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def spawn_tasks(**_: Any) -> list[asyncio.Task[None]]:
        return []

    async def run_tasks(*_: Any, **__: Any) -> None:
        raise ResourceVersionExpired("too old resource version: 2522 (2715)")

    monkeypatch.setattr(kopf, "spawn_tasks", spawn_tasks)
    monkeypatch.setattr(kopf, "run_tasks", run_tasks)
    monkeypatch.setattr(_PodEnvironment, "_install_signal_handlers", lambda _: None)
    operator, stopped = cast(Operator, SimpleNamespace(settings=Settings())), asyncio.Event()
    if is_ending:
        stopped.set()
        await _PodEnvironment().run_handlers(operator, stopped)
    else:
        with pytest.raises(ResourceVersionExpired):
            await _PodEnvironment().run_handlers(operator, stopped)
