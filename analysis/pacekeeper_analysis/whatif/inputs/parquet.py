"""Traces in the published schema as parquet files, and their metadata files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import abbreviate_value, parse_json
from pacekeeper_analysis.whatif.trace import (
    OPERATION_TYPES,
    TRACE_COLUMNS,
    JobTrace,
    TraceError,
    TraceMetadata,
    build_trace_from_columns,
)

WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")


def read_parquet(path: Path, metadata: TraceMetadata) -> JobTrace:
    """Read a trace. Raises TraceError if the file is damaged or lacks columns, and OSError if it cannot be read."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise TraceError("parquet traces need pyarrow: pip install 'pacekeeper[whatif]'") from error
    try:
        with parquet.ParquetFile(path, read_dictionary=["optype"], page_checksum_verification=True) as file:
            table = file.read(columns=[name for name in TRACE_COLUMNS if name in file.schema_arrow.names])
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # the last two: invalid names and sizes
        raise TraceError(f"{path} is not a readable parquet file ({error}); write it again") from error
    columns: dict[str, NDArray[np.generic]] = {}
    type_names: Sequence[str] = OPERATION_TYPES
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if column.null_count:
            raise TraceError(f"{path}: column {name} has {column.null_count} empty cells; fill them or drop the rows")
        if pyarrow.types.is_dictionary(column.type):
            type_names = column.dictionary.to_pylist()
            columns[name] = column.indices.to_numpy(zero_copy_only=False)
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    return build_trace_from_columns(columns, metadata, type_names)


def write_parquet(path: Path, trace: JobTrace) -> None:
    """Write a trace in the published schema."""
    import pyarrow
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table(trace.to_columns()), path, write_page_checksum=True)


def find_metadata(trace: Path) -> Path:
    """Return the metadata file next to a trace. Raises TraceError if none exists.

    For trace-NAME.parquet it is meta-NAME.yaml or meta-NAME.json.
    """
    name = trace.stem.removeprefix("trace-")
    for candidate in (trace.with_name(f"meta-{name}.yaml"), trace.with_name(f"meta-{name}.json")):
        if candidate.exists():
            return candidate
    raise TraceError(f"{trace} has no meta-{name}.yaml next to it; give the job's sizes with --meta")


def read_metadata(path: Path) -> TraceMetadata:
    """Read a metadata file: JSON, or lines `key: value` (flat YAML).

    Raises TraceError, or OSError if it is unreadable.
    """
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not UTF-8 text; write it again") from error
    if text.lstrip().startswith("{"):
        try:
            return TraceMetadata.from_mapping(parse_json(text))
        except InputError as error:
            raise TraceError(f"{path}: {error}") from error
    values: dict[str, object] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#")[0].strip()
        if not content:
            continue
        key, colon, value = (part.strip() for part in content.partition(":"))
        if not colon:
            raise TraceError(f"{path}, line {number}: {abbreviate_value(line)} is not `key: value`")
        values[key] = int(value) if WHOLE_NUMBER.fullmatch(value) else value.strip("'\"")
    return TraceMetadata.from_mapping(values)
