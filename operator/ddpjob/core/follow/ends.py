"""The first stage of `follow`, which finds the pods that ended since the last reconcile, and the
reasons.

Each slot is compared with its pod, and the coordinator with its own pod. A pod has ended if it can
no longer be used. It may have exited, vanished or been silent for too long, its image may be for a
different platform, or it may have to leave an unhealthy or slow host. Each end gets its cause here.
`attribution` then decides whether the end is the cause of a break or a consequence.

Some ends look like a host's fault but are the job's own. They become InitFailure, which fails a job
before its first step:

- a container that cannot start because the job's program is missing, or that fails to start on two
  hosts
- a preflight that no pod passes (`_judge_preflights`)

The opposite case is a coordinator that ends before the operator has reached it. The operator first
suspects the host, and starts the next coordinator on a different host (`_suspect_host`).

Example of containers that cannot start:

    exec: "python3": executable file not found      InitFailure: the image lacks the program
    a GPU hook fails on host a                      StartError: the next pod avoids host a
    the hook also fails on host b                   InitFailure: two hosts, so the job is at fault
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ddpjob_runtime.protocol import MemberState

from ddpjob.api.job_spec import Placement
from ddpjob.api.job_status import Slot, SlotState
from ddpjob.core.failures.avoided_nodes import RECENT
from ddpjob.core.failures.classify import (
    Cause,
    End,
    explain_end,
    explain_vanished,
    find_wrong_platform,
    is_about_platform,
    names_entry_point,
)
from ddpjob.core.failures.liveness import is_given_up, lost_since
from ddpjob.core.failures.node_health import judge_nodes
from ddpjob.core.failures.slow_ranks import judge_slow_ranks
from ddpjob.core.plan.slots import QUICK
from ddpjob.core.view import View
from ddpjob.core.world import (
    COORDINATOR_CONTAINER,
    PodView,
    Role,
    coordinator_pod_name,
    host_port,
    is_down,
    node_pod_name,
    platform_of,
)

UNPREPARED = timedelta(seconds=60)
"""How long a coordinator's pod may wait for its volumes and network. The volumes are only a
ConfigMap and folders on the host, so they are normally ready sooner."""
_PASSED = frozenset({MemberState.READY, MemberState.RUNNING, MemberState.FINISHED})
"""States of members that have passed the preflight on their node."""


@dataclass(frozen=True)
class Ended:
    """A slot's or coordinator's pod that can no longer be used."""

    end: End
    pod: PodView | None
    """The pod; None if it has vanished."""
    name: str


@dataclass(frozen=True)
class Ends:
    """The pods that have ended, and the view to continue with.

    The view's status has the current states of the slots and of the coordinator.
    """

    view: View
    slots: dict[int, Ended]
    """The slots' pods that have ended, by slot index."""
    coordinator: Ended | None

    @property
    def all(self) -> list[Ended]:
        """All pods that have ended: the slots' pods, and then the coordinator's."""
        return [*self.slots.values(), *([self.coordinator] if self.coordinator is not None else [])]


def find_ends(view: View) -> Ends:
    """Return the pods of the current generation that have ended, with the reasons."""
    view, slots = _follow_slots(view)
    view, coordinator = _follow_coordinator(view)
    ends = Ends(view, slots, _suspect_host(view, coordinator))
    return _judge_preflights(_judge_start_errors(ends))


def _follow_slots(view: View) -> tuple[View, dict[int, Ended]]:
    slots, ends = [], dict[int, Ended]()
    slow = {verdict.index: verdict.end for verdict in judge_slow_ranks(view) if not verdict.why}
    leaving = slow | {verdict.index: verdict.end for verdict in judge_nodes(view) if not verdict.reason}
    for index, (slot, pod) in enumerate(zip(view.status.slots, view.pods, strict=True)):
        since = _silent_since(view, slot, pod)
        state, end = _follow_slot(view, index, slot, pod)
        if since is not None and end is None and pod is not None and is_given_up(view, pod, since):
            state, end = SlotState.FAILED, _host_lost(view, pod, since)
        if end is None and index in leaving:
            state, end = SlotState.FAILED, leaving[index]
        node = pod.host if pod else slot.node
        same = (slot.state, slot.node, slot.lost_since) == (state, node, since)
        slots.append(slot if same else replace(slot, state=state, node=node, lost_since=since))
        if end is not None:
            ends[index] = Ended(end, pod, node_pod_name(view.job, index, slot.attempt))
    return view.with_slots(slots), ends


def _silent_since(view: View, slot: Slot, pod: PodView | None) -> datetime | None:
    """Return the time at which a slot's pod fell silent; None if the pod is not silent.

    If the exact time is unknown, the slot remembers the time of the first reconcile that saw the
    silence.
    """
    since = lost_since(pod, view.world, view.now) if pod is not None else None
    return min(since, slot.lost_since) if since is not None and slot.lost_since is not None else since


