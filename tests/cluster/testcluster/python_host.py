"""A tiny image whose pods run this machine's Python, so that no gigabytes have to be copied.

The image contains only folders and links. `overlay` mounts the interpreter, its virtual
environment, the checkout and their libraries, read-only and at the same paths as on the host.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from testcluster.settings import CHECKOUT

IMAGE = "ddpjob.test/python-host:1"
MERGED_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
PATH = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def links() -> dict[str, str]:
    """Return links such as /bin -> usr/bin, as on this machine (Debian's merged /usr)."""
    return {name: str(Path(f"/{name}").readlink()) for name in MERGED_FOLDERS if Path(f"/{name}").is_symlink()}


def host_paths() -> list[str]:
    """Return the paths that a pod mounts from this machine. A path below another path is left
    out.
    """
    unmerged = [
        f"/{name}" for name in MERGED_FOLDERS if Path(f"/{name}").is_dir() and not Path(f"/{name}").is_symlink()
    ]
    # The interpreter behind the virtual environment's link may be in a different place than its
    # library suggests (a package manager's store). The same is true for packages that a .pth file
    # adds.
    interpreter = str(Path(sys.executable).resolve().parent)
    wanted = [
        "/usr",
        *unmerged,
        "/etc/alternatives",
        "/etc/ssl",
        "/etc/ld.so.cache",
        sys.base_prefix,
        sys.prefix,
        interpreter,
        str(CHECKOUT),
        *(path for path in sys.path if Path(path).is_dir()),
    ]
    present = sorted({path for path in wanted if Path(path).exists()})
    return [
        path for path in present if not any(path != other and Path(path).is_relative_to(other) for other in present)
    ]


def overlay(container: str = "trainer") -> dict[str, Any]:
    """Return a part of a pod template for a strategic merge: volumes, and mounts and PATH of one
    container.

    /tmp is an emptyDir, because the image has no folder that a non-root user can write to.
    """
    volumes: list[dict[str, Any]] = [{"name": "host-tmp", "emptyDir": {}}]
    mounts: list[dict[str, Any]] = [{"name": "host-tmp", "mountPath": "/tmp"}]
    for number, path in enumerate(host_paths()):
        kind = "Directory" if Path(path).is_dir() else "File"
        volumes.append({"name": f"host-{number}", "hostPath": {"path": path, "type": kind}})
        mounts.append({"name": f"host-{number}", "mountPath": path, "readOnly": True})
    env = [
        {"name": "PATH", "value": PATH},
        {"name": "HOME", "value": "/tmp"},
        {"name": "OMP_NUM_THREADS", "value": os.environ.get("OMP_NUM_THREADS", "1")},
    ]
    return {"spec": {"volumes": volumes, "containers": [{"name": container, "volumeMounts": mounts, "env": env}]}}


def pod(name: str, command: list[str], node: str | None = None, **spec: Any) -> dict[str, Any]:
    """Return a complete pod that runs `command` with this machine's Python, on one node or any."""
    made = overlay("main")["spec"]
    made["containers"][0] |= {"image": IMAGE, "imagePullPolicy": "Never", "command": command}
    made |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, **spec}
    if node:
        made["nodeName"] = node
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": made}
