"""On one NVIDIA GPU: are times right, what do recording and keeping the state cost, what does overlap hide, how soon is
a rank back?

It takes a Python with torch and numpy and no more: `make bench NAME=gpu`, by GPU_PYTHON. Without a GPU it is not run
(exit status 77). Two ranks share the GPU, and talk over gloo, which stages their tensors through pinned memory.
QUICK=1: fewer steps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from bench.__main__ import NOT_RUN
from bench.scripts.gpu import keeping, measures, transfers
from bench.scripts.gpu.machine import DEVICE, NCCL, ON_GPU, explain_missing_gpu, read_machine_facts
from bench.scripts.gpu.recovery import measure_recovery
from bench.scripts.gpu.workers import run_workers
from pacekeeper.launcher.network.nccl_plugin import PROFILER_PLUGIN_PATH, explain_unusable_plugin

STEPS = 10 if os.environ.get("QUICK") else 60
REPEATS = 1 if os.environ.get("QUICK") else 5
TOLERANCE = 0.03
STEP_SECONDS = 0.05
LAYERS, WIDTH = 24, 1024 if ON_GPU else 64
"""Some 100 MB of gradients: several all-reduces a step."""
MAX_OVERHEAD = 0.005
MIN_HIDDEN_SHARE = 0.5
STATE_BYTES = 8 * 10**9 if ON_GPU else 2 * 10**8
RUNS_PER_KIND = 2 if os.environ.get("QUICK") else 5
"""Snapshots, checkpoints and restores, of each kind."""
MAX_TIME_SHARE = 0.01
COPY_MARGIN = 1.25
"""The longest stall of a step by a checkpoint, as a multiple of the bare copy of the state to pinned memory."""


def main() -> int:
    if reason := explain_missing_gpu():
        print(f"not run: {reason}", file=sys.stderr)
        return NOT_RUN
    result: dict[str, Any] = {"bench": "gpu", "device": str(DEVICE), "machine": read_machine_facts()}
    holds: dict[str, bool] = {}
    for part in (
        measure_known_times,
        times_of_two,
        measure_overhead,
        measure_overlap,
        measure_transfer_recording,
        measure_state_saving,
        measure_recovery_after_sigkill,
    ):
        log_progress(f"{part.__name__} …")
        try:
            metrics, goals = part()
        except RuntimeError as error:  # the other parts' figures are not to be lost
            metrics, goals = {"error": str(error)}, {part.__name__: False}
        log_progress(json.dumps(metrics))
        result[part.__name__] = metrics
        holds |= goals
    print(json.dumps(result | {"holds": holds}))
    return 0


def measure_known_times() -> tuple[dict[str, Any], dict[str, bool]]:
    """Own work of a rank whose kernels take a known time."""
    errors = {}
    for own_seconds in (0.05, 0.1, 0.2):
        (metrics,) = run_workers(
            f"{measures.__name__}:measure_steps", 1, own_seconds=[own_seconds], count=STEPS, backend=NCCL
        )
        errors[own_seconds] = _compute_median(metrics["own"]) / own_seconds - 1
    return {"own_error": _round_values(errors)}, {"own_3_percent": max(map(abs, errors.values())) <= TOLERANCE}


def times_of_two() -> tuple[dict[str, Any], dict[str, bool]]:
    """Own work and waits of a fast and a slow rank. They take turns on the GPU, by milliseconds: hence long steps."""
    own_seconds = (0.4, 0.6)
    ranks = run_workers(
        f"{measures.__name__}:measure_steps", 2, own_seconds=list(own_seconds), count=max(10, STEPS // 3)
    )
    own_errors = [
        _compute_median(rank["own"]) / expected - 1 for rank, expected in zip(ranks, own_seconds, strict=True)
    ]
    waits = [
        _compute_median([step - work for step, work in zip(rank["step"], rank["own"], strict=True)]) for rank in ranks
    ]
    wait_errors = [
        (wait - (max(own_seconds) - expected)) / max(own_seconds)
        for wait, expected in zip(waits, own_seconds, strict=True)
    ]
    metrics = {"own_error": own_errors, "exposed_s": waits, "exposed_error_of_step": wait_errors}
    return {name: [round(value, 5) for value in values] for name, values in metrics.items()}, {
        "own_of_two_3_percent": max(map(abs, own_errors)) <= TOLERANCE,
        "exposed_3_percent": max(map(abs, wait_errors)) <= TOLERANCE,
    }


def measure_overhead() -> tuple[dict[str, Any], dict[str, bool]]:
    """What recording adds to steps of 50 ms on the GPU, and to the host's part of them; in turns."""
    wall_seconds: dict[bool, list[float]] = {True: [], False: []}
    host_seconds: dict[bool, list[float]] = {True: [], False: []}
    records = 0.0
    for recording in _alternate_pairs(REPEATS):
        (metrics,) = run_workers(
            f"{measures.__name__}:measure_steps",
            1,
            watched=recording,
            own_seconds=[STEP_SECONDS],
            count=2 * STEPS,
            backend=NCCL,
            layers=LAYERS,
            width=WIDTH,
        )
        wall_seconds[recording].append(metrics["mean"])
        host_seconds[recording].append(_compute_median(metrics["host"]))
        records = max(records, metrics["records"])

    def summarize_times(recording: bool) -> dict[str, float]:
        return {
            "step_ms": round(_compute_median(wall_seconds[recording]) * 1e3, 4),
            "launched_after_ms": round(_compute_median(host_seconds[recording]) * 1e3, 4),
        }

    added_seconds = _compute_median(wall_seconds[True]) - _compute_median(wall_seconds[False])
    metrics = {
        "without": summarize_times(False),
        "with": summarize_times(True) | {"records_a_step": round(records, 1)},
        "overhead": round(added_seconds / STEP_SECONDS, 5),
        "pairs": REPEATS,
    }
    return metrics, {"overhead_half_a_percent": added_seconds / STEP_SECONDS <= MAX_OVERHEAD}


