"""A valid value, then one mutation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, TypeVar

Value = TypeVar("Value")
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Mutated:
    """What differs from the valid value in one place."""

    value: Any
    how: str  # for people
    place: Path = ()  # in the document; (): all of it, or of bytes


NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 10**5000, -(10**5000)),
    *(0.5, -0.5, -0.0, 5e-324, 1e-12, 1e12, 1e18, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
)
WORDS = (
    *("", " ", "x", "0", "-1", "1e308", "NaN", "²", "٣", "--5", "\0", "a\nb", "\u202egpj", "\ud800", "é" * 300),
    *(
        "../../../etc/passwd",
        "/etc/passwd",
        "1" * 5000,
        "0-99999999999",
        "7*99999999999",
        "0-9999999999999999999999",
        "x" * 1_000_000,
    ),
    *("%s%n", "{}", "[[[[", "1h", "99999999999999999999h", "true", "null", "a-w0-0", "a\r\nHost: b"),
)
OTHER_TYPES: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": {}}, [None], {"a": 1}, ["x"], [0], [[0]])
NESTING_LEVELS = (300, 900, 3_000)
"""Levels: what reads JSON takes, what it takes and what comes after it may not, and more than Python's own limit."""


def mutate_document(rng: Random, valid: Any) -> Mutated:
    """Of what JSON can hold, and of numbers that it cannot."""
    places = list(_iterate_places(valid))
    place = rng.choice(places)
    description, new = rng.choice(_IN_DOCUMENTS)(
        rng, _get_value(valid, place), [_get_value(valid, other) for other in places]
    )
    return Mutated(_replace_value(valid, place, new), f"{description} at {_format_place(place)}", place)


def mutate_bytes(rng: Random, valid: bytes) -> Mutated:
    """Of bytes."""
    description, new = rng.choice(_IN_BYTES)(rng, valid)
    return Mutated(new, description)


def mutate_text(rng: Random, valid: Any) -> Mutated:
    """A document as JSON's bytes: mostly another document, else what is no JSON, or hardly."""
    if rng.random() < 0.75:
        mutated = mutate_document(rng, valid)
        return Mutated(as_json(mutated.value), mutated.how, mutated.place)
    encoded = as_json(valid)
    if rng.random() < 0.5:
        return mutate_bytes(rng, encoded)
    template = as_json(_replace_value(valid, rng.choice(list(_iterate_places(valid))), _HOLE))
    description, filling = rng.choice(_NO_JSON)
    return Mutated(template.replace(json.dumps(_HOLE).encode(), filling, 1), description)


def mutate_word(rng: Random, valid: str) -> Mutated:
    """Of a line of text."""
    if rng.random() < 0.3:
        return Mutated(rng.choice(WORDS), "another word")
    mutated = mutate_bytes(rng, valid.encode())
    return Mutated(mutated.value.decode(errors="replace"), mutated.how)


def mutate_one_part(
    rng: Random, valid: Mapping[str, Any], mutate: Mapping[str, Callable[[Random, Any], Mutated]]
) -> Mutated:
    """Of several parts, one is mutated. `mutate`: those that may be, and how."""
    name = rng.choice(sorted(mutate.keys() & valid.keys()))
    mutated = mutate[name](rng, valid[name])
    return Mutated({**valid, name: mutated.value}, f"{name}: {mutated.how}", mutated.place)


def as_json(value: Any) -> bytes:
    """Also of integers that Python does not write by itself, and of what is nested too deeply for it."""
    try:
        text = json.dumps(value)
    except (RecursionError, TypeError, ValueError):
        text = "".join(_iterate_pieces(value))
    return text.encode(errors="surrogatepass")


def to_bytes(value: Any) -> bytes:
    """What `mutate_text` makes, or the valid document itself."""
    return value if isinstance(value, bytes) else as_json(value)


_HOLE = "\x01hole\x01"


