"""What holds for all unit tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Keep what 8,000 tests have imported out of garbage collections: a full one costs a second otherwise."""
    gc.collect()
    gc.freeze()
