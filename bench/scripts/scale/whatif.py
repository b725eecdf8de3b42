"""Every figure of the what-if analysis of a very large job, from the rows of its trace on (more: `bench.whatif`).

In a process of its own, so that its peak memory is its own; that of making the trace is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.whatif import SYNTHETIC, measure_in_subprocess

from .measurement import Measurement

LARGE, SMALL = "10240 workers", "1024 workers"


def run_measurements(quick: bool) -> Sequence[Measurement]:
    name = SMALL if quick else LARGE
    result, steps = measure_in_subprocess(name), SYNTHETIC[name].steps
    return [
        Measurement(f"what-if, {name}, {steps} steps, every figure", result["total_s"], 3.0, "s", "before: 4.9"),
        Measurement("its memory at the most", result["peak_gb"], 1.0, "GB", "before: 1.5"),
    ]
