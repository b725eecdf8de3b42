"""How to start a rank."""

from __future__ import annotations

from dataclasses import dataclass

RING_VARIABLE = "PACEKEEPER_RING"
COMMUNICATORS_VARIABLE = "PACEKEEPER_COMMUNICATORS"
"""The launcher sets it only for ranks whose script does not use the library itself."""


@dataclass(frozen=True)
class RankStart:
    """How to start a rank. Plain data: the launcher sends it to the warm process."""

    key: str  # the launcher's name for this process
    rank: int
    round: int
    script: str  # a path, or the name of a module
    is_module: bool
    arguments: list[str]
    environment: dict[str, str]  # added to the launcher's own
    ring_path: str  # path of its ring of records
    stack_path: str  # path of its stack file
    threads: int | None  # for torch's operations; None: torch's default
    is_program: bool = False  # the script is any program, which replaces the process

    @property
    def is_first_local(self) -> bool:
        """Whether it is the first rank of its worker."""
        return self.environment.get("PACEKEEPER_LOCAL_RANK", self.environment.get("LOCAL_RANK")) == "0"
