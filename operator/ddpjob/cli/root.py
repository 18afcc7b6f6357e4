"""The root command `ddpjob`, its groups of commands, and functions that the commands share."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddpjob.cli.output import paint, printable
from ddpjob.cli.places import Place
from ddpjob.client.backends.backend import Backend, Mistake
from ddpjob.missing_package import installed_version

_ROOT = """\
Run PyTorch DDP jobs on Kubernetes or on this machine, from the same manifest.

\b
Start here:
  ddpjob init train.py         write a manifest and see what the script needs
  ddpjob run job.yaml          train on this machine
  ddpjob submit job.yaml       train on the cluster of your kubeconfig
  ddpjob top                   watch all jobs
  ddpjob why JOB               explain why a job is waiting or has failed
"""
PLACES = """\
A command acts either on this machine or on a cluster. --local selects this machine.
--cluster, -n, --context, --kubeconfig and `kubectl ddp` select a cluster. Without any
of these, the variable DDPJOB_PLACE (local or cluster) decides. Without the variable,
the command acts on this machine if $DDPJOB_RUNS (default: ./runs) contains a job, and
otherwise on the cluster.

Exit codes: 0 success; 1 the job failed, or a check found a fault; 2 the input is
invalid, and no job was changed except those listed before the error; 3 the cluster is
unreachable; 124 `wait` timed out; 130 the command was interrupted with Ctrl-C."""

GROUPS = {
    "Begin": ("init", "run", "submit", "convert"),
    "Watch": ("get", "top", "describe", "why", "logs", "events", "plot", "dashboard", "stacks", "pod", "wait", "show"),
    "Change": ("scale", "suspend", "resume", "restart", "rerun", "stop", "kill", "delete"),
    "Check": ("validate", "explain", "schema", "doctor", "version", "completion"),
}


_MEANT = {
    **dict.fromkeys(("ls", "list", "ps"), "get"),
    **dict.fromkeys(("apply", "create", "launch"), "submit"),
    "status": "describe",
    **dict.fromkeys(("history", "archive"), "show"),
    "rm": "delete",
    "log": "logs",
    "check": "validate",
    "pause": "suspend",
    **dict.fromkeys(("ui", "web", "serve"), "dashboard"),
    **dict.fromkeys(("new", "scaffold", "quickstart"), "init"),
}
"""Maps command names from other tools to the commands of `ddpjob`."""


class _Commands(click.Group):
    """The root command, which groups its commands and suggests a command for an unknown name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        grouped = [name for names in GROUPS.values() for name in names if name in self.commands]
        return grouped + sorted(self.commands.keys() - set(grouped))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands into the help text, in groups.

        Commands without a group come last.
        """
        grouped = [name for names in GROUPS.values() for name in names]
        others = tuple(name for name in self.commands if name not in grouped)
        for title, names in {**GROUPS, "Other": others}.items():
            known = [(name, self.commands[name]) for name in names if name in self.commands]
            if known:
                with formatter.section(title):
                    formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in known])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for part in PLACES.split("\n\n"):
            formatter.write_paragraph()
            formatter.write_text(part.replace("\n", " "))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        # `ddpjob help COMMAND` works as in git, kubectl and docker.
        if args[:1] == ["help"]:
            if not args[1:]:
                click.echo(ctx.get_help())
                ctx.exit()
            args = [*args[1:], "--help"]
        if args and args[0] not in self.commands:
            meant = _MEANT.get(args[0])
            near = [meant] if meant else difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; the commands are {', '.join(self.commands)}"
            if Path(args[0]).is_file():
                hint = f"; did you mean `ddpjob {'init' if args[0].endswith('.py') else 'run'} {args[0]}`?"
            raise click.UsageError(f"no command {args[0]}{hint}")
        name, command, rest = super().resolve_command(ctx, args)
        arguments = [one for one in command.params if isinstance(one, click.Argument)] if command else []
        names = bool(arguments) and arguments[0].name in ("job", "jobs", "pod")
        words = sum(1 for _ in itertools.takewhile(lambda word: not word.startswith("-"), rest))
        if names and words > sum(abs(one.nargs) for one in arguments) and f"{rest[0]}/" in _KINDS:
            # Leave out the kind in a line such as `kubectl get ddp NAME`.
            rest = rest[1:]
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            known = {name for each in self.commands["submit"].params for name in (*each.opts, *each.secondary_opts)}
            if error.ctx and error.ctx.info_name == "run" and error.option_name in known:
                remedy = "so change the manifest, or use `ddpjob submit`"
                text = f"no option {error.option_name}; `ddpjob run` takes the job from the manifest, {remedy}"
                raise click.UsageError(text, error.ctx) from error
            names = {parameter.name for parameter in error.ctx.command.params} if error.ctx else set()
            what = "job.yaml" if names & {"file", "program", "words"} else "JOB" if names & {"job", "jobs"} else ""
            if error.option_name not in ("-f", "--filename") or error.ctx is None or not what:
                raise
            line = f"ddpjob {error.ctx.info_name} {what}"
            raise click.UsageError(f"no option {error.option_name}; write `{line}`", error.ctx) from error
        except OSError as error:
            raise SystemFault(error) from error


class SystemFault(Exception):
    """A file or the output cannot be read or written.

    This exception replaces OSError, because click itself handles the OSError of a closed output and
    exits with 1. For `ddpjob`, exit code 1 means that a job has failed.
    """

    def __init__(self, error: OSError) -> None:
        self.error = error


_BEHIND = {"submit": "train.py --", "convert": "-- torchrun"}
_OF_TORCHRUN = {"nprocpernode": "--procs", "nnodes": "--nodes", "maxrestarts": "--set recovery.maxRestarts=N"}
"""Maps torchrun's option names, in lower case and without dashes, to options of `submit`."""


