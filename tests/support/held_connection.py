"""`python -m tests.support.held_connection`: a connection as the operator holds it, until the other side has gone.

With an address: the other side, which says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time

from pacekeeper_operator.connections import Connections, listen

PORT = 8443


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
        asyncio.run(hold())
    else:
        with socket.create_connection((sys.argv[1], PORT)):
            time.sleep(600)
