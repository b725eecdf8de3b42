"""Prometheus' answers over HTTP: from exporters of metrics, and from proxies in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pacekeeper_operator.observe.prometheus import LinkRatesResult, PrometheusClient, PrometheusSample

from ..border import Border, Enter
from ..mutations import mutate_text, to_bytes

NOW = 1000.0
JOB = {"namespace": "ns", "trainingjob": "j"}


def build_row(query: str, value: object, **labels: str) -> dict[str, Any]:
    return {"metric": {"pacekeeper_query": query, **labels}, "value": [NOW, str(value)]}


ROWS = [
    build_row("ranks", 4, **JOB),
    build_row("min_step", 17, **JOB),
    build_row("ranks", 2, namespace="ns", trainingjob="k"),
    build_row("scrape_age", "NaN", **JOB),
    build_row("gpu", 79, __name__="DCGM_FI_DEV_XID_ERRORS", Hostname="node-1", gpu="2", UUID="GPU-1"),
    build_row("node_from_target", 8),
    build_row("RowsPending", 1, node="node-1", gpu="0", UUID="GPU-0"),
    build_row("", 4e11, leaf="l1", spine="s1"),
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
def query_prometheus() -> Iterator[Enter]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answering)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"

    async def send_queries() -> tuple[PrometheusSample, LinkRatesResult]:
        prometheus = PrometheusClient(url, "gpus", "Hostname")
        return await prometheus.sample(NOW, [("ns", "j")]), await prometheus.read_link_rates("up")

    def enter(answer: Any) -> object:
        _Answering.body = to_bytes(answer)
        sample, links = asyncio.run(send_queries())  # neither raises for Prometheus' sake
        return sample.get_metrics("ns", "j"), sample.gpu_signs, sorted(links.rates.values()), sample.error, links.error

    try:
        yield enter
    finally:
        server.shutdown()
        server.server_close()


def check_error_length(result: Any, _valid: Any) -> str:
    """Users read the error in a condition."""
    *_, unavailable, error = result
    if max(len(unavailable), len(error)) > 3_000:
        return "its error takes thousands of characters"
    return ""


BORDERS = [
    Border(
        "Prometheus", lambda: [ANSWER], mutate_text, query_prometheus, refusals=(), check=check_error_length, cases=120
    ),
]
