"""Faults of machines: nodes with a network of their own on one bridge, folders that only one process sees, filters.

Namespaces need root; the filters of sockets do not.
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
    """Skip the test where no namespaces can be made."""
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
        """Of a node."""
        return f"10.77.0.{node + 1}"

    def enter(self, node: int) -> None:
        """Move this process, which must have one thread, to a node."""
        with Path(f"/run/netns/{self.prefix}{node}").open() as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) == 0, os.strerror(
                ctypes.get_errno()
            )

    def run(self, node: int, command: str) -> None:
        """A command on a node."""
        _run(f"ip netns exec {self.prefix}{node} {command}")


@contextmanager
def network(nodes: int) -> Iterator[Network]:
    """For the time of a `with`; the bridge is in a namespace too, so that this machine's own network is left alone."""
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
    """Put an empty file system over a folder, for this process alone. `options`: of mount -o, such as size=1m or ro."""
    assert ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    _run("mount --make-rprivate /")
    _run(f"mount -t tmpfs -o {options} tmpfs {folder}")


def drop_packets(receiver: socket.socket, longer_than: int = -1) -> None:
    """Have the kernel lose, in silence, what arrives for a socket and those it accepts, as a firewall does.

    Classic BPF (linux/filter.h): return 0 bytes of a packet (with its TCP header) that is longer, else all.
    """
    program = [(0x06, 0, 0, 0)] if longer_than < 0 else [(0x80, 0, 0, 0), (0x25, 0, 1, longer_than), (0x06, 0, 0, 0)]
    code = b"".join(struct.pack("HBBI", *line) for line in [*program, (0x06, 0, 0, 0xFFFFFFFF)])
    held = ctypes.create_string_buffer(code, len(code))
    receiver.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(code) // 8, ctypes.addressof(held)))
