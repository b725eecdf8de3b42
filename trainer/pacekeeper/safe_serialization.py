"""Trees of plain values as JSON and tensors: the format of saved states and of messages between ranks.

It replaces pickle, whose reader runs code that the writer chooses. Here a reader creates only the values listed below,
for any input. Supported are dicts, lists, tuples, sets, strings, numbers, bytes, tensors (of sharded ones, this rank's
part), numpy arrays and numbers, and torch's types, shapes and layouts. An instance of a subclass is stored as the
listed class. Dataclasses and enumerations are supported after their module has called `allow_classes`.
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
from pacekeeper_analysis.protocol.decoding import parse_json

_PACKED_MAGIC = b"PKPLAIN1"
_PACKED_HEADER_BYTES = len(_PACKED_MAGIC) + 8
_TENSOR_ALIGNMENT_BYTES = 64
_ARRAY_KINDS = "biufcSU"
"""Kinds of numpy types that consist of bytes only."""
_TORCH_CONSTANTS: dict[str, Any] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}
_allowed: dict[str, type] = {}

TensorLayout = Sequence[tuple[torch.dtype, Sequence[int]]]
"""Types and shapes of tensors."""


def allow_classes(*classes: type) -> None:
    """Allow instances of these dataclasses, and members of these enumerations, as plain values from now on."""
    _allowed.update({allowed_class.__name__: allowed_class for allowed_class in classes})


def encode_tree(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the part of `value` that JSON can hold, and append the rest to `tensors`.

    Of sharded tensors it takes this rank's part. Raises InputError that names the unsupported value and its path.
    """
    try:
        return _encode_value(value, tensors)
    except _NotSerializable as error:
        raise InputError(
            f"{'.'.join(error.path[::-1]) or 'the state'}: {error.what} cannot be saved; let state_dict() return "
            "tensors, numpy arrays, numbers, strings and bytes, and dicts, lists, tuples and sets of these"
        ) from None


def decode_tree(skeleton: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None = None) -> Any:
    """Return the value that `encode_tree` was given. `mesh`: mesh of the sharded tensors; None if there are none.

    Raises InputError if `skeleton` is not from `encode_tree`.
    """
    try:
        return _decode_value(skeleton, tensors, mesh)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(f"not what Pacekeeper writes: {error!r}") from error


def pack_value(value: Any) -> bytes:
    """Return `value` as one byte string, without sharded tensors. Raises InputError as `encode_tree` does."""
    tensors: list[torch.Tensor] = []
    skeleton = encode_tree(value, tensors)
    description = json.dumps([skeleton, describe_layout(get_layout(tensors))], separators=(",", ":")).encode()
    start = align_bytes(_PACKED_HEADER_BYTES + len(description))
    content = bytearray(start + compute_layout_bytes(get_layout(tensors)))
    content[:_PACKED_HEADER_BYTES] = _PACKED_MAGIC + len(description).to_bytes(8, "little")
    content[_PACKED_HEADER_BYTES : _PACKED_HEADER_BYTES + len(description)] = description
    buffer = torch.frombuffer(content, dtype=torch.uint8)
    for target, tensor in zip(view_tensors(buffer, start, get_layout(tensors)), tensors, strict=True):
        target.copy_(tensor)
    return bytes(content)


