"""Builds the repository's Dockerfile with buildah, and loads the result into nodes, layer by layer.

buildah's store, the exported layers and pip's downloads are kept in the cache: an unchanged checkout builds, exports and
loads nothing anew, a changed one only the layers that have changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from testcluster import debian, node
from testcluster.processes import run
from testcluster.settings import CHECKOUT, ClusterError, Settings

_PIP_SETTINGS_ELSEWHERE = ("cache-dir", "cert", "find-links", "no-cache-dir", "require-virtualenv")
CA_BUNDLE = "/run/build-ca.crt"


@dataclass(frozen=True)
class Image:
    """A built image, exported to the cache's folder of blobs."""

    tag: str
    manifest: str
    """Digest of the manifest, `sha256:...`: changes with the content."""
    layers: tuple[str, ...]
    size: int
    """Bytes of all layers, uncompressed."""


def _buildah(settings: Settings) -> list[str | Path]:
    store = settings.cache / "containers"
    return [
        "buildah",
        "--root",
        store / "storage",
        "--runroot",
        store / "run",
        "--storage-driver",
        os.environ.get("STORAGE_DRIVER", "overlay"),
    ]


def _environment() -> dict[str, str]:
    """chroot: a container cannot be started in every machine that can build one."""
    return {**os.environ, "BUILDAH_ISOLATION": "chroot"}


def base_image(settings: Settings) -> str:
    """The name of the base image in buildah's store."""
    name = f"localhost/ddpjob-base:{debian.key()}"
    if (
        subprocess.run(
            [*_buildah(settings), "inspect", "--type=image", name], env=_environment(), capture_output=True, check=False
        ).returncode
        == 0
    ):
        return name
    archive = debian.base_archive(settings)
    container = run(*_buildah(settings), "from", "scratch", env=_environment()).strip()
    run(*_buildah(settings), "add", container, archive, "/", env=_environment())
    run(
        *_buildah(settings),
        "config",
        "--env",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "--cmd",
        "bash",
        container,
        env=_environment(),
    )
    run(*_buildah(settings), "commit", "--rm", container, name, env=_environment())
    return name


