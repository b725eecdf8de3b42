"""Readers of trace files. Each imports its heavy library only when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pacekeeper_analysis.whatif.inputs.parquet import find_metadata, read_metadata, read_parquet
from pacekeeper_analysis.whatif.inputs.records import build_window_from_records, is_ring, read_ring
from pacekeeper_analysis.whatif.published import build_window_from_trace
from pacekeeper_analysis.whatif.trace import TraceError
from pacekeeper_analysis.whatif.window import RecordedWindow

PARQUET_SIGNATURE, GZIP_SIGNATURE = b"PAR1", b"\x1f\x8b"
"""Signatures at the beginning of such files."""


@dataclass(frozen=True)
class LoadedWindow:
    """A window read from files."""

    window: RecordedWindow
    title: str
    worker_ranks: Mapping[tuple[int, int], int] | None = None
    """Global rank of each worker (dp_rank, stage), if the trace contains it."""


def load_window(paths: Sequence[Path], meta: Path | None = None) -> LoadedWindow:
    """Read a window. The content of the files decides the kind of trace.

    Raises TraceError if the content cannot be analyzed, and OSError if a file cannot be read.
    """
    first, notes = paths[0], tuple[str, ...]()
    if is_ring(first):
        rings = dict(read_ring(path) for path in paths)
        return LoadedWindow(build_window_from_records(rings), f"{len(rings)} ranks, from their records")
    if _begins_with(first, PARQUET_SIGNATURE):
        if len(paths) > 1:
            raise TraceError(f"{len(paths)} parquet files; give one, it holds all ranks")
        metadata = read_metadata(meta if meta is not None else find_metadata(first))
        trace = read_parquet(first, metadata)
        title = f"{metadata.trial_name or first.stem}: {metadata}"
    elif _begins_with(first, GZIP_SIGNATURE) or _begins_with(first, b"{"):
        from pacekeeper_analysis.whatif.inputs.kineto import read_kineto

        trace, notes = read_kineto(paths)
        title = f"{trace.metadata.dp_size} ranks, from the PyTorch profiler"
    else:
        raise TraceError(
            f"{first} is empty, damaged or of an unknown kind; give a parquet file in the published schema, "
            "or the PyTorch profiler's traces or the rings of all ranks"
        )
    return LoadedWindow(replace(build_window_from_trace(trace), notes=notes), title, trace.map_worker_ranks())


def _begins_with(path: Path, signature: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(signature)
