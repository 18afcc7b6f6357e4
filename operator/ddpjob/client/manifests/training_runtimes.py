"""Completes a TrainJob of Kubeflow Trainer with the settings of the runtime that it names.

A v2 TrainJob contains few settings. A runtime (TrainingRuntime or ClusterTrainingRuntime) has the
image, the volumes, the number of nodes and the initializers, and the TrainJob overrides parts of
it. Kubeflow's controller merges both in this order, and so does this module:

1. the pod template of the runtime's replicated job `node`;
2. `spec.trainer` over its container `node`: image, command, args, env, resources;
3. `spec.podTemplateOverrides` and `spec.runtimePatches` for the job `node`, by strategic merge.

The TrainJob's `numNodes` and `numProcPerNode` take precedence over `mlPolicy`. An initializer
becomes an init container, because a DDPJob has no other jobs. The initializer's `storageUri`
becomes the container's variable STORAGE_URI.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ddpjob.api.job_spec import Json
from ddpjob.api.merging import merge

KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")
TRAINER_GROUP = "/apis/trainer.kubeflow.org/v1alpha1"
_NODE = "node"
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_INITIALIZERS = {"dataset-initializer": "dataset", "model-initializer": "model"}
_COUNTERPARTS = {
    "ttlSecondsAfterFinished": "runPolicy.ttlSecondsAfterFinished",
    "activeDeadlineSeconds": "runPolicy.activeDeadlineSeconds",
    "backoffLimit": "recovery.maxRestarts",
    "failurePolicy": "recovery.maxRestarts",
    "podFailurePolicy": "recovery.rules",
}
"""Maps fields of the runtime's JobSet or Job to the DDPJob fields with the same purpose."""


