"""The dashboard's HTTP server: access checks, pages, and streams of changes and logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import re
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import utc_now
from ddpjob.api.yamltext import write_document
from ddpjob.client.backends.backend import (
    ENDED,
    METRICS,
    Backend,
    Happened,
    LogOptions,
    Mistake,
    NoSuchJob,
    PodLine,
    Unreachable,
)
from ddpjob.client.logs.log_follower import Chosen, LogFollower, newest_pods, ranks_of_pods
from ddpjob.client.texts.compare_runs import MOST_RUNS, compare
from ddpjob.client.texts.job_text import gpu_hours, phase, restart_counts, took, why
from ddpjob.client.texts.metric_series import AXES, read_metrics
from ddpjob.client.texts.run_record import record_of
from ddpjob.core.status.messages import count, put_cause_first
from ddpjob.core.status.repeated import UNKNOWN, repeats
from ddpjob.core.status.shown_progress import duration
from ddpjob.dashboard.fleet import STATES, WITHOUT_ETA, Key, read_job
from ddpjob.dashboard.gate import AccessRefused, FleetView, Gate, own_host
from ddpjob.dashboard.job_views import (
    Choice,
    listed,
    metrics_of,
    plain,
    reported_curves,
    slot_rows,
    timeline,
    trained_curves,
    with_code,
)

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
"""Maximum number of simultaneous streams in a view. Each open page has at least one."""
LOG_STREAMS = 16
_LOG_PODS = 16
"""Maximum number of pods whose logs can be shown together, as the log of the whole job."""
_LOG_LINES = 500
"""When a log is opened, this many lines from the end of each pod's log are shown."""
_LINE = 4000
"""Maximum number of characters in a log line; the rest is cut off."""
_BATCH = 500
_FRESH_SECONDS = 1.0
"""Number of seconds for which other requests reuse data that was read about a job."""
_CURVES_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_BODY = 32 << 10
"""Maximum size of a form in bytes."""
_SILENCE_SECONDS = 15.0
"""A stream that has had nothing to send for this many seconds sends a comment. Sending shows
whether the viewer is still connected."""
_TYPES = {".js": "text/javascript", ".css": "text/css", ".txt": "text/plain", ".svg": "image/svg+xml"}
_NAME = r"{namespace:[a-z0-9][-a-z0-9.]{0,252}}/{name:[a-z0-9][-a-z0-9.]{0,252}}"
_WORD = re.compile(r"[a-z0-9][-a-z0-9.]{0,252}")
_MOST_EVENTS = 50
_MOST_OFFERED = 500
"""Maximum number of other jobs that the comparison page offers to add."""
_VIEW = web.RequestKey("view", FleetView)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Read:
    """A job's data, read for one page.

    `faults` maps the name of each part that could not be read, such as `pods`, to the reason.
    """

    body: Json
    pods: list[PodLine]
    events: list[Happened]
    faults: dict[str, str]


