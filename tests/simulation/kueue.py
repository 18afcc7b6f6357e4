"""Kueue's handling of a job's Workloads: one queue with a fixed quota, full and partial admission,
eviction, slices, and topology domains.

As in Kueue 0.19, a replaced Workload is finished a moment before its slice is admitted. An evicted
Workload keeps its quota until the job releases it. A finished Workload holds no quota. A pod with
Kueue's topology gate gets the node selector of the domain for its index. Then the gate is removed.
"""

from __future__ import annotations

from ddpjob.api.job import PRIORITY_LABEL, QUEUE_LABEL

from .simulated import Simulation
from .store import Json

REPLACES = "kueue.x-k8s.io/workload-slice-replacement-for"


class Kueue:
    """The queue `team`, with quota for `pods` pods of slots. Other jobs use `taken` of it."""

    def __init__(self, simulation: Simulation, pods: int) -> None:
        self.s, self.pods, self.taken = simulation, pods, 0
        self.flavor = "default"
        simulation.cluster.serves_queues = True
        simulation.job_body["metadata"]["labels"] = {QUEUE_LABEL: "team", PRIORITY_LABEL: "normal"}
        self.racks: list[str] = []
        """The rack of each pod that is still to be admitted; empty for a queue without topology."""
        self._admitting: list[str] = []
        self._steps()

    def _steps(self) -> None:
        self.act()
        self.s.clock.later(1.0, self._steps)

    # --- state

    def workloads(self) -> dict[str, Json]:
        return {w["metadata"]["name"]: w for w in self.s.store.all("Workload")}

    def holds(self, workload: Json, kind: str) -> bool:
        """Whether a condition is True."""
        return any(
            c["type"] == kind and c["status"] == "True" for c in workload.get("status", {}).get("conditions", ())
        )

    def asked(self, workload: Json) -> int:
        """Return the number of pods of slots that the Workload asks for or, once admitted, that it
        got.
        """
        admission = workload.get("status", {}).get("admission")
        return int((admission["podSetAssignments"] if admission else workload["spec"]["podSets"])[0]["count"])

    def additional(self) -> Json:
        """Return the Workload that asks only for additional pods."""
        [found] = [w for w in self.workloads().values() if "ddpjob.io/queue-additional" in w["metadata"]["labels"]]
        return found

    def using(self) -> int:
        """Return the pods of slots for which the job holds quota."""
        held = [w for w in self.workloads().values() if self.holds(w, "QuotaReserved")]
        return sum(self.asked(w) for w in held if not self.holds(w, "Finished"))

    # --- actions

    def act(self) -> None:
        """Run one round of the scheduler."""
        for name, workload in self.workloads().items():
            workload.setdefault("status", {})
            if self.holds(workload, "Finished") or self.holds(workload, "QuotaReserved"):
                continue
            old = self.workloads().get(workload["metadata"]["annotations"].get(REPLACES, "/").split("/")[1])
            replaced = self.asked(old) if old and self.holds(old, "QuotaReserved") else 0
            if old is not None and self.holds(old, "Finished"):
                replaced = 0
            room = self.pods - self.taken - self.using() + replaced
            wanted, least = self.asked(workload), workload["spec"]["podSets"][0].get("minCount", 10**9)
            if name not in self._admitting and wanted > room and (room < least or replaced):
                self._set(workload, {"QuotaReserved": ("False", "Pending", "insufficient unused quota for cpu")})
            elif replaced and old is not None:
                self._set(old, {"Finished": ("True", "WorkloadSliceReplaced", "replaced")})
                self._admitting.append(name)
            else:
                self._admit(workload, wanted if name in self._admitting else min(wanted, room))
        self._ungate()

    def _admit(self, workload: Json, pods: int) -> None:
        sets = [
            {"name": s["name"], "count": s["count"], "flavors": {"cpu": self.flavor}}
            for s in workload["spec"]["podSets"]
        ]
        sets[0]["count"] = pods
        if self.racks:
            roots, self.racks = self.racks[:pods], self.racks[pods:]
            values = [{"individual": {"roots": roots}}]
            one = {"domainCount": pods, "valuesPerLevel": values, "podCounts": {"universal": 1}}
            sets[0]["topologyAssignment"] = {"levels": ["rack"], "slices": [one]}
        workload["status"]["admission"] = {"clusterQueue": "cluster-queue", "podSetAssignments": sets}
        met = ("True", "Admitted", "admitted")
        evicted = {"Evicted": ("False", "QuotaReserved", "")} if self.holds(workload, "Evicted") else {}
        self._set(workload, {"QuotaReserved": met, "Admitted": met, **evicted})

    def _ungate(self) -> None:
        """Give pods their domains, as Kueue's TopologyUngater does for pods with an index label."""
        for pod in self.s.store.all("Pod"):
            meta, spec = pod["metadata"], pod["spec"]
            if {"name": "kueue.x-k8s.io/topology"} not in spec.get("schedulingGates", ()):
                continue
            workload = self.workloads()[meta["annotations"]["kueue.x-k8s.io/workload"]]
            [asked] = [s for s in workload["spec"]["podSets"] if s["name"] == meta["labels"]["kueue.x-k8s.io/podset"]]
            label = asked["topologyRequest"]["podIndexLabel"]
            rank = int(meta["labels"][label]) - int(meta["annotations"].get("kueue.x-k8s.io/pod-index-offset", 0))
            [assigned] = workload["status"]["admission"]["podSetAssignments"][:1]
            [one] = assigned["topologyAssignment"]["slices"]
            spec["nodeSelector"] = {
                **spec.get("nodeSelector", {}),
                "rack": one["valuesPerLevel"][0]["individual"]["roots"][rank],
            }
            spec["schedulingGates"] = []
            self.s.store.changed("Pod", pod)

    def evict(self, workload: Json | None = None) -> None:
        """Revoke the quota of all Workloads or of one, for a job of a higher priority, which uses
        it immediately.
        """
        for one in self.workloads().values() if workload is None else [workload]:
            if self.holds(one, "QuotaReserved") and not self.holds(one, "Finished"):
                self._set(one, {"Evicted": ("True", "Preempted", "preempted by a job of a higher priority")})

    def _set(self, workload: Json, conditions: dict[str, tuple[str, str, str]]) -> None:
        known = {c["type"]: c for c in workload["status"].get("conditions", ())}
        before = dict(known)
        for kind, (state, reason, message) in conditions.items():
            known[kind] = {"type": kind, "status": state, "reason": reason, "message": message}
            known[kind]["lastTransitionTime"] = self.s.clock.stamp()
        if {k: {**c, "lastTransitionTime": ""} for k, c in known.items()} != {
            k: {**c, "lastTransitionTime": ""} for k, c in before.items()
        }:
            workload["status"]["conditions"] = list(known.values())
            self.s.store.changed("Workload", workload)
