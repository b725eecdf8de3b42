"""One run: a world in which a schedule's faults come and go, under the eyes of judges."""

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

from . import coverage, judges
from .chronicle import ChangeLogger
from .faults.fault import HealCallback, TargetMissing
from .faults.moments import AtTime
from .faults.scene import PERSON_MANAGER, FaultContext
from .judges import Violation
from .kubernetes.connection import Request, RequestStage
from .kubernetes.errors import ApiError
from .loop import LoopStuck, get_current_process
from .operators.endpoint import clear_application_cache
from .schedule import HEALED_BY_SECONDS, MIN_RUN_SECONDS, Aim, Schedule, FaultInjection
from .story import LogLine
from .world import NAMESPACE, World

JOB_KINDS = ("trainingjobs", "trainingjobstates", "pods", "networkpolicies")
"""Kinds of which nothing is left when all jobs are deleted."""
JOB_DELETION_SECONDS = 60.0
MAX_OVERTIME_SECONDS = 400.0
"""Beyond its end a run goes on for so long where the judges are not content yet."""
END_CHECK_INTERVAL_SECONDS = 10.0
REQUIRED_CLEAN_CHECKS = 3
"""So many looks in a row the judges are content: what holds for a moment only is no end."""
MAX_REAL_SECONDS = 120.0
"""A run that computes for longer goes round in circles."""
REPEATED_LOG_SECONDS = 30.0


@dataclass(frozen=True)
class RunOutcome:
    """What a run has shown."""

    seed: int
    digest: str
    violations: tuple[Violation, ...] = ()
    virtual_seconds: float = 0.0
    real_seconds: float = 0.0
    requests: int = 0  # of operators
    writes: int = 0  # of them, those from which something follows
    restarts: int = 0  # that jobs have counted
    coverage: frozenset[str] = frozenset()
    log: tuple[str, ...] = field(default=(), repr=False)

    @property
    def broken_rules(self) -> tuple[str, ...]:
        """Those that were broken, in the order in which they were."""
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
    """The same schedule has the same outcome, but for the real seconds. `story`: keep its lines; `patience`: seconds
    for which a job that can train may stand still; `to_the_end`: even if something was broken already; `seconds`: of
    virtual time, at least; `grace`: so many more at most, where the judges are not content yet."""
    _freeze_imports()
    gc.collect()
    gc.disable()
    began, busy = time.perf_counter(), time.process_time()
    world = World(schedule.seed, schedule.world)
    performance = _ScheduleRun(world, schedule, patience, run_to_end, (seconds, seconds + grace))
    with coverage.count_coverage() as reached, _capture_operator_logs(world, keep_log):
        try:
            violations = performance.run(busy)
            return RunOutcome(
                seed=schedule.seed,
                digest=world.log.digest(),
                violations=violations,
                virtual_seconds=world.now(),
                real_seconds=time.perf_counter() - began,
                requests=performance.requests,
                writes=performance.writes,
                restarts=performance.checker.restarts,
                coverage=frozenset(reached | performance.change_logger.reached),
                log=tuple(map(str, world.log.lines)) if keep_log else (),
            )
        finally:  # what its tasks do while they are dropped is no part of the run
            world.loop.close()
            clear_application_cache()
            gc.enable()


@cache
def _freeze_imports() -> None:
    """What a process has loaded is not looked through for garbage at each run."""
    gc.collect()
    gc.freeze()


@contextmanager
def _capture_operator_logs(world: World, told: bool) -> Iterator[None]:
    """What operators log belongs into the story, if it is `told`, and nowhere else. The digest does without."""
    logger = logging.getLogger("pacekeeper_operator")
    before = logger.level, logger.propagate
    logger.setLevel(logging.WARNING if told else logging.ERROR)
    logger.propagate = False
    handler = _OperatorLogHandler(world) if told else logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _OperatorLogHandler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._logged_at: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """What is said again and again, now and then."""
        process, now = get_current_process(), self._world.now()
        who, words = "" if process is None else process.name, record.getMessage()[:200]
        if now >= self._logged_at.get((who, words), -math.inf) + REPEATED_LOG_SECONDS:
            self._logged_at[who, words] = now
            self._world.log.lines.append(LogLine(now, who, f"| {words}"))


