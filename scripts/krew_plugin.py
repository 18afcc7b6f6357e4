"""Builds the krew plugin `ddp`: python scripts/krew_plugin.py TAG URL FOLDER

Writes FOLDER/kubectl-ddp.tar.gz, an asset of the release at URL, and FOLDER/ddp.yaml, krew's
manifest with the archive's checksum. To try them without a release, run `kubectl krew install
--manifest=ddp.yaml --archive=kubectl-ddp.tar.gz`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
ARCHIVE = "kubectl-ddp.tar.gz"
LAUNCHER = """\
#!/bin/sh
# kubectl ddp: runs ddpjob from PATH or, if there is none, that of release {version}.
export DDPJOB_PLACE="${{DDPJOB_PLACE:-cluster}}"
if command -v ddpjob >/dev/null 2>&1; then exec ddpjob "$@"; fi
if command -v uvx >/dev/null 2>&1; then exec uvx --from 'ddpjob[cli]=={version}' ddpjob "$@"; fi
if command -v pipx >/dev/null 2>&1; then exec pipx run --spec 'ddpjob[cli]=={version}' ddpjob "$@"; fi
echo "kubectl ddp needs Python 3.11 or newer and the package: pip install 'ddpjob[cli]=={version}'" >&2
exit 2
"""


def archive(version: str) -> bytes:
    """Return the archive. A version's archive always has the same bytes, because krew compares a
    checksum.
    """
    files = {"kubectl-ddp": (LAUNCHER.format(version=version).encode(), 0o755)}
    files["LICENSE"] = ((ROOT / "LICENSE").read_bytes(), 0o644)
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def manifest(tag: str, url: str, packed: bytes) -> dict[str, object]:
    """Return krew's Plugin object."""
    systems = {"matchExpressions": [{"key": "os", "operator": "In", "values": ["linux", "darwin"]}]}
    platform = {
        "selector": systems,
        "uri": f"{url.rstrip('/')}/{ARCHIVE}",
        "sha256": hashlib.sha256(packed).hexdigest(),
        "bin": "kubectl-ddp",
        "files": [{"from": name, "to": "."} for name in ("kubectl-ddp", "LICENSE")],
    }
    spec = {
        "version": tag,
        "homepage": url.partition("/releases/")[0],
        "shortDescription": "Submit, watch and debug DDPJobs (PyTorch DDP)",
        "description": "Jobs of the DDPJob operator: submit, describe, why, logs over replaced pods, wait, stacks.",
        "caveats": "Needs Python 3.11 or newer and the package ddpjob[cli], or uv or pipx, which fetch it.",
        "platforms": [platform],
    }
    return {"apiVersion": "krew.googlecontainertools.github.com/v1alpha2", "kind": "Plugin",
            "metadata": {"name": "ddp"}, "spec": spec}  # fmt: skip


def main(tag: str, url: str, folder: str) -> None:
    packed = archive(tag.removeprefix("v"))
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / ARCHIVE).write_bytes(packed)
    (Path(folder) / "ddp.yaml").write_text(yaml.safe_dump(manifest(tag, url, packed), sort_keys=False))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
