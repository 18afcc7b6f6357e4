"""Builds a DDPJob from a command line, and builds a ConfigMap that contains the user's code."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ddpjob.api.job import API_VERSION, KIND
from ddpjob.api.job_spec import Json
from ddpjob.api.submitted_code import CODE_FOLDER, mount_code
from ddpjob.api.yamltext import YamlError, read_documents, shown
from ddpjob.client.backends.backend import Mistake
from ddpjob.client.manifests.code_archive import IGNORE_FILE, CodePlace, Found, find_files, send
from ddpjob.client.manifests.git_commit import resolve
from ddpjob.local.paths import job_folder

SOURCE = "function.py"
"""Name of the file that contains JobRequest.source. It must not be the name of a module that
scripts import. The script's folder is on sys.path, so the file would hide that module."""
MOST_BYTES = 1024 * 1024 - 16 * 1024
"""Maximum total size, in bytes, of the files in a ConfigMap. An API object, including its metadata,
can have at most 1 MiB."""
_ENTRIES = ("train.py", "main.py", "__main__.py")
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_Kind = TypeVar("_Kind", list[Any], dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A user's request for a new job. Empty fields get the CRD's defaults."""

    program: str
    source: str = ""
    """The text of a script, for a script that is not in a file. If `source` is set, `program` is
    the script's name."""
    args: Sequence[str | os.PathLike[str]] = ()
    image: str = ""
    name: str = ""
    nodes: int = 1
    gpus: int | None = None
    procs: int | None = None
    spares: int = 0
    min_nodes: int | None = None
    max_nodes: int | None = None
    mode: str = ""
    env: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)
    cpu: str = ""
    memory: str = ""
    checkpoints: str | os.PathLike[str] = ""
    """`claim:NAME`, `s3://BUCKET/FOLDER`, or the absolute path of a folder that exists on every
    Kubernetes node.
    """
    entry: str | os.PathLike[str] = ""
    """The script to start if the program is a folder."""
    code: str = ""
    """The s3:// folder for code that is too large for a ConfigMap.

    The default is the `code` folder in the s3:// folder of `checkpoints`.
    """
    git: str = ""
    """URL or URL@REF of a git repository. If `git` is set, `program` is a path in the repository,
    or a module."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Maps the path of a field below spec, such as recovery.maxRestarts, to its value. If another
    option also sets this field, and both values are mappings, the values are merged."""


def _silent(text: str) -> None:
    """Report nothing."""


def build(request: JobRequest, *, local: bool, say: Callable[[str], None] = _silent, upload: bool = True) -> list[Json]:
    """Return the objects that have to be created for a request.

    The job is the last object. If `local` is true, the job runs on this machine, so it needs no
    image and its code is not copied. A folder that is too large for a ConfigMap is uploaded to a
    bucket, unless `upload` is False. `say` is called with messages about the upload and about files
    that are left out.
    """
    image = request.image or ("local" if local else "")
    of_class = any(request.settings.get(path) for path in ("className", "spec.className"))
    spec: Json = {} if of_class and not image else {"image": image}
    if not image and not of_class:
        raise Mistake("image (--image): missing; specify any image with Python and PyTorch")
    name = request.name or _name(request)
    needed, archive = _program(request, name, spec, say, local=local)
    spec["nodes"] = request.nodes
    optional = {"gpusPerNode": request.gpus, "procsPerNode": request.procs, "spares": request.spares or None}
    spec |= {name: value for name, value in optional.items() if value is not None}
    if request.args:
        spec["args"] = _plain("args", list(request.args))
    if request.env:
        spec["env"] = [{"name": name, "value": _plain("env", value)} for name, value in request.env.items()]
    if request.min_nodes is not None or request.max_nodes is not None:
        elastic = {"minNodes": request.min_nodes or 1, "maxNodes": request.max_nodes}
        spec["elastic"] = {name: value for name, value in elastic.items() if value is not None}
    if request.mode:
        spec["recovery"] = {"mode": request.mode}
    amounts = {name: value for name, value in (("cpu", request.cpu), ("memory", request.memory)) if value}
    if amounts:
        spec["resources"] = {"requests": amounts, "limits": {k: v for k, v in amounts.items() if k == "memory"}}
        spec["resources"] = {kind: values for kind, values in spec["resources"].items() if values}
    if request.checkpoints:
        spec["storage"] = {"checkpoints": _volume(os.fspath(request.checkpoints))}
    for path, value in _plain("settings (--set)", request.settings).items():
        _set(spec, path, value)
    if request.git:
        spec["code"] = {"git": {**resolve(request.git), **(spec.get("code") or {}).get("git", {})}}
    if archive is not None:
        sent = send(archive, request.program, _code_place(request, spec, archive), say, upload=upload)
        spec["code"] = {**sent, **(spec.get("code") or {})}
    job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    maps = [_config_map(name, files) for files in needed]
    for code, files in zip(maps, needed, strict=True) if not local else ():
        _mount(spec, code, files)
    return [*maps, job]