class Dashboard:
    """The dashboard's pages.

    Each request gets a view from the gate. The view determines which jobs are visible.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._closing = asyncio.Event()
        self._gates_own = {route.path for route in gate.routes()}
        names = (file for file in resources.files(__package__).joinpath("static").iterdir())
        self._files = {file.name: file.read_bytes() for file in names if file.name[0] != "."}
        self._pages = Environment(
            loader=PackageLoader("ddpjob.dashboard"), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._pages.filters |= {
            "duration": duration,
            "plain": plain,
            "with_code": with_code,
            "cause_first": put_cause_first,
            "repeats": lambda restart: repeats(restart) or (UNKNOWN if restart.continued_from == UNKNOWN else ""),
            "counted": count,
            "gpu_hours": gpu_hours,
            "number": lambda n: f"{n:,}".replace(",", "\u202f"),
        }
        self._pages.globals |= {
            "STATES": STATES,
            "ENDED": ENDED,
            "WITHOUT_ETA": WITHOUT_ETA,
            "ago": _ago,
            "local_time": _local_time,
        }

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=_BODY)
        app.router.add_get("/", self.fleet_page)
        app.router.add_get("/healthz", _healthy)
        # HEAD is refused, because it would start a stream that never ends.
        app.router.add_get("/live", self.live, allow_head=False)
        app.router.add_get("/static/{file}", self.static)
        app.router.add_get("/compare", self.compare_page)
        app.router.add_get(f"/jobs/{_NAME}", self.job_page)
        app.router.add_get(f"/jobs/{_NAME}/logs", self.logs_page)
        app.router.add_get(f"/jobs/{_NAME}/manifest", self.manifest_page)
        app.router.add_get(f"/jobs/{_NAME}/curves", self.curves)
        app.router.add_get(f"/jobs/{_NAME}/log", self.log, allow_head=False)
        app.router.add_routes(self.gate.routes())
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        self._closing.set()
        await self.gate.close()

    # --- access

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            await self._admit(request)
            response = await handler(request)
        except web.HTTPRedirection as moved:
            moved.headers.update({"Cache-Control": "no-store", **HEADERS})
            raise
        except web.HTTPException as refused:
            response = self._problem(request, refused.status, refused.reason, "")
        except AccessRefused as refused:
            response = self._problem(request, refused.status, refused.title, refused.message, form=refused.form)
        except NoSuchJob as missing:
            response = self._problem(request, 404, "No such job", str(missing))
        except Mistake as mistake:
            status = 502 if isinstance(mistake, Unreachable) else getattr(mistake, "status", 502)
            status = status if 400 <= status < 600 else 502
            response = self._problem(request, status, "This cannot be read", str(mistake))
        except Exception as fault:
            # The cause is a bug in this program, or a record with unexpected values.
            _log.exception("%s cannot be shown", request.path)
            response = self._problem(request, 500, "This cannot be shown", f"{type(fault).__name__}: {fault}")
        if not response.prepared:
            response.headers.update({"Cache-Control": "no-store", **HEADERS, **response.headers})
        return response

    async def _admit(self, request: web.Request) -> None:
        """Get a view for the request from the gate, and store the view in the request.

        Raises AccessRefused if the request was sent to a different host name, if another site may
        have caused the request, or if the request has no valid token.
        """
        if not own_host(request.headers.get("Host", ""), self.gate.names):
            raise AccessRefused(421, "Not this server", "The address must be an IP address or this machine's name.")
        if request.path == "/healthz" or request.path.startswith("/static/"):
            return
        site = request.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin") and request.headers.get("Sec-Fetch-Mode") != "navigate":
            raise AccessRefused(403, "Refused", "This request came from another site.")
        if request.path not in self._gates_own:
            request[_VIEW] = await self.gate.admit(request)

    # --- pages

    def _page(self, request: web.Request, template: str, status: int = 200, **values: Any) -> web.Response:
        view = request.get(_VIEW)
        common = {
            "now": utc_now(),
            "problem": view.fleet.problem if view is not None else "",
            "where": view.where if view is not None else "",
            "user": view.user if view is not None else "",
            "past": view is not None and view.past,
            "signed_in": view is not None and bool(view.user) and "Authorization" not in request.headers,
        }
        text = self._pages.get_template(template).render(common | values)
        return web.Response(text=text, content_type="text/html", status=status)

    def _problem(
        self, request: web.Request, status: int, title: str, message: str, *, form: bool = False
    ) -> web.Response:
        return self._page(
            request, "problem.html", status, problem="", title=title, message=message, form=form,
            allowed=request.get(_VIEW) is not None,
        )  # fmt: skip

    async def fleet_page(self, request: web.Request) -> web.Response:
        choice, view = Choice.read(request.query), _view(request)
        rows = view.fleet.rows()
        found = listed(rows, choice, utc_now())

        def link(**changed: str | int) -> str:
            query = choice.query(**changed)
            return "/" + (f"?{urlencode(query)}" if query else "")

        namespaces = len({row.namespace for row in rows}) > 1 or "all namespaces" in view.where
        return self._page(
            request, "fleet.html", goodput=view.fleet.goodput(), choice=choice, found=found, link=link,
            namespaces=namespaces, most=MOST_RUNS,
        )  # fmt: skip

    async def job_page(self, request: web.Request) -> web.Response:
        key = _key(request)
        read = await self._read(_view(request), key)
        now = utc_now()
        job = _job(read.body)
        reasons = [plain(line) for line in why(read.body, read.pods, now)]
        rows, more = slot_rows(job, read.body, read.pods)
        restarts = job.status.restarts
        ranks = sum(map(len, ranks_of_pods(read.pods, read.body).values()))
        return self._page(
            request, "job.html", **self._head(key, read), tab="overview", why=reasons,
            timeline=timeline(job, phase(read.body), now), restarts=list(reversed(restarts.recent)),
            counts=restart_counts(job.status, job.spec.recovery.max_restarts), slots=rows, more_slots=more, ranks=ranks,
            events=list(reversed(read.events[-_MOST_EVENTS:])), more_events=max(0, len(read.events) - _MOST_EVENTS),
            metrics=metrics_of(job.status), faults=read.faults, nodes=_nodes(read.body, job),
            runtime=took(read.body, now), record=list(record_of(read.body)),
        )  # fmt: skip

    async def logs_page(self, request: web.Request) -> web.Response:
        key = _key(request)
        view = _view(request)
        read = await self._read(view, key)
        pods = [pod.name for pod in read.pods]
        looked = _reads_gone(request, view)
        gone, fault = await self._gone(view, key, pods) if looked else ([], "")
        nodes = newest_pods(read.pods)
        chosen = request.query.get("pod", "")
        if chosen not in (*pods, *gone):
            first = next((pod.name for pod in nodes if not pod.ended), nodes[0].name if nodes else "")
            chosen = (gone[-1] if gone and not pods else "") if len(nodes) <= _LOG_PODS else first
        return self._page(
            request, "logs.html", **self._head(key, read), tab="logs", pods=pods[:2000], chosen=chosen,
            whole=len(nodes) <= _LOG_PODS and not view.past, lines=_LOG_LINES, gone=gone[-2000:], fault=fault,
            offer=view.commands and not looked and not _backend(view, key).local,
        )  # fmt: skip

    async def _gone(self, view: FleetView, key: Key, known: list[str]) -> tuple[list[str], str]:
        """Return the names of deleted pods whose logs are kept, and a note if there are none.

        `known` are the pods that still exist. The note says that no logs are kept, or why they
        cannot be read.
        """
        backend = _backend(view, key)
        try:
            kept = await view.shared.get(("kept", key), _CURVES_SECONDS, lambda: view.run(backend.kept_logs, key[1]))
        except Unreachable:
            raise
        except Mistake as mistake:
            return [], plain(str(mistake))
        gone = [pod.name for pod in kept.pods(known)]
        return gone, "" if gone else "No logs of deleted pods are kept."

    async def manifest_page(self, request: web.Request) -> web.Response:
        key = _key(request)
        read = await self._read(_view(request), key)
        meta = {name: value for name, value in read.body["metadata"].items() if name != "managedFields"}
        shown = {**read.body, "metadata": meta}
        status = shown.pop("status", {})
        return self._page(
            request, "manifest.html", **self._head(key, read), tab="manifest", manifest=write_document(shown),
            written=write_document({"status": status}),
        )  # fmt: skip

    async def compare_page(self, request: web.Request) -> web.Response:
        """Show several jobs side by side: their curves, and a table of their differences."""
        view, keys = _view(request), _chosen(request)
        bodies = [await self._body(view, key) for key in keys]
        for body in bodies:
            _job(body)
        rows = compare(bodies, utc_now())
        others = [row.key for row in view.fleet.rows() if row.key not in keys][:_MOST_OFFERED]

        def link(keys: list[Key]) -> str:
            return "/compare?" + urlencode([("job", "/".join(key)) for key in keys])

        return self._page(
            request, "compare.html", keys=keys, link=link, others=others, axes=AXES, most=MOST_RUNS,
            differing=[row for row in rows if row.differs], same=[row for row in rows if not row.differs],
        )  # fmt: skip

    async def _body(self, view: FleetView, key: Key) -> Json:
        backend = _backend(view, key)
        read = ("body", key, view.fleet.job_version(key))
        return await view.shared.get(read, _FRESH_SECONDS, lambda: view.run(backend.job, key[1]))

    def _head(self, key: Key, read: Read) -> Json:
        """Return the template values that all pages of a job need."""
        return {"key": key, "path": f"/jobs/{key[0]}/{key[1]}", "job": _job(read.body), "state": phase(read.body)}

    async def _read(self, view: FleetView, key: Key) -> Read:
        _backend(view, key)  # Raises NoSuchJob if the job was deleted in the meantime.
        # A page that is requested after a change has been announced must show this change. The key
        # therefore contains the job's version.
        read = ("job", key, view.fleet.job_version(key))
        return await view.shared.get(read, _FRESH_SECONDS, lambda: view.run(_read_now, view, key))

    # --- data

    async def static(self, request: web.Request) -> web.Response:
        name = request.match_info["file"]
        if name not in self._files:
            raise web.HTTPNotFound()
        kind = _TYPES.get("." + name.rpartition(".")[2], "application/octet-stream")
        return web.Response(body=self._files[name], content_type=kind, headers={"Cache-Control": "no-cache"})

    async def curves(self, request: web.Request) -> web.Response:
        """Return a job's curves as JSON for the page's script.

        On a cluster, the file with the trainer's measurements is in a pod, and is read only if the
        query contains `pods=1`. Otherwise, the curves show what the job has reported to its status
        since the dashboard was started.
        """
        key, view = _key(request), _view(request)
        in_pods = request.query.get("pods") == "1" and view.commands
        by = request.query.get("by", "step")
        if by not in AXES:
            raise web.HTTPBadRequest(reason=f"by must be one of {', '.join(AXES)}")
        found = await view.shared.get(
            ("curves", key, in_pods, by), _CURVES_SECONDS, lambda: view.run(_curves_now, view, key, in_pods, by)
        )
        return web.json_response(found, dumps=lambda value: json.dumps(value, allow_nan=False))

    # --- streams

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Send an event after each change to the job that the query names.

        If the query names no job, send an event after each change to any job.
        """
        namespace, _, name = request.query.get("job", "").partition("/")
        view = _view(request)

        def version() -> int:
            return view.fleet.job_version((namespace, name)) if name else view.fleet.version

        async with _stream(request, view) as stream:
            known = (-1, "")
            while not (self._closing.is_set() or view.closed.is_set()):
                now = (version(), view.fleet.problem)
                if now != known:
                    known = now
                    await stream.write("event: changed\ndata: {}\n\n")
                await stream.wait(_LOOK_SECONDS)
        return stream.response

    async def log(self, request: web.Request) -> web.StreamResponse:
        """Send a log's lines as JSON events, followed by an `end` event.

        If the query names a pod, the lines are from this pod's log. Otherwise, they are from the
        logs of all of the job's training pods.
        """
        key, view, pod = _key(request), _view(request), request.query.get("pod", "")
        if view.log_streams >= LOG_STREAMS:
            raise web.HTTPServiceUnavailable(reason=f"{LOG_STREAMS} logs are already open")
        backend, gone = _backend(view, key), False
        read = await self._read(view, key)
        if pod and _reads_gone(request, view) and all(each.name != pod for each in read.pods):
            gone = True
        if not pod and len(newest_pods(read.pods)) > _LOG_PODS:
            raise web.HTTPBadRequest(reason=f"this job has more than {_LOG_PODS} pods; choose one to read its log")
        view.log_streams += 1
        stop = threading.Event()
        lines: queue.Queue[str | None] = queue.Queue(_BATCH)
        try:
            async with _stream(request, view) as stream:
                options = LogOptions(
                    follow=phase(read.body) not in ENDED, tail=_LOG_LINES, stop=stop, line_bytes=4 * _LINE
                )
                threading.Thread(
                    target=_copy_log,
                    args=(backend, read.body, pod, gone, options, lines),
                    name="log",
                    daemon=True,
                ).start()
                await self._send_lines(stream, view, lines)
            return stream.response
        finally:
            stop.set()
            view.log_streams -= 1

    async def _send_lines(self, stream: _EventStream, view: FleetView, lines: queue.Queue[str | None]) -> None:
        while not (self._closing.is_set() or view.closed.is_set()):
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
async def _stream(request: web.Request, view: FleetView) -> AsyncIterator[_EventStream]:
    if view.streams >= STREAMS:
        raise web.HTTPServiceUnavailable(reason=f"{STREAMS} pages are already open")
    view.streams += 1
    try:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers={**HEADERS, **headers})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # The viewer has disconnected.
            yield _EventStream(response)
    finally:
        view.streams -= 1


