"""`python -m testcluster up|down|status|env|build`."""

from __future__ import annotations

import argparse
import shlex
import sys

from testcluster import binaries, network, prerequisites, processes
from testcluster.cluster import Cluster
from testcluster.settings import CHECKOUT, ClusterError


def _up(cluster: Cluster, arguments: argparse.Namespace) -> int:
    prerequisites.require(cluster.settings)
    seconds = cluster.up(arguments.nodes)
    print(
        f"{len(cluster.nodes)} nodes are Ready ({seconds:.1f} s). For kubectl and helm:\n"
        f'  eval "$(cd {CHECKOUT} && DDPJOB_CLUSTER_SLOT={cluster.settings.slot} PYTHONPATH=tests:tests/cluster '
        f'{sys.executable} -m testcluster env)"'
    )
    return 0


def _down(cluster: Cluster, arguments: argparse.Namespace) -> int:
    cluster.down()
    print("nothing of the cluster is left")
    return 0


def _status(cluster: Cluster, arguments: argparse.Namespace) -> int:
    state = cluster.state()
    if state is None:
        print("not up")
        return 1
    ready = cluster.ready_nodes()
    print(f"checkout {state.checkout}\nfiles    {state.run}")
    for node in state.nodes:
        cut = "" if network.link_is_up(cluster.settings, node) else ", its link is cut"
        print(f"node     {node}: {'Ready' if node in ready else 'not Ready'}{cut}")
    for process in processes.recorded(cluster.settings):
        print(f"  {process.name:<26} pid {process.pid:<8} {'runs' if process.alive() else 'ENDED'}")
    return 0


def _env(cluster: Cluster, arguments: argparse.Namespace) -> int:
    for name, value in cluster.environment().items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _build(cluster: Cluster, arguments: argparse.Namespace) -> int:
    for name, path in binaries.build(cluster.settings).items():
        print(f"{name} {path}")
    return 0


def main(words: list[str] | None = None) -> int:
    """Run a command. The exit code is 0 on success, and 1 if the cluster is not up or an error was
    reported.
    """
    parser = argparse.ArgumentParser(
        prog="testcluster", description="A real Kubernetes in network namespaces of this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start it, or find it running")
    up.add_argument("--nodes", type=int, default=2, help="0: the API server alone (default 2)")
    up.set_defaults(function=_up)
    for name, function, text in (
        ("down", _down, "end it and remove what is left of it, also after a crash"),
        ("status", _status, "what runs"),
        ("env", _env, "shell lines that set KUBECONFIG and PATH"),
        ("build", _build, "build the binaries only"),
    ):
        commands.add_parser(name, help=text).set_defaults(function=function)
    arguments = parser.parse_args(words)
    try:
        code: int = arguments.function(Cluster(), arguments)
    except ClusterError as error:
        print(f"testcluster: {error}", file=sys.stderr)
        return 1
    return code
