"""Finds jobs that wait although there is room: what each job lacks, what is free, and since when.

A job waits for its gang (all of its `minNodes` at once), for a node that it needs, or for an
optional node: a spare, or a node beyond `minNodes`. Jobs are considered in the scheduler's order,
by priority and then by age, and a job that fits takes its room in that check. Only the remaining
room counts for later jobs, so if two jobs need the same room, only one counts as waiting. A
preempting pod's room is reserved for it. A pod that fits on several nodes takes the fullest, so
that as many jobs as possible count as waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ddpjob.api.job_spec import Json
from ddpjob.core.world import LABEL_GENERATION, LABEL_JOB, LABEL_ROLE

from benchmarks.night.schedule import Job

GPU = "nvidia.com/gpu"


class Lack(StrEnum):
    """What a job is waiting for."""

    GANG = "its gang"
    NODE = "one node"
    MORE = "a spare or an elastic node"


class Whose(StrEnum):
    """The program that must act next: the operator if pods are missing, the scheduler if pods lack
    a node.
    """

    OPERATOR = "operator"
    SCHEDULER = "kube-scheduler"


@dataclass(frozen=True)
class Need:
    """A need for `pods` at once, with `gpus` each, on different nodes that are not in `apart`."""

    job: str
    lack: Lack
    pods: int
    gpus: int
    priority: int
    since: str
    """When the pods, or the job, were created (RFC 3339)."""
    whose: Whose
    said: str = ""
    """The scheduler's message about the first pod."""
    apart: frozenset[str] = frozenset()
    nominated: tuple[str, ...] = ()
    """Nodes reserved for its pods while preempted pods terminate."""


def free_gpus(nodes: Iterable[Json], pods: Iterable[Json]) -> dict[str, int]:
    """Return the free GPUs of each schedulable node. A pod holds its GPUs until it has ended."""
    used: Counter[str] = Counter()
    for pod in pods:
        if holds(pod):
            used[pod["spec"]["nodeName"]] += gpus_of(pod)
    found = {}
    for node in nodes:
        hard = [t for t in node["spec"].get("taints", ()) if t["effect"] != "PreferNoSchedule"]
        if not hard and not node["spec"].get("unschedulable") and is_ready(node):
            name = node["metadata"]["name"]
            found[name] = int(node["status"]["allocatable"].get(GPU, 0)) - used[name]
    return found


def is_ready(node: Json) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", ()))


def gpus_of(pod: Json) -> int:
    return sum(int(c.get("resources", {}).get("requests", {}).get(GPU, 0)) for c in pod["spec"]["containers"])


def holds(pod: Json) -> bool:
    """Whether the pod has a node and has not ended."""
    return bool(pod["spec"].get("nodeName")) and pod["status"].get("phase") not in ("Succeeded", "Failed")


def needs(job: Job, body: Json, pods: Iterable[Json], priority: int) -> Iterator[Need]:
    """Yield the job's needs. `body` is its object, and `pods` are all its pods."""
    status = body.get("status", {})
    if status.get("phase") in ("Complete", "Failed"):
        return
    nodes = [p for p in pods if p["metadata"]["labels"][LABEL_ROLE] != "coordinator"]
    generation = str(status.get("rendezvous", {}).get("generation", 0))
    mine = [p for p in nodes if p["metadata"]["labels"][LABEL_GENERATION] == generation and _is_wanted(p)]
    bound = sum(bool(p["spec"].get("nodeName")) for p in mine)
    waiting = [p for p in mine if not p["spec"].get("nodeName")]
    apart = frozenset(p["spec"]["nodeName"] for p in nodes if holds(p))
    gang = status.get("gang") or {}
    at_once = not gang.get("placed") and bool(gang or not status.get("slots"))
    if at_once and bound < job.minimum:
        lack, count = Lack.GANG if job.minimum > 1 else Lack.NODE, job.minimum - bound
    elif bound < job.minimum:
        lack, count = Lack.NODE, 1
    elif bound < job.nodes + job.spares:
        lack, count = Lack.MORE, 1
    else:
        return
    first: Json = waiting[0] if waiting else body
    whose = Whose.SCHEDULER if len(waiting) >= count else Whose.OPERATOR
    said = next(
        (c.get("message", "") for c in first.get("status", {}).get("conditions", ()) if c["type"] == "PodScheduled"), ""
    )
    nominated = tuple(filter(None, (p["status"].get("nominatedNodeName") for p in waiting)))
    made = first["metadata"]["creationTimestamp"]
    yield Need(job.name, lack, count, job.gpus, priority, made, whose, said, apart, nominated)


def _is_wanted(pod: Json) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") not in ("Succeeded", "Failed")


def fitting(free: Mapping[str, int], wanted: Iterable[Need]) -> list[Need]:
    """Return the needs that fit into the free GPUs now, placed one after the other by priority and
    age.
    """
    left, found = dict(free), []
    for need in sorted(wanted, key=lambda n: (-n.priority, n.since, n.job)):
        open_to = sorted((room, name) for name, room in left.items() if name not in need.apart and room >= need.gpus)
        if len(open_to) >= need.pods:
            found.append(need)
            for _, name in open_to[: need.pods]:
                left[name] -= need.gpus
        else:
            for name in need.nominated:
                left[name] = left.get(name, 0) - need.gpus
    return found


@dataclass
class Wait:
    """A period, in seconds, in which a job waited although it fitted."""

    job: str
    lack: Lack
    began: float
    seconds: float = 0.0
    of: defaultdict[Whose, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of the wait, by the program that had to act."""
    gpu_seconds: float = 0.0
    said: str = ""


class Waits:
    """Tracks waits from one check of the cluster to the next."""

    def __init__(self) -> None:
        self.ended: list[Wait] = []
        self._open: dict[tuple[str, Lack], Wait] = {}
        self._last: float | None = None

    def look(self, now: float, fit: Iterable[Need]) -> float:
        """Process the needs that fit now, and return the longest current wait in seconds.

        Waits for a gang or a lost node count. A need that fits in two consecutive checks has waited
        for the time between them.
        """
        passed = 0.0 if self._last is None else now - self._last
        self._last = now
        before, self._open = self._open, {}
        for need in fit:
            key = need.job, need.lack
            wait = before.pop(key, None)
            if wait is None:
                wait = Wait(need.job, need.lack, now)
            else:
                wait.seconds += passed
                wait.of[need.whose] += passed
                wait.gpu_seconds += passed * need.pods * need.gpus
            wait.said = need.said or wait.said
            self._open[key] = wait
        self.ended += before.values()
        return max((w.seconds for w in self._open.values() if w.lack is not Lack.MORE), default=0.0)

    def close(self) -> None:
        """Close all open waits, because the night is over."""
        self.ended += self._open.values()
        self._open = {}


def by_job(pods: Iterable[Json]) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = defaultdict(list)
    for pod in pods:
        found[pod["metadata"]["labels"][LABEL_JOB]].append(pod)
    return found
