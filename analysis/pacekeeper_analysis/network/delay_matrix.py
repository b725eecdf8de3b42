"""Finds slow links between ranks, from the kernel's counters of connections and NCCL's counters of transfers.

    cells, unknown = join_link_ends(evidence)    # one per direction of two ranks and window of some seconds
    view = diagnose_links(cells, unknown)        # the delay matrix, and its hot spots
    sort_cells_by_ratio(cells)                   # all cells, for people

Delay matrix: D[s, d] = log(busy seconds per MB that s sent to d), of cells with at least 8 MB (slow ones: 1 MB). Each
class of link has its own matrix: on one node or between nodes, counted by the kernel or by NCCL. Median polish, D = m +
r_s + c_d + e_sd, separates the effects of a sender, a receiver and one link (Tukey 1977, as in C4D). A hot spot takes
1.5 × the usual time and more than five robust standard deviations (or 4 × the usual) in two of the last three windows.

Small messages take long per MB. So each cell counts relative to its own first windows, if the sidecars still have them.
(C4D compares absolute values of rings in which all links carry the same.)

A connection is busy until its data has been acknowledged, and acknowledgements wait in the queue of a slow reverse
direction. So of a spot and its reverse direction only the slower one is reported.

A ring has one cell per row and column, so sender, receiver and link cannot be separated there: `kind` is PAIR, and a
probe decides.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..protocol.reports import Evidence

MIN_CELL_BYTES, MIN_SLOW_CELL_BYTES, MIN_SLOW_CELL_BUSY_SECONDS = 8_000_000, 1_000_000, 0.5
"""Smallest traffic of a cell in a window. The second limit applies if the cell was busy for at least the third value.

Less traffic shows single messages, not a link.
"""
MIN_COUNTED_SECONDS, MIN_COUNTED_BY_NCCL_SECONDS = 0.02, 20e-6
"""Resolution of busy time: the kernel counts it in ticks of 4 ms, the NCCL plugin in microseconds."""
MIN_HOT_BUSY_SECONDS = 0.3
"""Busy time in a window of five seconds from which on a cell can be hot.

A cell with less makes steps at most 6 % longer, and its time is coarse.
"""
MIN_HOT_RATIO = 1.5
MIN_HOT_SIGMAS = 5.0
CERTAINLY_HOT_RATIO = 4.0
"""Multiple of the usual time that is hot at any spread: the spread of a few cells is itself uncertain."""
MIN_DELAY_SIGMA = 0.08
"""Smallest standard deviation of D. Equal links differ by this much from second to second by chance."""
MAX_SAME_PAIR_RATIO = 2.0
"""Ratio between a link and its reverse direction below which both could be the cause."""
MIN_HOT_WINDOWS = 2
MIN_CELLS_PER_LINE = 3
"""Number of cells from which on a row (a column) has its own effect, separate from its cells."""
USUAL_DELAY_QUANTILE = 0.25
"""Quantile of delays that counts as usual if each cell is relative to its own first windows.

One slow side of a ring of four affects half of its cells: those that it sends, and those that it acknowledges.
"""
POLISH_ROUNDS = 4
"""Rounds of median polish. After these the residuals hardly change."""
MAX_HOT_SPOTS_COMPARED = 256
"""Upper limit of hot spots that are compared with each other."""
MAX_HOT_SPOTS_REPORTED = 8
"""Upper limit of reported hot spots, hottest first."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SpotKind(StrEnum):
    """The cause that a hot spot indicates."""

    LINK = "Link"  # one cell: the other cells of its row and column are normal
    SENDER = "Sender"  # a row: everything that a rank sends
    RECEIVER = "Receiver"  # a column: everything that a rank receives
    PAIR = "Pair"  # one of these: the rank has no other cell to decide by


_CELL_KINDS = frozenset({SpotKind.LINK, SpotKind.PAIR})


