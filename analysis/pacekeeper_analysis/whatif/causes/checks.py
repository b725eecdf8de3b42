"""The checks. Each takes one cause's part out of the recorded durations and asks how much of the slowdown goes with
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from pacekeeper_analysis.whatif.causes.model import Computations, DurationModel, find_pauses, fit_duration_model
from pacekeeper_analysis.whatif.data_parallel import COMPUTATION_TYPES, DATA
from pacekeeper_analysis.whatif.figures import MIN_DECOMPOSED_SLOWDOWN, WhatIf
from pacekeeper_analysis.whatif.scenario import RECORDED_SCENARIO, IDEAL, OperationSelection
from pacekeeper_analysis.whatif.simulate import Array
from pacekeeper_analysis.whatif.trace import GC

MIN_EXPLAINED_SLOWDOWN_SHARE = 0.35
"""A cause has to explain at least this share of the slowdown."""

MIN_CAUSE_STEP_SHARE = 0.012
"""... and to cost at least this share of the step."""

MIN_SLOW_WORKER_RATIO = 1.05
"""A worker is slow when its computations take this many times as long as its peers' in half of the window or more."""


MIN_NAMED_LOSS_SHARE = 0.25
"""A slow worker is named when it loses at least this share of what the slowest one loses."""


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
    """What a check found."""

    cause: SlowdownCause
    explains: float
    """Share of the slowdown that goes when the cause goes; may exceed 1."""
    step_s: float
    """Mean seconds of a step without the cause."""
    evidence: str
    """In a sentence, with figures."""
    remedy: str
    """What to do about it."""
    confidence: float = 0.0
    """0 to 1."""
    workers: tuple[tuple[int, int], ...] = ()
    """(dp_rank, stage) of the workers concerned, the worst first."""


def diagnose_cause(whatif: WhatIf) -> CauseFinding:
    """The cause that explains most of the slowdown, or NONE."""
    findings = sorted(run_all_checks(whatif), key=lambda finding: -finding.explains)
    likely = [finding for finding in findings if _is_worth_reporting(finding, whatif)]
    if not likely:
        return _build_no_cause_finding(whatif, max((finding.explains for finding in findings), default=0.0))
    first = likely[0]
    second = next((finding.explains for finding in findings if finding is not first), 0.0)
    lead = 1.0 - max(second, 0.0) / first.explains
    return replace(first, confidence=float(np.clip(min(first.explains, 1.0) * (0.5 + 0.5 * lead), 0.0, 1.0)))


def _build_no_cause_finding(whatif: WhatIf, best: float) -> CauseFinding:
    """best: what the best cause explains."""
    step_s = float(whatif.step_s.mean())
    if whatif.slowdown < MIN_DECOMPOSED_SLOWDOWN:
        evidence = f"the slowdown is {whatif.slowdown:.3f}, too small to have a cause"
        return CauseFinding(SlowdownCause.NONE, 0.0, step_s, evidence, "Nothing to do.", 1.0)
    best = float(np.clip(best, 0.0, 1.0))
    evidence = f"no single cause explains the slowdown of {whatif.slowdown:.3f}; the best one explains {best:.0%} of it"
    remedy = "Record a longer window; look at the slowest workers."
    return CauseFinding(SlowdownCause.NONE, 0.0, step_s, evidence, remedy, 1.0 - best)


def run_all_checks(whatif: WhatIf) -> list[CauseFinding]:
    """What every check found, whatever it explains; none where the slowdown is too small."""
    if whatif.slowdown < MIN_DECOMPOSED_SLOWDOWN:
        return []
    parts = fit_duration_model(whatif.window)
    return [finding for check in CAUSE_CHECKS if (finding := check(whatif, parts)) is not None]


