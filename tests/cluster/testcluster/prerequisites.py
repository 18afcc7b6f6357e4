"""The requirements for a machine that runs the cluster. Missing packages are installed from Debian
if possible.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from testcluster import binaries, cgroups
from testcluster.node import CNI_PLUGINS
from testcluster.settings import ClusterError, Settings

# a program (or file) and the Debian package that contains it
TOOLS = {
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
}
IMAGE_TOOLS = {
    "buildah": "buildah",
    "/etc/containers/policy.json": "golang-github-containers-common",  # missing if an installation was interrupted
    "debootstrap": "debootstrap",
}
_SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _missing(tools: dict[str, str]) -> dict[str, str]:
    return {
        tool: package
        for tool, package in tools.items()
        if not (Path(tool).exists() if "/" in tool else shutil.which(tool, path=_SEARCH))
    }


def _trial() -> str | None:
    """Create namespaces, veth pairs and mounts and remove them again. Return the error if this is
    not possible here, otherwise None.
    """
    links = "ip link add trial0 type veth peer name trial1 && ip link add trial2 type bridge"
    script = f"mount -t tmpfs trial /mnt && {links} && iptables -w -L -n >/dev/null"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", script], text=True, capture_output=True, check=False
    )
    return None if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


def reasons(settings: Settings, images: bool = False) -> list[str]:
    """Return the reasons why this machine cannot run the cluster, each with its remedy. If `images`
    is true, they include requirements for building images.
    """
    if sys.platform != "linux":
        return [f"the system is {sys.platform}: the cluster needs Linux"]
    found = []
    if os.geteuid() != 0:
        found.append("not root: network namespaces and containers need it")
    missing = _missing(TOOLS | IMAGE_TOOLS if images else TOOLS)
    if missing and shutil.which("apt-get") is None:
        found.append(
            f"missing {', '.join(missing)}, and no apt-get to install {', '.join(sorted(set(missing.values())))}"
        )
    if binaries.given_folder() is None and not binaries.are_built(settings) and shutil.which("go") is None:
        found.append(
            "no Go to build the binaries, and none in the cache: "
            "install Go, or name a folder of them in DDPJOB_CLUSTER_BIN"
        )
    if not cgroups.hierarchies():
        found.append(f"no cgroups below {cgroups.ROOT}")
    if found:
        return found
    if "iptables" not in missing and "ip" not in missing and (why := _trial()):
        found.append(f"cannot make network namespaces, links or mounts: {why}")
    return found


def install(images: bool = False) -> None:
    """Install the missing Debian packages. Raises ClusterError with apt-get's output if it
    fails.
    """
    tools = TOOLS | IMAGE_TOOLS if images else TOOLS
    if not _missing(tools):
        return
    with Path("/run/ddpjob-cluster-install.lock").open("a") as lock:  # apt-get refuses to run twice at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if packages := sorted(set(_missing(tools).values())):
            _apt_get(packages)


def _apt_get(packages: list[str]) -> None:
    print(f"installing {', '.join(packages)} ...", file=sys.stderr, flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", *packages]):
        done = subprocess.run(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}")


def require(settings: Settings, images: bool = False) -> None:
    """Install missing requirements. Raises ClusterError with every reason why the cluster cannot
    run here.
    """
    found = reasons(settings, images)
    if found:
        raise ClusterError("; ".join(found))
    install(images)
    if why := _trial():
        raise ClusterError(f"cannot make network namespaces, links or mounts: {why}")
