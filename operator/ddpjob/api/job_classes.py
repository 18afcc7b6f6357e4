"""Job classes: the values and limits that the platform team sets for jobs that name a class."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpjob.api.job import API_VERSION, KIND, DDPJob, classed
from ddpjob.api.job_spec import JobSpec
from ddpjob.api.job_status import ClassLimits, ConditionType, JobClass
from ddpjob.api.merging import CLASS_FIELDS, QUEUE, at, is_empty
from ddpjob.api.reader import validate, with_defaults
from ddpjob.api.schema import Json, without_nulls
from ddpjob.api.submitted_code import split_code

MOST_CLASSES = 100
LARGEST_CLASS = 32 * 1024
"""Maximum size of a class as JSON, in bytes. Classes must be small because the status of every job
contains a copy of the job's class."""
_KEYS = ("namespaces", "spec", QUEUE, "fixed", "limits")
_LIMITS = ("maxNodes", "maxGpusPerNode", "images")
_SETTABLE = (*CLASS_FIELDS, QUEUE)
_GROUPS = frozenset(path.split(".")[0] for path in CLASS_FIELDS if "." in path)
_NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_QUEUE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_MOST = 4096
_OTHER_GPUS = re.compile(r"(^|[./])gpu([./]|$)|/mig-")
"""Matches the names of GPU resources of any kind, not only the job's gpuResource. Examples are
nvidia.com/gpu, nvidia.com/mig-1g.5gb and gpu.intel.com/i915."""


@dataclass(frozen=True)
class Offer:
    """The class that a job would get if it started now, and why the job may not use it."""

    job_class: JobClass | None = None
    """The class that the job names. None if there is no such class, or if jobs in this namespace
    may not use it."""
    known: tuple[str, ...] = ()
    """Names of all classes that jobs in this namespace are allowed to use."""
    problems: tuple[str, ...] = ()
    """Reasons why the job may not use the class. Each reason is a sentence that names the faulty
    field and the remedy."""


@dataclass(frozen=True)
class JobClasses:
    """An operator's classes, and the namespaces whose jobs are allowed to use each class."""

    classes: Mapping[str, JobClass] = field(default_factory=dict)
    namespaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> JobClasses:
        """Read all classes from the chart's `jobClasses` value.

        Raises ValueError with a message that names the faulty field and the remedy.
        """
        if len(found) > MOST_CLASSES:
            raise ValueError(f"{len(found)} classes; at most {MOST_CLASSES} are allowed, so remove some")
        found = {str(name): without_nulls(one) for name, one in found.items()}
        classes = {name: _read(name, one) for name, one in found.items()}
        return cls(classes, {name: tuple(one.get("namespaces", ["*"])) for name, one in found.items()})

    def offer(self, job: DDPJob) -> Offer:
        """Return the class that the job would get if it started now.

        The result is empty unless the job is about to start or resume, because a running job keeps
        its class.
        """
        if not begins(job):
            return Offer()
        known = tuple(sorted(n for n, spaces in self.namespaces.items() if {"*", job.namespace} & set(spaces)))
        if job.spec.class_name not in known:
            return Offer(None, known)
        given = self.classes[job.spec.class_name]
        return Offer(given, known, (*violations(job, given), *_unfit(job, given)))


def lacks_class(job: DDPJob) -> bool:
    """Whether the job names a class that the job's status does not contain yet.

    This is the case for a new job, and after a change of className.
    """
    taken = job.status.job_class
    return bool(job.spec.class_name) and (taken is None or taken.name != job.spec.class_name)


def begins(job: DDPJob) -> bool:
    """Whether the job names a class and is about to start or resume."""
    fresh = not job.status.slots or job.status.holds(ConditionType.SUSPENDED) or lacks_class(job)
    return bool(job.spec.class_name) and fresh and not (job.spec.run_policy.suspend or job.status.terminal)


def violations(job: DDPJob, given: JobClass) -> tuple[str, ...]:
    """Return one sentence for each way in which the job violates this class.

    The job violates the class if it sets a field that only the class may set, or a value above one
    of the class's limits.
    """
    return (*_fixed(job, given), *_exceeded(job, given))


