"""The main job, as a user sees it: the job recovers from the faults of the demo and completes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from demo import job, kube
from demo.fault_demo import run_fault_demo
from testing.kubernetes.dashboards import DASHBOARDS, list_queries

pytestmark = pytest.mark.usefixtures("operator")
NOT_IN_THIS_DEMO = {
    "pacekeeper_fabric_": "no Fabric describes the network",
    "pacekeeper_link_side_ratio": "in a ring a side cannot be distinguished from its one link",
    "pacekeeper_refused_calls_total": "no sidecar is refused",
    "pacekeeper_watched_": "no job of another controller is watched",
}
"""Series, and why the demo has none of them."""


FAULTS = ("rank crash", "slow link", "GPU error")
"""A crash, a slow link and its end, a node that is taken away. Each other fault has a test of its own."""


def test_the_faults_of_a_short_demo_are_recovered_and_the_job_completes(tmp_path: Path) -> None:
    began = time.time()
    report = run_fault_demo(tmp_path, FAULTS)
    unhealed = [outcome for outcome in report.outcomes if not outcome.healed]
    assert not unhealed
    assert report.phase == "Complete"
    assert report.loss_before is not None
    assert report.loss_after is not None
    assert report.loss_after < report.loss_before - 1.0, "the training must have gone on through all of it"
    outcomes = {outcome.fault: outcome for outcome in report.outcomes}
    assert outcomes["slow link"].steps_lost == 0, "no rank restarts for a slow link"
    before, after = (float(number) for number in outcomes["slow link"].gain.removeprefix("slowdown ").split(" → "))
    assert after < before
    assert outcomes["link well again"].reason.startswith("AsyncEDiT → Sync")
    assert list_unanswered(began, time.time()) == []


def list_unanswered(began: float, ended: float) -> list[str]:
    """Queries of the dashboards that have no answer in the demo."""
    queries = [q for name in DASHBOARDS for q in list_queries(name, namespace=job.NAMESPACE, trainingjob=job.NAME)]
    expected = [query for query in queries if not any(series in query for series in NOT_IN_THIS_DEMO)]
    return [query for query in expected if not kube.has_answers(query, began, ended)]
