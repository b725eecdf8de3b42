"""Prometheus' answers over HTTP: of whoever may export metrics, and of what stands between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pacekeeper_operator.observe.prometheus import LinkRatesResult, PrometheusClient, PrometheusSample

from ..border import Border, Enter
from ..mutations import text, written

NOW = 1000.0
JOB = {"namespace": "ns", "trainingjob": "j"}


def row(figure: str, value: object, **labels: str) -> dict[str, Any]:
    return {"metric": {"figure": figure, **labels}, "value": [NOW, str(value)]}


ROWS = [
    row("ranks", 4, **JOB),
    row("least_step", 17, **JOB),
    row("ranks", 2, namespace="ns", trainingjob="k"),
    row("scrape_age", "NaN", **JOB),
    row("gpu", 79, __name__="DCGM_FI_DEV_XID_ERRORS", Hostname="node-1", gpu="2", UUID="GPU-1"),
    row("named", 8),
    row("RowsPending", 1, node="node-1", gpu="0", UUID="GPU-0"),
    row("", 4e11, leaf="l1", spine="s1"),
]
ANSWER = {"status": "success", "data": {"resultType": "vector", "result": ROWS}}


class _Answering(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(type(self).body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def asked() -> Iterator[Enter]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answering)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"

    async def ask() -> tuple[PrometheusSample, LinkRatesResult]:
        prometheus = PrometheusClient(url, "gpus", "Hostname")
        return await prometheus.sample(NOW, [("ns", "j")]), await prometheus.read_link_rates("up")

    def enter(answer: Any) -> object:
        _Answering.body = written(answer)
        sample, links = asyncio.run(ask())  # neither raises for Prometheus' sake
        return sample.get_metrics("ns", "j"), sample.gpu_signs, sorted(links.rates.values()), sample.error, links.error

    try:
        yield enter
    finally:
        server.shutdown()
        server.server_close()


def in_short(found: Any, _valid: Any) -> str:
    """People read the trouble in a condition."""
    *_, unavailable, trouble = found
    if max(len(unavailable), len(trouble)) > 3_000:
        return "its trouble takes thousands of characters"
    return ""


BORDERS = [
    Border("Prometheus", lambda: [ANSWER], text, asked, refusals=(), judge=in_short, cases=120),
]
