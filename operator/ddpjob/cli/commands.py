"""The commands beside `run`: they read records on disk, and leave requests for the process that runs a job."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import yaml

from ddpjob.api.reader import validate as validate_change
from ddpjob.api.types import JobStatus, Json, parse_time
from ddpjob.cli.run import BadInput, read_job
from ddpjob.core.progress import duration
from ddpjob.local import processes
from ddpjob.local.paths import JobFolder, job_folder, runs_folder
from ddpjob.local.pod import UID_VARIABLE
from ddpjob.local.record import ask, read_record, runner

COLUMNS = ("NAME", "STATE", "NODES", "PROGRESS", "LOSS", "SPEED", "RESTARTS", "AGE")
STOP_MARGIN = 15.0
"""Seconds beyond the pods' grace after which `stop` no longer waits for the runner."""


class Mistake(Exception):
    """What the user asked for cannot be done; the text says why."""


# --- looking ----------------------------------------------------------------------------------------------------


def validate(arguments: argparse.Namespace) -> int:
    """0 when all files are right."""
    bad = False
    for path in arguments.files:
        try:
            manifest = read_job(path)
            print(f"{path}: ddpjob {manifest['metadata']['name']} is valid")
        except BadInput as error:
            bad = True
            print(error, file=sys.stderr)
    return 2 if bad else 0


