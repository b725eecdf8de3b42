"""Which link between ranks is slow, from the kernel's counters of their connections and NCCL's of its transfers.

    cells = join(evidence)                      # one a direction of two ranks and window of some seconds
    view = judge(cells)                         # the delay matrix, and what of it is hot
    sort_cells_by_ratio(cells)                             # all of it, for people

Delay matrix: D[s, d] = log(busy seconds for each MB that s sent to d), of cells with 8 MB at least (slow ones: 1 MB),
for each class of link by itself (on one node, between nodes; counted by the kernel, by NCCL). Median polish,
D = m + r_s + c_d + e_sd, takes apart what belongs to a sender's side, a receiver's and one link (Tukey 1977, as C4D
uses it). Hot is what takes 1.5 × the usual and more than five robust standard deviations (or 4 × the usual) in two of
the last three windows.

Where small messages go, a MB takes long by nature: each cell counts by how many times the time of its own first windows
it takes, where the sidecars still know it (C4D compares cells as they are, of rings that all carry the same).

Busy is a connection until it has been acknowledged, and acknowledgements stand in the queue of what is slow the other
way: of a place and its way back only the slower one is told.
A ring has one cell a row and a column, so these cannot be told apart there: `kind` says PAIR, and a probe decides.
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

from ..reports import Evidence

MIN_CELL_BYTES, MIN_SLOW_CELL_BYTES, MIN_SLOW_CELL_BUSY_SECONDS = 8_000_000, 1_000_000, 0.5
"""That a cell has carried in a window, or that it has needed so long for: less tells of single messages, not of a link.
"""
MIN_COUNTED_SECONDS, MIN_COUNTED_BY_NCCL_SECONDS = 0.02, 20e-6
"""Busy time that is told from less: the kernel counts it in ticks of 4 ms, our plugin for NCCL in microseconds."""
MIN_HOT_BUSY_SECONDS = 0.3
"""Of a window of five: a cell that was busy for less makes steps 6 % longer at most, and its time is coarse."""
MIN_HOT_RATIO = 1.5
MIN_HOT_SIGMAS = 5.0
CERTAINLY_HOT_RATIO = 4.0
"""× the usual is hot whatever the spread: the spread of a few cells is itself a guess."""
MIN_DELAY_SIGMA = 0.08
"""Of D: links alike differ by so much from second to second; less is luck."""
MAX_SAME_PAIR_RATIO = 2.0
"""Of a link and its way back, the slower one takes less than so many times as long."""
MIN_HOT_WINDOWS = 2
MIN_CELLS_PER_LINE = 3
"""Cells that a row (a column) needs before an effect of its own can be told from those of its cells."""
USUAL_DELAY_QUANTILE = 0.25
"""Quantile of delays that is taken for the usual where each counts by its own connection's pace: one slow side of a
ring of four is half of its cells, what it sends and what it acknowledges."""
POLISH_ROUNDS = 4
"""Of median polish; its residuals hardly change any more."""
MAX_HOT_SPOTS_COMPARED = 256
"""Hot spots of which each is held against each other."""
MAX_HOT_SPOTS_REPORTED = 8
"""Hot spots that are told at most, hottest first."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SpotKind(StrEnum):
    """What a hot spot is a fault of."""

    LINK = "Link"  # one cell: other cells of its row, and of its column, are as usual
    SENDER = "Sender"  # a row: all that a rank sends
    RECEIVER = "Receiver"  # a column: all that a rank receives
    PAIR = "Pair"  # one of these: the rank has no other cell to tell by


_CELL_KINDS = frozenset({SpotKind.LINK, SpotKind.PAIR})


@dataclass(frozen=True)
class DelayCell:
    """What one rank sent to another in one window."""

    source: int
    destination: int
    age: int  # windows ago
    acked_bytes: int
    busy_seconds: float
    receiver_limited_seconds: float = 0.0
    retransmitted_bytes: int = 0
    same_node: bool = False
    early_bytes: int = 0  # in a fast one of its first windows; 0: not known
    early_busy_seconds: float = 0.0
    by_nccl: bool = False  # then its busy time is the sum over channels

    @property
    def delay(self) -> float:
        """log(busy seconds a MB)."""
        return math.log(1e6 / self.bytes_per_second)

    @property
    def early_delay(self) -> float:
        return math.log(1e6 * max(self.early_busy_seconds, MIN_COUNTED_SECONDS) / self.early_bytes)

    @property
    def bytes_per_second(self) -> float:
        """While it was busy."""
        least = MIN_COUNTED_BY_NCCL_SECONDS if self.by_nccl else MIN_COUNTED_SECONDS
        return self.acked_bytes / max(self.busy_seconds, least)


