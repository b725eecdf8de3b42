"""A report of a job as an HTML page."""

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
"""When the job began."""
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


def build_incident(
    cause: IncidentCause = IncidentCause.HANG,
    class_: IncidentClass = IncidentClass.UNKNOWN,
    message: str = "",
    **status: Any,
) -> LoadedIncident:
    spec = IncidentSpec(ObjectRef("j", "ns", "u1d2c3"), cause, class_, rank=2, message=message or "rank 2 stands still")
    return LoadedIncident("ns", f"j-r1-{cause}", NOW - 300, spec, replace(STATUS, **status))


def render_page(*incidents: LoadedIncident) -> str:
    return report.render_page(LoadedJob.from_object(build_job_object(build_training())), incidents, NOW)


def extract_text(html: str) -> str:
    return " ".join(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL).split())


def test_a_report_summarizes_the_job_and_details_each_incident() -> None:
    shown = extract_text(render_page(build_incident(), build_incident(IncidentCause.CRASH, steps_lost=2)))
    for part in (
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
        assert part in shown, part


def test_a_report_without_incidents_has_empty_sections() -> None:
    assert extract_text(render_page()).count("None.") == 3


def test_text_of_tenants_is_escaped() -> None:
    shown = render_page(build_incident(message='</style><script>alert("x")</script>\x1b[31m'))
    assert "<script" not in shown
    assert "&lt;script&gt;alert(&quot;x&quot;)" in shown
    assert "\x1b" not in shown


def test_a_report_loads_no_other_resource() -> None:
    assert not re.findall(r"(?:src|href)=|url\(|@import|<script", render_page(build_incident()))


class TestLostSeconds:
    def test_a_standstill_counts_in_full(self) -> None:
        assert report.compute_lost_seconds(build_incident(), NOW) == 20.0

    def test_slow_steps_count_by_their_slowdown(self) -> None:
        slow = build_incident(IncidentCause.STRAGGLER, IncidentClass.PERFORMANCE, slowdown_before=1.25)
        assert report.compute_lost_seconds(slow, NOW) == pytest.approx(4.0)
        assert report.compute_lost_seconds(replace(slow, status=replace(slow.status, slowdown_before=None)), NOW) == 0.0

    def test_a_worker_that_waits_to_move_costs_nothing(self) -> None:
        assert (
            report.compute_lost_seconds(build_incident(IncidentCause.NODE_LEAVING, IncidentClass.DISRUPTION), NOW)
            == 0.0
        )

    def test_an_open_incident_costs_until_now_and_a_recommended_one_nothing(self) -> None:
        lasting: dict[str, Any] = {"recovered": None, "recovered_seconds": None}
        assert report.compute_lost_seconds(build_incident(outcome=None, **lasting), NOW) == 300.0
        assert report.compute_lost_seconds(build_incident(outcome=IncidentOutcome.RECOMMENDED, **lasting), NOW) == 0.0

    def test_the_most_expensive_cause_comes_first(self) -> None:
        found = report.compute_losses(
            [build_incident(IncidentCause.CRASH, recovered_seconds=5.0), build_incident(), build_incident()], NOW
        )
        assert [(loss.cause, loss.incidents, loss.seconds, loss.steps) for loss in found] == [
            ("hang", 2, 40.0, 14),
            ("crash", 1, 5.0, 7),
        ]


def list_timeline_pieces(html: str) -> list[tuple[str, float, float]]:
    """Return kind, left end, and width of each incident in the timeline."""
    found = re.findall(r'<rect class="(lost|slow)" x="([\d.]+)" y="\d+" width="([\d.]+)"', html)
    return [(kind, float(left), float(width)) for kind, left, width in found]


def test_the_timeline_shows_each_incident_from_first_sign_to_recovery() -> None:
    """The job began 400 s ago, and these seconds take 1084 units."""
    slow = build_incident(
        IncidentCause.STRAGGLER, IncidentClass.PERFORMANCE, first_sign=NOW - 100, recovered=None, outcome=None
    )
    (lost, light) = list_timeline_pieces(render_page(slow, build_incident()))
    assert (lost[0], light[0]) == ("lost", "slow")
    assert lost[1:] == pytest.approx((8 + 1084 / 4, 1084 * 20 / 400), abs=0.1)
    assert light[1:] == pytest.approx((8 + 1084 * 3 / 4, 1084 / 4), abs=0.1)
