"""Describes the present in the status: conditions, counts and progress, from pods and the report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from ddpjob_runtime.protocol import (
    COPY_BEHIND,
    COPY_STEP,
    DATA,
    DATA_WAITS,
    EXCHANGING,
    PREFLIGHT,
    UNCOUNTABLE,
    UNGROUPED,
    CoordinatorState,
    MemberState,
    Overdue,
    Report,
)

from ddpjob.api.job_spec import PreflightScope
from ddpjob.api.job_status import Condition, ConditionType, JobStatus, Restart, SlotState, format_time, known_time
from ddpjob.core.decision import BLOCKED_POLL
from ddpjob.core.failures.classify import Cause, Stuck, ranks_of, stuck
from ddpjob.core.failures.node_health import judge_nodes
from ddpjob.core.rank_order import judge_order
from ddpjob.core.status.conditions import GROUP_RESTARTS, with_condition, with_phase, without_condition
from ddpjob.core.status.messages import cause_first, count, why_held
from ddpjob.core.status.shown_progress import shown_progress, shown_stragglers
from ddpjob.core.status.waiting_pods import NODES_MISSING, not_considered, not_started
from ddpjob.core.view import View, is_number
from ddpjob.core.volumes import FIELD, has_claim
from ddpjob.core.world import PodView, Rejection, Role, World, gang_name

CREATION_REFUSED = "CreationRefused"
NAME_IS_TAKEN = "NameTaken"
DELETION_REFUSED = "DeletionRefused"
STEP_OVERDUE = "StepOverdue"
NO_GROUP = "NoGroup"
NODES_RUN = "NodesRun"
FINISHED_EARLY = "NodeFinishedEarly"
LEFT_ALONE = timedelta(minutes=3)
"""How long a pod may run without progress, after another has ended with 0, before that is reported."""
SURELY_TRAINED = timedelta(minutes=10)
_FORMED = (CoordinatorState.RUNNING, CoordinatorState.SUCCEEDED)
_IN_GROUP = (MemberState.RUNNING, MemberState.FINISHED)

_BEFORE_THE_REPORT = frozenset(
    {Cause.SCALED, Cause.SPEC_CHANGED, Cause.KEY_CHANGED, Cause.RUNTIME_CHANGED, Cause.COORDINATOR_LOST}
)
"""Decided by the operator itself: a report that was read before cannot know of them."""


def describe(view: View, restarts: tuple[Restart, ...], *, creating: bool) -> JobStatus:
    """The view's status with conditions, counts and progress as of now.

    `restarts` are those recorded in this reconcile. `creating`: something is missing and is about
    to be created.
    """
    job, now = view.job, view.now
    alive = [p for p in view.pods if p is not None and not p.ended and p.deleted_at is None]
    training = _training(view)
    running_pods = sum(p.main.running for p in alive)
    finished = sum(s.state is SlotState.SUCCEEDED for s in view.status.slots)
    ready = max(0, training - finished) if training is not None else min(running_pods, job.spec.nodes)
    spare = min(_spares(view, training), max(0, running_pods - ready))
    status = replace(view.status, active=min(len(alive), job.spec.nodes), ready=ready, spare=spare)
    view = view.with_status(_scheduled(view.with_status(status), alive, creating=creating))
    running, reason, message = _running(view, training, running_pods)
    view = view.with_status(with_condition(view.status, ConditionType.RUNNING, running, reason, message, now))
    whole = (
        running
        and reason not in ("CoordinatorUnreachable", "CoordinatorReplaced")
        and (training is None or training <= job.spec.nodes)
    )
    view = view.with_status(_restarting(view, whole, [r for r in restarts if r.round]))
    view = view.with_status(preflight_passed(view, restarts, formed=view.status.holds(ConditionType.RUNNING)))
    status = _isolated(view.with_status(_fast_recovery(view)))
    status = _nodes_healthy(view.with_status(status))
    status = _checkpoints_copied(view.with_status(status))
    status = _ranks_ordered(view.with_status(status), training)
    status = replace(
        status,
        trained=view.trained or _has_run_long(status, now),
        claim_made=status.claim_made or has_claim(job, view.world),
    )
    due = status.phase is not with_phase(status).phase
    return with_phase(
        replace(
            status,
            progress=shown_progress(
                status.progress, view.reported_progress, now, at_once=due, stragglers=shown_stragglers(view)
            ),
        )
    )


def _has_run_long(status: JobStatus, now: datetime) -> bool:
    """Whether the group has run for so long that steps must be assumed, although the program reports none."""
    running = status.condition(ConditionType.RUNNING)
    return running is not None and running.status and now - running.since >= SURELY_TRAINED


def _training(view: View) -> int | None:
    """How many nodes train as one group; None: not known, or none do.

    The coordinator's report counts only while the pods of all its members are alive: it may be
    older than a loss.
    """
    report = view.report
    if not view.job.spec.under_torchrun or report is None or report.state not in _FORMED:
        return None
    alive = {p.name for p in view.pods if p is not None and (p.succeeded or (p.main.running and not p.ended))}
    members = [m.pod for m in report.members if m.state in _IN_GROUP]
    if report.world is None or len(members) < report.world or not set(members) <= alive:
        return None
    return report.world


def _spares(view: View, training: int | None) -> int:
    """How many members are ready to take over at once: a pod that runs has a Python to start before it is one.

    Without a report as many as were known.
    """
    report = view.report
    if report is None:
        return view.status.spare
    running = {p.name for p in view.pods if p is not None and p.main.running and not p.ended}
    ready = sum(m.state is MemberState.READY and m.pod in running for m in report.members)
    return ready if training is not None else max(0, ready - view.job.spec.nodes)


# --- Scheduled --------------------------------------------------------------------------------------------------


def _scheduled(view: View, alive: list[PodView], *, creating: bool) -> JobStatus:
    """The status with its condition Scheduled. `alive`: pods of slots that run or will."""
    status, spec, world = view.status, view.job.spec, view.world
    condition = partial(with_condition, status, ConditionType.SCHEDULED, now=view.now)

    if world.problems:
        remedy = "the pods stay as they are, and none is created until spec.podTemplate is corrected"
        return condition(False, "InvalidPodTemplate", f"{'; '.join(world.problems)} ({remedy})")
    if status.gang_waits and not world.serves_gangs:
        return condition(False, GANG_NOT_SERVED, _gang_not_served(volcano=spec.scheduling.by_volcano))
    if view.claim_problem is not None:
        return condition(False, view.claim_problem.reason, view.claim_problem.message)
    blocking = [rejection for rejection in world.rejections if not rejection.of_budget]
    if blocking:
        return condition(False, *_refused(view, alive, blocking[0]))
    before = status.condition(ConditionType.SCHEDULED)
    if creating and not world.rejections and before is not None and before.reason in (CREATION_REFUSED, NAME_IS_TAKEN):
        # The outcome of the next try is not known yet. Another reason in the meantime would be a write, which wakes
        # the job, which tries again: without end and without a pause.
        return status
    coordinator = view.coordinator
    dedicated = [coordinator] if coordinator is not None and coordinator.role is Role.COORDINATOR else []
    waiting = next((p for p in [*alive, *dedicated] if p.unschedulable and not p.host), None)
    if waiting is not None:
        message = f"pod {waiting.name}: {waiting.unschedulable}{_spread_hint(view, waiting)}"
        if status.gang_waits:
            message = _gang_waits(view, alive)
        return condition(False, "Unschedulable", message)
    by_volcano = status.gang_waits and spec.scheduling.by_volcano
    ignored = not_considered([*alive, *dedicated], spec.scheduling, view.now) if not by_volcano else None
    if ignored is not None:
        return condition(False, *ignored)
    placed = sum(bool(p.host) for p in alive) + sum(s.state is SlotState.SUCCEEDED for s in status.slots)
    if world.deletion_refused and placed < spec.pods:
        return condition(False, DELETION_REFUSED, deletion_refused(world))
    if placed >= spec.pods:
        budget = next((rejection for rejection in world.rejections if rejection.of_budget), None)
        if budget is None and creating and before is not None and before.status and _NO_BUDGET in before.message:
            return status  # As above.
        refused = f"; {budget.object} {_NO_BUDGET}: {budget.message}" if budget is not None else ""
        return condition(True, "AllPlaced", f"{_are_scheduled(spec.pods, spec.pods)}{refused}")
    message = f"{_are_scheduled(placed, spec.pods)}{_backing_off(status, view.now)}"
    if by_volcano and alive:
        group = gang_name(view.job, status.rendezvous.generation)
        message += (
            "; Volcano has said nothing of them yet: if that lasts, see whether their queue exists and is open, and "
            f"look at the events of PodGroup {group} (podgroups.scheduling.volcano.sh)"
        )
    return condition(False, "Placing", message)


def _are_scheduled(placed: int, pods: int) -> str:
    return f"{placed} of {count(pods, 'pod')} {'is' if 1 in (placed, pods) else 'are'} scheduled"


def _refused(view: View, alive: list[PodView], rejected: Rejection) -> tuple[str, str]:
    """Reason and message for an object that the API server refuses, with the field where it names none."""
    what = f"{rejected.object}{f' ({FIELD})' if rejected.is_claim else ''}: {rejected.message}"
    if rejected.name_taken:
        return NAME_IS_TAKEN, f"{what}; retried within {BLOCKED_POLL:.0f} s"
    if _NO_CLASS.search(rejected.message):
        what += "; what is judged is spec.scheduling.priorityClassName"
    elif rejected.of_gang:
        what += "; to have the pods scheduled one by one, without a gang, set scheduling.gang to false"
    if _OF_A_CONTAINER.search(rejected.message):
        of_coordinator = rejected.object.startswith(f"Pod {view.job.name}-coordinator-")
        what += f"; what is judged is {'spec.rendezvous.resources' if of_coordinator else 'spec.resources'}"
    if "violates PodSecurity" in rejected.message:
        where = "spec.podTemplate.spec.securityContext, or that of the container that it names"
        instead = "instead of hostPath and nfs use claims, and do without hostNetwork and hostPort"
        what += f"; set what is missing in {where}; {instead}"
    return CREATION_REFUSED, f"{what}; retried within a minute{_idle(view, alive)}"


_OF_A_CONTAINER = re.compile(r"usage per (Container|Pod) is|request ratio per (Container|Pod) is")
"""What a LimitRange refuses. It names no container."""
_NO_CLASS = re.compile(r"no PriorityClass with name \S+ was found")
"""Without it no pod is created either, one by one or as a gang."""
_NO_BUDGET = (
    "is refused, so that a drain may end several pods at once (scheduling.disruptionBudget: false does without)"
)


def deletion_refused(world: World) -> str:
    """That a pod stays, and that it is not the job's doing."""
    return f"the API server refuses the deletion of {world.deletion_refused}; retried within a minute"


