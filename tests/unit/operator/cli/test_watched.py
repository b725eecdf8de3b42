"""Watched jobs and their bill, as text and as a page, over a stand-in for kubectl."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pacekeeper_analysis.accounting.gpu_account import GpuAccount, Loss, Tally
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.incident import (
    IncidentCause,
    IncidentOutcome,
    IncidentSpec,
    IncidentStatus,
    ObjectRef,
    RemedyPrice,
)
from pacekeeper_operator.api.names import API_VERSION, Object
from pacekeeper_operator.api.watched_job import (
    AccountStatus,
    PotentialSavings,
    RootRef,
    WatchedJobSpec,
    WatchedJobStatus,
)
from pacekeeper_operator.cli.bill import get_saved_seconds
from pacekeeper_operator.cli.command import main
from pacekeeper_operator.cli.loaded_objects import LoadedIncident, LoadedWatchedJob
from pacekeeper_operator.cli.watched import describe_injection, format_job, format_overview
from testing.kubernetes.cli_objects import build_metadata, install_kubectl_stand_in

NOW = time.time()
DAY = format_time(NOW)[:10]
HANG_PRICE = RemedyPrice("RestartRanks", None, 20.0, chosen=True)


def build_watched_job(name: str, uid: str, tally: Tally, nodes: Mapping[str, float] | None = None) -> Object:
    by_day = {(DAY, node): seconds for node, seconds in (nodes or {}).items()}
    account = GpuAccount(tally, {DAY: tally, "2020-01-01": tally}, by_day, until=NOW, round=1, gpus=8)
    status = WatchedJobStatus(
        ranks="8/8",
        step=70,
        culprits=("rank 3 on train-0 takes 2.00 × its peers' time (P = 0.99)",),
        account=AccountStatus.from_account(account),
        potential_savings=PotentialSavings(3600.0, 2),
    )
    return {
        "apiVersion": API_VERSION,
        "kind": "WatchedJob",
        "metadata": build_metadata(name, uid),
        "spec": WatchedJobSpec(RootRef("PyTorchJob", name.partition(".")[0]), "blue").to_json(),
        "status": {key: value for key, value in status.to_patch().items() if value is not None},
    }


def build_incident_object(name: str, uid: str, age: float = 600.0, **status: Any) -> Object:
    spec = IncidentSpec(
        ObjectRef("train.1", "ns", uid), IncidentCause.HANG, node="node-3", message="<b>rank 3</b> stands still"
    )
    found = IncidentStatus(first_sign=NOW - age, **status)
    return {
        "apiVersion": API_VERSION,
        "kind": "Incident",
        "metadata": build_metadata(name, f"uid-{name}"),
        "spec": spec.to_json(),
        "status": {key: value for key, value in found.to_patch().items() if value is not None},
    }


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({}, "pods are not watched: no operator"),
        ({"ca.crt": "…"}, "pods are not watched: no operator"),
        ({"enabled": "true"}, "new pods are watched"),
        ({"enabled": "false", "disabledAt": "2026-01-01T00:00:00Z"}, "new pods are not watched: a person has switched"),
        (
            {"enabled": "false", "disabledAt": "2026-01-01T00:00:00Z", "reason": "no image"},
            "new pods are not watched since 2026-01-01T00:00:00Z: no image",
        ),
    ],
)
def test_whether_pods_are_watched_is_told(state: dict[str, str], text: str) -> None:
    assert describe_injection(state).startswith(text)


def test_the_overview_tells_why_new_pods_are_not_watched() -> None:
    stop = "new pods are not watched: no image (8 of 8 ranks that run now are watched)"
    body = build_watched_job("train", "uid-1", Tally())
    body["status"]["conditions"] = [
        {"type": "Covered", "status": "False", "reason": "InjectionIsOff", "message": stop, "lastTransitionTime": None}
    ]
    job = LoadedWatchedJob.from_object(body)
    assert format_overview([job, job]).count(stop) == 1
    assert f"Covered  {stop}" in " ".join(format_job(job, []).split("\n")).replace("   ", "  ")


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for kubectl, with two watched jobs, an Incident of the first, and one of a TrainingJob."""
    hours = {Loss.HANG: 3 * 3600.0, Loss.STARTUP: 3600.0}
    objects = [
        build_watched_job("train.1", "u-1", Tally(4 * 3600.0, hours), {"node-3": 3 * 3600.0}),
        build_watched_job("tune.2", "u-2", Tally(3600.0)),
        build_incident_object(
            "hang", "u-1", outcome=IncidentOutcome.OBSERVED, recovered_seconds=470.0, considered=(HANG_PRICE,)
        ),
        build_incident_object(
            "slow", "u-9", outcome=IncidentOutcome.MITIGATED, predicted_gain=30.0, measured_gain=20.0
        ),
        build_incident_object(
            "old-hang",
            "u-1",
            age=30 * 86_400.0,
            outcome=IncidentOutcome.OBSERVED,
            recovered_seconds=470.0,
            considered=(HANG_PRICE,),
        ),
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ns", "labels": {"team": "red"}}},
    ]
    install_kubectl_stand_in(tmp_path, monkeypatch, objects)


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["watched"], ["PyTorchJob train", "50%", "1.0 h", "rank 3 on train-0"]),
        (
            ["watched", "train"],
            [
                "team",
                "blue",
                "remedies of 2 incidents would have kept 1.0 h",
                "hang 37.5%, startup 12.5%",
                "50.0% of 8.0 GPU hours",
                "stands still",
            ],
        ),
        (["bill"], ["2 jobs held GPUs for 9.0 hours", "55.6%", "about 1.0 GPU hours", "node-3", "1 remedies was 1.50"]),
        (["bill", "--since", "2019-12-31"], ["held GPUs for 18.0 hours", "about 2.0 GPU hours"]),
        (["bill", "--since", "2100-01-01"], ["no watched job has held GPUs since 2100-01-01"]),
        (["bill", "--team", "blue"], ["2 jobs"]),
        (["bill", "--team", "blue", "--team-label", "team"], ["no watched job"]),
        (["bill", "--team", "red", "--team-label", "team"], ["2 jobs"]),
    ],
)
def test_watched_jobs_and_their_bill_are_shown(
    arguments: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert [text for text in texts if text not in printed] == []


@pytest.mark.usefixtures("kubectl")
def test_the_page_has_teams_intervals_and_no_markup_of_tenants(tmp_path: Path) -> None:
    page = tmp_path / "bill.html"
    assert main(["bill", "-o", str(page)]) == 0
    html = page.read_text()
    assert "<b>rank 3</b>" not in html
    text = " ".join(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL).split())
    assert "8 min PyTorchJob train hang node-3" in text
    assert "blue 9.00 55.6%" in text


