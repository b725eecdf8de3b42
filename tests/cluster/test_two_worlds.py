"""Of a disaster the simulation tells what the cluster tells: a difference is its defect, or a discovery about the
operator.

`python -m simulation compare` plays all of them.
"""

from __future__ import annotations

import pytest

from simulation.two_worlds.cluster import play_all
from simulation.two_worlds.disaster import disaster
from simulation.two_worlds.sequences import Comparison
from simulation.two_worlds.simulated import simulate
from tests.support.cluster import Cluster
from tests.support.operator_process import OperatorProcess

pytestmark = pytest.mark.usefixtures("resources")

SEEDS = (13, 15)
"""They affect no other job: out of memory, deleted by force; stopped twice, crashed, finished."""


def test_both_worlds_tell_the_same(cluster: Cluster, operator_process: OperatorProcess) -> None:
    played = play_all(cluster, operator_process, map(disaster, SEEDS), told=print)
    compared = [Comparison(each, simulate(each), real) for each, real in played]
    assert len(compared) == len(SEEDS)
    different = [line for each in compared if not each.agrees for line in each.lines()]
    assert not different, "\n".join(different)