@dataclass(frozen=True)
class DelayCell:
    """The traffic from one rank to another in one window."""

    source: int
    destination: int
    age: int  # 0 is the newest window
    acked_bytes: int
    busy_seconds: float
    receiver_limited_seconds: float = 0.0
    retransmitted_bytes: int = 0
    same_node: bool = False
    early_bytes: int | None = None  # in a fast one of its first windows; None: not known
    early_busy_seconds: float = 0.0
    counted_by_nccl: bool = False  # then its busy time is the sum over channels

    @property
    def delay(self) -> float:
        """log(busy seconds per MB)."""
        return math.log(1e6 / self.bytes_per_second)

    @property
    def early_delay(self) -> float:
        assert self.early_bytes is not None
        return math.log(1e6 * max(self.early_busy_seconds, MIN_COUNTED_SECONDS) / self.early_bytes)

    @property
    def bytes_per_second(self) -> float:
        """The rate while it was busy."""
        resolution = MIN_COUNTED_BY_NCCL_SECONDS if self.counted_by_nccl else MIN_COUNTED_SECONDS
        return self.acked_bytes / max(self.busy_seconds, resolution)


@dataclass(frozen=True)
class HotSpot:
    """A spot of the delay matrix that is slower than the others."""

    kind: SpotKind
    source: int | None  # rank; None: all ranks
    destination: int | None
    ratio: float  # time per byte over the usual
    windows: int  # in which it was hot
    bytes_per_second: float  # in the newest of them
    usual_bytes_per_second: float
    pairs: tuple[tuple[int, int], ...] = ()  # source, destination of its hot cells, hottest first
    counted_by_nccl: bool = False  # then its rate is that of one channel


@dataclass(frozen=True)
class LinkDiagnosis:
    """What a job's connections, and its transfers over NCCL, show."""

    hot_spots: tuple[HotSpot, ...] = ()  # hottest first
    cells: int = 0  # with enough traffic to be judged, in the newest window
    unknown_ends: int = (
        0  # ends whose other end was not reported: a mesh, address translation, a peer without an answer
    )
    row_ratio: Mapping[int, float] = field(default_factory=dict)  # rank → its side's time per byte over the usual
    column_ratio: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return self.cells > 0


def diagnose_links(cells: Sequence[DelayCell], unknown_ends: int = 0) -> LinkDiagnosis:
    """Diagnose the links. `unknown_ends` is the number of ends that could not be joined."""
    by_window: dict[int, list[DelayCell]] = defaultdict(list)
    for cell in cells:
        if _has_enough_traffic(cell):
            by_window[cell.age].append(cell)
    polished = {
        age: [_polish_matrix(group) for group in _group_by_link_class(window_cells)]
        for age, window_cells in sorted(by_window.items())
    }
    newest = [matrix for age in list(polished)[:1] for matrix in polished[age]]
    rows: dict[int, float] = {}
    columns: dict[int, float] = {}
    for matrix in newest:
        _keep_largest(rows, matrix.sources, matrix.rows)
        _keep_largest(columns, matrix.destinations, matrix.columns)
    return LinkDiagnosis(
        hot_spots=_merge_hot_spots(polished),
        cells=len(by_window[min(by_window)]) if by_window else 0,
        unknown_ends=unknown_ends,
        row_ratio=rows,
        column_ratio=columns,
    )


def _has_enough_traffic(cell: DelayCell) -> bool:
    return cell.acked_bytes >= (
        MIN_SLOW_CELL_BYTES if cell.busy_seconds >= MIN_SLOW_CELL_BUSY_SECONDS else MIN_CELL_BYTES
    )


def sort_cells_by_ratio(cells: Sequence[DelayCell]) -> list[tuple[DelayCell, float | None]]:
    """Return each pair's newest window with traffic, and its time per byte over the usual, the slowest first.

    The ratio is None if the cell has carried too little, or too few cells of its class exist.
    """
    newest: dict[tuple[int, int, bool], DelayCell] = {}
    for cell in sorted(cells, key=lambda cell: -cell.age):
        if cell.acked_bytes:
            newest[cell.source, cell.destination, cell.counted_by_nccl] = cell
    ratios: dict[DelayCell, float] = {}
    for matrix in map(
        _polish_matrix, _group_by_link_class([cell for cell in newest.values() if _has_enough_traffic(cell)])
    ):
        for cell, usual in zip(matrix.cells, matrix.usual.tolist(), strict=True):
            ratios[cell] = usual / cell.bytes_per_second
    return sorted(((cell, ratios.get(cell)) for cell in newest.values()), key=lambda item: -(item[1] or 0.0))


