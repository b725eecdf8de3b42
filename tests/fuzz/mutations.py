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
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": {}}, [None], {"a": 1}, ["x"], [0], [[0]])
DEEP = (300, 900, 3_000)
"""Levels: what reads JSON takes, what it takes and what comes after it may not, and more than Python's own limit."""


def document(dice: Random, valid: Any) -> Mutated:
    """Of what JSON can hold, and of numbers that it cannot."""
    places = list(_places(valid))
    place = dice.choice(places)
    how, new = dice.choice(_IN_DOCUMENTS)(dice, _at(valid, place), [_at(valid, other) for other in places])
    return Mutated(_with(valid, place, new), f"{how} at {_written(place)}", place)


def content(dice: Random, valid: bytes) -> Mutated:
    """Of bytes."""
    how, new = dice.choice(_IN_BYTES)(dice, valid)
    return Mutated(new, how)


def text(dice: Random, valid: Any) -> Mutated:
    """A document as JSON's bytes: mostly another document, else what is no JSON, or hardly."""
    if dice.random() < 0.75:
        found = document(dice, valid)
        return Mutated(as_json(found.value), found.how, found.place)
    written = as_json(valid)
    if dice.random() < 0.5:
        return content(dice, written)
    hole = as_json(_with(valid, dice.choice(list(_places(valid))), _HOLE))
    how, filling = dice.choice(_NO_JSON)
    return Mutated(hole.replace(json.dumps(_HOLE).encode(), filling, 1), how)


def word(dice: Random, valid: str) -> Mutated:
    """Of a line of text."""
    if dice.random() < 0.3:
        return Mutated(dice.choice(WORDS), "another word")
    found = content(dice, valid.encode())
    return Mutated(found.value.decode(errors="replace"), found.how)


def one_of(dice: Random, valid: Mapping[str, Any], mutate: Mapping[str, Callable[[Random, Any], Mutated]]) -> Mutated:
    """Of several parts, one is mutated. `mutate`: those that may be, and how."""
    name = dice.choice(sorted(mutate.keys() & valid.keys()))
    found = mutate[name](dice, valid[name])
    return Mutated({**valid, name: found.value}, f"{name}: {found.how}", found.place)


def as_json(value: Any) -> bytes:
    """Also of integers that Python does not write by itself, and of what is nested too deeply for it."""
    try:
        words = json.dumps(value)
    except (RecursionError, TypeError, ValueError):
        words = "".join(_pieces(value))
    return words.encode(errors="surrogatepass")


def written(value: Any) -> bytes:
    """What `text` makes, or the valid document itself."""
    return value if isinstance(value, bytes) else as_json(value)


_HOLE = "\x01hole\x01"


def _pieces(value: Any) -> Iterator[str]:
    """Without recursion."""
    waiting: list[Any] = [("value", value)]
    while waiting:
        kind, each = waiting.pop()
        if kind == "text":
            yield each
        elif isinstance(each, Mapping):
            parts: list[Any] = [("text", "{")]
            for i, (key, item) in enumerate(each.items()):
                parts += [("text", ("," if i else "") + json.dumps(str(key)) + ":"), ("value", item)]
            waiting += reversed([*parts, ("text", "}")])
        elif isinstance(each, (list, tuple)):
            parts = [("text", "[")]
            for i, item in enumerate(each):
                parts += [("text", ",")] * bool(i) + [("value", item)]
            waiting += reversed([*parts, ("text", "]")])
        elif isinstance(each, int) and not isinstance(each, bool) and abs(each) > 10**1000:
            yield f"{'-' if each < 0 else ''}1{'0' * 5000}"
        else:
            yield json.dumps(each)


def _places(value: Any, at: Path = ()) -> Iterator[Path]:
    yield at
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for key, item in items:
        yield from _places(item, (*at, key))


def _at(value: Any, place: Path) -> Any:
    for key in place:
        value = value[key]
    return value


class _Gone:
    """In the place of what is dropped."""


_GONE = _Gone()


def _with(value: Any, place: Path, new: Any) -> Any:
    """A copy with `new` at `place`."""
    if not place:
        return {} if new is _GONE else new
    key, *rest = place
    inner = new if not rest else _with(value[key], tuple(rest), new)
    if isinstance(value, Mapping):
        return {k: inner if k == key else item for k, item in value.items() if k != key or inner is not _GONE}
    items = [inner if i == key else item for i, item in enumerate(value)]
    return [item for item in items if item is not _GONE]


def _written(place: Path) -> str:
    return ".".join(map(str, place)) or "the whole"


_Found = tuple[str, Any]


def _drop(*_: Any) -> _Found:
    return "dropped", _GONE


def _retyped(dice: Random, *_: Any) -> _Found:
    new = dice.choice(OTHERS)
    return f"{new!r}", new


def _number(dice: Random, *_: Any) -> _Found:
    new = dice.choice(NUMBERS)
    return f"a number of {new.bit_length()} bits" if isinstance(new, int) else f"{new!r}", new


