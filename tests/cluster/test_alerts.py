"""The chart's alerts, as Prometheus evaluates them: when each fires, when it does not, and that it ends."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client import start_http_server

from pacekeeper_operator import metrics
from pacekeeper_operator.api.conditions import ConditionStatus
from pacekeeper_operator.api.training_job import JobPhase, JobStatus
from testcluster.programs import find_promtool
from testing.kubernetes.chart import CHART
from testing.operators.prometheus import run_alertmanager, run_prometheus
from testing.training.launchers import wait_until_true

CASES = sorted(Path(__file__).with_name("alerts").glob("*.yaml"))


@pytest.fixture(scope="module")
def tool() -> Path:
    return find_promtool()


def test_the_rules_are_well_formed(tool: Path) -> None:
    run_promtool(tool, "check", "rules", "--lint=all", "--lint-fatal", str(CHART / "files/alerts.yaml"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_it_fires_on_its_condition_and_resolves(tool: Path, case: Path) -> None:
    run_promtool(tool, "test", "rules", str(case))


def run_promtool(tool: Path, *arguments: str) -> None:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class AlertReceiver(BaseHTTPRequestHandler):
    """The receiver of Alertmanager."""

    alerts: list[tuple[str, str, str]] = []  # noqa: RUF012  # (name, job, status), set by each test

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for alert in body["alerts"]:
            labels = alert["labels"]
            self.alerts.append((labels["alertname"], labels.get("trainingjob", ""), alert["status"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def webhook() -> Iterator[str]:
    AlertReceiver.alerts.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), AlertReceiver) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_alert_reaches_its_receiver_and_is_resolved(tmp_path: Path, webhook: str) -> None:
    """From the operator's own gauges through Prometheus and Alertmanager."""
    exporter, _ = start_http_server(0, "127.0.0.1")
    failed = ConditionStatus("Failed", "True", "ScriptFailed")
    try:
        with run_alertmanager(tmp_path, webhook) as manager:
            alerting = {"alertmanagers": [{"static_configs": [{"targets": [manager.removeprefix("http://")]}]}]}
            rules = [str(CHART / "files/alerts.yaml")]
            target = f"127.0.0.1:{exporter.server_port}"
            with run_prometheus(tmp_path, target, rule_files=rules, alerting=alerting):
                metrics.publish_job_metrics("team-a", "gpt", JobStatus(phase=JobPhase.FAILED, conditions=(failed,)))
                wait_until_true(
                    lambda: ("PacekeeperJobFailed", "gpt", "firing") in AlertReceiver.alerts, "it fires", seconds=60
                )
                metrics.publish_job_metrics("team-a", "gpt", None)
                wait_until_true(
                    lambda: ("PacekeeperJobFailed", "gpt", "resolved") in AlertReceiver.alerts, "it ends", seconds=60
                )
    finally:
        metrics.publish_job_metrics("team-a", "gpt", None)
        exporter.shutdown()
