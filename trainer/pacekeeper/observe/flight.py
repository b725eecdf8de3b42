"""How far the GPU has come with the rank's collectives, by NCCL's flight recorder: what tells a kernel that never ends
from a wait for peers.

Both look alike from the host, which has issued the collective in either case and waits for its GPU now. The recorder
knows of each collective whether it has begun. The *oldest* one that is not complete says it: what that one waits for on
its stream cannot be another collective. If it has begun, it waits for a peer; if not, the rank's own work is before it.

A thread looks while the rank makes no progress, since the main one may be blocked in CUDA. It writes to the ring's
state; whether somebody hangs, and who, is judged by others (`launcher.watch`, `pacekeeper_analysis.diagnose.hang`).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pacekeeper import torch_internals
from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.records import Collective, Device, Phase

from .communicators import compute_group_identity

FLIGHT_POLL_INTERVAL_SECONDS = 0.5
"""Seconds between two looks at the rank's progress."""
FLIGHT_QUERY_SECONDS, FLIGHT_QUERY_STEPS = 1.0, 5
"""The recorder is asked after so many seconds without progress, or after so many steps where they are longer."""
UNARMED_FLIGHT_QUERY_SECONDS, FLIGHT_ARMED_STEPS = 15.0, 5
"""The same in the first steps of a round: then CUDA graphs are captured, which nobody must disturb."""
# All of it is shorter than what the launcher takes for a stall (launcher.watch).

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OldestCollective:
    """The oldest collective that the GPU has not completed. All but `device` is meaningful where there is one."""

    device: Device
    collective: Collective = Collective.NONE
    group: int = 0  # the same number on all its ranks; 0: a send or receive, whose numbers are each rank's own
    sequence: int = 0


def start_flight_monitor(state: Any) -> None:
    """Looks from now on, in a thread, where torch knows of GPUs. `state`: the ring's (`ring.StateFields`)."""
    if torch.backends.cuda.is_built():
        watch = FlightMonitor(state)
        threading.Thread(target=_run_monitor, args=(watch,), name="pacekeeper-flight", daemon=True).start()


def query_flight_recorder() -> bytes | None:
    """What the recorder tells; None: nothing.

    It queries CUDA's events, and does that as NCCL's own watchdog does: on a GPU that this process uses, or it would
    make a context of half a GiB on the first one; and without invalidating a CUDA graph that another thread captures.
    """
    used = torch_internals.list_used_gpus()
    if not used:
        return None
    preserve_graph_captures()
    torch.cuda.set_device(used[0])
    return torch_internals.dump_flight_record()


def preserve_graph_captures(driver: str = "libcuda.so.1") -> None:
    """From now on no call of this thread invalidates what other threads capture.

    driver: CUDA's, since its runtime would make a context for the same call. Raises OSError without it, RuntimeError
    where it refuses.
    """
    thread_local = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL; the call leaves the mode of before in it
    error = ctypes.CDLL(driver).cuThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))
    if error:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode fails with error {error} of the CUDA driver")


def find_oldest_collective(record: bytes) -> OldestCollective:
    """The oldest collective in what the flight recorder has written of those that are not complete (its JSON, 2.x)."""
    try:
        content = parse_json(record)
        entries = [entry for entry in content.get("entries", ()) if _is_active(entry)]
        if not entries:
            return OldestCollective(Device.IDLE if content.get("pg_config") else Device.RUNNING)  # without groups, it is off
        told = [entry for entry in entries if _has_start_record(entry, content)]
        if not told:
            return OldestCollective(Device.RUNNING)
        entry = min(told, key=lambda each: int(each["record_id"]))
        device = Device.STARTED if entry["state"] == "started" else Device.SCHEDULED
        collective = _parse_collective(entry["profiling_name"])
        if entry.get("is_p2p"):
            return OldestCollective(device, collective)
        name, description = entry["process_group"]
        ranks = parse_json(content.get("pg_config", {}).get(name, {}).get("ranks", "[]"))
        group = compute_group_identity(name, description, map(int, ranks))
        return OldestCollective(device, collective, group, int(entry["collective_seq_id"]) & 0xFFFF_FFFF)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):  # another version of the recorder
        return OldestCollective(Device.RUNNING)


def compute_query_delay(steps_in_round: int, step_seconds: float) -> float:
    """After so many seconds without progress the recorder is asked."""
    return max(FLIGHT_QUERY_SECONDS if steps_in_round >= FLIGHT_ARMED_STEPS else UNARMED_FLIGHT_QUERY_SECONDS, FLIGHT_QUERY_STEPS * step_seconds)


@dataclass
class FlightMonitor:
    """Writes to the ring's state how far the GPU is."""

    state: Any
    uses_gpu: Callable[[], bool] = lambda: torch.cuda.is_initialized()
    uses_nccl: Callable[[], bool] = lambda: any("nccl" in backends for backends in torch_internals.list_backends())
    read_record: Callable[[], bytes | None] = query_flight_recorder
    _progress: tuple[int, ...] = ()
    _unchanged_since: float = 0.0
    _step_seconds: float = 0.0
    _steps: int = 0
    _step_end_ns: int = 0

    def check(self, now: float) -> None:
        """Call it every `PERIOD`. `now`: seconds, monotonic."""
        state = self.state
        if not self.uses_gpu():
            return
        progress = (state.step_end_ns, state.collectives_entered, state.phase_since_ns)
        if progress != self._progress:
            self._progress, self._unchanged_since = progress, now
            self._time_steps()
            self._write(OldestCollective(Device.RUNNING))
        elif state.phase == Phase.TRAIN and now - self._unchanged_since >= compute_query_delay(state.steps_in_round, self._step_seconds):
            self._write(self._read_oldest())

    def _read_oldest(self) -> OldestCollective:
        if not self.uses_nccl():
            return OldestCollective(Device.IDLE)
        record = self.read_record()
        return OldestCollective(Device.RUNNING) if record is None else find_oldest_collective(record)

    def _time_steps(self) -> None:
        """How long a step takes, by those that have ended since the last look that saw one end."""
        steps, end = self.state.steps_in_round, self.state.step_end_ns
        if steps > self._steps:
            if self._steps:
                self._step_seconds = (end - self._step_end_ns) * 1e-9 / (steps - self._steps)
            self._steps, self._step_end_ns = steps, end

    def _write(self, flight: OldestCollective) -> None:
        """`device` last: it says that the others are there."""
        state = self.state
        if flight.device in (Device.SCHEDULED, Device.STARTED):
            state.device_collective = flight.collective
            state.device_group = flight.group
            state.device_sequence = flight.sequence
        state.device = flight.device


def _run_monitor(watch: FlightMonitor) -> None:
    while True:
        time.sleep(FLIGHT_POLL_INTERVAL_SECONDS)
        try:
            watch.check(time.monotonic())
        except Exception:
            log.exception("kernels that never end cannot be told from waits for peers any more")
            watch.state.device = Device.RUNNING
            return


def _is_active(entry: Mapping[str, Any]) -> bool:
    """One that is retired without being complete was given up by NCCL's watchdog."""
    return entry["state"] != "completed" and not entry.get("retired", False)


def _has_start_record(entry: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    """Whether the recorder would know of it that it has begun: not of the single sends and receives of a batch, and of
    none where it records no start (TORCH_NCCL_ENABLE_TIMING is off: others have completed that never began)."""
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
"""Parts of the recorder's names (`nccl:_all_gather_base`), the longer ones first where one holds another."""


def _parse_collective(name: str) -> Collective:
    return next((collective for part, collective in _COLLECTIVE_NAME_PARTS if part in name), Collective.NONE)
