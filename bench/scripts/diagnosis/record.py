"""Recordings: all reports that the operator would have received of a fault on real ranks, kept to be replayed.

`python -m bench.scripts.diagnosis.record [PLACES [FAULT …]]` makes those that are missing. They are kept outside of the
repository, keyed by what makes them: a change of the trainer, the protocol or these scripts requires new recordings.
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

from .faults import PLACES, InjectedFault, list_faults
from .hosts import HostedJob, Usual, create_hosted_job

HEALTHY = "healthy"
WARM_SECONDS = 40.0
"""The job's first steady steps, which are its baseline."""
BEFORE_SECONDS, SLOW_SECONDS, HANG_SECONDS = 3.0, 32.0, 10.0
STEPS_FLUSH_SECONDS, LINKS_FLUSH_SECONDS = 6.0, 16.0
"""After which windows of steps, and of connections, hold nothing of the fault before. A hang's end is a new round, with
new connections."""
HEALTHY_SECONDS = 40.0
MAX_CALM_RELATIVE_TIME, CALM_TIMEOUT_SECONDS = 1.1, 300.0
"""The longest a step may take before a fault, as a multiple of the job's first ones, and how long to wait for that. On
a busy machine a fault is not the intended one, and a healthy job does not look healthy."""
PROFILE_DELAY_SECONDS, PROFILE_AHEAD_STEPS, PROFILE_STEPS, PROFILE_SECONDS = 3.0, 15, 64, 8.0
"""Seconds after a fault's beginning, steps ahead of then, and what the operator would request."""
PROBE_DELAY_SECONDS = 24.0
"""Late: its bytes would be in the windows."""


@dataclass(frozen=True)
class Recording:
    """`reports`: of each worker, oldest first: {"at": seconds since the epoch, "worker": …, and heartbeat, evidence,
    fault or probe}. `began`: when the fault began; 0: there was none."""

    fault: str
    place: int
    began: float
    ended: float
    reports: Sequence[Mapping[str, Any]]
    patterns: Mapping[int, bytes]  # by rank, of the requested profile
    profiled: float  # when the last of them came; 0: none did
    load: float  # of the machine when it began, by its one-minute average

    def save(self, path: Path) -> None:
        fields = {**vars(self), "patterns": {rank: data.decode() for rank, data in self.patterns.items()}}
        temporary = path.with_suffix(".new")
        with gzip.open(temporary, "wt", compresslevel=1) as file:
            json.dump(fields, file)
        temporary.rename(path)

    @classmethod
    def load_from(cls, path: Path) -> Recording:
        with gzip.open(path, "rt") as file:
            fields = json.load(file)
        patterns = {int(rank): text.encode() for rank, text in fields["patterns"].items()}
        return cls(**{**fields, "patterns": patterns})


def get_recordings_folder() -> Path:
    """Where those that the present code makes are kept."""
    return Path(os.environ.get("PACEKEEPER_CACHE") or Path.home() / ".cache/pacekeeper") / "diagnosis" / _hash_sources()


def get_recording_path(name: str, place: int) -> Path:
    return get_recordings_folder() / f"{name.replace(' ', '-')}-{place}.json.gz"


def iterate_recording_paths(faults: Sequence[str], places: int) -> Iterator[Path]:
    for place in range(places):
        for name in (*faults, HEALTHY):
            yield get_recording_path(name, place)


def record_faults(faults: Sequence[InjectedFault], places: int = PLACES) -> None:
    """Makes what is missing, one place after the other, the faults of each in an order of their own."""
    get_recordings_folder().mkdir(parents=True, exist_ok=True)
    if all(path.exists() for path in iterate_recording_paths([fault.name for fault in faults], places)):
        return
    with create_hosted_job() as hosted_job:
        hosted_job.start()
        time.sleep(WARM_SECONDS)
        for place in range(places):
            missing = [fault for fault in faults if not get_recording_path(fault.name, place).exists()]
            random.Random(place).shuffle(missing)
            missing.sort(key=lambda fault: fault.hangs)  # these begin new rounds, with new connections
            if not get_recording_path(HEALTHY, place).exists():
                _record_healthy(hosted_job, place).save(get_recording_path(HEALTHY, place))
            for fault in missing:
                recording = _record_fault(hosted_job, fault, place)
                recording.save(get_recording_path(fault.name, place))
                steps = "" if fault.hangs else f", steps {compute_depth(recording):.2f} × as long"
                print(f"recorded {fault.name} ({place}), load {recording.load:.1f}{steps}", file=sys.stderr, flush=True)


def compute_depth(recording: Recording) -> float:
    """Of a fault: steps while it lasted over steps before it struck."""
    earlier_reports = [report for report in recording.reports if report["at"] < recording.began]
    return measure_relative_time(recording.reports) / measure_relative_time(earlier_reports)


