"""Adapts a spec to this machine, warns about the differences, and reports what prevents a run."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from ddpjob.api.job import DDPJob
from ddpjob.api.job_spec import DataVolume, JobSpec, Json
from ddpjob.api.submitted_code import CODE_FOLDER
from ddpjob.core.world import TRAINER_CONTAINER
from ddpjob.local.environment import field_value
from ddpjob.local.paths import JobFolder
from ddpjob.objects.pods import SECRET_KEYS

NVIDIA = "nvidia.com/gpu"
_SMI_SECONDS = 30.0
MOST_RANKS = max(64, 8 * (os.cpu_count() or 1))
"""Maximum number of ranks on this machine. Without a limit, a typo could start processes until
memory is full.
"""


@dataclass(frozen=True)
class Options:
    """Command-line options that override a manifest."""

    data: Path | None = None
    working_dir: Path | None = None


@dataclass(frozen=True)
class LocalSpec:
    """A job's spec, adapted to this machine."""

    spec: JobSpec
    gpus: tuple[str, ...]
    """The GPUs for the job's pods, named as in CUDA_VISIBLE_DEVICES. Empty if the job requests no
    NVIDIA GPUs, or more than this machine has.
    """
    data: Path | None
    code: Path | None
    """The folder into which the code from spec.code is fetched."""
    working_dir: Path
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    """Reasons why the job cannot run here. Each is one sentence that names the field and the
    remedy. The job is started only if there are none.
    """

    def visible_gpus(self, index: int) -> str | None:
        """Return the value of CUDA_VISIBLE_DEVICES for the pod in slot `index`.

        None means that the pod gets this shell's value.
        """
        if not self.gpus:
            return "" if self.spec.gpu_resource == NVIDIA else None
        each = self.spec.gpus_per_node
        # A replacement pod has the index of the pod that it replaces, so it gets the same GPUs.
        return ",".join(self.gpus[index * each : (index + 1) * each])


def adapt_spec(job: DDPJob, folder: JobFolder, options: Options) -> LocalSpec:
    """Adapt a job's spec to this machine, and find out what is missing or ignored here.

    This function inspects the machine, but changes nothing on it.
    """
    spec = job.spec if options.working_dir is None else replace(job.spec, code=None)
    gpus = usable_gpus() if spec.gpus_per_node and spec.gpu_resource == NVIDIA else ()
    enough = len(gpus) >= spec.pods * spec.gpus_per_node
    data = _data(spec, folder, options)
    given = data if options.data is not None else None
    on_cpu = spec.gpus_per_node > 0 and spec.gpu_resource == NVIDIA and not enough
    code = folder.fetched_code / spec.code.version[:16] if spec.code else None
    working_dir = options.working_dir or _working_dir(spec, code)
    problems = [
        *filter(None, [_too_many_ranks(spec, spec.nodes)]),
        *_without_torch(spec),
        *_unreadable(spec),
        *_without_credentials(spec, options),
        *_folders(spec, data, working_dir, options, fetched=code is not None),
    ]
    warnings = [
        *_gpu_warnings(spec, gpus),
        *_ignored(spec),
        *_data_note(spec, data, options),
        *_code_note(job.spec, options),
        *(_module_note(spec, working_dir) if code is None else ()),
        *_rights_note(spec, working_dir),
    ]
    return LocalSpec(
        spec=_adapted(spec, given, code, on_cpu=on_cpu),
        gpus=gpus if enough else (),
        data=data,
        code=code,
        working_dir=working_dir.absolute(),
        warnings=tuple(warnings),
        problems=tuple(problems),
    )


