"""What ranks have answered, as the key of what it comes to."""

from __future__ import annotations

from pacekeeper_analysis.reports import Evidence


class EvidenceKey:
    """Told apart by which answers they are: what is in them are megabytes, and passes come twice a second."""

    def __init__(self, evidence: tuple[Evidence, ...]) -> None:
        self.evidence = evidence

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.evidence)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EvidenceKey) or len(self.evidence) != len(other.evidence):
            return False
        return all(one is another for one, another in zip(self.evidence, other.evidence, strict=True))
