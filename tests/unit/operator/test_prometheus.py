"""Prometheus as the operator asks it, over real HTTP; only the answers are made up."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

import testcluster.prometheus
from pacekeeper_operator.observation import NOT_ASKED, GpuValue, Metrics
from pacekeeper_operator.observe.prometheus import Prometheus, Sample, gpu_signs_query, query
from pacekeeper_operator.settings import Settings
from tests.support import metric_names
from tests.support.chart import CHART, helm_template

NOW = 1000.0
JOB = {"namespace": "ns", "trainingjob": "j"}
OTHER = {"namespace": "ns", "trainingjob": "k"}


class FakePrometheus(BaseHTTPRequestHandler):
    rows: list[dict[str, Any]] = []  # noqa: RUF012  # set anew by each test
    status = 200
    queries: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.queries.append(parse_qs(urlparse(self.path).query)["query"][0])
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "success", "data": {"result": self.rows}}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    FakePrometheus.status = 200
    FakePrometheus.queries.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakePrometheus)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def row(figure: str, value: object, **labels: str) -> dict[str, Any]:
    return {"metric": {"figure": figure, **labels}, "value": [NOW, str(value)]}


async def test_one_request_answers_for_all_jobs(url: str) -> None:
    FakePrometheus.rows = [
        row("ranks", 4, **JOB),
        row("least_step", 17, **JOB),
        row("ranks", 2, **OTHER),
        row("scrape_age", "NaN", **JOB),
        row("gpu", 79, __name__="DCGM_FI_DEV_XID_ERRORS", Hostname="node-1", gpu="2"),
    ]
    sample = await Prometheus(url, "gpus", "Hostname").sample(NOW)
    assert len(FakePrometheus.queries) == 2, "and another one for the signs of GPUs"
    metrics = sample.of("ns", "j")
    assert (metrics.ranks, metrics.least_step) == (4, 17)
    assert metrics.scrape_age is None  # not a number is no figure
    assert sample.of("ns", "k").ranks == 2
    assert metrics.gpu == (GpuValue("node-1", "2", "DCGM_FI_DEV_XID_ERRORS", 79.0),)
    assert not metrics.unavailable


async def test_an_error_is_an_answer_too(url: str) -> None:
    FakePrometheus.status = 503
    sample = await Prometheus(url, "gpus", "Hostname").sample(NOW)
    assert "does not answer" in sample.unavailable


async def test_nobody_there_is_an_answer_too() -> None:
    sample = await Prometheus("http://127.0.0.1:9", "gpus", "Hostname").sample(NOW)
    assert "does not answer" in sample.unavailable


async def test_none_configured_says_how_to() -> None:
    sample = await Prometheus("", "gpus", "Hostname").sample(NOW)
    assert "prometheus.url" in sample.unavailable


def test_what_was_never_asked_is_not_known() -> None:
    assert Sample().of("ns", "j").unavailable == NOT_ASKED


@pytest.mark.parametrize(
    "bad",
    [
        row("ranks", "NaN", **JOB),
        row("ranks", "+Inf", **JOB),
        row("ranks", -1.0, **JOB),
        row("ranks", 1.0, namespace="ns"),
        row("ranks", 1.0, namespace="../../x", trainingjob="j"),
        row("ranks", 1.0, namespace="n" * 300, trainingjob="j"),
        row("unheard-of", 1.0, **JOB),
        row("gpu", 79, __name__="DCGM_FI_DEV_XID_ERRORS", gpu="2"),
        row("gpu", "NaN", __name__="DCGM_FI_DEV_XID_ERRORS", node="node-1", gpu="2"),
        {"metric": None, "value": [NOW, "1"]},
        {"metric": JOB},
        {"metric": {"figure": "ranks", **JOB}, "value": []},
    ],
    ids=str,
)
async def test_a_bad_row_costs_that_row(url: str, bad: dict[str, Any]) -> None:
    FakePrometheus.rows = [bad, row("least_step", 5, **JOB), row("least_step", 7, **OTHER)]
    sample = await Prometheus(url, "gpus", "Hostname").sample(NOW)
    assert not sample.unavailable
    assert sample.of("ns", "j") == Metrics(least_step=5, gpu_unvouched=sample.unvouched, at=sample.at)
    known = {key for values in sample.figures.values() for key in values}
    assert known == {("ns", "j"), ("ns", "k")}, "names are of Kubernetes"


async def test_the_smallest_and_the_largest_that_make_sense(url: str) -> None:
    longest = {"namespace": "n" * 253, "trainingjob": "j"}
    FakePrometheus.rows = [row("scrape_age", 0.0, **longest), row("least_step", 1e300, **longest)]
    metrics = (await Prometheus(url, "gpus", "Hostname").sample(NOW)).of("n" * 253, "j")
    assert (metrics.scrape_age, metrics.least_step) == (0.0, 1e300)


async def test_that_gpu_series_are_no_witness_is_logged_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    prometheus = Prometheus(url, "gpus", "Hostname")
    said = []
    for unnamed in (1, 1, 2, 0, 2):
        FakePrometheus.rows = [row("named", 8), row("unnamed", unnamed)]
        caplog.clear()
        await prometheus.sample(NOW)
        said.append(len([record for record in caplog.records if record.levelname == "WARNING"]))
    assert said == [1, 0, 1, 0, 1]


class TestGpuSeries:
    XID = "DCGM_FI_DEV_XID_ERRORS"

    async def test_service_discoverys_word_is_vouched_for_the_exporters_is_not(self, url: str) -> None:
        FakePrometheus.rows = [
            row("gpu", 79, __name__=self.XID, node="node-1", Hostname="node-9", gpu="2"),
            row("gpu", 48, __name__=self.XID, Hostname="node-3", gpu="0"),
            row("named", 8),
            row("unnamed", 16),
        ]
        sample = await Prometheus(url, "gpus", "Hostname").sample(NOW)
        assert sample.of("ns", "j").gpu == (
            GpuValue("node-1", "2", self.XID, 79.0, vouched=True),
            GpuValue("node-3", "0", self.XID, 48.0, vouched=False),
        )
        assert "16 GPU series of namespace gpus name their node themselves" in sample.unvouched

    async def test_it_says_whether_they_are_a_witness(self, url: str) -> None:
        FakePrometheus.rows = [row("named", 8)]
        assert not (await Prometheus(url, "gpus", "Hostname").sample(NOW)).unvouched
        FakePrometheus.rows = []
        assert "no GPU series" in (await Prometheus(url, "gpus", "Hostname").sample(NOW)).unvouched
        assert "dcgm.namespace" in (await Prometheus(url, "", "Hostname").sample(NOW)).unvouched

    def test_only_the_platforms_namespace_is_asked(self) -> None:
        assert query("gpus").count("DCGM") == query("gpus").count('namespace="gpus"') * 3
        assert "DCGM" not in query("")
        signs = gpu_signs_query("gpus")
        assert signs.count("__name__") == signs.count('namespace="gpus"')

    def test_the_charts_counters_are_all_that_is_asked_for(self) -> None:
        asked = set(re.findall(r"DCGM_FI_[A-Z_]+", query("gpus") + gpu_signs_query("gpus")))
        lines = (CHART / "files/dcgm-counters.csv").read_text().splitlines()
        listed = {line.split(",")[0] for line in lines if line and not line.startswith("#")}
        assert asked - listed == {"DCGM_FI_PROF_SM_ACTIVE"}, "of two that say the same one is enough"
        assert listed <= asked
        assert all(len(line.split(",")) == 3 for line in lines if line and not line.startswith("#"))


class TestScrapes:
    """Who speaks is what Prometheus has found, never what the target says."""

    @pytest.mark.parametrize("name", ["pacekeeper", "pacekeeper-workers", "pacekeeper-dcgm"])
    def test_the_charts(self, name: str) -> None:
        values = ("podMonitor.enabled=true", "dcgm.podMonitor.enabled=true", "dcgm.namespace=gpus")
        found = helm_template(*(part for value in values for part in ("--set", value)))
        (monitor,) = [o for o in found if o["kind"] == "PodMonitor" and o["metadata"]["name"] == name]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["honorLabels"] is False
        sources = {r["targetLabel"]: r["sourceLabels"] for r in endpoint["relabelings"]}
        assert sources["namespace"] == ["__meta_kubernetes_namespace"]
        assert sources["pod"] == ["__meta_kubernetes_pod_name"]
        assert sources["node"] == ["__meta_kubernetes_pod_node_name"]
        if name == "pacekeeper-workers":
            assert sources["trainingjob"] == ["__meta_kubernetes_pod_label_pacekeeper_dev_job"]
        if name == "pacekeeper-dcgm":
            assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["gpus"]}

    def test_the_operator_alone_speaks_of_jobs_and_nodes(self) -> None:
        found = {o["metadata"]["name"]: o for o in helm_template("--set", "podMonitor.enabled=true")}
        (of_workers,) = found["pacekeeper-workers"]["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
        assert (of_workers["sourceLabels"], of_workers["action"]) == (["__name__"], "keep")
        kept = re.compile(of_workers["regex"])
        assert all(kept.fullmatch(name) for name in metric_names.of_a_sidecar())
        assert not [name for name in metric_names.of_the_operator() if kept.fullmatch(name)]

    def test_the_operator_speaks_of_jobs_in_their_namespaces(self) -> None:
        found = {o["metadata"]["name"]: o for o in helm_template("--set", "podMonitor.enabled=true")}
        set_, drop = found["pacekeeper"]["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
        assert set_ == {"sourceLabels": ["exported_namespace"], "regex": "(.+)", "targetLabel": "namespace"}
        assert drop == {"regex": "exported_namespace", "action": "labeldrop"}

    def test_a_gpu_monitor_needs_the_namespace(self) -> None:
        with pytest.raises(subprocess.CalledProcessError) as refused:
            helm_template("--set", "dcgm.podMonitor.enabled=true")
        assert "dcgm.namespace" in refused.value.stderr

    def test_the_namespace_reaches_the_operator(self) -> None:
        (deployment,) = [o for o in helm_template("--set", "dcgm.namespace=gpus") if o["kind"] == "Deployment"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        given = {item["name"]: item.get("value", "") for item in container["env"]}
        assert Settings.from_environment(given).dcgm_namespace == "gpus"

    def test_the_test_clusters(self) -> None:
        for scrape in testcluster.prometheus._config()["scrape_configs"]:
            assert scrape["honor_labels"] is False
            named = {r["target_label"] for r in scrape["relabel_configs"] if "target_label" in r}
            assert named >= {"namespace", "pod", "node", "trainingjob"}

    def test_no_variable_of_the_operator_is_given_twice(self) -> None:
        (deployment,) = [o for o in helm_template("--set", "dcgm.namespace=gpus") if o["kind"] == "Deployment"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        names = [item["name"] for item in container["env"]]
        assert len(names) == len(set(names))
