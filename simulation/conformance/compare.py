"""The command `python -m simulation compare`."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from .cluster import prepare_cluster, run_all_on_cluster
from .scenario import generate_scenario
from .sequences import Comparison, format_table
from .simulated import run_in_simulation


def compare_worlds(seeds: Iterable[int]) -> int:
    """Print each result as it arrives, then a table. Return the exit status: 1 if the worlds differ."""
    logging.disable(logging.WARNING)  # the simulated operator's logs are not of interest here
    with prepare_cluster() as (cluster, operator):
        comparisons = []
        for each, real in run_all_on_cluster(cluster, operator, map(generate_scenario, seeds)):
            comparisons.append(Comparison(each, run_in_simulation(each), real))
            print(*comparisons[-1].format_lines(), sep="\n", flush=True)
    print(*format_table(comparisons), sep="\n")
    return 0 if all(each.agrees for each in comparisons) else 1
