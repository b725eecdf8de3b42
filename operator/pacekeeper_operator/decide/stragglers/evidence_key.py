"""The ranks' answers, as the cache key of what is computed from them."""

from __future__ import annotations

from pacekeeper_analysis.protocol.reports import Evidence


class EvidenceKey:
    """A key by the identity of the answers: their content takes megabytes, and passes come twice a second."""

    def __init__(self, evidence: tuple[Evidence, ...]) -> None:
        self.evidence = evidence

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.evidence)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EvidenceKey) or len(self.evidence) != len(other.evidence):
            return False
        return all(answer is other_answer for answer, other_answer in zip(self.evidence, other.evidence, strict=True))
