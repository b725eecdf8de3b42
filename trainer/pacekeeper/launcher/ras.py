"""Asks NCCL's RAS what it knows of a job whose ranks make no progress: who is dead, who has launched less than others.

Each process of NCCL has a RAS thread that goes on when the others hang, knows its peers, and answers at a local socket
in lines of text: `CLIENT PROTOCOL 2`, `TIMEOUT <seconds>`, `SET FORMAT json` (NCCL 2.28.7 and later), `STATUS`. The
processes of a host share the port, so that a stopped one may be the one that takes the call: then another try may
meet another one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.reading import parse_json

DEFAULT_RAS_ADDRESS = "localhost:28028"
RAS_QUERY_TIMEOUT_SECONDS = 8.0
"""Seconds for the whole question; nothing waits for the answer."""
RAS_GREETING_TIMEOUT_SECONDS = 1.0
"""Seconds in which a process greets that is alive."""
RAS_PEER_TIMEOUT_SECONDS = 2
"""Seconds that NCCL gives each of its own peers to answer."""
MAX_RAS_ANSWER_BYTES = 8 * 2**20
"""Of an answer: longer ones are asked for as text, which NCCL sums up itself. A rank takes half a kilobyte."""
RAS_QUERYING_RANKS = 16
"""Workers that have one of the job's first so many ranks ask."""
MAX_RAS_REPORT_CHARACTERS = 2_000
"""Characters that are told."""
MAX_RAS_ITEMS_NAMED = 8


async def query_ras(environment: Mapping[str, str], patience: float = RAS_QUERY_TIMEOUT_SECONDS) -> str:
    """What RAS says, in words for people of LONGEST characters at most; "": nobody listens, or RAS is switched off."""
    if environment.get("NCCL_RAS_ENABLE") == "0":
        return ""
    try:
        host, port = _parse_address(environment.get("NCCL_RAS_ADDR") or DEFAULT_RAS_ADDRESS)
        async with asyncio.timeout(patience):
            answer = await _request_status(host, port, as_json=True)
            if answer is not None:
                return await asyncio.to_thread(lambda: shorten_text(summarize_status(parse_json(answer))))
            text = await _request_status(host, port, as_json=False)
        if text is None:
            raise InputError(f"status: more than {MAX_RAS_ANSWER_BYTES} bytes")
        return shorten_text(extract_findings(text))
    except TimeoutError:
        return f"NCCL's RAS has not answered within {patience:g} s"
    except OSError:
        return ""
    except (InputError, ValueError) as error:
        return shorten_text(f"NCCL's RAS answers what cannot be read: {error}")


def is_querying_worker(ranks: Collection[int]) -> bool:
    """Whether the worker of these ranks asks: each answer has NCCL gather from all its processes."""
    return min(ranks, default=RAS_QUERYING_RANKS) < RAS_QUERYING_RANKS


async def _request_status(host: str, port: int, *, as_json: bool) -> str | None:
    """The answer; None: as JSON it is too long, or NCCL is too old for it."""
    reader, writer = await _connect_ras(host, port)
    try:
        await _send_line(reader, writer, f"TIMEOUT {RAS_PEER_TIMEOUT_SECONDS}")
        if as_json and (await _send_line(reader, writer, "SET FORMAT json")).strip() != "OK":
            return None
        writer.write(b"STATUS\n")
        answer = bytearray()
        while part := await reader.read(2**16):
            answer += part
            if len(answer) > MAX_RAS_ANSWER_BYTES:
                return None
        return answer.decode(errors="replace")
    finally:
        writer.close()


