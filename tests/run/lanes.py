"""Processes of parts: starts them lane by lane, measures them, and ends them all on a signal."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .clusters import Usage, read_clusters
from .parts import ROOT, Part
from .slowdown import SlowdownMeter

PROGRESS_INTERVAL_SECONDS = 30
GRACE_SECONDS = 20
"""After a signal, parts have this long to end what they started; then they are killed."""
_SAMPLE_INTERVAL_SECONDS = 1


@dataclass(frozen=True)
class Result:
    part: Part
    status: int  # exit status; negative: the signal that ended the part
    wall_seconds: float = 0
    processor_seconds: float = 0

    def normalize(self, slowdown: float) -> Result:
        """Return the result with the processor seconds of the usual machine."""
        return replace(self, processor_seconds=self.processor_seconds / slowdown)


@dataclass(frozen=True)
class _Running:
    part: Part
    process: subprocess.Popen[bytes]
    began: float
    cluster_seconds_before: float


class Runner:
    """Runs parts, and reports by lines of text. Output of a part goes to `<name>.log` in `folder`."""

    def __init__(
        self,
        parts: Sequence[Part],
        folder: Path,
        report: Callable[[str], None] = print,
        read_usage: Callable[[], Mapping[str, float]] = read_clusters,
    ) -> None:
        self._lanes: dict[str, deque[Part]] = {}
        for part in parts:
            self._lanes.setdefault(part.lane, deque()).append(part)
        self._folder, self._report, self._read_usage = folder, report, read_usage
        self._usage = Usage(read_usage())
        self._meter = SlowdownMeter()
        self._poll = select.poll()
        self._running: dict[int, _Running] = {}  # by the descriptor of the process
        self._results: list[Result] = []
        self._began = self._reported = time.monotonic()
        self.stopped_by: int | None = None

    def run(self) -> list[Result]:
        """Return the results in the order in which the parts ended; not those of parts that a signal stopped."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            for lane in self._lanes:
                self._start_next(lane)
            while self._running and self.stopped_by is None:
                ended = self._poll.poll(_SAMPLE_INTERVAL_SECONDS * 1000)
                self._usage.add(self._read_usage())
                self._meter.update(time.monotonic())
                for descriptor, _ in ended:
                    self._finish_part(descriptor)
                self._report_progress()
        finally:
            self._end_all()
        return self._results

    @property
    def slowdown(self) -> float:
        """Return how many times as slow as usual the machine was, at least 1."""
        return self._meter.slowdown

    def stop(self, signum: int) -> None:
        """Make `run` end all parts and return. A signal handler may call this."""
        self.stopped_by = signum

    def _start_next(self, lane: str) -> None:
        while self._lanes[lane] and self.stopped_by is None:
            part = self._lanes[lane].popleft()
            if self._start_part(part):
                return

    def _start_part(self, part: Part) -> bool:
        """Return whether the part runs: its program may be missing, and that is its result."""
        junit = self._folder / f"{part.name}.xml"
        junit.unlink(missing_ok=True)
        command = part.build_command(junit)
        self._report(f"[{self._elapsed()}] {part.name} begins: {part.command}")
        with (self._folder / f"{part.name}.log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=_build_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a process group that is ended as a whole
                    preexec_fn=partial(_prepare_child, part.idle),
                )
            except OSError as error:
                log.write(f"{error}\n".encode())
                process = None
        if process is None:
            self._add_result(Result(part, status=127))
            return False
        descriptor = os.pidfd_open(process.pid)
        self._poll.register(descriptor, select.POLLIN)
        self._running[descriptor] = _Running(part, process, time.monotonic(), self._usage.total)
        return True

    def _finish_part(self, descriptor: int) -> None:
        running = self._running[descriptor]
        _, status, usage = os.wait4(running.process.pid, 0)
        self._forget_process(descriptor, os.waitstatus_to_exitcode(status))
        clusters = self._usage.total - running.cluster_seconds_before if running.part.uses_clusters else 0
        wall = time.monotonic() - running.began
        processor = usage.ru_utime + usage.ru_stime + clusters
        self._add_result(Result(running.part, running.process.returncode, wall, processor))
        self._start_next(running.part.lane)

    def _add_result(self, result: Result) -> None:
        self._results.append(result)
        name = result.part.name
        outcome = "passed" if result.status == 0 else f"FAILED (exit status {result.status})"
        if log := (self._folder / f"{name}.log").read_text(errors="replace"):
            self._report(prefix_lines(name, log))
        self._report(f"[{self._elapsed()}] {name} ends: {outcome}")

    def _report_progress(self) -> None:
        now = time.monotonic()
        if now - self._reported >= PROGRESS_INTERVAL_SECONDS:
            self._reported = now
            for running in self._running.values():
                last = read_last_line(self._folder / f"{running.part.name}.log")
                self._report(f"[{self._elapsed()}] {running.part.name}: {last[:100]}")

    def _elapsed(self) -> str:
        return format_minutes(time.monotonic() - self._began)

    def _end_all(self) -> None:
        # pytest tears down its fixtures on SIGINT but not on SIGTERM. Ranks in their own sessions end only by this.
        for running in self._running.values():
            os.killpg(running.process.pid, signal.SIGINT)
        deadline = time.monotonic() + GRACE_SECONDS
        alive = set(self._running)
        while alive and (remaining := deadline - time.monotonic()) > 0:
            for descriptor, _ in self._poll.poll(remaining * 1000):
                self._poll.unregister(descriptor)
                alive.discard(descriptor)
        # The leader of a group may end before the rest. It is not reaped yet, so its id still names this group.
        stopped = list(self._running.items())
        for descriptor, running in stopped:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            self._forget_process(descriptor, running.process.wait())
        for _, running in stopped:
            self._report(f"[{self._elapsed()}] {running.part.name} was stopped")

    def _forget_process(self, descriptor: int, status: int) -> None:
        self._running.pop(descriptor).process.returncode = status
        with suppress(KeyError):
            self._poll.unregister(descriptor)
        os.close(descriptor)


def read_last_line(path: Path) -> str:
    """Return the last line of a log that is not empty."""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - 4096))
        lines = log.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "(no output yet)")


def prefix_lines(name: str, text: str) -> str:
    """Mark each line with its part, so that CI takes no part's closing line for that of the run."""
    return "\n".join(f"{name} | {line}".rstrip() for line in text.splitlines())


def format_minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _build_environment() -> dict[str, str]:
    """Byte code is always kept, against the caller's setting: each of hundreds of processes would compile it again."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return variables | {"PYTHONUNBUFFERED": "1"}


def _prepare_child(idle: bool) -> None:
    """Run in the child, before its program."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it for what it starts in the background
    if not idle:
        return
    with suppress(OSError):  # the scheduler shares between sessions first: SCHED_IDLE counts only within one
        Path("/proc/self/autogroup").write_text("19")
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        os.nice(19)
