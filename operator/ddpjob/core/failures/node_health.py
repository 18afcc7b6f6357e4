"""Decides which pods to replace because of an unhealthy Kubernetes node or a broken container.

Here a node is a Kubernetes node. Health agents mark nodes that are about to fail, and the pods on a
marked node should move before the node fails (`judge_nodes`). But agents may be wrong, so there are
limits:

- A sign must last for LASTS. If more than SHARE of the nodes of one kind show a sign, no pod moves.
- A job leaves the same node at most once an hour, and only if a spare or another node can take
  over.
- It is unknown whether another node has room. Without a spare, the unhealthy node itself must
  therefore be able to take the pod back.

A failed worker is restarted in its pod. That does not help if the container or the node is broken,
so such a pod is replaced (`judge_failing`):

- immediately, if the failure's message shows that the container has lost its device, as happens
  after the host's systemd is reloaded. A new container has the device again, even on the same node.
- after its second failure in a row, if no other pod failed in between. No pod moves because of an
  error in the program's code, which would occur in every pod, or because of an error that ranks of
  other pods had in the same round. A program that fails for only one rank causes at most MAX_MOVES
  moves an hour.
- after its third lost connection in a row, if another pod runs on a third node. With only two nodes
  it is unknown whether the pod's or the coordinator's node is partitioned. Lost connections do not
  count against the budget, so without this rule a pod could lose its connection forever.

Example: rank 3's GPU begins to fail.

    first CUDA error     the worker restarts in its pod; the failure counts
    second CUDA error    the pod is replaced by a spare or by a new pod on another node; this
                         failure does not count, because the first one has already counted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from ddpjob_runtime.protocol import CoordinatorState, MemberState

from ddpjob.api.job_spec import JobSpec
from ddpjob.api.job_status import PodChanges, QueueStatus, Restart, SlotState
from ddpjob.core.failures.avoided_nodes import RECENT, WINDOW
from ddpjob.core.failures.classify import PLANNED, Cause, End, without_wait
from ddpjob.core.failures.policy import COUNTED, find_lost_device, names_program_error
from ddpjob.core.only_copy import ONLY_COPY, STATE, find_holders
from ddpjob.core.view import View
from ddpjob.core.world import ANNOTATION_WORKLOAD, TRAINER_CONTAINER, HostView, PodView

LASTS = timedelta(seconds=60)
"""How long a node must have been unhealthy, by the operator's clock, before pods leave it. No pod
moves if the node becomes healthy sooner."""
SHARE = 0.25
"""Maximum share of unhealthy nodes among nodes of one kind. If a larger share is unhealthy, the
agent may be broken, or the other nodes may be no better."""
MAX_MOVES = 3
"""Maximum number of moves within an hour. More moves would cost more than they could save."""
LINK_LOSSES = 3
"""Number of consecutive lost connections after which a pod is replaced. Two consecutive worker
failures are enough to replace a pod, but a restarting switch can cause two lost connections."""
_BEYOND = (
    "that depends on the required affinity, spread constraints, claims or quantities in podTemplate and resources, "
    "or on the queue's topology"
)


@dataclass(frozen=True)
class NodeVerdict:
    """The decision on whether a pod leaves a node that has been unhealthy for LASTS."""

    index: int
    end: End
    """Cause and message to record as the pod's end if the pod is moved. If the pod stays, users see
    only the message."""
    reason: str = ""
    """The `reason` of the condition that says why the pod stays; empty if the pod is moved."""
    why: str = ""
    """Why the pod stays, as a message for users."""


def judge_nodes(view: View) -> list[NodeVerdict]:
    """Decide which slots' pods leave their unhealthy nodes, in the order of indices.

    The result is empty once one of the job's nodes has finished, because the job is about to
    finish.
    """
    hosts = view.world.hosts
    if not hosts or any(slot.state is SlotState.SUCCEEDED for slot in view.status.slots):
        return []
    found = []
    for index, pod in enumerate(view.pods):
        trains = pod is not None and pod.main.running and not pod.ended and pod.deleted_at is None
        host = hosts.get(pod.host) if pod is not None and trains else None
        if pod is not None and host is not None and _lasts(view, host):
            message = f"Kubernetes node {host.name} of pod {pod.name} is unhealthy: {host.unhealthy}"
            found.append((index, pod, host, End(Cause.NODE_UNHEALTHY, message)))
    if not found:
        return []
    within = [r for r in view.status.restarts.recent if r.time > view.now - WINDOW]
    recent = [r for r in within if r.reason == Cause.NODE_UNHEALTHY]
    # The list of recent restarts has a limited length. A full list may lack earlier moves, so a
    # full list means that the limit on moves counts as reached.
    often = len({r.round for r in recent}) >= MAX_MOVES or len(within) >= RECENT
    left = {r.node for r in recent}
    left |= {a.node for a in view.status.avoided_nodes if a.reason.startswith(Cause.NODE_UNHEALTHY)}
    wants = Wants.of(view.job.spec, view.status.queue)
    own = {host.name for _, _, host, _ in found}
    kin = [host for host in hosts.values() if not host.deleted and (host.name in own or wants.kind(host))]
    storm = sum(bool(host.unhealthy) for host in kin) > max(1, SHARE * len(kin))
    spares, places = len(ready_spares(view)), 0 if wants.more else _places(view, wants)
    holders, moved = find_holders(view), set[str]()
    verdicts = []
    for index, pod, host, end in found:
        if storm:
            # The message omits the number of unhealthy nodes, because the status would be written
            # again each time the number changes.
            reason, why = (
                "TooManyUnhealthy",
                "more than a quarter of the Kubernetes nodes of the same kind are unhealthy",
            )
        elif host.name in left:
            reason, why = (
                "MovedBefore",
                "the job left this Kubernetes node within the last hour, but its pod was placed there again",
            )
        elif _came_after(pod, host):
            reason, why = "PlacedThere", "the scheduler chose this Kubernetes node when it was already unhealthy"
        elif often:
            reason = "MovedTooOften"
            why = f"within the last hour, pods were moved {MAX_MOVES} times, or the job restarted {RECENT} times"
        elif holders - moved == {pod.name}:
            reason, why = ONLY_COPY, f"only this pod holds {STATE}; set storage.checkpoints to let it move"
        elif spares:
            reason, why, spares = "", "", spares - 1
        elif wants.more:
            reason, why = (
                "NoOtherNode",
                f"no spare is ready, and only the scheduler can tell where this pod fits: {_BEYOND}",
            )
        elif not wants.admitted_to(host):
            why = (
                "no spare is ready, and this Kubernetes node is cordoned or tainted, so it could not take the pod back"
            )
            reason = "NoOtherNode"
        elif not places:
            reason, why = "NoOtherNode", "no spare is ready, and no known Kubernetes node has room for this pod"
        else:
            reason, why, places = "", "", places - 1
        if not reason:
            moved.add(pod.name)
        verdicts.append(NodeVerdict(index, end, reason, why))
    return verdicts


_OF_PLACES = frozenset({Cause.WORKER_FAILED, Cause.HANG})
"""Failures that leave the pod alive and may be the node's fault. Exceeded memory or storage
limits are not included, because they are the job's own fault."""
MOVE_CAUSES = (Cause.NODE_UNHEALTHY, Cause.POD_UNHEALTHY, Cause.SLOW_RANK)


