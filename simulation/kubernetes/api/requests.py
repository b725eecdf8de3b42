"""Requests over the network, as those who observe them see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from .objects import KINDS, ServedKind


class RequestStage(Enum):
    """The stages of a request."""

    SENT = "it is about to be sent: a process that is killed now has not sent it"
    APPLIED = "it has taken effect, and its sender has no answer yet"
    ANSWERED = "its sender has the answer"


@dataclass(frozen=True, slots=True)
class Request:
    """A request over the network. `operator`: by its service account. `status`: of the answer; 0: there is none yet."""

    place: str
    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    style: str
    stage: RequestStage = RequestStage.SENT
    status: int = 0
    operator: bool = True

    @property
    def is_write(self) -> bool:
        return self.method != "GET"


@dataclass(frozen=True, slots=True)
class ResourceTarget:
    """What a path names."""

    kind: ServedKind
    namespace: str
    name: str
    subresource: str


@lru_cache(maxsize=4096)
def parse_path(path: str) -> ResourceTarget | None:
    """Parse a path; None: no such kind is served there."""
    parts = path.strip("/").split("/")
    count = 2 if parts[0] == "api" else 3
    prefix, rest = "/" + "/".join(parts[:count]), parts[count:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces" and rest[2] in KINDS:
        namespace, rest = rest[1], rest[2:]
    kind = KINDS.get(rest[0]) if rest else None
    if kind is None or kind.path != prefix:
        return None
    return ResourceTarget(kind, namespace, *[*rest[1:], "", ""][:2])