def _name(request: JobRequest) -> str:
    path = Path(request.program)
    return f"{name_after(path.resolve().name if path.is_dir() else path.stem)}-{secrets.token_hex(2)}"


def name_after(stem: str) -> str:
    """Return a valid job name that resembles the name of a program."""
    words = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:30].strip("-")
    return words if words[:1].isalpha() else "job"


def _program(
    request: JobRequest, name: str, spec: Json, say: Callable[[str], None], *, local: bool
) -> tuple[list[dict[str, bytes]], Found | None]:
    """Set `script` or `module` in `spec`, and return the program's files that have to be copied.

    The first result contains the files for ConfigMaps, and the second contains the files for an
    archive. At most one of the two has files, and neither has any if the code is not copied.
    """
    program, path = request.program, Path(request.program)
    if not program:
        raise Mistake("the program's name is empty, perhaps because a shell variable is not set")
    if request.git:
        if request.entry or request.code or request.source:
            raise Mistake(
                "entry (--entry) and code (--code) cannot be used with git (--git); specify a path in the repository "
                "instead"
            )
        is_module = re.fullmatch(_MODULE, program) and not program.endswith(".py")
        spec["module" if is_module else "script"] = program
        return [], None
    if request.source or not path.is_dir():
        for option, given in (
            ("entry (--entry) is for a script in", request.entry),
            ("code (--code) is for", request.code),
        ):
            if given:
                raise Mistake(f"{option} a folder, but {program} is not a folder")
    if request.source:
        spec["script"] = f"{job_folder(name).code if local else CODE_FOLDER}/{SOURCE}"
        return [_limited([(SOURCE, len(request.source.encode()), request.source.encode)], program)], None
    if path.is_dir():
        entry = os.fspath(request.entry) or next((name for name in _ENTRIES if (path / name).is_file()), "")
        if not entry or not (path / entry).is_file():
            raise Mistake(
                f"{program}: a folder needs an entry point; set entry (--entry) to its script, such as {_ENTRIES[0]}"
            )
        if local:
            spec |= {"script": str((path / entry).absolute()), "workingDir": str(path.absolute())}
            return [], None
        inside, found = Path(os.path.relpath(path / entry, path)).as_posix(), find_files(path)
        if inside not in found.files:
            raise Mistake(
                f"entry (--entry) {entry}: excluded from the copy of {program}; choose a different script. Hidden "
                "files, caches, outputs, secrets, links to folders, and files listed in "
                f"{IGNORE_FILE} or .gitignore are never copied"
            )
        for note in found.notes():
            say(f"{program}: {note}")
        if request.code or found.size > MOST_BYTES:
            # The script's path is relative to the folder where the archive is unpacked.
            spec["script"] = inside
            return [], found
        spec |= {"script": f"{CODE_FOLDER}/{inside}", "workingDir": CODE_FOLDER}
        files = ((inside, file.stat().st_size, file.read_bytes) for inside, file in found.files.items())
        return [_limited(files, program)], None
    if path.is_file():
        if local:
            spec["script"] = str(path.absolute())
            return [], None
        spec["script"] = f"{CODE_FOLDER}/{path.name}"
        return [_limited([(path.name, path.stat().st_size, path.read_bytes)], program)], None
    if path.is_absolute() and not local:
        spec["script"] = program  # The script is in the image.
    elif re.fullmatch(_MODULE, program) and not program.endswith(".py"):
        spec["module"] = program
    else:
        raise Mistake(
            f"{program}: no such file or folder on this machine; specify a script in the image by its absolute path, "
            "or a module by its name"
        )
    return [], None


def _code_place(request: JobRequest, spec: Json, found: Found) -> CodePlace:
    """Return the bucket folder that the code is uploaded to.

    Raises Mistake if the request does not specify a bucket.
    """
    checkpoints = (spec.get("storage") or {}).get("checkpoints") or {}
    url = request.code or (f"{str(checkpoints['url']).rstrip('/')}/code" if checkpoints.get("url") else "")
    if not url:
        raise Mistake(
            f"{request.program}: contains more than {MOST_BYTES // 1024} KiB, the limit of a ConfigMap; set "
            "checkpoints (--checkpoints) or code (--code) to s3://BUCKET/FOLDER, list unneeded files in "
            f"{IGNORE_FILE}, or put the code into the image"
        )
    if not url.startswith("s3://"):
        raise Mistake(f"code (--code) {url}: must have the form s3://BUCKET/FOLDER")
    own = spec.get("code") or {}
    endpoint, region = (str(own.get(name) or checkpoints.get(name) or "") for name in ("endpoint", "region"))
    return CodePlace(url, endpoint, region)


_File = tuple[str, int, Callable[[], bytes]]
"""A file: its name, its size in bytes, and a function that reads its content."""


def _limited(files: Iterable[_File], source: str) -> dict[str, bytes]:
    """Read files and return their contents by name.

    Raises Mistake if the total size of the files exceeds MOST_BYTES. A file that would exceed this
    limit is not read.
    """
    found, size = dict[str, bytes](), 0
    for name, length, read in files:
        size += length + len(name)
        if size > MOST_BYTES:
            most = f"more than {MOST_BYTES // 1024} KiB, the limit of a ConfigMap"
            raise Mistake(
                f"{source}: contains {most}; put the code into the image, or on a volume that podTemplate mounts"
            )
        found[name] = read()
    return found