@dataclass(frozen=True)
class HotSpot:
    """A place of the delay matrix that is slower than the others. -1: all ranks."""

    kind: SpotKind
    source: int
    destination: int
    ratio: float  # time for a byte over the usual
    windows: int  # in which it was hot
    bytes_per_second: float  # in the newest of them
    usual_bytes_per_second: float
    pairs: tuple[tuple[int, int], ...] = ()  # source, destination of its hot cells, hottest first
    by_nccl: bool = False  # then its bytes a second are those of one channel


@dataclass(frozen=True)
class LinkDiagnosis:
    """What the connections of a job, and its transfers over NCCL, show."""

    hot: tuple[HotSpot, ...] = ()  # hottest first
    cells: int = 0  # with enough traffic to be judged, in the newest window
    unknown: int = 0  # ends whose other end nobody has told: a mesh, address translation, a peer that did not answer
    row_ratio: Mapping[int, float] = field(default_factory=dict)  # rank → its side's time for a byte over the usual
    column_ratio: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return self.cells > 0


def diagnose_links(cells: Sequence[DelayCell], unknown: int = 0) -> LinkDiagnosis:
    """`unknown`: ends that could not be joined."""
    by_window: dict[int, list[DelayCell]] = defaultdict(list)
    for cell in cells:
        if _has_enough_traffic(cell):
            by_window[cell.age].append(cell)
    polished = {age: [_polish_matrix(group) for group in _group_by_link_class(found)] for age, found in sorted(by_window.items())}
    newest = [matrix for age in list(polished)[:1] for matrix in polished[age]]
    rows: dict[int, float] = {}
    columns: dict[int, float] = {}
    for matrix in newest:
        _keep_largest(rows, matrix.sources, matrix.rows)
        _keep_largest(columns, matrix.destinations, matrix.columns)
    return LinkDiagnosis(
        hot=_merge_hot_spots(polished),
        cells=len(by_window[min(by_window)]) if by_window else 0,
        unknown=unknown,
        row_ratio=rows,
        column_ratio=columns,
    )


def _has_enough_traffic(cell: DelayCell) -> bool:
    return cell.acked_bytes >= (MIN_SLOW_CELL_BYTES if cell.busy_seconds >= MIN_SLOW_CELL_BUSY_SECONDS else MIN_CELL_BYTES)


def sort_cells_by_ratio(cells: Sequence[DelayCell]) -> list[tuple[DelayCell, float | None]]:
    """Each pair's newest window in which it has sent something, with its time for a byte over the usual (None: it has
    carried too little, or too few are alike to say what is usual); the slowest first."""
    newest: dict[tuple[int, int, bool], DelayCell] = {}
    for cell in sorted(cells, key=lambda cell: -cell.age):
        if cell.acked_bytes:
            newest[cell.source, cell.destination, cell.by_nccl] = cell
    ratios: dict[DelayCell, float] = {}
    for matrix in map(_polish_matrix, _group_by_link_class([cell for cell in newest.values() if _has_enough_traffic(cell)])):
        for cell, usual in zip(matrix.cells, matrix.usual.tolist(), strict=True):
            ratios[cell] = usual / cell.bytes_per_second
    return sorted(((cell, ratios.get(cell)) for cell in newest.values()), key=lambda item: -(item[1] or 0.0))


def join_link_ends(evidence: Sequence[Evidence], nodes: Mapping[str, str] | None = None) -> tuple[list[DelayCell], int]:
    """Both ends of every connection and flow put together: (cells, number of ends that have no other end).

    nodes: worker → its node. Ends of a connection fit where each names the other's address and port as its own and its
    peer's: where something in between changes them, nothing is said. Ends of a flow are places in a communicator, of
    which each rank tells its own. An end that two ranks claim is nobody's.

    What NCCL sends over sockets shows in both: then the kernel's counters are taken.
    """
    of_kernel, strangers = _build_cells(_list_connection_ends(evidence), nodes or {}, by_nccl=False)
    of_nccl, lost = _build_cells(_list_flow_ends(evidence), nodes or {}, by_nccl=True)
    by_kernel, by_nccl = _sum_bytes_by_pair(of_kernel), _sum_bytes_by_pair(of_nccl)
    beside_sockets = [
        cell
        for cell in of_nccl
        if by_nccl[cell.source, cell.destination] > 2 * by_kernel[cell.source, cell.destination]
    ]
    return of_kernel + beside_sockets, strangers + lost


