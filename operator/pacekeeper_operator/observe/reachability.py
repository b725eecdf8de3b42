"""The operator's own look at a worker and its node: is anybody there?"""

from __future__ import annotations

import asyncio

from ..api import METRICS_PORT

TIMEOUT_SECONDS = 0.4
TRIES = 2
"""The second try is the retransmission that a lost packet deserves."""
KUBELET_PORT = 10250


async def reaches_worker(address: str, port: int = METRICS_PORT) -> bool:
    """Whether the sidecar's port (`manifests.metrics_port`) can be connected to."""
    return await _reaches(address, port)


async def reaches_node(address: str) -> bool:
    """Whether the kubelet's port can be connected to."""
    return await _reaches(address, KUBELET_PORT)


async def _reaches(address: str, port: int) -> bool:
    """A refused connection is an answer too: somebody is there."""
    for _ in range(TRIES):
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                _, writer = await asyncio.open_connection(address, port)
                writer.close()
            return True
        except ConnectionRefusedError:
            return True
        except (TimeoutError, OSError):
            continue
    return False
