"""The `ddpjob dashboard` command, which serves the web pages until Ctrl-C and prints
their address.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket

import click

from ddpjob.client.backends.backend import Backend, Mistake
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.client.backends.past_jobs import PastJobs
from ddpjob.dashboard.fleet import Fleet
from ddpjob.dashboard.gate import FleetView, OneSession, is_loopback
from ddpjob.dashboard.web_server import serve


def serve_dashboard(backend: Backend, host: str, port: int) -> int:
    """Serve the dashboard until Ctrl-C, and return the exit code.

    Raises Mistake if jobs cannot be read or the port is in use.
    """
    token = secrets.token_urlsafe(24)

    def scoped(namespace: str) -> Backend:
        if isinstance(backend, ClusterBackend):
            return ClusterBackend(backend.api, namespace)
        return backend.within(namespace) if isinstance(backend, PastJobs) else backend

    def started(bound: int) -> None:
        name = f"[{host}]" if ":" in host else host
        click.echo(f"jobs of {backend.where}: http://{name}:{bound}/?token={token}")
        if not is_loopback(host):
            click.echo(f"{host}: the connection is not encrypted; others on the network can read the token", err=True)
        click.echo("press Ctrl-C to stop")

    with Fleet(backend) as fleet:
        try:
            view = FleetView(fleet, scoped, backend.where, past=isinstance(backend, PastJobs))
            gate = OneSession(view, token, host)
            asyncio.run(serve(gate, host=host, port=port, started=started))
        except (socket.gaierror, UnicodeError) as error:
            fault = error.strerror if isinstance(error, OSError) else "not a host name"
            raise Mistake(f"--host {host}: {fault}; write an address of this machine") from error
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error
            raise Mistake(
                f"--host {host} --port {port}: {why}; choose a different --port, or 0 for any free port"
            ) from error
        except KeyboardInterrupt:
            return 0
    return 0
