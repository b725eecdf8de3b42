"""The sidecar's loops between the runtime folder and the operator.

They retry indefinitely: the operator may be away for hours, and the training goes on during that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import replace
from pathlib import Path

from pacekeeper.runtime_folder import TouchedFile, read_boot_clock, read_json, write_plan
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.profiling.pattern import MAX_PROFILE_ANSWER_BYTES
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.plan import EvidencePart, WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport, Heartbeat

from . import connection_sampler
from .connection_sampler import ConnectionSampler
from .launcher_monitor import LauncherMonitor
from .operator_client import OperatorClient, OperatorUnavailable, RequestRejected
from .rank_metrics import MetricsReporter
from .rank_rings import RankRings
from .settings import SidecarSettings

FILE_POLL_INTERVAL_SECONDS = 0.05
"""Seconds between two polls of the files. A poll is a few system calls."""
RING_POLL_INTERVAL_SECONDS = 1.0
"""Seconds between two polls of the ranks' rings: the minimum between two heartbeats that only carry metrics."""
MIN_REPORTED_SILENCE_SECONDS, MAX_REPORTED_SILENCE_SECONDS = 5, 15
"""Between these seconds of the launcher's silence, each second is reported at once: the operator decides by them."""
PARTITIONED_FILE_SECONDS = 3.0
"""Maximum age of a partitioned launcher's file. The launcher touches it more often than that."""
MAX_CONTACT_AGE_SECONDS = 2.0
"""Maximum age of the operator's last answer while the launcher is partitioned."""
FINAL_REPORT_SECONDS = 3.0
"""Seconds within which the operator must receive the final reports."""

log = logging.getLogger(__name__)


