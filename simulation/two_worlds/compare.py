"""`python -m simulation compare`."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from .cluster import on_the_cluster, play_all
from .disaster import disaster
from .sequences import Comparison, table
from .simulated import simulate


def compare(seeds: Iterable[int]) -> int:
    """What happened is printed as seeds end, then a table. The exit status: 1 where the worlds differ."""
    logging.disable(logging.WARNING)  # of the simulated operator, whose words are nobody's concern here
    with on_the_cluster() as (cluster, operator):
        found = []
        for each, real in play_all(cluster, operator, map(disaster, seeds)):
            found.append(Comparison(each, simulate(each), real))
            print(*found[-1].lines(), sep="\n", flush=True)
    print(*table(found), sep="\n")
    return 0 if all(each.agrees for each in found) else 1