@pytest.mark.usefixtures("kubectl")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["watched", "other"], 1, "no watched job 'other'; there are: train.1"),
        (["bill", "-o", "/nowhere/bill.html"], 2, "--output /nowhere/bill.html"),
    ],
)
def test_what_cannot_be_shown_is_named(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("since", ["week", "-", "99999999999d", "2026-13-01"])
def test_a_period_that_is_none_is_refused(since: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bill", f"--since={since}"])
    assert "give days, such as 7d, or a date" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "saved"),
    [
        ({"considered": (HANG_PRICE,)}, 80.0),
        ({"considered": (RemedyPrice("ReplaceWorker", 50.0, 20.0, chosen=True),)}, 30.0),
        ({"considered": (RemedyPrice("ReplaceWorker", 5.0, 20.0, chosen=True),)}, 0.0),
        ({"considered": (RemedyPrice("ReplaceWorker", 50.0, 20.0),)}, 0.0),
        ({"considered": (HANG_PRICE,), "outcome": IncidentOutcome.RECOVERED}, 0.0),
    ],
)
def test_only_what_was_not_done_and_would_have_paid_counts_as_saved(changes: Any, saved: float) -> None:
    status = {"outcome": IncidentOutcome.OBSERVED, "recovered_seconds": 100.0, **changes}
    incident = LoadedIncident.from_object(build_incident_object("hang", "u-1", **status))
    assert get_saved_seconds(incident) == saved
