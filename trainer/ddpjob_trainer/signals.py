"""SIGTERM as a flag that the ranks agree on at a step's end.

Python runs a signal handler in the main thread only, and not while that is blocked in a collective. The C level writes the signal's
number to the wake-up descriptor at once, and a thread reads it there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

from ddpjob_trainer.group import Group, Reduction

EXIT_STEPPED_ASIDE = 75
EXIT_TERMINATED = 128 + signal.SIGTERM
_PATIENCE_SECONDS = 4.0


class StopRequest:
    """Knows whether SIGTERM has come, lets the ranks agree on it, and ends this process when they no longer can."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._requested = threading.Event()
        self._agreed = threading.Event()
        self._last_step = time.monotonic()
        self._slowest_step = 0.0

    def listen(self) -> None:
        """From now on SIGTERM does not end the process but sets the flag. To be called in the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="sigterm", daemon=True).start()

    @property
    def requested(self) -> bool:
        """SIGTERM has come to this rank."""
        return self._requested.is_set()

    def agreement(self, save_due: bool) -> Agreement:
        """Begin to agree, while the step runs, on whether to stop and whether to save after it."""
        now = time.monotonic()
        self._slowest_step = max(self._slowest_step * 0.95, now - self._last_step)
        self._last_step = now
        flags = torch.tensor([float(self.requested), float(save_due)])
        return Agreement(self._group.sum_begin(flags), self._agreed)

    def _watch(self, reader: int) -> None:
        while signal.SIGTERM not in os.read(reader, 64):
            pass
        self._requested.set()
        if not self._agreed.wait(_PATIENCE_SECONDS + 2 * self._slowest_step):
            print("SIGTERM, and the other ranks do not answer: leaving without a checkpoint", file=sys.stderr, flush=True)
            os._exit(EXIT_TERMINATED)


class Agreement:
    """What the ranks agree on at the end of a step."""

    def __init__(self, flags: Reduction, agreed: threading.Event) -> None:
        self._flags, self._agreed = flags, agreed

    def wait(self) -> tuple[bool, bool]:
        """(stop, save): the same on every rank."""
        stop, save = (bool(flag > 0) for flag in self._flags.wait())
        if stop:
            self._agreed.set()
        return stop, save
