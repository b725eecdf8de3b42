"""Recordings: all that the operator would have been told of a fault on real ranks, kept to be replayed.

`python -m bench.scripts.diagnosis.record [PLACES [FAULT …]]` makes those that are missing. They are kept outside of the
repository, by what makes them: who changes the trainer, the protocol or these scripts records anew.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from testcluster.settings import REPOSITORY

from .faults import PLACES, InjectedFault, catalogue
from .hosts import HostedJob, Usual, job

HEALTHY = "healthy"
WARM_SECONDS = 40.0
"""The job's first steady steps, which are its baseline."""
BEFORE_SECONDS, SLOW_SECONDS, HANG_SECONDS = 3.0, 32.0, 10.0
STEPS_FLUSH_SECONDS, LINKS_FLUSH_SECONDS = 6.0, 16.0
"""After which windows of steps, and of connections, hold nothing of the fault before. A hang's end is a new round, with
new connections."""
HEALTHY_SECONDS = 40.0
CALM, CALM_SECONDS = 1.1, 300.0
"""Steps before a fault take so many times as long as the job's first ones at most. So long it is waited for that: on a
machine that is busy otherwise a fault is not the one that is meant, and a healthy job is none."""
PROFILE_AFTER, PROFILE_AHEAD, PROFILE_STEPS, PROFILE_SECONDS = 3.0, 15, 64, 8.0
"""Seconds after a fault's beginning, steps ahead of then, and what the operator would ask for."""
PROBE_DELAY_SECONDS = 24.0
"""Late: its bytes would be in the windows."""


@dataclass(frozen=True)
class Recording:
    """`told`: each worker's words, oldest first: {"at": seconds since the epoch, "worker": …, and heartbeat, evidence,
    fault or probe}. `began`: when the fault struck; 0: there was none."""

    fault: str
    place: int
    began: float
    ended: float
    told: Sequence[Mapping[str, Any]]
    patterns: Mapping[int, bytes]  # by rank, of the behaviour window that was asked for
    profiled: float  # when the last of them came; 0: none did
    load: float  # of the machine when it began, by its one-minute average

    def save(self, path: Path) -> None:
        fields = {**vars(self), "patterns": {rank: data.decode() for rank, data in self.patterns.items()}}
        new = path.with_suffix(".new")
        with gzip.open(new, "wt", compresslevel=1) as file:
            json.dump(fields, file)
        new.rename(path)

    @classmethod
    def load_from(cls, path: Path) -> Recording:
        with gzip.open(path, "rt") as file:
            fields = json.load(file)
        patterns = {int(rank): text.encode() for rank, text in fields["patterns"].items()}
        return cls(**{**fields, "patterns": patterns})


def folder() -> Path:
    """Where those that the present code makes are kept."""
    return Path(os.environ.get("PACEKEEPER_CACHE") or Path.home() / ".cache/pacekeeper") / "diagnosis" / _hash()


def path_of(name: str, place: int) -> Path:
    return folder() / f"{name.replace(' ', '-')}-{place}.json.gz"


def recordings(faults: Sequence[str], places: int) -> Iterator[Path]:
    for place in range(places):
        for name in (*faults, HEALTHY):
            yield path_of(name, place)


def record(faults: Sequence[InjectedFault], places: int = PLACES) -> None:
    """Makes what is missing, one place after the other, the faults of each in an order of their own."""
    folder().mkdir(parents=True, exist_ok=True)
    if all(path.exists() for path in recordings([fault.name for fault in faults], places)):
        return
    with job() as running:
        running.start()
        time.sleep(WARM_SECONDS)
        for place in range(places):
            missing = [fault for fault in faults if not path_of(fault.name, place).exists()]
            random.Random(place).shuffle(missing)
            missing.sort(key=lambda fault: fault.hangs)  # these begin new rounds, with new connections
            if not path_of(HEALTHY, place).exists():
                _healthy(running, place).save(path_of(HEALTHY, place))
            for fault in missing:
                made = _struck(running, fault, place)
                made.save(path_of(fault.name, place))
                steps = "" if fault.hangs else f", steps {depth(made):.2f} × as long"
                print(f"recorded {fault.name} ({place}), load {made.load:.1f}{steps}", file=sys.stderr, flush=True)


def depth(made: Recording) -> float:
    """Of a fault: steps while it lasted over steps before it struck."""
    before = [words for words in made.told if words["at"] < made.began]
    return measure_relative_time(made.told) / measure_relative_time(before)


