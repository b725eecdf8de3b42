"""What is found out once of ranks' answers."""

from pacekeeper_analysis.reports import Evidence
from pacekeeper_operator.decide.answers import Answers


def test_answers_are_the_same_where_each_of_them_is() -> None:
    one, other = Evidence("why", "j-w0-0", 1), Evidence("why", "j-w1-0", 1)
    assert Answers((one, other)) == Answers((one, other))
    assert hash(Answers((one, other))) == hash(Answers((one, other)))


def test_what_a_worker_says_anew_is_another_answer_even_in_the_same_words() -> None:
    one, again = Evidence("why", "j-w0-0", 1), Evidence("why", "j-w0-0", 1)
    assert Answers((one,)) != Answers((again,))
    assert Answers((one,)) != Answers((one, again))
