"""Reads the record of rounds that a job left in its checkpoint folder.

Any line of the record can be incomplete or hostile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpjob_runtime.protocol import (
    MAX_RECORDED,
    MAX_TEXT,
    ROUNDS_FILE,
    START,
    Incident,
    clip,
    is_number,
    read_figures,
    read_start,
)

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import format_time, known_time
from ddpjob.client.backends.backend import METRICS, METRICS_BYTES, Mistake
from ddpjob.core.status.messages import count
from ddpjob.core.status.repeated import count_steps, describe_repeats
from ddpjob.core.status.shown_progress import duration, show_progress

_BYTES = 8 << 20
"""Maximum number of bytes that are read from the end of the record. The whole record fits, because
the runtime keeps at most two files of 4 MiB each."""
_SHOWN = 200
"""Maximum number of rounds shown; older ones are omitted."""


@dataclass(frozen=True)
class Line:
    """A line of the record, about the start of a round or the end of the job.

    `incidents` are the breaks since the previous line.
    """

    time: datetime
    generation: str
    round: int
    world: int | None
    """Number of nodes in the round; None if the line is about the end of the job."""
    ok: bool
    why: str
    incidents: tuple[Incident, ...]
    progress: Json
    start: Json = field(default_factory=dict)
    """The point from which the round continued training, as `protocol.read_start` returns it; empty
    if the point was not recorded."""


@dataclass(frozen=True)
class LeftBehind:
    """The records of the last job that used a folder."""

    name: str
    namespace: str
    uid: str
    lines: tuple[Line, ...]
    unread: int
    """Number of lines that could not be read."""
    others: int
    """Number of earlier jobs that used the folder."""
    metrics: str
    """The end of metrics.jsonl; empty if the file does not exist."""

    @property
    def reported(self) -> Line:
        """The latest line with progress, or the last line if none has progress.

        The last line can lack progress, because a new coordinator does not know the progress until
        the script reports again.
        """
        return next((line for line in reversed(self.lines) if line.progress), self.lines[-1])


def read_left_behind(folder: Path) -> LeftBehind:
    """Read a checkpoint folder or a folder of `ddpjob run`. Raises Mistake."""
    if not folder.is_dir():
        raise Mistake(
            f"{folder}: no such folder on this machine; specify the folder that contains the job's checkpoints"
        )
    place = _place(folder)
    text = _end_of(place / f"{ROUNDS_FILE}.1") + _end_of(place / ROUNDS_FILE)
    metrics = _end_of(place / METRICS)
    found, unread = list[tuple[tuple[str, str, str], Line]](), 0
    for row in text[-_BYTES:].splitlines():
        try:
            job, line = _read(json.loads(row))
            if line.start:
                _add_start(found, job, line)
            else:
                found.append((job, line))
        except (ValueError, RecursionError):
            # The line is incomplete, or was not written by DDPJob.
            unread += 1
    if not found and not metrics:
        raise Mistake(
            f"{folder}: contains neither {ROUNDS_FILE} nor {METRICS}; job pods write both into the folder that "
            "spec.storage.checkpoints names"
        )
    identity = found[-1][0] if found else (folder.resolve().name, "", "")
    lines = tuple(line for job, line in found if job == identity)
    others = len({job for job, _ in found} - {identity})
    return LeftBehind(*identity, lines, unread, others, metrics)


def _add_start(found: list[tuple[tuple[str, str, str], Line]], job: tuple[str, str, str], start: Line) -> None:
    """Add the starting point in the line `start` to the earlier line about the same round.

    `found` contains the lines read so far. If none of them is about this round, nothing is changed.
    """
    for index in range(len(found) - 1, -1, -1):
        other, line = found[index]
        if other == job and (line.generation, line.round) == (start.generation, start.round):
            found[index] = job, replace(line, start=start.start)
            return


def _place(folder: Path) -> Path:
    """Return the folder that the job wrote to.

    If `folder` is a folder of `ddpjob run`, this is the checkpoint folder inside it. Otherwise, it
    is `folder` itself.
    """
    names = (ROUNDS_FILE, f"{ROUNDS_FILE}.1", METRICS)
    inside = folder / "checkpoints"
    return inside if inside.is_dir() and not any((folder / name).exists() for name in names) else folder


def _end_of(path: Path) -> str:
    """Return the last METRICS_BYTES of a file; empty if it does not exist. Raises Mistake."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - METRICS_BYTES))
            return file.read(METRICS_BYTES).decode(errors="replace")
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from error


