"""The Running condition: whether the group trains, and what is missing or wrong.

Only the coordinator's report proves that a group trains. Without this proof, the most useful
explanation is shown (`judge_running`), in this order:

1. a container that cannot start, with the kubelet's reason
2. pods that are missing or not started
3. a `command` with enough running pods: true, because no report describes the group of a `command`
4. a coordinator that cannot be reached: the condition keeps its status, because training may
   continue
5. the state of the rendezvous: backing off, finished, restarting, or forming

A message stays the same until the state changes. A time that must survive an operator restart, such
as the time of the last step, is part of the message and is read back from the message.

Example of a start with 2 nodes:

    NodesMissing         1 of 2 nodes runs
    GroupForming         2 of 2 nodes run and are joining the rendezvous
    GroupRuns (true)     2 nodes train as one group
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from ddpjob_runtime.protocol import (
    DATA,
    DATA_WAITS,
    EXCHANGING,
    UNCOUNTABLE,
    UNGROUPED,
    CoordinatorState,
    Hangs,
    MemberState,
    Overdue,
    Report,
)

from ddpjob.api.job_status import Condition, ConditionType, SlotState, format_time, known_time
from ddpjob.core.failures.classify import Stuck, describe_ranks, find_stuck
from ddpjob.core.status.conditions import GROUP_RESTARTS
from ddpjob.core.status.messages import count
from ddpjob.core.status.waiting_pods import NODES_MISSING, find_not_considered, find_not_started
from ddpjob.core.view import View

STEP_OVERDUE = "StepOverdue"
NO_GROUP = "NoGroup"
NODES_RUN = "NodesRun"
FINISHED_EARLY = "NodeFinishedEarly"
LEFT_ALONE = timedelta(minutes=3)
"""How long a pod may run without progress after another pod has exited with 0. After this time, the
condition reports the running pod.
"""


def judge_running(view: View, training: int | None, running_pods: int) -> tuple[bool, str, str]:
    """Return the status, reason and message of the Running condition."""
    status, spec, report = view.status, view.job.spec, view.report
    wanted = spec.nodes
    if training is not None:
        return _group_runs(view, training)
    for pod in [view.coordinator, *view.pods]:
        held = find_stuck(pod, has_run=True) if pod and pod.deleted_at is None else None
        if held is not None and not (report is None and spec.fast and status.holds(ConditionType.RUNNING)):
            return False, held.reason, held.message + _secret_hint(view, held)
    finished = sum(s.state is SlotState.SUCCEEDED for s in status.slots)
    there = min(running_pods, wanted)
    present = f"{there} of {count(wanted, 'node')} {'runs' if 1 in (there, wanted) else 'run'}"
    if there + finished < spec.min_nodes and not (spec.under_torchrun and finished):
        needed = f"{spec.min_nodes} {'is' if spec.min_nodes == 1 else 'are'} needed"
        least = f", {needed}" if spec.min_nodes < wanted else ""
        reason, why = find_not_started([p for p in view.pods if p is not None], view.now) or (NODES_MISSING, "")
        return False, reason, present + least + (f"; {why}" if why else "")
    if not spec.under_torchrun:
        ended = f", {finished} {'has' if finished == 1 else 'have'} finished" if finished else ""
        return True, *(_waits_for_finished(view) or (NODES_RUN, present + ended))
    coordinator = view.coordinator
    waits = (
        find_not_started([coordinator], view.now)
        if coordinator is not None and not status.rendezvous.endpoint
        else None
    )
    if report is None and waits is not None and not status.holds(ConditionType.RUNNING):
        return False, waits[0], f"{present}; {waits[1]}"
    placed = coordinator is not None and coordinator.host
    if report is None and not placed and not status.holds(ConditionType.RUNNING):
        return False, NODES_MISSING, f"{present}; the coordinator's pod has not been scheduled yet"
    if report is None:
        return status.holds(ConditionType.RUNNING), "CoordinatorUnreachable", f"{present}; {_unreachable(view)}"
    if report.attempt and report.state == CoordinatorState.FORMING and status.holds(ConditionType.RUNNING):
        trains = "continues to train while it connects" if there == 1 else "continue to train while they connect"
        return True, "CoordinatorReplaced", f"{present} and {trains} to a new coordinator"
    if report.backoff_until is not None and report.backoff_until > view.now:
        until = f"{report.backoff_until:%H:%M:%S} UTC"
        return (
            False,
            "BackingOff",
            f"{present}; the next round starts at {until}, because training has failed repeatedly without progress",
        )
    if spec.under_torchrun and (finished or report.state == CoordinatorState.SUCCEEDED):
        return (
            status.holds(ConditionType.RUNNING),
            "GroupFinished",
            "training has finished; the remaining pods are terminating",
        )
    if report.state == CoordinatorState.RESTARTING and _has_just_broken(view):
        return False, GROUP_RESTARTS, f"{present}, and the group is restarting"
    joining = f"{present} and {'is' if there == 1 else 'are'} joining the rendezvous"
    return False, "GroupForming", joining + _fetching(report)


def _waits_for_finished(view: View) -> tuple[str, str] | None:
    """Return the reason and message if a pod of a `command` stalls after another has finished."""
    over = [(p.main.finished, p.name) for p in view.pods if p is not None and p.ended and p.succeeded]
    at, name = min(((at, name) for at, name in over if at is not None), default=(None, ""))
    reported = known_time(reported_figures(view).get("updatedAt"))
    since = max(filter(None, (at, reported)), default=None)
    running = next((p.name for p in view.pods if p is not None and p.main.running), None)
    if at is None or running is None or since is None or view.now < since + LEFT_ALONE:
        return None
    return FINISHED_EARLY, (
        f"pod {name} ended with exit code 0 at {format_time(at)}, but pod {running} is still running and reports no "
        f"step. If ranks in pod {running} are waiting for ranks in pod {name}, they will wait forever. Read the log of "
        f"pod {running}; if the pod hangs, run `ddpjob restart`"
    )


def _has_just_broken(view: View) -> bool:
    """Whether the group has just stopped training and no restart explains it yet."""
    status, before = view.status, view.status.condition(ConditionType.RUNNING)
    if before is None or status.holds(ConditionType.RESTARTING) or status.round > view.job.status.round:
        return False
    return before.status or before.reason == GROUP_RESTARTS


def _fetching(report: Report) -> str:
    """Describe the progress of the first pod that is fetching storage.data.url."""
    notes = [note for note in report.notes if note.kind == DATA and note.why]
    notes.sort(key=lambda note: note.why == DATA_WAITS)
    others = f" (and {count(len(notes) - 1, 'more pod')})" if len(notes) > 1 else ""
    return f"; pod {notes[0].pod}{others}: {notes[0].why}" if notes else ""


def _secret_hint(view: View, held: Stuck) -> str:
    """Describe the bucket's Secret for which a container waits; empty if there is none."""
    storage = view.job.spec.storage
    for name, volume in (("checkpoints", storage.checkpoints), ("data", storage.data)):
        secret = volume.secret_name if volume is not None else None
        if secret and held.reason == "CreateContainerConfigError" and secret in held.message:
            return (
                f"; spec.storage.{name}.secretName needs a Secret {secret} in namespace {view.job.namespace} with the "
                "keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; the pod starts automatically once the Secret exists"
            )
    return ""


