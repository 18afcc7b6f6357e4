"""Decides which pods form the gang, and when a job gives up its nodes to wait for a new gang.

If a scheduler places pods one by one, two jobs may wait for each other forever, each with half of
its pods. Only the scheduler can prevent this, so the operator creates a PodGroup, which the
scheduler places as a whole.

- A generation's gang is its first `min_nodes` slots and the coordinator's own pod. Spares and nodes
  beyond `elastic.minNodes` are created later, so they neither delay the gang nor take its room.
- Once all its pods have been seen on hosts at the same time, the gang is placed (`with_placed`),
  and remains so in this generation. Later pods are not in a PodGroup, because Kubernetes 1.36 does
  not schedule a PodGroup's pods while fewer pods exist than the PodGroup's minimum.
- A job whose gang has been placed can later be stuck with half of its nodes. It then yields: it
  gives up all its nodes and waits as a new gang. It does so if it has held nodes for YIELD without
  training, and the scheduler finds no room for a pod that the job needs. After a preemption that
  leaves too few nodes, it yields immediately. But pods that hold the only copy of the job's latest
  state stay (`only_copy`), unless another job waits for room.

Example of two jobs with 4 nodes each on a cluster with 6:

    both wait; A's gang is placed: 4 nodes and its coordinator. B holds no nodes
    one of A's machines dies; the replacement needs no PodGroup, and takes 1 of the 2 free machines
    two more of A's machines die while 1 machine is free: A holds 3 of 4 nodes and cannot train
    30 s later A yields. A's new gang and B's gang each wait for 4 nodes at once

Why: docs/decisions/0016.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

from ddpjob.api.job_spec import Placement
from ddpjob.api.job_status import ConditionType, GangStatus, JobStatus, Slot, SlotState
from ddpjob.core.only_copy import find_holders
from ddpjob.core.status.messages import count
from ddpjob.core.view import View
from ddpjob.core.world import ANNOTATION_GROUP

YIELD = timedelta(seconds=30)
"""How long a group that cannot train may hold its nodes while there is no room for a missing
pod."""


def plan_gang(view: View) -> GangStatus | None:
    """Return the gang of a new generation; None if its pods are placed one by one."""
    spec = view.job.spec
    wanted = spec.scheduling.gang
    if wanted is None:
        meta, template = spec.pod_template.get("metadata") or {}, spec.pod_template.get("spec")
        grouped = isinstance(template, Mapping) and "schedulingGroup" in template
        own = grouped or ANNOTATION_GROUP in (meta.get("annotations") or {})
        known = spec.scheduling.by_volcano or not spec.scheduling.scheduler_name
        wanted = view.world.serves_gangs and not own and known
    return GangStatus(nodes=spec.min_nodes) if wanted and spec.min_nodes > 1 else None


def is_unserved(view: View) -> bool:
    """Whether the job waits for a gang although the cluster does not serve PodGroups.

    This happens if the user has set scheduling.gang to true.
    """
    return view.status.gang_waits and not view.world.serves_gangs


def is_outdated(view: View) -> bool:
    """Whether the current settings require a different gang, and the gang can still be changed.

    A PodGroup's size cannot change, so a waiting gang is replaced. A suspended job has no pods, so
    it resumes with the current settings.
    """
    status = view.status
    if not status.gang_waits and not status.holds(ConditionType.SUSPENDED):
        return False
    return status.gang != plan_gang(view)


def with_placed(view: View) -> JobStatus:
    """Return the status, with the gang marked as placed once all its pods are on hosts."""
    status = view.status
    if status.gang is None or status.gang.placed:
        return status
    members = list(view.pods[: status.gang.nodes])
    if view.job.spec.rendezvous.placement is Placement.DEDICATED:
        members.append(view.coordinator)
    if not all(pod is not None and pod.host for pod in members):
        return status
    return replace(status, gang=replace(status.gang, placed=True))


def is_broken_up(view: View, kept: list[Slot]) -> bool:
    """Whether a preempted group has too few pods left, so it must wait as a gang again.

    The scheduler preempts pods only if there is no other room, so not even one replacement would
    find room. `kept` are the slots that still have their pods. If only these pods hold the latest
    state, they stay until another job waits for room.
    """
    if find_holders(view) and not view.world.others_wait:
        return False
    held = sum(bool(slot.node) and slot.state in (SlotState.CREATED, SlotState.RUNNING) for slot in kept)
    return view.status.gang is not None and view.status.gang.placed and held < view.job.spec.min_nodes


def explain_yield(view: View) -> str:
    """Return why the job gives up its nodes and waits as a gang again; empty if it keeps its nodes.

    A job gives up its nodes if two conditions are met: the job has held nodes for YIELD without
    training, and the scheduler finds no room for a pod that the job needs. The job first waits
    until its own terminating pods have ended, because they may occupy that room.
    """
    status, spec, now = view.status, view.job.spec, view.now
    running, scheduled = (status.condition(kind) for kind in (ConditionType.RUNNING, ConditionType.SCHEDULED))
    if status.gang is None or not status.gang.placed or running is None or scheduled is None:
        return ""
    if running.status or scheduled.status or any(p.deleted_at is not None and not p.ended for p in view.world.pods):
        return ""
    alive = [pod for pod in view.pods if pod is not None and not pod.ended]
    held = [pod for pod in alive if pod.host]
    needed = alive if len(held) < spec.min_nodes else []
    lacking = [p for p in (view.coordinator, *needed) if p is not None and p.unschedulable and not p.host and p.created]
    if not held or not lacking:
        return ""
    first, holders = lacking[0], find_holders(view)
    if now - max(running.since, scheduled.since, first.created or now) < YIELD:
        return ""
    if holders and not view.world.others_wait:
        return ""
    cost = ""
    if holders:
        cost = f"; another job waits for room, so the only copy of the newest state (in pod {min(holders)}) is lost"
    return (
        f"{count(len(held), 'pod')} {'has' if len(held) == 1 else 'have'} held a Kubernetes node for {YIELD.seconds} s "
        f"without training, because there is no room for pod {first.name}. The job releases its pods and waits for "
        f"room for {spec.min_nodes} nodes at once{cost}"
    )
