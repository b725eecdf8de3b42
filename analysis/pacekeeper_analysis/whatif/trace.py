"""The published trace schema: one row per operation of a pipeline-parallel training job. It also checks traces.

Source: ByteDance's StragglerAnalysis data (arXiv 2505.05713). One rank per data-parallel rank and pipeline stage is
recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import abbreviate_value

FORWARD, BACKWARD = "forward-compute", "backward-compute"
FORWARD_SEND, FORWARD_RECV = "forward-send", "forward-recv"
BACKWARD_SEND, BACKWARD_RECV = "backward-send", "backward-recv"
ALL_GATHER, REDUCE_SCATTER = "params-all-gather", "grads-reduce-scatter"
SEPARATE_ALL_REDUCE = "separate-grads-all-reduce"
LAYERNORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, OPTIMIZER, GC = "optimizer-clip-main-grad", "optimizer", "gc"

OPERATION_TYPES = (
    FORWARD,
    BACKWARD,
    FORWARD_SEND,
    FORWARD_RECV,
    BACKWARD_SEND,
    BACKWARD_RECV,
    ALL_GATHER,
    REDUCE_SCATTER,
    SEPARATE_ALL_REDUCE,
    LAYERNORM,
    EMBEDDING,
    CLIP,
    OPTIMIZER,
    GC,
)
"""Every operation type. A trace holds their positions in this tuple."""

TRACE_COLUMNS = ("step", "dp_rank", "stage", "rank", "optype", "seq_id", "mc", "mb_id", "start_ts", "duration")
"""The columns that the analysis reads."""

MAX_DURATION_S = 86_400.0
"""Upper limit of a duration: no operation and no step takes longer than a day. A larger value is a broken record."""

MAX_METADATA_SIZE = 1 << 24
"""Upper limit of ranks, in one dimension or in total."""


class TraceError(InputError):
    """A trace that cannot be analyzed. The message names the place and the remedy."""


@dataclass(frozen=True)
class TraceMetadata:
    """The shape of the job. Raises TraceError if the sizes contradict each other."""

    dp_size: int
    """Number of data-parallel ranks."""
    pp_size: int = 1
    """Number of pipeline stages."""
    tp_size: int = 1
    """Number of tensor-parallel ranks, of which one is recorded."""
    dsp_size: int = 1
    """Number of sequence-parallel ranks that share the gradients' collectives, of which one is recorded."""
    vpp_size: int = 1
    """Number of model chunks per stage (interleaved schedule)."""
    world_size: int | None = None
    """Number of all ranks of the job. None if not known."""
    trial_name: str = ""

    def __post_init__(self) -> None:
        for name in ("dp_size", "pp_size", "tp_size", "dsp_size", "vpp_size"):
            if getattr(self, name) < 1:
                raise TraceError(f"metadata: {name} is {getattr(self, name)}; it must be 1 or more")
        product = self.dp_size * self.pp_size * self.tp_size * self.dsp_size
        if self.world_size is not None and self.world_size != product:
            raise TraceError(
                f"metadata: world_size is {self.world_size}, but dp_size x pp_size x tp_size x dsp_size is {product}; "
                "correct the sizes, or leave world_size out"
            )

    def __str__(self) -> str:
        sizes = {"data": self.dp_size, "pipeline": self.pp_size, "chunks": self.vpp_size}
        sizes |= {"tensor": self.tp_size, "sequence": self.dsp_size}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> TraceMetadata:
        """Read a metadata file's keys. Unknown keys are ignored."""
        sizes: dict[str, int] = {}
        for field in fields(cls):
            if field.name in values and field.name.endswith("_size"):
                value = values[field.name]
                if isinstance(value, bool) or not isinstance(value, int):
                    raise TraceError(f"metadata: {field.name} is {abbreviate_value(value)}; it must be a whole number")
                if value > MAX_METADATA_SIZE:
                    raise TraceError(
                        f"metadata: {field.name} is {abbreviate_value(value)}; no job has more than {MAX_METADATA_SIZE}"
                    )
                sizes[field.name] = value
        if "dp_size" not in sizes:
            raise TraceError("metadata: dp_size is missing; give the number of data-parallel ranks of the job")
        return cls(**sizes, trial_name=str(values.get("trial_name", "")))


Ints = NDArray[np.integer]