def _gang_waits(view: View, alive: list[PodView]) -> str:
    """What a gang waits for, and how much of it the scheduler has found room for in its last try."""
    spec, gang = view.job.spec, view.status.gang
    nodes = gang.nodes if gang is not None else spec.nodes
    gpus = f" with {count(spec.gpus_per_node, 'GPU')} each" if spec.gpus_per_node else ""
    text = f"waits for {nodes} nodes{gpus} at once, and holds none meanwhile"
    judged = [pod for pod in alive if pod.unschedulable and not pod.host]
    fitting = [pod for pod in judged if _FITS in pod.unschedulable]
    short = next((pod for pod in judged if pod not in fitting), None)
    if len(judged) == nodes and not spec.scheduling.by_volcano:  # Which says no such thing.
        text += f"; {len(fitting)} of them would fit now"
    if short is None:
        return text + _backing_off(view.status, view.now)
    return f"{text}; pod {short.name}: {short.unschedulable}{_spread_hint(view, short)}"


_FITS = "waiting for minCount pods from a gang"
"""What kube-scheduler (1.36) says of a pod for which there is room, while there is none for others of its group."""
GANG_NOT_SERVED = "GangNotServed"


def _gang_not_served(*, volcano: bool) -> str:
    """Whose PodGroups are missing."""
    kubernetes = (
        "PodGroups in this cluster (scheduling.k8s.io/v1alpha2, of Kubernetes 1.36 with the feature gates "
        "GenericWorkload and GangScheduling)"
    )
    missing = "PodGroups of Volcano in this cluster (scheduling.volcano.sh/v1beta1)" if volcano else kubernetes
    return (
        f"scheduling.gang is true, and the operator finds no {missing}; leave scheduling.gang out, or set it to false, "
        "to have the pods scheduled one by one"
    )