def measure_relative_time(reports: Iterable[Mapping[str, Any]]) -> float:
    """Steps now over the job's first ones, by the ranks' last windows; infinite where none has reported any."""
    relative_times = [
        mean(window["step_seconds"]) / window["baseline_seconds"] for window in _find_last_windows(reports)
    ]
    return median(relative_times) if relative_times else math.inf


def _find_last_windows(reports: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """One of each rank."""
    return {
        window["rank"]: window for report in reports if "evidence" in report for window in report["evidence"]["windows"]
    }.values()


def _record_healthy(hosted_job: HostedJob, place: int) -> Recording:
    listener = _wait_until_calm(hosted_job)
    time.sleep(HEALTHY_SECONDS)
    return listener.build_recording(HEALTHY, place, 0.0)


def _record_fault(hosted_job: HostedJob, fault: InjectedFault, place: int) -> Recording:
    listener = _wait_until_calm(hosted_job)
    began_at = time.time()
    fault.strike(hosted_job, place)
    requests = f"{began_at:.0f}"  # part of their names, which tells them apart from earlier ones
    name = f"profile-{requests}"
    try:
        if fault.hangs:
            time.sleep(HANG_SECONDS)
        else:
            time.sleep(PROFILE_DELAY_SECONDS)
            hosted_job.request_profile(name, PROFILE_AHEAD_STEPS, PROFILE_STEPS, PROFILE_SECONDS)
            time.sleep(PROBE_DELAY_SECONDS - PROFILE_DELAY_SECONDS)
            hosted_job.request_probe(f"probe-{requests}")
            time.sleep(SLOW_SECONDS - PROBE_DELAY_SECONDS)
    finally:
        fault.undo(hosted_job, place)
    profiled, patterns = hosted_job.read_patterns(name)
    recording = listener.build_recording(fault.name, place, began_at, patterns, profiled)
    if fault.hangs:
        hosted_job.train()
    hosted_job.update_requests(profile=None, probe=None)
    time.sleep(LINKS_FLUSH_SECONDS if fault.is_of_links and not fault.hangs else STEPS_FLUSH_SECONDS)
    return recording


def _wait_until_calm(hosted_job: HostedJob) -> _Listening:
    """Since BEFORE_SECONDS, in which steps were as fast as they should be; what the job usually needs is known then.
    Raises SystemExit where the machine stays busy."""
    deadline = time.monotonic() + CALM_TIMEOUT_SECONDS
    while True:
        listener, used_before = _Listening(hosted_job), hosted_job.read_cpu_seconds()
        time.sleep(BEFORE_SECONDS)
        reports, used_after = listener.read_reports(), hosted_job.read_cpu_seconds()
        relative_time = measure_relative_time(reports)
        if relative_time <= MAX_CALM_RELATIVE_TIME:
            cores = tuple(
                (later - earlier) / BEFORE_SECONDS for later, earlier in zip(used_after, used_before, strict=True)
            )
            hosted_job.usual = Usual(
                median(mean(window["step_seconds"]) for window in _find_last_windows(reports)), cores
            )
            return listener
        if time.monotonic() > deadline:
            sys.exit(
                f"steps take {relative_time:.2f} × as long as the first ones: "
                "stop what else the machine does, and try again"
            )


class _Listening:
    """To what the agents write from now on."""

    def __init__(self, hosted_job: HostedJob) -> None:
        self._running = hosted_job
        self._load = os.getloadavg()[0]
        self._from = {
            host.number: host.agent_report_path.stat().st_size if host.agent_report_path.exists() else 0
            for host in hosted_job.hosts
        }

    def read_reports(self) -> list[dict[str, Any]]:
        """So far, oldest first."""
        lines: list[dict[str, Any]] = []
        for host in self._running.hosts:
            with host.agent_report_path.open() as file:
                file.seek(self._from[host.number])
                lines += [json.loads(line) for line in file if line.endswith("\n")]
        return sorted(lines, key=lambda line: line["at"])

    def build_recording(
        self,
        name: str,
        place: int,
        began_at: float,
        patterns: Mapping[int, bytes] | None = None,
        profiled: float = 0.0,
    ) -> Recording:
        """Ends it, and empties the files."""
        reports = self.read_reports()
        for host in self._running.hosts:
            os.truncate(host.agent_report_path, 0)
        return Recording(name, place, began_at, time.time(), reports, patterns or {}, profiled, self._load)


@cache
def _hash_sources() -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    files = [folder / f"{name}.py" for name in ("agent", "faults", "hosts", "job", "record")]
    files += sorted((REPOSITORY / "trainer").rglob("*.py"))
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    chosen = [fault for fault in list_faults() if not sys.argv[2:] or fault.name in sys.argv[2:]]
    record_faults(chosen, int(sys.argv[1]) if sys.argv[1:] else PLACES)
    print(get_recordings_folder())