UNREACHABLE = timedelta(minutes=1)
"""How long a coordinator may be unreachable before an event reports it."""
UNREACHABLE_LONG = "worker failures are neither counted nor shown until it answers"


def _unreachable(view: View) -> str:
    """Describe an unreachable coordinator, and state when it became unreachable.

    That time is read from the condition's previous message, if there is one.
    """
    status = view.status
    where = f" at {status.rendezvous.endpoint}" if status.rendezvous.endpoint else ", whose pod has no address yet,"
    known = status.condition(ConditionType.RUNNING)
    said = _SINCE.search(known.message) if known is not None and known.reason == "CoordinatorUnreachable" else None
    since = (known_time(said[1]) if said else None) or view.now
    text = f"the coordinator{where} has not answered the operator since {format_time(since)}"
    if view.world.report_refused:
        return f"{text}: its report cannot be used ({view.world.report_refused}), and {UNREACHABLE_LONG}"
    if view.now - since >= UNREACHABLE:
        port = view.job.spec.rendezvous.endpoint_port
        reach = f"allow the operator's pod to reach port {port} of pods"
        text += f": training may continue, but {UNREACHABLE_LONG}; {reach}"
    before = last_step(known)
    return text if before is None else f"{text}; when it last answered, the group had {_NO_STEP} {format_time(before)}"


_SINCE = re.compile(r"has not answered the operator since (\S+Z)")


def _group_runs(view: View, training: int) -> tuple[bool, str, str]:
    wanted = view.job.spec.nodes
    if view.report is not None and view.report.overdue is not None:
        return True, STEP_OVERDUE, _without_steps(view, view.report.overdue, training)
    if view.report is not None and view.report.progress.get(UNGROUPED):
        run = f"{count(training, 'node')} {'runs' if training == 1 else 'run'}"
        return (
            True,
            NO_GROUP,
            f"{run}, but the ranks do not form a group: the script does not use torch.distributed, so each rank trains "
            "a separate model",
        )
    if training == wanted:
        return True, "GroupRuns", f"{_train(view, wanted)}{_finished_early(view)}{_without_count(view)}"
    if training > wanted:
        return True, "GroupShrinking", f"{_train(view, training)}, which is about to become {wanted}"
    some = f"{training} of {count(wanted, 'node')}"
    return True, "GroupRunsSmaller", f"{some} {_verb(view, training)}; {_missing(view)}"


