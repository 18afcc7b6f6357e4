"""The TCP sockets on which processes listen, as Linux shows them in /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

Where = tuple[str, int]
"""Address and port."""
_LISTENS = "0A"


def listening(pids: Iterable[int]) -> set[Where]:
    """Return the sockets on which these processes listen now."""
    sockets = _listening_sockets()
    return {sockets[inode] for inode in _sockets_of(pids) & sockets.keys()}


def beyond_loopback(where: Iterable[Where]) -> set[Where]:
    """Return the sockets that other machines can reach."""
    return {(address, port) for address, port in where if not ipaddress.ip_address(address).is_loopback}


def _listening_sockets() -> dict[str, Where]:
    """Return the listening sockets by inode."""
    found = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENS:
                    found[words[9]] = _read(family, words[1])
    return found


def _read(family: socket.AddressFamily, text: str) -> Where:
    """Decode an address, which consists of 32-bit words in the machine's byte order."""
    number, _, port = text.partition(":")
    words = [int(number[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(number), 8)]
    address = ipaddress.ip_address(socket.inet_ntop(family, b"".join(words)))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)


def _sockets_of(pids: Iterable[int]) -> set[str]:
    """Return the inodes of the processes' sockets. A process that has ended has none."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found
