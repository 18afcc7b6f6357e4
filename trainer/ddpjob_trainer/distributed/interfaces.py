"""The network interfaces of this machine and their addresses."""

from __future__ import annotations

import ipaddress
import socket


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface, with IPv4 before IPv6.

    Link-local IPv6 addresses (`fe80::1%eth0`) are left out.
    """
    import psutil

    found = {
        name: [entry.address for family in (socket.AF_INET, socket.AF_INET6) for entry in entries
               if entry.family == family and "%" not in entry.address]
        for name, entries in psutil.net_if_addrs().items()
    }  # fmt: skip
    return {name: addresses for name, addresses in found.items() if addresses}


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached only from the machine itself.

    A zone (`fe80::1%eth0`) is ignored.
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """Return the name of the interface with this address, or an empty string if there is none."""
    return next((name for name, addresses in interfaces().items() if address in addresses), "")
