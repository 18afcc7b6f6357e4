"""Formats the coordinator's report as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpjob_pod.job_environment import JobEnvironment

from ddpjob_runtime.protocol import (
    CHECKPOINT_TIME,
    COPY_BEHIND,
    COPY_TIME,
    CoordinatorState,
    IncidentKind,
    MemberState,
    Report,
)

FAMILIES = {
    "ddpjob_nodes": "Number of nodes that the job should have",
    "ddpjob_world_nodes": "Number of nodes that train as one group; 0 while no group trains",
    "ddpjob_members": "Number of connected nodes by state",
    "ddpjob_generation": "Generation of the rendezvous",
    "ddpjob_rendezvous_round": "Round of the group",
    "ddpjob_incidents_total": "Breaks of the group by first cause, since this coordinator started",
    "ddpjob_training_interrupted": "1 until the group has completed a step after its last break, otherwise 0",
    "ddpjob_training_overdue": "1 while the group's next step is overdue, otherwise 0",
    "ddpjob_last_recovery_seconds": "Time from the last break to the next step, "
    "or to the next round if no step has ever been reported",
    "ddpjob_train_epoch": "Epoch that the script has reported",
    "ddpjob_train_step": "Step that the script last reported. If training resumes from a checkpoint, "
    "counting continues from the step of the checkpoint",
    "ddpjob_train_planned_steps": "Total number of training steps, as reported",
    "ddpjob_train_loss": "Training loss that the script has reported",
    "ddpjob_train_samples_per_second": "Samples per second over all ranks, as reported; only while nodes train",
    "ddpjob_train_eta_seconds": "Time until training is done, as reported",
    "ddpjob_train_checkpoint_timestamp_seconds": "Unix time at which the newest checkpoint was written to disk, "
    "as reported",
    "ddpjob_train_copy_timestamp_seconds": "Unix time at which the newest checkpoint in the bucket was saved, "
    "as reported",
    "ddpjob_train_copy_behind_seconds": "How long new checkpoints have existed only on the machine that wrote them, "
    "because no copy reached the bucket",
    "ddpjob_progress_metric": "Other figures that the script reports, by name",
}
"""Name of each metric family, with its help text. The operator and the trainer
use the same names.
"""
LABELS = {"ddpjob_members": "state", "ddpjob_incidents_total": "kind", "ddpjob_progress_metric": "name"}
"""Families that have a label in addition to namespace and job_name, with the name of that label."""
SAVED = {
    CHECKPOINT_TIME: "ddpjob_train_checkpoint_timestamp_seconds",
    COPY_TIME: "ddpjob_train_copy_timestamp_seconds",
    COPY_BEHIND: "ddpjob_train_copy_behind_seconds",
}
"""Metrics from the script that do not appear in ddpjob_progress_metric, because each of them has
its own family.
"""
PROGRESS = {
    "epoch": "ddpjob_train_epoch", "step": "ddpjob_train_step", "steps": "ddpjob_train_planned_steps",
    "loss": "ddpjob_train_loss", "samplesPerSecond": "ddpjob_train_samples_per_second",
    "eta": "ddpjob_train_eta_seconds",
}  # fmt: skip


def render(report: Report, incidents: Mapping[IncidentKind, int]) -> str:
    """Return the report in Prometheus' text format, version 0.0.4.

    `incidents` contains the number of incidents of each kind.
    """
    lines: list[str] = []
    states = [m.state for m in report.members]
    own = dict(report.progress.get("metrics", {}))
    moments = {name: own.pop(metric, None) for metric, name in SAVED.items()}
    _family(lines, "ddpjob_nodes", report.nodes)
    trains = report.state == CoordinatorState.RUNNING
    _family(lines, "ddpjob_world_nodes", report.world if trains else 0)
    _labelled(lines, "ddpjob_members", {s: states.count(s) for s in MemberState if s is not MemberState.LOST})
    _family(lines, "ddpjob_generation", report.generation)
    _family(lines, "ddpjob_rendezvous_round", report.round)
    _labelled(lines, "ddpjob_incidents_total", {kind: incidents.get(kind, 0) for kind in IncidentKind})
    _family(lines, "ddpjob_training_interrupted", int(report.recovery.down_since is not None))
    _family(lines, "ddpjob_training_overdue", int(report.overdue is not None))
    _family(lines, "ddpjob_last_recovery_seconds", report.recovery.last_seconds)
    for name, metric in PROGRESS.items():
        _family(lines, metric, report.progress.get(name) if trains or name != "samplesPerSecond" else None)
    for name, value in moments.items():
        _family(lines, name, value)
    _labelled(lines, "ddpjob_progress_metric", own)
    return "\n".join(lines) + "\n"


def _family(lines: list[str], name: str, value: Any) -> None:
    """Append a family with one sample to `lines`. Append nothing if the value is None."""
    if value is not None:
        _head(lines, name)
        lines.append(f"{name}{{{_labels({})}}} {value}")


def _labelled(lines: list[str], name: str, values: Mapping[Any, Any]) -> None:
    """Append a family to `lines`, with one sample for each value of its label."""
    if values:
        _head(lines, name)
    for label, value in values.items():
        lines.append(f"{name}{{{_labels({LABELS[name]: label})}}} {value}")


def kind_of(name: str) -> str:
    """Return the Prometheus type of a family."""
    return "counter" if name.endswith("_total") else "gauge"


def _head(lines: list[str], name: str) -> None:
    lines.append(f"# HELP {name} {FAMILIES[name]}.")
    lines.append(f"# TYPE {name} {kind_of(name)}")


def _labels(more: Mapping[str, Any]) -> str:
    environment = JobEnvironment.read()
    job = {"job_name": environment.name, "namespace": environment.namespace}
    return ",".join(f'{k}="{_escape(v)}"' for k, v in dict(job, **more).items())


def _escape(value: str) -> str:
    # Replace unpaired surrogates, because the text format has no valid escape for them.
    whole = str(value).encode(errors="replace").decode()
    return whole.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
