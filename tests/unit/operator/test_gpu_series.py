"""Signs of faulty GPUs that a real Prometheus finds in ten minutes of an exporter's series, real and scripted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_api_client import PrometheusConnect

from pacekeeper_analysis.failures.gpu_health import GpuSign
from pacekeeper_operator.observe.prometheus import PrometheusClient
from pacekeeper_operator.state.job_metrics import GpuValue
from testing.operators.prometheus import run_prometheus
from testing.training.launchers import wait_until_true

Value = Callable[[float], float | None]
"""Of a series, by the seconds since ten minutes and a half ago; None: the exporter did not report it."""
SPAN, EVERY = 630.0, 15.0
REPLAYS, REASONS = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"
ECC = "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"
CLOCK, ACTIVE = "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_PROF_SM_ACTIVE"


@dataclass(frozen=True)
class Series:
    metric: str
    gpu: str
    value: Value
    labels: Mapping[str, str] = field(default_factory=dict)


def slow_down_during(seconds: float) -> Value:
    """Return clock reasons: heat for this duration, and a software power cap all the time."""
    return lambda at: 0x44 if at > SPAN - seconds else 0x4


SERIES = [
    Series("DCGM_FI_DEV_ROW_REMAP_PENDING", "pending", lambda _: 1),
    Series("DCGM_FI_DEV_ROW_REMAP_PENDING", "not-pending", lambda _: 0),
    Series("DCGM_FI_DEV_ROW_REMAP_FAILURE", "failed", lambda _: 1),
    Series(REPLAYS, "rising", lambda at: 5_000 + 0.2 * at),
    Series(REPLAYS, "rising-slowly", lambda at: 5_000 + 0.1 * at),
    Series(REPLAYS, "high-and-still", lambda _: 5_000),
    Series(REPLAYS, "reset", lambda at: 5_000 if at < 300 else at),
    Series(REPLAYS, "slipped", lambda at: 0 if 300 <= at < 330 else 5_000),
    Series(REPLAYS, "exporter-restarts", lambda at: None if 200 <= at < 300 else 5_000 + 0.2 * at),
    Series("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "link", lambda at: 0.05 * at),
    Series("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "link", lambda at: 0.05 * at),
    Series("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "link-that-recovers", lambda at: 0.05 * at),
    Series("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "sound-link", lambda at: 0.01 * at),
    Series(REASONS, "hot", slow_down_during(460)),
    Series(REASONS, "hot-for-a-while", slow_down_during(240)),
    Series(REASONS, "slowed-down", lambda _: 0x8),
    Series(REASONS, "capped", lambda _: 0x4 | 0x1 | 0x20),
    *(Series(CLOCK, f"peer-{n}", lambda _: 1800) for n in range(3)),
    *(Series(CLOCK, "cut", lambda _: 300, {"GPU_I_ID": f"{n}"}) for n in range(7)),
    Series(ACTIVE, "cut", lambda _: 0.9),
    *(Series(CLOCK, f"blank-{n}", lambda _: 0x7FFFFFF0) for n in range(7)),
    Series(REASONS, "blank", lambda _: 0xFFFFFFFF),
    Series("DCGM_FI_DEV_ROW_REMAP_PENDING", "blank", lambda _: 0xFFFFFFFF),
    Series(REPLAYS, "blank", lambda at: 5_000 if at < 600 else 0x7FFFFFF0),
    Series(ECC, "of-last-month", lambda at: None if at < SPAN - 60 else 5),
    Series(ECC, "old", lambda _: 5),
    Series(ECC, "new", lambda at: 0 if at < SPAN - 60 else 1),
    Series(ECC, "reset", lambda at: 5 if at < SPAN - 60 else 0),
    Series(ECC, "reset-by-one-of-two-exporters", lambda at: 5 if at < SPAN - 60 else 0, {"pod": "a"}),
    Series(ECC, "reset-by-one-of-two-exporters", lambda _: 5, {"pod": "b"}),
    Series(ECC, "never-seen-by-a-new-exporter", lambda at: 5 if at < SPAN - 330 else None, {"pod": "a"}),
    Series(ECC, "never-seen-by-a-new-exporter", lambda at: None if at < SPAN - 330 else 0, {"pod": "b"}),
    Series(ECC, "new-of-a-new-exporter", lambda at: 0 if at < SPAN - 60 else None, {"pod": "a"}),
    Series(ECC, "new-of-a-new-exporter", lambda at: None if at < SPAN - 60 else 1, {"pod": "b"}),
    Series(CLOCK, "slow", lambda _: 1400),
    Series(CLOCK, "idle", lambda _: 300),
    Series(CLOCK, "other-model", lambda _: 900, {"modelName": "B"}),
    Series(ACTIVE, "slow", lambda _: 0.9),
    Series(ACTIVE, "idle", lambda _: 0.0),
    Series(ACTIVE, "other-model", lambda _: 0.9),
    Series("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "slow", lambda _: 0.9),
    Series("DCGM_FI_DEV_ROW_REMAP_PENDING", "foreign", lambda _: 1, {"namespace": "tenant"}),
    Series("DCGM_FI_DEV_ROW_REMAP_PENDING", "liar", lambda _: 1, {"node": "", "Hostname": "node-9"}),
]
"""Service discovery places each GPU but the last on node-1."""


def build_exposition(now: float) -> str:
    """Return all samples of these minutes at once: the text format allows timestamps."""
    lines = []
    for series in SERIES:
        labels = {"namespace": "gpus", "node": "node-1", "gpu": series.gpu, "UUID": f"GPU-{series.gpu}"}
        labels = {**labels, "modelName": "A", **series.labels}
        text = ",".join(f'{name}="{value}"' for name, value in labels.items() if value)
        times = [EVERY * i for i in range(int(SPAN / EVERY) + 1)]
        for at in times:
            value = series.value(at)
            if value is not None:
                lines.append(f"{series.metric}{{{text}}} {value} {int(1000 * (now - SPAN + at))}")
    return "\n".join(lines) + "\n"


class Exporter(BaseHTTPRequestHandler):
    text, moment = "", 0.0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has scraped all series."""
    Exporter.moment = time.time()
    Exporter.text = build_exposition(Exporter.moment)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    folder: Path = tmp_path_factory.mktemp("prometheus")
    with run_prometheus(folder, f"127.0.0.1:{server.server_port}") as address:
        query = {"query": f"count(last_over_time({{__name__=~'DCGM_.*'}}[15m])) == {len(SERIES)}"}

        def scraped() -> bool:
            answer: dict[str, Any] = requests.get(f"{address}/api/v1/query", params=query, timeout=60).json()
            return bool(answer["data"]["result"])

        wait_until_true(scraped, "all series are there", seconds=240)
        yield address
    server.shutdown()
    server.server_close()


