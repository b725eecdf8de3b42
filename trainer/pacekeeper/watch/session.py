"""Watches one run of a command on this machine: reads its runtime folder, and keeps what it has found."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from pacekeeper_analysis.protocol.reports import RankWindow
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_rank.watching.process_monitor import start_process_monitor
from pacekeeper_rank.watching.watch_folder import WatchFolder

from .container import WatchedContainer
from .live import LiveAnalysis
from .slow_rank_profile import SlowRankProfile

SPEED_INTERVAL_SECONDS = 1.0
"""Seconds between two judgments of the ranks' speed."""


class WatchSession:
    """One run of a command. As a context, it samples the ranks' processes."""

    def __init__(self, runtime: Path, *, takes_profiles: bool = False) -> None:
        """`takes_profiles`: show which function takes the time of slow ranks."""
        self._folder = WatchFolder(runtime).create()
        self._container = WatchedContainer(runtime)
        self._live = LiveAnalysis(time.time())
        self._profile = SlowRankProfile(self._container) if takes_profiles else None
        self._speed_due = 0.0
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        self._monitor = start_process_monitor(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._monitor.stop()

    def poll(self, *, is_over: bool = False) -> Sequence[str]:
        """Return lines about what is new. `is_over`: the command has ended."""
        now = time.monotonic()
        state = self._container.read(now, time.time(), is_over=is_over)
        windows: tuple[RankWindow, ...] = ()
        if state.ranks and (is_over or now >= self._speed_due):
            self._speed_due = now + SPEED_INTERVAL_SECONDS
            windows = self._container.rings.build_evidence("live", "local", 1, (EvidencePart.WINDOWS,)).windows
        lines = self._live.observe(state, windows, time.time())
        if self._profile is not None:
            live, steps = self._live, state.heartbeat.progress.steps_in_round
            sentences = self._profile.follow(live.slow_ranks, steps, live.step_seconds, len(state.ranks), now)
            lines += [f"PROFILE: {sentence}" for sentence in sentences]
        self._lines += lines
        return lines

    def summarize(self) -> Sequence[str]:
        """Return the last news, and the summary. Call it once, after the end of the command."""
        news, summary = self.poll(is_over=True), self._live.summarize(time.time())
        self._lines += summary
        return [*news, *summary]

    def save_records(self, output: Path, command: Sequence[str]) -> Sequence[str]:
        """Copy the rings of the last ranks, which `pacekeeper whatif` reads, and all lines. Raises OSError."""
        saved = []
        for rank, ring in sorted(self._container.get_ring_files().items()):
            with suppress(OSError):  # one that was never there, or was removed
                saved.append(shutil.copyfile(ring, output / f"rank-{rank}.ring"))
        (output / "watch.json").write_text(json.dumps({"command": list(command), "lines": self._lines}))
        return [f"records saved; `pacekeeper whatif {output}/*.ring` analyzes them"] if saved else []
