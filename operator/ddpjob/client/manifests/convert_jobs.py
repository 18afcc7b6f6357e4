"""Translates PyTorchJobs, TrainJobs and torchrun commands into DDPJobs, and lists settings that
have no equivalent.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpjob.api.job import API_VERSION, KIND, QUEUE_LABEL
from ddpjob.api.job_spec import Json
from ddpjob.api.merging import mounted_at
from ddpjob.api.schema import default_of
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests.launcher_lines import as_torchrun
from ddpjob.client.manifests.training_runtimes import complete, named_runtime
from ddpjob.core.world import LABEL_JOB, TRAINER_CONTAINER
from ddpjob.objects.pod_group import QUEUE_ANNOTATION
from ddpjob.objects.pod_template import OWNED_VARIABLES

_GPUS = re.compile(
    r"(?!.*(mem|core|ratio))(.+/(.*gpu.*|xpu|npu|hpu|gaudi|mig-.+)|huawei\.com/Ascend.+|gpu\.intel\.com/(i915|xe))"
)
"""Matches the names of resources that count whole devices. Resources that count memory or fractions
of a device, such as nvidia.com/gpumem, do not match."""
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_OPERATORS = ("rdzv-backend", "rdzv-endpoint", "rdzv-id", "master-addr", "master-port", "node-rank",
              "standalone", "local-addr", "rdzv_backend", "is-host", "monitor-interval", "start-method",
              "use-env")  # fmt: skip
_BARE = ("standalone", "m", "module", "no-python", "run-path", "virtual-local-rank", "use-env")
"""Names of torchrun's options that do not take a value."""
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_MOST_SHOWN = 5
_PLAIN_SHELL = re.compile(r"-[euvx]*c")
"""Matches the options that make a shell run a command without first reading startup files. The
options -l and -i make the shell read these files, so they do not match."""
_SHELL = re.compile(r"[;&|<>$`*?(){}#~\n]")
_QUOTED = re.compile(r"""\\.|'[^']*'|"((?:\\.|[^"\\])*)\"""", re.DOTALL)
_SIGN_IN_QUOTES = re.compile(r"`|\$\w+|\$[{(][^\s)}]*[)}]?")
"""Matches constructs that a shell interprets even in double quotes."""
_THEIRS = re.compile(
    r"""(^|\s)--(nnodes|node[-_]rank|master[-_](addr|port)|rdzv[-_](backend|endpoint|id)|machine_rank|"""
    r"""num_(machines|nodes)|main_process_(ip|port))(=|\s+)["']?\$\S*(?=\s)"""
)
"""Matches a launcher's options for the number of nodes, the rank of a node or the rendezvous. An
option matches only if its value is a shell variable, which other operators set in their pods."""
_NOT_SET = re.compile(
    r"\$[{(]?(WORLD_SIZE|RANK|MASTER_ADDR|MASTER_PORT|PET_NODE_RANK|PET_MASTER_ADDR|PET_MASTER_PORT)\b"
)
"""Matches uses of variables that are set in a PyTorchJob's pods, but not in a DDPJob's pods. As an
exception, a DDPJob with `command` sets MASTER_ADDR and MASTER_PORT to the address of the pod with
index 0."""
_THEIR_LABELS = re.compile(
    r"\b(training\.kubeflow\.org/|trainer\.kubeflow\.org/|jobset\.sigs\.k8s\.io/|batch\.kubernetes\.io/job-)[\w.-]+"
)
_ROOTS_TOOLS = re.compile(r"(?:^|[\s;&|(/])(apt-get|apt|yum|dnf|apk|chown|sshd|useradd)(?=[\s;&|)]|$)")
"""Matches programs that fail even as root if the container has no capabilities. The containers of a
PyTorchJob have capabilities by default, but those of a DDPJob do not."""
_OF_PYTORCH_JOB = {
    "spec": ("pytorchReplicaSpecs", "runPolicy", "elasticPolicy", "nprocPerNode"),
    "spec.pytorchReplicaSpecs": ("Master", "Worker"),
    "spec.pytorchReplicaSpecs.Master": ("replicas", "restartPolicy", "template"),
    "spec.pytorchReplicaSpecs.Worker": ("replicas", "restartPolicy", "template"),
    "spec.runPolicy": ("activeDeadlineSeconds", "ttlSecondsAfterFinished", "suspend", "cleanPodPolicy", "backoffLimit",
                       "schedulingPolicy", "managedBy"),
    "spec.elasticPolicy": ("minReplicas", "maxReplicas", "nProcPerNode", "maxRestarts", "metrics", "rdzvBackend",
                           "rdzvHost", "rdzvPort", "rdzvId", "rdzvConf", "standalone"),
}  # fmt: skip
_OF_TRAIN_JOB = {
    "spec": ("runtimeRef", "trainer", "suspend", "activeDeadlineSeconds", "initializer", "podTemplateOverrides",
             "runtimePatches", "labels", "annotations", "managedBy"),
    "spec.trainer": ("image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode"),
}  # fmt: skip
"""The TrainJob fields that the conversion either reads, or ignores because DDPJob's operator
chooses their values. For any other field, a note says that it was left out."""


