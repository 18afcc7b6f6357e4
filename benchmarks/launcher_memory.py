"""Measures the memory of one node's processes in modes Standard and Fast.

    python -m benchmarks.launcher_memory [--table docs/recovery.md]

The node has two workers under `ddpjob run`, whose script imports torch, takes an optimizer step and
waits. Linux shares the pages of forked processes until one of them writes to a page, so the
benchmark counts written pages. A process's own pages are those that no other process holds; its
share also includes a part of each shared page. Pages of library files count only in the resident
size, because all pods on a machine that use the same image share them, and the kernel can drop
them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddpjob.local import processes
from ddpjob.local.pod import CONTAINER_VARIABLE
from ddpjob.local.processes import end_all

from benchmarks.marks import add_table_option, write_between
from benchmarks.processes import exit_on_sigterm

WORKERS = 2
SCRIPT = """
import pathlib, sys, time
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
pathlib.Path(sys.argv[1], __import__("os").environ["RANK"]).touch()
time.sleep(1000)
"""


def measure(mode: str, folder: Path) -> list[tuple[str, float, float, float]]:
    """Return (process, resident, written by it alone, its share of all written pages) for each
    process.

    All sizes are in MiB.
    """
    name, ready = f"memory-{mode.lower()}", folder / mode
    ready.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    spec = {
        "image": "any:1", "nodes": 1, "gpusPerNode": 0, "procsPerNode": WORKERS, "recovery": {"mode": mode},
        "script": str(folder / "script.py"), "args": [str(ready)],
    }  # fmt: skip
    manifest = folder / f"{name}.json"
    body = {"apiVersion": "ddpjob.io/v1alpha1", "kind": "DDPJob", "metadata": {"name": name}, "spec": spec}
    manifest.write_text(json.dumps(body))
    environment = {**os.environ, "DDPJOB_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ddpjob.cli", "run", str(manifest)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as runner:
        try:
            while len(list(ready.iterdir())) < WORKERS:
                if runner.poll() is not None:
                    raise RuntimeError(f"the job has ended; see python -m ddpjob.cli run {manifest}")
                time.sleep(0.1)
            return _of_container(f"{name}-0-0/trainer")
        finally:
            runner.terminate()
            runner.wait()
            end_all({CONTAINER_VARIABLE: f"{name}-0-0/trainer"})


def _of_container(container: str) -> list[tuple[str, float, float, float]]:
    pids = processes.find({CONTAINER_VARIABLE: container})
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    rows = []
    for pid in pids:
        below = any(parent == pid for parent in parents.values())
        kind = "worker" if not below else "launcher" if parents[pid] not in pids else "fork server"
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {key: int(value.split()[0]) / 1024 for key, value in (line.split(":") for line in lines)}
        rows.append((kind, sizes["Rss"], sizes["Private_Dirty"], sizes["Pss_Anon"]))
    return rows


def table(found: dict[str, list[tuple[str, float, float, float]]]) -> str:
    """Return a table with one row per process."""
    lines = ["| mode | process | resident, MiB | written, its own, MiB | written, its share, MiB |"]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    for mode, rows in found.items():
        lines += [f"| {mode} | {kind} | {rss:.0f} | {own:.0f} | {share:.0f} |" for kind, rss, own, share in rows]
        lines.append(f"| {mode} | whole node |  |  | {sum(share for *_, share in rows):.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure both modes, and return 0."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_table_option(made, "memory")
    options = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        text = table({mode: measure(mode, Path(folder)) for mode in ("Standard", "Fast")})
    print(text)
    if options.table:
        write_between(options.table, "memory", text)
    return 0


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
