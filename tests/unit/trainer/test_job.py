"""What a script can pass to a `Job`, as its editor and its type checker show it."""

from __future__ import annotations

import inspect
from typing import get_args, get_type_hints

from pacekeeper.data.lengths import Lengths
from pacekeeper.job import Job
from pacekeeper_analysis.stragglers.length_cost import SequenceCost


def test_the_dataloader_names_lengths_and_cost_and_takes_iterables() -> None:
    parameters = inspect.signature(Job.dataloader).parameters
    assert {name: parameters[name].default for name in ("weight", "shuffle", "lengths", "cost")} == {
        "weight": None,
        "shuffle": True,
        "lengths": None,
        "cost": None,
    }
    hints = get_type_hints(Job.dataloader)
    assert set(get_args(Lengths)) < set(get_args(hints["lengths"]))
    assert SequenceCost in get_args(hints["cost"])
    assert "collections.abc.Iterable" in str(hints["dataset"])