def check_stage_imbalance(whatif: WhatIf, parts: DurationModel | None) -> CauseFinding | None:
    """One stage is slow on every data-parallel rank: usually the last one, where the loss is computed."""
    if parts is None or len(set(parts.forward.stages)) < 2:
        return None
    balanced = [(part, (part.usual.mean() / _clip_above_zero(part.usual))[:, None, None, None]) for part in _list_directions(parts)]
    total = np.sum([part.usual for part in _list_directions(parts)], axis=0)
    slowest = int(np.argmax(total))
    stage = parts.forward.stages[slowest]
    times = float(total[slowest] / max(np.median(np.delete(total, slowest)), 1e-12))
    return _build_finding(
        whatif,
        _simulate_scaled_computations(whatif, balanced),
        SlowdownCause.STAGE_IMBALANCE,
        f"stage {stage} takes {times:.2f} times as long as the other stages, on every data-parallel rank",
        f"Move layers away from stage {stage}"
        + (", or split the loss computation" if stage == max(parts.forward.stages) else "")
        + ".",
        workers=tuple((replica, stage) for replica in range(whatif.window.replicas)),
    )


def check_slow_worker(whatif: WhatIf, parts: DurationModel | None) -> CauseFinding | None:
    """Single workers are slow all the time, while their peers in the same stage are not."""
    if parts is None:
        return None
    both = _list_directions(parts)
    usual = [part.usual[:, None] * part.nodes.shape[1] for part in both]
    excess = np.sum([own * (part.worker - 1.0) for own, part in zip(usual, both, strict=True)], axis=0)
    factor = 1.0 + excess / np.maximum(np.sum(usual, axis=0), 1e-12)
    hot = (factor > MIN_SLOW_WORKER_RATIO) & (excess >= MIN_NAMED_LOSS_SHARE * excess.max())
    if not hot.any() or hot.mean() > 0.5:
        return None
    places, replicas = np.nonzero(hot)
    order = np.argsort(-excess[hot], kind="stable")
    workers = tuple(dict.fromkeys((int(replicas[at]), parts.forward.stages[places[at]]) for at in order))
    worst = ", ".join(_name_worker(whatif, worker) for worker in workers[:3])
    return _build_finding(
        whatif,
        _simulate_scaled_computations(whatif, [(part, np.where(hot, 1 / _clip_above_zero(part.worker), 1.0)[:, None, :, None]) for part in both]),
        SlowdownCause.SLOW_WORKER,
        f"worker {worst} computes {float(factor.max()):.2f} times as long as its peers, throughout"
        if len(workers) == 1
        else f"{len(workers)} workers, the worst {worst}, compute up to {float(factor.max()):.2f} times as long",
        "Replace the worker, or give it a smaller share of the batch; check its node.",
        workers,
    )


def check_sequence_length_imbalance(whatif: WhatIf, parts: DurationModel | None) -> CauseFinding | None:
    """Microbatches differ: forward and backward of the same one are long together, on other workers each step."""
    if parts is None or parts.backward is None or parts.correlation <= 0:
        return None
    even = 1.0 / np.maximum(parts.microbatch, 1e-12)
    # Samples are moved, not dropped: the total stays.
    even *= parts.microbatch.mean()
    load = parts.microbatch.sum(axis=0)
    moves = len(set(np.argmax(load, axis=0).tolist()))
    return _build_finding(
        whatif,
        _simulate_scaled_computations(whatif, [(part, even[None]) for part in _list_directions(parts)]),
        SlowdownCause.SEQUENCE_LENGTH_IMBALANCE,
        f"forward and backward times of a microbatch rise together (correlation {parts.correlation:.2f}); the longest "
        f"takes {float(parts.microbatch.max()):.2f} times the usual time; {moves} ranks take turns in being slow",
        "Balance sequences over ranks and microbatches by their cost (tokens squared), not by their count.",
    )


def check_garbage_collection(whatif: WhatIf, parts: DurationModel | None) -> CauseFinding | None:
    """Rare, long forwards on one worker at a time, whose backwards are as usual."""
    window = whatif.window
    seconds = window.seconds.copy()
    count, longest, by_worker = 0, 0.0, np.zeros(window.replicas)
    if parts is not None:
        found = find_pauses(parts.forward, parts.microbatch)
        if (found > 0).mean() > 0.1:
            return None
        seconds[parts.forward.nodes] -= found
        count, longest = int((found > 0).sum()), float(found.max())
        by_worker = (found > 0).sum(axis=(0, 1, 3))
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


