"""Launchers follow the job's latest coordinator, on loopback. Earlier ones may still run, and
strangers may answer.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ddpjob_runtime import protocol
from ddpjob_runtime.launcher import client as launcher_client
from ddpjob_runtime.launcher.client import MemberClient
from ddpjob_runtime.protocol import Mode
from machine import slowness
from runtime_harness import RUNTIME, TOKEN, Job, until

NAME = "coordinator.test"


class Town:
    """Coordinators on several loopback addresses, and the addresses to which the job's name
    resolves.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.job = Job(folder, nodes, mode="Fast")
        self.names: list[str] = ["127.0.0.1"]
        self.members: list[MemberClient] = []
        self.ends: list[tuple[int, str, str]] = []

    def start(self, address: str, attempt: int = 0, generation: int = 0, token: str = TOKEN) -> subprocess.Popen[bytes]:
        """Start a coordinator that listens at the address, and return it."""
        command = [sys.executable, str(RUNTIME), "coordinator", "--port", str(self.job.port), "--mode", "Fast"]
        command += ["--nodes", str(self.job.nodes), "--host", address, "--attempt", str(attempt)]
        env = {"DDPJOB_GENERATION": str(generation), "DDPJOB_TOKEN": token}
        process = self.job._start(f"{address}-{attempt}", command, env)
        until(lambda: reaches(address, self.job.port))
        return process

    def join(self, seconds: float = 60) -> None:
        """Wait until all members train."""
        for index in range(self.job.nodes):
            identity = {"pod": f"job-{index}-0", "index": index, "attempt": 0, "pid": 1, "generation": 0}
            end = lambda *how: self.ends.append(how)  # noqa: E731
            member = MemberClient(f"{NAME}:{self.job.port}", TOKEN, identity, Mode.FAST, seconds, end)
            self.members.append(member)
            member.start()
            assert member.wait_welcome(30)
        waiting = [threading.Thread(target=self._train, args=(member,)) for member in self.members]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join(30)

    def _train(self, member: MemberClient) -> None:
        go = member.wait_go("127.0.0.1", 1)
        assert go is not None
        member.joined(go["round"])

    def at(self) -> list[str]:
        """Return the address of the coordinator to which each member is connected."""
        sockets = [member._socket for member in self.members if member.welcomed]
        found = []
        for stream in sockets:
            with contextlib.suppress(OSError):  # the member has just disconnected
                found += [stream.getpeername()[0]] if stream is not None else []
        return found


