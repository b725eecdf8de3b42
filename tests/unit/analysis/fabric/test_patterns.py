"""Who sends to whom."""

from __future__ import annotations

from pacekeeper_analysis.fabric.patterns import pipeline, ring


def test_a_ring_comes_back() -> None:
    assert ring([4, 5, 6, 7]) == [(4, 5), (5, 6), (6, 7), (7, 4)]
    assert set(ring([0, 1, 2], backwards=True)) == {(2, 1), (1, 0), (0, 2)}
    assert ring([3]) == []


def test_stages_send_on_and_back() -> None:
    assert set(pipeline([2, 5, 3])) == {(2, 5), (5, 3), (5, 2), (3, 5)}
    assert pipeline([2]) == []