def _idle(view: View, alive: list[PodView]) -> str:
    """What the pods that there are hold while they wait for those that are refused, and how to let them go."""
    spec, unknown = view.job.spec, view.report is None and view.status.holds(ConditionType.RUNNING)
    if not alive or unknown or _training(view) is not None:
        return ""
    wait = "waits" if len(alive) == 1 else "wait"
    gpus = len(alive) * spec.gpus_per_node
    held = f" with {count(gpus, 'GPU')}" if gpus else ""
    text = f"; meanwhile {len(alive)} of {count(spec.pods, 'pod')} {wait}{held}"
    return f"{text}: to let go of them, set runPolicy.suspend to true; to train with fewer, lower spec.nodes"


def _backing_off(status: JobStatus, now: datetime) -> str:
    held = [
        (s.not_before, i, s)
        for i, s in enumerate(status.slots)
        if s.state is SlotState.PLANNED and s.not_before and s.not_before > now
    ]
    if not held:
        return ""
    until, index, slot = min(held, key=lambda h: h[0])
    return f"; the next pod of index {index} is created at {until:%H:%M:%S} UTC ({why_held(slot)})"


def _spread_hint(view: View, pod: PodView) -> str:
    scheduling = view.job.spec.scheduling
    leaving = next((p for p in view.world.nodes() if p.deleted_at is not None and not p.ended), None)
    if leaving is not None and leaving.deleted_at is not None:
        until = f"{leaving.deleted_at:%H:%M:%S} UTC"
        return f" (pod {leaving.name} is still terminating and keeps its Kubernetes node until {until} at the latest)"
    if scheduling.same_topology and "pod affinity" in pod.unschedulable:
        return (
            f" (all pods share one {scheduling.same_topology}: where that of the placed ones has no room, "
            "runPolicy.suspend set to true and back to false lets the job choose again)"
        )
    if scheduling.one_pod_per_node and "anti-affinity" in pod.unschedulable:
        wanted = "spec.nodes and spec.spares" if view.job.spec.spares else "spec.nodes"
        return (
            f" (one pod per {scheduling.topology_key}: fewer Kubernetes nodes fit than {wanted} asks for; "
            "scheduling.onePodPerNode=false lets pods share one)"
        )
    return ""


