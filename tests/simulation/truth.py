"""Samples the status and compares it with the world. No statement may be untrue for long while the
operator runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .invariants import Violation

if TYPE_CHECKING:
    from .story import Story

LIMIT = 2.0
"""Seconds for which the status may be untrue."""
PERIOD = 0.1
UNKNOWABLE = frozenset(
    {"cut-operator", "lossy", "watch-gap", "isolate", "cut-host", "delete-host", "kubelet", "hang", "stuck"}
    | {"coordinator", "key"}
)
"""Faults that cannot be known so soon, or that keep the operator from knowing."""


class Truth:
    """Samples a story whose faults can be noticed immediately. Raises Violation if a statement
    stays untrue.
    """

    def __init__(self, story: Story) -> None:
        self.story, self.s = story, story.s
        self.samples = 0
        self._since: dict[str, float] = {}
        self.failed = ""
        self._later()

    def _later(self) -> None:
        self.s.clock.later(PERIOD, self._sample)

    def _sample(self) -> None:
        self._later()
        if self.s.now < self.story.down_until or self.s.job is None or not self.s.status.get("conditions"):
            self._since.clear()
            return
        self.samples += 1
        untrue = self._untrue()
        self._since = {text: self._since.get(text, self.s.now) for text in untrue}
        for text, since in self._since.items():
            if self.s.now - since > LIMIT:
                self.failed = f"at {self.s.now:.1f} s, for {self.s.now - since:.1f} s: {text}"
                raise Violation(self.failed)

    def _untrue(self) -> list[str]:
        """Return the statements of the status that are untrue now."""
        s, phase, nodes = self.s, self.s.phase, self.s.status["nodes"]
        rounds = [r for r in s.training.rounds.values() if r.whole and not r.broken and not self._silent(r)]
        finished = s.training.made >= s.training.steps
        found = []
        if phase == "Running" and not rounds and not finished:
            found.append("the phase is Running, and nobody trains")
        if phase in ("Pending", "Starting", "Restarting", "Suspended") and rounds and not finished:
            found.append(f"the phase is {phase}, and {rounds[-1]} trains")
        if phase in ("Complete", "Failed"):
            return found
        alive = sum(p.is_node and not p.removed and not p.ended and not p.deleting for p in s.pods.values())
        known = s.status.get("observedGeneration") == s.job_body["metadata"]["generation"]
        if known and nodes["active"] != min(alive, s.spec["nodes"]) and phase != "Suspended":
            found.append("nodes.active is not the number of pods")
        if rounds and phase == "Running" and not finished and nodes["ready"] != rounds[-1].world:
            found.append("nodes.ready is not the number of nodes that train")
        return found

    @staticmethod
    def _silent(current: object) -> bool:
        return bool(getattr(current, "silent_peer", False))
