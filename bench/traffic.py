"""What planning the traffic of a fabric wins over ECMP and others' planning, and how near it is to what is best.

    make bench NAME=traffic                    # 5 seeds simulated, 20 on the real fabric
    QUICK=1 make bench NAME=traffic            # 1 and 2
    python -m bench.traffic fabric             # one half only: fabric, or simulator

In a simulator at 10,240 GPUs, and on a real fabric of network namespaces (`scripts/traffic`: simulator, real). The real
one needs root, iproute2 and a C compiler: without them only the simulator's half runs, and the exit status is 77.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from .scripts.traffic.real import FULL, QUICK, explain_missing_tools, measure_fabric
from .scripts.traffic.simulator import run_simulations

HALVES = ("simulator", "fabric")
SEEDS = 5


def main(arguments: Sequence[str]) -> int:
    if unknown := set(arguments) - set(HALVES):
        print(f"no half {', '.join(sorted(unknown))}; there are: {', '.join(HALVES)}", file=sys.stderr)
        return 2
    start, quick, halves = time.monotonic(), os.environ.get("QUICK") == "1", arguments or HALVES
    missing_tools = explain_missing_tools() if "fabric" in halves else ""
    metrics: dict[str, Any] = {}
    holds: dict[str, bool] = {}
    if missing_tools:
        print(f"this machine cannot have the real fabric: {missing_tools}", file=sys.stderr)
    elif "fabric" in halves:
        metrics["fabric"], fabric_holds = measure_fabric(QUICK if quick else FULL)
        holds |= fabric_holds
    if "simulator" in halves:
        metrics["simulator"], simulator_holds = run_simulations(1 if quick else SEEDS)
        holds |= simulator_holds
    print(json.dumps({"bench": "traffic", **metrics, "holds": holds, "seconds": round(time.monotonic() - start, 1)}))
    if not all(holds.values()):
        return 1
    return 77 if missing_tools else 0


def _raise_interrupt(*_: object) -> NoReturn:
    """So that namespaces and processes are put away."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _raise_interrupt)
    sys.exit(main(sys.argv[1:]))
