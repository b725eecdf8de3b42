"""The bill of a period: jobs, teams, nodes, and how good predictions were."""

from __future__ import annotations

import pytest

from pacekeeper_analysis.accounting.bill import JobAccount, PredictionRecord, sum_bill
from pacekeeper_analysis.accounting.gpu_account import Loss, Tally

JOBS = [
    JobAccount(
        "vision",
        "PyTorchJob",
        "segment",
        "red",
        {"2026-11-01": Tally(100.0, {Loss.HANG: 50.0}), "2026-11-02": Tally(10.0, {Loss.STRAGGLER: 5.0})},
        {("2026-11-01", "node-1"): 50.0, ("2026-11-02", "node-1"): 5.0, ("2026-11-01", "node-3"): 9.0},
        saved=40.0,
    ),
    JobAccount(
        "speech",
        "Job",
        "tune",
        "blue",
        {"2026-11-02": Tally(10.0, {Loss.STARTUP: 30.0})},
        {("2026-11-02", "node-2"): 1.0},
    ),
    JobAccount(
        "speech", "Job", "old", "blue", {"2026-10-01": Tally(1.0, {Loss.IDLE: 1.0})}, {("2026-10-01", "node-1"): 1.0}
    ),
]


def test_a_period_has_only_its_days_and_the_largest_loss_comes_first() -> None:
    bill = sum_bill(JOBS, "2026-11-02", ())
    assert [(line.job.name, line.tally.held) for line in bill.lines] == [("tune", 40.0), ("segment", 15.0)]
    assert bill.total == Tally(20.0, {Loss.STARTUP: 30.0, Loss.STRAGGLER: 5.0})
    assert list(bill.teams) == ["blue", "red"]
    assert bill.nodes == (("node-1", 5.0), ("node-2", 1.0)), "of the period"
    assert bill.saved == 40.0


def test_a_team_is_billed_for_its_own_jobs() -> None:
    bill = sum_bill(JOBS, "2026-01-01", (), team="blue")
    assert [line.job.name for line in bill.lines] == ["tune", "old"]
    assert (bill.nodes, bill.saved) == ((("node-1", 1.0), ("node-2", 1.0)), 0.0)


def test_without_jobs_the_bill_is_empty() -> None:
    bill = sum_bill((), "2026-01-01", ())
    assert (bill.total.held, bill.total.goodput, bill.lines) == (0.0, None, ())


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        ((), PredictionRecord(0)),
        (((3.0, 0.0), (0.0, 1.0)), PredictionRecord(0)),
        (((3.0, 2.0),), PredictionRecord(1, 1.5)),
        (((1.0, 1.0), (2.0, 1.0), (3.0, 1.0), (4.0, 1.0), (5.0, 1.0)), PredictionRecord(5, 3.0, (2.0, 4.0))),
    ],
)
def test_predictions_are_compared_where_both_values_are_known(
    predictions: tuple[tuple[float, float], ...], expected: PredictionRecord
) -> None:
    assert sum_bill((), "2026-01-01", predictions).predictions == expected
