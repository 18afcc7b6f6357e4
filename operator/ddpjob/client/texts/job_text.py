"""Describes a job in words: its table row, its details, and why it is waiting or has failed.

These texts use only the job's object, pods and events.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cache
from importlib import resources
from itertools import groupby

from ddpjob_runtime.protocol import AT_RISK
from pydantic import ValidationError

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import MANAGER, Json
from ddpjob.api.job_status import Condition, ConditionType, JobStatus, Restart, SlotState, known_time, parse_time
from ddpjob.client.backends.backend import Happened, Mistake, PodLine
from ddpjob.client.texts.run_record import record_of
from ddpjob.core.status.conditions import QUEUED
from ddpjob.core.status.messages import count, put_cause_first
from ddpjob.core.status.repeated import UNKNOWN, and_repeats
from ddpjob.core.status.running import NO_GROUP
from ddpjob.core.status.shown_progress import began_again, duration
from ddpjob.core.view import is_number
from ddpjob.local.environment import HOST

COLUMNS = ("NAME", "STATE", "NODES", "PROGRESS", "LOSS", "SPEED", "RESTARTS", "AGE")
WIDE = ("DURATION", "GPUHOURS", "ATRISK", "REASON")
NO_STATUS_SECONDS = 30
"""A job that has no status this many seconds after its creation is assumed to have no operator."""
QUIET_SECONDS = 30
"""If a training job has reported no new progress for this many seconds, `why` mentions this."""
_SHOWN = 8
"""Maximum number of pods, restarts or events that `describe` lists individually."""
PAGE = "docs/troubleshooting.md"


def table(rows: Sequence[Sequence[str]], widths: list[int] | None = None) -> list[str]:
    """Return one line per row, with aligned columns, as kubectl prints them.

    `widths` contains the minimum widths of the columns, and is updated to their actual widths. A
    caller that passes the same list again therefore gets lines that are aligned with the earlier
    ones.
    """
    widths = [] if widths is None else widths
    columns = zip(widths or [0] * len(rows[0]), zip(*rows, strict=True), strict=True)
    widths[:] = [max(width, *map(len, cells)) for width, cells in columns]
    return ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def header(*, wide: bool = False, namespaces: bool = False) -> tuple[str, ...]:
    """Return the column titles of `row`."""
    return (*(("NAMESPACE",) if namespaces else ()), *COLUMNS, *(WIDE if wide else ()))


def row(body: Json, now: datetime, *, wide: bool = False, namespaces: bool = False) -> tuple[str, ...]:
    """Return the cells of a job's row. Their texts are the same as in `kubectl get ddp`."""
    stored, meta = body.get("status") or {}, body["metadata"]
    status = JobStatus.read(stored)
    progress = status.progress
    nodes, restarts = (str((stored.get(part) or {}).get("display", "")) for part in ("nodes", "restarts"))
    shown = (str(progress.get(part, "")) for part in ("display", "lossDisplay", "speedDisplay"))
    created = parse_time(meta.get("creationTimestamp"))
    cells = (meta["name"], phase(body), nodes, *shown, restarts, _since(created, now))
    if wide:
        first = main_condition(status)
        risk = str(progress.get(AT_RISK, ""))
        cells += (took(body, now), gpu_hours(status.gpu_seconds), risk, first.reason if first is not None else "")
    return (str(meta.get("namespace", "")), *cells) if namespaces else cells


def phase(body: Json) -> str:
    """Return the job's phase, which is its state in one word. A job without a status is Pending."""
    return str((body.get("status") or {}).get("phase") or "Pending")


def took(body: Json, now: datetime) -> str:
    """Return how long the job has run, as text.

    The time begins when the job was started or, after a suspension, when the job was last resumed.
    It ends when the job ends.
    """
    status = JobStatus.read(body.get("status") or {})
    return _since(status.start_time, status.completion_time or now) if status.start_time else ""


def gpu_hours(seconds: int) -> str:
    """Return a number of GPU seconds as GPU hours; empty for 0."""
    hours = seconds / 3600
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2f}" if seconds else ""


def _since(then: datetime | None, now: datetime) -> str:
    return duration((now - then).total_seconds()) if then is not None else ""


