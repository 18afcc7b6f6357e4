"""The report as Prometheus text."""

from __future__ import annotations

import os
from typing import Any

from ledger import KINDS
from membership import MEMBER_STATES

PROGRESS = {
    "epoch": "ddpjob_epoch", "step": "ddpjob_step", "steps": "ddpjob_steps", "loss": "ddpjob_loss",
    "samplesPerSecond": "ddpjob_samples_per_second", "eta": "ddpjob_eta_seconds",
}  # fmt: skip


def render(group: Any) -> str:
    """Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    course = group.course
    states = [m.state for m in group.members.values()]
    world = course.round.world if course.state == "Running" else 0
    _family(lines, "ddpjob_nodes", "gauge", "Nodes wanted.", [({}, course.size.nodes)])
    _family(lines, "ddpjob_world_nodes", "gauge", "Nodes that train as one group; 0 while none does.", [({}, world)])
    _family(lines, "ddpjob_members", "gauge", "Connected nodes by state.", [({"state": s}, states.count(s)) for s in MEMBER_STATES])
    _family(lines, "ddpjob_generation", "gauge", "Life of the rendezvous.", [({}, group.settings.generation)])
    _family(lines, "ddpjob_rendezvous_round", "gauge", "Round of the group.", [({}, course.last_number)])
    restarts = [({"kind": k}, course.ledger.counts.get(k, 0)) for k in KINDS]
    _family(lines, "ddpjob_incidents_total", "counter", "Breaks of the group by first cause.", restarts)
    down = int(course.down_since is not None)
    _family(lines, "ddpjob_down", "gauge", "1 while the group has not made a step since its last break.", [({}, down)])
    if course.last_recovery is not None:
        _family(lines, "ddpjob_recovery_seconds", "gauge", "Time from the last break to the next step.", [({}, course.last_recovery)])
    for name, metric in PROGRESS.items():
        if group.progress.values.get(name) is not None:
            _family(lines, metric, "gauge", f"Progress: {name}.", [({}, group.progress.values[name])])
    own = [({"name": k}, v) for k, v in group.progress.values.get("metrics", {}).items()]
    if own:
        _family(lines, "ddpjob_progress_metric", "gauge", "Figures the script reports.", own)
    return "\n".join(lines) + "\n"


def _family(lines: list[str], name: str, kind: str, text: str, samples: list[Any]) -> None:
    lines.append(f"# HELP {name} {text}")
    lines.append(f"# TYPE {name} {kind}")
    job = {"job_name": os.environ.get("DDPJOB_NAME", ""), "namespace": os.environ.get("DDPJOB_NAMESPACE", "")}
    for labels, value in samples:
        text = ",".join(f'{k}="{_escape(v)}"' for k, v in dict(job, **labels).items())
        lines.append(f"{name}{{{text}}} {value}")


def _escape(value: str) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
