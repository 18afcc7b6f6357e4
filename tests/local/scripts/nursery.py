"""Starts workers as the launcher does: python nursery.py FOLDER SCRIPT...; each script is one worker, one after the other."""

import json
import os
import sys
import time
from pathlib import Path

import ddpjob.podfiles

PODFILES = Path(ddpjob.podfiles.__file__).parent
sys.path.insert(0, str(PODFILES))
import warm  # noqa: E402

warm.preload("")
nursery = warm.Nursery()
folder = Path(sys.argv[1])
for script in sys.argv[2:]:
    environment = {**os.environ, "RANK": "0", "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    began = time.monotonic()
    worker = nursery.spawn(["--script", script, "--flag"], environment, str(folder / "out"), str(folder / "err"))
    started = time.monotonic() - began
    code = worker.wait(60)
    print(json.dumps({"script": script, "code": code, "started": started, "out": (folder / "out").read_text()}), flush=True)
