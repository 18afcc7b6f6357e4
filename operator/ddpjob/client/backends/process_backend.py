"""Reads the records that `ddpjob run` keeps on this machine, and sends requests to running jobs."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar

from ddpjob.api.job_spec import Json, WhenDeleted
from ddpjob.api.job_status import JobStatus, SlotState, format_time, known_time, parse_time
from ddpjob.api.reader import validate, with_defaults
from ddpjob.client.backends.backend import (
    INTERRUPTED,
    METRICS,
    METRICS_BYTES,
    METRICS_WRITERS,
    Happened,
    LogOptions,
    Mistake,
    NoSuchJob,
    PodLine,
    poll_changes,
)
from ddpjob.client.backends.kept_logs import KeptLogs
from ddpjob.core.world import COORDINATOR_CONTAINER
from ddpjob.local import processes
from ddpjob.local.paths import RUNS_VARIABLE, JobFolder, RunFolder, holds_checkpoints, job_folder, runs_folder
from ddpjob.local.pod import UID_VARIABLE
from ddpjob.local.record import RequestRefused, ask, holds, read_record, runner, write_atomically

STOP_MARGIN = 15.0
"""Number of seconds for which `stop` waits for the runner after the pods' grace period."""
_POLL = 0.3
_STARTED_SECONDS = 120.0
"""Number of seconds within which a new `ddpjob run` must have written its record. On a very busy
machine, starting Python can take half a minute."""
_STOPPED = "the job's `ddpjob run` was stopped; run the job again to resume"
"""Replaces the message of an interrupted job's Suspended condition. The usual message suggests
setting runPolicy.suspend to false, which is impossible while no `ddpjob run` is running."""


def has_jobs() -> bool:
    """Whether the folder of runs contains a job.

    A file named status.json is not enough, because other tools can use the same name.
    """
    return any(_is_record(JobFolder(file.parent)) for file in runs_folder().glob("*/status.json"))


