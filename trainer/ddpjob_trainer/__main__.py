"""`python -m ddpjob_trainer [--config FILE] [key=value ...]`, `... ledger DIR`, `... plot RUN -o FILE`."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from ddpjob_trainer.errors import ConfigError, FencedError, install_hook

_USAGE = """\
usage: torchrun [...] -m ddpjob_trainer [--config FILE] [key=value ...]     train, on all ranks of torchrun
       python -m ddpjob_trainer [--config FILE] [key=value ...]             train in one process
       python -m ddpjob_trainer ledger DIR [DIR ...]                        check that no sample was lost or repeated
       python -m ddpjob_trainer plot RUN -o FILE.png                        draw loss, accuracy and speed

FILE: a YAML file, or one that ships: {shipped}. Keys, with their defaults:"""


@record
def main() -> int:
    """Run what the command line asks for; returns the exit code. Raises TrainerError with a message for the user."""
    install_hook()
    command, *rest = sys.argv[1:] or [""]
    if command == "ledger":
        from ddpjob_trainer.ledger_check import main as check

        return check(rest)
    if command == "plot":
        from ddpjob_trainer.plot import main as plot

        return plot(rest)
    return _train(sys.argv[1:])


def _train(arguments: list[str]) -> int:
    from ddpjob_trainer import config, fields, leaving, train
    from ddpjob_trainer.fence import EXIT_FENCED

    if "--help" in arguments or "-h" in arguments:
        print(_USAGE.format(shipped=", ".join(config.shipped())) + fields.help_text(config.Config))
        return 0
    file: str | None = None
    values: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--config":
            file = next(remaining, None)
            if file is None:
                raise ConfigError("--config: the file's name is missing; write --config FILE")
        elif argument.startswith("--config="):
            file = argument.removeprefix("--config=")
        else:
            values.append(argument)
    settings = config.load(file, values)
    leaving.leave_fast()
    try:
        return leaving.with_code(train.run(settings))
    except FencedError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return leaving.with_code(EXIT_FENCED)


if __name__ == "__main__":
    sys.exit(main())
