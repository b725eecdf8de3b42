"""NCCL's RAS is asked when a job stands still: a stand-in for its server, which takes a GPU, speaks its protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pacekeeper.launcher.health import nccl_ras
from pacekeeper.launcher.health.nccl_ras import (
    MAX_RAS_REPORT_CHARACTERS,
    extract_findings,
    format_ranges,
    is_querying_worker,
    query_ras,
    summarize_status,
)
from pacekeeper_analysis.errors import InputError

COUNTS = {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 41}


def rank(number: int, all_reduces: int = 41, **status: Any) -> dict[str, Any]:
    usual = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": number,
        "host": "10.0.0.1",
        "pid": 70 + number,
        "status": {**usual, **status},
        "collective_counts": {**COUNTS, "AllReduce": all_reduces},
    }


def missing(number: int, unresponsive: bool = False, dead: bool = False) -> dict[str, Any]:
    status = {"unresponsive": unresponsive, "considered_dead": dead}
    return {"rank": number, "host": "10.0.0.2", "pid": 70 + number, "status": status}


def status(*ranks: dict[str, Any], gone: tuple[dict[str, Any], ...] = (), size: int = 4) -> dict[str, Any]:
    one = {"hash": "0xa1", "size": size, "ranks": list(ranks), "missing_ranks": list(gone)}
    return {"nccl_version": "2.30.7", "communicators": [one]}


@dataclass
class Server:
    """The stand-in. `answer`: to STATUS, as JSON; `text`: the same as text; None: it is too old for JSON."""

    answer: str | None
    text: str = ""
    greeting: str = "SERVER PROTOCOL 2\n"
    silent_calls: int = 0  # so many connections are taken by a process that is stopped
    said: list[str] = field(default_factory=list)
    calls: int = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls += 1
        silent, as_json = self.calls <= self.silent_calls, False
        while line := (await reader.readline()).decode().strip():
            self.said.append(line)
            command = line.lower()
            if silent:
                continue
            if command.startswith("client protocol "):
                writer.write(self.greeting.encode())
            elif command.startswith("timeout "):
                writer.write(b"OK\n")
            elif command == "set format json":
                as_json = self.answer is not None
                writer.write(b"OK\n" if as_json else b"ERROR: Unknown command SET FORMAT json\n")
            elif command == "status":
                writer.write(((self.answer or "") if as_json else self.text).encode(errors="surrogateescape"))
                break
        writer.close()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[dict[str, str]]:
    """The environment that has it asked."""
    listener = await asyncio.start_server(server.talk, "127.0.0.1", 0)
    try:
        yield {"NCCL_RAS_ADDR": f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"}
    finally:
        listener.close()


async def test_who_is_dead_and_who_has_launched_less_is_told() -> None:
    told = status(rank(0), rank(1, 40), rank(2), gone=(missing(3, unresponsive=True, dead=True),))
    server = Server(json.dumps(told, indent=2))
    async with serving(server) as environment:
        words = await query_ras(environment)
    assert words == (
        "communicator 0xa1 of 4: dead: rank 3 (10.0.0.2, process 73); AllReduce launched 40 by rank 1, 41 by rank 0, 2"
    )
    assert server.said == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"]


def test_every_oddity_has_its_words() -> None:
    told = status(
        rank(0, init_state=7),
        rank(1, init_state=3),
        rank(2, async_error=6),
        rank(3, abort_flag=True),
        rank(4, finalize_called=True),
        gone=(missing(5, unresponsive=True), missing(6)),
        size=7,
    )
    assert summarize_status(told) == (
        "communicator 0xa1 of 7: no answer from: rank 5 (10.0.0.2, process 75); not a member: rank 6 (10.0.0.2, "
        "process 76); initializing: rank 0; initialization failed with error 3: rank 1; error 6: rank 2; "
        "aborting: rank 3; finalizing: rank 4"
    )


def test_where_all_are_alike_one_line_says_so() -> None:
    alike = status(rank(0), rank(1))
    assert summarize_status(alike) == "1 communicator: all ranks alike"
    assert summarize_status({"communicators": alike["communicators"] * 3}) == "3 communicators: all ranks alike"
    assert summarize_status({"communicators": []}) == "NCCL has no communicators"


def test_many_ranks_are_counted_in_ranges() -> None:
    assert format_ranges([5, 0, 1, 2]) == "0–2, 5"
    assert format_ranges(list(range(0, 100, 2))).endswith("14 and 42 more")


async def test_an_older_nccl_is_asked_for_text() -> None:
    text = (
        "NCCL version 2.27\n\nJob summary\n===========\n\nErrors\n======\n\nDEAD\n  1 job process is considered dead\n"
    )
    async with serving(Server(None, text)) as environment:
        assert await query_ras(environment) == "Errors\n======\n\nDEAD\n  1 job process is considered dead"
    assert extract_findings("a\n\nWarnings\n========\n\nTIMEOUT\n") == "Warnings\n========\n\nTIMEOUT"
    assert extract_findings("Job summary\n 4 nodes\n") == "Job summary\n 4 nodes"


async def test_of_a_huge_answer_the_text_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "MAX_RAS_ANSWER_BYTES", 100_000)
    huge = json.dumps(status(*(rank(number) for number in range(1_000)), size=1_000))
    assert len(huge) > nccl_ras.MAX_RAS_ANSWER_BYTES
    async with serving(Server(huge, "Errors\n======\nmany" + "!" * 5_000)) as environment:
        words = await query_ras(environment)
    assert words.startswith("Errors\n======\nmany!!!")
    assert len(words) == MAX_RAS_REPORT_CHARACTERS
    async with serving(Server(huge, "x" * 200_000)) as environment:
        assert await query_ras(environment) == "NCCL's RAS sent an unreadable answer: status: more than 100000 bytes"


async def test_a_stopped_process_may_take_the_call_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "RAS_GREETING_TIMEOUT_SECONDS", 0.05)
    server = Server(json.dumps(status(rank(0))), silent_calls=2)
    async with serving(server) as environment:
        assert await query_ras(environment) == "1 communicator: all ranks alike"
    assert server.calls == 3


async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "RAS_GREETING_TIMEOUT_SECONDS", 0.05)
    async with serving(Server(None, silent_calls=99)) as environment:
        assert await query_ras(environment, patience=0.2) == "NCCL's RAS has not answered within 0.2 s"


async def test_where_nobody_listens_there_is_nothing_to_tell() -> None:
    async with serving(Server("{}")) as environment:
        assert await query_ras({**environment, "NCCL_RAS_ENABLE": "0"}) == ""
    assert await query_ras(environment) == ""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("", "unreadable answer"),
        ("\udcff\udc00{", "unreadable answer"),
        ("[1]", "status: must be an object"),
        ("[" * 100_000, "unreadable answer"),
        ('{"communicators": 3}', "status.communicators: must be a list of objects"),
        ('{"communicators": [{"ranks": [{"rank": "x", "status": {}}]}]}', "ranks[0].rank: must be a whole number"),
        ('{"communicators": [{"ranks": [{"rank": 1}]}]}', "ranks[0].status: must be an object"),
        ('{"communicators": [{"missing_ranks": [{"rank": 1, "pid": 2, "host": 3}]}]}', "host: must be a string"),
        ('{"communicators": [{"missing_ranks": [{"rank": 1e400}]}]}', "rank: must be a whole number"),
    ],
)
async def test_garbage_is_said_to_be_garbage(answer: str, words: str) -> None:
    async with serving(Server(answer)) as environment:
        assert words in await query_ras(environment)


async def test_another_service_at_the_port_is_not_believed() -> None:
    async with serving(Server("{}", greeting="HTTP/1.1 400 Bad Request\n")) as environment:
        assert "greeting: 'HTTP/1.1 400 Bad Request\\n' is not RAS's" in await query_ras(environment)


@pytest.mark.parametrize("address", ["nowhere", ":28028", "localhost:port", "localhost:99999"])
async def test_an_address_that_is_none_is_named(address: str) -> None:
    assert f"NCCL_RAS_ADDR={address!r}: give host:port" in await query_ras({"NCCL_RAS_ADDR": address})


def test_what_cannot_be_printed_is_left_out() -> None:
    with pytest.raises(InputError):
        summarize_status([])
    assert nccl_ras.shorten_text("a\x1b[31mb\x00\n") == "a[31mb"


def test_not_every_worker_of_a_large_job_asks() -> None:
    assert all(is_querying_worker(ranks) for ranks in ([0], [8, 9], [15, 16]))
    assert not any(is_querying_worker(ranks) for ranks in ([16, 17], []))
