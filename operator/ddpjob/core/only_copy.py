"""Decides whether deleting pods would destroy the only copy of a job's newest state.

A job without `storage.checkpoints` keeps its checkpoints and the states in memory in its pods. They
outlive any pod while another one that trained is left. What a user or the cluster deletes is gone.
What the operator deletes by its own decision is not: before it yields a gang's room, drops slots
or moves a pod, it asks here which pods hold the newest state.

- If no pod that holds the state would be left, the operator waits.
- A gang that waits for room yields its pods only if another job waits for room, too. Otherwise two
  jobs could wait for each other forever, each with half of its pods.

Example with 2 nodes, no checkpoints, and a cluster of two machines:

    train-1-0 is drained     train-0-0 is the only pod that has trained: it holds the state
    30 s without room        the pod stays, because nobody else waits for its node
    the machine returns      train-1-1 gets the state from train-0-0, and no step is lost
    another job waits        train-0-0 is deleted, and the event says what that costs

A new generation for a changed spec or key is the decision of whoever changed them.

See docs/decisions/0016.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpjob_runtime.protocol import COPY_STEP, CoordinatorState, MemberState

from ddpjob.api.job_spec import JobSpec
from ddpjob.core.view import View
from ddpjob.core.world import Role

_OF_THE_POD = frozenset({"name", "emptyDir", "configMap", "secret", "projected", "downwardAPI", "image", "ephemeral"})
"""Keys of volumes that end with their pod, or that nobody writes to."""


ONLY_COPY, STATE = "OnlyCopy", "the newest state"
"""The reason of pods that stay, and a part of each message about them."""


def find_holders(view: View) -> frozenset[str]:
    """Return the names of the pods that hold the job's newest state, if nothing else does.

    They are the pods that train or, while nothing trains, those that trained before the last break.
    """
    if not view.trained or is_kept_elsewhere(view):
        return frozenset()
    report = view.report
    alive = {p.name for p in view.pods if p is not None and p.main.running and not p.ended and p.deleted_at is None}
    if report is not None and report.state is CoordinatorState.RUNNING:
        return frozenset(m.pod for m in report.members if m.state is MemberState.RUNNING and m.pod in alive)
    slots = zip(view.status.slots, view.pods, strict=True)
    old = {p.name for slot, p in slots if p is not None and p.role is Role.NODE and slot.round < view.status.round}
    return frozenset(alive & old)


def is_kept_elsewhere(view: View) -> bool:
    """Whether the job's state may also be outside its pods.

    That is so with storage.checkpoints, with any other volume that the pods can write to and that
    outlives them, and for a script that reports copies in a bucket.
    """
    if view.job.spec.storage.checkpoints is not None or _mounts_a_volume(view.job.spec):
        return True
    metrics = (progress.get("metrics") for progress in (view.status.progress, view.reported_progress))
    return any(isinstance(each, Mapping) and COPY_STEP in each for each in metrics)


def _mounts_a_volume(spec: JobSpec) -> bool:
    pod: Any = spec.pod_template.get("spec")
    volumes: Any = pod.get("volumes") if isinstance(pod, Mapping) else None
    return any(isinstance(v, Mapping) and not v.keys() <= _OF_THE_POD for v in volumes or ())


def explain_kept(view: View) -> str:
    """Return why pods beyond spec.nodes and spec.spares stay for now; empty if none do.

    The last slots are dropped. They stay while no pod of the other slots holds the newest state.
    """
    going = {pod.name for pod in view.pods[view.job.spec.pods :] if pod is not None}
    holders = find_holders(view) if going else frozenset()
    if not holders or not holders <= going:
        return ""
    return (
        f"pod {min(holders)} would go with the lower spec.nodes or spec.spares, and stays until another pod trains, "
        f"because only it holds {STATE}"
    )
