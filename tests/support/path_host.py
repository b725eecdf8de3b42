"""A launcher's part in finding paths, on a host of `fabric.leaf_spine`.

    python -m tests.support.path_host ADDRESS FOLDER

Reads a WorkerPlan, prints the notes to its peers; reads the notes to it, prints what its ranks' shims are told; then
prints, for each time that it reads (seconds, as the launcher's clock would show), what has become of the paths.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from pacekeeper.launcher.meeting import PortNote
from pacekeeper.launcher.paths import PathFinder
from pacekeeper.runtime import Runtime
from pacekeeper_analysis.plan import WorkerPlan


async def main(address: str, folder: Path) -> None:
    runtime, found = Runtime(folder).make(), asyncio.Event()
    finder = PathFinder(runtime, address, no_shim="", labels=True, on_found=found.set)
    plan = WorkerPlan.from_json(await _read())
    if not finder.find(plan, seen=0):
        await found.wait()
    _print([asdict(note) for note in finder.notes])
    notes = await _read()
    finder.put_in_force(plan, [PortNote(**{**note, "ports": tuple(note["ports"])}) for note in notes])
    _print([runtime.paths_of(local).read_text() for local in range(len(plan.ranks))])
    while True:
        finder.look(await _read())
        _print([asdict(report) for report in finder.reports()])


async def _read() -> object:
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if not line:
        sys.exit(0)
    return json.loads(line)


def _print(content: object) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
