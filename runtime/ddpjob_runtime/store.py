"""Hosts the c10d TCPStore of one rendezvous, as a child process: the coordinator itself needs no torch.

    python3 PATH/ddpjob_runtime store --port PORT

Prints a line "ready PORT" when it accepts connections; ends when its standard input does (the coordinator has died).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys

from ddpjob_runtime import lean_torch, protocol


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    gc.disable()  # A tenth of the time that torch takes; afterwards this process makes no objects.
    try:
        with lean_torch.for_rendezvous():
            from torch.distributed import TCPStore
    except Exception as error:  # OSError, too: a library of CUDA's that is missing
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
            raise  # This node's trouble for now, not the image's: a library that is missing has no errno.
        why = " ".join(str(error).split())  # The coordinator takes the last line.
        sys.stdout.write(f"\nthe image has no usable torch, which the rendezvous store needs: {why}\n")
        sys.stdout.flush()
        os._exit(protocol.EXIT_INIT_FAILURE)

    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    sys.stdout.write(f"\nready {store.port}\n")  # The image may have printed something without a newline.
    sys.stdout.flush()
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)  # the store's threads need no orderly shutdown
