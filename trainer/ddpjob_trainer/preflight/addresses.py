"""Finds the address at which other nodes reach this node, in the same way as gloo and NCCL."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from ddpjob_trainer.distributed.init_method import address_towards, meeting
from ddpjob_trainer.distributed.interfaces import interface_of, interfaces, is_loopback
from ddpjob_trainer.distributed.process_group import Group


@dataclass(frozen=True)
class NodeAddress:
    """A node's addresses, and its listener.

    Other nodes can reach the node at `address`, which belongs to `interface`. `gloo` is the address
    that gloo would announce to the other nodes. `stack` identifies the node's loopback
    (`network_stack`). The node's listener responds on `port` to peers that know `token`.
    """

    stack: str
    address: str
    gloo: str = ""
    interface: str = ""
    port: int = 0
    token: str = ""

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})" if self.interface else self.address


def own_address(group: Group) -> NodeAddress:
    """Return this node's addresses, without a listener.

    If GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface, the node's address is the
    address of this interface. Otherwise, it is the address that gloo would choose. If gloo would
    choose a loopback address although there are several nodes, the address from which this node
    reaches rank 0 is used instead. Raises OSError if the named interface does not exist.
    """
    named, nccl = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], os.environ.get("NCCL_SOCKET_IFNAME", "")
    address = gloo = _address_of(named) if named else _host_address()
    if not named and nccl and not nccl.startswith("^"):
        address = _address_of(named := _nccl_interface(nccl))
    elif not named and is_loopback(gloo) and group.world > group.local_world and not meeting().file:
        address = address_towards(meeting().address)
    return NodeAddress(network_stack(), address, gloo, named or interface_of(address))


def network_stack() -> str:
    """Return an id that is the same for all processes that share a loopback interface.

    The id consists of the kernel's boot id and the network namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _address_of(name: str) -> str:
    if name not in (there := interfaces()):
        known = ", ".join(there)
        raise OSError(
            f"interface {name} (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) has no address; interfaces of "
            f"this machine: {known}"
        )
    return there[name][0]


def _nccl_interface(wanted: str) -> str:
    """Return the name of the first interface that matches NCCL_SOCKET_IFNAME.

    The variable contains prefixes of names or, after `=`, whole names.
    """
    exact, words = wanted.startswith("="), [word.partition(":")[0] for word in wanted.removeprefix("=").split(",")]
    matches = (n for n in interfaces() if any(n == word if exact else n.startswith(word) for word in words))
    return next(matches, words[0])


def _host_address() -> str:
    """Return the address that torch's gloo would choose for this host.

    gloo chooses the first address of the host's name that belongs to this machine. If there is
    none, gloo chooses the loopback address.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((where[0], 0))
                return str(where[0])
    return "127.0.0.1"
