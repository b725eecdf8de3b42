"""The worker of a TrainingJob as its sidecar reports it: launcher, ranks, and connections.

The launcher stores heartbeat and faults in the runtime folder, and follows the answers that the sidecar stores there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pacekeeper.health.rank_metrics import CurrentRankMetrics
from pacekeeper.health.rank_rings import RankRings
from pacekeeper.runtime_folder import (
    RequestsFile,
    TouchedFile,
    read_boot_clock,
    read_bounded,
    read_json,
    write_json,
)
from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.profiling.pattern import MAX_PROFILE_ANSWER_BYTES
from pacekeeper_analysis.protocol.decoding import parse_json
from pacekeeper_analysis.protocol.plan import WorkerPlan, WorkerRole
from pacekeeper_analysis.protocol.reports import Evidence, FaultReport, Heartbeat
from pacekeeper_analysis.protocol.requests import EvidencePart, EvidenceRequest, WorkerRequests

from . import connection_sampler
from .connection_sampler import ConnectionSampler
from .delivery import RetryBackoff, deliver_report
from .launcher_monitor import LauncherMonitor
from .monitor import Monitor, SidecarLoop
from .operator_client import OperatorClient
from .settings import SidecarSettings

FILE_POLL_INTERVAL_SECONDS = 0.05
"""Seconds between two polls of the files. A poll is a few system calls."""
PARTITIONED_FILE_SECONDS = 3.0
"""Maximum age of a partitioned launcher's file. The launcher touches it more often than that."""
MAX_CONTACT_AGE_SECONDS = 2.0
"""Maximum age of the operator's last answer while the launcher is partitioned."""
MAX_FAULT_FILE_BYTES = 1 << 20
"""Limit of a fault's file: the operator accepts no longer one."""

log = logging.getLogger(__name__)


class WorkerMonitor(Monitor):
    """Reads the runtime folder of a worker, and stores the operator's answers there."""

    poll_interval_seconds = FILE_POLL_INTERVAL_SECONDS

    def __init__(self, settings: SidecarSettings, ranks: RankRings, connections: ConnectionSampler) -> None:
        self._worker, self._runtime = settings.worker, settings.runtime
        self._ranks = ranks
        self._connections = connections
        self._launcher = LauncherMonitor(settings.runtime, settings.worker)
        self._partitioned = TouchedFile(self._runtime.partitioned)
        self._contact = TouchedFile(self._runtime.operator_contact)
        self._requests = WorkerRequests()

    @property
    def heartbeat(self) -> Heartbeat:
        return self._launcher.heartbeat

    def check(self, now: float, wall: float, *, is_over: bool = False) -> None:
        del wall, is_over
        self._launcher.check(now)

    def measure_metrics(self) -> Sequence[CurrentRankMetrics]:
        return self._ranks.measure_metrics()

    def build_evidence(self, request: EvidenceRequest, plan: WorkerPlan | None) -> Evidence | None:
        if plan is None or plan.role is not WorkerRole.MEMBER:
            return None
        evidence = self._ranks.build_evidence(request.name, self._worker, self.heartbeat.round, request.parts)
        if EvidencePart.LINKS in request.parts:
            evidence = replace(evidence, links=self._connections.windows())
        return evidence

    def list_faults(self) -> Iterable[str]:
        return sorted(path.name for path in _list_json_files(self._runtime.faults))

    def read_fault(self, name: str) -> FaultReport | None:
        fault = read_fault_file(self._runtime.faults / name)
        return None if fault is None else self._connections.add_blocked(fault, time.monotonic())

    def drop_fault(self, name: str) -> None:
        (self._runtime.faults / name).unlink(missing_ok=True)

    def list_loops(self, client: OperatorClient) -> Iterable[SidecarLoop]:
        return (
            self._sample_connections,
            lambda: self._deliver_probes(client),
            lambda: self._deliver_patterns(client),
        )

    def read_stored_answers(self) -> tuple[WorkerPlan | None, WorkerRequests]:
        self._requests = RequestsFile(self._runtime.requests).read()
        return read_stored_plan(self._runtime.plan), self._requests

    def store_answer(self, requests: WorkerRequests | None, plan: WorkerPlan | None) -> None:
        if requests is not None:
            write_json(self._runtime.requests, requests.to_json())  # before the plan, which may end the requests
            self._requests = requests
        if plan is not None:
            write_json(self._runtime.plan, plan.to_json())
        self._runtime.operator_contact.touch()  # last: who sees it finds this answer's plan

    def needs_contact(self) -> bool:
        """Return whether the launcher is partitioned: it ends its ranks by the age of the operator's last answer."""
        now, wall = read_boot_clock(), time.time()
        partitioned_age, contact_age = self._partitioned.age(now, wall), self._contact.age(now, wall)
        return partitioned_age < PARTITIONED_FILE_SECONDS and contact_age > MAX_CONTACT_AGE_SECONDS

    async def _sample_connections(self) -> None:
        while True:
            self._connections.sample(time.monotonic())
            self._connections.answer_link_queries(self._worker, self.heartbeat.round)
            await asyncio.sleep(connection_sampler.CONNECTION_SAMPLE_INTERVAL_SECONDS)

    async def _deliver_probes(self, client: OperatorClient) -> None:
        """Send the results of each link probe, once."""
        delivered, backoff = "", RetryBackoff()
        while True:
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)
            probe = self._requests.probe
            if probe is None or probe.name == delivered:
                continue
            evidence = _read_probe_evidence(self._runtime.probes, probe.name, self._worker, self.heartbeat.round)
            if evidence is None:
                continue
            if await deliver_report(client.send_evidence(evidence), f"probe {probe.name}", backoff):
                delivered = probe.name

    async def _deliver_patterns(self, client: OperatorClient) -> None:
        """Send what ranks have written for profiles, each file once."""
        backoff = RetryBackoff()
        while True:
            await asyncio.sleep(FILE_POLL_INTERVAL_SECONDS)
            for path in _list_json_files(self._runtime.patterns):
                window, _, rank = path.stem.rpartition(".")
                content = read_bounded(path, MAX_PROFILE_ANSWER_BYTES)
                if content is None or len(content) > MAX_PROFILE_ANSWER_BYTES or not rank.isdecimal():
                    log.error(
                        "pattern %s dropped: it must be window.rank.json, and no rank writes more bytes", path.name
                    )
                elif not await deliver_report(
                    client.send_pattern(window, int(rank), content), f"pattern {path.stem}", backoff
                ):
                    continue
                path.unlink(missing_ok=True)


def read_fault_file(path: Path) -> FaultReport | None:
    """Return what a launcher has written; None: it is malformed."""
    try:
        return FaultReport.from_json(parse_json(read_bounded(path, MAX_FAULT_FILE_BYTES) or b""))
    except (InputError, ValueError) as error:
        log.error("fault %s dropped: %s", path.stem, error)
        return None


def read_stored_plan(path: Path) -> WorkerPlan | None:
    """Return the plan that an earlier run of this sidecar received; None: there is none, or it is malformed."""
    try:
        content = read_json(path)
        return None if content is None else WorkerPlan.from_json(content)
    except (InputError, ValueError):
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


def _list_json_files(folder: Path) -> list[Path]:
    """Return the complete files of a folder. Links and folders are from no launcher and no rank."""
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if entry.name.endswith(".json") and entry.name[0] != "." and entry.is_file(follow_symlinks=False)
            ]
    except OSError:
        return []