async def _connect_ras(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To a process that greets."""
    while True:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            async with asyncio.timeout(RAS_GREETING_TIMEOUT_SECONDS):
                greeting = await _send_line(reader, writer, "CLIENT PROTOCOL 2")
        except TimeoutError:
            writer.close()
            continue
        except BaseException:
            writer.close()
            raise
        if greeting.upper().startswith("SERVER PROTOCOL "):
            return reader, writer
        writer.close()
        raise InputError(f"greeting: {greeting[:80]!r} is not RAS's")


async def _send_line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> str:
    writer.write(line.encode() + b"\n")
    return (await reader.readline()).decode(errors="replace")


def extract_findings(text: str) -> str:
    """Of RAS's answer as text: its errors and warnings; where there are none, its tables."""
    for heading in ("Errors\n======", "Warnings\n========"):
        if (start := text.find(heading)) >= 0:
            return text[start:].strip()
    return text.strip()


def summarize_status(status: object) -> str:
    """RAS's answer as JSON in words: one line a communicator in which something is not alike on all ranks.

    Raises InputError that names the field.
    """
    if not isinstance(status, dict):
        raise InputError("status: must be an object")
    lines, alike = [], 0
    for position, communicator in enumerate(_read_list(status, "communicators", "status")):
        path = f"status.communicators[{position}]"
        odd = list(_list_anomalies(communicator, path))
        alike += not odd
        if odd:
            size = _read_number(communicator, "size", path)
            lines.append(f"communicator {_read_text(communicator, 'hash', path)} of {size}: {'; '.join(odd)}")
    if alike:
        lines.append(f"{alike} communicator{'s' * (alike > 1)}: all ranks alike")
    return "\n".join(lines) or "NCCL has no communicators"


def _list_anomalies(communicator: Mapping[str, Any], path: str) -> Iterator[str]:
    """What is not as it should be, the gravest first."""
    missing: dict[str, list[str]] = {"dead": [], "no answer from": [], "not a member": []}
    for position, rank in enumerate(_read_list(communicator, "missing_ranks", path)):
        where = f"{path}.missing_ranks[{position}]"
        number, host, pid = _read_number(rank, "rank", where), _read_text(rank, "host", where), _read_number(rank, "pid", where)
        missing[_classify_absence(_read_object(rank, "status", where))].append(f"{number} ({host}, process {pid})")
    for absence, ranks in missing.items():
        if ranks:
            yield f"{absence}: rank {', '.join(ranks[:MAX_RAS_ITEMS_NAMED])}{_format_remaining(ranks)}"
    counts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    states: dict[str, list[int]] = defaultdict(list)
    for position, rank in enumerate(_read_list(communicator, "ranks", path)):
        where = f"{path}.ranks[{position}]"
        number, status = _read_number(rank, "rank", where), _read_object(rank, "status", where)
        for state in _list_unusual_states(status, f"{where}.status"):
            states[state].append(number)
        launched = _read_object(rank, "collective_counts", where)
        for collective in launched:
            counts[collective][_read_number(launched, collective, f"{where}.collective_counts")].append(number)
    for state, ranks_of_state in states.items():
        yield f"{state}: rank {format_ranges(ranks_of_state)}"
    for collective, by_count in counts.items():
        if len(by_count) > 1:
            told = [f"{count} by rank {format_ranges(by_count[count])}" for count in sorted(by_count)[:MAX_RAS_ITEMS_NAMED]]
            yield f"{collective[:40]} launched {', '.join(told)}"


def _classify_absence(status: Mapping[str, Any]) -> str:
    if status.get("considered_dead") is True:
        return "dead"
    return "no answer from" if status.get("unresponsive") is True else "not a member"


def _list_unusual_states(status: Mapping[str, Any], path: str) -> Iterator[str]:
    """A rank's own state, where it is not the usual one. 7 is ncclInProgress."""
    initialised, error = _read_number(status, "init_state", path), _read_number(status, "async_error", path)
    if initialised == 7:
        yield "initialising"
    elif initialised:
        yield f"initialisation failed with error {initialised}"
    if error not in (0, 7):
        yield f"error {error}"
    if status.get("abort_flag") is True:
        yield "aborting"
    elif status.get("finalize_called") is True or status.get("destroy_flag") is True:
        yield "finalising"


def format_ranges(ranks: list[int]) -> str:
    """ "0–2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:MAX_RAS_ITEMS_NAMED]]
    return ", ".join(told) + _format_remaining(runs)


def shorten_text(message: str) -> str:
    """Without what cannot be printed; the gravest is at the front, so the end goes."""
    text = "".join(letter for letter in message if letter.isprintable() or letter == "\n").strip()
    return text if len(text) <= MAX_RAS_REPORT_CHARACTERS else f"{text[: MAX_RAS_REPORT_CHARACTERS - 1]}…"


def _format_remaining(items: list[Any]) -> str:
    return f" and {len(items) - MAX_RAS_ITEMS_NAMED} more" if len(items) > MAX_RAS_ITEMS_NAMED else ""


def _parse_address(text: str) -> tuple[str, int]:
    """NCCL's `host:port`, `[address]:port`. Raises InputError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"NCCL_RAS_ADDR={text[:80]!r}: give host:port")
    return host.strip("[]"), int(port)


def _read_list(data: Mapping[str, Any], name: str, path: str) -> list[dict[str, Any]]:
    value = data.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InputError(f"{path}.{name}: must be a list of objects")
    return value


def _read_object(data: Mapping[str, Any], name: str, path: str) -> dict[str, Any]:
    value = data.get(name)
    if not isinstance(value, dict):
        raise InputError(f"{path}.{name}: must be an object")
    return value


def _read_number(data: Mapping[str, Any], name: str, path: str) -> int:
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**64:
        raise InputError(f"{path}.{name[:40]}: must be a whole number")
    return value


def _read_text(data: Mapping[str, Any], name: str, path: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise InputError(f"{path}.{name}: must be a string")
    return value[:80]
