"""Decides what follows from a cause: whether it counts, and whether the job fails of it, from spec.recovery.rules and the defaults."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ddpjob.api.types import JobSpec, RuleAction, RuleCause
from ddpjob.core.classify import Cause

_RULED = {
    Cause.WORKER_FAILED: RuleCause.EXIT_CODE,
    Cause.EXIT_CODE: RuleCause.EXIT_CODE,
    Cause.OOM_KILLED: RuleCause.OOM_KILLED,
    Cause.DISRUPTION: RuleCause.DISRUPTION,
    Cause.PREEMPTED: RuleCause.DISRUPTION,
    Cause.EVICTED: RuleCause.DISRUPTION,
    Cause.NODE_LOST: RuleCause.NODE_LOST,
    Cause.HANG: RuleCause.HANG,
    Cause.INIT_FAILURE: RuleCause.INIT_FAILURE,
}
COUNTED = frozenset({Cause.WORKER_FAILED, Cause.EXIT_CODE, Cause.OOM_KILLED, Cause.HANG, Cause.INIT_FAILURE})
"""Failures of the job itself. Disruptions, lost nodes, deletions by hand and consequences do not use the budget."""
RULE_FAILED = "RuleFailed"


@dataclass(frozen=True)
class Ruling:
    """`fails`: the reason of the condition Failed; empty: the job goes on."""

    counted: bool
    fails: str = ""
    why: str = ""


def ruling(spec: JobSpec, cause: Cause, exit_code: int | None, *, trained: bool) -> Ruling:
    """The first rule that matches wins. `exit_code` as a shell shows it (128 + N for signal N); `trained`: a step was made."""
    for number, rule in enumerate(spec.recovery.rules):
        if _RULED.get(cause) is not rule.cause or (rule.exit_codes and exit_code not in rule.exit_codes):
            continue
        if rule.action is RuleAction.FAIL:
            return Ruling(False, RULE_FAILED, f"recovery.rules[{number}] (cause {rule.cause}) fails the job")
        return Ruling(rule.action is RuleAction.RESTART)
    if cause is Cause.INIT_FAILURE and not trained:
        return Ruling(False, Cause.INIT_FAILURE)
    return Ruling(cause in COUNTED)


def shell_code(exit_code: int | None, signal_name: str | None) -> int | None:
    """The exit code that a shell would show for a process: torchrun gives -N, or a name, for signal N."""
    if exit_code is not None:
        return exit_code if exit_code >= 0 else 128 - exit_code
    number = getattr(signal, signal_name, None) if signal_name else None
    return 128 + number if isinstance(number, signal.Signals) else None
