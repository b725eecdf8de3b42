"""Text forms of durations, times, rates, and ports in resources."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import abbreviate_value

_RATE_PATTERN = re.compile(r"([1-9]\d{0,5}(?:\.\d{1,3})?)([MGT])", re.ASCII)


def parse_rate(text: str) -> float:
    """Return the bits per second of a rate like `400G`.

    Raises InputError.
    """
    match = _RATE_PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InputError(f"{abbreviate_value(text)} is no rate: write bits a second in M, G or T, like 400G")
    return float(match[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]]


MIN_UNPRIVILEGED_PORT, MAX_PORT = 1024, 65535
_PORT_RANGE_PATTERN = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)


def parse_ports(text: str) -> tuple[int, int]:
    """Return the first and the last port of a range like `20000-29999`.

    Raises InputError.
    """
    match = _PORT_RANGE_PATTERN.fullmatch(text) if isinstance(text, str) else None
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not MIN_UNPRIVILEGED_PORT <= first < last <= MAX_PORT:
        raise InputError(
            f"{abbreviate_value(text)} must be two ports from {MIN_UNPRIVILEGED_PORT} to {MAX_PORT}, the lower one "
            "first, like 20000-29999"
        )
    return first, last


_GO_DURATION_PATTERN = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def parse_duration(text: str) -> float:
    """Return the seconds of a duration like `1h30m`, `5m`, or `90s`.

    Raises InputError.
    """
    match = _GO_DURATION_PATTERN.fullmatch(text) if isinstance(text, str) and text else None
    if match is None:
        raise InputError(
            f"{abbreviate_value(text)} is not a duration: write whole hours, minutes, seconds like 1h30m, 5m or 90s"
        )
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(3600 * hours + 60 * minutes + seconds)


def format_duration(seconds: float) -> str:
    """Format seconds, rounded to whole ones, as `parse_duration` reads them."""
    hours, remainder = divmod(round(seconds), 3600)
    minutes, remaining_seconds = divmod(remainder, 60)
    parts = [f"{value}{unit}" for value, unit in ((hours, "h"), (minutes, "m"), (remaining_seconds, "s")) if value]
    return "".join(parts) or "0s"


def parse_time(text: str) -> float:
    """Return the seconds since the epoch of an RFC 3339 time.

    Raises InputError.
    """
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise InputError(f"{abbreviate_value(text)} is not a time in RFC 3339, like 2026-01-31T12:00:00Z") from error


def format_time(seconds: float) -> str:
    """Format a time as RFC 3339 with microseconds, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def round_for_json(value: float) -> float | None:
    """Round to three digits after the point.

    Return None for what JSON cannot carry, like an infinite slowdown of a job that stands still.
    """
    return round(value, 3) if math.isfinite(value) else None
