"""What the sidecar does all the time: loops between the runtime folder and the operator.

None of them ever gives up: the operator may be away for hours, and the training goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import replace
from pathlib import Path

from pacekeeper.runtime import TouchedFile, read_boot_clock, read_json, write_plan
from pacekeeper_analysis.behaviour.pattern import MAX_PROFILE_ANSWER_BYTES
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.plan import EvidencePart, WorkerRole, WorkerPlan
from pacekeeper_analysis.reading import parse_json
from pacekeeper_analysis.reports import Evidence, FaultReport

from . import connections
from .client import OperatorClient, RequestRejected, OperatorUnavailable
from .connections import ConnectionSampler
from .figures import MetricsReporter
from .launcher import LauncherMonitor
from .ranks import RankRings
from .settings import SidecarSettings

FILE_POLL_INTERVAL_SECONDS = 0.05
"""How often files are looked at. A look is a few system calls."""
QUIET_FIELDS = (
    *("step", "steps_in_round", "snapshot_step", "checkpoint_step"),
    *("checkpoint_age_seconds", "launcher_silent_seconds", "gpus", "figures"),
)
"""Fields of the heartbeat whose change can wait for the next poll, or has its own rule; of the GPUs' health, that of
their signs cannot wait."""
RING_POLL_INTERVAL_SECONDS = 1.0
"""How often the ranks' rings are looked at: the least time between two heartbeats that only tell of figures."""
MIN_REPORTED_SILENCE_SECONDS, MAX_REPORTED_SILENCE_SECONDS = 5, 15
"""Seconds of the launcher's silence between which each second is told at once: the operator decides by them."""
PARTITIONED_FILE_SECONDS = 3.0
"""A launcher that is alone says so more often than that."""
MAX_CONTACT_AGE_SECONDS = 2.0
"""The operator's last answer is to be no older for such a launcher."""
FINAL_REPORT_SECONDS = 3.0
"""How long the operator may take to hear of the end."""

log = logging.getLogger(__name__)


