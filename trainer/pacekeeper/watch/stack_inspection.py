"""Samples each rank of a container twice when a stall is to be reported: process state, processor time, and stack.

It never waits: the reader calls `advance` at each poll. A rank of which nothing is known yet is not sampled: missing
answers prove nothing, so that the inspection then ends without a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pacekeeper.health.stack_file import extract_main_stack
from pacekeeper.health.stall_detector import PROCESS_SAMPLE_INTERVAL_SECONDS, ProcessSample
from pacekeeper_analysis.protocol.reports import EXITED_PROCESS_STATES
from pacekeeper_analysis.protocol.watched_container import ProcessSamples

from .runtime_files import RuntimeFiles

ANSWER_TIMEOUT_SECONDS = 2.0
"""Seconds within which a rank answers, also if a signal has to ask for its stack after one second."""
STOPPED_STATES = ("T", "t")
_STATE_OF_AN_ANSWER = "S"
"""State of a process that answers while no process monitor runs: it lives, and its main thread may do anything."""


@dataclass
class StackInspection:
    """One inspection. Times are in seconds, monotonic unless named otherwise."""

    name: str
    first: Mapping[int, ProcessSample] | None = None
    second: Mapping[int, ProcessSample] | None = None
    failed: bool = False
    _request: str = ""
    _requested_at: float = 0.0
    _requested_wall: float = 0.0
    _next_at: float = 0.0
    _dump_times: Mapping[int, int] = field(default_factory=dict)

    def advance(self, files: RuntimeFiles, slots: Mapping[int, int], now: float, wall: float) -> bool:
        """Return whether the inspection is over: `first` and `second` are known, or it has `failed`.

        `slots`: process ID by slot of the ranks. `wall`: seconds since the epoch.
        """
        if not self._request:
            if now >= self._next_at:
                self._begin_request(files, slots, now, wall)
            return False
        samples = self._collect(files, slots)
        is_complete = all(sample is not None for sample in samples.values())
        if not is_complete and now - self._requested_at < ANSWER_TIMEOUT_SECONDS:
            return False
        known = {slot: self._collect_late(files, slot, pid, samples[slot]) for slot, pid in slots.items()}
        found = {slot: sample for slot, sample in known.items() if sample is not None}
        if len(found) < len(slots):
            self.failed = True
            return True
        self._request, self._next_at = "", now + PROCESS_SAMPLE_INTERVAL_SECONDS
        if self.first is None:
            self.first = found
            return False
        self.second = found
        return True

    def _begin_request(self, files: RuntimeFiles, slots: Mapping[int, int], now: float, wall: float) -> None:
        self._request = f"{self.name}.{1 if self.first is None else 2}"
        self._requested_at, self._requested_wall = now, wall
        self._dump_times = {slot: files.read_dump_time(slot) for slot in slots}
        files.request_stacks(self._request)

    def _collect(self, files: RuntimeFiles, slots: Mapping[int, int]) -> dict[int, ProcessSample | None]:
        """Return the complete samples: those with a fresh state, and a stack if the process can write one."""
        samples = files.read_processes()
        return {slot: self._collect_rank(files, slot, pid, samples) for slot, pid in slots.items()}

    def _collect_rank(
        self, files: RuntimeFiles, slot: int, pid: int, samples: ProcessSamples | None
    ) -> ProcessSample | None:
        process = find_process(samples, slot, pid, self._requested_wall)
        if process is None:
            return None
        if process.process_state in (*STOPPED_STATES, *EXITED_PROCESS_STATES):
            return process
        stack = self._read_stack(files, slot)
        return None if not stack else ProcessSample(process.process_state, process.ticks, stack)

    def _collect_late(
        self, files: RuntimeFiles, slot: int, pid: int, complete: ProcessSample | None
    ) -> ProcessSample | None:
        """Return what is known of a rank after the timeout: a fresh state without a stack, or only a stack."""
        if complete is not None:
            return complete
        process = find_process(files.read_processes(), slot, pid, self._requested_wall)
        stack = self._read_stack(files, slot)
        if process is not None:
            return ProcessSample(process.process_state, process.ticks, stack)
        return ProcessSample(_STATE_OF_AN_ANSWER, 0, stack) if stack else None

    def _read_stack(self, files: RuntimeFiles, slot: int) -> str:
        """Return the rank's answer to this request, by its own thread or by faulthandler; "": none yet."""
        answer = files.read_stack(slot)
        if answer is not None and answer.request == self._request:
            return answer.format() or "no Python frame"
        if files.read_dump_time(slot) == self._dump_times.get(slot, 0):
            return ""
        main_thread, dump = files.read_stack_dump(slot)
        return extract_main_stack(dump, main_thread)


def find_process(samples: ProcessSamples | None, slot: int, pid: int, since: float) -> ProcessSample | None:
    """Return the slot's process as it was sampled after `since` (seconds since the epoch); None: it was not."""
    if samples is None or samples.at <= since:
        return None
    process = samples.ranks.get(str(slot))
    if process is None or process.pid != pid:
        return None
    return ProcessSample(process.state, process.cpu_ticks)
