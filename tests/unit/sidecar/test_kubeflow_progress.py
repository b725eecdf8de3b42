"""Progress that an unchanged script reports: what is read of it, and hostile clients."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pacekeeper.sidecar import kubeflow_progress
from pacekeeper.sidecar.kubeflow_progress import (
    MAX_PROGRESS_BODY_BYTES,
    MAX_PROGRESS_CONNECTIONS,
    MAX_PROGRESS_HEAD_BYTES,
    ProgressServer,
    read_progress,
)
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.watched_report import ReportedProgress

BEFORE = ReportedProgress(40, 60, 90)
Received = list[ReportedProgress]


def encode(**status: Any) -> bytes:
    return json.dumps({"trainerStatus": {"lastUpdatedTime": "2026-01-01T00:00:00Z", **status}}).encode()


def build_metric(name: str, value: object) -> dict[str, object]:
    return {"name": name, "value": value}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"progressPercentage": 0, "metrics": [build_metric("total_steps", "80")]}, ReportedProgress(0, 80, None)),
        ({"progressPercentage": 0}, ReportedProgress(0, None, None)),  # another training begins
        (
            {"progressPercentage": 41, "estimatedRemainingSeconds": 88, "metrics": [build_metric("loss", "0.5")]},
            ReportedProgress(41, 60, 88),
        ),
        ({"progressPercentage": 41.0, "metrics": [build_metric("total_steps", "1" * 99)]}, ReportedProgress(41, 60)),
        (
            {"metrics": [{}, 7, build_metric("total_steps", 8), build_metric("total_steps", "²")]},
            ReportedProgress(40, 60),
        ),
    ],
)
def test_a_report_changes_what_it_contains(status: dict[str, Any], expected: ReportedProgress) -> None:
    assert read_progress(encode(**status), BEFORE) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"trainerStatus": 1}',
        b"[" * 60_000,
        encode(progressPercentage=101),
        encode(progressPercentage=True),
        encode(progressPercentage="7"),
        encode(progressPercentage=float("nan")),
        encode(estimatedRemainingSeconds=1e300),
        encode(estimatedRemainingSeconds=-1),
    ],
)
def test_a_bad_report_is_an_input_error(body: bytes) -> None:
    with pytest.raises(InputError):
        read_progress(body, BEFORE)


@asynccontextmanager
async def serve() -> AsyncIterator[tuple[int, Received]]:
    received: Received = []
    server = ProgressServer(received.append)
    try:
        yield await server.start(0), received
    finally:
        server.close()


async def send(port: int, data: bytes) -> bytes:
    """Return the answer; empty: the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_request_as_transformers_sends_it_is_answered() -> None:
    async with serve() as (port, received):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}",
            data=encode(progressPercentage=7),
            headers={"Authorization": "Bearer pacekeeper", "Content-Type": "application/json"},
            method="POST",
        )

        def post() -> int:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)

        assert await asyncio.to_thread(post) == 200
        assert received == [ReportedProgress(7)]


def build_request(body: bytes, *lines: str) -> bytes:
    return "\r\n".join(["POST / HTTP/1.1", *lines, "", ""]).encode() + body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (build_request(b"{}", "Content-Length: 2"), b"400"),
        (build_request(b"", f"Content-Length: {MAX_PROGRESS_BODY_BYTES + 1}"), b"413"),
        (build_request(b"", "Content-Length: " + "9" * 5000), b"413"),
        (build_request(b"", "Content-Length: -1"), b"400"),
        (build_request(b"", "Content-Length: 1", "Content-Length: 2"), b"400"),
        (build_request(b"", "Transfer-Encoding: chunked"), b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"\x00" * (2 * MAX_PROGRESS_HEAD_BYTES), b""),
    ],
)
async def test_a_request_that_is_no_report_is_refused(data: bytes, status: bytes) -> None:
    async with serve() as (port, received):
        answer = await send(port, data)
        assert answer.partition(b" ")[2][:3] == status
        assert received == []


async def test_slow_clients_are_dropped_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow_progress, "PROGRESS_REQUEST_SECONDS", 0.2)
    async with serve() as (port, received):
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_PROGRESS_CONNECTIONS)]
        ends = await asyncio.gather(*(reader.read() for reader, _ in slow))
        assert ends == [b""] * MAX_PROGRESS_CONNECTIONS
        body = encode(progressPercentage=7)
        assert (await send(port, build_request(body, f"Content-Length: {len(body)}"))).startswith(b"HTTP/1.1 200")
        assert received == [ReportedProgress(7)]
        for _, writer in slow:
            writer.close()
