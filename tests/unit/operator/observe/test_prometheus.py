"""Prometheus as the operator queries it, over real HTTP. Only the answers are simulated."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from prometheus_api_client.exceptions import PrometheusApiClientException

import testcluster.prometheus
from pacekeeper_operator.observe.prometheus import (
    QUERY_EFFORT_EASE_SECONDS,
    PrometheusClient,
    PrometheusSample,
    _match_jobs,
    build_gpu_signs_query,
    build_query,
)
from pacekeeper_operator.observe.prometheus_access import QueryTimedOut, QueryTooLarge, create_http_query
from pacekeeper_operator.settings import Settings
from pacekeeper_operator.state.job_metrics import PROMETHEUS_NOT_QUERIED, GpuValue, JobMetrics
from testing.kubernetes.chart import CHART, render_chart
from testing.operators import metric_names

NOW = 1000.0
JOB = {"namespace": "ns", "trainingjob": "j"}
OTHER = {"namespace": "ns", "trainingjob": "k"}


class FakePrometheus(BaseHTTPRequestHandler):
    rows: list[dict[str, Any]] = []  # noqa: RUF012  # set by each test
    status = 200
    body = ""
    queries: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.queries.append(parse_qs(urlparse(self.path).query)["query"][0])
        self.send_response(self.status)
        self.end_headers()
        answer = json.dumps({"status": "success", "data": {"result": self.rows}})
        self.wfile.write((self.body or answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    FakePrometheus.status, FakePrometheus.body = 200, ""
    FakePrometheus.queries.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakePrometheus)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def build_row(query: str, value: object, **labels: str) -> dict[str, Any]:
    return {"metric": {"pacekeeper_query": query, **labels}, "value": [NOW, str(value)]}


async def test_one_request_answers_for_all_jobs(url: str) -> None:
    FakePrometheus.rows = [
        build_row("reporting_ranks", 4, **JOB),
        build_row("min_step", 17, **JOB),
        build_row("reporting_ranks", 2, **OTHER),
        build_row("scrape_age", "NaN", **JOB),
        build_row("gpu", 79, __name__="DCGM_FI_DEV_XID_ERRORS", Hostname="node-1", gpu="2"),
    ]
    sample = await PrometheusClient(url, "gpus", "Hostname").sample(NOW)
    assert len(FakePrometheus.queries) == 2, "the second query is for GPU signs"
    metrics = sample.get_metrics("ns", "j")
    assert (metrics.reporting_ranks, metrics.min_step) == (4, 17)
    assert metrics.scrape_age is None  # NaN is no value
    assert sample.get_metrics("ns", "k").reporting_ranks == 2
    assert metrics.gpu_values == (GpuValue("node-1", "2", "DCGM_FI_DEV_XID_ERRORS", 79.0, previous_value=None),)
    assert not metrics.prometheus_error


async def test_an_error_response_is_a_sample_with_an_error(url: str) -> None:
    FakePrometheus.status = 503
    sample = await PrometheusClient(url, "gpus", "Hostname").sample(NOW)
    assert "does not answer" in sample.error


class TestLimits:
    """A Prometheus that needs more time, or limits the size of an answer."""

    @dataclass
    class LimitedQuery:
        """A query function that answers about at most `most` jobs at once."""

        most: int
        queries: list[str] = field(default_factory=list)
        seconds: list[float] = field(default_factory=list)
        required_seconds: float = 0.0

        async def __call__(self, query: str, seconds: float) -> list[dict[str, Any]]:
            self.queries.append(query)
            self.seconds.append(seconds)
            if seconds < self.required_seconds:
                raise QueryTimedOut(f"does not answer within {seconds:g} s")
            if "rank_step" not in query:
                return [build_row("node_from_target", 8)]
            named = re.search(r'trainingjob=~"([^"]*)"', query)
            names = named[1].split("|") if named else [f"j{n}" for n in range(10)]
            if len(names) > self.most:
                raise QueryTooLarge("is asked for too much")
            return [build_row("min_step", 7, namespace="ns", trainingjob=name) for name in names]

    JOBS = tuple(("ns", f"j{n}") for n in range(10))

    async def test_a_limited_prometheus_is_not_queried_for_gpu_errors_separately(self) -> None:
        limited = self.LimitedQuery(most=3)
        prometheus = PrometheusClient("http://p", "gpus", "Hostname", limited)
        assert await prometheus.read_gpu_errors() == ()
        await prometheus.sample(NOW, self.JOBS)
        limited.queries.clear()
        assert await prometheus.read_gpu_errors() is None
        assert not limited.queries

    async def test_a_query_is_split_until_it_fits(self) -> None:
        limited = self.LimitedQuery(most=3)
        prometheus = PrometheusClient("http://p", "gpus", "Hostname", limited, ('cluster="a"',))
        samples = [await prometheus.sample(NOW + n, self.JOBS) for n in range(3)]
        assert [sample.timed_out for sample in samples] == [True, True, False]
        assert set(samples[2].job_values["min_step"]) == set(self.JOBS)
        assert not samples[2].gpu_untrusted_reason, "GPUs are queried, too"
        assert all('cluster="a"' in query for query in limited.queries)

    async def test_larger_queries_are_tried_again_after_a_while(self) -> None:
        limited = self.LimitedQuery(most=3)
        prometheus = PrometheusClient("http://p", "", "", limited)
        for after in (0, 1, 2, QUERY_EFFORT_EASE_SECONDS + 3, QUERY_EFFORT_EASE_SECONDS + 4):
            limited.queries.clear()
            limited.most = 3 if after < QUERY_EFFORT_EASE_SECONDS else 100
            await prometheus.sample(NOW + after, self.JOBS)
            count = len(limited.queries)
        assert count == 2, "half as many"

    async def test_a_slow_prometheus_gets_a_longer_timeout(self) -> None:
        limited = self.LimitedQuery(most=100, required_seconds=10.0)
        prometheus = PrometheusClient("http://p", "", "", limited)
        samples = [await prometheus.sample(NOW + n, self.JOBS) for n in range(3)]
        assert limited.seconds == [3.0, 6.0, 12.0]
        assert [bool(sample.error) for sample in samples] == [True, True, False]

    async def test_a_server_without_an_answer_times_out_and_a_closed_port_is_unavailable(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(QueryTimedOut, match=r"within 0\.1 s"):
                await create_http_query(url)("up", 0.1)
        sample = await PrometheusClient(url, "", "").sample(NOW)
        assert (bool(sample.error), sample.timed_out) == (True, False)

    @pytest.mark.parametrize(
        ("status", "body", "error"),
        [
            (422, "query processing would load too many samples into memory", QueryTooLarge),
            (414, "", QueryTooLarge),
            (413, "", QueryTooLarge),
            (504, "", QueryTimedOut),
            (503, '{"status":"error","errorType":"timeout"}', QueryTimedOut),
            (503, "no upstream", PrometheusApiClientException),
            (422, "found duplicate series", PrometheusApiClientException),
        ],
    )
    async def test_errors_are_classified_by_status_and_body(
        self, url: str, status: int, body: str, error: type[Exception]
    ) -> None:
        FakePrometheus.status, FakePrometheus.body = status, body
        with pytest.raises(error):
            await create_http_query(url)("up", 3.0)

    def test_selectors_escape_names(self) -> None:
        (first,) = re.findall(r'trainingjob=~"[^"]*"', build_query("", _match_jobs([("a.b", "x.y"), ("c", "z")])))[:1]
        assert first == 'trainingjob=~"x[.]y|z"'


async def test_an_unavailable_prometheus_is_a_sample_with_an_error() -> None:
    sample = await PrometheusClient("http://127.0.0.1:9", "gpus", "Hostname").sample(NOW)
    assert "does not answer" in sample.error


async def test_without_prometheus_the_error_names_the_setting() -> None:
    sample = await PrometheusClient("", "gpus", "Hostname").sample(NOW)
    assert "prometheus.url" in sample.error


def test_an_empty_sample_states_that_prometheus_was_not_queried() -> None:
    assert PrometheusSample().get_metrics("ns", "j").prometheus_error == PROMETHEUS_NOT_QUERIED


@pytest.mark.parametrize(
    "bad",
    [
        build_row("reporting_ranks", "NaN", **JOB),
        build_row("reporting_ranks", "+Inf", **JOB),
        build_row("reporting_ranks", -1.0, **JOB),
        build_row("reporting_ranks", 1.0, namespace="ns"),
        build_row("reporting_ranks", 1.0, namespace="../../x", trainingjob="j"),
        build_row("reporting_ranks", 1.0, namespace="n" * 300, trainingjob="j"),
        build_row("unheard-of", 1.0, **JOB),
        build_row("gpu", 79, __name__="DCGM_FI_DEV_XID_ERRORS", gpu="2"),
        build_row("gpu", "NaN", __name__="DCGM_FI_DEV_XID_ERRORS", node="node-1", gpu="2"),
        {"metric": None, "value": [NOW, "1"]},
        {"metric": JOB},
        {"metric": {"pacekeeper_query": "reporting_ranks", **JOB}, "value": []},
    ],
    ids=str,
)
async def test_a_bad_row_is_dropped_alone(url: str, bad: dict[str, Any]) -> None:
    FakePrometheus.rows = [bad, build_row("min_step", 5, **JOB), build_row("min_step", 7, **OTHER)]
    sample = await PrometheusClient(url, "gpus", "Hostname").sample(NOW)
    assert not sample.error
    assert sample.get_metrics("ns", "j") == JobMetrics(
        min_step=5, gpu_untrusted_reason=sample.gpu_untrusted_reason, queried_at=sample.queried_at
    )
    known = {key for values in sample.job_values.values() for key in values}
    assert known == {("ns", "j"), ("ns", "k")}, "names are of Kubernetes"


async def test_the_smallest_and_largest_valid_values_are_read(url: str) -> None:
    longest = {"namespace": "n" * 253, "trainingjob": "j"}
    FakePrometheus.rows = [build_row("scrape_age", 0.0, **longest), build_row("min_step", 1e300, **longest)]
    metrics = (await PrometheusClient(url, "gpus", "Hostname").sample(NOW)).get_metrics("n" * 253, "j")
    assert (metrics.scrape_age, metrics.min_step) == (0.0, 1e300)


async def test_untrusted_gpu_series_are_logged_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    prometheus = PrometheusClient(url, "gpus", "Hostname")
    counts = []
    for unnamed in (1, 1, 2, 0, 2):
        FakePrometheus.rows = [build_row("node_from_target", 8), build_row("node_from_exporter", unnamed)]
        caplog.clear()
        await prometheus.sample(NOW)
        counts.append(len([record for record in caplog.records if record.levelname == "WARNING"]))
    assert counts == [1, 0, 1, 0, 1]


class TestGpuSeries:
    XID = "DCGM_FI_DEV_XID_ERRORS"

    async def test_node_names_of_service_discovery_are_trusted_and_those_of_exporters_are_not(self, url: str) -> None:
        FakePrometheus.rows = [
            build_row("gpu", 79, __name__=self.XID, node="node-1", Hostname="node-9", gpu="2"),
            build_row("gpu", 48, __name__=self.XID, Hostname="node-3", gpu="0"),
            build_row("node_from_target", 8),
            build_row("node_from_exporter", 16),
        ]
        sample = await PrometheusClient(url, "gpus", "Hostname").sample(NOW)
        assert sample.get_metrics("ns", "j").gpu_values == (
            GpuValue("node-1", "2", self.XID, 79.0, trusted=True, previous_value=None),
            GpuValue("node-3", "0", self.XID, 48.0, trusted=False, previous_value=None),
        )
        assert "16 GPU series of namespace gpus name their node themselves" in sample.gpu_untrusted_reason
        assert await PrometheusClient(url, "gpus", "Hostname").read_gpu_errors() == sample.gpu_values

    async def test_a_gpu_value_has_its_previous_value(self, url: str) -> None:
        FakePrometheus.rows = [
            build_row("gpu", 79, __name__=self.XID, node="node-1", gpu="0"),
            build_row("gpu_baseline", 45, __name__=self.XID, node="node-1", gpu="0"),
            build_row("gpu", 79, __name__=self.XID, node="node-2", gpu="0"),
            build_row("gpu_baseline", 7, __name__="DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", node="node-2", gpu="0"),
        ]
        found = (await PrometheusClient(url, "gpus", "Hostname").sample(NOW)).gpu_values
        assert [(value.node, value.previous_value) for value in found] == [("node-1", 45.0), ("node-2", None)]

    @pytest.mark.parametrize("blank", [4294967295, 0x7FFFFFF0, 0x7FFFFFF3, 2**47, 2**63 - 16, 2**64 - 1])
    async def test_placeholders_of_dcgm_are_no_values(self, url: str, blank: int) -> None:
        FakePrometheus.rows = [
            build_row("gpu", blank, __name__="DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", node="node-1", gpu="0")
        ]
        sample = await PrometheusClient(url, "gpus", "Hostname").sample(NOW)
        assert (sample.gpu_values, sample.error) == ((), "")
        FakePrometheus.rows = [build_row("RowsPending", blank, node="node-1", gpu="0")]
        assert (await PrometheusClient(url, "gpus", "Hostname").sample(NOW)).gpu_signs == ()

    async def test_mig_instances_are_distinguished_and_a_gpu_counts_once(self, url: str) -> None:
        FakePrometheus.rows = [
            build_row("gpu", 45, __name__=self.XID, node="node-1", gpu="0", GPU_I_ID="1"),
            build_row("gpu", 31, __name__=self.XID, node="node-1", gpu="0", GPU_I_ID="2"),
            build_row("gpu", 45, __name__=self.XID, node="node-1", gpu="1", pod="exporter-a"),
            build_row("gpu", 31, __name__=self.XID, node="node-1", gpu="1", pod="exporter-b"),
            build_row("gpu", 45, __name__=self.XID, node="node-1", UUID="GPU-a"),
            build_row("gpu", 31, __name__=self.XID, node="node-1", UUID="GPU-b"),
        ]
        found = (await PrometheusClient(url, "gpus", "Hostname").sample(NOW)).gpu_values
        assert {value.key: value.value for value in found} == {
            f"node-1/0:1/{self.XID}": 45,
            f"node-1/0:2/{self.XID}": 31,
            f"node-1/1/{self.XID}": 45,
            f"node-1/GPU-a/{self.XID}": 45,
            f"node-1/GPU-b/{self.XID}": 31,
        }

    async def test_a_gpu_value_names_the_pods_that_use_the_gpu(self, url: str) -> None:
        """The label `pod` is the exporter's own; pods that share a GPU have a series each."""
        users = [{"exported_namespace": "ns", "exported_pod": name} for name in ("a", "b")]
        FakePrometheus.rows = [
            *(
                build_row("gpu", 79, __name__=self.XID, node="node-1", gpu="0", pod="exporter", **user)
                for user in users
            ),
            build_row("gpu", 79, __name__=self.XID, node="node-1", gpu="1", pod="exporter", namespace="gpus"),
        ]
        found = (await PrometheusClient(url, "gpus", "Hostname").sample(NOW)).gpu_values
        assert [set(value.pods) for value in found] == [{"ns/a", "ns/b"}, set()]

    async def test_the_sample_states_why_gpu_series_are_untrusted(self, url: str) -> None:
        FakePrometheus.rows = [build_row("node_from_target", 8)]
        assert not (await PrometheusClient(url, "gpus", "Hostname").sample(NOW)).gpu_untrusted_reason
        FakePrometheus.rows = []
        assert "no GPU series" in (await PrometheusClient(url, "gpus", "Hostname").sample(NOW)).gpu_untrusted_reason
        assert "dcgm.namespace" in (await PrometheusClient(url, "", "Hostname").sample(NOW)).gpu_untrusted_reason

    def test_gpu_queries_select_only_the_configured_namespace(self) -> None:
        assert build_query("gpus").count("DCGM") == build_query("gpus").count('namespace="gpus"') * 3, (
            "each name once in each selector"
        )
        assert "DCGM" not in build_query("")
        signs = build_gpu_signs_query("gpus")
        assert signs.count("__name__") == signs.count('namespace="gpus"')

    def test_the_counters_of_the_chart_are_those_that_are_queried(self) -> None:
        names = set(re.findall(r"DCGM_FI_[A-Z_]+", build_query("gpus") + build_gpu_signs_query("gpus")))
        lines = (CHART / "files/dcgm-counters.csv").read_text().splitlines()
        listed = {line.split(",")[0] for line in lines if line and not line.startswith("#")}
        assert names - listed == {"DCGM_FI_PROF_SM_ACTIVE"}, "one of two equivalent counters is enough"
        assert listed <= names
        assert all(len(line.split(",")) == 3 for line in lines if line and not line.startswith("#"))


