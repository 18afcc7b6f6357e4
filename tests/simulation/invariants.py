"""Invariants that must hold at every step of every story, whatever happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpjob.core.world import LABEL_ATTEMPT, LABEL_INDEX, LABEL_ROLE

from .store import Json
from .training import WorkerRound

if TYPE_CHECKING:
    from .simulated import Simulation

TRUTH_SECONDS = 12.0
"""Silence of a member (6 s), a lost report, and a late list.

The status may say Running for this long after the group broke.
"""


class Violation(AssertionError):
    """A violated invariant."""


class Invariants:
    """Watches the store and the training."""

    def __init__(self, simulation: Simulation) -> None:
        self.s = simulation
        self.names: set[str] = set()
        self.unseen: set[str] = set()
        """Pods force-deleted before the operator knew of them, so that it creates them again."""
        self.attempts: dict[tuple[str, int], int] = {}
        self.last_round: tuple[int, int] = (-1, -1)
        self.worlds: list[int] = []
        self.violations: list[str] = []
        self._status: Json = {}
        self._rounds_seen: set[tuple[int, int]] = set()
        self.ready_since = 0.0
        simulation.store.watchers.append(self._observe)
        simulation.training.check = self._step

    def _fail(self, text: str) -> None:
        self.violations.append(text)  # in case an event loop swallows the exception
        raise Violation(f"at {self.s.now:.3f} s: {text}")

    # ---- objects

    def _observe(self, kind: str, what: str, body: Json) -> None:
        if kind == "Pod" and what == "ADDED":
            self._created(body)
        elif kind == "DDPJob" and what == "MODIFIED":
            self._written(body.get("status", {}))

    def _created(self, body: Json) -> None:
        name, labels = body["metadata"]["name"], body["metadata"]["labels"]
        if name in self.names and name not in self.unseen:
            self._fail(f"the name {name} is used a second time")
        self.names.add(name)
        if self.s.store.find("Service", "job") is None or not list(self.s.store.all("ConfigMap")):
            self._fail(f"pod {name} is created before the service and the files that it needs")
        if labels[LABEL_ROLE] != "coordinator":
            index, attempt = labels[LABEL_INDEX], int(labels[LABEL_ATTEMPT])
            if attempt <= self.attempts.get((index, 0), -1):
                self._fail(f"attempt {attempt} of index {index} comes after {self.attempts[index, 0]}")
            self.attempts[index, 0] = attempt
        if self.s.phase in ("Complete", "Failed"):
            self._fail(f"pod {name} is created for a job that has ended")

    def _written(self, status: Json) -> None:
        old, self._status = self._status, status
        before, after = _ended(old), _ended(status)
        if before and before != after:
            self._fail(f"a terminal condition changes: {before} -> {after}")
        if len(after) > 1:
            self._fail(f"two terminal conditions hold: {after}")
        counts, now = old.get("restarts", {}), status.get("restarts", {})
        for name in ("uncounted", "total"):
            if now.get(name, 0) < counts.get(name, 0):
                self._fail(f"restarts.{name} goes back from {counts[name]} to {now.get(name, 0)}")
        if now.get("counted", 0) < counts.get("counted", 0) and now.get("counted", 0) != 0:
            self._fail("restarts.counted goes back, and not to 0")
        place, new_place = (_generation(s) for s in (old, status))
        if new_place < place:
            self._fail(f"the rendezvous goes back from {place} to {new_place}")
        if status.get("round", 0) < old.get("round", 0):
            self._fail("status.round goes back")
        if "Complete" in after and not before and self.s.training.made < self.s.training.steps:
            self._fail(f"Complete after {self.s.training.made} of {self.s.training.steps} steps")
        holding = {c["type"] for c in status.get("conditions", ()) if c["status"] == "True"}
        if after and holding & {"Running", "Restarting", "Suspended"}:
            self._fail(f"a job that has ended is also {holding - set(after)}")
        if {"Suspended", "Running"} <= holding:
            self._fail("a suspended job says that it runs")
        indices = [s["attempt"] for s in status.get("slots", ())]
        if status.get("highestAttempt", 0) < max(indices, default=0):
            self._fail("status.highestAttempt is below an attempt")

    # ---- training

    def _step(self, current: WorkerRound) -> None:
        """Check that no older round takes a step after a newer one, while the coordinator reaches
        one of the older round's members.

        Other steps do no harm, because storage refuses writes from members that the coordinator
        does not reach, and from pods without an object.
        """
        members = [launcher.pod for launcher in current.working.values()]
        if any(pod.removed for pod in members):
            return
        place = current.generation, current.number
        if place < self.last_round and any(launcher.obeys for launcher in current.working.values()):
            self._fail(f"round {place} trains on after round {self.last_round} began to")
        if place > self.last_round:
            self.last_round = place
            self.worlds.append(current.world)
            pods = [pod.name for pod in members]
            if len(set(pods)) != current.world or len({pod.index for pod in members}) != current.world:
                self._fail(f"{current} has a pod twice: {pods}")

    # ---- after a reconcile

    def after_reconcile(self) -> None:
        """Check that the status is true, except for bounded delays."""
        status = self.s.status
        nodes, spec = status.get("nodes", {}), self.s.spec
        known = status.get("observedGeneration") == self.s.job_body["metadata"]["generation"]
        if known and max(nodes.get("active", 0), nodes.get("ready", 0)) > spec["nodes"]:
            self._fail(f"status.nodes shows more than the {spec['nodes']} nodes of the spec: {nodes}")
        restarts = status.get("restarts", {})
        # Failures that ended the job count against its budget, although they restarted nothing.
        ended = status.get("phase") == "Failed"
        if restarts and not ended and restarts["counted"] + restarts["uncounted"] > restarts["total"]:
            self._fail("more restarts than there were in total")
        woken = self.s.phase in ("Suspended", "Queued") or (spec.get("managedBy") and not status.get("phase"))
        if self.s.wake is None and self.s.job is not None and not _ended(status) and not woken:
            self._fail(f"nobody will wake a job that is {self.s.phase}")

    def running_is_true(self, stale: float, hang: bool) -> None:
        """Check that Running holds only while the group takes steps. The operator may be unaware of
        a change for `stale` seconds.
        """
        running: Any = next((c for c in self.s.status.get("conditions", ()) if c["type"] == "Running"), {})
        done = self.s.training.made >= self.s.training.steps
        if running.get("status") != "True" or not running["reason"].startswith("GroupRuns") or hang or done:
            return
        # A coordinator that has just taken over has had no time to notice, and neither has one
        # whose group has just started its workers: a host may be partitioned before their first
        # step.
        training = self.s.training
        since = [c.began for c in self.s.network.coordinators if c.attempt]
        known = max([training.last_step, training.last_start, *since])
        silent = self.s.now - known
        if silent > TRUTH_SECONDS + stale:
            self._fail(f"Running ({running['reason']}), but the last step was {silent:.1f} s ago")


def _ended(status: Json) -> list[str]:
    conditions = status.get("conditions", ())
    return [c["type"] for c in conditions if c["type"] in ("Complete", "Failed") and c["status"] == "True"]


def _generation(status: Json) -> tuple[int, int]:
    rendezvous = status.get("rendezvous", {})
    return rendezvous.get("generation", 0), rendezvous.get("attempt", 0)
