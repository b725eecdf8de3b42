"""The key under which an analysis of ranks' answers is cached."""

from pacekeeper_analysis.protocol.reports import Evidence
from pacekeeper_operator.decide.stragglers.evidence_key import EvidenceKey


def test_keys_are_equal_if_each_answer_is_the_same_object() -> None:
    first, second = Evidence("why", "j-w0-0", 1), Evidence("why", "j-w1-0", 1)
    assert EvidenceKey((first, second)) == EvidenceKey((first, second))
    assert hash(EvidenceKey((first, second))) == hash(EvidenceKey((first, second)))


def test_a_new_answer_with_equal_content_has_another_key() -> None:
    first, second = Evidence("why", "j-w0-0", 1), Evidence("why", "j-w0-0", 1)
    assert EvidenceKey((first,)) != EvidenceKey((second,))
    assert EvidenceKey((first,)) != EvidenceKey((first, second))
