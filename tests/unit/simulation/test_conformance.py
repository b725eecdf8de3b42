"""Conformance scenarios, as far as they need no cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simulation.conformance.scenario import CONFORMANCE_FAULTS, ConformanceScenario, Episode, generate_scenario
from simulation.conformance.scenario_run import is_job_calm
from simulation.conformance.sequences import Comparison
from simulation.conformance.simulated import run_in_simulation
from simulation.faults import machines, people
from simulation.faults.targets import TargetRole
from simulation.simulated_job import SimulatedJob

Change = Callable[[dict[str, Any]], None]


def test_twenty_consecutive_seeds_use_the_whole_vocabulary() -> None:
    found = {type(episode.fault) for seed in range(1, 21) for episode in generate_scenario(seed).episodes}
    assert found >= set(CONFORMANCE_FAULTS)


def test_a_scenario_is_a_function_of_its_seed() -> None:
    assert generate_scenario(7) == generate_scenario(7)
    assert len({str(generate_scenario(seed)) for seed in range(1, 21)}) == 20


def test_scenarios_with_failing_operators_or_nodes_are_exclusive() -> None:
    """Such a job runs alone in the cluster."""
    cut_off = Episode(machines.NodeIsCutOff())
    assert ConformanceScenario(0, SimulatedJob(), (Episode(machines.PodDeleted()), cut_off)).is_exclusive
    assert not ConformanceScenario(0, SimulatedJob(), (Episode(machines.PodDeleted()),)).is_exclusive


def test_a_simulated_scenario_has_a_complete_sequence() -> None:
    job = SimulatedJob("a", replicas=2, spares=1)
    sequence = run_in_simulation(
        ConformanceScenario(3, job, (Episode(machines.PodDeleted()), Episode(people.JobFinishes())))
    )
    assert sequence == (
        "Running, membership 1, round 1, restarts 0, workers 2/2+1, 3 made",
        "→ pod-deleted",
        "worker-lost of rank 0 (Disruption): ReplaceWorker, Recovered",
        "Running, membership 2, round 2, restarts 0, workers 2/2+1, 4 made",
        "→ job-finishes",
        "Complete, membership 2, round 2, restarts 0, workers 2/2, 4 made",
    )


def test_a_fault_without_effect_is_part_of_the_sequence() -> None:
    """The fault deletes a spare, and the job has none."""
    unnoticed = machines.PodDeleted(role=TargetRole.SPARE)
    sequence = run_in_simulation(ConformanceScenario(3, SimulatedJob("a", replicas=2, spares=0), (Episode(unnoticed),)))
    assert "misses: job a has no spare" in sequence


def test_a_comparison_shows_both_sequences_where_they_differ() -> None:
    same = Comparison(generate_scenario(1), ("a", "b"), ("a", "b"))
    assert same.agrees
    different = Comparison(generate_scenario(1), ("a", "b", "d"), ("a", "c"))
    assert not different.agrees
    assert [line.strip() for line in different.format_lines()][1:] == ["a", "- b", "+ c", "- d", "+ (nothing)"]


def change_spec(**changes: object) -> Change:
    return lambda job: job["spec"].update(changes)


def change_status(**changes: object) -> Change:
    return lambda job: job["status"].update(changes)


@pytest.mark.parametrize(
    ("change", "calm"),
    [
        (change_spec(), True),
        (change_status(observedGeneration=1), False),
        (change_status(phase="Recovering"), False),
        (change_status(workers={"ready": 2}), False),
        (change_spec(suspend=True), False),
        (change_status(phase="Complete", workers={}), True),
    ],
)
def test_a_job_is_calm_if_it_matches_its_spec(change: Change, calm: bool) -> None:
    job: dict[str, Any] = {
        "metadata": {"generation": 2},
        "spec": {"replicas": 2, "spares": 1},
        "status": {"observedGeneration": 2, "phase": "Running", "workers": {"ready": 2, "spare": 1}},
    }
    change(job)
    assert is_job_calm(job, []) == calm


def test_a_job_with_an_open_incident_is_not_calm() -> None:
    job: dict[str, Any] = {
        "metadata": {"generation": 2},
        "spec": {"replicas": 2},
        "status": {"observedGeneration": 2, "phase": "Running", "workers": {"ready": 2}},
    }
    assert is_job_calm(job, [{"status": {"outcome": "Recovered"}}])
    assert not is_job_calm(job, [{"status": {"outcome": "Recovered"}}, {"status": {}}])