@dataclass
class Conversion:
    """The result of a conversion: a DDPJob, and notes on settings that were not converted."""

    job: Json
    notes: list[str] = field(default_factory=list)
    plain: bool = False
    """Whether the original job starts the script with python instead of a launcher. Such a job runs
    one process per pod, however many GPUs the pod has."""
    counted: bool = False
    """Whether the torchrun command line sets the number of processes per node. If so, the number in
    the manifest's own fields has no effect: other operators pass it to torchrun in a variable, and
    the command line takes precedence over variables."""


def convert(
    manifest: Mapping[str, Any], runtimes: Sequence[Mapping[str, Any]] = (), *, script: str = "", image: str = ""
) -> Conversion:
    """Convert another operator's manifest. Raises Mistake for an unknown kind.

    `runtimes` are searched for the runtime that a TrainJob names. `image` replaces the manifest's
    image. `script` becomes the entry point of a job whose manifest leaves the entry point to the
    image.
    """
    made = _converted(manifest, runtimes)
    _complete(made, script, image)
    return made


def _converted(manifest: Mapping[str, Any], runtimes: Sequence[Mapping[str, Any]]) -> Conversion:
    kind = str(manifest.get("kind", ""))
    try:
        if kind == "PyTorchJob":
            return _pytorch_job(manifest)
        if kind == "TrainJob":
            return _train_job(manifest, named_runtime(manifest, runtimes))
    except (AttributeError, TypeError, ValueError) as error:
        raise Mistake(f"{kind} cannot be read: {error}") from error
    raise Mistake(f"kind {kind or '(missing)'} cannot be converted; only PyTorchJob, TrainJob and torchrun lines can")


def _complete(made: Conversion, script: str, image: str) -> None:
    """Set the image and the script that the caller specified.

    If the job still has no entry point, add a note. Raises Mistake if both the caller and the
    manifest specify an entry point.
    """
    spec = made.job["spec"]
    if image:
        spec["image"] = image
        made.notes = [note for note in made.notes if not note.startswith("spec.image: ")]
    if known := {"script", "module", "command"} & spec.keys():
        if script:
            raise Mistake(f"--script {script}: the manifest already starts {spec[known.pop()]}; remove --script")
        return
    if script:
        spec["script"] = script
    else:
        name = spec.get("image") or "IMAGE"
        made.notes.append(
            "spec.script: missing, because the image defines the entry point; look it up with "
            f"`docker inspect -f '{{{{.Config.Entrypoint}}}} {{{{.Config.Cmd}}}}' {name}`, then convert again with "
            "--script, or set script, module or command"
        )


