"""Jobs with pipeline stages: their bottlenecks, from the graph of what their ranks did.

    live = build_live_window(evidence)                     # None: no stages, or too little is known
    found = diagnose_staged_job(live, windows, threshold)  # like strategies.diagnose_bottleneck

A stage with more work than the others is the script's own choice, so a rank's peers are those of its own stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..errors import InputError
from ..protocol.operations import decode_operations
from ..protocol.reports import Evidence, RankWindow
from ..whatif.live import COMPUTE, LiveWindow, RankSteps, build_window_from_operations
from ..whatif.scenario import IDEAL, PEERS, RECORDED_SCENARIO, OperationSelection, WhatIfScenario
from ..whatif.simulate import Array
from ..whatif.slowdown_statistics import analyze_window
from . import strategies
from .step_model import MIN_PERSISTENT_STEPS_SHARE
from .strategies import Bottleneck, Diagnosis
from .windows import align_windows

MAX_STAGED_RANKS_NAMED = 8
"""Upper limit of ranks named in a sentence."""
MIN_LATE_SENDER_SLOWDOWN = 2.0
"""Slowdown of own work from which on a rank also sends and receives late, so that its transfers prove nothing."""
STEPS_PER_BLOCK = 4
"""Steps that are judged together."""
MAX_RANKS_DECOMPOSED = 64
"""Upper limit of ranks for a decomposition: each of them is simulated alone."""


def diagnose_staged_job(live: LiveWindow, windows: Sequence[RankWindow], threshold: float) -> Diagnosis | None:
    """Diagnose what costs the job most: slow ranks, or slow transfers.

    Transfers are slow if they take longer than those of the other replicas and steps. The result is None if the windows
    have too few common steps. A rank is slow from `threshold` times its peers' time on. A bottleneck is one from
    `threshold` times the ideal step time on.
    """
    aligned = align_windows(windows)
    if aligned is None:
        return None
    window = live.window
    relative = _compute_relative_work(live)
    is_slow = (relative >= threshold).mean(axis=2) >= MIN_PERSISTENT_STEPS_SHARE
    slow_workers = {worker: rank for worker, rank in live.worker_ranks.items() if is_slow[worker]}
    seconds_now = float(window.simulate_step_seconds([RECORDED_SCENARIO]).mean())
    scenarios = {
        Bottleneck.COMPUTE: _build_peer_speed_scenario(slow_workers),
        Bottleneck.COMMUNICATION: _build_ideal_transfers_scenario(live),
    }
    effects = _diagnose_ignoring_stages(windows, threshold)
    for kind, scenario in scenarios.items():
        effects[kind] = max(effects[kind], seconds_now / float(window.simulate_step_seconds([scenario]).mean()))
    worst = max(effects, key=lambda kind: effects[kind])
    typical = np.median(relative, axis=2)
    by_rank = {rank: float(typical[worker]) for worker, rank in live.worker_ranks.items()}
    if effects[Bottleneck.COMPUTE] >= threshold and max(by_rank.values()) >= MIN_LATE_SENDER_SLOWDOWN:
        worst = Bottleneck.COMPUTE
    return Diagnosis(
        bottleneck=worst if effects[worst] >= threshold else Bottleneck.NONE,
        slowdown=effects[worst],
        culprits=tuple(sorted(slow_workers.values())),
        evidence=(_describe_relative_work(by_rank), _describe_staged_whatif(live, seconds_now)),
        step_seconds=seconds_now,
        exposed_seconds=0.0,
        rank_slowdown=tuple(by_rank[rank] for rank in sorted(by_rank)),
        effects=effects,
        window=aligned,
    )


def exclude_bottleneck(diagnosis: Diagnosis, excluded: Bottleneck, threshold: float) -> Diagnosis:
    """Return the diagnosis without the bottleneck `excluded` of the job: the most costly other one, if any."""
    worst = max((kind for kind in diagnosis.effects if kind is not excluded), key=lambda kind: diagnosis.effects[kind])
    slowdown = diagnosis.effects[worst]
    return replace(diagnosis, bottleneck=worst if slowdown >= threshold else Bottleneck.NONE, slowdown=slowdown)


def _diagnose_ignoring_stages(windows: Sequence[RankWindow], threshold: float) -> dict[Bottleneck, float]:
    """Return S of the effects that do not depend on the stages.

    These are effects that come and go, and growth since the job's first steps. Slow ranks are left to the comparison
    within their stages.
    """
    diagnosis = strategies.diagnose_bottleneck(windows, threshold)
    effects: dict[Bottleneck, float] = {kind: 1.0 for kind in Bottleneck if kind is not Bottleneck.NONE}
    if diagnosis is not None:
        effects.update(diagnosis.effects)
    effects[Bottleneck.COMPUTE] = 1.0
    return effects


def build_live_window(evidence: Sequence[Evidence]) -> LiveWindow | None:
    """Return the window of a job with stages. None if it has none, or the evidence is not sufficient."""
    seconds = {
        window.rank: dict(zip(window.steps, window.step_seconds, strict=True))
        for report in evidence
        for window in report.windows
    }
    try:
        ranks = [
            RankSteps(
                rank_operations.rank,
                decode_operations(rank_operations.operations),
                report.communicators,
                seconds.get(rank_operations.rank, {}),
            )
            for report in evidence
            for rank_operations in report.operations
        ]
        live = build_window_from_operations(ranks)
    except InputError:
        return None
    return live if max(stage for _, stage in live.worker_ranks) > 0 else None


def _compute_relative_work(live: LiveWindow) -> Array:
    """Return each rank's own work over the median of its stage's other ranks, [replica, stage, block of steps].

    A single rank is its own peer.
    """
    window = live.window
    stages = 1 + max(operation.stage for operation in window.operations)
    own = np.zeros((window.replicas, stages, len(window.steps)))
    for node, operation in enumerate(window.operations):
        if operation.type == COMPUTE:
            own[:, operation.stage] += window.get_recorded_seconds(node)
    own = _average_blocks(own)
    if window.replicas == 1:
        return np.ones_like(own)
    others = [np.median(np.delete(own, replica, axis=0), axis=0) for replica in range(window.replicas)]
    return np.asarray(own / np.maximum(np.stack(others), 1e-9))


def _average_blocks(own: Array) -> Array:
    """Return means over STEPS_PER_BLOCK steps. A CPU quota delays a rank only in some periods, and so in some steps."""
    steps = own.shape[2] // STEPS_PER_BLOCK * STEPS_PER_BLOCK
    if steps < 2 * STEPS_PER_BLOCK:
        return own
    return np.asarray(own[:, :, -steps:].reshape(*own.shape[:2], -1, STEPS_PER_BLOCK).mean(axis=3))


def _build_peer_speed_scenario(workers: dict[tuple[int, int], int]) -> WhatIfScenario:
    """Return a scenario with these workers at their peers' speed. A stage without healthy peers stays as it is."""
    by_stage: dict[int, list[int]] = {}
    for replica, stage in workers:
        by_stage.setdefault(stage, []).append(replica)
    scenario = RECORDED_SCENARIO
    for stage, replicas in sorted(by_stage.items()):
        selection = OperationSelection(types=[COMPUTE], workers=[(replica, stage) for replica in replicas])
        scenario = scenario.with_change(selection, takes=PEERS)
    return scenario


