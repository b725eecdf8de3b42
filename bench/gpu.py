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
from bench.scripts.gpu.machine import DEVICE, NCCL, ON_GPU, facts, why_not
from bench.scripts.gpu.recovery import recovery
from bench.scripts.gpu.workers import run_workers
from pacekeeper.launcher.nccl import PROFILER_PLUGIN_PATH, explain_unusable_plugin

STEPS = 10 if os.environ.get("QUICK") else 60
REPEATS = 1 if os.environ.get("QUICK") else 5
TOLERANCE = 0.03
STEP_SECONDS = 0.05
LAYERS, WIDTH = 24, 1024 if ON_GPU else 64
"""Some 100 MB of gradients: several all-reduces a step."""
OVERHEAD = 0.005
HIDDEN = 0.5
STATE_BYTES = 8 * 10**9 if ON_GPU else 2 * 10**8
RUNS_PER_KIND = 2 if os.environ.get("QUICK") else 5
"""Snapshots, checkpoints and ways back, of each kind."""
MOST_OF_THE_TIME = 0.01
COPY_MARGIN = 1.25
"""A checkpoint may hold a step up so many times as long as the bare copy of the state to pinned memory."""


def main() -> int:
    if reason := why_not():
        print(f"not run: {reason}", file=sys.stderr)
        return NOT_RUN
    result: dict[str, Any] = {"bench": "gpu", "device": str(DEVICE), "machine": facts()}
    holds: dict[str, bool] = {}
    for part in (measure_known_times, times_of_two, overhead, overlap, measure_transfer_recording, keeping_state, measure_recovery_after_sigkill):
        log_progress(f"{part.__name__} …")
        try:
            found, goals = part()
        except RuntimeError as error:  # the other parts' figures are not to be lost
            found, goals = {"error": str(error)}, {part.__name__: False}
        log_progress(json.dumps(found))
        result[part.__name__] = found
        holds |= goals
    print(json.dumps(result | {"holds": holds}))
    return 0


def measure_known_times() -> tuple[dict[str, Any], dict[str, bool]]:
    """Own work of a rank whose kernels take a known time."""
    errors = {}
    for own in (0.05, 0.1, 0.2):
        (found,) = run_workers(f"{measures.__name__}:steps", 1, own_seconds=[own], count=STEPS, backend=NCCL)
        errors[own] = _median(found["own"]) / own - 1
    return {"own_error": _rounded(errors)}, {"own_3_percent": max(map(abs, errors.values())) <= TOLERANCE}


