"""Workers that are forked from a process which has imported torch: a program must not be able to tell, but for the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from podfiles_harness import SCRIPTS

PROBE = """
import json, sys, os, random, threading, time
began = time.monotonic()
import torch, numpy
print(json.dumps({
    "argv": sys.argv, "name": __name__, "path0": sys.path[0], "torch_seconds": time.monotonic() - began,
    "siblings": sorted({"wire", "link", "warm", "entry", "departure"} & set(sys.modules)),
    "random": [random.random(), float(numpy.random.rand()), float(torch.rand(()))], "threads": threading.active_count(),
    "main": sys.modules["__main__"].__dict__ is globals(), "group": os.getpgid(0) == os.getpid(),
    "sigterm": __import__("signal").getsignal(15).name, "torch_threads": torch.get_num_threads(),
}))
"""
OWN_MODULES = "import link\nprint(link.NAME)\n"
LOADERS = """
import torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    for kind in ("fork", "spawn"):
        loader = DataLoader(list(range(20)), batch_size=5, num_workers=2, multiprocessing_context=kind)
        print(kind, sum(int(batch.sum()) for batch in loader))
"""
FAILS = "def f():\n    raise ValueError('told to fail')\nf()\n"
EXITS = "import atexit, sys\natexit.register(lambda: print('at exit'))\nsys.exit(7)\n"
SAYS = "import sys\nsys.exit('a word')\n"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
NO_MODULE = "import no_such_module\n"


def outcomes(folder: Path, *texts: str, **env: str) -> list[dict[str, Any]]:
    names = []
    for number, text in enumerate(texts):
        (folder / f"script{number}.py").write_text(text)
        names.append(f"script{number}.py")
    command = [sys.executable, str(SCRIPTS / "nursery.py"), str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_worker_sees_what_a_fresh_process_would_see(tmp_path: Path) -> None:
    first, second = (json.loads(o["out"]) for o in outcomes(tmp_path, PROBE, PROBE, OMP_NUM_THREADS="1"))
    assert first["argv"] == ["script0.py", "--flag"] and first["name"] == "__main__" and first["main"]
    assert first["path0"] == str(tmp_path)
    assert first["siblings"] == [] and first["threads"] == 1 and first["group"] and first["sigterm"] == "SIG_DFL"
    assert first["torch_threads"] == 1
    assert first["torch_seconds"] < 0.5, "torch was there already"
    shared = [one for one, other in zip(first["random"], second["random"], strict=True) if one == other]
    assert not shared, "no stream of random numbers is the same in two workers"


def test_its_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "link.py").write_text("NAME = 'the script has a module called link'\n")
    own, loaders, fails = outcomes(tmp_path, OWN_MODULES, LOADERS, FAILS)
    assert (own["code"], own["out"]) == (0, "the script has a module called link\n")
    assert (loaders["code"], loaders["out"]) == (0, "fork 190\nspawn 190\n")
    error = json.loads((tmp_path / "error.json").read_text())["message"]
    assert (fails["code"], error["message"]) == (1, "ValueError: told to fail")
    assert "in f" in error["extraInfo"]["py_callstack"] and "warm.py" not in error["extraInfo"]["py_callstack"]
    assert "ValueError: told to fail" in (tmp_path / "err").read_text()
    exits, says, killed, init = outcomes(tmp_path, EXITS, SAYS, KILLED, NO_MODULE)
    assert (exits["code"], exits["out"]) == (7, "at exit\n")
    assert [says["code"], killed["code"], init["code"]] == [1, -9, 1]
    assert json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]["ddpjob_init"] is True
