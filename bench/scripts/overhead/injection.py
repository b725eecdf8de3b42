"""What the watch costs a rank into which it was injected, as it is into those of pods.

Two processes train the same by turns, one of them watched. What is compared is their processor time, with that of all
threads: the median over pairs of turns. Processes differ a little from their start on, so that there are several pairs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.watch.payload import build_payload
from pacekeeper_rank.records import RecordKind

from ..watch_fidelity.environment import build_environment

SCRIPT = Path(__file__).parent / "training.py"
STEP_SECONDS = 0.05
STEPS = 20
"""Of a turn: a second, in which each thread of the watch wakes at least twice."""
PROCESS_PAIRS, TURNS = (1, 10) if os.environ.get("QUICK") else (4, 40)
"""Turns: of each process."""
MIB = 1 << 20
ADDED = ("wall", "processor", "between")
"""What is compared of an answer of training.py."""


def measure_injection(python: str) -> dict[str, Any]:
    """Return the cost in ranks of this interpreter, which needs torch only."""
    with tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-") as payload:
        boot = build_payload(Path(payload))
        pairs = [_compare_processes(python, boot) for _ in range(PROCESS_PAIRS)]
    added = {name: np.array([pair["added"][name] for pair in pairs]) for name in ADDED}
    medians = np.median(added["processor"], axis=1)
    memory = statistics.median(pair["memory_bytes"] for pair in pairs)
    return {
        **pairs[0]["description"],
        "collectives_a_step": pairs[0]["collectives_a_step"],
        "added_processor_us_a_step": round(float(np.median(added["processor"])) * 1e6, 1),
        "of_which_threads_between_steps_us": round(float(np.median(added["between"])) * 1e6, 1),
        "by_process_pair_us": [round(float(median) * 1e6, 1) for median in medians],
        "added_wall_us_a_step": round(float(np.median(added["wall"])) * 1e6, 1),
        "overhead": round(float(np.median(added["processor"])) / STEP_SECONDS, 5),
        "memory_mib": round(memory / MIB, 2),
    }


def _compare_processes(python: str, boot: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-of-pacekeeper-", dir="/dev/shm") as folder:
        runtime = Path(folder)
        processes = {watched: _start(python, boot if watched else None, runtime) for watched in (False, True)}
        try:
            turns: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for turn in range(1 + TURNS):
                for watched in (False, True) if turn % 2 else (True, False):
                    turns[watched].append(_take_turn(processes[watched]))
            (description,) = [json.loads(path.read_text()) for path in (runtime / "ranks").glob("*.json")]
            if any((runtime / "broken").iterdir()):
                raise RuntimeError("the rank is not watched any more")
            pages = sum(file.stat().st_size for file in runtime.rglob("*") if file.is_file())
            collectives = _count_collectives(runtime / "rings" / str(description["slot"]))
        finally:
            for process in processes.values():
                assert process.stdin is not None
                process.stdin.close()
                process.wait()
    pairs = list(zip(turns[True][1:], turns[False][1:], strict=True))  # the first turn warms both up
    added = {name: [on[name] - off[name] for on, off in pairs] for name in ADDED}
    memory = pairs[-1][0]["anonymous_bytes"] - pairs[-1][1]["anonymous_bytes"] + pages
    return {
        "description": {name: description[name] for name in ("python", "torch", "recording")},
        "added": added,
        "memory_bytes": memory,
        "collectives_a_step": collectives,
    }


def _start(python: str, boot: Path | None, runtime: Path) -> subprocess.Popen[str]:
    environment = build_environment(boot, runtime)
    return subprocess.Popen(
        [python, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )


def _take_turn(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{STEPS}\n")
    process.stdin.flush()
    answer: dict[str, float] = json.loads(process.stdout.readline())
    return answer


def _count_collectives(ring: Path) -> float:
    """Return how many collectives of a step are recorded."""
    records = RingReader(ring).records()
    counts = np.bincount(records["step"][records["kind"] == RecordKind.COLLECTIVE])
    return float(np.median(counts[counts > 0])) if counts.any() else 0.0