def unpack_value(content: bytes | bytearray | memoryview) -> Any:
    """Return the value that `pack_value` was given. Raises InputError if `content` is not from `pack_value`."""
    buffer = bytearray(content)
    if bytes(buffer[: len(_PACKED_MAGIC)]) != _PACKED_MAGIC or len(buffer) < _PACKED_HEADER_BYTES:
        raise InputError("not what Pacekeeper writes: another format")
    end = _PACKED_HEADER_BYTES + int.from_bytes(buffer[len(_PACKED_MAGIC) : _PACKED_HEADER_BYTES], "little")
    try:
        skeleton, description = parse_json(buffer[_PACKED_HEADER_BYTES:end].decode())
        views = view_tensors(torch.frombuffer(buffer, dtype=torch.uint8), align_bytes(end), read_layout(description))
        tensors = [tensor.clone() for tensor in views]  # each with its own storage, as parts of torch require
    except (LookupError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise InputError(f"not what Pacekeeper writes: {error!r}") from error
    return decode_tree(skeleton, tensors)


# Tensors that lie one after the other


def get_layout(tensors: Sequence[torch.Tensor]) -> TensorLayout:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def describe_layout(layout: TensorLayout) -> list[list[Any]]:
    """Return the layout in a form for JSON."""
    return [[str(dtype).removeprefix("torch."), *shape] for dtype, shape in layout]


def read_layout(description: Sequence[Sequence[Any]]) -> TensorLayout:
    """Return the layout that `describe_layout` described. Raises LookupError, TypeError or ValueError if it is none."""
    layout = [(_TORCH_CONSTANTS[dtype], [int(length) for length in shape]) for dtype, *shape in description]
    if any(length < 0 for _, shape in layout for length in shape):
        raise ValueError("a negative length")
    return layout


def compute_layout_bytes(layout: TensorLayout) -> int:
    """Return the bytes that the layout's tensors take."""
    return sum(align_bytes(math.prod(shape) * dtype.itemsize) for dtype, shape in layout)


def view_tensors(content: torch.Tensor, offset: int, layout: TensorLayout) -> list[torch.Tensor]:
    """Return views of the tensors in `content` (uint8) from `offset` on. Raises RuntimeError if it is too short."""
    views = []
    for dtype, shape in layout:
        nbytes = math.prod(shape) * dtype.itemsize
        views.append(content[offset : offset + nbytes].view(dtype).view(list(shape)))
        offset += align_bytes(nbytes)
    return views


def align_bytes(nbytes: int) -> int:
    return -(-nbytes // _TENSOR_ALIGNMENT_BYTES) * _TENSOR_ALIGNMENT_BYTES


# Values: JSON's own as they are, lists as lists, and everything else as {"tag": …}


class _NotSerializable(Exception):
    def __init__(self, what: str) -> None:
        self.what = what
        self.path: list[str] = []  # innermost first


def _encode_value(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, np.generic):  # before float: np.float64 is a subclass of it
        return _encode_number(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for types, encode in _VALUE_ENCODERS:
        if isinstance(value, types):
            return encode(value, tensors)
    if type(value) is _allowed.get(type(value).__name__):
        return _encode_object(value, tensors)
    raise _NotSerializable(f"a {type(value).__module__}.{type(value).__qualname__}")


def _decode_value(skeleton: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> Any:
    if isinstance(skeleton, list):
        return [_decode_value(item, tensors, mesh) for item in skeleton]
    if isinstance(skeleton, dict):
        ((tag, content),) = skeleton.items()
        return _VALUE_DECODERS[tag](content, tensors, mesh)
    return skeleton


def _encode_dict(value: Mapping[Any, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    tag = "ordered" if isinstance(value, OrderedDict) else "counter" if isinstance(value, Counter) else "dict"
    return {tag: [[_encode_value(key, tensors), _encode_item(key, item, tensors)] for key, item in value.items()]}


def _encode_item(key: object, value: Any, tensors: list[torch.Tensor]) -> Any:
    try:
        return _encode_value(value, tensors)
    except _NotSerializable as error:
        error.path.append(str(key))
        raise


def _encode_list(value: Sequence[Any], tensors: list[torch.Tensor]) -> list[Any]:
    return [_encode_item(index, item, tensors) for index, item in enumerate(value)]


def _encode_tensor(value: torch.Tensor, tensors: list[torch.Tensor]) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise _NotSerializable("a tensor that is sparse, quantized or without content")
    tensors.append(value.detach())
    return {"tensor": len(tensors) - 1}


def _encode_sharded(value: DTensor, tensors: list[torch.Tensor]) -> dict[str, Any]:
    dimensions = [_get_shard_dimension(placement) for placement in value.placements]
    tensors.append(value.to_local().detach())
    return {"sharded": [len(tensors) - 1, dimensions, list(value.shape), list(value.stride())]}


def _get_shard_dimension(placement: Placement) -> int | None:
    """Return the dimension along which a tensor is sharded; None: it is replicated."""
    if type(placement) not in (Shard, Replicate):
        raise _NotSerializable(f"a tensor placed by {placement}")
    return placement.dim if isinstance(placement, Shard) else None


def _decode_sharded(content: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> DTensor:
    index, dimensions, shape, stride = content
    if mesh is None:
        raise ValueError("a sharded tensor without the mesh that it is sharded over")
    placements = [Replicate() if dimension is None else Shard(dimension) for dimension in dimensions]
    local, full = tensors[index].to(mesh.device_type), torch.Size(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full, stride=tuple(stride))


def _encode_bytes(value: bytes | bytearray | memoryview, tensors: list[torch.Tensor]) -> dict[str, Any]:
    return {"bytes": _append_bytes(value, tensors)}


def _encode_array(value: np.ndarray[Any, Any], tensors: list[torch.Tensor]) -> dict[str, Any]:
    if value.dtype.kind not in _ARRAY_KINDS:
        raise _NotSerializable(f"an array of {value.dtype}")
    return {"array": [value.dtype.str, list(value.shape), _append_bytes(value.tobytes(), tensors)]}


def _decode_array(content: Any, tensors: Sequence[torch.Tensor], _: object) -> np.ndarray[Any, Any]:
    name, shape, index = content
    dtype = np.dtype(str(name))
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(_decode_bytes(index, tensors, None), dtype).reshape(shape).copy()


def _append_bytes(value: bytes | bytearray | memoryview, tensors: list[torch.Tensor]) -> int:
    buffer = bytearray(value)
    tensors.append(torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8))
    return len(tensors) - 1


def _decode_bytes(index: Any, tensors: Sequence[torch.Tensor], _: object) -> bytes:
    content: bytes = tensors[index].numpy().tobytes()
    return content


def _encode_number(value: np.generic) -> dict[str, Any]:
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise _NotSerializable(f"a number of type {value.dtype}")
    return {"number": [value.dtype.str, value.item()]}


def _decode_number(content: Any, *_: object) -> Any:
    name, value = content
    dtype = np.dtype(str(name))
    if dtype.kind not in "biuf":
        raise ValueError(f"a number of type {dtype}")
    return dtype.type(value)


def _encode_object(value: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    name = type(value).__name__
    if isinstance(value, Enum):
        return {"member": [name, value.name]}
    return {
        "object": [name, *(_encode_item(f.name, getattr(value, f.name), tensors) for f in dataclasses.fields(value))]
    }


def _decode_object(content: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> Any:
    name, *values = content
    fields = dataclasses.fields(_allowed[name])
    if len(values) > len(fields):
        raise ValueError(f"a {name} with {len(values)} fields instead of {len(fields)}")
    pairs = zip(fields, values, strict=False)  # a newer version may add fields at the end; they get their defaults
    return _allowed[name](**{field.name: _decode_value(value, tensors, mesh) for field, value in pairs})


def _make_pairs_decoder(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def put(content: Any, tensors: Sequence[torch.Tensor], mesh: DeviceMesh | None) -> Any:
        return kind({_decode_value(key, tensors, mesh): _decode_value(value, tensors, mesh) for key, value in content})

    return put


def _make_items_decoder(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda content, tensors, mesh: kind(_decode_value(content, tensors, mesh))


def _decode_member(content: Any, *_: object) -> Any:
    name, member = content
    return _allowed[name][member]  # type: ignore[index]  # a class that is no enumeration has no members: TypeError


_VALUE_ENCODERS: tuple[tuple[Any, Callable[[Any, list[torch.Tensor]], Any]], ...] = (
    (DTensor, _encode_sharded),
    (torch.Tensor, _encode_tensor),
    (dict, _encode_dict),
    (list, _encode_list),
    (torch.Size, lambda value, _: {"size": list(value)}),
    (tuple, lambda value, tensors: {"tuple": _encode_list(value, tensors)}),
    ((set, frozenset), lambda value, tensors: {"set": _encode_list(list(value), tensors)}),
    ((bytes, bytearray, memoryview), _encode_bytes),
    (np.ndarray, _encode_array),
    (complex, lambda value, _: {"complex": [value.real, value.imag]}),
    ((torch.dtype, torch.layout, torch.memory_format), lambda value, _: {"torch": str(value).removeprefix("torch.")}),
    (torch.device, lambda value, _: {"device": str(value)}),
)
"""The first match counts."""

_VALUE_DECODERS: dict[str, Callable[..., Any]] = {
    "tensor": lambda index, tensors, _: tensors[index],
    "sharded": _decode_sharded,
    "dict": _make_pairs_decoder(dict),
    "ordered": _make_pairs_decoder(OrderedDict),
    "counter": _make_pairs_decoder(Counter),
    "size": lambda content, *_: torch.Size(content),
    "tuple": _make_items_decoder(tuple),
    "set": _make_items_decoder(set),
    "bytes": _decode_bytes,
    "array": _decode_array,
    "number": _decode_number,
    "complex": lambda content, *_: complex(*content),
    "torch": lambda name, *_: _TORCH_CONSTANTS[name],
    "device": lambda name, *_: torch.device(name),
    "object": _decode_object,
    "member": _decode_member,
}
