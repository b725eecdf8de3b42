"""GPU errors as the launcher sees them: the real pynvml in a process of its own, on a double of NVML's library."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import pytest

from pacekeeper.launcher.health.gpu_monitor import MAX_UNKNOWN_GPU_ERRORS, GpuEvent, GpuHistory, GpuInventory
from pacekeeper_analysis.failures.gpu_health import GPU_RATE_WINDOW_SECONDS, GpuSample, GpuSign
from pacekeeper_analysis.protocol.reports import GpuHealth, Heartbeat
from testing.training.launchers import wait_until_true
from testing.training.nvml import (
    DRIVER_NOT_LOADED,
    ECC,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NOT_SUPPORTED,
    UNKNOWN,
    XID,
    NvmlDouble,
    build_nvml_double,
)

PROGRAM = """
import dataclasses, json, logging, sys, threading, time
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='"%(message)s"')
import pynvml
from pacekeeper.launcher.health.gpu_monitor import NvmlMonitor, NvmlTiming
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
hung, *without = sys.argv[1:]
for name in without:
    delattr(pynvml, name)
health = ()
timing = NvmlTiming(
    event_timeout=0.02, check_interval=0.05, call_timeout=float(hung), reopen_pause=0.02, longest_reopen_pause=0.1
)
watch = NvmlMonitor(pynvml, timing)
while not over.wait(0.01):
    for event in watch.poll(time.monotonic()):
        print(json.dumps(dataclasses.asdict(event)), flush=True)
    if watch.health != health:
        health = watch.health
        print(json.dumps([dataclasses.asdict(one) for one in health]), flush=True)
    if not any(thread.name == "nvml" for thread in threading.enumerate()):
        print(json.dumps("over"), flush=True)
        break
"""


@dataclass
class Watching:
    """The process that watches the double."""

    double: NvmlDouble
    lines: Queue[str] = field(default_factory=Queue)
    messages: list[str] = field(default_factory=list)
    events: list[GpuEvent] = field(default_factory=list)
    health: tuple[GpuHealth, ...] = ()

    def receive_until(self, holds: Callable[[], bool]) -> bool:
        try:
            while True:
                match json.loads(self.lines.get_nowait()):
                    case str(message):
                        self.messages.append(message)
                    case list(health):
                        self.health = Heartbeat.from_json({"gpus": health}).gpus
                    case event:
                        self.events.append(GpuEvent(**event))
        except Empty:
            return holds()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            wait_until_true(lambda: self.receive_until(holds), what, seconds=240)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.events}, {self.messages}") from None

    def assert_polling_continues(self) -> None:
        """NVML is polled repeatedly."""
        before = self.double.state.calls
        self.wait_until(lambda: self.double.state.calls > before + 200, "further calls")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml_double(tmp_path_factory.mktemp("nvml"))


@contextmanager
def start_monitor(double: NvmlDouble, *without: str, hung: float = 60.0) -> Iterator[Watching]:
    """`without`: what this pynvml lacks. `hung`: seconds after which a call counts as one that does not return."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(hung), *without],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=double.environment,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    monitor = Watching(double)
    output = process.stdout
    reader = Thread(target=_forward_lines, args=(output, monitor.lines))
    reader.start()
    try:
        yield monitor
    finally:
        process.stdin.close()
        try:
            process.wait(timeout=240)
        finally:
            process.kill()
            reader.join()
            output.close()


def _forward_lines(lines: Iterable[str], to: Queue[str]) -> None:
    for line in lines:
        to.put(line)


@pytest.fixture
def double(tmp_path: Path, library: Path) -> NvmlDouble:
    shutil.copy(library, tmp_path)
    return NvmlDouble(tmp_path, gpus=2)


def test_gpu_errors_are_reported_as_they_occur(double: NvmlDouble) -> None:
    double.state.gpus[1].event_types = XID
    with start_monitor(double) as monitor:
        monitor.wait_until(lambda: bool(double.state.gpus[1].registered), "events are registered")
        assert (double.state.gpus[0].registered, double.state.gpus[1].registered) == (ECC | XID, XID)
        double.send_event(1, XID, 31)
        double.send_event(0, ECC, 0)
        double.send_event(1, XID, 31)
        monitor.wait_until(lambda: len(monitor.events) == 3, "three events")
    assert monitor.events == [
        GpuEvent("GPU-1", 31, "XID 31 on GPU-1"),
        GpuEvent("GPU-0", 48, "double-bit ECC error on GPU-0"),
        GpuEvent("GPU-1", 31, "XID 31 on GPU-1"),
    ]
    assert monitor.messages == []


