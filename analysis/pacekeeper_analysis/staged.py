"""Jobs with pipeline stages: what holds them back, by the graph of what their ranks did.

    live = build_live_window(evidence)                 # None: no stages, or too little is known
    found = diagnose(live, windows, threshold)   # as adapt.diagnose

A stage that has more to do than the others is the script's own way, so a rank's peers are those of its own stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from . import adapt
from .adapt import Diagnosis, Bottleneck
from .diagnose.windows import align_windows
from .diagnose.work import MIN_PERSISTENT_STEPS_SHARE
from .errors import InputError
from .operations import decode_operations
from .reports import Evidence, RankWindow
from .whatif.figures import analyze_window
from .whatif.live import COMPUTE, LiveWindow, RankSteps, build_window_from_operations
from .whatif.scenario import RECORDED_SCENARIO, IDEAL, PEERS, WhatIfScenario, OperationSelection
from .whatif.simulate import Array

MAX_STAGED_RANKS_NAMED = 8
"""Ranks in a sentence at most."""
MIN_LATE_SENDER_SLOWDOWN = 2.0
"""A rank whose own work takes so many times its peers' sends and receives late, too: its transfers say nothing."""
STEPS_PER_BLOCK = 4
"""Steps that are judged together."""
MAX_RANKS_DECOMPOSED = 64
"""Ranks: each of them is simulated alone."""


def diagnose_staged_job(live: LiveWindow, windows: Sequence[RankWindow], threshold: float) -> Diagnosis | None:
    """What costs the job most: ranks that are slow in their own work, or transfers that take longer than those of the
    other replicas and steps. None where the windows have too few steps in common.

    threshold: so many times its peers' time makes a rank slow, and so many times the ideal makes a trouble.
    """
    aligned = align_windows(windows)
    if aligned is None:
        return None
    window = live.window
    relative = _compute_relative_work(live)
    slow = (relative >= threshold).mean(axis=2) >= MIN_PERSISTENT_STEPS_SHARE
    workers = {worker: rank for worker, rank in live.worker_ranks.items() if slow[worker]}
    now = float(window.simulate_step_seconds([RECORDED_SCENARIO]).mean())
    scenarios = {Bottleneck.COMPUTE: _build_peer_speed_scenario(workers), Bottleneck.COMMUNICATION: _build_ideal_transfers_scenario(live)}
    effects = _diagnose_ignoring_stages(windows, threshold)
    for each, scenario in scenarios.items():
        effects[each] = max(effects[each], now / float(window.simulate_step_seconds([scenario]).mean()))
    main = max(effects, key=lambda each: effects[each])
    typical = np.median(relative, axis=2)
    by_rank = {rank: float(typical[worker]) for worker, rank in live.worker_ranks.items()}
    if effects[Bottleneck.COMPUTE] >= threshold and max(by_rank.values()) >= MIN_LATE_SENDER_SLOWDOWN:
        main = Bottleneck.COMPUTE
    return Diagnosis(
        trouble=main if effects[main] >= threshold else Bottleneck.NONE,
        slowdown=effects[main],
        culprits=tuple(sorted(workers.values())),
        evidence=(_describe_relative_work(by_rank), _describe_staged_whatif(live, now)),
        step_seconds=now,
        exposed_seconds=0.0,
        rank_slowdown=tuple(by_rank[rank] for rank in sorted(by_rank)),
        effects=effects,
        window=aligned,
    )


def exclude_bottleneck(found: Diagnosis, usual: Bottleneck, threshold: float) -> Diagnosis:
    """The same where `usual`, which it names, is the job's own way: what costs it most beside that, if anything."""
    main = max((each for each in found.effects if each is not usual), key=lambda each: found.effects[each])
    slowdown = found.effects[main]
    return replace(found, trouble=main if slowdown >= threshold else Bottleneck.NONE, slowdown=slowdown)


