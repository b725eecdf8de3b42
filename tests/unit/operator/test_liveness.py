"""The operator calls itself dead when it no longer sees the cluster."""

from __future__ import annotations

from typing import cast

import pytest

from pacekeeper_operator.cluster import Cluster
from pacekeeper_operator.manifests import Installation
from pacekeeper_operator.observe.memory import Memory
from pacekeeper_operator.observe.prometheus import Prometheus
from pacekeeper_operator.services.operator import FIRST_WORD_SECONDS, MISSED_EVENTS, Operator
from pacekeeper_operator.settings import Settings


@pytest.fixture
def operator() -> Operator:
    """One whose watches have told of a node. It calls nobody."""
    nobody = cast(Cluster, None)
    operator = Operator(Settings(), nobody, Memory(0.0), Installation("", "", "", ""), Prometheus("", "", ""))
    operator.nodes.hear({"metadata": {"name": "node-1", "uid": "u", "resourceVersion": "1"}}, deleted=False)
    return operator


def later(operator: Operator) -> float:
    return operator.memory.started_at + 2 * FIRST_WORD_SECONDS


def test_watches_that_tell_are_alive(operator: Operator) -> None:
    assert operator.blind(later(operator)) == ""


def test_changes_that_only_lists_have_shown_are_a_dead_watch(operator: Operator) -> None:
    operator.pods.unheard = MISSED_EVENTS
    assert "the watch of pods is dead" in operator.blind(later(operator))


def test_watches_that_never_came_to_life_are_dead_after_a_while(operator: Operator) -> None:
    operator.nodes.heard = False
    assert operator.blind(operator.memory.started_at + 1) == ""
    assert "no watch has told anything" in operator.blind(later(operator))