OFF_THE_BUS = GpuEvent("GPU-1", 79, "GPU GPU-1 has fallen off the bus: it does not answer")


@pytest.mark.parametrize("error", [GPU_IS_LOST, UNKNOWN])
def test_a_gpu_that_falls_off_the_bus_is_reported_once_and_the_others_are_monitored_further(
    double: NvmlDouble, error: int
) -> None:
    with start_monitor(double) as monitor:
        monitor.assert_polling_continues()
        double.state.gpus[1].error = error
        monitor.wait_until(lambda: bool(monitor.events), "the loss is reported")
        double.state.wait_error = error  # and now NVML is opened repeatedly
        monitor.wait_until(lambda: double.state.openings > 3, "it is opened again")
        double.state.wait_error = 0
        double.send_event(1, XID, 79)
        double.send_event(0, XID, 48)
        monitor.wait_until(lambda: len(monitor.events) == 2, "another GPU's error")
    assert monitor.events == [OFF_THE_BUS, GpuEvent("GPU-0", 48, "XID 48 on GPU-0")]
    assert len(monitor.messages) == 1, "an NVML that fails is reported once"


@pytest.mark.parametrize("gone", ["GPU-0", "GPU-1"])
def test_a_gpu_that_is_gone_when_nvml_is_reopened_is_reported_by_its_earlier_name(
    double: NvmlDouble, gone: str
) -> None:
    with start_monitor(double) as monitor:
        monitor.assert_polling_continues()
        double.state.gpus[0].uuid = b"GPU-1" if gone == "GPU-0" else b"GPU-0"  # which moves up
        double.state.count, double.state.wait_error = 1, UNKNOWN
        monitor.wait_until(lambda: bool(monitor.events), "the loss is reported")
    assert monitor.events == [replace(OFF_THE_BUS, gpu=gone, text=OFF_THE_BUS.text.replace("GPU-1", gone))]


def test_an_nvml_that_never_returns_stops_nothing_and_is_polled_again(double: NvmlDouble) -> None:
    with start_monitor(double, hung=0.2) as monitor:
        monitor.assert_polling_continues()
        double.state.blocked = 1
        monitor.wait_until(lambda: bool(monitor.messages), "it is reported")
        calls = double.state.calls
        monitor.wait_until(lambda: double.state.calls > calls, "another thread tries")
        double.state.blocked = 0
        double.send_event(0, XID, 62)
        monitor.wait_until(lambda: bool(monitor.events), "it is watched again")
        monitor.assert_polling_continues()
    assert monitor.events == [GpuEvent("GPU-0", 62, "XID 62 on GPU-0")]
    assert len(monitor.messages) == 1


def test_an_nvml_that_fails_at_first_is_polled_again(double: NvmlDouble) -> None:
    double.state.init_error = UNKNOWN
    with start_monitor(double) as monitor:
        monitor.wait_until(lambda: bool(monitor.messages), "it is reported")
        double.state.init_error = 0
        monitor.assert_polling_continues()
    assert monitor.messages[0].startswith("NVML: Unknown Error")


@pytest.mark.parametrize("why", ["no driver", "no GPU", "no library"])
def test_without_a_gpu_nothing_is_monitored(double: NvmlDouble, tmp_path: Path, why: str) -> None:
    double.state.init_error = DRIVER_NOT_LOADED if why == "no driver" else 0
    double.state.count = 0
    if why == "no library":
        (tmp_path / "libnvidia-ml.so.1").unlink()
    with start_monitor(double) as monitor:
        monitor.wait_until(lambda: "over" in monitor.messages, "the thread ends")
    assert monitor.events == []


def test_unknown_errors_count_as_a_loss_only_in_a_row() -> None:
    inventory = GpuInventory()
    for _ in range(2 * MAX_UNKNOWN_GPU_ERRORS):
        assert list(inventory.record_failure("GPU-1", lost=False)) == []
        assert list(inventory.record_sample("GPU-1", GpuSample(0.0))) == []
    assert [len(list(inventory.record_failure("GPU-1", lost=False))) for _ in range(MAX_UNKNOWN_GPU_ERRORS + 2)] == [
        0,
        0,
        1,
        0,
        0,
    ]


