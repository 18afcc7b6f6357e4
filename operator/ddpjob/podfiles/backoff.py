"""How long a group waits after a failure of its own that repeats without progress."""

from __future__ import annotations

from dataclasses import dataclass

HEALTHY_SECONDS = 60.0  # a round that ran for so long was no crash loop


@dataclass
class Backoff:
    """The first failure waits for nothing, the second in a row `initial` seconds, then twice as long each time, at most `maximum`."""

    initial: float
    maximum: float
    streak: int = 0
    furthest: tuple[float, float] | None = None  # (epoch, step)
    _advanced: bool = False

    def step(self, position: tuple[float, float]) -> None:
        """The job has got to (epoch, step)."""
        if self.furthest is None or position > self.furthest:
            self.furthest, self._advanced = position, True

    def failed(self, ran_seconds: float) -> float:
        """A round that ran for so long broke by its own failure; returns the seconds to wait before the next one."""
        healthy = self._advanced or ran_seconds >= HEALTHY_SECONDS
        self.streak = 1 if healthy else self.streak + 1
        self._advanced = False
        if self.streak < 2:
            return 0.0
        return min(self.maximum, self.initial * 2.0 ** min(self.streak - 2, 60))
