"""What collectives add to the diagnosis of a slow job: a second witness, or a veto if ranks differ by design."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pacekeeper_analysis.failures.finding import FaultClass, SignalKind
from pacekeeper_analysis.protocol.reports import Evidence, RankWindow
from pacekeeper_analysis.stragglers import strategies
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Diagnosis
from pacekeeper_operator.decide.stragglers import collective_waits
from pacekeeper_operator.state.observation import Observation
from pacekeeper_rank.records import Collective
from testing.operators.observations import build_training
from testing.training.nested_ranks import NestedRanks

STEPS = 12


def build_windows(own_seconds: Sequence[float], step_seconds: float) -> tuple[RankWindow, ...]:
    steps = tuple(range(STEPS))
    return tuple(
        RankWindow(rank, steps, (step_seconds,) * STEPS, (seconds,) * STEPS, (8,) * STEPS)
        for rank, seconds in enumerate(own_seconds)
    )


def build_with_evidence(
    collectives: tuple[Evidence, ...], own_seconds: Sequence[float], step_seconds: float
) -> tuple[Observation, Diagnosis]:
    windows = build_windows(own_seconds, step_seconds)
    evidence = tuple(
        replace(answer, windows=windows[4 * index : 4 * index + 4]) for index, answer in enumerate(collectives)
    )
    diagnosis = strategies.diagnose_bottleneck(windows, 1.1)
    assert diagnosis is not None
    return replace(build_training(), evidence=evidence), diagnosis


def build_pipeline(own_seconds: Sequence[float]) -> tuple[Evidence, ...]:
    """Build evidence of two stages (ranks 0, 1 and 2, 3) of two replicas, with these seconds of work."""
    job = NestedRanks((2, 2))
    for _ in range(STEPS):
        job.begin_step()
        for stage, ends in (((1, 1, 0, 0), (0, 1)), ((0, 0, 1, 1), (1, 0))):
            job.work(np.array(own_seconds) * stage)
            for replica in range(2):
                source, destination = (end * 2 + replica for end in ends)
                job.enter_collective((source, destination), collectives=(Collective.SEND, Collective.RECV))
        job.run_collective(1)
    return job.build_evidence()


def test_a_stage_with_more_layers_than_the_others_is_no_straggler() -> None:
    own_seconds = (0.02, 0.02, 0.04, 0.04)
    observation, diagnosis = build_with_evidence(build_pipeline(own_seconds), own_seconds, 0.064)
    assert diagnosis.bottleneck is Bottleneck.COMPUTE, "by the own work of ranks alone"
    assert not collective_waits.is_holding_up_peers(observation, diagnosis, 2)
    assert not collective_waits.is_holding_up_peers(observation, diagnosis, 3)
    slow = (0.02, 0.02, 0.04, 0.05)
    observation, diagnosis = build_with_evidence(build_pipeline(slow), slow, 0.074)
    assert collective_waits.is_holding_up_peers(observation, diagnosis, 3)
    assert not collective_waits.is_holding_up_peers(observation, diagnosis, 2)


def test_a_slow_rank_in_a_flat_job_is_confirmed_by_the_waits_of_its_peers() -> None:
    own_seconds = (0.02, 0.02, 0.03, 0.02)
    job = NestedRanks((4,))
    for _ in range(STEPS):
        job.begin_step()
        job.work(np.array(own_seconds))
        job.run_collective(0)
    observation, diagnosis = build_with_evidence(job.build_evidence(), own_seconds, 0.031)
    assert collective_waits.is_holding_up_peers(observation, diagnosis, 2)
    finding = collective_waits.build_wait_finding(observation, diagnosis, 2)
    assert (finding.fault, finding.culprit) == (FaultClass.UNKNOWN, "rank 2")
    assert {witness.kind: witness.message for witness in finding.signals}[SignalKind.WAITS] == (
        "each of its peers waits for rank 2 for 32% of a step, passed on through its groups"
    )


def test_without_collectives_the_windows_show_the_waits() -> None:
    own_seconds = (0.02, 0.02, 0.03, 0.02)
    observation, diagnosis = build_with_evidence((), own_seconds, 0.031)
    assert collective_waits.is_holding_up_peers(observation, diagnosis, 2)
    messages = [witness.message for witness in collective_waits.build_wait_finding(observation, diagnosis, 2).signals]
    assert messages[1] == "the ranks wait for each other 0.001 s to 0.011 s of a step, rank 2 0.001 s"
    assert collective_waits.find_slow_groups(observation) is None


def test_a_group_with_slow_transfers_is_named() -> None:
    job = NestedRanks((2, 2))
    for _ in range(STEPS):
        job.begin_step()
        job.work(np.full(4, 0.02))
        job.run_collective(1, slow=lambda ranks: 2.0 if tuple(ranks) == (2, 3) else 1.0)
        job.work(np.where(np.arange(4) < 2, 0.001, 0.0))
        job.run_collective(0)
    observation, _ = build_with_evidence(job.build_evidence(), (0.02,) * 4, 0.024)
    finding = collective_waits.find_slow_groups(observation)
    assert finding is not None
    assert (finding.fault, finding.culprit) == (FaultClass.NETWORK, "links of ranks 2-3")
    assert finding.signals[0].message == "ALL_REDUCE of ranks 2-3 takes 2.00 × as long as in groups like it"
