"""Decides whether deleting pods would destroy the only copy of a job's newest state.

If a job has no `storage.checkpoints`, its checkpoints and in-memory states exist only in its pods.
Each training pod has a copy, so the state survives until the last of these pods is deleted. The
operator cannot prevent deletions by users or by the cluster, but it must not cause such a loss
itself. Before it yields a gang's room, drops slots or moves a pod, it therefore asks this module
which pods hold the state.

- If the deletion would remove the last copy, the operator waits.
- The exception is a gang that waits for room. It yields its pods if another job waits for room too,
  because otherwise the two jobs could wait for each other forever, each with half of its pods.

Example with 2 nodes, no checkpoints, and a cluster of two machines:

    train-1-0 is drained     train-0-0 is the only pod that has trained, so it holds the state
    30 s without room        the pod stays, because no other job waits for its node
    the machine returns      train-1-1 gets the state from train-0-0, and no step is lost
    another job waits        train-0-0 is deleted, and the event states the cost

A changed spec or key replaces all pods without this check, because the user or administrator chose
to change it.

Why: docs/decisions/0016.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpjob_runtime.protocol import COPY_STEP, CoordinatorState, MemberState

from ddpjob.api.job_spec import JobSpec
from ddpjob.core.view import View
from ddpjob.core.world import Role

_OF_THE_POD = frozenset({"name", "emptyDir", "configMap", "secret", "projected", "downwardAPI", "image", "ephemeral"})
"""Keys of volumes in a podTemplate. A volume with only these keys is either read-only or deleted
with its pod, so it cannot preserve a job's state."""


ONLY_COPY, STATE = "OnlyCopy", "the newest state"
"""The reason that conditions and events give for keeping a pod, and the phrase that messages use
for the state."""


def find_holders(view: View) -> frozenset[str]:
    """Return the names of the pods that hold the only copies of the job's latest state.

    These are the training pods or, while no group trains, the living pods that trained before the
    last break. The result is empty if the state may also be stored elsewhere.
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
    """Whether the job's state may also be stored outside its pods.

    The state may be in storage.checkpoints or in any other writable volume that outlives the pods.
    If the script reports that it copies checkpoints, the state may also be in a bucket.
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
    """Return why surplus pods stay after a job has been made smaller.

    The result is empty if no surplus pod stays.

    A smaller job drops its last slots, but not while only the pods in these slots hold the latest
    state.
    """
    going = {pod.name for pod in view.pods[view.job.spec.pods :] if pod is not None}
    holders = find_holders(view) if going else frozenset()
    if not holders or not holders <= going:
        return ""
    return (
        f"spec.nodes or spec.spares was lowered, but pod {min(holders)} is kept until another pod trains, because no "
        f"other pod holds {STATE}"
    )
