"""The delay matrix: joined from both ends of connections, polished, and its hot cells."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.network.delay_matrix import (
    DelayCell,
    HotSpot,
    SpotKind,
    describe_hot_spot,
    diagnose_links,
    join_link_ends,
    sort_cells_by_ratio,
)
from pacekeeper_analysis.protocol.reports import Evidence, FlowWindow, LinkWindow

MB = 1_000_000
SECONDS = 0.2
"""That a healthy cell needs for its 20 MB."""

Factor = Callable[[int, int], float]


def build_matrix(
    ranks: int, factor: Factor, seed: int = 0, noise: float = 0.1, ages: Iterable[int] = range(3)
) -> list[DelayCell]:
    """All pairs. `factor`: of (source, destination), how many times as long a byte takes."""
    draws = np.random.default_rng(seed)
    return [
        DelayCell(s, d, age, 20 * MB, SECONDS * factor(s, d) * math.exp(draws.normal(0, noise)))
        for age in ages
        for s in range(ranks)
        for d in range(ranks)
        if s != d
    ]


def build_ring(ranks: int, factor: Factor, seed: int = 0) -> list[DelayCell]:
    """Each sends to the next one only."""
    draws = np.random.default_rng(seed)
    return [
        DelayCell(
            s, (s + 1) % ranks, age, 20 * MB, SECONDS * factor(s, (s + 1) % ranks) * math.exp(draws.normal(0, 0.1))
        )
        for age in range(3)
        for s in range(ranks)
    ]


def list_places(hot: Iterable[HotSpot]) -> list[tuple[SpotKind, int | None, int | None]]:
    return [(spot.kind, spot.source, spot.destination) for spot in hot]


class TestByRatio:
    def test_all_pairs_are_listed_with_the_slowest_first(self) -> None:
        cells = build_matrix(4, lambda s, d: {(2, 0): 9, (1, 3): 4}.get((s, d), 1), noise=0.0)
        links = sort_cells_by_ratio([replace(cell, busy_seconds=9.0) if cell.age else cell for cell in cells])
        assert [(cell.source, cell.destination) for cell, _ in links[:2]] == [(2, 0), (1, 3)]
        assert [ratio for _, ratio in links] == pytest.approx([9.0, 4.0, *[1.0] * 10])

    def test_each_cell_is_compared_with_its_like(self) -> None:
        """Links that are slow by nature, and links within a node, are not taken for slow."""
        cells = build_matrix(4, lambda s, _: 2 if s == 1 else 1, noise=0.0)
        cells = [replace(cell, early_bytes=20 * MB, early_busy_seconds=cell.busy_seconds) for cell in cells]
        near = [DelayCell(9, 8 - at, 0, 20 * MB, SECONDS / 50, same_node=True) for at in range(3)]
        assert [ratio for _, ratio in sort_cells_by_ratio([*cells, *near])] == pytest.approx([1.0] * 15)

    def test_the_usual_speed_is_unknown_for_too_few_or_quiet_cells(self) -> None:
        one, quiet = DelayCell(0, 1, 1, 20 * MB, SECONDS), DelayCell(1, 0, 0, 0, 0.0)
        assert sort_cells_by_ratio([one, replace(one, age=0, acked_bytes=0), quiet]) == [(one, None)]
        answers = [DelayCell(s, (s - 1) % 4, 0, 1000, 3.0) for s in range(4)]
        assert {cell.source: ratio for cell, ratio in sort_cells_by_ratio(answers)} == dict.fromkeys(range(4))
        assert [ratio for _, ratio in sort_cells_by_ratio([*build_ring(4, lambda *_: 1), *answers])][4:] == [None] * 4


class TestJudge:
    @pytest.mark.parametrize("ranks", [4, 8, 16])
    @pytest.mark.parametrize("seed", range(5))
    def test_a_link_a_sender_and_a_receiver_are_distinguished(self, ranks: int, seed: int) -> None:
        slow_link = diagnose_links(build_matrix(ranks, lambda s, d: 3 if (s, d) == (1, 2) else 1, seed)).hot_spots
        slow_sender = diagnose_links(build_matrix(ranks, lambda s, _: 3 if s == 1 else 1, seed)).hot_spots
        slow_receiver = diagnose_links(build_matrix(ranks, lambda _, d: 3 if d == 2 else 1, seed)).hot_spots
        assert list_places(slow_link) == [(SpotKind.LINK, 1, 2)]
        assert list_places(slow_sender) == [(SpotKind.SENDER, 1, None)]
        assert list_places(slow_receiver) == [(SpotKind.RECEIVER, None, 2)]
        for (spot,) in (slow_link, slow_sender, slow_receiver):
            assert spot.ratio == pytest.approx(3, rel=0.4)
            assert spot.usual_bytes_per_second == pytest.approx(100 * MB, rel=0.2)

    @pytest.mark.parametrize("seed", range(20))
    def test_links_that_are_alike_show_nothing(self, seed: int) -> None:
        assert diagnose_links(build_matrix(4, lambda *_: 1, seed, noise=0.15)).hot_spots == ()
        assert diagnose_links(build_ring(8, lambda *_: 1, seed)).hot_spots == ()

    def test_small_messages_are_slow_by_nature(self) -> None:
        """Each rank sends some to the opposite one, which lets them wait. Compared with the links' own first windows,
        only the one that has become slower shows."""

        def slow_by_nature(source: int, destination: int) -> int:
            return 20 if (destination - source) % 6 == 3 else 1

        mixed = build_matrix(6, lambda s, d: slow_by_nature(s, d) * (4 if (s, d) == (1, 2) else 1))
        cells = [
            replace(
                cell, early_bytes=20 * MB, early_busy_seconds=SECONDS * slow_by_nature(cell.source, cell.destination)
            )
            for cell in mixed
        ]
        (spot,) = diagnose_links(cells).hot_spots
        assert list_places([spot]) == [(SpotKind.LINK, 1, 2)]
        assert spot.usual_bytes_per_second == pytest.approx(100 * MB, rel=0.3)
        assert len(diagnose_links(mixed).hot_spots) > 1

    def test_a_link_and_another_ranks_side_are_found_at_once(self) -> None:
        cells = build_matrix(8, lambda s, d: 4 if s == 5 else 3 if (s, d) == (1, 2) else 1)
        assert set(list_places(diagnose_links(cells).hot_spots)) == {(SpotKind.SENDER, 5, None), (SpotKind.LINK, 1, 2)}

    def test_coarse_times_of_others_hide_no_slow_link(self) -> None:
        """Counted in ticks of 4 ms, all that rank 1 sends seems to take 1.6 × as long: but one of its cells is busy."""
        seconds = {(1, 2): 5.0, (1, 0): 0.032, (1, 3): 0.032}
        cells = [
            replace(c, busy_seconds=seconds.get((c.source, c.destination), 0.02)) for c in build_matrix(4, lambda *_: 1)
        ]
        assert list_places(diagnose_links(cells).hot_spots) == [(SpotKind.LINK, 1, 2)]

    def test_in_a_ring_only_the_pair_is_known(self) -> None:
        (spot,) = diagnose_links(build_ring(8, lambda s, _: 5 if s == 3 else 1)).hot_spots
        assert (spot.kind, spot.pairs) == (SpotKind.PAIR, ((3, 4),))
        assert describe_hot_spot(spot).startswith(
            "from rank 3 to rank 4: 20 MB/s while busy, the others 95 MB/s (5.4 ×"
        )

    def test_ranks_of_two_cells_each_are_evaluated_by_whether_both_are_hot(self) -> None:
        three = diagnose_links(build_matrix(3, lambda s, _: 9 if s == 1 else 1)).hot_spots
        assert list_places(three) == [(SpotKind.SENDER, 1, None)]
        assert list_places(diagnose_links(build_matrix(3, lambda s, d: 9 if (s, d) == (1, 2) else 1)).hot_spots) == [
            (SpotKind.LINK, 1, 2)
        ]

    def test_one_hot_window_is_chance_and_two_are_not(self) -> None:
        once = [replace(c, busy_seconds=c.busy_seconds * (5 if c.age == 1 else 1)) for c in build_slow_cell()]
        assert diagnose_links(once).hot_spots == ()
        twice = [replace(c, busy_seconds=c.busy_seconds * (5 if c.age < 2 else 1)) for c in build_slow_cell()]
        rest = [c for c in build_matrix(4, lambda *_: 1) if (c.source, c.destination) != (1, 2)]
        (spot,) = diagnose_links(rest + twice).hot_spots
        assert (spot.kind, spot.windows) == (SpotKind.LINK, 2)
        assert diagnose_links([c for c in rest + twice if c.age == 0]).hot_spots == (), "the first window of a job"

    def test_the_reverse_direction_of_a_slow_link_is_not_reported(self) -> None:
        def slow_both_ways(source: int, destination: int) -> float:
            return {(1, 2): 9.0, (2, 1): 4.0}.get((source, destination), 1.0)

        assert list_places(diagnose_links(build_matrix(6, slow_both_ways)).hot_spots) == [(SpotKind.LINK, 1, 2)]
        sides = build_matrix(6, lambda s, d: 9 if s == 1 else 4 if d == 1 else 1)
        assert list_places(diagnose_links(sides).hot_spots) == [(SpotKind.SENDER, 1, None)]
        in_turn = build_ring(8, lambda s, _: {3: 9.0, 2: 5.0, 4: 5.0}.get(s, 1.0))
        assert list_places(diagnose_links(in_turn).hot_spots) == [(SpotKind.PAIR, 3, 4)]

    @pytest.mark.parametrize("seed", range(10))
    def test_one_slow_side_of_a_ring_of_four_is_half_of_its_cells(self, seed: int) -> None:
        """What the rank sends, and what it acknowledges. Compared with each connection's own first windows, both stand
        out, of which the middle of all would be the middle."""
        slow = build_ring(4, lambda s, d: 10 if s == 1 else 6 if d == 1 else 1, seed)
        cells = [replace(cell, early_bytes=20 * MB, early_busy_seconds=SECONDS) for cell in slow]
        assert list_places(diagnose_links(cells).hot_spots) == [(SpotKind.PAIR, 1, 2)]
        alike = [replace(cell, busy_seconds=3 * cell.busy_seconds) for cell in build_ring(4, lambda *_: 1, seed)]
        assert (
            diagnose_links([replace(c, early_bytes=20 * MB, early_busy_seconds=SECONDS) for c in alike]).hot_spots == ()
        )

    @pytest.mark.parametrize("seed", range(10))
    def test_a_link_that_has_become_faster_makes_the_others_no_slower(self, seed: int) -> None:
        now = build_ring(4, lambda *_: 1, seed)
        early = [10 * SECONDS if cell.source == 2 else SECONDS for cell in now]
        cells = zip(now, early, strict=True)
        assert (
            diagnose_links([replace(c, early_bytes=20 * MB, early_busy_seconds=was) for c, was in cells]).hot_spots
            == ()
        )

    def test_a_reverse_direction_that_was_hot_once_leaves_the_direction_open(self) -> None:
        """It is the slower direction itself, which only the newest window shows yet."""

        def slow_later(cell: DelayCell) -> float:
            back = 9.0 if (cell.source, cell.destination) == (2, 1) and cell.age == 0 else 1.0
            return 8.0 if (cell.source, cell.destination) == (1, 2) else back

        cells = [replace(c, busy_seconds=c.busy_seconds * slow_later(c)) for c in build_matrix(6, lambda *_: 1)]
        assert list_places(diagnose_links(cells).hot_spots) == [(SpotKind.PAIR, 1, 2)]

    def test_little_traffic_is_not_evaluated(self) -> None:
        """Single messages wait for their acknowledgments, however fast the link is."""
        quiet = [DelayCell(5, 6, age, MB // 2, 4.0) for age in range(3)]
        idle = [DelayCell(6, 5, age, 9 * MB, 0.004) for age in range(3)]
        found = diagnose_links(build_matrix(4, lambda *_: 1) + quiet + idle)
        assert found.hot_spots == ()
        assert found.cells == 13, "the fast one counts, however coarse its time"

    def test_traffic_that_hardly_progresses_is_evaluated_nevertheless(self) -> None:
        crawling = [replace(c, acked_bytes=2 * MB, busy_seconds=4.9) for c in build_slow_cell()]
        others = [c for c in build_matrix(4, lambda *_: 1) if (c.source, c.destination) != (1, 2)]
        assert list_places(diagnose_links(others + crawling).hot_spots) == [(SpotKind.LINK, 1, 2)]

    def test_classes_of_links_are_evaluated_separately(self) -> None:
        def is_far(source: int, destination: int) -> bool:
            return source // 4 != destination // 4

        cells = [replace(c, same_node=not is_far(c.source, c.destination)) for c in build_matrix(8, lambda *_: 1)]
        slower = [replace(c, busy_seconds=c.busy_seconds * (1 if c.same_node else 8)) for c in cells]
        assert diagnose_links(slower).hot_spots == (), "between nodes all is slower, and no fault"

    def test_flows_of_nccl_are_evaluated_separately(self) -> None:
        """An InfiniBand's 20 GB/s next to what a few ranks send over sockets."""
        fast = build_matrix(6, lambda s, d: 4 if (s, d) == (1, 2) else 1)
        of_nccl = [replace(c, acked_bytes=200 * c.acked_bytes, counted_by_nccl=True) for c in fast]
        sockets = [
            replace(c, source=c.source + 6, destination=c.destination + 6) for c in build_matrix(3, lambda *_: 1)
        ]
        (spot,) = diagnose_links(of_nccl + sockets).hot_spots
        assert list_places([spot]) == [(SpotKind.LINK, 1, 2)]
        assert "MB/s while a channel of NCCL is busy" in describe_hot_spot(spot)

    def test_nccl_counts_no_ticks(self) -> None:
        short = DelayCell(0, 1, 0, 20 * MB, 0.001)
        assert short.bytes_per_second == 1_000 * MB, "all that fits into five ticks of the kernel's"
        assert replace(short, counted_by_nccl=True).bytes_per_second == 20_000 * MB

    def test_rows_and_columns_have_ratios(self) -> None:
        found = diagnose_links(build_matrix(6, lambda s, _: 3 if s == 1 else 1))
        assert found.row_ratio[1] == pytest.approx(3, rel=0.3)
        assert found.row_ratio[0] == pytest.approx(1, rel=0.3)
        assert set(found.column_ratio) == set(range(6))
        assert diagnose_links(build_ring(6, lambda *_: 1)).row_ratio == {}, "a ring has none that could be computed"

    def test_an_empty_matrix_has_no_result(self) -> None:
        assert not diagnose_links([]).is_known
        assert diagnose_links([DelayCell(0, 1, 0, 20 * MB, 1.0)]).hot_spots == (), "with nothing to compare with"

    @pytest.mark.parametrize(
        ("cells", "place", "seconds"),
        [
            (build_ring(1024, lambda s, _: 5 if s == 700 else 1), (SpotKind.PAIR, 700, 701), 0.2),
            (build_matrix(128, lambda s, _: 5 if s == 70 else 1), (SpotKind.SENDER, 70, None), 2.0),
        ],
        ids=["ring of 1,024", "all pairs of 128"],
    )
    def test_many_workers_take_little_time(
        self, cells: list[DelayCell], place: tuple[SpotKind, int | None, int | None], seconds: float
    ) -> None:
        began = time.process_time()
        assert list_places(diagnose_links(cells).hot_spots) == [place]
        assert time.process_time() - began < seconds


