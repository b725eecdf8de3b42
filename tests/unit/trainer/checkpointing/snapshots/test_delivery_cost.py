"""What a copy takes from the training: no more than its threads compute, and nothing while no thread waits for it."""

from __future__ import annotations

import pytest

from pacekeeper.checkpointing.snapshots.delivery_cost import DeliveryCost


class Machine:
    """Whose threads compute, and wait for a processor, when the test requests it."""

    def __init__(self, counts: bool = True) -> None:
        self.computed = self.waited = 0.0
        self._counts = counts
        self.cost = DeliveryCost(lambda: self.computed, lambda: self.waited if self._counts else None)

    def run_copy(self, computes: float, waits: float) -> None:
        with self.cost.count_work():
            self.computed += computes
            self.waited += waits
        self.cost.finish_copy()


@pytest.mark.parametrize(
    ("computes", "waits", "costs"), [(2.0, 0.0, 0.0), (2.0, 0.5, 0.5), (2.0, 30.0, 2.0)], ids=["idle", "some", "full"]
)
def test_a_copy_costs_the_time_that_the_training_may_have_waited_for_it(
    computes: float, waits: float, costs: float
) -> None:
    machine = Machine()
    assert machine.cost.seconds == 0.0
    machine.run_copy(computes, waits)
    assert machine.cost.seconds == costs


def test_all_computation_counts_where_waiting_is_not_measured() -> None:
    machine = Machine(counts=False)
    machine.run_copy(2.0, 0.0)
    assert machine.cost.seconds == 2.0


def test_waiting_outside_of_a_copy_is_not_counted() -> None:
    machine = Machine()
    machine.waited += 100.0
    machine.run_copy(2.0, 0.5)
    machine.waited += 100.0
    machine.run_copy(2.0, 1.5)
    assert machine.cost.seconds == 1.0


def test_both_ends_count_and_waiting_while_both_work_counts_once() -> None:
    machine = Machine()
    with machine.cost.count_work():
        machine.computed += 1.0
        machine.waited += 2.0
        with machine.cost.count_work():
            machine.computed += 1.0
            machine.waited += 2.0
    machine.cost.finish_copy()
    assert machine.cost.seconds == 3.0, "of the stand-in's one clock, the outer one has seen both"
    with machine.cost.count_work():
        machine.computed += 9.0
        machine.waited += 1.0
        with machine.cost.count_work():
            machine.waited += 1.0
    machine.cost.finish_copy()
    assert machine.cost.seconds == (3.0 + 2.0) / 2


def test_the_last_few_copies_count_and_an_unsent_copy_costs_nothing() -> None:
    machine = Machine()
    machine.run_copy(9.0, 9.0)
    for _ in range(4):
        machine.run_copy(0.0, 9.0)
    assert machine.cost.seconds == 9.0 / 5
    machine.run_copy(0.0, 9.0)
    assert machine.cost.seconds == 0.0
