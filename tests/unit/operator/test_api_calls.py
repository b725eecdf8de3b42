"""Calls to the API server: long lists come in pages, and concurrent calls are bounded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from pacekeeper_operator.kube import client as calls
from pacekeeper_operator.kube.client import (
    LIST_PAGE_OBJECTS,
    MAX_CONCURRENT_API_CALLS,
    NODE_OBJECTS,
    PODS,
    ApiResponse,
    ApiServerBusy,
    Cluster,
    HttpConnection,
    NotFound,
    Object,
    Objects,
    ResourceVersionExpired,
    WatchEvent,
)
from pacekeeper_operator.kube.leader_election import NotLeading


class PagingApiServer:
    """An API server that has `nodes` nodes, and returns pages of the requested limit."""

    def __init__(self, nodes: int, forgets_after: int = -1) -> None:
        self.nodes, self.forgets_after = nodes, forgets_after
        self.queries: list[Mapping[str, str]] = []

    async def request(
        self, method: str, path: str, query: Mapping[str, str], body: Object | Objects | None, style: str
    ) -> ApiResponse:
        assert (method, path, body, style) == ("GET", "/api/v1/nodes", None, "application/json")
        self.queries.append(dict(query))
        first = int(query.get("continue") or 0)
        if self.forgets_after == len(self.queries) - 1:
            return ApiResponse(410, {"message": "the continue parameter is too old"})
        end = min(first + int(query["limit"]), self.nodes)
        items = [{"metadata": {"name": f"node-{number}"}} for number in range(first, end)]
        left = {"continue": str(end)} if end < self.nodes else {}
        return ApiResponse(200, {"items": items or None, "metadata": {"resourceVersion": "7", **left}})


@pytest.mark.parametrize("nodes", [0, 1, LIST_PAGE_OBJECTS, LIST_PAGE_OBJECTS + 1, 3 * LIST_PAGE_OBJECTS - 1])
async def test_all_pages_are_one_list(nodes: int) -> None:
    pages = PagingApiServer(nodes)
    found = await Cluster(cast(Any, pages)).list_with_version(NODE_OBJECTS, labels="a=b")
    assert [item["metadata"]["name"] for item in found.items] == [f"node-{number}" for number in range(nodes)]
    assert found.version == 7
    assert len(pages.queries) == max(1, -(-nodes // LIST_PAGE_OBJECTS))
    assert all(query["labelSelector"] == "a=b" for query in pages.queries)


async def test_a_list_that_ends_in_an_error_returns_nothing() -> None:
    with pytest.raises(kopf.TemporaryError, match="too old"):
        await Cluster(cast(Any, PagingApiServer(2 * LIST_PAGE_OBJECTS, forgets_after=1))).list(NODE_OBJECTS)


class TestWatch:
    """The real client uses real HTTP."""

    async def collect_watch_events(
        self, *parts: bytes, status: int = 200, pause_seconds: float = 0.0, version: int = 5
    ) -> list[WatchEvent]:
        """Collect the events of a watch whose response consists of `parts` and ends after a pause."""

        async def answer(request: web.Request) -> web.StreamResponse:
            assert request.path == "/api/v1/namespaces/ns/pods"
            assert request.query["resourceVersion"] == str(version)
            assert (request.query["watch"], request.query["allowWatchBookmarks"]) == ("true", "true")
            assert request.query["labelSelector"] == "a=b"
            response = web.StreamResponse(status=status)
            await response.prepare(request)
            for part in parts:
                await response.write(part)
            await asyncio.sleep(pause_seconds)
            return response

        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", answer)
        async with TestServer(app) as server:
            configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
            async with ApiClient(configuration) as connection:
                watch = Cluster(HttpConnection(connection)).watch(PODS, version, "ns", labels="a=b")
                return [change async for change in watch]

    @staticmethod
    def build_event_line(kind: str, body: Object) -> bytes:
        return json.dumps({"type": kind, "object": body}).encode() + b"\n"

    async def test_events_arrive_in_chunks_of_any_size(self) -> None:
        pod = {"metadata": {"name": "a", "resourceVersion": "6"}, "data": "x" * 300_000}
        gone = {"metadata": {"name": "a", "resourceVersion": "7"}}
        nothing = {"metadata": {"resourceVersion": "9"}}
        data = (
            self.build_event_line("MODIFIED", pod)
            + self.build_event_line("DELETED", gone)
            + self.build_event_line("BOOKMARK", nothing)
        )
        events = await self.collect_watch_events(*[data[at : at + 10_007] for at in range(0, len(data), 10_007)])
        assert events == [WatchEvent(pod, 6), WatchEvent(gone, 7, deleted=True), WatchEvent(None, 9)]

    async def test_a_version_that_is_too_old_raises_expired(self) -> None:
        status = {"code": 410, "message": "too old resource version"}
        with pytest.raises(ResourceVersionExpired, match="too old"):
            await self.collect_watch_events(self.build_event_line("ERROR", status))
        with pytest.raises(ResourceVersionExpired, match="too old"):
            await self.collect_watch_events(json.dumps(status).encode(), status=410)

    async def test_other_errors_of_a_watch_are_those_of_any_call(self) -> None:
        with pytest.raises(ApiServerBusy, match="later"):
            await self.collect_watch_events(json.dumps({"message": "later"}).encode(), status=429)
        with pytest.raises(NotFound):
            await self.collect_watch_events(b"no such page", status=404)
        with pytest.raises(kopf.TemporaryError, match="without an event"):
            await self.collect_watch_events(b"who are you?\n")

    async def test_a_silent_watch_ends_with_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "WATCH_IDLE_TIMEOUT_SECONDS", 0.05)
        with pytest.raises(kopf.TemporaryError, match="does not answer a watch"):
            await self.collect_watch_events(
                self.build_event_line("BOOKMARK", {"metadata": {"resourceVersion": "9"}}), pause_seconds=5.0
            )


class BlockingClient:
    """A client of the API server whose responses wait for `answer`."""

    def __init__(self) -> None:
        self.configuration = self.rest_client = self
        self.host = "https://api"
        self.under_way = self.calls = 0
        self.answer = asyncio.Event()
        self.status, self.headers = 200, dict[str, str]()

    async def update_params_for_auth(self, *_: Any) -> None:
        return

    async def request(self, *_: Any, **__: Any) -> BlockingClient:
        self.calls += 1
        self.under_way += 1
        assert self.under_way <= MAX_CONCURRENT_API_CALLS
        await self.answer.wait()
        self.under_way -= 1
        return self

    async def read(self) -> bytes:
        return b"{}"


async def test_concurrent_calls_are_bounded_and_all_complete() -> None:
    client = BlockingClient()
    cluster = Cluster(HttpConnection(cast(Any, client)))
    calls = [
        asyncio.create_task(cluster.get(NODE_OBJECTS, f"node-{number}"))
        for number in range(3 * MAX_CONCURRENT_API_CALLS)
    ]
    for _ in range(100):
        await asyncio.sleep(0)
    assert client.under_way == client.calls == MAX_CONCURRENT_API_CALLS
    client.answer.set()
    assert await asyncio.wait_for(asyncio.gather(*calls), 60) == [{}] * len(calls)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("Sun, 06 Nov 1994 08:49:37 GMT", [784111777.0]),
        ("", []),
        ("soon", []),
        ("Sun, 99 Nov 1994 08:49:37 GMT", []),
    ],
)
async def test_responses_carry_the_servers_clock(header: str, seconds: list[float]) -> None:
    client = BlockingClient()
    client.headers["Date"] = header
    client.answer.set()
    cluster, dates = Cluster(HttpConnection(cast(Any, client))), list[float]()
    cluster.on_server_date = dates.append
    await cluster.get(NODE_OBJECTS, "node")
    assert dates == seconds


async def test_a_queued_write_is_not_sent_once_the_lease_is_lost() -> None:
    client, leads = BlockingClient(), True

    def require() -> None:
        if not leads:
            raise NotLeading("another may lead", delay=1)

    cluster = Cluster(HttpConnection(cast(Any, client)))
    cluster.before_write = require
    before = [
        asyncio.create_task(cluster.get(NODE_OBJECTS, f"node-{number}")) for number in range(MAX_CONCURRENT_API_CALLS)
    ]
    write = asyncio.create_task(cluster.delete(PODS, "pod", "ns"))
    for _ in range(100):
        await asyncio.sleep(0)
    leads = False
    client.answer.set()
    await asyncio.gather(*before)
    with pytest.raises(NotLeading):
        await write
    assert client.calls == MAX_CONCURRENT_API_CALLS