def _host_lost(view: View, pod: PodView, since: datetime | None) -> End:
    seconds, hosts = _seconds(view, since), view.world.hosts
    if not is_down(pod.host, hosts):
        return End(Cause.NODE_LOST, f"pod {pod.name} on Kubernetes node {pod.host} has been silent for {seconds} s")
    what = "has been deleted" if (hosts or {})[pod.host].deleted else f"has not been ready for {seconds} s"
    return End(Cause.NODE_LOST, f"Kubernetes node {pod.host} of pod {pod.name} {what}")


def _seconds(view: View, since: datetime | None) -> int:
    return round((view.now - (since or view.now)).total_seconds())


def _follow_slot(view: View, index: int, slot: Slot, pod: PodView | None) -> tuple[SlotState, End | None]:
    hosts, launcher = view.world.hosts, view.job.spec.under_torchrun
    if slot.state in (SlotState.SUCCEEDED, SlotState.LOST):
        return slot.state, None
    if pod is None:
        name = node_pod_name(view.job, index, slot.attempt)
        last = view.world.last_of(name)
        if slot.state is SlotState.PLANNED and last is None:
            return slot.state, None
        if last is not None and is_success(last, launcher=launcher):
            # The pod was removed between two reconciles, for example by a cleanup tool.
            return SlotState.SUCCEEDED, None
        return SlotState.LOST, explain_vanished(name, slot.node, hosts, last, launcher=launcher)
    if is_success(pod, launcher=launcher):
        return SlotState.SUCCEEDED, None
    if pod.ended or pod.deleted_at is not None:
        return SlotState.FAILED, explain_end(pod, hosts, launcher=launcher)
    group = view.status.rendezvous.generation
    if pod.generation < group:
        # The pod belongs to an earlier coordinator, which the operator no longer follows. Either
        # the status was changed manually, or the pod was created late.
        why = f"pod {pod.name} belongs to generation {pod.generation}, but the group is at generation {group}"
        return SlotState.FAILED, End(Cause.RENDEZVOUS_LOST, why)
    elsewhere = find_wrong_platform(pod)
    if elsewhere is not None:
        return SlotState.FAILED, elsewhere
    return (SlotState.RUNNING if pod.main.running else SlotState.CREATED), None


def is_success(pod: PodView, *, launcher: bool) -> bool:
    """Whether the program has finished its work.

    The launcher exits with 0 only once every program has finished. A user's program may also exit
    with 0 after it has saved on SIGTERM, so that exit code proves nothing while the pod is being
    deleted.
    """
    return pod.ended and pod.succeeded and (launcher or pod.deleted_at is None)


def _follow_coordinator(view: View) -> tuple[View, Ended | None]:
    """Return the view with the coordinator's state and endpoint, and the coordinator's end.

    The end is None if the coordinator has not ended. With Master placement, the coordinator is a
    container in slot 0's pod.
    """
    job, rendezvous, hosts, pod = view.job, view.status.rendezvous, view.world.hosts, view.coordinator
    name = coordinator_pod_name(job, rendezvous.generation, rendezvous.attempt)
    if pod is None:
        dedicated = job.spec.rendezvous.placement is Placement.DEDICATED
        last = view.world.last_of(name)
        gone = dedicated and (rendezvous.state is not SlotState.PLANNED or last is not None)
        return view, (Ended(explain_vanished(name, "", hosts, last), None, name) if gone else None)
    container = pod.containers.get(COORDINATOR_CONTAINER)
    dedicated = pod.role is Role.COORDINATOR
    if dedicated and ((container is not None and container.ended) or pod.ended or pod.deleted_at is not None):
        return view, Ended(explain_end(pod, hosts), pod, name)
    if container is not None and container.ended:
        # Judge the coordinator as if it were the only container of its pod.
        alone = replace(pod, role=Role.COORDINATOR, containers={COORDINATOR_CONTAINER: container})
        return view, Ended(explain_end(alone, hosts), pod, name)
    since = lost_since(pod, view.world, view.now) if dedicated else None
    if is_given_up(view, pod, since):
        return view, Ended(_host_lost(view, pod, since), pod, name)
    if job.spec.fast and is_given_up(view, pod, view.world.deaf_since):
        why = f"pod {name} has not heard from most of the other pods for {_seconds(view, view.world.deaf_since)} s"
        return view, Ended(End(Cause.RENDEZVOUS_LOST, f"{why}, although their Kubernetes nodes are ready"), pod, name)
    running = container is not None and container.running
    endpoint = host_port(pod.address, job.spec.rendezvous.endpoint_port) if pod.address else ""
    state = SlotState.RUNNING if running else SlotState.CREATED
    status = replace(view.status, rendezvous=replace(rendezvous, state=state, endpoint=endpoint))
    return view.with_status(status), None