def _iterate_pieces(value: Any) -> Iterator[str]:
    """Without recursion."""
    stack: list[Any] = [("value", value)]
    while stack:
        kind, node = stack.pop()
        if kind == "text":
            yield node
        elif isinstance(node, Mapping):
            parts: list[Any] = [("text", "{")]
            for i, (key, item) in enumerate(node.items()):
                parts += [("text", ("," if i else "") + json.dumps(str(key)) + ":"), ("value", item)]
            stack += reversed([*parts, ("text", "}")])
        elif isinstance(node, (list, tuple)):
            parts = [("text", "[")]
            for i, item in enumerate(node):
                parts += [("text", ",")] * bool(i) + [("value", item)]
            stack += reversed([*parts, ("text", "]")])
        elif isinstance(node, int) and not isinstance(node, bool) and abs(node) > 10**1000:
            yield f"{'-' if node < 0 else ''}1{'0' * 5000}"
        else:
            yield json.dumps(node)


def _iterate_places(value: Any, at: Path = ()) -> Iterator[Path]:
    yield at
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for key, item in items:
        yield from _iterate_places(item, (*at, key))


def _get_value(value: Any, place: Path) -> Any:
    for key in place:
        value = value[key]
    return value


class _Gone:
    """In the place of what is dropped."""


_GONE = _Gone()


def _replace_value(value: Any, place: Path, new: Any) -> Any:
    """A copy with `new` at `place`."""
    if not place:
        return {} if new is _GONE else new
    key, *rest = place
    inner = new if not rest else _replace_value(value[key], tuple(rest), new)
    if isinstance(value, Mapping):
        return {k: inner if k == key else item for k, item in value.items() if k != key or inner is not _GONE}
    items = [inner if i == key else item for i, item in enumerate(value)]
    return [item for item in items if item is not _GONE]


def _format_place(place: Path) -> str:
    return ".".join(map(str, place)) or "the whole"


_Found = tuple[str, Any]


def _drop_value(*_: Any) -> _Found:
    return "dropped", _GONE


def _change_type(rng: Random, *_: Any) -> _Found:
    new = rng.choice(OTHER_TYPES)
    return f"{new!r}", new


def _put_number(rng: Random, *_: Any) -> _Found:
    new = rng.choice(NUMBERS)
    return f"a number of {new.bit_length()} bits" if isinstance(new, int) else f"{new!r}", new


def _put_word(rng: Random, *_: Any) -> _Found:
    new = rng.choice(WORDS)
    return f"{new[:40]!a}", new


def _add_item(rng: Random, old: Any, everything: Sequence[Any]) -> _Found:
    """One more key, or one more item."""
    if isinstance(old, Mapping):
        key = rng.choice(["extra", "", "__class__", "metadata", *old, "x" * 1000])
        return f"{key[:40]!r} set", {**old, key: rng.choice([*OTHER_TYPES, rng.choice(everything)])}
    if isinstance(old, (list, tuple)):
        return "another item", [*old, rng.choice([*OTHER_TYPES, rng.choice(everything)])]
    return "in a list", [old]