@dataclass(frozen=True)
class Failing:
    """A living pod that is replaced because its ranks failed."""

    number: int
    """The position of the failure in the sequence that `judge_failing` received."""
    index: int
    failure: Restart
    """The failure as recorded in the status. The failure does not count if an
    earlier failure on this node has already counted (`_has_counted`)."""
    end: End


def judge_failing(view: View, failures: Sequence[Restart]) -> list[Failing]:
    """Return the pods that must be replaced because of these new failures.

    The view's status does not contain these failures yet. In a cluster with only one host, no pod
    is replaced, because a new pod would run on the same host.
    """
    if view.world.one_host:
        return []
    within = [r for r in view.status.restarts.recent if r.time > view.now - WINDOW]
    found: list[Failing] = []
    for number, failure in enumerate(failures):
        earlier = [*within, *failures[:number]]  # An operator that was down may see several failures at once.
        index = failure.index if view.status.slot(failure.index) is not None else None
        pod = view.pods[index] if index is not None else None
        if index is None or pod is None or pod.name != failure.pod or pod.ended or pod.deleted_at is not None:
            continue
        judged = failure.reason in _OF_PLACES or failure.reason == Cause.PEER_LOST
        if failure.consequence or not judged or any(f.index == index for f in found):
            continue
        why = _why_it_leaves(view, failure, earlier)
        if why and _has_a_place(view, pod):
            where = f" on Kubernetes node {pod.host}" if pod.host else ""
            last = without_wait(failure.message).partition("\n")[0]
            message = f"pod {pod.name}{where} is being replaced, because {why}; last failure: {last}"
            end = End(Cause.POD_UNHEALTHY, message, time=view.now)
            counted = failure.counted and not _has_counted(failure, earlier)
            found.append(Failing(number, index, replace(failure, counted=counted), end))
    return found


