"""What it costs to keep a job's state, and to bring it back: ours beside torch's own checkpoints (DCP) and torchft's.

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

from bench.scripts.state.hosts import RankHost, SideFailedError, hosts
from bench.scripts.state.workload import LAYER_BYTES, RANKS, layers_for
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
    """Of each way back."""


FULL = Sizes(nbytes=10**9, snapshots=4, checkpoints=6, tries=5)
QUICK = Sizes(nbytes=10**8, snapshots=3, checkpoints=2, tries=2)
SIZES = QUICK if os.environ.get("QUICK") else FULL
SHARED_MEMORY = Path("/dev/shm")
IN_MEMORY, IN_SHARED_MEMORY = 8, 5
"""How often a rank's part lies in memory where it does most: live, in its own two slots and in two of the other rank's,
and for a moment where it is received, and once more where it is taken over."""
CALL_TIMEOUT = 240.0
MAKE_ROOM = 1
"""Checkpoints of a side that take memory, which the later ones use again."""
MAKE_SLOTS = 2
"""Snapshots that take memory."""

MOST_OF_THE_TIME = 0.01
COPY_MARGIN, AGREEING_SECONDS = 1.25, 0.025
"""A checkpoint may take so many times as long as the bare copy, and so much longer: names are gathered, and the ranks
agree, however much there is to copy."""


@dataclass
class RestoreRoute:
    """One of the ways by which the state comes back."""

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
            "seconds": [round(its, 3) for its in self.seconds],
            "bit_for_bit": self.exact and bool(self.seconds),
            "failures": self.failures,
        }


def main() -> None:
    nbytes = bytes_of_a_rank(SIZES.nbytes, read_memory_limit(), shutil.disk_usage(SHARED_MEMORY).free)
    layers = layers_for(nbytes)
    log_progress(f"{layers * LAYER_BYTES / 1e6:.0f} MB a rank, {RANKS} ranks")
    with (
        tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-", dir=SHARED_MEMORY) as runtime,
        tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-") as volume,
        tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-") as logs,
        hosts(Path(logs)) as (ours, torchft),
    ):
        kept = ours.call("checkpoints", CALL_TIMEOUT, layers=layers, volume=volume, count=SIZES.checkpoints)
        checkpoint = compute_checkpoint_statistics([rank["seconds"] for rank in kept]) | {"failures": kept[0]["failures"]}
        log_progress(f"checkpoint: {checkpoint}")
        taken = ours.call("snapshots", CALL_TIMEOUT, layers=layers, runtime=runtime, count=SIZES.snapshots)
        snapshot = compute_snapshot_statistics(taken)
        log_progress(f"snapshot: {snapshot}")
        ways = measure_restore(ours, torchft, layers, Path(runtime), volume, digests(taken), digests(kept))
    result = {
        "bench": "state",
        "ranks": RANKS,
        "megabytes_of_a_rank": round(layers * LAYER_BYTES / 1e6),
        "snapshot": snapshot,
        "checkpoint": checkpoint,
        "restore": {name: way.to_json() for name, way in ways.items()},
        "holds": goals(snapshot, checkpoint, ways),
    }
    print(json.dumps(result))


def read_memory_limit() -> int:
    """Bytes that this process and those that it starts may take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return int(min(available, compute_memory_left()))


