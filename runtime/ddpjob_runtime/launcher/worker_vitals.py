"""Reads from /proc what workers have done since the last check, and what they are waiting for.

A worker is judged together with all processes in its session, because its work may be done by its
data-loader processes or by a program that it started. Activity that the kernel does not show is not
counted. This is safe, because a lack of activity alone does not prove a hang. The stacks must also
be equal, and the coordinator compares several checks (`standstill`).

    stat         CPU time, and whether a process is stopped (T) or waits in the kernel (D)
    io           bytes read and written through files and pipes
    sock_diag    bytes received and acknowledged through sockets, which `io` leaves out, and
                 whether a server has not answered
    syscall      whether a thread is in a system call on storage, or the main thread asleep
    fd           whether a GPU is open

A request is unanswered if its connection has received no data since the request was sent. Stacks
would not show that a worker waits for the answer, because the wait may be in a different thread or
process, or in a native library. Other ranks do not count as servers. Their ports are ephemeral, so
only connections to lower ports are examined.

Open files are identified only by their names, because even a stat of a file on a dead server would
block. Why: docs/decisions/0024.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob_runtime.protocol import WaitKind

TICKS = os.sysconf("SC_CLK_TCK")
GPUS = re.compile(r"/dev/(nvidia\d|kfd$)")
COUNTED = "rchar", "wchar", "read_bytes", "write_bytes"

ON_FILES = {
    "x86_64": {
        0: "read", 1: "write", 3: "close", 5: "fstat", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
        74: "fsync", 75: "fdatasync", 77: "ftruncate", 217: "getdents64", 285: "fallocate", 326: "copy_file_range",
    },
    "aarch64": {
        63: "read", 64: "write", 57: "close", 80: "fstat", 67: "pread64", 68: "pwrite64", 65: "readv", 66: "writev",
        82: "fsync", 83: "fdatasync", 46: "ftruncate", 61: "getdents64", 47: "fallocate", 285: "copy_file_range",
    },
}  # fmt: skip
"""System calls that may wait for storage. Their first argument is the descriptor of a file."""
ON_NAMES = {
    "x86_64": {
        2: "open", 4: "stat", 6: "lstat", 26: "msync", 82: "rename", 83: "mkdir", 87: "unlink", 257: "openat",
        258: "mkdirat", 262: "newfstatat", 263: "unlinkat", 264: "renameat", 316: "renameat2", 332: "statx",
    },
    "aarch64": {
        56: "openat", 34: "mkdirat", 35: "unlinkat", 38: "renameat", 79: "newfstatat", 227: "msync", 276: "renameat2",
        291: "statx",
    },
}  # fmt: skip
SLEEPS = {"x86_64": (35, 230), "aarch64": (101, 115)}
SELECTS = {"x86_64": (23, 270), "aarch64": (72,)}
"""System calls that sleep. Those in SELECTS sleep only if they do not wait for files."""

DIAGNOSE, OF_FAMILY, DUMP, DONE, ERROR = 4, 20, 0x301, 3, 2
"""Numbers of the netlink protocol. DIAGNOSE is the protocol for sockets, OF_FAMILY is the kind of a
request, and DUMP is the request's flags. A message of the kind DONE or ERROR ends a response.
"""
MESSAGE, LENGTH_OF_SOCKET, INODE_AT = struct.Struct("=IHHII"), 72, 68
PORT_AT, ADDRESS_AT, UNSENT_AT = 6, 24, 60
INFO, SENT_MS_AT, RECEIVED_MS_AT, RECEIVED_AT = 2, 44, 52, 120
"""INFO is the number of the attribute with TCP's counters. The other numbers are positions in this
attribute: milliseconds since data was last sent, milliseconds since data was last received, and the
numbers of acknowledged and received bytes.
"""
ESTABLISHED, CONNECTING = 1, 2
SECONDS_OF_KERNEL = 1.0


@dataclass
class Vitals:
    """The counters of all processes in a worker's session, and what the worker is waiting for."""

    at: float
    cpu: float = 0.0
    bytes: int = 0
    processes: set[int] = field(default_factory=set)
    gpu: bool = False
    wait: WaitKind | None = None
    call: str = ""

    def since(self, before: Vitals | None) -> dict[str, object]:
        """Return the fields of a RankLook that describe what this worker has done.

        Each counter is the change since the last check (`before`); 0 at the first check.
        """
        start = self if before is None else before
        return {
            "seconds": self.at - start.at,
            "cpu": max(0.0, self.cpu - start.cpu),
            "bytes": abs(self.bytes - start.bytes),
            "forks": len(self.processes ^ start.processes),
            "gpu": self.gpu,
            "wait": self.wait,
            "call": self.call,
        }


def read_vitals(workers: Iterable[int]) -> dict[int, Vitals]:
    """Return the vitals of each worker, by the worker's pid.

    Each worker must be the leader of its session.
    """
    found = {pid: Vitals(time.monotonic()) for pid in workers}
    sockets = _read_sockets()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # The process has just ended.
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            vitals = found.get(int(fields[3]))
            if vitals is not None and fields[0] not in (b"Z", b"X"):
                _add(vitals, folder, fields, sockets)
    return found


