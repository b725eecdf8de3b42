"""`python -m testing.network.open_connection`: a connection as the operator holds it, until the other side has gone.

With an address: the other side, which sends nothing. The kernels send keepalive probes sooner than in the product.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time

from pacekeeper_operator.endpoint import connections
from pacekeeper_operator.endpoint.connections import EndpointConnections, open_listener

PORT = 8443
KEEPALIVE_SECONDS, KEEPALIVE_TRIES = 1, 2
SILENCE_TIMEOUT_SECONDS = KEEPALIVE_SECONDS + KEEPALIVE_TRIES


async def hold_connection() -> None:
    endpoint_connections = EndpointConnections()
    with open_listener("", PORT) as listener:
        print("listens", flush=True)
        connection = await endpoint_connections.accept(listener)
        print("holds", flush=True)
        reader, writer = await asyncio.open_connection(sock=connection)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        print(connection.silent_seconds, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        connections.TCP_KEEPALIVE_SECONDS, connections.TCP_KEEPALIVE_TRIES = KEEPALIVE_SECONDS, KEEPALIVE_TRIES
        connections.PEER_SILENCE_TIMEOUT_SECONDS = SILENCE_TIMEOUT_SECONDS
        asyncio.run(hold_connection())
    else:
        with socket.create_connection((sys.argv[1], PORT)):
            time.sleep(600)
