"""Collectives as they travel."""

import numpy as np
import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.operations import MAX_OPERATIONS, OPERATION, decode_operations, encode_operations


def build_operations(count: int) -> np.ndarray:
    found = np.zeros(count, OPERATION)
    found["step"], found["end"] = np.arange(count), 0.5
    return found


@pytest.mark.parametrize("count", [0, 1, MAX_OPERATIONS])
def test_operations_are_read_as_they_were_written(count: int) -> None:
    assert (decode_operations(encode_operations(build_operations(count))) == build_operations(count)).all()


def test_more_operations_than_the_limit_are_rejected() -> None:
    with pytest.raises(ValueError, match="more than"):
        encode_operations(build_operations(MAX_OPERATIONS + 1))


@pytest.mark.parametrize(("name", "value"), [("start", 1.0), ("end", np.inf), ("bytes", np.nan), ("start", -1.0)])
def test_numbers_that_are_no_measurements_are_rejected(name: str, value: float) -> None:
    wrong = build_operations(3)
    wrong[name][1] = value
    with pytest.raises(InputError, match="operations"):
        decode_operations(encode_operations(wrong))


@pytest.mark.parametrize("text", ["!", "AAAA", "A" * 8 * OPERATION.itemsize * MAX_OPERATIONS])
def test_an_invalid_list_is_rejected(text: str) -> None:
    with pytest.raises(InputError):
        decode_operations(text)
