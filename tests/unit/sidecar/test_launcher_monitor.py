"""When a launcher counts as silent, and for how long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pacekeeper.launcher.health.heartbeat import LIVENESS_INTERVAL_SECONDS, LivenessFile
from pacekeeper.runtime_folder import RuntimeFolder, write_json
from pacekeeper.sidecar.launcher_monitor import LauncherMonitor, LauncherSilence
from pacekeeper.sidecar.sidecar import _quantize_silence
from pacekeeper_analysis.protocol.reports import Heartbeat, LauncherState


def measure_silence(*signs: tuple[float, int | None]) -> float:
    """Return the silence after checks at these times, at which the launcher's newest sign was that one."""
    silence = LauncherSilence()
    for now, sign in signs:
        silence.update(sign, now)
    return silence.seconds


@pytest.mark.parametrize(
    ("signs", "seconds"),
    [
        ([(100.0, 1), (100.5, 1), (101.25, 1)], 1.25),
        ([(100.0, 1), (100.5, 1), (101.0, 2)], 0.0),
        ([(100.0, 1), (100.5, 1), (101.0, 2), (101.5, 2)], 0.5),
        ([(100.0, None), (100.5, None), (160.0, None)], 0.0),  # torch is being imported
        ([(100.0, 1), (100.5, None), (101.0, None)], 0.0),  # an orderly end
        ([(100.0, 2), (100.5, 1)], 0.0),  # clocks may be set back: another sign is a sign
    ],
)
def test_silence_is_counted_from_the_last_sign(signs: list[tuple[float, int | None]], seconds: float) -> None:
    assert measure_silence(*signs) == pytest.approx(seconds)


def test_a_pause_of_the_sidecar_itself_is_no_silence() -> None:
    """The machine stood still for an hour: at the first check afterward the launcher has had no time for a sign."""
    assert measure_silence((100.0, 1), (100.5, 1), (3_700.0, 1)) == pytest.approx(1.5)
    assert measure_silence((100.0, 1), (100.5, 1), (3_700.0, 1), (3_700.5, 2)) == 0.0


def test_each_second_of_a_short_silence_is_reported_and_a_long_one_only_with_the_polls() -> None:
    assert [_quantize_silence(seconds) for seconds in (0.0, 4.9, 5.0, 5.9, 6.0, 8.2, 15.0, 400.0)] == [
        0, 0, 5, 5, 6, 8, 15, 15,
    ]  # fmt: skip


def test_the_launchers_signs_are_seen_and_its_heartbeat_is_stamped(tmp_path: Path) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    seen, sign = LauncherMonitor(runtime, "w"), LivenessFile(runtime.liveness)
    write_json(runtime.heartbeat, Heartbeat("w", LauncherState.RUNNING, round=2).to_json())
    for now in (10.0, 10.5, 11.0):
        seen.check(now)
    assert (seen.heartbeat.round, seen.heartbeat.launcher_silent_seconds) == (2, 0.0), "it has not begun to speak"
    sign.touch(11.0)
    os.utime(runtime.liveness, (0, 0))
    for now in (11.0, 11.5, 11.9):
        seen.check(now)
    assert seen.heartbeat.launcher_silent_seconds == 0.0, "a pause of this duration is usual"
    seen.check(12.0)
    assert seen.heartbeat.launcher_silent_seconds == 1.0
    sign.touch(11.0 + 0.9 * LIVENESS_INTERVAL_SECONDS)
    seen.check(12.5)
    assert seen.heartbeat.launcher_silent_seconds == 1.5, "two signs are not given in one period"
    sign.touch(11.0 + LIVENESS_INTERVAL_SECONDS)
    seen.check(12.5)
    assert seen.heartbeat.launcher_silent_seconds == 0.0
    sign.remove()
    for now in (13.0, 14.0):
        seen.check(now)
    assert seen.heartbeat.launcher_silent_seconds == 0.0
    assert not runtime.liveness.exists()


def test_a_sign_of_an_earlier_launcher_does_not_count_for_the_next_one(tmp_path: Path) -> None:
    runtime = RuntimeFolder(tmp_path).create()
    runtime.liveness.touch()
    LivenessFile(runtime.liveness)
    assert not runtime.liveness.exists()
