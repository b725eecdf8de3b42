"""Readers of the traces that people have. Each imports its heavy library only when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pacekeeper_analysis.whatif.inputs.parquet import metadata_of, read_metadata, read_parquet
from pacekeeper_analysis.whatif.published import window_from_trace
from pacekeeper_analysis.whatif.trace import TraceError
from pacekeeper_analysis.whatif.window import Window


@dataclass(frozen=True)
class Loaded:
    """A window read from files."""

    window: Window
    title: str
    worker_ranks: Mapping[tuple[int, int], int] | None = None
    """Global rank of each worker (dp_rank, stage), where the trace says so."""


def load(paths: Sequence[Path], meta: Path | None = None) -> Loaded:
    """Reads a window; the kind of trace goes by the files' names.

    Raises TraceError where the content cannot be analysed, OSError where a file cannot be read.
    """
    first = paths[0]
    if first.suffix == ".parquet":
        if len(paths) > 1:
            raise TraceError(f"{len(paths)} parquet files; give one, it holds all ranks")
        metadata = read_metadata(meta if meta is not None else metadata_of(first))
        trace = read_parquet(first, metadata)
        title = metadata.trial_name or first.stem
        return Loaded(window_from_trace(trace), f"{title}: {metadata}", trace.worker_ranks())
    raise TraceError(f"{first}: unknown kind of trace; give .parquet, .json, .json.gz or .records")
