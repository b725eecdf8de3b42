"""A launcher's two ends of a probe, on a host of `namespaces.network`.

    python -m testing.network.link_prober_host ADDRESS FOLDER

Prints its port; reads a ProbeTask (JSON; an empty line: it is not to measure), measures, prints what it found.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from pacekeeper.launcher.network.interfaces import bind_socket
from pacekeeper.launcher.network.link_probes import LinkProber, LinkProbeServer
from pacekeeper_analysis.protocol.requests import LinkProbeTask, ProbeTarget

MEMBERSHIP, SECRET = 3, "5ec2e7" * 8


async def main(address: str, folder: Path) -> None:
    listener = bind_socket(address)
    server = LinkProbeServer()
    server.admit(MEMBERSHIP, SECRET)
    await server.serve(listener)
    print(listener.getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if not line.strip():
            continue
        task = json.loads(line)
        results_file = folder / f"{task['name']}-{address}"
        targets = tuple(ProbeTarget(**target) for target in task["targets"])
        prober = LinkProber(results_file)
        prober.start_task(LinkProbeTask(task["name"], targets), MEMBERSHIP, SECRET)
        await prober.wait_done()
        print(results_file.read_text(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