class Sidecar:
    """Its loops share the plan that was fetched last."""

    def __init__(
        self, settings: SidecarSettings, client: OperatorClient, ranks: RankRings, connections: ConnectionSampler
    ) -> None:
        self._settings = settings
        self._runtime = settings.runtime
        self._client = client
        self._ranks = ranks
        self._connections = connections
        self._plan = _read_stored_plan(settings.runtime.plan)
        self._launcher = LauncherMonitor(settings.runtime, settings.worker)
        self._partitioned, self._contact = TouchedFile(self._runtime.partitioned), TouchedFile(self._runtime.operator_contact)
        self._metrics = MetricsReporter()
        self._last_report: dict[str, object] = {}

    async def run(self) -> None:
        """Until cancelled. What the operator has not heard of by then, such as that the ranks have finished, it hears
        before this returns, if it answers."""
        loops = (
            *(self._poll_launcher, self._poll_ranks, self._sample_connections, self._poll_plan),
            *(self._send_changes, self._deliver_faults, self._answer_requests, self._deliver_probes),
            self._deliver_patterns,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                for loop in loops:
                    tasks.create_task(loop())
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FINAL_REPORT_SECONDS):
                    await self._send_final_reports()

    async def _send_final_reports(self) -> None:
        """The launcher ends before its sidecar is told to: its last words are there."""
        self._launcher.check(time.monotonic())
        backoff = RetryBackoff()
        while (now := self._select_urgent_fields()) != self._last_report:
            try:
                await self._send_heartbeat(now)
            except (OperatorUnavailable, RequestRejected, InputError, OSError) as error:
                await backoff.sleep("the last heartbeat is not sent", error)
        await asyncio.gather(*(self._deliver_fault(path) for path in self._list_fault_files()))

    async def _poll_launcher(self) -> None:
        while True:
            self._launcher.check(time.monotonic())
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)

    async def _poll_ranks(self) -> None:
        while True:
            band = WorkerPlan.figures_band if self._plan is None else self._plan.figures_band
            self._metrics.update(self._ranks.measure_metrics(), band, time.monotonic())
            await asyncio.sleep(RING_POLL_INTERVAL_SECONDS)

    async def _sample_connections(self) -> None:
        while True:
            self._connections.sample(time.monotonic())
            self._connections.answer_link_queries(self._settings.worker, self._launcher.heartbeat.round)
            await asyncio.sleep(connections.CONNECTION_SAMPLE_INTERVAL_SECONDS)

    async def _poll_plan(self) -> None:
        """Poll the plan; each poll carries the heartbeat. It may be held for twice as long as the one before was, so
        that an operator that stands still is soon given up where it has few workers."""
        backoff, wait, held = RetryBackoff(), self._settings.poll_seconds, 0.0
        while True:
            began = time.monotonic()
            try:
                news = await self._poll(wait, min(self._settings.hold_seconds, max(wait, 2 * held)))
                held = held if news else time.monotonic() - began
                backoff.reset()
            except (OperatorUnavailable, RequestRejected, InputError, OSError) as error:  # the volume is full
                await backoff.sleep("no plan", error)

    async def _send_changes(self) -> None:
        """Send the heartbeat at once when more than the step has changed, or figures are news, beside the poll that is
        being held."""
        backoff = RetryBackoff()
        while True:
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)
            now = self._select_urgent_fields()
            asked = self._needs_contact()  # at each look, or it would not know since when
            if now == self._last_report and not asked:
                continue
            try:
                await self._send_heartbeat(now)
                backoff.reset()
            except (OperatorUnavailable, RequestRejected, InputError, OSError) as error:  # the volume has no room for the answer
                await backoff.sleep("heartbeat not sent", error)

    def _needs_contact(self) -> bool:
        """A launcher without peers ends its ranks by the age of the operator's last answer."""
        now, wall = read_boot_clock(), time.time()
        alone, contact = self._partitioned.age(now, wall), self._contact.age(now, wall)
        return alone < PARTITIONED_FILE_SECONDS and contact > MAX_CONTACT_AGE_SECONDS

    async def _send_heartbeat(self, loud: dict[str, object]) -> None:
        await self._poll(wait=0)
        self._last_report = loud

    async def _deliver_faults(self) -> None:
        """Send each fault until the operator has acknowledged it; several at once, so that none waits for another."""
        under_way: dict[Path, asyncio.Task[None]] = {}
        while True:
            under_way = {path: task for path, task in under_way.items() if not task.done()}
            for path in self._list_fault_files():
                if path not in under_way:
                    under_way[path] = asyncio.create_task(self._deliver_fault(path))
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)

    async def _deliver_fault(self, path: Path) -> None:
        backoff = RetryBackoff()
        fault = _read_fault(path)
        if fault is not None:
            fault = self._connections.add_blocked(fault, time.monotonic())
        while fault is not None:
            try:
                await self._client.send_fault(fault)
                self._touch_contact()
                break
            except OperatorUnavailable as error:
                await backoff.sleep(f"fault {path.stem} not taken", error)
            except RequestRejected as error:
                log.error("fault %s is dropped: %s", path.stem, error)
                break
        _delete_file(path)

    async def _answer_requests(self) -> None:
        """Answer the plan's request for evidence, once."""
        answered = ""
        backoff = RetryBackoff()
        while True:
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)
            plan = self._plan
            if plan is None or plan.role is not WorkerRole.MEMBER or plan.evidence_request in ("", answered):
                continue
            evidence = self._ranks.build_evidence(
                plan.evidence_request,
                self._settings.worker,
                self._launcher.heartbeat.round,
                plan.evidence_parts,
            )
            if EvidencePart.LINKS in plan.evidence_parts:
                evidence = replace(evidence, links=self._connections.windows())
            try:
                await self._client.send_evidence(evidence)
                answered = plan.evidence_request
                backoff.reset()
            except RequestRejected as error:
                log.error("evidence %s is dropped: %s", plan.evidence_request, error)
                answered = plan.evidence_request
            except OperatorUnavailable as error:
                await backoff.sleep("evidence not taken", error)

    async def _deliver_probes(self) -> None:
        """What the launcher has measured for the plan's probe, once."""
        delivered = ""
        backoff = RetryBackoff()
        while True:
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)
            probe = None if self._plan is None else self._plan.probe
            if probe is None or probe.name == delivered:
                continue
            found = _read_probe_evidence(self._runtime.probes, probe.name, self._settings.worker, self._launcher.heartbeat.round)
            if found is None:
                continue
            try:
                await self._client.send_evidence(found)
                delivered = probe.name
                backoff.reset()
            except RequestRejected as error:
                log.error("probe %s is dropped: %s", probe.name, error)
                delivered = probe.name
            except OperatorUnavailable as error:
                await backoff.sleep("probe not taken", error)

    async def _deliver_patterns(self) -> None:
        """What ranks have written of behaviour windows, each once."""
        backoff = RetryBackoff()
        while True:
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)
            for path in filter(Path.is_file, self._runtime.patterns.glob("[!.]*.json")):
                window, _, rank = path.stem.rpartition(".")
                try:
                    await self._client.send_pattern(window, int(rank), _read_pattern(path))
                    backoff.reset()
                except OperatorUnavailable as error:
                    await backoff.sleep(f"pattern {path.stem} not taken", error)
                    continue
                except (RequestRejected, ValueError, OSError) as error:
                    log.error("pattern %s is dropped: %s", path.stem, error)
                _delete_file(path)

    async def _poll(self, wait: float, hold: float = 0.0) -> bool:
        """Whether there was an answer before it was due."""
        after = -1 if self._plan is None else self._plan.version
        beat = replace(self._launcher.heartbeat, figures=self._metrics.take_report())
        plan = await self._client.fetch_plan(beat, after, wait, hold)
        self._touch_contact()
        if plan is not None and (self._plan is None or plan.version > self._plan.version):
            write_plan(self._runtime.plan, plan)
            self._plan = plan
        return plan is not None

    def _list_fault_files(self) -> list[Path]:
        return sorted(self._runtime.faults.glob("*.json"))

    def _touch_contact(self) -> None:
        self._runtime.operator_contact.touch()

    def _select_urgent_fields(self) -> dict[str, object]:
        """The heartbeat without what can wait."""
        beat = self._launcher.heartbeat
        loud = {name: value for name, value in beat.to_json().items() if name not in QUIET_FIELDS}
        silence = _quantize_silence(beat.launcher_silent_seconds)
        return {**loud, "silence": silence, "gpu_signs": beat.gpu_signs, "figures": self._metrics.urgent_changes}


