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


def report(
    worker: str, status: ParticipantStatus = ParticipantStatus.READY, round_: int = 0, **fields: object
) -> ParticipantReport:
    base = ParticipantReport(worker, "first", membership=1, status=status, round=round_, workers=2, restart_limit=5)
    return replace(base, **fields)  # type: ignore[arg-type]  # fields of Report


def by_worker(*reports: ParticipantReport) -> dict[str, ParticipantReport]:
    return {report.worker: report for report in reports}


def running(round_: int = 4) -> Rendezvous:
    """Workers a and b in a round."""
    return Rendezvous(1, RendezvousStage.RUNNING, round_, port=7, participants={"a": "first", "b": "first"})


def test_a_round_starts_when_all_are_ready_and_not_before() -> None:
    assert advance_rendezvous(Rendezvous(1), by_worker(report("a"))).stage is RendezvousStage.GATHERING
    assert (
        advance_rendezvous(Rendezvous(1), by_worker(report("a"), report("b", ParticipantStatus.ENDING))).stage
        is RendezvousStage.GATHERING
    )
    meeting = advance_rendezvous(Rendezvous(1), by_worker(report("a"), report("b")))
    assert (meeting.stage, meeting.round, meeting.restarts) == (RendezvousStage.RUNNING, 1, 0)
    assert meeting.build_view("a", "first").included
    assert not meeting.build_view("a", "second").included


def test_the_rounds_number_is_above_all_that_were_seen_and_not_below_the_plans() -> None:
    assert advance_rendezvous(Rendezvous(1), by_worker(report("a", round_=6), report("b"))).round == 7
    assert (
        advance_rendezvous(Rendezvous(1), by_worker(report("a", first_round=9), report("b", first_round=9))).round == 9
    )


def test_who_is_not_ready_again_is_named_to_those_that_are() -> None:
    ended = report("a", ParticipantStatus.READY, 4)
    meeting = advance_rendezvous(running(), by_worker(ended))  # b is frozen, and its connection has been given up
    assert meeting.build_view("a", "first").missing == ("b",)
    meeting = advance_rendezvous(meeting, by_worker(ended, report("b", ParticipantStatus.ENDING, 4)))
    assert meeting.build_view("a", "first").missing == ("b",), "its ranks are not gone"
    meeting = advance_rendezvous(meeting, by_worker(ended, report("b", ParticipantStatus.READY, 4)))
    assert (meeting.stage, meeting.build_view("a", "first").missing) == (RendezvousStage.RUNNING, ())


def test_whose_ranks_had_ended_well_when_a_round_ended_is_told_until_the_next_one_ends() -> None:
    """Uneven batches: b's ranks fail for want of a's. Whichever of the two is heard first."""
    finished, failed = (
        report("a", ParticipantStatus.FINISHED, 4, first_rank=2, finished_round=4),
        report("b", ParticipantStatus.ENDING, 4),
    )
    gathering = advance_rendezvous(running(), by_worker(failed))
    for meeting in (
        advance_rendezvous(gathering, by_worker(finished, failed)),
        advance_rendezvous(running(), by_worker(finished, failed)),
    ):
        again = [replace(finished, status=ParticipantStatus.READY), replace(failed, status=ParticipantStatus.READY)]
        following = advance_rendezvous(meeting, by_worker(*again))
        assert (following.round, following.build_view("b", "first").finished_rank) == (5, 2)
        over = advance_rendezvous(following, by_worker(replace(finished, round=5), replace(failed, round=5)))
        assert over.build_view("b", "first").finished_rank is None


def test_only_a_few_of_those_that_have_not_come_are_named() -> None:
    participants = {f"w{number:03}": "first" for number in range(500)}
    meeting = advance_rendezvous(
        Rendezvous(1, RendezvousStage.GATHERING, 4, participants=participants), by_worker(report("w000", round_=4))
    )
    assert meeting.missing == tuple(f"w{number:03}" for number in range(1, 9))


def test_a_launcher_whose_ranks_have_ended_ends_the_round() -> None:
    for status in (ParticipantStatus.ENDING, ParticipantStatus.READY):
        reports = by_worker(
            report("a", ParticipantStatus.RUNNING, 4), report("b", status, 4, ending=RanksEnding.SIGNAL)
        )
        view = advance_rendezvous(running(), reports).build_view("a", "first")
        assert (view.stage, view.ended_by, view.ending) == (RendezvousStage.GATHERING, "b", RanksEnding.SIGNAL)


def test_a_report_from_before_the_round_ends_nothing() -> None:
    assert (
        advance_rendezvous(
            running(), by_worker(report("a", ParticipantStatus.READY, 3), report("b", ParticipantStatus.RUNNING, 4))
        )
        == running()
    )