def _adapted(spec: JobSpec, given: Path | None, code: Path | None, *, on_cpu: bool) -> JobSpec:
    """Return the spec in a form that this machine can run.

    The class, the gang, the rank order, the receiver and the network interface are removed, because
    they need a cluster. The time to live is also removed, so that the job's folder and its logs are
    kept. `given`, if it is set, becomes the folder with the training data. If the job trains on the
    CPU, the nccl backend is not used. A script below CODE_FOLDER is taken from `code`, the folder
    with the fetched code.
    """
    storage = spec.storage
    if given is not None and (storage.data is None or storage.data.url):
        storage = replace(storage, data=DataVolume(mount_path=str(given), host_path=str(given), read_only=True))
    backend = "auto" if on_cpu and spec.backend != "gloo" else spec.backend
    policy = replace(spec.run_policy, ttl_seconds_after_finished=None, logs_kept=0)
    script = spec.script
    if script and code is not None and Path(script).is_relative_to(CODE_FOLDER):
        script = str(code / Path(script).relative_to(CODE_FOLDER))
    network, scheduling = replace(spec.network, interface=None), replace(spec.scheduling, gang=False)
    return replace(
        spec,
        managed_by=None,
        class_name="",
        script=script,
        storage=storage,
        backend=backend,
        run_policy=policy,
        network=network,
        scheduling=scheduling,
        rank_order=(),
        notify=None,
        working_dir=None,
    )


# --- GPUs -------------------------------------------------------------------------------------------------------


def usable_gpus() -> tuple[str, ...]:
    """Return this machine's NVIDIA GPUs.

    If CUDA_VISIBLE_DEVICES is set, return only the GPUs that it lists. As in CUDA, the list ends at
    the first entry that is not a GPU, so `-1`, `NoDevFiles` and similar values hide all GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return ()
    found = _listed_gpus()
    if not visible or not found:
        return found
    names = (name.strip() for name in visible.split(","))
    return tuple(takewhile(lambda name: name in found or name.startswith(("GPU-", "MIG-")), names))


def _listed_gpus() -> tuple[str, ...]:
    """Return the numbers of all NVIDIA GPUs in this machine.

    The result is empty if nvidia-smi cannot run, fails, or hangs because of a broken driver.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, timeout=_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = (line.strip() for line in listed.stdout.decode(errors="replace").splitlines())
    return tuple(line for line in lines if line.isdigit())


def _gpu_warnings(spec: JobSpec, gpus: tuple[str, ...]) -> Iterator[str]:
    wanted = spec.pods * spec.gpus_per_node
    if not wanted:
        return
    if spec.gpu_resource != NVIDIA:
        why = "is not assigned on this machine; every node sees the devices that this shell sees"
        yield f"spec.gpuResource: {spec.gpu_resource} {why}"
    elif len(gpus) < wanted:
        yield (
            f"spec.gpusPerNode: {spec.nodes} nodes{_and_spares(spec)} x {spec.gpus_per_node} need {wanted}"
            f" NVIDIA GPUs, but this machine has {len(gpus)}, so the job trains on the CPU (set gpusPerNode: 0"
            " to silence this warning)"
        )


def _and_spares(spec: JobSpec) -> str:
    return f" and {spec.spares} {'spare' if spec.spares == 1 else 'spares'}" if spec.spares else ""


def too_many_nodes(local: LocalSpec, nodes: int) -> str:
    """Return the reason why a job cannot have this many nodes here; empty if it can."""
    wanted = (nodes + local.spec.spares) * local.spec.gpus_per_node
    if local.gpus and wanted > len(local.gpus):
        return f"{nodes} nodes{_and_spares(local.spec)} need {wanted} GPUs, but this machine has {len(local.gpus)}"
    return _too_many_ranks(local.spec, nodes)


def _too_many_ranks(spec: JobSpec, nodes: int) -> str:
    ranks = (nodes + spec.spares) * spec.procs_per_node
    if ranks <= MOST_RANKS:
        return ""
    text = f"{nodes} nodes{_and_spares(spec)} x {spec.procs_per_node} processes make {ranks} ranks"
    return f"spec.nodes={nodes}: {text}, but this machine runs at most {MOST_RANKS}; set nodes to a lower number"


# --- folders ----------------------------------------------------------------------------------------------------


def _data(spec: JobSpec, folder: JobFolder, options: Options) -> Path | None:
    if options.data is not None:
        return options.data.absolute()
    volume = spec.storage.data
    if volume is None:
        return None
    if volume.host_path and _is_here(volume):
        return Path(volume.host_path) / (volume.sub_path or "")
    return folder.data / volume.fetched_folder if volume.url else folder.data


def _is_here(volume: DataVolume) -> bool:
    return bool(volume.host_path) and Path(str(volume.host_path)).is_dir()


