"""`python -m tests.support.held_connection`: a connection as the operator holds it, until the other side has gone.

With an address: the other side, which says nothing. The kernels ask for each other sooner than the product has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time

from pacekeeper_operator import connections
from pacekeeper_operator.connections import Connections, listen

PORT = 8443
KEEPALIVE_SECONDS, KEEPALIVE_TRIES = 1, 2
UNHEARD_SECONDS = KEEPALIVE_SECONDS + KEEPALIVE_TRIES


async def hold() -> None:
    held = Connections()
    with listen("", PORT) as listener:
        print("listens", flush=True)
        connection = await held.accept(listener)
        print("holds", flush=True)
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        print(connection.unheard_seconds, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        connections.KEEPALIVE_SECONDS, connections.KEEPALIVE_TRIES = KEEPALIVE_SECONDS, KEEPALIVE_TRIES
        connections.UNHEARD_SECONDS = UNHEARD_SECONDS
        asyncio.run(hold())
    else:
        with socket.create_connection((sys.argv[1], PORT)):
            time.sleep(600)
