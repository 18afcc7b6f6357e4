"""The coordinator's port, and the rules for declaring a silent member lost.

The first byte of a connection distinguishes members' lines from HTTP (`http_api`).

A silent member may be dead, suspended, or unreachable together with most others. Declaring a live
member lost costs a restart, and waiting for a dead one stops the whole group. So silent members are
checked:

- After SILENCE_SECONDS, the member gets a heartbeat. If its kernel acknowledges the heartbeat, the
  process is only suspended, and is lost only after SLOW_SECONDS of silence. If not, the member is
  lost after PROBE_SECONDS.
- If most members are silent, this coordinator or its network is failing. Then no member is lost
  before BLIND_SECONDS of silence. After that, all silent members are lost together, so that the
  operator replaces this coordinator.
- If a training member's connection ends after a silence, or after a suspension of this process, the
  member has RETURN_SECONDS to reconnect.

Example: node 3's machine loses power after its last heartbeat at 0.0 s.

    6.0  "node train-3-0 is silent; checking whether it is alive"
    7.0  its kernel has acknowledged nothing: the member is lost, and its round breaks

With a ready spare, `witnesses` decides within a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from ddpjob_runtime import protocol
from ddpjob_runtime.acknowledgements import is_acknowledged, resend_often, shows_acknowledgements
from ddpjob_runtime.coordinator import http_api
from ddpjob_runtime.coordinator.coordinator import Coordinator
from ddpjob_runtime.coordinator.loop import within
from ddpjob_runtime.coordinator.member_lines import HANDLERS, whole
from ddpjob_runtime.coordinator.members import Member
from ddpjob_runtime.coordinator.settings import CoordinatorSettings
from ddpjob_runtime.log_lines import Log
from ddpjob_runtime.protocol import FromMember, MemberState, ToMember

HELLO_SECONDS = 10.0
STARTING_SECONDS = 120.0
"""How long a starting member may be silent. The limit is high because loading torch from a cold
disk stalls all threads of a launcher.
"""
PROBE_SECONDS = 1.0
"""How long the kernel of a silent member may take to acknowledge data. If it acknowledges the data
in time, the member is suspended but alive.
"""
SLOW_SECONDS, BLIND_SECONDS = 15.0, 30.0
"""Maximum silence of a suspended member, and of any member while most of them are silent."""
RETURN_SECONDS = 10.0
"""How long a member may take to reconnect if its connection ended after a silence of the member, or
after a suspension of this process.
"""
TICK_SECONDS, STALL_SECONDS = 0.25, 1.0
MAX_BACKLOG = 1024 * 1024
"""Maximum number of bytes that a member may leave unread before its connection is closed."""
DEFAULT_GRACE = 30.0
"""A pod's grace period in seconds if its launcher does not send it."""
MAX_STRANGERS = protocol.MAX_PODS + 512
"""Maximum number of open connections whose peers have not yet proved that they know the job's
token.

All pods of a job may connect at once, each from its own address. They must not displace each other,
because on a slow host their attempts would then be closed and repeated forever.
"""
MAX_NONCES = 4096
"""Maximum number of nonces of state-changing requests to remember, so that replays are refused."""
LOGGED_EVERY = 1.0
"""Minimum number of seconds between log lines about strangers."""
BEAT = protocol.encode(FromMember.HEARTBEAT)
"""A heartbeat as launchers send it."""
POD_NAME = re.compile(rf"[-.\w]{{1,{protocol.MAX_NAME}}}", re.ASCII)
STARTED_AT = time.time() - time.monotonic()


def now() -> float:
    """Return Unix seconds that never jump.

    Otherwise, a correction of the clock would make members look silent, or steps overdue.
    """
    return STARTED_AT + time.monotonic()


log = Log("coordinator")


class MemberSilent(Exception):
    """A member has been silent for too long."""


class Strangers:
    """Connections whose peers have not proved that they know the job's token.

    If there are too many, the oldest connection from the address with the most connections is
    closed. This keeps strangers from locking out members and the operator by holding connections
    open.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.StreamWriter, str] = {}
        self._logged, self._unlogged = float("-inf"), 0

    def meet(self, writer: asyncio.StreamWriter) -> None:
        """Count an accepted connection as a stranger's."""
        self._open[writer] = str((writer.get_extra_info("peername") or ("",))[0])
        if len(self._open) > MAX_STRANGERS:
            [(busiest, _)] = Counter(self._open.values()).most_common(1)
            oldest = next(other for other, address in self._open.items() if address == busiest)
            self.recognize(oldest)
            oldest.transport.abort()
            self.complain(f"more than {MAX_STRANGERS} unknown connections: closed one from {busiest}")

    def recognize(self, writer: asyncio.StreamWriter) -> None:
        """Stop counting this connection as a stranger's.

        Its peer has proved that it knows the token, or the connection has ended.
        """
        self._open.pop(writer, None)

    def complain(self, text: str) -> None:
        """Log what a stranger did, rate-limited so that strangers cannot fill the log."""
        moment = time.monotonic()
        if moment < self._logged + LOGGED_EVERY:
            self._unlogged += 1
            return
        log(text + (f" ({self._unlogged} more of this kind since the last line)" if self._unlogged else ""))
        self._logged, self._unlogged = moment, 0


