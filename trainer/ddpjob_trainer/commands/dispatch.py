"""Runs the command named in the arguments of `python -m ddpjob_trainer`.

A command's module is imported only if the command is used.
"""

from __future__ import annotations

import difflib
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable

from ddpjob_pod.late_dynamo import uncollected

from ddpjob_trainer.errors import ConfigError, FencedError
from ddpjob_trainer.lifecycle import fast_exit

COMMANDS = {
    # Maps the name of a command to (module, usage, purpose). The module's `main(arguments)` returns
    # the exit code.
    "ledger": ("ddpjob_trainer.commands.check_ledger", "DIR [DIR ...]", "check that no sample was lost or repeated"),
    "preflight": (
        "ddpjob_trainer.preflight.command",
        "[key=value ...]",
        "check machines, network and folders, on all ranks; --json FILE",
    ),
    "checkpoint": (
        "ddpjob_trainer.commands.show_checkpoint",
        "FILE|DIR",
        "show the contents of checkpoints, and whether they are intact",
    ),
    "evaluate": (
        "ddpjob_trainer.commands.evaluate_checkpoint",
        "CHECKPOINT [key=value ...]",
        "evaluate a checkpoint on its test set, alone or under torchrun",
    ),
    "export": (
        "ddpjob_trainer.commands.export_model",
        "CHECKPOINT -o FOLDER",
        "export the model for other programs (safetensors and torch.export)",
    ),
    "plot": (
        "ddpjob_trainer.commands.plot_runs",
        "RUN [RUN ...]",
        "draw loss, accuracy, speed and ranks of one run, or of several runs in one plot",
    ),
    "shards": ("ddpjob_trainer.commands.pack_shards", "FOLDER OUT", "pack an image folder into tar shards"),
}


_USAGE = """\
usage: torchrun [...] -m ddpjob_trainer [--config FILE] [key=value ...]     train on all ranks of torchrun
       python -m ddpjob_trainer [--config FILE] [key=value ...]             train in one process
       python -m ddpjob_trainer --spawn N [...] [key=value ...]             train in N processes, without torchrun
       python -m ddpjob_trainer COMMAND ...

--spawn N [--init env://|tcp://HOST:PORT|file:///PATH] [--nodes K --node-rank R]: like mp.spawn; also for commands
that need several ranks. --init is where the ranks meet. With env:// and several nodes, MASTER_ADDR and MASTER_PORT
must be set.

commands:
{commands}

FILE: a YAML file, or the name of a shipped one: {shipped}. Keys, with their defaults:"""


def run(arguments: list[str]) -> int:
    """Run the command in `arguments`, or train if they do not start with a command.

    This process is one rank of the group that the environment describes. Return the exit code.
    """
    from ddpjob_trainer.config.command_line import wants_help, without_local_rank

    arguments = without_local_rank(arguments)
    if arguments and arguments[0] in COMMANDS:
        module, _, _ = COMMANDS[arguments[0]]
        return _printed(lambda: int(importlib.import_module(module).main(arguments[1:])))
    if wants_help(arguments):
        return _printed(_help)
    if arguments and not arguments[0].startswith("-") and "=" not in arguments[0]:
        raise ConfigError(_unknown_command(arguments[0]))
    return train(arguments)


def _help() -> int:
    print(help_text())
    return 0


def _printed(command: Callable[[], int]) -> int:
    """Run a command that prints text, and return its exit code.

    If the reader of the output has exited, return the exit code that a shell would show for
    SIGPIPE.
    """
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        if _is_read(sys.stdout.fileno()):
            # The error came from a different connection, not from standard output.
            raise
        # Discard the rest of the output. Otherwise, Python would flush it again at exit, and report
        # the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return fast_exit.with_code(128 + signal.SIGPIPE)
    return code


def _is_read(descriptor: int) -> bool:
    """Return whether another program still has the other end of the descriptor open for reading."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _unknown_command(name: str) -> str:
    if name in ("train", "fit", "run"):
        return f"unknown command {name!r}; to train, leave it out"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
    return f"{name!r} is neither a command nor key=value; {hint} (--help lists commands and keys)"


def help_text() -> str:
    """Return the help: the usage, the commands and every configuration key."""
    from ddpjob_trainer import config
    from ddpjob_trainer.config import loader

    width = max(len(f"{name} {arguments}") for name, (_, arguments, _) in COMMANDS.items())
    lines = [f"  {f'{name} {arguments}':{width}}  {purpose}" for name, (_, arguments, purpose) in COMMANDS.items()]
    return _USAGE.format(commands="\n".join(lines), shipped=", ".join(config.shipped())) + loader.help_text(
        config.Config
    )


def train(arguments: list[str]) -> int:
    """Train, and return the exit code."""
    from ddpjob_trainer.config.command_line import read_settings

    # Report wrong settings now, because importing torch takes seconds.
    settings = read_settings(arguments)
    with uncollected(keep=True):
        from ddpjob_trainer import train
        from ddpjob_trainer.lifecycle.fence import EXIT_FENCED

    fast_exit.leave_fast()
    try:
        return fast_exit.with_code(train.run(settings))
    except FencedError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return fast_exit.with_code(EXIT_FENCED)
