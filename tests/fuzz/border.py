"""A place where what comes from elsewhere is read, and one try at it."""

from __future__ import annotations

import dataclasses
import math
import resource
import signal
import threading
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, NoReturn

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import MaxLength, Within

from .mutations import Mutated

MAX_SECONDS = 10.0
"""Of processor time, for one value: what takes longer grows faster than the value's length."""
MAX_BYTES = 1 << 30
"""Of address space beyond what there was."""
MAX_MESSAGE_CHARACTERS = 3_000
"""Characters of an error: a client that sends nonsense does not fill the log by it."""

Enter = Callable[[Any], object]
"""What is done with a value at the border; it returns what came of it."""


@dataclass(frozen=True)
class Border:
    """`open` gives the real entry point, for as long as its context lasts."""

    name: str
    examples: Callable[[], Sequence[Any]]  # valid values
    mutate: Callable[[Random, Any], Mutated]
    open: Callable[[], AbstractContextManager[Enter]]
    refusals: tuple[type[BaseException], ...] = (InputError,)
    check: Callable[[Any, Any], str] = lambda _found, _of_valid: ""  # what is wrong with what came of a mutated value
    cases: int = 150  # in `make test`


def call_directly(function: Enter) -> Callable[[], AbstractContextManager[Enter]]:
    """Of an entry point that needs nothing but the value."""
    return lambda: nullcontext(function)


class Finding(Exception):
    """What the product must not do."""


class _TooMuch(BaseException):
    """The value has cost too much processor time."""


def run_trials(border: Border, seeds: Iterator[int]) -> int:
    """How many values have been tried. Raises Finding, with the command that repeats it."""
    tried = 0
    with _watch_threads() as thread_errors, border.open() as enter:
        examples = border.examples()
        expected = [enter(example) for example in examples]
        for seed in seeds:
            rng = Random(f"{border.name}/{seed}")
            number = rng.randrange(len(examples))
            mutated = border.mutate(rng, examples[number])
            if problem := _run_trial(border, enter, mutated, expected[number]) or "".join(thread_errors):
                raise Finding(
                    f"{border.name}, {mutated.how}: {problem}\n"
                    f"again: python -m tests.fuzz --border {border.name!r} --seed {seed} --cases 1\n"
                    f"value: {_format_value(mutated.value)}"
                )
            tried += 1
    return tried


def _run_trial(border: Border, enter: Enter, mutated: Mutated, expected: object) -> str:
    """What is wrong; "": nothing."""
    try:
        with _limit_resources(), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # numpy's, of numbers that are none
            result = enter(mutated.value)
    except border.refusals as error:
        return _check_message(error)
    except _TooMuch:
        return f"takes more than {MAX_SECONDS:g} s"
    except Exception as error:
        trace = "".join(_format_frames(error))
        return f"raises {type(error).__name__}: {_format_value(error)}{trace}"
    return border.check(result, expected) or find_unsound_value(result)


def _check_message(error: BaseException) -> str:
    message = str(error)
    if len(message) > MAX_MESSAGE_CHARACTERS:
        return f"its error has {len(message)} characters: {message[:200]!r}"
    return "" if message.strip() else f"a {type(error).__name__} has no message"


def find_unsound_value(record: object, path: str = "") -> str:
    """Which value of a record is not a number, or not of its field's type; "": none. Most borders return records."""
    if isinstance(record, float) and not math.isfinite(record):
        return f"{path or 'the figure'} is {record}"
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        hints = _get_type_hints(type(record))
        for field in dataclasses.fields(record):
            value, field_path = getattr(record, field.name, None), f"{path}.{field.name}"
            if problem := _check_bounds(value, hints[field.name], field_path) or find_unsound_value(value, field_path):
                return problem
    if isinstance(record, (list, tuple)):
        for i, item in enumerate(record[:1_000]):
            if problem := find_unsound_value(item, f"{path}[{i}]"):
                return problem
    return ""


@cache
def _get_type_hints(record: type) -> dict[str, Any]:
    """Return the types of a record's fields; resolving them costs more than checking a value."""
    return typing.get_type_hints(record, include_extras=True)


def _check_bounds(value: object, hint: Any, path: str) -> str:
    """Whether a field's value is of another type than is written there, or beyond the bounds that are."""
    kind, *bounds = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
    plain = kind in (bool, int, float, str)
    if plain and not (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
        return f"{path} is a {type(value).__name__}"
    for bound in bounds:
        match bound:
            case Within() if isinstance(value, (int, float)) and not bound.low <= value <= bound.high:
                return f"{path} is {value}, and must be from {bound.low} to {bound.high}"
            case MaxLength() if isinstance(value, (str, tuple)) and len(value) > bound.count:
                return f"{path} has {len(value)} items or characters, and may have {bound.count}"
    return ""


@contextmanager
def _limit_resources() -> Iterator[None]:
    """Of processor time and memory, both by the kernel."""
    previous_limit = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    handler = signal.signal(signal.SIGPROF, _raise_too_much)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, previous_limit[1]))
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, previous_limit)
        signal.signal(signal.SIGPROF, handler)


def _raise_too_much(_number: int, _frame: FrameType | None) -> NoReturn:
    raise _TooMuch


@contextmanager
def _watch_threads() -> Iterator[list[str]]:
    """What threads have ended by."""
    errors: list[str] = []
    previous_hook = threading.excepthook
    threading.excepthook = lambda args: errors.append(f"a thread ends by {args.exc_value!r}; ")
    try:
        yield errors
    finally:
        threading.excepthook = previous_hook


def _format_frames(error: BaseException) -> Iterator[str]:
    """The innermost frames."""
    trace, lines = error.__traceback__, []
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f"\n    {code.co_filename}:{trace.tb_lineno} {code.co_qualname}")
        trace = trace.tb_next
    yield from lines[-6:]


def _format_value(value: object) -> str:
    try:
        text = ascii(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that cannot be written"
    return text if len(text) <= 2_000 else f"{text[:2_000]}… ({len(text)} characters)"
