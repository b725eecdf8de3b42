"""What is read of JSON from any writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated

import pytest

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import MaxLength, Within, parse_json, read_dataclass


class Grade(IntEnum):
    LOW = 0
    HIGH = 1


@dataclass(frozen=True)
class Size:
    nbytes: Annotated[int, Within(0)]


@dataclass(frozen=True)
class Box:
    sizes: dict[str, Size] = field(default_factory=dict)
    grade: Grade = Grade.LOW
    names: Annotated[tuple[str, ...], MaxLength(2)] | None = None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        ("9" * 5_000, "not JSON"),
        (b'"\xff"', "not JSON"),
        (b"\xef\xbb\xbf1", "not JSON"),
        ("", "not JSON"),
        ("x" * 10_000, "not JSON"),
    ],
)
def test_invalid_json_is_an_input_error_that_names_the_expected_content(text: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=f"plan.json: is {message}") as refused:
        parse_json(text, "plan.json")
    assert len(str(refused.value)) < 200


def test_numbers_that_json_does_not_have_are_rejected_on_request() -> None:
    assert parse_json("[Infinity]") == [float("inf")]
    with pytest.raises(InputError, match="NaN is not a number"):
        parse_json('{"step": NaN}', finite=True)


def test_objects_by_name_and_numbered_names_are_read() -> None:
    box = read_dataclass(Box, {"sizes": {"a": {"nbytes": 1}}, "grade": 1, "names": ["x"]})
    assert box == Box({"a": Size(1)}, Grade.HIGH, ("x",))
    assert read_dataclass(Box, {"names": None}) == Box()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sizes": [1]}, "Box.sizes: must be an object"),
        ({"sizes": {"a": {"nbytes": -1}}}, "Box.sizes.'a'.nbytes: -1 must be from 0"),
        ({"grade": True}, "Box.grade: True is not one of 0, 1"),
        ({"grade": 7}, "Box.grade: 7 is not one of 0, 1"),
        ({"names": ["x"] * 3}, "Box.names: 3 items are more"),
    ],
)
def test_an_error_names_its_field(wrong: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_dataclass(Box, wrong)