def measure_relative_time(told: Iterable[Mapping[str, Any]]) -> float:
    """Steps now over the job's first ones, by the ranks' last windows; infinite where none has told of any."""
    paces = [mean(window["step_seconds"]) / window["baseline_seconds"] for window in _last_windows(told)]
    return median(paces) if paces else math.inf


def _last_windows(told: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """One of each rank."""
    return {
        window["rank"]: window for words in told if "evidence" in words for window in words["evidence"]["windows"]
    }.values()


def _healthy(running: HostedJob, place: int) -> Recording:
    listening = _listen_to_calm(running)
    time.sleep(HEALTHY_SECONDS)
    return listening.recording(HEALTHY, place, 0.0)


def _struck(running: HostedJob, fault: InjectedFault, place: int) -> Recording:
    listening = _listen_to_calm(running)
    began = time.time()
    fault.strike(running, place)
    name = f"profile-{running.plan.version + 1}"
    try:
        if fault.hangs:
            time.sleep(HANG_SECONDS)
        else:
            time.sleep(PROFILE_AFTER)
            running.request_profile(name, PROFILE_AHEAD, PROFILE_STEPS, PROFILE_SECONDS)
            time.sleep(PROBE_DELAY_SECONDS - PROFILE_AFTER)
            running.request_probe(f"probe-{running.plan.version + 1}")
            time.sleep(SLOW_SECONDS - PROBE_DELAY_SECONDS)
    finally:
        fault.heal(running, place)
    profiled, patterns = running.patterns(name)
    made = listening.recording(fault.name, place, began, patterns, profiled)
    if fault.hangs:
        running.train()
    running.give(profile=None, probe=None)
    time.sleep(LINKS_FLUSH_SECONDS if fault.is_of_links and not fault.hangs else STEPS_FLUSH_SECONDS)
    return made


def _listen_to_calm(running: HostedJob) -> _Listening:
    """Since BEFORE_SECONDS, in which steps were as fast as they should be; what the job usually needs is known then.
    Raises SystemExit where the machine stays busy."""
    deadline = time.monotonic() + CALM_SECONDS
    while True:
        listening, used = _Listening(running), running.cpu_seconds()
        time.sleep(BEFORE_SECONDS)
        told, after = listening.read_reports(), running.cpu_seconds()
        now = measure_relative_time(told)
        if now <= CALM:
            cores = tuple((at - was) / BEFORE_SECONDS for at, was in zip(after, used, strict=True))
            running.usual = Usual(median(mean(window["step_seconds"]) for window in _last_windows(told)), cores)
            return listening
        if time.monotonic() > deadline:
            sys.exit(
                f"steps take {now:.2f} × as long as the first ones: stop what else the machine does, and try again"
            )


class _Listening:
    """To what the agents write from now on."""

    def __init__(self, running: HostedJob) -> None:
        self._running = running
        self._load = os.getloadavg()[0]
        self._from = {host.number: host.agent_report_path.stat().st_size if host.agent_report_path.exists() else 0 for host in running.hosts}

    def read_reports(self) -> list[dict[str, Any]]:
        """So far, oldest first."""
        lines: list[dict[str, Any]] = []
        for host in self._running.hosts:
            with host.agent_report_path.open() as file:
                file.seek(self._from[host.number])
                lines += [json.loads(line) for line in file if line.endswith("\n")]
        return sorted(lines, key=lambda line: line["at"])

    def recording(
        self,
        name: str,
        place: int,
        began: float,
        patterns: Mapping[int, bytes] | None = None,
        profiled: float = 0.0,
    ) -> Recording:
        """Ends it, and empties the files."""
        told = self.read_reports()
        for host in self._running.hosts:
            os.truncate(host.agent_report_path, 0)
        return Recording(name, place, began, time.time(), told, patterns or {}, profiled, self._load)


@cache
def _hash() -> str:
    found = hashlib.sha256()
    here = Path(__file__).parent
    files = [here / f"{name}.py" for name in ("agent", "faults", "hosts", "job", "record")]
    files += sorted((REPOSITORY / "trainer").rglob("*.py"))
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


if __name__ == "__main__":
    chosen = [fault for fault in catalogue() if not sys.argv[2:] or fault.name in sys.argv[2:]]
    record(chosen, int(sys.argv[1]) if sys.argv[1:] else PLACES)
    print(folder())
