"""The checks for causes.

Each removes one cause from the recorded durations and measures how much slowdown disappears.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from pacekeeper_analysis.whatif.causes.model import Computations, DurationModel, find_pauses, fit_duration_model
from pacekeeper_analysis.whatif.data_parallel import COMPUTATION_TYPES, DATA
from pacekeeper_analysis.whatif.scenario import IDEAL, RECORDED_SCENARIO, OperationSelection
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.slowdown_statistics import MIN_DECOMPOSED_SLOWDOWN, WhatIf
from pacekeeper_analysis.whatif.trace import GC

MIN_EXPLAINED_SLOWDOWN_SHARE = 0.35
"""Smallest share of the slowdown that a cause must explain."""

MIN_CAUSE_STEP_SHARE = 0.012
"""Smallest share of the step that a cause must cost."""

MIN_SLOW_WORKER_RATIO = 1.05
"""Ratio to its peers' time, in half of the window or more, from which on a worker is slow."""


MIN_NAMED_LOSS_SHARE = 0.25
"""Share of the slowest worker's loss from which on a slow worker is named."""

MAX_SLOW_WORKERS_SHARE = 0.5
"""Share of the workers above which being slow is the rule, and no cause."""

MAX_PAUSED_FORWARDS_SHARE = 0.1
"""Share of the forwards above which pauses are too frequent for garbage collections."""


class SlowdownCause(StrEnum):
    """Why a job is slower than it could be."""

    STAGE_IMBALANCE = "stage-imbalance"
    SEQUENCE_LENGTH_IMBALANCE = "sequence-length-imbalance"
    GARBAGE_COLLECTION = "garbage-collection"
    SLOW_WORKER = "slow-worker"
    SLOW_COMMUNICATION = "slow-communication"
    NONE = "none"


@dataclass(frozen=True)
class CauseFinding:
    """The result of a check."""

    cause: SlowdownCause
    explained_share: float
    """Share of the slowdown that disappears with the cause. It may exceed 1."""
    step_s: float
    """Mean seconds of a step without the cause."""
    evidence: str
    """A sentence with numbers."""
    remedy: str
    """The recommended action."""
    confidence: float = 0.0
    """0 to 1."""
    workers: tuple[tuple[int, int], ...] = ()
    """Affected workers (dp_rank, stage), the worst first."""


def diagnose_cause(whatif: WhatIf) -> CauseFinding:
    """Return the cause that explains most of the slowdown, or NONE."""
    findings = sorted(run_all_checks(whatif), key=lambda finding: -finding.explained_share)
    likely = [finding for finding in findings if _is_worth_reporting(finding, whatif)]
    if not likely:
        return _build_no_cause_finding(whatif, max((finding.explained_share for finding in findings), default=0.0))
    first = likely[0]
    second = next((finding.explained_share for finding in findings if finding is not first), 0.0)
    margin = 1.0 - max(second, 0.0) / first.explained_share
    return replace(first, confidence=float(np.clip(min(first.explained_share, 1.0) * (0.5 + 0.5 * margin), 0.0, 1.0)))


def _build_no_cause_finding(whatif: WhatIf, best: float) -> CauseFinding:
    """Build the finding without a cause. `best` is the share that the best cause explains."""
    step_s = float(whatif.step_s.mean())
    if whatif.slowdown < MIN_DECOMPOSED_SLOWDOWN:
        evidence = f"the slowdown is {whatif.slowdown:.3f}, too small to have a cause"
        return CauseFinding(SlowdownCause.NONE, 0.0, step_s, evidence, "Nothing to do.", 1.0)
    best = float(np.clip(best, 0.0, 1.0))
    evidence = f"no single cause explains the slowdown of {whatif.slowdown:.3f}; the best one explains {best:.0%} of it"
    remedy = "Record a longer window; check the slowest workers."
    return CauseFinding(SlowdownCause.NONE, 0.0, step_s, evidence, remedy, 1.0 - best)


def run_all_checks(whatif: WhatIf) -> list[CauseFinding]:
    """Return the findings of all checks, including those that explain little. None if the slowdown is too small."""
    if whatif.slowdown < MIN_DECOMPOSED_SLOWDOWN:
        return []
    model = fit_duration_model(whatif.window)
    return [finding for check in CAUSE_CHECKS if (finding := check(whatif, model)) is not None]


