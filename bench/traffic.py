"""What planning the traffic of a fabric wins over ECMP and others' planning, and how near it is to what is best.

    make bench NAME=traffic                    # 5 seeds
    QUICK=1 make bench NAME=traffic            # one seed

In a simulator at 10,240 GPUs: `scripts/traffic` has its fabrics, jobs, planners and goals.
"""

from __future__ import annotations

import json
import os
import sys
import time

from .scripts.traffic.simulator import simulated

SEEDS = 5


def main() -> int:
    began = time.monotonic()
    simulator, holds = simulated(1 if os.environ.get("QUICK") == "1" else SEEDS)
    print(
        json.dumps(
            {"bench": "traffic", "simulator": simulator, "holds": holds, "seconds": round(time.monotonic() - began, 1)}
        )
    )
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