class _LinkEnd(NamedTuple):
    """What one rank tells of something that has two ends."""

    worker: str
    rank: int  # -1: nobody's
    here: Hashable  # what both ranks call this end,
    there: Hashable  # and the other one
    age: int
    sums: tuple[float, float, float, float, float, float]  # from Cell.acked_bytes to early_busy_seconds


def _list_connection_ends(evidence: Sequence[Evidence]) -> Iterable[_LinkEnd]:
    for answer in evidence:
        for end in answer.links:
            here, there = _name_end(answer.worker, end.local, end.remote), _name_end(answer.worker, end.remote, end.local)
            counted = (end.acked_bytes, end.busy_seconds, end.receiver_limited_seconds, end.retransmitted_bytes)
            sums = (*counted, end.early_bytes, end.early_busy_seconds)
            yield _LinkEnd(answer.worker, end.rank, here, there, end.age, sums)


def _list_flow_ends(evidence: Sequence[Evidence]) -> Iterable[_LinkEnd]:
    for answer in evidence:
        for flow in answer.flows:
            here, there = (flow.communicator, flow.place), (flow.communicator, flow.peer)
            sums = (flow.sent_bytes, flow.network_seconds, 0.0, 0, 0, 0.0)
            yield _LinkEnd(answer.worker, flow.rank, here, there, flow.age, sums)


def _build_cells(told: Iterable[_LinkEnd], nodes: Mapping[str, str], *, by_nccl: bool) -> tuple[list[DelayCell], int]:
    ends, owners = list(told), defaultdict[Hashable, set[tuple[int, str]]](set)
    for end in ends:
        if end.rank >= 0:
            owners[end.here].add((end.rank, end.worker))
    sums: dict[tuple[int, int, int], list[float]] = defaultdict(lambda: [0.0] * 6)
    near: dict[tuple[int, int], bool] = {}
    unknown: set[Hashable] = set()
    for end in ends:
        there = owners.get(end.there, set())
        if end.rank < 0 or len(owners[end.here]) != 1 or len(there) != 1:
            unknown.add((end.here, end.there))
            continue
        ((rank, worker),) = there
        if rank != end.rank:
            cell = sums[end.rank, rank, end.age]
            cell[:] = map(add, cell, end.sums)
            near[end.rank, rank] = _is_same_node(end.worker, worker, nodes)
    cells = [
        DelayCell(
            source,
            destination,
            age,
            int(acked),
            busy,
            limited,
            int(again),
            near[source, destination],
            int(early),
            first,
            by_nccl,
        )
        for (source, destination, age), (acked, busy, limited, again, early, first) in sums.items()
    ]
    return cells, len(unknown)


def _sum_bytes_by_pair(cells: Iterable[DelayCell]) -> Counter[tuple[int, int]]:
    found = Counter[tuple[int, int]]()
    for cell in cells:
        found[cell.source, cell.destination] += cell.acked_bytes
    return found


def describe_hot_spot(spot: HotSpot) -> str:
    """For people."""
    where = {
        SpotKind.LINK: f"link {spot.source} → {spot.destination}",
        SpotKind.SENDER: f"all that rank {spot.source} sends",
        SpotKind.RECEIVER: f"all that rank {spot.destination} receives",
        SpotKind.PAIR: f"from rank {spot.source} to rank {spot.destination}",
    }[spot.kind]
    busy = "while a channel of NCCL is busy" if spot.by_nccl else "while busy"
    return (
        f"{where}: {_format_rate(spot.bytes_per_second)} {busy}, the others {_format_rate(spot.usual_bytes_per_second)} "
        f"({spot.ratio:.1f} × the time for a byte, in {spot.windows} windows)"
    )


@dataclass(frozen=True)
class _DelayMatrix:
    """The cells of one class in one window, taken apart: `delay` = its row's + its column's + residual, beside what all
    have in common."""

    cells: Sequence[DelayCell]
    delay: Floats  # beyond what it was in the job's first windows, where that is known
    usual: Floats  # bytes a second that each cell would have, if its delay were what all have in common
    sources: Ints  # ranks with a row
    destinations: Ints
    row: Ints  # of each cell, its place in `sources`
    column: Ints
    rows: Floats  # of each row, NaN where it has too few cells to tell
    columns: Floats
    residual: Floats
    usual_quantile: float  # of residuals