def _why_it_leaves(view: View, failure: Restart, within: Sequence[Restart]) -> str:
    """Return why the pod must be replaced after this failure; empty if it may stay."""
    if failure.reason == Cause.PEER_LOST:
        often = _link_breaks(view, failure, within) and not _has_moved_too_often(view, within)
        return f"it lost its connection {LINK_LOSSES} times in a row while no other pod did" if often else ""
    said = find_lost_device(view.job.spec, failure.message, trained=view.trained)
    if said:
        return f"it has lost its device ({said})"
    if failure.everywhere and view.job.spec.nodes > 1:
        return ""  # Ranks in other pods failed in the same way, so the pod's node is not the reason.
    before = next((r for r in reversed(within) if r.reason in COUNTED and not r.consequence), None)
    again = before is not None and before.pod == failure.pod and before.reason in _OF_PLACES
    counts = view.status.restarts
    restored = before in counts.recent and before is not None and before.counted and not counts.counted
    # If the budget was restored between the two failures, the job has trained for a long time in
    # between, so the failures do not count as two in a row.
    if not again or restored or len(view.status.slots) < 2 or names_program_error(failure.message):
        return ""
    return "" if _has_moved_too_often(view, within) else "it failed twice in a row while no other pod did"


def _link_breaks(view: View, failure: Restart, within: Sequence[Restart]) -> bool:
    """Whether the pod's own node has been partitioned LINK_LOSSES times in a row.

    The coordinator's node may be the partitioned one instead. The pod's node is at fault only if a
    pod on a third node has kept its connection.
    """
    breaks = [r for r in within if r.round and not r.consequence and r.reason not in PLANNED][1 - LINK_LOSSES :]
    again = len(breaks) == LINK_LOSSES - 1 and all((r.reason, r.pod) == (failure.reason, failure.pod) for r in breaks)
    if not again or view.coordinator is None:
        return False
    near = {"", failure.node, view.coordinator.host}
    connected = {member.pod for member in view.report.members} if view.report is not None else set()
    others = [pod for pod in view.pods if pod is not None and pod.name in connected - {failure.pod}]
    return any(pod.host not in near for pod in others)


def _has_moved_too_often(view: View, within: Sequence[Restart]) -> bool:
    moves = {r.round for r in within if r.reason in MOVE_CAUSES}
    # The list of recent restarts has a limited length and may lack some moves. The nodes that these
    # moves left are still in the list of avoided nodes.
    left = [a for a in view.status.avoided_nodes if a.reason.startswith(MOVE_CAUSES)]
    return max(len(moves), len(left)) >= MAX_MOVES


