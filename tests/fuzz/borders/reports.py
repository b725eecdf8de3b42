"""What launchers, sidecars and ranks report, and what they receive, as JSON."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pacekeeper_analysis.protocol.communicators import Communicator
from pacekeeper_analysis.protocol.operations import OPERATION, encode_operations
from pacekeeper_analysis.protocol.reports import (
    BadLoss,
    BlockedConnection,
    Evidence,
    FaultReport,
    FlowWindow,
    GpuHealth,
    Heartbeat,
    LinkProbe,
    LinkWindow,
    PathReport,
    RankMetrics,
    RankOperations,
    RankWindow,
)
from testing.operators.observations import build_crash, build_stall, build_training

from ..border import Border, call_directly
from ..mutations import mutate_document

GROUP = Communicator(7, "0-3", "shard")


def build_heartbeat() -> Heartbeat:
    """With something in each field."""
    heartbeat = build_training().workers[0].heartbeat
    assert heartbeat is not None
    return replace(
        heartbeat,
        unkillable_ranks=(1,),
        rank_metrics=(RankMetrics(0, 32, 0.5, 0.4, 0.01, 0.1, 8, 0.5, 0.1),),
        gpus=(GpuHealth("GPU-1", ("RowsPending",), 1, 2, 3, 4, 16, 5, 6, 7, 0.9, 60, 300.0),),
        paths=(PathReport(0, 1, True),),
        training=replace(heartbeat.training, refused="because", sync_mode="Sync", bad_loss=BadLoss(0, 7)),
        sent_at=(heartbeat.start.started_at or 0.0) + 1,
    )


def build_faults() -> list[FaultReport]:
    hung = build_stall("j-w1-0", 1, culprit=True)
    entered = tuple(replace(rank, entered="7:12", stack="f") for rank in hung.ranks)
    blocked = (BlockedConnection(1, "10.0.0.1:5000", 12.0),)
    return [
        build_crash("j-w0-0", 0),
        replace(hung, ranks=entered, communicators=(GROUP,), blocked=blocked, unreachable=("x",)),
    ]


def build_evidence() -> Evidence:
    """With something in each field."""
    operations = np.zeros(3, OPERATION)
    operations["end"] = 1.0
    seconds = (0.5, 0.6, 0.5)
    window = RankWindow(0, (7, 8, 9), seconds, (0.4, 0.5, 0.4), (8, 8, 8), (0.0, 0.1, 0.0), seconds, seconds, "Sync")
    return Evidence(
        "why",
        "j-w0-0",
        1,
        windows=(window, replace(window, rank=1)),
        communicators=(GROUP,),
        operations=(RankOperations(0, encode_operations(operations)),),
        links=(LinkWindow("10.0.0.1:1", "10.0.0.2:2", 0, 1, 5.0, 10**9, 2.0, 0.1, 0.1, 0, 0, 1e-4, 10**9, 1.0),),
        flows=(FlowWindow(2**63, 0, 1, 0, 0, 10**9, 1.0),),
        probes=(LinkProbe("j-w1-0", 1e9, 1e-4, 0, ""),),
    )


BORDERS = [
    Border(
        "heartbeats",
        lambda: [build_heartbeat().to_json()],
        mutate_document,
        call_directly(Heartbeat.from_json),
        cases=400,
    ),
    Border(
        "faults",
        lambda: [fault.to_json() for fault in build_faults()],
        mutate_document,
        call_directly(FaultReport.from_json),
        cases=400,
    ),
    Border(
        "evidence", lambda: [build_evidence().to_json()], mutate_document, call_directly(Evidence.from_json), cases=400
    ),
]
