"""The operator reports itself dead when it no longer sees the cluster, and ends when a part of it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_operator import __main__ as entry
from pacekeeper_operator.async_runtime import OperatorRuntime
from pacekeeper_operator.kube.client import ApiConnection, Cluster
from pacekeeper_operator.observe.job_cache import JobRegistry
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.pods.manifests import Installation
from pacekeeper_operator.runtime import process
from pacekeeper_operator.services.operator import Operator
from pacekeeper_operator.services.shared.watched_stores import FIRST_WATCH_EVENT_SECONDS, MAX_MISSED_POD_CHANGES
from pacekeeper_operator.settings import Settings


@pytest.fixture
def operator() -> Operator:
    """An operator whose watches have reported a node. It calls no server."""
    absent_client = Cluster(cast(ApiConnection, None))
    operator = Operator(
        Settings(), absent_client, JobRegistry(0.0), Installation("", "", "", ""), PrometheusClient("", "", "")
    )
    operator.stores.nodes.apply_event(
        {"metadata": {"name": "node-1", "uid": "u", "resourceVersion": "1"}}, deleted=False
    )
    return operator


def compute_deadline(operator: Operator) -> float:
    return operator.jobs.started_at + 2 * FIRST_WATCH_EVENT_SECONDS


def test_watches_with_events_are_alive(operator: Operator) -> None:
    assert operator.stores.find_watch_failure(compute_deadline(operator)) == ""


def test_changes_seen_only_in_lists_mean_a_dead_watch(operator: Operator) -> None:
    operator.stores.pods.missed_changes = MAX_MISSED_POD_CHANGES
    assert "the watch of pods is dead" in operator.stores.find_watch_failure(compute_deadline(operator))


def test_watches_without_any_event_are_dead_after_a_while(operator: Operator) -> None:
    operator.stores.nodes.has_watch_events = False
    assert operator.stores.find_watch_failure(operator.jobs.started_at + 1) == ""
    assert "no watch has reported anything" in operator.stores.find_watch_failure(compute_deadline(operator))


class TestProcess:
    """The process ends; what it serves before that is fake."""

    @pytest.fixture
    def serve(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[OperatorRuntime], Awaitable[None]]], None]:
        """A function that replaces the operator's work."""

        def do(work: Callable[[OperatorRuntime], Awaitable[None]]) -> None:
            async def serving(
                _settings: Settings, runtime: OperatorRuntime, _edges: process.ProcessEnvironment
            ) -> None:
                await work(runtime)

            monkeypatch.setattr(process, "_serve_until_ended", serving)

        return do

    async def test_a_requested_end_has_exit_status_zero(self, serve: Callable[..., None]) -> None:
        async def work(_runtime: OperatorRuntime) -> None:
            return

        serve(work)
        assert await entry._run_process(Settings()) == 0

    async def test_a_failed_task_ends_the_operator_in_order_with_an_error(self, serve: Callable[..., None]) -> None:
        events = []

        async def die() -> None:
            raise RuntimeError("a defect")

        async def work(runtime: OperatorRuntime) -> None:
            runtime.start_task(die(), "a loop")
            await runtime.failed.wait()  # as the watches' machinery does
            events.append(True)

        serve(work)
        assert await entry._run_process(Settings()) == 1
        assert events

    async def test_an_operator_that_does_not_end_is_forced_to(
        self, serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(process, "OPERATOR_SHUTDOWN_SECONDS", 0.01)

        async def die() -> None:
            raise RuntimeError("a defect")

        async def work(runtime: OperatorRuntime) -> None:
            runtime.start_task(die(), "a loop")
            await asyncio.Event().wait()

        serve(work)
        assert await entry._run_process(Settings()) == 1

    async def test_bad_input_is_reported_to_the_user(
        self, serve: Callable[..., None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        async def work(_runtime: OperatorRuntime) -> None:
            raise InputError("Secret pacekeeper-system/pacekeeper-ca: tls.key is missing")

        serve(work)
        assert await entry._run_process(Settings()) == 2
        assert "tls.key is missing" in capsys.readouterr().err
