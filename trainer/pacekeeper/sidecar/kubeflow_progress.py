"""Kubeflow Trainer's progress protocol on the pod's loopback: what an unchanged Hugging Face script reports of itself.

transformers reports to the server that `KUBEFLOW_TRAINER_SERVER_URL` names, from rank 0, between two steps. So each
request is answered at once. Every process of the pod can connect: connections, sizes, and times are bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.watched_report import (
    MAX_REPORTED_SECONDS,
    MAX_REPORTED_STEPS,
    ReportedProgress,
)

MAX_PROGRESS_HEAD_BYTES, MAX_PROGRESS_BODY_BYTES = 8 << 10, 64 << 10
"""Limits of a request's head and of its body, which holds the script's metrics."""
MAX_PROGRESS_CONNECTIONS = 8
PROGRESS_REQUEST_SECONDS = 5.0
"""Time for a request: transformers waits as long for the answer."""
TOTAL_STEPS_METRIC = "total_steps"
"""Metric of the first report of a training."""
LOOPBACK_ADDRESS = "127.0.0.1"

log = logging.getLogger(__name__)


class ProgressServer:
    """Receives reports of progress, and passes on the newest one."""

    def __init__(self, receive: Callable[[ReportedProgress], None]) -> None:
        self._receive = receive
        self._progress = ReportedProgress()
        self._connections = 0
        self._server: asyncio.Server | None = None

    async def start(self, port: int) -> int:
        """Listen on the loopback, and return the port; 0 chooses one. Raises OSError."""
        self._server = await asyncio.start_server(
            self._serve, LOOPBACK_ADDRESS, port, limit=MAX_PROGRESS_HEAD_BYTES, backlog=MAX_PROGRESS_CONNECTIONS
        )
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        self._connections += 1
        try:
            if self._connections <= MAX_PROGRESS_CONNECTIONS:
                async with asyncio.timeout(PROGRESS_REQUEST_SECONDS):
                    status = await self._answer(reader)
                    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                    await writer.drain()
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
            pass  # it has gone, is too slow, or sends too much
        finally:
            self._connections -= 1
            with suppress(OSError):
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> str:
        """Read a request, and return the status line's end."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b" ")
        fields = [line.partition(b":") for line in rest.split(b"\r\n")[1:]]
        lengths = [value.strip() for name, _, value in fields if name.strip().lower() == b"content-length"]
        if method not in (b"POST", b"PUT", b"PATCH") or len(lengths) != 1 or not lengths[0].isdigit():
            return "400 Bad Request"
        length = int(lengths[0][:16])
        if length > MAX_PROGRESS_BODY_BYTES:
            return "413 Content Too Large"
        body = await reader.readexactly(length)
        try:
            self._progress = read_progress(body, self._progress)
        except InputError as error:
            log.debug("a report of progress is ignored: %s", error)
            return "400 Bad Request"
        self._receive(self._progress)
        return "200 OK"


def read_progress(body: bytes, before: ReportedProgress) -> ReportedProgress:
    """Parse a report. `before`: the last one, since only the first report of a training has its number of steps.

    Raises InputError.
    """
    report = parse_json(body, "trainerStatus")
    status = report.get("trainerStatus") if isinstance(report, dict) else None
    if not isinstance(status, dict):
        raise InputError("trainerStatus: must be an object")
    percent = _read_count(status, "progressPercentage", 100)
    total = _read_total_steps(status.get("metrics"))
    begins = percent == 0
    return ReportedProgress(
        before.percent if percent is None else percent,
        total if total is not None or begins else before.total_steps,
        _read_count(status, "estimatedRemainingSeconds", MAX_REPORTED_SECONDS),
    )


def _read_count(status: dict[str, Any], name: str, limit: int) -> int | None:
    """Return a number from 0 to `limit`; None: there is none. Raises InputError."""
    value = status.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        raise InputError(f"trainerStatus.{name}: must be a number from 0 to {limit}")
    return int(value)


def _read_total_steps(metrics: object) -> int | None:
    """Return the number of steps among the metrics; None: it is not there, or is none."""
    if not isinstance(metrics, list):
        return None
    values = (
        item.get("value") for item in metrics if isinstance(item, dict) and item.get("name") == TOTAL_STEPS_METRIC
    )
    text = next((value for value in values if isinstance(value, str)), "")[:20]
    number = int(text) if text.isascii() and text.isdigit() else 0
    return number if 0 < number <= MAX_REPORTED_STEPS else None