def times_of_two() -> tuple[dict[str, Any], dict[str, bool]]:
    """Own work and waits of a fast and a slow rank. They take turns on the GPU, by milliseconds: hence long steps."""
    own = (0.4, 0.6)
    ranks = run_workers(f"{measures.__name__}:steps", 2, own_seconds=list(own), count=max(10, STEPS // 3))
    own_errors = [_median(rank["own"]) / its - 1 for rank, its in zip(ranks, own, strict=True)]
    waits = [_median([a - b for a, b in zip(rank["step"], rank["own"], strict=True)]) for rank in ranks]
    wait_errors = [(wait - (max(own) - its)) / max(own) for wait, its in zip(waits, own, strict=True)]
    found = {"own_error": own_errors, "exposed_s": waits, "exposed_error_of_step": wait_errors}
    return {name: [round(value, 5) for value in values] for name, values in found.items()}, {
        "own_of_two_3_percent": max(map(abs, own_errors)) <= TOLERANCE,
        "exposed_3_percent": max(map(abs, wait_errors)) <= TOLERANCE,
    }


def overhead() -> tuple[dict[str, Any], dict[str, bool]]:
    """What recording adds to steps of 50 ms on the GPU, and to the host's part of them; in turns."""
    wall: dict[bool, list[float]] = {True: [], False: []}
    host: dict[bool, list[float]] = {True: [], False: []}
    records = 0.0
    for watched in _alternate_pairs(REPEATS):
        (found,) = run_workers(
            f"{measures.__name__}:steps",
            1,
            watched=watched,
            own_seconds=[STEP_SECONDS],
            count=2 * STEPS,
            backend=NCCL,
            layers=LAYERS,
            width=WIDTH,
        )
        wall[watched].append(found["mean"])
        host[watched].append(_median(found["host"]))
        records = max(records, found["records"])

    def times(watched: bool) -> dict[str, float]:
        return {
            "step_ms": round(_median(wall[watched]) * 1e3, 4),
            "launched_after_ms": round(_median(host[watched]) * 1e3, 4),
        }

    added = _median(wall[True]) - _median(wall[False])
    found = {
        "without": times(False),
        "with": times(True) | {"records_a_step": round(records, 1)},
        "overhead": round(added / STEP_SECONDS, 5),
        "pairs": REPEATS,
    }
    return found, {"overhead_half_a_percent": added / STEP_SECONDS <= OVERHEAD}


def overlap() -> tuple[dict[str, Any], dict[str, bool]]:
    """The share of a synchronisation that the forward pass hides."""
    size: dict[str, Any] = {"blocks": 8, "width": 2048 if ON_GPU else 256, "repeats": 3 * REPEATS}
    ranks = run_workers(f"{measures.__name__}:overlap", 2, **size)
    alone, off, on = (max(rank[side] for rank in ranks) for side in ("alone", "off", "on"))
    hidden = 1 - (on - alone) / (off - alone) if off > alone else 0.0
    milliseconds = {side: round(value * 1e3, 2) for side, value in (("alone", alone), ("off", off), ("on", on))}
    return {"forward_ms": milliseconds, "hidden": round(hidden, 3), **size}, {"overlap_half": hidden >= HIDDEN}


def measure_transfer_recording() -> tuple[dict[str, Any], dict[str, bool]]:
    """What NCCL's plugin adds to an all-reduce of two ranks over sockets; in turns. They share the GPU by milliseconds,
    and all-reduces wait for that: only what is added to it shows."""
    if reason := explain_unusable_plugin(PROFILER_PLUGIN_PATH):
        raise RuntimeError(reason)
    took: dict[bool, list[float]] = {True: [], False: []}
    pairs = min(REPEATS, 3)
    for watched in _alternate_pairs(pairs):
        ranks = run_workers(f"{transfers.__name__}:timed", 2, nbytes=1 << 20, count=200, watched=watched)
        took[watched].append(max(ranks))
    added = _median(took[True]) / _median(took[False]) - 1
    found = {
        "without_ms": round(_median(took[False]) * 1e3, 3),
        "with_ms": round(_median(took[True]) * 1e3, 3),
        "overhead": round(added, 5),
        "pairs": pairs,
    }
    return found, {"plugin_1_percent": added <= MOST_OF_THE_TIME}


def keeping_state() -> tuple[dict[str, Any], dict[str, bool]]:
    """What snapshots and checkpoints of 8 GB hold a step up, and how soon they are back on the GPU.

    The volume is in memory, too, so that no disk stands between the sides; each is written beside the steps anyway.
    """
    size: dict[str, Any] = {"nbytes": STATE_BYTES, "step_seconds": 4 * STEP_SECONDS, "count": RUNS_PER_KIND}
    with (
        tempfile.TemporaryDirectory(prefix="pacekeeper-gpu-", dir=keeping.folder_in_memory()) as runtime,
        tempfile.TemporaryDirectory(prefix="pacekeeper-gpu-", dir=keeping.folder_in_memory()) as volume,
    ):
        (taken,) = run_workers(f"{keeping.__name__}:snapshots", 1, runtime=runtime, **size)
        log_progress(json.dumps({name: its for name, its in taken.items() if name != "digest"}))
        (kept,) = run_workers(f"{keeping.__name__}:checkpoints", 1, volume=volume, **size)
        log_progress(json.dumps(kept["seconds"]))
        ways: dict[str, tuple[str, dict[str, Any], list[int]]] = {
            "snapshot": ("restore", {"runtime": runtime, "volume": None}, taken["digest"]),
            "checkpoint": ("restore", {"runtime": None, "volume": volume}, kept["digest"][keeping.OURS]),
            "dcp": ("load_dcp", {"volume": volume}, kept["digest"][keeping.DCP]),
        }
        back: dict[str, list[float]] = {name: [] for name in ways}
        exact = dict.fromkeys(ways, True)
        for _ in range(RUNS_PER_KIND):
            for name, (function, where, state) in ways.items():
                ((seconds, found),) = run_workers(f"{keeping.__name__}:{function}", 1, nbytes=STATE_BYTES, **where)
                back[name].append(seconds)
                exact[name] &= found == state
    step, usual = _median(taken["plain"]), slice(keeping.MAKE_SLOTS, None)
    beside = _median(taken["longest"][usual])
    stall = _median(taken["with"][usual]) - step + max(beside - step, 0.0) + _median(taken["settle"][usual])
    share = stall / (taken["interval"] * step)
    stalls = {side: _median(its[1:]) - _median(kept["seconds"]["plain"]) for side, its in kept["seconds"].items()}
    found = {
        "bytes": taken["bytes"],
        "snapshot_s": {"stall": round(stall, 4), "step": round(step, 4)},
        "longest_step_while_memory_is_taken_s": round(max([taken["longest_making"], *taken["with"]]), 3),
        "snapshot_interval": taken["interval"],
        "snapshot_share": round(share, 5),
        "checkpoint_stall_s": {side: round(its, 4) for side, its in stalls.items()},
        "restore_s": {name: round(_median(its), 3) for name, its in back.items()},
        "bit_for_bit": exact,
    }
    return found, {
        "snapshot_1_percent": share <= MOST_OF_THE_TIME,
        "checkpoint_as_the_copy": stalls[keeping.OURS] <= COPY_MARGIN * stalls["copy"],
        "restored_bit_for_bit": all(exact.values()),
    }


def measure_recovery_after_sigkill() -> tuple[dict[str, Any], dict[str, bool]]:
    """SIGKILL within a kernel, with 60 GiB held → the new rank's first step."""
    runs = [recovery() for _ in range(REPEATS)]
    found = {
        "held_gib": round(runs[0].held_bytes / 2**30, 1),
        "median_s": round(_median([run.seconds for run in runs]), 3),
        "parts_s": {stage: round(_median([run.parts[stage] for run in runs]), 4) for stage in runs[0].parts},
        "runs": [asdict(run) for run in runs],
    }
    return found, {"recovered": all(run.lost_steps <= 2 for run in runs)}


def _alternate_pairs(pairs: int) -> Iterator[bool]:
    """With and without, each of them first in every other pair."""
    for pair in range(pairs):
        yield from (True, False) if pair % 2 else (False, True)


def _median(values: list[float]) -> float:
    """Raises RuntimeError where nothing was recorded."""
    if not values:
        raise RuntimeError("nothing was recorded")
    return statistics.median(values)


def _rounded(values: dict[float, float]) -> dict[float, float]:
    return {key: round(value, 5) for key, value in values.items()}


def log_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
