"""The address of the leading operator, as an operator that does not lead has named it: it is called directly.

The Service routes to any of the operators. Trusting the named address is harmless. The server there must present the
operator's own certificate, and the address is given up at once if it does not answer.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any

LEADER_AVOID_SECONDS = 30.0
"""Seconds for which an address that did not answer is not called again: it may never be reachable from this pod."""


@dataclass
class LeaderAddress:
    """Where to call the leader. Times are seconds, monotonic."""

    address: str = ""
    """address:port; "": call the Service."""
    _avoided: str = ""
    _avoided_until: float | None = None
    """None: no address is avoided."""

    def update(self, leader: str, now: float) -> None:
        """Set the address that an operator without the lead has named; "": it has found no leader."""
        avoided = leader == self._avoided and self._avoided_until is not None and now < self._avoided_until
        self.address = "" if avoided else leader

    def mark_unreachable(self, address: str, now: float) -> None:
        """Record that a call to the address has failed."""
        self._avoided, self._avoided_until = address, now + LEADER_AVOID_SECONDS
        if self.address == address:
            self.address = ""


def parse_named_leader(answer: Any) -> str | None:
    """Return the leader that an answer (parsed JSON) names.

    "": it names none, or an invalid address. None: it is not such an answer: the operator that sent it leads.
    """
    if not isinstance(answer, dict) or "leader" not in answer:
        return None
    leader = answer["leader"]
    host, _, port = leader.rpartition(":") if isinstance(leader, str) and len(leader) < 64 else ("", "", "")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return ""
    canonical = f"[{address}]" if address.version == 6 else f"{address}"
    is_valid_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
    return f"{canonical}:{int(port)}" if is_valid_port and host == canonical and "%" not in host else ""
