"""Reads the readable part of a profiler trace that is not valid JSON, event by event.

PyTorch writes names unescaped, including quotes and control characters, and numbers as C++ prints them (`inf`, `-nan`).
A killed rank leaves a file without an end.
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
from pacekeeper_analysis.protocol.decoding import parse_json

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
    """The readable part of a trace."""

    content: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """What cannot be read, for people."""


def read_trace(raw: bytes) -> Readable:
    """Read a trace as the profiler wrote it, compressed or not. Raises InputError if it has no events."""
    unpacked, is_whole = _decompress_trace(raw)
    try:
        content = parse_json(unpacked)
    except InputError as error:
        text = unpacked.decode(errors="replace")
        readable = _read_events(text, error)
        if replaced_bytes := text.count("\ufffd") - unpacked.count("\ufffd".encode()):
            readable.notes.append(f"{replaced_bytes} bytes are not UTF-8; names that contain them are altered")
        return readable
    if not isinstance(content, dict):
        raise InputError("it is not an object; use export_chrome_trace")
    return Readable(content, [] if is_whole else ["its compression is damaged after the last event"])


def _decompress_trace(raw: bytes) -> tuple[bytes, bool]:
    """Return the part of the trace that can be decompressed, and whether that is all of it."""
    if not raw.startswith(_GZIP_MAGIC):
        return raw, True
    try:
        return gzip.decompress(raw), True
    except (EOFError, OSError, zlib.error):
        unpacked, stream = bytearray(), zlib.decompressobj(wbits=31)
        with contextlib.suppress(zlib.error):  # damaged data ends the stream
            for start in range(0, len(raw), _DECOMPRESS_CHUNK_BYTES):
                unpacked += stream.decompress(raw[start : start + _DECOMPRESS_CHUNK_BYTES])
        return bytes(unpacked), False


def _read_events(text: str, error: InputError) -> Readable:
    """Read events one by one. Raises `error` if there are none."""
    start = _EVENTS_START.search(text)
    if start is None:
        raise error
    events: list[Any] = []
    unreadable, has_end, position = 0, False, start.end()
    while not has_end:
        position = _SEPARATORS.match(text, position).end()  # type: ignore[union-attr]  # it also matches nothing
        if text.startswith("]", position):
            has_end = True
            continue
        following = _EVENT_BOUNDARY.search(text, position)
        end = len(text) if following is None else following.start() + 1
        event, remaining = _read_event(text[position:end])
        if remaining is not None:
            events.append(event)
            position = end - remaining
        elif following is not None:
            unreadable += 1
            position = end
        elif _EVENTS_END.search(text, position):
            unreadable, has_end = unreadable + 1, True
        else:
            break
    if not events:
        raise error
    content: dict[str, Any] = {"traceEvents": events}
    if info_match := _DISTRIBUTED_INFO.search(text):
        with contextlib.suppress(ValueError, RecursionError):  # the caller reports an unknown rank
            content["distributedInfo"] = _decoder.raw_decode(text, info_match.end())[0]
    notes = []
    if unreadable:
        notes.append(f"{unreadable} of {unreadable + len(events)} events cannot be read and are left out")
    if not has_end:
        notes.append(f"the end is missing: what comes after {len(events)} events is left out")
    return Readable(content, notes)


def _read_event(chunk: str) -> tuple[Any, int | None]:
    """Return the event at the beginning, and the number of characters after it; None: it cannot be read.

    The text is a separate string, because the decoder counts the lines before an error.
    """
    for text in (chunk, _NO_NUMBER.sub(r"\1NaN", chunk)):
        with contextlib.suppress(ValueError, RecursionError):
            event, end = _decoder.raw_decode(text)
            return event, len(text) - end
    return None, None
