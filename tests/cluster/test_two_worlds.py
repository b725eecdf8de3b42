"""The simulation and the cluster write the same objects in a disaster. A difference is a defect of the simulation, or a
discovery about the operator.

`python -m simulation compare` plays all of them.
"""

from __future__ import annotations

import pytest

from simulation.conformance.cluster import run_all_on_cluster
from simulation.conformance.scenario import generate_scenario
from simulation.conformance.sequences import Comparison
from simulation.conformance.simulated import run_in_simulation
from testing.kubernetes.cluster import KubectlCluster
from testing.operators.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("resources")

SEEDS = (13, 15)
"""They affect no other job: out of memory, deleted by force; stopped twice, crashed, finished."""


def test_the_cluster_and_the_simulation_write_the_same_objects(
    cluster: KubectlCluster, operator_process: OperatorProcess
) -> None:
    played = run_all_on_cluster(cluster, operator_process, map(generate_scenario, SEEDS), on_entry=print)
    compared = [Comparison(each, run_in_simulation(each), real) for each, real in played]
    assert len(compared) == len(SEEDS)
    different = [line for each in compared if not each.agrees for line in each.format_lines()]
    assert not different, "\n".join(different)