def _polish_matrix(cells: Sequence[DelayCell]) -> _DelayMatrix:
    told = [cell for cell in cells if cell.early_bytes]
    cells = told if 2 * len(told) >= len(cells) and len(told) >= MIN_CELLS_PER_LINE else cells
    early = np.array([cell.early_delay if cells is told else 0.0 for cell in cells])
    delay = np.array([cell.delay for cell in cells]) - early
    sources, row = np.unique([cell.source for cell in cells], return_inverse=True)
    destinations, column = np.unique([cell.destination for cell in cells], return_inverse=True)
    rows_known = np.bincount(row) >= MIN_CELLS_PER_LINE
    columns_known = np.bincount(column) >= MIN_CELLS_PER_LINE
    rows, columns = np.zeros(len(sources)), np.zeros(len(destinations))
    usual_quantile = USUAL_DELAY_QUANTILE if cells is told else 0.5
    middle = float(np.quantile(delay, usual_quantile))
    residual = delay - middle
    for _ in range(POLISH_ROUNDS):
        step = np.where(rows_known, _compute_medians(residual, row, len(sources)), 0.0)
        rows += step
        residual = residual - step[row]
        step = np.where(columns_known, _compute_medians(residual, column, len(destinations)), 0.0)
        columns += step
        residual = residual - step[column]
    # What all rows (columns) have in common is the middle's.
    for effects, known in ((rows, rows_known), (columns, columns_known)):
        if known.all():
            shift = float(np.median(effects))
            effects -= shift
            middle += shift
    rows = np.where(rows_known, rows, np.nan)
    columns = np.where(columns_known, columns, np.nan)
    usual = 1e6 / np.exp(early + middle)
    return _DelayMatrix(cells, delay, usual, sources, destinations, row, column, rows, columns, residual, usual_quantile)


def _merge_hot_spots(polished: Mapping[int, Sequence[_DelayMatrix]]) -> tuple[HotSpot, ...]:
    """Those of single windows, put together: the same place has to be hot in two of them (in the only one of a job that
    has no more yet, nothing is)."""
    seen: dict[tuple[bool, int, int], list[HotSpot]] = defaultdict(list)
    for _, matrices in sorted(polished.items()):
        for matrix in matrices:
            for spot in _find_hot_spots(matrix):
                seen[spot.kind in _CELL_KINDS, spot.source, spot.destination].append(spot)
    found = [
        replace(spots[0], ratio=float(np.median([spot.ratio for spot in spots])), windows=len(spots))
        for spots in seen.values()
        if len(spots) >= MIN_HOT_WINDOWS
    ]
    found = sorted(found, key=lambda spot: -spot.ratio)[:MAX_HOT_SPOTS_COMPARED]
    found.sort(key=lambda spot: spot.bytes_per_second)
    causes = [spot for place, spot in enumerate(found) if not any(_is_acknowledgement_queue(spot, cause) for cause in found[:place])]
    ratios = {place[1:]: max(spot.ratio for spot in spots) for place, spots in seen.items()}
    causes = [
        # Which of two ways that are about as hot answers the other one, busy times alone do not tell.
        replace(spot, kind=SpotKind.PAIR)
        if spot.kind is SpotKind.LINK and MAX_SAME_PAIR_RATIO * ratios.get((spot.destination, spot.source), 0.0) >= spot.ratio
        else spot
        for spot in causes
    ]
    return tuple(sorted(causes, key=lambda spot: -spot.ratio)[:MAX_HOT_SPOTS_REPORTED])


def _is_acknowledgement_queue(spot: HotSpot, cause: HotSpot) -> bool:
    """Whether `spot` is hot only because its acknowledgements stand in the queue of a slower one. Behind a pair there
    may be the source's or the destination's side, through which those of other pairs pass."""
    by_source, by_destination = _may_share_rank(spot.destination, cause.source), _may_share_rank(spot.source, cause.destination)
    return by_source or by_destination if cause.kind is SpotKind.PAIR else by_source and by_destination


def _may_share_rank(one: int, other: int) -> bool:
    return one == other or -1 in (one, other)


