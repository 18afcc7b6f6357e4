"""Decides whether a job's claims can serve all its nodes, and whether the job may use an existing
claim.

Pods that mount an unsuitable claim wait without a clear error, or train from scratch unnoticed. So
no pod is created until every claim exists, suits the number of nodes, and holds the right data.

- A claim that only one Kubernetes node can mount cannot serve several nodes.
- A claim from `claimTemplate` is used only if this job made it, or an earlier job with the same
  name made it from an equal template. If the claim is lost with its checkpoints, no new pod is
  created.
- A checkpoint folder belongs to the first job that starts with it, until that job has ended or is
  deleted. A suspended job keeps its folder. Another job that uses the same folder on the same
  volume waits (`FolderTaken`), because it would continue and overwrite the first job's training.
  Jobs share a folder only if all of them set `exclusive: false`.

Example with three jobs that name the claim `checkpoints`:

    a                   uses the folder a, by default
    b, subPath: a       waits until a has ended, then continues its training
    c                   uses the folder c, at the same time as the others

Why: docs/decisions/0027.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import WhenDeleted
from ddpjob.api.job_status import ConditionType, SlotState, format_time
from ddpjob.core.world import ClaimView, PodView, World, node_pod_name

_ONE_HOST = {"ReadWriteOnce", "ReadWriteOncePod"}
FOLDER_TAKEN = "FolderTaken"
FIELD = "spec.storage.checkpoints.claimTemplate"


@dataclass(frozen=True)
class Unusable:
    """Why pods are not created, and what the user can do."""

    reason: str
    message: str


def find_unusable_claim(job: DDPJob, world: World) -> Unusable | None:
    """Return why a claim cannot serve the job's pods; None if all claims can.

    The result describes the first claim with a problem. If claims are missing, it names all the
    claims that the user has to create.
    """
    template = job.spec.storage.claim_template
    if world.folder_user:
        return Unusable(FOLDER_TAKEN, _taken(job, world.folder_user))
    for claim in world.claims:
        problem = _goes_with_job(job, claim)
        if problem is None and claim.name == job.made_claim:
            problem = _not_ours(job, world, claim) if claim.exists else _lost(job, claim)
        if problem is not None:
            return problem
        if template is not None and claim.name == job.made_claim and not claim.exists:
            claim = replace(claim, exists=True, access_modes=tuple(template.spec["accessModes"]))
        if not claim.exists:
            return Unusable("ClaimNotFound", _missing(job, world.claims))
        if not can_serve_all(claim.access_modes, job.spec.pods, one_per_node=job.spec.scheduling.one_pod_per_node):
            modes = ", ".join(claim.access_modes)
            remedy = "use a claim with ReadWriteMany (or ReadOnlyMany for data), or set spec.nodes to 1"
            if claim.name == job.made_claim:
                remedy = f"recreate the job with {FIELD}.spec.accessModes [ReadWriteMany], or with spec.nodes 1"
            message = (
                f"claim {claim.name} ({modes}) can be mounted by only one Kubernetes node, but {_sizes(job)}; {remedy}"
            )
            return Unusable("VolumeSingleNode", message)
    return None


def _missing(job: DDPJob, claims: Iterable[ClaimView]) -> str:
    names = [claim.name for claim in claims if not claim.exists and claim.name != job.made_claim]
    what, them = f"the claim {names[0]}, which does", "it"
    if len(names) > 1:
        what, them = f"the claims {', '.join(names)}, which do", "them"
    return (
        f"spec.storage refers to {what} not exist in namespace {job.namespace}; create {them}; the job then starts "
        "automatically"
    )


def find_folder_user(job: DDPJob, others: Iterable[DDPJob]) -> str:
    """Return the name and phase of another job that uses this job's folder; empty if none does.

    A job that already has its folder keeps it, so the folder is checked only for a job that is
    starting or waiting. If two jobs start at once, the older job gets the folder.
    """
    key = _folder(job)
    if not key or _has_its_folder(job):
        return ""
    for other in others:
        if other.uid == job.uid or other.status.terminal or other.spec.managed_elsewhere or _folder(other) != key:
            continue
        shared = not _is_exclusive(job) and not _is_exclusive(other)
        if not shared and (_has_its_folder(other) or _age(other) < _age(job)):
            return f"{other.name}, which is {other.status.phase}"
    return ""


def _folder(job: DDPJob) -> tuple[str, ...]:
    """Return the kind, the volume and the path that identify the job's checkpoint folder.

    The result is empty if no other job can use the same folder.
    """
    volume = job.spec.storage.checkpoints
    if volume is None or volume.url or volume.read_only:
        return ()
    claim = job.made_claim or volume.claim_name
    if claim:
        return "claim", claim, job.checkpoint_folder
    if volume.nfs:
        return "NFS share", f"{volume.nfs.get('server')}:{_same(volume.nfs.get('path'))}", job.checkpoint_folder
    return ("folder", _same(volume.host_path), job.checkpoint_folder) if volume.shared else ()


def _same(path: str | None) -> str:
    """Return a path in the one form that all spellings of it have, without a final slash."""
    return f"/{posixpath.normpath(f'/{path}').lstrip('/')}"


def _is_exclusive(job: DDPJob) -> bool:
    return job.spec.storage.checkpoints is None or job.spec.storage.checkpoints.exclusive


def _has_its_folder(job: DDPJob) -> bool:
    """Whether the job has begun to use its folder.

    A job that was suspended before it got pods has not used the folder yet.
    """
    status, scheduled = job.status, job.status.condition(ConditionType.SCHEDULED)
    if not status.slots or (scheduled is not None and scheduled.reason == FOLDER_TAKEN):
        return False
    began = any(slot.state is not SlotState.PLANNED for slot in status.slots)
    return began or status.round + status.rendezvous.generation > 0 or not status.holds(ConditionType.SUSPENDED)


def _age(job: DDPJob) -> tuple[str, str]:
    return format_time(job.created) or "", job.uid


def _taken(job: DDPJob, user: str) -> str:
    kind, volume, folder = _folder(job)
    where = f"folder {folder} of {kind} {volume}" if folder else f"the root of {kind} {volume}"
    return (
        f"{where} is in use by job {user}; this job starts when the other job has finished. To use a separate folder, "
        f"create this job without storage.checkpoints.subPath. To share the folder, set "
        f"storage.checkpoints.exclusive: false in both jobs"
    )


def lacks_claim(job: DDPJob, world: World) -> bool:
    """Whether the claim of the job's claimTemplate is missing."""
    return any(claim.name == job.made_claim and not claim.exists for claim in world.claims)


