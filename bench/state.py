"""What it costs to keep a job's state, and to restore it: ours against torch's own checkpoints (DCP) and torchft's.

Two ranks over gloo, each a worker on a node of its own, train layers under AdamW, sharded over both; a rank's part of
the state has 1 GB, or what this machine has memory for. A step's stall is the time for which a call holds the ranks up,
from a moment at which all are there; of the bare copy of the same bytes as well. Sides take turns: on one and the same
step where the state is kept, try by try where it comes back, each time by new processes. Seconds are those of the
slower rank. What has come back is held, bit for bit, against what was kept. The volume is this machine's disk, and what
is read from it lies in the page cache. QUICK=1: less state, fewer tries.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.scripts.state.hosts import RankHost, SideFailedError, start_hosts
from bench.scripts.state.workload import LAYER_BYTES, RANKS, count_layers
from bench.scripts.stragglers.hosts import log_progress
from pacekeeper.cgroup import compute_memory_left


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    nbytes: int
    """Of a rank's part of the state."""
    snapshots: int
    checkpoints: int
    tries: int
    """Of each kind of restore."""


FULL = Sizes(nbytes=10**9, snapshots=4, checkpoints=6, tries=5)
QUICK = Sizes(nbytes=10**8, snapshots=3, checkpoints=2, tries=2)
SIZES = QUICK if os.environ.get("QUICK") else FULL
SHARED_MEMORY = Path("/dev/shm")
MEMORY_COPIES, SHARED_MEMORY_COPIES = 8, 5
"""How often a rank's part lies in memory where it does most: live, in its own two slots and in two of the other rank's,
and for a moment where it is received, and once more where it is taken over."""
CALL_TIMEOUT_SECONDS = 240.0
FIRST_SAVES = 1
"""Checkpoints of a side that take memory, which the later ones use again."""
MAKE_SLOTS = 2
"""Snapshots that take memory."""

MAX_TIME_SHARE = 0.01
COPY_MARGIN, COPY_MARGIN_SECONDS = 1.25, 0.025
"""The longest checkpoint: a multiple of the bare copy, plus a constant. Names are gathered, and the ranks agree, for
any amount of data."""


@dataclass
class RestoreRoute:
    """One of the kinds of restore."""

    seconds: list[float] = field(default_factory=list)
    exact: bool = True
    failures: list[str] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Infinite: it never did."""
        return statistics.median(self.seconds) if self.seconds else math.inf

    def to_json(self) -> dict[str, Any]:
        return {
            "median_s": round(self.median, 3) if self.seconds else None,
            "seconds": [round(value, 3) for value in self.seconds],
            "bit_for_bit": self.exact and bool(self.seconds),
            "failures": self.failures,
        }


def main() -> None:
    nbytes = compute_rank_bytes(SIZES.nbytes, read_memory_limit(), shutil.disk_usage(SHARED_MEMORY).free)
    layers = count_layers(nbytes)
    log_progress(f"{layers * LAYER_BYTES / 1e6:.0f} MB a rank, {RANKS} ranks")
    with (
        tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-", dir=SHARED_MEMORY) as runtime,
        tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-") as volume,
        tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-") as logs,
        start_hosts(Path(logs)) as (ours, torchft),
    ):
        checkpoint_results = ours.call(
            "measure_checkpoints", CALL_TIMEOUT_SECONDS, layers=layers, volume=volume, count=SIZES.checkpoints
        )
        checkpoint = compute_checkpoint_statistics([rank["seconds"] for rank in checkpoint_results]) | {
            "failures": checkpoint_results[0]["failures"]
        }
        log_progress(f"checkpoint: {checkpoint}")
        snapshot_results = ours.call(
            "measure_snapshots", CALL_TIMEOUT_SECONDS, layers=layers, runtime=runtime, count=SIZES.snapshots
        )
        snapshot = compute_snapshot_statistics(snapshot_results)
        log_progress(f"snapshot: {snapshot}")
        routes = measure_restore(
            ours,
            torchft,
            layers,
            Path(runtime),
            volume,
            list_digests(snapshot_results),
            list_digests(checkpoint_results),
        )
    result = {
        "bench": "state",
        "ranks": RANKS,
        "megabytes_of_a_rank": round(layers * LAYER_BYTES / 1e6),
        "snapshot": snapshot,
        "checkpoint": checkpoint,
        "restore": {name: route.to_json() for name, route in routes.items()},
        "holds": check_goals(snapshot, checkpoint, routes),
    }
    print(json.dumps(result))


def read_memory_limit() -> int:
    """Bytes that this process and those that it starts may take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return int(min(available, compute_memory_left()))


