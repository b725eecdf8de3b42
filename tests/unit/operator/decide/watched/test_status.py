"""Phases and conditions of a WatchedJob."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.protocol.watched_report import RecordingLevel, ReportedProgress, WatchedReport
from pacekeeper_operator.api.watched_job import WatchedJobStatus
from pacekeeper_operator.decide.watched.status import build_watched_status
from pacekeeper_operator.state.observation import Observation
from testing.kubernetes.schema import read_schema
from testing.operators.observations import NOW, build_training, change_worker
from testing.operators.watched_pods import describe_ranks


def build_watched(**changes: Any) -> Observation:
    """A job of four ranks; `changes`: of the description of each rank."""
    observation = build_training(4, 0)
    for rank, view in enumerate(observation.workers):
        report = WatchedReport(describe_ranks([rank], 4, **changes))
        observation = change_worker(observation, view.name, heartbeat={"watched": report})
    return observation


def find_conditions(observation: Observation) -> dict[str, tuple[str, str]]:
    status = build_watched_status(observation, WatchedJobStatus())
    return {condition.type: (condition.status, condition.reason) for condition in status.conditions}


@pytest.mark.parametrize(
    ("observation", "phase", "changed"),
    [
        (build_watched(), "Watched", {}),
        (build_watched(recording=RecordingLevel.PURE), "Watched", {"Recording": ("True", "Pure")}),
        (build_watched(recording=RecordingLevel.STEPS_ONLY), "Watched", {"Recording": ("False", "StepsOnly")}),
        (build_watched(broken="step: error"), "Watched", {"Broken": ("True", "LibraryDisabled")}),
        (
            change_worker(build_watched(), "j-w1-0", silent_seconds=60.0),
            "PartlyWatched",
            {"Reporting": ("False", "PodsSilent")},
        ),
        (
            change_worker(build_watched(), "j-w1-0", heartbeat={"watched": None}),
            "PartlyWatched",
            {"Covered": ("False", "RanksMissing")},
        ),
        (
            build_training(4, 0),
            "Unwatched",
            {"Covered": ("False", "NoRanks"), "Recording": ("Unknown", "NotReported")},
        ),
    ],
    ids=["all", "pure", "steps only", "broken", "silent", "missing ranks", "no ranks"],
)
def test_phase_and_conditions(observation: Observation, phase: str, changed: dict[str, tuple[str, str]]) -> None:
    usual = {
        "Covered": ("True", "AllRanks"),
        "Reporting": ("True", "AllPods"),
        "Recording": ("True", "Native"),
        "Broken": ("False", "NothingBroken"),
    }
    assert find_conditions(observation) == usual | changed
    assert build_watched_status(observation, WatchedJobStatus()).phase == phase


@pytest.mark.parametrize(
    ("observation", "ranks"), [(build_watched(), "4 of 4"), (build_training(4, 0), "0 of 4")], ids=["all", "none"]
)
def test_while_new_pods_are_not_watched_no_job_is_covered(observation: Observation, ranks: str) -> None:
    status = build_watched_status(observation, WatchedJobStatus(), injection_stop="an image cannot be pulled")
    (covered,) = [condition for condition in status.conditions if condition.type == "Covered"]
    assert (covered.status, covered.reason) == ("False", "InjectionIsOff")
    assert covered.message == (
        f"new pods are not watched: an image cannot be pulled ({ranks} ranks that run now are watched)"
    )
    assert len(status.conditions) == 4


def test_the_scripts_own_progress_is_shown_while_it_runs() -> None:
    report = ReportedProgress(24, 6000, 7261)
    observation = change_worker(build_watched(), "j-w0-0", heartbeat={"reported_progress": report})
    status = build_watched_status(observation, WatchedJobStatus())
    assert (status.total_steps, status.progress, status.remaining) == (6000, "24%", "2h")
    ended = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW))
    assert build_watched_status(ended, WatchedJobStatus()).remaining is None
    assert build_watched_status(build_watched(), WatchedJobStatus()).progress is None


def test_between_two_attempts_nothing_is_known_and_at_the_end_the_phase_says_so() -> None:
    observation = build_watched()
    for view in observation.workers:
        observation = change_worker(observation, view.name, gone=True)
    assert set(find_conditions(observation).values()) == {("Unknown", "NoPods")}
    ended = observation.with_desired(observation.desired.with_lifecycle(completed_at=NOW))
    assert set(find_conditions(ended).values()) == {("Unknown", "Ended")}
    assert build_watched_status(ended, WatchedJobStatus()).phase == "Ended"


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    first = build_watched_status(build_watched(), WatchedJobStatus())
    later = build_watched_status(replace(build_watched(broken="step: error"), now=NOW + 60), first)
    changed = {condition.type: condition.last_transition_time for condition in later.conditions}
    assert changed == {"Covered": NOW, "Reporting": NOW, "Recording": NOW, "Broken": NOW + 60}
    assert WatchedJobStatus.parse(later.to_patch()) == later


def test_the_status_has_the_fields_of_the_schema() -> None:
    fields = WatchedJobStatus().to_patch().keys()
    assert fields == read_schema("watchedjobs")["status"]["properties"].keys()
