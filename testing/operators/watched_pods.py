"""Watched pods for tests: as the API server shows them, and as their sidecars report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pacekeeper_analysis.protocol.reports import (
    Heartbeat,
    LauncherState,
    RankMetrics,
    RoundStart,
    StepProgress,
)
from pacekeeper_analysis.protocol.watched_report import RecordingLevel, ReportedRank, WatchedReport
from pacekeeper_operator.api.formats import format_time
from pacekeeper_operator.api.names import LABEL_WATCHED
from testing.operators.observations import NOW

JOB_OWNER = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "job-uid", "controller": True}


def build_pod_body(name: str, owner: Mapping[str, Any] = JOB_OWNER, **changes: Any) -> dict[str, Any]:
    """Return a running pod of a Job in namespace `ns`; `changes`: of labels and status."""
    labels = {LABEL_WATCHED: "true", **changes.pop("labels", {})}
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "uid": f"uid-{name}",
            "labels": labels,
            "ownerReferences": [dict(owner)],
            "creationTimestamp": format_time(NOW - 400),
        },
        "spec": {"nodeName": f"node-{name}"},
        "status": {"phase": "Running", "podIP": "10.0.0.1", **changes},
    }


def describe_ranks(numbers: Sequence[int], world_size: int, **changes: Any) -> tuple[ReportedRank, ...]:
    """Return ranks of one container, each in a process of its own; `changes`: of fields of all of them."""
    values: dict[str, Any] = {
        "started_at": NOW - 350,
        "recording": RecordingLevel.NATIVE,
        "rendezvous": "train-0:29500",
    }
    pid = changes.pop("pid", 100)
    return tuple(ReportedRank(rank, world_size, pid + rank, **(values | changes)) for rank in numbers)


def build_watched_heartbeat(worker: str, ranks: Sequence[ReportedRank], step: int = 500, **changes: Any) -> Heartbeat:
    """Return the heartbeat of a container whose ranks have trained for `step` steps."""
    began = min((rank.started_at for rank in ranks), default=NOW - 350)
    heartbeat = Heartbeat(
        worker=worker,
        state=LauncherState.RUNNING,
        round=1,
        start=RoundStart(started_at=began, first_step_at=began + 5 if step else None),
        progress=StepProgress(step=step or None, steps_in_round=step),
        watched=WatchedReport(tuple(ranks)),
    )
    return replace(heartbeat, **changes)


def build_rank_metrics(rank: int, own_seconds: float, step_seconds: float = 0.1, last_step: int = 500) -> RankMetrics:
    """Return the metrics of a rank over its last 32 steps."""
    return RankMetrics(
        rank, 32, step_seconds, own_seconds, own_seconds, step_seconds - own_seconds, 1, 0.1, last_step=last_step
    )
