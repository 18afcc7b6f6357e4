"""Starts many workers as the launcher does in mode Fast: a single fork server starts them all, two
at a time.

python forked_corpus.py RUNTIME ORDERS RESULTS: the folder of the runtime, JSON files
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path

sys.path[0] = sys.argv[1]
from ddpjob_runtime.launcher import forkserver  # noqa: E402

del sys.path[0]
SECONDS = 60.0

faulthandler.enable()  # as the launcher does
forkserver.preload()
server = forkserver.ForkServer()
assert server.why_not() == "", server.why_not()
waiting, running, codes = json.loads(Path(sys.argv[2]).read_text()), [], {}
while waiting or running:
    while waiting and len(running) < 2:
        order = waiting.pop(0)
        worker = server.spawn(order["words"], order["environment"], order["out"], order["err"])
        running.append((order["name"], worker, time.monotonic()))
    for entry in list(running):
        name, worker, since = entry
        if worker.poll() is None and time.monotonic() - since > SECONDS:
            os.kill(worker.pid, 9)
            worker.wait()
        if worker.poll() is not None:
            codes[name] = worker.poll()
            running.remove(entry)
    time.sleep(0.002)
Path(sys.argv[3]).write_text(json.dumps(codes))
os._exit(0)
