"""Paths of the cluster's files, names of its components, and their addresses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
MODULE = CHECKOUT / "tests" / "cluster" / "binaries"
OLDEST_MODULE = CHECKOUT / "tests" / "cluster" / "oldest"
"""Go module that pins the oldest Kubernetes version supported by the chart."""
SLOTS = 16
MAX_NODES = 7


class ClusterError(Exception):
    """An error that the user can act on. The message states the problem and the remedy."""


@dataclass(frozen=True)
class Addresses:
    """The part of 198.18.0.0/15 (RFC 2544, never routed on the Internet) that the cluster in one
    slot uses.
    """

    slot: int

    @property
    def api(self) -> str:
        return f"198.18.{self.slot}.1"

    @property
    def dns(self) -> str:
        return f"198.19.{128 + 8 * self.slot}.10"

    @property
    def kubernetes_service(self) -> str:
        return f"198.19.{128 + 8 * self.slot}.1"

    @property
    def services(self) -> str:
        return f"198.19.{128 + 8 * self.slot}.0/21"

    @property
    def pods(self) -> str:
        return f"198.19.{8 * self.slot}.0/21"

    @property
    def door_host(self) -> str:
        """The address of the host's end of the veth pair between the host and the control plane."""
        return f"198.18.{128 + self.slot}.2"

    @property
    def door_cluster(self) -> str:
        return f"198.18.{128 + self.slot}.1"

    @property
    def door(self) -> str:
        return f"198.18.{128 + self.slot}.0/30"

    def node(self, number: int) -> str:
        return f"198.18.{self.slot}.{10 + number}"

    def pods_of(self, number: int) -> str:
        return f"198.19.{8 * self.slot + number}.0/24"


def _slot() -> int:
    text = os.environ.get("DDPJOB_CLUSTER_SLOT", "0")
    if not text.isdigit() or int(text) >= SLOTS:
        raise ClusterError(f"DDPJOB_CLUSTER_SLOT={text}: must be a number from 0 to {SLOTS - 1}")
    return int(text)


def of_oldest() -> bool:
    """Return whether DDPJOB_CLUSTER_KUBERNETES=oldest selects the oldest Kubernetes that the chart
    supports.
    """
    text = os.environ.get("DDPJOB_CLUSTER_KUBERNETES", "")
    if text not in ("", "oldest"):
        raise ClusterError(f"DDPJOB_CLUSTER_KUBERNETES={text}: must be oldest, or left out for the newest")
    return text == "oldest"


def _cache() -> Path:
    own = os.environ.get("DDPJOB_CLUSTER_CACHE")
    if own:
        return Path(own).resolve()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache").resolve() / "ddpjob" / "cluster"


@dataclass(frozen=True)
class Settings:
    """The settings of a cluster. `slot` distinguishes its names and addresses from those of other
    clusters on the same machine.
    """

    slot: int = field(default_factory=_slot)
    cache: Path = field(default_factory=_cache)

    @property
    def run(self) -> Path:
        """The folder for the state of the running cluster. It is on a disk, because the nodes keep
        their images here and /run is often a small tmpfs.
        """
        own = os.environ.get("DDPJOB_CLUSTER_RUN")
        return (Path(own).resolve() if own else self.cache) / f"run{self.slot}"

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.slot)

    @property
    def prefix(self) -> str:
        """The prefix of the names of all namespaces, links and cgroups of this cluster."""
        return f"ddpjob{self.slot}"

    @property
    def control_plane_netns(self) -> str:
        return f"{self.prefix}-cp"

    def node_netns(self, name: str) -> str:
        return f"{self.prefix}-{name}"

    @property
    def door_link(self) -> str:
        return f"{self.prefix}-door"

    @property
    def kubeconfig(self) -> Path:
        return self.run / "admin.kubeconfig"

    @property
    def lock(self) -> Path:
        """The path of the lock file. It is the same for all caches, because a slot's names and
        addresses exist once per machine.
        """
        return Path(f"/run/ddpjob-cluster-{self.slot}.lock")


def node_number(name: str) -> int:
    """Return 1 for `n1`. Raises ClusterError if this is not the name of a node."""
    if not name.startswith("n") or not name[1:].isdigit():
        raise ClusterError(f"{name}: nodes are called n1, n2, ...")
    return int(name[1:])
