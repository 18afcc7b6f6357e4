"""The coordinator's port, and the rules for declaring a silent member lost.

The first byte of a connection shows whether the peer speaks HTTP (`http_api`) or sends a member's
lines.

A silent member may be dead, suspended, or unreachable along with most other members. Declaring a
live member lost restarts the job without need, and waiting for a dead member stalls the whole
group. Silent members are therefore checked:

- After SILENCE_SECONDS without a line from a member, the coordinator sends it a heartbeat. If the
  kernel of the member's host acknowledges the heartbeat, the member's process is only suspended,
  and the member is declared lost only after SLOW_SECONDS of silence. If the kernel does not
  acknowledge it, the member is declared lost after PROBE_SECONDS.
- If most members are silent, the fault is in this coordinator or its network. Then no member is
  declared lost before BLIND_SECONDS of silence. After that, all silent members are declared lost
  together, so that the operator replaces this coordinator.
- If a training member's connection ends after the member was silent, or after this process was
  suspended, the member has RETURN_SECONDS to reconnect.

Example: node 3's machine loses power after its last heartbeat at 0.0 s.

    6.0  "node train-3-0 is silent; checking whether it is alive"
    7.0  its kernel has acknowledged nothing: the member is lost, and its round breaks

If a spare is ready, `witnesses` decides within a second.
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
"""Maximum silence of a starting member, in seconds. The limit is high because loading torch from a
cold disk stalls all threads of a launcher.
"""
PROBE_SECONDS = 1.0
"""Number of seconds within which the kernel of a silent member's host must acknowledge data. If it
does, the member counts as suspended but alive.
"""
SLOW_SECONDS, BLIND_SECONDS = 15.0, 30.0
"""Maximum silence in seconds: for a suspended member, and for any member while most members are
silent.
"""
RETURN_SECONDS = 10.0
"""Number of seconds that a member has to reconnect after its connection has ended. The member gets
this time only if it was silent, or this process was suspended, before the connection ended.
"""
TICK_SECONDS, STALL_SECONDS = 0.25, 1.0
MAX_BACKLOG = 1024 * 1024
"""Maximum number of bytes waiting to be sent to a member. If a member reads so slowly that more
bytes are waiting, its connection is closed.
"""
DEFAULT_GRACE = 30.0
"""Grace period of a member's pod in seconds, if the launcher does not report it."""
MAX_STRANGERS = protocol.MAX_PODS + 512
"""Maximum number of open connections whose peers have not yet proved that they know the job's
token. All pods of a job may connect at the same time, each from its own address, so the limit must
allow for all of them. With a lower limit, new connections would close older ones, and on a slow
host the pods would reconnect forever.
"""
MAX_NONCES = 4096
"""Maximum number of nonces to remember in order to refuse repeated requests. Only requests that
change the state use up nonces.
"""
LOGGED_EVERY = 1.0
"""Minimum number of seconds between log lines about connections from unknown peers."""
BEAT = protocol.encode(FromMember.HEARTBEAT)
"""The bytes of a heartbeat, exactly as launchers send it."""
POD_NAME = re.compile(rf"[-.\w]{{1,{protocol.MAX_NAME}}}", re.ASCII)
STARTED_AT = time.time() - time.monotonic()


def now() -> float:
    """Return the time as Unix seconds, from a clock that is never corrected.

    If corrections of the system clock had an effect, members could seem silent, or steps overdue.
    """
    return STARTED_AT + time.monotonic()


log = Log("coordinator")


class MemberSilent(Exception):
    """A member has been silent for too long."""


