"""A checkpoint server in a thread of the test, over a folder that stands for a claim."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pacekeeper.checkpointing.server.claim_files import ClaimFiles
from pacekeeper.checkpointing.server.server import CheckpointServer
from pacekeeper_analysis.protocol import plan


class ClaimServer:
    """The server, which a test can end and start again. It then has another port, as a pod has another address."""

    def __init__(self, folder: Path) -> None:
        self.files = ClaimFiles(str(folder))
        self.secret = secrets.token_hex(32)
        self.requests = list[str]()
        self.address: plan.CheckpointEndpoint | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: CheckpointServer | None = None

    def start(self) -> None:
        self._server = CheckpointServer(self.files, self.secret)
        port = asyncio.run_coroutine_threadsafe(self._server.start("127.0.0.1", 0), self._loop).result(30)
        self.address = plan.CheckpointEndpoint(self.secret, "127.0.0.1", port)

    def kill(self) -> None:
        """End the server, whose requests get no answer."""
        assert self._server is not None
        self.address = None
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def serve_claim(folder: Path) -> Iterator[ClaimServer]:
    folder.mkdir(exist_ok=True)
    server = ClaimServer(folder)
    server.start()
    try:
        yield server
    finally:
        if server.address is not None:
            server.kill()
        server.close()
        server.files.close()
