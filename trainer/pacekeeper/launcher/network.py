"""Which interface holds an address, and sockets that are bound to one."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_INTERFACE_NAME_BYTES = 16


def find_interface(address: str) -> str | None:
    """The network interface that holds `address`; None where it cannot be told."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return "lo"
    held = _list_interfaces_v4() if wanted.version == 4 else _list_interfaces_v6()
    return held.get(str(wanted))


def bind_socket(address: str, port: int = 0) -> socket.socket:
    """A socket that holds the port and does not listen yet; `port` 0: any free one. Raises OSError where it is taken.

    A port that was asked for may linger from a launcher that ran here before; one that is free must be nobody else's.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound


def _list_interfaces_v4() -> dict[str, str]:
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack(f"{_INTERFACE_NAME_BYTES}s240x", name.encode()))
            try:
                fcntl.ioctl(query, _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            found[socket.inet_ntoa(request.tobytes()[20:24])] = name
    return found


def _list_interfaces_v6(table: Path = Path("/proc/net/if_inet6")) -> dict[str, str]:
    rows = (line.split() for line in table.read_text().splitlines())
    return {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))): row[5] for row in rows}
