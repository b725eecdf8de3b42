"""What scripts ask for: each event once, on whichever ranks ask, and the ranks know the same."""

from __future__ import annotations

from pacekeeper.modes.asking import Question, Questions

EVAL, PRINT = Question("eval", 6), Question("print", 4)


def meet(ranks: list[Questions], step: int, done: bool = False) -> set[Question]:
    """What all ranks know to be due at an ordinal of a Local-SGD mode after `step`."""
    if any(rank.to_tell for rank in ranks):
        told = [rank.to_tell for rank in ranks]
        for rank in ranks:
            rank.learn(told)
    (due,) = {rank.due(step) for rank in ranks}
    return set() if done else set(due)


def follow(ranks: list[Questions], step: int, all_answered: bool = False) -> None:
    for rank in ranks:
        rank.pass_ordinal(step, all_answered)


def test_what_one_rank_asks_is_known_to_all_from_the_next_ordinal_on() -> None:
    ranks = asking, other = [Questions(0), Questions(0)]
    asking.ask(EVAL)
    other.ask(PRINT)
    found = []
    for step in (4, 8, 12, 16):
        found.append(meet(ranks, step))
        follow(ranks, step)
    assert found == [{PRINT}, {EVAL, PRINT}, {EVAL, PRINT}, {PRINT}]
    assert not asking.to_tell


def test_what_is_asked_first_when_the_ranks_have_met_is_due_at_the_next_ordinal() -> None:
    ranks = [Questions(4), Questions(4)]
    assert meet(ranks, 8) == set()
    ranks[1].ask(EVAL)  # a multiple of six lies between 4 and 8
    follow(ranks, 8)
    ranks[0].ask(EVAL)  # later: it has had no chance before
    assert meet(ranks, 10) == {EVAL}
    follow(ranks, 10)
    assert meet(ranks, 11) == set()


def test_what_no_rank_may_be_told_where_one_came_without_a_step_comes_next() -> None:
    ranks = [Questions(0), Questions(0)]
    ranks[0].ask(EVAL)
    assert meet(ranks, 7, done=True) == set()
    assert meet(ranks, 8) == {EVAL}


def test_in_sync_every_step_is_answered_at_once_and_nothing_twice() -> None:
    questions = Questions(0)
    answers = []
    for step in range(1, 13):
        questions.ask(EVAL)
        answers.append(questions.is_due(EVAL, step))
        if step == 3:
            questions.learn([questions.to_tell])
        questions.pass_ordinal(step, all_answered=True)
    assert [step for step, due in enumerate(answers, 1) if due] == [6, 12]
    assert questions.due(16) == set()  # in a Local-SGD mode, four steps later
    assert questions.due(18) == {EVAL}


def test_what_is_not_told_yet_when_sync_ends_is_not_due_twice() -> None:
    questions = Questions(5)
    questions.ask(EVAL)
    assert questions.is_due(EVAL, 6)
    questions.pass_ordinal(6, all_answered=True)
    questions.learn([questions.to_tell])
    assert questions.due(10) == set()


def test_one_name_may_come_at_two_paces() -> None:
    ranks = [Questions(0), Questions(0)]
    ranks[0].ask(Question("log", 2))
    ranks[1].ask(Question("log", 3))
    assert meet(ranks, 2) == {("log", 2)}
    follow(ranks, 2)
    assert meet(ranks, 3) == {("log", 3)}