def _data_note(spec: JobSpec, data: Path | None, options: Options) -> Iterator[str]:
    volume = spec.storage.data
    if volume is None or volume.url or options.data is not None or _is_here(volume):
        return
    names = {"hostPath": volume.host_path, "claim": volume.claim_name}
    where = next((f"{kind} {name}" for kind, name in names.items() if name), "NFS share")
    remedy = "choose a different folder with --data DIR"
    yield f"spec.storage.data: the {where} is not on this machine, so data is read from {data}; {remedy}"


def _working_dir(spec: JobSpec, code: Path | None) -> Path:
    """Return this machine's folder for spec.workingDir.

    If the job fetches code, a path below CODE_FOLDER is looked up in the folder with the fetched
    code.
    """
    if code is None:
        return Path(spec.working_dir or Path.cwd())
    given = Path(spec.working_dir or CODE_FOLDER)
    return code / given.relative_to(CODE_FOLDER) if given.is_relative_to(CODE_FOLDER) else given


def _code_note(spec: JobSpec, options: Options) -> Iterator[str]:
    if spec.code is not None and options.working_dir is not None:
        yield f"spec.code: not fetched, because the code in --workdir {options.working_dir} is used"


def _folders(spec: JobSpec, data: Path | None, working_dir: Path, options: Options, *, fetched: bool) -> Iterator[str]:
    """Yield a message for each missing folder or script.

    If the code has not been fetched yet, the launcher checks the script later.
    """
    if options.data is not None and not options.data.is_dir():
        yield f"--data {options.data}: no such folder"
    if fetched:
        return
    if not working_dir.is_dir():
        named = f"--workdir {working_dir}" if options.working_dir else f"spec.workingDir: {working_dir}"
        yield f"{named}: no such folder on this machine; choose a different folder with --workdir DIR"
    elif spec.script and "$(" not in spec.script and not (working_dir / spec.script).exists():
        if Path(spec.script).is_absolute():
            remedy = "is not on this machine; write its path on this machine, or a path relative to --workdir DIR"
        else:
            near = difflib.get_close_matches(spec.script, [path.name for path in working_dir.glob("*.py")], n=1)
            meant = f"did you mean {near[0]}?" if near else "specify its folder with --workdir DIR"
            remedy = f"is not in {working_dir.absolute()}; {meant}"
        yield f"spec.script: {spec.script} {remedy}"


def _without_torch(spec: JobSpec) -> Iterator[str]:
    """Yield a message if torch is missing from the Python that runs this command.

    For example, pipx installs the command in a separate environment that lacks the user's packages.
    If the job sets PYTHONPATH, nothing is yielded, because torch may be in one of its folders.
    """
    names = {entry["name"] for entry in (*spec.env, *(_trainer(spec)[0].get("env") or ()))}
    if spec.command or "PYTHONPATH" in names or importlib.util.find_spec("torch") is not None:
        return
    python = shlex.quote(sys.executable)
    yield (
        f"the job runs in this Python, {sys.executable}, which does not have torch; install torch there"
        f" (`{python} -m pip install torch`), or install ddpjob in an environment that has torch"
    )


def _module_note(spec: JobSpec, working_dir: Path) -> Iterator[str]:
    """Yield a message if spec.module was not found.

    The message is only a warning, because the job's environment variables may add to the folders
    that Python searches.
    """
    top = spec.module.partition(".")[0] if spec.module and "$(" not in spec.module else ""
    if not top or not working_dir.is_dir() or (working_dir / top).is_dir() or (working_dir / f"{top}.py").exists():
        return
    with contextlib.suppress(ValueError):
        # find_spec raises ValueError for `__main__`, which is this program.
        if importlib.util.find_spec(top) is not None:
            return
        where = f"neither in {working_dir.absolute()} nor installed in this Python"
        yield f"spec.module: {spec.module} is {where}; specify its folder with --workdir DIR"


def _rights_note(spec: JobSpec, working_dir: Path) -> Iterator[str]:
    """Yield a message if the program in `command` is a local file without execute permission."""
    program = working_dir / spec.command[0] if spec.command and "/" in spec.command[0] else None
    if program is not None and program.is_file() and not os.access(program, os.X_OK):
        yield f"spec.command: {spec.command[0]} cannot be executed; run chmod +x {shlex.quote(str(program))}"


