"""What the estimator knows, as metrics."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from pacekeeper_operator import metrics
from pacekeeper_operator.state.straggler_estimate import EstimatedFault, FaultEstimate, StragglerEstimate


def read_series(name: str, job: str = "a") -> dict[str, float]:
    return {
        sample.labels["fault"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and sample.labels["trainingjob"] == job
    }


def test_each_fault_has_probability_slowdown_and_onset_until_the_job_is_gone() -> None:
    faults = (
        FaultEstimate(EstimatedFault.SLOW_WORKER, 0.98, 1.4, 1000.0, 3),
        FaultEstimate(EstimatedFault.SLOW_LINK, 0.01, 1.1, 900.0),
    )
    metrics.publish_estimate("ns", "a", StragglerEstimate(faults))
    assert read_series("pacekeeper_estimator_probability") == {"SlowWorker": 0.98, "SlowLink": 0.01}
    assert read_series("pacekeeper_estimator_slowdown") == {"SlowWorker": 1.4, "SlowLink": 1.1}
    assert read_series("pacekeeper_estimator_onset_timestamp_seconds") == {"SlowWorker": 1000.0, "SlowLink": 900.0}
    metrics.publish_estimate("ns", "a", None)
    assert read_series("pacekeeper_estimator_probability") == {}


@pytest.mark.parametrize("count", [1, 3])
def test_disagreements_count_passes_by_kind(count: int) -> None:
    def read() -> float:
        return REGISTRY.get_sample_value("pacekeeper_estimator_disagreements_total", {"kind": "Sync by the rules"}) or 0

    before = read()
    for _ in range(count):
        metrics.count_disagreements(["Sync by the rules"])
    assert read() - before == count