@dataclass
class CompletedTrainJob:
    """The pod template for the nodes of a TrainJob, and the other settings from its runtime."""

    template: Json
    container: str = _NODE
    nodes: Any = None
    procs: Any = None
    scheduling: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def named_runtime(manifest: Mapping[str, Any], runtimes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the runtime that the TrainJob refers to; None if `runtimes` does not contain it."""
    reference = (manifest.get("spec") or {}).get("runtimeRef") or {}
    kind, name = reference.get("kind") or KINDS[0], reference.get("name")
    found = (r for r in runtimes if r.get("kind") == kind and (r.get("metadata") or {}).get("name") == name)
    return next(found, None)


def runtime_paths(manifest: Mapping[str, Any], namespace: str) -> Iterator[tuple[str, str]]:
    """Yield the kind of the runtime that a TrainJob names, and its path on the API server.

    If the manifest does not name a runtime, nothing is yielded.
    """
    reference = (manifest.get("spec") or {}).get("runtimeRef") or {}
    namespace = (manifest.get("metadata") or {}).get("namespace") or namespace
    if manifest.get("kind") == "TrainJob" and reference.get("name"):
        kind = reference.get("kind") or KINDS[0]
        below = "" if kind == KINDS[0] else f"/namespaces/{namespace}"
        yield kind, f"{TRAINER_GROUP}{below}/{kind.lower()}s/{reference['name']}"


def complete(manifest: Mapping[str, Any], runtime: Mapping[str, Any]) -> CompletedTrainJob:
    """Merge a TrainJob with its runtime.

    Raises AttributeError or TypeError if a field has a value of the wrong type.
    """
    spec, theirs = manifest.get("spec") or {}, runtime.get("spec") or {}
    trainer, policy = spec.get("trainer") or {}, theirs.get("mlPolicy") or {}
    jobs = {
        str(job.get("name")): job for job in (theirs.get("template") or {}).get("spec", {}).get("replicatedJobs") or ()
    }
    node = next((job for job in jobs.values() if _step(job) == "trainer"), jobs.get(_NODE)) or {}
    made = CompletedTrainJob(deepcopy(_pod_template(node)))
    pod = made.template.setdefault("spec", {})
    containers = pod.setdefault("containers", [{"name": _NODE}])
    main = next((c for c in containers if c.get("name") == _NODE), containers[0])
    made.container = main.setdefault("name", _NODE)
    main |= {key: trainer[key] for key in ("image", "command", "args") if trainer.get(key)}
    if trainer.get("resourcesPerNode"):
        main["resources"] = trainer["resourcesPerNode"]
    if trainer.get("env"):
        names = {variable.get("name") for variable in trainer["env"]}
        main["env"] = [v for v in main.get("env") or () if v.get("name") not in names] + list(trainer["env"])
    name = str(node.get("name") or _NODE)
    for override in (*_overrides(spec, name), *_patches(spec, name)):
        made.template = merge(made.template, override)
    if others := dict.fromkeys(target for target in _targets(spec) if target not in (name, _NODE)):
        made.notes.append(
            f"podTemplateOverrides and runtimePatches for {', '.join(others)}: left out; change the init containers in "
            "podTemplate instead"
        )
    _add_initializers(made, spec.get("initializer") or {}, jobs)
    made.nodes = trainer.get("numNodes") or policy.get("numNodes")
    torch = policy.get("torch") or {}
    procs = trainer.get("numProcPerNode")
    made.procs = torch.get("numProcPerNode") if procs is None else procs
    made.procs = None if made.procs == "auto" else made.procs
    if torch.get("elasticPolicy"):
        made.notes.append("mlPolicy.torch.elasticPolicy of the runtime: set spec.elastic instead")
    if other := [name for name in policy if name not in ("numNodes", "torch")]:
        made.notes.append(
            f"mlPolicy.{other[0]} of the runtime: left out, because only torch can be converted; what the job "
            "runs depends only on the command"
        )
    _gang(made, theirs.get("podGroupPolicy") or {})
    _report_jobs(made, theirs.get("template") or {}, node, jobs)
    return made


def _report_jobs(made: CompletedTrainJob, whole: Mapping[str, Any], node: Json, jobs: Mapping[str, Json]) -> None:
    """Add a note about each part of the runtime that is not converted.

    These parts are settings and metadata of the JobSet, settings of the Job, and jobs that neither
    train nor initialize anything.
    """
    settings = {**((node.get("template") or {}).get("spec") or {}), **(whole.get("spec") or {})}
    made.notes += [
        f"{name} of the runtime: left out; set {counterpart}"
        for name, counterpart in _COUNTERPARTS.items()
        if name in settings
    ]
    metadata = whole.get("metadata") or {}
    if keys := [*(metadata.get("labels") or ()), *(metadata.get("annotations") or ())]:
        made.notes.append(
            f"template.metadata of the runtime: {', '.join(keys)} belonged to the JobSet; copy the label for Kueue to "
            "metadata, and what the pods need to podTemplate.metadata"
        )
    others = [name for name, job in jobs.items() if job is not node and not _initializes(job)]
    if others:
        made.notes.append(
            f"replicatedJobs {', '.join(others)} of the runtime: left out, because a DDPJob has only training pods; "
            "create a Job for each"
        )


def _initializes(job: Json) -> str | None:
    """Return the spec.initializer field that a runtime's job is for: dataset, model or None."""
    return _INITIALIZERS.get(_step(job)) or _INITIALIZERS.get(str(job.get("name")))


def _step(job: Mapping[str, Any]) -> str:
    labels = ((job.get("template") or {}).get("metadata") or {}).get("labels") or {}
    return str(labels.get(_STEP, ""))


def _pod_template(job: Mapping[str, Any]) -> Json:
    template = ((job.get("template") or {}).get("spec") or {}).get("template") or {}
    return {key: template[key] for key in ("metadata", "spec") if template.get(key)}


def _overrides(spec: Mapping[str, Any], node: str) -> Iterator[Json]:
    """Yield the entries of spec.podTemplateOverrides that apply to the training pods.

    `node` is the name of the runtime's training job.
    """
    for override in spec.get("podTemplateOverrides") or ():
        targets = [target.get("name") for target in override.get("targetJobs") or ()]
        if not targets or node in targets or _NODE in targets:
            yield {key: override[key] for key in ("metadata", "spec") if override.get(key)}


def _patches(spec: Mapping[str, Any], node: str) -> Iterator[Json]:
    """Yield the changes that spec.runtimePatches makes to the training pods."""
    for job in _patched_jobs(spec):
        if job.get("name") in (node, _NODE):
            yield _pod_template(job)


def _patched_jobs(spec: Mapping[str, Any]) -> Iterator[Json]:
    for patch in spec.get("runtimePatches") or ():
        template = (patch.get("trainingRuntimeSpec") or {}).get("template") or {}
        yield from (template.get("spec") or {}).get("replicatedJobs") or ()


def _targets(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of all jobs that podTemplateOverrides and runtimePatches change."""
    for override in spec.get("podTemplateOverrides") or ():
        yield from (str(target.get("name")) for target in override.get("targetJobs") or ())
    yield from (str(job.get("name")) for job in _patched_jobs(spec))


def _add_initializers(made: CompletedTrainJob, wanted: Mapping[str, Any], jobs: Mapping[str, Json]) -> None:
    pod = made.template["spec"]
    for job in jobs.values():
        name, part = str(job.get("name")), _initializes(job)
        given = wanted.get(part or "") or {}
        if part is None or not given:
            continue
        theirs = _pod_template(job).get("spec") or {}
        container: Json = deepcopy(next(iter(theirs.get("containers") or ()), {"name": name}))
        env = {v.get("name"): v for v in (*(container.get("env") or ()), *(given.get("env") or ()))}
        if given.get("storageUri"):
            env["STORAGE_URI"] = {"name": "STORAGE_URI", "value": given["storageUri"]}
        container["env"] = list(env.values())
        if given.get("secretRef"):
            container["envFrom"] = [{"secretRef": given["secretRef"]}]
        pod["initContainers"] = [*(pod.get("initContainers") or ()), container]
        known = {volume.get("name") for volume in pod.get("volumes") or ()}
        pod["volumes"] = [
            *(pod.get("volumes") or ()),
            *(v for v in theirs.get("volumes") or () if v.get("name") not in known),
        ]
        made.notes.append(
            f"initializer.{part}: runs as an init container of every pod; for s3://, use storage.data.url instead"
        )


def _gang(made: CompletedTrainJob, policy: Mapping[str, Any]) -> None:
    if "volcano" in policy:
        made.scheduling["schedulerName"] = "volcano"
        if (policy["volcano"] or {}).get("networkTopology"):
            made.notes.append(
                "podGroupPolicy.volcano.networkTopology of the runtime: left out; use scheduling.sameTopology"
            )
    elif "coscheduling" in policy:
        made.notes.append(
            "podGroupPolicy.coscheduling of the runtime: the operator places gangs with Kubernetes' own PodGroups, "
            "where the cluster serves them (scheduling.gang)"
        )
