"""The cluster's control groups: one for its own programs and one for each node's pods, on cgroup v1
and v2.

With them, every process can be found after a crash, because a process cannot leave its cgroup by
forking or starting a session.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path

from testcluster.settings import ClusterError, Settings

ROOT = Path("/sys/fs/cgroup")
V1_CONTROLLERS = (
    *("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids"),
    *("hugetlb", "net_cls", "net_prio", "perf_event", "systemd"),
)
# Without this, the whole cluster would get the same share of a busy machine as a single process:
# 1024 on v1, 100 on v2.
CPU_WEIGHT = {"cpu.shares": 4096, "cpu.weight": 400}
V2_NEEDED = ("cpu", "memory", "pids")


def is_v2() -> bool:
    """Return whether the machine has only the unified hierarchy."""
    return (ROOT / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """Return the mounted hierarchies: one on v2, one per controller on v1. Linked names such as cpu
    and cpuacct appear once.
    """
    if is_v2():
        return [ROOT]
    found = {(ROOT / name).resolve() for name in V1_CONTROLLERS if (ROOT / name / "cgroup.procs").exists()}
    return sorted(found)


def system(settings: Settings) -> list[Path]:
    """Return the cgroup of the cluster's own programs in each hierarchy."""
    return [root / settings.prefix / "system" for root in hierarchies()]


def node_root(settings: Settings, node: str) -> str:
    """Return the kubelet's `cgroupRoot`."""
    return f"/{settings.prefix}/{node}"


def create(settings: Settings, leaf: str) -> None:
    """Create the cgroup `PREFIX/LEAF` in every hierarchy, ready for processes."""
    for root in hierarchies():
        folder = root / settings.prefix / leaf
        folder.mkdir(parents=True, exist_ok=True)
        if is_v2():
            _delegate(root)
            _delegate(root / settings.prefix)
        elif (root / "cpuset.cpus").exists():
            _copy_cpuset(root, [folder.parent, folder])
        for name, value in CPU_WEIGHT.items():
            if (folder.parent / name).exists():
                (folder.parent / name).write_text(str(value))


def _delegate(folder: Path) -> None:
    available = (folder / "cgroup.controllers").read_text().split()
    missing = [name for name in V2_NEEDED if name not in available]
    if missing:
        raise ClusterError(
            f"{folder}/cgroup.controllers lacks {', '.join(missing)}: "
            "run on a machine (or in a container) that delegates them"
        )
    enabled = (folder / "cgroup.subtree_control").read_text().split()
    for name in available:
        if name in enabled:
            continue
        try:
            (folder / "cgroup.subtree_control").write_text(f"+{name}")
        except OSError as error:
            if name not in V2_NEEDED:
                continue  # the kubelet needs only V2_NEEDED; cpuset, io and hugetlb are used if available
            hint = "; processes sit in this cgroup: move them into a child first" if error.errno == errno.EBUSY else ""
            raise ClusterError(f"cannot enable the {name} controller in {folder}: {error.strerror}{hint}") from error


def _copy_cpuset(root: Path, folders: list[Path]) -> None:
    """Set cpus and mems of a new v1 cpuset, which is empty and refuses processes until then."""
    for folder in folders:
        for name in ("cpuset.cpus", "cpuset.mems"):
            (folder / name).write_text((root / name).read_text())


def _folders(settings: Settings) -> list[Path]:
    """Return every cgroup of the cluster, children before parents."""
    found: list[Path] = []
    for root in hierarchies():
        top = root / settings.prefix
        if top.is_dir():
            found += sorted(
                (path for path in [top, *top.rglob("*")] if path.is_dir()), key=lambda path: -len(path.parts)
            )
    return found


def members(settings: Settings) -> set[int]:
    """Return the process ids of all processes in the cluster's cgroups."""
    pids: set[int] = set()
    for folder in _folders(settings):
        try:
            pids |= {int(line) for line in (folder / "cgroup.procs").read_text().split()}
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise
    return pids


def remove(settings: Settings, timeout: float = 10.0) -> None:
    """Remove the cluster's cgroups, which must not contain processes. A dying process can keep a
    cgroup busy for a moment.
    """
    deadline = time.monotonic() + timeout
    while folders := _folders(settings):
        for folder in folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise ClusterError(f"cannot remove the cgroup {folder}: {error.strerror}") from error
                time.sleep(0.05)
