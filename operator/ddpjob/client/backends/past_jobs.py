"""A `Backend` for the dashboard, which finds deleted jobs in their checkpoint folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpjob_runtime.protocol import ROUNDS_FILE, Incident

from ddpjob.api.job import API_VERSION, KIND
from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import format_time
from ddpjob.client.backends.backend import (
    METRICS,
    METRICS_WRITERS,
    Happened,
    LogOptions,
    Mistake,
    NoSuchJob,
    PodLine,
    poll_changes,
)
from ddpjob.client.backends.kept_logs import KeptLogs, in_folder
from ddpjob.client.backends.left_behind import LeftBehind, Line, describe_end, read_left_behind
from ddpjob.core.status.messages import count
from ddpjob.core.status.repeated import UNKNOWN, count_steps
from ddpjob.core.status.shown_progress import show_progress

_MOST_FOLDERS = 1000
_MOST_RESTARTS = 200
_MOST_ROUNDS = 200
_LOOK_SECONDS = 2.0
_NAME = re.compile(r"[a-z0-9][-a-z0-9.]{0,252}")
_READ_ONLY = "a job that is shown from its checkpoint folder cannot be changed"


class PastJobs:
    """Implements `Backend` for a checkpoint folder, or for a folder with several of them.

    Raises Mistake if the folder does not exist, cannot be read, or contains no records.
    """

    local = True

    def __init__(self, folder: Path) -> None:
        self._root, self._namespace = folder, ""
        self.notes: list[str] = []
        self.whole = True  # Large fields are included, because the files belong to this user.
        self._known: dict[Path, tuple[tuple[float, ...], LeftBehind]] = {}
        """Maps each folder to its stamp (see `_stamp`) and its record. A folder is read again only
        if its stamp has changed."""
        self._found: dict[tuple[str, str], tuple[Path, LeftBehind]] = {}
        self.jobs()

    def within(self, namespace: str) -> PastJobs:
        """Return a copy of this backend in which names refer to jobs in this namespace."""
        scoped = copy(self)
        scoped._namespace = namespace
        return scoped

    @property
    def where(self) -> str:
        return f"folder {self._root}"

    def jobs(self) -> list[Json]:
        notes, found = list[str](), dict[tuple[str, str], tuple[Path, LeftBehind]]()
        folders, kept = self._folders(), dict[Path, tuple[tuple[float, ...], LeftBehind]]()
        for folder in folders[:_MOST_FOLDERS]:
            try:
                kept[folder] = self._read_again(folder)
            except Mistake as mistake:
                if folders == [self._root]:
                    raise
                notes.append(str(mistake))
                continue
            left = kept[folder][1]
            name = next((name for name in (left.name, folder.name.lower()) if _NAME.fullmatch(name)), "")
            namespace = left.namespace or "default"
            if not name or (namespace, name) in found:
                # If several folders have the same job name, only the newest is listed under this
                # name.
                name = f"{name or 'job'}.{len(found)}"[-253:]
            found[namespace, name] = folder, left
        if len(folders) > _MOST_FOLDERS:
            notes.append(f"only the newest {_MOST_FOLDERS} of {len(folders)} folders are shown")
        self.notes, self._found, self._known = notes, found, kept
        bodies = [_as_job(name, left) for (_, name), (_, left) in found.items()]
        return sorted(bodies, key=lambda body: str(body["metadata"].get("creationTimestamp")))

    def _read_again(self, folder: Path) -> tuple[tuple[float, ...], LeftBehind]:
        """Return a folder's stamp and its record. Raises Mistake.

        The record is read again only if the stamp has changed. Its metrics are left out, because
        the metrics of many jobs would fill the memory.
        """
        known, stamp = self._known.get(folder), _stamp(folder)
        if known is not None and known[0] == stamp:
            return known
        return stamp, replace(read_left_behind(folder), metrics="")

    def _folders(self) -> list[Path]:
        """Return the checkpoint folders to read.

        If a job has used the backend's folder itself, return only this folder. Otherwise, return
        the subfolders that jobs have used, newest first.
        """
        if _stamp(self._root) or not self._root.is_dir():
            return [self._root]
        try:
            inside = [(stamp, folder) for folder in self._root.iterdir() if (stamp := _stamp(folder))]
        except OSError as error:
            raise Mistake(f"{self._root}: {error.strerror}") from error
        return [folder for _, folder in sorted(inside, reverse=True)] or [self._root]

    def _folder_of(self, name: str) -> tuple[Path, LeftBehind]:
        for (namespace, known), found in self._found.items():
            if known == name and self._namespace in ("", namespace):
                return found
        raise NoSuchJob(f"no job {name} in {self._root}")

    def job(self, name: str) -> Json:
        return _as_job(name, self._folder_of(name)[1])

    def changes(
        self, name: str | None, seconds: float | None = None, known: Iterable[Json] | None = None
    ) -> Iterator[tuple[Json, bool]]:
        """Yield changes as `Backend` defines them.

        The listed jobs can change, because some may still be training and writing to their folders.
        """
        return poll_changes(self.jobs, name, f"no job {name} in {self._root}", _LOOK_SECONDS, seconds, known)

    def pods(self, name: str) -> list[PodLine]:
        return []

    def events(self, name: str) -> list[Happened]:
        found = []
        for line in self._folder_of(name)[1].lines[-_MOST_ROUNDS:]:
            if line.world is not None:
                found.append(Happened(line.time, False, "Round", f"round {line.round}: {count(line.world, 'node')}"))
            else:
                found.append(Happened(line.time, not line.ok, "End", line.why))
        return found

    def kept_logs(self, name: str) -> KeptLogs:
        folder, left = self._folder_of(name)
        return in_folder(folder, left.name, left.uid)

    def log(self, pod: PodLine, options: LogOptions) -> Iterator[bytes]:
        raise Mistake("the logs were deleted with their pods")

    def metrics(self, name: str) -> str:
        found = read_left_behind(self._folder_of(name)[0]).metrics
        if not found:
            raise Mistake(f"{name}: there is no {METRICS}; {METRICS_WRITERS}")
        return found

    def _refuse(self, *_: object) -> Any:
        raise Mistake(_READ_ONLY)

    patch = create = delete = kill = run_in = _refuse


def _stamp(folder: Path) -> tuple[float, ...]:
    """Return the modification times and the sizes of the files that a job wrote to its folder.

    The newest time comes first, so that folders can be sorted by their stamps. If the folder has no
    such files, the result is empty.
    """
    times, sizes = list[float](), list[float]()
    for place in (folder, folder / "checkpoints"):
        for file in (ROUNDS_FILE, METRICS):
            try:
                found = (place / file).stat()
            except OSError:
                continue
            times.append(found.st_mtime)
            sizes.append(found.st_size)
    return (*sorted(times, reverse=True), *sizes)


def _as_job(name: str, left: LeftBehind) -> Json:
    """Build a DDPJob from a record.

    The record contains only part of the job's status and, from the spec, only the number of nodes.
    """
    metadata: Json = {"name": name, "namespace": left.namespace or "default", "uid": left.uid}
    spec: Json = {"image": "", "nodes": 1, "gpusPerNode": 0}
    body: Json = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}
    if not left.lines:
        return {**body, "status": {"phase": "Interrupted"}}
    first, last = left.lines[0], left.lines[-1]
    metadata["creationTimestamp"] = format_time(first.time)
    world = next((line.world for line in reversed(left.lines) if line.world is not None), None)
    spec["nodes"] = max(1, world or 1)
    restarts = list(_restarts(left.lines))
    status: Json = {
        "phase": "Interrupted",
        "startTime": format_time(first.time),
        "progress": show_progress({}, left.reported.progress, left.reported.time, at_once=True),
        "restarts": {
            "total": len(restarts),
            "uncounted": 0,
            "recent": restarts[-_MOST_RESTARTS:],
            "display": str(len(restarts)),
            "repeatedSteps": sum(restart.get("repeatedSteps", 0) for restart in restarts),
            "repeatedSeconds": sum(restart.get("repeatedSeconds", 0.0) for restart in restarts),
            "unknownRepeats": sum("continuedFrom" in r and "repeatedSteps" not in r for r in restarts),
        },
        "nodes": {"display": f"{world}" if world is not None else ""},
    }
    if last.world is None:
        status["phase"] = "Complete" if last.ok else "Failed"
        status["conditions"] = [{
            "type": status["phase"], "status": "True", "reason": "Finished" if last.ok else "Stopped",
            "message": last.why, "lastTransitionTime": format_time(last.time),
        }]  # fmt: skip
    status["completionTime"] = format_time(max(line.time for line in left.lines))
    return {**body, "status": status}


def _restarts(lines: tuple[Line, ...]) -> Iterator[Json]:
    """Yield each break in the form of an entry in `status.restarts.recent`.

    The entry's `round` is the round that followed the break. `counted` is always false, because the
    record does not show whether a break counted.
    """
    for line in lines:
        for incident in line.incidents:
            entry: Json = {
                "time": format_time(incident.time), "pod": incident.pod or "", "reason": str(incident.kind),
                "message": _message(incident), "counted": False, "round": line.round,
            }  # fmt: skip
            if incident.rank is not None:
                entry["rank"] = incident.rank
            if line.world is not None and line.time >= incident.time:
                entry["seconds"] = round((line.time - incident.time).total_seconds(), 1)
            if incident is line.incidents[-1] and line.world is not None:
                entry |= _repeated(line.start)
            yield entry


def _repeated(start: Json) -> Json:
    """Return the fields of a restart that describe the repeated work.

    `start` is the record of how the round after the restart began. If `start` is empty, the
    repeated work is unknown.
    """
    found: Json = {"continuedFrom": start.get("source", UNKNOWN), "repeatedSteps": count_steps(start)}
    found |= {"repeatedSeconds": start.get("seconds")}
    return {name: value for name, value in found.items() if value is not None}


def _message(incident: Incident) -> str:
    where = describe_end(incident)
    head = next(iter(incident.message.splitlines()), "")
    said = f"{head} ({', '.join(where)})" if where else head
    return "\n".join(filter(None, (said.strip(), incident.traceback)))
