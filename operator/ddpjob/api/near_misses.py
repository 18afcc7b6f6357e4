"""Suggests corrections for rejected fields and values, such as 16Gi for `16 GB`."""

from __future__ import annotations

import json
import math
import re
import shlex
from typing import Any

_POD = "spec.podTemplate.spec"
_TRAINER = f"the container named trainer in {_POD}.containers"

_OTHERS_WORDS = {
    "spec.nodes": "replicas workers worker numnodes numworkers nnodes numreplicas nummachines minavailable parallelism "
    "completions size hosts",
    "spec.procsPerNode": "nprocpernode nproc numprocpernode processespernode slotsperworker ranks rankspernode",
    "spec.gpusPerNode": "gpus gpu numgpus gpuspernode gpuspertask accelerators",
    "spec.elastic": "elasticpolicy",
    "spec.elastic.minNodes": "minreplicas minworkers min minnodes",
    "spec.elastic.maxNodes": "maxreplicas maxworkers max maxnodes",
    "spec.recovery.maxRestarts": "backofflimit maxretry maxretries maxrestarts maxfailure retries",
    "spec.recovery.rules": "restartpolicy failurepolicy podfailurepolicy policies",
    "spec.runPolicy.activeDeadlineSeconds": "timeout deadline timelimit activedeadline",
    "spec.runPolicy.ttlSecondsAfterFinished": "ttl ttlseconds shutdownafterjobfinishes",
    "spec.runPolicy.cleanPodPolicy": "cleanuppolicy cleanpods",
    "spec.runPolicy.suspend": "paused pause suspended",
    "metadata.labels, as the label kueue.x-k8s.io/queue-name": "queue queuename localqueue",
    "spec.script": "entrypoint main program file",
    "spec.args": "arguments argv params parameters scriptargs",
    "spec.env": "environment envs envvars variables",
    "spec.workingDir": "workdir cwd directory",
    "spec.imagePullPolicy": "pullpolicy",
    "spec.imagePullSecrets": "pullsecrets imagepullsecret",
    "spec.storage.sharedMemory": "shm shmsize shmemsize sharedmemorysize",
    "spec.scheduling.priorityClassName": "priority priorityclass",
    "spec.scheduling.schedulerName": "scheduler",
    "spec.scheduling": "schedulingpolicy",
    "spec.podTemplate": "template podspec pod",
    "spec.nodes, image and script (run `ddpjob convert FILE` to translate the manifest)": "pytorchreplicaspecs "
    "trainer runtimeref",
    "spec.nodes and script (run `ddpjob convert -- torchrun ...` for a command line)": "mpireplicaspecs "
    "tasks replicatedjobs",
    "spec.resources, and spec.gpusPerNode for GPUs": "resourcespernode resourcesperworker",
    "spec.rendezvous": "rdzvbackend rdzvendpoint rdzvhost rdzvport rdzvid rdzvconf",
    "metadata, or spec.podTemplate.metadata for the pods": "labels annotations",
    _POD: "volumes nodeSelector tolerations affinity hostNetwork hostIPC hostPID dnsPolicy serviceAccountName "
    "serviceAccount initContainers containers securityContext runtimeClassName topologySpreadConstraints "
    "terminationGracePeriodSeconds",
    _TRAINER: "volumemounts ports lifecycle livenessprobe readinessprobe volumedevices",
}
"""Maps each field of this API to the names that PyTorchJob, TrainJob, JobSet, Volcano, Ray,
torchrun, accelerate and Slurm give to the same setting."""
_PLACES = {word: place for place, words in _OTHERS_WORDS.items() for word in words.lower().split()}


def belongs(name: str) -> str:
    """Suggest the field of this API that corresponds to a name in another API.

    The suggestion is empty if the name is unknown.
    """
    word = re.sub("[-_]", "", name.lower())
    place = _PLACES.get(word, "")
    if place == _POD:
        return f"write it as {_POD}.{_PODS_OWN[word]}"
    if place == _TRAINER:
        return f"set it in {_TRAINER}"
    return f"did you mean {place}?" if place else ""


_PODS_OWN = {word.lower(): word for word in _OTHERS_WORDS[_POD].split()} | {"serviceaccount": "serviceAccountName"}

