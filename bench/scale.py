"""How large a cluster one operator can manage: nodes that fail at once, one large job, many small ones.

    make bench NAME=scale                 # every part
    python -m bench.scale whatif          # some parts only
    QUICK=1 make bench NAME=scale         # smaller sizes: whether it runs, not what holds

Each part is a module in `scripts/scale`, and gives figures with their goals.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

from .scripts.scale import connections, jobs, nodes, passes, replicas, shadow, whatif, workers
from .scripts.scale.measurement import Measurement

PARTS: dict[str, Callable[[bool], Sequence[Measurement]]] = {
    "nodes": nodes.run_measurements,
    "workers": workers.run_measurements,
    "jobs": jobs.run_measurements,
    "connections": connections.run_measurements,
    "passes": passes.run_measurements,
    "shadow": shadow.run_measurements,
    "whatif": whatif.run_measurements,
    # At the end: it brings up the test cluster, whose programs take time of the cores.
    "replicas": replicas.run_measurements,
}
"""Measures, quick or not; each part logs its progress to standard error."""


def main(arguments: Sequence[str]) -> int:
    if unknown := set(arguments) - set(PARTS):
        print(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends with it
    start, quick, measurements = time.monotonic(), os.environ.get("QUICK") == "1", list[Measurement]()
    for name in arguments or PARTS:
        print(f"-- {name}", file=sys.stderr, flush=True)
        for measurement in PARTS[name](quick):
            print(measurement, file=sys.stderr, flush=True)
            measurements.append(measurement)
    holds = {measurement.name: measurement.holds for measurement in measurements}
    metrics = {measurement.name: measurement.to_json() for measurement in measurements}
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"bench": "scale", "figures": metrics, "holds": holds, "seconds": seconds}))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
