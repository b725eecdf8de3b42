"""Prometheus on the machine itself: it discovers the cluster's pods and scrapes them every second."""

from __future__ import annotations

from functools import partial
from typing import Any

import yaml

from testcluster import credentials
from testcluster.daemons import Daemon
from testcluster.programs import Programs
from testcluster.release import SYSTEM
from testcluster.settings import HOST_ADDRESS, PROMETHEUS_PORT, PROMETHEUS_URL, STATE
from testcluster.shell import is_answering, write_if_changed

_JOB_NAMESPACE_RELABELING = {
    "source_labels": ["namespace", "exported_namespace"],
    "regex": f"{SYSTEM};(.+)",
    "target_label": "namespace",
}
"""The operator exports metrics of jobs in their namespaces. Only the operator's own label is trusted."""


def ensure_prometheus(programs: Programs) -> None:
    daemon = build_prometheus(programs)
    daemon.ensure_running()
    daemon.wait_for(partial(is_answering, f"{PROMETHEUS_URL}/-/ready"), timeout=60, what="Prometheus ready")


def build_prometheus(programs: Programs) -> Daemon:
    config = write_if_changed(STATE / "prometheus.yaml", yaml.safe_dump(_build_config(), sort_keys=False))
    command = (
        str(programs.prometheus),
        f"--config.file={config}",
        f"--storage.tsdb.path={STATE / 'prometheus'}",
        "--storage.tsdb.retention.time=1d",
        "--storage.tsdb.retention.size=2GB",
        f"--web.listen-address={HOST_ADDRESS}:{PROMETHEUS_PORT}",
        "--log.level=warn",
    )
    return Daemon("prometheus", command, configuration=config.read_text())


def _build_config() -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [
            # Pacekeeper's sidecars and operator: every container port with this name.
            _build_pod_scrape("pacekeeper", _build_keep_rule("__meta_kubernetes_pod_container_port_name", "pk-metrics"))
            | {"metric_relabel_configs": [_JOB_NAMESPACE_RELABELING]},
            _build_pod_scrape(
                "dcgm-exporter",
                _build_keep_rule("__meta_kubernetes_namespace", "gpu-monitoring"),
                _build_keep_rule("__meta_kubernetes_pod_label_app_kubernetes_io_name", "dcgm-exporter"),
                _build_keep_rule("__meta_kubernetes_pod_container_port_name", "metrics"),
            ),
        ],
    }


def _build_pod_scrape(job: str, *keep_rules: dict[str, Any]) -> dict[str, Any]:
    """Build a scrape as in the chart's PodMonitors: labels come from discovery, never from the target."""
    relabel = [*keep_rules, _build_keep_rule("__meta_kubernetes_pod_phase", "Pending|Running")]
    for label, source in (
        ("namespace", "namespace"),
        ("pod", "pod_name"),
        ("container", "pod_container_name"),
        ("node", "pod_node_name"),
        ("trainingjob", "pod_label_pacekeeper_dev_job"),
    ):
        relabel.append({"source_labels": [f"__meta_kubernetes_{source}"], "target_label": label})
    discovery = {"role": "pod", "kubeconfig_file": str(credentials.PROMETHEUS.kubeconfig)}
    return {
        "job_name": job,
        "honor_labels": False,
        "sample_limit": 10000,
        "kubernetes_sd_configs": [discovery],
        "relabel_configs": relabel,
    }


def _build_keep_rule(label: str, pattern: str) -> dict[str, Any]:
    return {"source_labels": [label], "regex": pattern, "action": "keep"}
