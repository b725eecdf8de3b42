"""What a Fabric's query reports of its links; any exporter of metrics may influence it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_api_client.exceptions import PrometheusApiClientException
from requests.exceptions import ConnectionError as NobodyThere

from pacekeeper_operator.observe import prometheus
from pacekeeper_operator.observe.prometheus import (
    MAX_LEAF_NAME_CHARACTERS,
    MAX_LINK_ROWS,
    LinkRatesResult,
    PrometheusClient,
)

QUERY = "min by (leaf, spine) (link_bits)"


def build_row(leaf: object = "l1", spine: object = "s1", value: object = "4e11") -> dict[str, Any]:
    return {"metric": {"leaf": leaf, "spine": spine}, "value": [0, value]}


async def read_rates(rows: Any) -> LinkRatesResult:
    queries: list[str] = []

    async def ask(text: str, _seconds: float) -> Sequence[Mapping[str, Any]]:
        queries.append(text)
        if isinstance(rows, Exception):
            raise rows
        return rows  # type: ignore[no-any-return]  # any response is possible

    answer = await PrometheusClient("http://prometheus", "", "", ask).read_link_rates(QUERY)
    assert queries == [QUERY]
    return answer


async def test_each_row_is_the_rate_of_a_link() -> None:
    answer = await read_rates([build_row(), build_row(spine="s2", value="0"), build_row("l2", "s1", "1e11")])
    assert answer == LinkRatesResult({("l1", "s1"): 4e11, ("l1", "s2"): 0.0, ("l2", "s1"): 1e11})


async def test_the_lower_of_two_rates_of_a_link_counts() -> None:
    assert (await read_rates([build_row(value="0"), build_row()])).rates == {("l1", "s1"): 0.0}


async def test_no_rows_mean_healthy_links() -> None:
    assert await read_rates([]) == LinkRatesResult({})


@pytest.mark.parametrize(
    "bad",
    [
        build_row(value="NaN"),
        build_row(value="+Inf"),
        build_row(value="-1"),
        build_row(value="up"),
        build_row(leaf=""),
        build_row(leaf="x" * (MAX_LEAF_NAME_CHARACTERS + 1)),
        build_row(spine="s12345"),
        build_row(leaf=7),
        {"metric": {"leaf": "l1"}, "value": [0, "1"]},
        {"value": [0, "1"]},
        {"metric": {"leaf": "l1", "spine": "s1"}},
        "no row",
        None,
    ],
)
async def test_an_invalid_row_is_skipped(bad: Any) -> None:
    assert await read_rates([bad, build_row()]) == LinkRatesResult({("l1", "s1"): 4e11})
    answer = await read_rates([bad])
    assert (answer.rates, answer.error) == ({}, "none of 1 rows has a leaf, a spine and a rate")


async def test_the_number_of_rows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_LINK_ROWS", 2)
    answer = await read_rates([build_row("a"), build_row("b"), build_row("c")])
    assert (sorted(answer.rates), answer.error) == (
        [("a", "s1"), ("b", "s1")],
        "only 2 of 3 rows are read: narrow the query",
    )
    assert MAX_LINK_ROWS == 65536


@pytest.mark.parametrize(
    "error",
    [NobodyThere("refused"), PrometheusApiClientException("HTTP Status Code 400 (b'parse error')"), ValueError("text")],
)
async def test_an_unavailable_prometheus_is_reported(error: Exception) -> None:
    answer = await read_rates(error)
    assert answer.rates == {}
    assert answer.error.startswith("Prometheus at http://prometheus does not answer")


async def test_an_invalid_response_is_reported() -> None:
    assert (await read_rates(7)).error.startswith("Prometheus at http://prometheus does not answer")


async def test_the_error_message_is_short() -> None:
    answer = await read_rates(PrometheusApiClientException("x" * 10_000))
    assert len(answer.error) <= 500


async def test_without_a_prometheus_the_query_is_reported_as_unavailable() -> None:
    assert "no Prometheus is configured" in (await PrometheusClient("", "", "").read_link_rates(QUERY)).error