def _word(dice: Random, *_: Any) -> _Found:
    new = dice.choice(WORDS)
    return f"{new[:40]!a}", new


def _further(dice: Random, old: Any, everything: Sequence[Any]) -> _Found:
    """One more key, or one more item."""
    if isinstance(old, Mapping):
        key = dice.choice(["extra", "", "__class__", "metadata", *old, "x" * 1000])
        return f"{key[:40]!r} set", {**old, key: dice.choice([*OTHERS, dice.choice(everything)])}
    if isinstance(old, (list, tuple)):
        return "another item", [*old, dice.choice([*OTHERS, dice.choice(everything)])]
    return "in a list", [old]


def _doubled(dice: Random, old: Any, _: Any) -> _Found:
    if isinstance(old, (list, tuple)):
        times = dice.choice([2, 2, 100, 100_000 // max(1, len(old))])
        return f"{times} times over", [*old] * times
    if isinstance(old, str):
        return "twice", old * 2
    if isinstance(old, Mapping) and old:
        key = dice.choice(list(old))
        return "thousands of keys", {**old, **{f"{key}{i}": old[key] for i in range(5_000)}}
    return "in two", [old, old]


def _nested(dice: Random, old: Any, _: Any) -> _Found:
    for _level in range(dice.choice(DEEP)):
        old = {"a": old} if isinstance(old, Mapping) else [old]
    return "deep down", old


def _swapped(dice: Random, _: Any, everything: Sequence[Any]) -> _Found:
    return "what stands elsewhere", dice.choice(everything)


def _nudged(dice: Random, old: Any, _: Any) -> _Found:
    """The neighbours of what is valid: where bounds are off by one, it shows."""
    if isinstance(old, bool) or old is None:
        return "the opposite", not old
    if isinstance(old, (int, float)):
        new = dice.choice([old + 1, old - 1, -old, old * 2, float(old), str(old)])
        return f"{new!r}", new
    if isinstance(old, str):
        return "nearly it", dice.choice([old + " ", old[:-1], old.upper(), old[::-1], f"{old}0"])
    return "turned round", list(old)[::-1]


_IN_DOCUMENTS = (
    _drop,
    _retyped,
    _retyped,
    _number,
    _number,
    _word,
    _word,
    _further,
    _doubled,
    _nested,
    _swapped,
    _nudged,
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


def _flipped(dice: Random, old: bytes) -> _Found:
    new = bytearray(old)
    at = [dice.randrange(len(new)) for _ in range(dice.choice([1, 1, 1, 4]))] if new else []
    for i in at:
        new[i] ^= 1 << dice.randrange(8)
    return f"bits flipped at {at}", bytes(new)


def _cut(dice: Random, old: bytes) -> _Found:
    length = dice.choice([0, 1, 7, 8, len(old) // 2, max(0, len(old) - 1), dice.randrange(len(old) + 1)])
    return f"cut to {length}", old[:length]


def _longer(dice: Random, old: bytes) -> _Found:
    more = dice.choice([b"\0", b"\n", b"}", dice.randbytes(64), old, b"\0" * 4096])
    return f"{len(more)} bytes more", old + more


def _hole(dice: Random, old: bytes) -> _Found:
    start, length = _span(dice, old)
    filling = dice.choice([b"\0", b"\xff"]) * length
    return f"{length} equal bytes at {start}", old[:start] + filling + old[start + length :]


def _lost(dice: Random, old: bytes) -> _Found:
    start, length = _span(dice, old)
    return f"{length} bytes lost at {start}", old[:start] + old[start + length :]


def _repeated(dice: Random, old: bytes) -> _Found:
    start, length = _span(dice, old)
    return f"{length} bytes twice at {start}", old[: start + length] + old[start:]


def _integer(dice: Random, old: bytes) -> _Found:
    """An extreme number where one may stand, early in it more often than late: that is where lengths are."""
    width = dice.choice([4, 8])
    end = dice.choice([min(len(old), 128), len(old)]) // width
    start = width * dice.randrange(max(1, end))
    number = dice.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
    number &= (1 << 8 * width) - 1
    order: Literal["little", "big"] = "little" if dice.random() < 0.5 else "big"
    return f"{number} at {start}", old[:start] + number.to_bytes(width, order) + old[start + width :]


def _noise(dice: Random, old: bytes) -> _Found:
    start, length = _span(dice, old)
    return f"{length} random bytes at {start}", old[:start] + dice.randbytes(length) + old[start + length :]


def _exchanged(dice: Random, old: bytes) -> _Found:
    middle = dice.randrange(len(old) + 1)
    return f"turned round at {middle}", old[middle:] + old[:middle]


def _span(dice: Random, old: bytes) -> tuple[int, int]:
    start = dice.randrange(len(old) + 1)
    return start, min(dice.choice([1, 4, 8, 64, 1024]), len(old) - start)


_IN_BYTES = (_flipped, _flipped, _cut, _longer, _hole, _lost, _repeated, _integer, _integer, _noise, _exchanged)
