"""What a probe reports of its neighbors' work, from a fake /proc/stat and a fake clock."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from pacekeeper_operator import node_probe

TICKS = os.sysconf("SC_CLK_TCK")


class FakeMachine:
    """Cores that are idle for a share of the time, except for the probe's own thread on one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, idle: Sequence[float], usable: Sequence[int] = ()) -> None:
        self.idle, self._ticks, self._time, self._ran = list(idle), [0.0] * len(idle), 0.0, 0.0
        self.usable = set(usable or range(len(idle)))
        self.told = True
        monkeypatch.setattr("time.perf_counter", lambda: self._time)
        monkeypatch.setattr("time.thread_time", lambda: self._ran)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: self.usable)
        monkeypatch.setattr(node_probe, "_read_file", self._read)

    def advance(self, wall: float, ran: float) -> None:
        self._time, self._ran = self._time + wall, self._ran + ran
        for core, idle in enumerate(self.idle):
            self._ticks[core] += TICKS * wall * idle

    def _read(self, path: str) -> str:
        if path != "/proc/stat" or not self.told:
            return ""
        cores = [f"cpu{i} 7 7 7 {ticks:.0f} 0 7 7 0 0 0" for i, ticks in enumerate(self._ticks)]
        return "\n".join(["cpu  9 9 9 9 9 9 9 9 0 0", *cores, "intr 5 0 1", "ctxt 7", ""])


class TestWatch:
    def test_the_probes_own_work_is_not_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = FakeMachine(monkeypatch, idle=[0.0, 1.0, 1.0, 1.0])
        watch = node_probe.CpuTimer()
        machine.advance(10, ran=10)
        assert watch.compute_spare_share() == pytest.approx(1.0)

    def test_processor_time_of_others_reduces_the_idle_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = FakeMachine(monkeypatch, idle=[0.0, 0.5, 0.5, 0.0])
        watch = node_probe.CpuTimer()
        machine.advance(10, ran=8)
        assert watch.usable_idle_seconds() == pytest.approx(10)
        assert watch.compute_spare_share() == pytest.approx(0.45)

    def test_idle_time_of_unusable_cores_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = FakeMachine(monkeypatch, idle=[0.0, 0.0, 1.0, 1.0], usable=[0, 1])
        watch = node_probe.CpuTimer()
        machine.advance(10, ran=4)
        assert watch.usable_idle_seconds() == 0.0, "it waited for neighbors, not for a quota"
        assert watch.compute_spare_share() == pytest.approx(0.2)

    def test_work_on_unusable_cores_still_counts_as_disturbance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = FakeMachine(monkeypatch, idle=[0.0, 1.0, 0.0, 0.0], usable=[0, 1])
        watch = node_probe.CpuTimer()
        machine.advance(10, ran=10)
        assert watch.compute_spare_share() == pytest.approx(0.5)

    def test_without_proc_stat_all_cores_count_as_idle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = FakeMachine(monkeypatch, idle=[0.0, 0.0])
        machine.told = False
        watch = node_probe.CpuTimer()
        machine.advance(10, ran=4)
        assert watch.compute_spare_share() == 1.0


@pytest.mark.parametrize("busy", ["cores", "stretch", "memory"])
def test_a_neighbor_that_is_busy_during_one_measurement_is_detected(monkeypatch: pytest.MonkeyPatch, busy: str) -> None:
    machine = FakeMachine(monkeypatch, idle=[1.0] * 4)

    def work(figure: str, found: object) -> object:
        machine.idle = [0.0, *([0.0 if busy == figure else 1.0] * 3)]
        machine.advance(1.0, ran=1.0)
        return found

    monkeypatch.setattr(node_probe, "_time_cores", lambda: work("cores", [0.003] * 4))
    monkeypatch.setattr(node_probe, "_run_work_piece", lambda: work("stretch", 1))
    monkeypatch.setattr(node_probe, "check_memory", lambda: work("memory", 1e9))
    values = node_probe.measure_node_speed()
    assert values["cores"] == 4
    assert values["idle_cores"] == pytest.approx(1.0)
    assert values["memory_bytes_per_second"] == 1e9


def test_the_cores_of_a_measurement_are_chosen_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: timed.extend(cores) if len(cores) == 1 else None)
    monkeypatch.setattr(node_probe, "_time_work", lambda _: 0.003)
    chosen_cores = set()
    for _ in range(3):
        assert node_probe._time_cores() == [0.003] * node_probe.MAX_TIMED_CORES
        chosen_cores.add(frozenset(timed))
        assert len(set(timed)) == node_probe.MAX_TIMED_CORES
        timed.clear()
    assert len(chosen_cores) > 1
