"""Nodes watch their neighbours over real connections. Socket filters drop packets, as a partitioned
network does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from ddpjob_runtime.acknowledgements import shows_acknowledgements
from ddpjob_runtime.launcher import neighbours
from ddpjob_runtime.launcher.neighbours import Neighbours, RingPlace, watch_neighbours
from machine import slowness
from networks import drop_packets, need_namespaces, network

if not shows_acknowledgements():
    pytest.skip("only Linux shows acknowledgements", allow_module_level=True)

TOKEN = "a-token"
RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
Reports = list[tuple[int, int, bool]]
PEER = """
import sys, time
from ddpjob_runtime.launcher.neighbours import Neighbours, RingPlace
host, rank, world, port = sys.argv[1], *map(int, sys.argv[2:5])
reports = lambda *report: print("report", *report, time.monotonic(), flush=True)
watched = Neighbours(host, "a-token", reports)
print("port", watched.port, flush=True)
watched.enter(RingPlace(0, 1, rank, world, (sys.argv[5], port) if port else None))
watched.run()
"""


class Ring:
    """Watchers in this process whose timers the test fires. Only packets take real time."""

    def __init__(self, world: int, token: Callable[[int], str] = lambda rank: TOKEN) -> None:
        self.reports: list[Reports] = [[] for _ in range(world)]
        self.members = [Neighbours("127.0.0.1", token(rank), self._report(rank)) for rank in range(world)]
        self.now = 100.0
        self.enter(1)

    def _report(self, rank: int) -> Callable[[int, int, bool], None]:
        return lambda *report: self.reports[rank].append(report)

    def enter(self, number: int) -> None:
        world = len(self.members)
        for rank, member in enumerate(self.members):
            member.enter(RingPlace(0, number, rank, world, ("127.0.0.1", self.members[(rank + 1) % world].port)))

    def tick(self, times: int) -> None:
        for _ in range(times):
            self.now += neighbours.TICK_SECONDS
            for member in self.members:
                member.tick(self.now)
            time.sleep(0.002)

    def links(self) -> list[list[int]]:
        """Return the neighbours that each member has authenticated."""
        return [sorted(x.rank for x in member._links if x.rank is not None) for member in self.members]

    def stream(self, rank: int, to: int) -> socket.socket:
        return next(link.stream for link in self.members[rank]._links if link.rank == to)


@contextmanager
def ring(world: int, **more: Any) -> Iterator[Ring]:
    made = Ring(world, **more)
    try:
        yield made
    finally:
        for member in made.members:
            member.close()


def test_every_node_is_watched_only_by_its_two_neighbours() -> None:
    with ring(5) as made:
        made.tick(15)
        assert made.links() == [[1, 4], [0, 2], [1, 3], [2, 4], [0, 3]]
        made.enter(2)
        made.tick(30)
        assert made.links() == [[1, 4], [0, 2], [1, 3], [2, 4], [0, 3]]
        assert made.reports == [[]] * 5
    with ring(2) as made:
        made.tick(15)
        assert made.links() == [[1], [0]], "one connection is enough for two nodes"


def test_a_neighbour_is_reported_while_its_kernel_acknowledges_nothing() -> None:
    with ring(3) as made:
        made.tick(15)
        drop_packets(made.stream(1, to=0))
        drop_packets(made.stream(1, to=2))
        made.tick(5)
        assert made.reports[0] == [], "an outage of less than half a second"
        made.tick(3)
        assert made.reports[0] == [(1, 1, True)] and made.reports[2] == [(1, 1, True)]
        made.tick(10)
        assert made.reports[0] == [(1, 1, True)] * 2, "the report is repeated, in case the coordinator was replaced"
        for stream in (made.stream(1, to=0), made.stream(1, to=2)):
            stream.setsockopt(socket.SOL_SOCKET, 27, b"\0" * 4)  # SO_DETACH_FILTER
        until = time.monotonic() + 20 * slowness()
        while made.reports[0][-1] != (1, 1, False) or made.reports[2][-1] != (1, 1, False):
            assert time.monotonic() < until, made.reports
            made.tick(1)


def test_a_neighbour_that_exits_is_not_reported() -> None:
    with ring(3) as made:
        made.tick(15)
        made.members[1].close()
        made.tick(30)
        assert made.reports == [[], [], []]


def test_a_watcher_that_was_stopped_measures_silence_from_when_it_continues() -> None:
    with ring(3) as made:
        made.tick(15)
        drop_packets(made.stream(1, to=0))
        made.tick(1)
        made.now += 10
        made.tick(4)
        assert made.reports[0] == []
        made.tick(4)
        assert made.reports[0] == [(1, 1, True)]


def test_a_node_of_a_different_job_is_not_watched() -> None:
    with ring(3, token=lambda rank: "another" if rank == 1 else TOKEN) as made:
        made.tick(40)
        assert made.links() == [[2], [], [0]]


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b"x" * 5000,
        b'{"t":"neighbour","rank":0,"nonce":"a","proof":"' + b"0" * 64 + b'"}\n',
        b'{"t":"neighbour","nonce":["a"],"proof":null}\n',
        b'{"t":"neighbour","nonce":"' + b"a" * 200 + b'","proof":null}\n',
        b"[" * 400 + b"\n",
        b"",
    ],
)
def test_a_watcher_refuses_connections_of_strangers(line: bytes) -> None:
    with ring(3) as made:
        made.tick(15)
        stranger = socket.create_connection(("127.0.0.1", made.members[1].port))
        stranger.settimeout(5)
        stranger.sendall(line)
        made.tick(30)
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
        stranger.close()
        assert made.links() == [[1, 2], [0, 2], [0, 1]] and made.reports == [[], [], []]
        assert all(len(member._links) == 2 for member in made.members)


def test_a_stranger_at_the_next_nodes_address_is_not_trusted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        reports: Reports = []
        node = Neighbours("127.0.0.1", TOKEN, lambda *report: reports.append(report))
        node.enter(RingPlace(0, 1, 0, 3, ("127.0.0.1", stranger.getsockname()[1])))
        node.tick(100.0)
        stream, _ = stranger.accept()
        stream.settimeout(5)
        time.sleep(0.05)
        node.tick(100.1)
        assert json.loads(stream.recv(1000))["rank"] == 0
        stream.sendall(b'{"t":"neighbour","proof":"' + b"0" * 64 + b'"}\n')
        time.sleep(0.05)
        node.tick(100.2)
        assert stream.recv(1000) == b"" and node._links == [] and reports == []
        stream.close()
        node.close()


def test_the_number_of_concurrent_strangers_is_limited() -> None:
    with ring(3) as made:
        made.tick(15)
        strangers = [socket.create_connection(("127.0.0.1", made.members[1].port)) for _ in range(14)]
        made.tick(2)
        assert len(made.members[1]._links) == 2 + neighbours.MAX_STRANGERS
        for stranger in strangers:
            stranger.close()


def test_a_recorded_greeting_cannot_be_replayed_in_another_round() -> None:
    place = RingPlace(0, 1, 0, 3, None)
    proof = place.seal(TOKEN, "connects", 0, "a")
    assert place.is_sealed(proof, TOKEN, "connects", 0, "a")
    for other, side, rank in [
        (RingPlace(0, 2, 0, 3, None), "connects", 0),
        (RingPlace(1, 1, 0, 3, None), "connects", 0),
        (place, "accepts", 0),
        (place, "connects", 1),
    ]:
        assert not other.is_sealed(proof, TOKEN, side, rank, "a")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"next": {"host": "10.0.0.1", "port": 5}}, ("10.0.0.1", 5)),
        ({"next": {"host": "fd00::1", "port": 5}}, ("fd00::1", 5)),
        ({"next": {"host": "pod-1.job", "port": 5}}, None),
        ({"next": {"host": "10.0.0.1", "port": 70000}}, None),
        ({"next": {"host": "10.0.0.1", "port": True}}, None),
        ({"next": ["10.0.0.1", 5]}, None),
        ({}, None),
    ],
)
def test_the_watcher_connects_only_to_an_ip_address(more: dict[str, Any], expected: tuple[str, int] | None) -> None:
    place = RingPlace.read(0, {"round": 3, "rank": 1, "world": 2, **more})
    assert place is not None and place.next == expected
    assert RingPlace.read(0, {"round": 3, "rank": 0, "world": 1, **more}) is None
    with pytest.raises(ValueError, match="rank: must be a whole number from 0 to 1"):
        RingPlace.read(0, {"round": 3, "rank": 2, "world": 2, **more})


def test_no_neighbour_is_watched_if_all_nodes_share_a_host() -> None:
    assert watch_neighbours("", TOKEN, lambda *report: None) is None


class Peer:
    """A watcher in a separate process. `prefix` is a command that puts the process into a network
    namespace.
    """

    def __init__(self, host: str, rank: int, world: int, after: tuple[str, int], prefix: str = "") -> None:
        self.lines: list[str] = []
        command = [*prefix.split(), sys.executable, "-c", PEER, host, str(rank), str(world), str(after[1]), after[0]]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(RUNTIME)}
        )
        assert self.process.stdout is not None
        found = re.match(r"port (\d+)", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1])

    def end(self) -> list[str]:
        """End the process and return its reports: round, rank, silent, time."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        return [line for line in self.process.communicate()[0].splitlines() if line.startswith("report")]


def test_a_stopped_process_is_not_reported() -> None:
    last = Peer("127.0.0.1", 1, 2, ("", 0))
    first = Peer("127.0.0.1", 0, 2, ("127.0.0.1", last.port))
    time.sleep(1.5)
    last.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    assert first.end() == [] and last.end() == []


def test_a_host_without_a_network_is_reported_within_a_second() -> None:
    need_namespaces()
    with network(3) as made:
        peers: list[Peer] = []
        for rank in (2, 1):
            after = (made.address(rank + 1), peers[-1].port) if peers else ("", 0)
            peers.append(Peer(made.address(rank), rank, 3, after, f"ip netns exec {made.prefix}{rank}"))
        peers.append(Peer(made.address(0), 0, 3, (made.address(1), peers[-1].port), f"ip netns exec {made.prefix}0"))
        time.sleep(2)
        began = time.monotonic()
        made.run(1, "ip link set eth0 down")
        time.sleep(1.5)
        cut = [peer.end() for peer in peers]
    for reports in (cut[0], cut[2]):  # ranks 2 and 0
        assert reports and all(line.startswith("report 1 1 True") for line in reports), cut
        assert float(reports[0].split()[-1]) - began < 1.0 * slowness()
