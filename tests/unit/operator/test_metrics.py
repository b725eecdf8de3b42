"""What the operator shows of jobs and quarantines: as their statuses say, and nothing of what is gone."""

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
from pacekeeper_operator.state.desired_state import LinkCheck, LinkSide
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
def nothing_left() -> Iterator[None]:
    yield
    for job in ("a", "b"):
        metrics.publish_job_metrics("ns", job, None)
        metrics.publish_link_metrics("ns", job, None)
    metrics.publish_quarantine_metrics({})


def shown(job: str = "a") -> dict[str, float]:
    """Values by name and the labels beside the job's."""
    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name in OF_A_JOB and (labels.pop("namespace"), labels.pop("trainingjob")) == ("ns", job):
                name = sample.name.removeprefix("pacekeeper_job_")
                found[" ".join([name, *labels.values()])] = sample.value
    return found


def test_a_job_is_shown_as_its_status_says() -> None:
    metrics.publish_job_metrics("ns", "a", RUNNING, restarts_left=3, restarts_allowed=10)
    assert shown() == {
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
    }, "what is not known is not shown"


def test_what_holds_no_more_is_shown_no_more() -> None:
    metrics.publish_job_metrics("ns", "a", RUNNING, restarts_left=3, restarts_allowed=10)
    blocked = ConditionStatus("ActionBlocked", "True", "PodDenied")
    metrics.publish_job_metrics(
        "ns",
        "a",
        replace(RUNNING, phase=JobPhase.FAILED, sync_mode=SyncMode.EDIT, slowdown=None, conditions=(blocked,)),
    )
    found = shown()
    assert {name for name in found if name.split()[0] in ("phase", "mode", "condition")} == {
        "phase Failed",
        "mode EDiT",
        "condition ActionBlocked PodDenied",
    }
    assert not {"slowdown", "restarts_left", "restarts_allowed"} & set(found)


def test_a_job_that_is_gone_takes_its_own_series_and_no_others() -> None:
    metrics.publish_job_metrics("ns", "a", RUNNING, restarts_left=3, restarts_allowed=10)
    metrics.publish_job_metrics("ns", "b", RUNNING, restarts_left=3, restarts_allowed=10)
    metrics.publish_job_metrics("ns", "a", None)
    assert shown("a") == {}
    assert len(shown("b")) == 13


def test_quarantines_by_their_nodes_names() -> None:
    held = ConditionStatus(QuarantineCondition.QUARANTINED, "False", QuarantineVerdict.BUDGET_SPENT)
    metrics.publish_quarantine_metrics(
        {
            "node-1": QuarantineStatus(phase=QuarantinePhase.BLOCKED, conditions=(held,)),
            "node-2": QuarantineStatus(phase=QuarantinePhase.PENDING),
            "node-3": QuarantineStatus(),
        }
    )
    labels = {"nodequarantine": "node-1", "phase": "Blocked", "reason": "BudgetSpent"}
    assert REGISTRY.get_sample_value("pacekeeper_node_quarantine", labels) == 1
    metrics.publish_quarantine_metrics({"node-2": QuarantineStatus(phase=QuarantinePhase.ACTIVE)})
    (family,) = [found for found in REGISTRY.collect() if found.name == "pacekeeper_node_quarantine"]
    assert [sample.labels["phase"] for sample in family.samples] == ["Active"]


def test_the_first_of_each_kind_is_an_increase() -> None:
    """Whatever counts Incidents is there, with some number, before any is opened."""
    for cause in IncidentCause:
        assert REGISTRY.get_sample_value("pacekeeper_recovery_seconds_count", {"cause": cause}) is not None
        labels = {"cause": cause, "class_": "Unknown", "mode": "Act"}
        assert REGISTRY.get_sample_value("pacekeeper_incidents_total", labels) is not None
        outcome = {"cause": cause, "outcome": "Recovered"}
        assert REGISTRY.get_sample_value("pacekeeper_incident_outcomes_total", outcome) is not None
    for remedy in Remedy:
        assert REGISTRY.get_sample_value("pacekeeper_remedies_total", {"remedy": remedy}) is not None


def test_people_can_read_what_each_series_means() -> None:
    page = (REPOSITORY / "docs/monitoring.md").read_text()
    names = {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in list_operator_metrics()
    }
    budget = {"pacekeeper_job_restarts_left", "pacekeeper_job_restarts_allowed"}  # named by their ends
    assert not [n for n in names - budget if n not in page and not n.startswith("pacekeeper_fabric_")]


class TestLinks:
    """What a job's connections showed when they were last looked at."""

    SLOW = LinkCheck(
        NOW, "ask", hot_places=("all that rank 3 sends",), conclusive=True, sides=(LinkSide(3, True, 4.0),)
    )

    def test_hot_places_and_the_slowest_sides(self) -> None:
        metrics.publish_link_metrics("ns", "a", 2, [(3, "sends", 4.0), (3, "receives", 1.5)])
        assert self.shown() == {"hot": 2, ("3", "sends"): 4.0, ("3", "receives"): 1.5}
        assert self.shown("b") == {}

    def test_only_those_of_the_newest_look(self) -> None:
        metrics.publish_link_metrics("ns", "a", 1, [(3, "sends", 4.0), (5, "sends", 2.0)])
        metrics.publish_link_metrics("ns", "b", 1, [(3, "sends", 3.0)])
        metrics.publish_link_metrics("ns", "a", 0, [(5, "sends", 1.1)])
        assert self.shown() == {"hot": 0, ("5", "sends"): 1.1}, "that nothing is hot is known"
        metrics.publish_link_metrics("ns", "a", None)
        assert self.shown() == {}
        assert self.shown("b") == {"hot": 1, ("3", "sends"): 3.0}

    @pytest.mark.parametrize("seen", [None, replace(SLOW, conclusive=False)])
    def test_of_what_is_not_known_nothing(self, seen: LinkCheck | None) -> None:
        job = replace(build_training().job, namespace="ns", name="a")
        show_link_metrics(job, self.SLOW)
        assert self.shown() == {"hot": 1, ("3", "sends"): 4.0}
        show_link_metrics(job, seen)
        assert self.shown() == {}

    def shown(self, job: str = "a") -> dict[str | tuple[str, str], float]:
        """`hot`, and by rank and side."""
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
