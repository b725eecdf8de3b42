"""What the ranks' collectives add to a slow job's diagnosis: a second witness, a veto where ranks differ by nature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pacekeeper_analysis.failures.finding import FaultClass, SignalKind
from pacekeeper_analysis.protocol.records import Collective
from pacekeeper_analysis.protocol.reports import Evidence, RankWindow
from pacekeeper_analysis.stragglers import strategies
from pacekeeper_analysis.stragglers.strategies import Bottleneck, Diagnosis
from pacekeeper_operator.decide.stragglers import collective_waits
from pacekeeper_operator.state.observation import Observation
from testing.operators.observations import build_training
from testing.training.nested_ranks import NestedRanks

STEPS = 12


def windows(own: Sequence[float], step_seconds: float) -> tuple[RankWindow, ...]:
    steps = tuple(range(STEPS))
    return tuple(
        RankWindow(rank, steps, (step_seconds,) * STEPS, (seconds,) * STEPS, (8,) * STEPS)
        for rank, seconds in enumerate(own)
    )


def asked(told: tuple[Evidence, ...], own: Sequence[float], step_seconds: float) -> tuple[Observation, Diagnosis]:
    of_ranks = windows(own, step_seconds)
    evidence = tuple(replace(each, windows=of_ranks[4 * at : 4 * at + 4]) for at, each in enumerate(told))
    found = strategies.diagnose_bottleneck(of_ranks, 1.1)
    assert found is not None
    return replace(build_training(), evidence=evidence), found


def pipeline(own: Sequence[float]) -> tuple[Evidence, ...]:
    """Two stages (ranks 0, 1 and 2, 3) of two replicas, with so many seconds of work each."""
    job = NestedRanks((2, 2))
    for _ in range(STEPS):
        job.begin_step()
        for stage, ends in (((1, 1, 0, 0), (0, 1)), ((0, 0, 1, 1), (1, 0))):
            job.work(np.array(own) * stage)
            for replica in range(2):
                source, destination = (end * 2 + replica for end in ends)
                job.enter_collective((source, destination), collectives=(Collective.SEND, Collective.RECV))
        job.run_collective(1)
    return job.build_evidence()


def test_a_stage_with_more_layers_than_the_others_is_no_straggler() -> None:
    own = (0.02, 0.02, 0.04, 0.04)
    observation, found = asked(pipeline(own), own, 0.064)
    assert found.bottleneck is Bottleneck.COMPUTE, "by the ranks' own work alone"
    assert not collective_waits.is_holding_up_peers(observation, found, 2)
    assert not collective_waits.is_holding_up_peers(observation, found, 3)
    slow = (0.02, 0.02, 0.04, 0.05)
    observation, found = asked(pipeline(slow), slow, 0.074)
    assert collective_waits.is_holding_up_peers(observation, found, 3)
    assert not collective_waits.is_holding_up_peers(observation, found, 2)


def test_who_is_slow_in_a_flat_job_is_confirmed_by_who_waits_for_it() -> None:
    own = (0.02, 0.02, 0.03, 0.02)
    job = NestedRanks((4,))
    for _ in range(STEPS):
        job.begin_step()
        job.work(np.array(own))
        job.run_collective(0)
    observation, found = asked(job.build_evidence(), own, 0.031)
    assert collective_waits.is_holding_up_peers(observation, found, 2)
    said = collective_waits.build_wait_finding(observation, found, 2)
    assert (said.fault, said.culprit) == (FaultClass.UNKNOWN, "rank 2")
    assert {witness.kind: witness.message for witness in said.signals}[SignalKind.WAITS] == (
        "each of its peers waits for rank 2 for 32% of a step, passed on through its groups"
    )


def test_without_collectives_the_windows_say_who_waits() -> None:
    own = (0.02, 0.02, 0.03, 0.02)
    observation, found = asked((), own, 0.031)
    assert collective_waits.is_holding_up_peers(observation, found, 2)
    words = [witness.message for witness in collective_waits.build_wait_finding(observation, found, 2).signals]
    assert words[1] == "the ranks wait for each other 0.001 s to 0.011 s of a step, rank 2 0.001 s"
    assert collective_waits.find_slow_groups(observation) is None


def test_a_group_with_slow_transfers_is_named() -> None:
    job = NestedRanks((2, 2))
    for _ in range(STEPS):
        job.begin_step()
        job.work(np.full(4, 0.02))
        job.run_collective(1, slow=lambda ranks: 2.0 if tuple(ranks) == (2, 3) else 1.0)
        job.work(np.where(np.arange(4) < 2, 0.001, 0.0))
        job.run_collective(0)
    observation, _ = asked(job.build_evidence(), (0.02,) * 4, 0.024)
    found = collective_waits.find_slow_groups(observation)
    assert found is not None
    assert (found.fault, found.culprit) == (FaultClass.NETWORK, "links of ranks 2-3")
    assert found.signals[0].message == "ALL_REDUCE of ranks 2-3 takes 2.00 × as long as in groups like it"