def check_slow_communication(whatif: WhatIf, parts: DurationModel | None) -> CauseFinding | None:
    """Transfers take longer than the same transfers usually do."""
    del parts
    window = whatif.window
    own = {*COMPUTATION_TYPES, GC, DATA}
    nodes = [node for node, operation in enumerate(window.operations) if operation.type not in own]
    if not nodes:
        return None
    excess = window.seconds[nodes].reshape(len(nodes), window.replicas, -1) - window.ideal[nodes][:, None, None]
    by_type: dict[str, float] = {}
    for at, node in enumerate(nodes):
        name = window.operations[node].type
        by_type[name] = by_type.get(name, 0.0) + float(excess[at].clip(min=0.0).sum())
    worst = max(by_type, key=lambda name: by_type[name])
    at, replica, step = (int(index) for index in np.unravel_index(int(np.argmax(excess)), excess.shape))
    longest, usual = window.operations[nodes[at]], float(window.ideal[nodes[at]])
    return _build_finding(
        whatif,
        whatif.simulate_scenario(RECORDED_SCENARIO.with_change(OperationSelection(types=by_type), takes=IDEAL)),
        SlowdownCause.SLOW_COMMUNICATION,
        f"{worst} loses most time; the worst transfer, {longest} on dp_rank {replica} in step {window.steps[step]}, "
        f"takes {float(excess[at, replica, step]) + usual:.3f} s instead of {usual:.3f} s",
        "Look at the links of the ranks concerned; plan the traffic around them.",
        workers=((replica, longest.stage),),
    )


CAUSE_CHECKS: tuple[Callable[[WhatIf, DurationModel | None], CauseFinding | None], ...] = (
    check_stage_imbalance,
    check_sequence_length_imbalance,
    check_garbage_collection,
    check_slow_worker,
    check_slow_communication,
)
"""All checks, by name."""


def _build_finding(
    whatif: WhatIf,
    without_s: Array,
    cause: SlowdownCause,
    evidence: str,
    remedy: str,
    workers: tuple[tuple[int, int], ...] = (),
) -> CauseFinding:
    """A finding from the seconds of each step without the cause [step]."""
    recorded, without = float(whatif.step_s.mean()), float(without_s.mean())
    explains = (recorded - without) / (recorded - whatif.ideal_step_s)
    return CauseFinding(cause, explains, without, evidence, remedy, workers=workers)


def _name_worker(whatif: WhatIf, worker: tuple[int, int]) -> str:
    """A worker in words; the stage only where there are several."""
    replica, stage = worker
    several = len({operation.stage for operation in whatif.window.operations}) > 1
    return f"(dp {replica}, stage {stage})" if several else f"dp {replica}"


def _clip_above_zero(values: Array) -> Array:
    """Of what may take no time at all, in a trace that is damaged."""
    return np.maximum(values, 1e-12)


def _simulate_scaled_computations(whatif: WhatIf, changes: list[tuple[Computations, Array]]) -> Array:
    """Seconds of each step with computations multiplied [place, microbatch, replica, step] by something."""
    seconds = whatif.window.seconds.copy()
    for part, factor in changes:
        seconds[part.nodes] *= np.broadcast_to(factor, part.seconds.shape)
    return np.asarray(whatif.window.with_seconds(seconds).simulate_step_seconds([RECORDED_SCENARIO])[0])


def _list_directions(parts: DurationModel) -> list[Computations]:
    return [parts.forward] if parts.backward is None else [parts.forward, parts.backward]


def _is_worth_reporting(finding: CauseFinding, whatif: WhatIf) -> bool:
    costs = 1.0 - finding.step_s / float(whatif.step_s.mean())
    return finding.explains >= MIN_EXPLAINED_SLOWDOWN_SHARE and costs >= MIN_CAUSE_STEP_SHARE