def has_claim(job: DDPJob, world: World) -> bool:
    """Whether the claim that the job makes exists and belongs to the job."""
    return any(c.name == job.made_claim and c.exists and not _not_ours(job, world, c) for c in world.claims)


def list_claims_to_read(job: DDPJob, pods: Iterable[PodView]) -> tuple[str, ...]:
    """Return the names of the claims that this reconcile must read.

    All claims are read until a pod is active. In a job with several pods, they are read until two
    pods are placed, because a claim that can serve one pod cannot always serve two. Later, only the
    claim that the job made is read: until the status shows that the claim was made, and whenever a
    pod is missing. If a user has deleted this claim, a replacement pod must not train from scratch.
    """
    slots = job.status.slots
    wanted = {node_pod_name(job, i, s.attempt) for i, s in enumerate(slots) if s.state is not SlotState.SUCCEEDED}
    there = wanted & {p.name for p in pods if p.host and not p.ended and p.deleted_at is None}
    done = len(slots) - len(wanted)
    if not job.status.active or len(there) < 2 <= job.spec.pods - done:
        return job.claims
    if not job.made_claim:
        return ()
    return () if job.status.claim_made and wanted <= there else (job.made_claim,)


def _goes_with_job(job: DDPJob, claim: ClaimView) -> Unusable | None:
    """Return why deleting the job would also delete a claim that the spec wants to keep.

    A claimTemplate cannot change, but it can be removed and added again with a different
    `whenDeleted`. If no job made the claim, its owners are ignored, because the author of the claim
    chose them.
    """
    template = job.spec.storage.claim_template
    delete = template is not None and template.when_deleted is WhenDeleted.DELETE and claim.name == job.made_claim
    if delete or not claim.template or job.uid not in claim.owners:
        return None
    patch = json.dumps({"metadata": {"ownerReferences": [{"$patch": "delete", "uid": job.uid}]}}, separators=(",", ":"))
    message = (
        f"the claim {claim.name} was created with whenDeleted: Delete and would be deleted with the job, although "
        f"{FIELD} no longer requests this; to keep the claim, run kubectl patch pvc {claim.name} --namespace "
        f"{job.namespace} --patch '{patch}'; the job then continues automatically"
    )
    return Unusable("ClaimTaken", message)