def _add(vitals: Vitals, folder: Path, fields: list[bytes], sockets: Mapping[str, tuple[int, str]]) -> None:
    vitals.processes.add(int(folder.name))
    vitals.cpu += sum(map(int, fields[11:15])) / TICKS
    with contextlib.suppress(OSError):  # The process may belong to a different user.
        for line in (folder / "io").read_text().splitlines():
            name, _, value = line.partition(": ")
            vitals.bytes += int(value) if name in COUNTED else 0
    waits = [_find_wait(folder, fields[0].decode())]
    with contextlib.suppress(OSError):
        for name in _open_files(folder):
            vitals.gpu = vitals.gpu or GPUS.match(name) is not None
            count, server = sockets.get(name, (0, ""))
            vitals.bytes += count
            if server:
                waits.append((WaitKind.SERVER, server))
    with contextlib.suppress(OSError):
        for thread in (folder / "task").iterdir():
            state = (thread / "stat").read_bytes().rpartition(b")")[2].split()[0].decode()
            if (wait := _find_wait(thread, state))[0] is WaitKind.STORAGE:
                waits.append(wait)
    order = [None, WaitKind.ASLEEP, WaitKind.SERVER, WaitKind.STORAGE, WaitKind.STOPPED, WaitKind.TRACED]
    vitals.wait, vitals.call = max([(vitals.wait, vitals.call), *waits], key=lambda wait: order.index(wait[0]))


def _open_files(folder: Path) -> Iterator[str]:
    for entry in os.scandir(folder / "fd"):
        with contextlib.suppress(OSError):
            yield str(Path(entry.path).readlink())


def _find_wait(folder: Path, state: str) -> tuple[WaitKind | None, str]:
    """Return what a thread waits for, and the name of its system call.

    `folder` is the thread's folder in /proc. The folder of a process stands for its main thread.
    """
    if state in "Tt":
        return (WaitKind.STOPPED if state == "T" else WaitKind.TRACED), ""
    machine, call = platform.machine(), ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        number, *arguments = (folder / "syscall").read_text().split()
        if number.isdigit():
            call = ON_FILES.get(machine, {}).get(int(number), "")
            if call and _is_storage(str((folder / "fd" / str(int(arguments[0], 16))).readlink())):
                return WaitKind.STORAGE, call
            call = ON_NAMES.get(machine, {}).get(int(number), "")
            if call:
                return WaitKind.STORAGE, call
            none = int(arguments[0], 16) == 0
            if int(number) in SLEEPS.get(machine, ()) or (int(number) in SELECTS.get(machine, ()) and none):
                return WaitKind.ASLEEP, ""
    return (WaitKind.STORAGE, call) if state == "D" else (None, "")


def _is_storage(name: str) -> bool:
    return name.startswith("/") and not name.startswith(("/dev/", "/proc/"))


def _read_sockets() -> dict[str, tuple[int, str]]:
    """Return how many bytes each TCP socket has transferred, and which server owes it a response.

    If no server owes a response, the server is "". The keys are the sockets' names in `fd` folders.
    The result is empty if the kernel refuses to report sockets.
    """
    found: dict[str, tuple[int, str]] = {}
    with contextlib.suppress(OSError, ValueError, struct.error):
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        for family in (socket.AF_INET, socket.AF_INET6):
            for body in _dump_sockets(family):
                inode, count, awaited = _read_socket(body)
                (port,) = struct.unpack_from("!H", body, PORT_AT)
                server = ""
                if awaited and port < ephemeral:
                    size = 4 if family == socket.AF_INET else 16
                    server = f"{socket.inet_ntop(family, body[ADDRESS_AT : ADDRESS_AT + size])} port {port}"
                found[f"socket:[{inode}]"] = count, server
    return found


def _dump_sockets(family: int) -> Iterator[bytes]:
    """Yield the kernel's description of each TCP socket in this address family.

    Raises OSError.
    """
    request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (INFO - 1), 0xFFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, DIAGNOSE) as kernel:
        kernel.settimeout(SECONDS_OF_KERNEL)
        kernel.sendto(MESSAGE.pack(MESSAGE.size + len(request), OF_FAMILY, DUMP, 1, 0) + request, (0, 0))
        while True:
            data = kernel.recv(65536)
            while len(data) >= MESSAGE.size:
                length, kind, *_ = MESSAGE.unpack_from(data)
                if kind in (DONE, ERROR) or length < MESSAGE.size:
                    return
                if length >= MESSAGE.size + LENGTH_OF_SOCKET:
                    yield data[MESSAGE.size : length]
                data = data[(length + 3) & ~3 :]


def _read_socket(body: bytes) -> tuple[int, int, bool]:
    """Return a socket's inode, the bytes it has transferred, and whether the other end owes a
    response.
    """
    unsent, _, inode = struct.unpack_from("=3I", body, UNSENT_AT)
    awaited, at = body[1] == CONNECTING, LENGTH_OF_SOCKET
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        if kind == INFO and length >= 4 + RECEIVED_AT + 16:
            info = body[at + 4 :]
            (sent,), (received,) = (struct.unpack_from("=I", info, where) for where in (SENT_MS_AT, RECEIVED_MS_AT))
            awaited = awaited or (body[1] == ESTABLISHED and (unsent > 0 or sent <= received))
            return inode, sum(struct.unpack_from("=QQ", info, RECEIVED_AT)), awaited
        at += max(4, (length + 3) & ~3)
    return inode, 0, awaited
