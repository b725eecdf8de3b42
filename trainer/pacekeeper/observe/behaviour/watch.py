"""When a rank looks at itself: in the window that the plan asks for, and once in its early steps, to have something to
hold the window against.

The training thread only begins and ends a window, at ends of steps, so that all ranks look at the same steps. What is
seen is put together by another thread.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pacekeeper.environment import Environment
from pacekeeper.runtime import Runtime, write_text
from pacekeeper_analysis.behaviour.pattern import Answer, RankPattern
from pacekeeper_analysis.behaviour.reduce import Recording, reduce
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import MODES, Profile, Sources, SyncMode, WorkerPlan
from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.records import Phase

from ..clock import HostClock, Mark
from ..recorder import Recorder
from ..ring import RingReader
from . import machine, sources
from .sampler import Sampler
from .spans import Kernels, complete_from, spans_between, steps_between

LOOK_SECONDS = 0.25
"""Between two looks at what windows depend on, while none is open or soon to be: most steps end without one."""
EARLY = Profile("", first_step=0, steps=2**20, seconds=5.0)
"""The window of a rank's early steps. No other has an empty name."""
EARLY_AFTER_STEPS, EARLY_AFTER_SECONDS = 10, 3.0
"""Of a round: then caches and allocators are warm."""
EARLY_WINDOWS, EARLY_PAUSE_SECONDS = 3, 15.0
"""So many of them with such pauses, the fastest of which counts: while a job starts, its nodes are busy with more than
its steps."""
LEAST_EARLY_SECONDS = 0.5
LONGEST = 3.0
"""A window may take so many times its seconds, with what is left out of it."""
SAME_SAMPLES = 0.1
"""Shares that differ by less leave steps comparable."""
_NAME = re.compile(r"[A-Za-z0-9.-]{1,80}")

log = logging.getLogger(__name__)


def watch_behaviour(recorder: Recorder, environment: Environment) -> None:
    """From now on the rank has its windows. It has a ring."""
    assert environment.runtime is not None
    watch = BehaviourWatch(recorder, environment, environment.runtime)
    recorder.step_ended = watch.step_ended


@dataclass(frozen=True)
class Conditions:
    """How a rank trains: steps under different ones do not compare."""

    world_size: int
    mode: int
    samples: int  # in a step; 0: unknown

    def like(self, other: Conditions) -> bool:
        """Whether early steps under `other` are still something to hold these against."""
        if (self.world_size, self.mode) != (other.world_size, other.mode):
            return False
        steady = self.mode < 0 or MODES[self.mode] is SyncMode.SYNC
        return not steady or abs(self.samples - other.samples) <= SAME_SAMPLES * max(self.samples, other.samples)


