"""Reads what can be read of a profiler trace that is not valid JSON, event by event.

PyTorch writes names as they are, quotes and control characters included, and numbers as C++ prints them (`inf`,
`-nan`). A rank that is killed leaves a file without an end.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from dataclasses import dataclass, field
from typing import Any

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json

_EVENTS_START = re.compile(r'"traceEvents"\s*:\s*\[')
_DISTRIBUTED_INFO = re.compile(r'"distributedInfo"\s*:\s*')
_EVENT_BOUNDARY = re.compile(r"\}\s*,\s*\{")
_SEPARATORS = re.compile(r"[\s,]*")
_EVENTS_END = re.compile(r"\}\s*\]\s*[,}]")
_NO_NUMBER = re.compile(r"([:\[,]\s*)[-+]?(?:inf(?:inity)?|nan)(?=\s*[,}\]])", re.IGNORECASE)
_DECOMPRESS_CHUNK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"

_decoder = json.JSONDecoder(strict=False)


@dataclass
class Readable:
    """What can be read of a trace."""

    content: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What cannot, in words."""


def read_trace(raw: bytes) -> Readable:
    """Reads a trace as the profiler has written it, compressed or not. Raises InputError where it has no events."""
    unpacked, is_whole = _decompress_trace(raw)
    try:
        content = parse_json(unpacked)
    except InputError as error:
        text = unpacked.decode(errors="replace")
        readable = _read_events(text, error)
        if bad := text.count("\ufffd") - unpacked.count("\ufffd".encode()):
            readable.notes.append(f"{bad} bytes are no UTF-8; names that have them are not what they were")
        return readable
    if not isinstance(content, dict):
        raise InputError("it is no object; use export_chrome_trace")
    return Readable(content, [] if is_whole else ["its compression is damaged behind the last event"])


def _decompress_trace(raw: bytes) -> tuple[bytes, bool]:
    """The trace, as far as it can be unpacked; and whether that is all of it."""
    if not raw.startswith(_GZIP_MAGIC):
        return raw, True
    try:
        return gzip.decompress(raw), True
    except (EOFError, OSError, zlib.error):
        unpacked, stream = bytearray(), zlib.decompressobj(wbits=31)
        with contextlib.suppress(zlib.error):  # what is damaged ends it
            for start in range(0, len(raw), _DECOMPRESS_CHUNK_BYTES):
                unpacked += stream.decompress(raw[start : start + _DECOMPRESS_CHUNK_BYTES])
        return bytes(unpacked), False


def _read_events(text: str, error: InputError) -> Readable:
    """Raises `error` where there are none."""
    start = _EVENTS_START.search(text)
    if start is None:
        raise error
    events: list[Any] = []
    unreadable, has_end, at = 0, False, start.end()
    while not has_end:
        at = _SEPARATORS.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if text.startswith("]", at):
            has_end = True
            continue
        following = _EVENT_BOUNDARY.search(text, at)
        end = len(text) if following is None else following.start() + 1
        event, rest = _read_event(text[at:end])
        if rest >= 0:
            events.append(event)
            at = end - rest
        elif following is not None:
            unreadable += 1
            at = end
        elif _EVENTS_END.search(text, at):
            unreadable, has_end = unreadable + 1, True
        else:
            break
    if not events:
        raise error
    content: dict[str, Any] = {"traceEvents": events}
    if about := _DISTRIBUTED_INFO.search(text):
        with contextlib.suppress(ValueError, RecursionError):  # the reader complains where the rank is not known
            content["distributedInfo"] = _decoder.raw_decode(text, about.end())[0]
    notes = []
    if unreadable:
        notes.append(f"{unreadable} of {unreadable + len(events)} events cannot be read and are left out")
    if not has_end:
        notes.append(f"the end is missing: what comes after {len(events)} events is left out")
    return Readable(content, notes)


def _read_event(chunk: str) -> tuple[Any, int]:
    """What the text begins with, and how many characters there are behind it; -1: it cannot be read.

    Of a text of its own, since the decoder counts the lines before an error.
    """
    for text in (chunk, _NO_NUMBER.sub(r"\1NaN", chunk)):
        with contextlib.suppress(ValueError, RecursionError):
            event, used = _decoder.raw_decode(text)
            return event, len(text) - used
    return None, -1