# --- Running ----------------------------------------------------------------------------------------------------


def _running(view: View, training: int | None, running_pods: int) -> tuple[bool, str, str]:
    """Status, reason and message of the condition Running."""
    status, spec, report = view.status, view.job.spec, view.report
    wanted = spec.nodes
    if training is not None:
        return _group_runs(view, training)
    for pod in [view.coordinator, *view.pods]:
        held = stuck(pod, has_run=True) if pod and pod.deleted_at is None else None
        if held is not None and not (report is None and spec.fast and status.holds(ConditionType.RUNNING)):
            return False, held.reason, held.message + _secret_hint(view, held)
    finished = sum(s.state is SlotState.SUCCEEDED for s in status.slots)
    there = min(running_pods, wanted)
    present = f"{there} of {count(wanted, 'node')} {'runs' if 1 in (there, wanted) else 'run'}"
    if there + finished < spec.min_nodes and not (spec.under_torchrun and finished):
        needed = f"{spec.min_nodes} {'is' if spec.min_nodes == 1 else 'are'} needed"
        least = f", {needed}" if spec.min_nodes < wanted else ""
        reason, why = not_started([p for p in view.pods if p is not None], view.now) or (NODES_MISSING, "")
        return False, reason, present + least + (f"; {why}" if why else "")
    if not spec.under_torchrun:
        ended = f", {finished} {'has' if finished == 1 else 'have'} finished" if finished else ""
        return True, *(_waits_for_finished(view) or (NODES_RUN, present + ended))
    coordinator = view.coordinator
    waits = not_started([coordinator], view.now) if coordinator is not None and not status.rendezvous.endpoint else None
    if report is None and waits is not None and not status.holds(ConditionType.RUNNING):
        return False, waits[0], f"{present}; {waits[1]}"
    placed = coordinator is not None and coordinator.host
    if report is None and not placed and not status.holds(ConditionType.RUNNING):
        return False, NODES_MISSING, f"{present}; the coordinator's pod has no Kubernetes node yet"
    if report is None:
        return status.holds(ConditionType.RUNNING), "CoordinatorUnreachable", f"{present}; {_unreachable(view)}"
    if report.attempt and report.state == CoordinatorState.FORMING and status.holds(ConditionType.RUNNING):
        trains = "continues to train, while it connects" if there == 1 else "continue to train, while they connect"
        return True, "CoordinatorReplaced", f"{present} and {trains} to a new coordinator"
    if report.backoff_until is not None and report.backoff_until > view.now:
        until = f"{report.backoff_until:%H:%M:%S} UTC"
        return (
            False,
            "BackingOff",
            f"{present}; the next round starts at {until}: the same failure repeats without progress",
        )
    if spec.under_torchrun and (finished or report.state == CoordinatorState.SUCCEEDED):
        return (
            status.holds(ConditionType.RUNNING),
            "GroupFinished",
            "training has finished; the remaining pods are ending",
        )
    if report.state == CoordinatorState.RESTARTING and _has_just_broken(view):
        return False, GROUP_RESTARTS, f"{present}, and the group restarts"
    joining = f"{present} and {'is' if there == 1 else 'are'} joining the rendezvous"
    return False, "GroupForming", joining + _fetching(report)