def _build_ideal_transfers_scenario(live: LiveWindow) -> WhatIfScenario:
    return RECORDED_SCENARIO.with_change(
        OperationSelection(types={operation.type for operation in live.window.operations} - {COMPUTE}), takes=IDEAL
    )


def _describe_relative_work(by_rank: dict[int, float]) -> str:
    slowest = sorted(by_rank, key=lambda rank: -by_rank[rank])[:MAX_STAGED_RANKS_NAMED]
    return "own work over that of the same stage's other ranks: " + ", ".join(
        f"rank {rank} {by_rank[rank]:.2f} ×" for rank in slowest
    )


def _describe_staged_whatif(live: LiveWindow, step_seconds: float) -> str:
    """Describe S and its origins (arXiv 2505.05713), as far as they can be computed quickly."""
    window = live.window
    shape = f"{1 + max(operation.stage for operation in window.operations)} stages, {window.replicas} replicas"
    slowdown = step_seconds / window.compute_ideal_step_s()
    summary = f"simulated without stragglers ({shape}, {len(window.steps)} steps): S {slowdown:.2f}"
    if len(live.worker_ranks) > MAX_RANKS_DECOMPOSED or (decomposition := analyze_window(window).decomposition) is None:
        return summary
    stages = ", ".join(f"stage {stage} {value:.2f}" for stage, value in enumerate(decomposition.slowdown_by_stage))
    workers = sorted(live.worker_ranks, key=lambda worker: -decomposition.slowdown_by_worker[worker])[
        :MAX_STAGED_RANKS_NAMED
    ]
    ranks = ", ".join(
        f"rank {live.worker_ranks[worker]} {decomposition.slowdown_by_worker[worker]:.2f}" for worker in workers
    )
    types = ", ".join(
        f"{name} {value:.2f}"
        for name, value in sorted(decomposition.slowdown_by_type.items(), key=lambda item: -item[1])
    )
    return f"{summary}; S by stage: {stages}; S_w: {ranks}; S by type: {types}"
