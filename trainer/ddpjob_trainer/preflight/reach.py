"""Can every node connect to every other one? gloo and NCCL use any port, and hang in silence when one direction is blocked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ddpjob_trainer.preflight.check import Result, Status

_PAYLOAD = 64 * 1024
"""Bytes sent each way: a path that drops full packets (a wrong MTU) lets the small ones of a connection's start through."""
_DIGEST = 32
_AT_A_TIME = 64


@dataclass(frozen=True)
class Listener:
    """Where a node waits to be reached."""

    address: str
    port: int
    interface: str


@dataclass(frozen=True)
class Failure:
    """Node `source` (by its leader's rank) could not reach `target`."""

    source: int
    target: int
    why: str


def listen(address: str, token: str) -> int:
    """Answer, in the background, whoever knows the token; returns the port, which the system chose."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server(("", 0), family=family, backlog=1024)

    def answer(peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            peer.settimeout(10)
            if receive(peer, len(token)) == token.encode():
                peer.sendall(hashlib.sha256(receive(peer, _PAYLOAD)).digest() + os.urandom(_PAYLOAD))

    def serve() -> None:
        while True:
            with contextlib.suppress(OSError):
                peer, _ = server.accept()
                threading.Thread(target=answer, args=(peer,), daemon=True).start()

    threading.Thread(target=serve, name="preflight: listener", daemon=True).start()
    return int(server.getsockname()[1])


def receive(peer: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises ConnectionError when the other side ends before."""
    content = bytearray()
    while len(content) < size:
        part = peer.recv(min(65536, size - len(content)))
        if not part:
            raise ConnectionError("closed by the other side")
        content += part
    return bytes(content)


def connect(where: Listener, token: str, seconds: float) -> str:
    """Why it did not go well, or nothing."""
    try:
        peer = socket.create_connection((where.address, where.port), timeout=seconds)
    except TimeoutError:
        return "no answer: blocked"
    except OSError as error:
        return f"{error.strerror}"
    try:
        with peer:
            peer.settimeout(seconds)
            payload = os.urandom(_PAYLOAD)
            peer.sendall(token.encode() + payload)
            if receive(peer, _DIGEST) != hashlib.sha256(payload).digest():
                return "data came back changed"
            receive(peer, _PAYLOAD)
    except TimeoutError:
        return "it connects, but full packets are lost: wrong MTU, or a filter"
    except OSError as error:
        return f"it connects, then {error.strerror or error}: another program has this address"
    return ""


def connect_all(me: int, listeners: dict[int, Listener], token: str, seconds: float) -> list[Failure]:
    """Try all other nodes, many at the same time; each node begins with another one."""
    others = sorted(target for target in listeners if target != me)
    turn = sum(target < me for target in others)
    in_turn = others[turn:] + others[:turn]
    with ThreadPoolExecutor(max_workers=_AT_A_TIME) as pool:
        whys = list(pool.map(lambda target: connect(listeners[target], token, seconds), in_turn))
    return [Failure(me, target, why) for target, why in zip(in_turn, whys, strict=True) if why]


def culprits(failing: Iterable[tuple[int, int]]) -> dict[int, str]:
    """The fewest nodes that all failing pairs (source, target) have in common, and which direction fails: in, out or both.

    The node in most of the failing pairs comes first; of two nodes of which only one direction fails it is the target, because a
    firewall is mostly for what comes in; if both directions between two nodes fail, nothing tells which it is, and both are named.
    """
    pairs = set(failing)
    remaining, found = set(pairs), set[int]()
    while remaining:
        score = {node: sum(node in pair for pair in remaining) for pair in remaining for node in pair}
        worst = sorted(node for node in score if score[node] == max(score.values()))
        targets = {target for _, target in remaining}
        chosen = [node for node in worst if node in targets] or worst
        undecided = len(worst) == 2 and {(worst[0], worst[1]), (worst[1], worst[0])} <= remaining
        found |= set(chosen if undecided else chosen[:1])
        remaining = {pair for pair in remaining if not set(pair) & found}
    return {node: _side(node, pairs, found) for node in sorted(found)}


def _side(node: int, pairs: set[tuple[int, int]], blamed: set[int]) -> str:
    """By what fails with nodes that are not to blame themselves, if there are any."""
    own = {pair for pair in pairs if node in pair}
    telling = {pair for pair in own if not set(pair) - {node} & blamed} or own
    comes_in, goes_out = (any(pair[side] == node for pair in telling) for side in (1, 0))
    return "in and out" if comes_in and goes_out else "in" if comes_in else "out"


def judge(rows: dict[int, list[Failure]], listeners: dict[int, Listener], names: dict[int, str]) -> Result:
    """FAIL naming the nodes that the failing pairs have in common. `rows`: by leader; one that is missing has not reported."""
    pairs = len(listeners) * (len(listeners) - 1)
    if pairs == 0:
        return Result("reachability", Status.OK, "one node")
    silent = [leader for leader in listeners if leader not in rows]
    if silent:
        remedy = "look at its own output: it ended or stands still"
        return Result("reachability", Status.FAIL, "no report", tuple(names[leader] for leader in silent), remedy)
    failures = [failure for row in rows.values() for failure in row]
    if not failures:
        return Result("reachability", Status.OK, f"all {pairs} directed pairs of nodes connect")
    blamed = culprits((failure.source, failure.target) for failure in failures)
    first = next(failure for failure in failures if failure.source in blamed or failure.target in blamed)
    where = listeners[first.target]
    tried = f"{names[first.source]} -> {names[first.target]} ({where.address}, port {where.port}): {first.why}"
    sides = "; ".join(
        f"let in TCP ports 1024-65535 on {listeners[node].interface or listeners[node].address} at {names[node]} from the other nodes"
        if side == "in"
        else f"let out TCP ports 1024-65535 at {names[node]}"
        if side == "out"
        else f"open TCP ports 1024-65535 both ways on {listeners[node].interface or listeners[node].address} at {names[node]}"
        for node, side in blamed.items()
    )
    more = "" if "MTU" not in first.why else "; compare the MTU of the nodes' interfaces (ip link) with what the network carries"
    more += "; if the address is wrong, set GLOO_SOCKET_IFNAME" if "blocked" not in first.why and not more else ""
    culprit = tuple(f"{names[node]} ({side})" for node, side in blamed.items())
    return Result("reachability", Status.FAIL, f"{len(failures)} of {pairs} directed pairs fail; {tried}", culprit, sides + more)
