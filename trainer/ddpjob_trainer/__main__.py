"""`python -m ddpjob_trainer [--config FILE] [key=value ...]` trains; `python -m ddpjob_trainer COMMAND ...` does what COMMANDS lists."""

from __future__ import annotations

import importlib
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from ddpjob_trainer.errors import FencedError, install_hook

COMMANDS = {
    # name: (module whose `main(arguments) -> exit code` is the command, arguments, what it does); imported only when it is called
    "ledger": ("ddpjob_trainer.ledger_check", "DIR [DIR ...]", "check that no sample was lost or repeated"),
    "preflight": ("ddpjob_trainer.preflight.command", "[key=value ...]", "check machines, network and folders, on all ranks; --json FILE"),
    "checkpoint": ("ddpjob_trainer.checkpoints.show", "FILE|DIR", "show what checkpoints hold, and whether they are whole"),
    "evaluate": ("ddpjob_trainer.metrics.command", "CHECKPOINT [key=value ...]", "test a checkpoint, also under torchrun"),
    "plot": ("ddpjob_trainer.plot", "RUN [RUN ...]", "draw loss, accuracy, speed and ranks of a run, or of several over each other"),
    "shards": ("ddpjob_trainer.data.pack", "FOLDER OUT", "pack an image folder into tar shards"),
}

_USAGE = """\
usage: torchrun [...] -m ddpjob_trainer [--config FILE] [key=value ...]     train, on all ranks of torchrun
       python -m ddpjob_trainer [--config FILE] [key=value ...]             train in one process
       python -m ddpjob_trainer --spawn N [...] [key=value ...]             train in N processes of this node, without torchrun
       python -m ddpjob_trainer COMMAND ...

--spawn N [--init env://|tcp://HOST:PORT|file:///PATH] [--nodes K --node-rank R]: as mp.spawn does; commands that need several ranks
take it as well. --init says where the ranks meet; with env:// and several nodes MASTER_ADDR and MASTER_PORT must be set.

commands:
{commands}

FILE: a YAML file, or one that ships: {shipped}. Keys, with their defaults:"""


@record
def main() -> int:
    """Run what the command line asks for; returns the exit code. Raises TrainerError with a message for the user."""
    install_hook()
    arguments = sys.argv[1:]
    if any(argument.partition("=")[0] == "--spawn" for argument in arguments):
        from ddpjob_trainer import spawn

        return spawn.main(arguments)
    return run(arguments)


def run(arguments: list[str]) -> int:
    """A command, or training, as one rank of whatever group the environment describes; returns the exit code."""
    if arguments and arguments[0] in COMMANDS:
        module, _, _ = COMMANDS[arguments[0]]
        return int(importlib.import_module(module).main(arguments[1:]))
    if "--help" in arguments or "-h" in arguments:
        print(help_text())
        return 0
    return train(arguments)


def help_text() -> str:
    """Usage, commands and every key of the configuration."""
    from ddpjob_trainer import config, fields

    width = max(len(f"{name} {arguments}") for name, (_, arguments, _) in COMMANDS.items())
    lines = [f"  {f'{name} {arguments}':{width}}  {purpose}" for name, (_, arguments, purpose) in COMMANDS.items()]
    return _USAGE.format(commands="\n".join(lines), shipped=", ".join(config.shipped())) + fields.help_text(config.Config)


def train(arguments: list[str]) -> int:
    """Train; returns the exit code."""
    from ddpjob_trainer import leaving, train
    from ddpjob_trainer.command_line import read_settings
    from ddpjob_trainer.fence import EXIT_FENCED

    settings = read_settings(arguments)
    leaving.leave_fast()
    try:
        return leaving.with_code(train.run(settings))
    except FencedError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return leaving.with_code(EXIT_FENCED)


if __name__ == "__main__":
    sys.exit(main())