@contextmanager
def readable(body: Json) -> Iterator[None]:
    """Raise Mistake instead of a ValidationError if the enclosed code cannot read a job.

    This happens if the job contains values that only a newer release knows.
    """
    try:
        yield
    except ValidationError as error:
        fields = ", ".join(dict.fromkeys(".".join(["spec", *map(str, fault["loc"])]) for fault in error.errors()))
        why = "perhaps because the operator is newer; run `ddpjob doctor` to compare the two"
        raise Mistake(f"{body['metadata']['name']}: this client cannot read {fields}, {why}") from error


def warnings(bodies: Sequence[Json]) -> Iterator[str]:
    """Yield a warning for each job whose ranks do not form a group.

    In such a job, each rank trains a separate model, which the row in the table does not show.
    """
    for body in bodies:
        status = JobStatus.read(body.get("status") or {})
        running = status.condition(ConditionType.RUNNING)
        if running is not None and running.status and running.reason == NO_GROUP and not status.terminal:
            name = body["metadata"]["name"]
            yield (
                f"warning: {name}: its ranks do not form a group ({NO_GROUP}), so each rank trains a separate model; "
                f"run `ddpjob why {name}`"
            )


# --- describe ---------------------------------------------------------------------------------------------------


def describe(body: Json, pods: Sequence[PodLine], events: Sequence[Happened], now: datetime) -> Iterator[str]:
    """Yield lines that describe everything important about a job.

    However many nodes the job has, the lines fit on one screen.
    """
    with readable(body):
        job = DDPJob.read(body)
    status, spec, meta = job.status, job.spec, body["metadata"]
    yield from _pairs(
        ("Name", job.name),
        ("Namespace", str(meta.get("namespace", ""))),
        ("Class", spec.class_name),
        ("Image", spec.image),
        ("Runs", _program(job)),
        ("Nodes", _nodes(job)),
        ("Ranks", _ranks(status)),
        *_record(body),
        ("Mode", f"{spec.recovery.mode}, at most {count(spec.recovery.max_restarts, 'counted restart')}"),
        ("State", phase(body)),
        ("Created", f"{meta.get('creationTimestamp', '')} ({_since(job.created, now)} ago)"),
        ("Runtime", took(body, now)),
        ("GPU hours", _gpu_use(status)),
        ("Progress", _progress(status)),
        ("Restarts", restart_counts(status, spec.recovery.max_restarts)),
        ("Repeated", _repeated_work(status)),
        ("At risk", at_risk(status)),
    )
    yield ""
    yield from why(body, pods, now)
    if status.conditions:
        yield "\nConditions:"
        rows = [("  TYPE", "STATUS", "REASON", "FOR", "MESSAGE")]
        rows += [
            (f"  {c.type}", str(c.status), c.reason, _since(c.since, now), _first_line(c.message))
            for c in status.conditions
        ]
        yield from table(rows)
    if status.slots:
        yield "\nSlots:"
        yield from slot_lines(status)
    if pods:
        yield "\nPods:"
        yield from _pods(pods, now)
    if status.restarts.recent:
        recent, total = status.restarts.recent[-_SHOWN:], status.restarts.total
        counted = f"last {len(recent)} of {total}" if len(recent) < total else f"{total} in all"
        yield f"\nRecent restarts ({counted}):" if total else "\nFailures:"
        for restart in recent:
            yield "  " + restart_line(restart, now)
        if any(restart.continued_from == UNKNOWN for restart in status.restarts.recent):
            yield (
                "  The number of repeated steps is unknown, because the script does not report which step it "
                "continued from. ddpjob_report.Snapshots reports this."
            )
    if status.avoided_nodes:
        yield "\nAvoided Kubernetes nodes:"
        for avoided in status.avoided_nodes:
            yield f"  {avoided.node} until {avoided.until:%H:%M} UTC: {avoided.reason}"
    if events:
        yield f"\nEvents (last {_SHOWN} of {len(events)}):" if len(events) > _SHOWN else "\nEvents:"
        for event in events[-_SHOWN:]:
            yield "  " + event_line(event, now)


def _pairs(*pairs: tuple[str, str]) -> Iterator[str]:
    for label, text in pairs:
        if text:
            yield f"{label + ':':<11} {text}"


def _record(body: Json) -> Iterator[tuple[str, str]]:
    """Yield a (label, text) pair for the git commit, for the GPU, and for all packages together."""
    packages = []
    for label, text in record_of(body):
        if label in ("git commit", "GPU"):
            yield "Commit" if label == "git commit" else label, text
        else:
            packages.append(f"{label} {text}")
    yield "Packages", ", ".join(packages)