def check_stage_imbalance(whatif: WhatIf, model: DurationModel | None) -> CauseFinding | None:
    """Check whether one stage is slow on every data-parallel rank: usually the last one, which computes the loss."""
    if model is None or len(set(model.forward.stages)) <= 1:
        return None
    balanced = [
        (direction, (direction.usual.mean() / _clip_above_zero(direction.usual))[:, None, None, None])
        for direction in _list_directions(model)
    ]
    total = np.sum([direction.usual for direction in _list_directions(model)], axis=0)
    slowest = int(np.argmax(total))
    stage = model.forward.stages[slowest]
    ratio = float(total[slowest] / max(np.median(np.delete(total, slowest)), 1e-12))
    return _build_finding(
        whatif,
        _simulate_scaled_computations(whatif, balanced),
        SlowdownCause.STAGE_IMBALANCE,
        f"stage {stage} takes {ratio:.2f} times as long as the other stages, on every data-parallel rank",
        f"Move layers away from stage {stage}"
        + (", or split the loss computation" if stage == max(model.forward.stages) else "")
        + ".",
        workers=tuple((replica, stage) for replica in range(whatif.window.replicas)),
    )


def check_slow_worker(whatif: WhatIf, model: DurationModel | None) -> CauseFinding | None:
    """Check whether single workers are always slow, while their peers in the same stage are not."""
    if model is None:
        return None
    directions = _list_directions(model)
    usual = [direction.usual[:, None] * direction.nodes.shape[1] for direction in directions]
    excess = np.sum(
        [usual_seconds * (direction.worker - 1.0) for usual_seconds, direction in zip(usual, directions, strict=True)],
        axis=0,
    )
    factor = 1.0 + excess / np.maximum(np.sum(usual, axis=0), 1e-12)
    is_slow = (factor > MIN_SLOW_WORKER_RATIO) & (excess >= MIN_NAMED_LOSS_SHARE * excess.max())
    if not is_slow.any() or is_slow.mean() > MAX_SLOW_WORKERS_SHARE:
        return None
    places, replicas = np.nonzero(is_slow)
    order = np.argsort(-excess[is_slow], kind="stable")
    workers = tuple(dict.fromkeys((int(replicas[index]), model.forward.stages[places[index]]) for index in order))
    worst = ", ".join(_name_worker(whatif, worker) for worker in workers[:3])
    return _build_finding(
        whatif,
        _simulate_scaled_computations(
            whatif,
            [
                (direction, np.where(is_slow, 1 / _clip_above_zero(direction.worker), 1.0)[:, None, :, None])
                for direction in directions
            ],
        ),
        SlowdownCause.SLOW_WORKER,
        f"worker {worst} computes {float(factor.max()):.2f} times as long as its peers, throughout"
        if len(workers) == 1
        else f"{len(workers)} workers, the worst {worst}, compute up to {float(factor.max()):.2f} times as long",
        "Replace the worker, or give it a smaller share of the batch; check its node.",
        workers,
    )


def check_sequence_length_imbalance(whatif: WhatIf, model: DurationModel | None) -> CauseFinding | None:
    """Check whether microbatches differ: forward and backward of one are long together, on other workers each step."""
    if model is None or model.backward is None or model.correlation <= 0:
        return None
    balance = 1.0 / np.maximum(model.microbatch, 1e-12)
    # Samples are moved, not dropped: the total stays.
    balance *= model.microbatch.mean()
    load = model.microbatch.sum(axis=0)
    slow_ranks = len(set(np.argmax(load, axis=0).tolist()))
    return _build_finding(
        whatif,
        _simulate_scaled_computations(whatif, [(direction, balance[None]) for direction in _list_directions(model)]),
        SlowdownCause.SEQUENCE_LENGTH_IMBALANCE,
        f"forward and backward times of a microbatch rise together (correlation {model.correlation:.2f}); the longest "
        f"takes {float(model.microbatch.max()):.2f} times the usual time; {slow_ranks} ranks are slow in turn",
        "Balance sequences over ranks and microbatches by their cost (tokens squared), not by their count.",
    )


