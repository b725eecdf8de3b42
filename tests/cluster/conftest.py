"""Fixtures of tests on a real cluster, which is proven itself before anything that needs it."""

from __future__ import annotations

import pytest

from tests.support.cluster import cluster, namespace
from tests.support.operator import operator
from tests.support.resources import resources

__all__ = ["cluster", "namespace", "operator", "resources"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.path.parent.name == "cluster", item.path.name != "test_testcluster.py"))
