"""The memory for requests stays bounded, for any request under any number of names."""

from __future__ import annotations

from pacekeeper_operator.limits import Backoff, ExpiringCache, RateLimiter


def test_a_rate_limit_allows_a_burst_and_a_rate() -> None:
    rate = RateLimiter[str](per_second=2.0, at_once=3)
    assert [rate.take("a", 100.0) for _ in range(4)] == [True, True, True, False]
    assert rate.take("b", 100.0), "each key has its own limit"
    assert [rate.take("a", 101.0) for _ in range(3)] == [True, True, False]
    assert [rate.take("a", 1000.0) for _ in range(4)] == [True, True, True, False], "unused capacity is not accumulated"


def test_a_returned_token_does_not_count() -> None:
    rate = RateLimiter[str](per_second=0.0, at_once=1)
    assert rate.take("a", 0.0)
    rate.refund("a")
    assert rate.take("a", 0.0)
    rate.refund("nobody")


def test_the_least_recently_used_key_is_forgotten() -> None:
    rate = RateLimiter[str](per_second=0.0, at_once=1, keys=2)
    for key in "ab":
        rate.take(key, 0.0)
    assert not rate.take("a", 0.0)
    rate.take("c", 0.0)
    assert not rate.take("a", 0.0)
    assert rate.take("b", 0.0)


def test_cached_answers_expire() -> None:
    answers = ExpiringCache[str, int](seconds=10.0, capacity=2)
    answers.put("a", 1, 0.0)
    assert answers.get("a", 9.0) == 1
    assert answers.get("a", 10.0) is None
    assert answers.get("b", 0.0) is None


def test_the_oldest_answer_is_dropped_from_a_full_cache() -> None:
    answers = ExpiringCache[str, int](seconds=10.0, capacity=2)
    for at, key in enumerate("abac"):
        answers.put(key, at, float(at))
    assert [answers.get(key, 3.0) for key in "abc"] == [2, None, 3]


def test_backoff_doubles_up_to_a_limit_and_resets_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert not backoff.is_failing
    assert [backoff.record_failure() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert [backoff.record_failure() for _ in range(5000)][-1] == 3.0
    assert backoff.is_failing
    backoff.record_success()
    assert (backoff.is_failing, backoff.record_failure()) == (False, 0.5)
