"""Queries NCCL's RAS about a job whose ranks make no progress: which ranks are dead, which have launched less.

Each NCCL process has a RAS thread. It keeps running when the other threads hang, knows its peers, and answers on a
local socket in lines of text: `CLIENT PROTOCOL 2`, `TIMEOUT <seconds>`, `SET FORMAT json` (NCCL 2.28.7 and later),
`STATUS`. The processes of a host share the port. A stopped one may accept the connection; another try may reach another
process.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pacekeeper_analysis.errors import InputError
from pacekeeper_analysis.protocol.decoding import parse_json

DEFAULT_RAS_ADDRESS = "localhost:28028"
RAS_QUERY_TIMEOUT_SECONDS = 8.0
"""Seconds for the whole query. The stall report does not wait for the answer."""
RAS_GREETING_TIMEOUT_SECONDS = 1.0
"""Seconds within which a live process sends its greeting."""
RAS_PEER_TIMEOUT_SECONDS = 2
"""Seconds that NCCL gives each of its own peers to answer."""
MAX_RAS_ANSWER_BYTES = 8 * 2**20
"""Maximum size of an answer. A longer one is requested as text, which NCCL itself summarizes. A rank takes 0.5 KB."""
RAS_QUERYING_RANKS = 16
"""Only workers that have one of the job's first ranks, this many, send queries."""
MAX_RAS_REPORT_CHARACTERS = 2_000
"""Maximum length of the report, in characters."""
MAX_RAS_ITEMS_NAMED = 8


async def query_ras(environment: Mapping[str, str], patience: float = RAS_QUERY_TIMEOUT_SECONDS) -> str:
    """Query RAS and return a readable report, of MAX_RAS_REPORT_CHARACTERS at most.

    "": RAS is disabled, or no process listens.
    """
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
        return shorten_text(f"NCCL's RAS sent an unreadable answer: {error}")


def is_querying_worker(ranks: Collection[int]) -> bool:
    """Return whether the worker of these ranks sends queries: for each answer, NCCL gathers from all its processes."""
    return min(ranks, default=RAS_QUERYING_RANKS) < RAS_QUERYING_RANKS


async def _request_status(host: str, port: int, *, as_json: bool) -> str | None:
    """Return the answer; None: it is too long, or this NCCL does not support JSON."""
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
    """Connect to a process that sends its greeting. Raises InputError if the greeting is not RAS's."""
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
    """Return the errors and warnings of RAS's text answer; if there are none, its tables."""
    for heading in ("Errors\n======", "Warnings\n========"):
        if (start := text.find(heading)) >= 0:
            return text[start:].strip()
    return text.strip()


def summarize_status(status: object) -> str:
    """Summarize RAS's JSON answer: one line for each communicator whose ranks differ.

    Raises InputError that names the field.
    """
    if not isinstance(status, dict):
        raise InputError("status: must be an object")
    lines, alike_count = [], 0
    for position, communicator in enumerate(_read_list(status, "communicators", "status")):
        path = f"status.communicators[{position}]"
        anomalies = list(_list_anomalies(communicator, path))
        alike_count += not anomalies
        if anomalies:
            size = _read_number(communicator, "size", path)
            lines.append(f"communicator {_read_text(communicator, 'hash', path)} of {size}: {'; '.join(anomalies)}")
    if alike_count:
        lines.append(f"{alike_count} communicator{'s' * (alike_count > 1)}: all ranks alike")
    return "\n".join(lines) or "NCCL has no communicators"


def _list_anomalies(communicator: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield what is abnormal, most severe first."""
    missing: dict[str, list[str]] = {"dead": [], "no answer from": [], "not a member": []}
    for position, rank in enumerate(_read_list(communicator, "missing_ranks", path)):
        rank_path = f"{path}.missing_ranks[{position}]"
        number, host, pid = (
            _read_number(rank, "rank", rank_path),
            _read_text(rank, "host", rank_path),
            _read_number(rank, "pid", rank_path),
        )
        missing[_classify_absence(_read_object(rank, "status", rank_path))].append(f"{number} ({host}, process {pid})")
    for absence, ranks in missing.items():
        if ranks:
            yield f"{absence}: rank {', '.join(ranks[:MAX_RAS_ITEMS_NAMED])}{_format_remaining(ranks)}"
    counts: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    states: dict[str, list[int]] = defaultdict(list)
    for position, rank in enumerate(_read_list(communicator, "ranks", path)):
        rank_path = f"{path}.ranks[{position}]"
        number, status = _read_number(rank, "rank", rank_path), _read_object(rank, "status", rank_path)
        for state in _list_unusual_states(status, f"{rank_path}.status"):
            states[state].append(number)
        launched = _read_object(rank, "collective_counts", rank_path)
        for collective in launched:
            counts[collective][_read_number(launched, collective, f"{rank_path}.collective_counts")].append(number)
    for state, ranks_of_state in states.items():
        yield f"{state}: rank {format_ranges(ranks_of_state)}"
    for collective, by_count in counts.items():
        if len(by_count) > 1:
            parts = [
                f"{count} by rank {format_ranges(by_count[count])}" for count in sorted(by_count)[:MAX_RAS_ITEMS_NAMED]
            ]
            yield f"{collective[:40]} launched {', '.join(parts)}"


def _classify_absence(status: Mapping[str, Any]) -> str:
    if status.get("considered_dead") is True:
        return "dead"
    return "no answer from" if status.get("unresponsive") is True else "not a member"


def _list_unusual_states(status: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a rank's own abnormal states. 7 is ncclInProgress."""
    init_state, error = _read_number(status, "init_state", path), _read_number(status, "async_error", path)
    if init_state == 7:
        yield "initializing"
    elif init_state:
        yield f"initialization failed with error {init_state}"
    if error not in (0, 7):
        yield f"error {error}"
    if status.get("abort_flag") is True:
        yield "aborting"
    elif status.get("finalize_called") is True or status.get("destroy_flag") is True:
        yield "finalizing"


def format_ranges(ranks: list[int]) -> str:
    """Format ranks as ranges, such as "0–2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:MAX_RAS_ITEMS_NAMED]]
    return ", ".join(parts) + _format_remaining(runs)


def shorten_text(message: str) -> str:
    """Remove what is not printable, and truncate the end: the most severe findings come first."""
    text = "".join(character for character in message if character.isprintable() or character == "\n").strip()
    return text if len(text) <= MAX_RAS_REPORT_CHARACTERS else f"{text[: MAX_RAS_REPORT_CHARACTERS - 1]}…"


def _format_remaining(items: list[Any]) -> str:
    return f" and {len(items) - MAX_RAS_ITEMS_NAMED} more" if len(items) > MAX_RAS_ITEMS_NAMED else ""


def _parse_address(text: str) -> tuple[str, int]:
    """Parse NCCL's `host:port` or `[address]:port`. Raises InputError."""
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