def _left_out(made: Conversion, manifest: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> None:
    """Add a note for each field in the manifest that the conversion does not know.

    `known` maps the path of an object in the manifest to the names of its known fields.
    """
    for path, names in known.items():
        here: Any = manifest
        for name in path.split("."):
            here = (here.get(name) if isinstance(here, Mapping) else None) or {}
        made.notes += [
            f"{path}.{name}: ".removeprefix("spec.") + "left out, because the field is unknown"
            for name, value in here.items()
            if name not in names and value not in (None, {}, [], "")
        ]


def convert_command(words: Sequence[str], name: str = "", image: str = "IMAGE") -> Conversion:
    """Convert a torchrun command line.

    `words` contains either the words of the line, or the whole line as a single string.
    """
    made = _empty({"name": name})
    made.job["spec"]["image"] = image
    if image == "IMAGE":
        made.notes.append(
            "spec.image: a command line does not name an image; specify one that contains Python, PyTorch and the "
            "script"
        )
    text = words[0].replace("\\\n", " ").strip()
    line = list(words) if len(words) > 1 else _shell_words(text)
    if len(words) == 1 and (signs := _signs_of_shell(text)) and not _reads_only_theirs(text):
        made.notes.append(
            f"{' '.join(signs)}: scripts and modules are started without a shell, so these words became arguments; "
            'remove them, or write command: [bash, -c, "..."]'
        )
    while line and (variable := _VARIABLE.fullmatch(line[0])):
        if variable[1] == "CUDA_VISIBLE_DEVICES":
            made.notes.append("CUDA_VISIBLE_DEVICES: left out, because a pod sees only its own GPUs (gpusPerNode)")
        else:
            made.job["spec"].setdefault("env", []).append({"name": variable[1], "value": variable[2]})
        line = line[1:]
    if line:
        _entry_point(made, line, [])
    known = as_torchrun(line) if line else None
    line = known.words if known is not None else line
    if not {"script", "module"} & made.job["spec"].keys() and (not line or _after_launcher(line) is None):
        raise Mistake(
            f"{' '.join(words)}: not a torchrun command line; write it as one (torchrun --nnodes=NODES "
            f"--nproc-per-node=PROCESSES SCRIPT ARGS), or write a manifest with this line as spec.command"
        )
    return made


def _empty(metadata: Mapping[str, Any]) -> Conversion:
    kept = {key: metadata[key] for key in ("namespace", "labels", "annotations") if metadata.get(key)}
    kept.get("annotations", {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    key = "generateName" if metadata.get("generateName") and not metadata.get("name") else "name"
    meta = {key: str(metadata.get(key) or "converted"), **{key: value for key, value in kept.items() if value}}
    notes = (
        []
        if key == "name"
        else ["generateName: `kubectl apply` requires metadata.name; `ddpjob submit` and `kubectl create` do not"]
    )
    return Conversion({"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": {"image": ""}}, notes)


# --- PyTorchJob -------------------------------------------------------------------------------------------------


def _pytorch_job(manifest: Mapping[str, Any]) -> Conversion:
    metadata, spec = manifest.get("metadata") or {}, manifest.get("spec") or {}
    made = _empty(metadata)
    target, notes = made.job["spec"], made.notes
    replicas = spec.get("pytorchReplicaSpecs") or {}
    master, workers = (_wanted(replicas.get(name) or {}) for name in ("Master", "Worker"))
    if not master and not workers:
        raise Mistake("spec.pytorchReplicaSpecs: Master and Worker are both missing; add at least one of them")
    main = workers or master
    target["nodes"] = sum(int(part.get("replicas") or 1) for part in (master, workers) if part)
    template = main.get("template") or {}
    if master and workers and (lost := list(_differences(master.get("template"), template, "template"))):
        shown = ", ".join(lost[:_MOST_SHOWN]) + (
            f" and {len(lost) - _MOST_SHOWN} more" if len(lost) > _MOST_SHOWN else ""
        )
        notes.append(
            f"pytorchReplicaSpecs.Master: differs from Worker in {shown}; Worker's template is used, because all "
            "nodes of a DDPJob are alike"
        )
    _pod(made, template, "pytorch")
    _policies(made, spec.get("runPolicy") or {})
    nproc = spec.get("nprocPerNode")
    elastic = spec.get("elasticPolicy") or {}
    if elastic and "command" in target:
        notes.append(
            "elasticPolicy: cannot be combined with command, because the command forms its own group; "
            "use script or module"
        )
    elif elastic:
        bounds = {"minNodes": elastic.get("minReplicas"), "maxNodes": elastic.get("maxReplicas")}
        target["elastic"] = {"minNodes": target["nodes"]} | {k: v for k, v in bounds.items() if v is not None}
    if elastic:
        nproc = elastic.get("nProcPerNode", nproc)
        _rendezvous(made, ((str(pair.get("key")), pair.get("value")) for pair in elastic.get("rdzvConf") or ()))
        if elastic.get("metrics"):
            notes.append(
                "elasticPolicy.metrics: create a HorizontalPodAutoscaler for the DDPJob (it has a scale subresource)"
            )
    _procs(made, nproc)
    policies = {part.get("restartPolicy") or "OnFailure" for part in (master, workers) if part}
    if "ExitCode" in policies:
        notes.append(
            "restartPolicy ExitCode: codes from 1 to 127 failed the job immediately, but a DDPJob restarts within its "
            "budget; to fail immediately, write recovery.rules: [{cause: ExitCode, exitCodes: [...], action: Fail}]"
        )
    if {"Never"} < policies:
        notes.append(
            "restartPolicy Never: is set for only one of Master and Worker, but all nodes of a DDPJob restart alike; "
            "to fail at the first failure, write recovery.maxRestarts: 0"
        )
    of_workers = target.get("recovery", {}).get("maxRestarts", elastic.get("maxRestarts"))
    of_pods = 0 if policies == {"Never"} else (spec.get("runPolicy") or {}).get("backoffLimit")
    if of_pods is None:
        most = default_of("spec.recovery.maxRestarts") if of_workers is None else of_workers
        notes.append(
            "runPolicy.backoffLimit: not set, so failed pods were restarted without a limit, but a DDPJob fails after "
            f"{most} counted restarts; to allow more, set recovery.maxRestarts"
        )
    if limits := [limit for limit in (of_workers, of_pods) if limit is not None]:
        # A PyTorchJob limits worker failures and pod failures separately. A DDPJob has a single
        # limit for both, so use the larger one.
        target.setdefault("recovery", {})["maxRestarts"] = max(limits)
    _sharing(made)
    _left_out(made, manifest, _OF_PYTORCH_JOB)
    return made


def _wanted(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a job's Master or Worker section, or an empty mapping if the section asks for no pods.

    Helm charts write `replicas: 0` for a job that does not need workers.
    """
    return {} if part.get("replicas") == 0 else part


def _differences(master: Any, worker: Any, path: str) -> Iterator[str]:
    """Yield the path of each field that differs between the pod templates of Master and Worker."""
    if isinstance(master, Mapping) and isinstance(worker, Mapping):
        for key in dict.fromkeys((*master, *worker)):
            yield from _differences(master.get(key), worker.get(key), f"{path}.{key}")
    elif isinstance(master, list) and isinstance(worker, list) and len(master) == len(worker):
        for position, pair in enumerate(zip(master, worker, strict=True)):
            yield from _differences(*pair, f"{path}[{position}]")
    elif (master or None) != (worker or None):
        yield path


def _policies(made: Conversion, policy: Mapping[str, Any]) -> None:
    target = made.job["spec"]
    names = {"activeDeadlineSeconds", "ttlSecondsAfterFinished", "suspend"}
    kept = {key: policy[key] for key in sorted(names & policy.keys()) if policy[key] is not None}
    if policy.get("cleanPodPolicy") in ("All", "None", "Running"):
        kept["cleanPodPolicy"] = policy["cleanPodPolicy"]
    if kept:
        target["runPolicy"] = kept
    if scheduling := policy.get("schedulingPolicy"):
        made.notes.append(
            "runPolicy.schedulingPolicy: left out, because the scheduler places gangs; see spec.scheduling"
        )
        if scheduling.get("queue"):
            made.notes.append(
                f"runPolicy.schedulingPolicy.queue {scheduling['queue']}: left out. For a Volcano queue, set the "
                f"annotation {QUEUE_ANNOTATION} in podTemplate.metadata. For a Kueue queue, set the label "
                f"{QUEUE_LABEL} in metadata"
            )
        here = target.get("scheduling", {}).get("priorityClassName")
        if scheduling.get("priorityClass") not in (None, "", here):
            made.notes.append(
                f"runPolicy.schedulingPolicy.priorityClass {scheduling['priorityClass']}: left out; set "
                "scheduling.priorityClassName, which also applies to the pods"
            )
    if policy.get("managedBy"):
        made.notes.append("runPolicy.managedBy: left out, because it has no counterpart")


# --- TrainJob ---------------------------------------------------------------------------------------------------


def _train_job(manifest: Mapping[str, Any], runtime: Mapping[str, Any] | None) -> Conversion:
    metadata, spec = manifest.get("metadata") or {}, manifest.get("spec") or {}
    made = _empty(metadata)
    target, notes, trainer = made.job["spec"], made.notes, spec.get("trainer") or {}
    whole = complete(manifest, runtime or {})
    if runtime is None:
        name = (spec.get("runtimeRef") or {}).get("name", "")
        notes.append(
            f"runtimeRef {name}: its image, volumes and environment are not in this file; convert again with "
            "--runtime FILE, or --runtime cluster"
        )
        for missing, set_here in (("numNodes", "nodes"), ("resourcesPerNode", "gpusPerNode")):
            if not trainer.get(missing):
                notes.append(f"trainer.{missing}: comes from the runtime; set {set_here}")
    target["nodes"] = whole.nodes or 1
    _pod(made, whole.template, whole.container)
    notes += whole.notes
    if whole.scheduling:
        target["scheduling"] = {**whole.scheduling, **target.get("scheduling", {})}
    _procs(made, whole.procs)
    policy = {key: spec[key] for key in ("suspend", "activeDeadlineSeconds") if spec.get(key)}
    if policy:
        target["runPolicy"] = policy
    initializers = "" if runtime else "download data and models in an init container of podTemplate, or in the script"
    for name, remedy in (
        ("initializer", initializers),
        ("labels", "belonged to the JobSet; write the ones that pods need in podTemplate.metadata"),
        ("annotations", "belonged to the JobSet; write the ones that pods need in podTemplate.metadata"),
        ("managedBy", "left out, because it has no counterpart"),
    ):
        if spec.get(name) and remedy:
            notes.append(f"{name}: {remedy}")
    _sharing(made)
    _left_out(made, manifest, _OF_TRAIN_JOB)
    return made


def _sharing(made: Conversion) -> None:
    """Allow a job's pods to share a Kubernetes node if they could do so in the original job.

    By default, each pod of a DDPJob gets a Kubernetes node of its own, so several pods with few
    GPUs would wait for separate nodes. The default is kept if the original job has a
    podAntiAffinity.
    """
    spec = made.job["spec"]
    affinity = _pod_spec(spec).get("affinity") or {}
    if max(spec["nodes"], (spec.get("elastic") or {}).get("maxNodes", 1)) > 1 and "podAntiAffinity" not in affinity:
        spec.setdefault("scheduling", {})["onePodPerNode"] = False


def _procs(made: Conversion, count: Any) -> None:
    spec, notes = made.job["spec"], made.notes
    text, gpus = str(count if count is not None else ""), spec.get("gpusPerNode", 0)
    if made.counted:
        return
    if text.isdigit():
        if int(text) != max(gpus, 1):
            spec["procsPerNode"] = int(text)
        if made.plain and int(text) > 1:
            notes.append(
                f"procsPerNode: python started one process per pod, and the script itself started {text}; now "
                f"torchrun starts {text} processes, so remove that code from the script"
            )
    elif made.plain:
        if gpus > 1:
            spec["procsPerNode"] = 1
            notes.append("procsPerNode: set to 1, as before; for one process per GPU, remove this field")
    elif text == "cpu":
        notes.append("nprocPerNode cpu: set procsPerNode to the number of processes")
    elif not gpus and {"script", "module"} & spec.keys():
        claims = _pod_spec(spec).get("resourceClaims")
        each = "device of resourceClaims" if claims else "CPU"
        notes.append(
            f"procsPerNode: set to 1, but torchrun started one process per {each}; set procsPerNode to the number of "
            "processes"
        )


def _rendezvous(made: Conversion, settings: Iterable[tuple[str, Any]]) -> None:
    """Take the join timeout from torchrun's rdzv_conf; the operator chooses the other settings."""
    for name, value in settings:
        if name.strip() == "join_timeout" and str(value).isdigit():
            made.job["spec"].setdefault("rendezvous", {}).setdefault("joinTimeoutSeconds", int(value))


# --- pods -------------------------------------------------------------------------------------------------------


def _pod(made: Conversion, template: Mapping[str, Any], name: str) -> None:
    target, notes = made.job["spec"], made.notes
    pod = {key: value for key, value in (template.get("spec") or {}).items() if value is not None}
    containers = list(pod.pop("containers", None) or ())
    if not containers:
        raise Mistake("the pod template has no container")
    main = next((c for c in containers if c.get("name") == name), containers[0])
    sidecars = [c for c in containers if c is not main]
    pod, container, sidecars = (_of_trainer(part, main.get("name")) for part in (pod, main, sidecars))
    container.pop("name", None)
    target["image"] = container.pop("image", "") or "IMAGE"
    if target["image"] == "IMAGE":
        notes.append("spec.image: the runtime's image is not in this manifest; set it here")
    _drop_owned(made, container)
    for field_name in ("imagePullPolicy", "env", "envFrom", "workingDir"):
        if container.get(field_name):
            target[field_name] = container[field_name]
        container.pop(field_name, None)
    resources = container.pop("resources", None) or {}
    _resources(made, {key: value for key, value in resources.items() if key != "claims"})
    if resources.get("claims"):
        container["resources"] = {"claims": resources["claims"]}
    if container.pop("ports", None):
        notes.append("ports: left out, because the operator creates the service and the rendezvous")
    _entry_point(made, *(_words(container, key) for key in ("command", "args")))
    _references(made)
    _privileges(made, pod, container)
    if exposed := [str(c.get("name")) for c in sidecars if c.get("ports") and not pod.get("hostNetwork")]:
        notes.append(
            f"ports of {', '.join(exposed)}: only the job's own pods can reach them; to admit other pods, set "
            f"network.isolate: false, or create a NetworkPolicy for the label {LABEL_JOB}"
        )
    secrets = pod.pop("imagePullSecrets", None)
    if secrets:
        target["imagePullSecrets"] = secrets
    pod.pop("restartPolicy", None)
    scheduling = {key: pod.pop(key) for key in ("schedulerName", "priorityClassName") if pod.get(key)}
    if scheduling:
        target["scheduling"] = scheduling
    if pod.pop("nodeName", None):
        notes.append(
            "nodeName: left out, because pods could not move away from a lost Kubernetes node; use nodeSelector"
        )
    if pod.get("serviceAccountName") and "automountServiceAccountToken" not in pod:
        notes.append(
            "serviceAccountName: pods get no token of this account by default; if a program in them calls the API "
            "server, add automountServiceAccountToken: true to podTemplate.spec"
        )
    _shared_memory(made, pod, container, sidecars)
    if container:
        pod["containers"] = [{"name": TRAINER_CONTAINER, **container}, *sidecars]
    elif sidecars:
        pod["containers"] = sidecars
    metadata = {k: v for k, v in (template.get("metadata") or {}).items() if k in ("labels", "annotations") and v}
    wanted = ({"metadata": metadata} if metadata else {}) | ({"spec": pod} if pod else {})
    if wanted:
        target["podTemplate"] = wanted
    if theirs := _their_labels(wanted):
        notes.append(
            f"podTemplate: pods of a DDPJob do not have the label {', '.join(theirs)}, so a selector that uses this "
            f"label matches no pods; select pods by {LABEL_JOB}, whose value is the job's name"
        )
    if theirs := _their_labels(target.get("env")):
        notes.append(
            f"env: pods of a DDPJob do not have the label {', '.join(theirs)}, so the variable is empty; in the "
            "script, read RANK or GROUP_RANK (the number of the node), which torchrun sets"
        )


def _drop_owned(made: Conversion, container: Json) -> None:
    """Remove the variables that the operator and torchrun set themselves, and add a note."""
    names = [str(variable.get("name")) for variable in container.get("env") or ()]
    if owned := [name for name in names if OWNED_VARIABLES.fullmatch(name)]:
        container["env"] = [v for v in container["env"] if v.get("name") not in owned]
        made.notes.append(f"env {', '.join(owned)}: left out, because the operator and torchrun set them")


def _their_labels(written: Any) -> list[str]:
    """Return the labels in `written` that other operators put on their pods."""
    return list(dict.fromkeys(found[0] for found in _THEIR_LABELS.finditer(json.dumps(written))))


def _pod_spec(spec: Json) -> Json:
    found: Json = spec.get("podTemplate", {}).get("spec") or {}
    return found


def _privileges(made: Conversion, pod: Json, container: Json) -> None:
    """Add a note if the job runs as root, or starts programs that need root's capabilities.

    In a DDPJob's containers, root has no capabilities by default.
    """
    contexts = [holder.get("securityContext") or {} for holder in (pod, container)]
    command, args = (made.job["spec"].get(name, ()) for name in ("command", "args"))
    tools = dict.fromkeys(_ROOTS_TOOLS.findall(" ".join([*command, *args]))) if command else {}
    needs = [f"command: runs {', '.join(tools)}"] if tools else []
    needs += ["securityContext.runAsUser: 0"] if any(context.get("runAsUser") == 0 for context in contexts) else []
    if needs and not contexts[1].get("privileged"):
        made.notes.append(
            f"{needs[0]}; root has no capabilities here, so it can neither install packages nor write other users' "
            "files; to add capabilities, write podTemplate.spec.containers: "
            "[{name: trainer, securityContext: {capabilities: {add: [CHOWN, DAC_OVERRIDE, FOWNER, SETGID, SETUID]}}}]"
        )


def _of_trainer(value: Any, name: str | None) -> Any:
    """Return a copy of `value` in which references to the main container use its new name.

    The conversion renames the container `name` to `trainer`. A resourceFieldRef of the downward API
    refers to a container by name, so it must change as well.
    """
    if isinstance(value, list):
        return [_of_trainer(item, name) for item in value]
    if not isinstance(value, Mapping):
        return value
    copy = {key: _of_trainer(below, name) for key, below in value.items()}
    if "resource" in copy and name and copy.get("containerName") == name:
        copy["containerName"] = TRAINER_CONTAINER
    return copy


def _words(container: Json, name: str) -> list[str]:
    words = container.pop(name, None) or []
    if not isinstance(words, list):
        raise Mistake(f"{name}: must be a list, not {words!r}; write each word as an item")
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise Mistake(f"{name}: {json.dumps(wrong[0])} is not a string; put it in quotes")
    return words


def _references(made: Conversion) -> None:
    """Add a note if the arguments or the environment use variables that the pod lacks.

    In a PyTorchJob, Kubernetes replaces `$(RANK)` and similar references with values. In a DDPJob,
    only torchrun sets these variables, when it starts a worker.
    """
    spec = made.job["spec"]
    texts = {"args": [] if "command" in spec else spec.get("args", ())}
    texts["env"] = [str(variable.get("value", "")) for variable in spec.get("env", ())]
    for name, values in texts.items():
        if unset := _unset(spec, values):
            made.notes.append(
                f"{name}: the values use {', '.join(unset)}, but torchrun sets these variables only when a worker "
                "starts; in the script, read the rank and the group's address from the environment"
            )


def _unset(spec: Json, texts: Iterable[str]) -> list[str]:
    """Return the names of variables that `texts` use but that are not set in a DDPJob's pods."""
    names = dict.fromkeys(match[1] for text in texts for match in _NOT_SET.finditer(text))
    return [name for name in names if "command" not in spec or not name.startswith("MASTER_")]


def _resources(made: Conversion, resources: Mapping[str, Any]) -> None:
    target, kept = made.job["spec"], {}
    target["gpusPerNode"] = 0
    if resources and not {"requests", "limits"} & resources.keys():
        # A TrainJob's resourcesPerNode field can contain amounts without requests and limits.
        resources = {"limits": resources}
    names = [n for kind in ("limits", "requests") for n in resources.get(kind) or () if _GPUS.fullmatch(n)]
    # Only one kind of device becomes gpusPerNode. The other kinds stay in `resources`.
    name = max(names, key=lambda n: n == "nvidia.com/gpu", default="")
    for kind in ("requests", "limits"):
        amounts = dict(resources.get(kind) or {})
        if name in amounts:
            number = str(amounts.pop(name))
            if not number.isdigit():
                raise Mistake(f"resources.{kind}.{name}: {number} is not a whole number of GPUs")
            target["gpusPerNode"] = int(number)
            if name != "nvidia.com/gpu":
                target["gpuResource"] = name
        if amounts:
            kept[kind] = amounts
    if kept := {kind: amounts for kind, amounts in kept.items() if amounts}:
        target["resources"] = kept


def _shared_memory(made: Conversion, pod: Json, container: Json, sidecars: Sequence[Json]) -> None:
    """Convert a memory volume at /dev/shm into storage.sharedMemory."""
    mounts = container.get("volumeMounts") or []
    shm = next((m for m in mounts if mounted_at(m) == "/dev/shm"), None)
    if shm is None:
        return
    volume: Json = next((v for v in pod.get("volumes") or () if v.get("name") == shm.get("name")), {})
    container["volumeMounts"] = [m for m in mounts if m is not shm]
    others = (container, *sidecars, *(pod.get("initContainers") or ()))
    if any(m.get("name") == shm.get("name") for other in others for m in other.get("volumeMounts") or ()):
        made.notes.append(
            f"the volume {shm.get('name')} stays mounted in its other places; the trainer's /dev/shm is now a separate "
            "volume (spec.storage.sharedMemory)"
        )
    else:
        pod["volumes"] = [v for v in pod.get("volumes") or () if v is not volume]
    for holder, key in ((container, "volumeMounts"), (pod, "volumes")):
        if not holder.get(key):
            holder.pop(key, None)
    size = (volume.get("emptyDir") or {}).get("sizeLimit")
    if size is not None:
        made.job["spec"].setdefault("storage", {})["sharedMemory"] = size
    else:
        made.notes.append(
            "the volume at /dev/shm has no sizeLimit, but in a DDPJob /dev/shm has 1Gi by default. SIGBUS kills a "
            "data loader that needs more; to raise the limit, set spec.storage.sharedMemory"
        )


# --- the entry point --------------------------------------------------------------------------------------------


def _entry_point(made: Conversion, command: list[str], args: list[str]) -> None:
    spec, words = made.job["spec"], [*command, *args]
    shell = len(words) == 3 and words[0].rpartition("/")[2] in ("sh", "bash")
    if shell and _PLAIN_SHELL.fullmatch(words[1]):
        inner = words[2].replace("\\\n", " ").strip().removeprefix("exec ").strip()
        if inner and (not _SHELL.search(inner) or _reads_only_theirs(inner)):
            words = _shell_words(inner)
    line = as_torchrun(words) if words else None
    if line is not None:
        words = line.words
        made.notes += line.notes
        known = {variable.get("name") for variable in spec.get("env") or ()}
        added = [{"name": name, "value": value} for name, value in line.env.items() if name not in known]
        if added:
            spec["env"] = [*(spec.get("env") or ()), *added]
    elif not command and (not args or args[0].startswith("-") or "=" in args[0]):
        # The words are arguments for the program that the image starts. Some programs, such as
        # torchtune, have arguments of the form dataset=...
        if args:
            spec["args"] = list(args)
        return
    if line is None and not command and args[0].endswith(".py"):
        made.notes.append(
            f"script: taken from args[0] ({args[0]}), which used to be passed to the image's entry point; torchrun now "
            "runs it directly"
        )
        words = ["torchrun", *words]
    launched = _after_launcher(words)
    if launched is not None:
        if "torch.distributed.launch" in words and not {"--use-env", "--use_env"} & {*words}:
            made.notes.append(
                "torch.distributed.launch: passed --local-rank to the script, but torchrun does not; read the variable "
                "LOCAL_RANK in the script"
            )
        _torchrun(made, words[: len(words) - len(launched)], launched)
        return
    if _PYTHON.fullmatch(words[0]):
        rest = [w for w in words[1:] if w not in ("-u",)]
        if rest[:1] == ["-m"] and len(rest) > 1:
            spec["module"], rest = rest[1], rest[2:]
        elif rest and not rest[0].startswith("-"):
            spec["script"], rest = rest[0], rest[1:]
        else:
            rest = []
        if "script" in spec or "module" in spec:
            spec |= {"args": rest} if rest else {}
            made.plain = True
            return
    spec["command"] = list(command or args)
    if command and args:
        spec["args"] = list(args)
    if not command:
        made.notes.append(
            f"command: taken from args ({args[0]} ...), which used to be passed to the image's entry point; if the "
            f"entry point does more than start the command, put the entry point first"
        )
    made.notes.append(
        "command: runs unchanged, so it must start torchrun itself (torchrun reads the PET_ variables); the operator "
        "sees the failure of each rank only with script or module"
    )
    if unset := _unset(spec, words):
        made.notes.append(
            f"command: uses {', '.join(unset)}, but these variables are not set; remove torchrun's options for nodes, "
            f"ranks and addresses, because torchrun reads them from the PET_ variables; for other launchers, write "
            f"DDPJOB_INDEX instead of RANK, and DDPJOB_NODES instead of WORLD_SIZE"
        )


def _shell_words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise Mistake(f"{line}: not a valid shell command ({error})") from error


def _signs_of_shell(line: str) -> list[str]:
    """Return the parts of a line that a shell would interpret instead of passing to the program.

    Such parts are pipes, redirections, command lists and variables.
    """
    bare = _QUOTED.sub(lambda quoted: " ".join(_SIGN_IN_QUOTES.findall(quoted[1] or "")), line)
    signs = re.findall(rf"[;&|<>()]+|(?<!\S)#|\n|{_SIGN_IN_QUOTES.pattern}", bare)
    return ["a line break" if sign == "\n" else sign for sign in signs]


def _after_launcher(words: list[str]) -> list[str] | None:
    """Return the words after torchrun's name, or None if the command does not start torchrun."""
    if words[0].rpartition("/")[2] == "torchrun":
        return words[1:]
    if _PYTHON.fullmatch(words[0]):
        for position in range(1, len(words) - 1):
            if words[position] == "-m" and words[position + 1] in ("torch.distributed.run", "torch.distributed.launch"):
                return words[position + 2 :]
    return None


def _reads_only_theirs(line: str) -> bool:
    """Whether a torchrun line needs a shell only for variables in the options that _THEIRS matches.

    The job does not need these variables, because DDPJob's operator sets the options itself.
    """
    if _SHELL.search(_THEIRS.sub(" ", line)):
        return False
    words = _shell_words(line)
    known = as_torchrun(words)
    launched = _after_launcher(known.words if known is not None else words)
    return launched is not None and not any("$" in word for word in launched[_options(launched) :])


def _options(words: Sequence[str]) -> int:
    """Return how many words torchrun's options and their values take up."""
    position = 0
    while position < len(words) and words[position].startswith("-"):
        if words[position] == "--":
            return position + 1
        name, equals, _ = words[position].lstrip("-").partition("=")
        position += 1 if equals or name.replace("_", "-") in _BARE else 2
    return position


def _torchrun(made: Conversion, launcher: list[str], words: list[str]) -> None:
    spec, own, module, plain = made.job["spec"], list[str](), False, False
    position, nproc = 0, None
    while position < len(words) and words[position].startswith("-"):
        word = words[position]
        if word == "--":
            position += 1
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if not word.startswith("--") and name[:1] in ("r", "t") and len(name) > 1 and not equals:
            # A short option can contain its value, as in -r3.
            name, equals, value = name[0], "=", name[1:]
        if not equals and name not in _BARE:
            position += 1
            value = words[position] if position < len(words) else ""
            # An empty role is valid, because TorchX writes --role ''.
            if (not value and name != "role") or value.startswith("-"):
                raise Mistake(f"{word} {value}: the value is missing, perhaps because a shell variable is not set")
        position += 1
        if name in ("m", "module"):
            module = True
        elif name == "no-python":
            plain = True
        elif name == "nnodes":
            _nnodes(made, value)
        elif name == "nproc-per-node":
            nproc = value
        elif name == "max-restarts":
            if not value.isdigit():
                raise Mistake(f"--max-restarts={value}: must be a number")
            spec.setdefault("recovery", {})["maxRestarts"] = int(value)
        elif name == "rdzv-conf":
            pairs = (setting.partition("=") for setting in value.split(","))
            _rendezvous(made, ((key, given) for key, _, given in pairs))
        elif name in ("r", "t"):
            # Keep the short name, because several long options begin with --r.
            own += [f"-{name}", value]
        elif name not in _OPERATORS and (value or name in _BARE):
            own.append(f"--{name}" if name in _BARE else f"--{name}={value}")
    if position >= len(words):
        raise Mistake("the torchrun command line contains no script")
    program, rest = words[position], words[position + 1 :]
    if plain:
        start = launcher if len(launcher) == 1 else [launcher[0], "-m", "torch.distributed.run"]
        spec["command"] = [*start, *own, "--no-python", "--", program, *rest]
    else:
        spec["module" if module else "script"] = program
        spec |= {"args": rest} if rest else {}
        spec |= {"torchrunArgs": own} if own else {}
    made.counted = nproc is not None
    if nproc is not None and nproc.isdigit():
        spec.setdefault("gpusPerNode", int(nproc))
        if spec["gpusPerNode"] != int(nproc):
            spec["procsPerNode"] = int(nproc)
    elif nproc in ("auto", "gpu", "xpu"):
        made.notes.append(
            f"--nproc-per-node={nproc}: the number of processes comes from gpusPerNode, which is "
            f"{spec.get('gpusPerNode', 1)}; correct gpusPerNode if necessary"
        )
    elif nproc == "cpu":
        spec["gpusPerNode"] = 0
        made.notes.append("--nproc-per-node=cpu: set procsPerNode to the number of processes")
    elif nproc is not None:
        made.notes.append(
            f"--nproc-per-node={nproc}: not a number; set procsPerNode, unless each GPU should have one process"
        )


def _nnodes(made: Conversion, value: str) -> None:
    least, _, most = value.partition(":")
    if not least.isdigit() or (most and not most.isdigit()):
        if "nodes" in made.job["spec"]:
            return
        made.notes.append(f"--nnodes={value}: not a number; set nodes")
        return
    nodes = int(most or least)
    spec = made.job["spec"]
    spec.setdefault("nodes", nodes)
    if most and most != least:
        spec.setdefault("elastic", {"minNodes": int(least), "maxNodes": int(most)})