def _has_counted(failure: Restart, within: Sequence[Restart]) -> bool:
    """Whether an earlier failure in the same pod or on the same node has already counted.

    After MAX_MOVES uncounted failures, every later failure counts, so the result is False. The
    pod's name is compared too, because the node may have been unknown when an earlier failure was
    recorded.
    """
    replaced = {r.round for r in within if r.reason == Cause.POD_UNHEALTHY}
    free = [r for r in within if r.round in replaced and r.reason in _OF_PLACES and not r.counted]
    same = (r for r in within if r.pod == failure.pod or r.node == failure.node)
    return len(free) < MAX_MOVES and any(r.counted and r.reason in _OF_PLACES for r in same)


def _has_a_place(view: View, pod: PodView) -> bool:
    """Whether there is a place for the replacement of a pod: a ready spare, or the pod's own node.

    It is unknown whether other nodes have room. If no other node has room, the replacement must
    return to the old pod's node, so this node must be able to take the replacement.
    """
    host, members = (view.world.hosts or {}).get(pod.host), view.report.members if view.report is not None else ()
    spares = len({m.pod for m in members} & view.current_names - {pod.name}) >= view.job.spec.nodes
    return spares or host is None or Wants.of(view.job.spec, view.status.queue).admitted_to(host)


def find_next_judgement(view: View) -> datetime | None:
    """Return when the next node will have been unhealthy for LASTS; None if there is none."""
    hosts = view.world.hosts or {}
    begun = [hosts[p.host].unhealthy_since for p in view.pods if p is not None and p.host in hosts]
    return min((since + LASTS for since in begun if since is not None and since + LASTS > view.now), default=None)


def _lasts(view: View, host: HostView) -> bool:
    since = host.unhealthy_since
    return bool(host.unhealthy) and host.ready and since is not None and view.now >= since + LASTS


def _came_after(pod: PodView, host: HostView) -> bool:
    """Whether the pod was created after its node became unhealthy.

    The scheduler placed such a pod on an unhealthy node, and would do so again. The two times come
    from different clocks, the API server's and the operator's. If the clocks differ, a pod may stay
    or move by mistake, but the module's other limits still hold.
    """
    return pod.created is not None and host.unhealthy_since is not None and pod.created > host.unhealthy_since


def ready_spares(view: View) -> list[PodView]:
    """Return the ready spares on healthy nodes; empty while the group is incomplete."""
    report, hosts = view.report, view.world.hosts or {}
    if report is None or report.state != CoordinatorState.RUNNING or (report.world or 0) < view.job.spec.nodes:
        return []
    ready = {m.pod for m in report.members if m.state is MemberState.READY}
    pods = [p for p in view.pods if p is not None and p.name in ready]
    return [p for p in pods if p.host not in hosts or hosts[p.host].well]