def measure_overlap() -> tuple[dict[str, Any], dict[str, bool]]:
    """The share of a synchronization that the forward pass hides."""
    size: dict[str, Any] = {"blocks": 8, "width": 2048 if ON_GPU else 256, "repeats": 3 * REPEATS}
    ranks = run_workers(f"{measures.__name__}:measure_overlap", 2, **size)
    alone, off, on = (max(rank[side] for rank in ranks) for side in ("alone", "off", "on"))
    hidden = 1 - (on - alone) / (off - alone) if off > alone else 0.0
    milliseconds = {side: round(value * 1e3, 2) for side, value in (("alone", alone), ("off", off), ("on", on))}
    return {"forward_ms": milliseconds, "hidden": round(hidden, 3), **size}, {
        "overlap_half": hidden >= MIN_HIDDEN_SHARE
    }


def measure_transfer_recording() -> tuple[dict[str, Any], dict[str, bool]]:
    """What NCCL's plugin adds to an all-reduce of two ranks over sockets; in turns. They share the GPU by milliseconds,
    and all-reduces wait for that: only what is added to it shows."""
    if reason := explain_unusable_plugin(PROFILER_PLUGIN_PATH):
        raise RuntimeError(reason)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    pairs = min(REPEATS, 3)
    for recording in _alternate_pairs(pairs):
        ranks = run_workers(f"{transfers.__name__}:time_all_reduces", 2, nbytes=1 << 20, count=200, watched=recording)
        seconds[recording].append(max(ranks))
    added_share = _compute_median(seconds[True]) / _compute_median(seconds[False]) - 1
    metrics = {
        "without_ms": round(_compute_median(seconds[False]) * 1e3, 3),
        "with_ms": round(_compute_median(seconds[True]) * 1e3, 3),
        "overhead": round(added_share, 5),
        "pairs": pairs,
    }
    return metrics, {"plugin_1_percent": added_share <= MAX_TIME_SHARE}


