"""Evidence from the ranks' collectives about a slow job: for which rank the others wait.

It is a second signal in addition to the ranks' own work. It is the better one where ranks differ by nature, as the
stages of a pipeline do.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pacekeeper_analysis.failures.finding import FaultClass, Finding, Signal, SignalKind, merge_findings
from pacekeeper_analysis.failures.wait_graph import name_ranks
from pacekeeper_analysis.protocol.requests import EvidencePart
from pacekeeper_analysis.stragglers import pipeline_stages
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Diagnosis
from pacekeeper_analysis.stragglers.wait_attribution import (
    MeasuredTransfer,
    TransferClass,
    WaitAttribution,
    attribute_waits,
    find_slow_transfers,
    find_usual_transfer_times,
    measure_transfers,
)
from pacekeeper_rank.records import Collective

from ...state.observation import Observation
from .evidence_key import EvidenceKey

FIRST_REQUEST_MAX_RANKS, SECOND_REQUEST_MAX_RANKS = 64, 1024
"""Largest world sizes in which ranks report their collectives with the first answer, and with the second.

A rank's report takes up to 130 KB. In larger jobs, no rank reports them.
"""
MIN_WAIT_SHARE = 0.02
"""Least share of a step that a rank must cost its peers, beyond others of its role, to hold them up."""
BOTTLENECK_TO_FAULT_CLASS = {Bottleneck.GC: FaultClass.CODE, Bottleneck.LENGTHS: FaultClass.DATA}
"""Fault class that the bottleneck alone implies. The class of a slow rank takes more evidence."""
BOTTLENECK_TO_CULPRIT = {
    Bottleneck.GC: "garbage collections on all ranks",
    Bottleneck.LENGTHS: "sequence lengths on all ranks",
}
"""Culprit that the bottleneck alone implies."""


def is_holding_up_peers(observation: Observation, diagnosis: Diagnosis, rank: int) -> bool:
    """Return False if this rank, slow in its own work, makes no peer wait more than ranks in its role always do."""
    attribution = _get_blame(observation)
    if attribution is None or len(set(attribution.roles.tolist())) == 1 or rank not in attribution.ranks:
        return True
    return _compute_wait_share(attribution, diagnosis, rank) >= MIN_WAIT_SHARE


def can_have_pipeline_stages(observation: Observation) -> bool:
    """Return whether this answer covers own work alone, in a monitored script: its ranks may differ by nature."""
    has_operations = EvidencePart.OPERATIONS in observation.requests.evidence_parts
    is_monitored = any(
        view.heartbeat is not None and not view.heartbeat.training.managed for view in observation.members
    )
    return is_monitored and not has_operations and observation.plan.world_size <= SECOND_REQUEST_MAX_RANKS


def diagnose_stages(observation: Observation) -> Diagnosis | None:
    """Return the diagnosis of a job with pipeline stages; None: it has none, or that is not known."""
    threshold = observation.job.spec.detection.straggler_slowdown
    return (
        _diagnose_cached_stages(EvidenceKey(observation.evidence), threshold)
        if _has_collective_evidence(observation)
        else None
    )


def build_wait_finding(observation: Observation, diagnosis: Diagnosis, culprit: int | None) -> Finding:
    """Return the finding about slow steps. `culprit`: the rank that is slow in its own work."""
    window, attribution = diagnosis.window, _get_blame(observation)
    sentences = [sentence for sentence in diagnosis.evidence if sentence] or [
        f"steps take {diagnosis.slowdown:.2f} × as long"
    ]
    signals = [Signal(SignalKind.TIMES, sentences[0])]
    if culprit is not None and attribution is not None and culprit in attribution.ranks:
        share = _compute_wait_share(attribution, diagnosis, culprit)
        waits_text = (
            f"each of its peers waits for rank {culprit} for {share:.0%} of a step, passed on through its groups"
        )
    else:
        wait_seconds = np.maximum(window.step_seconds - window.compute_seconds, 0.0).mean(axis=0)
        waits_text = f"the ranks wait for each other {wait_seconds.min():.3f} s to {wait_seconds.max():.3f} s of a step"
        if culprit is not None:
            waits_text += f", rank {culprit} {wait_seconds[culprit]:.3f} s"
    signals.append(Signal(SignalKind.WAITS, waits_text))
    culprit_name = BOTTLENECK_TO_CULPRIT.get(diagnosis.bottleneck, "") if culprit is None else f"rank {culprit}"
    return merge_findings(
        None,
        Finding(BOTTLENECK_TO_FAULT_CLASS.get(diagnosis.bottleneck, FaultClass.UNKNOWN), culprit_name, tuple(signals)),
    )


def find_slow_groups(observation: Observation) -> Finding | None:
    """Return the finding about groups whose transfers take longer than in similar ones; None: not known, or none."""
    transfers = _measure_transfers(EvidenceKey(observation.evidence)) if _has_collective_evidence(observation) else {}
    slow = sorted(
        find_slow_transfers(transfers, find_usual_transfer_times(transfers)).items(), key=lambda item: -item[1]
    )
    if not slow:
        return None
    kind, slowdown = slow[0]
    ranks = name_ranks(transfers[kind].ranks)
    message = f"{Collective(kind.collective).name} of {ranks} takes {slowdown:.2f} × as long as in groups like it"
    return Finding(FaultClass.NETWORK, f"links of {ranks}", (Signal(SignalKind.WAITS, message),))


def prefetch_collective_waits(observation: Observation) -> None:
    """Compute in advance what passes will need: in a large job that takes seconds."""
    if _has_collective_evidence(observation):
        evidence_key = EvidenceKey(observation.evidence)
        _compute_blame(evidence_key), _measure_transfers(evidence_key), diagnose_stages(observation)


def _compute_wait_share(attribution: WaitAttribution, diagnosis: Diagnosis, rank: int) -> float:
    """Return the share of a step that each peer waits for this rank beyond its waits for others in its role."""
    (index,) = np.flatnonzero(attribution.ranks == rank)
    return float(attribution.compute_shares(diagnosis.step_seconds)[index].mean())


def _get_blame(observation: Observation) -> WaitAttribution | None:
    return _compute_blame(EvidenceKey(observation.evidence)) if _has_collective_evidence(observation) else None


def _has_collective_evidence(observation: Observation) -> bool:
    ranks = {
        collectives.rank
        for evidence in observation.evidence
        for collectives in evidence.operations
        if collectives.operations
    }
    return len(ranks) == observation.plan.world_size


@lru_cache(maxsize=2)
def _diagnose_cached_stages(evidence_key: EvidenceKey, threshold: float) -> Diagnosis | None:
    live_window = pipeline_stages.build_live_window(evidence_key.evidence)
    windows = [window for answer in evidence_key.evidence for window in answer.windows]
    return None if live_window is None else pipeline_stages.diagnose_staged_job(live_window, windows, threshold)


@lru_cache(maxsize=2)
def _measure_transfers(evidence_key: EvidenceKey) -> dict[TransferClass, MeasuredTransfer]:
    return measure_transfers(evidence_key.evidence)


@lru_cache(maxsize=2)
def _compute_blame(evidence_key: EvidenceKey) -> WaitAttribution:
    """Attribute the waits, once for all passes in which an answer is weighed.

    Few results are cached: those of a large job take 100 MB.
    """
    return attribute_waits(evidence_key.evidence)
