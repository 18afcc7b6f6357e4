"""Plays a trace on a system, and computes the account of its effects."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery.digits import write_digits
from benchmarks.recovery.groups import NotRecovered
from benchmarks.recovery.trace.account import Account, keep_account
from benchmarks.recovery.trace.events import Event, Kind, Trace
from benchmarks.recovery.trace.systems import SYSTEMS

TEND_SECONDS = 0.05


@dataclass(frozen=True)
class Setting:
    """The settings shared by all systems of a comparison."""

    state: int
    """Size of weights and optimizer state in bytes."""
    step: float
    """Time of a step in seconds, without the system's overhead."""
    save_seconds: float
    patience: float
    """Seconds without a step after which everything is restarted, as a person or an operator would
    do.
    """

    @property
    def options(self) -> tuple[str, ...]:
        """The options of training.py."""
        return f"--state={self.state}", f"--step={self.step}", f"--save-seconds={self.save_seconds}"


@dataclass(frozen=True)
class Run:
    """A played trace. `note` says why there is no account."""

    system: str
    state: int
    step: float
    round: int
    load: float
    account: Account | None
    whole_restarts: int = 0
    note: str = ""


def play(system: str, setting: Setting, trace: Trace, round_: int) -> Run:
    """Play a trace on a system, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        write_digits(Path(folder))
        group = None
        try:
            group = SYSTEMS[system](Path(folder), setting.options, trace.joins)
            group.start()
            group.settle()
            account = play_on(group, trace, setting.patience)
        except NotRecovered as error:
            restarts = group.restarts if group is not None else 0
            return Run(system, setting.state, setting.step, round_, os.getloadavg()[0], None, restarts, str(error))
        finally:
            if group is not None:
                group.close()
        return Run(system, setting.state, setting.step, round_, os.getloadavg()[0], account, group.restarts)


def play_on(group: Any, trace: Trace, patience: float) -> Account:
    """Inflict the failures on a training group, and return the account."""
    begin, struck = time.time(), list[tuple[float, Kind]]()
    for event in trace.events:
        _tend_until(group, begin + event.at, patience)
        struck.append((time.time(), event.kind))
        strike(group, event)
    _tend_until(group, end := begin + trace.seconds, patience)
    return keep_account(group.log.refresh().incarnations, struck, begin, end)


def strike(group: Any, event: Event) -> None:
    """Inflict a failure on the newest incarnation, if there is one."""
    if event.kind is Kind.JOIN:
        group.join_node()
        return
    incarnation = group.log.refresh().newest
    if incarnation is None:
        return
    node = incarnation.nodes[min(incarnation.nodes) if event.number % 2 else max(incarnation.nodes)]
    {Kind.KILL: group.kill_node, Kind.CRASH: group.crash_worker, Kind.SILENT: group.silence_node}[event.kind](node)


def _tend_until(group: Any, when: float, patience: float) -> None:
    """Wait, and restart everything if there is no step for too long."""
    began = time.time()
    while (now := time.time()) < when:
        group.tend()
        newest = group.log.refresh().newest
        began = max(began, newest.last if newest is not None else 0.0)
        if now - began > patience:
            group.restart_all()
            began = time.time()
        time.sleep(min(TEND_SECONDS, max(0.0, when - time.time())))
