"""Sets the conditions that describe recovery: Restarting, FastRecovery and PreflightPassed.

Restarting is true from a break until the group runs again. The operator sees both moments late, so
three cases need care (`judge_restarting`):

- The operator may first see a break when the group already runs again. Restarting then never
  becomes true. But if the operator itself caused the break, for example by scaling, the report of a
  running group may be older than the break. Restarting then becomes true anyway.
- For a `command`, no report shows when the group forms. If the program reported steps before, the
  next reported step shows that training has resumed. If the program has never reported steps, the
  operator knows only that the pods run.
- A suspension may cut a restart short. Such a restart never gets a duration.

Example of a drained node:

    10:00:00  the pod is evicted       Restarting is true: Evicted
    10:00:09  the group runs again     Restarting is false: Recovered; the restart took 9 s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ddpjob_runtime.protocol import DATA, PREFLIGHT

from ddpjob.api.job_spec import PreflightScope
from ddpjob.api.job_status import ConditionType, JobStatus, Restart
from ddpjob.core.failures.classify import Cause
from ddpjob.core.status.conditions import with_condition, without_condition
from ddpjob.core.status.group_counts import FORMED
from ddpjob.core.status.messages import count, put_cause_first
from ddpjob.core.status.repeated import and_repeats, current_restart
from ddpjob.core.status.running import reported_figures
from ddpjob.core.view import View, is_number

_BEFORE_THE_REPORT = frozenset(
    {Cause.SCALED, Cause.SPEC_CHANGED, Cause.KEY_CHANGED, Cause.RUNTIME_CHANGED, Cause.COORDINATOR_LOST}
)
"""Causes of breaks that the operator may know about before the coordinator. A report that is older
than such a break still shows a running group."""


def judge_restarting(view: View, running: bool, broke: list[Restart]) -> JobStatus:
    """Return the status with the Restarting condition, and with the durations of past restarts.

    `broke` lists the new breaks, and `running` is true if the group runs according to its report.
    """
    status, now = view.status, view.now
    if not broke and status.round > view.job.status.round and status.restarts.recent:
        broke = [status.restarts.recent[-1]]
    if broke and not (running and all(r.reason not in _BEFORE_THE_REPORT for r in broke)):
        last = next((r for r in reversed(broke) if not r.consequence), broke[-1])
        message = next(
            iter(put_cause_first(last.message).splitlines()), ""
        )  # The message comes from a user's coordinator, so it may be empty.
        return with_condition(status, ConditionType.RESTARTING, True, last.reason, message, now)
    running = running and _has_resumed(view)
    if running and any(r.seconds is None for r in status.restarts.recent):
        status = replace(status, restarts=replace(status.restarts, recent=_timed(view)))
    before = status.condition(ConditionType.RESTARTING)
    if running and (broke or (before is not None and (before.status or before.reason in (RECOVERED, PODS_RUN)))):
        known = view.job.spec.under_torchrun or _steps(reported_figures(view))
        known = known or (not broke and before is not None and before.reason == RECOVERED)
        reason, message = (RECOVERED, "the group runs again") if known else (PODS_RUN, _PODS_RUN)
        message += and_repeats(current_restart(status))  # Empty until the script has reported.
        return with_condition(status, ConditionType.RESTARTING, False, reason, message, now)
    return status


RECOVERED, PODS_RUN = "Recovered", "PodsRunAgain"
_PODS_RUN = "the pods run again; no step is reported, so it is unknown whether training has resumed"


def _has_resumed(view: View) -> bool:
    """Whether the running group trains again, as far as the operator can know.

    For a `command`, the new generation's report has no steps until the program reports the next
    one.
    """
    return view.job.spec.under_torchrun or not _steps(view.status.progress) or _steps(reported_figures(view))


def _steps(progress: Mapping[str, Any]) -> bool:
    return any(is_number(progress.get(name)) for name in ("step", "epoch"))


def _timed(view: View) -> tuple[Restart, ...]:
    """Return the recent restarts, with a duration in seconds for each restart that is over.

    If steps are reported to the coordinator, a restart is over once the next step is complete. The
    coordinator measures the last restart more precisely than the operator, because the operator may
    have been down when the group broke. If several breaks end at once, the coordinator's
    measurement begins with the first break, so the shorter of the two durations is used. A restart
    that a suspension has cut short gets no duration, because there was no recovery.
    """
    report, recent = view.report, view.status.restarts.recent
    if report is not None and report.recovery.down_since is not None and view.job.spec.under_torchrun:
        return recent
    measured = report.recovery.last_seconds if report is not None and report.recovery.down_since is None else None
    over = [r for r in recent if r.seconds is None and not view.status.ended_without_recovery(r)]
    alone = all(r.round == view.status.round and r.reason not in _BEFORE_THE_REPORT for r in over)

    def seconds(restart: Restart) -> float:
        seen = max(0.0, (view.now - restart.time).total_seconds())
        if measured is None or restart.round != view.status.round:
            return round(seen, 1 if measured is None else 2)
        return round(measured if alone else min(seen, measured), 2)

    return tuple(replace(r, seconds=seconds(r)) if r in over else r for r in recent)


def judge_fast_recovery(view: View) -> JobStatus:
    """Show in the FastRecovery condition whether every pod can recover quickly.

    Fast mode promises quick recovery. The condition is absent until the group runs, or until a pod
    reports that it cannot recover quickly. After a change of coordinator, the pods report one after
    another. The condition then stays unchanged until a pod reports a problem or the group has
    formed.
    """
    status, report = view.status, view.report
    if not view.job.spec.fast:
        return without_condition(status, ConditionType.FAST_RECOVERY)
    if report is None or not report.members:
        return status
    notes = [note for note in report.notes if note.kind not in (PREFLIGHT, DATA)]
    if notes:
        first = notes[0]
        others = len({n.pod for n in notes}) - 1
        message = f"pod {first.pod}: {first.why}" + (f" (and {count(others, 'more pod')})" if others else "")
        return with_condition(status, ConditionType.FAST_RECOVERY, False, first.kind, message, view.now)
    if report.state not in FORMED:
        return status
    message = "workers are forked from a process that has imported torch"
    return with_condition(status, ConditionType.FAST_RECOVERY, True, "WarmWorkers", message, view.now)


def judge_preflight(view: View, restarts: tuple[Restart, ...], *, formed: bool) -> JobStatus:
    """Show in the PreflightPassed condition whether the pods pass their preflight.

    The condition is set after a pod has failed its preflight, or once the group has `formed`.
    `restarts` are the restarts of this reconcile. A coordinator that has just taken over has no
    notes from the pods yet, so the condition stays unchanged until the pods reconnect.
    """
    status, report, preflight = view.status, view.report, view.job.spec.preflight
    if preflight is None:
        return without_condition(status, ConditionType.PREFLIGHT_PASSED)
    condition = partial(with_condition, status, ConditionType.PREFLIGHT_PASSED, now=view.now)
    failed = [r for r in restarts if r.reason == Cause.PREFLIGHT_FAILED]
    if failed:
        return condition(False, Cause.PREFLIGHT_FAILED, failed[-1].message)
    if not formed or report is None:
        return status
    note = next((n for n in reversed(report.notes) if n.kind == PREFLIGHT), None)
    if note is not None:
        return condition(True, "LinksChecked", note.why)
    if preflight.scope is PreflightScope.NODE:
        return condition(True, "NodesChecked", "every node in the group has passed its device and folder checks")
    return status
