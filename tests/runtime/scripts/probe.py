# ruff: noqa: PTH109, PTH110, PTH115, PTH123
"""Records everything that a script can see of its process: python probe.py FILE ARGUMENTS."""

import json
import os
import resource
import signal
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGCHLD, signal.SIGUSR1)
limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
seen = {
    "environment": dict(os.environ),
    "argv": sys.argv[2:],
    "name": __name__,
    "path": sys.path,
    "flags": str(sys.flags),
    "started as": [word for word in getattr(sys, "orig_argv", []) if word != sys.argv[1]],
    "session": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0) == os.getpid(),
    "folder": os.getcwd(),
    "umask": os.umask(0),
    "limits": limits,
    "signals": {name.name: str(signal.getsignal(name)) for name in SIGNALS},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "output": [type(sys.stdout.buffer).__name__, sys.stdout.encoding, sys.stderr.errors, sys.stdout.write_through],
    "input": os.readlink("/proc/self/fd/0"),
    "descriptors": [n for n in range(64) if os.path.exists(f"/proc/self/fd/{n}")],
    "torch": "torch" in sys.modules,
}
with open(sys.argv[1], "w") as file:
    json.dump(seen, file)
