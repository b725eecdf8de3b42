"""Progress of the GPU in the rank's collectives, by NCCL's flight recorder.

It distinguishes a kernel that never ends from a wait for peers. Both look alike from the host, which has issued the
collective in either case and waits for its GPU. The recorder has for each collective whether it has begun. The *oldest*
incomplete one decides, because it does not wait for another collective on its stream. If it has begun, it waits for a
peer. If not, the rank's own work is before it.

A thread checks while the rank makes no progress, since the main thread may be blocked in CUDA. It writes to the ring's
state. Other modules decide whether a rank hangs, and which one (`pacekeeper.launcher.health`,
`pacekeeper_analysis.failures`).
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_internals
from ..records import Collective, Device, Phase
from .communicators import compute_group_identity

FLIGHT_POLL_INTERVAL_SECONDS = 0.5
"""Seconds between two checks of the rank's progress."""
FLIGHT_QUERY_SECONDS, FLIGHT_QUERY_STEPS = 1.0, 5
"""The recorder is queried after this number of seconds without progress, or of steps if they take longer."""
UNARMED_FLIGHT_QUERY_SECONDS, FLIGHT_ARMED_STEPS = 15.0, 5
"""The same in the first steps of a round, in which CUDA graphs are captured, which must not be disturbed."""
# All of them are shorter than the launcher's limit for a stall (launcher/health).

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OldestCollective:
    """The oldest collective that the GPU has not completed. Fields other than `device` are valid if there is one."""

    device: Device
    collective: Collective = Collective.NONE
    group: int | None = None  # the same number on all its ranks; None: a send or receive, which has none
    sequence: int | None = None  # in `group`


def start_flight_monitor(state: Any) -> None:
    """Check in a thread from now on, if torch supports GPUs. `state`: the ring's (`record_ring.StateFields`)."""
    if torch.backends.cuda.is_built():
        monitor = FlightMonitor(state)
        threading.Thread(target=_run_monitor, args=(monitor,), name="pacekeeper-flight", daemon=True).start()


def query_flight_recorder() -> bytes | None:
    """Return the content of the recorder; None: there is none.

    It queries CUDA events as NCCL's own watchdog does, on a GPU that this process uses: otherwise it would create a
    context of half a GiB on the first one. It does not invalidate a CUDA graph that another thread captures.
    """
    gpus = torch_internals.list_used_gpus()
    if not gpus:
        return None
    preserve_graph_captures()
    torch.cuda.set_device(gpus[0])
    return torch_internals.dump_flight_record()


def preserve_graph_captures(driver: str = "libcuda.so.1") -> None:
    """Make later calls of this thread preserve graph captures of other threads.

    `driver`: CUDA's driver, since its runtime would create a context for the same call. Raises OSError without it,
    RuntimeError if it refuses.
    """
    thread_local = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL; the call replaces it by the previous mode
    error = ctypes.CDLL(driver).cuThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))
    if error:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode fails with error {error} of the CUDA driver")


def find_oldest_collective(record: bytes) -> OldestCollective:
    """Return the oldest of the incomplete collectives in the flight recorder's output (its JSON, 2.x)."""
    try:
        content = json.loads(record)
        entries = [entry for entry in content.get("entries", ()) if _is_active(entry)]
        if not entries:
            return OldestCollective(
                Device.IDLE if content.get("pg_config") else Device.RUNNING
            )  # without groups, the recorder is off
        timed_entries = [entry for entry in entries if _has_start_record(entry, content)]
        if not timed_entries:
            return OldestCollective(Device.RUNNING)
        entry = min(timed_entries, key=lambda candidate: int(candidate["record_id"]))
        device = Device.STARTED if entry["state"] == "started" else Device.SCHEDULED
        collective = _parse_collective(entry["profiling_name"])
        if entry.get("is_p2p"):
            return OldestCollective(device, collective)
        name, description = entry["process_group"]
        ranks = json.loads(content.get("pg_config", {}).get(name, {}).get("ranks", "[]"))
        group = compute_group_identity(name, description, map(int, ranks))
        return OldestCollective(device, collective, group, int(entry["collective_seq_id"]) & 0xFFFF_FFFF)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ):  # another version of the recorder
        return OldestCollective(Device.RUNNING)


def compute_query_delay(steps_in_round: int, step_seconds: float | None) -> float:
    """Return the seconds without progress after which the recorder is queried. `step_seconds`: None: unknown."""
    return max(
        FLIGHT_QUERY_SECONDS if steps_in_round >= FLIGHT_ARMED_STEPS else UNARMED_FLIGHT_QUERY_SECONDS,
        FLIGHT_QUERY_STEPS * (step_seconds or 0.0),
    )