def _find_hot_spots(matrix: _DelayMatrix) -> Iterable[HotSpot]:
    """Of one window and class. Cells that are explained by their row or column are not told by themselves."""
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
    for place in np.flatnonzero(hot).tolist():
        cell = matrix.cells[place]
        alone = row_is_cool[matrix.row[place]] and column_is_cool[matrix.column[place]]
        yield HotSpot(
            kind=SpotKind.LINK if alone else SpotKind.PAIR,
            source=cell.source,
            destination=cell.destination,
            ratio=math.exp(matrix.residual[place]),
            windows=1,
            bytes_per_second=cell.bytes_per_second,
            usual_bytes_per_second=float(matrix.usual[place]),
            pairs=((cell.source, cell.destination),),
            by_nccl=cell.by_nccl,
        )


def _find_hot_lines(
    effects: Floats, residual: Floats, line: Ints, hot: NDArray[np.bool_], busy: NDArray[np.bool_]
) -> list[tuple[int, float]]:
    """Rows (or columns) that are slow as a whole, and their effects. One with two cells has no effect of its own: it is
    slow where both are. `hot`: cells that no line across them explains."""
    known = np.isfinite(effects)
    slow = np.zeros(len(effects), bool)
    slow[known] = _is_hot(effects[known])
    slow &= np.bincount(line, weights=busy) > 1  # the coarse times of those that hardly carry hide no slow cell
    size, hot_cells = np.bincount(line), np.bincount(line, weights=hot)
    pair = ~known & (size == MIN_CELLS_PER_LINE - 1) & (hot_cells == size)
    effects = np.where(known, effects, _compute_medians(residual, line, len(effects)))
    return [(int(place), float(effects[place])) for place in np.flatnonzero(slow | pair)]


def _build_line_spot(matrix: _DelayMatrix, kind: SpotKind, rank: int, mine: NDArray[np.bool_], effect: float) -> HotSpot:
    places = np.flatnonzero(mine)
    its = [matrix.cells[i] for i in places[np.argsort(-matrix.delay[places], kind="stable")]]
    return HotSpot(
        kind=kind,
        source=rank if kind is SpotKind.SENDER else -1,
        destination=rank if kind is SpotKind.RECEIVER else -1,
        ratio=math.exp(effect),
        windows=1,
        bytes_per_second=float(sum(cell.acked_bytes for cell in its) / sum(cell.busy_seconds for cell in its)),
        usual_bytes_per_second=float(np.median(matrix.usual[places])),
        pairs=tuple((cell.source, cell.destination) for cell in its[:MAX_HOT_SPOTS_REPORTED]),
        by_nccl=its[0].by_nccl,
    )


def _is_hot(values: Floats, usual_quantile: float = 0.5) -> NDArray[np.bool_]:
    """Much above the usual, by a spread that what is hot itself does not widen."""
    if not len(values):
        return np.zeros(0, bool)
    above = values - np.quantile(values, usual_quantile)
    sigma = max(MIN_DELAY_SIGMA, 1.4826 * float(np.median(np.abs(above))))
    return (above > math.log(MIN_HOT_RATIO)) & (above > min(MIN_HOT_SIGMAS * sigma, math.log(CERTAINLY_HOT_RATIO)))


def _compute_medians(values: Floats, group: Ints, groups: int) -> Floats:
    """Of the values of each group; every group has one at least."""
    order = np.lexsort((values, group))
    counts = np.bincount(group, minlength=groups)
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    ordered = values[order]
    return np.asarray((ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2)


def _group_by_link_class(cells: Sequence[DelayCell]) -> list[list[DelayCell]]:
    """By class of link, those with enough cells to compare."""
    kinds = defaultdict[tuple[bool, bool], list[DelayCell]](list)
    for cell in cells:
        kinds[cell.same_node, cell.by_nccl].append(cell)
    return [alike for alike in kinds.values() if len(alike) >= MIN_CELLS_PER_LINE]


def _keep_largest(ratios: dict[int, float], ranks: Ints, effects: Floats) -> None:
    for rank, effect in zip(ranks.tolist(), effects.tolist(), strict=True):
        if not math.isnan(effect):
            ratios[rank] = max(math.exp(effect), ratios.get(rank, 0.0))


def _name_end(worker: str, local: str, remote: str) -> tuple[str, str, str]:
    """Of an end. A loopback's addresses mean something inside one pod only."""
    inside = local.startswith(("127.", "[::1]"))
    return worker if inside else "", local, remote


def _is_same_node(one: str, other: str, nodes: Mapping[str, str]) -> bool:
    return one == other or (bool(nodes.get(one)) and nodes.get(one) == nodes.get(other))


def _format_rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.0f} MB/s"
