"""A job's life as a page."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_operator.api.incident import (
    IncidentCause,
    IncidentClass,
    IncidentOutcome,
    IncidentSpec,
    IncidentStatus,
    ObjectRef,
    RemedyPrice,
)
from pacekeeper_operator.api.training_job import RemediationMode
from pacekeeper_operator.cli import report
from pacekeeper_operator.cli.loaded_objects import LoadedIncident, LoadedJob
from testing.kubernetes.cli_objects import build_job_object
from testing.operators.observations import NOW, build_training

BEGAN = NOW - 400
"""Of the job."""
STATUS = IncidentStatus(
    mode=RemediationMode.ACT,
    remedy="RestartRanks",
    considered=(RemedyPrice("RestartRanks", None, 6.0, chosen=True, reason="the job stands still"),),
    first_sign=NOW - 300,
    detected=NOW - 298,
    decided=NOW - 297,
    applied=NOW - 296,
    recovered=NOW - 280,
    recovered_seconds=20.0,
    steps_lost=7,
    outcome=IncidentOutcome.RECOVERED,
)


def incident(
    cause: IncidentCause = IncidentCause.HANG,
    class_: IncidentClass = IncidentClass.UNKNOWN,
    message: str = "",
    **status: Any,
) -> LoadedIncident:
    spec = IncidentSpec(ObjectRef("j", "ns", "u1d2c3"), cause, class_, rank=2, message=message or "rank 2 stands still")
    return LoadedIncident("ns", f"j-r1-{cause}", NOW - 300, spec, replace(STATUS, **status))


def page(*incidents: LoadedIncident) -> str:
    return report.render_page(LoadedJob.from_object(build_job_object(build_training())), incidents, NOW)


def text(html: str) -> str:
    return " ".join(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL).split())


def test_it_tells_how_the_job_has_done_and_of_each_incident_all_there_is() -> None:
    told = text(page(incident(), incident(IncidentCause.CRASH, steps_lost=2)))
    for words in (
        "j in ns",
        "Running phase",
        "500 steps",
        "7 min since its start",
        "2 incidents within their retention",
        "9 steps lost",
        "hang 1 20 s 5.0% 7",
        "1 100 s hang rank 2 RestartRanks 2.0 s 3.0 s 20 s 7 Recovered",
        "RestartRanks: chosen, costs 6.0 s of training, wins all (the job stands still)",
        "Recovered: training goes on as before; recovered 20 s after the first sign; 7 steps lost",
    ):
        assert words in told, words


def test_a_job_without_incidents() -> None:
    assert text(page()).count("None.") == 3


def test_what_tenants_have_written_is_text() -> None:
    shown = page(incident(message='</style><script>alert("x")</script>\x1b[31m'))
    assert "<script" not in shown
    assert "&lt;script&gt;alert(&quot;x&quot;)" in shown
    assert "\x1b" not in shown


def test_it_loads_nothing() -> None:
    assert not re.findall(r"(?:src|href)=|url\(|@import|<script", page(incident()))


class TestLostSeconds:
    def test_all_of_a_standstill(self) -> None:
        assert report.compute_lost_seconds(incident(), NOW) == 20.0

    def test_of_slow_steps_what_they_take_longer(self) -> None:
        slow = incident(IncidentCause.STRAGGLER, IncidentClass.PERFORMANCE, slowdown_before=1.25)
        assert report.compute_lost_seconds(slow, NOW) == pytest.approx(4.0)
        assert report.compute_lost_seconds(replace(slow, status=replace(slow.status, slowdown_before=None)), NOW) == 0.0

    def test_nothing_while_a_worker_waits_to_move(self) -> None:
        assert report.compute_lost_seconds(incident(IncidentCause.NODE_LEAVING, IncidentClass.DISRUPTION), NOW) == 0.0

    def test_what_lasts_costs_until_now_and_what_was_only_recommended_is_not_known(self) -> None:
        lasting: dict[str, Any] = {"recovered": None, "recovered_seconds": None}
        assert report.compute_lost_seconds(incident(outcome=None, **lasting), NOW) == 300.0
        assert report.compute_lost_seconds(incident(outcome=IncidentOutcome.RECOMMENDED, **lasting), NOW) == 0.0

    def test_the_dearest_cause_comes_first(self) -> None:
        found = report.compute_losses(
            [incident(IncidentCause.CRASH, recovered_seconds=5.0), incident(), incident()], NOW
        )
        assert [(loss.cause, loss.incidents, loss.seconds, loss.steps) for loss in found] == [
            ("hang", 2, 40.0, 14),
            ("crash", 1, 5.0, 7),
        ]


def pieces(html: str) -> list[tuple[str, float, float]]:
    """Kind, left end and width of what the timeline shows of incidents."""
    found = re.findall(r'<rect class="(lost|slow)" x="([\d.]+)" y="\d+" width="([\d.]+)"', html)
    return [(kind, float(left), float(width)) for kind, left, width in found]


def test_the_timeline_has_a_piece_from_each_first_sign_to_its_recovery() -> None:
    """The job was taken up 400 s ago: 1084 units for them."""
    slow = incident(
        IncidentCause.STRAGGLER, IncidentClass.PERFORMANCE, first_sign=NOW - 100, recovered=None, outcome=None
    )
    (lost, light) = pieces(page(slow, incident()))
    assert (lost[0], light[0]) == ("lost", "slow")
    assert lost[1:] == pytest.approx((8 + 1084 / 4, 1084 * 20 / 400), abs=0.1)
    assert light[1:] == pytest.approx((8 + 1084 * 3 / 4, 1084 / 4), abs=0.1)
