"""Names and addresses: where rank 0 is for each rank, and the address under which a node lets others find it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from ddpjob_trainer.preflight.check import Check, Context, Result, Seen, Status, odd
from ddpjob_trainer.rendezvous import address_towards, meeting

_SIOCGIFADDR = 0x8915
_IPV6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Master:
    """What this rank's resolver says of the host that has the store, empty with a file or alone; `stack`: whose loopback this is."""

    stack: str
    name: str = ""
    addresses: tuple[str, ...] = ()


def look_master(context: Context) -> Master:
    """Raises OSError when the name is not known here."""
    if context.group.world == 1 or meeting().file:
        return Master(network_stack())
    name = meeting().address
    return Master(
        network_stack(), name, tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}))
    )


def judge_master(seen: Seen[Master]) -> Result:
    """FAIL where a node looks for rank 0 on itself, and is not rank 0's; other addresses on some nodes are right behind a NAT, and else
    a mistake."""
    first = next(iter(seen.values.values()))
    if not first.name:
        return Result("master address", Status.OK, "not needed: one rank" if seen.world == 1 else "a file")
    loopback = [
        rank for rank, value in seen.values.items() if any(ipaddress.ip_address(a).is_loopback for a in map(_plain, value.addresses))
    ]
    at_home = seen.values[0].stack if 0 in seen.values else first.stack
    lost = [rank for rank in loopback if seen.values[rank].stack != at_home]
    if lost:
        remedy = "set MASTER_ADDR (or --init tcp://HOST:PORT) to rank 0's address in the network that the nodes share"
        return Result("master address", Status.FAIL, f"{first.name} is each node itself", seen.nodes.names(lost), remedy)
    # Debian's /etc/hosts gives a node's own name a loopback address: right for the ranks that are there, and for nobody else.
    told = {
        rank: ", ".join(value.addresses) for rank, value in seen.values.items() if rank not in loopback or len(loopback) == len(seen.values)
    }
    norm, ranks = odd(told)
    if ranks:
        other = ", ".join(seen.values[ranks[0]].addresses)
        remedy = "right behind a NAT; else correct /etc/hosts or the DNS there"
        return Result("master address", Status.WARN, f"{first.name} is {norm}, but {other} there", seen.nodes.names(ranks), remedy)
    return Result("master address", Status.OK, f"{first.name} is {norm}" if first.name != norm else norm)


def network_stack() -> str:
    """The same for processes that share a loopback: the kernel's start, and the network namespace in it."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _plain(address: str) -> str:
    return address.partition("%")[0]


@dataclass(frozen=True)
class Address:
    """`address`: what other nodes can reach this one by; `gloo`: what gloo tells them, `interface` named by the user or found."""

    stack: str
    address: str
    gloo: str
    interface: str


def look_address(context: Context) -> Address:
    """GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME if set, else what gloo takes (the host name's address), else the way to rank 0.

    Raises OSError when the interface that is named does not exist.
    """
    if named := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        address = interface_address(named)
        return Address(network_stack(), address, address, named)
    gloo = _host_address()
    if (wanted := os.environ.get("NCCL_SOCKET_IFNAME", "")) and not wanted.startswith("^"):
        named = named_interface(wanted)
        return Address(network_stack(), interface_address(named), gloo, named)
    if not ipaddress.ip_address(_plain(gloo)).is_loopback or context.group.world == context.group.local_world:
        return Address(network_stack(), gloo, gloo, interface_of(gloo))
    address = address_towards(meeting().address) if not meeting().file else gloo
    return Address(network_stack(), address, gloo, interface_of(address))


def _host_address() -> str:
    """As gloo in torch finds it: the first address of the host's name that this machine has; else the loopback."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((where[0], 0))
                return str(where[0])
    return "127.0.0.1"


def named_interface(wanted: str) -> str:
    """The first interface with an address that NCCL_SOCKET_IFNAME names: a list of beginnings of names, or of whole names after =.

    The first word of it when there is none.
    """
    exact, words = wanted.startswith("="), [word.partition(":")[0] for word in wanted.removeprefix("=").split(",")]
    for _, name in socket.if_nameindex():
        if any(name == word if exact else name.startswith(word) for word in words):
            with contextlib.suppress(OSError):
                interface_address(name)
                return name
    return words[0]


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface, else its global IPv6 address. Raises OSError naming it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            if address := _global_address(name):
                return address
            there = ", ".join(entry for _, entry in socket.if_nameindex())
            raise OSError(
                error.errno, f"interface {name} (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME): {error.strerror}; there are {there}"
            ) from error
        return socket.inet_ntoa(answer[20:24])


def _global_address(name: str) -> str:
    """An interface's IPv6 address that other nodes can use; empty when it has none."""
    with contextlib.suppress(OSError):
        for line in _IPV6.read_text().splitlines():
            address, _, _, scope, _, interface = line.split()
            if interface == name and scope == "00":
                return str(ipaddress.IPv6Address(bytes.fromhex(address)))
    return ""


def interface_of(address: str) -> str:
    """The interface that has an address; empty when it is none of this machine's."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if interface_address(name) == address:
                return name
    return ""


def judge_address(seen: Seen[Address]) -> Result:
    """FAIL where gloo would tell other nodes a loopback address: they would connect to themselves and wait."""
    if len({value.stack for value in seen.values.values()}) > 1:
        wrong = [rank for rank, value in seen.values.items() if ipaddress.ip_address(_plain(value.gloo)).is_loopback]
        if wrong:
            name = seen.values[wrong[0]].interface or "eth0"
            return Result(
                "own address",
                Status.FAIL,
                f"the host's name is {seen.values[wrong[0]].gloo} there, which gloo would tell the other nodes",
                seen.nodes.names(wrong),
                f"set GLOO_SOCKET_IFNAME (to {name}, it seems), or give the host's name its real address in /etc/hosts",
            )
    found = [f"{value.address}{f' ({value.interface})' if value.interface else ''}" for _, value in sorted(seen.values.items())]
    found = list(dict.fromkeys(found))
    return Result("own address", Status.OK, ", ".join(found[:4]) + (", ..." if len(found) > 4 else ""))


CHECKS = (
    Check("master address", Master, look_master, judge_master),
    Check("own address", Address, look_address, judge_address, per_node=True),
)
