"""Schedule of a rank's profiles: in the window that the plan requests, and in its early steps for comparison.

The training thread only begins and ends a window, at ends of steps, so that all ranks sample the same steps. Another
thread processes the samples.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from pacekeeper.environment import Environment
from pacekeeper.observe.ring_reader import RingReader
from pacekeeper.runtime_folder import RequestsFile, RuntimeFolder, write_text
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.profiling.pattern import ProfileAnswer, RankPattern
from pacekeeper_analysis.profiling.reduce import StackSamples, WindowRecording, reduce_window
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.plan import SYNC_MODES, SyncMode
from pacekeeper_analysis.protocol.requests import ProfileRequest, SourceNaming
from pacekeeper_rank.profiling.function_names import FunctionNames
from pacekeeper_rank.profiling.sampled_window import SampledWindow, ignore_wait
from pacekeeper_rank.recorder import Recorder

from . import machine_counters, path_hashes
from .kernel_profile import KernelProfile
from .known_spans import collect_known_spans, find_complete_start, select_steps

PROFILE_POLL_INTERVAL_SECONDS = 0.25
"""Seconds between two polls of the conditions, while no window is open or about to open: most steps have none."""
EARLY_PROFILE = ProfileRequest("", first_step=0, steps=2**20, seconds=5.0)
"""The window of a rank's early steps. No other has an empty name."""
EARLY_PROFILE_MIN_STEPS, EARLY_PROFILE_MIN_SECONDS = 10, 3.0
"""Steps and seconds of a round after which caches and allocators are warm."""
EARLY_PROFILE_WINDOWS, EARLY_PROFILE_PAUSE_SECONDS = 3, 15.0
"""Number of early windows, and pause between them.

The fastest counts: while a job starts, its nodes are busy with other work, too.
"""
MIN_EARLY_PROFILE_SECONDS = 0.5
COMPARABLE_SHARE_DIFFERENCE = 0.1
"""Difference of shares up to which steps are comparable."""
_WINDOW_NAME_PATTERN = re.compile(r"[A-Za-z0-9.-]{1,80}")

log = logging.getLogger(__name__)


def start_rank_profiler(recorder: Recorder, environment: Environment) -> None:
    """Start the profiler of a rank that has a ring."""
    assert environment.runtime is not None
    profiler = RankProfiler(recorder, environment, environment.runtime)
    recorder.step_ended = profiler.step_ended


@dataclass(frozen=True)
class TrainingConditions:
    """How a rank trains. Steps under different conditions are not comparable."""

    world_size: int
    mode: int | None  # position in plan.SYNC_MODES; None: a monitored script
    samples: int | None  # in a step; None: unknown

    def is_comparable(self, other: TrainingConditions) -> bool:
        """Return whether early steps under `other` are comparable with these."""
        if (self.world_size, self.mode) != (other.world_size, other.mode):
            return False
        has_equal_steps = self.mode is None or SYNC_MODES[self.mode] is SyncMode.SYNC
        if not has_equal_steps or self.samples == other.samples:
            return True
        if self.samples is None or other.samples is None:
            return False
        return abs(self.samples - other.samples) <= COMPARABLE_SHARE_DIFFERENCE * max(self.samples, other.samples)