def build_image(
    settings: Settings, target: str, tag: str, arguments: Mapping[str, str] | None = None, dockerfile: Path = CHECKOUT / "Dockerfile"
) -> Image:
    """Build a target of a Dockerfile, with its folder as context, and export it.

    `arguments` are build arguments beside BASE_IMAGE; TORCH_INDEX_URL is passed on from the environment when it is set there.
    Raises ClusterError with the end of the build's output.
    """
    start = time.monotonic()
    images = settings.cache / "images"
    images.mkdir(parents=True, exist_ok=True)
    with (images / "lock").open("a") as lock:  # Two builds would write over each other's log and records.
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(f"building the image {tag} ...", file=sys.stderr, flush=True)
        passed = {name: os.environ[name] for name in ("TORCH_INDEX_URL",) if os.environ.get(name)}
        _build(settings, target, tag, dockerfile, {"BASE_IMAGE": base_image(settings), **passed, **(arguments or {})})
        image = _export(settings, target, tag)
    print(f"  {image.size / 1e6:.0f} MB, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return image


def _build(settings: Settings, target: str, tag: str, dockerfile: Path, arguments: Mapping[str, str]) -> None:
    log = settings.cache / "images" / f"build-{target}.log"
    words = [
        *_buildah(settings),
        "build",
        "--layers",
        "--format=oci",
        "--network=host",
        "--file",
        dockerfile,
        "--target",
        target,
        "--tag",
        tag,
    ]
    words += [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    words += _registry_access(settings)
    with log.open("w") as output:
        done = subprocess.run([*words, dockerfile.parent], env=_environment(), stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise ClusterError(f"building {tag} failed; the end of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))


def _registry_access(settings: Settings) -> list[str]:
    """Volumes that give RUN steps this machine's way to its package registries; nothing of it stays in the image.

    pip's settings (environment and files) become the /etc/pip.conf of the build; certificates and local wheels are mounted.
    """
    folder = settings.cache / "images"
    (folder / "pip").mkdir(parents=True, exist_ok=True)
    values = _pip_settings()
    lines = ["[global]"] + [f"{name} = {value}" for name, value in sorted(values.items()) if name not in _PIP_SETTINGS_ELSEWHERE]
    volumes = [f"{folder / 'pip'}:/root/.cache/pip:rw"]
    bundle = values.get("cert") or os.environ.get("SSL_CERT_FILE")
    if bundle and Path(bundle).is_file():
        volumes.append(f"{bundle}:{CA_BUNDLE}:ro")
        lines.append(f"cert = {CA_BUNDLE}")
    wheels = values.get("find-links", "")
    if Path(wheels).is_absolute() and Path(wheels).is_dir() and any(Path(wheels).iterdir()):
        volumes.append(f"{wheels}:/run/build-wheels:ro")
        lines.append("find-links = /run/build-wheels")
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    volumes.append(f"{folder / 'pip.conf'}:/etc/pip.conf:ro")
    return [word for volume in volumes for word in ("--volume", volume)]


def _pip_settings() -> dict[str, str]:
    """pip's settings on this machine, by their names in a file: `index-url`, `cert`, ..."""
    settings = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            settings[option] = value.strip("'\"")
    return settings


# ---- export and load ---------------------------------------------------------------------------------------------


def _blob(settings: Settings, digest: str) -> Path:
    return settings.cache / "images" / "blobs" / digest.removeprefix("sha256:")


def _blob_json(settings: Settings, digest: str) -> Any:
    return json.loads(_blob(settings, digest).read_text())


def _export(settings: Settings, target: str, tag: str) -> Image:
    """Copy the image's blobs out of buildah's store; nothing is done when the same image was exported before.

    By way of buildah's `dir:`, the one destination that keeps layers uncompressed: gzip would cost minutes for gigabytes.
    """
    images = settings.cache / "images"
    identity = run(*_buildah(settings), "images", "--quiet", "--no-trunc", tag, env=_environment()).strip()
    record = images / f"{target}.json"
    known = json.loads(record.read_text()) if record.exists() else {}
    if known.get("id") != identity or not _blob(settings, known["manifest"]).exists():
        known = {"id": identity, "manifest": _copy_blobs(settings, tag)}
        record.write_text(json.dumps(known))
        _prune(settings)
    layers = _blob_json(settings, known["manifest"])["layers"]
    return Image(tag, known["manifest"], tuple(layer["digest"] for layer in layers), sum(layer["size"] for layer in layers))


def _copy_blobs(settings: Settings, tag: str) -> str:
    """Returns the digest of the manifest."""
    images = settings.cache / "images"
    (images / "blobs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=images, prefix=".export-") as temporary:
        words = [*_buildah(settings), "push", "--quiet", "--disable-compression", "--format=oci", tag, f"dir:{temporary}"]
        run(*words, env=_environment(), timeout=3600)
        manifest = Path(temporary) / "manifest.json"
        digest = f"sha256:{hashlib.sha256(manifest.read_bytes()).hexdigest()}"
        for file in Path(temporary).iterdir():
            if len(file.name) == 64:  # The others are `version` and the manifest.
                file.rename(_blob(settings, file.name))
        manifest.rename(_blob(settings, digest))
    return digest


def _prune(settings: Settings) -> None:
    """Remove the blobs of no target's latest image: a trainer's layers are gigabytes."""
    used = set()
    for record in (settings.cache / "images").glob("*.json"):
        digest = json.loads(record.read_text())["manifest"]
        if _blob(settings, digest).exists():
            manifest = _blob_json(settings, digest)
            used |= {digest, manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
    for file in (settings.cache / "images" / "blobs").iterdir():
        if f"sha256:{file.name}" not in used:
            file.unlink()


def load(settings: Settings, image: Image, node_name: str, programs: Path) -> None:
    """Load an image into a node: only blobs that it lacks are sent, so a second load costs nothing."""
    ctr = [str(word) for word in node.ctr(settings, node_name, programs)]
    present = set(run(*ctr, "content", "list", "--quiet").split())
    known = run(*ctr, "images", "list", f"name=={image.tag}")
    if image.manifest in known:
        return
    config = _blob_json(settings, image.manifest)["config"]["digest"]
    missing = [digest for digest in (config, *image.layers, image.manifest) if digest not in present]
    _link(settings, missing, node_name)
    child = subprocess.Popen(
        [*ctr, "images", "import", "--local", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        _write_archive(settings, image, missing, child.stdin)
        child.stdin.close()
    except BrokenPipeError:
        pass  # ctr has ended; it says why.
    output = child.stdout.read().decode()
    if child.wait() != 0:
        raise ClusterError(f"loading {image.tag} into {node_name}: {output[-2000:]}")


def _link(settings: Settings, blobs: list[str], node_name: str) -> None:
    """Lay blobs into containerd's content store as hard links, where cache and run folder share a file system.

    containerd knows them by their digest and reads past their bytes in the archive: gigabytes are not written once more per node.
    It never changes a blob in place; when it collects one, it removes its own link.
    """
    store = node.folder(settings, node_name) / "containerd" / "io.containerd.content.v1.content" / "blobs" / "sha256"
    store.mkdir(parents=True, exist_ok=True)
    if store.stat().st_dev != (settings.cache / "images" / "blobs").stat().st_dev:
        return
    for digest in blobs:
        target = store / digest.removeprefix("sha256:")
        if not target.exists():
            target.hardlink_to(_blob(settings, digest))


def _write_archive(settings: Settings, image: Image, blobs: list[str], stream: IO[bytes]) -> None:
    """An OCI archive with some of an image's blobs; containerd has the others."""
    entry = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": image.manifest,
        "size": _blob(settings, image.manifest).stat().st_size,
        "annotations": {"io.containerd.image.name": image.tag},
    }
    index = {"schemaVersion": 2, "manifests": [entry]}
    with tarfile.open(fileobj=stream, mode="w|", bufsize=1 << 20) as archive:
        _add_json(archive, "oci-layout", {"imageLayoutVersion": "1.0.0"})
        _add_json(archive, "index.json", index)
        for digest in dict.fromkeys(blobs):
            archive.add(_blob(settings, digest), arcname=f"blobs/sha256/{digest.removeprefix('sha256:')}")


def _add_json(archive: tarfile.TarFile, name: str, content: object) -> None:
    data = json.dumps(content).encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    archive.addfile(entry, io.BytesIO(data))
