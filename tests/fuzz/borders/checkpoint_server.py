"""The checkpoint server: requests that no proof precedes, and the answers to its clients and to itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pacekeeper.checkpointing.server.job_secret import parse_secret
from pacekeeper.checkpointing.server.server import BadRequestError, parse_head
from pacekeeper.checkpointing.storage.claim_filesystem import (
    ClaimFilesystem,
    parse_checkpoint_server,
    parse_refusal,
)
from pacekeeper_analysis.protocol.plan import CheckpointEndpoint, Plan

from ..border import Border, call_directly
from ..mutations import mutate_bytes, mutate_text, to_bytes

SERVER = CheckpointEndpoint("5a" * 32, "10.0.0.1")
PLAN = replace(Plan(version=3), checkpoint_server=SERVER).build_worker_plan("a").to_json()
HEAD = (
    b"PUT /uploads/0123456789abcdef0123456789abcdef?offset=16777216 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
    b"X-Pacekeeper-Sha256: 00\r\nX-Pacekeeper-Proof: 00\r\n\r\n"
)
ENTRIES = [{"name": "manifest.json", "size": 3}, {"name": "step-00000001", "size": None}]


class _AnsweredFilesystem(ClaimFilesystem):
    """Every request has one answer."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(lambda: None)
        self._answer = answer

    def request(self, *_: Any, **__: Any) -> bytes:
        return self._answer


def parse_numbers(head: bytes) -> object:
    request = parse_head(head)
    return request.path, [request.read_number(name, 0) for name in ("offset", "nbytes", "start")]


BORDERS = [
    Border(
        "checkpoint server's requests", lambda: [HEAD], mutate_bytes, call_directly(parse_numbers), (BadRequestError,)
    ),
    Border(
        "checkpoint server's secret",
        lambda: [PLAN],
        mutate_text,
        call_directly(lambda data: parse_secret(to_bytes(data))),
    ),
    Border(
        "checkpoint server's address",
        lambda: [PLAN],
        mutate_text,
        call_directly(lambda data: parse_checkpoint_server(to_bytes(data))),
        refusals=(),
    ),
    Border(
        "checkpoint server's listing",
        lambda: [ENTRIES],
        mutate_text,
        call_directly(lambda data: _AnsweredFilesystem(to_bytes(data)).ls("", detail=True)),
    ),
    Border(
        "checkpoint server's entry",
        lambda: [ENTRIES[0]],
        mutate_text,
        call_directly(lambda data: _AnsweredFilesystem(to_bytes(data)).info("manifest.json")),
    ),
    Border(
        "checkpoint server's refusal",
        lambda: [{"errno": 28}],
        mutate_text,
        call_directly(lambda data: str(parse_refusal(507, to_bytes(data), "/objects/a"))),
        refusals=(),
    ),
]