def measure_state_saving() -> tuple[dict[str, Any], dict[str, bool]]:
    """What snapshots and checkpoints of 8 GB hold a step up, and how soon they are back on the GPU.

    The volume is in memory, so that no disk distorts the comparison; both write in the background of the steps.
    """
    size: dict[str, Any] = {"nbytes": STATE_BYTES, "step_seconds": 4 * STEP_SECONDS, "count": RUNS_PER_KIND}
    with (
        tempfile.TemporaryDirectory(prefix="pacekeeper-gpu-", dir=keeping.find_memory_folder()) as runtime,
        tempfile.TemporaryDirectory(prefix="pacekeeper-gpu-", dir=keeping.find_memory_folder()) as volume,
    ):
        (snapshots,) = run_workers(f"{keeping.__name__}:measure_snapshots", 1, runtime=runtime, **size)
        log_progress(json.dumps({name: value for name, value in snapshots.items() if name != "digest"}))
        (checkpoints,) = run_workers(f"{keeping.__name__}:measure_checkpoints", 1, volume=volume, **size)
        log_progress(json.dumps(checkpoints["seconds"]))
        routes: dict[str, tuple[str, dict[str, Any], list[int]]] = {
            "snapshot": ("restore_state", {"runtime": runtime, "volume": None}, snapshots["digest"]),
            "checkpoint": ("restore_state", {"runtime": None, "volume": volume}, checkpoints["digest"][keeping.OURS]),
            "dcp": ("load_dcp", {"volume": volume}, checkpoints["digest"][keeping.DCP]),
        }
        restore_seconds: dict[str, list[float]] = {name: [] for name in routes}
        exact = dict.fromkeys(routes, True)
        for _ in range(RUNS_PER_KIND):
            for name, (function, arguments, expected_digest) in routes.items():
                ((seconds, result),) = run_workers(f"{keeping.__name__}:{function}", 1, nbytes=STATE_BYTES, **arguments)
                restore_seconds[name].append(seconds)
                exact[name] &= result == expected_digest
    step, later_snapshots = _compute_median(snapshots["plain"]), slice(keeping.MAKE_SLOTS, None)
    longest_step = _compute_median(snapshots["longest"][later_snapshots])
    stall = (
        _compute_median(snapshots["with"][later_snapshots])
        - step
        + max(longest_step - step, 0.0)
        + _compute_median(snapshots["settle"][later_snapshots])
    )
    share = stall / (snapshots["interval"] * step)
    stalls = {
        side: _compute_median(value[1:]) - _compute_median(checkpoints["seconds"]["plain"])
        for side, value in checkpoints["seconds"].items()
    }
    result = {
        "bytes": snapshots["bytes"],
        "snapshot_s": {"stall": round(stall, 4), "step": round(step, 4)},
        "longest_step_while_memory_is_taken_s": round(max([snapshots["longest_making"], *snapshots["with"]]), 3),
        "snapshot_interval": snapshots["interval"],
        "snapshot_share": round(share, 5),
        "checkpoint_stall_s": {side: round(value, 4) for side, value in stalls.items()},
        "restore_s": {name: round(_compute_median(value), 3) for name, value in restore_seconds.items()},
        "bit_for_bit": exact,
    }
    return result, {
        "snapshot_1_percent": share <= MAX_TIME_SHARE,
        "checkpoint_as_the_copy": stalls[keeping.OURS] <= COPY_MARGIN * stalls["copy"],
        "restored_bit_for_bit": all(exact.values()),
    }


def measure_recovery_after_sigkill() -> tuple[dict[str, Any], dict[str, bool]]:
    """SIGKILL within a kernel, with 60 GiB held → the new rank's first step."""
    runs = [measure_recovery() for _ in range(REPEATS)]
    metrics = {
        "held_gib": round(runs[0].held_bytes / 2**30, 1),
        "median_s": round(_compute_median([run.seconds for run in runs]), 3),
        "parts_s": {stage: round(_compute_median([run.parts[stage] for run in runs]), 4) for stage in runs[0].parts},
        "runs": [asdict(run) for run in runs],
    }
    return metrics, {"recovered": all(run.lost_steps <= 2 for run in runs)}


def _alternate_pairs(pairs: int) -> Iterator[bool]:
    """With and without, each of them first in every other pair."""
    for pair in range(pairs):
        yield from (True, False) if pair % 2 else (False, True)


def _compute_median(values: list[float]) -> float:
    """Raises RuntimeError where nothing was recorded."""
    if not values:
        raise RuntimeError("nothing was recorded")
    return statistics.median(values)


def _round_values(values: dict[float, float]) -> dict[float, float]:
    return {key: round(value, 5) for key, value in values.items()}


def log_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
