"""Collectives as they travel."""

import numpy as np
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.operations import MOST_OPERATIONS, OPERATION, decode, encode


def operations(count: int) -> np.ndarray:
    found = np.zeros(count, OPERATION)
    found["step"], found["end"] = np.arange(count), 0.5
    return found


@pytest.mark.parametrize("count", [0, 1, MOST_OPERATIONS])
def test_what_is_written_is_read_again(count: int) -> None:
    assert (decode(encode(operations(count))) == operations(count)).all()


def test_more_than_travels_is_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        encode(operations(MOST_OPERATIONS + 1))


@pytest.mark.parametrize(("name", "value"), [("start", 1.0), ("end", np.inf), ("bytes", np.nan), ("start", -1.0)])
def test_numbers_that_are_no_measurements_are_refused(name: str, value: float) -> None:
    wrong = operations(3)
    wrong[name][1] = value
    with pytest.raises(InputError, match="operations"):
        decode(encode(wrong))


@pytest.mark.parametrize("text", ["!", "AAAA", "A" * 8 * OPERATION.itemsize * MOST_OPERATIONS])
def test_what_is_no_list_of_them_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        decode(text)
