"""How fast the what-if analysis is, against simulating one scenario after the other.

Published traces (where they are at hand) and synthetic jobs of 1,024 and 10,240 workers, 20 steps of 8
microbatches. Each case runs in a process of its own, so that its peak memory is its own. "Operations a second"
counts operation x scenario as simulated; S_dp of 1,280 ranks is simulated with two columns a rank, and only these
are counted.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pacekeeper_analysis.whatif import (
    IDEAL,
    IDEAL_SCENARIO,
    RECORDED,
    RECORDED_SCENARIO,
    OperationSelection,
    RecordedWindow,
    WhatIfScenario,
    build_window_from_trace,
)
from pacekeeper_analysis.whatif.inputs.parquet import read_metadata, read_parquet
from pacekeeper_analysis.whatif.simulate import Array, simulate_graph
from pacekeeper_analysis.whatif.slowdown_statistics import MERGED_TYPES, WhatIf, analyze_window
from pacekeeper_analysis.whatif.synthetic import JobShape, draw_healthy_seconds, list_operations, make_trace
from pacekeeper_analysis.whatif.trace import JobTrace

PROJECT = Path(__file__).parents[1]
TRACES = Path(os.environ.get("PACEKEEPER_TRACES", PROJECT.parent / "shared" / "traces"))
SYNTHETIC = {"1024 workers": JobShape(dp=128, pp=8, steps=20), "10240 workers": JobShape(dp=1280, pp=8, steps=20)}
REPEATS = 5

Result = TypeVar("Result")


def main() -> None:
    """Runs every case; the last line of the output is the summary as JSON."""
    published = sorted(path.stem.removeprefix("trace-") for path in TRACES.glob("trace-*.parquet"))
    cases = {name: measure_in_subprocess(name) for name in (*published, *SYNTHETIC)}
    for name in published:
        cases[name]["process_s"] = time_whole_process(name)
        print(f"{name}: {cases[name]['process_s']:.2f} s as a whole process", file=sys.stderr)
    reference = cases["AR"] if "AR" in cases else cases["1024 workers"]
    print(
        json.dumps(
            {
                "bench": "whatif",
                "cases": cases,
                "all_scenarios_at_once_s": reference["simulate_s"],
                "one_after_the_other_s": reference["one_by_one_s"],
                "ratio": reference["one_by_one_s"] / reference["simulate_s"],
            }
        )
    )


def measure_in_subprocess(name: str) -> dict[str, Any]:
    """Measures one case in a process of its own."""
    print(f"{name} …", file=sys.stderr)
    command = [sys.executable, str(Path(__file__)), name]
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
    measured: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    print(
        f"{name}: {measured['operations']:,} operations, all figures in {measured['total_s']:.3f} s, "
        f"{measured['operations_a_second'] / 1e6:.0f} million operations x scenarios a second, "
        f"{measured['peak_gb']:.2f} GB; one scenario after the other {measured['one_by_one_s']:.3f} s",
        file=sys.stderr,
    )
    return measured


def measure_case(name: str) -> dict[str, Any]:
    """All figures of one case: reading, taking apart, simulating; then the same scenarios one after the other."""
    read_s = 0.0
    if name in SYNTHETIC:
        trace = make_synthetic_trace(SYNTHETIC[name])
    else:
        read_s, trace = time_fastest(lambda: read_published_trace(name))
    window_s, window = time_fastest(lambda: build_window_from_trace(trace))
    simulate_s, whatif = time_fastest(lambda: analyze_window(window), repeats=10)
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    one_by_one_s, one_by_one = time_fastest(lambda: simulate_one_by_one(window), repeats=2)
    assert np.allclose(one_by_one, list_compared_scenarios(whatif))
    simulated = count_simulated_operations(window)
    return {
        "operations": int(window.seconds.size),
        "read_s": read_s,
        "window_s": window_s,
        "simulate_s": simulate_s,
        "total_s": read_s + window_s + simulate_s,
        "operations_x_scenarios": simulated,
        "operations_a_second": simulated / simulate_s,
        "peak_gb": peak_gb,
        "one_by_one_s": one_by_one_s,
    }


def read_published_trace(name: str) -> JobTrace:
    return read_parquet(TRACES / f"trace-{name}.parquet", read_metadata(TRACES / f"meta-{name}.yaml"))


def make_synthetic_trace(shape: JobShape) -> JobTrace:
    """A job with a slow data-parallel rank and 5 % noise."""
    operations = list_operations(shape)
    seconds = draw_healthy_seconds(operations, shape, noise=0.05, rng=np.random.default_rng(0))
    seconds[:, 3] *= 1.5
    return make_trace(shape, operations, seconds)


def list_scenarios(window: RecordedWindow) -> list[WhatIfScenario]:
    """The scenarios of the figures, apart from one a data-parallel rank, which `analyze` does not simulate one by
    one."""
    types = sorted({operation.type for operation in window.operations})
    stages = sorted({operation.stage for operation in window.operations})
    return [
        RECORDED_SCENARIO,
        RECORDED_SCENARIO.with_change(OperationSelection(stages=stages[-1:]), takes=IDEAL),
        *(IDEAL_SCENARIO.with_change(OperationSelection(types=[name]), takes=RECORDED) for name in types),
        *(IDEAL_SCENARIO.with_change(OperationSelection(stages=[stage]), takes=RECORDED) for stage in stages),
    ]


def simulate_one_by_one(window: RecordedWindow) -> Array:
    """The baseline, as the published analyzer works: a table of durations for one scenario, a simulation, the next
    one.

    Seconds of each step as recorded, and with the last stage ideal [scenario, step], for comparison.
    """
    compared, nodes = [], range(window.graph.size)
    for number, scenario in enumerate(list_scenarios(window)):
        rows = (
            np.broadcast_to(window.compute_seconds_in(scenario, node), window.seconds[node].shape) for node in nodes
        )
        durations = np.stack(list(rows))
        seconds = simulate_graph(window.graph, durations[:, None])
        if number < 2:
            compared.append(seconds[0].max(axis=0))
    return np.array(compared)


def list_compared_scenarios(whatif: WhatIf) -> Array:
    assert whatif.decomposition is not None
    return np.array([whatif.step_s, whatif.decomposition.last_stage.ideal_step_s])


def count_simulated_operations(window: RecordedWindow) -> int:
    """Operations x scenarios that `analyze` simulates: whole scenarios, and two columns for each data-parallel rank."""
    types = {MERGED_TYPES.get(operation.type, operation.type) for operation in window.operations}
    stages = {operation.stage for operation in window.operations}
    recorded, last_stage, worst_workers, each_replica = 1, 1, 2, 2
    return int(window.seconds.size * (recorded + last_stage + len(types) + len(stages) + worst_workers + each_replica))


def time_whole_process(name: str) -> float:
    """Seconds of the command from the start of its interpreter to its end, byte-compiled as an installation is."""
    command = [sys.executable, "-m", "pacekeeper_analysis.whatif.command", str(TRACES / f"trace-{name}.parquet")]
    with tempfile.TemporaryDirectory() as cache:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache
        run = partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL, timeout=60, env=environment)
        run()
        seconds, _ = time_fastest(run)
    return seconds


def time_fastest(work: Callable[[], Result], repeats: int = REPEATS) -> tuple[float, Result]:
    """Seconds of the fastest of some repeats, and its result."""
    best, result = time_call(work)
    for _ in range(repeats - 1):
        del result  # two of them would take memory at once
        seconds, result = time_call(work)
        best = min(best, seconds)
    return best, result


def time_call(work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure_case(sys.argv[1])))
    else:
        main()
