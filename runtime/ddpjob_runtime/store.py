"""Hosts the rendezvous's TCPStore in a child process, so that the coordinator does not need torch.

    python3 PATH/ddpjob_runtime store --port PORT --host ADDRESS

The process prints a line "ready PORT" once it accepts connections. When the coordinator dies,
standard input ends, and the process exits.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
from datetime import timedelta
from typing import Any

from ddpjob_runtime import lean_torch, protocol


def serve(host: str, port: int = 0, seconds: float = 300.0) -> Any:
    """Return a TCPStore that listens on one address. The store's timeout is `seconds`.

    Port 0 means any free port. torch would let the store listen on every address of the machine,
    which is unsafe because a store has no authentication.

    Raises OSError if the address does not belong to this machine, or if the port is in use.
    """
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    try:
        if not host:
            raise OSError("the address is empty")
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            port, descriptor = listener.getsockname()[1], listener.detach()
    except OSError as error:
        why = error.strerror or error
        raise OSError(
            f"cannot host a store on {host!r}, port {port}: {why}. The address must be one of this machine's, and the"
            " port must be free; check POD_IP, torchrun's --local-addr or the coordinator's --host"
        ) from error
    # torch has two servers for a store. Before version 2.8, only the older one accepts an existing
    # socket.
    uses_libuv, timeout = torch.__version__ >= "2.8", timedelta(seconds=seconds)
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout,
        master_listen_fd=descriptor, use_libuv=uses_libuv,
    )  # fmt: skip


def main() -> None:
    """Serve the store until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", required=True)
    arguments = parser.parse_args()
    # torch imports a tenth faster without garbage collection. Collection is not needed later
    # either, because this process then creates no more objects.
    gc.disable()
    try:
        with lean_torch.for_rendezvous():
            import torch.distributed  # noqa: F401
    # The import can fail in many ways. If a CUDA library is missing, the error is an OSError.
    except Exception as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
            raise  # This node has a temporary problem. An error about a missing library has no errno.
        # The coordinator reads only the last line of the output, so the reason must be one line.
        why = " ".join(str(error).split())
        sys.stdout.write(f"\ncannot import the image's torch, which the rendezvous store needs: {why}\n")
        sys.stdout.flush()
        os._exit(protocol.EXIT_INIT_FAILURE)

    try:
        store = serve(arguments.host, arguments.port)
    except OSError as error:
        sys.exit(f"store: {error}")
    # The image's own code may have printed text that does not end with a newline.
    sys.stdout.write(f"\nready {store.port}\n")
    sys.stdout.flush()
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)  # The store's threads do not need to be shut down.
