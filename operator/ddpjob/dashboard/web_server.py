"""The HTTP server of the dashboard: who may ask, what each page shows, and streams of changes and logs."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import queue
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpjob.api.types import DDPJob, Json
from ddpjob.api.yamltext import write_document
from ddpjob.client.backend import Backend, Happened, LogOptions, Mistake, NoSuchJob, PodLine, Unreachable
from ddpjob.client.job_text import phase, restart_counts, took, why
from ddpjob.client.log_follower import Chosen, LogFollower, newest_pods, ranks_of_pods
from ddpjob.client.metric_series import read_metrics
from ddpjob.core.status.shown_progress import duration
from ddpjob.dashboard.fleet import ENDED, STATES, Fleet, Key, read_job
from ddpjob.dashboard.job_views import (
    Choice,
    listed,
    metrics_of,
    plain,
    reported_curves,
    slot_rows,
    timeline,
    trained_curves,
)
from ddpjob.engine.reconcile import utc_now

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
STREAMS = 64
"""Streams at the same time; each open page has one."""
LOG_STREAMS = 16
_LOG_PODS = 16
"""Pods up to which the log of a whole job is shown at once."""
_LOG_LINES = 500
"""Last lines of each pod with which a log begins."""
_LINE = 4000
"""Characters of a line of a log; the rest is cut off."""
_BATCH = 500
_FRESH_SECONDS = 1.0
"""For how long what was read of a job serves other viewers too."""
_CURVES_SECONDS = 5.0
_KEPT = 64
_LOOK_SECONDS = 1.0
_SILENCE_SECONDS = 15.0
"""After which a stream without news writes a comment, so that a viewer who is gone is noticed."""
_TYPES = {".js": "text/javascript", ".css": "text/css", ".txt": "text/plain", ".svg": "image/svg+xml"}
_NAME = r"{namespace:[a-z0-9][-a-z0-9.]{0,252}}/{name:[a-z0-9][-a-z0-9.]{0,252}}"
_MOST_EVENTS = 50
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Read:
    """A job as a page needs it, read at one moment. `faults`: what could not be read beside the job."""

    body: Json
    pods: list[PodLine]
    events: list[Happened]
    faults: list[str]


class Shared:
    """Results that several viewers share for a moment: the work does not grow with their number."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def get(self, key: Hashable, seconds: float, make: Callable[[], Awaitable[_T]]) -> _T:
        """The result of `make`, of this call or of one so many seconds ago."""
        found = self._kept.get(key)
        if found is None or (found[1].done() and time.monotonic() - found[0] > seconds):
            self._kept.pop(key, None)
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            found = (time.monotonic(), asyncio.ensure_future(make()))
            self._kept[key] = found
        result: _T = await asyncio.shield(found[1])
        return result