def _places(view: View, wants: Wants) -> int:
    """Return how many of the job's pods would fit on suitable nodes.

    The true number may be lower, because pods of other jobs may already occupy these nodes.
    """
    spec, hosts = view.job.spec, view.world.hosts or {}
    used = Counter(p.host for p in view.world.nodes() if not p.ended)
    on = [hosts[name] for name in used if name in hosts]
    labels = dict(wants.labels)
    if spec.scheduling.same_topology and spec.pods > 1:
        key = spec.scheduling.same_topology
        labels |= next(({key: host.labels[key]} for host in on if key in host.labels), {})
    avoided = {entry.node for entry in view.status.avoided_nodes}
    fitting = [
        host
        for host in hosts.values()
        if host.well
        and host.name not in avoided
        and wants.admitted_to(host)
        and labels.items() <= host.labels.items()
        and all(host.devices.get(name, 0) >= n for name, n in wants.devices.items())
    ]
    if spec.scheduling.one_pod_per_node:
        key = spec.scheduling.topology_key
        taken = {host.labels.get(key, host.name) for host in on if host.well}
        return len({host.labels.get(key, host.name) for host in fitting} - taken)
    return sum(
        min((host.devices[name] // n - used[host.name] for name, n in wants.devices.items() if n), default=spec.pods)
        for host in fitting
    )


@dataclass(frozen=True)
class Wants:
    """The requirements that the scheduler considers when it places a job's pod."""

    labels: Mapping[str, str]
    devices: Mapping[str, int]
    """How many of each extended resource a pod requests, by the resource's name."""
    tolerations: tuple[Mapping[str, Any], ...]
    more: bool
    """Whether the job also has requirements that only the scheduler can judge."""

    @classmethod
    def of(cls, spec: JobSpec, queue: QueueStatus | None) -> Wants:
        """Return the spec's requirements, together with those that Kueue's flavor adds."""
        added = queue.node if queue is not None else PodChanges()
        pod = _dict(spec.pod_template.get("spec"))
        affinity = _dict(pod.get("affinity"))
        rules = any(name.startswith("required") and v for kind in affinity.values() for name, v in _dict(kind).items())
        # If the quota has a topology, Kueue chooses the Kubernetes node of each pod.
        rules = rules or ANNOTATION_WORKLOAD in added.annotations
        more = rules or any(pod.get(f) for f in ("resourceClaims", "nodeName", "topologySpreadConstraints"))
        amounts: dict[str, Any] = {spec.gpu_resource: spec.gpus_per_node} if spec.gpus_per_node else {}
        amounts |= _extended(spec.resources)
        containers = _dicts(pod.get("containers")) + _dicts(pod.get("initContainers"))
        for container in sorted(containers, key=lambda c: c.get("name") != TRAINER_CONTAINER):
            asked = _extended(_dict(container.get("resources")))
            if container.get("name") != TRAINER_CONTAINER and asked.keys() & amounts.keys():
                more = True
            amounts |= asked
        return cls(
            labels={str(k): str(v) for k, v in {**_dict(pod.get("nodeSelector")), **added.node_selector}.items()},
            devices={name: int(n) for name, n in amounts.items() if str(n).isdecimal()},
            tolerations=(*_dicts(pod.get("tolerations")), *added.tolerations),
            more=more or not all(str(n).isdecimal() for n in amounts.values()),
        )

    def kind(self, host: HostView) -> bool:
        """Whether a node is of the same kind as the nodes that the job runs on.

        Such a node offers the requested kinds of devices. If the job requests no devices, the node
        has the labels of the job's node selector. A node whose devices are all broken still lists
        each kind of device, with the number 0.
        """
        if self.devices:
            return self.devices.keys() <= host.devices.keys()
        return self.labels.items() <= host.labels.items()

    def admitted_to(self, host: HostView) -> bool:
        """Whether a node is not cordoned, and the job tolerates all of its taints."""
        return host.schedulable and all(any(_tolerates(t, *taint) for t in self.tolerations) for taint in host.taints)


def _tolerates(toleration: Mapping[str, Any], key: str, value: str, effect: str) -> bool:
    if toleration.get("effect") not in (None, "", effect) or toleration.get("tolerationSeconds") is not None:
        return False
    exists, named = toleration.get("operator") == "Exists", toleration.get("key")
    if not named:
        return exists
    equal = toleration.get("operator") in (None, "", "Equal") and (toleration.get("value") or "") == value
    return named == key and (exists or equal)


def _extended(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extended resources that a container requests (with a domain in their names).

    Kubernetes requires that the request and the limit of an extended resource are equal, so the
    container may state either.
    """
    asked = {**_dict(resources.get("requests")), **_dict(resources.get("limits"))}
    return {name: amount for name, amount in asked.items() if "/" in name}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
