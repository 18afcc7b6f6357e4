"""A real headless Chromium, controlled through its DevTools protocol. It is taken from PATH or from
Debian's package.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from debian_packages import refuse, unpacked
from machine import slowness

SECONDS = 30.0
_NAMES = ("chromium-headless-shell", "chromium", "google-chrome")


def _program() -> tuple[Path, dict[str, str]]:
    """Return (the program, its environment)."""
    for name in _NAMES:
        if (found := shutil.which(name)) is not None:
            return Path(found), dict(os.environ)
    files = unpacked("chromium-headless-shell", "fonts-dejavu-core", needed=True)
    fonts = files / "fonts.conf"
    fonts.write_text(f"<fontconfig><dir>{files}/usr/share/fonts</dir><cachedir>{files}/fonts</cachedir></fontconfig>")
    libraries = [str(path) for path in files.glob("usr/lib/*-linux-gnu*")]
    libraries += [str(path) for path in files.glob("usr/lib/*-linux-gnu*/pulseaudio")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries), "FONTCONFIG_FILE": str(fonts)}
    return files / "usr/lib/chromium/chromium-headless-shell", environment


class Page:
    """A tab. `problems` contains the errors in the page's console, including violations of its
    content policy.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command of the protocol and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(SECONDS * slowness()):
            while True:
                answer = await self._socket.receive_json()
                if answer.get("id") == number:
                    assert "error" not in answer, f"{method}: {answer['error']}"
                    return dict(answer["result"])
                self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        said = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.problems.append(str(said["exceptionDetails"].get("exception", said["exceptionDetails"])))
        elif event["method"] == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.problems.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")

    async def js(self, code: str) -> Any:
        """Evaluate an expression in the page, and return its value, awaited if necessary."""
        result = await self.do("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, code: str) -> Any:
        """Wait until an expression's value is true, and return the value."""
        async with asyncio.timeout(SECONDS * slowness()):
            while not (value := await self.js(code)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            return value

    async def open(self, address: str) -> None:
        await self.js("window.left = true")
        await self.do("Page.navigate", url=address)
        await self.until("!window.left && document.readyState === 'complete'")

    async def size(self, width: int, height: int = 900) -> None:
        await self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def scheme(self, name: str) -> None:
        """Set the color scheme, light or dark."""
        await self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def key(self, name: str, text: str = "") -> None:
        codes = {"Tab": 9, "Enter": 13, "/": 191}
        key = {"key": name, "windowsVirtualKeyCode": codes.get(name, ord(name[0].upper()))}
        if name == "Enter":
            text = "\r"
        await self.do("Input.dispatchKeyEvent", type="keyDown", **key, **({"text": text} if text else {}))
        await self.do("Input.dispatchKeyEvent", type="keyUp", **key)

    async def type(self, text: str) -> None:
        await self.do("Input.insertText", text=text)

    async def picture(self, *, whole: bool = False) -> bytes:
        """Return a PNG of the visible area or of the whole page."""
        answer = await self.do("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])


@contextlib.asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """Yield a page of a new browser, and close the browser afterwards. Skip the test if there is no
    Chromium.
    """
    program, environment = _program()
    with tempfile.TemporaryDirectory(prefix="ddpjob-chromium-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            str(program), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-port=0", "--remote-allow-origins=*",
            f"--user-data-dir={folder}", "about:blank",
            env={**environment, "HOME": folder}, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        rest: asyncio.Task[bytes] | None = None
        try:
            port = await _port(process)
            assert process.stderr is not None
            rest = asyncio.create_task(process.stderr.read())  # an unread pipe would block the browser
            async with (
                aiohttp.ClientSession() as session,
                session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer,
                session.ws_connect((await answer.json())["webSocketDebuggerUrl"], max_msg_size=0) as socket,
            ):
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.do(f"{domain}.enable")
                yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if rest is not None:
                rest.cancel()


async def _port(process: asyncio.subprocess.Process) -> int:
    said = b""
    assert process.stderr is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SECONDS * slowness()):
            while line := await process.stderr.readline():
                said += line
                if b"DevTools listening on ws://" in line:
                    return int(line.rpartition(b":")[2].partition(b"/")[0])
    refuse("Chromium", said.decode(errors="replace")[-500:])
    raise AssertionError
