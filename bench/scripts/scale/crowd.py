"""Many sidecars' polls, from one process: real TLS, real HTTP, a token each, and a heartbeat with new steps.

    python -m bench.scripts.scale.crowd <port> <workers> <ranks a worker> <seconds a poll may be held>

Each has one connection, from an address that it shares with a hundred others, and comes back after a failure as a
sidecar does. A heartbeat's step counts the polls that its worker has made.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import ssl
import sys
import time
from dataclasses import replace

from pacekeeper.sidecar.delivery import RetryBackoff
from pacekeeper_analysis.protocol.reports import (
    GpuHealth,
    Heartbeat,
    LauncherState,
    RankMetrics,
    RoundStart,
    StepProgress,
    TrainingReport,
)
from pacekeeper_operator import file_limits
from pacekeeper_operator.api.names import TOKEN_AUDIENCE
from pacekeeper_operator.endpoint.connections import shrink_tls_buffers

from .endpoint import HOST, JOB, VERSION

CONNECTIONS_PER_ADDRESS = 100
TOKEN_BYTES = 1_000
"""Of a service account's token that is bound to a pod."""
CONNECT_SECONDS = 10.0
MAX_CONCURRENT_CONNECTS = 64
"""Connections. Thousands of machines would have a processor each for their handshakes; this is one."""
WAIT_SECONDS, ANSWER_SECONDS = 3.0, 5.0


async def main(port: int, workers: int, ranks: int, hold: float) -> None:
    shrink_tls_buffers()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connect_slots = asyncio.Semaphore(MAX_CONCURRENT_CONNECTS)
    await asyncio.gather(*(_run_sidecar(port, n, ranks, hold, context, connect_slots) for n in range(workers)))


async def _run_sidecar(
    port: int, number: int, ranks: int, hold: float, context: ssl.SSLContext, connect_slots: asyncio.Semaphore
) -> None:
    backoff, polls = RetryBackoff(), 0
    heartbeat, token = _build_heartbeat(number, ranks), _build_token(number)
    address = f"127.1.{number // CONNECTIONS_PER_ADDRESS // 250}.{1 + number // CONNECTIONS_PER_ADDRESS % 250}"
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with connect_slots, asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    HOST, port, ssl=context, server_hostname=HOST, local_addr=(address, 0), limit=2**12
                )
            try:
                while True:
                    polls += 1
                    body = heartbeat.replace(b"-7", str(polls).encode(), 1)
                    writer.write(_build_request(token, hold, body) + body)
                    async with asyncio.timeout(hold + ANSWER_SECONDS):
                        head = await reader.readuntil(b"\r\n\r\n")
                    status = int(head.split(b" ", 2)[1])
                    if status != 204:
                        break
                    backoff.reset()
            finally:
                writer.close()
        await backoff.sleep("no plan", OSError())


def _build_request(token: str, hold: float, body: bytes) -> bytes:
    return (
        f"POST /v1/plan?after={VERSION}&wait={WAIT_SECONDS:g}&hold={hold:g} HTTP/1.1\r\nHost: operator:8443\r\n"
        f"Accept: */*\r\nAccept-Encoding: gzip, deflate\r\nUser-Agent: Python/3.11\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


def _build_heartbeat(number: int, ranks: int) -> bytes:
    """With -7 where the step belongs."""
    metrics = RankMetrics(0, 32, 0.25131, 0.20417, 0.0063803, 0.047142, 32, 0.24988, 0.0)
    gpus = tuple(GpuHealth(f"GPU-{number:08}-{gpu:04}-4f6b-9f5c-0123456789ab") for gpu in range(ranks))
    heartbeat = Heartbeat(
        worker=f"{JOB}-w{number}-0",
        state=LauncherState.RUNNING,
        plan_version=VERSION,
        membership=1,
        round=1,
        start=RoundStart(started_at=time.time(), first_step_at=time.time()),
        progress=StepProgress(step=-7),
        training=TrainingReport(managed=True, sync_mode="Sync"),
        rendezvous_port=31000,
        probe_port=31001,
        rank_metrics=tuple(replace(metrics, rank=number * ranks + rank) for rank in range(ranks)),
        gpus=gpus,
        sent_at=time.time(),
    )
    return json.dumps(heartbeat.to_json()).encode()


def _build_token(number: int) -> str:
    name, until = f"{JOB}-w{number}-0", time.time() + 86_400
    claims = {"aud": [TOKEN_AUDIENCE], "exp": until, "name": name, "uid": f"uid-{number}"}
    text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{text}.{'s' * max(0, TOKEN_BYTES - len(text))}"


if __name__ == "__main__":
    file_limits.raise_file_limit()
    logging.disable()  # each would report that there is no answer yet
    port, workers, ranks = map(int, sys.argv[1:4])
    asyncio.run(main(port, workers, ranks, float(sys.argv[4])))