def _waits_for_finished(view: View) -> tuple[str, str] | None:
    """Return reason and message if a pod of a `command` ended with 0 a while ago and another shows no progress."""
    over = [(p.main.finished, p.name) for p in view.pods if p is not None and p.ended and p.succeeded]
    at, name = min(((at, name) for at, name in over if at is not None), default=(None, ""))
    reported = known_time(_reported(view).get("updatedAt"))
    since = max(filter(None, (at, reported)), default=None)
    running = next((p.name for p in view.pods if p is not None and p.main.running), None)
    if at is None or running is None or since is None or view.now < since + LEFT_ALONE:
        return None
    return FINISHED_EARLY, (
        f"pod {name} has ended with exit code 0 at {format_time(at)}, and pod {running} still runs and reports no "
        "step. If its ranks wait for those of the other pod, they wait for ever: look at its log, and run "
        "`ddpjob restart` if it hangs"
    )


def _has_just_broken(view: View) -> bool:
    """Whether the group trained until a moment ago, and no restart says yet why it does not any more."""
    status, before = view.status, view.status.condition(ConditionType.RUNNING)
    if before is None or status.holds(ConditionType.RESTARTING) or status.round > view.job.status.round:
        return False
    return before.status or before.reason == GROUP_RESTARTS


def _fetching(report: Report) -> str:
    """How far the first of the pods has come that fetch storage.data.url."""
    notes = [note for note in report.notes if note.kind == DATA and note.why]
    notes.sort(key=lambda note: note.why == DATA_WAITS)
    others = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
    return f"; pod {notes[0].pod}{others}: {notes[0].why}" if notes else ""


def _secret_hint(view: View, held: Stuck) -> str:
    """What the Secret of the bucket must hold, where a container waits for it."""
    storage = view.job.spec.storage
    for name, volume in (("checkpoints", storage.checkpoints), ("data", storage.data)):
        secret = volume.secret_name if volume is not None else None
        if secret and held.reason == "CreateContainerConfigError" and secret in held.message:
            return (
                f"; spec.storage.{name}.secretName needs a Secret {secret} in namespace {view.job.namespace} with the "
                "keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: when it is there, the pod starts by itself"
            )
    return ""


UNREACHABLE = timedelta(minutes=1)
"""After so long it is worth an event: restarts of workers are neither counted nor shown meanwhile."""
UNREACHABLE_LONG = "meanwhile failures of workers are neither counted nor shown"


def _unreachable(view: View) -> str:
    """Since when the coordinator does not answer, which the message itself remembers."""
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
        text += f": training may continue, but {UNREACHABLE_LONG}; let the operator's pod reach port {port} of pods"
    before = last_step(known)
    return text if before is None else f"{text}; when it last did, the group had {_NO_STEP} {format_time(before)}"


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
            f"{run}, but the ranks form no group: the script makes steps without torch.distributed being initialized, "
            "so each rank trains a model of its own",
        )
    if training == wanted:
        return True, "GroupRuns", f"{_train(view, wanted)}{_finished_early(view)}{_without_count(view)}"
    if training > wanted:
        return True, "GroupShrinking", f"{_train(view, training)}, which is about to become {wanted}"
    some = f"{training} of {count(wanted, 'node')}"
    return True, "GroupRunsSmaller", f"{some} {_verb(view, training)}; {_missing(view)}"


def _without_steps(view: View, overdue: Overdue, training: int) -> str:
    """What is known of a group whose next step is overdue, with the stacks of its ranks; it stays the same."""
    known = last_step(view.status.condition(ConditionType.RUNNING))
    since = known if known is not None and abs(known - overdue.since) < _SAME_STEP else overdue.since
    said = f", while the script reports: {overdue.activity}" if overdue.activity else ""
    remedy = "to have groups without a step restarted, set recovery.hangAfterSeconds"
    text = (
        f"the group of {count(training, 'node')} has {_NO_STEP} {format_time(since)}, far beyond the job's own "
        f"pace{said}: {overdue.where}. It is left alone; {remedy}"
    )
    return f"{text}\n{overdue.traceback}" if overdue.traceback else text


