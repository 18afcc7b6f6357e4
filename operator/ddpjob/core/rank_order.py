"""Decides the order of ranks for spec.rankOrder, so that nearby nodes get neighbouring ranks.

NCCL's and gloo's rings and trees connect ranks in order, without regard to the network between
Kubernetes nodes. If neighbouring ranks are in different racks, every byte crosses the slow links
several times. `spec.rankOrder` lists labels of Kubernetes nodes, the widest level first. Only the
operator can read these labels, so it sends the order to the coordinator as a list of pods.

- A node's place is a list: the values that these labels have on its Kubernetes node, and then the
  Kubernetes node's name (`place_of`). If a label is missing, the name replaces this label and all
  narrower ones, so the Kubernetes node shares no place with others at these levels.
- Places are sorted by their lowest index, level by level. Index 0 is therefore always first, and
  the logs, metrics and checkpoints of rank 0 stay where users look for them.

Example with rankOrder: [zone, rack]:

    index   0       1       2       3       4
    place   z1/r1   z2/r9   z1/r2   z1/r1   z2/r9
    order   0, 3 (z1/r1), 2 (z1/r2), 1, 4 (z2/r9)

Ranks follow the list, and the coordinator skips pods that are not in the round. Even if pods are
skipped, each place stays contiguous, so losses, spares and smaller groups do not need a new list.

Why: docs/decisions/0019.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from ddpjob_runtime.protocol import Report

from ddpjob.core.view import View
from ddpjob.core.world import HostView

Place = tuple[str, ...]
"""A node's place in the network: the values that the labels in spec.rankOrder have on its
Kubernetes node, from the widest level to the narrowest, and then the Kubernetes node's name. The
name also replaces the first missing label and all narrower ones."""


def order_pods(view: View) -> tuple[str, ...]:
    """Return the names of the slots' pods in rank order, without pods whose place is unknown.

    The result is empty if spec.rankOrder is not set. Ranks then follow the indices.
    """
    if not view.job.spec.rank_order:
        return ()
    hosts, places, names = view.world.hosts, dict[int, Place](), dict[int, str]()
    for index, pod in enumerate(view.pods):
        # Leave out a pod whose Kubernetes node the watch has not reported yet, because the report
        # will arrive soon. If `hosts` is None, the operator is not permitted to watch nodes, so
        # give every pod a place of its own.
        if pod is not None and pod.host and (hosts is None or pod.host in hosts):
            names[index] = pod.name
            places[index] = place_of(pod.host, (hosts or {}).get(pod.host), view.job.spec.rank_order)
    return tuple(names[index] for index in in_order(places))


def judge_order(view: View, report: Report, group: Sequence[str]) -> tuple[bool, str, str]:
    """Return the status, reason and message of the RanksOrdered condition for a running group.

    `group` lists the names of the group's pods in rank order.
    """
    labels, hosts = view.job.spec.rank_order, view.world.hosts
    if hosts is None:
        remedy = "use a ClusterRole to grant it get, list and watch on nodes"
        return False, "NodesUnknown", f"the operator is not permitted to read the labels of Kubernetes nodes; {remedy}"
    pods = view.world.nodes_by_name
    placed = [pods[name] for name in group if name in pods and pods[name].host in hosts]
    places = [place_of(pod.host, hosts[pod.host], labels) for pod in placed]
    for level, label in enumerate(labels):
        lacking = sorted({p.host for p, place in zip(placed, places, strict=True) if place[level] == f"/{p.host}"})
        if lacking:
            some = f"{lacking[0]} and {len(lacking) - 1} more" if len(lacking) > 1 else lacking[0]
            found = f"Kubernetes nodes that run the job but lack label {label}: {some}"
            return (
                False,
                "LabelsMissing",
                f"{found}. Each of them counts as a separate place. Add the label, or correct spec.rankOrder",
            )
    ranked = {pod.name: None for pod in placed}
    if list(ranked) != [name for name in order_pods(view) if name in ranked]:
        why = (
            "the labels of the Kubernetes nodes were unknown when the group formed, or the labels or rankOrder have "
            "changed since then"
        )
        return False, "NextRound", f"{why}; the new order applies from the next round"
    values = [f"{len({place[: level + 1] for place in places})} x {label}" for level, label in enumerate(labels)]
    return True, "InOrder", f"Kubernetes nodes with the same labels have neighbouring ranks ({', '.join(values)})"


def place_of(name: str, host: HostView | None, labels: Sequence[str]) -> Place:
    """Return a Kubernetes node's place in the network; `host` is None if no labels are known."""
    values = (host.labels.get(label, "") if host is not None else "" for label in labels)
    known = tuple(takewhile(bool, values))
    # Label values never begin with a slash, so no label value equals this name.
    return (*known, *[f"/{name}"] * (len(labels) + 1 - len(known)))


def in_order(places: dict[int, Place]) -> list[int]:
    """Return the keys of `places`, ordered so that indices with the same place are neighbours.

    Places are ordered by their lowest index, level by level.
    """
    lowest: dict[Place, int] = {}
    for index in sorted(places):
        for level in range(len(places[index])):
            lowest.setdefault(places[index][: level + 1], index)
    return sorted(places, key=lambda i: ([lowest[places[i][: level + 1]] for level in range(len(places[i]))], i))