def check_garbage_collection(whatif: WhatIf, model: DurationModel | None) -> CauseFinding | None:
    """Check for rare, long forwards on one worker at a time, whose backwards are normal."""
    window = whatif.window
    seconds = window.seconds.copy()
    count, longest, by_worker = 0, 0.0, np.zeros(window.replicas)
    if model is not None:
        pauses = find_pauses(model.forward, model.microbatch)
        if (pauses > 0).mean() > MAX_PAUSED_FORWARDS_SHARE:
            return None
        seconds[model.forward.nodes] -= pauses
        count, longest = int((pauses > 0).sum()), float(pauses.max())
        by_worker = (pauses > 0).sum(axis=(0, 1, 3))
    for node, operation in enumerate(window.operations):
        if operation.type == GC:
            count += int((seconds[node] > 0).sum())
            longest = max(longest, float(seconds[node].max()))
            seconds[node] = 0.0
    if count == 0:
        return None
    return _build_finding(
        whatif,
        window.with_seconds(seconds).simulate_step_seconds([RECORDED_SCENARIO])[0],
        SlowdownCause.GARBAGE_COLLECTION,
        f"{count} forwards pause for up to {longest:.3f} s, on {int((by_worker > 0).sum())} of {window.replicas} "
        "data-parallel ranks, each at another time",
        "Switch automatic garbage collection off and collect on all ranks at the same planned step.",
    )


def check_slow_communication(whatif: WhatIf, model: DurationModel | None) -> CauseFinding | None:
    """Check whether transfers take longer than the same transfers usually do."""
    del model
    window = whatif.window
    own_types = {*COMPUTATION_TYPES, GC, DATA}
    nodes = [node for node, operation in enumerate(window.operations) if operation.type not in own_types]
    if not nodes:
        return None
    excess = window.seconds[nodes].reshape(len(nodes), window.replicas, -1) - window.ideal[nodes][:, None, None]
    by_type: dict[str, float] = {}
    for row, node in enumerate(nodes):
        name = window.operations[node].type
        by_type[name] = by_type.get(name, 0.0) + float(excess[row].clip(min=0.0).sum())
    worst = max(by_type, key=lambda name: by_type[name])
    row, replica, step = (int(index) for index in np.unravel_index(int(np.argmax(excess)), excess.shape))
    longest, usual = window.operations[nodes[row]], float(window.ideal[nodes[row]])
    return _build_finding(
        whatif,
        whatif.simulate_scenario(RECORDED_SCENARIO.with_change(OperationSelection(types=by_type), takes=IDEAL)),
        SlowdownCause.SLOW_COMMUNICATION,
        f"{worst} loses most time; the worst transfer, {longest} on dp_rank {replica} in step {window.steps[step]}, "
        f"takes {float(excess[row, replica, step]) + usual:.3f} s instead of {usual:.3f} s",
        "Check the links of the affected ranks; route the traffic around them.",
        workers=((replica, longest.stage),),
    )


CAUSE_CHECKS: tuple[Callable[[WhatIf, DurationModel | None], CauseFinding | None], ...] = (
    check_stage_imbalance,
    check_sequence_length_imbalance,
    check_garbage_collection,
    check_slow_worker,
    check_slow_communication,
)
"""All checks."""


def _build_finding(
    whatif: WhatIf,
    without_s: Array,
    cause: SlowdownCause,
    evidence: str,
    remedy: str,
    workers: tuple[tuple[int, int], ...] = (),
) -> CauseFinding:
    """Build a finding from the seconds of each step without the cause [step]."""
    recorded, without = float(whatif.step_s.mean()), float(without_s.mean())
    explained_share = (recorded - without) / (recorded - whatif.ideal_step_s)
    return CauseFinding(cause, explained_share, without, evidence, remedy, workers=workers)


def _name_worker(whatif: WhatIf, worker: tuple[int, int]) -> str:
    """Name a worker. The stage is named only if there are several."""
    replica, stage = worker
    several = len({operation.stage for operation in whatif.window.operations}) > 1
    return f"(dp {replica}, stage {stage})" if several else f"dp {replica}"


def _clip_above_zero(values: Array) -> Array:
    """Limit values that may be zero in a damaged trace."""
    return np.maximum(values, 1e-12)


def _simulate_scaled_computations(whatif: WhatIf, changes: list[tuple[Computations, Array]]) -> Array:
    """Return the seconds of each step with computations multiplied by factors [place, microbatch, replica, step]."""
    seconds = whatif.window.seconds.copy()
    for computations, factor in changes:
        seconds[computations.nodes] *= np.broadcast_to(factor, computations.seconds.shape)
    return np.asarray(whatif.window.with_seconds(seconds).simulate_step_seconds([RECORDED_SCENARIO])[0])


def _list_directions(model: DurationModel) -> list[Computations]:
    return [model.forward] if model.backward is None else [model.forward, model.backward]


def _is_worth_reporting(finding: CauseFinding, whatif: WhatIf) -> bool:
    cost_share = 1.0 - finding.step_s / float(whatif.step_s.mean())
    return finding.explained_share >= MIN_EXPLAINED_SLOWDOWN_SHARE and cost_share >= MIN_CAUSE_STEP_SHARE
