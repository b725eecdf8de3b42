"""A launcher's two ends of a probe, on a host of `namespaces.network`.

    python -m tests.support.probe_host ADDRESS FOLDER

Prints its port; reads a ProbeTask (JSON; an empty line: it is not to measure), measures, prints what it found.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from pacekeeper.launcher.network import bind_socket
from pacekeeper.launcher.probe import LinkProbeServer, LinkProber
from pacekeeper_analysis.plan import ProbeTarget, LinkProbeTask

MEMBERSHIP, SECRET = 3, "5ec2e7" * 8


async def main(address: str, folder: Path) -> None:
    listener = bind_socket(address)
    host = LinkProbeServer()
    host.admit(MEMBERSHIP, SECRET)
    await host.serve(listener)
    print(listener.getsockname()[1], flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if not line.strip():
            continue
        asked = json.loads(line)
        results = folder / f"{asked['name']}-{address}"
        targets = tuple(ProbeTarget(**target) for target in asked["targets"])
        prober = LinkProber(results)
        prober.start_task(LinkProbeTask(asked["name"], targets), MEMBERSHIP, SECRET)
        await prober.wait_done()
        print(results.read_text(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
