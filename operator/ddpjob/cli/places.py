"""Options that select jobs on this machine or in a cluster, and the exit codes of the commands."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from ddpjob.client.backends.backend import Backend, Mistake, Unreachable
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.client.backends.process_backend import ProcessBackend

EXIT_NEGATIVE, EXIT_MISTAKE, EXIT_UNREACHABLE, EXIT_TIMEOUT = 1, 2, 3, 124
PLUGIN = "kubectl-ddp"
VARIABLE = "DDPJOB_PLACE"


@dataclass
class Place:
    """The options by which the user chooses between a cluster and this machine."""

    namespace: str | None
    context: str | None
    kubeconfig: str | None
    local: bool | None

    def is_local(self) -> bool:
        """Return whether the command acts on this machine's jobs.

        The options --local and --cluster decide first. Without them, an option for clusters or the
        program name `kubectl ddp` selects a cluster. Otherwise, $DDPJOB_PLACE decides. Without this
        variable, the jobs are local if the folder of runs contains a job.
        """
        if self.local is not None:
            return self.local
        if self.namespace or self.context or self.kubeconfig or PLUGIN in os.path.basename(sys.argv[0]):  # noqa: PTH119
            return False
        if said := os.environ.get(VARIABLE):
            if said not in ("local", "cluster"):
                raise Mistake(f"{VARIABLE}={said}: write local or cluster")
            return said == "local"
        from ddpjob.client.backends.process_backend import has_jobs

        return has_jobs()

    def backend(self, *, everywhere: bool = False) -> Backend:
        """Return the backend for the jobs on which the command acts."""
        return ProcessBackend() if self.is_local() and not everywhere else self.cluster(everywhere=everywhere)

    def cluster(self, *, everywhere: bool = False) -> ClusterBackend:
        """Return the cluster's backend, even if the command would otherwise act on local jobs.

        Raises Mistake if the user has given --local.
        """
        if self.local:
            raise Mistake("--local: -A and --server need a cluster; remove --local")
        from ddpjob.client.backends.api_server import ApiServer

        return ClusterBackend(ApiServer.open(self.kubeconfig, self.context), self.namespace, everywhere=everywhere)


_OPTIONS = (
    click.option(
        "-n", "--namespace", metavar="NAMESPACE", help="Namespace on the cluster. Default: the context's namespace."
    ),
    click.option("--context", metavar="CONTEXT", help="The kubeconfig context to use."),
    click.option("--kubeconfig", metavar="FILE", help="Default: $KUBECONFIG, else ~/.kube/config."),
    click.option("--local/--cluster", "local", default=None, help="Act on this machine or on the cluster."),
)


PLACE_NAMES = ("namespace", "context", "kubeconfig", "local")
PLACE_OPTIONS = {"-n": 2, "--namespace": 2, "--context": 2, "--kubeconfig": 2, "--local": 1, "--cluster": 1}
"""Maps each option to the number of words that the option and its value take in a command line."""


def in_place(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of Place to a command.

    The command gets a Place as its first argument.
    """

    @functools.wraps(command)
    def wrapped(
        namespace: str | None, context: str | None, kubeconfig: str | None, local: bool | None, **rest: Any
    ) -> Any:
        # kubectl also accepts -n=NAMESPACE.
        namespace = namespace and namespace.removeprefix("=")
        return command(Place(namespace, context, kubeconfig, local), **rest)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def with_backend(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of Place to a command.

    The command gets the backend that these options choose as its first argument.
    """

    @functools.wraps(command)
    def wrapped(place: Place, **rest: Any) -> Any:
        return command(place.backend(), **rest)

    return in_place(wrapped)


def exit_code(mistake: Mistake) -> int:
    """Return the exit code for a command that has raised this Mistake."""
    return EXIT_UNREACHABLE if isinstance(mistake, Unreachable) else EXIT_MISTAKE
