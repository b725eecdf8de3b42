"""Which of several operators leads, as one that does not has told: where to call it, past the Service.

The Service leads to any of them. What one says of another is believed as far as that is of no harm: an address is
called that proves the operator's own certificate, as whatever is called, and given up at once where it does not answer.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Any

LEADER_AVOID_SECONDS = 30.0
"""So long an address that did not answer is not called again: the way there may be closed to this pod for ever."""


@dataclass
class LeaderAddress:
    """Times are seconds, monotonic."""

    address: str = ""
    """address:port; "": whomever the Service leads to."""
    _avoided: str = ""
    _avoided_until: float = -math.inf

    def update(self, named: str, now: float) -> None:
        """One that does not lead has answered, and named this one; "": it knows of none."""
        avoided = named == self._avoided and now < self._avoided_until
        self.address = "" if avoided else named

    def mark_unreachable(self, address: str, now: float) -> None:
        """A call of it has come to nothing."""
        self._avoided, self._avoided_until = address, now + LEADER_AVOID_SECONDS
        if self.address == address:
            self.address = ""


def parse_named_leader(answer: Any) -> str | None:
    """Whom an answer (parsed JSON) names as the leader: "" where nobody; None where it is no such answer, but of an
    operator that leads. What is no address of a machine and a port is nobody."""
    if not isinstance(answer, dict) or "leader" not in answer:
        return None
    said = answer["leader"]
    host, _, port = said.rpartition(":") if isinstance(said, str) and len(said) < 64 else ("", "", "")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return ""
    written = f"[{address}]" if address.version == 6 else f"{address}"
    plain = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
    return f"{written}:{int(port)}" if plain and host == written and "%" not in host else ""
