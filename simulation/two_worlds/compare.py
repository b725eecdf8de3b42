"""`python -m simulation compare`."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from .cluster import prepare_cluster, run_all_on_cluster
from .disaster import generate_scenario
from .sequences import Comparison, format_table
from .simulated import run_in_simulation


def compare_worlds(seeds: Iterable[int]) -> int:
    """What happened is printed as seeds end, then a table. The exit status: 1 where the worlds differ."""
    logging.disable(logging.WARNING)  # of the simulated operator, whose words are nobody's concern here
    with prepare_cluster() as (cluster, operator):
        found = []
        for each, real in run_all_on_cluster(cluster, operator, map(generate_scenario, seeds)):
            found.append(Comparison(each, run_in_simulation(each), real))
            print(*found[-1].format_lines(), sep="\n", flush=True)
    print(*format_table(found), sep="\n")
    return 0 if all(each.agrees for each in found) else 1
