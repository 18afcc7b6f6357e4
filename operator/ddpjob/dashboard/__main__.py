"""Serves the dashboard in a cluster, where the Helm chart runs `python -m ddpjob.dashboard`.

The dashboard has no rights of its own (see `viewers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import ssl
import sys
from pathlib import Path

from ddpjob.missing_package import missing_package

try:
    from ddpjob.dashboard.viewers import Viewers
    from ddpjob.dashboard.web_server import serve
except ModuleNotFoundError as error:
    sys.exit(missing_package(error, "ddpjob.dashboard", "cli"))

_RELOAD_SECONDS = 60.0
_LAST_PORT = 65535


class WrongSetting(Exception):
    """An environment variable that the chart sets has an invalid value."""


def main() -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve())
    except (WrongSetting, OSError) as error:
        sys.exit(f"ddpjob.dashboard: {error}")


async def _serve() -> None:
    server, ca = _given("KUBERNETES_SERVICE_HOST"), _given("DDPJOB_DASHBOARD_CA")
    url = f"https://{f'[{server}]' if ':' in server else server}:{_given('KUBERNETES_SERVICE_PORT')}"
    gate = Viewers(url, ca, _words("DDPJOB_DASHBOARD_HOSTS"), _words("DDPJOB_DASHBOARD_NAMESPACES"))
    port = _given("DDPJOB_DASHBOARD_PORT")
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > _LAST_PORT:
        raise WrongSetting(f"DDPJOB_DASHBOARD_PORT is {port!r}; it must be a port number, from 0 to {_LAST_PORT}")
    tls, renewal = None, None
    if folder := os.environ.get("DDPJOB_DASHBOARD_TLS"):
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(Path(folder, "tls.crt"), Path(folder, "tls.key"))
        renewal = asyncio.create_task(_renew(tls, Path(folder)))
    serving = asyncio.create_task(serve(gate, host=None, port=int(port), tls=tls, started=_say))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    if renewal is not None:
        renewal.cancel()


async def _renew(tls: ssl.SSLContext, folder: Path) -> None:
    """Reload the certificate every _RELOAD_SECONDS.

    New connections use the reloaded certificate. cert-manager replaces the files in the folder
    whenever it renews the certificate.
    """
    while True:
        await asyncio.sleep(_RELOAD_SECONDS)
        try:
            tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        except (OSError, ssl.SSLError) as error:
            logging.warning("the certificate in %s cannot be read; the previous one stays in use: %s", folder, error)


def _say(port: int) -> None:
    logging.info("listening on port %d; every request uses its viewer's own token", port)


def _given(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise WrongSetting(f"{name} is not set; the chart sets it")
    return value


def _words(name: str) -> list[str]:
    try:
        found = json.loads(os.environ.get(name) or "[]")
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise WrongSetting(f"{name} must be a JSON list of strings")
    return found


if __name__ == "__main__":
    main()