def join_link_ends(evidence: Sequence[Evidence], nodes: Mapping[str, str] | None = None) -> tuple[list[DelayCell], int]:
    """Join both ends of each connection and flow. Returns (cells, number of ends without another end).

    `nodes` maps each worker to its node. Two ends of a connection match if each has the other's address and port. If
    something between them changes addresses, no cell results. Ends of a flow are places in a communicator, and each
    rank reports its own. An end that two ranks claim belongs to neither.

    Traffic of NCCL over sockets appears in both sources. Then the kernel's counters are used.
    """
    kernel_cells, unknown_to_kernel = _build_cells(_list_connection_ends(evidence), nodes or {}, by_nccl=False)
    nccl_cells, unknown_to_nccl = _build_cells(_list_flow_ends(evidence), nodes or {}, by_nccl=True)
    kernel_bytes, nccl_bytes = _sum_bytes_by_pair(kernel_cells), _sum_bytes_by_pair(nccl_cells)
    without_sockets = [
        cell
        for cell in nccl_cells
        if nccl_bytes[cell.source, cell.destination] > 2 * kernel_bytes[cell.source, cell.destination]
    ]
    return kernel_cells + without_sockets, unknown_to_kernel + unknown_to_nccl


class _LinkEnd(NamedTuple):
    """One rank's report of a connection or flow, which has two ends."""

    worker: str
    rank: int | None  # None: not owned by a rank
    here: Hashable  # name of this end, common to both ranks
    there: Hashable  # name of the other end
    age: int
    sums: tuple[float, float, float, float, float, float]  # from DelayCell.acked_bytes to early_busy_seconds


def _list_connection_ends(evidence: Sequence[Evidence]) -> Iterable[_LinkEnd]:
    for report in evidence:
        for end in report.links:
            here, there = (
                _name_end(report.worker, end.local, end.remote),
                _name_end(report.worker, end.remote, end.local),
            )
            counted = (end.acked_bytes, end.busy_seconds, end.receiver_limited_seconds, end.retransmitted_bytes)
            sums = (*counted, end.early_bytes or 0, end.early_busy_seconds or 0.0)
            yield _LinkEnd(report.worker, end.rank, here, there, end.age, sums)


def _list_flow_ends(evidence: Sequence[Evidence]) -> Iterable[_LinkEnd]:
    for report in evidence:
        for flow in report.flows:
            here, there = (flow.communicator, flow.place), (flow.communicator, flow.peer)
            sums = (flow.sent_bytes, flow.network_seconds, 0.0, 0, 0, 0.0)
            yield _LinkEnd(report.worker, flow.rank, here, there, flow.age, sums)


def _build_cells(
    reported: Iterable[_LinkEnd], nodes: Mapping[str, str], *, by_nccl: bool
) -> tuple[list[DelayCell], int]:
    ends, owners = list(reported), defaultdict[Hashable, set[tuple[int, str]]](set)
    for end in ends:
        if end.rank is not None:
            owners[end.here].add((end.rank, end.worker))
    sums: dict[tuple[int, int, int], list[float]] = defaultdict(lambda: [0.0] * 6)
    same_node: dict[tuple[int, int], bool] = {}
    unknown: set[Hashable] = set()
    for end in ends:
        peer_owners = owners.get(end.there, set())
        if end.rank is None or len(owners[end.here]) != 1 or len(peer_owners) != 1:
            unknown.add((end.here, end.there))
            continue
        ((rank, worker),) = peer_owners
        if rank != end.rank:
            cell = sums[end.rank, rank, end.age]
            cell[:] = map(add, cell, end.sums)
            same_node[end.rank, rank] = _is_same_node(end.worker, worker, nodes)
    cells = [
        DelayCell(
            source,
            destination,
            age,
            int(acked),
            busy,
            limited,
            int(retransmitted),
            same_node[source, destination],
            int(early_bytes) or None,
            early_busy,
            by_nccl,
        )
        for (source, destination, age), (acked, busy, limited, retransmitted, early_bytes, early_busy) in sums.items()
    ]
    return cells, len(unknown)