def compute_rank_bytes(wanted: int, available: int, shared_available: int) -> int:
    """Of the state; no more than there is memory for, of which a tenth stays free."""
    max_bytes = min(available // MEMORY_COPIES, shared_available // SHARED_MEMORY_COPIES)
    return min(wanted, max_bytes * 9 // 10 // RANKS)


def list_digests(rank_results: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [rank_result["digest"] for rank_result in rank_results]


# What keeping it costs


def find_slowest(rank_seconds: Sequence[Sequence[float]]) -> list[float]:
    """Of each time, that of the rank for which it was longest."""
    return [max(seconds) for seconds in zip(*rank_seconds, strict=True)]


def compute_snapshot_statistics(rank_results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of what each rank's `with_pacekeeper.measure_snapshots` gave back. `share`: of the time, at the job's own
    interval, for which a snapshot holds the steps up, and what they lose to its replication at the same time."""
    held_seconds = find_slowest([rank_result["held"] for rank_result in rank_results])
    step_seconds = statistics.median(find_slowest([rank_result["plain"] for rank_result in rank_results]))
    copying_seconds = find_slowest([rank_result["copying"] for rank_result in rank_results])
    stall, period = statistics.median(held_seconds[MAKE_SLOTS:]), rank_results[0]["interval"] * step_seconds
    lost_seconds = (sum(copying_seconds) - len(copying_seconds) * step_seconds) / len(held_seconds[MAKE_SLOTS:])
    return {
        "stall_s": round(stall, 4),
        "first_s": round(max(held_seconds[:MAKE_SLOTS]), 4),
        "step_s": round(step_seconds, 4),
        "interval_steps": rank_results[0]["interval"],
        "share": round((stall + max(lost_seconds, 0.0)) / period, 5),
        "share_of_stalls": round(stall / period, 5),
        "lost_beside_a_copy_s": round(lost_seconds, 3),
    }


def compute_checkpoint_statistics(rank_results: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Of the seconds that each rank has measured for each side; `of_the_copy`: as a share of the bare copy's."""
    by_side = {side: find_slowest([rank_result[side] for rank_result in rank_results]) for side in rank_results[0]}
    by_side = {side: seconds for side, seconds in by_side.items() if len(seconds) > FIRST_SAVES}
    medians = {side: statistics.median(seconds[FIRST_SAVES:]) for side, seconds in by_side.items()}
    return {
        "stall_s": {side: round(value, 4) for side, value in medians.items()},
        "first_s": {side: round(max(value[:FIRST_SAVES]), 4) for side, value in by_side.items()},
        "of_the_copy": {side: round(value / medians["copy"], 3) for side, value in medians.items()},
    }


# Bringing it back


def measure_restore(
    ours: RankHost,
    torchft: RankHost,
    layers: int,
    runtime: Path,
    volume: str,
    snapshot: Sequence[Sequence[int]],
    checkpoint: Sequence[Sequence[int]],
) -> dict[str, RestoreRoute]:
    """By each kind, in turns. snapshot, checkpoint: what each rank's state was like when it was kept there."""

    def restore_ours(state: Sequence[Sequence[int]], **options: Any) -> tuple[float, bool]:
        results = ours.call("restore_state", CALL_TIMEOUT_SECONDS, layers=layers, **options)
        return max(seconds for seconds, _ in results), [digest for _, digest in results] == list(state)

    def restore_on_lost_node() -> tuple[float, bool]:
        try:
            return restore_ours(snapshot, runtime=str(runtime), workers="ac", volume=None)
        finally:
            shutil.rmtree(runtime / "c", ignore_errors=True)

    def restore_with_dcp() -> tuple[float, bool]:
        results = ours.call("load_dcp", CALL_TIMEOUT_SECONDS, layers=layers, volume=volume)
        return max(seconds for seconds, _ in results), [digest for _, digest in results] == list(checkpoint)

    def transfer_with_torchft(transport: str) -> tuple[float, bool]:
        results = torchft.call(transport, CALL_TIMEOUT_SECONDS, layers=layers)
        return max(seconds for seconds, _ in results), all(exact for _, exact in results)

    restores: dict[str, Callable[[], tuple[float, bool]]] = {
        "crash": lambda: restore_ours(snapshot, runtime=str(runtime), workers="ab", volume=None),
        "torchft_http": lambda: transfer_with_torchft("transfer_by_http"),
        "lost_node": restore_on_lost_node,
        "torchft_pg": lambda: transfer_with_torchft("transfer_by_pg"),
        "volume": lambda: restore_ours(checkpoint, runtime=None, workers="ab", volume=f"{volume}/ours"),
        "dcp_volume": restore_with_dcp,
    }
    routes = {name: RestoreRoute() for name in restores}
    for number in range(1, SIZES.tries + 1):
        for name, restore in restores.items():
            measure_attempt(routes[name], restore)
            log_progress(f"try {number} of {SIZES.tries}, {name}: {(routes[name].seconds or [math.inf])[-1]:.2f} s")
    return routes


def measure_attempt(route: RestoreRoute, restore: Callable[[], tuple[float, bool]]) -> None:
    """`restore`: seconds, and whether what came back is what was kept."""
    try:
        seconds, exact = restore()
    except SideFailedError as error:
        log_progress(f"failed: {error}")
        route.failures.append(str(error))
        return
    route.seconds.append(seconds)
    route.exact &= exact


OUR_ROUTES = ("crash", "lost_node", "volume")
"""The kinds of restore that are ours."""


def compute_max_checkpoint_seconds(copy_seconds: float) -> float:
    return COPY_MARGIN * copy_seconds + COPY_MARGIN_SECONDS


def check_goals(
    snapshot: Mapping[str, Any], checkpoint: Mapping[str, Any], routes: Mapping[str, RestoreRoute]
) -> dict[str, bool]:
    """Which of them are reached."""
    our_routes, stalls = [routes[name] for name in OUR_ROUTES], checkpoint["stall_s"]
    return {
        "snapshot_1_percent": snapshot["share"] <= MAX_TIME_SHARE,
        "checkpoint_the_copy": stalls.get("ours", math.inf) <= compute_max_checkpoint_seconds(stalls["copy"]),
        "restored_bit_for_bit": all(bool(route.seconds) and route.exact and not route.failures for route in our_routes),
    }


if __name__ == "__main__":
    main()