class Sidecar:
    """The sidecar's loops. They share the last plan that was received."""

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
        self._partitioned, self._contact = (
            TouchedFile(self._runtime.partitioned),
            TouchedFile(self._runtime.operator_contact),
        )
        self._metrics = MetricsReporter()
        self._last_report: tuple[object, ...] = ()

    async def run(self) -> None:
        """Run until cancelled. Then send what the operator has not received, such as that the ranks have finished.

        The final reports are dropped after FINAL_REPORT_SECONDS.
        """
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
        """Send the last heartbeat and faults.

        The launcher exits before its sidecar is stopped, so its files are final.
        """
        self._launcher.check(time.monotonic())
        backoff = RetryBackoff()
        while (urgent := self._select_urgent_fields()) != self._last_report:
            try:
                await self._send_heartbeat(urgent)
            except (OperatorUnavailable, RequestRejected, InputError, OSError) as error:
                await backoff.sleep("last heartbeat not sent", error)
        await asyncio.gather(*(self._deliver_fault(path) for path in self._list_fault_files()))

    async def _poll_launcher(self) -> None:
        while True:
            self._launcher.check(time.monotonic())
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)

    async def _poll_ranks(self) -> None:
        while True:
            deadband = WorkerPlan.metrics_deadband if self._plan is None else self._plan.metrics_deadband
            self._metrics.update(self._ranks.measure_metrics(), deadband, time.monotonic())
            await asyncio.sleep(RING_POLL_INTERVAL_SECONDS)

    async def _sample_connections(self) -> None:
        while True:
            self._connections.sample(time.monotonic())
            self._connections.answer_link_queries(self._settings.worker, self._launcher.heartbeat.round)
            await asyncio.sleep(connection_sampler.CONNECTION_SAMPLE_INTERVAL_SECONDS)

    async def _poll_plan(self) -> None:
        """Poll the plan. Each poll carries the heartbeat.

        A poll may be held for twice as long as the previous one. So an unresponsive operator with few workers is
        detected soon.
        """
        backoff, wait, held_seconds = RetryBackoff(), self._settings.poll_seconds, 0.0
        while True:
            began = time.monotonic()
            try:
                has_plan = await self._poll(wait, min(self._settings.hold_seconds, max(wait, 2 * held_seconds)))
                held_seconds = held_seconds if has_plan else time.monotonic() - began
                backoff.reset()
            except (OperatorUnavailable, RequestRejected, InputError, OSError) as error:  # the volume is full
                await backoff.sleep("no plan", error)

    async def _send_changes(self) -> None:
        """Send the heartbeat at once when more than the step has changed, or metrics are urgent.

        It is sent in addition to the poll that is being held.
        """
        backoff = RetryBackoff()
        while True:
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)
            urgent = self._select_urgent_fields()
            needs_contact = self._needs_contact()  # at each poll: it tracks since when the files are unchanged
            if urgent == self._last_report and not needs_contact:
                continue
            try:
                await self._send_heartbeat(urgent)
                backoff.reset()
            except (
                OperatorUnavailable,
                RequestRejected,
                InputError,
                OSError,
            ) as error:  # OSError: the volume has no room for the answer
                await backoff.sleep("heartbeat not sent", error)

    def _needs_contact(self) -> bool:
        """Return whether the launcher is partitioned.

        It then ends its ranks by the age of the operator's last answer.
        """
        now, wall = read_boot_clock(), time.time()
        partitioned_age, contact_age = self._partitioned.age(now, wall), self._contact.age(now, wall)
        return partitioned_age < PARTITIONED_FILE_SECONDS and contact_age > MAX_CONTACT_AGE_SECONDS

    async def _send_heartbeat(self, urgent: tuple[object, ...]) -> None:
        await self._poll(wait=0)
        self._last_report = urgent

    async def _deliver_faults(self) -> None:
        """Send each fault until the operator has acknowledged it, several at once: none waits for another."""
        deliveries: dict[Path, asyncio.Task[None]] = {}
        while True:
            deliveries = {path: task for path, task in deliveries.items() if not task.done()}
            for path in self._list_fault_files():
                if path not in deliveries:
                    deliveries[path] = asyncio.create_task(self._deliver_fault(path))
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)

    async def _deliver_fault(self, path: Path) -> None:
        backoff = RetryBackoff()
        fault = _read_fault(path)
        if fault is not None:
            fault = self._connections.add_blocked(fault, time.monotonic())
        while fault is not None:
            try:
                await self._client.send_fault(fault)
                break
            except OperatorUnavailable as error:
                await backoff.sleep(f"fault {path.stem} not accepted", error)
            except RequestRejected as error:
                log.error("fault %s dropped: %s", path.stem, error)
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
                log.error("evidence %s dropped: %s", plan.evidence_request, error)
                answered = plan.evidence_request
            except OperatorUnavailable as error:
                await backoff.sleep("evidence not accepted", error)

    async def _deliver_probes(self) -> None:
        """Send the results of the plan's link probe, once."""
        delivered = ""
        backoff = RetryBackoff()
        while True:
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)
            probe = None if self._plan is None else self._plan.probe
            if probe is None or probe.name == delivered:
                continue
            evidence = _read_probe_evidence(
                self._runtime.probes, probe.name, self._settings.worker, self._launcher.heartbeat.round
            )
            if evidence is None:
                continue
            try:
                await self._client.send_evidence(evidence)
                delivered = probe.name
                backoff.reset()
            except RequestRejected as error:
                log.error("probe %s dropped: %s", probe.name, error)
                delivered = probe.name
            except OperatorUnavailable as error:
                await backoff.sleep("probe not accepted", error)

    async def _deliver_patterns(self) -> None:
        """Send what ranks have written for profiles, each file once."""
        backoff = RetryBackoff()
        while True:
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)
            for path in filter(Path.is_file, self._runtime.patterns.glob("[!.]*.json")):
                window, _, rank = path.stem.rpartition(".")
                try:
                    await self._client.send_pattern(window, int(rank), _read_pattern(path))
                    backoff.reset()
                except OperatorUnavailable as error:
                    await backoff.sleep(f"pattern {path.stem} not accepted", error)
                    continue
                except (RequestRejected, ValueError, OSError) as error:
                    log.error("pattern %s dropped: %s", path.stem, error)
                _delete_file(path)

    async def _poll(self, wait: float, hold: float = 0.0) -> bool:
        """Poll the plan, and return whether the operator answered with a plan before the poll's time was over."""
        known_version = None if self._plan is None else self._plan.version
        heartbeat = replace(self._launcher.heartbeat, rank_metrics=self._metrics.take_report())
        plan = await self._client.fetch_plan(heartbeat, known_version, wait, hold)
        if plan is not None and (self._plan is None or plan.version > self._plan.version):
            write_plan(self._runtime.plan, plan)
            self._plan = plan
        self._runtime.operator_contact.touch()  # last: who sees it finds this answer's plan
        return plan is not None

    def _list_fault_files(self) -> list[Path]:
        return sorted(self._runtime.faults.glob("*.json"))

    def _select_urgent_fields(self) -> tuple[object, ...]:
        """Return what of the heartbeat cannot wait for the next poll."""
        heartbeat = self._launcher.heartbeat
        return select_urgent_fields(heartbeat, heartbeat.launcher_silent_seconds, self._metrics.urgent_changes)