def _diagnose_ignoring_stages(windows: Sequence[RankWindow], threshold: float) -> dict[Bottleneck, float]:
    """S of what comes and goes, and of what has grown since the job's first steps: that stages differ is in neither.
    That of slow ranks is for their stages to say."""
    found = adapt.diagnose_bottleneck(windows, threshold)
    effects: dict[Bottleneck, float] = {each: 1.0 for each in Bottleneck if each is not Bottleneck.NONE}
    if found is not None:
        effects.update(found.effects)
    effects[Bottleneck.COMPUTE] = 1.0
    return effects


def build_live_window(answers: Sequence[Evidence]) -> LiveWindow | None:
    """The window of a job with stages; None: it has none, or what was answered is no such window."""
    seconds = {
        window.rank: dict(zip(window.steps, window.step_seconds, strict=True))
        for answer in answers
        for window in answer.windows
    }
    try:
        ranks = [
            RankSteps(of.rank, decode_operations(of.operations), answer.communicators, seconds.get(of.rank, {}))
            for answer in answers
            for of in answer.operations
        ]
        live = build_window_from_operations(ranks)
    except InputError:
        return None
    return live if max(stage for _, stage in live.worker_ranks) > 0 else None


def _compute_relative_work(live: LiveWindow) -> Array:
    """Each rank's own work over the median of its stage's other ranks, [replica, stage, block of steps]; a single one
    is its own peer."""
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
    """Means over BLOCK steps: a processor quota holds a rank up in some of its periods, and so in some of its steps."""
    steps = own.shape[2] // STEPS_PER_BLOCK * STEPS_PER_BLOCK
    if steps < 2 * STEPS_PER_BLOCK:
        return own
    return np.asarray(own[:, :, -steps:].reshape(*own.shape[:2], -1, STEPS_PER_BLOCK).mean(axis=3))


def _build_peer_speed_scenario(workers: dict[tuple[int, int], int]) -> WhatIfScenario:
    """Where so many are slow that none of a stage is left as a peer, nothing changes there."""
    by_stage: dict[int, list[int]] = {}
    for replica, stage in workers:
        by_stage.setdefault(stage, []).append(replica)
    scenario = RECORDED_SCENARIO
    for stage, replicas in sorted(by_stage.items()):
        where = OperationSelection(types=[COMPUTE], workers=[(replica, stage) for replica in replicas])
        scenario = scenario.with_change(where, takes=PEERS)
    return scenario


def _build_ideal_transfers_scenario(live: LiveWindow) -> WhatIfScenario:
    return RECORDED_SCENARIO.with_change(OperationSelection(types={o.type for o in live.window.operations} - {COMPUTE}), takes=IDEAL)


def _describe_relative_work(by_rank: dict[int, float]) -> str:
    slowest = sorted(by_rank, key=lambda rank: -by_rank[rank])[:MAX_STAGED_RANKS_NAMED]
    return "own work over that of the same stage's other ranks: " + ", ".join(
        f"rank {rank} {by_rank[rank]:.2f} ×" for rank in slowest
    )


def _describe_staged_whatif(live: LiveWindow, now: float) -> str:
    """S, and where it comes from (arXiv 2505.05713), as far as that is quickly found."""
    window = live.window
    shape = f"{1 + max(operation.stage for operation in window.operations)} stages, {window.replicas} replicas"
    slowdown = now / window.compute_ideal_step_s()
    words = f"simulated without stragglers ({shape}, {len(window.steps)} steps): S {slowdown:.2f}"
    if len(live.worker_ranks) > MAX_RANKS_DECOMPOSED or (found := analyze_window(window).decomposition) is None:
        return words
    stages = ", ".join(f"stage {stage} {value:.2f}" for stage, value in enumerate(found.by_stage))
    workers = sorted(live.worker_ranks, key=lambda worker: -found.by_worker[worker])[:MAX_STAGED_RANKS_NAMED]
    ranks = ", ".join(f"rank {live.worker_ranks[worker]} {found.by_worker[worker]:.2f}" for worker in workers)
    types = ", ".join(f"{name} {value:.2f}" for name, value in sorted(found.by_type.items(), key=lambda item: -item[1]))
    return f"{words}; S by stage: {stages}; S_w: {ranks}; S by type: {types}"
