"""A launcher's part in finding paths, on a host of `fabric.leaf_spine`.

    python -m testing.network.path_finder_host ADDRESS FOLDER

Reads a WorkerPlan, and prints when it is ready; reads a line, and begins the round. From then on it prints, for each
time that it reads (seconds, as the launcher's clock would show), what its ranks' shims get and what has become of the
paths.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pacekeeper.launcher.network.path_finder import PathFinder
from pacekeeper.runtime_folder import RuntimeFolder
from pacekeeper_analysis.protocol.plan import WorkerPlan


async def main(address: str, folder: Path) -> None:
    runtime, paths_found = RuntimeFolder(folder).create(), asyncio.Event()
    finder = PathFinder(runtime, address, no_shim="", labels=True, on_found=paths_found.set)
    plan = WorkerPlan.from_json(await _read_message())
    if not finder.ensure_searched(plan, last_round=0):
        await paths_found.wait()
    _print_message("ready")
    await _read_message()
    finder.apply(plan)
    _print_message("begun")
    while True:
        finder.check_connections(await _read_message())
        path_lines = [runtime.paths_file(local).read_text().splitlines() for local in range(len(plan.ranks))]
        ports = [path.ports for path in finder._found.values()]
        _print_message(
            {"lines": path_lines, "found": ports, "reports": [asdict(report) for report in finder.build_reports()]}
        )


async def _read_message() -> Any:
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if not line:
        sys.exit(0)
    return json.loads(line)


def _print_message(content: object) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