_SAME_STEP = timedelta(minutes=1)
"""What a step's time may differ by from one report to the next: each is read by a new comparison of the clocks."""
_NO_STEP = "made no step since"
_LAST_STEP = re.compile(rf"{_NO_STEP} (\S+Z)")


def last_step(running: Condition | None) -> datetime | None:
    """When the group made its last step, if the next one is overdue: the condition's message remembers it."""
    said = _LAST_STEP.search(running.message) if running is not None else None
    return known_time(said[1]) if said else None


def _train(view: View, nodes: int) -> str:
    return f"{count(nodes, 'node')} {_verb(view, nodes)}"


def _verb(view: View, nodes: int) -> str:
    """What nodes do. That the ranks train one model is known once their steps have exchanged something."""
    if nodes == 1:
        return "trains"
    exchange = view.report is not None and view.report.progress.get(EXCHANGING)
    return "train as one group" if exchange else "run together"


def _finished_early(view: View) -> str:
    """Names a node whose program has ended with 0 while others still train: they wait for it in vain."""
    report = view.report
    members = () if report is None or report.state is not CoordinatorState.RUNNING else report.members
    finished = [m for m in members if m.state is MemberState.FINISHED]
    if not finished or len(finished) == len(members):
        return ""
    first = finished[0]
    ranks = "" if first.rank is None else f" ({ranks_of(first.rank, view.job.spec.procs_per_node)})"
    others, have = (f" and {len(finished) - 1} more", "have") if len(finished) > 1 else ("", "has")
    return f"; pod {first.pod}{ranks}{others} {have} already ended with exit code 0"


def _without_count(view: View) -> str:
    """What recovery.hangAfterSeconds is worth for a script whose steps nobody can count."""
    uncountable = view.report is not None and view.report.progress.get(UNCOUNTABLE)
    if not uncountable or view.job.spec.recovery.hang_after_seconds is None:
        return ""
    return (
        "; no step of this script can be counted, so recovery.hangAfterSeconds restarts it only if every rank stands "
        "still: have it call ddpjob_report.report() after each step"
    )


def _missing(view: View) -> str:
    """Why a group that may be smaller is smaller."""
    report = view.report
    reported = report.members if report is not None else ()
    present = {m.pod for m in reported if m.state is not MemberState.STARTING}
    silent = {m.pod for m in report.lost} if report is not None else set()
    for pod in view.pods:
        if pod is None or pod.ended or pod.name in present:
            continue
        if pod.main.running and pod.name in silent:
            return f"pod {pod.name} runs, but the coordinator does not hear from it"
        held = stuck(pod, has_run=True)
        if held is not None:
            return held.message
        if pod.unschedulable:
            return f"pod {pod.name} is not scheduled: {pod.unschedulable}"
        waits = not_considered([pod], view.job.spec.scheduling, view.now) or not_started([pod], view.now)
        return waits[1] if waits is not None else f"pod {pod.name} is starting"
    spare = view.status.spare
    if spare:
        return f"{spare} more {'joins' if spare == 1 else 'join'} at the next restart"
    scheduled = view.status.condition(ConditionType.SCHEDULED)
    if scheduled is not None and not scheduled.status and scheduled.reason != "Placing":
        return f"the missing pods are not created: {scheduled.reason}: {scheduled.message}"
    return "the missing pods are being created"


# --- Restarting and FastRecovery --------------------------------------------------------------------------------


def _restarting(view: View, running: bool, broke: list[Restart]) -> JobStatus:
    """True from a break until the group runs again; never for one that is over already when it is seen."""
    status, now = view.status, view.now
    if not broke and status.round > view.job.status.round and status.restarts.recent:
        broke = [status.restarts.recent[-1]]
    if broke and not (running and all(r.reason not in _BEFORE_THE_REPORT for r in broke)):
        last = next((r for r in reversed(broke) if not r.consequence), broke[-1])
        message = next(iter(cause_first(last.message).splitlines()), "")  # Of a user's coordinator: it may be empty.
        return with_condition(status, ConditionType.RESTARTING, True, last.reason, message, now)
    running = running and _has_resumed(view)
    if running and any(r.seconds is None for r in status.restarts.recent):
        status = replace(status, restarts=replace(status.restarts, recent=_timed(view)))
    if running and (broke or status.holds(ConditionType.RESTARTING)):
        known = view.job.spec.under_torchrun or _steps(_reported(view))
        reason, message = ("Recovered", "the group runs again") if known else (PODS_RUN, _PODS_RUN)
        return with_condition(status, ConditionType.RESTARTING, False, reason, message, now)
    return status