def _program(job: DDPJob) -> str:
    spec = job.spec
    program = list(spec.command) or (["-m", spec.module] if spec.module else [spec.script or ""])
    text = " ".join([*([] if spec.command else ["torchrun"]), *program, *spec.args])
    return text if len(text) <= 100 else text[:97] + "..."


def _nodes(job: DDPJob) -> str:
    spec = job.spec
    parts = [f"{job.status.nodes_display(spec)} train"]
    parts += [f"{spec.gpus_per_node} x {spec.gpu_resource} each"] if spec.gpus_per_node else ["on the CPU"]
    parts += [count(spec.spares, "spare")] if spec.spares else []
    if spec.elastic:
        most = spec.elastic.max_nodes
        parts.append(f"elastic from {spec.elastic.min_nodes}" + (f" to {most}" if most else ""))
    return ", ".join(parts)


def _ranks(status: JobStatus) -> str:
    """Return a text that lists the nodes in rank order.

    The text is empty if the status does not contain the rank order.
    """
    runs: list[list[int]] = []
    for index in status.rank_order:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    shown = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_SHOWN]]
    more = ["..."] if len(runs) > _SHOWN else []
    return f"in this order: nodes {', '.join(shown + more)}" if runs else ""


def _progress(status: JobStatus) -> str:
    shown = [("", "display"), ("loss ", "lossDisplay"), ("", "speedDisplay")]
    shown += [("eta ", "eta")] if time_is_left(status) else []
    return ", ".join(f"{label}{status.progress[name]}" for label, name in shown if name in status.progress)


def time_is_left(status: JobStatus) -> bool:
    """Whether the remaining time should be mentioned.

    It is omitted if the job has finished or is suspended.
    """
    return not (status.terminal or status.holds(ConditionType.SUSPENDED))


def restart_counts(status: JobStatus, most: int) -> str:
    """Return a text that gives the numbers of counted, allowed and uncounted restarts.

    Before the first restart, the text is empty.
    """
    counts = status.restarts
    return f"{counts.counted} of {counts.limit(most)} counted, {counts.uncounted} not counted" if counts.total else ""


def _gpu_use(status: JobStatus) -> str:
    """Return a text about the GPU time that a job has used and the GPUs that it holds.

    If the job has not used any GPUs, the text is empty.
    """
    held = f"{count(status.gpu_use.held, 'GPU')} held" if status.gpu_use is not None else ""
    spent = f"{gpu_hours(status.gpu_seconds)} ({status.gpu_seconds:,} GPU seconds)" if status.gpu_seconds else ""
    return ", ".join(part for part in (spent, held) if part)


def _repeated_work(status: JobStatus) -> str:
    """Return a text that says how much work was repeated after restarts.

    The text also says after how many restarts the amount of repeated work is unknown.
    """
    counts = status.restarts
    parts = [f"{count(counts.repeated_steps, 'step')}, {counts.repeated_seconds:.1f} s"]
    parts = parts if counts.repeated_steps else []
    parts += [f"unknown after {count(counts.unknown_repeats, 'restart')}"] if counts.unknown_repeats else []
    return "; ".join(parts)


def at_risk(status: JobStatus) -> str:
    """Return a text that says how much work would be repeated if a node were lost now.

    The text is empty if this amount is unknown, or if the job has finished.
    """
    steps = status.progress.get(AT_RISK)
    return f"at most {count(int(steps), 'step')}" if is_number(steps) and not status.terminal else ""


def slot_lines(status: JobStatus) -> Iterator[str]:
    """Yield a line for each group of adjacent slots that are in the same state."""
    numbered = list(enumerate(status.slots))
    for alike, group in groupby(numbered, key=lambda pair: (pair[1].state, pair[1].reason, pair[1].failures)):
        members = list(group)
        first, last = members[0][0], members[-1][0]
        where = f"{first}" if first == last else f"{first}-{last}"
        state, reason, failures = alike
        text = f"  {where:<9} {state}" + (" until the end" if status.terminal and state is SlotState.RUNNING else "")
        if first == last:
            slot = members[0][1]
            text += f", attempt {slot.attempt}" + (f", on {slot.node}" if slot.node else "")
            if slot.not_before is not None and slot.state is SlotState.PLANNED:
                text += f", created at {slot.not_before:%H:%M:%S} UTC"
        yield text + (f" ({reason}{f', {failures} in a row' if failures > 1 else ''})" if reason else "")


