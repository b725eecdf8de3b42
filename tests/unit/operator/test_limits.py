"""Whatever somebody asks, and under however many names, what is kept of it stays bounded."""

from __future__ import annotations

from pacekeeper_operator.limits import Backoff, ExpiringCache, RateLimiter


def test_so_many_at_once_and_so_many_a_second() -> None:
    rate = RateLimiter[str](per_second=2.0, at_once=3)
    assert [rate.take("a", 100.0) for _ in range(4)] == [True, True, True, False]
    assert rate.take("b", 100.0), "another's are its own"
    assert [rate.take("a", 101.0) for _ in range(3)] == [True, True, False]
    assert [rate.take("a", 1000.0) for _ in range(4)] == [True, True, True, False], "what is not used is not saved up"


def test_what_is_given_back_does_not_count() -> None:
    rate = RateLimiter[str](per_second=0.0, at_once=1)
    assert rate.take("a", 0.0)
    rate.refund("a")
    assert rate.take("a", 0.0)
    rate.refund("nobody")


def test_of_too_many_keys_the_one_that_was_not_used_for_longest_is_forgotten() -> None:
    rate = RateLimiter[str](per_second=0.0, at_once=1, keys=2)
    for key in "ab":
        rate.take(key, 0.0)
    assert not rate.take("a", 0.0)
    rate.take("c", 0.0)
    assert not rate.take("a", 0.0)
    assert rate.take("b", 0.0)


def test_answers_hold_for_a_time() -> None:
    answers = ExpiringCache[str, int](seconds=10.0, capacity=2)
    answers.put("a", 1, 0.0)
    assert answers.get("a", 9.0) == 1
    assert answers.get("a", 10.0) is None
    assert answers.get("b", 0.0) is None


def test_of_too_many_answers_the_oldest_goes() -> None:
    answers = ExpiringCache[str, int](seconds=10.0, capacity=2)
    for at, key in enumerate("abac"):
        answers.put(key, at, float(at))
    assert [answers.get(key, 3.0) for key in "abc"] == [2, None, 3]


def test_pauses_double_up_to_the_longest_however_often_it_fails_and_begin_anew_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert not backoff.is_failing
    assert [backoff.record_failure() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert [backoff.record_failure() for _ in range(5000)][-1] == 3.0
    assert backoff.is_failing
    backoff.record_success()
    assert (backoff.is_failing, backoff.record_failure()) == (False, 0.5)
