"""Fixtures of tests on a real cluster, which is proven itself before anything that needs it."""

from __future__ import annotations

import pytest

from tests.support.cluster import apart, cluster, namespace
from tests.support.operator_process import operator_process
from tests.support.operator_release import operator
from tests.support.resources import resources

__all__ = ["apart", "cluster", "namespace", "operator", "operator_process", "resources"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_stage)


def _stage(item: pytest.Item) -> tuple[bool, bool, bool]:
    """The cluster is proven first. What wants no operator in it comes before all that wants one: it changes once."""
    wants_none = "resources" in getattr(item, "fixturenames", ())
    return (_on_the_cluster(item), item.path.name != "test_testcluster.py", not wants_none)


def _on_the_cluster(item: pytest.Item) -> bool:
    return item.path.parent.name == "cluster"