def _sum_bytes_by_pair(cells: Iterable[DelayCell]) -> Counter[tuple[int, int]]:
    totals = Counter[tuple[int, int]]()
    for cell in cells:
        totals[cell.source, cell.destination] += cell.acked_bytes
    return totals


def describe_hot_spot(spot: HotSpot) -> str:
    """Describe a hot spot for people."""
    where = {
        SpotKind.LINK: f"link {spot.source} → {spot.destination}",
        SpotKind.SENDER: f"all that rank {spot.source} sends",
        SpotKind.RECEIVER: f"all that rank {spot.destination} receives",
        SpotKind.PAIR: f"from rank {spot.source} to rank {spot.destination}",
    }[spot.kind]
    busy = "while a channel of NCCL is busy" if spot.counted_by_nccl else "while busy"
    return (
        f"{where}: {_format_rate(spot.bytes_per_second)} {busy}, the others "
        f"{_format_rate(spot.usual_bytes_per_second)} "
        f"({spot.ratio:.1f} × the time per byte, in {spot.windows} windows)"
    )


@dataclass(frozen=True)
class _DelayMatrix:
    """The cells of one class in one window, decomposed by median polish.

    `delay` = effect of its row + effect of its column + residual, relative to the common level.
    """

    cells: Sequence[DelayCell]
    delay: Floats  # relative to the job's first windows, if known
    usual: Floats  # bytes per second of each cell at the common delay
    sources: Ints  # ranks with a row
    destinations: Ints
    row: Ints  # position of each cell in `sources`
    column: Ints
    rows: Floats  # effect of each row, NaN if it has too few cells
    columns: Floats
    residual: Floats
    usual_quantile: float  # of residuals


def _polish_matrix(cells: Sequence[DelayCell]) -> _DelayMatrix:
    with_early = [cell for cell in cells if cell.early_bytes is not None]
    cells = with_early if 2 * len(with_early) >= len(cells) and len(with_early) >= MIN_CELLS_PER_LINE else cells
    early = np.array([cell.early_delay if cells is with_early else 0.0 for cell in cells])
    delay = np.array([cell.delay for cell in cells]) - early
    sources, row = np.unique([cell.source for cell in cells], return_inverse=True)
    destinations, column = np.unique([cell.destination for cell in cells], return_inverse=True)
    rows_known = np.bincount(row) >= MIN_CELLS_PER_LINE
    columns_known = np.bincount(column) >= MIN_CELLS_PER_LINE
    rows, columns = np.zeros(len(sources)), np.zeros(len(destinations))
    usual_quantile = USUAL_DELAY_QUANTILE if cells is with_early else 0.5
    common_delay = float(np.quantile(delay, usual_quantile))
    residual = delay - common_delay
    for _ in range(POLISH_ROUNDS):
        step = np.where(rows_known, _compute_medians(residual, row, len(sources)), 0.0)
        rows += step
        residual = residual - step[row]
        step = np.where(columns_known, _compute_medians(residual, column, len(destinations)), 0.0)
        columns += step
        residual = residual - step[column]
    # The common part of all rows (columns) belongs to the middle.
    for effects, is_known in ((rows, rows_known), (columns, columns_known)):
        if is_known.all():
            shift = float(np.median(effects))
            effects -= shift
            common_delay += shift
    rows = np.where(rows_known, rows, np.nan)
    columns = np.where(columns_known, columns, np.nan)
    usual = 1e6 / np.exp(early + common_delay)
    return _DelayMatrix(
        cells, delay, usual, sources, destinations, row, column, rows, columns, residual, usual_quantile
    )


