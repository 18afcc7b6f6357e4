"""Image archives that are made without an image builder: a manifest, a configuration and one layer,
written with tarfile.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

from testcluster import python_host
from testcluster.node import PAUSE_IMAGE

# Archives contain no timestamps, so equal content gives equal bytes.
_FOLDERS = ("dev", "etc", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var")
_USERS = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_GROUPS = "root:x:0:\nnogroup:x:65534:\n"


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _file(layer: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    layer.addfile(entry, io.BytesIO(content))


def _entry(layer: tarfile.TarFile, name: str, kind: bytes, mode: int = 0o755, target: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname = kind, mode, target
    layer.addfile(entry)


def _archive(path: Path, name: str, layer: bytes, config: dict[str, object]) -> None:
    """Write the archive of an image with one layer, in the layout of `docker save`."""
    layer_name = hashlib.sha256(layer).hexdigest()
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{layer_name}"]}
    document = json.dumps({"architecture": _architecture(), "os": "linux", "config": config, "rootfs": rootfs}).encode()
    config_name = f"{hashlib.sha256(document).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{layer_name}.tar"]}]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        _file(archive, config_name, document)
        _file(archive, f"{layer_name}.tar", layer)
        _file(archive, "manifest.json", json.dumps(manifest).encode())


def write_pause(path: Path, binary: Path) -> None:
    """Write the sandbox image of every pod, which is one static program."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as layer:
        _file(layer, "pause", binary.read_bytes(), 0o755)
    _archive(path, PAUSE_IMAGE, content.getvalue(), {"Entrypoint": ["/pause"], "User": "65535:65535"})


def write_python_host(path: Path) -> None:
    """Write the image of `python_host`: folders, the links of a merged /usr, and users."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as layer:
        for folder in _FOLDERS:
            _entry(layer, folder, tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755)
        for name, target in python_host.links().items():
            _entry(layer, name, tarfile.SYMTYPE, 0o777, target)
        _file(layer, "etc/passwd", _USERS.encode())
        _file(layer, "etc/group", _GROUPS.encode())
        _file(layer, "etc/nsswitch.conf", b"hosts: files dns\n")
    _archive(path, python_host.IMAGE, content.getvalue(), {"Env": [f"PATH={python_host.PATH}"], "Cmd": ["python3"]})
