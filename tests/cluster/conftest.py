"""Fixtures of tests on a real cluster, which is proven itself before anything that needs it."""

from __future__ import annotations

import pytest

from tests.support.cluster import cluster, namespace
from tests.support.operator_process import operator_process
from tests.support.operator_release import operator
from tests.support.resources import resources

__all__ = ["cluster", "namespace", "operator", "operator_process", "resources"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.path.parent.name == "cluster", item.path.name != "test_testcluster.py"))
    for item in items:
        if item.path.parent.name == "cluster":
            # Six nodes and a training job share the machine's cores: one that a neighbour takes for a while is no bug.
            # Further tries are shown as RERUN in the summary.
            item.add_marker(pytest.mark.flaky(reruns=2))