_UNITS = {"b": "", "kb": "k", "mb": "M", "gb": "G", "tb": "T", "kib": "Ki", "mib": "Mi", "gib": "Gi", "tib": "Ti",
          "ki": "Ki", "mi": "Mi", "gi": "Gi", "ti": "Ti"}  # fmt: skip
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def quantity(text: str) -> str:
    """Return an amount in Kubernetes' notation, such as `16Gi or 16G` for `16 GB`.

    If the meaning of the text cannot be guessed, the result is empty.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        return ""
    number, unit = found[1], found[2].lower()
    if unit in ("core", "cores", "cpu", "cpus", "gpu", "gpus"):
        return number
    known = _UNITS.get(unit) if unit in _UNITS else {"k": "k", "m": "M", "g": "G", "t": "T"}.get(unit)
    if known is None:
        return ""
    return f"{number}{known}i or {number}{known}" if known and not known.endswith("i") else f"{number}{known}"


_SECONDS = {"s": 1, "sec": 1, "second": 1, "seconds": 1, "m": 60, "min": 60, "minute": 60, "minutes": 60, "h": 3600,
            "hour": 3600, "hours": 3600, "d": 86400, "day": 86400, "days": 86400}  # fmt: skip


def seconds(text: str) -> int | None:
    """Convert a duration such as `5m` or `1h30m` to seconds.

    Return None if the text is not a duration.
    """
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", text)
    if not parts or re.sub(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)|\s", "", text):
        return None
    if any(unit.lower() not in _SECONDS for _, unit in parts):
        return None
    found = sum(float(number) * _SECONDS[unit.lower()] for number, unit in parts)
    return round(found) if math.isfinite(found) else None


def as_type(path: str, wanted: Any, value: Any) -> str:
    """Suggest a value of the right type to replace a value of the wrong type.

    If the intended value cannot be guessed, the suggestion is empty.
    """
    field = re.sub(r"\[.*?\]", "", path).rpartition(".")[2]
    if wanted in ("integer", "number") and isinstance(value, str):
        if "Seconds" in field and (length := seconds(value)) is not None:
            return f"; write {length}"
        return f"; write {value.strip()}" if re.fullmatch(r"\s*-?[0-9]+\s*", value) else ""
    if wanted == "array":
        return _as_list(field, value)
    if wanted == "boolean" and isinstance(value, str) and (meant := _BOOLEANS.get(value.lower())):
        return f"; write {meant}, without quotes"
    if wanted == "object" and isinstance(value, str):
        return _as_mapping(re.sub(r"\[[0-9]+\]$", "[]", path).rpartition(".")[2], value)
    if wanted == "object" and isinstance(value, bool) and path in _SWITCHED_ON:
        return f"; write {_SWITCHED_ON[path]}" if value else "; leave it out"
    return ""


_SWITCHED_ON = {"spec.preflight": "{}", "spec.elastic": "{minNodes: 1}"}
"""Objects that other APIs switch on with `true`. Maps the path of each object to a value that has
the same effect in this API."""


_BOOLEANS = {**dict.fromkeys(("true", "yes", "on", "y"), "true"), **dict.fromkeys(("false", "no", "off", "n"), "false")}


def _as_mapping(field: str, text: str) -> str:
    if field == "env[]" and (found := re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", text, re.DOTALL)):
        return f"; write {{name: {found[1]}, value: {json.dumps(found[2])}}}"
    if field == "imagePullSecrets[]":
        return f"; write {{name: {text}}}"
    if field in ("checkpoints", "data"):
        kind = "hostPath" if text.startswith("/") else "url" if "://" in text else "claimName"
        return f"; write {{{kind}: {text.removeprefix('claim:')}}}"
    if field == "nfs" and (found := re.fullmatch(r"([^:/]+):(/.*)", text)):
        return f"; write {{server: {found[1]}, path: {found[2]}}}"
    if field == "recovery" and text.capitalize() in ("Fast", "Standard"):
        return f"; write {{mode: {text.capitalize()}}}"
    return ""


def _as_list(field: str, value: Any) -> str:
    if field in ("env", "envFrom", "imagePullSecrets"):
        if field == "env" and isinstance(value, dict) and value:
            items = [{"name": str(k), "value": v if isinstance(v, str) else json.dumps(v)} for k, v in value.items()]
            return "; write " + _flow(items)
        if field == "imagePullSecrets" and isinstance(value, str):
            return f"; write [{{name: {value}}}]"
        return ""
    if isinstance(value, str) and value.strip():
        try:
            words = shlex.split(value)
        except ValueError:
            words = value.split()
        return f"; write {json.dumps(words)}"
    return ""


def _flow(items: list[dict[str, str]]) -> str:
    shown = ", ".join(f"{{name: {item['name']}, value: {json.dumps(item['value'])}}}" for item in items[:3])
    return f"[{shown}{', ...' if len(items) > 3 else ''}]"


_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_PATTERNS = {
    r"^/": "an absolute path, such as /data",
    r"^/[^:]*$": "an absolute path without ':', such as /data",
    _LABEL: "a name of lower-case letters, digits and '-'",
    r"^[-._a-zA-Z][-._a-zA-Z0-9]*$": "a name of letters, digits, '-', '_' and '.' that does not start with a digit",
    r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$": "a Python module name, such as my_package.train",
}


def refused_by(pattern: str, value: str) -> str:
    """Describe why a string does not match a pattern of the schema, and suggest what to write."""
    pattern = pattern.replace("\\Z", "$")
    if "[KMGTPE]i" in pattern:
        meant = quantity(value)
        return "is not a quantity, such as 500m, 8 or 16Gi" + (f"; did you mean {meant}?" if meant else "")
    if ")?/[A-Za-z0-9]" in pattern:
        gpu = value.lower() in ("gpu", "gpus", "nvidia", "cuda")
        known = "; did you mean nvidia.com/gpu?" if gpu else ""
        return f"is not a resource name with a domain, such as nvidia.com/gpu{known}"
    if pattern.startswith("^s3://"):
        return "is not a bucket with a folder, such as s3://bucket/folder; bucket names have 3 to 63 characters"
    if pattern == _LABEL:
        name = re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-")
        return f"is not {_PATTERNS[_LABEL]}" + (f"; did you mean {name}?" if name else "")
    return f"is not {_PATTERNS[pattern]}" if pattern in _PATTERNS else f"does not match {pattern}"
