"""One run: a world in which a schedule's faults are injected and healed while checkers observe it."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from . import checkers, coverage
from .change_logger import ChangeLogger
from .checkers import Violation
from .faults.context import PERSON_MANAGER, FaultContext
from .faults.fault import HealCallback
from .faults.targets import TargetMissing
from .faults.triggers import AtTime
from .kubernetes.api.errors import ApiError
from .kubernetes.api.requests import Request, RequestStage
from .loop import LoopStuck, get_current_process
from .operators.endpoint import clear_application_cache
from .run_log import LogLine
from .schedule import HEALED_BY_SECONDS, MIN_RUN_SECONDS, Aim, FaultInjection, Schedule
from .world import NAMESPACE, World

JOB_KINDS = ("trainingjobs", "trainingjobstates", "pods", "networkpolicies")
"""Kinds of which no object may be left after all jobs are deleted."""
JOB_DELETION_SECONDS = 60.0
MAX_OVERTIME_SECONDS = 400.0
"""Maximum time that a run is extended beyond its end while the end check has complaints."""
END_CHECK_INTERVAL_SECONDS = 10.0
REQUIRED_CLEAN_CHECKS = 3
"""Number of consecutive end checks without complaints that end a run: a single one may be transient."""
MAX_REAL_SECONDS = 120.0
"""Computing time after which a run counts as endless."""
REPEATED_LOG_SECONDS = 30.0


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run."""

    seed: int
    digest: str
    violations: tuple[Violation, ...] = ()
    virtual_seconds: float = 0.0
    real_seconds: float = 0.0
    requests: int = 0  # sent by operators
    writes: int = 0  # those of them that can change an object
    restarts: int = 0  # counted by jobs
    coverage: frozenset[str] = frozenset()
    log: tuple[str, ...] = field(default=(), repr=False)

    @property
    def broken_rules(self) -> tuple[str, ...]:
        """The broken rules, in the order of their first violation."""
        return tuple(dict.fromkeys(violation.rule for violation in self.violations))


def run_schedule(
    schedule: Schedule,
    *,
    keep_log: bool = False,
    patience: float = math.inf,
    run_to_end: bool = True,
    seconds: float = MIN_RUN_SECONDS,
    grace: float = MAX_OVERTIME_SECONDS,
) -> RunOutcome:
    """Run a schedule. The outcome depends on the schedule only, except for the real seconds.

    `keep_log`: keep the log's lines. `patience`: seconds for which a job that can train may make no progress.
    `run_to_end`: do not stop at the first violation. `seconds`: minimum virtual time. `grace`: maximum extension while
    the end check has complaints.
    """
    _freeze_imports()
    gc.collect()
    gc.disable()
    started, cpu_started = time.perf_counter(), time.process_time()
    world = World(schedule.seed, schedule.world)
    runner = _ScheduleRun(world, schedule, patience, run_to_end, (seconds, seconds + grace))
    with coverage.count_coverage() as reached, _capture_operator_logs(world, keep_log):
        try:
            violations = runner.run(cpu_started)
            return RunOutcome(
                seed=schedule.seed,
                digest=world.log.digest(),
                violations=violations,
                virtual_seconds=world.now(),
                real_seconds=time.perf_counter() - started,
                requests=runner.requests,
                writes=runner.writes,
                restarts=runner.checker.restarts,
                coverage=frozenset(reached | runner.change_logger.reached),
                log=tuple(map(str, world.log.lines)) if keep_log else (),
            )
        finally:  # what tasks do while they are dropped is not part of the run
            world.loop.close()
            clear_application_cache()
            gc.enable()


@cache
def _freeze_imports() -> None:
    """Exclude everything that is loaded from garbage collection, once per process."""
    gc.collect()
    gc.freeze()


@contextmanager
def _capture_operator_logs(world: World, keep_log: bool) -> Iterator[None]:
    """Write the operators' logs to the run's log if `keep_log`, and nowhere else. The digest excludes them."""
    logger = logging.getLogger("pacekeeper_operator")
    original = logger.level, logger.propagate
    logger.setLevel(logging.WARNING if keep_log else logging.ERROR)
    logger.propagate = False
    handler = _OperatorLogHandler(world) if keep_log else logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = original


