"""Measurements between ranks: connections in each direction, clocks, and an all-reduce."""

from __future__ import annotations

import datetime
import os
import socket
import socketserver
import statistics
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedIOBase
from typing import Any

import torch
import torch.distributed as dist

from ddpjob_trainer.config.config import Config
from ddpjob_trainer.distributed import devices
from ddpjob_trainer.distributed.process_group import Group, destroy
from ddpjob_trainer.preflight.addresses import NodeAddress

_PAYLOAD = 64 * 1024
"""Number of bytes sent in each direction. They fill several packets, because a path that drops full
packets (wrong MTU) still passes the small packets that open a connection.
"""
_AT_A_TIME, _ROUND_TRIPS = 64, 5
_SMALL, _LARGE = 2**18, 2**22  # Numbers of float32 elements: 1 MiB and 16 MiB.
_PATIENT_SECONDS, _WATCHDOG_SECONDS = 0.1, 300.0


@dataclass(frozen=True)
class Contact:
    """The outcome of a connection from one node to another.

    `problem` is the reason why the connection failed, or "". `ahead` is the number of seconds by
    which the other node's clock is ahead, with an error of at most `bound`.
    """

    problem: str
    ahead: float | None = None
    bound: float = 0.0


def now() -> float:
    """Return the seconds since the epoch according to this node's clock."""
    return time.time()


class Listener(socketserver.ThreadingTCPServer):
    """Responds to peers that know the token, in a background thread.

    The listener uses the given address and a port that the system chooses.
    """

    daemon_threads, block_on_close, request_queue_size = True, False, 1024

    def __init__(self, address: str, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.token = token.encode()
        super().__init__((address, 0), _Answer)
        threading.Thread(target=self.serve_forever, args=(0.05,), name="preflight: listener", daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Ignore peers that end a connection, and peers that are not ranks.

        The side that connects reports the problem.
        """

    def close(self) -> None:
        """Close the listener, and end the thread that waits for connections."""
        self.shutdown()
        self.server_close()


class _Answer(socketserver.StreamRequestHandler):
    timeout = 10

    def handle(self) -> None:
        assert isinstance(self.server, Listener)
        if self.rfile.read(len(self.server.token)) == self.server.token:
            for _ in range(_ROUND_TRIPS):
                _exactly(self.rfile, 1)
                self.wfile.write(struct.pack("!d", now()))
            self.wfile.write(_exactly(self.rfile, _PAYLOAD))


def _exactly(connection: BufferedIOBase, size: int) -> bytes:
    if len(content := connection.read(size)) < size:
        raise ConnectionError("closed by the other side")
    return content


def connect(where: NodeAddress, seconds: float) -> Contact:
    """Connect to a node's listener, ask for its time, then exchange full packets.

    The time is computed from the shortest of several round trips (Cristian 1989).
    """
    try:
        peer = socket.create_connection((where.address, where.port), timeout=seconds)
    except TimeoutError:
        return Contact("no response: blocked")
    except OSError as error:
        return Contact(error.strerror or str(error))
    ahead, bound, problem = None, seconds, ""
    try:
        with peer, peer.makefile("rb") as answers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(where.token.encode())
            for _ in range(_ROUND_TRIPS):
                asked, began = now(), time.perf_counter()
                peer.sendall(b"?")
                (theirs,) = struct.unpack("!d", _exactly(answers, 8))
                half = (time.perf_counter() - began) / 2
                if half < bound:
                    ahead, bound = theirs - asked - half, half
            payload = os.urandom(_PAYLOAD)
            peer.sendall(payload)
            if _exactly(answers, _PAYLOAD) != payload:
                problem = "the data that came back is different"
    except TimeoutError:
        lost, other = "full-size packets are lost (wrong MTU, or a filter)", "another program uses this address"
        problem = (
            f"connected, but got no response (the node hangs, or {other})"
            if ahead is None
            else f"connected, but {lost}"
        )
    except OSError as error:
        problem = f"connected, then {error.strerror or error} (another program uses this address)"
    return Contact(problem, ahead, bound)


def connect_all(me: int, listeners: dict[int, NodeAddress], seconds: float) -> dict[int, Contact]:
    """Try to connect to all other nodes, many at a time.

    Each node begins with the node after itself, so no two nodes begin with the same node.
    """
    others = sorted(listeners, key=lambda target: (target < me, target))
    others = [target for target in others if target != me]
    with ThreadPoolExecutor(max_workers=_AT_A_TIME) as pool:
        return dict(zip(others, pool.map(lambda target: connect(listeners[target], seconds), others), strict=True))


@dataclass(frozen=True)
class Sum:
    """The outcome of the all-reduces.

    `problem` is the reason why there was no correct sum, or "". `bytes` is the size of one
    all-reduce, `bandwidth` is its bus bandwidth in GB/s (10^9), and `latency` is in ms.
    """

    problem: str = ""
    bytes: int = 0
    bandwidth: float = 0.0
    latency: float = 0.0


def all_reduce(config: Config, group: Group, store: Any, seconds: float) -> Sum:
    """Form a group over `store`, check and measure all-reduces, and leave the group.

    Runs on every rank. Raises the backend's errors.
    """
    placement = devices.choose_for(config, group.local_rank)
    # At the group's timeout, NCCL's watchdog would end the process. The timeout is therefore longer
    # than the caller's own deadline, after which the caller still has to show a table.
    patience = seconds if placement.device.type == "cpu" else 10 * seconds + _WATCHDOG_SECONDS
    timeout = datetime.timedelta(seconds=patience)
    dist.init_process_group(placement.backend, timeout=timeout, store=store, rank=group.rank, world_size=group.world)
    try:
        for device in dict.fromkeys((torch.device("cpu"), placement.device)):
            # Element i of rank r is i mod 97 + r: small whole numbers, whose sum float32 holds exactly.
            pattern = torch.arange(_SMALL, device=device, dtype=torch.float32) % 97
            right = pattern * group.world + group.world * (group.world - 1) / 2
            if different := int((group.sum(pattern + group.rank) != right).sum()):
                return Sum(f"{different} of {_SMALL} sums are wrong on {device}")
        return _speed(group, placement.device)
    finally:
        destroy()


def _speed(group: Group, device: torch.device) -> Sum:
    """Measure latency and bus bandwidth.

    Bus bandwidth is defined as in nccl-tests: 2 (n - 1) / n times the number of bytes, divided by
    the time.
    """
    number, small, large = (torch.zeros(size, device=device) for size in (1, _SMALL, _LARGE))
    latency = statistics.median(_timed(group, number) for _ in range(20))
    # The slowest rank determines the size, because all ranks must use the same size.
    patient = torch.tensor([max(_timed(group, small) for _ in range(2))])
    tensor = small if group.sum(patient).item() > _PATIENT_SECONDS * group.world else large
    took = statistics.median(_timed(group, tensor) for _ in range(3))
    size = tensor.numel() * tensor.element_size()
    return Sum("", size, 2 * (group.world - 1) / group.world * size / took / 1e9, latency * 1e3)


def _timed(group: Group, tensor: torch.Tensor) -> float:
    began = time.perf_counter()
    group.sum(tensor)[0].item()  # Reading the value also waits for an accelerator.
    return time.perf_counter() - began