_ALIVE = ("Running", "Pending", "Terminating")
"""States of pods that have not ended."""
_OF_POD = re.compile(rf"(\d+-\d+|coordinator-\d+(-\d+)?)(\.{COORDINATOR_CONTAINER})?")
"""Matches the part that follows `JOB-` in the names of pods and logs."""
_Known = tuple[tuple[int, int, int] | None, Json, bool]
"""A record as it was last read: the inode, modification time and size of its file, then its
content, then whether the job has ended."""


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _report_disk_errors(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Turn disk errors into Mistakes, because callers of `Client` do not expect an OSError."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except OSError as error:
            if error.filename is None:
                raise
            raise Mistake(f"{error.filename}: {error.strerror}") from error

    return wrapped


class ProcessBackend:
    """Implements `Backend` for the jobs of `ddpjob run`."""

    local = True

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Messages about status.json files that are not records of jobs."""
        self.whole = True  # Large fields are included, because the files belong to this user.
        self._known: dict[Path, _Known] = {}
        """The records that the last call to `jobs` read. Because these records are kept, a program
        that follows 1,000 jobs reads only the records that have changed."""

    @property
    def where(self) -> str:
        return str(runs_folder())

    # --- reading

    @_report_disk_errors
    def jobs(self) -> list[Json]:
        root = runs_folder()
        folders = [JobFolder(path) for path in sorted(root.iterdir())] if root.is_dir() else []
        notes, found, kept = list[str](), list[tuple[JobFolder, Json, bool]](), dict[Path, _Known]()
        for folder in folders:
            try:
                known = _read_again(folder, self._known.get(folder.path))
            except Mistake as foreign:
                notes.append(str(foreign))
                continue
            if known is not None:
                kept[folder.path] = known
                found.append((folder, known[1], known[2]))
        self.notes, self._known = notes, kept
        found.sort(key=lambda each: str(each[1]["metadata"].get("creationTimestamp")))
        return [_object(*each) for each in found]

    @_report_disk_errors
    def job(self, name: str) -> Json:
        folder = self.folder(name)
        record = _record(folder) or {}
        return _object(folder, record, _terminal(record))

    def folder(self, name: str) -> JobFolder:
        """Return the folder of a job that was run here. Raises NoSuchJob."""
        folder = job_folder(name)
        if "/" in name or _record(folder) is None:
            known = ", ".join(job["metadata"]["name"] for job in self.jobs())
            elsewhere = f"{RUNS_VARIABLE} selects a different folder; -n and --context select a cluster"
            raise NoSuchJob(f"no job {name} was run in {runs_folder()}; jobs there: {known or 'none'} ({elsewhere})")
        return folder

    def changes(
        self, name: str | None, seconds: float | None = None, known: Iterable[Json] | None = None
    ) -> Iterator[tuple[Json, bool]]:
        nowhere = f"no job {name} was run in {runs_folder()}"
        return poll_changes(self.jobs, name, nowhere, _POLL, seconds, known)

    @_report_disk_errors
    def pods(self, name: str) -> list[PodLine]:
        job = self.folder(name)
        record = _record(job) or {}
        folder, lines = job.run(record["local"]["run"]).pods, []
        states = {pod["name"]: pod["state"] for pod in record["local"]["pods"]}
        if runner(job) is None:
            # The runner has ended, and no pod outlives its runner. If the runner was killed, it
            # could not record that its pods have ended.
            states = {pod: "Ended" if state in _ALIVE else state for pod, state in states.items()}
        roles = {pod["name"]: str(pod.get("role", "node")) for pod in record["local"]["pods"]}
        created = {pod["name"]: known_time(pod.get("created")) for pod in record["local"]["pods"]}
        for log in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime):
            states.setdefault(log.stem, "Ended")
        for pod, state in states.items():
            words = pod.removeprefix(f"{name}-").split("-")
            index = int(words[0]) if words[0].isdigit() else None
            second = index is None or pod.endswith(f".{COORDINATOR_CONTAINER}")
            role = "coordinator" if second else roles.get(pod, "node")
            ended = state not in _ALIVE
            slot = None if role == "coordinator" else index
            lines.append(PodLine(pod, role, slot, state, "local", created=created.get(pod), ended=ended))
        return sorted(lines, key=lambda pod: (-1 if pod.index is None else pod.index, pod.name))

    @_report_disk_errors
    def events(self, name: str) -> list[Happened]:
        folder = self.folder(name)
        path = folder.run((_record(folder) or {})["local"]["run"]).events
        found = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            # Ignore a line that is incomplete because the disk was full, or because the run was
            # killed while it was writing the line.
            with suppress(ValueError):
                event = json.loads(line)
                found.append(Happened(parse_time(event["time"]), event["warning"], event["reason"], event["message"]))
        return found

    def kept_logs(self, name: str) -> KeptLogs:
        """Return an empty KeptLogs.

        Kept logs are not needed here, because `pods` also lists terminated pods, and `log` reads
        their logs from files on this machine.
        """
        return KeptLogs(name, "", {}, lambda file: b"")

    def log(self, pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        if options.previous:
            raise Mistake(
                "--previous: pods on this machine are replaced, not restarted; give the name of an earlier pod instead"
            )
        if options.since is not None:
            raise Mistake("--since: logs on this machine contain no timestamps; use --tail instead")
        folder, record = self.job_of_pod(pod.name)
        path = folder.run(record["local"]["run"]).pods / f"{pod.name}.log"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in path.parent.glob("*.log")))
            raise Mistake(
                f"pod {pod.name} has no log in the last run of {folder.name}; pods with a log: {known or 'none yet'}"
            )
        try:
            with path.open("rb") as log:
                if options.tail is not None:
                    yield _last_lines(log, options.tail)
                while True:
                    running = runner(folder) is not None
                    while piece := log.read(65536):
                        yield piece
                    if not options.follow or not running or options.stopped:
                        return
                    time.sleep(_POLL)
        except OSError as error:
            raise Mistake(f"{path}: {error.strerror}") from error

    def metrics(self, name: str) -> str:
        path = self.folder(name).checkpoints / METRICS
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - METRICS_BYTES))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            raise Mistake(f"{path}: no such file; {METRICS_WRITERS}") from None
        except OSError as error:
            raise Mistake(f"{path}: {error.strerror}") from error

    def job_of_pod(self, pod: str) -> tuple[JobFolder, Json]:
        """Return the folder and the record of a pod's job.

        The pod's name begins with the job's name, and ends with an index and an attempt. If the
        jobs exp and exp-1 exist, exp-1-0 is therefore a pod of exp.
        """
        jobs = [job["metadata"]["name"] for job in self.jobs()]
        fitting = [name for name in jobs if pod.startswith(f"{name}-")]
        if not fitting:
            if pod in jobs:
                raise Mistake(f"{pod} is a job; specify one of its pods, such as {pod}-0-0 (`ddpjob describe {pod}`)")
            raise Mistake(f"no job {pod.rsplit('-', 2)[0]} was run in {runs_folder()}")
        exact = [name for name in fitting if _OF_POD.fullmatch(pod.removeprefix(f"{name}-"))]
        folder = job_folder(max(exact or fitting, key=len))
        return folder, _record(folder) or {}

    # --- changes, which the runner makes

    @_report_disk_errors
    def patch(self, name: str, spec: Json) -> None:
        folder = self._running(name)
        old = _record(folder) or {}
        new = {**old, "spec": _merged(old["spec"], spec)}
        kept = ("apiVersion", "kind", "metadata", "spec")
        faults = validate(*({key: body[key] for key in kept} for body in (new, old)))
        if faults:
            raise Mistake("\n".join(map(str, faults)))
        if set(spec) == {"nodes"}:
            self._ask(folder, "scale", str(spec["nodes"]))
        elif set(spec) == {"runPolicy"} and set(spec["runPolicy"]) == {"suspend"}:
            self._ask(folder, "suspend" if spec["runPolicy"]["suspend"] else "resume", name)
        else:
            changed = ", ".join(spec)
            raise Mistake(
                f"{changed}: cannot be changed for a job on this machine; change it in the manifest, and rerun the job"
            )

    @_report_disk_errors
    def create(self, manifests: list[Json], *, fresh: bool = False) -> str:
        """Start `ddpjob run` in the background.

        The last manifest is the job. The other manifests are ConfigMaps, whose contents become
        files in the `code` folder in the job's folder. With `fresh`, the job starts from scratch.
        """
        *code, job = manifests
        # with_defaults turns a generateName into a name.
        name = str(with_defaults(job)["metadata"]["name"])
        job = {**job, "metadata": {**job["metadata"], "name": name}}
        folder = job_folder(name)
        folder.path.mkdir(parents=True, exist_ok=True)
        with (folder.path / "submit.lock").open("w") as lock:
            # A concurrent submission of the same job waits here, and then finds that the job is
            # already running. If the file system does not support locks, `ddpjob run` reports this.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._start(folder, code, job, fresh=fresh)
        return name

    def _start(self, folder: JobFolder, code: list[Json], job: Json, *, fresh: bool) -> None:
        """Start `ddpjob run` in the background, and return once it has written its record."""
        if runner(folder) is not None:
            raise Mistake(f"job {folder.name} is already running; run `ddpjob stop {folder.name}` to stop it")
        for file, text in (item for body in code for item in body.get("data", {}).items()):
            folder.code.mkdir(exist_ok=True)
            write_atomically(folder.code / file, text)
        manifest, output = folder.path / "submitted.json", folder.path / "submitted.log"
        write_atomically(manifest, json.dumps(job, indent=1))
        before = (_record(folder) or {}).get("metadata", {}).get("uid")
        with output.open("wb") as log:
            run = subprocess.Popen(
                # -P prevents imports from the current folder, which contains the job's own files.
                # The `ddpjob` command does not import from the current folder either.
                [sys.executable, "-P", "-m", "ddpjob.cli", "run", str(manifest), *(["--fresh"] if fresh else [])],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _STARTED_SECONDS
        while (_record(folder) or {}).get("metadata", {}).get("uid") == before:
            if run.poll() is not None:
                raise Mistake(
                    output.read_text(errors="replace").strip() or f"`ddpjob run` exited with code {run.returncode}"
                )
            if time.monotonic() > deadline:
                run.kill()  # The job must not start after its submission was reported as failed.
                run.wait()
                raise Mistake(
                    f"`ddpjob run` was killed, because it recorded no job within {_STARTED_SECONDS:g} s; see its "
                    f"output in {output}"
                )
            time.sleep(0.1)

    @_report_disk_errors
    def resumes(self, name: str) -> bool:
        """Whether the next run with this name would continue from a checkpoint."""
        return job_folder(name).is_resumable()

    @_report_disk_errors
    def delete(self, name: str) -> None:
        """Stop the job and remove its record and logs.

        Training data is kept. Checkpoints, including those that --fresh has set aside, are deleted
        only if all runs that used them had whenDeleted: Delete.
        """
        self.stop(name, now=True)
        folder = self.folder(name)
        spec = (_record(folder) or {}).get("spec") or {}
        template = ((spec.get("storage") or {}).get("checkpoints") or {}).get("claimTemplate") or {}
        delete = template.get("whenDeleted") == WhenDeleted.DELETE and folder.disposable.exists()
        kept = [folder.data]
        if not delete:
            kept.append(folder.checkpoints)
        elif folder.checkpoints.is_symlink() and folder.checkpoints.is_dir():
            _empty(folder.checkpoints)
        for run in map(RunFolder, folder.path.iterdir()):
            if holds_checkpoints(run.earlier) and not (delete and run.disposable.exists()):
                kept.append(run.earlier)
        # The record is removed last, so that a failed deletion can be repeated.
        _empty(folder.path, kept, last=folder.status)
        if folder.checkpoints.is_dir() and not folder.has_checkpoints():
            for path in folder.checkpoints.iterdir():
                path.unlink()
        for path in (folder.checkpoints, folder.path):
            if path.is_dir() and not any(path.iterdir()):
                path.unlink() if path.is_symlink() else path.rmdir()

    @_report_disk_errors
    def kill(self, pod: str) -> None:
        folder, record = self.job_of_pod(pod)
        self._running(folder.name)
        if not any(p["name"] == pod for p in record["local"]["pods"]):
            known = ", ".join(p["name"] for p in record["local"]["pods"])
            raise Mistake(f"pod {pod} is not running; pods of {folder.name}: {known or 'none'}")
        self._ask(folder, "kill", pod)

    def run_in(self, pod: PodLine, code: str) -> str:
        _, record = self.job_of_pod(pod.name)
        environment = {**os.environ, "DDPJOB_STACKS_POD": pod.name, "DDPJOB_STACKS_UID": record["metadata"]["uid"]}
        command = [sys.executable, "-P", "-c", code]
        try:
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=60, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Mistake(f"pod {pod.name}: no response within 60 s; try again") from error
        return ran.stdout + ran.stderr

    def stop(self, name: str, *, now: bool = False) -> bool:
        """Stop the job's runner and all of the job's processes. Return whether the job was running.

        The runner gets SIGTERM and, unless `now` is true, time to stop its pods gracefully. If the
        runner does not exit, it gets SIGKILL. Then all remaining processes of the job are killed.
        Raises Mistake if the runner cannot be stopped from here, or if processes remain.
        """
        folder = self.folder(name)
        record = _record(folder) or {}
        pid = runner(folder)
        if pid is not None:
            grace = (record["spec"].get("podTemplate", {}).get("spec") or {}).get("terminationGracePeriodSeconds", 30)
            try:
                if not holds(folder, pid) and runner(folder) == pid:
                    elsewhere = f"on another machine or in another container, as process {pid}"
                    raise Mistake(f"job {name} runs {elsewhere}; stop it there")
                _end(folder, pid, [0.0, 5.0] if now else [float(grace) + STOP_MARGIN, 5.0])
            except PermissionError as error:
                whose = f"belongs to another user or runs elsewhere (process {pid})"
                raise Mistake(f"job {name} {whose}; stop it as that user, or where it runs") from error
        left = processes.end_all({UID_VARIABLE: record["metadata"]["uid"]})
        if left:
            raise Mistake(f"processes that could not be killed: {', '.join(map(str, left))}")
        return pid is not None

    def _running(self, name: str) -> JobFolder:
        folder = self.folder(name)
        if runner(folder) is None:
            raise Mistake(f"job {name} is not running; start it with `ddpjob run`")
        return folder

    def _ask(self, folder: JobFolder, verb: str, subject: str) -> None:
        try:
            processed = ask(folder, verb, subject)
        except RequestRefused as refused:
            raise Mistake(str(refused)) from refused
        if not processed:
            self._running(folder.name)  # Raises Mistake if the job has ended in the meantime.
            raise Mistake(
                f"the process that runs {folder.name} ({runner(folder)}) does not respond; run "
                f"`ddpjob stop --now {folder.name}` to kill it"
            )


def _empty(folder: Path, kept: Collection[Path] = (), last: Path | None = None) -> None:
    """Remove everything in a folder except the paths in `kept`. Raises OSError.

    Links are removed, but not the files and folders that they point to. The path `last` is removed
    after all others, so it still exists if an earlier removal fails.
    """
    for path in sorted(folder.iterdir(), key=lambda path: path == last):
        if path in kept:
            continue
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif any(path in keep.parents for keep in kept):
            _empty(path, kept)
        else:
            shutil.rmtree(path)


def _last_lines(log: BinaryIO, lines: int) -> bytes:
    """Return the last `lines` lines of a log, and leave the log positioned at its end.

    The log can be larger than memory. Reading therefore stops after METRICS_BYTES, even if fewer
    lines have been found.
    """
    end = log.seek(0, os.SEEK_END)
    text, begin = b"", end
    while begin > 0 and text.count(b"\n") <= lines and len(text) < METRICS_BYTES:
        begin = max(0, begin - max(65536, len(text)))
        log.seek(begin)
        text = log.read(end - begin)
    log.seek(end)
    # Do not use splitlines(), which would also split a progress bar at each carriage return.
    return b"".join(BytesIO(text).readlines()[-lines:]) if lines else b""


def _is_record(folder: JobFolder) -> bool:
    try:
        return read_record(folder) is not None
    except ValueError:
        return False


def _read_again(folder: JobFolder, known: _Known | None) -> _Known | None:
    """Return a job's record, or None if there is none.

    `known` is the result of the previous call, and is returned again if the record's file has not
    changed. A record is always replaced as a whole, so every change shows in the inode, the
    modification time or the size of its file.
    """
    try:
        now = folder.status.stat()
    except OSError:
        stamp = None
    else:
        stamp = now.st_ino, now.st_mtime_ns, now.st_size
    if known is not None and stamp is not None and known[0] == stamp:
        return known
    record = _record(folder)
    return None if record is None else (stamp, record, _terminal(record))


def _record(folder: JobFolder) -> Json | None:
    try:
        return read_record(folder)
    except ValueError as error:
        raise Mistake(str(error)) from error


def _object(folder: JobFolder, record: Json, ended: bool) -> Json:
    """Return the record as `kubectl get -o json` would show the job."""
    interrupted = False
    if not ended and runner(folder) is None:
        record = _record(folder) or record  # The job may have ended since the record was read.
        interrupted = not _terminal(record)
    job = {key: value for key, value in record.items() if key != "local"}
    if interrupted:
        job["status"] = _interrupted(record.get("status") or {})
        with suppress(OSError):
            # Use the time of the record's last change as the end. Without an end, the job would
            # seem to have run until now. The record of a running job changes often, so the error is
            # small.
            ended_at = datetime.fromtimestamp(folder.status.stat().st_mtime, UTC)
            job["status"]["completionTime"] = format_time(ended_at)
    return job


def _interrupted(status: Json) -> Json:
    """Return the status of an interrupted job, which has no running pods.

    The job's run was killed, so it could not record the interruption itself.
    """
    status = {**status, "phase": INTERRUPTED}
    nodes = status.get("nodes")
    if isinstance(nodes, dict) and "wanted" in nodes:
        done = sum(slot.state is SlotState.SUCCEEDED for slot in JobStatus.read(status).slots)
        gone = {"active": 0, "ready": 0, "spare": 0, "display": f"{done}/{nodes['wanted']}"}
        status["nodes"] = {**nodes, **gone}
    if isinstance(conditions := status.get("conditions"), list):
        status["conditions"] = [
            {**each, "message": _STOPPED} if (each.get("type"), each.get("status")) == ("Suspended", "True") else each
            for each in conditions
        ]
    return status


def _terminal(record: Json) -> bool:
    return JobStatus.read(record.get("status") or {}).terminal


def _merged(old: Json, patch: Json) -> Json:
    """Return `old` with a JSON merge patch (RFC 7386) applied."""
    merged = dict(old)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(old.get(key) or {}, value) if isinstance(value, dict) else value
    return merged


def _end(folder: JobFolder, pid: int, patience: list[float]) -> None:
    """Stop the runner with the process id `pid`.

    For each number in `patience`, send SIGTERM and wait up to that many seconds. If the runner is
    still running after the last wait, send SIGKILL.
    """
    for seconds in patience:
        processes.send(pid, signal.SIGTERM)
        # Continue a runner that the user has stopped with Ctrl-Z. A stopped runner cannot react to
        # SIGTERM, and would be killed before a checkpoint is saved.
        processes.send(pid, signal.SIGCONT)
        deadline = time.monotonic() + max(seconds, 0.2)
        while time.monotonic() < deadline:
            if runner(folder) != pid:
                return
            time.sleep(0.05)
    processes.send(pid, signal.SIGKILL)
