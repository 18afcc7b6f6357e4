"""`python -m scripts.demo FILE`: runs a job, kills a node midway, and checks that the model has learned anyway."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import JobStatus
from ddpjob.cli.display import recoveries, reported_accuracy, stall_line
from ddpjob.cli.output import printable
from ddpjob.client.manifests.manifest_sources import BadInput, read_job
from ddpjob.local.paths import JobFolder, job_folder
from ddpjob.local.record import ask, read_record, runner


class Killer(threading.Thread):
    """Waits until `percent` of the work is done, then kills the pod of one node."""

    def __init__(self, folder: JobFolder, index: int, percent: int, run: subprocess.Popen[bytes]) -> None:
        super().__init__(name="killer", daemon=True)
        self.folder, self.index, self.percent, self._run = folder, index, percent, run
        self.killed: str | None = None

    def run(self) -> None:
        while self._run.poll() is None:
            record = read_record(self.folder) if runner(self.folder) == self._run.pid else None
            if record is not None and self._due(record):
                pod = f"{self.folder.name}-{self.index}-{record['status']['slots'][self.index]['attempt']}"
                if ask(self.folder, "kill", pod):
                    self.killed = pod
                return
            time.sleep(0.2)

    def _due(self, record: Json) -> bool:
        status = record.get("status", {})
        return bool(status.get("phase") == "Running" and status.get("progress", {}).get("percent", 0) >= self.percent)


def main() -> int:
    """Run the demo; return 0 if it succeeded.

    The job must be Complete, the node killed and replaced, and the accuracy reached.
    """
    parser = argparse.ArgumentParser(prog="python -m scripts.demo", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--kill-node", type=int, default=0, metavar="INDEX", help="node whose pod is killed (default 0)"
    )
    parser.add_argument(
        "--at",
        type=int,
        default=40,
        metavar="PERCENT",
        help="progress in percent at which the pod is killed (default 40)",
    )
    parser.add_argument("--accuracy", type=float, default=0.97, help="test accuracy to reach (default 0.97)")
    arguments = parser.parse_args()
    try:
        manifest = read_job(arguments.file)
    except BadInput as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    try:
        return _demo(arguments, manifest)
    except KeyboardInterrupt:  # The run handles its own signals.
        return 130


def _demo(arguments: argparse.Namespace, manifest: Json) -> int:
    folder = job_folder(manifest["metadata"]["name"])
    nodes = manifest["spec"]["nodes"]
    print(
        f"{arguments.file}: {nodes} nodes train; node {arguments.kill_node} is killed at {arguments.at} %\n", flush=True
    )
    run = subprocess.Popen([sys.executable, "-m", "ddpjob.cli", "run", "--fresh", str(arguments.file)])
    # On SIGTERM, the run stops its pods and exits with code 143.
    before = signal.signal(signal.SIGTERM, lambda *_: run.terminate())
    killer = Killer(folder, arguments.kill_node, arguments.at, run)
    killer.start()
    try:
        code = _wait(run)
    finally:
        signal.signal(signal.SIGTERM, before)
    killer.join(timeout=5)
    return _judge(folder, killer.killed, arguments.accuracy) if code == 0 else code


def _wait(run: subprocess.Popen[bytes]) -> int:
    """Return the run's exit code. Ctrl-C also reaches the run, which then needs time to stop."""
    while True:
        try:
            return run.wait()
        except KeyboardInterrupt:
            continue


def _judge(folder: JobFolder, killed: str | None, wanted: float) -> int:
    record = read_record(folder)
    assert record is not None, "the run has just written it"
    status = JobStatus.read(record["status"])
    accuracy = reported_accuracy(status)
    if killed is None or not status.restarts.uncounted:
        return _fail("no node was killed, because the job ended first")
    if accuracy is None or accuracy < wanted:
        return _fail(f"test accuracy {accuracy} is below {wanted:.0%}")
    if not _ledger(folder):
        return _fail("the ledger shows lost or repeated samples")
    plot = _plot(folder)
    if plot is None:
        return _fail("the plot was not drawn")
    print(
        f"\nPod {killed} was killed on purpose.",
        *map(printable, recoveries(status)),
        *map(stall_line, record["local"]["stallSeconds"]),
        sep="\n  ",
    )
    print(f"Complete with {accuracy:.2%} test accuracy (at least {wanted:.0%} wanted).\nPlot:        {plot}")
    return 0


def _fail(why: str) -> int:
    print(printable(f"demo: {why}"), file=sys.stderr)
    return 1


def _ledger(folder: JobFolder) -> bool:
    """Return whether every sample of every epoch was used exactly once.

    Steps that the kill undid are not counted.
    """
    command = [sys.executable, "-m", "ddpjob_trainer", "ledger", str(folder.checkpoints / "run")]
    print("\nLedger:", flush=True)
    return subprocess.run(command, check=False).returncode == 0


def _plot(folder: JobFolder) -> Path | None:
    path = folder.path / "training.png"
    command = [sys.executable, "-m", "ddpjob_trainer", "plot", str(folder.checkpoints / "run"), "-o", str(path)]
    environment = {"MPLBACKEND": "Agg", **os.environ}
    drawn = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    return path if drawn.returncode == 0 and path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
