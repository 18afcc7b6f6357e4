"""Checks each viewer's token to decide who may use a dashboard that runs in a cluster.

The dashboard has no rights of its own, and reads everything with the tokens of its viewers. The API
server checks a token when a view is opened for it, and every few seconds after that. Data that was
read with a token is shown only to viewers who have the same token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from ddpjob.api.job import API_VERSION, PLURAL
from ddpjob.client.backends.api_server import ApiRefusal, BearerServer
from ddpjob.client.backends.backend import Mistake, NotKnown, Unreachable
from ddpjob.client.backends.cluster_backend import NO_CRD, ClusterBackend
from ddpjob.dashboard.fleet import Fleet
from ddpjob.dashboard.gate import AccessRefused, FleetView, host_name, is_loopback, own_port

TRUST_SECONDS = 15.0
"""Seconds between checks of a token and its rights."""
IDLE_SECONDS = 300.0
"""Seconds after which an unused view and its watches are closed."""
SESSION_SECONDS = 12 * 3600.0
MOST_VIEWS = 64
"""Maximum number of views. Each view keeps the rows of its jobs in memory, and holds a watch for
each of its namespaces."""
MOST_SESSIONS = 1000
MOST_OF_A_USER = 4
"""Maximum number of views, and of sessions, for one user. This limit prevents a user with many
tokens from displacing other users."""
MOST_OF_A_NAMESPACE = 16
"""Maximum number of views, and of sessions, that all service accounts in a namespace can have
together. This limit prevents a namespace's admins from displacing other users by creating many
accounts."""
MOST_NAMESPACES = 16
_MOST_WAITING = 64
"""Maximum number of requests whose tokens are checked at the same time."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{1,16384}=*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SERVICE_ACCOUNT = re.compile(r"system:serviceaccount:([^:]+):[^:]+")
_CHOICE = "ddpjob-namespaces"
_WHOSE = "This dashboard shows what your own token can read."
_T = TypeVar("_T")
_K = TypeVar("_K")
_log = logging.getLogger(__name__)


@dataclass
class _Session:
    token: str
    user: str
    began: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return time.monotonic() - self.began > SESSION_SECONDS


@dataclass
class _Opened:
    """An open view for a token.

    `scope` contains the namespaces that the view follows, and is empty if the view follows all
    namespaces. `judged` is the time when the token was last checked.
    """

    view: FleetView
    api: BearerServer
    fleet: Fleet
    scope: tuple[str, ...]
    judged: float
    used: float

    def close(self) -> None:
        self.view.close()
        self.fleet.__exit__()
        self.api.close()