class _ScheduleRun:
    """A schedule's, in a world."""

    def __init__(
        self, world: World, schedule: Schedule, patience: float, to_the_end: bool, ends: tuple[float, float]
    ) -> None:
        self.world = world
        self.run_to_end = to_the_end
        self.end_seconds = ends
        self.schedule = schedule
        self.context = FaultContext(world, schedule)
        self.change_logger = ChangeLogger(world)
        self.checker = judges.start_checker(world, schedule, patience)
        self.requests = self.writes = 0
        self._active: dict[int, tuple[FaultInjection, HealCallback]] = {}
        world.api.add_observer(self._count_request)
        self.context.call_before_write(self._count_write)

    def run(self, began: float) -> tuple[Violation, ...]:
        """`began`: by the clock of the time that this process has computed."""
        violations = []
        try:
            self.world.run(self._run_and_check(began))
        except LoopStuck as error:
            violations.append(Violation(self.world.now(), "the run ends", f"nothing goes on: {error}"))
        except _RealTimeExceeded as error:
            violations.append(Violation(self.world.now(), "the run ends", str(error)))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{error!r} in {where.name}, {where.filename}:{where.lineno}"
            violations.append(Violation(self.world.now(), "the simulator works", words))
        return (*self.checker.violations, *violations, *self._end_violations)

    async def _run_and_check(self, began: float) -> None:
        self._end_violations: tuple[Violation, ...] = ()
        for place, job in enumerate(self.schedule.jobs):
            self.world.call_after(job.start_seconds, self.context.create_job, place)
        for place, stroke in enumerate(self.schedule.injections):
            stroke.trigger.arm(self.context, self._build_injector(place, stroke))
        self.world.call_after(HEALED_BY_SECONDS, self._heal_all)
        content, (least, most) = 0, self.end_seconds
        while True:
            await asyncio.sleep(END_CHECK_INTERVAL_SECONDS)
            if time.process_time() - began > MAX_REAL_SECONDS:
                raise _RealTimeExceeded(f"it has computed for {MAX_REAL_SECONDS:g} s")
            now = self.world.now()
            if self.checker.violations and not self.run_to_end:
                return
            if now <= HEALED_BY_SECONDS:
                continue
            complaints = self.checker.check_end()
            content = 0 if complaints else content + 1
            if now >= least and content >= REQUIRED_CLEAN_CHECKS:
                await self._delete_all_jobs()
                return
            if now >= most:
                self._end_violations = tuple(Violation(now, "the end", words) for words in complaints)
                return

    async def _delete_all_jobs(self) -> None:
        """Every object is deletable: jobs, and with them all that they had but their incidents."""
        if self.schedule.aim is not Aim.SAFETY:
            return
        api = self.world.api
        for job in api.list_all("trainingjobs"):
            if "deletionTimestamp" not in job["metadata"]:
                api.delete("trainingjobs", job["metadata"]["name"], NAMESPACE, manager=PERSON_MANAGER)
        gone_by = self.world.now() + JOB_DELETION_SECONDS
        while left := [body["metadata"]["name"] for kind in JOB_KINDS for body in api.list_all(kind, NAMESPACE)]:
            if self.world.now() >= gone_by:
                words = f"{', '.join(left)} are still there after {JOB_DELETION_SECONDS:g} s"
                self._end_violations = (Violation(self.world.now(), "every object is deletable", words),)
                return
            await asyncio.sleep(1.0)

    def _build_injector(self, place: int, injection: FaultInjection) -> Callable[[], None]:
        def strike() -> None:
            if isinstance(injection.trigger, AtTime) or self.world.now() < HEALED_BY_SECONDS:
                self._inject(place, injection)

        return strike

    def _inject(self, place: int, injection: FaultInjection) -> None:
        self.context.log(f"stroke {place}: {injection}")
        try:
            heal = injection.fault.inject(self.context)
        except TargetMissing as error:
            self.context.log(f"misses: {error}")
            return
        except ApiError as error:
            self.context.log(f"is refused: {error.message[:120]}")
            return
        self.context.mark_injected(place)
        if heal is not None:
            self._active[place] = (injection, heal)
            if injection.seconds is not None:
                self.world.call_after(min(injection.seconds, HEALED_BY_SECONDS - self.world.now()), self._heal, place)

    def _heal(self, place: int) -> None:
        stroke, heal = self._active.pop(place, (None, None))
        if stroke is None or heal is None:
            return
        self.context.log(f"stroke {place} is over")
        try:
            heal()
        except (TargetMissing, ApiError) as error:
            self.context.log(f"it cannot be undone: {error}")

    def _heal_all(self) -> None:
        for place, (stroke, _) in list(self._active.items()):
            if self.schedule.aim is Aim.SAFETY or stroke.seconds is not None:
                self._heal(place)
        self.context.log("all that heals has healed")

    def _count_request(self, request: Request) -> None:
        if request.stage is RequestStage.SENT:
            self.requests += 1
            self.world.log.record_for_digest(request.place, request.method, request.path)

    def _count_write(self, _plural: str) -> None:
        self.writes += 1


class _RealTimeExceeded(Exception):
    """A run does not come to its end."""
