"""Many sidecars' polls, from one process: real TLS, real HTTP, a token each, and a heartbeat with news of steps.

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

from pacekeeper.sidecar.sidecar import RetryBackoff
from pacekeeper_analysis.reports import GpuHealth, Heartbeat, LauncherState, RankMetrics
from pacekeeper_operator import files
from pacekeeper_operator.api import TOKEN_AUDIENCE
from pacekeeper_operator.connections import shrink_tls_buffers

from .endpoint import HOST, JOB, VERSION

CONNECTIONS_PER_ADDRESS = 100
TOKEN_BYTES = 1_000
"""Of a service account's token that is bound to a pod."""
CONNECT_SECONDS = 10.0
BEGIN_AT_ONCE = 64
"""Connections. Thousands of machines would have a processor each for their handshakes; this is one."""
WAIT_SECONDS, ANSWER_SECONDS = 3.0, 5.0


async def main(port: int, workers: int, ranks: int, hold: float) -> None:
    shrink_tls_buffers()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    begins = asyncio.Semaphore(BEGIN_AT_ONCE)
    await asyncio.gather(*(_poll(port, n, ranks, hold, context, begins) for n in range(workers)))


async def _poll(
    port: int, number: int, ranks: int, hold: float, context: ssl.SSLContext, begins: asyncio.Semaphore
) -> None:
    backoff, polls = RetryBackoff(), 0
    beat, token = _heartbeat(number, ranks), _token(number)
    address = f"127.1.{number // CONNECTIONS_PER_ADDRESS // 250}.{1 + number // CONNECTIONS_PER_ADDRESS % 250}"
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with begins, asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    HOST, port, ssl=context, server_hostname=HOST, local_addr=(address, 0), limit=2**12
                )
            try:
                while True:
                    polls += 1
                    body = beat.replace(b"-7", str(polls).encode(), 1)
                    writer.write(_request(token, hold, body) + body)
                    async with asyncio.timeout(hold + ANSWER_SECONDS):
                        head = await reader.readuntil(b"\r\n\r\n")
                    status = int(head.split(b" ", 2)[1])
                    if status != 204:
                        break
                    backoff.reset()
            finally:
                writer.close()
        await backoff.sleep("no plan", OSError())


def _request(token: str, hold: float, body: bytes) -> bytes:
    return (
        f"POST /v1/plan?after={VERSION}&wait={WAIT_SECONDS:g}&hold={hold:g} HTTP/1.1\r\nHost: operator:8443\r\n"
        f"Accept: */*\r\nAccept-Encoding: gzip, deflate\r\nUser-Agent: Python/3.11\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


def _heartbeat(number: int, ranks: int) -> bytes:
    """With -7 where the step belongs."""
    figures = RankMetrics(0, 32, 0.25131, 0.20417, 0.0063803, 0.047142, 32, 0.24988, 0.0)
    gpus = tuple(GpuHealth(f"GPU-{number:08}-{gpu:04}-4f6b-9f5c-0123456789ab") for gpu in range(ranks))
    beat = Heartbeat(
        worker=f"{JOB}-w{number}-0",
        state=LauncherState.RUNNING,
        plan_version=VERSION,
        membership=1,
        round=1,
        step=-7,
        steered=True,
        sync_mode="Sync",
        meeting_port=31000,
        probe_port=31001,
        round_started_at=time.time(),
        first_step_at=time.time(),
        figures=tuple(replace(figures, rank=number * ranks + rank) for rank in range(ranks)),
        gpus=gpus,
        sent_at=time.time(),
    )
    return json.dumps(beat.to_json()).encode()


def _token(number: int) -> str:
    name, until = f"{JOB}-w{number}-0", time.time() + 86_400
    claims = {"aud": [TOKEN_AUDIENCE], "exp": until, "name": name, "uid": f"uid-{number}"}
    text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"header.{text}.{'s' * max(0, TOKEN_BYTES - len(text))}"


if __name__ == "__main__":
    files.raise_file_limit()
    logging.disable()  # each would say that nobody answers yet
    port, workers, ranks = map(int, sys.argv[1:4])
    asyncio.run(main(port, workers, ranks, float(sys.argv[4])))
