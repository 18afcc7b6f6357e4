"""Decides who may use the dashboard, and which view of the jobs a request gets."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode, urlsplit

from aiohttp import web

from ddpjob.client.backends.backend import Backend
from ddpjob.dashboard.fleet import Fleet

_KEPT = 64
_T = TypeVar("_T")


class Shared:
    """Keeps the results of reads for a moment, so that all viewers of a view can share them.

    The amount of work therefore does not depend on the number of viewers.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def get(self, key: Hashable, seconds: float, make: Callable[[], Awaitable[_T]]) -> _T:
        """Return a recent result for `key`, or else the result of `make`.

        A result is recent if it was made within the last `seconds`. If another call is still making
        a result for `key`, wait for that result.
        """
        found = self._kept.get(key)
        if found is None or (found[1].done() and time.monotonic() - found[0] > seconds):
            self._kept.pop(key, None)
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            found = (time.monotonic(), asyncio.ensure_future(make()))
            self._kept[key] = found
        result: _T = await asyncio.shield(found[1])
        return result


class FleetView:
    """The jobs that a credential gives access to, and what the dashboard knows about them.

    No data is shared between two views. `scoped` returns the backend for one namespace. `commands`
    is true if viewers may request that commands run in pods. `past` is true if the view shows
    deleted jobs, of which only the records in their checkpoint folders remain.
    """

    def __init__(
        self, fleet: Fleet, scoped: Callable[[str], Backend], where: str, *, user: str = "", commands: bool = True,
        past: bool = False,
    ) -> None:  # fmt: skip
        self.fleet, self.scoped, self.where, self.user, self.commands = fleet, scoped, where, user, commands
        self.past = past
        self.shared = Shared()
        self.streams = self.log_streams = 0
        self.closed = asyncio.Event()
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="dashboard")

    async def run(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run a function in a thread of this view.

        Each view has its own threads, so that one viewer's slow requests do not delay another's.
        Raises AccessRefused if the view has been closed. This can happen during a request, because
        the viewer signs out in another window or gets different rights.
        """
        if self.closed.is_set():
            raise AccessRefused(401, "Open the page again", "This view was closed while its page was being rendered.")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def close(self) -> None:
        """Stop the view's streams and threads."""
        self.closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


class AccessRefused(Exception):
    """The request is not allowed. If `form` is true, the error page asks for a token."""

    def __init__(self, status: int, title: str, message: str, *, form: bool = False) -> None:
        super().__init__(message)
        self.status, self.title, self.message, self.form = status, title, message, form


class Gate(Protocol):
    """Decides which view serves a request."""

    names: set[str]
    """Host names of this server, in addition to IP addresses."""

    async def admit(self, request: web.Request) -> FleetView:
        """Return the view that serves a request.

        Raises AccessRefused if the request is not allowed, and HTTPSeeOther if it has to be
        redirected.
        """

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes of the gate's own pages, which are served without calling `admit`."""

    async def close(self) -> None:
        """Close all views."""


class OneSession:
    """The gate of `ddpjob dashboard`. Everyone who has the token gets the same view.

    The command prints an address that contains the token.
    """

    def __init__(self, view: FleetView, token: str, host: str = "localhost") -> None:
        self._view, self._token = view, token
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}
        threading.Thread(target=self._add_full_name, name="full name", daemon=True).start()

    def _add_full_name(self) -> None:
        """Add the machine's fully qualified name to `names`.

        This runs in a thread, because looking the name up in DNS may take seconds.
        """
        with contextlib.suppress(OSError, UnicodeError):
            self.names.add(socket.getfqdn().lower())

    def routes(self) -> Sequence[web.RouteDef]:
        return ()

    async def close(self) -> None:
        self._view.close()

    async def admit(self, request: web.Request) -> FleetView:
        cookie = f"ddpjob-dashboard-{own_port(request)}"
        given = request.query.get("token")
        if given is not None and self._is_token(given):
            rest = {name: value for name, value in request.query.items() if name != "token"}
            moved = web.HTTPSeeOther(request.path + (f"?{urlencode(rest)}" if rest else ""))
            moved.set_cookie(cookie, self._token, httponly=True, samesite="Lax", path="/")
            raise moved
        if given is None and self._is_token(request.cookies.get(cookie, "")):
            return self._view
        raise AccessRefused(
            401, "Open the address that `ddpjob dashboard` printed", "It contains a token for this session."
        )

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self._token.encode())


def own_host(header: str, names: Collection[str]) -> bool:
    """Whether a Host header contains an IP address or one of this server's `names`.

    Any other name may belong to an attacker whose DNS server resolves it to this server's address
    (DNS rebinding).
    """
    name = host_name(header)
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return bool(name) and name in names


def host_name(header: str) -> str:
    """Return the name or address in a Host header, in lower case.

    The result is empty if the header is missing or invalid.
    """
    try:
        return (urlsplit(f"//{header}").hostname or "") if re.fullmatch(r"[\w.:\[\]-]{1,260}", header) else ""
    except ValueError:
        return ""


def is_loopback(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


def own_port(request: web.Request) -> int:
    """Return the port on which this server received the request.

    The names of cookies contain this port, because all ports on a machine share cookies.
    """
    place = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return int(place[1]) if place else 0
