"""Metrics of jobs and quarantines match their statuses, and deleted objects have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from pacekeeper_analysis.protocol.plan import SyncMode
from pacekeeper_operator import metrics
from pacekeeper_operator.api.conditions import ConditionStatus, QuarantineCondition
from pacekeeper_operator.api.incident import IncidentCause
from pacekeeper_operator.api.node_quarantine import QuarantinePhase, QuarantineStatus, QuarantineVerdict
from pacekeeper_operator.api.training_job import JobPhase, JobStatus, Remedy, WorkerCounts
from pacekeeper_operator.runtime.reconcile import show_link_metrics
from pacekeeper_operator.state.job_requests import LinkCheck, LinkSide
from testing.kubernetes.chart import REPOSITORY
from testing.operators.metric_names import list_operator_metrics
from testing.operators.observations import NOW, build_training

RUNNING = JobStatus(
    phase=JobPhase.RUNNING,
    step=40,
    workers=WorkerCounts.from_counts(4, 3, 1),
    slowdown=1.2,
    goodput=0.97,
    sync_mode=SyncMode.SYNC,
    restarts=5,
    conditions=(
        ConditionStatus("Running", "True", "Training"),
        ConditionStatus("ActionBlocked", "False", "NothingBlocked"),
        ConditionStatus("MetricsAvailable", "Unknown", "PrometheusUnavailable"),
    ),
)
OF_A_JOB = (
    "pacekeeper_job_phase",
    "pacekeeper_job_step",
    "pacekeeper_job_slowdown",
    "pacekeeper_job_goodput",
    "pacekeeper_job_workers",
    "pacekeeper_job_restarts",
    "pacekeeper_job_restarts_left",
    "pacekeeper_job_restarts_allowed",
    "pacekeeper_job_mode",
    "pacekeeper_job_condition",
)


@pytest.fixture(autouse=True)
def no_series_left() -> Iterator[None]:
    yield
    for job in ("a", "b"):
        metrics.publish_job_metrics("ns", job, None)
        metrics.publish_link_metrics("ns", job, None)
    metrics.publish_quarantine_metrics({})


def read_job_series(job: str = "a") -> dict[str, float]:
    """Return values by name and the labels in addition to the job's."""
    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name in OF_A_JOB and (labels.pop("namespace"), labels.pop("trainingjob")) == ("ns", job):
                name = sample.name.removeprefix("pacekeeper_job_")
                found[" ".join([name, *labels.values()])] = sample.value
    return found


def test_series_of_a_job_match_its_status() -> None:
    metrics.publish_job_metrics("ns", "a", RUNNING, restarts_left=3, restarts_allowed=10)
    assert read_job_series() == {
        "phase Running": 1,
        "step": 40,
        "slowdown": 1.2,
        "goodput": 0.97,
        "workers desired": 4,
        "workers ready": 3,
        "workers spare": 1,
        "restarts": 5,
        "restarts_left": 3,
        "restarts_allowed": 10,
        "mode Sync": 1,
        "condition Running Training": 1,
        "condition ActionBlocked NothingBlocked": 0,
    }, "unknown values are not published"


def test_series_of_ended_states_are_removed() -> None:
    metrics.publish_job_metrics("ns", "a", RUNNING, restarts_left=3, restarts_allowed=10)
    blocked = ConditionStatus("ActionBlocked", "True", "PodDenied")
    metrics.publish_job_metrics(
        "ns",
        "a",
        replace(RUNNING, phase=JobPhase.FAILED, sync_mode=SyncMode.EDIT, slowdown=None, conditions=(blocked,)),
    )
    found = read_job_series()
    assert {name for name in found if name.split()[0] in ("phase", "mode", "condition")} == {
        "phase Failed",
        "mode EDiT",
        "condition ActionBlocked PodDenied",
    }
    assert not {"slowdown", "restarts_left", "restarts_allowed"} & set(found)


def test_a_deleted_job_removes_only_its_own_series() -> None:
    metrics.publish_job_metrics("ns", "a", RUNNING, restarts_left=3, restarts_allowed=10)
    metrics.publish_job_metrics("ns", "b", RUNNING, restarts_left=3, restarts_allowed=10)
    metrics.publish_job_metrics("ns", "a", None)
    assert read_job_series("a") == {}
    assert len(read_job_series("b")) == 13