def _merge_hot_spots(polished: Mapping[int, Sequence[_DelayMatrix]]) -> tuple[HotSpot, ...]:
    """Merge the hot spots of single windows: a spot must be hot in two of them.

    A job with only one window so far has none.
    """
    seen: dict[tuple[bool, int | None, int | None], list[HotSpot]] = defaultdict(list)
    for _, matrices in sorted(polished.items()):
        for matrix in matrices:
            for spot in _find_hot_spots(matrix):
                seen[spot.kind in _CELL_KINDS, spot.source, spot.destination].append(spot)
    confirmed = [
        replace(spots[0], ratio=float(np.median([spot.ratio for spot in spots])), windows=len(spots))
        for spots in seen.values()
        if len(spots) >= MIN_HOT_WINDOWS
    ]
    confirmed = sorted(confirmed, key=lambda spot: -spot.ratio)[:MAX_HOT_SPOTS_COMPARED]
    confirmed.sort(key=lambda spot: spot.bytes_per_second)
    causes = [
        spot
        for position, spot in enumerate(confirmed)
        if not any(_is_acknowledgement_queue(spot, cause) for cause in confirmed[:position])
    ]
    ratios = {position[1:]: max(spot.ratio for spot in spots) for position, spots in seen.items()}
    causes = [
        # If both directions are about equally hot, busy times alone do not show which one delays the other.
        replace(spot, kind=SpotKind.PAIR)
        if spot.kind is SpotKind.LINK
        and MAX_SAME_PAIR_RATIO * ratios.get((spot.destination, spot.source), 0.0) >= spot.ratio
        else spot
        for spot in causes
    ]
    return tuple(sorted(causes, key=lambda spot: -spot.ratio)[:MAX_HOT_SPOTS_REPORTED])


def _is_acknowledgement_queue(spot: HotSpot, cause: HotSpot) -> bool:
    """Return whether `spot` is hot only because its acknowledgements wait in the queue of a slower one.

    The cause of a pair may be the source's or the destination's side, which carries the acknowledgements of other
    pairs.
    """
    by_source, by_destination = (
        _may_share_rank(spot.destination, cause.source),
        _may_share_rank(spot.source, cause.destination),
    )
    return by_source or by_destination if cause.kind is SpotKind.PAIR else by_source and by_destination


def _may_share_rank(rank: int | None, other_rank: int | None) -> bool:
    return rank == other_rank or None in (rank, other_rank)


def _find_hot_spots(matrix: _DelayMatrix) -> Iterable[HotSpot]:
    """Find the hot spots of one window and class.

    Cells that their row or column explains are not reported themselves.
    """
    busy = np.array([cell.busy_seconds >= MIN_HOT_BUSY_SECONDS for cell in matrix.cells])
    hot = _is_hot(matrix.residual, matrix.usual_quantile) & busy
    row_is_cool = np.bincount(matrix.row, weights=~hot) > 0
    column_is_cool = np.bincount(matrix.column, weights=~hot) > 0
    rows = _find_hot_lines(matrix.rows, matrix.residual, matrix.row, hot & column_is_cool[matrix.column], busy)
    columns = _find_hot_lines(matrix.columns, matrix.residual, matrix.column, hot & row_is_cool[matrix.row], busy)
    for line, effect in rows:
        yield _build_line_spot(matrix, SpotKind.SENDER, int(matrix.sources[line]), matrix.row == line, effect)
        hot &= matrix.row != line
    for line, effect in columns:
        yield _build_line_spot(matrix, SpotKind.RECEIVER, int(matrix.destinations[line]), matrix.column == line, effect)
        hot &= matrix.column != line
    for position in np.flatnonzero(hot).tolist():
        cell = matrix.cells[position]
        is_isolated = row_is_cool[matrix.row[position]] and column_is_cool[matrix.column[position]]
        yield HotSpot(
            kind=SpotKind.LINK if is_isolated else SpotKind.PAIR,
            source=cell.source,
            destination=cell.destination,
            ratio=math.exp(matrix.residual[position]),
            windows=1,
            bytes_per_second=cell.bytes_per_second,
            usual_bytes_per_second=float(matrix.usual[position]),
            pairs=((cell.source, cell.destination),),
            counted_by_nccl=cell.counted_by_nccl,
        )


