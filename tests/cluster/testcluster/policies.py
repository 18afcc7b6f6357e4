"""Enforces NetworkPolicies in a running cluster, with kube-network-policies on every node.

kube-network-policies (sigs.k8s.io) decides in user space about the first packet of each connection.
The kernel hands these packets over through an NFQUEUE. The program's own nftables rule for that
needs CONFIG_NFT_QUEUE, which some kernels lack: it then logs `syncing nftables rules` as an error.
The same rule is therefore installed here with iptables, which has a queue of its own
(CONFIG_NETFILTER_XT_TARGET_NFQUEUE). If both rules exist, a packet is judged twice, with the same
result.

The cluster does not enforce policies by default, because most tests reach pods from the host.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from testcluster import binaries
from testcluster.cluster import Cluster
from testcluster.processes import kill, recorded, run, spawn, succeeds, wait_for
from testcluster.settings import CHECKOUT, Settings

MODULE = CHECKOUT / "tests" / "cluster" / "policies"
_NAME = "network-policies"
_QUEUE = "100"
_RULES = (
    # Packets of the node's own processes, for instance of the kubelet's probes.
    ("-m", "owner", "--uid-owner", "0", "-j", "RETURN"),
    ("-m", "conntrack", "--ctstate", "NEW", "-j", "NFQUEUE", "--queue-num", _QUEUE),
)
"""Rules of the chain POSTROUTING, where a service's address has already been replaced by a pod's."""


def program(settings: Settings) -> Path:
    """Return the path of the program, which exists once it is built."""
    given = binaries.given_folder()
    if given is not None and (given / _NAME).exists():
        return given / _NAME
    digest = hashlib.sha256(repr((binaries.FLAGS, binaries.ENVIRONMENT)).encode())
    for file in sorted(MODULE.iterdir()):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return settings.cache / "bin" / f"{_NAME}-{digest.hexdigest()[:16]}"


def build(settings: Settings) -> Path:
    """Return the program, after building it if it is not in the cache."""
    made = program(settings)
    if not made.is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        print(f"building kube-network-policies (only once, into {made}) ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=made.parent, prefix=".building-") as folder:
            binaries.go_build(binaries.FLAGS, Path(folder), ["."], MODULE)
            (Path(folder) / "policies").rename(made)
    return made


def obstacle(cluster: Cluster) -> str:
    """Return why this machine cannot enforce policies; empty if it can."""
    if not program(cluster.settings).is_file() and shutil.which("go") is None:
        return "no `go` to build kube-network-policies, and no built program in the cache"
    node = cluster.nodes[0]
    able = all(succeeds(*_iptables(cluster.settings, node, "-A", rule)) for rule in _RULES)
    _stop(cluster.settings, (node,))
    return "" if able else "iptables has no target NFQUEUE, or no matches `owner` and `conntrack`"


@contextmanager
def enforced(cluster: Cluster) -> Iterator[None]:
    """Enforce NetworkPolicies on the nodes that are up now, until the end of the context."""
    settings, nodes, made = cluster.settings, cluster.nodes, build(cluster.settings)
    _stop(settings, nodes)
    try:
        for node in nodes:
            words = [made, "-kubeconfig", settings.kubeconfig, "-node", node, "-queue", _QUEUE]
            spawn(settings, f"{node}-{_NAME}", settings.node_netns(node), words)
        for node in nodes:
            wait_for(f"{_NAME} of {node}", lambda node=node: _reads_queue(settings, node), settings, timeout=60)
            for rule in _RULES:
                run(*_iptables(settings, node, "-A", rule))
        yield
    finally:
        _stop(settings, nodes)


def _stop(settings: Settings, nodes: tuple[str, ...]) -> None:
    """Remove the rules and end the programs, also those that a killed test run has left."""
    for node in nodes:
        for rule in _RULES:
            while succeeds(*_iptables(settings, node, "-D", rule)):
                pass
    for process in recorded(settings):
        if process.name.endswith(f"-{_NAME}"):
            if process.alive():
                kill(process.pid)
                wait_for(f"the end of {process.name}", lambda process=process: not process.alive(), timeout=20)
            with suppress(FileNotFoundError):
                (settings.run / "pid" / process.name).unlink()


def _reads_queue(settings: Settings, node: str) -> bool:
    queues = run(*_enter(settings, node), "cat", "/proc/net/netfilter/nfnetlink_queue")
    return any(line.split()[0] == _QUEUE for line in queues.splitlines())


def _iptables(settings: Settings, node: str, action: str, rule: tuple[str, ...]) -> list[str]:
    return [*_enter(settings, node), "iptables", "-w", "-t", "mangle", action, "POSTROUTING", *rule]


def _enter(settings: Settings, node: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{settings.node_netns(node)}"]
