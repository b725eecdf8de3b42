"""How much memory a list and a watch of the API server may take, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import Mock

import aiohttp
import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from pacekeeper_operator.kube import response_limits
from pacekeeper_operator.kube.client import LIST_PAGE_OBJECTS, PODS, Cluster, HttpConnection, Object
from pacekeeper_operator.kube.response_limits import compute_next_limit


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_limits, "PAGE_BYTES", 40_000)
    monkeypatch.setattr(response_limits, "OBJECT_BYTES", 160_000)


class PagingServer:
    """Lists its pods by `limit` and `continue`, as the API server does."""

    def __init__(self, *sizes: int) -> None:
        self.pods: list[Object] = [
            {"metadata": {"name": f"pod-{number}", "resourceVersion": "3"}, "filling": "x" * size}
            for number, size in enumerate(sizes)
        ]
        self.answers: list[tuple[int, int]] = []  # requested limit, bytes of the answer
        self.offsets: list[int] = []  # the offset of each answer

    async def answer(self, request: web.Request) -> web.Response:
        first, limit = int(request.query.get("continue") or 0), int(request.query["limit"])
        assert request.query["labelSelector"] == "a=b"
        assert request.headers["Accept-Encoding"] == "identity"
        rest = {"continue": str(first + limit)} if first + limit < len(self.pods) else {}
        body = {"metadata": {"resourceVersion": "7", **rest}, "items": self.pods[first : first + limit]}
        text = json.dumps(body)
        self.answers.append((limit, len(text)))
        self.offsets.append(first)
        return web.Response(text=text, content_type="application/json")

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Cluster]:
        app = web.Application()
        app.router.add_get("/api/v1/pods", self.answer)
        async with TestServer(app) as server:
            configuration = Configuration(host=str(server.make_url("")).rstrip("/"))
            configuration.client_session_kwargs = response_limits.build_session_options()
            async with ApiClient(configuration) as connection:
                yield Cluster(HttpConnection(connection))

    async def read(self, cluster: Cluster) -> list[str]:
        return list(await cluster.collect(PODS, lambda pod: str(pod["metadata"]["name"]), labels="a=b"))

    @property
    def names(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods]


async def test_small_objects_arrive_in_one_page() -> None:
    server = PagingServer(*[10] * 50)
    async with server.connect() as cluster:
        assert await server.read(cluster) == server.names
    assert [limit for limit, _ in server.answers] == [LIST_PAGE_OBJECTS]


async def test_pages_of_large_objects_shrink_and_the_next_list_begins_with_that_size() -> None:
    server = PagingServer(*[15_000] * 20)
    async with server.connect() as cluster:
        assert await server.read(cluster) == server.names
        tries = len(server.answers)
        assert await server.read(cluster) == server.names
    assert all(size <= 40_000 for limit, size in server.answers[tries:])
    assert any(size > 40_000 for _, size in server.answers[:tries]), "these were not read to their end"


async def test_a_large_object_among_small_ones_has_its_own_page() -> None:
    server = PagingServer(*[100] * 100, 120_000, *[100] * 100)
    async with server.connect() as cluster:
        assert await server.read(cluster) == server.names
    assert (1, max(size for limit, size in server.answers if limit == 1)) in server.answers


async def test_a_page_that_is_too_large_is_requested_again_at_its_offset() -> None:
    """The token of the page before stays, and only the limit changes."""
    server = PagingServer(*[100] * LIST_PAGE_OBJECTS, *[15_000] * 20)
    async with server.connect() as cluster:
        assert await server.read(cluster) == server.names
    again = [offset for offset, (_, size) in zip(server.offsets, server.answers, strict=True) if size > 40_000]
    assert again, "some page was too large"
    assert server.offsets == sorted(server.offsets), "no list begins again"
    assert all(server.offsets.count(offset) > 1 for offset in again)


async def test_an_object_beyond_the_limit_of_etcd_is_an_error_that_names_its_kind() -> None:
    server = PagingServer(10, 200_000)
    async with server.connect() as cluster:
        with pytest.raises(kopf.TemporaryError, match=r"an object of /api/v1/pods has more than 160,000 bytes"):
            await server.read(cluster)


async def test_no_more_than_one_page_is_in_memory() -> None:
    server = PagingServer(*[15_000] * 6)
    pages: list[list[Object]] = []
    async with server.connect() as cluster:
        async for page in cluster.list_pages(PODS, labels="a=b"):
            assert not any(pages), "the earlier pages are released"
            pages.append(page.items)


@pytest.mark.parametrize(
    ("limit", "size", "following"),
    [(500, None, 125), (3, None, 1), (1, None, 1), (500, 40_000, 250), (10, 400, 500), (1, 160_000, 1), (1, 0, 20_000)],
)
def test_a_page_is_sized_by_the_last_one(limit: int, size: int | None, following: int) -> None:
    assert compute_next_limit(limit, size) == following


class TestLines:
    async def read(self, *parts: bytes) -> list[bytes]:
        reader = aiohttp.StreamReader(Mock(_reading_paused=False), 2**16)
        for part in parts:
            reader.feed_data(part)
        reader.feed_eof()
        return [line async for line in response_limits.read_lines(reader)]

    async def test_lines_may_arrive_in_any_pieces(self) -> None:
        assert await self.read(b"a", b"b\nc", b"\n", b"d\ne\n") == [b"ab", b"c", b"d", b"e"]

    async def test_a_line_without_an_end_is_refused(self) -> None:
        with pytest.raises(aiohttp.ClientPayloadError, match="more than"):
            await self.read(*[b"x" * 50_000] * 5)