class RankProfiler:
    """Takes one rank's profiles."""

    def __init__(self, recorder: Recorder, environment: Environment, runtime: RuntimeFolder) -> None:
        self._recorder = recorder
        self._environment = environment
        self._runtime = runtime
        self._requests = _ProfileRequestReader(runtime.requests)
        self._open: _OpenWindow | None = None
        self._last_window = ""
        """Name of the last window that was taken, or missed."""
        self._since: float | None = None
        self._steps = 0
        """Number of steps in this round."""
        self._early: tuple[TrainingConditions, RankPattern] | None = None
        self._early_tried: TrainingConditions | None = None
        self._early_windows = 0
        """Number of early windows under these conditions."""
        self._early_due = 0.0
        self._sources = FunctionNames()
        self._poll_due = 0.0

    def step_ended(self) -> None:
        """Update the window, in the training thread.

        An error must not fail the training: it ends profiling on this rank.
        """
        self._steps += 1
        now = time.monotonic()
        if now < self._poll_due:
            return
        try:
            self._update_window(now)
        except Exception:
            log.exception("profiling failed; this rank takes no more profiles")
            self._recorder.step_ended = _do_nothing
            self._recorder.notice_wait = ignore_wait

    def _update_window(self, now: float) -> None:
        self._since = self._since or now
        profile = self._requests.read_profile(now)
        requested = self._select_due_profile(profile)
        window = self._open
        if window is not None:
            conditions = self._read_conditions()
            interrupted = requested is not None and not window.profile.name
            if window.is_over(now) or interrupted or not conditions.is_comparable(window.conditions):
                self._end_window(window)
        if self._open is None and requested is not None:
            self._begin_window(requested, now)
        elif self._open is None and self._needs_early_window(now):
            self._begin_window(EARLY_PROFILE, now)
        is_pending = profile is not None and profile.name != self._last_window
        self._poll_due = 0.0 if is_pending or self._open is not None else now + PROFILE_POLL_INTERVAL_SECONDS

    def _select_due_profile(self, profile: ProfileRequest | None) -> ProfileRequest | None:
        """Return the requested window if it begins now; one that was over before it was received is skipped."""
        if profile is None or profile.name == self._last_window or self._recorder.step < profile.first_step:
            return None
        if self._recorder.step >= profile.first_step + profile.steps or not _WINDOW_NAME_PATTERN.fullmatch(
            profile.name
        ):
            self._last_window = profile.name
            return None
        return replace(profile, steps=profile.first_step + profile.steps - self._recorder.step)

    def _needs_early_window(self, now: float) -> bool:
        if self._steps < EARLY_PROFILE_MIN_STEPS or now - (self._since or now) < EARLY_PROFILE_MIN_SECONDS:
            return False
        conditions = self._read_conditions()
        if self._early_tried is None or not conditions.is_comparable(self._early_tried):
            self._early_windows = 0
            return True
        return self._early_windows < EARLY_PROFILE_WINDOWS and now >= self._early_due

    def _read_conditions(self) -> TrainingConditions:
        state = self._recorder.ring.state
        mode = None if state.sync_mode < 0 else int(state.sync_mode)
        return TrainingConditions(self._environment.world_size, mode, int(state.share) or None)

    def _begin_window(self, profile: ProfileRequest, now: float) -> None:
        conditions = self._read_conditions()
        if profile.name:
            self._last_window = profile.name
        else:
            self._early_tried = conditions
            self._early_windows += 1
            self._early_due = now + profile.seconds + EARLY_PROFILE_PAUSE_SECONDS
            if self._early_windows == 1 and (saved_pattern := self._load_early_pattern(conditions)) is not None:
                self._early = conditions, saved_pattern
                self._early_windows = EARLY_PROFILE_WINDOWS
                return
        self._open = _OpenWindow(self._recorder, profile, conditions, now)

    def _end_window(self, window: _OpenWindow) -> None:
        """End the window. Training continues while another thread processes the samples."""
        self._open = None
        window.stop()
        threading.Thread(target=self._process_window, args=(window,), name="pacekeeper-profile", daemon=True).start()

    def _process_window(self, window: _OpenWindow) -> None:
        """Process a window. An error must not fail the training."""
        try:
            pattern = window.build_pattern(self._environment, self._runtime, self._sources)
            if pattern is None:
                log.warning("profile %s: no step was complete in it", window.profile.name or "of early steps")
            elif window.profile.name:
                self._publish_pattern(window, pattern)
            elif pattern.seconds >= MIN_EARLY_PROFILE_SECONDS:
                self._save_early_pattern(window.conditions, pattern)
        except Exception:
            log.exception("profile %s is lost", window.profile.name)

    def _publish_pattern(self, window: _OpenWindow, pattern: RankPattern) -> None:
        early = self._early[1] if self._early is not None and self._early[0].is_comparable(window.conditions) else None
        answer = ProfileAnswer(pattern, early)
        if window.profile.sources is SourceNaming.HASH:
            table = path_hashes.map_path_hashes(answer.names)
            log.info("profile %s: %s", window.profile.name, ", ".join(f"{k} is {v}" for k, v in table.items()))
            answer = answer.rename_functions(path_hashes.hide_own_path, SourceNaming.HASH)
        path = self._runtime.pattern(window.profile.name, self._environment.rank)
        write_text(path, answer.to_bytes().decode())

    def _save_early_pattern(self, conditions: TrainingConditions, pattern: RankPattern) -> None:
        previous = self._early
        if (
            previous is not None
            and previous[0].is_comparable(conditions)
            and previous[1].step_seconds <= pattern.step_seconds
        ):
            return
        self._early = conditions, pattern
        content = {**asdict(conditions), "pattern": pattern.to_json()}
        write_text(self._runtime.early_pattern(self._environment.rank), json.dumps(content))

    def _load_early_pattern(self, conditions: TrainingConditions) -> RankPattern | None:
        """Load the pattern of an earlier round on this worker, under the same conditions."""
        try:
            content = parse_json(self._runtime.early_pattern(self._environment.rank).read_bytes())
            saved_conditions = TrainingConditions(content["world_size"], content["mode"], content["samples"])
            return RankPattern.from_json(content["pattern"]) if conditions.is_comparable(saved_conditions) else None
        except (OSError, ValueError, KeyError, TypeError, InputError):
            return None


