"""A proxy for the API server that refuses requests, silences watches, sends errors and shifts
clocks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import re
import ssl
import tempfile
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

ERROR = (
    b'{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":'
    b'"etcdserver: the fault of a benchmark","reason":"InternalError","code":500}}\n'
)
_NODE_TIME = re.compile(rb'"(startedAt|finishedAt)":"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)"')
_PASSED_ON = ("Content-Type", "Retry-After")


class Proxy:
    """Serves plain HTTP on a loopback port, in a separate thread, with a kubeconfig's rights.

    `refuse` is the share of requests that get a 429 or 5xx response. `delay` is the number of
    seconds until a response, except for watches and Leases, which an API server serves separately.
    `shift` is how many seconds the clocks of the cluster's nodes are ahead, as shown by the times
    in their pods' statuses.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self.refuse, self.delay, self.shift = 0.0, 0.0, 0
        self.refused = 0
        """Number of requests refused so far."""
        self.gone = 0
        """Number of responses and watch events with 410 so far."""
        self.port = 0
        self._upstream, self._ssl = _upstream(kubeconfig)
        self._streams: dict[web.StreamResponse, bool] = {}
        """Whether each watch is silent."""
        self._loop = asyncio.new_event_loop()
        self._random = random.Random(1)
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig whose API server is the proxy."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "proxy", "user": {}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
        }
        path = folder / "proxy.kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path

    def silence_watches(self) -> int:
        """Silence the open watches without closing them, and return their number."""
        for stream in self._streams:
            self._streams[stream] = True
        return len(self._streams)

    def send_errors(self) -> int:
        """Send an ERROR event on each open watch, and return their number."""
        asyncio.run_coroutine_threadsafe(self._send_errors(), self._loop).result(10)
        return len(self._streams)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _stop(self) -> None:
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    async def _send_errors(self) -> None:
        for stream in list(self._streams):
            with contextlib.suppress(ConnectionResetError):  # The watch's client has just disconnected.
                await stream.write(ERROR)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self._ssl, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, read_bufsize=2**24, timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self._random.random() < self.refuse:
            self.refused += 1
            status = self._random.choice((429, 500, 502, 503, 504))
            headers = {"Retry-After": "1"} if status == 429 else {}
            return web.json_response(
                {"kind": "Status", "code": status, "message": "a fault"}, status=status, headers=headers
            )
        watch = request.query.get("watch") in ("1", "true")
        if not watch and "/leases" not in request.path:
            await asyncio.sleep(self.delay)
        sent = await request.read()
        headers = {k: v for k, v in request.headers.items() if k in ("Content-Type", "Accept")}
        headers["Accept-Encoding"] = "identity"
        try:
            async with self._session.request(
                request.method, f"{self._upstream}{request.raw_path}", data=sent or None, headers=headers
            ) as answer:
                passed = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
                self.gone += answer.status == 410
                if watch and answer.status == 200:
                    return await self._watch(request, answer, passed)
                content = self._shifted(await answer.read())
                return web.Response(status=answer.status, body=content, headers=passed)
        except (aiohttp.ClientError, OSError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response()

    async def _watch(
        self, request: web.Request, answer: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)
        self._streams[stream] = False
        try:
            async for line in answer.content:
                self.gone += b'"code":410' in line
                if not self._streams[stream]:
                    await stream.write(self._shifted(line))
        finally:
            del self._streams[stream]
        return stream

    def _shifted(self, content: bytes) -> bytes:
        if not self.shift:
            return content

        def later(found: re.Match[bytes]) -> bytes:
            moment = datetime.strptime(found[2].decode(), "%Y-%m-%dT%H:%M:%SZ") + timedelta(seconds=self.shift)
            return b'"%b":"%b"' % (found[1], f"{moment:%Y-%m-%dT%H:%M:%SZ}".encode())

        return _NODE_TIME.sub(later, content)


def _upstream(kubeconfig: Path) -> tuple[str, ssl.SSLContext]:
    """Return the API server's address and the credentials for it."""
    content: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())
    cluster, user = content["clusters"][0]["cluster"], content["users"][0]["user"]
    with tempfile.TemporaryDirectory() as folder:

        def file(part: dict[str, Any], name: str) -> str:
            if f"{name}-data" not in part:
                return str(part[name])
            path = Path(folder) / name
            path.write_bytes(base64.b64decode(part[f"{name}-data"]))
            return str(path)

        context = ssl.create_default_context(cafile=file(cluster, "certificate-authority"))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.load_cert_chain(file(user, "client-certificate"), file(user, "client-key"))
    return str(cluster["server"]), context
