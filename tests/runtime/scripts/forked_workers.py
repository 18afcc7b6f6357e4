"""Runs scripts in sequence, each in a worker that is started as the launcher starts it.

python forked_workers.py FOLDER SCRIPT...
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime"))
from ddpjob_runtime.launcher import forkserver

del sys.path[0]

forkserver.preload()
server = forkserver.ForkServer()
folder = Path(sys.argv[1])
for script in sys.argv[2:]:
    environment = {**os.environ, "RANK": "0", "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    (folder / "error.json").unlink(missing_ok=True)
    began = time.monotonic()
    worker = server.spawn(["--script", script, "--flag"], environment, str(folder / "out"), str(folder / "err"))
    started = time.monotonic() - began
    code = worker.wait(600)
    print(
        json.dumps({"script": script, "code": code, "started": started, "out": (folder / "out").read_text()}),
        flush=True,
    )
