"""Find the interface of an address, and bind sockets."""

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
    """Return the network interface that holds `address`; None: there is none."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_loopback:
        return "lo"
    interfaces = _list_interfaces_v4() if parsed.version == 4 else _list_interfaces_v6()
    return interfaces.get(str(parsed))


def bind_socket(address: str, port: int = 0) -> socket.socket:
    """Return a socket that holds the port and does not listen yet. Raises OSError if the port is taken.

    `port` 0: any free one. A named port may linger from an earlier launcher, so it is reused. A free port must not be
    shared.
    """
    bound_socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port != 0))
        bound_socket.bind((address, port))
    except OSError:
        bound_socket.close()
        raise
    return bound_socket


def _list_interfaces_v4() -> dict[str, str]:
    interfaces = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack(f"{_INTERFACE_NAME_BYTES}s240x", name.encode()))
            try:
                fcntl.ioctl(query, _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            interfaces[socket.inet_ntoa(request.tobytes()[20:24])] = name
    return interfaces


def _list_interfaces_v6(table: Path = Path("/proc/net/if_inet6")) -> dict[str, str]:
    rows = (line.split() for line in table.read_text().splitlines())
    return {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))): row[5] for row in rows}
