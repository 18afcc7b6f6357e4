"""Decides which of the figures that a training script reports are shown in `status.progress`.

A script may report at every step, and may report anything. The status must stay small and valid,
and each write is a request to the API server. So:

- Progress alone is written at most once per REFRESH. The first loss and the first speed are written
  immediately, and so is progress that is written together with a new phase.
- Only known fields and a limited number of metrics are shown, and only finite numbers. A loss that
  is infinite or undefined is shown as `nan`, so that users do not mistake it for a missing report.
- If the steps start again at 0 after a restart, `stepsBefore` keeps the last step.
- A rank that lags is shown for at least SHOWN, because each change causes an event.

Example:

    reported   {"step": 900, "steps": 1200, "loss": 0.25, "eta": 750, "mine": "x"}
    shown      step 900, steps 1200, percent 75, loss 0.25, eta 12m30s, display "75 %"
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from ddpjob_runtime import protocol

from ddpjob.api.job_spec import Json
from ddpjob.api.job_status import format_time, known_time
from ddpjob.core.view import View, is_number

REFRESH = timedelta(seconds=2)
"""Minimum time between two writes of the status that only update the progress."""

SHOWN = timedelta(minutes=1)
"""Minimum time that a lagging rank stays in the status."""
MOST_SLOWDOWN = 1000.0
_INTEGERS = ("epoch", "epochs", "step", "steps", protocol.AT_RISK, protocol.SNAPSHOT_BYTES)
_OF_MEMORY = (protocol.AT_RISK, protocol.SNAPSHOT_BYTES)
_OF_A_GROUP = ("eta", "samplesPerSecond", "speedDisplay", *_OF_MEMORY)
_LARGEST = 2**53
"""The largest integer that every JSON reader parses exactly."""
_METRICS = 100
"""Maximum number of metrics in the status, because a script may report a new metric at every
step."""


def show_progress(
    shown: Json, reported: Json, now: datetime, *, at_once: bool, stragglers: Sequence[Json] = ()
) -> Json:
    """Return the progress that the status is to show.

    The result is `reported` in the form of the status, or `shown` if nothing has changed. Within
    REFRESH of the last write, the result is `shown` too, unless `at_once` is true, a loss or speed
    is reported for the first time, or the script begins again at step 0. `stragglers` comes from
    `show_stragglers`.
    """
    if not reported:
        return {key: value for key, value in shown.items() if key != "stragglers"} if "stragglers" in shown else shown
    last = known_time(shown.get("updatedAt"))
    first = protocol.awaited_figures(reported) - protocol.awaited_figures(shown)
    again = _begins_at_zero(shown, reported)
    if last is not None and not (at_once or first or again) and timedelta(0) <= now - last < REFRESH:
        return shown
    # A coordinator that replaces a lost one has no figures until the ranks report again, and a
    # group that is ending may never report again. Keep the last figures of the lost coordinator
    # until there are new ones.
    kept = {} if reported.keys() & {"epoch", "step"} else without_speed(shown)
    fresh: Json = {key: value for key, value in kept.items() if key not in ("stragglers", "updatedAt")}
    fresh |= {
        name: int(reported[name])
        for name in _INTEGERS
        if is_number(reported.get(name)) and abs(reported[name]) <= _LARGEST
    }
    loss, speed, eta = reported.get("loss"), reported.get("samplesPerSecond"), reported.get("eta")
    if is_number(loss):
        fresh |= {"loss": loss, "lossDisplay": f"{loss:z.4g}"}
    elif "loss" in reported:
        fresh.pop("loss", None)
        fresh["lossDisplay"] = "nan"
    if speed is not None and is_number(speed):
        fresh |= {"samplesPerSecond": round(speed, 1), "speedDisplay": f"{speed:,.0f}/s"}
    if eta is not None:
        fresh["eta"] = duration(eta) if is_number(eta) else protocol.escaped(str(eta))
    if isinstance(reported.get("metrics"), dict):
        # Escape the names of metrics. The API server would replace a lone half of a surrogate pair,
        # so the next report would always differ from the stored one.
        numbers = [(protocol.escaped(str(k)), v) for k, v in reported["metrics"].items() if is_number(v)]
        fresh["metrics"] = dict(numbers[:_METRICS])
        if "speedDisplay" not in fresh and protocol.COUNTED_SPEED in fresh["metrics"]:
            fresh["speedDisplay"] = f"{fresh['metrics'][protocol.COUNTED_SPEED]:.3g} steps/s"
    if stragglers:
        fresh["stragglers"] = list(stragglers)
    # A coordinator that replaces a lost one learns the environment only when rank 0 starts again.
    known = protocol.read_environment(reported.get(protocol.ENVIRONMENT)) or shown.get(protocol.ENVIRONMENT)
    fresh |= {protocol.ENVIRONMENT: known} if known else {}
    fresh |= _start(shown, reported, fresh)
    fresh |= _summary(fresh)
    if fresh == {key: value for key, value in shown.items() if key != "updatedAt"}:
        return shown
    return fresh | {"updatedAt": format_time(now)}


def _begins_at_zero(shown: Json, reported: Json) -> bool:
    """Whether the script has started again and reset its step counter."""
    step, before = reported.get("step"), shown.get("step")
    return protocol.RESUMED in reported and is_number(step) and is_number(before) and step < before


def _start(shown: Json, reported: Json, fresh: Json) -> Json:
    """Return the last step before a restart, and whether the script continued from a checkpoint.

    Both fields are known only if the script's steps are counted automatically.
    """
    if protocol.RESUMED not in reported or "step" not in fresh:
        return {}
    before = shown["step"] if _begins_at_zero(shown, reported) else shown.get("stepsBefore")
    said = reported[protocol.RESUMED]
    known = said if said in protocol.RESUMED_WORDS else protocol.UNKNOWN
    return {} if before is None else {"stepsBefore": before, "resumed": known}


def began_again(progress: Json) -> str:
    """Return a note if the script may not have continued from a checkpoint; otherwise empty."""
    known, before = progress.get("resumed"), progress.get("stepsBefore")
    if before is None or known == protocol.YES:
        return ""
    if known == protocol.NO:
        return (
            f"after the last restart the script seems to have started again from step 0, because its optimizer had no "
            f"state from the {before} earlier steps (see docs/own-scripts.md to make it resume)"
        )
    return (
        "it is unknown whether the script continued from a checkpoint after the last restart; report its steps with "
        "ddpjob_report.report()"
    )


def without_speed(progress: Json) -> Json:
    """Return the progress without figures of a training group, such as speed and remaining time."""
    kept = {name: value for name, value in progress.items() if name not in _OF_A_GROUP}
    if isinstance(kept.get("metrics"), dict):
        kept["metrics"] = {name: value for name, value in kept["metrics"].items() if name != protocol.COUNTED_SPEED}
    return kept


def without_future(progress: Json) -> Json:
    """Return the progress of a finished job, without the remaining time and the steps at risk."""
    return {name: value for name, value in progress.items() if name not in ("eta", *_OF_MEMORY)}


def show_stragglers(view: View) -> list[Json]:
    """Return the lagging ranks, with their pods, in the form of status.progress.

    The script reports ranks, and the operator adds pods and times. A rank is shown for at least
    SHOWN, so that a rank close to the limit causes few events. A rank is removed if the group stops
    training, or if the next round gives the rank to a different pod.
    """
    report, now, procs = view.report, view.now, view.job.spec.procs_per_node
    if report is None or report.state is not protocol.CoordinatorState.RUNNING:
        return []
    members = {member.rank: member.pod for member in report.members if member.rank is not None}
    hosts = {pod.name: pod.host for pod in view.pods if pod is not None}
    was = view.status.progress.get("stragglers") or ()
    shown = {
        entry["rank"]: entry
        for entry in was
        if {"rank", "pod", "slowdown"} <= entry.keys() and members.get(entry["rank"] // procs) == entry["pod"]
    }
    reported: dict[int, Json] = {}
    for found in protocol.read_stragglers(report.progress.get(protocol.STRAGGLERS)):
        pod = members.get(found["rank"] // procs)
        if pod not in hosts:
            continue  # This rank does not exist.
        since = shown.get(found["rank"], {}).get("since", format_time(now))
        slowdown = round(float(min(found["slowdown"], MOST_SLOWDOWN)), 1)
        reported[found["rank"]] = {"rank": found["rank"], "pod": pod, "slowdown": slowdown, "since": since}
        if hosts[pod]:
            reported[found["rank"]]["node"] = hosts[pod]
    kept = [rank for rank in shown if rank in reported or _is_fresh(shown[rank], now)]
    ranks = [*kept, *(rank for rank in reported if rank not in shown)][: protocol.MAX_STRAGGLERS]
    entries = [reported.get(rank) or shown[rank] for rank in ranks]
    return sorted(entries, key=lambda entry: (-entry["slowdown"], entry["rank"]))


def _is_fresh(entry: Json, now: datetime) -> bool:
    since = known_time(entry.get("since"))
    return since is not None and timedelta(0) <= now - since < SHOWN


def _summary(fresh: Json) -> Json:
    """Return `percent` and the text of the `display` column, if the reported counts suffice."""
    step, steps, epoch, epochs = (fresh.get(name) for name in ("step", "steps", "epoch", "epochs"))
    parts = []
    if epoch is not None:
        parts.append(f"epoch {epoch}/{epochs}" if epochs is not None else f"epoch {epoch}")
    summary: Json = {}
    if step is not None and steps is not None and steps > 0:
        summary["percent"] = max(0, min(100, 100 * step // steps))
        parts.append(f"{summary['percent']} %")
    elif step is not None:
        parts.append(f"step {step}" + (" since the restart" if "stepsBefore" in fresh else ""))
    return summary | ({"display": " ".join(parts)} if parts else {})


def duration(seconds: float) -> str:
    """Return a number of seconds in the form `45s`, `12m30s` or `3h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