def _keys(files: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Yield a pair for each file: the file's key in the ConfigMap, and its path."""
    for number, path in enumerate(files):
        # Begin each key with a number. Otherwise, two files with the same name in different folders
        # would have the same key, and so would the files "a_b" and "a b".
        key = path if len(files) == 1 else f"{number}.{Path(path).name}"
        yield re.sub(r"[^-._a-zA-Z0-9]", "_", key)[:200], path


def _config_map(name: str, files: dict[str, bytes]) -> Json:
    """Build the ConfigMap with the code."""
    data, binary = {}, {}
    for key, path in _keys(files):
        try:
            data[key] = files[path].decode()
        except UnicodeDecodeError:
            binary[key] = base64.b64encode(files[path]).decode()
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:8]
    meta = {"name": f"{name}-code-{digest}"}
    body: Json = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "immutable": True}
    return body | ({"data": data} if data else {}) | ({"binaryData": binary} if binary else {})


def _mount(spec: Json, code: Json, files: Mapping[str, bytes]) -> None:
    """Mount the ConfigMap's files into the trainer's container."""
    items = [{"key": key, "path": path} for key, path in _keys(files)]
    template = _within(_within(spec, "podTemplate", dict), "spec", dict)
    volume, mount = mount_code(code["metadata"]["name"], items)
    _within(template, "volumes", list).append(volume)
    containers = _within(template, "containers", list)
    trainer = next((c for c in containers if isinstance(c, dict) and c.get("name") == "trainer"), None)
    if trainer is None:
        containers.append({"name": "trainer", "volumeMounts": [mount]})
    else:
        _within(trainer, "volumeMounts", list).append(mount)


def _within(parent: Json, name: str, kind: type[_Kind]) -> _Kind:
    """Return the value of a field in podTemplate.

    If the field is absent or null, set it to an empty value of the type `kind` first. Raises
    Mistake if the field's value has a different type.
    """
    found = parent[name] = parent.get(name) or kind()
    if not isinstance(found, kind):
        raise Mistake(f"{name}: must be a {'list' if kind is list else 'mapping'} (podTemplate in settings or --set)")
    return found


def _volume(text: str) -> Json:
    kind, _, name = text.partition(":")
    if kind == "claim" and name:
        return {"claimName": name}
    if text.startswith("/"):
        return {"hostPath": text}
    if kind == "s3":
        return {"url": text}
    raise Mistake(
        f"checkpoints (--checkpoints) {text}: must be claim:NAME, s3://BUCKET/FOLDER, or an absolute path on the "
        "Kubernetes nodes"
    )


def read_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Read `FIELD=VALUE` strings, where VALUE is YAML."""
    settings = {}
    for setting in texts:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise Mistake(f"--set {shown(setting)}: must have the form FIELD=VALUE, such as storage.sharedMemory=8Gi")
        try:
            found = [document.value for document in read_documents(text)]
        except YamlError as error:
            raise Mistake(f"--set {shown(setting)}: {error}") from error
        settings[path] = found[0] if found else None
    return settings


def _set(spec: Json, path: str, value: Any) -> None:
    parts = path.removeprefix("spec.").split(".")
    if not all(parts):
        raise Mistake(f"{path} (--set): must name a field of spec, such as storage.sharedMemory")
    here: Any = spec
    for part in parts[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise Mistake(f"{path} (--set): {part} is not a mapping")
    here[parts[-1]] = _joined(path, here.get(parts[-1]), value)


def _joined(path: str, old: Any, value: Any) -> Any:
    """Return the new value of a field whose current value is `old`.

    Two mappings are merged, and the entries of `value` take precedence. Raises Mistake if `value`
    would replace a list from another option.
    """
    if isinstance(old, list):
        raise Mistake(
            f"{path} (--set): another option also sets this list; set the whole list with only one of the two"
        )
    if not isinstance(old, dict) or not isinstance(value, dict):
        return value
    return old | {key: _joined(f"{path}.{key}", old.get(key), below) for key, below in value.items()}


def _plain(where: str, value: Any) -> Any:
    """Return a copy that contains only JSON types. Paths become strings.

    Raises Mistake for types that JSON does not have.
    """
    match value:
        case int() if not -(2**63) <= value < 2**63:
            # The message does not contain the number, because Python refuses to convert very large
            # numbers to text.
            raise Mistake(f"{where}: the number does not fit into 64 bits; write a smaller number, or a string")
        case None | str() | bool() | int() | float():
            return value
        case os.PathLike():
            return os.fspath(value)
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: _plain(f"{where}.{key}", below) for key, below in value.items()}
        case list() | tuple():
            return [_plain(f"{where}[{number}]", below) for number, below in enumerate(value)]
    raise Mistake(f"{where}: {value!r:.80} must be a string, a number, a list, or a mapping with strings as keys")