@dataclass(frozen=True)
class JobTrace:
    """The rows of a trace, by column. All columns have the same length."""

    step: Ints
    dp_rank: Ints
    stage: Ints
    optype: Ints
    """Index into OPERATION_TYPES."""
    seq_id: Ints
    """Position among the operations of the same type, step and worker, from 0."""
    mc: Ints
    """Model chunk. -1 if the operation belongs to none."""
    mb_id: Ints
    """Microbatch. -1 if the operation belongs to none."""
    start_ts: NDArray[np.floating]
    """Seconds. The origin may be that of the step."""
    duration: NDArray[np.floating]
    """Seconds, including the wait for others."""
    rank: Ints
    """Global rank of the recorded process."""
    metadata: TraceMetadata

    def __len__(self) -> int:
        return len(self.step)

    def select_rows(self, rows: NDArray[np.bool_]) -> JobTrace:
        """Return the trace with some of the rows."""
        return replace(self, **{name: getattr(self, name)[rows] for name in TRACE_COLUMNS})

    def map_worker_ranks(self) -> dict[tuple[int, int], int]:
        """Return the global rank of each worker (dp_rank, stage)."""
        workers = self.dp_rank.astype(np.int64) * (int(self.stage.max()) + 1) + self.stage
        _, first = np.unique(workers, return_index=True)
        return {(int(self.dp_rank[row]), int(self.stage[row])): int(self.rank[row]) for row in first}

    def to_columns(self) -> dict[str, NDArray[np.generic]]:
        """Return the columns as they are written to files, with operation types by name."""
        columns: dict[str, NDArray[np.generic]] = {name: getattr(self, name) for name in TRACE_COLUMNS}
        return columns | {"optype": np.array(OPERATION_TYPES)[self.optype]}

    def describe_row(self, row: int | np.integer) -> str:
        """Describe a row for messages."""
        return (
            f"step {self.step[row]}, dp_rank {self.dp_rank[row]}, stage {self.stage[row]}, "
            f"{OPERATION_TYPES[self.optype[row]]} {self.seq_id[row]}"
        )


def build_trace_from_columns(
    columns: Mapping[str, NDArray[np.generic]], metadata: TraceMetadata, type_names: Sequence[str] = OPERATION_TYPES
) -> JobTrace:
    """Build a trace from columns of the published schema. `optype` holds names, or positions in `type_names`.

    Raises TraceError if a column is missing, empty or of the wrong kind, or an operation type is unknown.
    """
    missing = [name for name in TRACE_COLUMNS if name not in columns]
    if missing:
        raise TraceError(f"the trace has no column {', '.join(missing)}; it needs {', '.join(TRACE_COLUMNS)}")
    if len({len(columns[name]) for name in TRACE_COLUMNS}) > 1:
        raise TraceError("the trace's columns differ in length; the file is damaged, write it again")
    if len(columns["step"]) == 0:
        raise TraceError("the trace has no rows; was the profiler on?")
    checked = {name: np.asarray(columns[name]) for name in TRACE_COLUMNS}
    if not np.issubdtype(checked["optype"].dtype, np.integer):
        names, checked["optype"] = np.unique(checked["optype"].astype(str), return_inverse=True)
        type_names = names.tolist()
    for name, column in checked.items():
        expected_type = np.floating if name in ("start_ts", "duration") else np.integer
        if not np.issubdtype(column.dtype, expected_type):
            kind = "floating-point seconds" if expected_type is np.floating else "whole numbers"
            raise TraceError(f"column {name} holds {column.dtype}; it must hold {kind}, without missing values")
    codes = np.array(
        [OPERATION_TYPES.index(name) if name in OPERATION_TYPES else -1 for name in type_names], dtype=np.int8
    )
    type_indices = checked["optype"]
    checked["optype"] = codes[type_indices]
    unknown = np.flatnonzero(checked["optype"] < 0)
    if unknown.size:
        row = unknown[0]
        step, dp_rank, stage, seq = (checked[name][row] for name in ("step", "dp_rank", "stage", "seq_id"))
        raise TraceError(
            f"step {step}, dp_rank {dp_rank}, stage {stage}, seq_id {seq}: unknown operation type "
            f"{type_names[type_indices[row]]!r} ({unknown.size} such rows); "
            f"rename it to one of {', '.join(OPERATION_TYPES)}"
        )
    return JobTrace(**checked, metadata=metadata)