SOUND = GpuHealth("GPU-1", pcie_width=16, pcie_generation=5, clock_share=0.9, temperature=50, power=300.0)


def test_the_health_of_each_gpu_is_reported(double: NvmlDouble) -> None:
    signs = (
        GpuSign.ROWS_PENDING,
        GpuSign.MEMORY_ERRORS,
        GpuSign.PCIE_REPLAYS,
        GpuSign.NVLINK_ERRORS,
        GpuSign.NVLINK_DOWN,
    )
    ill = replace(
        SOUND, signs=signs, memory_errors=2, lifetime_errors=7, remapped_rows=3, pcie_replays=80,
        nvlink_errors=11, throttled_minutes=1, temperature=91, power=699.6,
    )  # fmt: skip
    with start_monitor(double) as monitor:
        monitor.wait_until(lambda: monitor.health == (replace(SOUND, gpu="GPU-0"), SOUND), "both are sound")
        gpu = double.state.gpus[1]
        gpu.rows_pending, gpu.remapped_rows, gpu.temperature, gpu.power = 1, 3, 91, 699_600
        gpu.pcie_replays, gpu.nvlink_replays, gpu.nvlink_recoveries = 80, 5, 6
        gpu.lifetime_errors, gpu.uncorrected_errors, gpu.nvlinks_active, gpu.slowdown = 7, 2, 17, 0x48
        monitor.wait_until(lambda: monitor.health == (replace(SOUND, gpu="GPU-0"), ill), "its health is reported")
    assert monitor.events == []


def test_rows_that_can_no_longer_be_remapped_are_an_error_at_once_unless_they_failed_before(
    double: NvmlDouble,
) -> None:
    double.state.gpus[0].rows_failed = 1
    with start_monitor(double) as monitor:
        monitor.wait_until(lambda: len(monitor.health) == 2, "both are checked")
        double.state.gpus[1].rows_failed = 1
        monitor.wait_until(lambda: bool(monitor.events), "it is reported")
        monitor.assert_polling_continues()
    assert monitor.events == [GpuEvent("GPU-1", 64, "memory rows of GPU-1 could not be remapped (XID 64)")]
    assert [health.signs for health in monitor.health] == [(GpuSign.ROWS_FAILED,)] * 2


@pytest.mark.parametrize("error", [NOT_SUPPORTED, FUNCTION_NOT_FOUND, UNKNOWN])
def test_an_unsupported_query_is_no_sign_against_a_gpu(double: NvmlDouble, error: int) -> None:
    double.state.gpus[1].health_error = error
    with start_monitor(double) as monitor:
        monitor.wait_until(lambda: len(monitor.health) == 2, "both are checked")
        monitor.assert_polling_continues()
    assert monitor.health[1] == GpuHealth("GPU-1", temperature=40)
    assert (monitor.events, monitor.messages) == ([], [])


def test_a_query_that_an_older_pynvml_lacks_is_no_sign_against_a_gpu(double: NvmlDouble) -> None:
    double.state.gpus[1].rows_pending = 1
    lacks = ("nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues", "NVML_FI_DEV_MEMORY_TEMP")
    with start_monitor(double, *lacks) as monitor:
        monitor.wait_until(lambda: len(monitor.health) == 2, "both are checked")
    assert monitor.health[1] == replace(SOUND, temperature=40)
    assert monitor.messages == []


def test_a_gpu_lost_while_its_health_is_read_is_reported_and_has_no_health_afterward(double: NvmlDouble) -> None:
    with start_monitor(double) as monitor:
        monitor.wait_until(lambda: len(monitor.health) == 2, "both are checked")
        double.state.gpus[1].health_error = GPU_IS_LOST
        monitor.wait_until(lambda: len(monitor.health) == 1, "it has none any more")
    assert monitor.events == [OFF_THE_BUS]


def test_a_journal_drops_entries_older_than_its_window() -> None:
    journal = GpuHistory("GPU-0")
    for at in (0.0, 5.0, GPU_RATE_WINDOW_SECONDS + 4.0):
        journal.add(GpuSample(at, pcie_replays=int(at)))
    assert journal.assess_health().pcie_replays == GPU_RATE_WINDOW_SECONDS - 1