def _not_ours(job: DDPJob, world: World, claim: ClaimView) -> Unusable | None:
    """Return why the job cannot use an existing claim for its claimTemplate; None if it can.

    The job can use the claim if this job, or an earlier job with the same name, made the claim from
    an equal template. Names are unique in a namespace, so the earlier job is gone. Even a claim
    that this job made may not match, because a claimTemplate can be removed and a different one
    added.
    """
    what = f"the claim {claim.name} of {FIELD}"
    if any(uid != job.uid for uid in claim.owners):
        why = "exists and will be deleted with its owner, such as an earlier job"
        return Unusable("ClaimTaken", f"{what} {why}; {_WAIT}")
    if claim.deleting:
        return Unusable("ClaimTaken", f"{what} is being removed; the operator creates a new claim afterwards")
    if claim.made_for != job.name:
        return Unusable("ClaimTaken", f"{what} exists, but was not created by a job with this name; {_USE}")
    if claim.template != world.claim_template:
        why = "was kept from an earlier job with this name, and was created from a different claimTemplate"
        if claim.made_by == job.uid:
            why = "was created by this job from a different claimTemplate"
        return Unusable("ClaimTaken", f"{what} {why}; {_USE}")
    return None


def _lost(job: DDPJob, claim: ClaimView) -> Unusable | None:
    """Describe the loss of the job's checkpoints if their claim is gone; None if nothing was lost.

    A job that has lost its checkpoints must not train from scratch unnoticed.
    """
    if not (job.status.trained and job.status.claim_made):
        return None
    message = (
        f"the claim {claim.name} of {FIELD} no longer exists, and the checkpoints in it are lost; to train from the "
        "beginning, delete the job and create it again; to continue from a copy of the checkpoints, suspend the job, "
        "remove claimTemplate, set claimName to the claim with the copy, and set subPath to `.`"
    )
    return Unusable("ClaimNotFound", message)


_USE = (
    "to use the claim as it is, remove claimTemplate, set claimName to this claim, and set subPath to `.`; otherwise "
    "delete the claim, or choose a different name for the job"
)
_WAIT = "wait until the claim is removed, or choose a different name for the job"


def _sizes(job: DDPJob) -> str:
    return f"spec.nodes is {job.spec.nodes}" + (f" and spec.spares {job.spec.spares}" if job.spec.spares else "")


def can_serve_all(access_modes: Collection[str], pods: int, *, one_per_node: bool) -> bool:
    """Whether this many pods can all mount a claim with these access modes.

    Pods on the same host can share a ReadWriteOnce claim, but not a ReadWriteOncePod claim.
    """
    modes = set(access_modes)
    shared = not modes or not modes <= _ONE_HOST
    return shared or pods <= 1 or (not one_per_node and modes != {"ReadWriteOncePod"})