def _fixed(job: DDPJob, given: JobClass) -> Iterator[str]:
    remedy = f"remove it, or ask the platform team to remove it from fixed in class {given.name}"
    for path in given.fixed:
        mine = at(job.written, path)
        if path == "podTemplate":
            mine = split_code(mine, at(given.spec, path))[1]
        if path == "env":
            names = {variable["name"] for variable in given.spec.get("env", ())}
            for variable in mine or ():
                if variable["name"] in names:
                    yield f"spec.env: class {given.name} sets {variable['name']}, so a job cannot set it; {remedy}"
        elif path != QUEUE and not is_empty(path, mine) and mine != at(given.spec, path):
            sets = at(given.spec, path) is not None
            what = (
                f"class {given.name} sets this field, so jobs of the class" if sets else f"jobs of class {given.name}"
            )
            yield f"spec.{path}: {what} cannot set it; {remedy}"


def _exceeded(job: DDPJob, given: JobClass) -> Iterator[str]:
    limits, spec = given.limits, JobSpec.read(classed(job.written, given))
    of_class = f"class {given.name} allows at most"
    if limits.max_nodes is not None and spec.pods > limits.max_nodes:
        spares, remedy = (" including spares", "lower nodes or spares") if spec.spares else ("", "lower nodes")
        yield f"spec.nodes: {spec.pods}{spares}, but {of_class} {limits.max_nodes}; {remedy}"
    gpus = _gpus_of_pod(spec)
    if limits.max_gpus_per_node is not None and gpus > limits.max_gpus_per_node:
        yield f"spec.gpusPerNode: {gpus}, but {of_class} {limits.max_gpus_per_node}; lower gpusPerNode"
    if limits.images:
        images = {"spec.image": spec.image}
        images |= {
            f"spec.podTemplate, container {c.get('name')}": c["image"] for c in _containers(spec) if "image" in c
        }
        for where, image in images.items():
            if not any(_fits(str(image), pattern) for pattern in limits.images):
                allowed = f"not one of the images that class {given.name} allows ({', '.join(limits.images[:10])})"
                yield f"{where}: {image} is {allowed}; use one of them"


def _gpus_of_pod(spec: JobSpec) -> int:
    """Return the number of GPUs that a node pod needs, as Kubernetes counts them.

    The result is the larger of two numbers: the total for all ordinary containers, and the number
    for the init container that needs the most. Init containers run one at a time, so their GPUs are
    not added up. A sidecar keeps running, so its GPUs count toward every later container.
    """
    ending, sidecars = 0, 0
    for container in _containers(spec, "initContainers"):
        own = _gpus(container, spec.gpu_resource)
        if container.get("restartPolicy") == "Always":
            sidecars += own
        else:
            ending = max(ending, sidecars + own)
    others = ({"resources": spec.resources}, *_containers(spec, "containers"))
    beside = sum(_gpus(container, spec.gpu_resource) for container in others)
    return max(ending, spec.gpus_per_node + sidecars + beside)


def _containers(spec: JobSpec, *kinds: str) -> Iterator[Json]:
    """Yield the containers of the given kinds in podTemplate, including the trainer.

    If no kinds are given, yield ordinary containers and init containers. Malformed entries are
    skipped, because the validation of podTemplate reports them.
    """
    pod = spec.pod_template.get("spec")
    for kind in kinds or ("containers", "initContainers"):
        listed = pod.get(kind) if isinstance(pod, Mapping) else None
        yield from (c for c in listed if isinstance(c, dict)) if isinstance(listed, list) else ()


def _gpus(container: Json, resource: str) -> int:
    """Return the number of GPUs of all kinds that a container requests.

    Counting only `resource` would let a job evade the limit with GPUs of a different kind, because
    the job itself chooses `resource` in gpuResource.
    """
    resources = container.get("resources")
    limits = resources.get("limits") if isinstance(resources, Mapping) else None
    asked = limits.items() if isinstance(limits, Mapping) else ()
    values = [str(value) for name, value in asked if name == resource or _OTHER_GPUS.search(str(name))]
    return sum(int(value) if value.isdecimal() and len(value) < 10 else _MOST for value in values)


def _fits(image: str, pattern: str) -> bool:
    return image.startswith(pattern[:-1]) if pattern.endswith("*") else image == pattern