def _repeat_value(rng: Random, old: Any, _: Any) -> _Found:
    if isinstance(old, (list, tuple)):
        times = rng.choice([2, 2, 100, 100_000 // max(1, len(old))])
        return f"{times} times over", [*old] * times
    if isinstance(old, str):
        return "twice", old * 2
    if isinstance(old, Mapping) and old:
        key = rng.choice(list(old))
        return "thousands of keys", {**old, **{f"{key}{i}": old[key] for i in range(5_000)}}
    return "in two", [old, old]


def _nest_value(rng: Random, old: Any, _: Any) -> _Found:
    for _level in range(rng.choice(NESTING_LEVELS)):
        old = {"a": old} if isinstance(old, Mapping) else [old]
    return "deep down", old


def _swap_value(rng: Random, _: Any, everything: Sequence[Any]) -> _Found:
    return "what stands elsewhere", rng.choice(everything)


def _nudge_value(rng: Random, old: Any, _: Any) -> _Found:
    """The neighbors of what is valid: where bounds are off by one, it shows."""
    if isinstance(old, bool) or old is None:
        return "the opposite", not old
    if isinstance(old, (int, float)):
        new = rng.choice([old + 1, old - 1, -old, old * 2, float(old), str(old)])
        return f"{new!r}", new
    if isinstance(old, str):
        return "nearly it", rng.choice([old + " ", old[:-1], old.upper(), old[::-1], f"{old}0"])
    return "turned round", list(old)[::-1]


_IN_DOCUMENTS = (
    _drop_value,
    _change_type,
    _change_type,
    _put_number,
    _put_number,
    _put_word,
    _put_word,
    _add_item,
    _repeat_value,
    _nest_value,
    _swap_value,
    _nudge_value,
)

_NO_JSON: tuple[tuple[str, bytes], ...] = (
    ("NaN", b"NaN"),
    ("Infinity", b"-Infinity"),
    ("5,000 digits", b"9" * 5_000),
    ("an exponent", b"1e99999"),
    ("100,000 brackets", b"[" * 100_000),
    ("100,000 levels", b"[" * 100_000 + b"]" * 100_000),
    ("100,000 objects", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    ("a key twice", b'{"a":1,"a":[]}'),
    ("half a surrogate pair", rb'"\ud800"'),
    ("no UTF-8", b'"\xff\xfe"'),
    ("a byte-order mark", b"\xef\xbb\xbf1"),
    ("a string of 10 MB", b'"' + b"x" * 10_000_000 + b'"'),
    ("a million zeros", b"[" + b"0," * 1_000_000 + b"0]"),
    ("nothing", b""),
)


def _flip_bits(rng: Random, old: bytes) -> _Found:
    new = bytearray(old)
    positions = [rng.randrange(len(new)) for _ in range(rng.choice([1, 1, 1, 4]))] if new else []
    for i in positions:
        new[i] ^= 1 << rng.randrange(8)
    return f"bits flipped at {positions}", bytes(new)


def _cut_bytes(rng: Random, old: bytes) -> _Found:
    length = rng.choice([0, 1, 7, 8, len(old) // 2, max(0, len(old) - 1), rng.randrange(len(old) + 1)])
    return f"cut to {length}", old[:length]


def _append_bytes(rng: Random, old: bytes) -> _Found:
    extra = rng.choice([b"\0", b"\n", b"}", rng.randbytes(64), old, b"\0" * 4096])
    return f"{len(extra)} bytes more", old + extra


def _fill_bytes(rng: Random, old: bytes) -> _Found:
    start, length = _draw_span(rng, old)
    filling = rng.choice([b"\0", b"\xff"]) * length
    return f"{length} equal bytes at {start}", old[:start] + filling + old[start + length :]


def _drop_bytes(rng: Random, old: bytes) -> _Found:
    start, length = _draw_span(rng, old)
    return f"{length} bytes lost at {start}", old[:start] + old[start + length :]


def _repeat_bytes(rng: Random, old: bytes) -> _Found:
    start, length = _draw_span(rng, old)
    return f"{length} bytes twice at {start}", old[: start + length] + old[start:]


def _put_integer(rng: Random, old: bytes) -> _Found:
    """An extreme number where one may stand, early in it more often than late: that is where lengths are."""
    width = rng.choice([4, 8])
    end = rng.choice([min(len(old), 128), len(old)]) // width
    start = width * rng.randrange(max(1, end))
    number = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
    number &= (1 << 8 * width) - 1
    order: Literal["little", "big"] = "little" if rng.random() < 0.5 else "big"
    return f"{number} at {start}", old[:start] + number.to_bytes(width, order) + old[start + width :]


def _put_noise(rng: Random, old: bytes) -> _Found:
    start, length = _draw_span(rng, old)
    return f"{length} random bytes at {start}", old[:start] + rng.randbytes(length) + old[start + length :]


def _rotate_bytes(rng: Random, old: bytes) -> _Found:
    middle = rng.randrange(len(old) + 1)
    return f"turned round at {middle}", old[middle:] + old[:middle]


def _draw_span(rng: Random, old: bytes) -> tuple[int, int]:
    start = rng.randrange(len(old) + 1)
    return start, min(rng.choice([1, 4, 8, 64, 1024]), len(old) - start)


_IN_BYTES = (
    _flip_bits,
    _flip_bits,
    _cut_bytes,
    _append_bytes,
    _fill_bytes,
    _drop_bytes,
    _repeat_bytes,
    _put_integer,
    _put_integer,
    _put_noise,
    _rotate_bytes,
)
