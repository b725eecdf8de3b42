"""Events that scripts query: each is answered once, and all ranks receive the same answer."""

from __future__ import annotations

from pacekeeper.sync.due_queries import DueQueries, DueQuery

EVAL, PRINT = DueQuery("eval", 6), DueQuery("print", 4)


def list_due(ranks: list[DueQueries], step: int, done: bool = False) -> set[DueQuery]:
    """Return what all ranks know to be due at an ordinal of a Local-SGD mode after `step`."""
    if any(rank.unreported for rank in ranks):
        reports = [rank.unreported for rank in ranks]
        for rank in ranks:
            rank.merge_reports(reports)
    (due,) = {rank.list_due(step) for rank in ranks}
    return set() if done else set(due)


def pass_sync_points(ranks: list[DueQueries], step: int, all_answered: bool = False) -> None:
    for rank in ranks:
        rank.pass_sync_point(step, all_answered)


def test_a_query_of_one_rank_is_known_to_all_from_the_next_ordinal_on() -> None:
    ranks = asking, other = [DueQueries(0), DueQueries(0)]
    asking.add_query(EVAL)
    other.add_query(PRINT)
    found = []
    for step in (4, 8, 12, 16):
        found.append(list_due(ranks, step))
        pass_sync_points(ranks, step)
    assert found == [{PRINT}, {EVAL, PRINT}, {EVAL, PRINT}, {PRINT}]
    assert not asking.unreported


def test_a_first_query_after_a_sync_point_is_due_at_the_next_ordinal() -> None:
    ranks = [DueQueries(4), DueQueries(4)]
    assert list_due(ranks, 8) == set()
    ranks[1].add_query(EVAL)  # a multiple of six lies between 4 and 8
    pass_sync_points(ranks, 8)
    ranks[0].add_query(EVAL)  # later: it has had no chance before
    assert list_due(ranks, 10) == {EVAL}
    pass_sync_points(ranks, 10)
    assert list_due(ranks, 11) == set()


def test_an_event_that_was_not_reported_for_want_of_a_step_comes_next() -> None:
    ranks = [DueQueries(0), DueQueries(0)]
    ranks[0].add_query(EVAL)
    assert list_due(ranks, 7, done=True) == set()
    assert list_due(ranks, 8) == {EVAL}


def test_in_sync_every_step_is_answered_at_once_and_nothing_twice() -> None:
    questions = DueQueries(0)
    answers = []
    for step in range(1, 13):
        questions.add_query(EVAL)
        answers.append(questions.is_due(EVAL, step))
        if step == 3:
            questions.merge_reports([questions.unreported])
        questions.pass_sync_point(step, all_answered=True)
    assert [step for step, due in enumerate(answers, 1) if due] == [6, 12]
    assert questions.list_due(16) == set()  # in a Local-SGD mode, four steps later
    assert questions.list_due(18) == {EVAL}


def test_an_unanswered_query_is_not_due_twice_when_sync_ends() -> None:
    questions = DueQueries(5)
    questions.add_query(EVAL)
    assert questions.is_due(EVAL, 6)
    questions.pass_sync_point(6, all_answered=True)
    questions.merge_reports([questions.unreported])
    assert questions.list_due(10) == set()


def test_one_name_may_have_two_intervals() -> None:
    ranks = [DueQueries(0), DueQueries(0)]
    ranks[0].add_query(DueQuery("log", 2))
    ranks[1].add_query(DueQuery("log", 3))
    assert list_due(ranks, 2) == {("log", 2)}
    pass_sync_points(ranks, 2)
    assert list_due(ranks, 3) == {("log", 3)}
