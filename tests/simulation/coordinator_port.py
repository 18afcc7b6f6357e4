"""The HTTP port of a simulated coordinator, on a real socket. An operator reaches it like a real
pod's port.
"""

from __future__ import annotations

import asyncio

from ddpjob_runtime.coordinator import http_api

from .coordinator import CoordinatorProcess

COORDINATOR_PORT = 29401
"""The default port: the one after the jobs' rendezvous port."""


async def listen(process: CoordinatorProcess, address: str) -> asyncio.AbstractServer:
    """Serve on a separate loopback address until the caller closes the server. The clock is the
    event loop's.
    """
    server = process.real.server
    server._change = asyncio.Event()
    process.on_change = server._on_change

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await reader.read(1)
            if not process.network.reaches_operator(process.pod):
                await asyncio.sleep(60)
            if process.listening and first:
                process._hear()
                await http_api.serve(server, first, reader, writer)
                if process.real.exits:
                    process.stop(0)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(answer, address, COORDINATOR_PORT, reuse_address=True)
