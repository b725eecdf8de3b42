"""`python -m pacekeeper.checkpointing.server`: runs until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from pacekeeper_analysis.errors import InputError

from .claim_files import ClaimFiles
from .job_secret import ServerSettings, obtain_secret
from .server import CheckpointServer


async def serve_claim(settings: ServerSettings, secret: str) -> None:
    """Serve the folder until SIGTERM. Raises OSError."""
    files = ClaimFiles(settings.folder)
    server = CheckpointServer(files, secret)
    terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
    logging.info("serving %s at port %d", settings.folder, await server.start(None, settings.port))
    await terminated.wait()
    await server.close()
    files.close()


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as process 1, it would otherwise ignore it while it waits
    try:
        settings = ServerSettings.from_environment()
        asyncio.run(serve_claim(settings, obtain_secret(settings)))
    except InputError as error:
        print(f"pacekeeper.checkpointing.server: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"pacekeeper.checkpointing.server: the claim cannot be served: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
