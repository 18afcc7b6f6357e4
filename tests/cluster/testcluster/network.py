"""The cluster's network: a bridge in the control plane's namespace, one namespace per node, and a
link to the host.

No namespace has a default route, so nothing leaves the machine.
"""

from __future__ import annotations

import json
import subprocess

from testcluster.processes import run, succeeds
from testcluster.settings import MAX_NODES, Settings, node_number


def _ip(netns: str, *words: str) -> None:
    run("ip", "-n", netns, *words)


def _forward(netns: str) -> None:
    """Enable forwarding in the namespace. This needs a child process, because /proc/sys/net belongs
    to the writer's own namespace.
    """
    run("nsenter", f"--net=/run/netns/{netns}", "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")


def namespaces(settings: Settings) -> list[str]:
    """Return the existing network namespaces of the cluster."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line]
    return [name for name in names if name.startswith(f"{settings.prefix}-")]


def create_control_plane(settings: Settings) -> None:
    """Create the control plane's namespace, the bridge of the nodes, and the link to the host."""
    netns, addresses = settings.control_plane_netns, settings.addresses
    run("ip", "netns", "add", netns)
    _ip(netns, "link", "set", "lo", "up")
    _ip(netns, "link", "add", "br0", "type", "bridge")
    _ip(netns, "addr", "add", f"{addresses.api}/24", "dev", "br0")
    _ip(netns, "addr", "add", f"{addresses.dns}/32", "dev", "br0")
    _ip(netns, "link", "set", "br0", "up")
    _forward(netns)
    run("ip", "link", "add", settings.door_link, "type", "veth", "peer", "name", "door", "netns", netns)
    run("ip", "addr", "add", f"{addresses.door_host}/30", "dev", settings.door_link)
    run("ip", "link", "set", settings.door_link, "up")
    _ip(netns, "addr", "add", f"{addresses.door_cluster}/30", "dev", "door")
    _ip(netns, "link", "set", "door", "up")
    for target in (f"{addresses.api}/32", addresses.pods, f"{addresses.dns}/32"):
        run("ip", "route", "add", target, "via", addresses.door_cluster, "dev", settings.door_link)


def create_node(settings: Settings, node: str) -> None:
    """Create a node's namespace, connected to the bridge, with routes to the pods of every possible
    node.
    """
    netns, control_plane, addresses = settings.node_netns(node), settings.control_plane_netns, settings.addresses
    number = node_number(node)
    run("ip", "netns", "add", netns)
    _ip(netns, "link", "set", "lo", "up")
    run("ip", "link", "add", node, "netns", control_plane, "type", "veth", "peer", "name", "eth0", "netns", netns)
    _ip(control_plane, "link", "set", node, "master", "br0", "up")
    _ip(netns, "addr", "add", f"{addresses.node(number)}/24", "dev", "eth0")
    _ip(netns, "link", "set", "eth0", "up")
    _forward(netns)
    _ip(control_plane, "route", "add", addresses.pods_of(number), "via", addresses.node(number))
    for target in (f"{addresses.dns}/32", addresses.door):
        _ip(netns, "route", "add", target, "via", addresses.api)
    for peer in range(1, MAX_NODES + 1):
        if peer != number:
            _ip(netns, "route", "add", addresses.pods_of(peer), "via", addresses.node(peer))
    # kube-proxy rewrites service addresses before packets are routed again. Packets to unknown
    # addresses must be dropped.
    _ip(netns, "route", "add", "blackhole", addresses.services)


def set_link(settings: Settings, node: str, up: bool) -> None:
    """Connect or disconnect the node's cable at the bridge. The node keeps its own routes."""
    _ip(settings.control_plane_netns, "link", "set", node, "up" if up else "down")


def link_is_up(settings: Settings, node: str) -> bool:
    """Return whether the link exists and is up. After `set_link(..., up=False)` it is not."""
    command = ["ip", "-n", settings.control_plane_netns, "-j", "link", "show", "dev", node]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    return done.returncode == 0 and "UP" in json.loads(done.stdout)[0]["flags"]


def remove(settings: Settings) -> None:
    """Remove the cluster's remaining links, routes and namespaces."""
    if succeeds("ip", "link", "show", "dev", settings.door_link):
        # The routes are removed with the link. The link may already have disappeared with the
        # namespace of its peer.
        subprocess.run(["ip", "link", "delete", settings.door_link], capture_output=True, check=False)
    for name in namespaces(settings):
        run("ip", "netns", "delete", name)