def _without_steps(view: View, overdue: Overdue, training: int) -> str:
    """Describe a group whose next step is overdue, with the stacks of its ranks.

    Until the step is complete, the text stays the same from report to report.
    """
    known = last_step(view.status.condition(ConditionType.RUNNING))
    since = known if known is not None and abs(known - overdue.since) < _SAME_STEP else overdue.since
    said = f", while the script reports: {overdue.activity}" if overdue.activity else ""
    ends = view.job.spec.recovery.hangs is Hangs.END
    remedy = "it restarts once no rank is active" if ends else "it is left running, because recovery.hangs is Report"
    text = (
        f"the group of {count(training, 'node')} has {_NO_STEP} {format_time(since)}"
        f"{said}: {overdue.where}. If the group hangs, {remedy}; to restart it after a fixed time, set "
        "recovery.hangAfterSeconds"
    )
    return f"{text}\n{overdue.traceback}" if overdue.traceback else text


_SAME_STEP = timedelta(minutes=1)
"""Reported times of the same step differ by less than this. They are not equal, because the clocks
of the coordinator and the operator are compared again for each report."""
_NO_STEP = "completed no step since"
_LAST_STEP = re.compile(rf"{_NO_STEP} (\S+Z)")


def last_step(running: Condition | None) -> datetime | None:
    """Return the time of the last step from the condition's message; None if no step is overdue."""
    said = _LAST_STEP.search(running.message) if running is not None else None
    return known_time(said[1]) if said else None


def _train(view: View, nodes: int) -> str:
    return f"{count(nodes, 'node')} {_verb(view, nodes)}"


def _verb(view: View, nodes: int) -> str:
    """Return the verb that describes what the running nodes do.

    Nodes train as one group only if their ranks exchange data.
    """
    if nodes == 1:
        return "trains"
    exchange = view.report is not None and view.report.progress.get(EXCHANGING)
    return "train as one group" if exchange else "run together"


def _finished_early(view: View) -> str:
    """Describe the first node that has exited with 0 while other nodes are still training.

    The other nodes may wait forever for the finished node. The result is empty if there is no such
    node.
    """
    report = view.report
    members = () if report is None or report.state is not CoordinatorState.RUNNING else report.members
    finished = [m for m in members if m.state is MemberState.FINISHED]
    if not finished or len(finished) == len(members):
        return ""
    first = finished[0]
    ranks = "" if first.rank is None else f" ({describe_ranks(first.rank, view.job.spec.procs_per_node)})"
    others, have = (f" and {count(len(finished) - 1, 'more pod')}", "have") if len(finished) > 1 else ("", "has")
    return f"; pod {first.pod}{ranks}{others} {have} already ended with exit code 0"


def _without_count(view: View) -> str:
    """Explain the effect of recovery.hangAfterSeconds if the script's steps cannot be counted."""
    uncountable = view.report is not None and view.report.progress.get(UNCOUNTABLE)
    if not uncountable or view.job.spec.recovery.hang_after_seconds is None:
        return ""
    return (
        "; this script's steps cannot be counted, so recovery.hangAfterSeconds restarts the group only if no rank is "
        "active; call ddpjob_report.report() after each step"
    )


def _missing(view: View) -> str:
    """Return why an elastic group is smaller than requested."""
    report = view.report
    reported = report.members if report is not None else ()
    present = {m.pod for m in reported if m.state is not MemberState.STARTING}
    silent = {m.pod for m in report.lost} if report is not None else set()
    for pod in view.pods:
        if pod is None or pod.ended or pod.name in present:
            continue
        if pod.main.running and pod.name in silent:
            return f"pod {pod.name} is running but has lost its connection to the coordinator"
        held = find_stuck(pod, has_run=True)
        if held is not None:
            return held.message
        if pod.unschedulable:
            return f"pod {pod.name} is not scheduled: {pod.unschedulable}"
        waits = find_not_considered([pod], view.job.spec.scheduling, view.now) or find_not_started([pod], view.now)
        return waits[1] if waits is not None else f"pod {pod.name} is starting"
    spare = view.status.spare
    if spare:
        return f"{count(spare, 'more pod')} {'joins' if spare == 1 else 'join'} at the next restart"
    scheduled = view.status.condition(ConditionType.SCHEDULED)
    if scheduled is not None and not scheduled.status and scheduled.reason != "Placing":
        return f"the missing pods cannot be created ({scheduled.reason}): {scheduled.message}"
    return "the missing pods are being created"


def reported_figures(view: View) -> Mapping[str, Any]:
    """Return the progress that the current generation's coordinator reports; empty if unknown."""
    return view.report.progress if view.report is not None else {}
