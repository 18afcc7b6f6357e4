"""Kueue's part in a job's Workloads: one queue with a fixed quota, admission, eviction, and slices.

As in Kueue 0.19, a replaced Workload is finished a moment before its slice is admitted. An evicted
Workload keeps its
quota until the job releases it. A finished Workload holds no quota.
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
        return int(workload["spec"]["podSets"][0]["count"])

    def using(self) -> int:
        """Pods of slots for which the job holds quota."""
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
            if name not in self._admitting and self.taken + self.using() - replaced + self.asked(workload) > self.pods:
                self._set(workload, {"QuotaReserved": ("False", "Pending", "insufficient unused quota for cpu")})
            elif replaced and old is not None:
                self._set(old, {"Finished": ("True", "WorkloadSliceReplaced", "replaced")})
                self._admitting.append(name)
            else:
                self._admit(workload)

    def _admit(self, workload: Json) -> None:
        sets = [
            {"name": s["name"], "count": s["count"], "flavors": {"cpu": self.flavor}}
            for s in workload["spec"]["podSets"]
        ]
        workload["status"]["admission"] = {"clusterQueue": "cluster-queue", "podSetAssignments": sets}
        met = ("True", "Admitted", "admitted")
        evicted = {"Evicted": ("False", "QuotaReserved", "")} if self.holds(workload, "Evicted") else {}
        self._set(workload, {"QuotaReserved": met, "Admitted": met, **evicted})

    def evict(self) -> None:
        """Revoke the quota for a job of a higher priority, which uses it at once."""
        for workload in self.workloads().values():
            if self.holds(workload, "QuotaReserved") and not self.holds(workload, "Finished"):
                self._set(workload, {"Evicted": ("True", "Preempted", "preempted by a job of a higher priority")})

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
