"""What holds for all tests."""

from __future__ import annotations

import os

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # before anything reads it: each worker has its own cluster
    os.environ.setdefault("PACEKEEPER_CLUSTER", worker)

collect_ignore = ["gpu"]
"""Tests of unittest, for machines with a GPU and without pytest: `make test-gpu`."""
