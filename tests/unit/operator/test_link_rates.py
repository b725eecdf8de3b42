"""What a Fabric's query tells of its links, which anybody who exports metrics may have a say in."""

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


def row(leaf: object = "l1", spine: object = "s1", value: object = "4e11") -> dict[str, Any]:
    return {"metric": {"leaf": leaf, "spine": spine}, "value": [0, value]}


async def told(rows: Any) -> LinkRatesResult:
    asked: list[str] = []

    async def ask(text: str, _seconds: float) -> Sequence[Mapping[str, Any]]:
        asked.append(text)
        if isinstance(rows, Exception):
            raise rows
        return rows  # type: ignore[no-any-return]  # whatever somebody answers

    answer = await PrometheusClient("http://prometheus", "", "", ask).read_link_rates(QUERY)
    assert asked == [QUERY]
    return answer


async def test_each_link_by_its_row() -> None:
    answer = await told([row(), row(spine="s2", value="0"), row("l2", "s1", "1e11")])
    assert answer == LinkRatesResult({("l1", "s1"): 4e11, ("l1", "s2"): 0.0, ("l2", "s1"): 1e11})


async def test_of_a_link_that_is_told_twice_the_worse_counts() -> None:
    assert (await told([row(value="0"), row()])).rates == {("l1", "s1"): 0.0}


async def test_no_row_says_that_all_is_well() -> None:
    assert await told([]) == LinkRatesResult({})


@pytest.mark.parametrize(
    "bad",
    [
        row(value="NaN"),
        row(value="+Inf"),
        row(value="-1"),
        row(value="up"),
        row(leaf=""),
        row(leaf="x" * (MAX_LEAF_NAME_CHARACTERS + 1)),
        row(spine="s12345"),
        row(leaf=7),
        {"metric": {"leaf": "l1"}, "value": [0, "1"]},
        {"value": [0, "1"]},
        {"metric": {"leaf": "l1", "spine": "s1"}},
        "no row",
        None,
    ],
)
async def test_a_row_that_makes_no_sense_costs_that_row(bad: Any) -> None:
    assert await told([bad, row()]) == LinkRatesResult({("l1", "s1"): 4e11})
    answer = await told([bad])
    assert (answer.rates, answer.error) == ({}, "none of 1 rows has a leaf, a spine and a rate")


async def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_LINK_ROWS", 2)
    answer = await told([row("a"), row("b"), row("c")])
    assert (sorted(answer.rates), answer.error) == (
        [("a", "s1"), ("b", "s1")],
        "only 2 of 3 rows are read: narrow the query",
    )
    assert MAX_LINK_ROWS == 65536


@pytest.mark.parametrize(
    "error",
    [NobodyThere("refused"), PrometheusApiClientException("HTTP Status Code 400 (b'parse error')"), ValueError("text")],
)
async def test_nobody_answers(error: Exception) -> None:
    answer = await told(error)
    assert answer.rates == {}
    assert answer.error.startswith("Prometheus at http://prometheus does not answer")


async def test_what_is_no_answer_at_all() -> None:
    assert (await told(7)).error.startswith("Prometheus at http://prometheus does not answer")


async def test_the_trouble_is_told_in_few_words() -> None:
    answer = await told(PrometheusApiClientException("x" * 10_000))
    assert len(answer.error) <= 500


async def test_without_prometheus() -> None:
    assert "no Prometheus is configured" in (await PrometheusClient("", "", "").read_link_rates(QUERY)).error