def _unfit(job: DDPJob, given: JobClass) -> Iterator[str]:
    """Yield a message for each CRD rule that the job violates once the class is applied.

    The job and the class can each be valid alone and still form a forbidden combination together.
    """
    from ddpjob.api.cel import check_rules

    spec = classed(job.written, given)
    if not spec.get("image"):
        yield f"spec.image: required, but neither the job nor class {given.name} sets it; add it"
        return
    whole = with_defaults({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": job.name}, "spec": spec})
    if job.status.slots:
        # Give the object a status, because some rules apply only to new jobs, which have none.
        whole["status"] = {}
    for problem in check_rules(whole, None):
        yield f"{problem} (with class {given.name})"


# --- reading the platform team's classes -------------------------------------------------------------------------


def _read(name: str, given: Any) -> JobClass:
    """Read one class from the platform team's values.

    Raises ValueError with a message that names the faulty field and the remedy.
    """
    if not _NAME.fullmatch(name) or len(name) > 63:
        raise ValueError(f"{name!r} is not a valid class name; use at most 63 lower-case letters, digits and -")
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}: must be a mapping with the keys {', '.join(_KEYS)}")
    for key in given:
        if key not in _KEYS:
            raise ValueError(f"{name}.{key}: unknown; the fields are {', '.join(_KEYS)}")
    if len(json.dumps(given)) > LARGEST_CLASS:
        raise ValueError(
            f"{name}: must be at most {LARGEST_CLASS} bytes, because the status of every job of the class contains it"
        )
    for key in ("namespaces", "fixed"):
        _texts(given.get(key, []), f"{name}.{key}")
    for path in given.get("fixed", ()):
        if path not in _SETTABLE:
            raise ValueError(f"{name}.fixed: a class cannot fix {path}; the fields are {', '.join(_SETTABLE)}")
    queue = given.get(QUEUE, "")
    if not isinstance(queue, str) or (queue and not (_QUEUE_NAME.fullmatch(queue) and len(queue) <= 63)):
        raise ValueError(f"{name}.{QUEUE}: {queue!r} is not a valid LocalQueue name")
    spec, limits = _spec(name, given.get("spec", {})), _limits(name, given.get("limits", {}))
    content = json.dumps([spec, queue, given.get("fixed", []), given.get("limits", {})], sort_keys=True)
    mark = hashlib.sha256(content.encode()).hexdigest()[:10]
    return JobClass(name=name, mark=mark, spec=spec, queue=queue, fixed=tuple(given.get("fixed", ())), limits=limits)


def _spec(name: str, spec: Any) -> Json:
    if not isinstance(spec, Mapping):
        raise ValueError(f"{name}.spec: must be a mapping of fields of a DDPJob's spec")
    for key, value in spec.items():
        below = [f"{key}.{inner}" for inner in value] if key in _GROUPS and isinstance(value, Mapping) else [key]
        for path in below:
            if path not in CLASS_FIELDS:
                remedy = f"only a job can set it; a class can set {', '.join(CLASS_FIELDS)}"
                raise ValueError(f"{name}.spec.{path}: not allowed in a class; {remedy}")
    # Add the fields that every job sets itself, because a class may omit them. Only the class's own
    # faults are then reported.
    whole = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "job"}}
    problems = validate({**whole, "spec": {"image": "image", "script": "script", **spec}})
    if problems:
        raise ValueError(f"{name}.{'; '.join(map(str, problems))}")
    return dict(spec)


def _limits(name: str, limits: Any) -> ClassLimits:
    if not isinstance(limits, Mapping):
        raise ValueError(f"{name}.limits: must be a mapping with the keys {', '.join(_LIMITS)}")
    for key in limits:
        if key not in _LIMITS:
            raise ValueError(f"{name}.limits.{key}: unknown; the keys are {', '.join(_LIMITS)}")
    for key, least in (("maxNodes", 1), ("maxGpusPerNode", 0)):
        value = limits.get(key, least)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
            raise ValueError(f"{name}.limits.{key}: {value!r} is not an integer from {least} to {_MOST}")
    for image in _texts(limits.get("images", []), f"{name}.limits.images"):
        if "*" in image[:-1] or image in ("", "*"):
            raise ValueError(f"{name}.limits.images={image!r}: must be an image, or a prefix that ends with *")
    return ClassLimits(
        max_nodes=limits.get("maxNodes"),
        max_gpus_per_node=limits.get("maxGpusPerNode"),
        images=tuple(limits.get("images", ())),
    )


def _texts(value: Any, path: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{path}: must be a list of strings, not {value!r}")
    return value
