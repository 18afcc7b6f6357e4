"""Whether the job still makes steps, and what a hang looks like from inside."""

from __future__ import annotations

import re

import wire

LEAST_SECONDS = 300.0
PACE_FACTOR = 20.0
LEAST_REPORTS = 20
NAMED_RANKS = 8

FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.M)
FIRST_CALL_FIRST = "(most recent call last)"


class HangWatch:
    """Knows when the next step is overdue.

    `hang_after`: seconds without a step that are a hang; None: far beyond the job's own pace, once that is known. What the job needs from a
    round's beginning to its first report is a pace of its own: loading data may take longer than any step.
    """

    def __init__(self, hang_after: float | None) -> None:
        self.hang_after = hang_after
        self._reports, self._longest_gap, self._longest_start = 0, 0.0, 0.0
        self._since: float | None = None
        self._in_round = 0

    def begin(self, now: float) -> None:
        """A round runs."""
        self._since, self._in_round = now, 0

    def end(self) -> None:
        """No round runs."""
        self._since = None

    def step(self, now: float) -> None:
        """The job has made a step, or spoken of something else that it does."""
        if self._since is None:
            return
        gap = now - self._since
        if self._in_round:
            self._longest_gap = max(self._longest_gap, gap)
        else:
            self._longest_start = max(self._longest_start, gap)
        self._reports += 1
        self._in_round += 1
        self._since = now

    @property
    def limit(self) -> float | None:
        """Seconds without a step that are a hang at this time; None: not known."""
        if self.hang_after is not None:
            return self.hang_after
        if self._reports < LEAST_REPORTS:
            return None
        pace = self._longest_gap if self._in_round else max(self._longest_gap, self._longest_start)
        return max(LEAST_SECONDS, PACE_FACTOR * pace)

    def due(self) -> float | None:
        """When the next step is overdue."""
        return None if self._since is None or self.limit is None else self._since + self.limit


def innermost(text: str) -> str:
    """Where the main thread of a dumped process stands: `FUNCTION (FILE:LINE)`; empty when the dump holds no frame."""
    frames = list(FRAME.finditer(_main_thread(text)))
    if not frames:
        return ""
    frame = frames[-1] if FIRST_CALL_FIRST in text else frames[0]
    return "{} ({}:{})".format(frame["name"].strip(), frame["file"], frame["line"])


def _main_thread(text: str) -> str:
    """faulthandler writes the thread that got the signal as "Current thread" or, from outside, the main thread last."""
    blocks = re.split(r"^(?=(?:Current thread|Thread) )", text, flags=re.M)
    current = [block for block in blocks if block.startswith("Current thread")]
    return current[0] if current else blocks[-1]


def describe(stacks: dict[int, str], seconds: float) -> tuple[str, str]:
    """(message, traceback) of a hang: which ranks stand where, and all their stacks within the traceback's limit."""
    ranks = sorted(stacks)
    message = f"no step for {seconds:.0f} s"
    if not ranks:
        return f"{message}; no rank gave its stack", ""
    shown = [f"rank {rank} in {innermost(stacks[rank]) or 'no Python frame'}" for rank in ranks[:NAMED_RANKS]]
    more = f" and {len(ranks) - NAMED_RANKS} more ranks" if len(ranks) > NAMED_RANKS else ""
    share = max(200, wire.MAX_TRACEBACK // len(ranks) - 20)
    texts = [f"rank {rank}:\n{wire.clip(stacks[rank].strip(), share)}\n" for rank in ranks]
    return f"{message}: {'; '.join(shown)}{more}", wire.clip("\n".join(texts), wire.MAX_TRACEBACK)