def bytes_of_a_rank(wanted: int, left: int, shared_left: int) -> int:
    """Of the state; no more than there is memory for, of which a tenth is left alone."""
    most = min(left // IN_MEMORY, shared_left // IN_SHARED_MEMORY)
    return min(wanted, most * 9 // 10 // RANKS)


def digests(of_ranks: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    return [its["digest"] for its in of_ranks]


# What keeping it costs


def slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Of each time, that of the rank for which it was longest."""
    return [max(its) for its in zip(*of_ranks, strict=True)]


def compute_snapshot_statistics(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of what each rank's `with_pacekeeper.snapshots` gave back. `share`: of the time, at the job's own interval, for
    which a snapshot holds the steps up, and what they lose to its copy that goes to the neighbour meanwhile."""
    held = slowest([its["held"] for its in of_ranks])
    step = statistics.median(slowest([its["plain"] for its in of_ranks]))
    beside = slowest([its["beside"] for its in of_ranks])
    stall, period = statistics.median(held[MAKE_SLOTS:]), of_ranks[0]["interval"] * step
    copying = (sum(beside) - len(beside) * step) / len(held[MAKE_SLOTS:])
    return {
        "stall_s": round(stall, 4),
        "first_s": round(max(held[:MAKE_SLOTS]), 4),
        "step_s": round(step, 4),
        "interval_steps": of_ranks[0]["interval"],
        "share": round((stall + max(copying, 0.0)) / period, 5),
        "share_of_stalls": round(stall / period, 5),
        "lost_beside_a_copy_s": round(copying, 3),
    }


def compute_checkpoint_statistics(of_ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Of the seconds that each rank has measured for each side; `of_the_copy`: as a share of the bare copy's."""
    by_side = {side: slowest([its[side] for its in of_ranks]) for side in of_ranks[0]}
    by_side = {side: seconds for side, seconds in by_side.items() if len(seconds) > MAKE_ROOM}
    medians = {side: statistics.median(seconds[MAKE_ROOM:]) for side, seconds in by_side.items()}
    return {
        "stall_s": {side: round(its, 4) for side, its in medians.items()},
        "first_s": {side: round(max(its[:MAKE_ROOM]), 4) for side, its in by_side.items()},
        "of_the_copy": {side: round(its / medians["copy"], 3) for side, its in medians.items()},
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
    """By each way, in turns. snapshot, checkpoint: what each rank's state was like when it was kept there."""

    def by_us(state: Sequence[Sequence[int]], **where: Any) -> tuple[float, bool]:
        found = ours.call("restore", CALL_TIMEOUT, layers=layers, **where)
        return max(seconds for seconds, _ in found), [digest for _, digest in found] == list(state)

    def lost_node() -> tuple[float, bool]:
        try:
            return by_us(snapshot, runtime=str(runtime), workers="ac", volume=None)
        finally:
            shutil.rmtree(runtime / "c", ignore_errors=True)

    def by_dcp() -> tuple[float, bool]:
        found = ours.call("load_dcp", CALL_TIMEOUT, layers=layers, volume=volume)
        return max(seconds for seconds, _ in found), [digest for _, digest in found] == list(checkpoint)

    def by_torchft(transport: str) -> tuple[float, bool]:
        found = torchft.call(transport, CALL_TIMEOUT, layers=layers)
        return max(seconds for seconds, _ in found), all(exact for _, exact in found)

    by_name: dict[str, Callable[[], tuple[float, bool]]] = {
        "crash": lambda: by_us(snapshot, runtime=str(runtime), workers="ab", volume=None),
        "torchft_http": lambda: by_torchft("http"),
        "lost_node": lost_node,
        "torchft_pg": lambda: by_torchft("pg"),
        "volume": lambda: by_us(checkpoint, runtime=None, workers="ab", volume=f"{volume}/ours"),
        "dcp_volume": by_dcp,
    }
    ways = {name: RestoreRoute() for name in by_name}
    for number in range(1, SIZES.tries + 1):
        for name, bring in by_name.items():
            attempt(ways[name], bring)
            log_progress(f"try {number} of {SIZES.tries}, {name}: {(ways[name].seconds or [math.inf])[-1]:.2f} s")
    return ways


def attempt(way: RestoreRoute, bring: Callable[[], tuple[float, bool]]) -> None:
    """`bring`: seconds, and whether what came back is what was kept."""
    try:
        seconds, exact = bring()
    except SideFailedError as error:
        log_progress(f"failed: {error}")
        way.failures.append(str(error))
        return
    way.seconds.append(seconds)
    way.exact &= exact


OURS = ("crash", "lost_node", "volume")
"""The ways back that are ours."""


def most_for_a_checkpoint(copy_seconds: float) -> float:
    return COPY_MARGIN * copy_seconds + AGREEING_SECONDS


def goals(snapshot: Mapping[str, Any], checkpoint: Mapping[str, Any], ways: Mapping[str, RestoreRoute]) -> dict[str, bool]:
    """Which of them are reached."""
    own, stalls = [ways[name] for name in OURS], checkpoint["stall_s"]
    return {
        "snapshot_1_percent": snapshot["share"] <= MOST_OF_THE_TIME,
        "checkpoint_the_copy": stalls.get("ours", math.inf) <= most_for_a_checkpoint(stalls["copy"]),
        "restored_bit_for_bit": all(bool(way.seconds) and way.exact and not way.failures for way in own),
    }


if __name__ == "__main__":
    main()