class Strangers:
    """Keeps track of connections whose peers have not proved that they know the job's token.

    If there are too many of these connections, the address with the most of them loses its oldest
    connection. Strangers that hold connections open therefore cannot lock out members or the
    operator.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.StreamWriter, str] = {}
        self._logged, self._unlogged = float("-inf"), 0

    def meet(self, writer: asyncio.StreamWriter) -> None:
        """Count a new connection as a stranger's. If there are now too many strangers, close the
        connection of one stranger.
        """
        self._open[writer] = str((writer.get_extra_info("peername") or ("",))[0])
        if len(self._open) > MAX_STRANGERS:
            [(busiest, _)] = Counter(self._open.values()).most_common(1)
            oldest = next(other for other, address in self._open.items() if address == busiest)
            self.recognize(oldest)
            oldest.transport.abort()
            self.complain(f"more than {MAX_STRANGERS} unauthenticated connections; closed one from {busiest}")

    def recognize(self, writer: asyncio.StreamWriter) -> None:
        """Stop counting this connection as a stranger's.

        Either its peer has proved that it knows the token, or the connection has ended.
        """
        self._open.pop(writer, None)

    def complain(self, text: str) -> None:
        """Log what a stranger did, but write at most one line every LOGGED_EVERY seconds, so that
        strangers cannot fill the log.
        """
        moment = time.monotonic()
        if moment < self._logged + LOGGED_EVERY:
            self._unlogged += 1
            return
        log(text + (f" ({self._unlogged} similar messages were not logged)" if self._unlogged else ""))
        self._logged, self._unlogged = moment, 0


class MemberConnection(asyncio.StreamReaderProtocol):
    """A member's connection. It handles heartbeats without waking the member's task.

    During training, waking the tasks for heartbeats took most of the CPU time.
    """

    _on_beat: Callable[[], bool] | None = None

    def take_beats(self, on_beat: Callable[[], bool]) -> None:
        """Call `on_beat` for each heartbeat from now on.

        If `on_beat` returns False, leave the heartbeat to the member's task.
        """
        self._on_beat = on_beat

    def data_received(self, data: bytes) -> None:
        """Receive bytes. If they are exactly one heartbeat, as is usual, handle it here."""
        if data != BEAT or self._on_beat is None or not self._on_beat():
            super().data_received(data)


class Server:
    """Owns the coordinator's sockets, and passes everything that arrives to a `Coordinator`."""

    def __init__(self, settings: CoordinatorSettings, token: str, store_ready: bool) -> None:
        loop = asyncio.get_running_loop()
        self.token, self.store_ready = token, store_ready
        self.renew()
        self.strangers = Strangers()
        self._change = asyncio.Event()
        self._stood_still = float("-inf")
        """Time at which this process last noticed that it had been suspended, in monotonic seconds.
        """
        self._connections: dict[Member, asyncio.StreamWriter] = {}

        def later(seconds: float, act: Callable[[], None]) -> None:
            # `act` runs in the next turn of the event loop, so that everything that arrived during
            # a suspension is read first.
            loop.call_later(seconds, loop.call_soon, act)

        self.coordinator = Coordinator(settings, now, later, self._on_change, log, self._acknowledges)

    def renew(self) -> None:
        """Choose a new random number as `instance`. Proofs that were made for an earlier number
        become invalid.
        """
        self.instance = secrets.token_hex(16)
        self._used: set[str] = set()

    def use(self, nonce: str) -> bool:
        """Mark a nonce as used. Return False if it was used before, because the request is then a
        replay.

        This method is called only for clients that know the token. After MAX_NONCES nonces, a new
        `instance` is chosen, and all earlier proofs become invalid. Clients learn the new
        `instance` from the next response.
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
        """Return an awaitable that completes at the next change to the report."""
        return self._change.wait()

    def watch_for_stalls(self) -> None:
        """Start detecting suspensions of this process.

        A process is suspended while its host is migrated or has no CPU time for it. A timer of the
        event loop detects the suspension. Timers run in the order of their times, so this timer
        runs before any time limit for hangs that expired during the suspension.
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
        """Accept connections at this address from now on. Raises OSError if the address cannot be
        used.
        """
        loop = asyncio.get_running_loop()

        def connection() -> MemberConnection:
            return MemberConnection(asyncio.StreamReader(protocol.MAX_LINE, loop), self.serve, loop)

        return await loop.create_server(connection, host, port, backlog=512)

    def store_is_ready(self) -> None:
        """Record that the job's store accepts connections."""
        self.store_ready = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection from its first byte to its end."""
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
            pass  # The peer is gone. If it was a member, _serve_member has reported that.
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
            # If the member has a different `send`, it is already using a newer connection.
            if member.send is send:
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
        """Answer the member's heartbeats in the connection itself, without waking the member's
        task.

        If the connection may have to end, leave the heartbeat to the task.
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
        """Report a member as lost, unless it has been reported already.

        If most members are silent, the caller must report all of them at the same moment. Otherwise
        the operator would not recognize the partition, and would replace each member instead of
        this coordinator.
        """
        if member.state == MemberState.LOST:
            return
        log(f"node {member.pod} ({member.state}): {why}")
        self.coordinator.lost(member, why)

    def _prove(self, line: bytes, send: Any) -> tuple[str, str] | None:
        """Answer a member's challenge, and send a challenge to the member. Return the member's
        nonce and this coordinator's nonce. If the member's line is not a valid challenge, refuse
        the member and return None.
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
            # The peer has closed the connection, because this is not the peer's coordinator.
            return None
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
                # The launcher belongs to a different generation, so it will leave.
                send(ToMember.WELCOME, {"generation": generation})
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
            self.strangers.complain(f"a hello could not be processed: {_unexpected(defect)}")
            for member in [member for member in self.coordinator.members if member.send is send]:
                self._lose(member, "its hello could not be processed")
            return None

    async def _listen(
        self, member: Member, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send: Any
    ) -> str:
        """Handle a member's lines until its connection must end or has ended, and return the
        reason.
        """
        while True:
            try:
                line = await self._hear(member, reader, writer, send)
            except ValueError:
                return f"it sent a line longer than {protocol.MAX_LINE} bytes"
            if not line.endswith(b"\n"):
                return "its connection ended"
            member.hear(now())
            try:
                self._on_message(member, protocol.decode(line), send)
            except ValueError as error:
                log(f"node {member.pod} sent an invalid line: {error}")
                send(ToMember.ERROR, {"why": str(error)})
            except Exception as defect:
                return f"it sent a line that cannot be processed: {_unexpected(defect)}"
            if member.given_up:
                # The member must send a new hello, because it was declared lost.
                return "it responds again and must reconnect"
            # `send` has closed the connection. After a reset by the peer, the next read raises an
            # error.
            if writer.is_closing() and reader.exception() is None:
                return "it did not read the coordinator's messages"

    async def _hear(
        self, member: Member, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send: Any
    ) -> bytes:
        """Return the member's next line.

        Raises MemberSilent if the member is silent for too long, and ValueError if the line is too
        long.
        """
        allowed = STARTING_SECONDS if member.state == MemberState.STARTING else protocol.SILENCE_SECONDS
        # When a heartbeat is sent to a silent member, `probed` is set to the time of the member's
        # last line.
        seconds, probed = allowed, 0.0
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
        """Whether a silent member may still be alive, because it is only slow or because most
        members are silent.
        """
        silence = now() - member.heard
        if silence < SLOW_SECONDS and is_acknowledged(writer.get_extra_info("socket")):
            return True
        return silence < BLIND_SECONDS and bool(self._silent_members())

    def _acknowledges(self, member: Member) -> bool:
        """Whether the kernel of the member's host has acknowledged all data that was sent; True if
        that is unknown.
        """
        writer = self._connections.get(member)
        if writer is None or writer.is_closing() or not shows_acknowledgements():
            return True
        return is_acknowledged(writer.get_extra_info("socket"))

    def _silent_members(self) -> list[Member]:
        """Return the silent members if they are the majority, otherwise an empty list.

        If most members are silent, this coordinator is probably the one that is partitioned.
        """
        # Starting members do not count, because they may be silent for a long time while they
        # import torch.
        others = [other for other in self.coordinator.members if other.state != MemberState.STARTING]
        silent = [other for other in others if now() - other.heard > protocol.SILENCE_SECONDS / 2]
        return silent if len(silent) > max(1, len(others) / 2) else []

    def _may_return(self, member: Member) -> bool:
        """Whether the connection may have ended only because the member or this process was
        suspended.
        """
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
            return  # Another pod has taken this member's index.
        HANDLERS[verb](self.coordinator, member, message)


# ---- sockets


def _unexpected(error: Exception) -> str:
    """Describe an unexpected error that a member's line has caused, and where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)!r:.200} ({place.filename}:{place.lineno})"


def _sender(writer: asyncio.StreamWriter) -> Any:
    def send(verb: str, fields: dict[str, Any]) -> None:
        if writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > MAX_BACKLOG:
            writer.transport.abort()  # The peer has stopped reading, so it counts as gone.
            return
        writer.write(protocol.encode(verb, **fields))

    return send


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line from an unknown peer, or no bytes if it is too long or late."""
    with contextlib.suppress(ValueError):
        return await within(HELLO_SECONDS, reader.readline()) or b""
    return b""


async def _flush(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await within(1.0, writer.drain())