def _backend(view: FleetView, key: Key) -> Backend:
    """Return the backend that reads a job.

    Raises NoSuchJob if the dashboard does not follow the job.
    """
    if view.fleet.row(key) is None:
        raise NoSuchJob(f"no job {key[1]} in namespace {key[0]}; this dashboard shows {view.where}")
    return view.scoped(key[0])


def _read_now(view: FleetView, key: Key) -> Read:
    backend = _backend(view, key)
    body = backend.job(key[1])
    found, faults = dict[str, Any](), dict[str, str]()
    for part, read in (("pods", backend.pods), ("events", backend.events)):
        try:
            found[part] = read(key[1])
        except Unreachable:
            raise
        except Mistake as mistake:  # A viewer may be allowed to read jobs but not their pods.
            faults[part] = str(mistake)
    return Read(body, found.get("pods", []), found.get("events", []), faults)


def _curves_now(view: FleetView, key: Key, in_pods: bool, by: str = "step") -> Json:
    backend, note = _backend(view, key), ""
    if backend.local or in_pods:
        try:
            series = read_metrics(backend.metrics(key[1]))
            drawn = trained_curves(series, by)
            if drawn["curves"]:
                notes = filter(None, (series.after_last_loss(), series.missing_beginning()))
                return {**drawn, "source": METRICS, "more": False, "note": "; ".join(notes)}
            note = f"{METRICS} has no {by}" if series.made else ""
        except Unreachable:
            raise
        except Mistake as mistake:
            note = str(mistake) if in_pods else ""
    row = view.fleet.row(key)
    unit = "steps/s" if row is not None and "steps" in row.speed else "samples/s"
    source = "values reported by the job since the dashboard started"
    more = view.commands and not backend.local
    return {**reported_curves(view.fleet.samples(key), unit, by), "source": source, "more": more, "note": note}