@pytest.fixture
async def signs(url: str, monkeypatch: pytest.MonkeyPatch) -> tuple[GpuValue, ...]:
    """The values as of the end of the ten minutes."""
    answer_query = PrometheusConnect.custom_query

    def ask_as_of_then(self: PrometheusConnect, query: str, limit: dict[str, str], **more: Any) -> Any:
        return answer_query(self, query, limit | {"time": f"{Exporter.moment + 1}"}, **more)

    monkeypatch.setattr(PrometheusConnect, "custom_query", ask_as_of_then)
    sample = await PrometheusClient(url, "gpus", "Hostname").sample(time.time())
    assert not sample.error
    return sample.get_metrics("ns", "j").gpu_signs


def list_gpus_with(signs: tuple[GpuValue, ...], metric: GpuSign) -> set[str]:
    return {sign.gpu for sign in signs if sign.metric == metric}


@pytest.mark.parametrize(
    ("sign", "gpus"),
    [
        (GpuSign.ROWS_PENDING, {"pending", "liar"}),
        (GpuSign.ROWS_FAILED, {"failed"}),
        (GpuSign.PCIE_REPLAYS, {"rising", "exporter-restarts"}),
        (GpuSign.NVLINK_ERRORS, {"link", "link-that-recovers"}),
        (GpuSign.THROTTLED, {"hot", "slowed-down"}),
        (GpuSign.SLOW_CLOCK, {"slow"}),
    ],
)
async def test_each_sign_is_found_on_these_gpus_and_no_others(
    signs: tuple[GpuValue, ...], sign: GpuSign, gpus: set[str]
) -> None:
    assert list_gpus_with(signs, sign) == gpus
    assert len([one for one in signs if one.metric == sign]) == len(gpus), "each once"


@pytest.mark.usefixtures("signs")
async def test_an_error_includes_the_earlier_value_of_its_series_and_resets_are_named(url: str) -> None:
    found = await PrometheusClient(url, "gpus", "Hostname").read_gpu_errors()
    assert found is not None
    assert {value.gpu: (value.value, value.previous_value) for value in found if value.metric == ECC} == {
        "of-last-month": (5, None),
        "old": (5, 5),
        "new": (1, 0),
        "new-of-a-new-exporter": (1, 0),
        "reset": (0, None),
        "reset-by-one-of-two-exporters": (5, 5),
    }


async def test_only_nodes_from_service_discovery_are_trusted(signs: tuple[GpuValue, ...]) -> None:
    by_gpu = {sign.gpu: sign for sign in signs}
    assert by_gpu["pending"] == GpuValue("node-1", "pending", "RowsPending", 1.0, trusted=True, uuid="GPU-pending")
    assert by_gpu["liar"] == GpuValue("node-9", "liar", "RowsPending", 1.0, trusted=False, uuid="GPU-liar")


async def test_values_cover_ten_minutes(signs: tuple[GpuValue, ...]) -> None:
    figures = {sign.gpu: sign.value for sign in signs}
    assert figures["rising"] == pytest.approx(120, abs=2)
    assert figures["hot"] in (7, 8)
    assert figures["slow"] == 1400


async def test_gpu_values_are_queried_rarely(url: str) -> None:
    queries: list[str] = []

    async def answer_query(query: str, _seconds: float) -> list[Any]:
        queries.append(query)
        return []

    watched = PrometheusClient(url, "gpus", "Hostname", answer_query)
    for now in (0.0, 0.0, 5.0, 29.0, 31.0, 7.0):
        await watched.sample(now)
    assert ["PCIE" in query for query in queries] == [*(False, True, False, False, False, False, True, False, True)], (
        "every 30 seconds, and when the clock was set back"
    )
    await PrometheusClient(url, "", "Hostname", answer_query).sample(0.0)
    assert "DCGM" not in queries[-1]


async def test_a_failed_query_affects_nothing_else(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def answer_query(query: str, _seconds: float) -> list[Any]:
        if "PCIE" in query:
            raise requests.ConnectionError("found duplicate series")
        return []

    sample = await PrometheusClient(url, "gpus", "Hostname", answer_query).sample(0.0)
    assert (sample.error, sample.gpu_signs) == ("", ())
    assert "cannot be queried for signs of GPUs: found duplicate series" in caplog.text