class _OperatorLogHandler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._logged_at: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record to the log. A repeated message appears once in REPEATED_LOG_SECONDS."""
        process, now = get_current_process(), self._world.now()
        source, message = "" if process is None else process.name, record.getMessage()[:200]
        if now >= self._logged_at.get((source, message), -math.inf) + REPEATED_LOG_SECONDS:
            self._logged_at[source, message] = now
            self._world.log.lines.append(LogLine(now, source, f"| {message}"))


class _ScheduleRun:
    """One run of a schedule in a world."""

    def __init__(
        self, world: World, schedule: Schedule, patience: float, run_to_end: bool, end_seconds: tuple[float, float]
    ) -> None:
        self.world = world
        self.run_to_end = run_to_end
        self.end_seconds = end_seconds
        self.schedule = schedule
        self.context = FaultContext(world, schedule.jobs)
        self.change_logger = ChangeLogger(world)
        self.checker = checkers.start_checker(world, schedule, patience)
        self.requests = self.writes = 0
        self._active: dict[int, tuple[FaultInjection, HealCallback]] = {}
        world.api.add_observer(self._count_request)
        self.context.call_before_write(self._count_write)

    def run(self, cpu_started: float) -> tuple[Violation, ...]:
        """Run, and return all violations. `cpu_started`: process time at the start, in seconds."""
        violations = []
        try:
            self.world.run(self._run_and_check(cpu_started))
        except LoopStuck as error:
            violations.append(Violation(self.world.now(), "the run ends", f"no progress: {error}"))
        except _RealTimeExceeded as error:
            violations.append(Violation(self.world.now(), "the run ends", str(error)))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{error!r} in {frame.name}, {frame.filename}:{frame.lineno}"
            violations.append(Violation(self.world.now(), "the simulator works", message))
        return (*self.checker.violations, *violations, *self._end_violations)

    async def _run_and_check(self, cpu_started: float) -> None:
        self._end_violations: tuple[Violation, ...] = ()
        for index, job in enumerate(self.schedule.jobs):
            self.world.call_after(job.start_seconds, self.context.create_job, index)
        for index, injection in enumerate(self.schedule.injections):
            injection.trigger.arm(self.context, self._build_injector(index, injection))
        self.world.call_after(HEALED_BY_SECONDS, self._heal_all)
        clean_checks, (min_seconds, max_seconds) = 0, self.end_seconds
        while True:
            await asyncio.sleep(END_CHECK_INTERVAL_SECONDS)
            if time.process_time() - cpu_started > MAX_REAL_SECONDS:
                raise _RealTimeExceeded(f"it has computed for {MAX_REAL_SECONDS:g} s")
            now = self.world.now()
            if self.checker.violations and not self.run_to_end:
                return
            if now <= HEALED_BY_SECONDS:
                continue
            complaints = self.checker.check_end()
            clean_checks = 0 if complaints else clean_checks + 1
            if now >= min_seconds and clean_checks >= REQUIRED_CLEAN_CHECKS:
                await self._delete_all_jobs()
                return
            if now >= max_seconds:
                self._end_violations = tuple(Violation(now, "the end", complaint) for complaint in complaints)
                return

    async def _delete_all_jobs(self) -> None:
        """Delete all jobs, and check that all of their objects go, except incidents."""
        if self.schedule.aim is not Aim.SAFETY:
            return
        api = self.world.api
        for job in api.list_all("trainingjobs"):
            if "deletionTimestamp" not in job["metadata"]:
                api.delete("trainingjobs", job["metadata"]["name"], NAMESPACE, manager=PERSON_MANAGER)
        deadline = self.world.now() + JOB_DELETION_SECONDS
        while remaining := [body["metadata"]["name"] for kind in JOB_KINDS for body in api.list_all(kind, NAMESPACE)]:
            if self.world.now() >= deadline:
                message = f"{', '.join(remaining)} still exist after {JOB_DELETION_SECONDS:g} s"
                self._end_violations = (Violation(self.world.now(), "every object is deletable", message),)
                return
            await asyncio.sleep(1.0)

    def _build_injector(self, index: int, injection: FaultInjection) -> Callable[[], None]:
        def strike() -> None:
            if isinstance(injection.trigger, AtTime) or self.world.now() < HEALED_BY_SECONDS:
                self._inject(index, injection)

        return strike

    def _inject(self, index: int, injection: FaultInjection) -> None:
        self.context.log(f"stroke {index}: {injection}")
        try:
            heal = injection.fault.inject(self.context)
        except TargetMissing as error:
            self.context.log(f"misses: {error}")
            return
        except ApiError as error:
            self.context.log(f"is refused: {error.message[:120]}")
            return
        self.context.mark_injected(index)
        if heal is not None:
            self._active[index] = (injection, heal)
            if injection.seconds is not None:
                self.world.call_after(min(injection.seconds, HEALED_BY_SECONDS - self.world.now()), self._heal, index)

    def _heal(self, index: int) -> None:
        injection, heal = self._active.pop(index, (None, None))
        if injection is None or heal is None:
            return
        self.context.log(f"stroke {index} is over")
        try:
            heal()
        except (TargetMissing, ApiError) as error:
            self.context.log(f"cannot be healed: {error}")

    def _heal_all(self) -> None:
        for index, (injection, _) in list(self._active.items()):
            if self.schedule.aim is Aim.SAFETY or injection.seconds is not None:
                self._heal(index)
        self.context.log("all temporary faults have healed")

    def _count_request(self, request: Request) -> None:
        if request.stage is RequestStage.SENT:
            self.requests += 1
            self.world.log.record_for_digest(request.place, request.method, request.path)

    def _count_write(self, _plural: str) -> None:
        self.writes += 1


class _RealTimeExceeded(Exception):
    """A run exceeds its computing time."""