PODS_RUN = "PodsRunAgain"
_PODS_RUN = "the pods run again; no step is reported, so whether training has resumed is not known"


def _has_resumed(view: View) -> bool:
    """Whether the group that runs trains again, as far as can be known.

    With `command` nothing says when the group forms. A program that has reported steps before reports the next one to
    the new generation's coordinator, which has heard of none yet.
    """
    return view.job.spec.under_torchrun or not _steps(view.status.progress) or _steps(_reported(view))


def _reported(view: View) -> Mapping[str, Any]:
    """The progress of the present generation alone."""
    return view.report.progress if view.report is not None else {}


def _steps(progress: Mapping[str, Any]) -> bool:
    return any(is_number(progress.get(name)) for name in ("step", "epoch"))


def _timed(view: View) -> tuple[Restart, ...]:
    """Recent restarts, those that have ended with their duration in seconds.

    They end with the next step, if the coordinator hears of steps. Its measurement of the last one
    is finer than the time between two reconciles. Those that a suspension cut short have none: it took no recovery.
    """
    report = view.report
    if report is not None and report.recovery.down_since is not None and view.job.spec.under_torchrun:
        return view.status.restarts.recent
    measured = report.recovery.last_seconds if report is not None and report.recovery.down_since is None else None

    def seconds(restart: Restart, *, last: bool) -> float:
        seen = max(0.0, (view.now - restart.time).total_seconds())
        return round(min(seen, measured) if last and measured is not None else seen, 2 if measured is not None else 1)

    recent = view.status.restarts.recent
    return tuple(
        r
        if r.seconds is not None or view.status.ended_without_recovery(r)
        else replace(r, seconds=seconds(r, last=r.round == view.status.round))
        for r in recent
    )


def _fast_recovery(view: View) -> JobStatus:
    """In mode Fast: whether every pod of the group can do what the mode promises, once it runs or one cannot.

    A coordinator that takes over hears the pods one after the other.
    """
    status, report = view.status, view.report
    if not view.job.spec.fast:
        return without_condition(status, ConditionType.FAST_RECOVERY)
    if report is None or not report.members:
        return status
    notes = [note for note in report.notes if note.kind not in (PREFLIGHT, DATA)]
    if notes:
        first = notes[0]
        others = len({n.pod for n in notes}) - 1
        message = f"pod {first.pod}: {first.why}" + (f" (and {others} more)" if others else "")
        return with_condition(status, ConditionType.FAST_RECOVERY, False, first.kind, message, view.now)
    if report.state not in _FORMED:
        return status
    message = "workers start from a process that has imported torch"
    return with_condition(status, ConditionType.FAST_RECOVERY, True, "WarmWorkers", message, view.now)


def preflight_passed(view: View, restarts: tuple[Restart, ...], *, formed: bool) -> JobStatus:
    """With spec.preflight: which pod has not passed, until the group is `formed`; then what the links are like.

    `restarts` are new. A coordinator that took over has no notes until the pods are back: its predecessor's hold.
    """
    status, report, preflight = view.status, view.report, view.job.spec.preflight
    if preflight is None:
        return without_condition(status, ConditionType.PREFLIGHT_PASSED)
    condition = partial(with_condition, status, ConditionType.PREFLIGHT_PASSED, now=view.now)
    failed = [r for r in restarts if r.reason == Cause.PREFLIGHT_FAILED]
    if failed:
        return condition(False, Cause.PREFLIGHT_FAILED, failed[-1].message)
    if not formed or report is None:
        return status
    note = next((n for n in reversed(report.notes) if n.kind == PREFLIGHT), None)
    if note is not None:
        return condition(True, "LinksChecked", note.why)
    if preflight.scope is PreflightScope.NODE:
        return condition(True, "NodesChecked", "every node of the group has passed the check of its devices and folder")
    return status


