"""Settings of all unit tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Exclude all that the tests have imported from garbage collections: a full one costs a second otherwise."""
    gc.collect()
    gc.freeze()