class _OpenWindow:
    """A window in progress."""

    def __init__(self, recorder: Recorder, profile: ProfileRequest, conditions: TrainingConditions, now: float) -> None:
        self.profile = profile
        self.conditions = conditions
        self._recorder = recorder
        self._kernels = _start_kernel_profile()
        self._before = self._after = machine_counters.read_machine_counters(recorder.training_thread)
        self._sampled = SampledWindow(recorder, profile.steps, profile.seconds, now)

    def is_over(self, now: float) -> bool:
        return self._sampled.is_over(now)

    def stop(self) -> None:
        """Stop sampling, at the end of a step."""
        self._sampled.stop()
        if self._kernels is not None:
            self._recorder.finish()  # steps that the GPU still works on belong to the window
            self._kernels.stop()
        self._after = machine_counters.read_machine_counters(self._recorder.training_thread)

    def build_pattern(
        self, environment: Environment, runtime: RuntimeFolder, names: FunctionNames
    ) -> RankPattern | None:
        """Return the pattern. None: no complete step. If the ring has lost the beginning, only the rest is used."""
        records = RingReader(runtime.ring(environment.local_rank)).records()
        sampled = self._sampled
        between = max(sampled.began.ns, find_complete_start(records)), sampled.ended.ns
        steps = select_steps(records, between)
        if steps is None:
            return None
        waits = [(start.ns, end.ns) for start, end in sampled.waits]
        kernels = [] if self._kernels is None else self._kernels.read_spans()
        return reduce_window(
            WindowRecording(
                rank=environment.rank,
                round=environment.round,
                first_step=steps.first,
                step_seconds=steps.seconds,
                own_seconds=steps.own_seconds,
                lengths=steps.lengths,
                samples=self.conditions.samples or 0,
                stack_samples=StackSamples.from_lists(*sampled.sampler.list_samples(names.name_stack, between)),
                spans=collect_known_spans(records, waits, kernels, between),
                mode="" if self.conditions.mode is None else SYNC_MODES[self.conditions.mode],
                sources=SourceNaming.SHOW,
                setup=machine_counters.build_setup(self._before, self._after),
            )
        )


class _ProfileRequestReader:
    """Reads the profile request from the file of open requests."""

    def __init__(self, path: Path) -> None:
        self._file = RequestsFile(path)
        self._polled_at: float | None = None
        self._profile: ProfileRequest | None = None

    def read_profile(self, now: float) -> ProfileRequest | None:
        """Return the present request. Frequent calls cost almost nothing."""
        if self._polled_at is not None and now - self._polled_at < PROFILE_POLL_INTERVAL_SECONDS:
            return self._profile
        self._polled_at, self._profile = now, self._file.read().profile
        return self._profile


def _start_kernel_profile() -> KernelProfile | None:
    """Start a kernel profile; None: the rank uses no GPU, or another profile runs."""
    if not torch.cuda.is_initialized():
        return None
    try:
        return KernelProfile()
    except RuntimeError as error:
        log.warning("profile without kernels: %s", error)
        return None


def _do_nothing() -> None: ...