class BehaviourWatch:
    """One rank's windows."""

    def __init__(self, recorder: Recorder, environment: Environment, runtime: Runtime) -> None:
        self._recorder = recorder
        self._environment = environment
        self._runtime = runtime
        self._plan = _PlanFile(runtime.plan)
        self._open: _OpenWindow | None = None
        self._told = ""
        """Name of the window that was taken part in last, or missed."""
        self._since: float | None = None
        self._steps = 0
        """Of this round."""
        self._early: tuple[Conditions, RankPattern] | None = None
        self._early_tried: Conditions | None = None
        self._early_windows = 0
        """That were begun under these."""
        self._early_due = 0.0
        self._sources = sources.SourceNames()
        self._look_due = 0.0

    def step_ended(self) -> None:
        """In the training thread. What fails here must not fail the training: it is the end of the rank's windows."""
        self._steps += 1
        now = time.monotonic()
        if now < self._look_due:
            return
        try:
            self._follow(now)
        except Exception:
            log.exception("this rank has no behaviour windows from now on")
            self._recorder.step_ended = _nothing
            self._recorder.notice_wait = _no_wait

    def _follow(self, now: float) -> None:
        self._since = self._since or now
        profile = self._plan.profile(now)
        asked = self._asked(profile)
        window = self._open
        if window is not None:
            conditions = self._conditions()
            interrupted = asked is not None and not window.profile.name
            if window.is_over(now, self._steps) or interrupted or not conditions.like(window.conditions):
                self._end(window)
        if self._open is None and asked is not None:
            self._begin(asked, now)
        elif self._open is None and self._wants_early(now):
            self._begin(EARLY, now)
        soon = profile is not None and profile.name != self._told
        self._look_due = 0.0 if soon or self._open is not None else now + LOOK_SECONDS

    def _asked(self, profile: Profile | None) -> Profile | None:
        """The window that is to begin here and now; one that is over before it was heard of is let be."""
        if profile is None or profile.name == self._told or self._recorder.step < profile.first_step:
            return None
        if self._recorder.step >= profile.first_step + profile.steps or not _NAME.fullmatch(profile.name):
            self._told = profile.name
            return None
        return replace(profile, steps=profile.first_step + profile.steps - self._recorder.step)

    def _wants_early(self, now: float) -> bool:
        if self._steps < EARLY_AFTER_STEPS or now - (self._since or now) < EARLY_AFTER_SECONDS:
            return False
        conditions = self._conditions()
        if self._early_tried is None or not conditions.like(self._early_tried):
            self._early_windows = 0
            return True
        return self._early_windows < EARLY_WINDOWS and now >= self._early_due

    def _conditions(self) -> Conditions:
        state = self._recorder.ring.state
        return Conditions(self._environment.world_size, int(state.sync_mode), int(state.share))

    def _begin(self, profile: Profile, now: float) -> None:
        conditions = self._conditions()
        if profile.name:
            self._told = profile.name
        else:
            self._early_tried = conditions
            self._early_windows += 1
            self._early_due = now + profile.seconds + EARLY_PAUSE_SECONDS
            if self._early_windows == 1 and (kept := self._kept_early(conditions)) is not None:
                self._early = conditions, kept
                self._early_windows = EARLY_WINDOWS
                return
        self._open = _OpenWindow(self._recorder, profile, conditions, now, self._steps)

    def _end(self, window: _OpenWindow) -> None:
        """The training goes on while another thread puts together what was seen."""
        self._open = None
        window.stop()
        threading.Thread(target=self._put_together, args=(window,), name="pacekeeper-behaviour", daemon=True).start()

    def _put_together(self, window: _OpenWindow) -> None:
        """What fails here must not fail the training."""
        try:
            pattern = window.pattern(self._environment, self._runtime, self._sources)
            if pattern is None:
                log.warning("behaviour window %s: no step was complete in it", window.profile.name or "of early steps")
            elif window.profile.name:
                self._tell(window, pattern)
            elif pattern.seconds >= LEAST_EARLY_SECONDS:
                self._keep_early(window.conditions, pattern)
        except Exception:
            log.exception("behaviour window %s is lost", window.profile.name)

    def _tell(self, window: _OpenWindow, pattern: RankPattern) -> None:
        early = self._early[1] if self._early is not None and self._early[0].like(window.conditions) else None
        answer = Answer(pattern, early)
        if window.profile.sources is Sources.HASH:
            table = sources.aliases(answer.names)
            log.info("behaviour window %s: %s", window.profile.name, ", ".join(f"{k} is {v}" for k, v in table.items()))
            answer = answer.renamed(sources.hidden, Sources.HASH)
        path = self._runtime.pattern(window.profile.name, self._environment.rank)
        write_text(path, answer.to_bytes().decode())

    def _keep_early(self, conditions: Conditions, pattern: RankPattern) -> None:
        before = self._early
        if before is not None and before[0].like(conditions) and before[1].step_seconds <= pattern.step_seconds:
            return
        self._early = conditions, pattern
        content = {**asdict(conditions), "pattern": pattern.to_json()}
        write_text(self._runtime.early_pattern(self._environment.rank), json.dumps(content))

    def _kept_early(self, conditions: Conditions) -> RankPattern | None:
        """Of an earlier round on this worker, under the same conditions."""
        try:
            content = parse_json(self._runtime.early_pattern(self._environment.rank).read_bytes())
            kept = Conditions(content["world_size"], content["mode"], content["samples"])
            return RankPattern.from_json(content["pattern"]) if conditions.like(kept) else None
        except (OSError, ValueError, KeyError, TypeError, InputError):
            return None


