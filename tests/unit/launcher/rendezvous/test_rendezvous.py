"""What the launchers agree on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pacekeeper.launcher.rendezvous.rendezvous import (
    ParticipantReport,
    ParticipantStatus,
    RanksEnding,
    Rendezvous,
    RendezvousStage,
    RendezvousView,
    advance_rendezvous,
)
from pacekeeper_analysis.errors import InputError


def build_report(
    worker: str, status: ParticipantStatus = ParticipantStatus.READY, round_: int = 0, **fields: object
) -> ParticipantReport:
    base = ParticipantReport(worker, "first", membership=1, status=status, round=round_, workers=2, restart_limit=5)
    return replace(base, **fields)  # type: ignore[arg-type]  # fields of Report


def index_by_worker(*reports: ParticipantReport) -> dict[str, ParticipantReport]:
    return {report.worker: report for report in reports}


def build_running_rendezvous(round_: int = 4) -> Rendezvous:
    """Return a round with workers a and b."""
    return Rendezvous(1, RendezvousStage.RUNNING, round_, port=7, participants={"a": "first", "b": "first"})


def test_a_round_starts_when_all_are_ready_and_not_before() -> None:
    assert advance_rendezvous(Rendezvous(1), index_by_worker(build_report("a"))).stage is RendezvousStage.GATHERING
    assert (
        advance_rendezvous(
            Rendezvous(1), index_by_worker(build_report("a"), build_report("b", ParticipantStatus.ENDING))
        ).stage
        is RendezvousStage.GATHERING
    )
    rendezvous = advance_rendezvous(Rendezvous(1), index_by_worker(build_report("a"), build_report("b")))
    assert (rendezvous.stage, rendezvous.round, rendezvous.restarts) == (RendezvousStage.RUNNING, 1, 0)
    assert rendezvous.build_view("a", "first").included
    assert not rendezvous.build_view("a", "second").included


def test_the_rounds_number_is_above_all_that_were_seen_and_not_below_the_plans() -> None:
    assert advance_rendezvous(Rendezvous(1), index_by_worker(build_report("a", round_=6), build_report("b"))).round == 7
    assert (
        advance_rendezvous(
            Rendezvous(1), index_by_worker(build_report("a", first_round=9), build_report("b", first_round=9))
        ).round
        == 9
    )


def test_a_missing_worker_is_named_to_those_that_are_ready() -> None:
    ended = build_report("a", ParticipantStatus.READY, 4)
    # b hangs, and its connection has been closed
    rendezvous = advance_rendezvous(build_running_rendezvous(), index_by_worker(ended))
    assert rendezvous.build_view("a", "first").missing == ("b",)
    rendezvous = advance_rendezvous(rendezvous, index_by_worker(ended, build_report("b", ParticipantStatus.ENDING, 4)))
    assert rendezvous.build_view("a", "first").missing == ("b",), "its ranks are not gone"
    rendezvous = advance_rendezvous(rendezvous, index_by_worker(ended, build_report("b", ParticipantStatus.READY, 4)))
    assert (rendezvous.stage, rendezvous.build_view("a", "first").missing) == (RendezvousStage.RUNNING, ())


def test_workers_that_had_finished_when_a_round_ended_are_reported_until_the_next_one_ends() -> None:
    """Uneven batches: b's ranks fail for want of a's, in both orders of the reports."""
    finished, failed = (
        build_report("a", ParticipantStatus.FINISHED, 4, first_rank=2, finished_round=4),
        build_report("b", ParticipantStatus.ENDING, 4),
    )
    gathering = advance_rendezvous(build_running_rendezvous(), index_by_worker(failed))
    for rendezvous in (
        advance_rendezvous(gathering, index_by_worker(finished, failed)),
        advance_rendezvous(build_running_rendezvous(), index_by_worker(finished, failed)),
    ):
        again = [replace(finished, status=ParticipantStatus.READY), replace(failed, status=ParticipantStatus.READY)]
        following = advance_rendezvous(rendezvous, index_by_worker(*again))
        assert (following.round, following.build_view("b", "first").finished_rank) == (5, 2)
        over = advance_rendezvous(following, index_by_worker(replace(finished, round=5), replace(failed, round=5)))
        assert over.build_view("b", "first").finished_rank is None


def test_only_a_few_missing_workers_are_named() -> None:
    participants = {f"w{number:03}": "first" for number in range(500)}
    rendezvous = advance_rendezvous(
        Rendezvous(1, RendezvousStage.GATHERING, 4, participants=participants),
        index_by_worker(build_report("w000", round_=4)),
    )
    assert rendezvous.missing == tuple(f"w{number:03}" for number in range(1, 9))


def test_a_launcher_whose_ranks_have_ended_ends_the_round() -> None:
    for status in (ParticipantStatus.ENDING, ParticipantStatus.READY):
        reports = index_by_worker(
            build_report("a", ParticipantStatus.RUNNING, 4), build_report("b", status, 4, ending=RanksEnding.SIGNAL)
        )
        view = advance_rendezvous(build_running_rendezvous(), reports).build_view("a", "first")
        assert (view.stage, view.ended_by, view.ending) == (RendezvousStage.GATHERING, "b", RanksEnding.SIGNAL)


def test_a_report_from_before_the_round_ends_nothing() -> None:
    assert (
        advance_rendezvous(
            build_running_rendezvous(),
            index_by_worker(
                build_report("a", ParticipantStatus.READY, 3), build_report("b", ParticipantStatus.RUNNING, 4)
            ),
        )
        == build_running_rendezvous()
    )


def test_a_restarted_launcher_ends_the_round_that_its_ranks_were_in() -> None:
    reports = index_by_worker(build_report("a", ParticipantStatus.RUNNING, 4), build_report("b", incarnation="second"))
    assert advance_rendezvous(build_running_rendezvous(), reports).stage is RendezvousStage.GATHERING


def test_a_launcher_that_has_not_received_the_rounds_end_does_not_count_as_ready() -> None:
    gathering = replace(build_running_rendezvous(), stage=RendezvousStage.GATHERING)
    reports = index_by_worker(build_report("a", round_=4), build_report("b", round_=3))
    assert advance_rendezvous(gathering, reports).stage is RendezvousStage.GATHERING
    assert (
        advance_rendezvous(gathering, index_by_worker(build_report("a", round_=4), build_report("b", round_=4))).round
        == 5
    )


def test_the_best_explanation_of_a_rounds_end_replaces_the_first() -> None:
    victim = build_report("a", ParticipantStatus.ENDING, 4, ending=RanksEnding.CONNECTION)
    first = advance_rendezvous(
        build_running_rendezvous(), index_by_worker(victim, build_report("b", ParticipantStatus.RUNNING, 4))
    )
    assert first.build_view("a", "first").ended_by == "a"
    both = advance_rendezvous(
        first, index_by_worker(victim, build_report("b", ParticipantStatus.ENDING, 4, ending=RanksEnding.SIGNAL))
    )
    assert both.build_view("a", "first").ended_by == "b"
    next_round = advance_rendezvous(
        both,
        index_by_worker(
            replace(victim, status=ParticipantStatus.READY), build_report("b", round_=4, ending=RanksEnding.SIGNAL)
        ),
    )
    assert (next_round.round, next_round.build_view("a", "first").ended_by) == (5, "b")


def test_the_rendezvous_is_over_when_all_have_finished_the_round() -> None:
    half = index_by_worker(
        build_report("a", ParticipantStatus.FINISHED, 4), build_report("b", ParticipantStatus.RUNNING, 4)
    )
    assert advance_rendezvous(build_running_rendezvous(), half).stage is RendezvousStage.RUNNING
    whole = index_by_worker(
        build_report("a", ParticipantStatus.FINISHED, 4), build_report("b", ParticipantStatus.FINISHED, 4)
    )
    assert advance_rendezvous(build_running_rendezvous(), whole).stage is RendezvousStage.FINISHED


def test_restarts_are_counted_across_a_restart_of_the_server_and_end_with_the_budget() -> None:
    ready = {"round_": 4, "has_run": True, "restarts": 4}
    rendezvous = advance_rendezvous(Rendezvous(1), index_by_worker(build_report("a"), build_report("b", **ready)))  # type: ignore[arg-type]
    assert (rendezvous.stage, rendezvous.restarts) == (RendezvousStage.RUNNING, 5)
    ready["restarts"] = 5
    halted = advance_rendezvous(Rendezvous(1), index_by_worker(build_report("a"), build_report("b", **ready)))  # type: ignore[arg-type]
    assert halted.stage is RendezvousStage.HALTED
    assert "5 restarts" in halted.reason


def test_two_no_progress_rounds_halt_unless_one_launcher_has_seen_a_step() -> None:
    barren = index_by_worker(
        build_report("a", round_=4, has_run=True, no_progress_rounds=2),
        build_report("b", round_=4, has_run=True, no_progress_rounds=2),
    )
    assert (
        advance_rendezvous(replace(build_running_rendezvous(), stage=RendezvousStage.GATHERING), barren).stage
        is RendezvousStage.HALTED
    )
    one_step = index_by_worker(
        build_report("a", round_=4, has_run=True, no_progress_rounds=2),
        build_report("b", round_=4, has_run=True, no_progress_rounds=0),
    )
    assert (
        advance_rendezvous(replace(build_running_rendezvous(), stage=RendezvousStage.GATHERING), one_step).stage
        is RendezvousStage.RUNNING
    )


def test_nothing_changes_without_a_new_report() -> None:
    reports = index_by_worker(build_report("a"), build_report("b"))
    rendezvous = advance_rendezvous(Rendezvous(1), reports)
    assert advance_rendezvous(rendezvous, reports) == rendezvous


def test_reports_and_views_are_the_same_after_encoding() -> None:
    sent = build_report(
        "a", ParticipantStatus.ENDING, 4, ending=RanksEnding.LEFT, has_run=True, restarts=2, no_progress_rounds=1
    )
    assert ParticipantReport.from_json(sent.to_json()) == sent
    view = RendezvousView(1, RendezvousStage.RUNNING, 4, 29500, 2, True, "b", RanksEnding.SIGNAL, "why", ("c",))
    assert RendezvousView.from_json(json.loads(json.dumps(view.to_json()))) == view


@pytest.mark.parametrize(
    ("field", "value"), [("round", "3"), ("round", float("nan")), ("worker", []), ("workers", -1), ("ending", "0")]
)
def test_an_invalid_report_names_its_field(field: str, value: object) -> None:
    report = ParticipantReport("a", "first", 1, ParticipantStatus.READY, 0).to_json()
    with pytest.raises(InputError, match=f"Report.{field}"):
        ParticipantReport.from_json(report | {field: value})
