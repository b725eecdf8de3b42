"""Which rank sends to which."""

from __future__ import annotations

from pacekeeper_analysis.fabric.patterns import build_pipeline_edges, build_ring_edges


def test_a_ring_is_closed() -> None:
    assert build_ring_edges([4, 5, 6, 7]) == [(4, 5), (5, 6), (6, 7), (7, 4)]
    assert set(build_ring_edges([0, 1, 2], backwards=True)) == {(2, 1), (1, 0), (0, 2)}
    assert build_ring_edges([3]) == []


def test_stages_send_forward_and_back() -> None:
    assert set(build_pipeline_edges([2, 5, 3])) == {(2, 5), (5, 3), (5, 2), (3, 5)}
    assert build_pipeline_edges([2]) == []
