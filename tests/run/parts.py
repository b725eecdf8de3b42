"""The table of parts: what `make test` runs, and how much processor time each part may use."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build/test"
BUDGET_SECONDS = 3600
"""Processor seconds of `make test`: 30 minutes on two processors. The budgets of all parts add up to no more."""
BUDGET_LIMIT = 1.5
"""A run fails if it uses more than this multiple of its budget. Times are those of the usual machine (slowdown.py)."""


@dataclass(frozen=True)
class Part:
    """One command. The parts of a lane run one after the other; lanes run at the same time."""

    name: str
    lane: str
    budget_seconds: float
    command: str  # relative to the repository; quoted as in a shell, but no shell reads it
    idle: bool = False  # runs when no other process wants the processor

    @property
    def is_pytest(self) -> bool:
        return self._words[0].endswith("pytest")

    @property
    def uses_clusters(self) -> bool:
        return "tests/cluster" in self._words

    def build_command(self, junit: Path | None = None) -> list[str]:
        """Return the arguments of the command. A part of pytest writes its results to `junit`."""
        return [*self._words, *([f"--junit-xml={junit}"] if junit and self.is_pytest else [])]

    @property
    def _words(self) -> list[str]:
        return shlex.split(self.command)


# The environment with the oldest torch has only the trainer: neither the operator nor what the test cluster needs.
_OLDEST = (
    ".venv-oldest/bin/pytest -n 2 --dist loadfile -m oldest_torch tests/distributed"
    " --ignore=tests/distributed/test_deciding.py --ignore=tests/distributed/test_leaf_spine.py"
    " --ignore=tests/distributed/test_watched_jobs.py"
)
# Each worker has a cluster of its own, in which files run one after the other.
_CLUSTER = ".venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/cluster"
_STYLE = (
    "sh -c '.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/codespell . "
    "&& .venv/bin/python -m lint'"
)

# Cluster and distributed tests often wait, and load makes them fail: they run one after the other. The rest waits for
# nothing: it runs at idle priority in what they leave, in two lanes so that it still uses two processors once they are
# done.
PARTS = (
    Part("cluster", "real", 2160, _CLUSTER),
    Part("oldest-torch", "real", 100, _OLDEST),
    Part("distributed", "real", 500, ".venv/bin/pytest -n 2 --dist loadfile tests/distributed"),
    Part("image", "image", 75, ".venv/bin/pytest tests/image"),
    Part("style", "unit", 25, _STYLE, idle=True),
    Part("contracts", "unit", 5, ".venv/bin/lint-imports", idle=True),
    Part("unit", "unit", 310, ".venv/bin/pytest tests/unit --ignore=tests/unit/simulation", idle=True),
    Part("types", "simulation", 115, ".venv/bin/mypy", idle=True),
    Part("unit-simulation", "simulation", 140, ".venv/bin/pytest tests/unit/simulation", idle=True),
    Part("disasters", "simulation", 170, ".venv/bin/python -m simulation run 0-39 --fresh 20", idle=True),
)


def select_parts(names: Sequence[str], parts: Sequence[Part] = PARTS) -> list[Part]:
    """Return the parts with these names, or all parts. Raises ValueError for an unknown name."""
    known = {part.name: part for part in parts}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no part is named {', '.join(unknown)}; choose from {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] or list(parts)
