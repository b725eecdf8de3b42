"""The published traces, where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def published() -> Path:
    """The folder of the published traces and their results."""
    folder = Path(os.environ.get("PACEKEEPER_TRACES", PROJECT.parent / "shared" / "traces"))
    if not any(folder.glob("trace-*.parquet")):
        pytest.skip(f"no published traces in {folder}; set PACEKEEPER_TRACES to their folder")
    return folder