def _judge_start_errors(ends: Ends) -> Ends:
    """Return the ends, with InitFailure as the cause of start errors that are the job's fault.

    A start error is the job's fault if the job's own program is missing from the image. Before the
    first step, it is also the job's fault if containers could not start on two hosts. If the image
    is for a different platform, and the cluster has a ready host with another platform, the hosts
    are at fault.
    """
    view = ends.view
    hosts = {e.pod.host for e in ends.all if e.pod is not None and e.end.cause is Cause.START_ERROR}
    hosts |= {r.node for r in view.status.restarts.recent if r.node and r.reason == Cause.START_ERROR}
    everywhere = len(hosts) > 1 and not view.trained

    def judge(ended: Ended) -> Ended:
        if ended.end.cause is not Cause.START_ERROR:
            return ended
        if is_about_platform(ended.end) and _has_other_platform(view, hosts):
            return ended
        program = () if ended is ends.coordinator else view.job.spec.command
        if not everywhere and not names_entry_point(ended.end, program):
            return ended
        return replace(ended, end=replace(ended.end, cause=Cause.INIT_FAILURE))

    slots = {i: judge(e) for i, e in ends.slots.items()}
    return Ends(view, slots, judge(ends.coordinator) if ends.coordinator is not None else None)


def _has_other_platform(view: View, hosts: set[str]) -> bool:
    """Whether any ready Kubernetes node has a platform that none of these `hosts` has."""
    known = view.world.hosts or {}
    failed = {platform_of(known[name]) for name in hosts if name in known}
    return any(host.ready and platform_of(host) not in failed for host in known.values())


def _suspect_host(view: View, ended: Ended | None) -> Ended | None:
    """Return the coordinator's end; blame its host if the operator never reached the coordinator.

    An end that is blamed on the host does not count, and the next coordinator starts on a different
    host. If the job already avoids a host because of a start error, no second host is blamed,
    because the fault is more likely in the program. If the image does not fit the host's platform,
    this fault is always the cause.
    """
    pod, report, rendezvous = view.coordinator, view.report, view.status.rendezvous
    if pod is None or pod.role is not Role.COORDINATOR or not pod.host or pod.deleted_at is not None:
        return ended
    if view.world.one_host or (report is not None and report.attempt == rendezvous.attempt):
        return ended
    platform = find_wrong_platform(pod) if ended is None else None
    if platform is not None:
        return Ended(platform, pod, pod.name)
    if any(avoided.reason.startswith(Cause.START_ERROR) for avoided in view.status.avoided_nodes):
        return ended
    where = f"the coordinator's pod {pod.name} on Kubernetes node {pod.host}"
    if ended is None and pod.prepared is False and view.now - (pod.scheduled or view.now) >= UNPREPARED:
        why = f"{where} has waited {_seconds(view, pod.scheduled)} s for its volumes or network"
        return Ended(End(Cause.START_ERROR, f"{why}; the next coordinator starts elsewhere"), pod, pod.name)
    if ended is None or ended.end.cause is not Cause.EXIT_CODE or not _ended_soon(view, pod):
        return ended
    why = f"{where} ended before the operator reached it, so the next coordinator starts elsewhere: {ended.end.message}"
    return replace(ended, end=replace(ended.end, cause=Cause.START_ERROR, message=why))


def _ended_soon(view: View, pod: PodView) -> bool:
    began, over = pod.main.started or pod.created, pod.main.finished or view.now
    return began is not None and over - began < QUICK


def _judge_preflights(ends: Ends) -> Ends:
    """Return the ends, with InitFailure as the cause of failed preflights that no pod can pass.

    Typical reasons are a folder that the job cannot write to, and a wrong gpusPerNode. The cause
    changes only before the first step, and only after many preflights have failed: more than two
    per slot, or more than the status can list.
    """
    view = ends.view
    failed = {i: e for i, e in ends.slots.items() if e.end.cause is Cause.PREFLIGHT_FAILED}
    before = sum(r.reason == Cause.PREFLIGHT_FAILED for r in view.status.restarts.recent)
    passed = view.report is not None and any(m.state in _PASSED for m in view.report.members)
    if passed or view.trained or before + len(failed) <= min(2 * len(view.status.slots), RECENT):
        return ends
    why = "no pod has passed the preflight: "
    judged = {
        i: replace(e, end=replace(e.end, cause=Cause.INIT_FAILURE, message=why + e.end.message))
        for i, e in failed.items()
    }
    return replace(ends, slots=ends.slots | judged)
