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
from .chronicle import Chronicle
from .faults.fault import Heal, Missed
from .faults.moments import At
from .faults.scene import PERSON, Scene
from .judges import Violation
from .kubernetes.connection import Request, Stage
from .kubernetes.errors import ApiError
from .loop import Stuck, current_process
from .operators.endpoint import forget_applications
from .schedule import HEALED_AFTER, SECONDS, Aim, Schedule, Stroke
from .story import Line
from .world import NAMESPACE, World

OF_JOBS = ("trainingjobs", "trainingjobstates", "pods", "networkpolicies")
"""Kinds of which nothing is left when all jobs are deleted."""
DELETED_SECONDS = 60.0
PATIENCE_SECONDS = 400.0
"""Beyond its end a run goes on for so long where the judges are not content yet."""
LOOK_SECONDS = 10.0
CONTENT_LOOKS = 3
"""So many looks in a row the judges are content: what holds for a moment only is no end."""
REAL_SECONDS = 120.0
"""A run that computes for longer goes round in circles."""
SAID_SECONDS = 30.0


@dataclass(frozen=True)
class Outcome:
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
    story: tuple[str, ...] = field(default=(), repr=False)

    @property
    def rules(self) -> tuple[str, ...]:
        """Those that were broken, in the order in which they were."""
        return tuple(dict.fromkeys(violation.rule for violation in self.violations))


def run(
    schedule: Schedule,
    *,
    story: bool = False,
    patience: float = math.inf,
    to_the_end: bool = True,
    seconds: float = SECONDS,
    grace: float = PATIENCE_SECONDS,
) -> Outcome:
    """The same schedule has the same outcome, but for the real seconds. `story`: keep its lines; `patience`: seconds
    for which a job that can train may stand still; `to_the_end`: even if something was broken already; `seconds`: of
    virtual time, at least; `grace`: so many more at most, where the judges are not content yet."""
    _forget_imports()
    gc.collect()
    gc.disable()
    began, busy = time.perf_counter(), time.process_time()
    world = World(schedule.seed, schedule.world)
    performance = _Performance(world, schedule, patience, to_the_end, (seconds, seconds + grace))
    with coverage.counting() as reached, _logging(world, story):
        try:
            violations = performance.play(busy)
            return Outcome(
                seed=schedule.seed,
                digest=world.story.digest(),
                violations=violations,
                virtual_seconds=world.now(),
                real_seconds=time.perf_counter() - began,
                requests=performance.requests,
                writes=performance.writes,
                restarts=performance.judge.restarts,
                coverage=frozenset(reached | performance.chronicle.reached),
                story=tuple(map(str, world.story.lines)) if story else (),
            )
        finally:  # what its tasks do while they are dropped is no part of the run
            world.loop.close()
            forget_applications()
            gc.enable()


@cache
def _forget_imports() -> None:
    """What a process has loaded is not looked through for garbage at each run."""
    gc.collect()
    gc.freeze()


