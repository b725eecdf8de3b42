"""Trees of plain values as JSON and tensors: the form in which a state is kept, and in which ranks tell each other
things.

It stands in the place of pickle, whose reader runs what its writer pleases: here a reader makes the values listed below
and nothing else, whatever the bytes. Dicts, lists, tuples, sets, strings, numbers, bytes, tensors (this rank's part of
sharded ones), numpy arrays and numbers, and torch's types, shapes and layouts go in; of a subclass, the value of the
class that is listed. Dataclasses and enumerations do where their module says so by `allow`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json

_MAGIC = b"PKPLAIN1"
_HEAD_BYTES = len(_MAGIC) + 8
_ALIGNMENT = 64
_ARRAYS = "biufcSU"
"""Kinds of numpy's types that are bytes and nothing else."""
_NAMED: dict[str, Any] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
_allowed: dict[str, type] = {}

Layout = Sequence[tuple[torch.dtype, Sequence[int]]]
"""Types and shapes of tensors."""


def allow(*classes: type) -> None:
    """Instances of these dataclasses, and members of these enumerations, are plain from now on."""
    _allowed.update({its.__name__: its for its in classes})


def take_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What JSON can hold of `value`; the rest is appended to `tensors`. Of sharded tensors it takes this rank's part.

    Raises InputError that says what is not plain, and where it stands.
    """
    try:
        return _take(value, tensors)
    except _NotPlain as error:
        raise InputError(
            f"{'.'.join(error.path[::-1]) or 'the state'}: {error.what} cannot be kept; let state_dict() give tensors, "
            "numpy arrays, numbers, strings and bytes, and dicts, lists, tuples and sets of these"
        ) from None


def put_together(skeleton: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None = None) -> Any:
    """The value again. `mesh`: of the sharded tensors; None where there are none.

    Raises InputError where `skeleton` is none of `take_apart`'s.
    """
    try:
        return _put(skeleton, tensors, mesh)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(f"not what Pacekeeper writes: {error!r}") from error


def pack(value: Any) -> bytes:
    """`value` in one piece, without sharded tensors. Raises InputError as `take_apart` does."""
    tensors: list[torch.Tensor] = []
    skeleton = take_apart(value, tensors)
    description = json.dumps([skeleton, describe_layout(layout_of(tensors))], separators=(",", ":")).encode()
    start = aligned(_HEAD_BYTES + len(description))
    content = bytearray(start + size(layout_of(tensors)))
    content[:_HEAD_BYTES] = _MAGIC + len(description).to_bytes(8, "little")
    content[_HEAD_BYTES : _HEAD_BYTES + len(description)] = description
    whole = torch.frombuffer(content, dtype=torch.uint8)
    for target, tensor in zip(views(whole, start, layout_of(tensors)), tensors, strict=True):
        target.copy_(tensor)
    return bytes(content)


def unpack(content: bytes | bytearray | memoryview) -> Any:
    """What `pack` was given. Raises InputError where this is not `pack`'s."""
    own = bytearray(content)
    if bytes(own[: len(_MAGIC)]) != _MAGIC or len(own) < _HEAD_BYTES:
        raise InputError("not what Pacekeeper writes: another format")
    end = _HEAD_BYTES + int.from_bytes(own[len(_MAGIC) : _HEAD_BYTES], "little")
    try:
        skeleton, description = parse_json(own[_HEAD_BYTES:end].decode())
        lying = views(torch.frombuffer(own, dtype=torch.uint8), aligned(end), read_layout(description))
        tensors = [tensor.clone() for tensor in lying]  # each with a storage of its own, as some of torch asks for
    except (LookupError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise InputError(f"not what Pacekeeper writes: {error!r}") from error
    return put_together(skeleton, tensors)


# Tensors that lie one behind the other


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def describe_layout(layout: Layout) -> list[list[Any]]:
    """For JSON."""
    return [[str(dtype).removeprefix("torch."), *shape] for dtype, shape in layout]


def read_layout(described: Sequence[Sequence[Any]]) -> Layout:
    """Raises LookupError, TypeError or ValueError where `described` is no layout."""
    layout = [(_NAMED[dtype], [int(length) for length in shape]) for dtype, *shape in described]
    if any(length < 0 for _, shape in layout for length in shape):
        raise ValueError("a negative length")
    return layout


def size(layout: Layout) -> int:
    """Bytes that its tensors take."""
    return sum(aligned(math.prod(shape) * dtype.itemsize) for dtype, shape in layout)


def views(content: torch.Tensor, offset: int, layout: Layout) -> list[torch.Tensor]:
    """The tensors that lie in `content` (uint8) from `offset` on. Raises RuntimeError where it is too short."""
    found = []
    for dtype, shape in layout:
        nbytes = math.prod(shape) * dtype.itemsize
        found.append(content[offset : offset + nbytes].view(dtype).view(list(shape)))
        offset += aligned(nbytes)
    return found


def aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


# Values: JSON's own as they are, lists as lists, and everything else as {"tag": …}


class _NotPlain(Exception):
    def __init__(self, what: str) -> None:
        self.what = what
        self.path: list[str] = []  # innermost first


def _take(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, np.generic):  # before float, which one of them is
        return _numpy_number(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for types, write in _WRITERS:
        if isinstance(value, types):
            return write(value, tensors)
    if type(value) is _allowed.get(type(value).__name__):
        return _object(value, tensors)
    raise _NotPlain(f"a {type(value).__module__}.{type(value).__qualname__}")


def _put(skeleton: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> Any:
    if isinstance(skeleton, list):
        return [_put(item, tensors, mesh) for item in skeleton]
    if isinstance(skeleton, dict):
        ((tag, content),) = skeleton.items()
        return _READERS[tag](content, tensors, mesh)
    return skeleton


def _dict(value: Mapping[Any, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    tag = "ordered" if isinstance(value, OrderedDict) else "counter" if isinstance(value, Counter) else "dict"
    return {tag: [[_take(key, tensors), _item(key, item, tensors)] for key, item in value.items()]}


def _item(place: object, value: Any, tensors: list[torch.Tensor]) -> Any:
    try:
        return _take(value, tensors)
    except _NotPlain as error:
        error.path.append(str(place))
        raise


def _list(value: Sequence[Any], tensors: list[torch.Tensor]) -> list[Any]:
    return [_item(place, item, tensors) for place, item in enumerate(value)]


def _tensor(value: torch.Tensor, tensors: list[torch.Tensor]) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise _NotPlain("a tensor that is sparse, quantized or without content")
    tensors.append(value.detach())
    return {"tensor": len(tensors) - 1}


def _sharded(value: DTensor, tensors: list[torch.Tensor]) -> dict[str, Any]:
    dimensions = [_dimension(placement) for placement in value.placements]
    tensors.append(value.to_local().detach())
    return {"sharded": [len(tensors) - 1, dimensions, list(value.shape), list(value.stride())]}


def _dimension(placement: Placement) -> int | None:
    """Along which a tensor is sharded; None: it is replicated."""
    if type(placement) not in (Shard, Replicate):
        raise _NotPlain(f"a tensor placed by {placement}")
    return placement.dim if isinstance(placement, Shard) else None


def _put_sharded(content: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> DTensor:
    index, dimensions, shape, stride = content
    if mesh is None:
        raise ValueError("a sharded tensor without the mesh that it is sharded over")
    placements = [Replicate() if dimension is None else Shard(dimension) for dimension in dimensions]
    local, full = tensors[index].to(mesh.device_type), torch.Size(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full, stride=tuple(stride))


def _bytes(value: bytes | bytearray | memoryview, tensors: list[torch.Tensor]) -> dict[str, Any]:
    return {"bytes": _append_bytes(value, tensors)}


def _array(value: np.ndarray[Any, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    if value.dtype.kind not in _ARRAYS:
        raise _NotPlain(f"an array of {value.dtype}")
    return {"array": [value.dtype.str, list(value.shape), _append_bytes(value.tobytes(), tensors)]}


def _put_array(content: Any, tensors: Sequence[torch.Tensor], _: object) -> np.ndarray[Any, Any]:
    name, shape, index = content
    dtype = np.dtype(str(name))
    if dtype.kind not in _ARRAYS:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(_put_bytes(index, tensors, None), dtype).reshape(shape).copy()


def _append_bytes(value: bytes | bytearray | memoryview, tensors: list[torch.Tensor]) -> int:
    own = bytearray(value)
    tensors.append(torch.frombuffer(own, dtype=torch.uint8) if own else torch.empty(0, dtype=torch.uint8))
    return len(tensors) - 1


def _put_bytes(index: Any, tensors: Sequence[torch.Tensor], _: object) -> bytes:
    content: bytes = tensors[index].numpy().tobytes()
    return content


def _numpy_number(value: np.generic) -> dict[str, Any]:
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise _NotPlain(f"a number of type {value.dtype}")
    return {"number": [value.dtype.str, value.item()]}


def _put_number(content: Any, *_: object) -> Any:
    name, value = content
    dtype = np.dtype(str(name))
    if dtype.kind not in "biuf":
        raise ValueError(f"a number of type {dtype}")
    return dtype.type(value)


def _object(value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    name = type(value).__name__
    if isinstance(value, Enum):
        return {"member": [name, value.name]}
    return {"object": [name, *(_item(f.name, getattr(value, f.name), tensors) for f in dataclasses.fields(value))]}


def _put_object(content: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> Any:
    name, *values = content
    fields = dataclasses.fields(_allowed[name])
    if len(values) > len(fields):
        raise ValueError(f"a {name} with {len(values)} fields instead of {len(fields)}")
    pairs = zip(fields, values, strict=False)  # later fields have come with a newer version, and are at their defaults
    return _allowed[name](**{its.name: _put(value, tensors, mesh) for its, value in pairs})


def _put_pairs(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def put(content: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> Any:
        return kind({_put(key, tensors, mesh): _put(value, tensors, mesh) for key, value in content})

    return put


def _put_all(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda content, tensors, mesh: kind(_put(content, tensors, mesh))


def _put_member(content: Any, *_: object) -> Any:
    name, member = content
    return _allowed[name][member]  # type: ignore[index]  # what is no enumeration has no members: refused


_WRITERS: tuple[tuple[Any, Callable[[Any, list[torch.Tensor]], Any]], ...] = (
    (DTensor, _sharded),
    (torch.Tensor, _tensor),
    (dict, _dict),
    (list, _list),
    (torch.Size, lambda value, _: {"size": list(value)}),
    (tuple, lambda value, tensors: {"tuple": _list(value, tensors)}),
    ((set, frozenset), lambda value, tensors: {"set": _list(list(value), tensors)}),
    ((bytes, bytearray, memoryview), _bytes),
    (np.ndarray, _array),
    (complex, lambda value, _: {"complex": [value.real, value.imag]}),
    ((torch.dtype, torch.layout, torch.memory_format), lambda value, _: {"torch": str(value).removeprefix("torch.")}),
    (torch.device, lambda value, _: {"device": str(value)}),
)
"""The first that fits counts."""

_READERS: dict[str, Callable[..., Any]] = {
    "tensor": lambda index, tensors, _: tensors[index],
    "sharded": _put_sharded,
    "dict": _put_pairs(dict),
    "ordered": _put_pairs(OrderedDict),
    "counter": _put_pairs(Counter),
    "size": lambda content, *_: torch.Size(content),
    "tuple": _put_all(tuple),
    "set": _put_all(set),
    "bytes": _put_bytes,
    "array": _put_array,
    "number": _put_number,
    "complex": lambda content, *_: complex(*content),
    "torch": lambda name, *_: _NAMED[name],
    "device": lambda name, *_: torch.device(name),
    "object": _put_object,
    "member": _put_member,
}
