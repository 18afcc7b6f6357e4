"""Builds the cluster's pinned programs from one Go module, once per content of the module, in the
user's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from testcluster.settings import MODULE, OLDEST_MODULE, ClusterError, Settings, of_oldest

KUBERNETES_VERSION, OLDEST_VERSION = "1.36.3", "1.29.15"
_CONTAINERD = "github.com/containerd/containerd/v2/cmd"
_KUBERNETES = "k8s.io/kubernetes/cmd"
PACKAGES = {
    "pause": "./pause",
    "etcd": "go.etcd.io/etcd/server/v3",
    "containerd": f"{_CONTAINERD}/containerd",
    "containerd-shim-runc-v2": f"{_CONTAINERD}/containerd-shim-runc-v2",
    "ctr": f"{_CONTAINERD}/ctr",
    "coredns": "./coredns",
    "helm": "helm.sh/helm/v4/cmd/helm",
    "kube-apiserver": f"{_KUBERNETES}/kube-apiserver",
    "kube-controller-manager": f"{_KUBERNETES}/kube-controller-manager",
    "kube-scheduler": f"{_KUBERNETES}/kube-scheduler",
    "kubelet": f"{_KUBERNETES}/kubelet",
    "kube-proxy": f"{_KUBERNETES}/kube-proxy",
    "kubectl": f"{_KUBERNETES}/kubectl",
}
"""The Go package of each program. All are in one module and built by one command, so shared
packages are compiled once.
"""
OLDEST = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
"""Programs that are taken from the oldest Kubernetes version, if it is requested."""


def _link_flags(version: str) -> str:
    """Return linker flags that omit symbols and set the version; without it, Kubernetes' clients
    see v0.0.0.
    """
    major, minor = version.split(".")[:2]
    values = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s -w", *(f"-X k8s.io/component-base/version.{name}={it}" for name, it in values.items())])


FLAGS = (
    "-trimpath",
    "-mod=readonly",
    "-buildvcs=false",
    "-tags=no_btrfs,no_devmapper,no_zfs,no_tracing",
    # The linker would drop debug information anyway. Without it, compiling takes a sixth less time.
    "-gcflags=all=-dwarf=false",
    f"-ldflags={_link_flags(KUBERNETES_VERSION)}",
)
ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}


def given_folder() -> Path | None:
    """Return the folder in DDPJOB_CLUSTER_BIN, whose programs are used unchanged.

    Raises ClusterError if a program is missing.
    """
    text = os.environ.get("DDPJOB_CLUSTER_BIN")
    if not text:
        return None
    folder = Path(text).resolve()
    missing = [name for name in PACKAGES if not os.access(folder / name, os.X_OK)]
    if missing:
        raise ClusterError(f"DDPJOB_CLUSTER_BIN={folder}: lacks {', '.join(missing)}; unset it to have them built")
    return folder


def key() -> str:
    """Return a key that changes with the module's sources, pins and flags."""
    digest = hashlib.sha256(repr((PACKAGES, FLAGS, ENVIRONMENT)).encode())
    for file in sorted(MODULE.rglob("*")):
        if file.suffix in (".go", ".mod", ".sum"):
            digest.update(f"{file.relative_to(MODULE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _folder(settings: Settings) -> Path:
    return settings.cache / "bin" / key()


def are_built(settings: Settings) -> bool:
    """Return whether nothing needs to be built."""
    return given_folder() is not None or _folder(settings).is_dir()


def build(settings: Settings) -> dict[str, Path]:
    """Return the path of every program, after building those that are not in the cache."""
    folder = given_folder() or _folder(settings)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("a") as lock:  # a process that waited for the lock finds them built
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _build(folder)
    programs = {name: folder / name for name in PACKAGES}
    if of_oldest():
        oldest = _build_oldest(settings)
        programs |= {name: oldest / name for name in OLDEST}
    return programs


def _build_oldest(settings: Settings) -> Path:
    pins = [(OLDEST_MODULE / name).read_bytes() for name in ("go.mod", "go.sum")]
    flags = [it for it in FLAGS if not it.startswith(("-mod=", "-ldflags="))]
    flags += ["-mod=mod", f"-ldflags={_link_flags(OLDEST_VERSION)}"]
    key = hashlib.sha256(repr((OLDEST, pins, flags)).encode()).hexdigest()[:16]
    folder = settings.cache / "bin" / f"oldest-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("a") as lock, tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            module = Path(temporary) / "module"
            shutil.copytree(OLDEST_MODULE, module)
            print(f"building Kubernetes {OLDEST_VERSION} (only once, into {folder}) ...", file=sys.stderr, flush=True)
            go_build(flags, module / "bin", [f"{_KUBERNETES}/{name}" for name in OLDEST], module)
            (module / "bin").rename(folder)
    return folder


def _build(folder: Path) -> None:
    print(
        f"building {', '.join(PACKAGES)} (only once, takes some minutes; into {folder}) ...",
        file=sys.stderr,
        flush=True,
    )
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as temporary:
        target = Path(temporary) / "bin"
        target.mkdir()
        go_build(FLAGS, target, PACKAGES.values(), MODULE)
        (target / "server").rename(target / "etcd")  # Go names a program after its package
        target.rename(folder)
    print(f"  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def go_build(flags: Iterable[str], target: Path, packages: Iterable[str], module: Path) -> None:
    """Build programs of a module into the folder `target`."""
    go = shutil.which("go")
    if go is None:
        raise ClusterError(
            f"no `go` to build {', '.join(PACKAGES)}: install Go, or name a folder of binaries in DDPJOB_CLUSTER_BIN"
        )
    command = [go, "build", *flags, "-o", f"{target}/", *packages]
    done = subprocess.run(
        command,
        cwd=module,
        env={**os.environ, **ENVIRONMENT},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)} failed in {module}:\n{done.stdout[-4000:]}")


def collect(settings: Settings) -> Path:
    """Return a folder with a link to every program, for PATH. containerd looks for its shim
    there.
    """
    folder = settings.run / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in build(settings).items():
        link = folder / name
        if not (link.is_symlink() and link.readlink() == path):
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    return folder
