"""A launcher's part in finding paths, on a host of `fabric.leaf_spine`.

    python -m tests.support.path_host ADDRESS FOLDER

Reads a WorkerPlan, and says when it is ready; reads a word, and begins the round. From then on it prints, for each time
that it reads (seconds, as the launcher's clock would show), what its ranks' shims are told and what has become of the
paths.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pacekeeper.launcher.path_finder import PathFinder
from pacekeeper.runtime import Runtime
from pacekeeper_analysis.plan import WorkerPlan


async def main(address: str, folder: Path) -> None:
    runtime, found = Runtime(folder).make(), asyncio.Event()
    finder = PathFinder(runtime, address, no_shim="", labels=True, on_found=found.set)
    plan = WorkerPlan.from_json(await _read())
    if not finder.find(plan, seen=0):
        await found.wait()
    _print("ready")
    await _read()
    finder.put_in_force(plan)
    _print("begun")
    while True:
        finder.look(await _read())
        told = [runtime.paths_of(local).read_text().splitlines() for local in range(len(plan.ranks))]
        ports = [each.ports for each in finder._found.values()]
        _print({"told": told, "found": ports, "reports": [asdict(report) for report in finder.reports()]})


async def _read() -> Any:
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if not line:
        sys.exit(0)
    return json.loads(line)


def _print(content: object) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
