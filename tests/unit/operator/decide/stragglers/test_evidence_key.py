"""What is found out once of ranks' answers."""

from pacekeeper_analysis.protocol.reports import Evidence
from pacekeeper_operator.decide.stragglers.evidence_key import EvidenceKey


def test_answers_are_the_same_where_each_of_them_is() -> None:
    one, other = Evidence("why", "j-w0-0", 1), Evidence("why", "j-w1-0", 1)
    assert EvidenceKey((one, other)) == EvidenceKey((one, other))
    assert hash(EvidenceKey((one, other))) == hash(EvidenceKey((one, other)))


def test_what_a_worker_says_anew_is_another_answer_even_in_the_same_words() -> None:
    one, again = Evidence("why", "j-w0-0", 1), Evidence("why", "j-w0-0", 1)
    assert EvidenceKey((one,)) != EvidenceKey((again,))
    assert EvidenceKey((one,)) != EvidenceKey((one, again))