class Viewers:
    """The gate of a dashboard in a cluster (`gate.Gate`).

    `url` is the address of the API server, and `ca` is a file with its certificate authorities.
    `names` are the host names of proxies that terminate TLS and forward requests to this server.
    `namespaces` are the default for viewers who have not chosen any namespaces and are not
    permitted to read all.
    """

    def __init__(self, url: str, ca: str, names: Sequence[str] = (), namespaces: Sequence[str] = ()) -> None:
        self._url, self._ca, self._behind, self._namespaces = url, ca, {*map(str.lower, names)}, tuple(namespaces)
        self.names = {"localhost", *self._behind}
        self._views: dict[tuple[bytes, tuple[str, ...]], _Opened] = {}
        self._locks: dict[tuple[bytes, tuple[str, ...]], asyncio.Lock] = {}
        self._sessions: dict[str, _Session] = {}
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="viewers")
        self._waiting = 0
        self._watch: asyncio.Task[None] | None = None

    def routes(self) -> Sequence[web.RouteDef]:
        return (
            web.get("/sign-in", self._ask), web.post("/sign-in", self._sign_in), web.post("/sign-out", self._sign_out)
        )  # fmt: skip

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for key in list(self._views):
            self._forget(key)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- requests

    async def admit(self, request: web.Request) -> FleetView:
        self._private(request)
        self._watch = self._watch or asyncio.create_task(self._look_after())
        token, session = self._token(request)
        if token is None:
            raise _ask_to_sign_in(_WHOSE)
        chosen = _namespaces(request.cookies.get(_CHOICE, "").replace(".", ","))
        try:
            return await self._view(token, chosen)
        except NotKnown as unknown:
            self._sessions.pop(session, None)
            raise _ask_to_sign_in(f"The token is invalid or has expired: {unknown}") from unknown

    def _private(self, request: web.Request) -> None:
        """Raise AccessRefused unless the request was sent over TLS or through a port-forward.

        Without encryption, others could read the request's token in transit. TLS may end at this
        server or at a proxy in front of it.
        """
        name = host_name(request.headers.get("Host", ""))
        proxied = name in self._behind and request.headers.get("X-Forwarded-Proto", "").lower() == "https"
        if not (request.secure or proxied or is_loopback(name)):
            raise AccessRefused(
                403,
                "The connection is not encrypted",
                "A token could be read in transit. Use https, or `kubectl port-forward`. A proxy that"
                " terminates TLS must send X-Forwarded-Proto: https, and its host name must be listed in the"
                " chart's dashboard.hosts.",
            )

    def _token(self, request: web.Request) -> tuple[str | None, str]:
        """Return a request's bearer token, or None, and the id of its session.

        A proxy may have added an Authorization header. The token in this header takes precedence
        over the token of the session. In that case, the id of the session is empty.
        """
        if header := request.headers.get("Authorization"):
            kind, _, token = header.partition(" ")
            if kind.lower() != "bearer" or not _TOKEN.fullmatch(token.strip()):
                raise _ask_to_sign_in("The header Authorization must contain a bearer token.")
            return token.strip(), ""
        session = request.cookies.get(_cookie(request), "")
        found = self._sessions.get(session)
        if found is not None and found.over:
            self._end(session)
            found = None
        return (found.token if found is not None else None), session

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        self._private(request)
        raise _ask_to_sign_in(_WHOSE, 200)

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        """Open a session for the token in the form, if the API server accepts this token.

        If the form contains no token, the viewer's session is kept, and only the chosen namespaces
        change.
        """
        self._private(request)
        _own_form(request)
        form = await request.post()
        token, chosen = str(form.get("token", "")).strip(), _namespaces(str(form.get("namespaces", "")))
        moved = web.HTTPSeeOther("/")
        if token:
            if not _TOKEN.fullmatch(token):
                raise _ask_to_sign_in(
                    "This is not a bearer token, because it contains characters that tokens cannot have.", 400
                )
            try:
                user = await self._in_turn(lambda: self._judge(token, _user))
            except NotKnown as unknown:
                raise _ask_to_sign_in(f"The API server does not recognize this token: {unknown}") from None
            for old in _beyond_limits({name: one.user for name, one in self._sessions.items()}, user):
                del self._sessions[old]
            while len(self._sessions) >= MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            session = secrets.token_urlsafe(32)
            self._sessions[session] = _Session(token, user)
            moved.set_cookie(_cookie(request), session, httponly=True, samesite="Lax", path="/",
                             secure=_cookie(request).startswith("__Host-"))  # fmt: skip
        elif self._token(request)[0] is None:
            raise _ask_to_sign_in("Paste a token.", 400)
        # Separate the names with periods, because a value with commas would be quoted in the
        # cookie.
        moved.set_cookie(_CHOICE, ".".join(chosen), httponly=True, samesite="Lax", path="/")
        raise moved

    async def _sign_out(self, request: web.Request) -> web.StreamResponse:
        self._private(request)
        _own_form(request)
        self._end(request.cookies.get(_cookie(request), ""))
        moved = web.HTTPSeeOther("/")
        for name in (_cookie(request), _CHOICE):
            moved.del_cookie(name, path="/", secure=name.startswith("__Host-"), httponly=True, samesite="Lax")
        raise moved

    def _end(self, session: str) -> None:
        """Forget a session, and close the views that were opened with its token.

        The views stay open if another session has the same token.
        """
        found = self._sessions.pop(session, None)
        if found is not None and all(other.token != found.token for other in self._sessions.values()):
            for key in [key for key in self._views if key[0] == _digest(found.token)]:
                self._forget(key)

    # --- views

    async def _view(self, token: str, chosen: tuple[str, ...]) -> FleetView:
        """Return the view for a token and a choice of namespaces.

        If the token was last checked more than TRUST_SECONDS ago, it is checked again first.

        Raises AccessRefused, NotKnown and other Mistakes.
        """
        key = (_digest(token), chosen)
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                found = self._views.get(key)
                if found is None or time.monotonic() - found.judged > TRUST_SECONDS:
                    found = await self._judged(key, token)
                found.used = time.monotonic()
                return found.view
        finally:
            if key not in self._views and not lock.locked():
                self._locks.pop(key, None)

    async def _judged(self, key: tuple[bytes, tuple[str, ...]], token: str) -> _Opened:
        """Check which namespaces the token is permitted to read now, and return a view of them.

        If these namespaces have changed since the last check, the old view and its cached data are
        discarded, and a new view is opened.
        """
        found = self._views.get(key)
        if found is not None:
            await self._in_turn(lambda: self._again(key, found))
            if key in self._views:
                return found
        opened = await self._in_turn(lambda: self._judge(token, lambda api: self._open(api, key[1])))
        self._forget(key)
        try:
            self._make_room(opened.view.user)
        except web.HTTPException:
            opened.close()
            raise
        self._views[key] = opened
        return opened

    async def _again(self, key: tuple[bytes, tuple[str, ...]], opened: _Opened) -> None:
        """Recheck the token of an open view.

        If the permitted namespaces have changed, or if the API server refuses the token, the view
        is closed and its cached data is discarded. Raises AccessRefused and Mistakes.
        """
        try:
            scope = await self._run(lambda: self._scope(opened.api, opened.view.user, key[1]))
        except (Mistake, AccessRefused) as refused:
            if not getattr(refused, "passing", False):
                self._forget(key)
            raise
        opened.judged = time.monotonic()
        if scope != opened.scope:
            self._forget(key)

    async def _judge(self, token: str, what: Callable[[BearerServer], _T]) -> _T:
        """Run `what` in a thread, with an API server connection that uses the token."""
        return await self._run(lambda: what(BearerServer(self._url, self._ca, token)))

    async def _run(self, what: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, what)

    async def _in_turn(self, make: Callable[[], Awaitable[_T]]) -> _T:
        """Run a token check, unless too many token checks are already running.

        To protect the API server, a request beyond the limit is refused with
        HTTPServiceUnavailable.
        """
        if self._waiting >= _MOST_WAITING:
            raise web.HTTPServiceUnavailable(reason="too many viewers are signing in; try again")
        self._waiting += 1
        try:
            return await make()
        finally:
            self._waiting -= 1

    def _open(self, api: BearerServer, chosen: tuple[str, ...]) -> _Opened:
        user = _user(api)
        scope = self._scope(api, user, chosen)
        backends = [ClusterBackend(api, name) for name in scope] or [ClusterBackend(api, everywhere=True)]
        fleet = Fleet(*backends)
        fleet.__enter__()
        where = f"namespace{'s' * (len(scope) > 1)} {', '.join(scope)}" if scope else "all namespaces"
        view = FleetView(fleet, lambda namespace: ClusterBackend(api, namespace), where, user=user, commands=False)
        now = time.monotonic()
        return _Opened(view, api, fleet, scope, now, now)

    def _scope(self, api: BearerServer, user: str, chosen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the namespaces that a view has to follow. An empty result means all namespaces.

        Raises AccessRefused if the token is not permitted to read any candidate namespace, and
        Mistake if this cannot be checked.
        """
        if not chosen and _may_list(api, ""):
            return ()
        own = _SERVICE_ACCOUNT.fullmatch(user)
        candidates = chosen or tuple(dict.fromkeys((*self._namespaces, *(own.groups() if own else ()))))
        allowed = tuple(name for name in candidates[:MOST_NAMESPACES] if _may_list(api, name))
        if allowed:
            return allowed
        tried = f"{'in' if chosen else ', nor in'} {', '.join(candidates[:MOST_NAMESPACES])}" if candidates else ""
        raise AccessRefused(
            403, "No jobs that you can read",
            f"{user or 'The token'} is not permitted to list DDPJobs {'' if chosen else 'in all namespaces'}{tried}. "
            "Enter the namespaces that you work in; the roles view, edit and admin of a namespace include its jobs.",
            form=True,
        )  # fmt: skip

    def _forget(self, key: tuple[bytes, tuple[str, ...]]) -> None:
        found = self._views.pop(key, None)
        if found is not None:
            found.close()
        if key in self._locks and not self._locks[key].locked():
            # If the lock is held, its holder removes it.
            del self._locks[key]

    def _make_room(self, user: str) -> None:
        """Close views, if necessary, so that `user` can get one more within the limits.

        There are limits for each user, for all service accounts in a namespace together, and for
        the total number of views. The least recently used views are closed first. At the total
        limit, a view of the user with the most views is closed, if `user` will still have fewer
        views than that user had. Otherwise, a view without an open stream is closed. Raises
        HTTPServiceUnavailable if no view can be closed.
        """
        by_use = sorted(self._views.items(), key=lambda item: item[1].used)
        for key in _beyond_limits({key: opened.view.user for key, opened in by_use}, user):
            self._forget(key)
        if len(self._views) < MOST_VIEWS:
            return
        left = [(key, opened.view) for key, opened in by_use if key in self._views]
        owned = Counter(_owner(view.user) for _, view in left)
        [(greediest, most)] = owned.most_common(1)
        greedy = most > owned[_owner(user)] + 1
        closable = [key for key, view in left if (_owner(view.user) == greediest if greedy else not view.streams)]
        if not closable:
            raise web.HTTPServiceUnavailable(reason=f"{MOST_VIEWS} viewers are already connected")
        self._forget(closable[0])

    async def _look_after(self) -> None:
        """End expired sessions, close unused views and check tokens, every TRUST_SECONDS.

        Each request also checks its own token and session, but a viewer who only keeps a stream
        open does not send any requests.
        """
        while True:
            await asyncio.sleep(TRUST_SECONDS)
            for name in [name for name, session in self._sessions.items() if session.over]:
                self._end(name)
            for key, opened in list(self._views.items()):
                if opened.view.streams == 0 and time.monotonic() - opened.used > IDLE_SECONDS:
                    self._forget(key)
                elif opened.view.streams and time.monotonic() - opened.judged > TRUST_SECONDS:
                    try:
                        with contextlib.suppress(Mistake, AccessRefused, web.HTTPException):
                            await self._again(key, opened)
                    except Exception:
                        # This is a bug in this program. A token that cannot be checked must not
                        # stay in use.
                        _log.exception("the token of %s cannot be checked", opened.view.user)
                        self._forget(key)


def _ask_to_sign_in(message: str, status: int = 401) -> AccessRefused:
    return AccessRefused(status, "Sign in", message, form=True)


def _user(api: BearerServer) -> str:
    """Return the name of the user to whom the token belongs.

    The name is empty if the user is not permitted to query their own name. Raises NotKnown if the
    API server does not accept the token.
    """
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    try:
        answer = api.request("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body=review)
    except ApiRefusal as refusal:
        if not refusal.denied:
            raise
        return ""  # The token is valid, but its user is not permitted to make this request.
    return str(((answer.get("status") or {}).get("userInfo") or {}).get("username") or "")


def _may_list(api: BearerServer, namespace: str) -> bool:
    """Whether the token is permitted to list the DDPJobs in a namespace.

    An empty `namespace` stands for all namespaces.

    Raises Mistake if the API server does not give a clear response.
    """
    scope = f"/namespaces/{namespace}" if namespace else ""
    try:
        api.request("GET", f"/apis/{API_VERSION}{scope}/{PLURAL}", query={"limit": "1"})
    except ApiRefusal as refusal:
        if refusal.status == 404:
            raise Mistake(NO_CRD) from refusal
        if refusal.denied:
            return False
        raise Unreachable(str(refusal)) from refusal
    return True


def _owner(user: str) -> str:
    """Return the account that a user's views and sessions count toward.

    All service accounts in a namespace count as one account. Any other user is a separate account.
    """
    account = _SERVICE_ACCOUNT.fullmatch(user)
    return f"system:serviceaccounts:{account[1]}" if account else user


def _beyond_limits(users: Mapping[_K, str], user: str) -> list[_K]:
    """Return the keys of the views or sessions that have to be closed before `user` gets one more.

    `users` maps the key of each view or session to its user, in the order in which they have to be
    closed. The limits for a user and for the service accounts in a namespace are applied.
    """
    own = [key for key, other in users.items() if other == user]
    over = own[: max(0, len(own) - MOST_OF_A_USER + 1)]
    owner = _owner(user)
    if owner != user:
        theirs = [key for key, other in users.items() if _owner(other) == owner and key not in over]
        over += theirs[: max(0, len(theirs) - MOST_OF_A_NAMESPACE + 1)]
    return over


def _namespaces(text: str) -> tuple[str, ...]:
    """Return the namespaces named in a form field or a cookie.

    Raises AccessRefused if a name is invalid, or if there are too many names.
    """
    names = tuple(dict.fromkeys(name for name in re.split(r"[,\s]+", text[:2000]) if name))
    wrong = [name for name in names if not _LABEL.fullmatch(name)]
    if wrong or len(names) > MOST_NAMESPACES:
        what = (
            f"{wrong[0][:63]!r} is not a valid namespace name" if wrong else f"more than {MOST_NAMESPACES} namespaces"
        )
        raise _ask_to_sign_in(f"Namespaces: {what}.", 400)
    return names


def _own_form(request: web.Request) -> None:
    """Raise AccessRefused unless the browser's headers show that a form comes from this server."""
    origin = request.headers.get("Origin", "")
    site = request.headers.get("Sec-Fetch-Site")
    if urlsplit(origin).netloc.lower() != request.headers.get("Host", "").lower() or site not in (None, "same-origin"):
        raise AccessRefused(403, "Refused", "This form was sent from another site.")


def _cookie(request: web.Request) -> str:
    """Return the name of the session cookie.

    With TLS, the name begins with `__Host-`, so browsers let only this host set the cookie. On
    loopback, the name contains the port, because all ports on a machine share cookies.
    """
    own = own_port(request)
    return f"ddpjob-{own}" if is_loopback(host_name(request.headers.get("Host", ""))) else "__Host-ddpjob"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