@contextmanager
def _logging(world: World, told: bool) -> Iterator[None]:
    """What operators log belongs into the story, if it is `told`, and nowhere else. The digest does without."""
    logger = logging.getLogger("pacekeeper_operator")
    before = logger.level, logger.propagate
    logger.setLevel(logging.WARNING if told else logging.ERROR)
    logger.propagate = False
    handler = _Log(world) if told else logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _Log(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._said: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """What is said again and again, now and then."""
        process, now = current_process(), self._world.now()
        who, words = "" if process is None else process.name, record.getMessage()[:200]
        if now >= self._said.get((who, words), -math.inf) + SAID_SECONDS:
            self._said[who, words] = now
            self._world.story.lines.append(Line(now, who, f"| {words}"))


class _Performance:
    """A schedule's, in a world."""

    def __init__(
        self, world: World, schedule: Schedule, patience: float, to_the_end: bool, ends: tuple[float, float]
    ) -> None:
        self.world = world
        self.to_the_end = to_the_end
        self.ends = ends
        self.schedule = schedule
        self.scene = Scene(world, schedule)
        self.chronicle = Chronicle(world)
        self.judge = judges.watch(world, schedule, patience)
        self.requests = self.writes = 0
        self._under_way: dict[int, tuple[Stroke, Heal]] = {}
        world.api.observe(self._asked)
        self.scene.before_write(self._writes)

    def play(self, began: float) -> tuple[Violation, ...]:
        """`began`: by the clock of the time that this process has computed."""
        violations = []
        try:
            self.world.run(self._play(began))
        except Stuck as error:
            violations.append(Violation(self.world.now(), "the run ends", f"nothing goes on: {error}"))
        except _Circles as error:
            violations.append(Violation(self.world.now(), "the run ends", str(error)))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{error!r} in {where.name}, {where.filename}:{where.lineno}"
            violations.append(Violation(self.world.now(), "the simulator works", words))
        return (*self.judge.violations, *violations, *self._ends)

    async def _play(self, began: float) -> None:
        self._ends: tuple[Violation, ...] = ()
        for place, job in enumerate(self.schedule.jobs):
            self.world.after(job.begins, self.scene.make_job, place)
        for place, stroke in enumerate(self.schedule.strokes):
            stroke.when.arm(self.scene, self._striker(place, stroke))
        self.world.after(HEALED_AFTER, self._heal_all)
        content, (least, most) = 0, self.ends
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if time.process_time() - began > REAL_SECONDS:
                raise _Circles(f"it has computed for {REAL_SECONDS:g} s")
            now = self.world.now()
            if self.judge.violations and not self.to_the_end:
                return
            if now <= HEALED_AFTER:
                continue
            complaints = self.judge.at_end()
            content = 0 if complaints else content + 1
            if now >= least and content >= CONTENT_LOOKS:
                await self._delete_all()
                return
            if now >= most:
                self._ends = tuple(Violation(now, "the end", words) for words in complaints)
                return

    async def _delete_all(self) -> None:
        """Every object is deletable: jobs, and with them all that they had but their incidents."""
        if self.schedule.aim is not Aim.SAFETY:
            return
        api = self.world.api
        for job in api.all("trainingjobs"):
            if "deletionTimestamp" not in job["metadata"]:
                api.delete("trainingjobs", job["metadata"]["name"], NAMESPACE, manager=PERSON)
        gone_by = self.world.now() + DELETED_SECONDS
        while left := [body["metadata"]["name"] for kind in OF_JOBS for body in api.all(kind, NAMESPACE)]:
            if self.world.now() >= gone_by:
                words = f"{', '.join(left)} are still there after {DELETED_SECONDS:g} s"
                self._ends = (Violation(self.world.now(), "every object is deletable", words),)
                return
            await asyncio.sleep(1.0)

    def _striker(self, place: int, stroke: Stroke) -> Callable[[], None]:
        def strike() -> None:
            if isinstance(stroke.when, At) or self.world.now() < HEALED_AFTER:
                self._strike(place, stroke)

        return strike

    def _strike(self, place: int, stroke: Stroke) -> None:
        self.scene.tell(f"stroke {place}: {stroke}")
        try:
            heal = stroke.what.strike(self.scene)
        except Missed as error:
            self.scene.tell(f"misses: {error}")
            return
        except ApiError as error:
            self.scene.tell(f"is refused: {error.message[:120]}")
            return
        self.scene.has_struck(place)
        if heal is not None:
            self._under_way[place] = (stroke, heal)
            if stroke.seconds is not None:
                self.world.after(min(stroke.seconds, HEALED_AFTER - self.world.now()), self._heal, place)

    def _heal(self, place: int) -> None:
        stroke, heal = self._under_way.pop(place, (None, None))
        if stroke is None or heal is None:
            return
        self.scene.tell(f"stroke {place} is over")
        try:
            heal()
        except (Missed, ApiError) as error:
            self.scene.tell(f"it cannot be undone: {error}")

    def _heal_all(self) -> None:
        for place, (stroke, _) in list(self._under_way.items()):
            if self.schedule.aim is Aim.SAFETY or stroke.seconds is not None:
                self._heal(place)
        self.scene.tell("all that heals has healed")

    def _asked(self, request: Request) -> None:
        if request.stage is Stage.SENT:
            self.requests += 1
            self.world.story.note(request.place, request.method, request.path)

    def _writes(self, _plural: str) -> None:
        self.writes += 1


class _Circles(Exception):
    """A run does not come to its end."""