class RetryBackoff:
    """Waits that double from 0.2 s to 5 s, with jitter, so that thousands of sidecars do not come back as one."""

    def __init__(self, first: float = 0.2, longest: float = 5.0) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def reset(self) -> None:
        self._next = self._first

    async def sleep(self, what: str, why: Exception) -> None:
        if self._next == self._first:
            log.warning("%s: %s", what, why)
        await asyncio.sleep(self._next * random.uniform(0.5, 1.0))
        self._next = min(2 * self._next, self._longest)


def _quantize_silence(seconds: float) -> int:
    """Another number whenever the operator is to hear of the launcher's silence, or of its end."""
    return min(int(seconds), MAX_REPORTED_SILENCE_SECONDS) if seconds >= MIN_REPORTED_SILENCE_SECONDS else 0


def _read_fault(path: Path) -> FaultReport | None:
    try:
        return FaultReport.from_json(parse_json(path.read_bytes()))
    except (InputError, ValueError) as error:
        log.error("fault %s is dropped: %s", path.stem, error)
        return None


def _read_probe_evidence(path: Path, name: str, worker: str, round_: int) -> Evidence | None:
    """None: the launcher has not measured (all of) it yet."""
    try:
        written = read_json(path)
        if written is None or written.get("name") != name:
            return None
        return Evidence.from_json({"request": name, "worker": worker, "round": round_, "probes": written["probes"]})
    except (InputError, ValueError, KeyError, AttributeError):
        return None


def _read_pattern(path: Path) -> bytes:
    """What a rank has written. Raises OSError, and InputError where it is more than a rank sends."""
    if path.stat().st_size > MAX_PROFILE_ANSWER_BYTES:
        raise InputError(f"{path.name}: must be {MAX_PROFILE_ANSWER_BYTES} bytes at most")
    return path.read_bytes()


def _delete_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def _read_stored_plan(path: Path) -> WorkerPlan | None:
    """The plan that an earlier run of this sidecar has fetched."""
    try:
        written = read_json(path)
        return None if written is None else WorkerPlan.from_json(written)
    except (InputError, ValueError):
        return None