def _read(row: Any) -> tuple[tuple[str, str, str], Line]:
    """Return the identity (name, namespace, uid) of a line's job, and the line itself.

    A line with a `start` adds to an earlier line about the same round. Raises ValueError if `row`
    is not a line of the record.
    """
    if not isinstance(row, dict) or row.get("event") not in ("round", "end", START):
        raise ValueError("not a line of the record")
    start = read_start(row.get(START)) if row["event"] == START else {}
    time, incidents = known_time(row.get("time")), [] if start else row.get("incidents")
    if time is None or not isinstance(incidents, list) or bool(start) != (row["event"] == START):
        raise ValueError("time, incidents or start is missing")
    number, world = _whole(row, "round"), _whole(row, "world") if row["event"] == "round" else None
    name, namespace, uid, generation, why = (
        clip(row.get(key) or "", MAX_TEXT) for key in ("job", "namespace", "uid", "generation", "why")
    )
    line = Line(
        time, generation, number, world, row.get("ok") is True, why,
        tuple(Incident.read(body, "incident") for body in incidents[-MAX_RECORDED:]),
        read_figures(row.get("progress") or {}, "progress"), start,
    )  # fmt: skip
    return (name, namespace, uid), line


def _whole(row: Json, key: str) -> int:
    value = row.get(key)
    if not isinstance(value, int) or not is_number(value):
        raise ValueError(f"{key} is not a whole number")
    return value


# --- in words ---------------------------------------------------------------------------------------------------


def describe_left_behind(found: LeftBehind) -> Iterator[str]:
    """Yield lines about the job, its last progress and its rounds.

    Rounds are listed in chronological order, each followed by the breaks that ended it.
    """
    lines = found.lines
    yield f"Job:       {found.namespace}/{found.name}" if found.namespace else f"Job:       {found.name}"
    if not lines:
        yield f"Rounds:    not recorded, because there is no {ROUNDS_FILE}"
        return
    first, last = lines[0], lines[-1]
    yield f"State:     {_state(last)}"
    took = duration(max(0.0, (last.time - first.time).total_seconds()))
    yield f"Time:      {format_time(first.time)} to {format_time(last.time)}, {took}"
    if progress := _progress(found.reported):
        yield f"Progress:  {progress}"
    breaks = sum(len(line.incidents) for line in lines)
    yield f"Rounds:    {sum(line.world is not None for line in lines)}, with {count(breaks, 'break')}"
    if found.others:
        yield f"Earlier:   {count(found.others, 'other job')} in this folder (not shown)"
    if found.unread:
        yield f"Not read:  {count(found.unread, 'line')}"
    yield ""
    if len(lines) > _SHOWN:
        yield f"the last {_SHOWN} of {len(lines)}:"
    for line in lines[-_SHOWN:]:
        for incident in line.incidents:
            yield from _break(incident)
        if line.world is not None:
            yield f"{format_time(line.time)}  round {line.round} begins with {count(line.world, 'node')}"
            yield from _start(line)
    if last.world is None:
        yield f"{format_time(last.time)}  job ended: {last.why}"


def _state(last: Line) -> str:
    if last.world is not None:
        return (
            f"unknown: round {last.round} started, but the end of the round was not recorded (the job was suspended, "
            "deleted or interrupted)"
        )
    return f"{'Complete' if last.ok else 'Stopped'}: {last.why}"


def _progress(line: Line) -> str:
    shown = show_progress({}, line.progress, line.time, at_once=True)
    words = [str(shown["display"])] if "display" in shown else []
    words += [f"loss {shown['lossDisplay']}"] if "lossDisplay" in shown else []
    metrics = {name: value for name, value in (shown.get("metrics") or {}).items() if is_number(value)}
    return ", ".join([*words, *(f"{' '.join(name.split())} {value:.5g}" for name, value in list(metrics.items())[:10])])


def _start(line: Line) -> Iterator[str]:
    """Yield a line that says from which step a round continued after a restart.

    The line also says how much work was repeated. If the step was not recorded, there is no line.
    """
    if line.start and line.incidents:
        again = describe_repeats(line.start["source"], count_steps(line.start))
        took = f" in {line.start['seconds']:.1f} s" if line.start.get("seconds") else ""
        yield f"    continued after step {line.start['step']}: {again}{took}"


def _break(incident: Incident) -> Iterator[str]:
    where = [f"pod {incident.pod}"] if incident.pod else []
    where += [f"rank {incident.rank}"] if incident.rank is not None else []
    where += describe_end(incident)
    message = next(iter(incident.message.splitlines()), "")
    yield f"{format_time(incident.time)}  {incident.kind} ({', '.join(where)}): {message}"
    yield from (f"    | {line}" for line in incident.traceback.splitlines())


def describe_end(incident: Incident) -> list[str]:
    """Return the known details of an incident: exit code, signal and number of consequences."""
    parts = [f"exit code {incident.exit_code}"] if incident.exit_code is not None else []
    parts += [incident.signal] if incident.signal else []
    return [*parts, *([count(incident.consequences, "consequence")] if incident.consequences else [])]