# --- what only a cluster has ------------------------------------------------------------------------------------


def _trainer(spec: JobSpec) -> tuple[Json, str]:
    containers = (spec.pod_template.get("spec") or {}).get("containers") or ()
    for position, container in enumerate(containers):
        if container.get("name") == TRAINER_CONTAINER:
            return container, f"spec.podTemplate.spec.containers[{position}]"
    return {}, ""


_ANY_POD: Json = {"metadata": {"name": "", "namespace": ""}, "spec": {}}
_OBJECTS = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap", "resourceFieldRef": "the container's resources",
            "fileKeyRef": "the file of a volume"}  # fmt: skip


def _unreadable(spec: JobSpec) -> Iterator[str]:
    """Yield a message for each container variable whose value cannot be read here."""
    trainer, where = _trainer(spec)
    lists = [("spec", spec.env), (where, trainer.get("env") or ())]
    for path, entries in lists:
        for position, entry in enumerate(entries):
            for kind, source in (entry.get("valueFrom") or {}).items():
                at = f"{path}.env[{position}].valueFrom.{kind}"
                if kind == "fieldRef":
                    if field_value(_ANY_POD, source["fieldPath"]) is None:
                        field = f"the field {source['fieldPath']}"
                        yield f"{at}: {field} does not exist outside Kubernetes; remove the variable"
                elif entry["name"] not in os.environ and not source.get("optional"):
                    what = f"{_OBJECTS[kind]} {source.get('name', '')}".strip()
                    remedy = f"export {entry['name']} in this shell to use that value instead"
                    yield f"{at}: {what} cannot be read on this machine; {remedy}"


def _without_credentials(spec: JobSpec, options: Options) -> Iterator[str]:
    """Yield a message for each bucket whose credentials are missing here.

    In a cluster, a Secret provides the credentials. Here, variables of this shell must provide
    them.
    """
    data = spec.storage.data if options.data is None else None
    missing = [name for name in SECRET_KEYS if name != "AWS_SESSION_TOKEN" and not os.environ.get(name)]
    buckets = {"storage.checkpoints": spec.storage.checkpoints, "storage.data": data, "code": spec.code}
    for field, bucket in buckets.items():
        if bucket is not None and bucket.secret_name and missing:
            remedy = f"export {' and '.join(missing)} in this shell"
            secret = f"Secret {bucket.secret_name} cannot be read on this machine"
            yield f"spec.{field}.secretName: {secret}; {remedy}"


def _ignored(spec: JobSpec) -> Iterator[str]:
    if spec.image:
        yield f"spec.image: {spec.image} is not used, because this Python runs the job"
    if spec.class_name:
        given = "the class's values (env, podTemplate, ...) are missing here, and its limits do not apply"
        yield f"spec.className: {spec.class_name} is not used, because classes belong to a cluster's operator; {given}"
    if spec.managed_elsewhere:
        yield f"spec.managedBy: {spec.managed_by} is ignored, because the job runs here"
    if spec.scheduling.gang:
        yield "spec.scheduling.gang: has no effect on this machine, where pods are not scheduled"
    if spec.rank_order:
        yield "spec.rankOrder: has no effect on a single machine; ranks follow the indices"
    if spec.notify:
        yield "spec.notify: has no effect on this machine, because receivers belong to a cluster's operator"
    for position, source in enumerate(spec.env_from):
        kind = "secretRef" if "secretRef" in source else "configMapRef"
        name = source[kind]["name"]
        why = "cannot be read on this machine, so this shell's variables are used instead"
        yield f"spec.envFrom[{position}].{kind}: {name} {why}"
    if spec.network.interface:
        yield f"spec.network.interface: {spec.network.interface} is not used; nodes use this machine's loopback"
    pod = spec.pod_template.get("spec") or {}
    for kind in ("containers", "initContainers"):
        for position, container in enumerate(pod.get(kind) or ()):
            if container["name"] != TRAINER_CONTAINER:
                why = "is not started, because this machine does not run containers"
                yield f"spec.podTemplate.spec.{kind}[{position}]: {container['name']} {why}"
    if pod.get("volumes"):
        yield "spec.podTemplate.spec.volumes: not mounted, because paths refer to this machine"
