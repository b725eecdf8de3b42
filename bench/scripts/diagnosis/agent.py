"""The sidecar's eyes, without its voice: `python -m bench.scripts.diagnosis.agent NUMBER`, in a host's network.

Once a second it writes what a sidecar would answer to a request for everything.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pacekeeper.runtime import Runtime, read_json, write_json
from pacekeeper.sidecar.ranks import RankRings
from pacekeeper_analysis.reports import Heartbeat

WINDOW_STEPS = 32


def main(number: int) -> None:
    runtime, worker = Runtime.from_environment(), os.environ["PACEKEEPER_WORKER"]
    path = Path(os.environ["FOLDER"]) / f"evidence-{number}.json"
    rings = RankRings(runtime, WINDOW_STEPS)
    due = time.monotonic()
    while True:
        runtime.contact.touch()
        if time.monotonic() >= due:
            due += 1.0
            beat = Heartbeat.from_json(read_json(runtime.heartbeat) or {})
            write_json(path, rings.evidence("all", worker, beat.round).to_json())
        time.sleep(0.1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