def _find_hot_lines(
    effects: Floats, residual: Floats, line: Ints, hot: NDArray[np.bool_], busy: NDArray[np.bool_]
) -> list[tuple[int, float]]:
    """Return rows (or columns) that are slow as a whole, and their effects.

    One with two cells has no effect of its own: it is slow if both cells are. `hot` are cells that no crossing line
    explains.
    """
    has_effect = np.isfinite(effects)
    slow = np.zeros(len(effects), bool)
    slow[has_effect] = _is_hot(effects[has_effect])
    slow &= np.bincount(line, weights=busy) > 1  # the coarse times of nearly idle cells must not hide a slow cell
    size, hot_cells = np.bincount(line), np.bincount(line, weights=hot)
    pair = ~has_effect & (size == MIN_CELLS_PER_LINE - 1) & (hot_cells == size)
    effects = np.where(has_effect, effects, _compute_medians(residual, line, len(effects)))
    return [(int(position), float(effects[position])) for position in np.flatnonzero(slow | pair)]


def _build_line_spot(
    matrix: _DelayMatrix, kind: SpotKind, rank: int, in_line: NDArray[np.bool_], effect: float
) -> HotSpot:
    positions = np.flatnonzero(in_line)
    cells = [matrix.cells[position] for position in positions[np.argsort(-matrix.delay[positions], kind="stable")]]
    return HotSpot(
        kind=kind,
        source=rank if kind is SpotKind.SENDER else None,
        destination=rank if kind is SpotKind.RECEIVER else None,
        ratio=math.exp(effect),
        windows=1,
        bytes_per_second=float(sum(cell.acked_bytes for cell in cells) / sum(cell.busy_seconds for cell in cells)),
        usual_bytes_per_second=float(np.median(matrix.usual[positions])),
        pairs=tuple((cell.source, cell.destination) for cell in cells[:MAX_HOT_SPOTS_REPORTED]),
        counted_by_nccl=cells[0].counted_by_nccl,
    )


def _is_hot(values: Floats, usual_quantile: float = 0.5) -> NDArray[np.bool_]:
    """Return which values are far above the usual, by a spread that hot values do not widen."""
    if not len(values):
        return np.zeros(0, bool)
    above = values - np.quantile(values, usual_quantile)
    sigma = max(MIN_DELAY_SIGMA, 1.4826 * float(np.median(np.abs(above))))
    return (above > math.log(MIN_HOT_RATIO)) & (above > min(MIN_HOT_SIGMAS * sigma, math.log(CERTAINLY_HOT_RATIO)))


def _compute_medians(values: Floats, group: Ints, groups: int) -> Floats:
    """Return the median of each group. Each group has at least one value."""
    order = np.lexsort((values, group))
    counts = np.bincount(group, minlength=groups)
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    ordered = values[order]
    return np.asarray((ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2)


def _group_by_link_class(cells: Sequence[DelayCell]) -> list[list[DelayCell]]:
    """Group cells by class of link. Leave out classes with too few cells to compare."""
    by_class = defaultdict[tuple[bool, bool], list[DelayCell]](list)
    for cell in cells:
        by_class[cell.same_node, cell.counted_by_nccl].append(cell)
    return [group for group in by_class.values() if len(group) >= MIN_CELLS_PER_LINE]


def _keep_largest(ratios: dict[int, float], ranks: Ints, effects: Floats) -> None:
    for rank, effect in zip(ranks.tolist(), effects.tolist(), strict=True):
        if not math.isnan(effect):
            ratios[rank] = max(math.exp(effect), ratios.get(rank, 0.0))


def _name_end(worker: str, local: str, remote: str) -> tuple[str, str, str]:
    """Return a name of an end. Loopback addresses are only meaningful inside one pod."""
    is_loopback = local.startswith(("127.", "[::1]"))
    return worker if is_loopback else "", local, remote


def _is_same_node(worker: str, peer: str, nodes: Mapping[str, str]) -> bool:
    return worker == peer or (bool(nodes.get(worker)) and nodes.get(worker) == nodes.get(peer))


def _format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.0f} MB/s"
