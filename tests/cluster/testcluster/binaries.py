"""Builds the cluster's pinned binaries from Go modules into the user's cache, once per content of a module."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from testcluster.settings import MODULES, ClusterError, Settings

KUBERNETES_VERSION = "1.36.3"
_MAJOR, _MINOR = KUBERNETES_VERSION.split(".")[:2]
_VERSION = "k8s.io/component-base/version"
_STRIP = "-s -w"


@dataclass(frozen=True)
class Module:
    """One folder below `tests/cluster/binaries`: `packages` are built there, each to a binary named in `programs`."""

    name: str
    programs: tuple[str, ...]
    packages: tuple[str, ...]
    flags: tuple[str, ...] = ("-ldflags", _STRIP)


MODULES_BUILT = (
    Module("pause", ("pause",), (".",)),
    Module("etcd", ("etcd",), ("go.etcd.io/etcd/server/v3",)),
    Module(
        "containerd",
        ("containerd", "containerd-shim-runc-v2", "ctr"),
        tuple(f"github.com/containerd/containerd/v2/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")),
        ("-tags", "no_btrfs,no_devmapper,no_zfs", "-ldflags", _STRIP),
    ),
    Module("coredns", ("coredns",), (".",)),
    Module("helm", ("helm",), ("helm.sh/helm/v4/cmd/helm",)),
    Module(
        "kubernetes",
        ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
        tuple(
            f"k8s.io/kubernetes/cmd/{name}"
            for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
        ),
        # Without these clients see v0.0.0.
        (
            "-ldflags",
            f"{_STRIP} -X {_VERSION}.gitVersion=v{KUBERNETES_VERSION} -X {_VERSION}.gitMajor={_MAJOR} -X {_VERSION}.gitMinor={_MINOR}",
        ),
    ),
)
PROGRAMS = tuple(program for module in MODULES_BUILT for program in module.programs)
_GO = {"CGO_ENABLED": "0", "GOFLAGS": "-trimpath -mod=readonly"}


def given_folder() -> Path | None:
    """The folder named by DDPJOB_CLUSTER_BIN, whose binaries are used as they are. Raises ClusterError when one is missing."""
    text = os.environ.get("DDPJOB_CLUSTER_BIN")
    if not text:
        return None
    folder = Path(text).resolve()
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    if missing:
        raise ClusterError(f"DDPJOB_CLUSTER_BIN={folder}: lacks {', '.join(missing)}; unset it to have them built")
    return folder


def key(module: Module) -> str:
    """Changes with the module's sources, pins and flags."""
    digest = hashlib.sha256(repr((module, sorted(_GO.items()))).encode())
    for file in sorted((MODULES / module.name).iterdir()):
        if file.suffix in (".go", ".mod", ".sum"):
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _folder(settings: Settings, module: Module) -> Path:
    return settings.cache / "bin" / f"{module.name}-{key(module)}"


def are_built(settings: Settings) -> bool:
    """True when nothing needs to be built."""
    return given_folder() is not None or all(_folder(settings, module).is_dir() for module in MODULES_BUILT)


def build(settings: Settings) -> dict[str, Path]:
    """Build what is missing; the path of every program."""
    given = given_folder()
    if given is not None:
        return {name: given / name for name in PROGRAMS}
    paths: dict[str, Path] = {}
    for module in MODULES_BUILT:
        folder = _folder(settings, module)
        if not folder.is_dir():
            _build(module, folder)
        paths |= {name: folder / name for name in module.programs}
    return paths


def _build(module: Module, folder: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise ClusterError(f"no `go` to build {', '.join(module.programs)}: install Go, or name a folder of binaries in DDPJOB_CLUSTER_BIN")
    print(f"building {', '.join(module.programs)} (once; into {folder}) ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as temporary:
        target = Path(temporary) / module.name
        target.mkdir()
        for program, package in zip(module.programs, module.packages, strict=True):
            command = [go, "build", *module.flags, "-o", str(target / program), package]
            done = subprocess.run(
                command,
                cwd=MODULES / module.name,
                env={**os.environ, **_GO},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            if done.returncode != 0:
                raise ClusterError(f"{' '.join(command)} failed in {MODULES / module.name}:\n{done.stdout[-4000:]}")
            print(f"  {program}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if not folder.exists():  # Else another build was faster.
            target.rename(folder)


def collect(settings: Settings) -> Path:
    """One folder with a link to every program, for PATH: containerd looks for its shim there."""
    folder = settings.run / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in build(settings).items():
        link = folder / name
        if not (link.is_symlink() and link.readlink() == path):
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    return folder
