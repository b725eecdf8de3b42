"""What the ranks' collectives say of a slow job: for whom the others wait. A second witness beside the ranks' own work,
and the better judge where ranks differ by nature, as the stages of a pipeline do."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pacekeeper_analysis import staged
from pacekeeper_analysis.adapt import Diagnosis, Bottleneck
from pacekeeper_analysis.diagnose.blame import (
    WaitAttribution,
    MeasuredTransfer,
    TransferClass,
    attribute_waits,
    find_slow_transfers,
    measure_transfers,
    find_usual_transfer_times,
)
from pacekeeper_analysis.diagnose.finding import FaultClass, Finding, Signal, SignalKind, merge_findings
from pacekeeper_analysis.diagnose.waiting import name_ranks
from pacekeeper_analysis.plan import EvidencePart
from pacekeeper_analysis.records import Collective

from ..observation import Observation
from .answers import EvidenceKey

FIRST_REQUEST_MAX_RANKS, SECOND_REQUEST_MAX_RANKS = 64, 1024
"""Up to so many ranks tell of their collectives with the first answer: up to 130 KB a rank; up to so many, with the
second; of more, none do."""
MIN_WAIT_SHARE = 0.02
"""Of a step: a rank that costs its peers less than this, beyond what the others of its role do, holds nobody up."""
BOTTLENECK_TO_FAULT_CLASS = {Bottleneck.GARBAGE: FaultClass.CODE, Bottleneck.LENGTHS: FaultClass.DATA}
"""What the trouble itself says of its class; that of a slow rank takes more."""
BOTTLENECK_TO_CULPRIT = {Bottleneck.GARBAGE: "garbage collections on all ranks", Bottleneck.LENGTHS: "sequence lengths on all ranks"}
"""And of its culprit."""


def is_holding_up_peers(observation: Observation, found: Diagnosis, rank: int) -> bool:
    """False where this rank, slow in its own work, makes nobody wait beyond what ranks in its role always do."""
    told = _get_blame(observation)
    if told is None or len(set(told.roles.tolist())) == 1 or rank not in told.ranks:
        return True
    return _compute_wait_share(told, found, rank) >= MIN_WAIT_SHARE


def can_have_pipeline_stages(observation: Observation) -> bool:
    """Whether this answer tells of own work alone, in a script that is only watched: its ranks may differ by nature."""
    asked = EvidencePart.OPERATIONS in observation.plan.evidence_parts
    watched = any(view.heartbeat is not None and not view.heartbeat.steered for view in observation.members)
    return watched and not asked and observation.plan.world_size <= SECOND_REQUEST_MAX_RANKS


def diagnose_stages(observation: Observation) -> Diagnosis | None:
    """What holds up a job with pipeline stages; None: it has none, or that is not known."""
    threshold = observation.job.spec.detection.straggler_slowdown
    return _diagnose_cached_stages(EvidenceKey(observation.evidence), threshold) if _has_collective_evidence(observation) else None


def build_wait_finding(observation: Observation, found: Diagnosis, culprit: int | None) -> Finding:
    """Of slow steps; `culprit`: the rank that is slow in its own work."""
    window, told = found.window, _get_blame(observation)
    words = [sentence for sentence in found.evidence if sentence] or [f"steps take {found.slowdown:.2f} × as long"]
    witnesses = [Signal(SignalKind.TIMES, words[0])]
    if culprit is not None and told is not None and culprit in told.ranks:
        share = _compute_wait_share(told, found, culprit)
        waits = f"each of its peers waits for rank {culprit} for {share:.0%} of a step, passed on through its groups"
    else:
        waiting = np.maximum(window.step_seconds - window.compute_seconds, 0.0).mean(axis=0)
        waits = f"the ranks wait for each other {waiting.min():.3f} s to {waiting.max():.3f} s of a step"
        if culprit is not None:
            waits += f", rank {culprit} {waiting[culprit]:.3f} s"
    witnesses.append(Signal(SignalKind.WAITS, waits))
    name = BOTTLENECK_TO_CULPRIT.get(found.trouble, "") if culprit is None else f"rank {culprit}"
    return merge_findings(None, Finding(BOTTLENECK_TO_FAULT_CLASS.get(found.trouble, FaultClass.UNKNOWN), name, tuple(witnesses)))


def find_slow_groups(observation: Observation) -> Finding | None:
    """Groups whose transfers take longer than those of others like them; None: not known, or there are none."""
    now = _measure_transfers(EvidenceKey(observation.evidence)) if _has_collective_evidence(observation) else {}
    slow = sorted(find_slow_transfers(now, find_usual_transfer_times(now)).items(), key=lambda item: -item[1])
    if not slow:
        return None
    kind, times = slow[0]
    ranks = name_ranks(now[kind].ranks)
    words = f"{Collective(kind.collective).name} of {ranks} takes {times:.2f} × as long as in groups like it"
    return Finding(FaultClass.NETWORK, f"links of {ranks}", (Signal(SignalKind.WAITS, words),))


def prefetch_collective_waits(observation: Observation) -> None:
    """Find out what passes will ask for: in a large job that takes seconds."""
    if _has_collective_evidence(observation):
        answers = EvidenceKey(observation.evidence)
        _compute_blame(answers), _measure_transfers(answers), diagnose_stages(observation)


def _compute_wait_share(told: WaitAttribution, found: Diagnosis, rank: int) -> float:
    """Of a step, that each peer waits for this rank beyond what it waits for others in its role."""
    (at,) = np.flatnonzero(told.ranks == rank)
    return float(told.compute_shares(found.step_seconds)[at].mean())


def _get_blame(observation: Observation) -> WaitAttribution | None:
    return _compute_blame(EvidenceKey(observation.evidence)) if _has_collective_evidence(observation) else None


def _has_collective_evidence(observation: Observation) -> bool:
    ranks = {of.rank for evidence in observation.evidence for of in evidence.operations if of.operations}
    return len(ranks) == observation.plan.world_size


@lru_cache(maxsize=2)
def _diagnose_cached_stages(answers: EvidenceKey, threshold: float) -> Diagnosis | None:
    """As `_blame`."""
    live = staged.build_live_window(answers.evidence)
    windows = [window for answer in answers.evidence for window in answer.windows]
    return None if live is None else staged.diagnose_staged_job(live, windows, threshold)


@lru_cache(maxsize=2)
def _measure_transfers(answers: EvidenceKey) -> dict[TransferClass, MeasuredTransfer]:
    """As `_blame`."""
    return measure_transfers(answers.evidence)


@lru_cache(maxsize=2)
def _compute_blame(answers: EvidenceKey) -> WaitAttribution:
    """Passes come again and again while an answer is weighed. Few are kept: those of a large job hold 100 MB."""
    return attribute_waits(answers.evidence)
