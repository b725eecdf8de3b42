"""Of a disaster the simulation tells what the cluster tells: a difference is its defect, or a discovery about the
operator.

`python -m simulation compare` plays all of them.
"""

from __future__ import annotations

import pytest

from simulation.two_worlds.cluster import run_all_on_cluster
from simulation.two_worlds.disaster import generate_scenario
from simulation.two_worlds.sequences import Comparison
from simulation.two_worlds.simulated import run_in_simulation
from tests.support.cluster import KubectlCluster
from tests.support.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("resources")

SEEDS = (13, 15)
"""They affect no other job: out of memory, deleted by force; stopped twice, crashed, finished."""


def test_both_worlds_tell_the_same(cluster: KubectlCluster, operator_process: OperatorProcess) -> None:
    played = run_all_on_cluster(cluster, operator_process, map(generate_scenario, SEEDS), told=print)
    compared = [Comparison(each, run_in_simulation(each), real) for each, real in played]
    assert len(compared) == len(SEEDS)
    different = [line for each in compared if not each.agrees for line in each.format_lines()]
    assert not different, "\n".join(different)