class TestScrapes:
    """The identity of a target is what Prometheus discovers, never what the target claims."""

    @pytest.mark.parametrize("name", ["pacekeeper", "pacekeeper-workers", "pacekeeper-dcgm"])
    def test_monitors_of_the_chart_label_by_discovery(self, name: str) -> None:
        values = ("podMonitor.enabled=true", "dcgm.podMonitor.enabled=true", "dcgm.namespace=gpus")
        found = render_chart(*(part for value in values for part in ("--set", value)))
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

    def test_workers_cannot_expose_metrics_of_jobs_and_nodes(self) -> None:
        found = {o["metadata"]["name"]: o for o in render_chart("--set", "podMonitor.enabled=true")}
        (of_workers,) = found["pacekeeper-workers"]["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
        assert (of_workers["sourceLabels"], of_workers["action"]) == (["__name__"], "keep")
        pattern = re.compile(of_workers["regex"])
        assert all(pattern.fullmatch(name) for name in metric_names.list_sidecar_metrics())
        assert not [name for name in metric_names.list_operator_metrics() if pattern.fullmatch(name)]

    def test_metrics_of_jobs_have_the_namespace_of_the_job(self) -> None:
        found = {o["metadata"]["name"]: o for o in render_chart("--set", "podMonitor.enabled=true")}
        set_, drop = found["pacekeeper"]["spec"]["podMetricsEndpoints"][0]["metricRelabelings"]
        assert set_ == {"sourceLabels": ["exported_namespace"], "regex": "(.+)", "targetLabel": "namespace"}
        assert drop == {"regex": "exported_namespace", "action": "labeldrop"}

    def test_a_gpu_monitor_needs_the_namespace(self) -> None:
        with pytest.raises(subprocess.CalledProcessError) as refused:
            render_chart("--set", "dcgm.podMonitor.enabled=true")
        assert "dcgm.namespace" in refused.value.stderr

    def test_the_dcgm_namespace_is_passed_to_the_operator(self) -> None:
        (deployment,) = [o for o in render_chart("--set", "dcgm.namespace=gpus") if o["kind"] == "Deployment"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        given = {item["name"]: item.get("value", "") for item in container["env"]}
        assert Settings.from_environment(given).dcgm_namespace == "gpus"

    def test_scrapes_of_the_test_cluster_label_by_discovery(self) -> None:
        for scrape in testcluster.prometheus._build_config()["scrape_configs"]:
            assert scrape["honor_labels"] is False
            named = {r["target_label"] for r in scrape["relabel_configs"] if "target_label" in r}
            assert named >= {"namespace", "pod", "node", "trainingjob"}

    def test_no_variable_of_the_operator_is_given_twice(self) -> None:
        (deployment,) = [o for o in render_chart("--set", "dcgm.namespace=gpus") if o["kind"] == "Deployment"]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        names = [item["name"] for item in container["env"]]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("body", ["[" * 100_000, "[]", '{"data": {"result": 7}}', '{"data": []}', "7"])
async def test_a_malformed_answer_counts_as_no_answer(url: str, body: str) -> None:
    FakePrometheus.body = body
    prometheus = PrometheusClient(url, "gpus", "Hostname")
    assert "does not answer" in (await prometheus.sample(NOW)).error
    assert "does not answer" in (await prometheus.read_link_rates("up")).error
    assert await prometheus.read_gpu_errors() is None