class MemberConnection(asyncio.StreamReaderProtocol):
    """A connection that handles a member's heartbeats itself.

    During training, waking the member's task for each heartbeat took most of the CPU time.
    """

    _on_beat: Callable[[], bool] | None = None

    def take_beats(self, on_beat: Callable[[], bool]) -> None:
        """Call `on_beat` for each heartbeat.

        If `on_beat` returns False, the member's task handles the heartbeat.
        """
        self._on_beat = on_beat

    def data_received(self, data: bytes) -> None:
        """Receive bytes, and handle a heartbeat if it arrives alone, as it usually does."""
        if data != BEAT or self._on_beat is None or not self._on_beat():
            super().data_received(data)


class Server:
    """The sockets around a `Coordinator`."""

    def __init__(self, settings: CoordinatorSettings, token: str, store_ready: bool) -> None:
        loop = asyncio.get_running_loop()
        self.token, self.store_ready = token, store_ready
        self.renew()
        self.strangers = Strangers()
        self._change = asyncio.Event()
        self._stood_still = float("-inf")
        """When this process last continued after a suspension (monotonic seconds)."""
        self._connections: dict[Member, asyncio.StreamWriter] = {}

        def later(seconds: float, act: Callable[[], None]) -> None:
            loop.call_later(seconds, loop.call_soon, act)  # First read what arrived while this process was suspended.

        self.coordinator = Coordinator(settings, now, later, self._on_change, log, self._acknowledges)

    def renew(self) -> None:
        """Choose a new random number as `instance`.

        Proofs made for an earlier number become invalid.
        """
        self.instance = secrets.token_hex(16)
        self._used: set[str] = set()

    def use(self, nonce: str) -> bool:
        """Use up a nonce. Return False if it was used before.

        Only a client that knows the token can use up nonces. After MAX_NONCES nonces, all proofs
        expire, and clients get the new number with the next response.
        """
        if nonce in self._used:
            return False
        self._used.add(nonce)
        if len(self._used) >= MAX_NONCES:
            self.renew()
        return True

    def _on_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def wait_for_change(self) -> Coroutine[Any, Any, Any]:
        """Return an awaitable that completes at the report's next change after this call."""
        return self._change.wait()

    def watch_for_stalls(self) -> None:
        """Detect suspensions of this process from now on.

        A suspension happens when the host is migrated or has no CPU time for this process.

        Detection uses the loop's timers, which run in the order of their times. So a stall is
        detected before a hang that became due during the stall is judged.
        """
        asyncio.get_running_loop().call_later(TICK_SECONDS, self._look_for_a_stall, time.monotonic())

    def _look_for_a_stall(self, before: float) -> None:
        gap = time.monotonic() - before - TICK_SECONDS
        if gap > STALL_SECONDS:
            self._stood_still = time.monotonic()
            log(f"this coordinator was stalled for {gap:.1f} s")
            self.coordinator.stood_still(gap)
        self.watch_for_stalls()

    async def listen(self, host: str | None, port: int) -> asyncio.Server:
        """Accept connections at this address from now on. Raises OSError."""
        loop = asyncio.get_running_loop()

        def connection() -> MemberConnection:
            return MemberConnection(asyncio.StreamReader(protocol.MAX_LINE, loop), self.serve, loop)

        return await loop.create_server(connection, host, port, backlog=512)

    def store_is_ready(self) -> None:
        """Record that the store accepts connections."""
        self.store_ready = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection from its first byte to its end."""
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        resend_often(sock)
        self.strangers.meet(writer)
        try:
            first = await within(HELLO_SECONDS, reader.read(1))
            if first == b"{":
                await self._serve_member(first, reader, writer)
            elif first:
                await http_api.serve(self, first, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the peer is gone; _serve_member has reported that
        except Exception:
            self.strangers.complain(f"a connection has failed:\n{traceback.format_exc()}")
        finally:
            self.strangers.recognize(writer)
            writer.close()

    async def _serve_member(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        send = _sender(writer)
        nonces = self._prove(first + await _line(reader), send)
        member = self._admit(await _line(reader), nonces, send) if nonces is not None else None
        if member is None:
            await _flush(writer)
            return
        self.strangers.recognize(writer)
        self._answer_beats(member, writer)
        self._connections[member] = writer
        why, judged = "its connection ended", False
        try:
            why = await self._listen(member, reader, writer, send)
        except MemberSilent as silence:
            why, judged = str(silence), True
        except ConnectionError as error:
            why = f"its connection broke: {error}"
        finally:
            if member.send is send and not judged and self._may_return(member):
                await asyncio.sleep(RETURN_SECONDS)
            if member.send is send:  # otherwise the member is using a newer connection
                together = self._silent_members() if judged else []
                self._lose(member, f"{why}, like most members" if together else why)
                for other in together:
                    if now() - other.heard >= SLOW_SECONDS:
                        other.give_up()
                        self._lose(other, f"silent for {now() - other.heard:.0f} s, like most members")
            if self._connections.get(member) is writer:
                del self._connections[member]
            await _flush(writer)

    def _answer_beats(self, member: Member, writer: asyncio.StreamWriter) -> None:
        """Answer the member's heartbeats without waking its task.

        Heartbeats still reach the task if it may have to end the connection.
        """
        transport, answer = writer.transport, protocol.encode(ToMember.HEARTBEAT)

        def on_beat() -> bool:
            if member.given_up or transport.is_closing() or transport.get_write_buffer_size():
                return False
            member.hear(now())
            transport.write(answer)
            return True

        connection = transport.get_protocol()
        assert isinstance(connection, MemberConnection)
        connection.take_beats(on_beat)

    def _lose(self, member: Member, why: str) -> None:
        """Report a member as lost, once.

        If most members are silent, all of them must be lost at the same moment. Otherwise the
        operator would not recognize a partition, and would replace each of them instead of this
        coordinator.
        """
        if member.state == MemberState.LOST:
            return
        log(f"node {member.pod} ({member.state}): {why}")
        self.coordinator.lost(member, why)

    def _prove(self, line: bytes, send: Any) -> tuple[str, str] | None:
        """Answer a member's challenge, and challenge the member in turn.

        Return both nonces, the member's first; None if the member is refused.
        """
        try:
            challenge = protocol.decode(line)
            nonce = challenge.get("nonce")
            if challenge["t"] != FromMember.CHALLENGE or not isinstance(nonce, str):
                raise ValueError('the first line must be "challenge" with a nonce, not {!r}'.format(challenge["t"]))
        except ValueError as error:
            self._refuse(error, send)
            return None
        nonces = nonce[: protocol.MAX_NONCE], secrets.token_hex(16)
        settings = self.coordinator.settings
        place = {"generation": settings.generation, "attempt": settings.attempt}
        proof = protocol.seal(self.token, "coordinator", *nonces, *map(str, place.values()))
        send(ToMember.PROOF, {"nonce": nonces[1], "proof": proof, **place})
        return nonces

    def _refuse(self, error: ValueError, send: Any) -> None:
        self.strangers.complain(f"refused a connection: {error}")
        send(ToMember.REFUSED, {"why": str(error)})

    def _admit(self, line: bytes, nonces: tuple[str, str], send: Any) -> Member | None:
        if not line:
            return None  # the member has found that this is not its coordinator
        try:
            hello = protocol.decode(line)
            if hello["t"] != FromMember.HELLO:
                raise ValueError('the second line must be "hello", not {!r}'.format(hello["t"]))
            if not protocol.is_sealed(hello.get("proof"), self.token, "member", *nonces):
                raise ValueError("the proof was not made with this job's token")
            index = whole(hello, "index", protocol.MAX_PODS - 1)
            attempt, pid = whole(hello, "attempt"), whole(hello, "pid")
            pod, resume = hello.get("pod"), hello.get("resume")
            if not isinstance(pod, str) or not POD_NAME.fullmatch(pod):
                raise ValueError(f"pod: must be the pod's name, not {pod!r:.80}")
            grace = hello.get("grace", DEFAULT_GRACE)
            if not protocol.is_number(grace) or not 0 <= grace <= protocol.MAX_SECONDS:
                raise ValueError(
                    f"grace: must be a number of seconds from 0 to {protocol.MAX_SECONDS}, not {grace!r:.80}"
                )
            notes = hello.get("notes", {})
            if not isinstance(notes, dict):
                raise ValueError(f"notes: must be an object, not {notes!r:.80}")
            log(f"hello from {pod} (index {index}, attempt {attempt}): {resume or 'new'}"[:1000])
            generation = self.coordinator.settings.generation
            if hello.get("generation", generation) != generation:
                send(ToMember.WELCOME, {"generation": generation})  # its generation differs, so it will leave
                return None
            member = self.coordinator.hello(pod, index, attempt, pid, send, float(grace), resume)
            if member is not None:
                for kind, why in notes.items():
                    HANDLERS[FromMember.NOTE](self.coordinator, member, {"kind": kind, "why": why})
            return member
        except ValueError as error:
            self._refuse(error, send)
            return None
        except Exception as defect:
            send(ToMember.ERROR, {"why": _unexpected(defect)})
            self.strangers.complain(f"a hello could not be answered: {_unexpected(defect)}")
            for member in [member for member in self.coordinator.members if member.send is send]:
                self._lose(member, "its hello could not be answered")
            return None

    async def _listen(
        self, member: Member, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send: Any
    ) -> str:
        """Handle a member's lines until its connection ends, and return why it ended."""
        while True:
            try:
                line = await self._hear(member, reader, writer, send)
            except ValueError:
                return f"it sent a line of more than {protocol.MAX_LINE} bytes"
            if not line.endswith(b"\n"):
                return "its connection ended"
            member.hear(now())
            try:
                self._on_message(member, protocol.decode(line), send)
            except ValueError as error:
                log(f"node {member.pod} sent a bad line: {error}")
                send(ToMember.ERROR, {"why": str(error)})
            except Exception as defect:
                return f"it sent a line that cannot be processed: {_unexpected(defect)}"
            if member.given_up:
                return "it responds again and must reconnect"  # with a new hello, because this member is lost
            if writer.is_closing() and reader.exception() is None:  # `send` closed it; a reset raises at the next read
                return "it did not read what was sent to it"

    async def _hear(
        self, member: Member, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send: Any
    ) -> bytes:
        """Return the member's next line.

        Raises MemberSilent, and ValueError if the line is too long.
        """
        allowed = STARTING_SECONDS if member.state == MemberState.STARTING else protocol.SILENCE_SECONDS
        seconds, probed = allowed, 0.0  # `probed` is the value of `heard` at the last probe
        while True:
            line = await within(seconds, reader.readline(), lambda: member.heard + allowed - now())
            if line is not None:
                return line
            if probed == member.heard and not self._lives(member, writer):
                raise MemberSilent(f"silent for {now() - member.heard:.0f} s")
            if probed != member.heard:
                log(f"node {member.pod} is silent; checking whether it is alive")
            send(ToMember.HEARTBEAT, {})
            probed, seconds = member.heard, PROBE_SECONDS

    def _lives(self, member: Member, writer: asyncio.StreamWriter) -> bool:
        """Whether a silent member may just be slow, or be partitioned together with most others."""
        silence = now() - member.heard
        if silence < SLOW_SECONDS and is_acknowledged(writer.get_extra_info("socket")):
            return True
        return silence < BLIND_SECONDS and bool(self._silent_members())

    def _acknowledges(self, member: Member) -> bool:
        """Whether the member's kernel has acknowledged all sent data; True if unknown."""
        writer = self._connections.get(member)
        if writer is None or writer.is_closing() or not shows_acknowledgements():
            return True
        return is_acknowledged(writer.get_extra_info("socket"))

    def _silent_members(self) -> list[Member]:
        """Return the silent members if they are the majority, because then this coordinator is the
        one that is partitioned. Otherwise, return an empty list.
        """
        # Starting members do not count, because importing torch may silence them for a long time.
        others = [other for other in self.coordinator.members if other.state != MemberState.STARTING]
        silent = [other for other in others if now() - other.heard > protocol.SILENCE_SECONDS / 2]
        return silent if len(silent) > max(1, len(others) / 2) else []

    def _may_return(self, member: Member) -> bool:
        """Whether a suspension of the member or this process may have ended the connection."""
        stalled = time.monotonic() - self._stood_still < RETURN_SECONDS
        return member.has_workers and (stalled or now() - member.heard > protocol.SILENCE_SECONDS / 2)

    def _on_message(self, member: Member, message: dict[str, Any], send: Any) -> None:
        verb = message["t"]
        if verb == FromMember.HEARTBEAT:
            send(ToMember.HEARTBEAT, {})
            return
        if verb not in HANDLERS:
            raise ValueError(f"unknown verb {verb!r}")
        shown = {key: value for key, value in message.items() if key not in ("traceback", "text", "ranks")}
        log(f"{member.pod}: {shown}"[:1000])
        if member.state == MemberState.LOST and verb != FromMember.FAILURE:
            return  # another pod has taken its index
        HANDLERS[verb](self.coordinator, member, message)


# ---- sockets


def _unexpected(error: Exception) -> str:
    """Describe an unexpected error caused by a member's line, and where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)!r:.200} ({place.filename}:{place.lineno})"


def _sender(writer: asyncio.StreamWriter) -> Any:
    def send(verb: str, fields: dict[str, Any]) -> None:
        if writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > MAX_BACKLOG:
            writer.transport.abort()  # the peer does not read anything, so it counts as gone
            return
        writer.write(protocol.encode(verb, **fields))

    return send


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return a stranger's line; empty if it does not arrive in time or is too long."""
    with contextlib.suppress(ValueError):
        return await within(HELLO_SECONDS, reader.readline()) or b""
    return b""


async def _flush(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await within(1.0, writer.drain())
