"""What a broken or hostile worker may send: nothing but an InputError results, and what is read keeps its bounds."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.failures import hang
from pacekeeper_analysis.protocol.reports import (
    MAX_WINDOW_STEPS,
    BadLoss,
    BlockedConnection,
    CheckpointReport,
    Evidence,
    FaultKind,
    FaultReport,
    FlowWindow,
    Heartbeat,
    LauncherState,
    LinkWindow,
    RankState,
    RankWindow,
    RoundStart,
    StepProgress,
    TrainingReport,
)
from pacekeeper_analysis.stragglers import strategies
from pacekeeper_analysis.stragglers.windows import align_windows

STEPS = tuple(range(32))
WINDOW = RankWindow(
    rank=0, steps=STEPS, step_seconds=(0.2,) * 32, compute_seconds=(0.1,) * 32, samples=(8,) * 32,
    gc_seconds=(0.01,) * 32, lengths=(100.0,) * 32, squares=(2000.0,) * 32, sync_mode="Sync", transfers=(0.1,),
    share_granularity=4,
)  # fmt: skip
STATE = RankState(0, "TRAIN", 1.0, 5, "ALL_REDUCE", 1, 9, 9, 2.0, "S", False, "stack")
REPORTS: dict[str, tuple[Any, Any]] = {
    "heartbeat": (
        Heartbeat,
        Heartbeat(
            "w", LauncherState.RUNNING, 3, 1, 1, start=RoundStart(1.0, 0, 2.0), progress=StepProgress(7, 7, 9),
            checkpoint=CheckpointReport(6, 7, failed_rank=3), training=TrainingReport(True, bad_loss=BadLoss(3, 7)),
            unkillable_ranks=(3,),
        ),
    ),
    "fault": (
        FaultReport,
        FaultReport(
            "n", FaultKind.STALLED, "w", 1, 2.0, ranks=(STATE,), unreachable=("10.0.0.1",), missing=("j-w1-0",),
            blocked=(BlockedConnection(0, "10.0.0.2:5000", 2.5),),
        ),
    ),
    "evidence": (
        Evidence,
        Evidence(
            "e", "w", 1, (WINDOW, replace(WINDOW, rank=1)), links=(LinkWindow("a:1", "b:2", 0, 1, 5.0, 9),),
            flows=(FlowWindow(2**64 - 1, 0, 1, 0, 1, 9, 0.5),),
        ),
    ),
}  # fmt: skip
NONSENSE: tuple[Any, ...] = (
    None, True, -2, 2**64, 10**5000, -0.5, math.nan, math.inf, -math.inf, 1e300, 1e23, 2**52, "", "Idle", "a\nb\0",
    "\ud800", "x" * 100_000, [], [[]], ["oops"], [None] * 5_000, [-1], [math.nan] * 32, {}, {"rank": "oops"}, [{}],
)  # fmt: skip


def encode_report(report: Any) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(json.dumps(report.to_json()))
    return sent


@pytest.mark.parametrize("kind", REPORTS)
def test_reports_are_read_as_they_were_sent(kind: str) -> None:
    cls, report = REPORTS[kind]
    assert cls.from_json(encode_report(report)) == report
    assert cls.from_json({**encode_report(report), "of_a_later_version": [1]}) == report


def list_places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in it."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for key, item in items:
        yield from list_places(item, (*path, key))


def change_value(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = data.copy()
    copy[path[0]] = change_value(data[path[0]], path[1:], value)
    return copy


def use_report(report: Any) -> None:
    """Run all that this package computes of a report."""
    json.dumps(report.to_json(), allow_nan=False).encode()
    if isinstance(report, FaultReport):
        hang.diagnose_hang([report], world_size=1)
    if isinstance(report, Evidence):
        align_windows(report.windows)
        found = strategies.diagnose_bottleneck(report.windows, 1.1)
        if found is not None:
            strategies.propose_strategies(found, threshold=1.1)
        strategies.propose_revert_to_sync(report.windows, threshold=1.1)


@pytest.mark.parametrize("kind", REPORTS)
@pytest.mark.filterwarnings("error")
def test_nonsense_in_any_place_raises_nothing_but_an_input_error(kind: str) -> None:
    cls, report = REPORTS[kind]
    sent = encode_report(report)
    refused: list[str] = []
    for path in list_places(sent):
        for value in NONSENSE:
            try:
                use_report(cls.from_json(change_value(sent, path, value)))
            except InputError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert max(map(len, refused)) < 1_000


@pytest.mark.parametrize("kind", REPORTS)
@pytest.mark.filterwarnings("error")
def test_several_nonsenses_at_once_raise_nothing_but_an_input_error(kind: str) -> None:
    cls, report = REPORTS[kind]
    chance = random.Random(0)
    for _ in range(500):
        sent = encode_report(report)
        for _ in range(chance.randint(2, 4)):
            sent = change_value(
                sent, chance.choice([path for path in list_places(sent) if path]), chance.choice(NONSENSE)
            )
        try:
            use_report(cls.from_json(sent))
        except InputError:
            continue


@pytest.mark.parametrize(
    ("read", "change", "field"),
    [
        (Heartbeat.from_json, {"state": "Idle"}, "Heartbeat.state"),
        (Heartbeat.from_json, {"progress": {"step": "7"}}, "Heartbeat.progress.step"),
        (Heartbeat.from_json, {"training": {"managed": 1}}, "Heartbeat.training.managed"),
        (Heartbeat.from_json, {"launcher_silent_seconds": math.nan}, "Heartbeat.launcher_silent_seconds"),
        (Heartbeat.from_json, {"launcher_silent_seconds": -1.0}, "Heartbeat.launcher_silent_seconds"),
        (Heartbeat.from_json, {"worker": "w" * 254}, "Heartbeat.worker"),
        (Heartbeat.from_json, {"training": {"sync_mode": "DiLoCo"}}, "Heartbeat.training.sync_mode"),
        (Heartbeat.from_json, {"progress": {"step": -1}}, "Heartbeat.progress.step"),
        (Heartbeat.from_json, {"progress": None}, "Heartbeat.progress"),
        (Heartbeat.from_json, {"progress": [7]}, "Heartbeat.progress"),
        (Heartbeat.from_json, {"start": {"started_at": math.nan}}, "Heartbeat.start.started_at"),
        (Heartbeat.from_json, {"checkpoint": {"failed_rank": -1}}, "Heartbeat.checkpoint.failed_rank"),
        (Heartbeat.from_json, {"training": {"bad_loss": {"rank": 1}}}, "Heartbeat.training.bad_loss: step must be"),
        (Heartbeat.from_json, {"training": {"global_batch": 0}}, "Heartbeat.training.global_batch"),
        (Heartbeat.from_json, {"rendezvous_port": 0}, "Heartbeat.rendezvous_port"),
        (Heartbeat.from_json, {"unkillable_ranks": [0] * 2_000}, "Heartbeat.unkillable_ranks"),
        (FaultReport.from_json, {"kind": "Bored"}, "Fault.kind"),
        (FaultReport.from_json, {"noticed_at": math.inf}, "Fault.noticed_at"),
        (FaultReport.from_json, {"unreachable": ["a"] * 65}, "Fault.unreachable"),
        (FaultReport.from_json, {"unreachable": "10.0.0.1"}, "Fault.unreachable"),
        (FaultReport.from_json, {"ranks": [{"rank": 0}]}, r"Fault.ranks\[0\]: phase, phase_seconds"),
        (Evidence.from_json, {"request": 3}, "Evidence.request"),
        (Evidence.from_json, {"windows": {}}, "Evidence.windows"),
        (Evidence.from_json, {"windows": [None] * 2_000}, "Evidence.windows"),
    ],
)
def test_the_field_is_named(read: Callable[[Mapping[str, Any]], Any], change: dict[str, Any], field: str) -> None:
    given = next(encode_report(report) for cls, report in REPORTS.values() if cls.from_json == read)
    with pytest.raises(InputError, match=field):
        read({**given, **change})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InputError, match="Fault: kind, worker, round, noticed_at must be given"):
        FaultReport.from_json({"name": "n"})


def test_long_texts_are_cut_to_their_end_and_stay_text() -> None:
    fault = FaultReport.from_json({**encode_report(REPORTS["fault"][1]), "error": "x" * 100_000 + "the end\ud800"})
    assert len(fault.error) == 8_000
    assert fault.error.endswith("the end?")


@pytest.mark.parametrize(
    "change",
    [
        {"samples": [8] * 31},
        {"lengths": [1.0]},
        {"compute_seconds": [math.nan] * 32},
        {"gc_seconds": [-1.0] * 32},
        {"steps": list(range(MAX_WINDOW_STEPS + 1))},
        {"rank": "oops"},
        {"sync_mode": "Odd"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_window_that_is_not_sound_costs_itself_only(change: dict[str, Any]) -> None:
    sent = encode_report(REPORTS["evidence"][1])
    sent["windows"][0] |= change
    assert [window.rank for window in Evidence.from_json(sent).windows] == [1]


def test_a_ragged_window_cannot_be_built() -> None:
    with pytest.raises(InputError, match=r"RankWindow.squares: 1 numbers for 32 steps"):
        replace(WINDOW, squares=(1.0,))
