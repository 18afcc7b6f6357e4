"""Hosts the c10d TCPStore of one rendezvous: a child process of the coordinator, so that the coordinator itself needs no torch.

    python3 store.py --port PORT

Prints "ready PORT" when it accepts connections, and ends when its standard input does (the coordinator's death).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# torch must not find this folder's modules.
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != Path(__file__).resolve().parent]


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        sys.stdout.write(f"the image has no usable torch, which the rendezvous store needs: {error}\n")
        sys.stdout.flush()
        os._exit(78)

    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    sys.stdout.write(f"ready {store.port}\n")
    sys.stdout.flush()
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)  # the store's threads need no orderly end


if __name__ == "__main__":
    main()