class Dashboard:
    """`scoped`: the jobs of one namespace of the place that the fleet follows."""

    def __init__(
        self, fleet: Fleet, scoped: Callable[[str], Backend], where: str, token: str, host: str = "localhost"
    ) -> None:
        self.fleet, self.scoped, self.where, self.token = fleet, scoped, where, token
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="dashboard")
        self._shared = Shared()
        self._streams = self._log_streams = 0
        self._closing = asyncio.Event()
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        threading.Thread(target=self._add_full_name, name="full name", daemon=True).start()
        names = (file for file in resources.files(__package__).joinpath("static").iterdir())
        self._files = {file.name: file.read_bytes() for file in names if file.name[0] != "."}
        self._cookie = "ddpjob-dashboard"
        self._pages = Environment(
            loader=PackageLoader("ddpjob.dashboard"), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._pages.filters |= {
            "duration": duration,
            "plain": plain,
            "number": lambda n: f"{n:,}".replace(",", "\u202f"),
        }
        self._pages.globals |= {
            "where": where,
            "STATES": STATES,
            "ENDED": ENDED,
            "ago": _ago,
            "local_time": _local_time,
        }

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=0)
        app.router.add_get("/", self.fleet_page)
        app.router.add_get("/healthz", _healthy)
        app.router.add_get("/live", self.live)
        app.router.add_get("/static/{file}", self.static)
        app.router.add_get(f"/jobs/{_NAME}", self.job_page)
        app.router.add_get(f"/jobs/{_NAME}/logs", self.logs_page)
        app.router.add_get(f"/jobs/{_NAME}/manifest", self.manifest_page)
        app.router.add_get(f"/jobs/{_NAME}/curves", self.curves)
        app.router.add_get(f"/jobs/{_NAME}/log", self.log)
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- who may ask

    def _add_full_name(self) -> None:
        """Adds the machine's name with its domain, for which a DNS server may be asked for seconds."""
        with contextlib.suppress(OSError, UnicodeError):
            self._names.add(socket.getfqdn().lower())

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = self._refusal(request) or await handler(request)
        except web.HTTPException as refused:
            if refused.status < 400:
                raise
            response = self._problem(refused.status, refused.reason, "")
        except NoSuchJob as missing:
            response = self._problem(404, "No such job", str(missing))
        except Mistake as mistake:
            status = 502 if isinstance(mistake, Unreachable) else getattr(mistake, "status", 502)
            response = self._problem(status if 400 <= status < 600 else 502, "This cannot be read", str(mistake))
        except Exception as fault:  # Of ours, or a record that nobody has thought of.
            _log.exception("%s cannot be shown", request.path)
            response = self._problem(500, "This cannot be shown", f"{type(fault).__name__}: {fault}")
        if not response.prepared:
            response.headers.update({"Cache-Control": "no-store", **HEADERS, **response.headers})
        return response

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        """The answer to a request that another site may have caused, or that lacks the token; None: it is allowed."""
        if not _own_host(request.headers.get("Host", ""), self._names):
            return self._problem(421, "Not this server", "The address must be an IP address or this machine's name.")
        if request.path == "/healthz" or request.path.startswith("/static/"):
            return None
        site = request.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin") and request.headers.get("Sec-Fetch-Mode") != "navigate":
            return self._problem(403, "Refused", "Another site has asked for this.")
        cookie = f"{self._cookie}-{_port(request)}"
        given = request.query.get("token")
        if given is not None:
            if not _same(given, self.token):
                return self._no_token()
            rest = {name: value for name, value in request.query.items() if name != "token"}
            moved = web.HTTPSeeOther(request.path + (f"?{urlencode(rest)}" if rest else ""))
            moved.set_cookie(cookie, self.token, httponly=True, samesite="Lax", path="/")
            moved.headers.update({"Cache-Control": "no-store", **HEADERS})
            raise moved
        if not _same(request.cookies.get(cookie, ""), self.token):
            return self._no_token()
        return None

    def _no_token(self) -> web.Response:
        return self._problem(
            401, "Open the address that `ddpjob dashboard` printed", "It holds a token of this session."
        )

    # --- pages

    def _page(self, template: str, status: int = 200, **values: Any) -> web.Response:
        common = {"now": utc_now(), "problem": self.fleet.problem}
        text = self._pages.get_template(template).render(common | values)
        return web.Response(text=text, content_type="text/html", status=status)

    def _problem(self, status: int, title: str, message: str) -> web.Response:
        allowed = status not in (401, 403, 421)
        where = self.where if allowed else ""
        return self._page(
            "problem.html", status, problem="", title=title, message=message, allowed=allowed, where=where
        )

    async def fleet_page(self, request: web.Request) -> web.Response:
        choice = Choice.read(request.query)
        found = listed(self.fleet.rows(), choice, utc_now())

        def link(**changed: str | int) -> str:
            query = choice.query(**changed)
            return "/" + (f"?{urlencode(query)}" if query else "")

        namespaces = len({row.namespace for row in found.rows}) > 1 or "all namespaces" in self.where
        return self._page("fleet.html", choice=choice, found=found, link=link, namespaces=namespaces)

    async def job_page(self, request: web.Request) -> web.Response:
        key = _key(request)
        read = await self._read(key)
        now = utc_now()
        job = _job(read.body)
        reasons = [plain(line) for line in why(read.body, read.pods, now)]
        rows, more = slot_rows(job, read.body, read.pods)
        restarts = job.status.restarts
        ranks = sum(map(len, ranks_of_pods(read.pods, read.body).values()))
        return self._page(
            "job.html", **self._head(key, read), tab="overview", why=reasons,
            timeline=timeline(job, phase(read.body), now), restarts=list(reversed(restarts.recent)),
            counts=restart_counts(job.status, job.spec.recovery.max_restarts), slots=rows, more_slots=more, ranks=ranks,
            events=list(reversed(read.events[-_MOST_EVENTS:])), more_events=max(0, len(read.events) - _MOST_EVENTS),
            metrics=metrics_of(job.status), faults=read.faults,
            runtime=took(read.body, now),
        )  # fmt: skip

    async def logs_page(self, request: web.Request) -> web.Response:
        key = _key(request)
        read = await self._read(key)
        pods = [pod.name for pod in read.pods]
        nodes = newest_pods(read.pods)
        chosen = request.query.get("pod", "")
        if chosen not in pods:
            chosen = "" if len(nodes) <= _LOG_PODS else next((pod for pod in nodes if not pod.ended), nodes[0]).name
        return self._page(
            "logs.html", **self._head(key, read), tab="logs", pods=pods[:2000], chosen=chosen,
            whole=len(nodes) <= _LOG_PODS, lines=_LOG_LINES,
        )  # fmt: skip

    async def manifest_page(self, request: web.Request) -> web.Response:
        key = _key(request)
        read = await self._read(key)
        meta = {name: value for name, value in read.body["metadata"].items() if name != "managedFields"}
        shown = {**read.body, "metadata": meta}
        status = shown.pop("status", {})
        return self._page(
            "manifest.html", **self._head(key, read), tab="manifest", manifest=write_document(shown),
            written=write_document({"status": status}),
        )  # fmt: skip

    def _head(self, key: Key, read: Read) -> Json:
        """What the pages of a job have in common."""
        return {"key": key, "path": f"/jobs/{key[0]}/{key[1]}", "job": _job(read.body), "state": phase(read.body)}

    async def _read(self, key: Key) -> Read:
        self._backend(key)  # What was read of a job that is gone serves nobody.
        read = ("job", key, self.fleet.job_version(key))  # An announced change is on the page that asks for it.
        return await self._shared.get(read, _FRESH_SECONDS, lambda: self._run(self._read_now, key))

    def _read_now(self, key: Key) -> Read:
        backend = self._backend(key)
        body = backend.job(key[1])
        pods, events, faults = list[PodLine](), list[Happened](), list[str]()
        try:
            pods = backend.pods(key[1])
        except Unreachable:
            raise
        except Mistake as mistake:  # A viewer may be allowed to read jobs, but not their pods.
            faults.append(f"pods: {mistake}")
        try:
            events = backend.events(key[1])
        except Unreachable:
            raise
        except Mistake as mistake:
            faults.append(f"events: {mistake}")
        return Read(body, pods, events, faults)

    def _backend(self, key: Key) -> Backend:
        """Raises NoSuchJob for a namespace that is not followed."""
        if self.fleet.row(key) is None:
            raise NoSuchJob(f"no job {key[1]} in namespace {key[0]} of {self.where}")
        return self.scoped(key[0])

    async def _run(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    # --- data

    async def static(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name not in self._files:
            raise web.HTTPNotFound()
        kind = _TYPES.get("." + name.rpartition(".")[2], "application/octet-stream")
        return web.Response(body=self._files[name], content_type=kind, headers={"Cache-Control": "no-cache"})

    async def curves(self, request: web.Request) -> web.Response:
        """JSON for the page's script. On a cluster the trainer's file is read only where `pods=1` asks: in a pod."""
        key = _key(request)
        in_pods = request.query.get("pods") == "1"
        found = await self._shared.get(
            ("curves", key, in_pods), _CURVES_SECONDS, lambda: self._run(self._curves_now, key, in_pods)
        )
        return web.json_response(found, dumps=lambda value: json.dumps(value, allow_nan=False))

    def _curves_now(self, key: Key, in_pods: bool) -> Json:
        backend, note = self._backend(key), ""
        if backend.local or in_pods:
            try:
                drawn = trained_curves(read_metrics(backend.metrics(key[1])))
                if drawn["curves"]:
                    return {**drawn, "source": "metrics.jsonl of the built-in trainer", "more": False, "note": ""}
            except Unreachable:
                raise
            except Mistake as mistake:
                note = str(mistake) if in_pods else ""
        row = self.fleet.row(key)
        unit = "steps/s" if row is not None and "steps" in row.speed else "samples/s"
        source = "what the job has reported since the dashboard was started"
        return {
            **reported_curves(self.fleet.samples(key), unit),
            "source": source,
            "more": not backend.local,
            "note": note,
        }

    # --- streams

    async def live(self, request: web.Request) -> web.StreamResponse:
        """An event for each change that the page shows: of all jobs, or of the job named by `job`."""
        namespace, _, name = request.query.get("job", "").partition("/")

        def version() -> int:
            return self.fleet.job_version((namespace, name)) if name else self.fleet.version

        async with self._stream(request) as stream:
            known = (-1, "")
            while not self._closing.is_set():
                now = (version(), self.fleet.problem)
                if now != known:
                    known = now
                    await stream.write("event: changed\ndata: {}\n\n")
                await stream.wait(_LOOK_SECONDS)
        return stream.response

    async def log(self, request: web.Request) -> web.StreamResponse:
        """Events of lines, as JSON, of one pod or of the whole job; `end` when there will be no more."""
        key, pod = _key(request), request.query.get("pod", "")
        if self._log_streams >= LOG_STREAMS:
            raise web.HTTPServiceUnavailable(reason=f"{LOG_STREAMS} logs are open already")
        backend = self._backend(key)
        read = await self._read(key)
        if not pod and len(newest_pods(read.pods)) > _LOG_PODS:
            raise web.HTTPBadRequest(reason=f"of more than {_LOG_PODS} pods only one is read at a time: choose a pod")
        self._log_streams += 1
        stop = threading.Event()
        lines: queue.Queue[str | None] = queue.Queue(_BATCH)
        try:
            async with self._stream(request) as stream:
                options = LogOptions(
                    follow=phase(read.body) not in ENDED, tail=_LOG_LINES, stop=stop, line_bytes=4 * _LINE
                )
                threading.Thread(
                    target=_copy_log, args=(backend, key[1], read.body, pod, options, lines), name="log", daemon=True
                ).start()
                await self._send_lines(stream, lines)
            return stream.response
        finally:
            stop.set()
            self._log_streams -= 1

    async def _send_lines(self, stream: _EventStream, lines: queue.Queue[str | None]) -> None:
        while not self._closing.is_set():
            batch: list[str] = []
            over = False
            while len(batch) < _BATCH and not over:
                try:
                    line = lines.get_nowait()
                except queue.Empty:
                    break
                over = line is None
                batch += [line] if line is not None else []
            if batch:
                await stream.write(f"data: {json.dumps(batch)}\n\n")
            if over:
                await stream.write("event: end\ndata: {}\n\n")
                return
            await stream.wait(0.2)

    @contextlib.asynccontextmanager
    async def _stream(self, request: web.Request) -> AsyncIterator[_EventStream]:
        if self._streams >= STREAMS:
            raise web.HTTPServiceUnavailable(reason=f"{STREAMS} pages are open already")
        self._streams += 1
        try:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            response = web.StreamResponse(headers={**HEADERS, **headers})
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):  # The viewer is gone.
                yield _EventStream(response)
        finally:
            self._streams -= 1


class _EventStream:
    """Server-sent events to one viewer."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response
        self._silent = 0.0

    async def write(self, text: str) -> None:
        self._silent = 0.0
        await self.response.write(text.encode())

    async def wait(self, seconds: float) -> None:
        """Before the next look for news. A silence that lasts is broken by a comment."""
        if self._silent >= _SILENCE_SECONDS:
            await self.write(": waiting\n\n")
        await asyncio.sleep(seconds)
        self._silent += seconds


def _copy_log(
    backend: Backend, name: str, body: Json, pod: str, options: LogOptions, lines: queue.Queue[str | None]
) -> None:
    """Puts the lines into the queue, then None; ends when `options.stop` is set."""

    def put(line: str | None) -> None:
        while not options.stopped:
            with contextlib.suppress(queue.Full):
                lines.put(line, timeout=1.0)
                return

    try:
        follower = LogFollower(backend, body, options, Chosen(pod))
        for line in follower.lines():
            mark = f" rank {line.rank}" if line.rank is not None else ""
            short = line.pod.name.removeprefix(f"{name}-")
            last = line.text.rstrip(b"\r").rpartition(b"\r")[2]  # What a terminal shows of a progress bar.
            text = plain(last[: 4 * _LINE].decode(errors="replace"))[:_LINE]
            put(text if pod else f"[{short}{mark}] {text}")
        for note in follower.notes:
            put(f"-- {plain(note)}")
    except Mistake as mistake:
        put(f"-- {plain(str(mistake))}")
    except Exception as fault:  # Of ours: whoever reads the log learns of it.
        _log.exception("the log of %s cannot be read", name)
        put(f"-- the log cannot be read: {type(fault).__name__}: {plain(str(fault))}")
    finally:
        put(None)


# --- small parts ------------------------------------------------------------------------------------------------


async def _healthy(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _key(request: web.Request) -> Key:
    return request.match_info["namespace"], request.match_info["name"]


def _job(body: Json) -> DDPJob:
    """Raises Mistake for an object that cannot be read."""
    try:
        return read_job(body)
    except Exception as error:
        raise Mistake(f"the job cannot be read: {error}") from error


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


def _own_host(header: str, names: Collection[str]) -> bool:
    """Whether the Host header can only be meant for this server, which has these names.

    A name that somebody else's DNS leads here (rebinding) is none of these.
    """
    try:
        name = (urlsplit(f"//{header}").hostname or "") if re.fullmatch(r"[\w.:\[\]-]{1,260}", header) else ""
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return bool(name) and name in names


def _port(request: web.Request) -> int:
    """The server's own port: cookies are those of all ports of a machine."""
    place = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return int(place[1]) if place else 0


def _ago(then: datetime | None, now: datetime) -> str:
    return duration((now - then).total_seconds()) if then is not None else ""


def _local_time(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment is not None else ""


# --- running ----------------------------------------------------------------------------------------------------


async def serve(
    fleet: Fleet, scoped: Callable[[str], Backend], where: str, *, host: str, port: int, token: str,
    started: Callable[[int], None],
) -> None:  # fmt: skip
    """Serves until it is cancelled. `started` gets the port. Raises OSError if it cannot listen."""
    dashboard = Dashboard(fleet, scoped, where, token, host)
    runner = web.AppRunner(
        dashboard.app(), access_log=None, keepalive_timeout=75, shutdown_timeout=2.0, handler_cancellation=True
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        started(int(runner.addresses[0][1]))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
