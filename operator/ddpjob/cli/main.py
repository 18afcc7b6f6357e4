"""The entry point of the `ddpjob` command, and the subcommands doctor, version and completion."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ddpjob.api.yamltext import MAX_MESSAGE, shown
from ddpjob.cli.output import abandon_output, printable, usable_streams
from ddpjob.cli.places import EXIT_MISTAKE, EXIT_NEGATIVE, PLACE_OPTIONS, PLUGIN, Place, exit_code, in_place
from ddpjob.cli.root import SystemFault, print_line, print_note, root
from ddpjob.client.backends.backend import Mistake, Unreachable
from ddpjob.client.backends.cluster_backend import ClusterBackend
from ddpjob.missing_package import installed_version

# Importing these modules defines their commands.
from ddpjob.cli import preparing  # noqa: F401  isort: skip
from ddpjob.cli import looking  # noqa: F401  isort: skip
from ddpjob.cli import changing  # noqa: F401  isort: skip


@root.command()
@in_place
def doctor(place: Place) -> int:
    """Check the cluster, or this machine.

    On a cluster, the command checks that the client, the CRD and the operator match, and that you
    have the rights that `ddpjob` needs. If it acts on this machine, or no cluster is configured,
    it checks Python, torch, GPUs, /dev/shm, ports and disk.

    \b
    Exit code: 0 all checks passed, 1 a check failed, 3 no cluster was reached.
    Example: ddpjob doctor --local
             ddpjob doctor -n research
    """
    from ddpjob.client.texts.diagnose import checks
    from ddpjob.client.texts.diagnose_machine import checks_of_machine

    backend = _cluster_if_any(place)
    found = checks_of_machine() if backend is None else checks(backend.api, backend.namespace)
    faults = 0
    for check in found:
        mark = {True: "ok", False: "FAULT", None: "?"}[check.ok]
        print_line(f"{mark:<6}{check.what}")
        if check.ok is False:
            faults += 1
            click.echo(printable(f"      {check.remedy}") if check.remedy else "", nl=bool(check.remedy))
    return EXIT_NEGATIVE if faults else 0


def _cluster_if_any(place: Place) -> ClusterBackend | None:
    """Return the cluster's backend, or None if the command should check this machine.

    It should check this machine if the jobs are local, or if no cluster is configured and no option
    selects one.
    """
    if place.is_local():
        return None
    try:
        return place.cluster()
    except Unreachable as unreachable:
        if place.local is False or place.namespace or place.context or place.kubeconfig or "KUBECONFIG" in os.environ:
            raise
        print_note(f"{unreachable}; checking this machine")
        return None


@root.command()
def version() -> None:
    """Print the version of this client.

    \b
    Example: ddpjob version
    """
    click.echo(f"ddpjob {installed_version()}")


@root.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for a shell.

    \b
    Example: source <(ddpjob completion bash)
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None  # click has already rejected names of unknown shells.
    click.echo(made(root, {}, "ddpjob", "_DDPJOB_COMPLETE").source())


def _place_last(words: list[str]) -> list[str]:
    """Move options such as -n or --context from before the command's name to just after it.

    Users can therefore write these options in either place, as with kubectl.
    """
    before: list[str] = []
    while words and (words[0].startswith("-n") or words[0].partition("=")[0] in PLACE_OPTIONS):
        # In -nNAMESPACE and --context=CONTEXT, the option and its value form one word.
        size = PLACE_OPTIONS.get(words[0], 1)
        before, words = [*before, *words[:size]], words[size:]
    return [*words[:1], *before, *words[1:]] if words else before


_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors after which nothing more can be written to the output, for example because the pipe is
closed or the disk is full."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (default: the process's own), and return the exit code."""
    usable_streams()
    name = PLUGIN if PLUGIN in Path(sys.argv[0]).name else "ddpjob"
    if "NO_COLOR" in os.environ:
        root.context_settings["color"] = False
    try:
        code = root.main(
            _place_last(sys.argv[1:] if arguments is None else list(arguments)),
            prog_name=name.replace("kubectl-", "kubectl "),
            standalone_mode=False, complete_var="_DDPJOB_COMPLETE",
        )  # fmt: skip
        return int(code or 0)
    except Mistake as mistake:
        # The message may quote text of any length from a manifest.
        for line in str(mistake).split("\n"):
            print_note(shown(line, MAX_MESSAGE))
        return exit_code(mistake)
    except click.exceptions.Exit as ended:
        return int(ended.exit_code)
    except click.ClickException as error:
        error.show()
        return int(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except SystemFault as fault:
        # os.getcwd() has raised this error.
        if fault.error.filename is None and fault.error.errno == errno.ENOENT:
            print_note("the current folder no longer exists; change to a different folder")
            return EXIT_MISTAKE
        if fault.error.filename is None:
            if fault.error.errno not in _OUTPUT_ERRORS:
                raise fault.error from None
            abandon_output()
        if isinstance(fault.error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print_note(f"{fault.error.filename or 'standard output'}: {fault.error.strerror}")
        return EXIT_MISTAKE


if __name__ == "__main__":
    sys.exit(main())
