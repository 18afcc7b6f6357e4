"""Loads a built image into a node without a registry, an archive or a second copy of its files.

Otherwise, an image would be stored as a tar in buildah's store, in an export and in each node's
content store, and unpacked in each node. That would take many gigabytes and minutes. Here, a node's
snapshots are hard links to the files of buildah's layers. The kernel's overlay only reads lower
layers, so nodes can share them.
"""

from __future__ import annotations

import hashlib
import io
import json
import secrets
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from testcluster import node
from testcluster.builder import Image, digest_of
from testcluster.processes import run, succeeds
from testcluster.settings import ClusterError, Settings

# buildah mounts its folder of layers onto itself, and hard links cannot cross mounts. So files are
# linked from a path on which that mount is not visible.
_WITHOUT_MOUNT = 'while mountpoint --quiet "$1"; do umount --lazy "$1" || exit; done; shift; exec "$@"'


def load(settings: Settings, image: Image, node_name: str, programs: Path) -> None:
    """Load an image into a node. Layers that the node already has cost nothing."""
    ctr = [str(word) for word in node.ctr(settings, node_name, programs)]
    if image.manifest in run(*ctr, "images", "list", f"name=={image.tag}"):
        return
    parent = ""
    for layer in image.layers:
        chain = chain_id(parent, layer.digest)
        if not succeeds(*ctr, "snapshots", "info", chain):
            _add_snapshot(ctr, layer.folder, chain, parent)
        parent = chain
    # The snapshots exist, so nothing is unpacked and the layers' tars are never requested.
    words = [*ctr, "images", "import", "--local", "-"]
    done = subprocess.run(words, input=_archive(image), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise ClusterError(f"loading {image.tag} into {node_name}: {done.stdout.decode()[-2000:]}")


def chain_id(parent: str, digest: str) -> str:
    """Return the chain id of a layer. `parent` is the chain id of the layers below it, or empty.

    https://github.com/opencontainers/image-spec/blob/main/config.md#layer-chainid
    """
    return f"sha256:{hashlib.sha256(f'{parent} {digest}'.encode()).hexdigest()}" if parent else digest


def _add_snapshot(ctr: list[str], files: Path, chain: str, parent: str) -> None:
    active = f"load-{secrets.token_hex(8)}"
    mounts = json.loads(run(*ctr, "snapshots", "prepare", "--mounts", active, *([parent] if parent else [])))
    folder = _upper(mounts)
    # hard links across file systems are impossible, so copy
    link = ["--link"] if files.stat().st_dev == folder.stat().st_dev else []
    copy = ["cp", "--archive", *link, f"{files}/.", f"{folder}/"]
    run("unshare", "--mount", "sh", "-c", _WITHOUT_MOUNT, "sh", files.parent.parent, *copy, timeout=1800)
    run(*ctr, "snapshots", "commit", chain, active)


def _upper(mounts: list[dict[str, Any]]) -> Path:
    """Return the folder with a snapshot's own files: a bind mount for the first one, otherwise an
    overlay's upper folder.
    """
    (mount,) = ({key.lower(): value for key, value in mount.items()} for mount in mounts)
    if mount["type"] == "bind":
        return Path(mount["source"])
    return Path(next(option.removeprefix("upperdir=") for option in mount["options"] if option.startswith("upperdir=")))


def _archive(image: Image) -> bytes:
    """Return an OCI archive of an image without its layers."""
    entry = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": image.manifest,
        "size": len(image.document.encode()),
        "annotations": {"io.containerd.image.name": image.tag},
    }
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        _add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}))
        for document in (image.config, image.document):
            _add(archive, f"blobs/sha256/{digest_of(document).removeprefix('sha256:')}", document)
    return content.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content.encode())
    archive.addfile(entry, io.BytesIO(content.encode()))
