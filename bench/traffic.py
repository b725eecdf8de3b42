"""What planning the traffic of a fabric wins over ECMP and others' planning, and how near it is to what is best.

    make bench NAME=traffic                    # 5 seeds simulated, 20 on the real fabric
    QUICK=1 make bench NAME=traffic            # 1 and 2
    python -m bench.traffic fabric             # one half only: fabric, or simulator

In a simulator at 10,240 GPUs, and on a real fabric of network namespaces (`scripts/traffic`: simulator, real). The real
one needs root, iproute2 and a C compiler: without them the simulator's half runs alone, and the exit status is 77.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from .scripts.traffic.real import FULL, QUICK, measured, missing
from .scripts.traffic.simulator import simulated

HALVES = ("simulator", "fabric")
SEEDS = 5


def main(arguments: Sequence[str]) -> int:
    if unknown := set(arguments) - set(HALVES):
        print(f"no half {', '.join(sorted(unknown))}; there are: {', '.join(HALVES)}", file=sys.stderr)
        return 2
    began, quick, halves = time.monotonic(), os.environ.get("QUICK") == "1", arguments or HALVES
    lacking = missing() if "fabric" in halves else ""
    found: dict[str, Any] = {}
    holds: dict[str, bool] = {}
    if lacking:
        print(f"this machine cannot have the real fabric: {lacking}", file=sys.stderr)
    elif "fabric" in halves:
        found["fabric"], of_fabric = measured(QUICK if quick else FULL)
        holds |= of_fabric
    if "simulator" in halves:
        found["simulator"], of_simulator = simulated(1 if quick else SEEDS)
        holds |= of_simulator
    print(json.dumps({"bench": "traffic", **found, "holds": holds, "seconds": round(time.monotonic() - began, 1)}))
    if not all(holds.values()):
        return 1
    return 77 if lacking else 0


def _interrupt(*_: object) -> NoReturn:
    """So that namespaces and processes are put away."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main(sys.argv[1:]))