class _OpenWindow:
    """A window that is under way."""

    def __init__(self, recorder: Recorder, profile: Profile, conditions: Conditions, now: float, steps: int) -> None:
        self.profile = profile
        self.conditions = conditions
        self._recorder = recorder
        self._began, self._steps = now, steps
        self._waits: list[tuple[Mark, Mark]] = []
        self._kernels = _kernels()
        if isinstance(recorder.clock, HostClock):  # a device's waits are among its kernels
            recorder.notice_wait = lambda start, end: self._waits.append((start, end))
        self._before = self._after = machine.look(recorder.training_thread)
        self._sampler = Sampler(recorder.training_thread, lambda: recorder.phase in (Phase.TRAIN, Phase.LOAD))
        self._from = recorder.last_end

    def is_over(self, now: float, steps: int) -> bool:
        """`steps`: of this round, so far."""
        seconds = now - self._began
        trained = seconds - self._sampler.left_out_seconds
        enough = steps - self._steps >= self.profile.steps or trained >= self.profile.seconds
        return enough or seconds >= LONGEST * self.profile.seconds

    def stop(self) -> None:
        """At the end of a step."""
        self._sampler.stop()
        self._recorder.notice_wait = _no_wait
        if self._kernels is not None:
            self._recorder.finish()  # the steps that the GPU is at belong to the window
            self._kernels.stop()
        self._until = self._recorder.last_end
        self._after = machine.look(self._recorder.training_thread)

    def pattern(self, environment: Environment, runtime: Runtime, names: sources.SourceNames) -> RankPattern | None:
        """None: it has no whole step. Of one that the ring no longer holds from its beginning, what it holds."""
        records = RingReader(runtime.ring(environment.local_rank)).records()
        between = max(self._from.ns, complete_from(records)), self._until.ns
        steps = steps_between(records, between)
        if steps is None:
            return None
        waits = [(start.ns, end.ns) for start, end in self._waits]
        kernels = [] if self._kernels is None else self._kernels.spans()
        return reduce(
            Recording(
                rank=environment.rank,
                round=environment.round,
                first_step=steps.first,
                step_seconds=steps.seconds,
                own_seconds=steps.own_seconds,
                lengths=steps.lengths,
                samples=self.conditions.samples,
                looks=self._sampler.looks(names.stack, between),
                spans=spans_between(records, waits, kernels, between),
                mode=MODES[self.conditions.mode] if self.conditions.mode >= 0 else "",
                sources=Sources.SHOW,
                setup=machine.setup_between(self._before, self._after),
            )
        )


class _PlanFile:
    """What the plan's file says of a window."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at = float("-inf")
        self._seen: tuple[int, int] | None = None
        self._profile: Profile | None = None

    def profile(self, now: float) -> Profile | None:
        """Costs next to nothing where it was asked a moment ago."""
        if now - self._looked_at < LOOK_SECONDS:
            return self._profile
        self._looked_at = now
        try:
            status = self._path.stat()
            if (status.st_ino, status.st_mtime_ns) != self._seen:
                self._seen = status.st_ino, status.st_mtime_ns
                self._profile = WorkerPlan.from_json(parse_json(self._path.read_bytes())).profile
        except (OSError, ValueError, InputError):  # rank 0 says what is wrong with it
            self._profile = None
        return self._profile


def _kernels() -> Kernels | None:
    """None: the rank uses no GPU, or somebody profiles it already."""
    if not torch.cuda.is_initialized():
        return None
    try:
        return Kernels()
    except RuntimeError as error:
        log.warning("a behaviour window without kernels: %s", error)
        return None


def _nothing() -> None: ...


def _no_wait(_start: Any, _end: Any) -> None: ...