def reaches(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


@pytest.fixture
def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Town]:
    made, look_up = Town(tmp_path, 3), socket.getaddrinfo

    def resolve(host: str, port: Any, *more: Any) -> Any:
        if host != NAME:
            return look_up(host, port, *more)
        if not made.names:
            raise socket.gaierror("no such name")
        return [found for address in made.names for found in look_up(address, port, *more)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(launcher_client, "LOOKUP_SECONDS", 0.3)
    yield made
    for member in made.members:
        member._closing = True
        member.close()
    made.job.close()


@pytest.mark.parametrize("names", [["127.0.0.2"], ["127.0.0.1", "127.0.0.2"]], ids=["the next coordinator", "both"])
def test_members_leave_a_replaced_coordinator_without_losing_their_round(town: Town, names: list[str]) -> None:
    old = town.start("127.0.0.1")
    town.join()
    town.start("127.0.0.2", attempt=1)
    town.names = names
    until(lambda: town.at() == ["127.0.0.2"] * 3)
    assert old.wait(20 * slowness()) == 0, "a member has notified the replaced coordinator"
    time.sleep(2)
    assert not any(member.must_restart(1) for member in town.members) and town.ends == []
    assert "attempt 1) has taken over" in town.job.log("127.0.0.1-0").read_text()


def test_members_partitioned_from_their_coordinator_follow_the_next_one(town: Town) -> None:
    """The partitioned coordinator cannot be notified, because it does not read."""
    old = town.start("127.0.0.1")
    town.join()
    old.send_signal(19)
    town.start("127.0.0.2", attempt=1)
    town.names = ["127.0.0.2", "127.0.0.1"]
    until(lambda: town.at() == ["127.0.0.2"] * 3)
    old.send_signal(18)
    town.names = ["127.0.0.1"]  # a stale response of a name server
    time.sleep(3)
    assert town.at() == ["127.0.0.2"] * 3
    assert not any(member.must_restart(1) for member in town.members) and town.ends == []


def test_only_a_replaced_coordinator_obeys_the_operators_request_to_exit(town: Town) -> None:
    """The next coordinator may have its address by now."""
    second = town.start("127.0.0.1", attempt=1)
    assert town.job.post("/v1/exit", {"why": "replaced", "before": 1}) == (200, {})
    time.sleep(1)
    assert second.poll() is None
    assert town.job.post("/v1/exit", {"why": "replaced", "before": "2"})[0] == 400
    assert town.job.post("/v1/exit", {"why": "replaced", "before": 2}) == (200, {})
    assert second.wait(20 * slowness()) == 0


def test_no_member_returns_to_an_earlier_coordinator(town: Town) -> None:
    town.start("127.0.0.1")
    town.names = ["127.0.0.2"]
    later = town.start("127.0.0.2", attempt=1)
    town.join()
    town.names = ["127.0.0.1"]
    later.kill()
    time.sleep(3)
    assert town.at() == []
    town.start("127.0.0.3", attempt=2)
    town.names = ["127.0.0.1", "127.0.0.3"]
    until(lambda: town.at() == ["127.0.0.3"] * 3)


def test_a_different_jobs_coordinator_or_service_at_the_name_is_ignored(town: Town) -> None:
    town.start("127.0.0.1")
    town.join()
    town.start("127.0.0.2", attempt=5, token="another job's")
    with socket.create_server(("127.0.0.3", town.job.port)):
        town.names = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
        time.sleep(4)
        assert town.at() == ["127.0.0.1"] * 3 and town.ends == []


def test_pods_of_an_abandoned_generation_exit(town: Town) -> None:
    """If the kubelet is dead, nothing else stops them."""
    town.start("127.0.0.1")
    town.join()
    town.start("127.0.0.2", generation=1)
    town.names = ["127.0.0.2"]
    until(lambda: len(town.ends) >= 3)
    code, kind, message = town.ends[0]
    assert (code, kind) == (protocol.EXIT_STOPPED, "Stopped") and "the group is now at generation 1" in message


@contextlib.contextmanager
def relay(address: str, to: str, port: int, claim: dict[str, int]) -> Iterator[list[dict[str, Any]]]:
    """Relay the proof of the coordinator at `to`, but claim a different attempt or generation.
    Yield its responses.
    """
    given: list[dict[str, Any]] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError, ValueError), connection, socket.create_connection((to, port)) as true:
                true.sendall(connection.makefile("rb").readline())
                answer = {**json.loads(true.makefile("rb").readline()), **claim}
                connection.sendall(json.dumps(answer).encode() + b"\n")
                given.append(answer)

    with socket.create_server((address, port)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield given
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize("claim", [{"attempt": 10**9}, {"generation": 7}], ids=["attempt", "generation"])
def test_an_attempt_or_generation_altered_by_a_relay_is_not_trusted(town: Town, claim: dict[str, int]) -> None:
    true = town.start("127.0.0.1")
    town.join()
    with relay("127.0.0.2", "127.0.0.1", town.job.port, claim) as given:
        town.names = ["127.0.0.2", "127.0.0.1"]
        until(lambda: len(given) >= 9)
    assert town.at() == ["127.0.0.1"] * 3 and town.ends == [] and true.poll() is None


def test_two_addresses_of_a_coordinator_do_not_count_as_two_coordinators(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_client, "LOOKUP_SECONDS", 3600)
    town.start("127.0.0.1")
    town.join()
    town.start("127.0.0.2", generation=1)
    town.start("127.0.0.3", generation=1)
    town.names = ["127.0.0.2", "127.0.0.3"]
    member = town.members[0]
    assert member._socket is not None
    member._look_beside(member._socket)
    assert town.ends == []
    member._look_beside(member._socket)
    assert [kind for _, kind, _ in town.ends] == ["Stopped"]


def test_without_a_coordinator_members_train_until_they_need_a_round(town: Town) -> None:
    old = town.start("127.0.0.1")
    town.join(seconds=2)
    old.kill()
    town.names = []
    time.sleep(5)
    assert town.ends == [], "they train"
    threading.Thread(target=town.members[0].wait_go, args=("127.0.0.1", 1), daemon=True).start()
    until(lambda: town.ends)
    [(code, kind, _)] = town.ends
    assert (code, kind) == (protocol.EXIT_RENDEZVOUS_LOST, "RendezvousLost")
    town.names = ["127.0.0.2"]
    town.start("127.0.0.2", attempt=1)
    until(lambda: len(town.at()) == 2)


def test_a_ready_sent_during_the_admission_is_not_lost() -> None:
    """The race is between the welcome's arrival and the lock: `wait_go` finds no welcome yet and
    sends nothing.
    """
    sent: list[bytes] = []
    identity = {"pod": "job-0-0", "generation": 0}
    client = MemberClient("host:1", TOKEN, identity, Mode.FAST, 1.0, lambda *end: None)
    client._socket = SimpleNamespace(sendall=sent.append)  # type: ignore[assignment]
    lock = client._lock

    class Late:
        def __enter__(self) -> object:
            if client._ready is None:
                client._ready = {"after": 0, "host": "h", "port": 1}
            return lock.__enter__()

        def __exit__(self, *how: Any) -> None:
            lock.__exit__(*how)

    client._lock = Late()  # type: ignore[assignment]
    client._on_message({"t": "welcome", "generation": 0})
    assert [protocol.decode(line)["t"] for line in sent] == ["ready"]
