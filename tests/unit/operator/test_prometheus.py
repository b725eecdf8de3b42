"""Prometheus as the operator asks it, over real HTTP; only the answers are made up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from pacekeeper_operator.observation import NOT_ASKED, GpuValue
from pacekeeper_operator.observe.prometheus import Prometheus, Sample

NOW = 1000.0
JOB = {"namespace": "ns", "trainingjob": "j"}


class FakePrometheus(BaseHTTPRequestHandler):
    rows: list[dict[str, Any]] = []  # noqa: RUF012  # set anew by each test
    status = 200
    queries: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.queries.append(parse_qs(urlparse(self.path).query)["query"][0])
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "success", "data": {"result": self.rows}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    FakePrometheus.status = 200
    FakePrometheus.queries.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakePrometheus)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def row(figure: str, value: object, **labels: str) -> dict[str, Any]:
    return {"metric": {"figure": figure, **labels}, "value": [NOW, str(value)]}


async def test_one_request_answers_for_all_jobs(url: str) -> None:
    FakePrometheus.rows = [
        row("slowdown", 1.5, **JOB),
        row("pace", 2.0, **JOB),
        row("pace", 1.0, namespace="ns", trainingjob="other"),
        row("behind", "NaN", **JOB),
        row("slowest", 0.02, rank="3", **JOB),
        row("gpu", 79, __name__="DCGM_FI_DEV_XID_ERRORS", Hostname="node-1", gpu="2"),
    ]
    sample = await Prometheus(url, "Hostname").sample(NOW)
    assert len(FakePrometheus.queries) == 1
    metrics = sample.of("ns", "j")
    assert (metrics.slowdown, metrics.pace, metrics.slowest_rank) == (1.5, 2.0, 3)
    assert metrics.behind is None  # not a number is no figure
    assert sample.of("ns", "other").pace == 1.0
    assert metrics.gpu == (GpuValue("node-1", "2", "DCGM_FI_DEV_XID_ERRORS", 79.0),)
    assert not metrics.unavailable


async def test_an_error_is_an_answer_too(url: str) -> None:
    FakePrometheus.status = 503
    sample = await Prometheus(url, "Hostname").sample(NOW)
    assert "does not answer" in sample.unavailable


async def test_nobody_there_is_an_answer_too() -> None:
    sample = await Prometheus("http://127.0.0.1:9", "Hostname").sample(NOW)
    assert "does not answer" in sample.unavailable


async def test_none_configured_says_how_to() -> None:
    sample = await Prometheus("", "Hostname").sample(NOW)
    assert "prometheus.url" in sample.unavailable


def test_what_was_never_asked_is_not_known() -> None:
    assert Sample().of("ns", "j").unavailable == NOT_ASKED
