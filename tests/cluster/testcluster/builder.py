"""Builds the repository's Dockerfile with buildah.

buildah's store is kept in the cache. For an unchanged checkout, nothing is rebuilt; otherwise, only
changed layers are.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testcluster import debian
from testcluster.processes import run
from testcluster.settings import CHECKOUT, ClusterError, Settings

_PIP_SETTINGS_ELSEWHERE = ("cache-dir", "cert", "find-links", "no-cache-dir", "require-virtualenv")
CA_BUNDLE = "/run/build-ca.crt"


@dataclass(frozen=True)
class Layer:
    """One layer of an image."""

    digest: str
    """Digest of the files as an uncompressed tar: `sha256:...`."""
    folder: Path
    """Folder with the files in buildah's store, in the kernel's overlay format. A removed file is a
    device 0:0.
    """


@dataclass(frozen=True)
class Image:
    """A built image in buildah's store."""

    tag: str
    document: str
    """The OCI manifest."""
    config: str
    """The OCI image configuration that the manifest names."""
    layers: tuple[Layer, ...]
    """Layers of the image, starting with the base."""
    size: int
    """Size of all layers in bytes, uncompressed."""

    @property
    def manifest(self) -> str:
        """The digest of the manifest, `sha256:...`, which changes with the content."""
        return digest_of(self.document)


def digest_of(document: str) -> str:
    """Return the digest by which a registry refers to a document."""
    return f"sha256:{hashlib.sha256(document.encode()).hexdigest()}"


def _buildah(settings: Settings) -> list[str | Path]:
    # The storage driver and its options are set here, not taken from the machine. The nodes use the
    # layers in the format of the kernel's overlay: complete files (no metacopy), and the kernel's
    # own markers for removed files (fuse-overlayfs uses different ones).
    return [
        "buildah",
        "--root",
        _store(settings),
        "--runroot",
        settings.cache / "containers" / "run",
        "--storage-driver=overlay",
        "--storage-opt=overlay.mountopt=nodev",
    ]


def _store(settings: Settings) -> Path:
    return settings.cache / "containers" / "storage"


def _environment() -> dict[str, str]:
    """Return the environment for buildah. It uses chroot isolation, because some machines that can
    build an image cannot start a container.
    """
    return {**os.environ, "BUILDAH_ISOLATION": "chroot"}


def base_image(settings: Settings) -> str:
    """Return the name of the base image in buildah's store."""
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
    settings: Settings,
    target: str,
    tag: str,
    arguments: Mapping[str, str] | None = None,
    dockerfile: Path = CHECKOUT / "Dockerfile",
) -> Image:
    """Build a target of a Dockerfile, with its folder as context.

    `arguments` are build arguments in addition to BASE_IMAGE. TORCH_INDEX_URL is passed on if it is
    set. Raises ClusterError with the end of the build's output.
    """
    start = time.monotonic()
    images = settings.cache / "images"
    images.mkdir(parents=True, exist_ok=True)
    with (images / "lock").open("a") as lock:  # two builds would overwrite each other's log
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(f"building the image {tag} ...", file=sys.stderr, flush=True)
        passed = {name: os.environ[name] for name in ("TORCH_INDEX_URL",) if os.environ.get(name)}
        given = {"BASE_IMAGE": base_image(settings), "PIP_NO_CACHE_DIR": "", **passed, **(arguments or {})}
        _build(settings, target, tag, dockerfile, given)
        image = _inspect(settings, tag)
    print(f"  {image.size / 1e6:.0f} MB, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return image


def _build(settings: Settings, target: str, tag: str, dockerfile: Path, arguments: Mapping[str, str]) -> None:
    log = settings.cache / "images" / f"build-{target}.log"
    words = [
        *_buildah(settings),
        "build",
        "--layers",
        "--force-rm",
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
        done = subprocess.run(
            [*words, dockerfile.parent], env=_environment(), stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode != 0:
        raise ClusterError(
            f"building {tag} failed; the end of {log}:\n"
            + "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        )


def _registry_access(settings: Settings) -> list[str]:
    """Return volumes that give RUN steps this machine's access to package registries. They leave
    nothing in the image.

    pip's settings (environment and files) become the build's /etc/pip.conf. Certificates and local
    wheels are mounted.
    """
    folder = settings.cache / "images"
    values = _pip_settings()
    lines = ["[global]"] + [
        f"{name} = {value}" for name, value in sorted(values.items()) if name not in _PIP_SETTINGS_ELSEWHERE
    ]
    volumes = []
    downloads = subprocess.run(
        [sys.executable, "-m", "pip", "cache", "dir"], text=True, capture_output=True, check=False
    ).stdout.strip()
    if downloads:  # None if the user has disabled it
        Path(downloads).mkdir(parents=True, exist_ok=True)
        volumes.append(f"{downloads}:/root/.cache/pip:rw")
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
    """Return pip's settings on this machine, by the names that they have in a configuration file,
    such as `index-url` and `cert`.
    """
    settings = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:"):
            settings[option] = value.strip("'\"")
    return settings


def _inspect(settings: Settings, tag: str) -> Image:
    """Return the image as described in buildah's store."""
    found = json.loads(run(*_buildah(settings), "inspect", "--type=image", tag, env=_environment()))
    document, config = found["Manifest"], found["Config"]
    manifest = json.loads(document)
    folders = _layer_folders(settings, manifest["config"]["digest"].removeprefix("sha256:"))
    digests = json.loads(config)["rootfs"]["diff_ids"]
    layers = tuple(Layer(digest, folder) for digest, folder in zip(digests, folders, strict=True))
    return Image(tag, document, config, layers, sum(layer["size"] for layer in manifest["layers"]))


def _layer_folders(settings: Settings, image_id: str) -> list[Path]:
    """Return the folders of an image's layers, beginning with the base:
    https://github.com/containers/storage, overlay driver.
    """
    store = _store(settings)
    images = {image["id"]: image for image in json.loads((store / "overlay-images" / "images.json").read_text())}
    layers = {layer["id"]: layer for layer in json.loads((store / "overlay-layers" / "layers.json").read_text())}
    folders, name = [], images[image_id]["layer"]
    while name:
        folders.append(store / "overlay" / name / "diff")
        name = layers[name].get("parent", "")
    return folders[::-1]
