"""Simulates faults of machines: nodes with separate networks on a bridge, mounts visible to only
one process, and packet filters.

Namespaces need root, but socket filters do not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_SO_ATTACH_FILTER = 26


def need_namespaces() -> None:
    """Skip the test if namespaces cannot be created."""
    missing = [tool for tool in ("ip", "mount") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and ip, mount (missing: {', '.join(missing) or 'root'})")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@dataclass(frozen=True)
class Network:
    """Nodes 0, 1, ... with the addresses 10.77.0.1, 10.77.0.2, ... on their interface eth0."""

    prefix: str

    def address(self, node: int) -> str:
        """Return the address of a node."""
        return f"10.77.0.{node + 1}"

    def enter(self, node: int) -> None:
        """Move this process, which must have only one thread, to a node."""
        with Path(f"/run/netns/{self.prefix}{node}").open() as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0, os.strerror(
                ctypes.get_errno()
            )

    def run(self, node: int, command: str) -> None:
        """Run a command on a node."""
        _run(f"ip netns exec {self.prefix}{node} {command}")


@contextmanager
def network(nodes: int) -> Iterator[Network]:
    """Create the network for the duration of a `with` block. The bridge is also in a namespace, so
    that this machine's own network is not changed.
    """
    prefix = f"pf{os.getpid()}n"
    bridge = f"pf{os.getpid()}b"
    made = [bridge, *(f"{prefix}{node}" for node in range(nodes))]
    try:
        _run(f"ip netns add {bridge}")
        _run(f"ip -n {bridge} link add br0 type bridge")
        _run(f"ip -n {bridge} link set br0 up")
        for node in range(nodes):
            name = f"{prefix}{node}"
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link add eth0 type veth peer name port{node} netns {bridge}")
            _run(f"ip -n {bridge} link set port{node} master br0 up")
            _run(f"ip -n {name} address add 10.77.0.{node + 1}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up")
        yield Network(prefix)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def own_mount(folder: Path, options: str) -> None:
    """Mount an empty file system over a folder, visible only to this process. `options` are passed
    to mount -o, such as size=1m or ro.
    """
    assert ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    _run("mount --make-rprivate /")
    _run(f"mount -t tmpfs -o {options} tmpfs {folder}")


def drop_packets(receiver: socket.socket, longer_than: int = -1) -> None:
    """Make the kernel silently drop packets for a socket and the connections it accepts, as a
    firewall does.

    The filter is classic BPF (linux/filter.h). It returns 0 bytes for packets longer than
    `longer_than` (with their TCP header), and all bytes of others.
    """
    program = [(0x06, 0, 0, 0)] if longer_than < 0 else [(0x80, 0, 0, 0), (0x25, 0, 1, longer_than), (0x06, 0, 0, 0)]
    code = b"".join(struct.pack("HBBI", *line) for line in [*program, (0x06, 0, 0, 0xFFFFFFFF)])
    held = ctypes.create_string_buffer(code, len(code))
    receiver.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(code) // 8, ctypes.addressof(held)))