def build_slow_cell() -> list[DelayCell]:
    return [c for c in build_matrix(4, lambda *_: 1) if (c.source, c.destination) == (1, 2)]


def build_ends(worker: str, *links: LinkWindow) -> Evidence:
    return Evidence("why", worker, 1, links=links)


def build_end(local: str, remote: str, rank: int | None, **changes: Any) -> LinkWindow:
    return replace(LinkWindow(local, remote, rank, 0, 5.0, 20 * MB, 0.2), **changes)


def build_flow(place: int, peer: int, **changes: Any) -> FlowWindow:
    """Of rank 10 + place."""
    return replace(FlowWindow(0xA1, place, peer, 10 + place, 0, 20 * MB, 0.2), **changes)


def build_flows(worker: str, *evidence: FlowWindow) -> Evidence:
    return Evidence("why", worker, 1, flows=evidence)


class TestJoinFlows:
    def test_places_in_a_communicator_are_mapped_to_the_reported_ranks(self) -> None:
        silent = build_flow(2, 0, sent_bytes=0, network_seconds=0.0)
        evidence = [
            build_flows("w0", build_flow(0, 1), build_flow(0, 2, age=1)),
            build_flows("w1", build_flow(1, 0, sent_bytes=MB)),
            build_flows("w2", silent),
        ]
        cells, unknown = join_link_ends(evidence, {"w0": "n", "w1": "n"})
        assert unknown == 0
        assert {(c.source, c.destination, c.age, c.acked_bytes, c.same_node) for c in cells} == {
            (10, 11, 0, 20 * MB, True),
            (10, 12, 1, 20 * MB, False),
            (11, 10, 0, MB, True),
        }, "a rank that has sent nothing reports only its place"
        assert all(cell.counted_by_nccl for cell in cells)

    def test_communicators_of_a_pair_are_one_cell(self) -> None:
        other = {"communicator": 0xB2}
        evidence = [
            build_flows("w0", build_flow(0, 1), build_flow(0, 1, **other)),
            build_flows("w1", build_flow(1, 0), build_flow(1, 0, **other)),
        ]
        cells, _ = join_link_ends(evidence)
        assert [(c.acked_bytes, c.busy_seconds) for c in cells] == [(40 * MB, 0.4)] * 2

    def test_a_peer_that_reports_nothing_is_unknown(self) -> None:
        assert join_link_ends([build_flows("w0", build_flow(0, 1))]) == ([], 1)
        elsewhere = build_flow(1, 0, communicator=0xB2)
        assert join_link_ends([build_flows("w0", build_flow(0, 1)), build_flows("w1", elsewhere)]) == ([], 2)

    def test_a_place_that_two_ranks_claim_belongs_to_neither(self) -> None:
        liar = build_flow(1, 0, rank=12, network_seconds=5.0)
        evidence = [build_flows("w0", build_flow(0, 1)), build_flows("w1", build_flow(1, 0)), build_flows("w2", liar)]
        assert join_link_ends(evidence) == ([], 2)

    @pytest.mark.parametrize(("over_sockets", "by_nccl"), [(20 * MB, False), (11 * MB, False), (9 * MB, True)])
    def test_traffic_in_the_kernels_counters_is_not_counted_twice(self, over_sockets: int, by_nccl: bool) -> None:
        """NCCL over InfiniBand has a few connections between the same ranks, too."""
        a, b = "10.0.0.1:4000", "10.0.0.2:5000"
        one = replace(build_flows("w0", build_flow(0, 1)), links=(build_end(a, b, 10, acked_bytes=over_sockets),))
        other = replace(build_flows("w1", build_flow(1, 0)), links=(build_end(b, a, 11, acked_bytes=over_sockets),))
        cells, _ = join_link_ends([one, other])
        assert {cell.counted_by_nccl for cell in cells} == {False, by_nccl}
        assert len(cells) == (4 if by_nccl else 2)

    @pytest.mark.parametrize("field", ["communicator", "place", "peer", "rank", "age", "sent_bytes", "network_seconds"])
    def test_hostile_figures_are_rejected_by_name(self, field: str) -> None:
        sent = build_flows("w0", build_flow(0, 1)).to_json()
        sent["flows"][0][field] = -1
        with pytest.raises(InputError, match=rf"flows\[0\]\.{field}"):
            Evidence.from_json(sent)


