"""A sidecar that records instead of reporting: `python -m bench.scripts.diagnosis.agent NUMBER`, in a host's network.

It writes down what a sidecar would report, and when, one JSON object a line (`reports-NUMBER`): heartbeats with metrics
by the sidecar's own rule, stalls as the launcher reports them, and once a second the answer to a request for
everything. Collectives are large: they are requested every third time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pacekeeper.health.rank_metrics import MetricsReporter
from pacekeeper.health.rank_rings import RankRings
from pacekeeper.runtime_folder import RuntimeFolder, read_json
from pacekeeper.sidecar.connection_sampler import ConnectionSampler
from pacekeeper_analysis.protocol.plan import Plan
from pacekeeper_analysis.protocol.reports import FaultReport, Heartbeat
from pacekeeper_analysis.protocol.requests import EvidencePart

WINDOW_STEPS = 32
POLL_INTERVAL_SECONDS, EVIDENCE_INTERVAL_SECONDS = 0.1, 1.0
POLL_SECONDS = 3.0
"""The longest time between two heartbeats."""
ALL_PARTS_EVERY, ALL_PARTS = 3, (EvidencePart.WINDOWS, EvidencePart.OPERATIONS)


class Agent:
    """One worker's."""

    def __init__(self, number: int) -> None:
        self._runtime, self._worker = RuntimeFolder.from_environment(), os.environ["PACEKEEPER_WORKER"]
        self._path = Path(os.environ["FOLDER"]) / f"reports-{number}"
        self._rings = RankRings(self._runtime, WINDOW_STEPS)
        self._connections = ConnectionSampler(self._runtime)
        self._metrics = MetricsReporter()
        self._reported_changes, self._reported_at, self._polls, self._probed = 0, 0.0, 0, ""

    def run(self) -> None:
        """Until killed."""
        due = time.monotonic()
        while True:
            self._runtime.operator_contact.touch()
            self._write_faults()
            self._write_probes()
            if time.monotonic() >= due:
                due += EVIDENCE_INTERVAL_SECONDS
                self._poll(time.monotonic())
            time.sleep(POLL_INTERVAL_SECONDS)

    def _poll(self, now: float) -> None:
        self._connections.sample(now)
        self._metrics.update(self._rings.measure_metrics(), Plan.metrics_deadband, now)
        heartbeat = Heartbeat.from_json(read_json(self._runtime.heartbeat) or {})
        if self._metrics.urgent_changes != self._reported_changes or now >= self._reported_at + POLL_SECONDS:
            self._reported_changes, self._reported_at = self._metrics.urgent_changes, now
            self._write(heartbeat=replace(heartbeat, rank_metrics=self._metrics.take_report()).to_json())
        self._polls += 1
        parts = ALL_PARTS if self._polls % ALL_PARTS_EVERY == 0 else (EvidencePart.WINDOWS,)
        evidence = self._rings.build_evidence("all", self._worker, heartbeat.round, parts)
        self._write(evidence=replace(evidence, links=self._connections.windows()).to_json())

    def _write_faults(self) -> None:
        for path in sorted(self._runtime.faults.glob("[!.]*.json")):
            fault = FaultReport.from_json(json.loads(path.read_text()))
            self._write(fault=self._connections.add_blocked(fault, time.monotonic()).to_json())
            path.unlink()

    def _write_probes(self) -> None:
        report = read_json(self._runtime.probes) or {}
        if report.get("name", "") != self._probed:
            self._probed = report["name"]
            self._write(probe=report)

    def _write(self, **fields: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"at": time.time(), "worker": self._worker, **fields}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    Agent(int(sys.argv[1])).run()