class RetryBackoff:
    """Delays that double from 0.2 s to 5 s, with jitter, so that thousands of sidecars do not reconnect at once."""

    def __init__(self, first: float = 0.2, longest: float = 5.0) -> None:
        self._first, self._longest = first, longest
        self._next = first

    def reset(self) -> None:
        self._next = self._first

    async def sleep(self, problem: str, error: Exception) -> None:
        if self._next == self._first:
            log.warning("%s: %s", problem, error)
        await asyncio.sleep(self._next * random.uniform(0.5, 1.0))
        self._next = min(2 * self._next, self._longest)


def select_urgent_fields(heartbeat: Heartbeat, silent_seconds: float, urgent_changes: int) -> tuple[object, ...]:
    """Return what of a heartbeat cannot wait for the next poll.

    `silent_seconds`: the launcher's silence. `urgent_changes`: of the metrics. Signs of a GPU fault cannot wait; other
    values of the GPUs' health can, and so can steps, snapshots, and checkpoints.
    """
    urgent = replace(
        heartbeat,
        progress=replace(heartbeat.progress, step=None, steps_in_round=0),
        checkpoint=replace(heartbeat.checkpoint, step=None, snapshot_step=None, age_seconds=None),
        launcher_silent_seconds=0.0,
        rank_metrics=(),
        gpus=(),
    )
    return urgent, heartbeat.gpu_signs, _quantize_silence(silent_seconds), urgent_changes


def _quantize_silence(seconds: float) -> int:
    """Return a number that changes whenever the launcher's silence, or its end, is to be reported."""
    return min(int(seconds), MAX_REPORTED_SILENCE_SECONDS) if seconds >= MIN_REPORTED_SILENCE_SECONDS else 0


def _read_fault(path: Path) -> FaultReport | None:
    try:
        return FaultReport.from_json(parse_json(path.read_bytes()))
    except (InputError, ValueError) as error:
        log.error("fault %s dropped: %s", path.stem, error)
        return None


def _read_probe_evidence(path: Path, name: str, worker: str, round_: int) -> Evidence | None:
    """Return the results of the probe; None: the launcher has not measured all of it yet."""
    try:
        content = read_json(path)
        if content is None or content.get("name") != name:
            return None
        return Evidence.from_json({"request": name, "worker": worker, "round": round_, "probes": content["probes"]})
    except (InputError, ValueError, KeyError, AttributeError):
        return None


def _read_pattern(path: Path) -> bytes:
    """Read what a rank has written. Raises OSError, and InputError if it is larger than a rank writes."""
    if path.stat().st_size > MAX_PROFILE_ANSWER_BYTES:
        raise InputError(f"{path.name}: must be {MAX_PROFILE_ANSWER_BYTES} bytes at most")
    return path.read_bytes()


def _delete_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def _read_stored_plan(path: Path) -> WorkerPlan | None:
    """Return the plan that an earlier run of this sidecar received; None: there is none, or it is malformed."""
    try:
        content = read_json(path)
        return None if content is None else WorkerPlan.from_json(content)
    except (InputError, ValueError):
        return None
