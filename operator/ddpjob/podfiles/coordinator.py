"""One job's coordinator: tells members of each other, the operator of the members.

    python3 coordinator.py --port 29401 --nodes N [--min-nodes M] [--mode standard|fast] [--attempt A] [--store-port 29400] [--host ADDRESS]
                           [--hang-after SECONDS] [--backoff INITIAL:MAXIMUM]

Environment: DDPJOB_TOKEN, DDPJOB_GENERATION. Standard library only; with --store-port a child process hosts the c10d store, and when it
ends the coordinator ends too (exit 1). One port, two protocols, told apart by a connection's first byte: "{" begins a member's JSON lines,
anything else is HTTP/1.1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import web
import wire
from attribution import Failure
from departure import write_termination_log
from group import Group, Member, Settings
from membership import LOST

HELLO_SECONDS = 10.0
STARTING_SECONDS = 120.0  # loading torch's libraries from a cold disk stops every thread of a launcher
MAX_BACKLOG = 1024 * 1024  # bytes a member may leave unread before it is given up
DEFAULT_GRACE = 30.0  # of a pod, where its launcher does not say
STARTED_AT = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds that never jump: a corrected clock must not make members look silent or steps overdue."""
    return STARTED_AT + time.monotonic()


class Coordinator:
    """The sockets around a `Group`."""

    def __init__(self, settings: Settings, token: str, store_ready: bool) -> None:
        loop = asyncio.get_running_loop()
        self.token, self.store_ready = token, store_ready
        self._change = asyncio.Event()
        self.group = Group(settings, now, loop.call_later, self._on_change, log)

    def _on_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Returns at the next change of the report."""
        await self._change.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first byte to its end."""
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            first = await _within(HELLO_SECONDS, reader.read(1))
            if first == b"{":
                await self._serve_member(first, reader, writer)
            elif first:
                await web.serve(self, first, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the peer went away; whoever must know has been told by _serve_member
        finally:
            writer.close()

    async def _serve_member(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        send = _sender(writer)
        line = await _within(HELLO_SECONDS, reader.readline())
        member = self._admit(first + (line or b""), send)
        if member is None:
            await _flush(writer)
            return
        why = "its connection ended"
        try:
            why = await self._listen(member, reader, send)
        except ConnectionError as error:
            why = f"its connection broke: {error}"
        finally:
            if member.send is send:  # else another connection has taken over
                log(f"node {member.pod} ({member.state}): {why}")
                self.group.lost(member, why)
            await _flush(writer)

    def _admit(self, line: bytes, send: Any) -> Member | None:
        try:
            hello = wire.decode(line)
            if hello["t"] != "hello":
                raise ValueError('the first line must be "hello", not {!r}'.format(hello["t"]))
            if not hmac.compare_digest(str(hello.get("token", "")).encode(), self.token.encode()):
                raise ValueError("the token is not this job's: DDPJOB_TOKEN of the pod differs from the coordinator's")
            index, attempt, pid = (_whole(hello, name) for name in ("index", "attempt", "pid"))
            if not isinstance(hello.get("pod"), str) or not hello["pod"]:
                raise ValueError("pod: must be the pod's name")
            grace = hello.get("grace", DEFAULT_GRACE)
            if not isinstance(grace, (int, float)) or isinstance(grace, bool) or not 0 <= grace < float("inf"):
                raise ValueError(f"grace: must be a number of seconds from 0, not {grace!r}")
            log("hello from {} (place {}, attempt {}): {}".format(hello["pod"], index, attempt, hello.get("resume") or "new"))
            generation = self.group.settings.generation
            if hello.get("generation", generation) != generation:
                send("welcome", {"generation": generation})  # it sees that it belongs to another one and leaves
                return None
            return self.group.hello(hello["pod"], index, attempt, pid, send, float(grace), hello.get("resume"))
        except ValueError as error:
            log(f"refused a connection: {error}")
            send("refused", {"why": str(error)})
            return None

    async def _listen(self, member: Member, reader: asyncio.StreamReader, send: Any) -> str:
        """Take in a member's lines until its connection ends; says why it did."""
        while True:
            try:
                seconds = STARTING_SECONDS if member.state == "Starting" else wire.SILENCE_SECONDS
                line = await _within(seconds, reader.readline())
            except ValueError:
                return f"it sent a line of more than {wire.MAX_LINE} bytes"
            if line is None:
                return f"silent for {seconds:.0f} s"
            if not line.endswith(b"\n"):
                return "its connection ended"
            member.heard = now()
            try:
                self._on_message(member, wire.decode(line), send)
            except ValueError as error:
                log(f"node {member.pod} sent a bad line: {error}")
                send("error", {"why": str(error)})

    def _on_message(self, member: Member, message: dict[str, Any], send: Any) -> None:
        verb = message["t"]
        if verb == "hb":
            send("hb", {})
            return
        if verb != "failure":
            log("{}: {}".format(member.pod, {k: v for k, v in message.items() if k not in ("traceback", "text")}))
        if member.state == LOST and verb != "failure":
            return  # its place is another's by now
        if verb == "ready":
            host = message.get("host", "")
            if not isinstance(host, str):
                raise ValueError(f"host: must be a name or an address, not {host!r}")
            self.group.ready(member, _whole(message, "after"), host, _whole(message, "port"))
        elif verb == "joined":
            self.group.joined(member, _whole(message, "round"))
        elif verb == "finished":
            self.group.finished(member, _whole(message, "round"))
        elif verb == "stacks":
            text = wire.clip(message.get("text"), wire.MAX_TRACEBACK)
            self.group.stacks(member, _whole(message, "round"), _whole(message, "rank"), text)
        elif verb == "note":
            self.group.note(member, wire.clip(message.get("kind"), 100), wire.clip(message.get("why")))
        elif verb == "leaving":
            self.group.leaving(member, wire.clip(message.get("why") or "it was told to end"))
        elif verb == "init_failure":
            self.group.init_failure(member, wire.clip(message.get("message")))
        elif verb == "failure":
            failure = read_failure(member, message, now())
            log(f"{member.pod}: failure of rank {failure.rank}: {failure.message[:300]}")
            self.group.failure(member, message.get("round"), failure)
        else:
            raise ValueError(f"unknown verb {verb!r}")


def read_failure(member: Member, message: dict[str, Any], now: float) -> Failure:
    """The failure a launcher told of. Its time is carried over to this clock by its age: clocks of nodes differ."""
    sent, when = message.get("sent"), message.get("time")
    age = sent - when if isinstance(sent, (int, float)) and isinstance(when, (int, float)) else 0.0
    return Failure(
        place=member.place,
        rank=_whole_or_none(message, "rank"),
        local_rank=_whole_or_none(message, "localRank"),
        exit_code=_whole_or_none(message, "exitCode", negative=True),
        signal=None if message.get("signal") is None else str(message["signal"])[:20],
        message=wire.clip(message.get("message")),
        traceback=wire.clip(message.get("traceback"), wire.MAX_TRACEBACK),
        time=now - max(0.0, age),
        oom=message.get("oom") is True,
        init=message.get("init") is True,
    )


def _whole(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}: must be a whole number from 0, not {value!r}")
    return value


def _whole_or_none(message: dict[str, Any], name: str, negative: bool = False) -> int | None:
    value = message.get(name)
    if value is None:
        return None
    if negative and isinstance(value, int):
        return value
    return _whole(message, name)


def _sender(writer: asyncio.StreamWriter) -> Any:
    def send(verb: str, fields: dict[str, Any]) -> None:
        if writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > MAX_BACKLOG:
            writer.transport.abort()  # it reads nothing: as good as gone
            return
        writer.write(wire.encode(verb, **fields))

    return send


async def _within(seconds: float, what: Any) -> Any:
    """The result, or None when the time is over."""
    task = asyncio.ensure_future(what)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    return task.result() if done else None


async def _flush(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await _within(1.0, writer.drain())


def log(text: str) -> None:
    """One line of the coordinator's log."""
    sys.stderr.write(f"{wire.iso(time.time())} coordinator: {text}\n")
    sys.stderr.flush()


async def _host_store(coordinator: Coordinator, port: int) -> int:
    """Run the store's process until it ends; returns the coordinator's exit code."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("store.py")), "--port", str(port),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    line = await child.stdout.readline()
    if line.startswith(b"ready"):
        coordinator.store_ready = True
        log(f"store: {line.decode().strip()}")
    code = await child.wait()
    if code == wire.EXIT_INIT_FAILURE:
        why = line.decode().strip()
        log(why)
        write_termination_log("InitFailure", why)
        return code
    log(f"the store ended with exit code {code}; so does this coordinator")
    return 1


async def _until_asked(coordinator: Coordinator) -> int:
    """Serve until `POST /v1/exit`."""
    while coordinator.group.exit_why is None:
        await coordinator.wait_for_change()
    log(f"exits: {coordinator.group.exit_why}")
    return 0


async def run(arguments: argparse.Namespace, settings: Settings, token: str) -> int:
    """Serve until asked to exit (0), or until the store ends (1; 78 without torch). SIGTERM ends the process at once with 143."""
    coordinator = Coordinator(settings, token, store_ready=arguments.store_port is None)
    server = await asyncio.start_server(coordinator.serve, arguments.host or None, arguments.port, limit=wire.MAX_LINE, backlog=512)
    what = f"{settings.mode}, generation {settings.generation}, attempt {settings.attempt}"
    log(f"{what}: listens on port {arguments.port} for {settings.minimum} to {settings.nodes} nodes")
    async with server:
        ends = [asyncio.ensure_future(_until_asked(coordinator))]
        if arguments.store_port is not None:
            ends.append(asyncio.ensure_future(_host_store(coordinator, arguments.store_port)))
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()


def backoff(text: str) -> tuple[float, float]:
    """`INITIAL:MAXIMUM`, in seconds."""
    first, colon, last = text.partition(":")
    try:
        initial, maximum = float(first), float(last if colon else first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be INITIAL:MAXIMUM in seconds, such as 1:60, not {text!r}") from None
    if not 0 < initial <= maximum < float("inf"):
        raise argparse.ArgumentTypeError(f"INITIAL must be above 0 and not above MAXIMUM, not {text!r}")
    return initial, maximum


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text!r}") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text!r}")
    return value


def main() -> None:
    """Read arguments and environment, then serve."""
    parser = argparse.ArgumentParser(description="The coordinator of one DDPJob.", allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True, help="members' lines and HTTP")
    parser.add_argument("--nodes", type=int, required=True, help="nodes of a whole group")
    parser.add_argument("--min-nodes", type=int, help="nodes with which the group goes on (default: --nodes)")
    parser.add_argument("--mode", choices=[mode.lower() for mode in (wire.STANDARD, wire.FAST)], default=wire.STANDARD.lower())
    parser.add_argument("--attempt", type=int, default=0, help="how many coordinators this generation had before")
    parser.add_argument("--store-port", type=int, help="also host a c10d store here (mode standard)")
    parser.add_argument("--hang-after", type=seconds, help="seconds without a step that are a hang (default: by the job's own pace)")
    parser.add_argument("--backoff", type=backoff, default=(1.0, 60.0), help="waits of a crash loop in seconds, INITIAL:MAXIMUM")
    parser.add_argument("--host", default="", help="address to listen on (default: all)")
    arguments = parser.parse_args()
    settings = read_settings(parser, arguments)
    token = os.environ.get("DDPJOB_TOKEN", "")
    if not token:
        parser.error("the environment variable DDPJOB_TOKEN is missing or empty: set it to the job's token")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    try:
        code = asyncio.run(run(arguments, settings, token))
        os._exit(code)  # connections that linger must not delay the end
    except OSError as error:
        sys.exit(f"coordinator: cannot listen on port {arguments.port}: {error}")


def read_settings(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Settings:
    """The group's settings; ends the process with 2 when they are not possible."""
    minimum = arguments.nodes if arguments.min_nodes is None else arguments.min_nodes
    if arguments.nodes < 1:
        parser.error("--nodes: must be at least 1")
    if not 1 <= minimum <= arguments.nodes:
        parser.error(f"--min-nodes: must be from 1 to --nodes ({arguments.nodes}), not {minimum}")
    if arguments.attempt < 0:
        parser.error("--attempt: must not be negative")
    mode = wire.FAST if arguments.mode == wire.FAST.lower() else wire.STANDARD
    if mode == wire.FAST and arguments.store_port is not None:
        parser.error("--store-port: mode fast has no store of its own; leave it out")
    generation = os.environ.get("DDPJOB_GENERATION", "0")
    if not generation.isdigit():
        parser.error(f"DDPJOB_GENERATION must be a whole number, not {generation!r}")
    initial, maximum = arguments.backoff
    return Settings(arguments.nodes, minimum, int(generation), mode, arguments.attempt, arguments.hang_after, initial, maximum)


if __name__ == "__main__":
    main()
