"""Plain values: what is read is what was written, and reading any bytes runs nothing."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pacekeeper.safe_serialization import allow_classes, decode_tree, encode_tree, pack_value, unpack_value
from pacekeeper_analysis.errors import InputError


class Color(Enum):
    RED = auto()


@dataclass(frozen=True)
class Point:
    x: int
    y: tuple[int, ...]


@dataclass(frozen=True)
class Unknown:
    x: int = 1


@dataclass(frozen=True)
class Grown:
    x: int
    since: str = "the next version"


allow_classes(Color, Point, Grown)


def is_same(found: Any, wanted: Any) -> bool:
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
    if isinstance(wanted, np.ndarray):
        return found.dtype == wanted.dtype and np.array_equal(found, wanted)
    if isinstance(wanted, dict):
        return list(found) == list(wanted) and all(is_same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(is_same, found, wanted))
    return bool(found == wanted)


VALUES: list[Any] = [
    None, True, 0, -(2**70), 0.1, 5e-324, math.inf, "", "a\u2028\u00e9", b"", b"\x00\xff" * 40, 1 + 2j,
    [], (), {}, [1, [2, (3,)]], {0: "a", "0": "b", (1, "k"): [None]}, {1, 2}, {"dict": {"tuple": []}},
    OrderedDict(b=1, a=2), Counter({30: 2, 80: 1}), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"),
    np.float64(0.1), np.float32(0.1), np.int64(-1), np.bool_(True),
    np.arange(6, dtype=np.uint32).reshape(2, 3), np.array([], dtype=np.float16), np.array(["a", "bc"]), np.array(3),
    torch.arange(6).view(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 4), torch.tensor([True, False]),
    torch.arange(6.0).view(2, 3).t(), Color.RED, Point(1, (2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    assert is_same(unpack_value(pack_value(value)), value)
    assert is_same(unpack_value(pack_value({"deep": [value]})), {"deep": [value]})


def test_a_number_that_is_nan_stays_nan() -> None:
    assert math.isnan(unpack_value(pack_value(math.nan)))


def test_trailing_bytes_do_no_harm() -> None:
    assert unpack_value(pack_value([1, torch.ones(3).tolist()]) + b"\0" * 99) == [1, [1.0] * 3]


def test_tensors_that_are_read_share_nothing() -> None:
    first, second = unpack_value(pack_value([torch.zeros(3), torch.zeros(3)]))
    first.fill_(1)
    assert second.tolist() == [0.0] * 3
    assert first.untyped_storage().nbytes() == 12


@pytest.mark.parametrize(
    ("state", "place", "what"),
    [
        ({"model": {"extra": lambda: 1}}, "model.extra", "builtins.function"),
        ([{"x": (0, object())}], "0.x.1", "builtins.object"),
        ({"when": Path("/")}, "when", "PosixPath"),
        ({"point": Unknown()}, "point", "Unknown"),
        ({"array": np.array([object()])}, "array", "an array of object"),
        ({"tensor": torch.eye(2).to_sparse()}, "tensor", "sparse"),
        (object(), "the state", "builtins.object"),
    ],
)
def test_an_unsupported_value_is_named_with_its_place_and_the_remedy(state: Any, place: str, what: str) -> None:
    with pytest.raises(InputError, match=rf"^{place}: .*{what}.* cannot be saved; let state_dict\(\) return tensors"):
        pack_value(state)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _build_packed(skeleton: Any, layout: Any = ()) -> bytes:
    """Build what an attacker who knows the format could send."""
    description = json.dumps([skeleton, layout]).encode()
    return b"PKPLAIN1" + len(description).to_bytes(8, "little") + description


GOOD = pack_value({"a": torch.arange(100)})
HOSTILE = {
    "nothing": b"",
    "magic only": b"PKPLAIN1",
    "a giant length": b"PKPLAIN1" + b"\xff" * 8 + b"{}",
    "cut off": GOOD[:-500],
    "brackets": b"PKPLAIN1" + (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "no tag that we know": _build_packed({"system": "rm"}),
    "two tags": _build_packed({"tuple": [], "dict": []}),
    "a class that is not allowed": _build_packed({"object": ["Popen", "true"]}),
    "a class of this module": _build_packed({"object": ["Unknown", 1]}),
    "no member": _build_packed({"member": ["Color", "__class__"]}),
    "a member of no enumeration": _build_packed({"member": ["Point", "x"]}),
    "too few fields": _build_packed({"object": ["Point", 1]}),
    "too many fields": _build_packed({"object": ["Point", 1, 2, 3]}),
    "objects in an array": _build_packed({"array": ["|O", [1], 0]}, [["uint8", 8]]),
    "a tensor that is not there": _build_packed({"tensor": 7}),
    "a tensor larger than the rest": _build_packed({"tensor": 0}, [["float32", 1 << 40]]),
    "a negative length": _build_packed({"tensor": 0}, [["float32", -1]]),
    "a type that is none": _build_packed({"tensor": 0}, [["load", 1]]),
    "a name in torch that is no type": _build_packed({"torch": "load"}),
    "a key that cannot be one": _build_packed({"dict": [[[], 1]]}),
    "sharded over nothing": _build_packed({"sharded": [0, [0], [1], [1]]}, [["uint8", 0]]),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_bytes_of_an_attacker_are_an_input_error(content: bytes) -> None:
    with pytest.raises(InputError, match="not what Pacekeeper writes"):
        unpack_value(content)


def test_fields_that_an_older_version_did_not_write_are_at_their_defaults() -> None:
    assert unpack_value(_build_packed({"object": ["Grown", 1]})) == Grown(1)


def test_a_pickle_is_not_unpickled(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    for content in (bomb, b"PKPLAIN1" + len(bomb).to_bytes(8, "little") + bomb, _build_packed({"bytes": 0}) + bomb):
        with pytest.raises(InputError):
            unpack_value(content)
    assert unpack_value(pack_value(bomb)) == bomb
    assert not (tmp_path / "exploded").exists()


def test_the_skeleton_is_json_and_the_tensors_stay_where_they_are() -> None:
    tensors: list[torch.Tensor] = []
    weight = torch.ones(2, requires_grad=True)
    skeleton = json.loads(json.dumps(encode_tree({"w": weight, "lr": 0.1}, tensors)))
    assert tensors[0].data_ptr() == weight.data_ptr()
    assert not tensors[0].requires_grad
    assert decode_tree(skeleton, [torch.zeros(2)])["w"].tolist() == [0.0, 0.0]