class BeforeArguments(click.Command):
    """A command that passes all arguments after -- on to another program."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Keep a copy, because click removes the words from `args`.
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if "--" in given or error.option_name in ("-f", "--filename"):
                raise
            theirs = _OF_TORCHRUN.get(error.option_name.lstrip("-").replace("-", "").replace("_", ""))
            if theirs and self.name == "submit":
                raise click.UsageError(f"no option {error.option_name}; did you mean {theirs}?", ctx) from error
            near = f" (or did you mean {' or '.join(sorted(error.possibilities))}?)" if error.possibilities else ""
            raise click.UsageError(
                f"no option {error.option_name}{near}; write options of the program itself after --, as in"
                f" `ddpjob {self.name} {_BEHIND[str(self.name)]} {error.option_name} ...`",
                ctx,
            ) from error


def complete_job(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    given = ctx.params
    place = Place(*(given.get(name) for name in ("namespace", "context", "kubeconfig", "local")))
    try:
        return [n for job in place.backend().jobs() if (n := job["metadata"]["name"]).startswith(incomplete)]
    except Mistake:
        return []


_KINDS = ("ddpjob.ddpjob.io/", "ddpjobs.ddpjob.io/", "ddpjob/", "ddpjobs/", "ddp/", "pod/", "pods/")


def bare(ctx: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Remove the kind from a name such as ddpjob/first.

    `-o name` prints names in this form. click calls this function for arguments, so `value` can
    also be a tuple of names.
    """
    if isinstance(value, tuple):
        return tuple(bare(ctx, parameter, each) for each in value)
    kind = next((kind for kind in _KINDS if value and value.startswith(kind)), "")
    return value and value.removeprefix(kind)


_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@click.group(cls=_Commands, help=_ROOT, invoke_without_command=True, context_settings=_CONTEXT)
@click.option("--version", is_flag=True, help="Print the version.")
@click.pass_context
def root(ctx: click.Context, version: bool) -> None:
    if version:
        click.echo(f"ddpjob {installed_version()}")
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def command_of_job(command: Callable[..., Any]) -> click.Command:
    """Turn a function into a command of `ddpjob` that takes a job's name as its first argument."""
    return root.command()(click.argument("job", shell_complete=complete_job, callback=bare)(command))


def say(text: str, place: Backend) -> None:
    """Print a line that reports success.

    The line ends with the cluster or the folder of runs to which the job belongs.
    """
    click.echo(f"{text} ({place.where})")


def print_note(text: str) -> None:
    click.echo(printable(text), err=True)


def print_line(line: str) -> None:
    click.echo(printable(line))


def print_painted(line: str, colour: str = "") -> None:
    """Print a line in colour if the output is a terminal.

    If `colour` is given, the whole line has this colour. Otherwise, only the job's state is
    coloured.
    """
    click.echo(click.style(printable(line), fg=colour) if colour else paint(printable(line)))
