"""The summary of the bench of starts."""

from __future__ import annotations

from bench.start import build_result


def test_the_ratio_is_the_median_of_the_ratios_of_pairs() -> None:
    found = build_result({"pacekeeper": [4.0, 9.0, 5.0], "torchrun": [8.0, 10.0, 5.0]})
    assert (found["ratio"], found["pacekeeper_median_s"], found["torchrun_median_s"]) == (0.9, 5.0, 8.0)
    assert found["holds"] == {"no_later_than_torchrun": True}
    assert not build_result({"pacekeeper": [5.0], "torchrun": [4.0]})["holds"]["no_later_than_torchrun"]