def get(arguments: argparse.Namespace) -> int:
    """A line for each job, newest last; one job as JSON or YAML with -o."""
    found = [(folder, record) for folder, record in _records() if arguments.job in (None, folder.name)]
    if arguments.job is not None and not found:
        raise _unknown_job(arguments.job)
    if arguments.output != "table":
        documents = [record for _, record in found]
        document = documents[0] if arguments.job is not None else documents
        print(json.dumps(document, indent=1) if arguments.output == "json" else yaml.safe_dump(document, sort_keys=False), end="\n")
        return 0
    if not found:
        print(f"no jobs in {runs_folder()}", file=sys.stderr)
        return 0
    rows = [COLUMNS, *(_row(folder, record) for folder, record in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(folder: JobFolder, record: Json) -> tuple[str, ...]:
    status = JobStatus.read(record.get("status") or {})
    state = str(status.phase or "Pending")
    if not status.terminal and runner(folder) is None:
        state = "Interrupted"
    created = parse_time(record["metadata"].get("creationTimestamp"))
    age = duration((datetime.now(UTC) - created).total_seconds()) if created else ""
    written = status.write()
    progress = status.progress
    cells = (progress.get("display", ""), progress.get("lossDisplay", ""), progress.get("speedDisplay", ""))
    return (folder.name, state, written["nodes"]["display"], *map(str, cells), written["restarts"]["display"], age)


def _records() -> Iterator[tuple[JobFolder, Json]]:
    root = runs_folder()
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        record = _record(JobFolder(path))
        if record is not None:
            found.append((JobFolder(path), record))
    yield from sorted(found, key=lambda pair: str(pair[1]["metadata"].get("creationTimestamp")))


def _record(folder: JobFolder) -> Json | None:
    try:
        return read_record(folder)
    except ValueError as error:
        raise Mistake(str(error)) from error


def logs(arguments: argparse.Namespace) -> int:
    """The whole log; with --follow what comes, until nobody runs the job."""
    folder, record = _job_of_pod(arguments.pod)
    path = Path(record["local"]["folder"]) / "pods" / f"{arguments.pod}.log"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.log")))
        raise Mistake(f"pod {arguments.pod} has no log in the last run of {folder.name}; there are: {known or 'none yet'}")
    with path.open("rb") as log:
        while True:
            running = runner(folder) is not None
            sys.stdout.buffer.write(log.read())
            sys.stdout.buffer.flush()
            if not arguments.follow or not running:
                return 0
            time.sleep(0.3)


# --- acting -----------------------------------------------------------------------------------------------------


def kill(arguments: argparse.Namespace) -> int:
    """Asks the runner; it is the pod's parent and tells the decision what became of it."""
    folder, record = _job_of_pod(arguments.pod)
    _needs_runner(folder)
    if not any(pod["name"] == arguments.pod for pod in record["local"]["pods"]):
        known = ", ".join(pod["name"] for pod in record["local"]["pods"])
        raise Mistake(f"pod {arguments.pod} does not run; pods of {folder.name}: {known or 'none'}")
    return _ask(folder, "kill", arguments.pod)


def suspend(arguments: argparse.Namespace) -> int:
    """spec.runPolicy.suspend: true."""
    return _ask(_needs_runner(_folder(arguments.job)), "suspend", arguments.job)


def scale(arguments: argparse.Namespace) -> int:
    """spec.nodes, checked as the API server would."""
    folder = _needs_runner(_folder(arguments.job))
    old = _record(folder) or {}
    new = {**old, "spec": {**old["spec"], "nodes": arguments.nodes}}
    kept = ("apiVersion", "kind", "metadata", "spec")
    faults = validate_change(*({key: body[key] for key in kept} for body in (new, old)))
    if faults:
        raise Mistake("\n".join(map(str, faults)))
    return _ask(folder, "scale", str(arguments.nodes))


def resume(arguments: argparse.Namespace) -> int:
    """spec.runPolicy.suspend: false."""
    return _ask(_needs_runner(_folder(arguments.job)), "resume", arguments.job)


def _ask(folder: JobFolder, verb: str, subject: str) -> int:
    if not ask(folder, verb, subject):
        raise Mistake(f"the process that runs {folder.name} ({runner(folder)}) does not answer; `ddpjob stop --now {folder.name}` ends it")
    return 0


def stop(arguments: argparse.Namespace) -> int:
    """SIGTERM to the runner, in the end SIGKILL to everything of the job. Also for what a killed runner might have left."""
    folder = _folder(arguments.job)
    record = _record(folder) or {}
    pid = runner(folder)
    if pid is not None:
        grace = (record["spec"].get("podTemplate", {}).get("spec") or {}).get("terminationGracePeriodSeconds", 30)
        _end(folder, pid, [0.0, 5.0] if arguments.now else [float(grace) + STOP_MARGIN, 5.0])
    left = processes.end_all({UID_VARIABLE: record["metadata"]["uid"]})
    if left:
        raise Mistake(f"processes that could not be ended: {', '.join(map(str, left))}")
    print(f"{folder.name}: nothing runs" if pid is None else f"{folder.name}: ended")
    return 0


def _end(folder: JobFolder, pid: int, patience: list[float]) -> None:
    """SIGTERM as often as there are times to wait, then SIGKILL."""
    for seconds in patience:
        processes.send(pid, signal.SIGTERM)
        deadline = time.monotonic() + max(seconds, 0.2)
        while time.monotonic() < deadline:
            if runner(folder) != pid:
                return
            time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)


# --- names ------------------------------------------------------------------------------------------------------


def _folder(job: str) -> JobFolder:
    folder = job_folder(job)
    if "/" in job or _record(folder) is None:
        raise _unknown_job(job)
    return folder


def _unknown_job(job: str) -> Mistake:
    known = ", ".join(folder.name for folder, _ in _records())
    return Mistake(f"no job {job} was run in {runs_folder()}; there are: {known or 'none'} (DDPJOB_RUNS names another folder)")


def _needs_runner(folder: JobFolder) -> JobFolder:
    if runner(folder) is None:
        raise Mistake(f"job {folder.name} does not run; `ddpjob run` starts it")
    return folder


def _job_of_pod(pod: str) -> tuple[JobFolder, Json]:
    """The job whose name the pod's begins with; the longest, since job names may contain one another."""
    fitting = [(folder, record) for folder, record in _records() if pod.startswith(f"{folder.name}-")]
    if not fitting:
        raise _unknown_job(pod.rsplit("-", 2)[0])
    return max(fitting, key=lambda pair: len(pair[0].name))
