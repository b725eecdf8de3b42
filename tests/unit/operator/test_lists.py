"""Long lists come in pages."""

from __future__ import annotations

from collections.abc import Mapping

import kopf
import pytest

from pacekeeper_operator.cluster import NODES, PAGE, Answer, Cluster, Object, Objects


class Pages:
    """An API server that has so many nodes, and keeps to the limit that it is given."""

    def __init__(self, nodes: int, forgets_after: int = -1) -> None:
        self.nodes, self.forgets_after = nodes, forgets_after
        self.asked: list[Mapping[str, str]] = []

    async def request(
        self, method: str, path: str, query: Mapping[str, str], body: Object | Objects | None, style: str
    ) -> Answer:
        assert (method, path, body, style) == ("GET", "/api/v1/nodes", None, "application/json")
        self.asked.append(dict(query))
        first = int(query.get("continue") or 0)
        if self.forgets_after == len(self.asked) - 1:
            return Answer(410, {"message": "the continue parameter is too old"})
        end = min(first + int(query["limit"]), self.nodes)
        items = [{"metadata": {"name": f"node-{number}"}} for number in range(first, end)]
        left = {"continue": str(end)} if end < self.nodes else {}
        return Answer(200, {"items": items or None, "metadata": {"resourceVersion": "7", **left}})


@pytest.mark.parametrize("nodes", [0, 1, PAGE, PAGE + 1, 3 * PAGE - 1])
async def test_all_of_them_are_one_list(nodes: int) -> None:
    pages = Pages(nodes)
    found = await Cluster(pages).listing(NODES, labels="a=b")
    assert [item["metadata"]["name"] for item in found.items] == [f"node-{number}" for number in range(nodes)]
    assert found.version == 7
    assert len(pages.asked) == max(1, -(-nodes // PAGE))
    assert all(query["labelSelector"] == "a=b" for query in pages.asked)


async def test_half_a_list_is_none() -> None:
    with pytest.raises(kopf.TemporaryError, match="too old"):
        await Cluster(Pages(2 * PAGE, forgets_after=1)).list(NODES)
