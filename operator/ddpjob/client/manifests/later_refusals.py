"""Finds faults that the DDPJob schema allows, but that later make Kubernetes reject the job's pods.

`ddpjob validate` uses this module. The operator does not: it creates the pods and shows the API
server's own response, which a check here can only predict.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from ddpjob.api import near_misses
from ddpjob.api.job_spec import Json, oversized, size_fault
from ddpjob.api.schema import Problem, without_nulls
from ddpjob.core.volumes import FIELD, can_serve_all
from ddpjob.core.world import COORDINATOR_CONTAINER, TRAINER_CONTAINER
from ddpjob.objects.pod_template import problems
from ddpjob.objects.quantities import amount

_TEMPLATE = "spec.podTemplate.spec"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
# An image name is [domain[:port]/]path[:tag][@digest], as defined by distribution/reference.
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_DOMAIN = (
    r"(?:[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[-A-Za-z0-9]*[A-Za-z0-9])?)*|\[[0-9a-fA-F:]+\])"
)
_IMAGE = re.compile(
    rf"(?:{_DOMAIN}(?::[0-9]+)?/)?{_PART}(?:/{_PART})*(?::[\w][\w.-]{{0,127}})?(?:@[A-Za-z][\w+.-]*:[0-9a-fA-F]{{32,}})?"
)
_OWN_RESOURCES = ("cpu", "memory", "ephemeral-storage", "storage")
_WORDS = {"mem": "memory", "ram": "memory", "cpus": "cpu", "cores": "cpu", "disk": "ephemeral-storage",
          "gpu": "nvidia.com/gpu", "gpus": "nvidia.com/gpu"}  # fmt: skip
_LEAST_BYTES = 64 * 1024
_STARTER = re.compile(r"(.*/)?(torchrun|python[0-9.]*)")
_OWN_VOLUMES = ("ddpjob-runtime", "ddpjob-shm", "ddpjob-snapshots", "ddpjob-checkpoints", "ddpjob-data")
_OPERATORS = ("Exists", "Equal", "Lt", "Gt")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def later_refusals(manifest: Mapping[str, Any]) -> list[Problem]:
    """Return the problems that would keep a job from running, although the job fits the schema.

    Each problem names the path of its field in the manifest.
    """
    spec = manifest["spec"]
    if too_large := oversized(spec):
        return [Problem(*size_fault(too_large).split(": ", 1))]
    template = spec.get("podTemplate") or {}
    # The spec of a job with a class is incomplete, because only a cluster's operator knows the
    # values that the class adds.
    whole = "className" not in spec
    faulty = [Problem(*fault.split(": ", 1)) for fault in problems(template, whole=whole)] if template else []
    pod = without_nulls(template).get("spec") or {}
    found = [*_metadata(manifest["metadata"], "metadata"), *_spec(spec)]
    if not faulty:
        found += [
            *_pod(pod, whole=whole),
            *_metadata(without_nulls(template).get("metadata") or {}, "spec.podTemplate.metadata"),
        ]
    return sorted({*faulty, *found})


def _metadata(metadata: Mapping[str, Any], path: str) -> Iterator[Problem]:
    yield from _labels(metadata.get("labels"), f"{path}.labels")


def _labels(labels: Mapping[str, str] | None, path: str) -> Iterator[Problem]:
    for key, value in (labels or {}).items():
        if len(value) > 63 or not _LABEL_VALUE.fullmatch(value):
            remedy = "write at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
            yield Problem(f"{path}.{key}", f"{value!r} is not a valid label value; {remedy}")


def _spec(spec: Mapping[str, Any]) -> Iterator[Problem]:
    if "image" in spec:
        yield from _image(spec["image"], "spec.image")
    if re.search(r"\.py$", spec.get("module") or ""):
        yield Problem("spec.module", f"{spec['module']} is the name of a file; set `script: {spec['module']}` instead")
    yield from _one_file(spec.get("script") or "")
    for name in ("script", "module"):
        if _STARTER.fullmatch(program := spec.get(name) or ""):
            remedy = "specify only the program that it starts (`ddpjob convert` translates a whole torchrun line)"
            yield Problem(f"spec.{name}", f"{program} is a launcher, and the job has its own; {remedy}")
    yield from _resources(spec.get("resources") or {}, "spec.resources")
    if (shared := (spec.get("storage") or {}).get("sharedMemory")) is not None:
        yield from _few_bytes(shared, "spec.storage.sharedMemory")
    if (memory := (spec.get("storage") or {}).get("snapshotMemory")) is not None:
        yield from _few_bytes(memory, "spec.storage.snapshotMemory")
    rendezvous = spec.get("rendezvous") or {}
    yield from _resources(rendezvous.get("resources") or {}, "spec.rendezvous.resources")
    yield from _labels(rendezvous.get("nodeSelector"), "spec.rendezvous.nodeSelector")
    yield from _name(rendezvous.get("runtimeClassName"), "spec.rendezvous.runtimeClassName")
    for position, toleration in enumerate(rendezvous.get("tolerations") or ()):
        yield from _toleration(toleration, f"spec.rendezvous.tolerations[{position}]")
    for kind in ("data", "checkpoints"):
        volume = (spec.get("storage") or {}).get(kind) or {}
        yield from _name(volume.get("claimName"), f"spec.storage.{kind}.claimName")
        yield from _name(volume.get("secretName"), f"spec.storage.{kind}.secretName")
        yield from _host_path(volume.get("hostPath"), f"spec.storage.{kind}.hostPath")
    yield from _claim_template(spec)
    for position, secret in enumerate(spec.get("imagePullSecrets") or ()):
        yield from _name(secret.get("name"), f"spec.imagePullSecrets[{position}].name")
    yield from _name((spec.get("scheduling") or {}).get("priorityClassName"), "spec.scheduling.priorityClassName")


def _one_file(script: str) -> Iterator[Problem]:
    """Report a spec.script that is a whole command line or not a Python script."""
    if script.endswith((".sh", ".bash")):
        command = json.dumps(["bash", script])
        yield Problem(
            "spec.script",
            f"{script} is a shell script, and torchrun starts only Python scripts; specify the Python script that it "
            f"starts, or set `command: {command}` instead of script",
        )
    if script.endswith(".ipynb"):
        remedy = f"run `jupyter nbconvert --to script {PurePosixPath(script).name}` to convert it"
        yield Problem("spec.script", f"{script} is a notebook, and torchrun starts only Python scripts; {remedy}")
    found = re.fullmatch(r"(?:python[0-9.]*\s+|torchrun\s+)?(\S+\.py)(\s.*)?", script)
    if found and found[1] != script:
        try:
            words = shlex.split(found[2] or "")
        except ValueError:
            words = (found[2] or "").split()
        args = f" and `args: {json.dumps(words)}`" if words else ""
        yield Problem("spec.script", f"{script!r} contains more than a file name; set `script: {found[1]}`{args}")


def _few_bytes(value: Any, path: str) -> Iterator[Problem]:
    """Report an amount of memory that is too small to be intended.

    In Kubernetes, `512m` means half a byte, and `64` means 64 bytes.
    """
    number, text = amount(value), str(value)
    if number is not None and 0 < number < _LEAST_BYTES:
        digits = text.removesuffix("m")
        meant = f"; did you mean {digits}{'Mi' if text.endswith('m') else 'Gi'}?" if digits.isdigit() else ""
        yield Problem(path, f"{text} is {number:g} bytes, which is too small to be intended{meant}")


def _claim_template(spec: Mapping[str, Any]) -> Iterator[Problem]:
    template = ((spec.get("storage") or {}).get("checkpoints") or {}).get("claimTemplate")
    if not template:
        return
    claim, path = template["spec"], FIELD
    yield from _metadata(template.get("metadata") or {}, f"{path}.metadata")
    pods = spec.get("nodes", 1) + spec.get("spares", 0)
    one_per_node = (spec.get("scheduling") or {}).get("onePodPerNode", True)
    if not can_serve_all(claim["accessModes"], pods, one_per_node=one_per_node):
        what = (
            f"a claim with {', '.join(claim['accessModes'])} can be mounted on only one Kubernetes node, but the job "
            f"has {pods} pods"
        )
        yield Problem(f"{path}.spec.accessModes", f"{what}; set accessModes to [ReadWriteMany], or nodes to 1")
    for name in ("storageClassName", "volumeName", "volumeAttributesClassName"):
        yield from _name(claim.get(name) or None, f"{path}.spec.{name}")
    for kind in ("requests", "limits"):
        for name, value in (claim["resources"].get(kind) or {}).items():
            yield from _quantity(value, f"{path}.spec.resources.{kind}.{name}")


def _image(image: str, path: str) -> Iterator[Problem]:
    if _IMAGE.fullmatch(image):
        return
    if image != image.strip() or " " in image:
        remedy = "it contains a space"
    elif image.endswith(":"):
        remedy = "the tag after ':' is missing"
    elif image != image.lower() and _IMAGE.fullmatch(image.lower()):
        name, _, tag = image.rpartition(":")
        meant = f"{name.lower()}:{tag}" if name and "/" not in tag else image.lower()
        remedy = f"the path must be in lower case; did you mean {meant}?"
    else:
        remedy = "write [REGISTRY/]NAME[:TAG], such as ghcr.io/me/train:1.4"
    yield Problem(path, f"{image!r} is not a valid image name: {remedy}")


def _name(name: Any, path: str) -> Iterator[Problem]:
    if name is not None and (len(str(name)) > 253 or not _NAME.fullmatch(str(name))):
        meant = re.sub(r"[^a-z0-9.]+", "-", str(name).lower()).strip("-.")
        hint = f"; did you mean {meant}?" if meant else ""
        yield Problem(path, f"{name!r} is not a valid object name; use lower-case letters, digits, '-' and '.'{hint}")


def _host_path(path: Any, at: str) -> Iterator[Problem]:
    if ".." in str(path or "").split("/"):
        yield Problem(at, f"{path} contains '..', which Kubernetes does not allow; write the path without '..'")


def _resources(resources: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for kind in ("requests", "limits"):
        for name, value in (resources.get(kind) or {}).items():
            at = f"{path}.{kind}.{name}" if "/" not in name and "." not in name else f"{path}.{kind}[{name}]"
            if name not in _OWN_RESOURCES and "/" not in name and not name.startswith("hugepages-"):
                meant = _WORDS.get(name.lower())
                hint = (
                    f"did you mean {meant}?"
                    if meant
                    else "write cpu, memory, or a name with a domain, such as nvidia.com/gpu"
                )
                yield Problem(at, f"is not the name of a resource; {hint}")
            yield from _quantity(value, at)
            if name in ("memory", "ephemeral-storage"):
                yield from _few_bytes(value, at)
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for name in sorted(requests.keys() & limits.keys()):
        least, most = amount(requests[name]), amount(limits[name])
        if least is not None and most is not None and least > most:
            yield Problem(f"{path}.requests.{name}", f"{requests[name]} is more than the limit, {limits[name]}")
    for name in sorted(requests):
        whole = name.startswith("hugepages-") or ("/" in name and "kubernetes.io/" not in name)
        if whole and (name not in limits or (amount(requests[name]) or 0) < (amount(limits[name]) or 0)):
            why = f"must equal its limit, because this resource cannot be overcommitted; write it only in {path}.limits"
            yield Problem(f"{path}.requests[{name}]", why)


def _quantity(value: Any, path: str) -> Iterator[Problem]:
    number = amount(value)
    if number is None:
        meant = near_misses.quantity(str(value))
        hint = f"; did you mean {meant}?" if meant else ""
        yield Problem(path, f"{value!r} is not a quantity, such as 500m, 8 or 16Gi{hint}")
    elif number < 0:
        yield Problem(path, f"{value} is less than 0")


def _pod(pod: Json, *, whole: bool) -> Iterator[Problem]:
    yield from _name(pod.get("serviceAccountName"), f"{_TEMPLATE}.serviceAccountName")
    if pod.get("ephemeralContainers"):
        yield Problem(
            f"{_TEMPLATE}.ephemeralContainers", "not allowed in a new pod; use `kubectl debug` once the pod runs"
        )
    volumes = set(_OWN_VOLUMES)
    for position, volume in enumerate(pod.get("volumes") or ()):
        at = f"{_TEMPLATE}.volumes[{position}]"
        name = volume.get("name")
        if not name:
            yield Problem(f"{at}.name", "missing; name the volume")
        elif not _LABEL_NAME.fullmatch(name):
            yield Problem(f"{at}.name", f"{name!r} is not a valid name; use lower-case letters, digits and '-'")
        elif name in volumes:
            yield Problem(f"{at}.name", f"{name} is already the name of a volume; choose a different name")
        volumes.add(name)
        yield from _host_path((volume.get("hostPath") or {}).get("path"), f"{at}.hostPath.path")
        limit = (volume.get("emptyDir") or {}).get("sizeLimit")
        if limit is not None:
            yield from _quantity(limit, f"{at}.emptyDir.sizeLimit")
        sources = [key for key in volume if key != "name"]
        if len(sources) > 1:
            yield Problem(at, f"has {len(sources)} sources ({', '.join(sources)}); a volume must have one")
    for position, toleration in enumerate(pod.get("tolerations") or ()):
        yield from _toleration(toleration, f"{_TEMPLATE}.tolerations[{position}]")
    yield from _containers(pod, volumes, whole=whole)


def _toleration(toleration: Json, path: str) -> Iterator[Problem]:
    for field, known in (("operator", _OPERATORS), ("effect", _EFFECTS)):
        value = toleration.get(field)
        if value and value not in known:
            near = next((word for word in known if word.lower().startswith(str(value).lower()[:7])), None)
            hint = f"; did you mean {near}?" if near else ""
            yield Problem(f"{path}.{field}", f"{value!r} is not one of {', '.join(known)}{hint}")
    if toleration.get("operator") == "Exists" and toleration.get("value"):
        yield Problem(
            f"{path}.value", "not allowed with the operator Exists; remove the value, or set `operator: Equal`"
        )
    if not toleration.get("key") and toleration.get("operator", "Equal") != "Exists":
        yield Problem(f"{path}.key", "missing; without a key the operator must be Exists")


def _containers(pod: Json, volumes: set[str], *, whole: bool) -> Iterator[Problem]:
    names: set[str] = {COORDINATOR_CONTAINER}
    for kind in ("initContainers", "containers"):
        for position, container in enumerate(pod.get(kind) or ()):
            at = f"{_TEMPLATE}.{kind}[{position}]"
            name = container["name"]
            if name in names:
                yield Problem(f"{at}.name", f"{name} is already the name of a container; merge the two, or rename one")
            elif not _LABEL_NAME.fullmatch(name):
                yield Problem(f"{at}.name", f"{name!r} is not a valid name; use lower-case letters, digits and '-'")
            names.add(name)
            if name != TRAINER_CONTAINER and container.get("image"):
                yield from _image(container["image"], f"{at}.image")
            yield from _resources(container.get("resources") or {}, f"{at}.resources")
            yield from _mounts(container, volumes, at, whole=whole)
            for number, variable in enumerate(container.get("env") or ()):
                if not variable.get("name"):
                    yield Problem(f"{at}.env[{number}].name", "missing; name the variable")


def _mounts(container: Json, volumes: set[str], path: str, *, whole: bool) -> Iterator[Problem]:
    places: set[str] = set()
    for position, mount in enumerate(container.get("volumeMounts") or ()):
        at, name, place = f"{path}.volumeMounts[{position}]", mount.get("name"), mount.get("mountPath")
        if not name:
            yield Problem(f"{at}.name", "missing; set it to the name of a volume")
        elif whole and name not in volumes:
            others = ", ".join(sorted(v for v in volumes if v and v not in _OWN_VOLUMES)) or "none"
            yield Problem(f"{at}.name", f"there is no volume {name}; volumes of podTemplate: {others}")
        if not place:
            yield Problem(f"{at}.mountPath", "missing; set it to a folder in the container")
        elif place in places:
            yield Problem(f"{at}.mountPath", f"something is already mounted at {place}; choose a different folder")
        places.add(place or "")