class _EventStream:
    """A stream of server-sent events to one viewer."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response
        self._silent = 0.0

    async def write(self, text: str) -> None:
        self._silent = 0.0
        await self.response.write(text.encode())

    async def wait(self, seconds: float) -> None:
        """Wait between two checks for changes.

        If nothing has been sent for _SILENCE_SECONDS, send a comment.
        """
        if self._silent >= _SILENCE_SECONDS:
            await self.write(": waiting\n\n")
        await asyncio.sleep(seconds)
        self._silent += seconds


def _reads_gone(request: web.Request, view: FleetView) -> bool:
    """Whether to read the kept logs of deleted pods.

    On a cluster, reading them runs a command in a pod, so the viewer has to request it.
    """
    return view.past or (view.commands and request.query.get("gone") == "1")


def _copy_log(
    backend: Backend, body: Json, pod: str, gone: bool, options: LogOptions, lines: queue.Queue[str | None]
) -> None:
    """Read a log and put its lines into the queue, followed by None.

    This function runs in a thread of its own until the log ends or `options.stop` is set. If `gone`
    is true, the pod was deleted, and the pod's kept log is read.
    """

    def put(line: str | None) -> None:
        while not options.stopped:
            with contextlib.suppress(queue.Full):
                lines.put(line, timeout=1.0)
                return

    name = body["metadata"]["name"]
    try:
        kept = backend.kept_logs(name) if gone else None
        follower = LogFollower(backend, body, options, Chosen(pod, kept=kept))
        for line in follower.lines():
            mark = f" rank {line.rank}" if line.rank is not None else ""
            short = line.pod.name.removeprefix(f"{name}-")
            # Keep only the last state of a progress bar, as a terminal does.
            last = line.text.rstrip(b"\r").rpartition(b"\r")[2]
            text = plain(last[: 4 * _LINE].decode(errors="replace"))[:_LINE]
            put(text if pod else f"[{short}{mark}] {text}")
        for note in follower.notes:
            put(f"-- {plain(note)}")
    except Mistake as mistake:
        put(f"-- {plain(str(mistake))}")
    except Exception as fault:
        # This is a bug in this program. Show it to the viewer, who would otherwise see an empty
        # log.
        _log.exception("the log of %s cannot be read", name)
        put(f"-- the log cannot be read: {type(fault).__name__}: {plain(str(fault))}")
    finally:
        put(None)


# --- helpers ------------------------------------------------------------------------------------------------------


async def _healthy(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _key(request: web.Request) -> Key:
    return request.match_info["namespace"], request.match_info["name"]


def _chosen(request: web.Request) -> list[Key]:
    """Return the keys of the jobs that the query names.

    Raises HTTPBadRequest if a name is invalid, or if the query names too many jobs.
    """
    keys = list[Key]()
    for text in dict.fromkeys(request.query.getall("job", [])):
        namespace, _, name = text.strip().partition("/")
        if not (_WORD.fullmatch(namespace) and _WORD.fullmatch(name)):
            raise web.HTTPBadRequest(reason="job must be NAMESPACE/NAME; choose one from the list")
        keys.append((namespace, name))
    if len(keys) > MOST_RUNS:
        raise web.HTTPBadRequest(reason=f"{len(keys)} jobs: at most {MOST_RUNS} can be told apart; leave some out")
    return keys


def _job(body: Json) -> DDPJob:
    """Read a job. Raises Mistake for an object that cannot be read."""
    try:
        return read_job(body)
    except Exception as error:
        raise Mistake(f"the job cannot be read: {error}") from error


def _nodes(body: Json, job: DDPJob) -> str:
    """Return the text about a job's nodes that the list of jobs shows.

    The record of a deleted job contains this text, but not the slots from which it is computed.
    """
    stored = (body.get("status") or {}).get("nodes") or {}
    return str(stored.get("display") or job.status.nodes_display(job.spec))


def _view(request: web.Request) -> FleetView:
    return request[_VIEW]


def _ago(then: datetime | None, now: datetime) -> str:
    return duration((now - then).total_seconds()) if then is not None else ""


def _local_time(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment is not None else ""


# --- running ----------------------------------------------------------------------------------------------------


async def serve(
    gate: Gate, *, host: str | None, port: int, started: Callable[[int], None], tls: ssl.SSLContext | None = None
) -> None:
    """Serve until cancelled.

    `host=None` means all addresses of this machine. Once the server listens, `started` is called
    with the number of its port. Raises OSError if the server cannot listen.
    """
    runner = web.AppRunner(
        Dashboard(gate).app(), access_log=None, keepalive_timeout=75, shutdown_timeout=2.0, handler_cancellation=True
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=tls)
        await site.start()
        started(int(runner.addresses[0][1]))
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
