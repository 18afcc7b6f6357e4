"""An event loop whose clock jumps to the next timer when no socket has data.

Client and server run in the same loop and communicate over loopback, so a request takes no virtual
time unless a fault delays it. A timeout of 30 s, a Lease of 10 s or a watch of 5 minutes takes a
millisecond of real time. The loop counts the bytes that its sockets have sent but not yet received.
While any are in transit, however slowly a busy machine delivers them, the clock stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import io
import selectors
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Given = ParamSpec("Given")
LOST_SECONDS = 2.0
"""Real seconds after which unread bytes are forgotten, because their receiver has stopped
reading.
"""
END_SECONDS = 0.004
"""Real seconds after which the unread end of a connection is forgotten."""
STUCK_SECONDS = 20.0
LONGEST = 3600.0
"""Virtual seconds after which a test has failed. Timers alone could keep it running forever."""


class _Traffic:
    """Bytes in transit by (sender's address, receiver's address), and connections whose end is in
    transit.
    """

    def __init__(self) -> None:
        self.bytes: dict[tuple[Any, Any], int] = {}
        self.ends: set[tuple[Any, Any]] = set()
        self._unread: set[tuple[Any, Any]] = set()
        """Directions of connections whose unread bytes have been forgotten. Nothing is counted
        there until the receiver reads again.
        """

    def sent(self, way: tuple[Any, Any], count: int) -> None:
        if way not in self._unread:
            self.bytes[way] = self.bytes.get(way, 0) + count

    def forget(self) -> None:
        self._unread |= self.bytes.keys()
        self.bytes.clear()

    def read(self, way: tuple[Any, Any], count: int) -> None:
        self._unread.discard(way)
        if not count:
            self.ends.discard(way)
            return
        left = self.bytes.get(way, 0) - count
        if left > 0:
            self.bytes[way] = left
        else:
            self.bytes.pop(way, None)

    def closed(self, out: tuple[Any, Any], into: tuple[Any, Any]) -> None:
        self.bytes.pop(into, None)
        self.ends.discard(into)
        self.ends.add(out)


class _CountedSocket(socket.socket):
    traffic: _Traffic
    way: tuple[Any, Any] = (None, None)
    back: tuple[Any, Any] = (None, None)

    def begin(self, traffic: _Traffic) -> None:
        self.traffic = traffic
        self.way = self.getsockname(), self.getpeername()
        self.back = self.way[1], self.way[0]
        self.traffic.ends.discard(self.back)

    def send(self, *args: Any) -> int:
        count = super().send(*args)
        self.traffic.sent(self.way, count)
        return count

    def recv(self, *args: Any) -> bytes:
        try:
            data = super().recv(*args)
        except ConnectionError:
            self.traffic.read(self.back, 0)
            raise
        self.traffic.read(self.back, len(data))
        return data

    def recv_into(self, *args: Any) -> int:
        count = super().recv_into(*args)
        self.traffic.read(self.back, count)
        return count

    def close(self) -> None:
        if self.fileno() >= 0:
            self.traffic.closed(self.way, self.back)
        super().close()


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop

    def __init__(self) -> None:
        super().__init__()
        self._never: set[int] = set()
        """Descriptors that never became writable. They no longer stop the clock."""

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = super().unregister(fileobj)
        self._never.discard(key.fd)
        return key

    def _blocked(self) -> set[int]:
        """Return connections that are being established, and connections whose peer has not read
        all sent bytes.
        """
        return {key.fd for key in self.get_map().values() if key.events & selectors.EVENT_WRITE} - self._never

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if found or timeout == 0:
            return found
        traffic, began = self.loop.traffic, time.monotonic()
        while not found:
            waited = time.monotonic() - began
            blocked = self._blocked()
            if waited > LOST_SECONDS:
                traffic.forget()
            if waited > END_SECONDS:
                traffic.ends.clear()
            if waited > 2 * LOST_SECONDS:
                self._never |= blocked
                break
            if not (traffic.bytes or traffic.ends or blocked):
                break
            found = super().select(0.001)
        if found:
            return found
        if timeout is None:
            found = super().select(STUCK_SECONDS)
            if not found:
                raise RuntimeError("no timer is due and no data is in transit, so the test would wait forever")
            return found
        self.loop.advance(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop described in the module's docstring. `now` begins at 0."""

    def __init__(self) -> None:
        self.now, self.limit = 0.0, LONGEST
        self.traffic = _Traffic()
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance the clock. If the test takes too long, raises TimeoutError with the place where
        every task waits.
        """
        self.now += seconds
        if self.now > self.limit:
            self.limit += 600.0  # the tasks are cancelled in this loop
            stacks = io.StringIO()
            for task in asyncio.all_tasks(self):
                task.print_stack(file=stacks)
            raise TimeoutError(f"the test has not ended after {LONGEST:.0f} virtual seconds:\n{stacks.getvalue()}")

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> Any:
        """Call the function immediately, because the clock would not wait for a thread (aiohttp
        reads .netrc in one).
        """
        done = self.create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _make_socket_transport(self, sock: socket.socket, *args: Any, **kwargs: Any) -> Any:
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            family, kind, protocol = sock.family, sock.type, sock.proto
            counted = _CountedSocket(family, kind, protocol, fileno=sock.detach())
            counted.setblocking(False)
            with contextlib.suppress(OSError):  # the peer may have closed the connection already
                counted.begin(self.traffic)
            sock = counted
        return super()._make_socket_transport(sock, *args, **kwargs)  # type: ignore[misc]


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine like asyncio.run, but in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def virtual(test: Callable[Given, Coroutine[Any, Any, None]]) -> Callable[Given, None]:
    """Run an async test in virtual time."""

    @functools.wraps(test)
    def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> None:
        run(test(*args, **kwargs))

    return wrapped


Test = Callable[..., Any]


def virtual_in(world: Callable[[], AbstractAsyncContextManager[Any]]) -> Callable[[Test], Test]:
    """Return a decorator like `virtual`, for tests whose first parameter is the value of `world`.
    The other parameters are fixtures.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def wrapped(**fixtures: Any) -> None:
            async def main() -> None:
                async with world() as given:
                    await test(given, **fixtures)

            run(main())

        signature = inspect.signature(test)
        wrapped.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return wrapped

    return decorate