def test_a_restarted_launcher_ends_the_round_that_its_ranks_were_in() -> None:
    reports = by_worker(report("a", ParticipantStatus.RUNNING, 4), report("b", incarnation="second"))
    assert advance_rendezvous(running(), reports).stage is RendezvousStage.GATHERING


def test_a_launcher_that_does_not_know_of_the_rounds_end_is_not_counted_as_ready() -> None:
    gathering = replace(running(), stage=RendezvousStage.GATHERING)
    reports = by_worker(report("a", round_=4), report("b", round_=3))
    assert advance_rendezvous(gathering, reports).stage is RendezvousStage.GATHERING
    assert advance_rendezvous(gathering, by_worker(report("a", round_=4), report("b", round_=4))).round == 5


def test_the_best_explanation_of_a_rounds_end_wins_over_the_first() -> None:
    victim = report("a", ParticipantStatus.ENDING, 4, ending=RanksEnding.CONNECTION)
    first = advance_rendezvous(running(), by_worker(victim, report("b", ParticipantStatus.RUNNING, 4)))
    assert first.build_view("a", "first").ended_by == "a"
    both = advance_rendezvous(
        first, by_worker(victim, report("b", ParticipantStatus.ENDING, 4, ending=RanksEnding.SIGNAL))
    )
    assert both.build_view("a", "first").ended_by == "b"
    next_round = advance_rendezvous(
        both,
        by_worker(replace(victim, status=ParticipantStatus.READY), report("b", round_=4, ending=RanksEnding.SIGNAL)),
    )
    assert (next_round.round, next_round.build_view("a", "first").ended_by) == (5, "b")


def test_the_meeting_is_over_when_all_have_finished_the_round() -> None:
    half = by_worker(report("a", ParticipantStatus.FINISHED, 4), report("b", ParticipantStatus.RUNNING, 4))
    assert advance_rendezvous(running(), half).stage is RendezvousStage.RUNNING
    whole = by_worker(report("a", ParticipantStatus.FINISHED, 4), report("b", ParticipantStatus.FINISHED, 4))
    assert advance_rendezvous(running(), whole).stage is RendezvousStage.FINISHED


def test_restarts_are_counted_over_a_restarted_host_and_end_with_the_budget() -> None:
    ready = {"round_": 4, "has_run": True, "restarts": 4}
    meeting = advance_rendezvous(Rendezvous(1), by_worker(report("a"), report("b", **ready)))  # type: ignore[arg-type]
    assert (meeting.stage, meeting.restarts) == (RendezvousStage.RUNNING, 5)
    ready["restarts"] = 5
    halted = advance_rendezvous(Rendezvous(1), by_worker(report("a"), report("b", **ready)))  # type: ignore[arg-type]
    assert halted.stage is RendezvousStage.HALTED
    assert "5 restarts" in halted.reason


def test_two_barren_rounds_halt_unless_one_launcher_has_seen_a_step() -> None:
    barren = by_worker(
        report("a", round_=4, has_run=True, no_progress_rounds=2),
        report("b", round_=4, has_run=True, no_progress_rounds=2),
    )
    assert (
        advance_rendezvous(replace(running(), stage=RendezvousStage.GATHERING), barren).stage is RendezvousStage.HALTED
    )
    one_step = by_worker(
        report("a", round_=4, has_run=True, no_progress_rounds=2),
        report("b", round_=4, has_run=True, no_progress_rounds=0),
    )
    assert (
        advance_rendezvous(replace(running(), stage=RendezvousStage.GATHERING), one_step).stage
        is RendezvousStage.RUNNING
    )


def test_nothing_changes_when_nothing_is_new() -> None:
    reports = by_worker(report("a"), report("b"))
    meeting = advance_rendezvous(Rendezvous(1), reports)
    assert advance_rendezvous(meeting, reports) == meeting


def test_reports_and_views_survive_the_wire() -> None:
    sent = report(
        "a", ParticipantStatus.ENDING, 4, ending=RanksEnding.LEFT, has_run=True, restarts=2, no_progress_rounds=1
    )
    assert ParticipantReport.from_json(sent.to_json()) == sent
    view = RendezvousView(1, RendezvousStage.RUNNING, 4, 29500, 2, True, "b", RanksEnding.SIGNAL, "why", ("c",))
    assert RendezvousView.from_json(json.loads(json.dumps(view.to_json()))) == view


@pytest.mark.parametrize(
    ("field", "value"), [("round", "3"), ("round", float("nan")), ("worker", []), ("workers", -1), ("ending", "0")]
)
def test_a_report_that_is_none_names_its_field(field: str, value: object) -> None:
    report = ParticipantReport("a", "first", 1, ParticipantStatus.READY, 0).to_json()
    with pytest.raises(InputError, match=f"Report.{field}"):
        ParticipantReport.from_json(report | {field: value})