def _pods(pods: Sequence[PodLine], now: datetime) -> Iterator[str]:
    """Yield a table of the pods that need attention, and lines that count the other pods.

    If the job has only a few pods, the table contains all of them.
    """
    notable = [pod for pod in pods if pod.state not in ("Running", "Completed")]
    quiet = [pod for pod in pods if pod not in notable]
    listed = pods if len(pods) <= _SHOWN else notable[:_SHOWN]
    if listed:
        rows = [("  POD", "ROLE", "STATE", "AGE", "KUBERNETES NODE", "")]
        rows += [
            (f"  {p.name}", p.role, p.state, _since(p.created, now), p.host, _first_line(p.message)) for p in listed
        ]
        yield from table(rows)
    if len(notable) > len(listed) and len(pods) > _SHOWN:
        states = _tally(pod.state for pod in notable[len(listed) :])
        yield f"  and {len(notable) - len(listed)} more: {states}"
    if quiet and len(pods) > _SHOWN:
        yield f"  {len(quiet)} others: {_tally(pod.state for pod in quiet)}"


def _tally(words: Iterable[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in sorted(Counter(words).items()))


def restart_line(restart: Restart, now: datetime) -> str:
    """Describe a restart in one line.

    The line says when and why the job restarted, whether the restart counted, and how long it took.
    """
    counted = "counted" if restart.counted else "not counted"
    after = f", ran again after {restart.seconds:.1f} s" if restart.seconds is not None else ""
    consequence = ", a consequence" if restart.consequence else ""
    ago, message = _since(restart.time, now), _first_line(put_cause_first(restart.message))
    named = restart.node in ("", HOST) or restart.node in message
    where = "" if named else f" on {restart.node}"
    return f"{ago} ago {restart.reason}{where}: {message} ({counted}{consequence}{after}){and_repeats(restart)}"


def event_line(event: Happened, now: datetime) -> str:
    """Describe an event in one line."""
    mark = "!" if event.warning else " "
    times = f" (x{event.count})" if event.count > 1 else ""
    return f"{mark} {_since(event.time, now):>7}  {event.reason}: {_first_line(event.message)}{times}"


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


# --- why --------------------------------------------------------------------------------------------------------


def why(body: Json, pods: Sequence[PodLine], now: datetime) -> Iterator[str]:
    """Yield lines that explain why a job is waiting or has failed, and what to do about it."""
    yield from _state(body, pods, now)
    name, meta = body["metadata"]["name"], body["metadata"]
    # Ignore the two finalizers that Kubernetes sets and removes by itself.
    held = [it for it in meta.get("finalizers") or () if it not in ("foregroundDeletion", "orphan")]
    deleted = parse_time(meta.get("deletionTimestamp"))
    if held and deleted is not None:
        ago = _since(deleted, now)
        yield (
            f"The job was deleted {ago} ago. The operator ignores it until the owner of the finalizer {held[0]} "
            f"has removed it."
        )
        return
    seen = (body.get("status") or {}).get("observedGeneration")
    if isinstance(seen, int) and seen < meta.get("generation", 0):
        yield (
            f"This describes the job before its spec changed, because the operator has not acted on the change yet. If "
            f"this persists, `ddpjob events {name}` may show why; run `ddpjob doctor` to check the operator."
        )


def _state(body: Json, pods: Sequence[PodLine], now: datetime) -> Iterator[str]:
    status = JobStatus.read(body.get("status") or {})
    name, state = body["metadata"]["name"], phase(body)
    main = main_condition(status)
    if state == "Interrupted" and body["spec"].get("image") == "":
        # Only PastJobs returns jobs with an empty image. Everything known about such a job comes
        # from its checkpoint folder.
        yield f"{name}: its end was not recorded. It was suspended, deleted or interrupted, or it is still training."
        return
    if state == "Interrupted":
        yield f"{name}: its `ddpjob run` was stopped before the job finished."
        if status.restarts.recent:
            yield f"Last restart: {restart_line(status.restarts.recent[-1], now)}"
        yield f"What to do: run it again, for example with `ddpjob rerun {name}`."
        yield "It resumes from its last checkpoint, if it has one."
        return
    if not status.conditions and not status.phase:
        yield from _without_status(body, now)
        return
    if status.holds(ConditionType.COMPLETE):
        # If the job completed while it was suspended, the duration is unknown.
        ran = took(body, now)
        yield f"{name} is complete{f': it ran for {ran}' if ran else ''}."
        complete = status.condition(ConditionType.COMPLETE)
        doubt = complete.message.partition(", but ")[2] if complete is not None else ""
        doubt = doubt or began_again(status.progress)
        if doubt:
            yield f"{doubt[0].upper()}{doubt[1:]}."
        if not body["spec"].get("command") and status.progress.get("step") is None and not status.progress.get("epoch"):
            yield "Its program ended with exit code 0 and reported no step."
            yield f"Run `ddpjob logs {name}` to see what it did."
        return
    if main is None:
        spare = f" and {count(status.spare, 'spare')}" if status.spare else ""
        yield f"{name} trains on {count(status.ready, 'node')}{spare}. {_progress(status)}".rstrip()
        yield from missing_pod(status, name, pods)
        changed = known_time(status.progress.get("updatedAt"))
        if changed is not None and (now - changed).total_seconds() >= QUIET_SECONDS:
            yield f"Its progress has not changed for {_since(changed, now)}."
            yield f"Run `ddpjob stacks {name}` to see where each rank is."
        if status.restarts.recent:
            yield f"Last restart: {restart_line(status.restarts.recent[-1], now)}"
        if again := began_again(status.progress):
            yield f"{again[0].upper()}{again[1:]}."
        for condition in _notable(status):
            yield f"{condition.type} is {condition.status}: {condition.reason}."
            yield from (f"  {line}" for line in condition.message.splitlines())
            yield from _explained(condition)
        return
    suspended = main.type is ConditionType.SUSPENDED and main.reason not in QUEUED
    verb = "failed" if main.type is ConditionType.FAILED else "is suspended" if suspended else ""
    waits = verb or ("restarts" if main.type is ConditionType.RESTARTING else "waits")
    since = _since(main.since, now)
    yield f"{name} {waits}: {main.reason}, {f'{since} ago' if verb == 'failed' else f'for {since}'}."
    yield from (f"  {line}" for line in main.message.splitlines())
    if main.type is ConditionType.RUNNING and status.restarts.recent:
        yield f"Last restart: {restart_line(status.restarts.recent[-1], now)}"
    held = [pod for pod in pods if pod.message and pod.message not in main.message and not pod.ended]
    for pod in held[:3] if main.type is not ConditionType.FAILED else ():
        yield f"  pod {pod.name} ({pod.state}): {_first_line(pod.message)}"
    if suspended:
        yield f"What to do: `ddpjob resume {name}`; training continues from its last checkpoint."
        return
    last = next((r for r in reversed(status.restarts.recent) if r.counted), None)
    # If the restart budget is spent, explain the last failure that counted, because the user has to
    # correct that failure.
    spent = last if main.reason == "RestartBudgetSpent" else None
    yield from _explained(main if spent is None else replace(main, type=ConditionType.RESTARTING, reason=spent.reason))
    if main.type is ConditionType.FAILED:
        yield f"Next: correct the cause, and run `ddpjob rerun {name}`, which resumes from the last checkpoint."
        yield f"If the manifest changes, run `ddpjob delete {name}` and submit the new manifest instead."


def missing_pod(status: JobStatus, name: str, pods: Sequence[PodLine]) -> Iterator[str]:
    """Yield a line if the status shows a running pod that does not exist.

    A running operator replaces a lost pod immediately, so the operator may have stopped. If `pods`
    is empty, nothing is yielded, because the user might not be permitted to list pods.
    """
    there = {pod.name for pod in pods}
    for index, slot in enumerate(status.slots) if there else ():
        pod = f"{name}-{index}-{slot.attempt}"
        if slot.state is SlotState.RUNNING and pod not in there:
            yield (
                f"Pod {pod} of slot {index} does not exist, but the status does not show this yet. If this persists, "
                f"no operator is acting on this job; run `ddpjob doctor`, and read the operator's log."
            )
            return


_SIDE_CONDITIONS = (
    *(ConditionType.FAST_RECOVERY, ConditionType.RANKS_ORDERED, ConditionType.ISOLATED, ConditionType.NODES_HEALTHY),
    *(ConditionType.CHECKPOINTS_COPIED, ConditionType.SNAPSHOTS_HELD, ConditionType.NOTIFIES),
    *(ConditionType.CLASS_APPLIED, ConditionType.RANKS_KEEP_PACE),
)
"""Conditions that can be false while a job trains."""


def _notable(status: JobStatus) -> Iterator[Condition]:
    """Yield a training job's conditions that report a problem."""
    running = status.condition(ConditionType.RUNNING)
    if running is not None and running.status and running.reason not in ("GroupRuns", "NodesRun"):
        yield running
    yield from (c for c in map(status.condition, _SIDE_CONDITIONS) if c is not None and not c.status)


def _explained(condition: Condition) -> Iterator[str]:
    """Yield the explanation of a condition from the troubleshooting page (PAGE).

    PAGE may explain the condition's message as well as its reason. In that case, the explanation of
    the message is used. If a container cannot start for a reason that PAGE does not list, the
    explanation of ErrImagePull is used.
    """
    known, reason = remedies(), condition.reason
    texts = (name for name in known if name.startswith(SAID) and name[len(SAID) :] in condition.message)
    found = known.get(next(texts, "")) or known.get(f"{condition.type} {reason}") or known.get(reason)
    if found is None and condition.type is ConditionType.RUNNING and condition.message.startswith("container "):
        found = remedies().get("Running ErrImagePull")
    if found is not None and found["meaning"]:
        yield f"What it means: {_STATUS.sub('', found['meaning'])}"
    if found is not None and found["remedy"]:
        yield f"What to do: {found['remedy']}"


SAID = "message "
"""Prefix of the names of remedies that belong to messages instead of reasons. The rest of such a
name is a text. The remedy applies to messages that contain this text."""
_STATUS = re.compile(r"^\([^)]*\) ")
"""Matches the status of a condition, such as `(True) `, at the beginning of a text in PAGE. PAGE
adds this status to a text that explains a reason which occurs while the condition is True."""


def main_condition(status: JobStatus) -> Condition | None:
    """Return the first condition that keeps a job from training.

    Return None if the job is training or complete.
    """
    if status.holds(ConditionType.COMPLETE):
        return None
    refused, suspended = status.condition(ConditionType.CLASS_APPLIED), status.condition(ConditionType.SUSPENDED)
    if status.holds(ConditionType.FAILED):
        return status.condition(ConditionType.FAILED)
    if suspended is not None and suspended.status:
        return refused if refused is not None and refused.reason == suspended.reason else suspended
    running, scheduled = status.condition(ConditionType.RUNNING), status.condition(ConditionType.SCHEDULED)
    quiet = ("Placing", "NodesMissing", "GroupForming")
    if running is not None and running.status:
        return None
    false = [c for c in (scheduled, running) if c is not None and not c.status]
    telling = [c for c in false if c.reason not in quiet]
    restarting = status.condition(ConditionType.RESTARTING)
    if not telling and restarting is not None and restarting.status:
        return restarting
    # Until a job's class is found, the operator checks nothing else about the job.
    lacks_class = refused if refused is not None and not refused.status else None
    return next(iter(telling or false), lacks_class)


def _without_status(body: Json, now: datetime) -> Iterator[str]:
    name, created = body["metadata"]["name"], parse_time(body["metadata"].get("creationTimestamp"))
    age = (now - created).total_seconds() if created is not None else 0.0
    manager = (body.get("spec") or {}).get("managedBy")
    if manager not in (None, MANAGER):
        yield f"{name} is managed by {manager} (spec.managedBy), so DDPJob's operator ignores it."
        return
    yield f"{name} has no status {duration(age)} after its creation, so no operator has reconciled it."
    if age > NO_STATUS_SECONDS:
        yield (
            "What to do: check that the operator is running and watches this namespace (`ddpjob doctor`; the chart's "
            "watchNamespaces), and read its log: kubectl -n ddpjob logs deployment/ddpjob-operator"
        )


@cache
def remedies() -> dict[str, dict[str, str]]:
    """Return a mapping from each reason to its meaning and remedy.

    The mapping is generated from docs/troubleshooting.md.
    """
    text = resources.files(__package__).joinpath("remedies.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found