def _isolated(view: View) -> JobStatus:
    """What prevents the isolation that spec.network asks for; no condition where nothing does."""
    status, spec, world = view.status, view.job.spec, view.world
    condition = partial(with_condition, status, ConditionType.ISOLATED, now=view.now)

    if world.policy_refused:
        reached = "pods of others reach this job's; the operator tries again with the job's next pod"
        return condition(False, "PolicyRefused", f"NetworkPolicy {world.policy}: {world.policy_refused}; {reached}")
    if spec.network.isolate and spec.on_host_network:
        why = "with podTemplate.spec.hostNetwork no NetworkPolicy applies to the job's pods"
        return condition(False, "HostNetwork", f"{why}; if this is intended, set spec.network.isolate to false")
    if not world.policy:
        return without_condition(status, ConditionType.ISOLATED)
    if world.has_policy and status.condition(ConditionType.ISOLATED) is not None:
        return condition(True, "PolicyExists", f"NetworkPolicy {world.policy}")
    return status


def _nodes_healthy(view: View) -> JobStatus:
    """Which pods stay on unhealthy Kubernetes nodes, and why; no condition where none ever did."""
    status = view.status
    staying = [verdict for verdict in judge_nodes(view) if verdict.reason]
    condition = partial(with_condition, status, ConditionType.NODES_HEALTHY, now=view.now)
    if staying:
        first, more = staying[0], len(staying) - 1
        others = f" (and {count(more, 'more pod')})" if more else ""
        return condition(False, first.reason, f"{first.end.message}; the pod stays: {first.why}{others}")
    if status.holds(ConditionType.NODES_HEALTHY) or status.condition(ConditionType.NODES_HEALTHY) is None:
        return status
    return condition(True, "AllHealthy", "no pod runs on a Kubernetes node that is known to be unhealthy")


def _ranks_ordered(view: View, training: int | None) -> JobStatus:
    """The order of the ranks of a group that trains, and whether it is that of spec.rankOrder."""
    status, report, wanted = view.status, view.report, view.job.spec.rank_order
    if not wanted:
        status = without_condition(status, ConditionType.RANKS_ORDERED)
    if training is None or report is None:
        return status
    ranked = sorted((m.rank, m.index, m.pod) for m in report.members if m.state in _IN_GROUP and m.rank is not None)
    indices = tuple(index for _, index, _ in ranked)
    known = len(set(indices)) == len(indices) and all(status.slot(index) is not None for index in indices)
    status = replace(status, rank_order=indices if known and list(indices) != sorted(indices) else ())
    if not wanted:
        return status
    verdict = judge_order(view, report, [pod for _, _, pod in ranked])
    return with_condition(status, ConditionType.RANKS_ORDERED, *verdict, view.now)


COPIES_BEHIND, NO_COPIES = "CopiesBehind", "NoCopies"
BEHIND_SECONDS = 600
FIRST_COPY = timedelta(minutes=30)
"""After so long without a restart a job has saved something, if it copies at all."""


def _checkpoints_copied(view: View) -> JobStatus:
    """Whether checkpoints reach the bucket, by what the script reports; no condition where they always did."""
    status, url = view.status, view.job.spec.storage.url
    condition = partial(with_condition, status, ConditionType.CHECKPOINTS_COPIED, now=view.now)
    before = status.condition(ConditionType.CHECKPOINTS_COPIED)
    metrics = view.reported_progress.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    behind, step = metrics.get(COPY_BEHIND), metrics.get(COPY_STEP)
    where = url or "its bucket"
    if is_number(behind) and behind > BEHIND_SECONDS:
        newest = f"the newest there is of step {step:.0f}" if is_number(step) else "none of this start is there"
        text = f"no checkpoint has reached {where} for more than 10 minutes, {newest}: training continues, and the loss"
        return condition(False, COPIES_BEHIND, f"{text} of rank 0's pod would cost what came since; its log says why")
    running = status.condition(ConditionType.RUNNING)
    long = running is not None and running.status and view.now - running.since >= FIRST_COPY
    if url and behind is None and step is None and long:
        return condition(
            False,
            NO_COPIES,
            f"the program has reported no copy to {url} in more than 30 minutes; what it saves in its folder alone is "
            "lost with the pod: have it call ddpjob_report.restore_checkpoint and copy_checkpoint, or use a claim",
        )
    if before is None or before.status or (behind is None and step is None):
        return status
    return condition(True, "Copied", f"checkpoints reach {where}")