class TestJoin:
    def test_both_ends_make_two_cells(self) -> None:
        a, b = "10.0.0.1:4000", "10.0.0.2:5000"
        cells, unknown = join_link_ends(
            [build_ends("w0", build_end(a, b, 0)), build_ends("w1", build_end(b, a, 1, acked_bytes=8 * MB))]
        )
        assert unknown == 0
        assert {(c.source, c.destination, c.acked_bytes) for c in cells} == {(0, 1, 20 * MB), (1, 0, 8 * MB)}

    def test_several_connections_of_a_pair_are_one_cell(self) -> None:
        pairs = [(f"10.0.0.1:{4000 + i}", "10.0.0.2:5000") for i in range(3)]
        cells, _ = join_link_ends(
            [
                build_ends("w0", *(build_end(a, b, 0) for a, b in pairs)),
                build_ends("w1", *(build_end(b, a, 1) for a, b in pairs)),
            ]
        )
        assert {(c.source, c.acked_bytes) for c in cells} == {(0, 60 * MB), (1, 60 * MB)}
        assert all(cell.busy_seconds == pytest.approx(0.6) for cell in cells)

    def test_windows_stay_separate_and_an_end_that_was_quiet_in_one_still_names_its_rank(self) -> None:
        a, b = "10.0.0.1:4000", "10.0.0.2:5000"
        cells, _ = join_link_ends(
            [build_ends("w0", build_end(a, b, 0), build_end(a, b, 0, age=1)), build_ends("w1", build_end(b, a, 1))]
        )
        assert {(c.source, c.age) for c in cells} == {(0, 0), (0, 1), (1, 0)}

    def test_translated_addresses_are_unknown(self) -> None:
        seen = [
            build_ends("w0", build_end("10.0.0.1:4000", "10.96.0.9:80", 0)),
            build_ends("w1", build_end("10.0.0.2:5000", "10.0.0.1:4000", 1)),
        ]
        assert join_link_ends(seen) == ([], 2)

    def test_a_proxy_in_each_pod_is_unknown(self) -> None:
        seen = [build_ends(f"w{i}", build_end("127.0.0.1:4000", "127.0.0.1:15001", i)) for i in range(2)]
        assert join_link_ends(seen) == ([], 2), "loopback addresses are those of one pod each"

    def test_two_ranks_of_one_worker_meet_on_its_loopback(self) -> None:
        a, b = "127.0.0.1:4000", "127.0.0.1:5000"
        (one, other), unknown = join_link_ends([build_ends("w0", build_end(a, b, 0), build_end(b, a, 1))])
        assert (unknown, one.same_node, other.same_node) == (0, True, True)

    def test_an_end_that_two_ranks_claim_belongs_to_neither(self) -> None:
        a, b = "10.0.0.1:4000", "10.0.0.2:5000"
        liar = build_ends("w2", build_end(b, a, 2, busy_seconds=5.0))
        cells, unknown = join_link_ends(
            [build_ends("w0", build_end(a, b, 0)), build_ends("w1", build_end(b, a, 1)), liar]
        )
        assert (cells, unknown) == ([], 2)

    def test_an_end_of_no_rank_is_unknown(self) -> None:
        a, b = "10.0.0.1:4000", "10.0.0.2:5000"
        assert join_link_ends([build_ends("w0", build_end(a, b, None)), build_ends("w1", build_end(b, a, 1))]) == (
            [],
            2,
        )

    def test_ranks_on_one_node_are_marked(self) -> None:
        a, b = "10.0.0.1:4000", "10.0.0.2:5000"
        seen = [build_ends("w0", build_end(a, b, 0)), build_ends("w1", build_end(b, a, 1))]
        assert all(cell.same_node for cell in join_link_ends(seen, {"w0": "n", "w1": "n"})[0])
        assert not any(cell.same_node for cell in join_link_ends(seen, {"w0": "n", "w1": "m"})[0])
        assert not any(cell.same_node for cell in join_link_ends(seen)[0])

    @pytest.mark.parametrize("field", ["acked_bytes", "busy_seconds", "age", "unsent_bytes"])
    def test_hostile_figures_are_rejected_by_name(self, field: str) -> None:
        sent = build_ends("w0", build_end("10.0.0.1:4000", "10.0.0.2:5000", 0)).to_json()
        sent["links"][0][field] = -1
        with pytest.raises(InputError, match=rf"links\[0\]\.{field}"):
            Evidence.from_json(sent)