def test_quarantines_have_series_by_node_name() -> None:
    condition = ConditionStatus(QuarantineCondition.QUARANTINED, "False", QuarantineVerdict.BUDGET_SPENT)
    metrics.publish_quarantine_metrics(
        {
            "node-1": QuarantineStatus(phase=QuarantinePhase.BLOCKED, conditions=(condition,)),
            "node-2": QuarantineStatus(phase=QuarantinePhase.PENDING),
            "node-3": QuarantineStatus(),
        }
    )
    labels = {"nodequarantine": "node-1", "phase": "Blocked", "reason": "BudgetSpent"}
    assert REGISTRY.get_sample_value("pacekeeper_node_quarantine", labels) == 1
    metrics.publish_quarantine_metrics({"node-2": QuarantineStatus(phase=QuarantinePhase.ACTIVE)})
    (family,) = [found for found in REGISTRY.collect() if found.name == "pacekeeper_node_quarantine"]
    assert [sample.labels["phase"] for sample in family.samples] == ["Active"]


def test_incident_counters_exist_before_the_first_incident() -> None:
    """Each counter of Incidents exists, with some value, before any is opened."""
    for cause in IncidentCause:
        assert REGISTRY.get_sample_value("pacekeeper_recovery_seconds_count", {"cause": cause}) is not None
        labels = {"cause": cause, "class_": "Unknown", "mode": "Act"}
        assert REGISTRY.get_sample_value("pacekeeper_incidents_total", labels) is not None
        outcome = {"cause": cause, "outcome": "Recovered"}
        assert REGISTRY.get_sample_value("pacekeeper_incident_outcomes_total", outcome) is not None
    for remedy in Remedy:
        assert REGISTRY.get_sample_value("pacekeeper_remedies_total", {"remedy": remedy}) is not None


def test_the_docs_describe_each_series() -> None:
    page = (REPOSITORY / "docs/monitoring.md").read_text()
    names = {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in list_operator_metrics()
    }
    budget = {"pacekeeper_job_restarts_left", "pacekeeper_job_restarts_allowed"}  # the docs name them by their ends
    assert not [n for n in names - budget if n not in page and not n.startswith("pacekeeper_fabric_")]


class TestLinks:
    """Metrics show what the last check of a job's connections found."""

    SLOW = LinkCheck(
        NOW, "ask", hot_places=("all that rank 3 sends",), conclusive=True, sides=(LinkSide(3, True, 4.0),)
    )

    def test_hot_links_and_the_slowest_sides_are_published(self) -> None:
        metrics.publish_link_metrics("ns", "a", 2, [(3, "sends", 4.0), (3, "receives", 1.5)])
        assert self.read_link_series() == {"hot": 2, ("3", "sends"): 4.0, ("3", "receives"): 1.5}
        assert self.read_link_series("b") == {}

    def test_only_the_newest_link_check_is_published(self) -> None:
        metrics.publish_link_metrics("ns", "a", 1, [(3, "sends", 4.0), (5, "sends", 2.0)])
        metrics.publish_link_metrics("ns", "b", 1, [(3, "sends", 3.0)])
        metrics.publish_link_metrics("ns", "a", 0, [(5, "sends", 1.1)])
        assert self.read_link_series() == {"hot": 0, ("5", "sends"): 1.1}, "zero hot links are a known value"
        metrics.publish_link_metrics("ns", "a", None)
        assert self.read_link_series() == {}
        assert self.read_link_series("b") == {"hot": 1, ("3", "sends"): 3.0}

    @pytest.mark.parametrize("seen", [None, replace(SLOW, conclusive=False)])
    def test_unknown_values_have_no_series(self, seen: LinkCheck | None) -> None:
        job = replace(build_training().job, namespace="ns", name="a")
        show_link_metrics(job, self.SLOW)
        assert self.read_link_series() == {"hot": 1, ("3", "sends"): 4.0}
        show_link_metrics(job, seen)
        assert self.read_link_series() == {}

    def read_link_series(self, job: str = "a") -> dict[str | tuple[str, str], float]:
        """Return `hot`, and the values by rank and side."""
        found: dict[str | tuple[str, str], float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                labels = sample.labels
                if (labels.get("namespace"), labels.get("trainingjob")) != ("ns", job):
                    continue
                if sample.name == "pacekeeper_hot_links":
                    found["hot"] = sample.value
                elif sample.name == "pacekeeper_link_side_ratio":
                    found[labels["rank"], labels["side"]] = sample.value
        return found