@dataclass
class FlightMonitor:
    """Writes the GPU's progress to the ring's state."""

    state: Any
    uses_gpu: Callable[[], bool] = lambda: torch.cuda.is_initialized()
    uses_nccl: Callable[[], bool] = lambda: any("nccl" in backends for backends in torch_internals.list_backends())
    read_record: Callable[[], bytes | None] = query_flight_recorder
    _progress: tuple[int, ...] = ()
    _unchanged_since: float = 0.0
    _step_seconds: float | None = None
    _steps: int = 0
    _step_end_ns: int = 0

    def check(self, now: float) -> None:
        """Check the progress. Call it every `FLIGHT_POLL_INTERVAL_SECONDS`. `now`: seconds, monotonic."""
        state = self.state
        if not self.uses_gpu():
            return
        progress = (state.step_end_ns, state.collectives_entered, state.phase_since_ns)
        if progress != self._progress:
            self._progress, self._unchanged_since = progress, now
            self._time_steps()
            self._write(OldestCollective(Device.RUNNING))
        elif state.phase == Phase.TRAIN and now - self._unchanged_since >= compute_query_delay(
            state.steps_in_round, self._step_seconds
        ):
            self._write(self._read_oldest())

    def _read_oldest(self) -> OldestCollective:
        if not self.uses_nccl():
            return OldestCollective(Device.IDLE)
        record = self.read_record()
        return OldestCollective(Device.RUNNING) if record is None else find_oldest_collective(record)

    def _time_steps(self) -> None:
        """Measure the step time, from the steps that have ended since the last check that saw one end."""
        steps, end = self.state.steps_in_round, self.state.step_end_ns
        if steps > self._steps:
            if self._steps:
                self._step_seconds = (end - self._step_end_ns) * 1e-9 / (steps - self._steps)
            self._steps, self._step_end_ns = steps, end

    def _write(self, flight: OldestCollective) -> None:
        """Write `device` last: it makes the other fields valid."""
        state = self.state
        if flight.device in (Device.SCHEDULED, Device.STARTED):
            state.device_collective = flight.collective
            state.device_group = flight.group or 0
            state.device_sequence = flight.sequence or 0
        state.device = flight.device


def _run_monitor(monitor: FlightMonitor) -> None:
    while True:
        time.sleep(FLIGHT_POLL_INTERVAL_SECONDS)
        try:
            monitor.check(time.monotonic())
        except Exception:
            log.exception(
                "flight recorder polling failed; endless kernels are no longer distinguished from waits for peers"
            )
            monitor.state.device = Device.RUNNING
            return


def _is_active(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry is incomplete. An incomplete one that is retired was abandoned by NCCL's watchdog."""
    return entry["state"] != "completed" and not entry.get("retired", False)


def _has_start_record(entry: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    """Return whether the recorder would have recorded the start of a collective.

    It does not for the individual sends and receives of a batch, and for none if TORCH_NCCL_ENABLE_TIMING is off: then
    collectives have completed without a recorded start.
    """
    if entry["state"] == "started":
        return True
    status = content.get("pg_status", {}).get(str(entry["pg_id"]), {})
    started, completed = (int(status.get(f"last_{word}_collective", -1)) for word in ("started", "completed"))
    return not entry.get("is_p2p") and started >= completed


_COLLECTIVE_NAME_PARTS = (
    ("barrier", Collective.BARRIER),
    ("all_reduce", Collective.ALL_REDUCE),
    ("allreduce", Collective.ALL_REDUCE),
    ("reduce_scatter", Collective.REDUCE_SCATTER),
    ("all_gather", Collective.ALL_GATHER),
    ("allgather", Collective.ALL_GATHER),
    ("all_to_all", Collective.ALL_TO_ALL),
    ("broadcast", Collective.BROADCAST),
    ("reduce", Collective.REDUCE),
    ("gather", Collective.GATHER),
    ("scatter", Collective.SCATTER),
    ("send", Collective.SEND),
    ("recv", Collective.RECV),
)
"""Parts of the recorder's names (`nccl:_all_gather_base`); a part that contains another one comes first."""


def _parse_collective(name: str) -> Collective:
    return next((collective for part, collective in _COLLECTIVE_NAME_PARTS if part in name), Collective.NONE)
